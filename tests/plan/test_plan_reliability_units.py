"""Replica groups that fail together: against the simulator, and laws."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.plan.cluster import FailureCause
from outlast.plan.goodput import finish, goodput
from outlast.plan.reliability import Reliability, Replicas, Restart, Tier
from outlast.plan.simulate import Scenario, simulate

DAY = 86_400.0
NODE = FailureCause(name="node", per_node_day=0.01, repair_hours=12.0)
CRASH = FailureCause(name="crash", per_node_day=0.05)
RACK = FailureCause(name="rack", per_node_day=0.01, nodes_hit=8, repair_hours=4.0)


def run(
    nodes: int, groups: int, minimum: int, *causes: FailureCause, spares: int = 1000
) -> Reliability:
    return Reliability(
        nodes=nodes,
        causes=causes,
        interval_seconds=1800.0,
        tiers=(Tier(name="shared", blocked_seconds=5.0, restore_seconds=60.0),),
        restart=Restart(restart_seconds=300.0, replace_seconds=300.0, spares=spares),
        replicas=Replicas(groups=groups, minimum=minimum, step_seconds=5.0),
    )


def ettr(made: Reliability) -> float:
    return float(goodput(made).ettr[0])


# Several workers of a gradient code on one node, and groups that a rack takes together.
RUNS = {
    "no node may go": run(256, 2048, 2046, replace(NODE, per_node_day=0.03)),
    "one worker may go, but not a node": run(64, 512, 511, replace(CRASH, per_node_day=0.1)),
    "one node may go": run(64, 512, 504, replace(CRASH, per_node_day=0.4)),
    "nodes and racks": run(64, 512, 490, CRASH, replace(RACK, per_node_day=0.1)),
    "racks of groups": run(64, 16, 15, CRASH, replace(RACK, per_node_day=0.3)),
    "no spare": run(64, 512, 504, NODE, spares=0),
    "one spare": run(64, 512, 504, replace(NODE, per_node_day=0.03), spares=1),
    "few spares for nodes and racks": run(64, 512, 504, NODE, RACK, spares=4),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_closed_form_agrees_within_a_point(name: str) -> None:
    made = RUNS[name]
    # About as many failures each.
    rate = made.nodes * sum(cause.per_node_day / cause.nodes_hit for cause in made.causes)
    days = min(200.0 / rate, 120.0)
    scenario = Scenario(reliability=made, productive_days=days, limit_days=days, trials=20, seed=1)
    simulated = simulate(scenario)
    assert simulated.standard_error < 0.005
    assert ettr(made) == pytest.approx(simulated.ettr, abs=0.01)


@pytest.mark.slow
def test_widths_of_failure_share_one_stock_of_spares() -> None:
    node = replace(NODE, per_node_day=0.15, repair_hours=4.0)
    pair = replace(RACK, per_node_day=0.08, nodes_hit=2, repair_hours=1.5)
    made = run(64, 512, 510, node, pair, spares=1)
    scenario = Scenario(reliability=made, productive_days=80.0, limit_days=80.0, trials=30, seed=1)
    simulated = simulate(scenario)
    assert simulated.standard_error < 0.005
    assert ettr(made) == pytest.approx(simulated.ettr, abs=0.012)


def test_many_workers_on_each_node_of_a_large_code() -> None:
    made = run(512, 4096, 4095, replace(NODE, per_node_day=0.0065))
    # One absence at a time stops all: the share without any is that of 512 nodes, not of workers.
    alone = 1.0 / (1.0 + 0.0065 * 600.0 / DAY)
    assert ettr(made) == pytest.approx(ettr(replace(made, causes=())) * alone**512, abs=0.005)


def test_workers_of_one_node_are_as_one_worker() -> None:
    node = replace(NODE, per_node_day=0.1)
    for spares in (0, 2, 1000):
        each = ettr(run(64, 64, 62, node, spares=spares))
        assert ettr(run(64, 512, 496, node, spares=spares)) == pytest.approx(each, rel=1e-9)
        # Seven workers more are no node more.
        assert ettr(run(64, 512, 489, node, spares=spares)) == pytest.approx(each, rel=1e-9)
        assert ettr(run(64, 512, 488, node, spares=spares)) > each


@pytest.mark.slow
@given(
    st.sampled_from([1, 2, 8]),
    st.integers(0, 40),
    st.floats(0.0, 0.1),
    st.floats(0.0, 0.05),
    st.integers(0, 20),
)
@settings(max_examples=40, deadline=None)
def test_laws(workers: int, copies: int, node: float, rack: float, spares: int) -> None:
    groups = 64 * workers
    minimum = max(groups - copies, 1)
    causes = (replace(NODE, per_node_day=node), replace(RACK, per_node_day=rack))
    made = run(64, groups, minimum, *causes, spares=spares)
    found = ettr(made)
    assert 0.0 <= found <= 1.0
    tolerance = 1e-6
    for index in (0, 1):
        worse = list(causes)
        worse[index] = replace(worse[index], per_node_day=worse[index].per_node_day * 1.5)
        assert ettr(replace(made, causes=tuple(worse))) <= found + tolerance
    fewer = replace(made.replicas, minimum=max(minimum - 1, 1))
    assert ettr(replace(made, replicas=fewer)) >= found - tolerance
    richer = replace(made.restart, spares=spares + 1)
    assert ettr(replace(made, restart=richer)) >= found - tolerance


def test_many_candidates_at_once_are_as_one_by_one() -> None:
    groups, minimum = np.array([1.0, 64.0, 512.0, 512.0]), np.array([1.0, 62.0, 500.0, 1.0])
    spares = np.array([4.0, 0.0, 3.0, 30.0])
    made = run(64, 1, 1, NODE, CRASH, RACK)
    many = replace(
        made,
        replicas=replace(made.replicas, groups=groups, minimum=minimum),
        restart=replace(made.restart, spares=spares),
    )
    together = goodput(many).ettr
    for row in range(4):
        sizes = int(groups[row]), int(minimum[row])
        alone = ettr(run(64, *sizes, NODE, CRASH, RACK, spares=int(spares[row])))
        assert together[row] == pytest.approx(alone, rel=1e-9)


def test_the_finishing_time_counts_the_wait_for_enough_groups() -> None:
    made = RUNS["one worker may go, but not a node"]
    simulated = simulate(Scenario(reliability=made, productive_days=5.0, trials=200, seed=2))
    found = finish(goodput(made), 5.0 * DAY)
    for share in (0.1, 0.9):
        wanted = simulated.quantile_seconds(share)
        assert found.quantile_seconds(share)[0] == pytest.approx(wanted, rel=0.01)
