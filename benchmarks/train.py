"""`outlast train` against a plain hand-written loop, and how fast its commands answer.

    python benchmarks/train.py [--quick] [--json FILE]

Both loops train the quickstart model on the same data with the same settings, in the same
processes, in alternating blocks of steps; the figure is the median over pairs of blocks.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import Bar, arguments, at_least, at_most, median, publish
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig

from outlast.distributed.ranks import device_of, join, leave, ranks_from
from outlast.job import Job, load_job
from outlast.records import Evaluated, RecordWriter, Stopwatch, TrainingStarted, read_run
from outlast.runtime.stop import StopFlag
from outlast.train.build import SetUp, build, configure_torch, load_data
from outlast.train.preflight import preflight
from outlast.train.run import Start, claim, run_directory


@dataclass(frozen=True)
class Pair:
    """Seconds per step of one block of each loop: wall clock and CPU of this process."""

    hand_wall: float
    hand_cpu: float
    outlast_wall: float
    outlast_cpu: float


class HandLoop:
    """What one would write for this one job: model, data, two optimizers, clip, log."""

    def __init__(
        self, job: Job, tokens: np.ndarray, world_size: int, rank: int, device: torch.device
    ) -> None:
        torch.manual_seed(job.run.seed)
        settings = {k: v for k, v in job.model.settings.items() if k != "model_type"}
        model = AutoModelForCausalLM.from_config(LlamaConfig(**settings, use_cache=False))
        hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
        others = [p for n, p in model.named_parameters() if p.ndim != 2 or "layers" not in n]
        decay = job.optimizer.weight_decay
        self.optimizers = [
            torch.optim.Muon(hidden, lr=job.optimizer.muon_learning_rate, weight_decay=decay),
            torch.optim.AdamW(others, lr=job.optimizer.learning_rate, weight_decay=decay),
        ]
        self.device = device
        model.to(device)
        self.parameters = list(model.parameters())
        self.model = DistributedDataParallel(model) if world_size > 1 else model
        self.tokens, self.length = tokens, job.data.sequence_length
        self.batch = job.train.batch_size // world_size
        self.clip = job.train.gradient_clip
        self.random = np.random.default_rng(rank)
        self.losses: list[float] = []

    def steps(self, count: int) -> None:
        """Train for `count` steps."""
        for _ in range(count):
            starts = self.random.integers(len(self.tokens) - self.length - 1, size=self.batch)
            rows = np.stack([self.tokens[s : s + self.length + 1] for s in starts])
            window = torch.from_numpy(rows.astype(np.int64)).to(self.device)
            logits = self.model(window[:, :-1]).logits
            loss = functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            self.losses.append(loss.item())


def measure(job: Job, blocks: int, steps: int) -> list[Pair]:
    """Alternate blocks of both loops on this rank."""
    ranks = ranks_from(os.environ)
    device = device_of(ranks)
    configure_torch(job, ranks)
    join(ranks, device, 60.0)
    lock = claim(Start(job)) if ranks.is_first else None
    with StopFlag() as stop:
        setup = SetUp(
            job, preflight(job, ranks.world_size), ranks, device, run_directory(job), stop
        )
        data = load_data(setup)
        records = RecordWriter(setup.directory.path) if ranks.is_first else None
        trainer, _ = build(setup, data, records)
        trainer.records.watch.lap()
        hand = HandLoop(job, data.train.tokens, ranks.world_size, ranks.rank, device)
        pairs = []
        with trainer.consensus.waits.in_collectives():
            for block in range(blocks + 1):
                hand_wall, hand_cpu = _timed(lambda: hand.steps(steps))
                stop.reason = None
                first = block * steps
                wall, cpu = _timed(lambda first=first: trainer.train_from(first))
                if block:  # the first pair warms up
                    pairs.append(
                        Pair(hand_wall / steps, hand_cpu / steps, wall / steps, cpu / steps)
                    )
    trainer.store.close()
    if lock is not None:
        lock.release()
    leave()
    return pairs


def _timed(work: Any) -> tuple[float, float]:
    if dist.is_initialized():
        dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def on_ranks(size: int, job: Job, blocks: int, steps: int) -> list[Pair]:
    """Run `measure` on `size` fresh processes; returns rank 0's pairs."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = [
        context.Process(target=_rank, args=(rank, size, port, theirs, job, blocks, steps))
        for rank in range(size)
    ]
    for child in children:
        child.start()
    pairs: list[Pair] = ours.recv()
    for child in children:
        child.join()
    return pairs


def _rank(rank: int, size: int, port: int, pipe: Any, job: Job, blocks: int, steps: int) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    os.environ.update(zip(names, map(str, (rank, size, rank, size)), strict=True))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    pairs = measure(job, blocks, steps)
    if rank == 0:
        pipe.send(pairs)


def throughput_bars(folder: Path, quick: bool) -> list[Bar]:
    """Tokens/s of `outlast train`'s loop over that of the hand-written one."""
    bars = []
    blocks, steps = (6, 10) if quick else (16, 20)
    for size in (1, 2):
        job = load_job(
            None,
            [
                f'run.directory="{folder}"',
                f"run.name=throughput{size}",
                "train.steps=1000000",
                "checkpoint.every_steps=0",
                "evaluate.every_steps=0",
                f"train.stop_after_steps={steps}",
            ],
        )
        pairs = on_ranks(size, job, blocks, steps)
        wall = median([pair.hand_wall / pair.outlast_wall for pair in pairs])
        cpu = median([pair.hand_cpu / pair.outlast_cpu for pair in pairs])
        plural = "es" if size > 1 else ""
        peer = "hand-written loop, same model, data and settings"
        bars += [
            at_least(f"tokens/s, {size} process{plural}", wall, "ratio", 0.97, peer),
            at_least(f"CPU time, {size} process{plural}", cpu, "ratio", 0.97, peer),
        ]
    return bars


def agreement_bar(folder: Path) -> Bar:
    """The largest difference in loss between a one-process run and the same job on layouts."""
    settings = [
        f'run.directory="{folder}"',
        "model.settings.hidden_size=64",
        "model.settings.intermediate_size=128",
        "train.steps=20",
        "train.batch_size=12",
        "schedule.warmup_steps=5",
        "optimizer.name=adamw",
        "log.every_steps=1",
        "checkpoint.every_steps=0",
        "evaluate.samples=16",
        "sample.tokens=0",
        "export.huggingface=false",
    ]
    layouts = {
        "alone": [],
        "replicate": ["parallel.replicate=2", "launch.nproc=2"],
        "uneven": ["parallel.replicate=3", "launch.nproc=3", "train.micro_batch_size=3"],
        "shard": ["parallel.shard=2", "launch.nproc=2"],
        "tensor": ["parallel.tensor=2", "launch.nproc=2"],
        "pipeline": ["parallel.pipeline=2", "launch.nproc=2", "parallel.pipeline_microbatches=4"],
    }
    curves = {}
    for name, layout in layouts.items():
        command = [sys.executable, "-m", "outlast", "train", f"run.name=agree-{name}"]
        subprocess.run([*command, *settings, *layout], check=True, capture_output=True)
        curves[name] = [loss for _, loss in read_run(folder / f"agree-{name}").losses()]
    alone = np.array(curves.pop("alone"))
    largest = max(float(np.abs(np.array(curve) - alone).max()) for curve in curves.values())
    peer = f"one process, 20 steps in fp32; {', '.join(curves)}"
    return at_most("largest loss difference", largest, "nats", 2e-5, peer)


def timer_bar(folder: Path) -> Bar:
    """What the stopwatch costs, as a share of the quickstart's step time."""
    watch, repeats = Stopwatch(), 20_000
    begun = time.perf_counter()
    for _ in range(repeats):
        with watch("compute"):
            pass
    entry_seconds = (time.perf_counter() - begun) / repeats
    run = read_run(folder / "first-step")
    step_seconds = median([s for _, event in run.steps() for s in event.step_seconds])
    # A step enters four purposes: data, compute, communication, and at most one of the rest.
    return at_most("time by purpose", 4 * entry_seconds / step_seconds, "of step time", 0.005, "-")


def command_bars(folder: Path, repeats: int) -> list[Bar]:
    """How fast imports, the help and the first step come."""
    python = sys.executable

    def seconds(command: list[str]) -> float:
        begun = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        return time.perf_counter() - begun

    def extra(statement: str) -> float:
        pairs = [
            seconds([python, "-c", statement]) - seconds([python, "-c", "pass"])
            for _ in range(repeats)
        ]
        return median(pairs)

    helps = [seconds([python, "-m", "outlast", "--help"]) for _ in range(repeats)]
    bars = [
        at_most("import outlast", extra("import outlast"), "s", 0.1, "python -c pass"),
        at_most("import outlast.job", extra("import outlast.job"), "s", 0.3, "python -c pass"),
        at_most("outlast --help", median(helps), "s", 0.5, "-"),
    ]
    readies = []
    for repeat in range(max(repeats // 2, 1)):
        command = [python, "-m", "outlast", "train", "--fresh", f'run.directory="{folder}"']
        settings = ["run.name=first-step", "train.steps=60", "export.huggingface=false"]
        subprocess.run(
            [*command, *settings, "sample.tokens=0", "evaluate.samples=16"],
            check=True,
            capture_output=True,
        )
        [(_, ready)] = read_run(folder / "first-step").of(TrainingStarted)
        readies.append(ready)
        del repeat
    readies.sort(key=lambda ready: ready.seconds)
    middle = copy.copy(readies[len(readies) // 2])
    bars.append(at_most("command to first step", middle.seconds, "s", 15.0, "-"))
    for name, value in sorted(middle.parts.items(), key=lambda part: -part[1]):
        bars.append(Bar(f"- of it {name}", round(value, 3), "s", "reported", True, "-"))
    return bars


def quickstart_bars(folder: Path) -> list[Bar]:
    """The embedded default from command to report."""
    begun = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "outlast", "train", f'run.directory="{folder}"'],
        check=True,
        capture_output=True,
    )
    seconds = time.perf_counter() - begun
    run = read_run(folder / "quickstart")
    _, last = run.of(Evaluated)[-1]
    assert last.bits_per_byte is not None
    return [
        at_most("quickstart, command to report", seconds, "s", 150.0, "-"),
        at_most("quickstart, validation", last.bits_per_byte, "bits/byte", 2.4, "-"),
    ]


def main() -> None:
    options = arguments(__doc__ or "")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bars = throughput_bars(folder, options.quick)
        bars += command_bars(folder, 2 if options.quick else 7)
        bars.append(timer_bar(folder))
        if not options.quick:
            bars.append(agreement_bar(folder))
            bars += quickstart_bars(folder)
    publish("train", bars, options.json)


if __name__ == "__main__":
    main()
