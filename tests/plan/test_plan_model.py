"""The whole model: laws that tie time, memory, energy, failures and loss together."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_runs import H100, LLAMA_8B, MIXTURE, configuration
from plan_spaces import candidates_of

from outlast.energy.model import DeviceConstants
from outlast.errors import PlanError
from outlast.hardware import Unavailable
from outlast.plan.api import Training, predict, search
from outlast.plan.cluster import FailureCause, Power, Prices, Storage
from outlast.plan.configuration import Mechanisms, Settings

POWER = Power(limit_watts=700, blocked_watts=150, idle_watts=70, node_watts=2000, pue=1.2)
CRASH = FailureCause(name="crash", per_node_day=0.0065, repair_hours=12.0)
SITE = replace(
    H100,
    power=POWER,
    prices=Prices(per_device_hour=2.5, grams_per_kwh=300.0),
    storage=Storage(shared_bytes_per_s=8e9, memory_bytes_per_s=4e10),
    failures=(CRASH,),
    spares=1,
)
RUN = configuration(data=64, batch=256, sharding="parameters", recompute="full")
TRAINING = Training(model=LLAMA_8B, run=RUN, tokens=1e11)


@pytest.fixture(scope="module")
def estimate():
    return predict(TRAINING, SITE)


def test_every_figure_is_there_and_finite(estimate):
    assert estimate.fits
    assert not estimate.cliff
    figures = (
        estimate.step_seconds.figure,
        estimate.tokens_per_s,
        estimate.utilisation,
        estimate.memory.figure,
        estimate.joules.figure,
        estimate.run_joules,
        estimate.ettr.figure,
        estimate.finish_seconds,
        estimate.money,
        estimate.carbon_grams,
    )
    for figure in figures:
        assert 0.0 < figure.low <= figure.middle <= figure.high < math.inf
    assert estimate.loss_difference.figure.middle == 0.0
    assert estimate.steps == math.ceil(1e11 / RUN.tokens)


def test_terms_name_formula_and_source(estimate):
    for total in (
        estimate.step_seconds,
        estimate.memory,
        estimate.joules,
        estimate.ettr,
        estimate.loss_difference,
    ):
        assert total.terms
        for term in total.terms:
            assert term.formula
            assert term.source
            assert math.isfinite(term.value)
        whole = math.fsum(term.value for term in total.terms)
        assert whole == pytest.approx(total.figure.middle, rel=1e-9, abs=1e-12)
    used = {name for term in estimate.step_seconds.terms for name in term.constants}
    assert {"matmul_efficiency", "fabric_efficiency", "kernel_seconds"} <= used


def test_what_was_not_calibrated_is_said(estimate):
    assert any("was calibrated" in each for each in estimate.step_seconds.figure.extrapolated)


@pytest.mark.slow
@given(factor=st.floats(1.1, 50.0))
@settings(max_examples=10, deadline=None)
def test_more_failures_never_raise_the_share_of_progress(factor):
    worse = replace(SITE, failures=(replace(CRASH, per_node_day=CRASH.per_node_day * factor),))
    before, after = predict(TRAINING, SITE), predict(TRAINING, worse)
    assert after.ettr.figure.middle <= before.ettr.figure.middle
    assert after.finish_seconds.middle >= before.finish_seconds.middle


def test_energy_is_at_least_idle_power_over_the_time(estimate):
    devices_and_nodes = 64 * POWER.idle_watts + 8 * POWER.node_watts
    least = devices_and_nodes * POWER.pue
    assert estimate.joules.figure.middle >= least * estimate.step_seconds.figure.middle
    assert estimate.run_joules.middle >= least * estimate.finish_seconds.middle * 0.999


def test_unknown_power_and_prices_are_said_and_not_zero():
    bare = predict(TRAINING, replace(SITE, power=None, prices=Prices()))
    for figure in (bare.joules, bare.run_joules, bare.money, bare.carbon_grams):
        assert isinstance(figure, Unavailable)


def test_rent_follows_the_wall_time(estimate):
    hours = estimate.finish_seconds.middle / 3600.0
    assert estimate.money.middle == pytest.approx(64 * hours * 2.5, rel=1e-6)


def test_a_guard_costs_time_and_finds_silent_errors():
    silent = replace(
        SITE, failures=(CRASH, FailureCause(name="wrong sums", per_node_day=0.02, silent=True))
    )
    plain = predict(TRAINING, silent)
    guarded = predict(replace(TRAINING, settings=Settings(guard="full")), silent)
    assert "guard" in {term.name for term in guarded.step_seconds.terms}
    assert guarded.step_seconds.figure.middle > plain.step_seconds.figure.middle
    lost = {
        who: {term.name: -term.value for term in each.ettr.terms}
        for who, each in (("plain", plain), ("guarded", guarded))
    }
    assert lost["guarded"]["lost to silent errors"] < 0.1 * lost["plain"]["lost to silent errors"]


def test_structured_layers_are_faster_and_worse():
    structured = Settings(tensorize_form="low_rank", tensorize_rank=0.25)
    plain, other = predict(TRAINING, SITE), predict(replace(TRAINING, settings=structured), SITE)
    assert other.step_seconds.figure.middle < plain.step_seconds.figure.middle
    assert other.loss_difference.figure.middle > 0.0


def test_a_code_does_without_lost_workers_but_not_with_sharded_states():
    alone = replace(SITE, nodes=8, devices_per_node=1, fast_domain=1)
    whole = replace(RUN, sharding="none", data=8, batch=64)
    coded = replace(TRAINING, run=whole, settings=Settings(coding_copies=2))
    assert not predict(replace(coded, run=replace(whole, sharding="parameters")), alone).fits
    lost = [
        -{term.name: term.value for term in predict(each, alone).ettr.terms}["lost to restart"]
        for each in (replace(coded, settings=Settings()), coded)
    ]
    assert lost[1] < 0.1 * lost[0]


def test_clocks_of_an_unknown_device_are_refused():
    slow = replace(TRAINING, settings=Settings(clock_mhz=1000.0))
    with pytest.raises(PlanError, match="clock_mhz = 1000"):
        predict(slow, SITE)


def test_a_tier_that_the_cluster_lacks_is_not_possible():
    assert not predict(replace(TRAINING, settings=Settings(tiers=("peer", "shared"))), SITE).fits


def test_a_second_tier_never_makes_it_worse_by_much():
    fast = predict(replace(TRAINING, settings=Settings(tiers=("memory", "shared"))), SITE)
    slow = predict(TRAINING, SITE)
    assert fast.ettr.figure.middle >= slow.ettr.figure.middle - 1e-3


def test_illegal_runs_are_refused_in_a_sentence():
    with pytest.raises(PlanError, match="tensor = 16"):
        predict(replace(TRAINING, run=replace(RUN, tensor=16, data=4)), SITE)


@pytest.mark.parametrize("nodes", [1, 12_500])
def test_one_device_and_a_hundred_thousand_are_predicted_and_flagged(nodes):
    devices = 1 if nodes == 1 else nodes * 8
    per_node = 1 if nodes == 1 else 8
    site = replace(SITE, nodes=nodes, devices_per_node=per_node, fast_domain=per_node)
    run = configuration(
        data=devices, batch=devices, sharding="parameters", recompute="full", sequence=4096
    )
    estimate = predict(replace(TRAINING, run=run), site)
    assert 0.0 < estimate.ettr.figure.middle <= 1.0
    assert math.isfinite(estimate.finish_seconds.high)
    if nodes > 1:
        assert any("devices" in each for each in estimate.step_seconds.figure.extrapolated)


def test_a_search_agrees_with_predictions_and_recommends_nothing_that_does_not_fit():
    mechanisms = Mechanisms(guard=("off", "light"), tiers=(("shared",), ("memory", "shared")))
    front = search(TRAINING, SITE, mechanisms=mechanisms)
    assert front.searched > 500
    assert front.objectives.allowed.all()
    for row, candidate in enumerate(candidates_of(front)):
        alone = predict(
            replace(TRAINING, run=candidate.configuration, settings=candidate.settings), SITE
        )
        assert alone.fits
        assert not alone.cliff
        hours = alone.finish_seconds.middle / 3600.0
        assert float(front.objectives.hours[row]) == pytest.approx(hours, rel=1e-9)
        kwh = alone.run_joules.middle / 3.6e6
        assert float(front.objectives.kwh[row]) == pytest.approx(kwh, rel=1e-9)


def test_budgets_bind():
    free = search(TRAINING, SITE)
    least = float(free.objectives.hours.min())
    assert (search(TRAINING, SITE, f"{2 * least} h").objectives.hours <= 2 * least).all()
    with pytest.raises(PlanError, match="h"):
        search(TRAINING, SITE, f"{least / 2} h")


def test_a_mixture_of_experts_is_searched_too():
    mixture = Training(model=MIXTURE, run=configuration(data=64, batch=256), tokens=1e11)
    front = search(mixture, SITE)
    assert len(front.objectives) >= 1


def test_repeated_tokens_cost_quality():
    repeated = predict(replace(TRAINING, unique_tokens=1e9, tokens=1e12), SITE)
    terms = {term.name: term for term in repeated.loss_difference.terms}
    assert repeated.loss_difference.figure.middle > 0.0
    assert terms["repeated tokens"].value > 0.0
    assert terms["repeated tokens"].value > 2.0 * abs(terms["batch"].value)


def test_a_batch_above_the_critical_one_costs_quality():
    large = replace(TRAINING, run=replace(RUN, batch=256 * 64))
    terms = {term.name: term.value for term in predict(large, SITE).loss_difference.terms}
    assert terms["batch"] > 0.0
    small = replace(TRAINING, run=replace(RUN, batch=64))
    assert predict(small, SITE).loss_difference.figure.middle == 0.0


def test_a_code_that_leaves_chunks_out_costs_quality_and_an_exact_one_does_not():
    alone = replace(
        SITE,
        nodes=8,
        devices_per_node=1,
        fast_domain=1,
        failures=(replace(CRASH, per_node_day=100.0),),
    )
    run = replace(RUN, sharding="none", data=8, batch=64)
    exact = replace(TRAINING, run=run, settings=Settings(coding_copies=2))
    losing = replace(exact, commits_without=True)
    difference = [predict(each, alone).loss_difference.figure.middle for each in (exact, losing)]
    assert difference[0] == 0.0 < difference[1]
    # Wrong values take no chunk away, however many there are.
    wrong = FailureCause(name="wrong sums", per_node_day=100.0, silent=True)
    unhurt = predict(losing, replace(alone, failures=(wrong,)))
    assert unhurt.loss_difference.figure.middle == 0.0
    # Where every rank fails in every minute the run is hopeless, and still no riddle.
    doomed = replace(alone, failures=(replace(CRASH, per_node_day=1440.0),))
    assert predict(losing, doomed).loss_difference.figure.middle > difference[1]


def test_no_input_of_a_term_is_infinite(estimate):
    for total in (estimate.step_seconds, estimate.memory, estimate.loss_difference):
        for term in total.terms:
            assert all(math.isfinite(value) for value in term.inputs.values())


def test_energy_money_and_carbon_are_as_uncertain_as_time_and_watts_together(estimate):
    own = predict(
        TRAINING, replace(SITE, prices=Prices(per_kwh=0.2, grams_per_kwh=300.0), failures=())
    )

    def width(figure):
        assert figure.high / figure.middle == pytest.approx(figure.middle / figure.low)
        return math.log(figure.high / figure.middle)

    time = width(own.step_seconds.figure)
    both = width(own.joules.figure)
    assert both > time
    for figure in (own.run_joules, own.money, own.carbon_grams):
        assert width(figure) == pytest.approx(both)
        assert set(own.joules.figure.extrapolated) <= set(figure.extrapolated)
    assert width(estimate.money) == pytest.approx(width(estimate.step_seconds.figure))


def test_the_energy_of_a_search_is_as_uncertain_as_that_of_a_prediction():
    front = search(TRAINING, SITE)
    candidate = candidates_of(front)[0]
    alone = predict(
        replace(TRAINING, run=candidate.configuration, settings=candidate.settings), SITE
    )
    for name, figure in (("kwh", alone.run_joules), ("grams_co2", alone.carbon_grams)):
        half = math.log(figure.high / figure.middle)
        assert float(front.objectives.half_width(name)[0]) == pytest.approx(half, rel=1e-6)


def test_computing_again_draws_more_than_waiting():
    plain, again = (
        predict(replace(TRAINING, run=replace(RUN, recompute=kind)), SITE)
        for kind in ("none", "full")
    )
    watts = [
        {term.name: term.value for term in each.joules.terms}["busy"] for each in (plain, again)
    ]
    assert watts[1] > 1.2 * watts[0]


def test_a_run_that_computes_most_of_the_time_is_limited_by_compute(estimate):
    assert estimate.limiting == "compute"
    slow = replace(SITE, device="own", fast_bytes_per_s=2e9, fabric_bytes_per_s=1e9)
    assert predict(TRAINING, slow).limiting == "gathering of weights"


@pytest.mark.parametrize("limit", [700.0, math.inf])
def test_clocks_of_a_known_device_are_predicted_at_any_limit(limit):
    device = DeviceConstants(
        name="h100",
        top_clock_mhz=1980.0,
        static_watts=120.0,
        knee_mhz=1200.0,
        knee_per_ghz=0.4,
        power_limit_watts=limit,
        blocking_watts=150.0,
    )
    slow = replace(TRAINING, settings=Settings(clock_mhz=1000.0))
    before, after = (predict(each, SITE, clocks=device) for each in (TRAINING, slow))
    assert after.step_seconds.figure.middle > before.step_seconds.figure.middle
    assert after.joules.figure.middle < before.joules.figure.middle
    assert after.limiting == "compute"
