from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from outlast.coding.assignment import Assignment
from outlast.coding.codes.partial import (
    PartialCode,
    assignment_of,
    cyclic_orders,
    matching_orders,
    missing_copies,
    moment_curve,
    q_max,
    q_max_bound,
    recombination,
    worst_amplification,
)
from outlast.errors import CodingError


def random_orders(workers, copies, generator):
    """Orders of a random regular assignment, each position a random perfect matching."""
    costs = generator.random((workers, workers))
    orders = np.empty((workers, copies), dtype=np.int64)
    for position in range(copies):
        rows, columns = linear_sum_assignment(costs)
        orders[:, position] = columns
        costs[rows, columns] = 1e6
    return orders


def shuffled(orders, generator):
    return generator.permuted(orders, axis=1)


def missing_of_chunks(step):
    """(chunks,) squared Frobenius norm of what the decoded sum lacks of each chunk's blocks."""
    decoded = step.decode(range(step.workers)).coefficients
    return np.sum((decoded - np.eye(step.parts)[:, None, :]) ** 2, axis=(0, 2))


def recovered(step, gradients):
    sent = [step.encode(w, gradients[step.assignment.chunks_of(w)]) for w in range(step.workers)]
    return step.recover(range(step.workers), np.stack(sent), gradients.shape[1])


@pytest.mark.parametrize(
    ("workers", "copies", "parts"),
    [(1, 1, 1), (2, 2, 2), (3, 2, 1), (3, 2, 2), (4, 2, 2), (3, 3, 1), (3, 3, 2), (3, 3, 3)],
)
def test_every_status_leaves_the_missing_copies_as_residual(workers, copies, parts):
    code = PartialCode(workers, copies, parts)
    held = code.assignment.incidence.toarray().astype(bool)
    gradients = np.random.default_rng(0).standard_normal((workers, 2 * parts))
    for finished in itertools.product([False, True], repeat=workers * copies):
        status = np.zeros_like(held)
        status[held] = finished
        step = code.plan(status)
        expected = np.maximum(parts - status.sum(axis=0), 0)
        np.testing.assert_array_equal(step.residuals, expected)
        np.testing.assert_allclose(missing_of_chunks(step), expected, atol=1e-12)
        assert step.mean_error == pytest.approx(step.decode(range(workers)).mean_error, abs=1e-12)
        assert step.certificate.exact == (not expected.any())
        if step.certificate.exact:
            np.testing.assert_allclose(recovered(step, gradients), gradients.sum(0), atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.data())
def test_random_statuses_of_random_assignments_leave_the_missing_copies(workers, data):
    copies = data.draw(st.integers(1, min(workers, 5)))
    parts = data.draw(st.integers(1, min(copies, 3)))
    generator = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    assignment = assignment_of(random_orders(workers, copies, generator))
    code = PartialCode(workers, copies, parts, assignment=assignment)
    share = generator.random()
    status = (generator.random((workers, workers)) < share) & (assignment.incidence.toarray() > 0)
    step = code.plan(status)
    np.testing.assert_allclose(missing_of_chunks(step), step.residuals, atol=1e-8)
    gradients = generator.standard_normal((workers, 7))
    distance = np.linalg.norm(recovered(step, gradients) - gradients.sum(0))
    assert distance <= step.certificate.bound(np.linalg.norm(gradients, 2)) * (1 + 1e-6) + 1e-8


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_messages_are_as_many_times_shorter_as_there_are_parts(parts):
    code = PartialCode(6, 4, parts)
    step = code.plan(code.assignment.incidence)
    assert step.encode(2, np.ones((4, 12))).shape == (12 // parts,)
    assert step.message_share == 1 / parts


def test_one_part_counts_every_finished_chunk_once_by_who_had_it_first():
    code = PartialCode(5, 3)
    step = code.plan(code.assignment.incidence)
    # Everybody has finished everything: each worker's own chunk counts, no backup does.
    np.testing.assert_array_equal(step.message_matrix.toarray(), np.eye(5))
    # The holders of chunk 2 are workers 2, 1, 0 in this order.
    status = code.assignment.incidence.toarray().astype(bool)
    status[2, 2] = False
    np.testing.assert_array_equal(code.plan(status).message_matrix.toarray()[:, 2], [0, 1, 0, 0, 0])


def test_a_worker_without_a_counted_chunk_need_not_send():
    code = PartialCode(4, 2)
    status = code.assignment.incidence.toarray().astype(bool)
    status[3] = False
    step = code.plan(status)
    idle = [worker for worker in range(4) if not step.coefficients(worker).any()]
    assert idle == [3]
    assert step.decode([0, 1, 2]).error == 0.0


def test_a_worker_that_has_finished_nothing_is_not_waited_for():
    code = PartialCode(6, 3, 2)
    step = code.plan(code.status(np.array([3, 0, 1, 3, 2, 0])))
    without = step.decode([0, 2, 3, 4])
    assert not without.certificate.exact
    assert without.certificate == step.certificate
    np.testing.assert_array_equal(
        without.weights[:, [0, 2, 3, 4]].T, code.recombination[[0, 2, 3, 4]]
    )


def test_the_status_is_the_beginning_of_each_order():
    code = PartialCode(5, 3, assignment=PartialCode(5, 3).assignment)
    done = np.array([0, 1, 2, 3, 2])
    status = code.status(done).toarray()
    for worker in range(5):
        assert set(np.flatnonzero(status[worker])) == set(code.order(worker)[: done[worker]])


def test_parts_need_as_many_copies_and_tolerate_the_others():
    code = PartialCode(9, 5, 2)
    assert code.tolerance == 3
    for gone in itertools.combinations(range(9), 3):
        done = np.full(9, 5)
        done[list(gone)] = 0
        assert code.plan(code.status(done)).certificate.exact


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 25), st.data())
def test_matchings_order_every_regular_assignment(workers, data):
    copies = data.draw(st.integers(1, min(workers, 6)))
    generator = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    assignment = assignment_of(random_orders(workers, copies, generator))
    orders = matching_orders(assignment)
    for position in range(copies):
        assert sorted(orders[:, position]) == list(range(workers))
    for worker in range(workers):
        np.testing.assert_array_equal(np.sort(orders[worker]), assignment.chunks_of(worker))
    assert q_max(orders) == q_max_bound(workers, copies)


def exhaustive_q_max(orders, needed):
    """One more than the most work of any state in which a chunk lacks a copy."""
    workers, copies = orders.shape
    most = -1
    for done in itertools.product(range(copies + 1), repeat=workers):
        begun = [orders[worker, :count] for worker, count in enumerate(done)]
        if np.bincount(np.concatenate(begun), minlength=workers).min() < needed:
            most = max(most, sum(done))
    return most + 1


@pytest.mark.parametrize(("workers", "copies"), [(1, 1), (3, 2), (4, 2), (4, 3), (5, 3), (4, 4)])
@pytest.mark.parametrize("seed", range(3))
def test_the_metric_is_the_worst_of_all_states(workers, copies, seed):
    generator = np.random.default_rng(seed)
    orders = shuffled(random_orders(workers, copies, generator), generator)
    for needed in range(1, copies + 1):
        assert q_max(orders, needed) == exhaustive_q_max(orders, needed)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 20), st.data())
def test_no_order_is_below_the_bound(workers, data):
    copies = data.draw(st.integers(1, min(workers, 6)))
    generator = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    orders = shuffled(random_orders(workers, copies, generator), generator)
    assert q_max(orders) >= q_max_bound(workers, copies)


@pytest.mark.parametrize(("workers", "copies"), [(5, 2), (7, 3), (200, 3), (31, 10)])
def test_the_natural_cyclic_order_meets_the_bound_and_sorting_by_number_does_not(workers, copies):
    orders = cyclic_orders(workers, copies)
    assert q_max(orders) == q_max_bound(workers, copies)
    assert q_max(np.sort(orders, axis=1)) > q_max_bound(workers, copies)
    assert PartialCode(workers, copies).q_max == q_max_bound(workers, copies)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_residuals_at_a_deadline_are_those_of_the_plans(parts):
    generator = np.random.default_rng(0)
    code = PartialCode(12, 4, parts)
    finished = generator.integers(0, 5, (20, 12))
    expected = [code.plan(code.status(done)).residuals.sum() for done in finished]
    np.testing.assert_array_equal(missing_copies(code.orders, finished, parts), expected)


def test_a_deadline_misses_a_chunk_only_when_every_place_is_missed():
    generator = np.random.default_rng(0)
    seconds = 1.0 + generator.exponential(0.5, (1000, 100))
    finished = np.minimum(3.0 // seconds, 3).astype(np.int64)
    lost = missing_copies(cyclic_orders(100, 3), finished).mean() / 100
    # A worker misses its first chunk with probability e^-4, its second with e^-1, its third with 1.
    assert lost == pytest.approx(np.exp(-5.0), rel=0.05)


def test_ten_thousand_workers_are_planned_within_a_second():
    begun = time.process_time()
    code = PartialCode(10_000, 3)
    orders = matching_orders(code.assignment)
    step = code.plan(code.status(np.random.default_rng(0).integers(0, 4, 10_000)))
    certificate = step.certificate
    assert time.process_time() - begun < 1.0
    assert q_max(orders) == code.q_max
    assert certificate.error == np.count_nonzero(step.assignment.copies == 0)
    assert set(step.entries.ravel()) == {0.0, 1.0}


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5])
def test_rows_at_different_angles_are_independent_and_of_norm_one(parts):
    rows = moment_curve(np.linspace(0.0, 6.0, 9), parts)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1.0)
    every = np.array(list(itertools.combinations(range(9), parts)))
    assert np.linalg.svd(rows[every], compute_uv=False)[..., -1].min() > 1e-5


@pytest.mark.parametrize(("workers", "copies", "parts"), [(24, 5, 3), (30, 4, 2), (12, 6, 4)])
def test_no_set_of_holders_amplifies_more_than_stated(workers, copies, parts):
    code = PartialCode(workers, copies, parts)
    worst = 0.0
    for chunk in range(workers):
        holders = code.assignment.holders_of(chunk)
        for size in range(parts, copies + 1):
            for some in itertools.combinations(holders, size):
                inverse = np.linalg.pinv(code.recombination[list(some)])
                worst = max(worst, np.linalg.norm(inverse, 2))
    assert worst == pytest.approx(code.amplification)


def test_angles_chosen_for_the_ring_amplify_less_than_golden_and_random_ones():
    holders = PartialCode(24, 5, 3).assignment.incidence.tocsc().indices.reshape(24, 5)
    found = {
        kind: recombination(holders, 3, kind=kind)[1]
        for kind in ("best", "ring", "golden", "gaussian")
    }
    assert found["best"] == min(found.values())
    assert found["ring"] < found["golden"] / 5 < found["gaussian"] / 5


def test_equal_rows_amplify_without_bound():
    assert worst_amplification(np.ones((3, 2)), np.array([[0, 1], [1, 2], [0, 2]])) > 1e12


@pytest.mark.parametrize(
    ("settings_", "sentence"),
    [
        ((0, 1, 1), "workers = 0 is below 1"),
        ((5, 6, 1), r"copies = 6 is not in \[1, 5\]"),
        ((5, 0, 1), r"copies = 0 is not in \[1, 5\]"),
        ((5, 2, 3), r"parts = 3 is not in \[1, 2\]: every chunk needs at least 3 copies"),
        ((5, 2, 0), r"parts = 0 is not in \[1, 2\]"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_the_range_that_can(settings_, sentence):
    with pytest.raises(CodingError, match=sentence):
        PartialCode(*settings_)


def test_parts_that_amplify_rounding_too_much_are_refused_with_the_figure():
    with pytest.raises(CodingError, match=r"amplifies rounding .* times, in bfloat16"):
        PartialCode(20, 9, 6, dtype="bfloat16")
    assert PartialCode(20, 9, 6, dtype="float64").amplification > 10


def test_assignments_that_are_not_regular_are_refused():
    uneven = Assignment.of([[0, 1], [1, 2], [1, 2]], 3)
    with pytest.raises(CodingError, match="chunks 1 to 3 copies"):
        PartialCode(3, 2, assignment=uneven)
    with pytest.raises(CodingError, match="take copies = 2"):
        PartialCode(3, 3, assignment=uneven)
    wide = Assignment.of([[0, 1], [2, 3]], 4)
    with pytest.raises(CodingError, match="4 chunks to 2 workers"):
        PartialCode(2, 2, assignment=wide)
    with pytest.raises(CodingError, match="as many chunks as workers"):
        matching_orders(wide)


def test_impossible_statuses_are_refused():
    code = PartialCode(4, 2)
    foreign = np.zeros((4, 4), dtype=bool)
    foreign[0, 3] = True
    with pytest.raises(CodingError, match=r"worker 0 is said to have finished chunk 3.*\[0, 1\]"):
        code.plan(foreign)
    with pytest.raises(CodingError, match="shape"):
        code.plan(np.zeros((4, 5), dtype=bool))
    with pytest.raises(CodingError, match=r"4 numbers in \[0, 2\]"):
        code.status(np.array([0, 1, 2, 3]))
    with pytest.raises(CodingError, match=r"copies_needed = 3 is not in \[1, 2\]"):
        q_max(code.orders, 3)
    with pytest.raises(CodingError, match="best, ring, golden, gaussian"):
        PartialCode(4, 2, 2, kind="unit")
