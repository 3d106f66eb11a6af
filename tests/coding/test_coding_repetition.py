import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.coding.code import FractionalRepetition, GradientCode, decode
from outlast.errors import CodingError

SMALL = [(1, 0), (4, 0), (4, 1), (6, 1), (6, 2), (8, 3), (9, 2), (5, 4)]


@st.composite
def codes(draw):
    copies = draw(st.integers(1, 6))
    return FractionalRepetition(copies * draw(st.integers(1, 12)), copies - 1)


def masks(workers, stragglers):
    for gone in itertools.combinations(range(workers), stragglers):
        alive = np.ones(workers, dtype=bool)
        alive[list(gone)] = False
        yield alive


@pytest.mark.parametrize(("workers", "stragglers"), SMALL)
def test_every_pattern_has_the_least_error_that_linear_algebra_allows(workers, stragglers):
    code = FractionalRepetition(workers, stragglers)
    for gone in range(workers + 1):
        for alive in masks(workers, gone):
            weights, error = decode(code, alive)
            least = GradientCode.optimal_weights(code, alive)
            expected = np.sum((code.matrix.T @ least - 1.0) ** 2)
            assert error == pytest.approx(expected, abs=1e-8)
            assert set(weights) <= {0.0, 1.0}
            assert not weights[~alive].any()
            assert code.decodable(alive) == (error == 0.0)
            if gone <= stragglers:
                assert error == 0.0


@pytest.mark.parametrize(("workers", "stragglers"), SMALL)
def test_closed_forms_are_the_worst_and_the_mean_over_all_patterns(workers, stragglers):
    code = FractionalRepetition(workers, stragglers)
    for gone in range(workers + 1):
        errors = code.errors(np.array(list(masks(workers, gone))))
        assert code.worst_error(gone).value == errors.max()
        assert code.expected_error(gone).value == pytest.approx(errors.mean())
        assert code.worst_error(gone).kind == code.expected_error(gone).kind == "exact"


@settings(max_examples=50, deadline=None)
@given(codes(), st.data())
def test_errors_of_many_patterns_are_the_decodings_errors(code, data):
    seed = data.draw(st.integers(0, 2**32 - 1))
    alive = np.random.default_rng(seed).random((20, code.workers)) < 0.6
    assert code.errors(alive) == pytest.approx([code.error(each) for each in alive])
    fixed = [code.error(each, "fixed") for each in alive]
    assert code.errors(alive, "fixed") == pytest.approx(fixed)


@settings(max_examples=50, deadline=None)
@given(codes())
def test_load_and_copies_are_stragglers_plus_one(code):
    assert code.binary
    assert code.load == code.tolerance + 1
    assert set(code.assignment.copies) == {code.tolerance + 1}


def test_one_message_per_group_is_used():
    weights, error = decode(FractionalRepetition(workers=12, stragglers=2), [1, 2, 5, 6, 7, 8, 11])
    assert np.flatnonzero(weights).tolist() == [1, 5, 6, 11]
    assert error == 0.0


@pytest.mark.parametrize(
    ("workers", "stragglers", "advice"),
    [
        (10, 2, "stragglers = 1 or 4, or workers = 9 or 12"),
        (7, 3, "stragglers = 0 or 6, or workers = 4 or 8"),
        (30, 6, "stragglers = 5 or 9, or workers = 28 or 35"),
    ],
)
def test_uneven_groups_are_refused_with_the_nearest_sizes(workers, stragglers, advice):
    with pytest.raises(CodingError, match=f"workers = {workers} is not a multiple.*{advice}"):
        FractionalRepetition(workers, stragglers)


@pytest.mark.parametrize(
    ("workers", "stragglers", "text"),
    [
        (4, 4, "take stragglers = 3, or workers = 5"),
        (4, -1, "take stragglers = 0"),
        (0, 0, "below 1"),
    ],
)
def test_sizes_outside_the_range_are_refused(workers, stragglers, text):
    with pytest.raises(CodingError, match=text):
        FractionalRepetition(workers, stragglers)


def test_ten_thousand_workers_take_less_than_a_second():
    begun = time.process_time()
    code = FractionalRepetition(workers=10_000, stragglers=3)
    alive = np.random.default_rng(0).random(10_000) > 0.3
    error = code.decode(alive).error
    assert time.process_time() - begun < 1.0
    assert error == 4 * (~alive.reshape(-1, 4).any(axis=1)).sum()
