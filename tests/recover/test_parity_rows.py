"""Updates and rebuilds of whole groups in one process, with messages handed over at once."""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.recover.parity import (
    Change,
    Rebuild,
    RecoverableEpoch,
    RowMethod,
    RowWork,
    Update,
    changed_stripes,
)
from outlast.recover.parity_code import (
    Bytes,
    Layout,
    ParityFile,
    ParityMark,
    combine,
    products,
    weight,
)

STRIPE = 64


def _exchange(rows: int, plans: Sequence[Callable[[int], RowWork]]) -> int:
    """Do all rows of all members; returns how many bytes were sent."""
    sent = 0
    for row in range(rows):
        works = [plan(row) for plan in plans]
        for member, work in enumerate(works):
            got = []
            for peer, size in work.receives:
                (data,) = (data for to, data in works[peer].sends if to == member)
                assert data.nbytes == size
                got.append(data.copy())
            sent += sum(data.nbytes for _, data in work.sends)
            assert len(work.receives) == sum(to == member for each in works for to, _ in each.sends)
            if work.finish is not None:
                work.finish(got)
    return sent


class _Group:
    def __init__(self, folder: str, layout: Layout) -> None:
        self.layout = layout
        self.files = [
            ParityFile(Path(folder) / str(member), "parity", layout, member)
            for member in range(layout.members)
        ]
        self.data: list[Bytes] = []
        self.epoch = 0

    def update(self, data: list[Bytes]) -> int:
        old: Sequence[Bytes | None] = self.data or [None] * len(data)
        changed = tuple(map(changed_stripes, [self.layout] * len(data), old, data))
        before = tuple(each.nbytes for each in self.data) or (0,) * len(data)
        after = tuple(each.nbytes for each in data)
        change = Change(self.layout, before, after, changed, whole=not self.data)
        updates = []
        for member, file in enumerate(self.files):
            file.begin(change.rows)
            hashes = [0] * self.layout.stripes(after[member])
            updates.append(Update(member, change, file, old[member], data[member], hashes))
        sent = _exchange(change.rows, [each.plan for each in updates])
        self.epoch += 1
        self.data = data
        for file in self.files:
            file.prepare(self.mark)
            file.commit(self.mark)
        return sent

    @property
    def mark(self) -> ParityMark:
        return ParityMark(
            self.epoch, tuple(each.nbytes for each in self.data), (0,) * len(self.data)
        )

    def check(self) -> None:
        """All parity is by its definition that of the data."""
        for row in range(self.layout.rows(self.mark.lengths)):
            for which, holder in enumerate(self.layout.holders(row)):
                expected = np.zeros(STRIPE, np.uint8)
                for member in self.layout.contributors(row):
                    stripe = self.layout.data_stripe(member, row)
                    begin, end = self.layout.span(self.data[member].nbytes, stripe)
                    part = products(weight(which, member))[self.data[member][begin:end]]
                    expected[: part.size] ^= part
                kept = self.files[holder].stripe(self.mark, self.layout.parity_stripe(holder, row))
                assert np.array_equal(kept, expected)


def _bytes(draw: st.DrawFn, nbytes: int) -> Bytes:
    return np.random.default_rng(draw(st.integers(0, 2**32))).integers(0, 256, nbytes, np.uint8)


@st.composite
def histories(draw: st.DrawFn) -> tuple[Layout, list[list[Bytes]]]:
    """States of some epochs: each member's changes in part, grows, shrinks or stays."""
    losses = draw(st.integers(1, 2))
    layout = Layout(draw(st.integers(losses + 1, 6)), losses, STRIPE)
    now = [_bytes(draw, draw(st.integers(0, 700))) for _ in range(layout.members)]
    history = [now]
    for _ in range(draw(st.integers(0, 3))):
        following = []
        for data in now:
            nbytes = data.nbytes if draw(st.booleans()) else draw(st.integers(0, 700))
            new = _bytes(draw, nbytes)
            kept = draw(st.integers(0, min(data.nbytes, nbytes)))
            new[:kept] = data[:kept]
            following.append(new)
        now = following
        history.append(now)
    return layout, history


@settings(max_examples=25)
@given(histories())
def test_parity_follows_every_change_of_the_data(case: tuple[Layout, list[list[Bytes]]]) -> None:
    layout, history = case
    with TemporaryDirectory() as folder:
        group = _Group(folder, layout)
        for data in history:
            group.update(data)
            group.check()


@settings(max_examples=25)
@given(histories(), st.data())
def test_any_losses_are_rebuilt(
    case: tuple[Layout, list[list[Bytes]]], draw: st.DataObject
) -> None:
    layout, history = case
    members = st.sets(st.integers(0, layout.members - 1), max_size=layout.losses)
    lost = draw.draw(members)
    with TemporaryDirectory() as folder:
        group = _Group(folder, layout)
        for data in history:
            group.update(data)
        situation = RecoverableEpoch(group.mark, frozenset(lost), frozenset(lost))
        rebuilds = []
        for member, data in enumerate(group.data):
            own = data
            if member in lost:
                group.files[member].close(remove=True)
                group.files[member] = ParityFile(Path(folder) / "new", "parity", layout, member)
                group.files[member].begin(layout.rows(group.mark.lengths))
                own = np.full(data.nbytes, 99, np.uint8)
            rebuilds.append(Rebuild(layout, situation, member, group.files[member], own))
        _exchange(len(rebuilds[0].rows), [each.plan for each in rebuilds])
        for member in lost:
            assert np.array_equal(rebuilds[member].data, group.data[member])
            group.files[member].prepare(group.mark)
            group.files[member].commit(group.mark)
        group.check()


def test_stripes_that_did_not_change_are_not_sent() -> None:
    layout = Layout(4, 1, STRIPE)
    data = [np.full(10 * STRIPE, member, np.uint8) for member in range(4)]
    later = [each.copy() for each in data]
    later[2][5 * STRIPE] ^= 1
    with TemporaryDirectory() as folder:
        group = _Group(folder, layout)
        assert group.update(data) == 40 * STRIPE
        assert group.update(later) == STRIPE
        group.check()


def test_where_all_changed_the_data_are_sent_and_where_some_did_the_difference() -> None:
    layout = Layout(3, 1, STRIPE)
    lengths = (STRIPE, STRIPE, 0)
    changed = (np.array([True]), np.array([False]), np.zeros(0, np.bool_))
    some = Change(layout, lengths, lengths, changed, whole=False)
    # Row 0 has members 0 and 1, and its parity lies at member 2.
    assert some.row(0).how is RowMethod.DELTA
    assert some.row(0).senders == ((0, STRIPE),)
    both = (np.array([True]), np.array([True]), np.zeros(0, np.bool_))
    assert Change(layout, lengths, lengths, both, whole=False).row(0).how is RowMethod.WHOLE
    none = (np.array([False]), np.array([False]), np.zeros(0, np.bool_))
    assert Change(layout, lengths, lengths, none, whole=False).row(0).how is RowMethod.STAYS


def test_a_difference_is_the_sum_of_both() -> None:
    old, new = np.array([1, 2, 3], np.uint8), np.array([5, 2], np.uint8)
    out = np.empty(3, np.uint8)
    combine(out, [(1, old), (1, new)])
    assert out.tolist() == [4, 0, 3]
