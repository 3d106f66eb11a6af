"""Manners on a shared file system: what taking turns saves, in a fluid and on a throttled disk.

    python benchmarks/cluster_storage.py [--quick] [--json FILE]

The fluid has 40 jobs of 1 to 256 nodes with Young/Daly's periods and a bandwidth with which the
file system is busy for 80 % of the time when nobody coordinates. The disk is a real one: four
processes compute (sleep) and save (write) under one bandwidth limit, that of a blkio cgroup where
one can be made, else that of a process that hands out tokens; the table says which it was.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

from harness import Bar, arguments, publish

from outlast.cluster.copying import TokenBucket
from outlast.cluster.storage import SavingJob, ask, shared_periods, turn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cluster"))

from simulated_saves import simulate_saves

BAR = -0.30
LOAD = 0.80
BUDGET = 0.6
NODE_MTBF_SECONDS = 3 * 365 * 86400.0
DISK_BYTES_PER_S = 40e6
BLOCK_BYTES = 1 << 20
STEP_SECONDS = 0.02


def bars(quick: bool) -> list[Bar]:
    return [*_fluid(quick), *_disk(quick)]


def _cluster(seed: int, count: int, scale: float) -> list[SavingJob]:
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        nodes = 2 ** chance.uniform(0, 8)
        save = scale * nodes * chance.lognormvariate(0.0, 0.7)
        found.append(SavingJob(nodes, save, NODE_MTBF_SECONDS / nodes))
    return found


def _loaded(seed: int, count: int) -> list[SavingJob]:
    """A cluster whose file system is busy for 80 % of the time when nobody coordinates."""
    low, high = 1e-6, 1e6
    for _ in range(40):
        scale = math.sqrt(low * high)
        jobs = _cluster(seed, count, scale)
        periods = [job.best_period_seconds() for job in jobs]
        horizon = 20 * max(periods)
        if simulate_saves(jobs, periods, "uncoordinated", horizon_seconds=horizon).load > LOAD:
            high = scale
        else:
            low = scale
        if high / low < 1.01:
            break
    return jobs


def _fluid(quick: bool) -> Iterator[Bar]:
    found: dict[str, list[float]] = {}
    loads = []
    # None of these seeds was used to choose a rule or the budget.
    for seed in range(100, 102 if quick else 105):
        jobs = _loaded(seed, 40)
        alone = [job.best_period_seconds() for job in jobs]
        budget = shared_periods(jobs, BUDGET).seconds
        horizon = (20 if quick else 60) * max(alone)

        def waste(policy: Any, periods: Any, **more: Any) -> float:
            return simulate_saves(jobs, periods, policy, horizon_seconds=horizon, **more).waste  # noqa: B023

        plain = simulate_saves(jobs, alone, "uncoordinated", horizon_seconds=horizon)
        loads.append(plain.load)
        results = {
            "turns (least-waste), computing until it is one's turn": waste(
                "least-waste", alone, waiting="computing"
            ),
            "turns (set-10), computing until it is one's turn": waste(
                "set-10", alone, waiting="computing"
            ),
            f"turns (least-waste, interrupting), standing still, budget {BUDGET}": waste(
                "least-waste", budget, interrupt=True
            ),
            "turns (least-waste) alone, standing still": waste("least-waste", alone),
            "turns (fcfs) alone, standing still": waste("fcfs", alone),
            f"periods under a budget of {BUDGET} alone": waste("uncoordinated", budget),
        }
        for name, value in results.items():
            found.setdefault(name, []).append(value / plain.waste - 1.0)
    load = f"{min(loads):.0%} to {max(loads):.0%}"
    for name, changes in found.items():
        mean = statistics.fmean(changes)
        words = (
            f"uncoordinated, Young/Daly, 40 jobs, load {load}, {len(changes)} clusters, "
            f"worst {max(changes):+.1%}; saves, waits and work expected to be redone"
        )
        yield Bar(
            f"node-time waste: {name}",
            round(mean, 4),
            "share",
            f"<= {BAR:g}",
            mean <= BAR,
            words,
            "simulated",
        )


@dataclass(frozen=True)
class Writer:
    """One of the four processes."""

    nodes: int
    save_seconds: float
    period_seconds: float

    @property
    def job(self) -> SavingJob:
        """What it is in the fluid."""
        # The mean time between failures for which this period is Young/Daly's.
        mtbf = self.period_seconds**2 / (2 * self.save_seconds)
        return SavingJob(self.nodes, self.save_seconds, mtbf)


WRITERS = (Writer(8, 2.0, 5.6), Writer(4, 1.0, 2.8), Writer(2, 0.5, 1.4), Writer(1, 1.0, 2.8))


@dataclass(frozen=True)
class Disk:
    """How bandwidth is limited: by a cgroup, or by tokens of a process."""

    cgroup: Path | None
    tokens: Any

    @property
    def words(self) -> str:
        """For the table."""
        return "blkio cgroup, O_DIRECT" if self.cgroup else "tokens of a process, real files"


class _Manager(BaseManager):
    pass


_Manager.register("TokenBucket", TokenBucket)


@contextlib.contextmanager
def throttled(directory: Path) -> Iterator[Disk]:
    """A disk of `DISK_BYTES_PER_S` for all who write to `directory`."""
    cgroup = Path(f"/sys/fs/cgroup/blkio/outlast-{os.getpid()}")
    device = directory.stat().st_dev
    try:
        cgroup.mkdir()
        limit = f"{os.major(device)}:{os.minor(device)} {int(DISK_BYTES_PER_S)}"
        (cgroup / "blkio.throttle.write_bps_device").write_text(limit)
        _write(directory / "probe", BLOCK_BYTES, None)
    except OSError:
        with contextlib.suppress(OSError):
            cgroup.rmdir()
        manager = _Manager()
        manager.start()
        yield Disk(None, manager.TokenBucket(DISK_BYTES_PER_S, burst_seconds=0.0))  # type: ignore[attr-defined]
        manager.shutdown()
        return
    try:
        yield Disk(cgroup, None)
    finally:
        cgroup.rmdir()


def _write(path: Path, size: int, tokens: Any) -> None:
    """Write `size` bytes to disk, block by block, without the page cache."""
    flags = os.O_WRONLY | os.O_CREAT
    with mmap.mmap(-1, BLOCK_BYTES) as block:
        descriptor = os.open(path, flags | (0 if tokens else os.O_DIRECT), 0o600)
        try:
            for offset in range(0, size, BLOCK_BYTES):
                if tokens:
                    tokens.take(BLOCK_BYTES)
                os.pwrite(descriptor, block, offset)
        finally:
            os.close(descriptor)


def _work(
    number: int, policy: str, directory: Path, disk: Disk, start: float, end: float, results: Any
) -> None:
    """Compute and save until the end; then tell how long the nodes stood still."""
    if disk.cgroup:
        (disk.cgroup / "cgroup.procs").write_text(str(os.getpid()))
    writer = WRITERS[number]
    size = round(writer.save_seconds * DISK_BYTES_PER_S / BLOCK_BYTES) * BLOCK_BYTES
    chance = random.Random(number)
    turns = directory / "turns"
    time.sleep(max(start - time.monotonic(), 0.0))
    still = redone = 0.0
    saves = 0
    computing = chance.random() * writer.period_seconds
    while time.monotonic() < end:
        begun = time.monotonic()
        time.sleep(min(computing, max(end - begun, 0.0)))
        if time.monotonic() >= end:
            break
        path = directory / f"save-{number}"
        stood = time.monotonic()
        if policy == "uncoordinated":
            _write(path, size, disk.tokens)
        elif policy == "still":
            with turn(turns, size, nodes=writer.nodes, deadline_seconds=60.0) as mine:
                assert mine.granted
                _write(path, size, disk.tokens)
        else:
            request = ask(
                turns,
                size,
                nodes=writer.nodes,
                mtbf_seconds=writer.job.mtbf_seconds,
                unsaved_seconds=stood - begun,
            )
            while not request.ready() and time.monotonic() < end:
                time.sleep(STEP_SECONDS)
            stood = time.monotonic()
            with request:
                if request.granted:
                    _write(path, size, disk.tokens)
        now = min(time.monotonic(), end)
        still += max(now - stood, 0.0)
        redone += (stood - begun) * (0.5 * (stood - begun) + now - stood) / writer.job.mtbf_seconds
        saves += 1
        computing = writer.period_seconds * (1.0 + 0.1 * (chance.random() - 0.5))
    results.put((number, still, redone, saves, saves * size))


def _measured(policy: str, seconds: float) -> tuple[float, float, float, str]:
    """Shares of node-time that stood still and that would be redone; load; the kind of disk."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name, throttled(Path(name)) as disk:
        results = context.Queue()
        start = time.monotonic() + 3.0
        processes = [
            context.Process(
                target=_work,
                args=(n, policy, Path(name), disk, start, start + seconds, results),
            )
            for n in range(len(WRITERS))
        ]
        for each in processes:
            each.start()
        found = [results.get(timeout=seconds + 60.0) for _ in processes]
        for each in processes:
            each.join(30.0)
        words = disk.words
    all_nodes = sum(writer.nodes for writer in WRITERS) * seconds
    still = sum(WRITERS[n].nodes * each for n, each, *_ in found) / all_nodes
    redone = sum(WRITERS[n].nodes * each for n, _, each, *_ in found) / all_nodes
    load = sum(size for *_, size in found) / (DISK_BYTES_PER_S * seconds)
    return still, redone, load, words


def _disk(quick: bool) -> Iterator[Bar]:
    seconds, rounds = (15.0, 1) if quick else (60.0, 3)
    jobs = [writer.job for writer in WRITERS]
    periods = [writer.period_seconds for writer in WRITERS]
    kept: Any = {"horizon_seconds": 50_000.0}
    fluid = {
        "uncoordinated": simulate_saves(jobs, periods, "uncoordinated", **kept),
        "still": simulate_saves(jobs, periods, "least-waste", **kept),
        "computing": simulate_saves(jobs, periods, "least-waste", waiting="computing", **kept),
    }
    taken: dict[str, list[tuple[float, float, float, str]]] = {name: [] for name in fluid}
    for _ in range(rounds):
        for name, found in taken.items():
            found.append(_measured(name, seconds))
    still, waste, load = (
        {name: statistics.median(pick(each) for each in found) for name, found in taken.items()}
        for pick in (lambda e: e[0], lambda e: e[0] + e[1], lambda e: e[2])
    )
    words = f"4 uncoordinated writers, {taken['still'][0][3]}, load {load['uncoordinated']:.0%}"
    base = fluid["uncoordinated"]
    # What no order could better: nobody waits, and every save has the whole bandwidth.
    alone = sum(
        job.nodes * simulate_saves([job], [period], "fcfs", **kept).waste
        for job, period in zip(jobs, periods, strict=True)
    ) / sum(job.nodes for job in jobs)
    own = alone / base.waste - 1.0
    for name, label in (
        ("computing", "turns (least-waste), computing until it is one's turn"),
        ("still", "turns (least-waste), standing still"),
    ):
        change = still[name] / still["uncoordinated"] - 1.0
        expected = fluid[name].blocked / base.blocked - 1.0
        yield Bar(
            f"4 writers, node-time that stands still: {label}",
            round(change, 4),
            "share",
            f"<= {BAR:g}",
            change <= BAR,
            f"{words}; the fluid says {expected:+.1%}",
        )
        if name == "computing":
            total = waste[name] / waste["uncoordinated"] - 1.0
            ideal = fluid[name].waste / base.waste - 1.0
            yield Bar(
                f"4 writers, with work expected to be redone: {label}",
                round(total, 4),
                "share",
                f"<= {BAR:g}",
                total <= BAR,
                f"{words}; the fluid says {ideal:+.1%}, and {own:+.1%} with a disk for each",
            )
    apart = max(abs(still[name] - fluid[name].blocked) for name in fluid)
    yield Bar(
        "4 writers: the fluid's share of node-time that stands still is off by at most",
        round(apart, 4),
        "share",
        "<= 0.05",
        apart <= 0.05,
        f"measured, {taken['still'][0][3]}; "
        + ", ".join(f"{name} {still[name]:.3f} for {fluid[name].blocked:.3f}" for name in fluid),
    )


if __name__ == "__main__":
    options = arguments(str(__doc__).splitlines()[0])
    publish("cluster_storage", bars(options.quick), options.json)
