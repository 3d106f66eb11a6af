"""Overhead per layer and per step, flips in single products, alarms of a GPT, recovery.

Overheads are CPU time of a guarded and an unguarded copy of the same model on the same data, in one
process on one thread, alternating; the figure is the median over pairs of their ratio, minus one.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from guard_bits import Detection, bit_detection
from guard_workload import GPT, Biased, Text, train_step
from harness import Bar, at_least, at_most, median
from torch import nn
from torch.nn import functional

from outlast.guard import Guard, guard
from outlast.guard.forward_patch import suspended_checks
from outlast.guard.inject import Fault, inject
from outlast.guard.inject.fault import Pattern
from outlast.guard.policy import Policy

TOKENS = 4096
WARM_UP = 1
"""Pairs before those that count."""
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def overhead(plain: Callable[[int], Any], guarded: Callable[[int], Any], pairs: int) -> float:
    """Median over pairs of (CPU time of `guarded` / that of `plain`) - 1; both take the pair."""
    ratios = []
    for pair in range(-WARM_UP, pairs):
        seconds = {}
        # Which goes first alternates: the second finds warmer caches.
        for work in (plain, guarded) if pair % 2 else (guarded, plain):
            begun = time.process_time()
            work(pair)
            seconds[work] = time.process_time() - begun
        if pair >= 0:
            ratios.append(seconds[guarded] / seconds[plain])
    return median(ratios) - 1.0


def unguarded(watched: nn.Module, work: Callable[[int], Any]) -> Callable[[int], Any]:
    """`work` on another model than `watched`, whose guard would check its operations as well."""

    def suspended(pair: int) -> None:
        with suspended_checks(watched):
            work(pair)

    return suspended


def linear_overhead(width: int, dtype: torch.dtype, pairs: int) -> float:
    """One linear layer forward and backward, all checks, its weight encoded anew every time."""
    plain = nn.Linear(width, width, dtype=dtype)
    watched = copy.deepcopy(plain)
    handle = guard(watched, policy="linear")
    x = torch.randn(TOKENS, width, dtype=dtype, requires_grad=True)
    dy = torch.randn(TOKENS, width, dtype=dtype)

    def work(layer: nn.Linear) -> None:
        x.grad = layer.weight.grad = layer.bias.grad = None
        layer(x).backward(dy)

    def checked(_: int) -> None:
        handle.watch.advance()
        work(watched)

    return overhead(unguarded(watched, lambda _: work(plain)), checked, pairs)


def step_overhead(
    width: int, layers: int, autocast: torch.dtype | None, policy: str, pairs: int
) -> tuple[float, Guard]:
    """A whole training step of a small GPT; one pair is done with fewer samples."""
    torch.manual_seed(0)
    plain = GPT(width, layers)
    watched = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (plain, watched)]
    handle = guard(watched, optimizers[1], policy)
    text = Text()
    batches = {pair: text.batch(16 if pairs > 1 else 4) for pair in range(-WARM_UP, pairs)}
    figure = overhead(
        unguarded(watched, lambda pair: train_step(plain, optimizers[0], batches[pair], autocast)),
        lambda pair: train_step(watched, optimizers[1], batches[pair], autocast),
        pairs,
    )
    equal = all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True)
    )
    if not equal:
        raise AssertionError("the guard has changed the numbers of the training")
    return figure, handle


def linear_bars(quick: bool) -> Iterator[Bar]:
    """Overhead of one layer."""
    for name, dtype in TYPES.items():
        for width in (768,) if quick else (768, 1024, 2048, 4096):
            pairs = 7 if quick else {768: 31, 1024: 21, 2048: 15, 4096: 15}[width]
            limit = 0.08 if name == "bf16" else (0.03 if width == 4096 else 0.05)
            figure = linear_overhead(width, dtype, pairs)
            label = f"one linear, forward and backward, {name}, d = {width}"
            yield at_most(label, figure, "of CPU time", limit, "torch, unguarded")


def step_bars(quick: bool) -> Iterator[Bar]:
    """Overhead of a training step by policy."""
    for name, autocast in {"fp32": None, "bf16": torch.bfloat16}.items():
        limit = 0.05 if name == "fp32" else 0.08
        for width, layers, pairs in ((384, 4, 1),) if quick else ((384, 4, 41), (768, 2, 15)):
            figure, _ = step_overhead(width, layers, autocast, "linear", pairs)
            label = f"GPT step, every linear, {name}, d {width} L{layers}"
            if quick:
                # One pair says that it runs, and not what it costs.
                peer = "torch, unguarded"
                yield Bar(label, round(figure, 4), "of CPU time", "reported", True, peer)
            else:
                yield at_most(label, figure, "of CPU time", limit, "torch, unguarded")
        if not quick:
            figure, _ = step_overhead(384, 4, autocast, "full", 21)
            limit = 0.15 if name == "fp32" else 0.30
            label = f"GPT step, policy full, {name}, d 384 L4"
            yield at_most(label, figure, "of CPU time", limit, "torch, unguarded")
    light = light_share(2 if quick else 30)
    peer = "the step itself"
    label = "GPT step, policy light, time inside its checks"
    yield at_most(label, light, "of CPU time", 0.001, peer)
    label = "the same, and audits at 0.5 % of the time in as many steps as these ask for"
    yield at_most(label, light + audited_share(300 if quick else 1000), "of the time", 0.007, peer)


def audited_share(steps: int) -> float:
    """Time of audits at 0.5 % beside that of the run's steps."""
    model = GPT(128, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = guard(model, optimizer, Policy("light", audit=0.005))
    text = Text()
    for _ in range(steps):
        tokens, targets = text.batch(8)
        for _ in handle.attempts():
            optimizer.zero_grad()
            logits = model(tokens).flatten(0, 1)
            functional.cross_entropy(logits, targets.flatten()).backward()
        optimizer.step()
    report = handle.audits()
    if report is None or not report.replays:
        raise AssertionError(f"no audit of passes was made in {steps} steps")
    return report.seconds / report.steps_seconds


def light_share(steps: int) -> float:
    """CPU time of level light as a share of the step; too small for a comparison of two runs."""
    model = GPT(384, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = guard(model, optimizer, "light")
    text = Text()
    for _ in range(2):
        train_step(model, optimizer, text.batch(16))
    before, begun = handle.seconds or 0.0, time.process_time()
    for _ in range(steps):
        train_step(model, optimizer, text.batch(16))
    return ((handle.seconds or 0.0) - before) / (time.process_time() - begun)


def detection_bars(quick: bool) -> Iterator[Bar]:
    """Bit flips in stored outputs, at unit scale and at gradients' scales; clean rows beside."""
    trials = 2_000 if quick else 50_000
    every = "every flip counts, both directions"
    for scale in (1.0, 1e-4, 1e-8):
        size = "" if scale == 1.0 else f", data of size {scale:g}"
        found = bit_detection(torch.bfloat16, range(10, 15), trials=trials, scale=scale)
        lowest = min(share(found, bit) for bit in range(10, 14))
        label = f"bf16 output, single flip in bits 13..10 found{size}"
        yield at_least(label, lowest, "of flips, worst bit", 0.75, every)
        label = f"bf16 output, single flip in bit 14 found{size}"
        yield at_least(label, share(found, 14), "of flips", 1.0, every)
        alarms = found.clean.count
        if scale == 1.0:
            yield at_most(
                "threshold / mean clean error, bf16", found.threshold_ratio, "", 8.0,
                "V-ABFT's formula: 72 to 224 (published)",
            )  # fmt: skip
        found = bit_detection(torch.float32, range(20, 32), trials=trials, scale=scale)
        lowest = min(share(found, bit) for bit in range(20, 32))
        label = f"fp32 output, single flip in bits 31..20 found{size}"
        yield at_least(label, lowest, "of flips, worst bit", 0.998, every)
        rows = f"clean rows beside these flips that were flagged{size}"
        yield at_most(rows, alarms + found.clean.count, "rows", 0, "no fault")


def share(found: Detection, bit: int) -> float:
    """Detected of injected flips of one bit."""
    return found.bits[bit].share or 0.0


def alarm_bars(quick: bool) -> Iterator[Bar]:
    """Real training without faults until enough checks are made."""
    wanted = 100_000 if quick else 1_000_000
    cases: dict[str, tuple[nn.Module, torch.dtype | None]] = {
        "fp32": (GPT(128, 2), None),
        "bf16": (GPT(128, 2), torch.bfloat16),
        "fp16": (GPT(128, 2), torch.float16),
        "fp32, means far from zero": (Biased(), None),
        "bf16, means far from zero": (Biased(), torch.bfloat16),
    }
    for name, (model, autocast) in cases.items():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        handle = guard(model, optimizer, "linear")
        text = Text(1)
        linear = [
            site for site in handle.ledger.sites.values() if site.operation.startswith("linear")
        ]
        while sum(site.checks for site in linear) < wanted:
            train_step(model, optimizer, text.batch(8), autocast)
        ended = Counter(finding.outcome for finding in handle.ledger.findings)
        alarms = sum(count for outcome, count in ended.items() if outcome != "rounding")
        flagged = sum(site.exceeded for site in linear)
        label = f"false alarms in {wanted:.0e} checks of training, {name}"
        yield at_most(label, alarms, "findings", 0, "a training without faults")
        yield Bar(
            f"of these checks, looked into and recognised as rounding, {name}", flagged, "rows",
            "reported", True, "a training without faults",
        )  # fmt: skip


def recovery_bars(quick: bool) -> Iterator[Bar]:
    """A transient fault every fifth step: the same weights, and what one correction costs."""
    steps = 10 if quick else 200
    torch.manual_seed(0)
    clean = GPT(128, 2)
    faulty = copy.deepcopy(clean)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (clean, faulty)]
    handle = guard(faulty, optimizers[1], "linear")
    sites = ("linear.output", "linear.dx", "linear.dw")
    top = Pattern(bits=(30,))
    faults = [Fault(sites[step // 5 % 3], top, step=step) for step in range(0, steps, 5)]
    injector = inject(handle, faults)
    text, again = Text(2), Text(2)
    for _ in range(steps):
        train_step(clean, optimizers[0], text.batch(8))
        train_step(faulty, optimizers[1], again.batch(8))
    differing = sum(
        not torch.equal(a, b) for a, b in zip(clean.parameters(), faulty.parameters(), strict=True)
    )
    corrected = sum(finding.outcome == "corrected" for finding in handle.ledger.findings)
    if len(injector.injections) < steps // 5:
        raise AssertionError("not every fault struck")
    label = f"{steps} steps with a fault every 5: tensors that differ from the clean run's"
    yield at_most(label, differing, f"tensors ({corrected} faults corrected)", 0, "the clean run")
    if not quick:
        yield at_most(
            "cost of one correction", correction_cost(20), "of a step", 0.05,
            "going back to a checkpoint costs whole steps",
        )  # fmt: skip


def correction_cost(pairs: int) -> float:
    """Extra CPU time of a step in which one fault is found and corrected."""
    model = GPT(384, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = guard(model, optimizer, "linear")
    text = Text(3)
    batch = text.batch(16)
    plain, struck = [], []
    faults = [
        Fault("linear.output", Pattern(bits=(30,)), module=name, step=step, every=8)
        for step, name in zip(
            range(1, 8, 2), ("blocks.1.up", "blocks.2.qkv", "blocks.0.down", "head"), strict=True
        )
    ]
    inject(handle, faults)
    for step in range(2 * pairs + 2):
        begun = time.process_time()
        train_step(model, optimizer, batch)
        (struck if step % 2 else plain).append(time.process_time() - begun)
    ratios = [after / before for before, after in zip(plain[1:], struck[1:], strict=True)]
    return statistics.median(ratios) - 1.0
