"""Runs with a gradient code and few spares: the closed form of their goodput against simulation.

A code's run waits as soon as more workers are gone than it can do without, so that it depends on
how often several are gone at once: for want of spares, which all widths of failure share.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from harness import Bar

from outlast.plan.cluster import FailureCause
from outlast.plan.goodput import goodput
from outlast.plan.reliability import Reliability, Replicas, Restart, Tier
from outlast.plan.simulate import Scenario, simulate

SEED = 2_207_196_483
"""Of scenarios that had no part in building the model."""
SCENARIOS = 40
LONGEST_REPAIRS = 60.0
"""Length of a run, in repairs: one that begins with everything whole does better at first."""


def coded(quick: bool) -> Iterator[Bar]:
    """Closed form against simulation, in points of ETTR."""
    trials, events = (10, 2000.0) if quick else (40, 8000.0)
    gaps, errors, lowest = [], [], []
    for index in range(SCENARIOS):
        scenario = random_coded(index, trials=trials, events=events)
        simulated = simulate(scenario)
        gaps.append(100.0 * abs(float(goodput(scenario.reliability).ettr[0]) - simulated.ettr))
        errors.append(100.0 * simulated.standard_error)
        lowest.append(100.0 * simulated.ettr)
    figures = (
        ("worst", max(gaps), "points"),
        ("mean", float(np.mean(gaps)), "points"),
        ("worst standard error of the simulation", max(errors), "points"),
        ("lowest ETTR among them", min(lowest), "%"),
    )
    for name, figure, unit in figures:
        what = f"ETTR closed form - simulation, {SCENARIOS} coded runs with few spares: {name}"
        yield Bar(what, round(figure, 4), unit, "reported", True, "own Monte Carlo", "simulated")


def random_coded(index: int, *, trials: int, events: float) -> Scenario:
    """2 to 512 nodes of 1 or 8 workers, 2 to 4 copies, 0 to 4 spares, some with failing pairs."""
    generator = np.random.default_rng([SEED, index])

    def between(low: float, high: float) -> float:
        return float(np.exp(generator.uniform(np.log(low), np.log(high))))

    nodes = round(between(2, 512))
    workers, copies = nodes * int(generator.choice([1, 8])), int(generator.integers(2, 5))
    causes = [
        FailureCause(name="process", per_node_day=between(1e-3, 0.1)),
        FailureCause(name="node", per_node_day=between(1e-3, 0.1), repair_hours=between(1.0, 48.0)),
    ]
    if nodes >= 8 and generator.random() < 0.5:
        pair = between(1e-3, 0.03)
        causes.append(
            FailureCause(name="pair", per_node_day=pair, nodes_hit=2, repair_hours=between(1, 12))
        )
    run = Reliability(
        nodes=nodes,
        causes=tuple(causes),
        interval_seconds=1800.0,
        tiers=(Tier(name="shared", blocked_seconds=5.0, restore_seconds=60.0),),
        restart=Restart(
            restart_seconds=between(60.0, 900.0),
            replace_seconds=between(10.0, 600.0),
            spares=int(generator.integers(0, 5)),
        ),
        replicas=Replicas(
            groups=workers, minimum=max(workers - copies + 1, 1), step_seconds=between(1.0, 30.0)
        ),
    )
    rate = sum(float(cause.per_day(nodes)) for cause in causes)
    repair = max(cause.repair_hours for cause in causes) / 24.0
    days = float(max(events / rate, LONGEST_REPAIRS * repair))
    return Scenario(
        reliability=run, productive_days=days, limit_days=days, trials=trials, seed=index
    )
