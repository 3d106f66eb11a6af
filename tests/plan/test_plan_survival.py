"""What runs survive by: tiers that a cluster has and lacks, and why a run cannot be."""

import math
from dataclasses import replace

import pytest
from plan_runs import H100, LLAMA_8B, configuration
from plan_spaces import candidates_of

from outlast.errors import PlanError
from outlast.plan.api import Training, predict, search
from outlast.plan.cluster import FailureCause, Storage
from outlast.plan.configuration import Mechanisms, Settings

CRASH = FailureCause(name="crash", per_node_day=0.0065, repair_hours=12.0)
SITE = replace(H100, storage=Storage(shared_bytes_per_s=8e9), failures=(CRASH,), spares=1)
BARE = replace(SITE, storage=Storage())
RUN = configuration(data=64, batch=256, sharding="parameters", recompute="full")
TRAINING = Training(model=LLAMA_8B, run=RUN, tokens=1e11, framework="any")


def test_a_run_that_runs_has_no_reason_against_it():
    estimate = predict(TRAINING, SITE)
    assert estimate.fits
    assert estimate.unfit == ""


def test_a_cluster_without_shared_storage_is_said_and_not_a_riddle():
    estimate = predict(TRAINING, BARE)
    assert not estimate.fits
    assert "tiers = shared" in estimate.unfit
    assert "shared_bytes_per_s" in estimate.unfit
    assert 0.0 <= estimate.ettr.figure.low <= estimate.ettr.figure.high <= 1.0


@pytest.mark.parametrize("tier", ["peer", "local"])
def test_a_tier_that_the_cluster_lacks_is_named(tier: str):
    estimate = predict(replace(TRAINING, settings=Settings(tiers=(tier, "shared"))), SITE)
    assert not estimate.fits
    assert f"{tier}_bytes_per_s" in estimate.unfit
    assert "leave the tier out" in estimate.unfit


def test_a_code_says_what_it_needs():
    coded = replace(TRAINING, settings=Settings(coding_copies=2))
    assert "sharding = none" in predict(coded, SITE).unfit
    few = replace(RUN, sharding="none", tensor=8, data=1, pipeline=8)
    assert "data = 1" in predict(replace(coded, run=few), SITE).unfit


def test_memory_that_is_too_small_is_named_with_the_settings():
    whole = replace(RUN, sharding="none", recompute="none", micro_batch=4)
    estimate = predict(replace(TRAINING, run=whole), SITE)
    assert not estimate.fits
    assert "out of memory" in estimate.unfit
    assert "micro_batch = 4" in estimate.unfit
    assert "recompute" in estimate.unfit


def test_the_cliff_is_named():
    need = predict(TRAINING, SITE).memory.figure.middle
    tight = replace(SITE, device="own", memory_bytes=need / 0.95)
    estimate = predict(TRAINING, tight)
    assert estimate.fits
    assert estimate.cliff
    assert "memory cliff" in estimate.unfit


def test_a_search_in_which_nothing_is_possible_says_why():
    with pytest.raises(PlanError, match=r"tiers = shared: .* no shared storage"):
        search(TRAINING, BARE)
    with pytest.raises(PlanError, match="no peer storage"):
        search(TRAINING, SITE, mechanisms=Mechanisms(tiers=(("peer", "shared"),)))


def test_a_search_leaves_out_what_is_impossible():
    mechanisms = Mechanisms(tiers=(("shared",), ("peer", "shared")))
    front = search(TRAINING, SITE, mechanisms=mechanisms)
    assert {each.settings.tiers for each in candidates_of(front)} == {("shared",)}


@pytest.mark.parametrize("tiers", [("shared",), ("memory", "shared")])
def test_no_other_interval_is_much_better_than_the_chosen_one(tiers: tuple[str, ...]):
    busy = replace(SITE, failures=(replace(CRASH, per_node_day=0.5), replace(CRASH, name="soft")))

    def found(seconds: float):
        chosen = Settings(tiers=tiers, checkpoint_seconds=seconds)
        return predict(replace(TRAINING, settings=chosen), busy)

    best = found(0.0)
    for factor in (0.3, 0.6, 1.7, 3.0):
        other = found(factor * best.checkpoint_seconds)
        assert other.ettr.figure.middle < best.ettr.figure.middle + 1e-3
    assert found(10.0 * best.checkpoint_seconds).ettr.figure.middle < best.ettr.figure.middle - 1e-3


def test_a_hopeless_run_has_figures_and_no_division_by_zero():
    # Wrong values are noticed after two days, and every node makes one a minute.
    silent = FailureCause(name="wrong sums", per_node_day=1440.0, silent=True)
    found = predict(TRAINING, replace(SITE, failures=(silent,))).finish_seconds
    assert 0.0 < found.low <= found.middle <= found.high < math.inf


@pytest.mark.parametrize("rate", [5.0, 100.0, 1440.0])
def test_shares_stay_shares_when_everything_fails_all_the_time(rate: float):
    broken = replace(SITE, failures=(replace(CRASH, per_node_day=rate),))
    figure = predict(TRAINING, broken).ettr.figure
    assert 0.0 <= figure.low <= figure.middle <= figure.high <= 1.0
