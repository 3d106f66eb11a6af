"""The event simulator: against the closed form, and where only it can say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from outlast.plan.cluster import FailureCause
from outlast.plan.goodput import goodput
from outlast.plan.reliability import Guard, Pace, Reliability, Replicas, Restart, Tier
from outlast.plan.simulate import Lemons, Scenario, simulate

CRASH = FailureCause(name="crash", per_node_day=0.004, detection_seconds=120.0)
NODE = FailureCause(name="node", per_node_day=0.0025, detection_seconds=60.0, repair_hours=24.0)
RACK = FailureCause(name="rack", per_node_day=0.002, nodes_hit=8, repair_hours=4.0)
SILENT = FailureCause(name="silent", per_node_day=1e-4, silent=True)
TIERS = (
    Tier(name="memory", survives_nodes=0.0, blocked_seconds=1.0, restore_seconds=10.0),
    Tier(name="shared", every=4, blocked_seconds=5.0, write_seconds=60.0, restore_seconds=90.0),
)
BASE = Reliability(
    nodes=1000,
    causes=(CRASH, NODE),
    interval_seconds=900.0,
    tiers=TIERS,
    restart=Restart(restart_seconds=240.0, spares=4),
)


def scenario(run: Reliability, **settings: object) -> Scenario:
    made = Scenario(reliability=run, productive_days=60.0, limit_days=60.0, trials=20)
    return replace(made, **settings)


RUNS = {
    "tiers and spares": BASE,
    "racks": replace(BASE, causes=(CRASH, NODE, RACK)),
    "no spares": replace(BASE, restart=Restart(spares=0)),
    "replica groups": replace(BASE, replicas=Replicas(groups=8, step_seconds=10.0)),
    "guard in place": replace(
        BASE, causes=(CRASH, SILENT), guard=Guard(coverage=0.8, overhead=0.03, noticed=0.5)
    ),
    "guard that rolls back": replace(
        BASE,
        causes=(CRASH, SILENT),
        guard=Guard(coverage=0.8, rolls_back=True, false_alarms_per_day=20.0, alarm_seconds=30.0),
    ),
    "stragglers": replace(BASE, pace=Pace(straggler_factor=1.2, coding_ratio=0.9)),
    "hopeless": replace(BASE, nodes=16_384, interval_seconds=7200.0, tiers=TIERS[1:]),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_closed_form_agrees_within_a_point(name: str) -> None:
    run = RUNS[name]
    if name == "hopeless":
        run = replace(run, tiers=(replace(TIERS[1], every=1),))
    simulated = simulate(scenario(run))
    assert float(goodput(run).ettr[0]) == pytest.approx(simulated.ettr, abs=0.01)
    assert simulated.ettr + sum(simulated.lost_share.values()) == pytest.approx(1.0, abs=1e-9)


def test_each_kind_of_loss_agrees_with_its_term() -> None:
    simulated, terms = simulate(scenario(BASE)), goodput(BASE).terms
    for name in ("checkpoint saves", "lost work", "detection", "waiting for nodes"):
        assert terms[name][0] == pytest.approx(simulated.lost_share[name], abs=0.004), name
    back = terms["restart"][0] + terms["restore"][0]
    assert back == pytest.approx(simulated.lost_share["restart"], abs=0.002)


def test_the_same_seed_plays_the_same_run() -> None:
    first, again = simulate(scenario(BASE)), simulate(scenario(BASE))
    assert first == replace(again, finish_seconds=first.finish_seconds)
    assert (first.finish_seconds == again.finish_seconds).all()
    assert simulate(scenario(BASE, seed=1)).ettr != first.ettr


def test_a_run_without_failures_is_done_when_its_work_is() -> None:
    quiet = replace(BASE, causes=(), tiers=(Tier(name="shared", blocked_seconds=9.0),))
    found = simulate(scenario(quiet, productive_days=1.0, limit_days=10.0))
    assert found.finished == 1.0
    assert found.quantile_seconds(0.9) == pytest.approx(86_400.0 + 96 * 9.0)
    assert found.ettr == pytest.approx(86_400.0 / (86_400.0 + 96 * 9.0))
    assert found.failures == 0.0


def test_a_limit_leaves_runs_unfinished() -> None:
    found = simulate(scenario(BASE, productive_days=60.0, limit_days=30.0))
    assert found.finished == 0.0
    assert found.quantile_seconds(0.5) == np.inf


def test_as_many_failures_as_the_rate_says() -> None:
    found = simulate(scenario(BASE, trials=60))
    exposed = 1.0 - found.lost_share["detection"] - found.lost_share["waiting for nodes"]
    assert found.failures == pytest.approx(1000 * 0.0065 * 60.0 * exposed, rel=0.02)


def test_lemons_and_new_weibull_nodes_lose_more() -> None:
    run = replace(BASE, nodes=600, restart=Restart(restart_seconds=240.0, spares=60))
    plain = simulate(scenario(run)).ettr
    lemons = Lemons(share=0.05, factor=20.0)
    sour = simulate(scenario(run, lemons=lemons)).ettr
    weeded = simulate(scenario(run, lemons=replace(lemons, removed_after=1))).ettr
    assert sour < weeded - 0.01 < plain
    known = replace(
        run,
        causes=tuple(
            replace(c, per_node_day=c.per_node_day * lemons.mean_factor) for c in run.causes
        ),
    )
    assert float(goodput(known).ettr[0]) == pytest.approx(sour, abs=0.01)
    young = tuple(replace(cause, shape=0.7) for cause in run.causes)
    early = simulate(scenario(replace(run, causes=young))).ettr
    assert early < plain - 0.02
    told = replace(run, causes=young, days_from_new=60.0)
    assert float(goodput(told).ettr[0]) == pytest.approx(early, abs=0.02)


def test_each_cause_is_charged_with_its_own_losses() -> None:
    found = simulate(scenario(replace(BASE, causes=(CRASH, replace(NODE, per_node_day=0.0)))))
    assert found.cause_share["node"] == 0.0
    lost = 1.0 - found.ettr - found.lost_share["checkpoint saves"]
    assert found.cause_share["crash"] == pytest.approx(lost, rel=0.02)
