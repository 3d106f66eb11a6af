import time

import numpy as np
import pytest
from every_pattern import check_every_pattern, every_mask, least_error
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.coding.design import SoftDesign, SymmetricDesign, singer_difference_set
from outlast.errors import CodingError

SMALL = {
    "Fano plane": SymmetricDesign(7),
    "biplane": SymmetricDesign(11),
    "soft": SoftDesign(9, 3),
    "soft, more chunks": SoftDesign(6, 4, chunks=11),
    "soft, fewer chunks": SoftDesign(8, 3, chunks=5),
    "soft, everybody": SoftDesign(5, 5),
    "soft, once": SoftDesign(6, 1),
}
DESIGNS = ["Fano plane", "biplane"]


@pytest.mark.parametrize("name", SMALL)
def test_every_pattern_has_the_least_error_and_keeps_the_bounds(name):
    check_every_pattern(SMALL[name])


@pytest.mark.parametrize("name", DESIGNS)
def test_who_straggles_makes_no_difference(name):
    code = SMALL[name]
    masks = every_mask(code.workers)
    for stragglers in range(code.workers):
        some = masks[code.workers - masks.sum(axis=1) == stragglers][::7]
        errors = np.array([least_error(code, alive) for alive in some])
        np.testing.assert_allclose(errors, code.worst_error(stragglers).value, atol=1e-9)
    assert code.worst_error(2).kind == "exact"
    assert np.array_equal(code.errors(masks), code.errors(masks, "fixed"))


@pytest.mark.parametrize("workers", [7, 11, 13, 19, 21, 23, 31, 57, 73, 91, 133, 307])
def test_difference_sets_have_every_difference_equally_often(workers):
    code = SymmetricDesign(workers)
    shared = (code.matrix @ code.matrix.T).toarray()
    assert set(shared[~np.eye(workers, dtype=bool)]) == {code.overlap}
    assert set(np.diag(shared)) == {code.replication}
    assert code.binary
    assert code.replication * (code.replication - 1) == code.overlap * (workers - 1)


@pytest.mark.parametrize("order", [2, 3, 5, 7, 11, 13])
def test_planes_of_prime_order_exist(order):
    line = singer_difference_set(order)
    points = order * order + order + 1
    differences = {(a - b) % points for a in line for b in line if a != b}
    assert len(line) == order + 1
    assert differences == set(range(1, points))


@pytest.mark.alone
def test_ten_thousand_workers_are_built_and_decoded_within_a_second():
    begun = time.process_time()
    code = SymmetricDesign(97 * 97 + 97 + 1)
    decoded = code.decode(np.arange(code.workers) % 10 != 0)
    assert time.process_time() - begun < 1.0
    assert decoded.error == pytest.approx(code.worst_error(951).value)
    begun = time.process_time()
    soft = SoftDesign(10_000, 3)
    decoded = soft.decode(np.arange(10_000) % 10 != 0, "fixed")
    assert time.process_time() - begun < 1.0
    assert soft.most_shared == 1
    assert decoded.error <= soft.worst_error(1000).value


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 30), st.integers(0, 1000))
def test_soft_designs_exist_for_any_parameters(workers, copies, chunks, seed):
    copies = min(copies, workers)
    code = SoftDesign(workers, copies, chunks=chunks, seed=seed)
    assert code.binary
    assert set(code.assignment.copies) == {copies}
    assert code.assignment.loads.max() - code.assignment.loads.min() <= 1
    assert code.decode(np.ones(workers, dtype=bool)).error == 0.0
    masks = np.random.default_rng(seed).random((5, workers)) < 0.7
    errors = code.errors(masks, "fixed")
    for alive, fixed in zip(masks, errors, strict=True):
        least = least_error(code, alive)
        assert fixed == pytest.approx(code.decode(alive, "fixed").error, abs=1e-9)
        assert least - 1e-9 <= fixed
        assert least <= code.worst_error(int((~alive).sum())).value + 1e-9


def test_soft_designs_share_more_equally_than_chance():
    code = SoftDesign(60, 6)
    generator = np.random.default_rng(0)
    chance = []
    for _ in range(20):
        matrix = np.zeros((60, 60))
        for chunk in range(60):
            matrix[generator.choice(60, 6, replace=False), chunk] = 1
        shared = matrix @ matrix.T
        chance.append(shared[~np.eye(60, dtype=bool)].var())
    shared = (code.matrix @ code.matrix.T).toarray()
    assert shared[~np.eye(60, dtype=bool)].var() < 0.8 * min(chance)


def test_the_mean_of_equal_weights_is_exact_for_soft_designs():
    code = SMALL["soft"]
    masks = every_mask(code.workers)
    errors = code.errors(masks, "fixed")
    gone = code.workers - masks.sum(axis=1)
    for stragglers in range(code.workers):
        found = errors[gone == stragglers].mean()
        assert found == pytest.approx(code.expected_error(stragglers).value, abs=1e-9)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: SymmetricDesign(100), "no known difference set; take 91 or 103"),
        (lambda: SymmetricDesign(4), "take 7"),
        (lambda: SymmetricDesign(13, difference_set=(0, 1, 2, 3)), "modulo 13 equally often"),
        (lambda: SymmetricDesign(7, difference_set=()), "a difference set of 0"),
        (lambda: SymmetricDesign(1, difference_set=(0,)), "modulo 1 equally often"),
        (lambda: SoftDesign(0, 1), "workers = 0 is below 1"),
        (lambda: SoftDesign(4, 5), "copies = 5 is not in"),
        (lambda: SoftDesign(4, 2, chunks=0), "chunks = 0"),
        (lambda: SymmetricDesign(7).worst_error(8), "stragglers = 8"),
    ],
)
def test_what_is_no_design_is_refused(build, words):
    with pytest.raises(CodingError, match=words):
        build()
