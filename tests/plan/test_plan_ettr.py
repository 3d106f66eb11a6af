"""How sure the share of progress and the finishing time are: failure rates are never well known."""

from dataclasses import replace

import pytest
from plan_runs import H100, LLAMA_8B, configuration

from outlast.plan.api import Training, predict
from outlast.plan.cluster import Cluster, FailureCause, Storage
from outlast.plan.cluster_file import read_cluster
from outlast.plan.configuration import Settings
from outlast.plan.estimate import Source
from outlast.plan.prediction import ASSUMED_RATE_FACTOR, GIVEN_RATE_FACTOR, RATES_ASSUMED

NODE = FailureCause(name="node", per_node_day=0.02, repair_hours=12.0)
CRASH = FailureCause(name="crash", per_node_day=0.01)
GIVEN = replace(H100, storage=Storage(shared_bytes_per_s=8e9), failures=(NODE, CRASH), spares=1)
RUN = configuration(data=64, batch=256, sharding="parameters", recompute="full")
# A fixed interval: with other rates the chosen one would be another.
TRAINING = Training(
    model=LLAMA_8B, run=RUN, tokens=1e11, settings=Settings(checkpoint_seconds=1800.0)
)


def assumed(*causes: FailureCause) -> Cluster:
    sources = {
        f"failures.{cause.name}": Source(cause.per_node_day, "1/node-day", "unverified", "assumed")
        for cause in causes
    }
    return replace(GIVEN, sources=sources)


def times(cluster: Cluster, factor: float) -> Cluster:
    return replace(
        cluster,
        failures=tuple(
            replace(cause, per_node_day=cause.per_node_day * factor) for cause in cluster.failures
        ),
    )


@pytest.mark.parametrize(
    ("cluster", "factor"),
    [(GIVEN, GIVEN_RATE_FACTOR), (assumed(NODE, CRASH), ASSUMED_RATE_FACTOR)],
    ids=["given", "assumed"],
)
def test_ends_are_those_of_other_failure_rates(cluster: Cluster, factor: float) -> None:
    found = predict(TRAINING, cluster)
    many, few = (predict(TRAINING, times(GIVEN, each)) for each in (factor, 1.0 / factor))
    share = found.ettr.figure
    assert share.low == pytest.approx(many.ettr.figure.middle, rel=1e-9)
    assert share.high == pytest.approx(few.ettr.figure.middle, rel=1e-9)
    assert share.low < share.middle < share.high
    # The finishing time is in doubt by at least as much.
    assert found.finish_seconds.low <= few.finish_seconds.middle
    assert found.finish_seconds.high >= many.finish_seconds.middle


def test_assumed_rates_are_wider_and_said() -> None:
    given, guessed = predict(TRAINING, GIVEN), predict(TRAINING, assumed(NODE, CRASH))
    partly = predict(TRAINING, assumed(NODE))
    lows = [each.ettr.figure.low for each in (guessed, partly, given)]
    assert lows == sorted(lows)
    assert lows[0] < lows[1] < lows[2]
    assert guessed.finish_seconds.high > given.finish_seconds.high
    for each in (guessed, partly):
        assert RATES_ASSUMED in each.ettr.figure.extrapolated
        assert RATES_ASSUMED in each.finish_seconds.extrapolated
        assert RATES_ASSUMED not in each.step_seconds.figure.extrapolated
    assert RATES_ASSUMED not in given.ettr.figure.extrapolated
    assert RATES_ASSUMED not in given.finish_seconds.extrapolated


def test_what_was_not_calibrated_is_said_of_progress_too() -> None:
    found = predict(TRAINING, GIVEN)
    assert found.step_seconds.figure.extrapolated
    assert found.ettr.figure.extrapolated == found.step_seconds.figure.extrapolated
    assert found.finish_seconds.extrapolated == found.step_seconds.figure.extrapolated


def test_a_run_that_nothing_befalls_is_not_in_doubt() -> None:
    share = predict(TRAINING, replace(GIVEN, failures=())).ettr.figure
    assert share.low == pytest.approx(share.middle, rel=1e-12)
    assert share.high == pytest.approx(share.middle, rel=1e-12)
    assert share.middle < 1.0


def test_a_cluster_file_without_failures_is_flagged_and_one_with_its_own_is_not() -> None:
    bare = '[cluster]\ndevice = "h100-sxm"\nnodes = 8\ndevices_per_node = 8\n'
    own = '[[failures]]\nname = "node"\nper_node_day = 0.004\nrepair_hours = 12\n'
    files = (read_cluster(text) for text in (bare, bare + own))
    flags = [predict(TRAINING, file).ettr.figure.extrapolated for file in files]
    assert RATES_ASSUMED in flags[0]
    assert RATES_ASSUMED not in flags[1]
