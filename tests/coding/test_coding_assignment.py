import pytest

from outlast.coding import FractionalRepetition
from outlast.errors import CodingError


def test_an_assignment_tells_who_computes_what():
    held = FractionalRepetition(6, 2).assignment
    assert held.loads.tolist() == held.copies.tolist() == [3] * 6
    assert held.chunks_of(4).tolist() == [3, 4, 5]


@pytest.mark.parametrize("worker", [-1, 6])
def test_workers_that_do_not_exist_are_refused(worker):
    with pytest.raises(CodingError, match=rf"worker = {worker} is not in \[0, 6\)"):
        FractionalRepetition(6, 2).assignment.chunks_of(worker)
