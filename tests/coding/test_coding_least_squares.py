"""The generic optimal decoder: the same weights as least squares, small and large."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.coding.code import FractionalRepetition, by_gram, by_products
from outlast.coding.cyclic import RealReedSolomon
from outlast.coding.design import BernoulliCode, SoftDesign
from outlast.errors import CodingError


def shortest(rows):
    return np.linalg.lstsq(rows.T, np.ones(rows.shape[1]), rcond=None)[0]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.floats(0.02, 0.95), st.integers(0, 10_000))
def test_weights_are_the_shortest_of_least_error(workers, chunks, density, seed):
    generator = np.random.default_rng(seed)
    rows = (generator.random((workers, chunks)) < density).astype(float)
    found = by_gram(rows @ rows.T, rows.sum(axis=1))
    if found is not None:
        np.testing.assert_allclose(found, shortest(rows), atol=1e-8)


@pytest.mark.parametrize("copies", [1, 3])
def test_equal_messages_share_their_weight(copies):
    rows = np.repeat(np.eye(5), copies, axis=0)
    found = by_gram(rows @ rows.T, rows.sum(axis=1))
    np.testing.assert_allclose(found, np.full(5 * copies, 1.0 / copies), atol=1e-12)


def test_messages_of_nothing_and_no_messages_have_no_weight():
    assert not by_gram(np.zeros((3, 3)), np.zeros(3)).any()
    assert by_gram(np.zeros((0, 0)), np.zeros(0)).shape == (0,)
    code = SoftDesign(6, 2)
    assert not by_products(code.matrix, np.zeros(6, dtype=bool)).any()


@pytest.mark.parametrize(
    "code", [SoftDesign(256, 4), BernoulliCode(256, 4), BernoulliCode(200, 1.5)], ids=repr
)
def test_codes_of_hundreds_of_workers_decode_as_least_squares_does(code):
    generator = np.random.default_rng(3)
    for _ in range(3):
        alive = generator.random(code.workers) > 0.1
        expected = shortest(code.matrix[alive].toarray())
        np.testing.assert_allclose(code.optimal_weights(alive)[alive], expected, atol=1e-9)
        # Step by step the weights have fewer digits, the error nearly as many.
        stepped = by_products(code.matrix, alive)
        assert not stepped[~alive].any()
        rows = code.matrix[alive]
        least = np.sum((rows.T @ expected - 1.0) ** 2)
        assert np.sum((code.matrix.T @ stepped - 1.0) ** 2) == pytest.approx(least, rel=1e-6)


@pytest.mark.parametrize("code", [FractionalRepetition(60, 2), RealReedSolomon(40, 2)], ids=repr)
def test_steps_reach_what_is_certified_as_exact(code):
    alive = np.ones(code.workers, dtype=bool)
    alive[: code.tolerance] = False
    weights = by_products(code.matrix, alive)
    assert np.abs(code.matrix.T @ weights - 1.0).max() < 1e-8


def test_errors_of_codes_too_large_for_dense_matrices_are_refused_with_the_memory():
    code = SoftDesign(10_000, 2)
    alive = np.ones((1, code.workers), dtype=bool)
    with pytest.raises(CodingError, match=r'10000 would take about 4.0 GB .* decoder = "fixed"'):
        code.errors(alive)
    assert code.errors(alive, "fixed")[0] < 1e-9
