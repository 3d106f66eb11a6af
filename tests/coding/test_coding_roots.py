import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.coding.code import GradientCode
from outlast.coding.cyclic import CyclicMDS, RealReedSolomon, ReedSolomon
from outlast.errors import CodingError

SIZES = [(n, s) for n in range(1, 9) for s in range(n)]
BOTH = pytest.mark.parametrize("cls", [ReedSolomon, RealReedSolomon])
ANY = float("inf")


def alive_without(workers, gone):
    alive = np.ones(workers, dtype=bool)
    alive[list(gone)] = False
    return alive


def check_every_pattern(code):
    for gone in range(code.tolerance + 1):
        for pattern in itertools.combinations(range(code.workers), gone):
            alive = alive_without(code.workers, pattern)
            decoded = code.decode(alive)
            assert np.abs(decoded.coefficients - 1.0).max() <= 1e-8
            assert decoded.error == 0.0
            assert not decoded.weights[~alive].any()


@BOTH
@pytest.mark.parametrize(("workers", "stragglers"), SIZES)
def test_every_tolerated_pattern_is_exact(cls, workers, stragglers):
    check_every_pattern(cls(workers, stragglers))


@pytest.mark.parametrize(("workers", "stragglers"), SIZES)
def test_consecutive_holders_are_exact_too(workers, stragglers):
    check_every_pattern(ReedSolomon(workers, stragglers, mask="consecutive"))


@BOTH
@settings(max_examples=25, deadline=None)
@given(workers=st.integers(2, 20), data=st.data())
def test_any_size_is_exact_and_balanced(cls, workers, data):
    stragglers = data.draw(st.integers(0, min(workers - 1, 5)))
    size = data.draw(st.integers(0, stragglers))
    gone = data.draw(st.permutations(range(workers)))[:size]
    code = cls(workers, stragglers)
    decoded = code.decode(alive_without(workers, gone))
    assert np.abs(decoded.coefficients - 1.0).max() <= 1e-8
    assert set(code.assignment.loads) == set(code.assignment.copies) == {stragglers + 1}


@BOTH
def test_beyond_the_tolerance_the_error_is_the_least_squares_error(cls):
    code = cls(7, 2)
    for gone in range(3, 8):
        sets = itertools.combinations(range(7), gone)
        alive = np.array([alive_without(7, each) for each in sets])
        least = [
            np.sum(np.abs(code.matrix.T @ GradientCode.optimal_weights(code, each) - 1.0) ** 2)
            for each in alive
        ]
        assert [code.error(each) for each in alive] == pytest.approx(least, abs=1e-8)
        assert code.errors(alive) == pytest.approx(least, abs=1e-5)
        assert max(least) > 0.1


def test_product_form_of_the_weights_agrees_with_least_squares():
    code = ReedSolomon(17, 4)
    generator = np.random.default_rng(0)
    for _ in range(50):
        alive = alive_without(17, generator.choice(17, 4, replace=False))
        closed, general = code.optimal_weights(alive), GradientCode.optimal_weights(code, alive)
        assert closed == pytest.approx(general, abs=1e-10)


def test_decoded_gradient_is_real_and_right():
    code = ReedSolomon(11, 3)
    gradients = np.random.default_rng(1).standard_normal((11, 50))
    decoded = code.decode([0, 1, 2, 3, 4, 5, 6, 7]).weights @ (code.matrix @ gradients)
    assert decoded.real == pytest.approx(gradients.sum(axis=0), abs=1e-9)
    assert np.abs(decoded.imag).max() < 1e-9


def test_weights_stay_small_whoever_straggles():
    code = ReedSolomon(40, 6)
    for first in range(40):
        weights = code.decode(alive_without(40, (first + np.arange(6)) % 40)).weights
        assert np.abs(weights).max() <= 2**6 / 40 + 1e-12


def test_real_weights_stay_below_two_to_the_stragglers():
    for workers, stragglers in ((17, 4), (18, 5), (9, 8), (12, 1)):
        code = RealReedSolomon(workers, stragglers)
        assert code.conditioning.exhaustive
        assert code.conditioning.largest_weight <= 2.0**stragglers + 1e-9
    code = RealReedSolomon(40, 6)
    for first in range(40):
        weights = code.decode(alive_without(40, (first + np.arange(6)) % 40)).weights
        assert np.abs(weights).max() <= 2.0**6


@BOTH
def test_amplification_does_not_explode_with_the_workers_as_that_of_cyclic_codes_does(cls):
    growth = cls(61, 4).conditioning.rounding / cls(21, 4).conditioning.rounding
    cyclic = [CyclicMDS(n, 4, tolerance=ANY).conditioning.rounding for n in (21, 61)]
    assert growth < 5
    assert cyclic[1] / cyclic[0] > 30


@BOTH
def test_spread_holders_amplify_far_less_than_neighbours(cls):
    neighbours = ReedSolomon(31, 6, mask="consecutive", tolerance=ANY).conditioning.rounding
    assert cls(31, 6).conditioning.rounding < neighbours / 500


@BOTH
def test_low_precision_is_refused_with_the_figure_unless_allowed(cls):
    with pytest.raises(CodingError, match=r"bfloat16 .*of the gradient, above tolerance"):
        cls(24, 5, dtype="bfloat16")
    assert cls(24, 5, dtype="bfloat16", tolerance=ANY).conditioning.rounding > 0.01


@BOTH
def test_bad_sizes_are_refused(cls):
    with pytest.raises(CodingError, match="take stragglers = 3"):
        cls(4, 4)


def test_an_unknown_mask_is_refused():
    with pytest.raises(CodingError, match="not one of spread, consecutive"):
        ReedSolomon(5, 2, mask="random")


@BOTH
def test_sixty_workers_take_less_than_a_second(cls):
    begun = time.process_time()
    cls(60, 5)
    assert time.process_time() - begun < 1.0


def test_ten_thousand_workers_are_decoded_to_single_precision():
    code = ReedSolomon(10_000, 5)
    assert code.conditioning.rounding < 1e-4
    alive = alive_without(10_000, [0, 1, 2, 3, 9_000])
    decoded = code.decode(alive)
    assert decoded.error == 0.0
    assert np.abs(decoded.coefficients - 1.0).max() < 1e-10
