"""Everything that only a GPU can show, in one resumable command: its tests and benchmarks.

    python benchmarks/gpu.py [--part NAME ...] [--minutes 9] [--again]        # or: make gpu

Parts are run one after the other, each in a process of its own, and write
``benchmarks/results/gpu-PART.DEVICE.json``. A part whose file is there is run again only with
--again; when the minutes are up, the next call continues with what is missing. A summary of all
parts goes to ``benchmarks/results/gpu.DEVICE.md``. Clocks and power limits are left alone.

``--device cpu --quick`` runs small shapes of the same code on a CPU and writes no results: its
figures mean nothing, but what is broken breaks.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from energy_gpu import gpu_bars
from guard_workload import GPT, Text, train_step
from harness import Bar, at_least, at_most, median, publish
from tensorize_decode import decode_bars
from torch import nn
from train import on_ranks
from transformers import LlamaConfig, LlamaForCausalLM

from outlast.checkpoint import CheckpointStore
from outlast.guard import guard
from outlast.job import load_job
from outlast.tensorize import (
    BottleneckLinear,
    BTTLinear,
    LowRankLinear,
    MonarchLinear,
    TTLinear,
    TTMLinear,
)

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PART_SECONDS = 540.0
"""A part that takes longer than this is ended."""

NEEDS_GPU = (
    "no CUDA device on this machine: nothing was measured; `make test` checks all that a CPU can"
)


def synchronize(device: torch.device) -> None:
    """Wait for the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_in_turns(
    works: Mapping[str, Callable[[], Any]], repeats: int, device: torch.device
) -> dict[str, float]:
    """Median seconds of each work, interleaved; the device is idle before and after each."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(-3, repeats):
        for name, work in works.items():
            synchronize(device)
            begun = time.perf_counter()
            work()
            synchronize(device)
            if repeat >= 0:  # the first three warm up
                times[name].append(time.perf_counter() - begun)
    return {name: median(found) for name, found in times.items()}


def tests(device: torch.device, quick: bool) -> Iterator[Bar]:
    """The tests that need a CUDA device."""
    del device
    command = [sys.executable, "-m", "pytest", "-q", "-x" if quick else "-q", "tests/gpu"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PART_SECONDS
    )
    said = dict.fromkeys(("passed", "failed", "skipped", "error"), 0)
    for count, outcome in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout):
        said[outcome] = int(count)
    print("\n".join(done.stdout.splitlines()[-25:]))
    yield at_most("tests/gpu: failed", said["failed"] + said["error"], "tests", 0, "-")
    for outcome in ("passed", "skipped"):
        yield Bar(f"tests/gpu: {outcome}", said[outcome], "tests", "reported", True, "-")


def train(device: torch.device, quick: bool) -> Iterator[Bar]:
    """Steps of the trainer over those of a hand-written loop: a Llama of 134M weights in fp32."""
    del device
    width, layers, length, batch = (64, 2, 64, 4) if quick else (768, 12, 512, 16)
    blocks, steps = (2, 2) if quick else (12, 10)
    with tempfile.TemporaryDirectory() as folder:
        job = load_job(
            None,
            [
                f'run.directory="{folder}"',
                "run.name=throughput",
                f"model.settings.hidden_size={width}",
                f"model.settings.intermediate_size={width * 4}",
                f"model.settings.num_hidden_layers={layers}",
                f"model.settings.max_position_embeddings={length}",
                f"data.sequence_length={length}",
                f"train.batch_size={batch}",
                "train.steps=1000000",
                "checkpoint.every_steps=0",
                "evaluate.every_steps=0",
                f"train.stop_after_steps={steps}",
            ],
        )
        pairs = on_ranks(1, job, blocks, steps)
    peer = "hand-written loop, same model, data and settings"
    ratio = median([pair.hand_wall / pair.outlast_wall for pair in pairs])
    yield at_least("tokens/s of outlast train, 1 process", ratio, "ratio", 0.97, peer)
    seconds = median([pair.outlast_wall for pair in pairs])
    yield Bar("tokens/s", round(batch * length / seconds, 1), "tokens/s", "reported", True, peer)


def checkpoint(device: torch.device, quick: bool) -> Iterator[Bar]:
    """Time for which a save stops training, and until it is durable; a restore."""
    width, layers = (64, 2) if quick else (1024, 12)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=width, intermediate_size=width * 4,
        num_hidden_layers=layers, num_attention_heads=max(width // 64, 1),
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        tokens = torch.randint(4096, (4, 128), device=device)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = {"model": model, "optimizer": optimizer}
    size = 12 * sum(parameter.numel() for parameter in model.parameters())

    def flat() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    blocked: dict[str, list[float]] = {}
    durable: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, numbers = Path(name), itertools.count(1)
        store = CheckpointStore(folder / "outlast", keep=2)

        def outlast() -> Callable[[], Any]:
            return store.save_async(next(numbers), state).wait

        def dcp_async() -> Callable[[], Any]:
            writer = dcp.FileSystemWriter(folder / f"dcp-{next(numbers)}", sync_files=True)
            result = dcp.async_save(flat(), storage_writer=writer)
            return result.result  # type: ignore[union-attr]

        def torch_save() -> Callable[[], Any]:
            torch.save(flat(), folder / "torch.pt")
            return lambda: None

        ways = {"outlast": outlast, "dcp.async_save": dcp_async, "torch.save": torch_save}
        for repeat in range(-1, 2 if quick else 7):
            for way, save in ways.items():
                step()
                synchronize(device)
                begun = time.perf_counter()
                finish = save()
                synchronize(device)
                stopped = time.perf_counter() - begun
                finish()
                if repeat >= 0:
                    blocked.setdefault(way, []).append(stopped)
                    durable.setdefault(way, []).append(time.perf_counter() - begun)
        begun = time.perf_counter()
        store.restore(state)
        synchronize(device)
        restored = time.perf_counter() - begun
        store.close()
    peer = f"fp32 AdamW state of {size / 1e9:.2f} GB"
    ours, theirs = median(blocked["outlast"]), median(blocked["dcp.async_save"])
    yield at_most("blocked / dcp.async_save's", ours / theirs, "ratio", 1.0, f"dcp; {peer}")
    for way, found in blocked.items():
        yield Bar(f"- blocked, {way}", round(median(found), 4), "s", "reported", True, peer)
        done = round(median(durable[way]), 4)
        yield Bar(f"- until durable, {way}", done, "s", "reported", True, peer)
    yield Bar("restore, warm cache", round(restored, 4), "s", "reported", True, peer)


def guarding(device: torch.device, quick: bool) -> Iterator[Bar]:
    """A guarded training step over a plain one, the same weights afterwards."""
    sizes = ((64, 2),) if quick else ((384, 4), (1024, 12))
    text, policies = Text(), ("light", "linear", "full")
    for (width, layers), (name, autocast) in itertools.product(
        sizes, (("fp32", None), ("bf16", torch.bfloat16))
    ):
        torch.manual_seed(0)
        models = {"plain": GPT(width, layers).to(device)}
        models |= {policy: copy.deepcopy(models["plain"]) for policy in policies}
        works: dict[str, Callable[[], Any]] = {}
        repeats = 3 if quick else 31
        batches = [
            tuple(part.to(device) for part in text.batch(4 if quick else 32))
            for _ in range(repeats + 3)
        ]
        handles = []
        for policy, model in models.items():
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            if policy != "plain":
                handles.append(guard(model, optimizer, policy))
            remaining = iter(batches)

            def step(
                model: nn.Module = model,
                optimizer: torch.optim.Optimizer = optimizer,
                remaining: Iterator[Any] = remaining,
                autocast: torch.dtype | None = autocast,
            ) -> None:
                train_step(model, optimizer, next(remaining), autocast)

            works[policy] = step
        seconds = seconds_in_turns(works, repeats, device)
        where = f"{name}, d {width} L{layers}"
        for policy in policies:
            cost = seconds[policy] / seconds["plain"] - 1
            limit = {"light": 0.01, "linear": 0.05}.get(policy)
            label = f"GPT step, policy {policy}, {where}"
            peer = f"torch, unguarded, {seconds['plain'] * 1e3:.3g} ms"
            if limit is None:
                yield Bar(label, round(cost, 4), "of step time", "reported", True, peer)
            else:
                yield at_most(label, cost, "of step time", limit, peer)
        alarms = sum(len(handle.ledger.findings) for handle in handles)
        yield at_most(f"false alarms, {where}", alarms, "findings", 0, "-")
        same = all(
            torch.equal(a, b)
            for policy in policies
            for a, b in zip(models["plain"].parameters(), models[policy].parameters(), strict=True)
        )
        yield at_least(f"weights equal those of the plain model, {where}", same, "bool", 1, "-")


def layers(device: torch.device, quick: bool) -> Iterator[Bar]:
    """Structured layers against `nn.Linear`, forward and backward."""
    tokens = 64 if quick else 8192
    for width in (64,) if quick else (1024, 2048, 4096):
        forms: dict[str, nn.Module] = {
            "nn.Linear": nn.Linear(width, width),
            "low rank d/4": LowRankLinear(width, width, width // 4),
            "CoLA d/4": BottleneckLinear(width, width, width // 4),
            "merged TT r = 30": TTLinear(width, width, 30),
            "BTT r = 2": BTTLinear(width, width, 2),
            "Monarch, 8 blocks": MonarchLinear(width, width, 8),
            "TTM r = 16": TTMLinear(width, width, 16),
        }
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            works = {}
            for form, layer in forms.items():
                layer.to(device, dtype)
                x = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
                gradient = torch.randn_like(x)

                def work(
                    layer: nn.Module = layer, x: torch.Tensor = x, gradient: torch.Tensor = gradient
                ) -> None:
                    x.grad = None
                    layer.zero_grad()
                    layer(x).backward(gradient)

                works[form] = work
            seconds = seconds_in_turns(works, 3 if quick else 31, device)
            dense = seconds.pop("nn.Linear")
            for form, found in seconds.items():
                label = f"{form}, d = {width}, {tokens} tokens, {name}"
                peer = f"nn.Linear, {dense * 1e3:.3g} ms"
                if form == "low rank d/4" and width >= 2048 and name == "bf16":
                    yield at_least(label, dense / found, "x dense", 1.2, peer)
                else:
                    yield Bar(label, round(dense / found, 3), "x dense", "reported", True, peer)


def decode(device: torch.device, quick: bool) -> Iterator[Bar]:
    """Decoding with structured layers."""
    del device
    yield from decode_bars(quick)


def energy(device: torch.device, quick: bool) -> Iterator[Bar]:
    """Joules per token by setting, and how well the meter repeats."""
    del device, quick
    yield from gpu_bars()


PARTS: dict[str, Callable[[torch.device, bool], Iterator[Bar]]] = {
    "tests": tests,
    "train": train,
    "checkpoint": checkpoint,
    "guard": guarding,
    "layers": layers,
    "decode": decode,
    "energy": energy,
}


def device_name() -> str:
    """The device's name as a part of a file's name: ``NVIDIA H200`` is ``h200``."""
    words = torch.cuda.get_device_name().lower().removeprefix("nvidia").split()
    return re.sub(r"[^a-z0-9]+", "-", "-".join(words)).strip("-")


def summary(device: str) -> str:
    """All parts that have been measured on the device, as a page."""
    lines = [f"# Measured on {device}", ""]
    for part in PARTS:
        file = RESULTS / f"gpu-{part}.{device}.json"
        if not file.exists():
            lines += [f"## {part}", "", "not measured yet", ""]
            continue
        bars = [Bar(**row) for row in json.loads(file.read_text())["bars"]]
        lines += [f"## {part}", "", "| figure | value | unit | bar | holds | against |"]
        lines += ["|---|---|---|---|---|---|"]
        for bar in bars:
            value = "unavailable" if bar.figure is None else f"{bar.figure:g}"
            holds = "yes" if bar.holds else "**no**"
            lines.append(
                f"| {bar.name} | {value} | {bar.unit} | {bar.bar} | {holds} | {bar.peer} |"
            )
        lines.append("")
    return "\n".join(lines)


def all_parts(names: list[str], minutes: float, again: bool) -> int:
    """Run the parts that are missing while time remains; returns the exit code."""
    end = time.monotonic() + 60 * minutes
    device = device_name()
    failed, left = [], []
    for name in names:
        file = RESULTS / f"gpu-{name}.{device}.json"
        if file.exists() and not again:
            print(f"{name}: measured already ({file.relative_to(ROOT)}); --again repeats it")
            continue
        remaining = end - time.monotonic()
        if remaining < 60:
            left.append(name)
            continue
        command = [sys.executable, __file__, "--worker", name, "--json", str(file)]
        try:
            code = subprocess.run(
                command, cwd=ROOT, check=False, timeout=min(PART_SECONDS, remaining)
            ).returncode
        except subprocess.TimeoutExpired:
            left.append(name)
            continue
        failed += [name] if code else []
    (RESULTS / f"gpu.{device}.md").write_text(summary(device))
    print(f"summary: benchmarks/results/gpu.{device}.md")
    if left:
        print(f"not measured yet: {', '.join(left)}; the same command continues with them")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed or left else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", action="append", choices=[*PARTS], help="only this part")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call (default: 9)")
    parser.add_argument("--again", action="store_true", help="also what was measured before")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="small shapes, to see that it runs")
    parser.add_argument("--worker", choices=[*PARTS], help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        print(NEEDS_GPU, file=sys.stderr)
        return 2
    if asked.worker is None and asked.device == "cuda":
        return all_parts(asked.part or [*PARTS], asked.minutes, asked.again)
    for name in [asked.worker] if asked.worker else asked.part or [*PARTS]:
        bars = list(PARTS[name](torch.device(asked.device), asked.quick))
        publish(f"gpu-{name}", bars, asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
