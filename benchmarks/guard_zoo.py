"""The guard over a zoo of models: FLOPs checked, faults found, healthy runs, unknown code."""

from __future__ import annotations

import math
import statistics
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from harness import Bar, at_least, at_most
from torch.utils.flop_counter import FlopCounterMode

from outlast.errors import DataCorruptionError
from outlast.guard import Guard, guard
from outlast.guard.findings import LASTING
from outlast.guard.inject.operations import drill_operations
from outlast.guard.inject.zoo import DTYPES, Case

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "guard"))

from zoo import FAMILIES, UNKNOWN_OPERATIONS, with_unknown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outlast.guard.inject.operations import Trial

QUICK = ("mlp", "gpt2", "mixtral", "resnet", "lstm")
OF_BITS = frozenset({"embedding.forward"})
"""Checks that compare bits, and so can raise no alarm by rounding; those of memory do, too."""
LONG_RUNS = (
    *("mlp", "bert", "vit", "resnet", "convnext", "inception", "lstm", "gru"),
    *("llama", "gpt2", "mixtral", "t5"),
)
"""Families of the long runs: eight classifiers, and four language models."""


def families(quick: bool) -> tuple[str, ...]:
    """Those of the zoo that are measured."""
    return QUICK if quick else tuple(FAMILIES)


@dataclass
class Outcome:
    """Outcome of a healthy training under the guard."""

    checks: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    stops: list[str] = field(default_factory=list)

    @property
    def alarms(self) -> int:
        """Findings that say that something was wrong."""
        return sum(self.outcomes.values()) - self.excused

    @property
    def excused(self) -> int:
        """Findings that the guard took for rounding, or for the data's own infinities."""
        return self.outcomes["rounding"] + self.outcomes["not_finite"]


def train_healthy(case: Case, *, steps: int, checks: int = 0, batches: int = 8) -> Outcome:
    """Train with AdamW at level full, on a few batches in turn, until they are known by heart.

    It ends after `steps`, or after so many checks that have a threshold.
    """
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-3)
    handle = guard(case.model, optimizer, "full")
    outcome = Outcome()
    for step in range(steps):
        optimizer.zero_grad()
        case.loss(case.model, case.batch(step % batches)).backward()
        try:
            optimizer.step()
        except DataCorruptionError as error:
            outcome.stops.append(f"step {step}: {error}")
            handle.restart(step)
        outcome.checks = thresholds_compared(handle)
        if checks and outcome.checks >= checks:
            break
    outcome.outcomes.update(finding.outcome for finding in handle.ledger.findings)
    handle.remove()
    return outcome


def thresholds_compared(handle: Guard) -> int:
    """Checks so far whose sides are equal up to rounding only."""
    sites = handle.ledger.sites.values()
    return sum(site.checks for site in sites if site.operation not in OF_BITS | LASTING)


def _grouped(a: Any, b: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    # (tokens, k) by (experts, k, n), or, for the weights' gradient, (k, tokens) by (tokens, n).
    return 2 * math.prod(a) * b[-1]


def _recurrent(x: Any, *weights: Any, **_: Any) -> int:
    return 2 * math.prod(x[:-1]) * sum(math.prod(weight) for weight in weights[:2])


def _recurrent_backward(x: Any, *weights: Any, **options: Any) -> int:
    return 2 * _recurrent(x, *weights, **options)


def _attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _attention_backward(_: Any, q: Any, k: Any, v: Any, *__: Any, **___: Any) -> int:
    # The scores are computed again: five products in place of two.
    return 5 * _attention(q, k, v) // 2


def _convolution_backward(dy: Any, x: Any, weight: Any, *rest: Any, **_: Any) -> int:
    # torch's own formula takes grouped convolutions for full ones.
    transposed, mask = rest[4], rest[7]
    positions = math.prod((x if transposed else dy)[2:])
    return 2 * sum(mask[:2]) * x[0] * positions * math.prod(weight)


def _matrix_vector(matrix: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(matrix)


_ATEN = torch.ops.aten
_FORMULAS = {
    _ATEN._grouped_mm: _grouped,
    _ATEN.mkldnn_rnn_layer: _recurrent,
    _ATEN.mkldnn_rnn_layer_backward: _recurrent_backward,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _ATEN.convolution_backward: _convolution_backward,
    _ATEN.mv: _matrix_vector,
    _ATEN.dot: _matrix_vector,
}
"""FLOPs by shapes that torch's own counter leaves out on the CPU, or takes for more."""


def step_flops(case: Case, step: int = 0) -> float:
    """FLOPs of the products of a training step, forward and backward, as torch counts them."""
    case.model.zero_grad()
    with FlopCounterMode(display=False, custom_mapping=_FORMULAS) as counted:
        case.loss(case.model, case.batch(step)).backward()
    return float(counted.get_total_flops())


def checked_flops(handle: Guard, total: float) -> float:
    """FLOPs of the last step whose results the guard has checked.

    Args:
        handle: After a step.
        total: Of the step, for guards that know a share only.
    """
    operations = getattr(handle.watch, "operations", None)
    if operations is not None:
        return float(operations.checked)
    share = handle.uncovered().flops
    return 0.0 if share is None else (1.0 - share) * total


def coverage_bars(quick: bool) -> Iterator[Bar]:
    """Share of the FLOPs of a step that were checked at level linear."""
    shares = {}
    for family in families(quick):
        for dtype, kind in DTYPES.items():
            total = step_flops(FAMILIES[family](dtype=kind))
            case = FAMILIES[family](dtype=kind)
            optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-3)
            handle = guard(case.model, optimizer, "linear")
            for step in range(2):
                optimizer.zero_grad()
                case.loss(case.model, case.batch(step)).backward()
                optimizer.step()
            checked = checked_flops(handle, total)
            handle.remove()
            # To count more than there is would hide what is not checked.
            shares[f"{family} {dtype}"] = checked / total if checked <= 1.001 * total else 0.0
    least = min(shares, key=lambda name: shares[name])
    peer = "torch's FlopCounterMode and formulas for what it leaves out"
    over = f"over {len(shares)} models of the zoo"
    label = f"share of a step's FLOPs checked, level linear, median {over}"
    yield at_least(label, statistics.median(shares.values()), "of FLOPs", 0.99, peer)
    label = f"share of a step's FLOPs checked, level linear, least {over}"
    yield at_least(label, shares[least], f"of FLOPs ({least})", 0.95, peer)


def harm_bars(quick: bool) -> Iterator[Bar]:
    """Faults in results of products and attention, by what they do to the gradient."""
    count = 4 if quick else 32
    bounds = {"fp32": 0.995, "bf16": 0.90}
    for dtype, kind in DTYPES.items():
        great: list[Trial] = []
        middle: list[Trial] = []
        for family in families(quick):
            for harms, trials in (((1e-2, math.inf), great), ((1e-4, 1e-2), middle)):
                done = drill_operations(
                    *(FAMILIES[family](dtype=kind), "full"),
                    name=family,
                    dtype=dtype,
                    faults=count,
                    steps=4,
                    accepted=lambda harm, harms=harms: harms[0] <= harm < harms[1],
                )
                trials += [trial for trial in done.trials if trial.struck]
        where = f"{dtype}, zoo"
        peer = "each measured without protection"
        yield share_bar(f"faults of harm > 1e-2 found, {where}", great, "detected", 1.0, peer)
        label = f"steps with such a fault that end in the clean bits, {where}"
        yield share_bar(label, great, "equal", 1.0, peer)
        label = f"faults of harm 1e-4 .. 1e-2 found, {where}"
        yield share_bar(label, middle, "detected", bounds[dtype], peer)


def share_bar(name: str, trials: list[Trial], what: str, limit: float, peer: str) -> Bar:
    """Share of these trials, with the models where it fails most often."""
    count = sum(getattr(trial, what) for trial in trials)
    wrong = Counter(trial.model for trial in trials if not getattr(trial, what))
    worst = ", ".join(f"{model} {number}" for model, number in wrong.most_common(4))
    unit = f"of {len(trials)} faults" + (f" (not: {worst})" if worst else "")
    return at_least(name, count / len(trials) if trials else 0.0, unit, limit, peer)


def healthy_bars(quick: bool) -> Iterator[Bar]:
    """Checks of trainings without faults: what they found."""
    wanted = 100_000 if quick else 2_000_000
    names = families(quick)
    for dtype, kind in DTYPES.items():
        made: dict[str, Outcome] = {}
        missing = wanted
        # The last one makes up for models of few rows.
        for number, family in enumerate((*names, "gpt2 again")):
            case = FAMILIES[family.removesuffix(" again")](dtype=kind)
            limit = missing if number == len(names) else wanted // len(names)
            steps = 10_000 if number == len(names) else (20 if quick else 1000)
            made[family] = train_healthy(case, steps=steps, checks=max(limit, 1))
            missing -= made[family].checks
        yield of_healthy(f"false alarms in {wanted:.0e} checks over the zoo, {dtype}", made)
        excused = sum(outcome.excused for outcome in made.values())
        yield Bar(
            f"of these checks, looked into and recognised as rounding, zoo, {dtype}", excused,
            "rows", "reported", True, "trainings without faults",
        )  # fmt: skip
    runs, steps = (LONG_RUNS[:2], 60) if quick else (LONG_RUNS, 500)
    made = {
        family: train_healthy(FAMILIES[family](dtype=torch.bfloat16), steps=steps)
        for family in runs
    }
    label = f"false alarms in {len(runs)} runs of {steps} steps, classifiers and LMs, bf16"
    yield of_healthy(label, made)
    stops = [f"{family}, {stop}" for family, outcome in made.items() for stop in outcome.stops]
    unit = f"stops ({stops[0]})" if stops else "stops"
    label = f"false stops in {len(runs)} runs of {steps} steps, classifiers and LMs, bf16"
    yield at_most(label, len(stops), unit, 0, "trainings without faults")


def of_healthy(name: str, made: dict[str, Outcome]) -> Bar:
    """The alarms of healthy runs."""
    wrong = {family: outcome.alarms for family, outcome in made.items() if outcome.alarms}
    unit = f"findings ({wrong})" if wrong else "findings"
    return at_most(name, sum(wrong.values()), unit, 0, "trainings without faults")


def unknown_bars(quick: bool) -> Iterator[Bar]:
    """Models in which an operation that the guard has never seen changes a layer's result."""
    silent = []
    for family in families(quick):
        for name, operation in UNKNOWN_OPERATIONS.items():
            case = FAMILIES[family]()
            with_unknown(case.model, operation)
            optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-3)
            handle = guard(case.model, optimizer, "full")
            case.loss(case.model, case.batch(0)).backward()
            optimizer.step()
            if not any("blend" in known.lower() for known in handle.uncovered().operations):
                silent.append(f"{family} {name}")
            handle.remove()
    tried = len(families(quick)) * len(UNKNOWN_OPERATIONS)
    unit = f"of {tried} models" + (f" ({', '.join(silent[:4])})" if silent else "")
    peer = "a custom operation, an autograd function"
    yield at_most("unknown operations that are not named", len(silent), unit, 0, peer)
