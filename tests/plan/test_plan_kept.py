"""Recovery without a checkpoint in predictions: states in nodes' memory, parity, live groups."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_runs import H100, LLAMA_8B, MIXTURE, TINY, configuration
from plan_spaces import candidates_of

from outlast.cli.plan import scenario_of
from outlast.errors import PlanError
from outlast.job import load_job
from outlast.plan.api import Training, context_of, predict, search, training_of
from outlast.plan.batch import cases
from outlast.plan.cluster import Cluster, FailureCause, Storage
from outlast.plan.configuration import Configuration, Mechanisms, Recovery, Settings
from outlast.plan.estimate import Interval
from outlast.plan.fault_tolerance import in_memory_checkpoints
from outlast.plan.goodput import goodput
from outlast.plan.mechanisms import with_mechanisms
from outlast.plan.model import judge
from outlast.plan.prediction import Estimate
from outlast.plan.reliability import Reliability
from outlast.plan.simulate import Scenario, simulate
from outlast.plan.space import Block
from outlast.recover.cost import RECONNECT_SECONDS, SILENCE_SHARE, lost_seconds

SOFTWARE = FailureCause(name="software", per_node_day=0.05)
LOST = FailureCause(name="node", per_node_day=0.05, repair_hours=12.0)
RACK = FailureCause(name="rack", per_node_day=0.02, nodes_hit=4, repair_hours=6.0)
SITE = replace(
    H100,
    storage=Storage(shared_bytes_per_s=8e9, peer_bytes_per_s=4e10),
    failures=(SOFTWARE, LOST, RACK),
    spares=4,
)
SHARDED = configuration(data=64, batch=1024, sharding="parameters", recompute="full")
WHOLE = configuration(data=64, batch=1024)


def training(recovery: str, run: Configuration = SHARDED, **more: object) -> Training:
    chosen = Settings(recovery=replace(Recovery.of(recovery), **more))  # type: ignore[arg-type]
    model = LLAMA_8B if run is SHARDED else TINY
    return Training(model=model, run=run, tokens=1e11, framework="any", settings=chosen)


def share(estimate: Estimate) -> float:
    return estimate.ettr.figure.middle


def lost_to(name: str, estimate: Estimate) -> float:
    return -next(each.value for each in estimate.ettr.terms if each.name == f"lost to {name}")


def life(recovery: str, run: Configuration = SHARDED, cluster: Cluster = SITE) -> Reliability:
    asked = training(recovery, run)
    return scenario_of(context_of(asked, cluster), run, asked.settings).reliability


def outlived(run: Configuration, recovery: str = "restart", model=LLAMA_8B) -> float:
    """Nodes that may be lost together."""
    asked = replace(training(recovery, run), model=model)
    context = context_of(asked, SITE)
    numbers = cases([(model, run, SITE)])
    one = np.zeros(1, dtype=np.intp)
    block = Block(numbers, (asked.settings,), one, one)
    step = with_mechanisms(context, block, context.step.parts(numbers, context.whose))
    nodes, state = np.full(1, run.devices / 8.0), 12.0 * step.parameters
    kept = in_memory_checkpoints(SITE, block, step, nodes=nodes, state=state, memory_rate=4e10)
    assert kept is not None
    return float(kept.outlives[0])


def test_without_recovery_nothing_changes_beside_candidates_with_it() -> None:
    def figures(mechanisms: Mechanisms) -> list[tuple[Settings, float, float]]:
        context = context_of(training("off"), SITE)
        numbers = cases([(LLAMA_8B, SHARDED, SITE)])
        chosen = mechanisms.settings()
        rows = np.zeros(len(chosen), dtype=np.intp)
        judged = judge(context, Block(numbers, chosen, rows, np.arange(len(chosen))))
        ettr, ends = judged.survival.goodput.ettr, judged.finish.expected_seconds
        return list(zip(chosen, ettr.tolist(), ends.tolist(), strict=True))

    tiers = (("shared",), ("memory", "peer", "shared"))
    alone = figures(Mechanisms(tiers=tiers))
    ways = tuple(map(Recovery.of, ("off", "restart", "restart:2", "live")))
    together = figures(Mechanisms(tiers=tiers, recovery=ways))
    assert [each for each in together if each[0].recovery.mode == "off"] == alone


def test_memory_loses_half_a_step_in_place_of_half_an_interval() -> None:
    only = replace(SITE, failures=(SOFTWARE,))
    before, after = predict(training("off"), only), predict(training("restart"), only)
    assert share(after) > share(before)
    run = life("restart", cluster=only)
    step = float(np.ravel(run.interval_seconds)[0])
    assert step == pytest.approx(after.step_seconds.figure.middle)
    rate = 8 * SOFTWARE.per_node_day / 86_400.0
    # The newest state counts only when it has been copied.
    expected = rate * (lost_seconds(step) + float(run.tiers[0].write_seconds[0]))  # type: ignore[index]
    assert lost_to("lost work", after) == pytest.approx(expected, rel=0.02)
    assert lost_to("lost work", before) > 20 * expected


@pytest.mark.slow
@given(
    crashes=st.floats(1e-4, 0.5),
    nodes=st.floats(1e-4, 0.5),
    racks=st.floats(0.0, 0.1),
    hit=st.sampled_from([2, 4]),
)
@settings(max_examples=15, deadline=None)
def test_parity_never_lowers_the_share_of_progress_where_a_step_hides_it(
    crashes: float, nodes: float, racks: float, hit: int
) -> None:
    causes = (
        replace(SOFTWARE, per_node_day=crashes),
        replace(LOST, per_node_day=nodes),
        replace(RACK, per_node_day=racks, nodes_hit=hit),
    )
    site = replace(SITE, failures=causes)
    found = [predict(training(each), site) for each in ("off", *(f"restart:{n}" for n in range(3)))]
    assert all(lost_to("keeping in memory", each) == 0.0 for each in found)
    for before, after in pairwise(found):
        # P+Q takes longer until it is there, and intervals are the best to first order only.
        assert share(after) >= share(before) - 1e-4


@pytest.mark.parametrize(
    ("run", "nodes"),
    [
        (SHARDED, 1.0),
        (replace(SHARDED, sharding_ranks=8), 7.0),
        (replace(SHARDED, sharding_ranks=16), 3.0),
        (replace(SHARDED, data=8, tensor=8), 1.0),
        (replace(SHARDED, sharding="none", data=8, tensor=8), 7.0),
        (replace(SHARDED, sharding="none", data=16, tensor=4), 7.0),
        (replace(SHARDED, sharding="none", data=8, pipeline=8), 1.0),
        (replace(SHARDED, sharding="none", data=16, pipeline=4), 1.0),
        (replace(SHARDED, data=8), 0.0),
        (replace(SHARDED, sharding="none", data=8), 0.0),
    ],
)
def test_lost_nodes_that_replicas_or_parity_outlive(run: Configuration, nodes: float) -> None:
    assert outlived(run) == nodes


def test_experts_on_ranks_of_their_own_have_fewer_replicas() -> None:
    run = replace(SHARDED, sharding="none")
    assert outlived(run, model=MIXTURE) == 7.0
    assert outlived(replace(run, expert=8), model=MIXTURE) == 7.0
    assert outlived(replace(run, expert=64), "restart:0", model=MIXTURE) == 0.0


@pytest.mark.parametrize(
    ("recovery", "run"),
    [
        ("restart:0", SHARDED),
        ("restart", SHARDED),
        ("restart:2", SHARDED),
        ("restart", WHOLE),
        ("live", WHOLE),
    ],
)
def test_the_closed_form_is_that_of_the_simulated_run(recovery: str, run: Configuration) -> None:
    # A slow bus, so that what keeping costs counts.
    storage = replace(SITE.storage, memory_bytes_per_s=3e9)
    played = life(recovery, run, replace(SITE, storage=storage))
    found, terms = goodput(played), goodput(played).terms
    once = simulate(Scenario(reliability=played, productive_days=20.0, trials=60, seed=3))
    assert float(found.ettr[0]) == pytest.approx(once.ettr, abs=0.01)
    assert once.ettr + sum(once.lost_share.values()) == pytest.approx(1.0, abs=1e-9)
    for name in ("checkpoint saves", "keeping in memory", "lost work"):
        assert float(terms[name][0]) == pytest.approx(once.lost_share[name], abs=0.002), name


def test_what_a_step_does_not_hide_is_a_term_of_its_own() -> None:
    slow = replace(SITE, storage=replace(SITE.storage, memory_bytes_per_s=5e8))
    often = predict(training("restart"), slow)
    seldom = predict(training("restart", every_steps=10), slow)
    assert lost_to("keeping in memory", often) > 3 * lost_to("keeping in memory", seldom) > 0.0
    assert lost_to("lost work", seldom) > lost_to("lost work", often)
    assert share(seldom) > share(often)
    term = next(each for each in often.ettr.terms if each.name == "lost to keeping in memory")
    assert term.source == "outlast.recover.cost"
    # Steps are as long as ever: what is calibrated does not change.
    assert often.step_seconds.figure == predict(training("off"), slow).step_seconds.figure


def test_files_are_still_written_where_memory_outlives_all_that_is_listed() -> None:
    only = replace(SITE, failures=(SOFTWARE, LOST))
    found = predict(training("restart"), only)
    assert 3600.0 <= found.checkpoint_seconds < 3700.0
    given = replace(training("restart").settings, checkpoint_seconds=900.0)
    asked = predict(replace(training("restart"), settings=given), only)
    step = asked.step_seconds.figure.middle
    assert 900.0 <= asked.checkpoint_seconds < 900.0 + step


def test_live_groups_lose_no_work_and_are_noticed_by_their_silence() -> None:
    off, live = (predict(training(each, WHOLE), SITE) for each in ("off", "live"))
    assert share(live) > share(off)
    assert lost_to("degraded running", live) > 0.0
    assert lost_to("lost work", live) < 1e-3 * lost_to("lost work", off)
    run = life("live", WHOLE)
    assert run.replicas.groups == pytest.approx(64.0)
    assert run.replicas.detection_seconds == pytest.approx(SILENCE_SHARE)
    assert run.replicas.regroup_seconds == pytest.approx(RECONNECT_SECONDS)
    slower = predict(training("live", WHOLE, heartbeat_seconds=30.0), SITE)
    assert lost_to("regrouping", slower) > lost_to("regrouping", live)


@pytest.mark.parametrize(
    ("recovery", "run", "sentence"),
    [
        ("live", SHARDED, "recovery = live goes with whole replicas"),
        ("restart:1", replace(SHARDED, data=8), "parity = 1 needs groups of at least 2 nodes"),
        ("restart:2", replace(SHARDED, data=16), "parity = 2 needs groups of at least 3 nodes"),
    ],
)
def test_what_does_not_go_with_a_layout_is_said(
    recovery: str, run: Configuration, sentence: str
) -> None:
    found = predict(replace(training(recovery, run), model=LLAMA_8B), SITE)
    assert not found.fits
    assert sentence in found.unfit


def test_live_groups_do_not_go_with_a_gradient_code() -> None:
    both = replace(training("live", WHOLE).settings, coding_copies=2)
    found = predict(replace(training("live", WHOLE), settings=both), SITE)
    assert not found.fits
    assert "recovery = live does not go with coding_copies = 2" in found.unfit


def test_a_search_leaves_out_what_is_not_possible() -> None:
    ways = (Recovery(), Recovery(mode="live"))
    found = search(training("off"), SITE, mechanisms=Mechanisms(recovery=ways))
    for each in candidates_of(found):
        if each.settings.recovery.mode == "live":
            assert each.configuration.sharding == "none"


@pytest.mark.parametrize("text", ["often", "restart:3", "live:1", "restart:one", ""])
def test_words_that_name_no_way_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="recovery"):
        Recovery.of(text)


@pytest.mark.parametrize(
    "wrong", [{"every_steps": 0}, {"parity_group": 1}, {"heartbeat_seconds": 0.0}, {"parity": 3}]
)
def test_numbers_that_are_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(PlanError, match=next(iter(wrong))):
        Recovery(mode="restart", **wrong)  # type: ignore[arg-type]


def recovery_of(*changes: str, devices: int = 4) -> tuple[Recovery, tuple[str, ...]]:
    job = load_job(None, list(changes))
    found = training_of(job, devices)
    return found.settings.recovery, found.unmapped


def test_the_settings_of_a_job_reach_the_plan() -> None:
    assert recovery_of() == (Recovery(mode="restart"), ())
    assert recovery_of("recover.mode=off")[0] == Recovery()
    assert recovery_of(devices=1)[0] == Recovery()
    chosen = ("recover.every_steps=5", "recover.parity=2", "recover.parity_group=4")
    assert recovery_of(*chosen)[0] == Recovery(
        mode="restart", every_steps=5, parity=2, parity_group=4
    )
    live = ("recover.mode=live", "recover.heartbeat_seconds=3")
    assert recovery_of(*live)[0] == Recovery(mode="live", heartbeat_seconds=3.0)
    groups = recovery_of("recover.mode=live", "recover.groups=3")
    assert any("recover.groups = 3" in each for each in groups[1])
    fixed = recovery_of("recover.mode=live", "recover.fixed_order=true")
    assert any("recover.fixed_order" in each for each in fixed[1])
    process = recovery_of("recover.domain=process")
    assert process[0].parity == 0
    assert any('recover.domain = "process"' in each for each in process[1])
    fast = recovery_of("checkpoint.fast=/dev/shm/fast")
    assert any("checkpoint.fast" in each and "unused" in each for each in fast[1])


def test_a_default_job_is_predicted_with_its_memory() -> None:
    job = load_job(None, ["parallel.shard=16"])
    site = replace(SITE, nodes=2)
    found = predict(job, site)
    without = predict(load_job(None, ["parallel.shard=16", "recover.mode=off"]), site)
    assert isinstance(found.ettr.figure, Interval)
    assert lost_to("lost work", found) < lost_to("lost work", without)
