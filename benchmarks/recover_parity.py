"""Parity of sharded state: what it costs each step, and whether lost states come back.

    python benchmarks/recover_parity.py [--quick] [--json FILE]

The overhead is that of four gloo processes which train a llama of 50M parameters under FSDP2 with
fp32 AdamW, 4,096 tokens a step, and keep XOR parity of all their state (600 MB) after every step,
from a background thread during the next one. Steps with and without it take turns. The losses
are real ones: processes are killed with SIGKILL in the middle of an update, their memory is wiped,
and new processes take their place.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import Bar, arguments, at_least, at_most, median, publish
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from outlast.errors import RecoverError
from outlast.recover.parity import ParityGroup, Update
from outlast.recover.parity_code import STRIPE_BYTES

DEADLINE_SECONDS = 3000
BAR = 0.03


@dataclass(frozen=True)
class Size:
    """How much is done.

    Attributes:
        pairs: Steps with parity, and as many without.
        losses: Trials of each kind; None for all choices of who is lost.
        lost_bytes: State of all members together in the trials of losses.
    """

    hidden: int
    layers: int
    vocabulary: int
    length: int
    pairs: int
    losses: int | None
    lost_bytes: int


FULL = Size(512, 10, 36_000, 1024, pairs=15, losses=None, lost_bytes=600_000_000)
QUICK = Size(128, 2, 2048, 64, pairs=3, losses=1, lost_bytes=24_000_000)
WORKERS = 4


def bars(quick: bool) -> list[Bar]:
    size = QUICK if quick else FULL
    return [*_overhead(size), _losses(size, 4, 1), _losses(size, 6, 2)]


def _overhead(size: Size) -> list[Bar]:
    with _memory() as folder:
        found = _Processes(folder, WORKERS, _train, size).results()
    parameters, nbytes, _, _ = found[0]
    ratios, cpu = [], []
    for pair in range(size.pairs):
        walls = [max(each[2][pair][on][0] for each in found) for on in (0, 1)]
        ratios.append(walls[1] / walls[0] - 1)
        used = [sum(each[2][pair][on][1] for each in found) for on in (0, 1)]
        cpu.append(used[1] / used[0] - 1)
    off = median([max(each[2][pair][0][0] for each in found) for pair in range(size.pairs)])
    used = median([sum(each[2][pair][0][1] for each in found) for pair in range(size.pairs)])
    alone = median([sum(each) for each in zip(*(each[3] for each in found), strict=True)])
    whole = f"{parameters / 1e6:.1f}M parameters, {nbytes * WORKERS / 1e6:.0f} MB of state"
    without = f"the same steps without parity: {off:.2f} s, {used:.2f} s of CPU time; {whole}"
    return [
        at_most("XOR parity of every step: step time", median(ratios), "share", BAR, without),
        at_most("XOR parity of every step: CPU time", median(cpu), "share", BAR, without),
        at_most(
            "XOR parity of every step: CPU time of an update by itself",
            alone / used,
            "share",
            BAR,
            f"{alone:.2f} s of CPU time over all processes, to {used:.2f} s of a step",
        ),
    ]


def _train(folder: Path, size: Size) -> Any:
    """Parameters, bytes of this rank's state, and seconds (wall, CPU) of each pair of steps."""
    model = _model(size)
    parameters = sum(each.numel() for each in model.parameters())
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tokens = torch.randint(0, size.vocabulary, (1, size.length))
    group = ParityGroup(dist.new_group(backend="gloo"), directory=folder / str(dist.get_rank()))

    def step() -> None:
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def timed(work: Callable[[], object]) -> tuple[float, float]:
        dist.barrier()
        begun, used = time.perf_counter(), _cpu_seconds()
        work()
        return time.perf_counter() - begun, _cpu_seconds() - used

    slots = itertools.count(1)
    step()
    old = _state(model, optimizer)
    group.update(None, old, 0)
    new = old.clone()

    def beside() -> None:
        thread = threading.Thread(target=group.update, args=(old, new, next(slots)))
        thread.start()
        step()
        thread.join()

    def by_itself() -> None:
        group.update(old, new, next(slots))

    pairs = []
    # The first pair warms up; who goes first in a pair is drawn, the same by all.
    order = random.Random(7)
    for _ in range(size.pairs + 1):
        _state(model, optimizer, new)
        pair: dict[int, tuple[float, float]] = {}
        for on in order.sample((0, 1), 2):
            pair[on] = timed(beside if on else step)
        pairs.append(pair)
        old, new = new, old
    alone = []
    for _ in range(5):
        # Back and forth between two steps: all of the state changes each time.
        alone.append(timed(by_itself)[1])
        old, new = new, old
    group.close()
    return parameters, old.nbytes, pairs[1:], alone


def _model(size: Size) -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.hidden,
            intermediate_size=8 * size.hidden // 3,
            num_hidden_layers=size.layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=size.length,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )


def _state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, into: torch.Tensor | None = None
) -> torch.Tensor:
    """This rank's shards of weights and moments, one after the other (fp32)."""
    whole = [
        each
        for parameter in model.parameters()
        for moments in [optimizer.state[parameter]]
        for each in (parameter.data, moments["exp_avg"], moments["exp_avg_sq"])
    ]
    found = [(each.to_local() if isinstance(each, DTensor) else each).flatten() for each in whole]
    return torch.cat(found, out=into) if into is not None else torch.cat(found)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _losses(size: Size, members: int, losses: int) -> Bar:
    """Trials in which members die during an update and lose all their memory."""
    choices = list(itertools.combinations(range(members), losses))
    tried = choices if size.losses is None else choices[1 : 1 + size.losses]
    exact, lost_steps, seconds = 0, 0, []
    for trial, victims in enumerate(tried):
        nbytes = size.lost_bytes // members
        with _memory() as folder:
            processes = _Processes(folder, members, _live, nbytes, losses, victims, trial)
            processes.replace(victims)
            found = processes.results()
        exact += all(each[0] for each in found)
        lost_steps = max(lost_steps, *(each[1] for each in found))
        seconds.append(max(each[2] for each in found))
    said = (
        f"{exact} of {len(tried)} trials: SIGKILL during the update, memory wiped; "
        f"{size.lost_bytes / members / 1e6:.0f} MB each rebuilt and checked in "
        f"{median(seconds):.2f} s; at most {lost_steps} step lost"
    )
    name = f"lose {losses} of {members} processes: exact, and at most one step lost"
    return at_least(name, exact * (lost_steps <= 1) / len(tried), "share of trials", 1.0, said)


STEPS = 3


def _live(folder: Path, nbytes: int, losses: int, victims: tuple[int, ...], trial: int) -> Any:
    """Whether this member's state is right, how many steps are lost, and the rebuild's seconds."""
    member = dist.get_rank()
    slots: dict[int, np.ndarray] = {}
    if _generation() == 0:
        group = _join(folder, losses)
        slots = {0: _bytes(member, 0, nbytes)}
        group.update(None, slots[0], 0)
        for step in range(1, STEPS + 1):
            slots = {step - 1: slots[step - 1], step: _bytes(member, step, nbytes)}
            if step == STEPS and member in victims:
                _die_soon(random.Random(trial).randrange(nbytes // STRIPE_BYTES))
            with contextlib.suppress(RecoverError):
                group.update(slots[step - 1], slots[step], step)
            if step == STEPS and member in victims:
                # The other victim was faster, which ended this one's update before its row.
                os.kill(os.getpid(), signal.SIGKILL)
        group.close()
        dist.destroy_process_group()
        _initialize(1)
    group = _join(folder, losses)
    found = group.recover(slots, lambda size: np.empty(size, np.uint8))
    right = np.array_equal(found.data, _bytes(member, found.epoch, nbytes))
    group.close()
    return right, STEPS - found.epoch, found.seconds


def _join(folder: Path, losses: int) -> ParityGroup:
    return ParityGroup(dist.group.WORLD, losses=losses, directory=folder / str(dist.get_rank()))


def _bytes(member: int, step: int, nbytes: int) -> np.ndarray:
    return np.frombuffer(np.random.default_rng((member, step)).bytes(nbytes), np.uint8).copy()


def _die_soon(rows: int) -> None:
    """Let this process be killed when it comes to a certain row of the next update."""
    plan = Update.plan

    def dying(update: Update, row: int) -> Any:
        if row >= rows:
            os.kill(os.getpid(), signal.SIGKILL)
        return plan(update, row)

    Update.plan = dying  # type: ignore[method-assign]


def _generation() -> int:
    return int(os.environ["GENERATION"])


def _initialize(generation: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{os.environ['PORTS'].split()[generation]}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=120),
    )


class _Processes:
    """Forked gloo ranks, of which some may die and be replaced once."""

    def __init__(self, folder: Path, size: int, work: Callable[..., Any], *given: Any) -> None:
        self._folder, self._size, self._work, self._given = folder, size, work, given
        self._context = multiprocessing.get_context("fork")
        self._ports = [_free_port() for _ in range(2)]
        self._running = [self._start(rank, 0) for rank in range(size)]

    def replace(self, ranks: tuple[int, ...]) -> None:
        """Wait for the deaths of `ranks`, wipe their memory, and start new processes."""
        for rank in ranks:
            self._running[rank].join(DEADLINE_SECONDS)
            if self._running[rank].exitcode != -signal.SIGKILL:
                raise RuntimeError(f"rank {rank} was not killed: {self._running[rank].exitcode}")
            shutil.rmtree(self._folder / str(rank), ignore_errors=True)
            self._running[rank] = self._start(rank, 1)

    def results(self) -> list[Any]:
        """What the ranks returned."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        for rank, process in enumerate(self._running):
            process.join(max(deadline - time.monotonic(), 0.0))
            if process.exitcode != 0:
                for each in self._running:
                    each.kill()
                raise RuntimeError(f"rank {rank} of {self._size} ended with {process.exitcode}")
        return [pickle.loads(self._result(rank).read_bytes()) for rank in range(self._size)]

    def _result(self, rank: int) -> Path:
        return self._folder / f"{rank}.result"

    def _start(self, rank: int, generation: int) -> Any:
        process = self._context.Process(target=self._run, args=(rank, generation))
        process.start()
        return process

    def _run(self, rank: int, generation: int) -> None:
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(self._size),
            GENERATION=str(generation),
            PORTS=" ".join(map(str, self._ports)),
            GLOO_SOCKET_IFNAME="lo",
        )
        torch.set_num_threads(1)
        _initialize(generation)
        result = self._work(self._folder, *self._given)
        self._result(rank).write_bytes(pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="outlast-parity-") as folder:
        yield Path(folder)


if __name__ == "__main__":
    options = arguments(str(__doc__).splitlines()[0])
    publish("recover", bars(options.quick), options.json, part=True)
