"""Faults that befall a store on an S3 server, and what must hold after each."""

import multiprocessing
import os
import random
import signal
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from forked import run_ranks
from s3_server import s3_server
from torch import nn

from outlast.checkpoint import CheckpointStore
from outlast.errors import OutlastError

PART_BYTES = 4 << 10
REQUESTS = ("refuse", "lose", "cut", "busy", "slow")


class Weights(nn.Module):
    """Tensors that tell which save they are of, and one that never changes."""

    def __init__(self, value: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(value)
        for number in range(4):
            self.register_buffer(f"part{number}", torch.randn(2500, generator=generator))
        self.register_buffer("same", torch.arange(20_000) % 977)
        self.register_buffer("value", torch.tensor(value))


def state_of(value: int) -> dict[str, Any]:
    return {"model": Weights(value)}


class Faults:
    """What befalls requests: one kind, to some of them, from one on; counts what was staged."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.staged: Counter[str] = Counter()
        self.victims: Callable[[], list[int]] = list
        self.disarm()

    def disarm(self) -> None:
        self._kind, self._after, self._times = "", 0, 0

    def arm(
        self,
        kind: str,
        after: int = 0,
        times: int = 10**6,
        where: Callable[[str, str], bool] = lambda method, address: True,
    ) -> None:
        self._kind, self._after, self._times, self._where = kind, after, times, where

    def __call__(self, method: str, address: str) -> str:
        if not self._kind or not self._where(method, address):
            return ""
        self._after -= 1
        if self._after >= 0 or self._times <= 0:
            return ""
        self._times -= 1
        self.staged[self._kind] += 1
        if self._kind == "kill":
            for victim in self.victims():
                os.kill(victim, signal.SIGKILL)
            return "refuse"
        return self._kind


@contextmanager
def faulty_place(seed: int) -> Iterator[tuple[str, Faults]]:
    """A place on a server of its own, to which packs go in many parts, and its faults."""
    faults = Faults(seed)
    with (
        mock.patch.dict(os.environ, AWS_MAX_ATTEMPTS="1"),
        mock.patch("outlast.checkpoint.storage._PART_BYTES", PART_BYTES),
        mock.patch("s3fs.S3FileSystem.retries", 2),
        warnings.catch_warnings(),
        s3_server(f"faults{uuid.uuid4().hex}", fault=faults) as url,
    ):
        warnings.simplefilter("ignore")
        yield f"{url}/run", faults


def open_quietly(place: str, **settings: Any) -> CheckpointStore:
    return CheckpointStore(place, **{"writer": "thread", "timeout_seconds": 20.0} | settings)


def restored_step(place: str, tried: dict[int, set[int]], newest: int) -> int:
    """The step that is restored: of a state that was saved, and not before `newest`."""
    state = state_of(0)
    restored = open_quietly(place).restore(state)
    if restored is None:
        assert newest == 0, f"step {newest} is gone"
        return 0
    value = int(state["model"].value)
    assert restored.step >= newest, f"step {newest} is gone: {restored.skipped}"
    assert value in tried[restored.step], "the state of another step"
    for name, tensor in Weights(value).named_buffers():
        assert torch.equal(tensor, state["model"].get_buffer(name)), name
    return restored.step


def fail_requests(place: str, faults: Faults, rounds: int, *, writer: str = "thread") -> None:
    """Save again and again while requests fail; with a writer process, it is killed instead."""
    import psutil

    tried: dict[int, set[int]] = {}
    newest = step = 0

    def save(store: CheckpointStore) -> str | None:
        nonlocal newest, step
        step += 1
        tried[step] = {step}
        error = store.save_async(step, state_of(step)).result().error
        newest = newest if error else step
        return error

    faults.victims = lambda: [child.pid for child in psutil.Process().children()]
    done = 0
    while done < rounds:
        with open_quietly(place, keep=2, writer=writer) as store:
            if newest:
                newest = max(newest, store.restore(state_of(0)).step)  # type: ignore[union-attr]
            # The first save of a store claims it, later ones do not.
            if faults.random.random() < 0.5 or writer == "process":
                assert save(store) is None
            for _ in range(faults.random.randint(1, 4)):
                kind = "kill" if writer == "process" else faults.random.choice(REQUESTS)
                after = faults.random.randint(0, 8 if kind == "kill" else 45)
                times = 1 if kind == "kill" else faults.random.choice([1, 1, 3, 1000])
                faults.arm(kind, after, times)
                save(store)
                faults.disarm()
                done += 1
            error = save(store)
            assert error is None, f"after {kind}: {error}"
        newest = restored_step(place, tried, newest)


def save_with_ranks(place: str, pids: Any, said: Any, value: int) -> str:
    """Saves of one of several ranks, which are killed in between."""
    pids[int(os.environ["RANK"])] = os.getpid()
    dist.init_process_group("gloo")
    try:
        with open_quietly(place, keep=2, timeout_seconds=4.0) as store:
            found = store.restore(state_of(0))
            first = 1 if found is None else found.step + 1
            for step in range(first, first + 3):
                handle = store.save_async(step, state_of(value * 1000 + step))
                if handle.result().error is None:
                    said.value = max(said.value, step)
    except (OutlastError, RuntimeError) as error:
        return str(error)
    return ""


def kill_ranks(place: str, faults: Faults, rounds: int) -> None:
    """Kill one of two ranks at a request, start both anew, and so on."""
    pids = multiprocessing.get_context("fork").Array("i", 2)
    said = multiprocessing.get_context("fork").Value("i", 0)
    tried: dict[int, set[int]] = {}
    newest = 0
    for number in range(1, rounds + 1):
        rank = faults.random.randint(0, 1)
        faults.victims = lambda rank=rank: [pids[rank]]
        for step in range(newest + 1, newest + 4):
            tried.setdefault(step, set()).add(number * 1000 + step)
        faults.arm("kill", faults.random.randint(10, 130), 1)
        run_ranks(2, save_with_ranks, place, pids, said, number, may_die=(0, 1))
        faults.disarm()
        newest = restored_step(place, tried, said.value)


def save_in_a_race(place: str, barrier: Any) -> list[str]:
    rank = int(os.environ["RANK"])
    store = open_quietly(place, keep=9)
    barrier.wait(30)
    time.sleep(random.random() / 100)
    said = []
    for step in (1, 2):
        try:
            error = store.save_async(step, state_of(rank + 1)).result().error
        except OutlastError as refused:
            error = str(refused)
        said.append(error or "")
    barrier.wait(30)
    store.close()
    return said


def race(place: str, faults: Faults, rounds: int) -> None:
    """Let two processes save the same steps to the same place at once."""
    for number in range(rounds):
        here = f"{place}/{number}"
        barrier = multiprocessing.get_context("fork").Barrier(2)
        outcomes = run_ranks(2, save_in_a_race, here, barrier)
        faults.staged["race"] += 1
        for step in (1, 2):
            assert sum(said[step - 1] == "" for said in outcomes) <= 1, outcomes
        winners = [value for value, said in enumerate(outcomes, 1) if said[1] == ""]
        assert winners, outcomes
        restored_step(here, {2: {*winners}, 1: {1, 2}}, 2)
