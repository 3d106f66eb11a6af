from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.coding.codes.blocks import block_conditioning
from outlast.coding.codes.communication import StableBlocks, YeAbbe
from outlast.errors import CodingError

SMALL = [
    (workers, stragglers, parts)
    for workers in range(1, 7)
    for stragglers in range(workers)
    for parts in range(1, workers - stragglers + 1)
]


def without(workers, gone):
    alive = np.ones(workers, dtype=bool)
    alive[list(gone)] = False
    return alive


def up_to(workers, stragglers):
    sizes = range(stragglers + 1)
    return itertools.chain(*(itertools.combinations(range(workers), size) for size in sizes))


def send(code, gradients, alive):
    numbers = np.flatnonzero(alive)
    return np.stack([code.encode(w, gradients[code.assignment.chunks_of(w)]) for w in numbers])


def recovery_error(code, gradients, alive):
    total = gradients.astype(np.float64).sum(0)
    found = code.recover(alive, send(code, gradients, alive), len(total))
    return np.linalg.norm(found - total) / np.linalg.norm(total)


@pytest.mark.parametrize("kind", ["random", "vandermonde"])
@pytest.mark.parametrize(("workers", "stragglers", "parts"), SMALL)
def test_every_set_of_tolerated_stragglers_leaves_the_gradient_exact(
    workers, stragglers, parts, kind
):
    code = YeAbbe(workers, stragglers, parts, kind=kind)
    gradients = np.random.default_rng(1).standard_normal((workers, 2 * parts + 1))
    for gone in up_to(workers, stragglers):
        alive = without(workers, gone)
        assert code.error(alive) == 0.0
        assert recovery_error(code, gradients, alive) < 1e-9


@pytest.mark.parametrize(("workers", "stragglers", "parts"), SMALL)
def test_workers_that_encode_once_survivors_are_known_leave_the_gradient_exact(
    workers, stragglers, parts
):
    scheme = StableBlocks(workers, stragglers, parts)
    gradients = np.random.default_rng(1).standard_normal((workers, 2 * parts + 1))
    for gone in up_to(workers, stragglers):
        alive = without(workers, gone)
        code = scheme.agreed(alive)
        assert code.certificate.exact
        assert recovery_error(code, gradients, alive) < 1e-12


@pytest.mark.parametrize(("workers", "stragglers", "parts"), SMALL)
def test_a_worker_computes_stragglers_plus_parts_chunks_and_sends_a_part_of_a_gradient(
    workers, stragglers, parts
):
    code = YeAbbe(workers, stragglers, parts)
    assert set(code.assignment.loads) == set(code.assignment.copies) == {stragglers + parts}
    assert code.load == stragglers + parts
    assert code.message_share == 1 / parts
    gradients = np.ones((stragglers + parts, 12 * parts))
    assert code.encode(0, gradients).shape == (12,)


def test_one_straggler_more_than_tolerated_is_certified():
    code = YeAbbe(7, 2, 2)
    for gone in itertools.combinations(range(7), 3):
        decoded = code.decode(without(7, gone))
        assert not decoded.certificate.exact
        assert 0.0 < decoded.mean_error < 7.0


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 14), st.data())
def test_random_settings_recover_the_sum(workers, data):
    stragglers = data.draw(st.integers(0, min(workers - 1, 4)))
    parts = data.draw(st.integers(1, min(workers - stragglers, 4)))
    seed = data.draw(st.integers(0, 1000))
    generator = np.random.default_rng(seed)
    code = YeAbbe(workers, stragglers, parts, seed=seed, dtype="float64")
    alive = without(workers, generator.permutation(workers)[:stragglers])
    gradients = generator.standard_normal((workers, 9))
    found = code.decode(alive)
    assert found.certificate.exact
    # The certificate is for orthogonal gradients; these are close, and sums may cancel a little.
    assert recovery_error(code, gradients, alive) <= 1e2 * found.certificate.rounding + 1e-12


def test_the_seed_decides_the_random_code():
    first, again, other = (YeAbbe(6, 1, 2, seed=seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first.entries, again.entries)
    assert not np.allclose(first.entries, other.entries)


def test_the_deterministic_code_of_many_workers_is_refused_with_its_rounding_error():
    with pytest.raises(CodingError, match=r"rounding could be 0\.5\d of the gradient"):
        YeAbbe(24, 2, 3, kind="vandermonde")


def test_a_wider_type_lets_an_ill_conditioned_code_pass():
    code = YeAbbe(24, 2, 3, kind="vandermonde", dtype="float64")
    assert block_conditioning(code, patterns=50).rounding < 1e-6


def test_short_types_are_refused_for_the_random_code_and_served_by_the_stable_one():
    with pytest.raises(CodingError, match="take StableBlocks"):
        YeAbbe(24, 2, 3, dtype="float16")
    scheme = StableBlocks(24, 2, 3, dtype="float16")
    gradients = np.random.default_rng(0).standard_normal((24, 30)).astype(np.float16)
    for gone in [(0, 1), (3, 4), (5, 17)]:
        alive = without(24, gone)
        code = scheme.agreed(alive)
        assert recovery_error(code, gradients, alive) < 2e-3
        assert code.certificate.rounding < 5e-3


@pytest.mark.parametrize(("workers", "stragglers", "parts"), [(24, 2, 3), (30, 2, 2)])
def test_the_stable_scheme_keeps_single_precision(workers, stragglers, parts):
    scheme = StableBlocks(workers, stragglers, parts)
    gradients = np.random.default_rng(0).standard_normal((workers, 60)).astype(np.float32)
    for first in range(workers):
        alive = without(workers, [first, (first + 1) % workers])
        assert recovery_error(scheme.agreed(alive), gradients, alive) < 1e-7


def test_a_worker_lost_after_the_agreement_leaves_a_certified_error():
    scheme = StableBlocks(6, 2, 2)
    code = scheme.agreed([0, 1, 2, 4, 5])
    left = np.array([0, 1, 4, 5])
    decoded = code.decode(left)
    assert not decoded.certificate.exact
    gradients = np.random.default_rng(0).standard_normal((6, 8))
    found = code.recover(left, send(code, gradients, code.mask(left)))
    distance = np.linalg.norm(found - gradients.sum(0))
    assert 1e-6 < distance <= decoded.certificate.bound(np.linalg.norm(gradients, 2))


def test_the_load_decides_how_many_stragglers_are_tolerated():
    assert YeAbbe.of_load(8, 5, 2).tolerance == 3
    assert YeAbbe.of_load(8, 2, 2).tolerance == 0


@pytest.mark.parametrize("kind", [YeAbbe, StableBlocks])
@pytest.mark.parametrize(
    ("workers", "stragglers", "parts", "sentence"),
    [
        (6, 3, 4, "take parts = 3 or stragglers = 2"),
        (3, 1, 9, "take parts = 2$"),
        (6, 6, 1, r"stragglers = 6 is not in \[0, 5\]"),
        (6, -1, 1, r"stragglers = -1 is not in \[0, 5\]"),
        (6, 1, 0, "parts = 0 is below 1"),
        (0, 0, 1, "workers = 0 is below 1"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_the_nearest_that_can(
    kind, workers, stragglers, parts, sentence
):
    with pytest.raises(CodingError, match=sentence):
        kind(workers, stragglers, parts)


def test_unknown_names_and_too_small_loads_are_refused():
    with pytest.raises(CodingError, match="random, vandermonde"):
        YeAbbe(6, 1, 2, kind="fourier")
    with pytest.raises(CodingError, match="float32"):
        YeAbbe(6, 1, 2, dtype="int8")
    with pytest.raises(CodingError, match=r"load = 2 is not in \[parts, workers\] = \[3, 6\]"):
        YeAbbe.of_load(6, 2, 3)


def test_too_many_workers_are_refused_with_the_code_that_has_them():
    with pytest.raises(CodingError, match=r"workers = 501 is above 500: .* StableBlocks"):
        YeAbbe(501, 2, 2)
