"""The advice: a code where it pays, and an honest no where something simpler does."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from late_workers import Additive, ChunkCosts, Combined, FailStop, Fixed, Pareto

from outlast.coding.choose import TIE, Choice, choose_code
from outlast.coding.cost import CostModel
from outlast.coding.delays import DelayModel, Markov, ShiftedExponential, Slow
from outlast.errors import CodingError

COSTS = CostModel(0.1, 8, reduction_seconds=0.02, gradient_bytes=25e6)
SHARDS = CostModel(0.1, 8, reduction_seconds=0.02, gradient_bytes=25e6, iid=False)


def choose(workers: int, model: DelayModel, costs: CostModel = COSTS, **conditions) -> Choice:
    return choose_code(workers, model, costs, stretches=20, **conditions)


def test_nobody_straggles_so_wait_for_all() -> None:
    choice = choose(16, ShiftedExponential(0.002))
    assert choice.best.scheme == "wait-all"
    assert not choice.code
    assert choice.reason.startswith("Do not code: waiting")
    assert "0.0016 s of claims per step" in choice.reason
    # The coverage that is not taken would have cost its claims and nothing else.
    assert choice.candidate("coverage").mean_seconds < 1.005 * choice.best.mean_seconds


def test_a_gain_of_a_percent_is_not_worth_a_code() -> None:
    costs = CostModel(0.1, 32, claim_seconds=0.0)
    choice = choose(16, Additive(0.03), costs)
    assert choice.best.scheme == "wait-all"
    gain = 1.0 - choice.candidate("coverage").mean_seconds / choice.best.mean_seconds
    assert 0.0 < gain < TIE
    assert choose(16, Additive(0.1), costs).best.scheme == "coverage"


@pytest.mark.parametrize("slowdowns", [(2.35, 1.0, 1.0, 1.0), (10.0,) + (1.0,) * 15])
def test_one_rank_is_always_slow_so_rebalance(slowdowns: tuple[float, ...]) -> None:
    for exact in (False, True):
        choice = choose(len(slowdowns), Fixed(slowdowns), exact=exact)
        assert choice.best.scheme == "rebalance"
        assert not choice.code
        assert "slow in the next" in choice.reason
        assert choice.best.mean_seconds < 0.6 * choice.candidate("wait-all").mean_seconds


def test_sequence_lengths_differ_so_rebalance() -> None:
    choice = choose(16, ChunkCosts(0.3))
    assert choice.best.scheme == "rebalance"
    assert "stays with the chunk" in choice.reason
    # Dropping would lose the long sequences.
    assert choice.candidate("deadline").excluded.startswith("biased")
    assert choice.best.mean_seconds < choice.candidate("coverage").mean_seconds


def test_data_are_alike_and_batches_may_shrink_so_drop() -> None:
    choice = choose(240, Slow(0.05, 10.0))
    assert choice.best.scheme == "deadline"
    assert not choice.code
    assert choice.reason.startswith("Do not code, drop and rescale")
    assert "smaller batch" in choice.reason
    assert 0.9 < choice.best.kept < 1.0
    assert choice.best.error > 0.0
    assert choice.best.deadline_seconds == pytest.approx(0.8)


@pytest.mark.parametrize("conditions", [{"exact": True}, {"costs": SHARDS}])
@pytest.mark.parametrize("model", [Slow(0.05, 10.0), Markov(0.1, 0.9, 4.0), Pareto(2.0)])
def test_every_sample_must_count_so_cover(model: DelayModel, conditions) -> None:
    choice = choose(16, model, **conditions)
    assert choice.best.scheme == "coverage"
    assert choice.code
    assert choice.best.copies == 3
    assert choice.best.exact
    assert choice.best.kept == 1.0
    assert "is excluded" in choice.reason
    assert choice.best.mean_seconds < 0.6 * choice.candidate("wait-all").mean_seconds


def test_dropping_that_gains_little_is_not_taken_unless_asked_for() -> None:
    model = ShiftedExponential(0.3)
    assert choose(16, model).best.scheme == "coverage"
    assert "within the margin" in choose(16, model).reason
    assert choose(16, model, margin=0.0).best.scheme == "deadline"


def test_ranks_that_die_leave_coverage_exact_or_with_a_certified_error() -> None:
    dying = Combined((FailStop(0.15), Slow(0.05, 2.0)))
    again = choose(8, dying, exact=True).candidate("coverage")
    without = choose(8, dying).candidate("coverage")
    assert (again.error, again.kept) == (0.0, 1.0)
    assert 0.0 < without.error < 0.05
    assert without.kept < 1.0
    assert math.isfinite(again.deadline_seconds)
    assert again.mean_seconds > without.mean_seconds
    never = choose(8, dying).candidate("wait-all")
    assert never.excluded == "may never end"
    assert "may never end" in choose(8, dying, exact=True).reason


def test_memory_and_messages_limit_the_choice() -> None:
    lean = choose(16, Slow(0.1, 10.0), exact=True, memory_bytes=1e6)
    assert lean.best.extra_bytes == 0.0
    assert "of memory" in lean.candidate("coverage").excluded
    # Every scheme sums one gradient per worker.
    assert {each.sent_bytes for each in lean.candidates} == {25e6 * 2 * 15 / 16}
    with pytest.raises(CodingError, match="no scheme meets the conditions"):
        choose(16, Slow(0.1, 10.0), message_bytes=1e6)


def test_waits_before_the_start_make_replication_pay() -> None:
    # As in serverless training: a load costs little beside the wait.
    choice = choose(16, Additive(5.0), exact=True)
    assert choice.code
    coded = choice.candidate("repetition")
    assert coded.mean_seconds < 0.7 * choice.candidate("wait-all").mean_seconds
    cyclic = choice.candidate("cyclic-mds").mean_seconds
    assert cyclic < choice.candidate("wait-all").mean_seconds


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 13),
    st.sampled_from([Slow(0.1, 5.0), Markov(0.2, 0.8, 3.0), Pareto(1.5), Additive(0.3)]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_the_advice_is_among_the_fastest_of_what_is_allowed(
    workers: int, model: DelayModel, exact: bool, seed: int
) -> None:
    choice = choose_code(workers, model, COSTS, exact=exact, stretches=5, seed=seed, margin=0.0)
    allowed = [each for each in choice.candidates if not each.excluded]
    fastest = min(each.useful_seconds for each in allowed)
    assert choice.best in allowed
    # Dropping nothing is preferred to dropping at equal speed, then what is simpler.
    assert choice.best.useful_seconds <= fastest * (1.0 + TIE) * (1.0 + 1e-9)
    assert not exact or choice.best.exact
    assert all(
        each.mean_seconds >= choice.bound_seconds * (1.0 - 1e-9) for each in allowed if each.exact
    )
    assert [each.useful_seconds for each in allowed] == sorted(e.useful_seconds for e in allowed)


def test_coverage_is_never_predicted_slower_than_waiting_but_for_its_claims() -> None:
    for model in (Slow(0.1, 5.0), Pareto(3.0), Additive(0.2), ShiftedExponential(0.0)):
        choice = choose(12, model)
        waiting = choice.candidate("wait-all").mean_seconds
        # A claim per chunk, at the slowest rank's pace.
        slack = COSTS.claims_overhead * waiting
        assert choice.candidate("coverage").mean_seconds <= waiting + slack


def test_one_worker_has_nobody_to_share_with() -> None:
    choice = choose(1, Slow(0.2, 5.0), exact=True)
    assert choice.best.scheme == "wait-all"
    assert {each.scheme for each in choice.candidates} == {"wait-all", "rebalance", "deadline"}


def test_cyclic_codes_keep_to_their_parity() -> None:
    settings_of = {
        workers: [
            e.settings for e in choose(workers, Slow(0.1, 5.0)).candidates if "mds" in e.scheme
        ]
        for workers in (8, 9)
    }
    assert settings_of == {8: ["s = 1, d = 2"], 9: ["s = 2, d = 3"]}


def test_approximate_codes_are_weighed_and_excluded_where_every_sample_must_count() -> None:
    model = Slow(0.1, 5.0)
    choice, strict = choose(24, model), choose(24, model, exact=True)
    for scheme in ("graph", "erasure-head"):
        found = choice.candidate(scheme)
        assert found.lossy
        assert 0.8 < found.kept < 1.0
        assert found.error > 0.0
        assert not found.excluded
        assert strict.candidate(scheme).excluded == "not exact"
        assert "biased" in choose(24, model, SHARDS).candidate(scheme).excluded


def test_coverage_with_an_early_deadline_is_weighed_where_ranks_die_and_samples_may_be_lost() -> (
    None
):
    dying = Combined((FailStop(0.15), Slow(0.05, 2.0)))

    def early(choice: Choice) -> list[bool]:
        return [each.lossy for each in choice.candidates if each.scheme == "coverage"]

    assert sorted(early(choose(8, dying))) == [False, False, True, True]
    assert early(choose(8, dying, exact=True)) == [False, False]
    assert early(choose(8, Slow(0.1, 5.0))) == [False, False]
    patient, hasty = sorted(
        (e for e in choose(8, dying).candidates if e.scheme == "coverage" and e.copies == 3),
        key=lambda each: each.lossy,
    )
    assert hasty.deadline_seconds < patient.deadline_seconds
    assert hasty.p90_seconds <= hasty.deadline_seconds + COSTS.reduction_seconds
    assert hasty.kept <= patient.kept


def test_the_table_shows_every_candidate_in_line() -> None:
    choice = choose(8, Combined((Slow(0.1, 5.0), FailStop(0.02))))
    lines = choice.table().splitlines()
    assert len(lines) == 1 + len(choice.candidates)
    assert sum("<- chosen" in line for line in lines) == 1
    ends = {line.index("s/batch") + len("s/batch") for line in lines[:1]}
    (column,) = ends
    for line, each in zip(lines[1:], choice.candidates, strict=True):
        assert line.startswith(each.scheme)
        shown = line[:column].split()[-1]
        seconds = each.useful_seconds
        assert shown == ("never" if math.isinf(seconds) else f"{seconds:.4g}")
        assert ("may never end" in line) == (each.excluded == "may never end")


def test_unknown_schemes_are_refused_with_those_tried() -> None:
    with pytest.raises(CodingError, match="coverage, cyclic-mds, deadline"):
        choose(8, Slow(0.1, 5.0)).candidate("raptor")
    with pytest.raises(CodingError, match="workers = 0"):
        choose(0, Slow(0.1, 5.0))
