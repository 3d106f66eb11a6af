"""Parity of sharded state over processes: any one or two lost buffers are rebuilt bit for bit.

A group of processes keep parity of each other's state (`ParityGroup`): the messages between its
members, each with a deadline, and one member's part in an update of parity and in a rebuild.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import ProcessGroup, Work

from outlast.errors import RecoverError
from outlast.recover.parity_code import (
    STRIPE_BYTES,
    Buffer,
    Bytes,
    Combination,
    Layout,
    ParityFile,
    ParityMark,
    Stripe,
    as_bytes,
    combine,
    digest,
    hash_stripe,
    hash_stripes,
    rebuilding,
    same,
    stripes_of,
    weight,
)

__all__ = ["Buffer", "ParityGroup", "Recovered", "Updated"]

Flags = NDArray[np.bool_]
# What members tell each other mostly fits into one message with its length.
_SHORT_BYTES = 1024
_COUNT_BYTES = 8
_Result = TypeVar("_Result")
_rebuilding = functools.lru_cache(maxsize=1024)(rebuilding)


class AgreedError(RecoverError):
    """All members know of this failure, so they can continue together."""


@dataclass(frozen=True)
class RowWork:
    """Sends and receives of one member for one row.

    Attributes:
        sends: To whom, and which bytes; they must stay as they are until the row is finished.
        receives: From whom, and how many bytes.
        finish: Called with what was received, in this order.
    """

    sends: list[tuple[int, Bytes]] = field(default_factory=list)
    receives: list[tuple[int, int]] = field(default_factory=list)
    finish: Callable[[list[Bytes]], None] | None = None


class Transport:
    """A process group as its members use it.

    Args:
        group: A gloo group that nothing else uses at the same time.
        stripe_bytes: The longest message between two members.
        timeout_seconds: How long any one message may take.
    """

    def __init__(self, group: ProcessGroup, stripe_bytes: int, timeout_seconds: float) -> None:
        self._group = group
        self._stripe_bytes = stripe_bytes
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        # Kept from update to update: fresh memory costs more than what is received into it.
        self._pools: tuple[list[tuple[torch.Tensor, Bytes]], ...] = ([], [])
        self.sent_bytes = 0
        self.received_bytes = 0

    def gather(self, content: Any) -> list[Any]:
        """A small object of every member, in order of members."""
        text = pickle.dumps(content)
        first = self._allgather(
            np.frombuffer(len(text).to_bytes(_COUNT_BYTES, "little") + text, np.uint8),
            _SHORT_BYTES,
        )
        lengths = [int.from_bytes(bytes_[:_COUNT_BYTES].tobytes(), "little") for bytes_ in first]
        if max(lengths) > _SHORT_BYTES - _COUNT_BYTES:
            whole = self._allgather(np.frombuffer(text, np.uint8), max(lengths))
        else:
            whole = [bytes_[_COUNT_BYTES:] for bytes_ in first]
        return [
            pickle.loads(item[:size].tobytes()) for item, size in zip(whole, lengths, strict=True)
        ]

    def raise_together(self, action: Callable[[], _Result]) -> _Result:
        """Do something that may fail at any member, and fail at all members where it does.

        Raises:
            AgreedError: It failed somewhere; says at whom and why.
        """
        result, problem = None, ""
        try:
            result = action()
        except Exception as error:
            problem = str(error) or type(error).__name__
        for member, said in enumerate(self.gather(problem)):
            if said:
                raise AgreedError(f"member {member} of the parity group: {said}")
        return cast("_Result", result)

    def _allgather(self, content: Bytes, size: int) -> list[Bytes]:
        """The first `size` bytes of every member's content, with zeros behind a shorter one's."""
        own = torch.zeros(size, dtype=torch.uint8)
        own.numpy()[: content.size] = content[:size]
        all_of_them = [torch.empty_like(own) for _ in range(self._group.size())]
        try:
            self._group.allgather([all_of_them], [own]).wait(self._timeout)
        except RuntimeError as error:
            raise self._failed("the others", error) from error
        return [item.numpy() for item in all_of_them]

    def stream(self, rows: Iterable[int], plan: Callable[[int], RowWork]) -> None:
        """Send, receive and finish rows in order, while the next few are on their way.

        Args:
            rows: The same for all members.
            plan: What this member does for a row; called when the row is due.
        """
        due = iter(rows)
        ahead = self._post(due, plan, 0)
        turn = 1
        while ahead:
            now, ahead = ahead, self._post(due, plan, turn)
            turn = 1 - turn
            for work, got, pending in now:
                for peer, message in pending:
                    try:
                        message.wait(self._timeout)
                    except RuntimeError as error:
                        raise self._failed(f"member {peer}", error) from error
                if work.finish is not None:
                    work.finish(got)

    def _post(
        self, due: Iterator[int], plan: Callable[[int], RowWork], turn: int
    ) -> list[tuple[RowWork, list[Bytes], list[tuple[int, Work]]]]:
        """Start as many rows as there are members: in those, all members do the same work."""
        posted = []
        buffers = self._buffers(turn)
        for _, row in zip(range(self._group.size()), due, strict=False):
            work = plan(row)
            got: list[Bytes] = []
            pending: list[tuple[int, Work]] = []
            for peer, size in work.receives:
                buffer, content = next(buffers)
                if size < self._stripe_bytes:
                    buffer, content = buffer[:size], content[:size]
                pending.append((peer, self._start(self._group.recv, buffer, peer, row)))
                got.append(content)
                self.received_bytes += size
            for peer, data in work.sends:
                message = self._start(self._group.send, torch.from_numpy(data), peer, row)
                pending.append((peer, message))
                self.sent_bytes += data.nbytes
            posted.append((work, got, pending))
        return posted

    def _start(self, how: Callable[..., Work], data: torch.Tensor, peer: int, row: int) -> Work:
        try:
            return how([data], peer, row)
        except RuntimeError as error:
            raise self._failed(f"member {peer}", error) from error

    def _buffers(self, turn: int) -> Iterator[tuple[torch.Tensor, Bytes]]:
        pool = self._pools[turn]
        for place in itertools.count():
            if place == len(pool):
                buffer = torch.empty(self._stripe_bytes, dtype=torch.uint8)
                pool.append((buffer, buffer.numpy()))
            yield pool[place]

    def _failed(self, whom: str, error: RuntimeError) -> RecoverError:
        said = str(error).strip().splitlines()
        return RecoverError(
            f"the exchange of parity with {whom} failed, or took longer than "
            f"{self._timeout.total_seconds():g} s: {said[0] if said else 'no message'}"
        )


class RowMethod(Enum):
    """Method by which the parity of a row is brought up to date."""

    STAYS = "nothing in the row changed"
    WHOLE = "the sum of all its data, sent as they are now"
    DELTA = "the old parity and the sum of the differences old ^ new of those that changed"


@dataclass(frozen=True)
class RowChange:
    """One row.

    Attributes:
        senders: Who send their stripe or its difference, and how many bytes.
    """

    how: RowMethod
    senders: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Change:
    """Changes between two epochs.

    Where every stripe of a row changed, as under any optimizer that touches all its state, the
    stripes are sent as they are: that saves reading the old data and writing their difference.

    Attributes:
        before: Bytes of each member's data in the old epoch.
        after: The same in the new one.
        changed: Of each member's stripes, in whichever epoch there are more.
        whole: There is no common old epoch, so all data are sent.
    """

    layout: Layout
    before: tuple[int, ...]
    after: tuple[int, ...]
    changed: tuple[Flags, ...]
    whole: bool

    @cached_property
    def rows(self) -> int:
        """Number of rows that the new data reach, or the old ones did."""
        rows = self.layout.rows(self.after)
        return rows if self.whole else max(rows, self.layout.rows(self.before))

    def row(self, row: int) -> RowChange:
        """Update of one row."""
        if row < self._plain_rows:
            return self._plain[row % self.layout.members]
        reaching, changed = [], []
        for member in self.layout.contributors(row):
            stripe = self.layout.data_stripe(member, row)
            now = self._bytes(self.after, member, stripe)
            then = self._bytes(self.before, member, stripe)
            if now:
                reaching.append((member, now))
            if max(now, then) and (self.whole or self.changed[member][stripe]):
                changed.append((member, max(now, then)))
        if not changed and not self.whole:
            return RowChange(RowMethod.STAYS)
        if self.whole or {member for member, _ in reaching} <= {member for member, _ in changed}:
            return RowChange(RowMethod.WHOLE, tuple(reaching))
        return RowChange(RowMethod.DELTA, tuple(changed))

    @cached_property
    def _plain_rows(self) -> int:
        """The rows before this one are full of data that all changed: by far the most common."""
        if not (self.whole or all(bool(flags.all()) for flags in self.changed)):
            return 0
        layout = self.layout
        full = [nbytes // layout.stripe_bytes for nbytes in self.after]
        # The first row that a member does not fill.
        return min(layout.row_of_data(member, stripes) for member, stripes in enumerate(full))

    @cached_property
    def _plain(self) -> list[RowChange]:
        size = self.layout.stripe_bytes
        return [
            RowChange(
                RowMethod.WHOLE,
                tuple((contributor, size) for contributor in self.layout.contributors(row)),
            )
            for row in range(self.layout.members)
        ]

    def _bytes(self, lengths: tuple[int, ...], member: int, stripe: int) -> int:
        begin, end = self.layout.span(lengths[member], stripe)
        return end - begin


def changed_stripes(layout: Layout, old: Bytes | None, new: Bytes) -> Flags:
    """Flags of the stripes of one member's data that differ; all without old data."""
    before = 0 if old is None else old.nbytes
    count = max(layout.stripes(before), layout.stripes(new.nbytes))
    flags = np.ones(count, np.bool_)
    if old is not None:
        for stripe in range(count):
            (a, b), (c, d) = layout.span(before, stripe), layout.span(new.nbytes, stripe)
            flags[stripe] = not same(old[a:b], new[c:d])
    return flags


@dataclass(frozen=True)
class Update:
    """One member's part.

    Attributes:
        member: Its number.
        old: Its data in the old epoch; None where all is sent.
        new: Its data in the new one.
        hashes: Of the new data's stripes; filled in for those that changed.
    """

    member: int
    change: Change
    file: ParityFile
    old: Bytes | None
    new: Bytes
    hashes: list[int]

    def plan(self, row: int) -> RowWork:
        """Sends and receives of one row."""
        change = self.change.row(row)
        if change.how is RowMethod.STAYS:
            return RowWork()
        layout = self.change.layout
        holders = layout.holders(row)
        if self.member in holders:
            receives = [(peer, size) for peer, size in change.senders if peer != self.member]
            return RowWork(receives=receives, finish=self._summing(row, change.how, receives))
        stripe = layout.data_stripe(self.member, row)
        sizes = dict(change.senders)
        begin, end = layout.span(self.new.nbytes, stripe)
        if end > begin and self.member in sizes:
            self.hashes[stripe] = hash_stripe(self.new[begin:end])
        if self.member not in sizes:
            return RowWork()
        data = self.new[begin:end]
        if change.how is RowMethod.DELTA:
            data = self._difference(stripe, sizes[self.member])
        return RowWork(sends=[(holder, data) for holder in holders])

    def _summing(
        self, row: int, how: RowMethod, receives: list[tuple[int, int]]
    ) -> Callable[[list[Bytes]], None]:
        layout = self.change.layout
        stripe = layout.parity_stripe(self.member, row)
        parity = layout.holders(row).index(self.member)
        weights = [weight(parity, peer) for peer, _ in receives]

        def finish(got: list[Bytes]) -> None:
            terms = list(zip(weights, got, strict=True))
            if how is RowMethod.DELTA:
                terms.append((1, self.file.current(stripe)))
            combine(self.file.place(stripe), terms)

        return finish

    def _difference(self, stripe: int, nbytes: int) -> Bytes:
        assert self.old is not None
        difference = np.empty(nbytes, np.uint8)
        layout = self.change.layout
        spans = ((data, layout.span(data.nbytes, stripe)) for data in (self.old, self.new))
        combine(difference, [(1, data[begin:end]) for data, (begin, end) in spans])
        return difference


@dataclass(frozen=True)
class MemberReport:
    """Data and parity that one member still has.

    Attributes:
        slots: Of each epoch whose data it has: how many bytes, and their digest.
        marks: Of each epoch whose parity it has.
    """

    slots: Mapping[int, tuple[int, int]]
    marks: tuple[ParityMark, ...]


@dataclass(frozen=True)
class RecoverableEpoch:
    """An epoch that can be made whole, and its losses.

    Attributes:
        mark: The epoch, and what its data are.
        lost_data: Members whose data are gone, or are not those that the parity is of.
        lost_parity: Members whose parity is gone, or is of other data.
    """

    mark: ParityMark
    lost_data: frozenset[int]
    lost_parity: frozenset[int]


def recoverable_epochs(layout: Layout, reports: Sequence[MemberReport]) -> list[RecoverableEpoch]:
    """Epochs that can be made whole, the newest first.

    Members may have stale files of an earlier history of the same epoch. What most have in common
    counts; it is told apart by the digests.
    """
    epochs = {epoch for report in reports for epoch in report.slots}
    epochs |= {mark.epoch for report in reports for mark in report.marks}
    best = (_best(layout, reports, epoch) for epoch in sorted(epochs, reverse=True))
    return [situation for situation in best if situation is not None]


def _best(layout: Layout, reports: Sequence[MemberReport], epoch: int) -> RecoverableEpoch | None:
    marks = {mark for report in reports for mark in report.marks if mark.epoch == epoch}
    if all(epoch in report.slots for report in reports):
        lengths, digests = zip(*(report.slots[epoch] for report in reports), strict=True)
        marks.add(ParityMark(epoch, tuple(lengths), tuple(digests)))
    possible = []
    for mark in marks:
        expected = zip(mark.lengths, mark.digests, strict=True)
        slots = [report.slots.get(epoch) for report in reports]
        lost_data = frozenset(
            member
            for member, pair in enumerate(zip(slots, expected, strict=True))
            if pair[0] != pair[1]
        )
        lost_parity = frozenset(
            member for member, report in enumerate(reports) if mark not in report.marks
        )
        if layout.survives(lost_data, lost_parity):
            possible.append(RecoverableEpoch(mark, lost_data, lost_parity))
    return min(
        possible,
        key=lambda found: (
            len(found.lost_data) + len(found.lost_parity),
            len(found.lost_data),
            found.mark.digests,
        ),
        default=None,
    )


@dataclass(frozen=True)
class Rebuild:
    """One member's part.

    Attributes:
        member: Its number.
        data: Its data of the epoch; where they are lost, the memory to fill.
    """

    layout: Layout
    situation: RecoverableEpoch
    member: int
    file: ParityFile
    data: Bytes

    @property
    def rows(self) -> range:
        """The rows to look at: all, or none where nothing is lost."""
        lost = self.situation.lost_data or self.situation.lost_parity
        return range(self.layout.rows(self.situation.mark.lengths) if lost else 0)

    def plan(self, row: int) -> RowWork:
        """Sends and receives of one row."""
        stripes = tuple(
            stripe for stripe in stripes_of(self.layout, row) if self._bytes(stripe, row)
        )
        lost_of = (self.situation.lost_data, self.situation.lost_parity)
        lost = tuple(
            stripe for stripe in stripes if stripe.member in lost_of[stripe.parity is not None]
        )
        sends: list[tuple[int, Bytes]] = []
        receives: list[tuple[int, int]] = []
        finish = None
        for missing, combination in _rebuilding(stripes, lost).items():
            most = self._bytes(missing, row)
            sends += [
                (missing.member, self._read(source, row)[:most])
                for source in combination
                if source.member == self.member
            ]
            if missing.member == self.member:
                receives = [
                    (source.member, min(most, self._bytes(source, row))) for source in combination
                ]
                finish = self._making(missing, row, combination)
        return RowWork(sends, receives, finish)

    def _bytes(self, stripe: Stripe, row: int) -> int:
        if stripe.parity is not None:
            return self.layout.stripe_bytes
        place = self.layout.data_stripe(stripe.member, row)
        begin, end = self.layout.span(self.situation.mark.lengths[stripe.member], place)
        return end - begin

    def _read(self, stripe: Stripe, row: int) -> Bytes:
        if stripe.parity is None:
            return self._own(row)
        place = self.layout.parity_stripe(self.member, row)
        return self.file.stripe(self.situation.mark, place)

    def _own(self, row: int) -> Bytes:
        begin, end = self.layout.span(self.data.nbytes, self.layout.data_stripe(self.member, row))
        return self.data[begin:end]

    def _making(
        self, stripe: Stripe, row: int, combination: Combination
    ) -> Callable[[list[Bytes]], None]:
        def finish(got: list[Bytes]) -> None:
            place = self.layout.parity_stripe(self.member, row)
            out = self._own(row) if stripe.parity is None else self.file.place(place)
            combine(out, list(zip(combination.values(), got, strict=True)))

        return finish


@dataclass(frozen=True)
class Updated:
    """An update that all members have.

    Attributes:
        sent_bytes: What this member sent.
        seconds: From the call to the return, waiting for others included.
    """

    epoch: int
    sent_bytes: int
    seconds: float


@dataclass(frozen=True)
class Recovered:
    """The state that all members have again.

    Attributes:
        epoch: Of which step it is.
        data: (bytes,) uint8: this member's data of that step, its own or rebuilt.
        lost_data: Members whose data were rebuilt.
        lost_parity: Members whose parity was rebuilt.
        received_bytes: What this member received for it.
        seconds: From the call to the return, waiting for others included.
    """

    epoch: int
    data: Bytes
    lost_data: tuple[int, ...]
    lost_parity: tuple[int, ...]
    received_bytes: int
    seconds: float


class ParityGroup:
    """Processes that each hold a part of a sharded state, and parity of the others' parts.

    Any `losses` of them may lose all their memory: what they held is rebuilt bit for bit, whatever
    its type. In five lines, with ``slots`` the
    state after the last step and after the one before (of a new process: none)::

        parity = ParityGroup(dist.new_group(backend="gloo"), losses=1, directory="/dev/shm/run")
        parity.update(slots[step - 1], slots[step], step)     # after every step
        # a member dies: all make a group anew, with a new process in its place
        parity = ParityGroup(dist.new_group(backend="gloo"), losses=1, directory="/dev/shm/run")
        found = parity.recover(slots, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))

    A member's number is its rank in `group`, and must be the same whenever a group is made anew.
    All methods but `close` are called by all members together; a background thread may do it, as
    nothing here holds the interpreter's lock for long.

    Memory: twice ``losses / (members - losses)`` of the data, in files in `directory`, and of
    each process ``2 * losses * (members - losses)`` stripes. Traffic of an update: every member
    sends the stripes that changed `losses` times.

    Args:
        group: A gloo process group that nothing else uses at the same time.
        losses: How many members may be lost together, 1 or 2; fewer than there are members.
        directory: In memory (tmpfs), where the parity outlives the process.
        name: Of the group, the same for all members; tells groups in one directory apart.
        stripe_bytes: Unit of the placement and of messages, a multiple of 64.
        timeout_seconds: How long any one message may take before the exchange counts as failed.

    Raises:
        RecoverError: Where no such group can be, or the directory cannot be used.
    """

    def __init__(
        self,
        group: ProcessGroup,
        *,
        losses: int = 1,
        directory: str | Path = "/dev/shm",
        name: str = "parity",
        stripe_bytes: int = STRIPE_BYTES,
        timeout_seconds: float = 60.0,
    ) -> None:
        self._member = group.rank()
        self._layout = Layout(group.size(), losses, stripe_bytes)
        self._file = ParityFile(directory, name, self._layout, self._member)
        self._transport = Transport(group, stripe_bytes, timeout_seconds)
        self._hashes: list[int] | None = None
        self._stale = False
        self._broken = ""

    @property
    def epoch(self) -> int | None:
        """The step of whose state this member last saw that all members have parity."""
        return self._file.committed.epoch if self._file.committed else None

    def update(
        self,
        old: Buffer | None,
        new: Buffer,
        epoch: int,
        *,
        agree: Callable[[], None] | None = None,
    ) -> Updated:
        """Bring the parity from the last epoch to `epoch`.

        Both buffers must stay as they are until the update returns, and `new` also until the next
        one has: after a death in its midst `recover` asks for it.

        Args:
            old: What was `new` in the last update; None sends everything.
            new: This member's data now; any length.
            epoch: The step that they are of, the same for all members and not the last one.
            agree: Returns when all members of all groups that must roll back together have called
                it, and raises where one cannot; without it this group decides by itself.

        Raises:
            RecoverError: A member is gone or too late: whoever is left must make a new group and
                call `recover`. Or one has no room: this group may try again with later data. The
                last epoch's parity stays in either case.
        """
        started, sent = time.monotonic(), self._transport.sent_bytes
        with self._sound():
            part = self._begin(as_bytes(old) if old is not None else None, as_bytes(new), epoch)
            self._transport.stream(range(part.change.rows), part.plan)
            digests = self._transport.gather(digest(part.hashes, part.new.nbytes))
            mark = ParityMark(epoch, part.change.after, tuple(digests))
            self._transport.raise_together(lambda: self._file.prepare(mark))
            if agree is not None:
                agree()
            self._file.commit(mark)
        self._hashes, self._stale = part.hashes, False
        return Updated(epoch, self._transport.sent_bytes - sent, time.monotonic() - started)

    def epochs(self, slots: Mapping[int, Buffer]) -> tuple[int, ...]:
        """The steps that `recover` could make whole with these `slots`, the newest first.

        For jobs of several groups, which must all go back to the same step.
        """
        with self._sound():
            found, _ = self._survey({epoch: as_bytes(slot) for epoch, slot in slots.items()})
        return tuple(name.mark.epoch for name in found)

    def recover(
        self,
        slots: Mapping[int, Buffer],
        allocate: Callable[[int], Buffer],
        epoch: int | None = None,
    ) -> Recovered:
        """Make one step's state whole at all members: their data, and the parity of it.

        Nothing is overwritten before all is rebuilt, so after another death in its midst it can
        be called again. What is rebuilt is compared with the digest of what was lost.

        Args:
            slots: This member's data of the steps it still has; empty at a replacement.
            allocate: Makes memory for so many bytes, where this member's data are rebuilt.
            epoch: The step, one of `epochs`; None: the newest of them.

        Raises:
            RecoverError: More is lost than the parity makes good, a member is gone or too late, or
                one has no room.
        """
        started, received = time.monotonic(), self._transport.received_bytes
        own = {key: as_bytes(slot) for key, slot in slots.items()}
        with self._sound():
            found, hashes = self._survey(own)
            possible = [item.mark.epoch for item in found]
            if not possible or epoch not in (None, *possible):
                what = "any step" if epoch is None else f"step {epoch}"
                raise AgreedError(
                    f"the state of {what} cannot be rebuilt: more than {self._layout.losses} of "
                    f"{self._layout.members} members lost it; possible: {possible or 'no step'}"
                )
            chosen = possible[0] if epoch is None else epoch
            situation = found[possible.index(chosen)]
            data = self._transport.raise_together(lambda: self._make_room(situation, own, allocate))
            part = Rebuild(self._layout, situation, self._member, self._file, data)
            self._transport.stream(part.rows, part.plan)
            rebuilt = self._member in situation.lost_data
            made = hash_stripes(self._layout, data) if rebuilt else hashes[chosen]
            self._transport.raise_together(lambda: self._finish(situation, made))
            self._file.commit(situation.mark)
        self._hashes, self._stale = made, False
        return Recovered(
            chosen,
            data,
            tuple(sorted(situation.lost_data)),
            tuple(sorted(situation.lost_parity)),
            self._transport.received_bytes - received,
            time.monotonic() - started,
        )

    def close(self, *, remove: bool = False) -> None:
        """Let go of the parity; with `remove` also delete its files. Each member by itself."""
        self._file.close(remove=remove)
        self._broken = "it was closed"

    def _begin(self, old: Bytes | None, new: Bytes, epoch: int) -> Update:
        """Compare, tell each other what changed, and make room for it."""
        committed = self._file.committed
        if self._stale or committed is None or not self._is_committed(old):
            old = None
        changed = changed_stripes(self._layout, old, new)
        mine = {
            "epoch": epoch,
            "last": committed.epoch if committed else None,
            "committed": committed if old is not None else None,
            "lengths": (old.nbytes if old is not None else 0, new.nbytes),
            "changed": np.packbits(changed),
        }
        hellos = self._transport.gather(mine)
        if len(steps := {hello["epoch"] for hello in hellos}) > 1:
            raise AgreedError(f"members would keep parity of different steps: {sorted(steps)}")
        if any(hello["last"] == epoch for hello in hellos):
            raise AgreedError(f"step {epoch} is the one whose parity is kept already")
        before, after = zip(*(hello["lengths"] for hello in hellos), strict=True)
        change = Change(
            self._layout,
            tuple(before),
            tuple(after),
            tuple(np.unpackbits(hello["changed"]).astype(bool) for hello in hellos),
            whole=any(hello["committed"] != hellos[0]["committed"] for hello in hellos)
            or hellos[0]["committed"] is None,
        )
        self._transport.raise_together(lambda: self._file.begin(change.rows))
        known = self._hashes if old is not None and self._hashes else []
        hashes = [*known, *[0] * self._layout.stripes(new.nbytes)]
        del hashes[self._layout.stripes(new.nbytes) :]
        return Update(self._member, change, self._file, old, new, hashes)

    def _is_committed(self, old: Bytes | None) -> bool:
        """Return whether this member's committed parity is of `old`."""
        committed = self._file.committed
        if committed is None or old is None or old.nbytes != committed.lengths[self._member]:
            return False
        if self._hashes is None:
            self._hashes = hash_stripes(self._layout, old)
        return digest(self._hashes, old.nbytes) == committed.digests[self._member]

    def _survey(
        self, slots: Mapping[int, Bytes]
    ) -> tuple[list[RecoverableEpoch], dict[int, list[int]]]:
        """Epochs that can be made whole, and the hashes of this member's own slots."""
        hashes = {epoch: hash_stripes(self._layout, slot) for epoch, slot in slots.items()}
        report = MemberReport(
            {
                epoch: (slot.nbytes, digest(hashes[epoch], slot.nbytes))
                for epoch, slot in slots.items()
            },
            self._file.marks,
        )
        return recoverable_epochs(self._layout, self._transport.gather(report)), hashes

    def _make_room(
        self,
        situation: RecoverableEpoch,
        own: Mapping[int, Bytes],
        allocate: Callable[[int], Buffer],
    ) -> Bytes:
        mark = situation.mark
        if self._member in situation.lost_parity:
            self._file.begin(self._layout.rows(mark.lengths))
        if self._member not in situation.lost_data:
            return own[mark.epoch]
        nbytes = mark.lengths[self._member]
        data = as_bytes(allocate(nbytes))
        if data.nbytes != nbytes:
            raise RecoverError(f"allocate({nbytes}) gave {data.nbytes} bytes")
        return data

    def _finish(self, situation: RecoverableEpoch, hashes: list[int]) -> None:
        """Compare what was rebuilt with what was lost, and say that the parity is whole."""
        mark = situation.mark
        if digest(hashes, mark.lengths[self._member]) != mark.digests[self._member]:
            raise RecoverError(
                f"the rebuilt state of step {mark.epoch} is not what it was: a member's state or "
                "parity has been damaged in its memory"
            )
        if self._member in situation.lost_parity:
            self._file.prepare(mark)

    @contextlib.contextmanager
    def _sound(self) -> Iterator[None]:
        """Let a group whose members may no longer agree do nothing more."""
        if self._broken:
            raise RecoverError(
                f"this parity group cannot be used any more ({self._broken}): make a new one, and "
                "call recover"
            )
        try:
            yield
        except AgreedError:
            self._stale = True
            raise
        except BaseException as error:
            self._broken = str(error) or type(error).__name__
            raise
