import numpy as np
import pytest

from outlast.coding.assignment import Assignment
from outlast.errors import CodingError


def test_an_assignment_tells_who_computes_what():
    held = Assignment.of([[2, 0], [], [2]], 4)
    assert (held.workers, held.chunks) == (3, 4)
    assert held.loads.tolist() == [2, 0, 1]
    assert held.copies.tolist() == [1, 0, 2, 0]
    assert held.chunks_of(0).tolist() == [0, 2]
    assert held.holders_of(2).tolist() == [0, 2]
    assert np.array_equal(held.incidence.toarray(), [[1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 1, 0]])


@pytest.mark.parametrize(
    ("chunks_of_workers", "message"),
    [
        ([[0], [1, 3]], r"not in \[0, 3\)"),
        ([[0], [1, 2, 1]], "worker 1 is given chunk 1 twice"),
        ([], "at least 1 worker"),
    ],
)
def test_chunks_that_do_not_exist_or_come_twice_are_refused(chunks_of_workers, message):
    with pytest.raises(CodingError, match=message):
        Assignment.of(chunks_of_workers, 3)


def test_neighbours_may_end_and_begin_with_the_same_chunk():
    assert Assignment.of([[0, 1], [1, 2]], 3).copies.tolist() == [1, 2, 1]


def test_workers_and_chunks_that_do_not_exist_are_refused():
    held = Assignment.of(np.array([[1, 0], [2, 1]]), 3)
    assert held.chunks_of(1).tolist() == [1, 2]
    assert held.holders_of(1).tolist() == [0, 1]
    for number in (-1, 3):
        with pytest.raises(CodingError, match=rf"worker = {number} is not in \[0, 2\)"):
            held.chunks_of(number)
        with pytest.raises(CodingError, match=rf"chunk = {number} is not in \[0, 3\)"):
            held.holders_of(number)
