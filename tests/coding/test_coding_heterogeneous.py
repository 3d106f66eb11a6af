import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.coding.code import GradientCode
from outlast.coding.codes.heterogeneous import GroupedBySpeed, HeterogeneityAware, shares
from outlast.errors import CodingError

BOTH = pytest.mark.parametrize("cls", [HeterogeneityAware, GroupedBySpeed])
SPEEDS = [[1.0], [1, 2], [3, 1, 1], [1, 1, 2, 4], [1, 1, 1, 1, 1, 10], [5, 1, 2, 2, 3, 1, 4]]
ANY = float("inf")

speeds_of_workers = st.lists(st.floats(0.1, 10), min_size=1, max_size=16)


def alive_without(workers, gone):
    alive = np.ones(workers, dtype=bool)
    alive[list(gone)] = False
    return alive


def patterns(code, gone):
    for each in itertools.combinations(range(code.workers), gone):
        yield alive_without(code.workers, each)


@BOTH
@pytest.mark.parametrize("speeds", SPEEDS, ids=str)
def test_every_tolerated_pattern_is_exact(cls, speeds):
    for stragglers in range(len(speeds)):
        code = cls(speeds, stragglers)
        for gone in range(stragglers + 1):
            for alive in patterns(code, gone):
                decoded = code.decode(alive)
                assert np.abs(decoded.coefficients - 1.0).max() <= 1e-8
                assert decoded.error == 0.0
                assert not decoded.weights[~alive].any()


@BOTH
@settings(max_examples=25, deadline=None)
@given(speeds=speeds_of_workers, data=st.data())
def test_any_speeds_are_exact_with_the_same_number_of_copies(cls, speeds, data):
    stragglers = data.draw(st.integers(0, min(len(speeds) - 1, 4)))
    chunks = data.draw(st.one_of(st.none(), st.integers(1, 40)))
    gone = data.draw(st.permutations(range(len(speeds))))[:stragglers]
    options = {"tolerance": ANY} if cls is HeterogeneityAware else {}
    code = cls(speeds, stragglers, chunks=chunks, **options)
    decoded = code.decode(alive_without(len(speeds), gone))
    assert np.abs(decoded.coefficients - 1.0).max() <= 1e-8
    assert set(code.assignment.copies) == {stragglers + 1}


@BOTH
def test_beyond_the_tolerance_the_error_is_the_least_squares_error(cls):
    code = cls([5, 1, 2, 2, 3, 1, 4], 2, chunks=14)
    for gone in range(3, 8):
        for alive in patterns(code, gone):
            least = GradientCode.optimal_weights(code, alive)
            expected = np.sum((code.matrix.T @ least - 1.0) ** 2)
            assert code.error(alive) == pytest.approx(expected, abs=1e-6)
            assert expected <= code.worst_error(gone).value + 1e-6


def test_groups_decode_exactly_whenever_linear_algebra_does():
    code = GroupedBySpeed([5, 1, 2, 2, 3, 1, 4, 2], 2, chunks=10)
    luck = 0
    for gone in range(code.workers + 1):
        for alive in patterns(code, gone):
            least = GradientCode.optimal_weights(code, alive)
            exact = np.abs(code.matrix.T @ least - 1.0).max() < 1e-8
            assert code.decodable(alive) == exact
            assert (code.error(alive) == 0.0) == exact
            luck += exact and gone > code.tolerance
    assert luck > 10


@settings(max_examples=50, deadline=None)
@given(speeds_of_workers, st.integers(1, 60), st.data())
def test_groups_have_the_least_squares_error_for_any_survivors(speeds, chunks, data):
    code = GroupedBySpeed(speeds, data.draw(st.integers(0, len(speeds) - 1)), chunks=chunks)
    mask = st.lists(st.booleans(), min_size=len(speeds), max_size=len(speeds))
    alive = np.array(data.draw(mask))
    least = GradientCode.optimal_weights(code, alive)
    expected = np.sum((code.matrix.T @ least - 1.0) ** 2)
    assert code.error(alive) == pytest.approx(expected, abs=1e-6)


def test_one_worker_that_overlaps_with_thousands_needs_no_dense_matrix():
    code = GroupedBySpeed([1.0] * 4000 + [3000.0], 1, chunks=8002)
    others = np.flatnonzero(code.groups == code.groups[4000])
    gone = [others[0], np.flatnonzero(code.groups != code.groups[4000])[0]]
    lost = code.assignment.loads[gone].min()
    assert 0.0 < code.error(alive_without(4001, gone)) <= lost + 1e-6


def test_a_path_may_go_back_over_chunks_that_it_counted():
    code = GroupedBySpeed([1, 2, 3, 2, 3, 4, 2, 4], 2, chunks=3)
    spans = [code.assignment.chunks_of(worker).tolist() for worker in range(8)]
    forth, back, on = spans.index([0, 1]), spans.index([1]), spans.index([1, 2])
    weights, error = code.decode([forth, back, on])
    assert weights[[forth, back, on]].tolist() == [1.0, -1.0, 1.0]
    assert error == 0.0


def test_group_weights_are_signs_and_need_one_group_only():
    code = GroupedBySpeed(np.arange(1.0, 13.0), 2)
    weights = code.decode(np.ones(12, dtype=bool)).weights
    assert set(weights) == {0.0, 1.0}
    assert len(set(code.groups[weights == 1.0])) == 1
    assert code.binary


def test_coefficients_do_not_explode_where_speeds_differ():
    speeds = np.random.default_rng(0).uniform(1.0, 4.0, 40)
    assert HeterogeneityAware(speeds, 4).conditioning.rounding < 1e-5


@BOTH
def test_loads_follow_the_speeds(cls):
    speeds = np.random.default_rng(0).uniform(1.0, 4.0, 30)
    code = cls(speeds, 2, chunks=600)
    seconds = code.assignment.loads / speeds
    assert seconds.max() / seconds.min() < 1.1
    assert code.assignment.loads.sum() == 3 * 600


def test_a_worker_faster_than_all_others_together_computes_everything_once():
    code = HeterogeneityAware([1.0, 1.0, 1000.0], 1, chunks=10)
    assert code.assignment.loads.tolist() == [5, 5, 10]


@settings(max_examples=50, deadline=None)
@given(speeds_of_workers, st.integers(1, 50), st.data())
def test_shares_sum_to_the_total_below_the_cap_and_in_order_of_speed(speeds, most, data):
    total = data.draw(st.integers(0, most * len(speeds)))
    found = shares(np.array(speeds), total, most=most)
    assert found.sum() == total
    assert found.min() >= 0
    assert found.max() <= most
    order = np.argsort(speeds, kind="stable")
    assert np.diff(found[order]).min(initial=0) >= -1


@BOTH
@pytest.mark.parametrize(
    ("speeds", "stragglers", "options", "text"),
    [
        ([1.0, 0.0], 1, {}, r"speeds\[1\] = 0 is not above 0"),
        ([float("nan"), 1.0], 1, {}, r"speeds\[0\] = nan"),
        ([1.0, 2.0], 2, {}, "take stragglers = 1"),
        ([1.0, 2.0], 1, {"chunks": 0}, "chunks = 0 is below 1"),
        ([], 0, {}, "workers = 0 is below 1"),
    ],
)
def test_bad_parameters_are_refused(cls, speeds, stragglers, options, text):
    with pytest.raises(CodingError, match=text):
        cls(speeds, stragglers, **options)


def test_low_precision_is_refused_unless_allowed():
    speeds = np.linspace(1, 2, 24)
    with pytest.raises(CodingError, match="GroupedBySpeed"):
        HeterogeneityAware(speeds, 5, dtype="bfloat16")
    code = HeterogeneityAware(speeds, 5, dtype="bfloat16", tolerance=ANY)
    assert code.conditioning.rounding > 0.01


def test_sixty_workers_take_less_than_a_second():
    begun = time.process_time()
    HeterogeneityAware(np.linspace(1, 3, 60), 5)
    assert time.process_time() - begun < 1.0


def test_ten_thousand_workers_take_less_than_a_second():
    begun = time.process_time()
    generator = np.random.default_rng(0)
    code = GroupedBySpeed(generator.uniform(1, 4, 10_000), 3)
    decoded = code.decode(generator.random(10_000) > 0.05)
    assert time.process_time() - begun < 1.0
    assert 0.0 < decoded.error < 0.1 * code.chunks
