"""The place that brings the run back soonest is chosen."""

from hypothesis import given
from hypothesis import strategies as st

from outlast.recover.cost import BYTES_PER_S, RestoreSource, cheapest_source


def test_nothing_to_choose_from_is_nothing() -> None:
    assert cheapest_source([], 1.0) is None


def test_of_equal_states_the_fastest_place_wins() -> None:
    order = ["peer", "memory", "parity", "disk", "shared"]
    assert sorted(BYTES_PER_S, key=lambda source: -BYTES_PER_S[source]) == order
    candidates = [RestoreSource(source, 10, 10**9) for source in reversed(order)]
    while candidates:
        best = cheapest_source(candidates, 1.0)
        assert best is not None
        assert best.source == order.pop(0)
        candidates.remove(best)


def test_a_newer_state_on_disk_beats_memory_when_steps_are_dear() -> None:
    memory, disk = RestoreSource("memory", 10, 10**9), RestoreSource("disk", 20, 10**9)
    assert cheapest_source([memory, disk], 10.0) == disk
    assert cheapest_source([memory, disk], 0.01) == memory


def test_measured_rates_replace_assumed_ones() -> None:
    memory, disk = RestoreSource("memory", 10, 10**9), RestoreSource("disk", 10, 10**9, 1e11)
    assert cheapest_source([memory, disk], 1.0) == disk


@given(
    st.lists(
        st.builds(
            RestoreSource,
            st.sampled_from(sorted(BYTES_PER_S)),
            st.integers(0, 100),
            st.integers(0, 10**9),
        ),
        min_size=1,
    ),
    st.floats(0.0, 100.0),
)
def test_no_candidate_brings_the_run_back_sooner(found: list[RestoreSource], step: float) -> None:
    best = cheapest_source(found, step)
    assert best is not None
    newest = max(each.step for each in found)
    back = best.seconds + (newest - best.step) * step
    assert all(back <= each.seconds + (newest - each.step) * step for each in found)
