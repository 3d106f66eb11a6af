"""Stripes and their parity lie so that a few lost members never take too much of a row."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import RecoverError
from outlast.recover.parity_code import Layout


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    losses = draw(st.integers(1, 2))
    return Layout(draw(st.integers(losses + 1, 12)), losses, 64)


@given(layouts(), st.integers(0, 40))
def test_a_row_takes_one_stripe_of_every_member(layout: Layout, row: int) -> None:
    holders, contributors = layout.holders(row), layout.contributors(row)
    assert len(set(holders)) == layout.losses
    assert sorted((*holders, *contributors)) == list(range(layout.members))


@given(layouts())
def test_stripes_are_numbered_along_the_rows_without_gaps(layout: Layout) -> None:
    data, parity = [0] * layout.members, [0] * layout.members
    for row in range(3 * layout.members):
        for member in layout.contributors(row):
            assert layout.data_stripe(member, row) == data[member]
            assert layout.row_of_data(member, data[member]) == row
            data[member] += 1
        for member in range(layout.members):
            assert layout.parity_stripe(member, row) == parity[member]
        for member in layout.holders(row):
            assert layout.parity_stripe(member, row) == parity[member]
            parity[member] += 1


@given(layouts(), st.data())
def test_any_losses_up_to_the_promised_ones_leave_enough(
    layout: Layout, data: st.DataObject
) -> None:
    members = st.integers(0, layout.members - 1)
    lost = data.draw(st.sets(members, max_size=layout.losses))
    assert layout.survives(lost, lost)


@given(layouts(), st.data())
def test_one_more_loss_is_too_many(layout: Layout, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(layout.members)))
    lost = set(order[: layout.losses + 1])
    assert not layout.survives(lost, lost)


@given(layouts())
def test_all_parity_may_be_lost_while_the_data_are_there(layout: Layout) -> None:
    assert layout.survives((), range(layout.members))


@given(layouts(), st.lists(st.integers(0, 3000), min_size=12, max_size=12))
def test_rows_reach_just_as_far_as_the_data(layout: Layout, lengths: list[int]) -> None:
    lengths = lengths[: layout.members]
    rows = layout.rows(lengths)
    reached = [
        layout.row_of_data(member, stripe)
        for member, nbytes in enumerate(lengths)
        for stripe in range(layout.stripes(nbytes))
    ]
    assert rows == max(reached, default=-1) + 1


@given(layouts(), st.integers(0, 100_000))
def test_parity_takes_its_share_and_no_more(layout: Layout, nbytes: int) -> None:
    rows = layout.rows([nbytes] * layout.members)
    for member in range(layout.members):
        kept = layout.parity_stripe(member, rows) * layout.stripe_bytes
        share = nbytes * layout.losses / (layout.members - layout.losses)
        assert kept <= share + 2 * layout.losses * layout.stripe_bytes


def test_data_are_cut_into_stripes_of_which_the_last_is_short() -> None:
    layout = Layout(3, 1, 64)
    assert layout.stripes(0) == 0
    assert layout.stripes(65) == 2
    assert [layout.span(100, stripe) for stripe in range(3)] == [(0, 64), (64, 100), (100, 100)]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((4, 3), "losses = 3 is not 1 or 2"),
        ((2, 2), "2 members cannot share parity for 2 losses: it takes 3 to 255"),
        ((256, 1), "256 members cannot share parity"),
        ((4, 1, 100), "stripe_bytes = 100 is not a positive multiple of 64"),
    ],
)
def test_what_cannot_be_is_refused(settings: tuple[int, ...], said: str) -> None:
    with pytest.raises(RecoverError, match=said):
        Layout(*settings)
