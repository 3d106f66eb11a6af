"""Small workloads on a real Slurm and in the simulator."""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from local_slurm import LocalSlurm

from outlast.cluster.scheduler import Settings
from outlast.cluster.simulate import Simulation

INTERVAL_SECONDS = 5.0
NODES = 6
"""Of each Slurm."""


@dataclass(frozen=True)
class Request:
    """A job: when it is submitted after the workload's begin, nodes, limit, seconds of sleep."""

    at: float
    nodes: int
    limit_minutes: int
    run_seconds: int


@dataclass(frozen=True)
class Ran:
    """What Slurm did with a job, on the machine's clock."""

    submitted: float
    start: float
    end: float


def small_workload(seed: int, jobs: int = 8, longest: int = 22) -> list[Request]:
    """Jobs of seconds that fill the nodes and leave backfill windows."""
    source = np.random.default_rng(seed)
    at = np.sort(source.uniform(0.0, 14.0, jobs))
    return [
        Request(
            float(moment),
            int(source.integers(1, NODES + 1)),
            int(source.integers(1, 4)),
            int(source.integers(6, longest)),
        )
        for moment in at
    ]


def telling_workloads(
    count: int, first_seed: int = 0, jobs: int = 8, longest: int = 22
) -> list[list[Request]]:
    """Workloads in which backfill matters and fractions of a second do not.

    Where two ends fall together with a backfill pass, a real machine's delays of some tenths of a
    second decide which job starts, and all later starts with it. So only workloads are taken whose
    simulated starts stay within 2.5 intervals for every phase of the passes and every hand-over of
    nodes that the machine may have, and of these only such whose starts would differ by two
    intervals without backfill. Nothing that a real Slurm did takes part in the choice.
    """
    found: list[list[Request]] = []
    seed = first_seed
    while len(found) < count:
        requests = small_workload(seed, jobs, longest)
        seed += 1
        begun = [Ran(each.at, 0.0, float(each.run_seconds)) for each in requests]
        in_order = simulated_starts(requests, begun, 0.7, 0.0, backfill_jobs=1)
        starts = np.array(simulated_starts(requests, begun, 0.7, 0.0))
        if np.abs(starts - in_order).max() < 2 * INTERVAL_SECONDS:
            continue
        every = [
            simulated_starts(requests, begun, handover, phase)
            for handover in (0.2, 0.7, 1.2, 1.7)
            for phase in np.arange(0.0, INTERVAL_SECONDS, 0.5)
        ]
        if np.ptp(every, axis=0).max() <= 2.5 * INTERVAL_SECONDS:
            found.append(requests)
    return found


@contextlib.contextmanager
def clusters(count: int) -> Iterator[list[LocalSlurm]]:
    """So many private Slurms of `NODES` nodes, with the scheduler's interval.

    One each, not partitions of one: in Slurm 22.05 the jobs of other partitions blur the plan of
    this one (the will-run test of select/cons_tres looks at the next job of any partition when it
    ends a batch).
    """
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            # A socket's name may have 107 characters, fewer than pytest's folders need.
            root = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
            slurm = stack.enter_context(LocalSlurm(root, nodes=NODES))
            text = re.sub(
                "SchedulerParameters=.*",
                f"SchedulerParameters=bf_interval={INTERVAL_SECONDS:.0f},bf_resolution=1,"
                "bf_continue,sched_min_interval=100000,batch_sched_delay=1",
                slurm.conf.read_text(),
            )
            slurm.conf.write_text(text + "DebugFlags=Backfill\n")
            slurm.run("scontrol", "reconfigure")
            found.append(slurm)
        time.sleep(2.0)
        yield found


def run_on(slurm: LocalSlurm, requests: list[Request]) -> list[Ran]:
    """Run a workload and wait for its end."""
    script = slurm.root / "sleep.sh"
    script.write_text("#!/bin/sh\nexec sleep $1\n")
    numbers, submitted = [], []
    begin = time.time() + 0.5
    for request in requests:
        time.sleep(max(0.0, begin + request.at - time.time()))
        output = slurm.run(
            "sbatch", "--parsable", f"-N{request.nodes}", f"-t{request.limit_minutes}",
            "-o/dev/null", str(script), str(request.run_seconds),
        )  # fmt: skip
        submitted.append(time.time())
        numbers.append(output.split(";")[0].strip())
    deadline = time.monotonic() + 60 + 3 * sum(each.run_seconds + 5 for each in requests)
    while slurm.run("squeue", "-h", "-t", "PD,R,CG", "-o", "%A").strip():
        assert time.monotonic() < deadline, slurm.run("squeue")
        time.sleep(1.0)
    shown = [slurm.run("scontrol", "show", "job", number) for number in numbers]
    return [
        Ran(at, _time(text, "Start"), _time(text, "End"))
        for at, text in zip(submitted, shown, strict=True)
    ]


def differences(slurm: LocalSlurm, requests: list[Request], handover: float) -> list[float]:
    """Seconds by which each job started later on a Slurm than in the simulator."""
    ran = run_on(slurm, requests)
    simulated = simulated_starts(requests, ran, handover, backfill_phase(slurm))
    return [real.start - start for real, start in zip(ran, simulated, strict=True)]


def _time(shown: str, name: str) -> float:
    match = re.search(rf"\b{name}Time=(\S+)", shown)
    assert match, shown
    return time.mktime(time.strptime(match.group(1), "%Y-%m-%dT%H:%M:%S"))


def simulated_starts(
    requests: list[Request],
    ran: list[Ran],
    handover_seconds: float,
    phase: float,
    backfill_jobs: int = 1000,
) -> list[float]:
    """The same jobs in the simulator, each running as long as it really did."""
    scheduler = Settings(
        backfill_interval_seconds=INTERVAL_SECONDS,
        backfill_phase_seconds=phase,
        backfill_jobs=backfill_jobs,
        backfill_resolution_seconds=1.0,
        end_window_seconds=30.0,
        named_nodes=True,
        completing_seconds=handover_seconds,
    )
    begin = min(each.submitted for each in ran)
    simulation = Simulation(NODES, backfill="conservative", scheduler=scheduler, now=begin)
    for request, real in zip(requests, ran, strict=True):
        simulation.submit(
            request.nodes, request.limit_minutes * 60.0, real.end - real.start, at=real.submitted
        )
    simulation.run()
    return [simulation.start_of(job) for job in range(len(requests))]


def handover_seconds(slurm: LocalSlurm) -> float:
    """Mean time from a job's end to the start of the next, which waits for its nodes."""
    ran = run_on(slurm, [Request(0.2 * index, NODES, 1, 3) for index in range(5)])
    return float(np.mean([after.start - before.end for before, after in pairwise(ran)]))


def backfill_phase(slurm: LocalSlurm) -> float:
    """A moment at which the controller's last backfill pass began, from its log."""
    log = (slurm.root / "log" / "slurmctld.log").read_text()
    begun = re.findall(r"\[(\S+)\.(\d+)\] sched/backfill: _attempt_backfill: beginning", log)
    second, fraction = begun[-1]
    return time.mktime(time.strptime(second, "%Y-%m-%dT%H:%M:%S")) + float(f"0.{fraction}")
