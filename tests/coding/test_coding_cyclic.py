import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.coding.code import GradientCode, conditioning
from outlast.coding.cyclic import CyclicMDS, CyclicRepetition
from outlast.errors import CodingError

SIZES = [(n, s) for n in range(1, 9) for s in range(n)]
ANY = float("inf")


def alive_without(workers, gone):
    alive = np.ones(workers, dtype=bool)
    alive[list(gone)] = False
    return alive


def check_every_pattern(code):
    workers = code.workers
    for gone in range(code.tolerance + 1):
        for pattern in itertools.combinations(range(workers), gone):
            alive = alive_without(workers, pattern)
            decoded = code.decode(alive)
            assert np.abs(decoded.coefficients - 1.0).max() <= 1e-8
            assert decoded.error == 0.0
            assert not decoded.weights[~alive].any()


@pytest.mark.parametrize(("workers", "stragglers"), SIZES)
def test_random_code_is_exact_for_every_tolerated_pattern(workers, stragglers):
    check_every_pattern(CyclicRepetition(workers, stragglers))


@pytest.mark.parametrize(("workers", "stragglers"), [(n, s) for n, s in SIZES if (n - s) % 2])
def test_mds_code_is_exact_for_every_tolerated_pattern(workers, stragglers):
    check_every_pattern(CyclicMDS(workers, stragglers))


@pytest.mark.parametrize(
    "code", [CyclicRepetition(7, 2), CyclicMDS(7, 2), CyclicMDS(6, 3)], ids=repr
)
def test_beyond_the_tolerance_the_error_is_the_least_squares_error(code):
    for gone in range(code.tolerance + 1, code.workers + 1):
        sets = itertools.combinations(range(code.workers), gone)
        alive = np.array([alive_without(code.workers, each) for each in sets])
        least = [
            np.sum((code.matrix.T @ GradientCode.optimal_weights(code, each) - 1.0) ** 2)
            for each in alive
        ]
        assert [code.error(each) for each in alive] == pytest.approx(least, abs=1e-8)
        assert code.errors(alive) == pytest.approx(least, abs=1e-5)
        assert max(least) > 0.1
        assert max(least) <= code.worst_error(gone).value + 1e-9


@pytest.mark.parametrize("code", [CyclicRepetition(9, 3), CyclicMDS(9, 4)], ids=repr)
def test_weights_are_the_shortest_exact_ones(code):
    for gone in itertools.combinations(range(code.workers), code.tolerance - 1):
        alive = alive_without(code.workers, gone)
        shortest = GradientCode.optimal_weights(code, alive)
        assert code.optimal_weights(alive) == pytest.approx(shortest, abs=1e-7)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 18), st.data())
def test_any_size_is_exact_for_random_stragglers(workers, data):
    stragglers = data.draw(st.integers(0, min(workers - 1, 5)))
    gone = data.draw(st.lists(st.integers(0, workers - 1), max_size=stragglers, unique=True))
    cls = CyclicMDS if (workers - stragglers) % 2 and data.draw(st.booleans()) else CyclicRepetition
    code = cls(workers, stragglers, tolerance=ANY)
    decoded = code.decode(alive_without(workers, gone))
    assert np.abs(decoded.coefficients - 1.0).max() <= 1e-8
    assert code.load == stragglers + 1
    for worker in range(workers):
        own = (worker + np.arange(stragglers + 1)) % workers
        assert code.assignment.chunks_of(worker).tolist() == sorted(own)


def test_mds_coefficients_are_the_product_over_roots_next_to_minus_one():
    code = CyclicMDS(12, 5)
    roots = np.exp(2j * np.pi * np.arange(4, 9) / 12)
    product = np.poly(roots).real
    assert code.matrix.toarray()[0, :6] == pytest.approx(product / product.sum())
    assert code.matrix.data.min() > 0


def test_better_draws_amplify_less():
    gains = []
    for seed in range(6):
        one, best = (
            CyclicRepetition(16, 4, seed=seed, draws=draws, tolerance=ANY).conditioning.rounding
            for draws in (1, 8)
        )
        gains.append(one / best)
    assert np.median(gains) > 2


def test_draws_follow_the_seed():
    first, again, other = (CyclicRepetition(9, 2, seed=seed) for seed in (3, 3, 4))
    assert (first.matrix != again.matrix).nnz == 0
    assert (first.matrix != other.matrix).nnz > 0


@pytest.mark.parametrize(
    ("workers", "stragglers", "text"),
    [
        (30, 4, "both even.*take stragglers = 5, or workers = 29 or 31"),
        (7, 3, "both odd.*take stragglers = 4, or workers = 6 or 8"),
        (5, 5, "take stragglers = 4"),
    ],
)
def test_mds_parity_and_range_are_refused_with_the_nearest_sizes(workers, stragglers, text):
    with pytest.raises(CodingError, match=text):
        CyclicMDS(workers, stragglers)


def test_no_draw_is_refused():
    with pytest.raises(CodingError, match="draws = 0"):
        CyclicRepetition(5, 2, draws=0)


@pytest.mark.parametrize("cls", [CyclicRepetition, CyclicMDS])
def test_low_precision_is_refused_with_the_figure_unless_allowed(cls):
    with pytest.raises(CodingError, match=r"bfloat16 .*of the gradient, above tolerance = 0\.01"):
        cls(24, 5, dtype="bfloat16")
    allowed = cls(24, 5, dtype="bfloat16", tolerance=ANY)
    assert allowed.conditioning.rounding > 0.01
    assert allowed.conditioning.rounding >= conditioning(allowed).rounding * (1 - 1e-9)
    assert allowed.conditioning.exhaustive


def test_mds_of_moderate_size_is_allowed_in_single_precision():
    assert 1e-5 < CyclicMDS(30, 5).conditioning.rounding < 1e-3


@pytest.mark.parametrize("cls", [CyclicRepetition, CyclicMDS])
def test_sixty_workers_take_less_than_a_second(cls):
    begun = time.process_time()
    cls(60, 5, tolerance=ANY)
    assert time.process_time() - begun < 1.0


def test_an_encoding_that_is_not_binary_has_no_fixed_weights():
    with pytest.raises(CodingError, match='decoder = "optimal"'):
        CyclicMDS(6, 3).decode([0, 1, 2], "fixed")


def test_a_random_code_of_too_many_workers_is_refused_with_one_that_is_possible():
    with pytest.raises(CodingError, match=r"workers = 1001 is above 1000: .* RealReedSolomon"):
        CyclicRepetition(1001, 2)
