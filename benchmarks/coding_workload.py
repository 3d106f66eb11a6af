"""Real training with delays: gradients are computed, and every layer sleeps as long as it is told.

A slow process is slow in every layer, as one on a slow machine would be. Sleeping leaves the cores
free, so that 16 processes on 2 cores behave like 16 machines.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import socket
import sysconfig
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from outlast.coding import CyclicMDS, FractionalRepetition
from outlast.coding.protocol import CodedAllReduce, Coverage

CONTEXT = 16
Step = Callable[[int], object]
FORWARD_SHARE = 1 / 3


def on_ranks(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Results of ``work(*arguments)`` on `size` gloo ranks, each a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(size, mp_context=fork) as pool:
        jobs = [pool.submit(_rank, rank, size, port, work, arguments) for rank in range(size)]
        return [job.result() for job in jobs]


def _rank(rank: int, size: int, port: int, work: Callable[..., Any], arguments: Any) -> Any:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=120),
    )
    try:
        return work(*arguments)
    finally:
        dist.barrier()
        dist.destroy_process_group()


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: list[float]) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds[0] * FORWARD_SHARE)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds[0] * (1 - FORWARD_SHARE))
        return dy, None


class Layer(nn.Module):
    """A residual layer that takes `seconds[0]` forward and backward."""

    def __init__(self, width: int, seconds: list[float]) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(samples, width) in and out."""
        x = _Sleep.apply(x, self.seconds)
        return x + functional.gelu(self.linear(x))


class NextByte(nn.Module):
    """Predicts the byte after `CONTEXT` bytes."""

    def __init__(self, seconds: list[float], layers: int, width: int = 128) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bytes = nn.Embedding(256, width // 8)
        self.first = nn.Linear(CONTEXT * width // 8, width)
        self.layers = nn.ModuleList(Layer(width, seconds) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, contexts: torch.Tensor) -> torch.Tensor:
        """(samples, CONTEXT) bytes in, (samples, 256) logits out."""
        x = self.first(self.bytes(contexts).flatten(1))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Text:
    """Samples of chunks; with `sites` the last worker alone reads compiled modules, not source."""

    def __init__(self, workers: int, chunks: int, samples: int, *, sites: bool) -> None:
        library = Path(sysconfig.get_paths()["stdlib"])
        source = b"".join(each.read_bytes() for each in sorted(library.glob("*.py"))[:80])
        compiled = b"".join(
            each.read_bytes() for each in sorted((library / "__pycache__").glob("*.pyc"))[:80]
        )
        self.texts = [np.frombuffer(source, np.uint8), np.frombuffer(compiled, np.uint8)]
        self.workers, self.chunks, self.samples, self.sites = workers, chunks, samples, sites

    def chunk(self, step: int, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Contexts (samples, CONTEXT) and the bytes after them (samples,)."""
        site = int(self.sites and chunk // self.chunks == self.workers - 1)
        return self._draw(np.random.default_rng([step, chunk]), self.texts[site], self.samples)

    def held_out(self, samples: int = 2048) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples of all workers' texts, each text as often as workers read it."""
        generator = np.random.default_rng(123)
        count = samples // self.workers if self.sites else 0
        parts = [self._draw(generator, self.texts[0], samples - count)]
        parts += [self._draw(generator, self.texts[1], count)] if count else []
        contexts, targets = zip(*parts, strict=True)
        return torch.cat(contexts), torch.cat(targets)

    @staticmethod
    def _draw(
        generator: np.random.Generator, text: np.ndarray, samples: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        starts = generator.integers(0, len(text) - CONTEXT - 1, samples)
        windows = torch.from_numpy(text[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int64))
        return windows[:, :-1], windows[:, -1]


@dataclass(frozen=True)
class Course:
    """What a training run was like, as rank 0 saw it.

    Attributes:
        seconds: Of every step.
        losses: (step, held-out loss in nats), every few steps.
    """

    seconds: list[float]
    losses: list[tuple[int, float]]


@dataclass(frozen=True)
class Setting:
    """A training run.

    Attributes:
        scheme: A key of `SCHEMES`.
        slowdown: (steps, workers), how many times slower each worker is in each step.
        chunks: Micro-batches per worker and step.
        chunk_seconds: Time of a micro-batch at slowdown 1.
        sites: Whether the last worker's data differ.
        every: Steps between evaluations; 0 for none.
        copies: Workers that may compute, or that compute, every share.
        samples: Of a micro-batch.
        layers: Of the model.
    """

    scheme: str
    slowdown: np.ndarray
    chunks: int
    chunk_seconds: float
    sites: bool = False
    every: int = 0
    copies: int = 3
    samples: int = 16
    layers: int = 16


class Worker:
    """One rank of a training run."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.rank, self.workers = dist.get_rank(), dist.get_world_size()
        self.seconds = [0.0]
        self.model = NextByte(self.seconds, setting.layers)
        self.text = Text(self.workers, setting.chunks, setting.samples, sites=setting.sites)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.run_step = SCHEMES[setting.scheme](self)

    def loss(self, model: nn.Module, step: int, chunk: int) -> torch.Tensor:
        """A chunk's share of the mean loss of the step."""
        contexts, targets = self.text.chunk(step, chunk)
        loss = functional.cross_entropy(model(contexts), targets)
        return loss / (self.workers * self.setting.chunks)

    def slow_down(self, step: int, factor: float | None = None) -> None:
        """Set this worker's speed in this step."""
        slowdown = self.setting.slowdown[step, self.rank] if factor is None else factor
        self.seconds[0] = self.setting.chunk_seconds / self.setting.layers * slowdown

    def evaluate(self) -> float:
        """Held-out loss."""
        self.seconds[0] = 0.0
        with torch.no_grad():
            contexts, targets = self.text.held_out()
            return float(functional.cross_entropy(self.model(contexts), targets))

    def train(self) -> Course:
        """All steps."""
        seconds, losses = [], []
        for step in range(len(self.setting.slowdown)):
            self.slow_down(step)
            dist.barrier()
            begun = time.perf_counter()
            self.run_step(step)
            self.optimizer.step()
            self.optimizer.zero_grad()
            seconds.append(time.perf_counter() - begun)
            if self.setting.every and (step + 1) % self.setting.every == 0 and self.rank == 0:
                losses.append((step + 1, self.evaluate()))
        return Course(seconds, losses)


def wait_all(worker: Worker) -> Step:
    """DDP: everybody is waited for."""
    model = DistributedDataParallel(worker.model)
    first = worker.rank * worker.setting.chunks
    last = first + worker.setting.chunks - 1

    def step(number: int) -> None:
        for chunk in range(first, last + 1):
            waiting = contextlib.nullcontext() if chunk == last else model.no_sync()
            with waiting:
                # DDP divides by the number of workers; the losses are shares of the mean already.
                (worker.loss(model, number, chunk) * worker.workers).backward()

    return step


def coverage(worker: Worker) -> Step:
    """Micro-coverage."""
    setting = worker.setting
    protocol = Coverage(worker.model, chunks_per_rank=setting.chunks, copies=setting.copies)
    return lambda number: protocol.step(
        number, lambda chunk: worker.loss(worker.model, number, chunk)
    )


def deadline(worker: Worker) -> Step:
    """DropCompute's rule: micro-batches that are not finished in time are dropped."""
    setting = worker.setting
    protocol = Coverage(
        worker.model,
        chunks_per_rank=setting.chunks,
        copies=1,
        lost="commit",
        deadline_seconds=setting.chunks * setting.chunk_seconds * 1.3,
    )
    return lambda number: protocol.step(
        number, lambda chunk: worker.loss(worker.model, number, chunk)
    )


def fixed(make: Callable[[int, int], Any], largest_error: float = 0.0) -> Any:
    """A fixed code over workers' shares; with one copy and an error: drop and rescale."""

    def scheme(worker: Worker) -> Step:
        code = make(worker.workers, worker.setting.copies)
        protocol = CodedAllReduce(
            worker.model, code, on_lost="rescale", largest_error=largest_error
        )
        size = worker.setting.chunks

        def step(number: int) -> None:
            with protocol.computing():
                for share, weight in protocol.chunks():
                    for chunk in range(share * size, (share + 1) * size):
                        (weight * worker.loss(worker.model, number, chunk)).backward()
            protocol.reduce(number)

        return step

    return scheme


SCHEMES: dict[str, Callable[[Worker], Step]] = {
    "wait for all (DDP)": wait_all,
    "micro-coverage": coverage,
    "drop the slowest and rescale": fixed(lambda n, _: FractionalRepetition(n, 0), 1.0),
    "deadline per micro-batch (DropCompute)": deadline,
    "fractional repetition, 2 copies": fixed(lambda n, _: FractionalRepetition(n, 1)),
    "cyclic MDS, 1 straggler": fixed(lambda n, _: CyclicMDS(n, 1)),
}


def train(setting: Setting) -> Course:
    """A training run on this rank."""
    return Worker(setting).train()


def alternate(setting: Setting, pairs: int) -> tuple[list[float], list[float], float]:
    """Coverage and DDP in turns on one set of processes, nobody slow.

    Returns:
        Seconds of DDP's steps, of coverage's, and the largest relative difference of gradients.
    """
    worker = Worker(setting)
    other = Worker(replace(setting, scheme="wait for all (DDP)"))
    other.seconds = worker.seconds
    for layer, theirs in zip(worker.model.layers, other.model.layers, strict=True):
        theirs.seconds = layer.seconds
    seconds: dict[str, list[float]] = {"ddp": [], "coverage": []}
    worst = 0.0
    for pair in range(-2, pairs):
        worker.slow_down(0, 1.0)
        order = ("ddp", "coverage") if pair % 2 else ("coverage", "ddp")
        for name in order:
            one = worker if name == "coverage" else other
            one.optimizer.zero_grad()
            dist.barrier()
            begun = time.perf_counter()
            one.run_step(pair + 2)
            if pair >= 0:
                seconds[name].append(time.perf_counter() - begun)
        ours, theirs = (
            torch.cat([each.grad.flatten() for each in one.model.parameters()])
            for one in (worker, other)
        )
        worst = max(worst, float((ours - theirs).norm() / theirs.norm()))
    return seconds["ddp"], seconds["coverage"], worst
