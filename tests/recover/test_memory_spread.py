"""Who keeps parity of whom: no two of a group are lost together, and every place is taken again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import RecoverError
from outlast.recover.redundancy import Redundancy, Spread, even_parts, nodes_of, roles
from outlast.recover.restart import Holding, Part
from outlast.state.box import Box


def holdings(nodes: list[str], *, sharded: bool) -> list[Holding]:
    found = []
    for rank, node in enumerate(nodes):
        box = Box((rank if sharded else 0,), (1,))
        found.append(Holding(node, {"w": Part("float32", (len(nodes),), box, 4)}, ()))
    return found


@given(count=st.integers(1, 40), largest=st.integers(2, 10))
def test_parts_are_even_and_hold_everything_in_order(count: int, largest: int) -> None:
    parts = even_parts(list(range(count)), largest)
    assert [each for part in parts for each in part] == list(range(count))
    sizes = {len(part) for part in parts}
    assert max(sizes) <= largest
    assert max(sizes) - min(sizes) <= 1


@given(nodes=st.integers(2, 12), each=st.integers(1, 4), largest=st.integers(2, 5))
def test_no_group_has_two_processes_of_a_node(nodes: int, each: int, largest: int) -> None:
    names = [f"node-{number}" for number in range(nodes) for _ in range(each)]
    spread = Spread(nodes_of(names), 1, largest, "node")
    groups = spread.groups()
    assert sorted(rank for group in groups for rank in group) == list(range(nodes * each))
    assert all(len({names[rank] for rank in group}) == len(group) for group in groups)


def test_parity_is_kept_by_itself_only_where_a_node_holds_what_no_other_does() -> None:
    two = ["a", "a", "b", "b"]
    assert Redundancy().spread(holdings(two, sharded=False)) is None
    assert Redundancy().spread(holdings(["a"] * 4, sharded=True)) is None
    found = Redundancy().spread(holdings(two, sharded=True))
    assert found == Spread(((0, 1), (2, 3)), 1, 8, "node")
    by_process = Redundancy(domain="process").spread(holdings(["a"] * 4, sharded=True))
    assert by_process is not None
    assert by_process.groups() == [(0, 1, 2, 3)]
    assert Redundancy(losses=0).spread(holdings(two, sharded=True)) is None


def test_more_than_is_possible_is_refused_with_what_is() -> None:
    with pytest.raises(RecoverError, match=r"parity = 2 needs .* 3, but .* 2 nodes make one of 2"):
        Redundancy(losses=2).spread(holdings(["a", "b"], sharded=True))
    with pytest.raises(RecoverError, match="as many processes on each node"):
        Redundancy(losses=1).spread(holdings(["a", "a", "b"], sharded=True))
    with pytest.raises(RecoverError, match=r"parity_group = 2 and 4 processes make one of 2"):
        Redundancy(losses=2, largest=2, domain="process").check(["a"] * 4)
    # By itself none is kept where none can be.
    assert Redundancy().spread(holdings(["a", "a", "b"], sharded=True)) is None


def test_survivors_keep_their_places_and_the_new_take_those_of_the_lost() -> None:
    spread = Spread(((0, 1), (2, 3), (4, 5)), 1, 8, "node")
    # The second node is lost; its substitute comes first, the others have changed places.
    now = nodes_of(["new", "new", "third", "third", "first", "first"])
    assert roles(spread, now, {1: 2, 2: 0}) == {0: 2, 1: 3, 2: 4, 3: 5, 4: 0, 5: 1}


def test_another_number_of_processes_cannot_take_the_places() -> None:
    spread = Spread(((0, 1), (2, 3)), 1, 8, "node")
    assert roles(spread, nodes_of(["a", "a"]), {0: 0}) is None


def test_other_numbers_of_processes_on_the_same_nodes_cannot_take_the_places() -> None:
    spread = Spread(((0, 1), (2,)), 1, 8, "process")
    assert roles(spread, nodes_of(["a", "a", "b"]), {0: 0, 1: 1}) == {0: 0, 1: 1, 2: 2}
    assert roles(spread, nodes_of(["a", "b", "b"]), {0: 0, 1: 1}) is None
