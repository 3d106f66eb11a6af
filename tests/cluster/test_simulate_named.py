"""Plans with named nodes, as Slurm's backfill makes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.cluster.scheduler import Settings, Table, best_fit
from outlast.cluster.simulate import Simulation
from outlast.errors import ClusterError


@pytest.mark.parametrize(
    ("free", "count", "chosen"),
    [
        (0b111111, 2, 0b000011),  # lowest first
        (0b110111, 2, 0b110000),  # the tightest run that is long enough
        (0b110111, 4, 0b010111),  # none is: the longest, then what is left
        (0b101010, 3, 0b101010),
        (0b1, 1, 0b1),
    ],
)
def test_best_fit(free: int, count: int, chosen: int) -> None:
    assert best_fit(free, count) == chosen


@given(st.integers(1, 2**40 - 1), st.data())
def test_best_fit_takes_as_many_as_asked_out_of_the_free(free: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, free.bit_count()))
    chosen = best_fit(free, count)
    assert chosen & ~free == 0
    assert chosen.bit_count() == count


def test_table_of_reservations() -> None:
    table = Table(0.0, 0b1111)
    assert table.open(0, 50) == (0b1111, None)
    assert table.reserve_all(10, 20, 0b0011)
    assert table.open(0, 5) == (0b1111, 10)
    assert table.open(0, 10) == (0b1100, 10)  # Slurm counts the very end as part of a span
    assert table.open(20, 30) == (0b1111, None)
    assert not table.reserve_all(0, 10, 0b0001)
    assert not table.reserve_all(15, 25, 0b0110)
    assert table.reserve_all(15, 25, 0b0100)
    assert table.open(12, 14) == (0b1100, 15)


SLURM_LIKE = Settings(named_nodes=True, backfill_resolution_seconds=1, end_window_seconds=30)


def test_the_schedule_that_a_real_slurm_made() -> None:
    """Recorded from Slurm 22.05 with six nodes: jobs 5 and 6 wait though nodes are free.

    Its passes came every 2 s, so that starts came up to 2 s later than they could.
    """
    simulation = Simulation(6, backfill="conservative", scheduler=SLURM_LIKE)
    jobs = [(1, 2, 20), (5, 1, 9), (1, 3, 12), (2, 1, 10), (5, 1, 4), (1, 3, 5), (1, 2, 5)]
    for place, (nodes, minutes, run) in enumerate(jobs):
        simulation.submit(nodes, minutes * 60, run, at=place / 2)
    simulation.run()
    recorded = [0, 0, 9, 9, 20, 22, 26]
    assert simulation.starts() == pytest.approx(recorded, abs=2)


def test_failing_nodes_need_numbers() -> None:
    with pytest.raises(ClusterError, match="named_nodes and node_failures_per_second"):
        Settings(named_nodes=True, node_failures_per_second=1e-6)
