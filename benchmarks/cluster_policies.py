"""Policies on generated workloads: turnaround against one long job, regret, coverage, waste.

    python benchmarks/cluster_policies.py [--quick] [--json FILE]

Everybody else's jobs are Lublin and Feitelson's, on 128 nodes; at several moments of each workload
a run of 8 to 72 hours is added, under one policy after the other, to copies of the same
simulation. Save and restart are charged (60 s, 300 s), fillers take what backfill leaves, and their
nodes are freed before the anchor gets them. The seeds here were used for nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from harness import Bar, arguments, publish

from outlast.cluster.cost import LinkOverhead
from outlast.cluster.policies.automatic import (
    AnchorFiller,
    Automatic,
    Planned,
    candidates,
    thriftiest,
)
from outlast.cluster.policies.decision import (
    Decision,
    FixedLinks,
    MalleableJob,
    OneLongJob,
    PowerSpeed,
    Situation,
    Submission,
)
from outlast.cluster.policies.forecast import (
    QUICK,
    Behaviour,
    Correction,
    StartForecast,
    corrected,
    learn_correction,
)
from outlast.cluster.policies.replay import behaviour_now, moments, play, submission_times
from outlast.cluster.simulate import Backfill, Simulation
from outlast.cluster.workload import Workload, lublin

LOADS = (0.6, 0.75, 0.85, 0.95)
SEEDS = (1, 2, 3, 4, 5)
NODES, JOBS, HOUR = 128, 3000, 3600.0
RESTART_SECONDS, SAVE_SECONDS = 300.0, 60.0
LEVELS = ("p10_seconds", "p50_seconds", "p90_seconds")


@dataclass
class Ratios:
    """Turnarounds and node hours over those of one long job, by load."""

    turnaround: dict[float, list[float]] = field(default_factory=dict)
    nodes: list[float] = field(default_factory=list)

    def add(self, load: float, turnaround: float, nodes: float) -> None:
        """One run."""
        self.turnaround.setdefault(load, []).append(turnaround)
        self.nodes.append(nodes)

    @property
    def every(self) -> list[float]:
        """All turnarounds."""
        return [each for one in self.turnaround.values() for each in one]

    @property
    def mean(self) -> float:
        """Of all."""
        return float(np.mean(self.every))

    @property
    def worst_load(self) -> float:
        """The worst mean of a load."""
        return max(float(np.mean(each)) for each in self.turnaround.values())

    @property
    def worst(self) -> float:
        """The worst run."""
        return max(self.every)

    def above(self, limit: float) -> float:
        """Share of runs that are worse."""
        return float(np.mean(np.array(self.every) > limit))


@dataclass(frozen=True)
class Pinned:
    """One job on a number of nodes: what a clairvoyant may choose from."""

    nodes: int
    name: str = "pinned"
    watches: bool = False

    def decide(self, situation: Situation) -> Decision:
        """Submit all that is left, once."""
        if situation.own:
            return Decision(reason="")
        wall = situation.limits.wall_to_finish(situation.job, self.nodes)
        return Decision(reason="", submit=(Submission(nodes=self.nodes, wall_seconds=wall),))


def bars(quick: bool) -> list[Bar]:
    """All bars of the policies."""
    seeds = SEEDS[:1] if quick else SEEDS
    found = [*_rigid_bars(seeds, 3 if quick else 8, "easy")]
    if not quick:
        found += _rigid_bars(seeds, 8, "conservative")
    found += _malleable_bars(seeds, 2 if quick else 6)
    found += _waste_bars(seeds)
    return found


def _cases(
    seeds: tuple[int, ...], count: int, sizes: tuple[int, ...], backfill: Backfill
) -> Iterator[tuple[float, Simulation, MalleableJob, Workload]]:
    """Loads, the queue at a moment, the run to be added, and everybody's workload."""
    for load in LOADS:
        for seed in seeds:
            workload = lublin(JOBS, NODES, load=load, seed=seed)
            source = np.random.default_rng(seed)
            times = submission_times(workload, count, seed)
            for simulation in moments(workload, times, backfill=backfill):
                nodes = int(source.choice(sizes))
                hours = math.exp(source.uniform(math.log(8.0), math.log(72.0)))
                yield load, simulation, _job(nodes, hours), workload


def _job(nodes: int, hours: float) -> MalleableJob:
    return MalleableJob(
        work_seconds=hours * HOUR,
        reference_nodes=nodes,
        sizes=tuple(each for each in (nodes // 4, nodes // 2, nodes, 2 * nodes, 4 * nodes)),
        speed=PowerSpeed(nodes),
        restart_seconds=RESTART_SECONDS,
        save_seconds=SAVE_SECONDS,
    )


def _rigid_bars(seeds: tuple[int, ...], count: int, backfill: Backfill) -> Iterator[Bar]:
    """Anchor and filler, and what chance alone does, against one long job."""
    ours, chance = Ratios(), Ratios()
    for load, simulation, job, _ in _cases(seeds, count, (8, 16, 32, 64), backfill):
        base = play(simulation, OneLongJob(), job)
        run = play(simulation, AnchorFiller(backfill=backfill), job)
        luck = play(_shaken(simulation, job), OneLongJob(), job)
        for ratios, each in ((ours, run), (chance, luck)):
            turnaround = each.turnaround_seconds / base.turnaround_seconds
            ratios.add(load, turnaround, each.node_seconds / base.node_seconds)
    peer = f"one long job, {backfill} backfill, {len(ours.every)} runs"
    hours = f"{peer}; at {float(np.mean(ours.nodes)):.3f} of its node hours"
    luckier = (
        f"{peer}, {ours.above(1.1):.1%} of them above 1.1; one long job while an unrelated user "
        f"submits small jobs, by chance alone: {chance.worst:.2f}, {chance.above(1.1):.1%}"
    )
    name = f"anchor + filler, {backfill}: "
    yield _most(name + "turnaround, mean", ours.mean, 0.95, hours)
    yield _most(name + "mean at the worst load", ours.worst_load, 1.02, peer)
    yield _most(name + "worst single run", ours.worst, 1.10, luckier)


def _shaken(simulation: Simulation, job: MalleableJob) -> Simulation:
    """The same queue, where somebody else submits a job as small as a filler every hour."""
    import copy

    world = copy.deepcopy(simulation)
    source = np.random.default_rng(int(simulation.now))
    for hour in range(40):
        at = simulation.now + HOUR * (hour + float(source.random()))
        world.submit(max(job.reference_nodes // 4, 1), HOUR, HOUR * float(source.random()), at=at)
    return world


@dataclass
class Predictions:
    """Waits that were predicted, corrected by past errors, and what came of them."""

    plain: list[list[bool]] = field(default_factory=list)
    corrected: list[list[bool]] = field(default_factory=list)

    def add(self, forecast: StartForecast, correction: Correction, wait: float) -> None:
        """One start."""
        if forecast.certain:
            return
        mended = corrected(forecast, correction)
        self.plain.append([wait <= getattr(forecast, each) + 1.0 for each in LEVELS])
        self.corrected.append([wait <= getattr(mended, each) + 1.0 for each in LEVELS])


def _malleable_bars(seeds: tuple[int, ...], count: int) -> Iterator[Bar]:
    """Planned shapes against one long job and against a clairvoyant; coverage of predictions."""
    planned, automatic = Ratios(), Ratios()
    regrets: dict[str, list[float]] = {"shape": [], "automatic": []}
    told = Predictions()
    corrections: dict[int, Correction] = {}
    for load, simulation, job, workload in _cases(seeds, count, (8, 16, 32), "easy"):
        knows = behaviour_now(workload, simulation)
        if id(workload) not in corrections:
            corrections = {id(workload): _correction(workload, simulation, knows, job)}
        base = play(simulation, OneLongJob(), job)
        situation = Situation(queue=simulation.snapshot(), job=job)
        outlook = replace(QUICK, behaviour=knows)
        ranking = candidates(situation, outlook, windows=False)
        truth = {}
        for each in ranking:
            run = play(simulation, Pinned(each.nodes), job)
            truth[each.nodes] = run.turnaround_seconds
            wait = run.links[0].started_seconds - run.submitted_seconds
            told.add(each.start, corrections[id(workload)], wait)
        best = min(truth.values())
        regrets["shape"].append(truth[thriftiest(ranking, 0.02).nodes] / best - 1.0)
        alone = play(simulation, Planned(outlook=outlook), job)
        filled = play(simulation, Automatic(outlook=outlook), job)
        regrets["automatic"].append(filled.turnaround_seconds / best - 1.0)
        for ratios, each_run in ((planned, alone), (automatic, filled)):
            turnaround = each_run.turnaround_seconds / base.turnaround_seconds
            ratios.add(load, turnaround, each_run.node_seconds / base.node_seconds)
    peer = f"one long job, {len(planned.every)} runs"
    for name, ratios in (("planned 1/4 to 4x", planned), ("planned and fillers", automatic)):
        yield _most(f"{name}: turnaround, mean", ratios.mean, 0.85, peer)
        yield _most(f"{name}: node hours, mean", float(np.mean(ratios.nodes)), 1.15, peer)
    clairvoyant = "best of five node counts in hindsight"
    yield _most("regret of the planned nodes", float(np.mean(regrets["shape"])), 0.15, clairvoyant)
    yield _most("regret, fillers too", float(np.mean(regrets["automatic"])), 0.15, clairvoyant)
    yield from _coverage(told)


def _correction(
    workload: Workload, simulation: Simulation, knows: Behaviour, job: MalleableJob
) -> Correction:
    """From the jobs that were submitted before this moment."""
    before = int(np.searchsorted(workload.submit_seconds, simulation.now))
    like = (job.reference_nodes, job.wall_to_finish(job.reference_nodes))
    past, starts = workload.chosen(slice(0, before)), simulation.starts()[:before]
    return learn_correction(past, starts, replace(QUICK, behaviour=knows), like=like, count=60)


def _coverage(told: Predictions) -> Iterator[Bar]:
    low, middle, high = np.mean(told.corrected, axis=0)
    plain = np.mean(told.plain, axis=0)
    yield Bar(
        "P90 of the start: coverage",
        round(float(high), 4),
        "share",
        "0.85 to 0.95",
        bool(0.85 <= high <= 0.95),
        f"{len(told.plain)} starts that were uncertain; P10 covers {low:.0%}, P50 {middle:.0%}; "
        f"without correction by past errors {plain[0]:.0%}, {plain[1]:.0%}, {plain[2]:.0%}",
        "simulated",
    )


def _waste_bars(seeds: tuple[int, ...]) -> Iterator[Bar]:
    """Links of 8 h: what a run of 72 h wastes, beside the closed form."""
    restart, save = 120.0, 30.0
    job = replace(_job(16, 72.0), restart_seconds=restart, save_seconds=save)
    shares = []
    for seed in seeds[:2]:
        workload = lublin(JOBS, NODES, load=0.75, seed=seed)
        for simulation in moments(workload, submission_times(workload, 2, seed)):
            run = play(simulation, FixedLinks(8 * HOUR), job)
            shares.append(1.0 - run.useful_node_seconds / run.node_seconds)
    closed = LinkOverhead(restart_seconds=restart, save_seconds=save).waste(8 * HOUR)
    peer = f"restart {restart:g} s, save {save:g} s; closed form {closed:.2%}"
    yield _most("waste of links of 8 h", float(np.mean(shares)), 0.01, peer)


def _most(name: str, figure: float, limit: float, peer: str) -> Bar:
    unit = "share" if "waste" in name or "regret" in name or "share" in name else "ratio"
    return Bar(name, round(figure, 4), unit, f"<= {limit:g}", figure <= limit, peer, "simulated")


if __name__ == "__main__":
    options = arguments(str(__doc__).splitlines()[0])
    publish("cluster policies", bars(options.quick), options.json)
