from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.coding.codes.blocks import certify_blocks
from outlast.coding.codes.communication import YeAbbe
from outlast.coding.codes.partial import PartialCode
from outlast.errors import CodingError


def messages(code, gradients, workers=None):
    workers = range(code.workers) if workers is None else workers
    return np.stack([code.encode(w, gradients[code.assignment.chunks_of(w)]) for w in workers])


def orthonormal(code, length, seed=0):
    """Chunk gradients of norm 1 whose blocks are orthogonal and of equal norm."""
    generator = np.random.default_rng(seed)
    square = np.linalg.qr(generator.standard_normal((length, length)))[0]
    blocks = square[: code.chunks * code.parts] / np.sqrt(code.parts)
    return blocks.reshape(code.chunks, code.parts * length)


@pytest.mark.parametrize("size", [1, 5, 6, 7, 8])
def test_gradients_of_any_length_are_padded_and_cut_back(size):
    code = YeAbbe(5, 1, 3)
    gradients = np.random.default_rng(0).standard_normal((5, size))
    sent = messages(code, gradients)
    assert sent.shape == (5, -(-size // 3))
    recovered = code.recover([0, 1, 2, 4], sent[[0, 1, 2, 4]], size)
    np.testing.assert_allclose(recovered, gradients.sum(0), atol=1e-10)


def test_messages_come_in_the_order_in_which_survivors_are_named():
    code = YeAbbe(5, 1, 2)
    gradients = np.random.default_rng(0).standard_normal((5, 6))
    arrived = [3, 0, 4, 2]
    recovered = code.recover(arrived, messages(code, gradients, arrived))
    np.testing.assert_allclose(recovered, gradients.sum(0), atol=1e-10)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_messages_keep_the_type_of_the_gradients(dtype):
    code = YeAbbe(4, 1, 2)
    gradients = np.ones((3, 6), dtype=dtype)
    assert code.encode(0, gradients).dtype == dtype


def test_coefficients_are_the_message_that_a_caller_can_make_itself():
    code = YeAbbe(6, 2, 2)
    gradients = np.random.default_rng(0).standard_normal((4, 8))
    own = sum(
        code.coefficients(3)[chunk, part] * gradients[chunk, 4 * part : 4 * part + 4]
        for chunk in range(4)
        for part in range(2)
    )
    np.testing.assert_allclose(code.encode(3, gradients), own)


@settings(max_examples=50, deadline=None)
@given(st.integers(3, 9), st.data())
def test_the_certificate_bounds_the_error_of_any_gradients(workers, data):
    parts = data.draw(st.integers(1, 3))
    stragglers = data.draw(st.integers(0, workers - parts))
    seed = data.draw(st.integers(0, 10_000))
    code = YeAbbe(workers, stragglers, parts, seed=seed, tolerance=float("inf"))
    generator = np.random.default_rng(seed)
    alive = generator.random(workers) < 0.5
    gradients = generator.standard_normal((workers, 4 * parts))
    gradients[generator.random(workers) < 0.3] *= 30.0
    decoded = code.recover(alive, messages(code, gradients)[alive])
    certificate = code.decode(alive).certificate
    bound = certificate.bound(np.linalg.norm(gradients, 2))
    distance = np.linalg.norm(decoded - gradients.sum(0))
    assert distance <= bound * (1 + 1e-6) + 1e-6 * np.linalg.norm(gradients)


def test_the_bound_is_reached_where_whole_chunks_are_lost():
    code = PartialCode(6, 3, 2)
    status = code.assignment.incidence.toarray().astype(bool)
    status[:, [1, 4]] = False
    step = code.plan(status)
    assert step.certificate.error == pytest.approx(2.0)
    gradients = np.zeros((6, 4))
    gradients[[1, 4]] = [1.0, 2.0, 3.0, 4.0]
    decoded = step.recover(range(6), messages(step, gradients))
    distance = np.linalg.norm(decoded - gradients.sum(0))
    assert distance == pytest.approx(step.certificate.bound(np.linalg.norm(gradients, 2)))


def test_the_bound_is_reached_where_different_blocks_of_different_chunks_add_up():
    coefficients = np.tile(np.eye(2)[:, None, :], (1, 3, 1))
    coefficients[0, 0, 0] += 1.0
    coefficients[0, 1, 1] += 1.0
    certificate = certify_blocks(coefficients, np.zeros((2, 3)), np.zeros(3))
    # Block 0 of the first gradient and block 1 of the second are equal, everything else is 0.
    gradients = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    decoded = np.einsum("acb,cb->a", coefficients, gradients)
    distance = np.linalg.norm(decoded - gradients.sum(0))
    assert distance == pytest.approx(certificate.bound(np.linalg.norm(gradients, 2)))


def test_rescaling_leaves_an_error_from_the_differences_of_chunks_only():
    code = PartialCode(6, 3, 2)
    status = code.assignment.incidence.toarray().astype(bool)
    status[:, 2] = False
    step = code.plan(status)
    generator = np.random.default_rng(0)
    gradients = 100.0 + generator.standard_normal((6, 8))
    rescaled = step.certificate.scale * step.recover(range(6), messages(step, gradients))
    spread = np.linalg.norm(gradients - gradients.mean(0), 2)
    distance = np.linalg.norm(rescaled - gradients.sum(0))
    assert distance <= step.certificate.centred_bound(spread)
    assert step.certificate.scale == pytest.approx(6 / 5)


def test_no_rescaling_is_promised_where_blocks_of_a_chunk_are_mixed():
    code = PartialCode(5, 2, 2)
    status = code.assignment.incidence.toarray().astype(bool)
    status[0, 0] = False
    assert code.plan(status).certificate.centred == float("inf")


def test_the_mean_error_is_that_of_uncorrelated_blocks():
    code = YeAbbe(6, 1, 2)
    gradients = orthonormal(code, 16)
    decoded = code.decode([1, 2, 4])
    recovered = code.recover([1, 2, 4], messages(code, gradients, [1, 2, 4]))
    distance = np.linalg.norm(recovered - gradients.sum(0))
    assert distance**2 == pytest.approx(decoded.mean_error)
    assert decoded.mean_error <= decoded.error


@pytest.mark.parametrize("seed", range(5))
def test_rounded_messages_stay_within_the_rounding_certificate(seed):
    code = YeAbbe(8, 2, 2, seed=seed, dtype="float16", tolerance=float("inf"))
    gradients = orthonormal(code, 32, seed)
    exact = messages(code, gradients)
    for gone in itertools.combinations(range(8), 2):
        alive = np.isin(np.arange(8), gone, invert=True)
        rounding = code.decode(alive).certificate.rounding
        received = exact.astype(np.float16).astype(np.float64)
        distance = np.linalg.norm(code.recover(alive, received[alive]) - gradients.sum(0))
        assert distance <= rounding * np.linalg.norm(gradients.sum(0)) * 1.01


def test_large_codes_decode_without_a_dense_matrix():
    code = PartialCode(1100, 3, 2)
    step = code.plan(code.assignment.incidence)
    alive = np.arange(1100) != 7
    decoded = step.decode(alive)
    # Three chunks lose one of three encoded copies; neighbours' weights make up for a part of it.
    kept = np.where(alive, step.recombination.T, 0.0)
    flat = (step.message_matrix.T @ kept.T).T.reshape(2, 1100, 2)
    unchanged = np.sum((flat - np.eye(2)[:, None, :]) ** 2) / 2
    assert 0.0 < decoded.mean_error < unchanged


def test_nobody_left_decodes_to_nothing():
    decoded = YeAbbe(4, 1, 2).decode([])
    assert decoded.error == pytest.approx(4.0)
    assert not decoded.weights.any()


def test_workers_and_messages_that_do_not_fit_are_refused():
    code = YeAbbe(4, 1, 2)
    with pytest.raises(CodingError, match=r"not all in \[0, 4\)"):
        code.decode([1, 4])
    with pytest.raises(CodingError, match="mask has shape"):
        code.decode(np.ones(3, dtype=bool))
    with pytest.raises(CodingError, match="3 workers survive"):
        code.recover([0, 1, 2], np.ones((2, 4)))
    with pytest.raises(CodingError, match="name a worker twice"):
        code.recover([0, 1, 1], np.ones((3, 4)))
    with pytest.raises(CodingError, match="computes 3 chunks"):
        code.encode(0, np.ones((2, 4)))
