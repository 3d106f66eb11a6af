"""Agreement, through a key-value store, on whose messages make a step and on its commit.

Nobody is in charge. What must be equal everywhere is written once by compare-and-set, so any
worker may write it and all read what the first one wrote:

- the decision of a round: whose messages are added up;
- its outcome: committed if every member's sum succeeded, broken as soon as one says that its own
  did not. Without this vote a sum could be done for some members and lost for others;
- the members of the next epoch, after a broken one.

A *round* is one use of the protocol, a training step. An *epoch* is the time between two losses of
members. Every wait ends at a deadline.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outlast.errors import CodingError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from outlast.coding.protocol.key_value_store import KeyValueStore


_WORD_BITS = 62


_COMMITTED, _BROKEN = "committed", "broken"


_GRACE = 1.25


_POLL_SECONDS = 0.05


_SHORTEST_POLL_SECONDS = 0.001


_POLL_SHARE = 0.02


_GROUP_TIMEOUTS = 2.0


"""Longest time in which a process group fails: gloo waits for addresses, then for connections."""


class WorkerSet:
    """A growing set of workers: bits of counters, so that to join is to learn who is in.

    Counters hold 63 bits, so n workers take n / 62 counters. Who is the last of some workers to
    join sees all the others, since each reads the other counters after it has written its own.
    """

    def __init__(self, key_values: KeyValueStore, workers: int) -> None:
        self._key_values = key_values
        self._words = -(-workers // _WORD_BITS)

    def join(self, key: str, worker: int) -> frozenset[int]:
        """Add a worker, at most once; returns who is in, with it."""
        word, bit = divmod(worker, _WORD_BITS)
        own = self._key_values.add(f"{key}/{word}", 1 << bit)
        return self._read(key, {word: own})

    def read(self, key: str) -> frozenset[int]:
        """Members of the set."""
        return self._read(key, {})

    def keys(self, key: str) -> list[str]:
        """The store's keys that hold the set."""
        return [f"{key}/{word}" for word in range(self._words)]

    def _read(self, key: str, known: dict[int, int]) -> frozenset[int]:
        total = 0
        for word, name in enumerate(self.keys(key)):
            value = known[word] if word in known else self._key_values.add(name, 0)
            total |= value << (word * _WORD_BITS)
        return _workers_in(total)


@dataclass(frozen=True)
class Decision:
    """Whose messages make a round.

    Attributes:
        step: The training step, as the one who decided counts it.
        survivors: The workers whose messages are added up.
    """

    step: int
    survivors: frozenset[int]

    def written(self) -> str:
        """As text for the store: the step, and the survivors as a hexadecimal mask."""
        return f"{self.step} {sum(1 << worker for worker in self.survivors):x}"

    @classmethod
    def parse(cls, text: str) -> Decision:
        """The inverse of `written`."""
        step, mask = text.split()
        return cls(int(step), _workers_in(int(mask, 16)))


class Consensus:
    """One worker's view of the agreements.

    Args:
        key_values: Of this protocol's use alone.
        worker: This worker's number, the same for the whole run.
        workers: How many there were at the beginning.
        timeout_seconds: How long a silent worker is waited for.

    Attributes:
        name: That of the store, equal on all workers.
    """

    def __init__(
        self, key_values: KeyValueStore, *, worker: int, workers: int, timeout_seconds: float
    ) -> None:
        self._key_values = key_values
        self._worker = worker
        self._timeout_seconds = timeout_seconds
        self._marks = WorkerSet(key_values, workers)
        self._joined: dict[str, str] = {}
        self.name = key_values.name

    def agree(
        self,
        round_: int,
        epoch: int,
        *,
        step: int,
        members: frozenset[int],
        sufficient: Callable[[frozenset[int]], bool],
        seconds: float | None,
    ) -> Decision:
        """The decision of a round, made by this worker if it is the first who can.

        Args:
            round_: The round.
            epoch: The epoch.
            step: The training step, as this worker counts it.
            members: Who takes part in this epoch.
            sufficient: Whether such workers' messages are good enough to wait for nobody else.
            seconds: How long this worker, whose message is ready, waits for others; None if its
                message is not ready, and will not be.

        Raises:
            CodingError: When the others count another step, or this worker has said before that its
                message is ready, and it is not.
        """
        announced: frozenset[int] = frozenset()
        if seconds is None:
            if self._has_announced(round_):
                raise CodingError(
                    f"worker {self._worker} has told the others that its message of step {step} is "
                    "ready, and has no whole one now: compute all of its chunks again"
                )
            seconds = self._timeout_seconds
        else:
            announced = self.announce(round_) & members
        decision = None
        # Nobody else can come when all have.
        if announced != members and not sufficient(announced):
            decision = self.decision(round_, epoch, seconds)
            if decision is None:
                announced = self.announced(round_) & members
        if decision is None:
            decision = self.decide(round_, epoch, Decision(step, announced))
        if decision.step != step:
            raise CodingError(
                f"worker {self._worker} reduces step {step} while the others reduce step "
                f"{decision.step}: all must do so once for each step"
            )
        return decision

    def announce(self, round_: int) -> frozenset[int]:
        """Say that this worker's message is ready; returns whose are, with its own."""
        return self._join("announced", f"{round_}/announced")

    def announced(self, round_: int) -> frozenset[int]:
        """Whose messages are ready."""
        return self._marks.read(f"{round_}/announced")

    def decide(self, round_: int, epoch: int, decision: Decision) -> Decision:
        """Publish a decision; returns the first that was published, which is the valid one."""
        return Decision.parse(
            self._key_values.publish(f"{round_}/{epoch}/decision", decision.written())
        )

    def is_decided_without(self, round_: int, epoch: int) -> bool:
        """Return whether there is a decision and this worker's message was not ready.

        One message to the store and back.
        """
        if self._has_announced(round_):
            return False
        return self._key_values.has(f"{round_}/{epoch}/decision")

    def decision(self, round_: int, epoch: int, seconds: float) -> Decision | None:
        """The decision, once there is one; None if there is none within `seconds`."""
        text = self._await(f"{round_}/{epoch}/decision", seconds)
        return Decision.parse(text) if text is not None else None

    def enter(self, round_: int, epoch: int) -> None:
        """Say that this worker, which no decision names, takes part in the sum all the same."""
        self._join("entered", f"{round_}/{epoch}/entered")

    def is_broken(self, round_: int, epoch: int) -> bool:
        """Return whether a member has lost a peer; to be asked before this worker's own vote."""
        return self._key_values.has(f"{round_}/{epoch}/outcome")

    def vote(self, round_: int, epoch: int, *, voters: int, well: bool) -> bool:
        """Say whether this worker's sum succeeded; returns whether all of them did.

        A round is committed when all voters say so, and broken when one does not or is silent for
        longer than the timeout.
        """
        key = f"{round_}/{epoch}/outcome"
        if not well:
            return self._key_values.publish(key, _BROKEN) == _COMMITTED
        if self._key_values.add(f"{round_}/{epoch}/well") == voters:
            return self._key_values.publish(key, _COMMITTED) == _COMMITTED
        outcome = self._await(key, self._timeout_seconds) or self._key_values.publish(key, _BROKEN)
        return outcome == _COMMITTED

    def roll_call(
        self,
        round_: int,
        epoch: int,
        *,
        members: frozenset[int],
        survivors: Collection[int],
        begun: float | None,
    ) -> frozenset[int]:
        """Return the members that answer in time after a broken round.

        The call ends when all members have answered. It also ends when all who took part in the sum
        have and the others, which were silent during the whole sum, had the timeout to appear; and
        at the latest one timeout (and a grace of a quarter) after this worker's answer, when every
        sum that a living member is still in must have failed.

        Where it was their process group that could not be made, no member was silent: all are
        waited for until every attempt to make the group must have failed too.

        Args:
            round_: The broken round.
            epoch: In which it was broken.
            members: Who took part in this epoch.
            survivors: Who the decision of the round named.
            begun: When this worker began the sum, on ``time.monotonic``; None after the members'
                process group could not be made.

        Returns:
            The members of the next epoch, as the first to end the call saw them. This worker is
            not among them if it came too late.
        """
        key, call = members_key(epoch + 1), f"roll/{epoch}"
        present = self._join("call", call) & members
        timeouts = _GRACE if begun is not None else _GRACE + _GROUP_TIMEOUTS
        last = time.monotonic() + timeouts * self._timeout_seconds
        first = last if begun is None else begun + self._timeout_seconds
        while not self._key_values.has(key):
            now = time.monotonic()
            if present != members and now < last:
                taking_part = self._marks.read(f"{round_}/{epoch}/entered") | set(survivors)
                if now < first or not taking_part & members <= present:
                    time.sleep(_POLL_SECONDS)
                    present = self._marks.read(call) & members
                    continue
            return Decision.parse(
                self._key_values.publish(key, Decision(0, present).written())
            ).survivors
        return Decision.parse(
            self._key_values.read(key, self._timeout_seconds, "the roll")
        ).survivors

    def has_gone_on(self, epoch: int) -> bool:
        """Return whether a later epoch than this one has begun."""
        return self._key_values.has(members_key(epoch + 1))

    def publish_late(self, round_: int, seconds: float) -> None:
        """Write for how long the others would have waited for this worker, by its estimate."""
        self._key_values.publish(f"{round_}/late/{self._worker}", repr(seconds))

    def read_late(self, round_: int, worker: int) -> float | None:
        """Seconds that `worker` wrote with `publish_late`, if it did."""
        key = f"{round_}/late/{worker}"
        if not self._key_values.has(key):
            return None
        return float(self._key_values.read(key, self._timeout_seconds, "a late worker's estimate"))

    def forget(self, round_: int, epoch: int, members: Collection[int]) -> None:
        """Remove what nobody reads any more, if it is this worker's turn.

        Args:
            round_: A round that all members have left: they have all taken part in a later one.
            epoch: The epoch of that round.
            members: Who takes turns, equal on all of them.
        """
        if round_ < 0 or sorted(members)[round_ % len(members)] != self._worker:
            return
        prefix = f"{round_}/{epoch}"
        late = [f"{round_}/late/{worker}" for worker in self._marks.read(f"{prefix}/entered")]
        self._key_values.remove(
            [
                *self._marks.keys(f"{round_}/announced"),
                *self._marks.keys(f"{prefix}/entered"),
                *(f"{prefix}/{name}" for name in ("decision", "well", "outcome")),
                *late,
            ]
        )

    def _await(self, key: str, seconds: float) -> str | None:
        """Return the text under `key`; None if nothing is written within `seconds`.

        It asks again and again, after 2 % of the time that has passed. A wait of torch's TCPStore
        that expires looks up the store's host name for its message, which takes five seconds where
        the name server does not answer; here waits expire as a matter of course.
        """
        begun = time.monotonic()
        while not self._key_values.has(key):
            waited = time.monotonic() - begun
            if waited >= seconds:
                return None
            pause = min(max(waited * _POLL_SHARE, _SHORTEST_POLL_SECONDS), _POLL_SECONDS)
            time.sleep(min(pause, seconds - waited))
        return self._key_values.read(key, self._timeout_seconds, key)

    def _has_announced(self, round_: int) -> bool:
        """Return whether this worker has said that its message is ready."""
        return self._joined.get("announced") == f"{round_}/announced"

    def _join(self, kind: str, key: str) -> frozenset[int]:
        """Join a set, or read it where this worker has joined it: a bit is added once."""
        if self._joined.get(kind) == key:
            return self._marks.read(key)
        # Written down first, since an addition whose answer was lost must not be repeated either.
        self._joined[kind] = key
        return self._marks.join(key, self._worker)


def synchronise(devices: Iterable[torch.device]) -> None:
    """Wait until accelerators have done what was queued; a message is announced only then.

    A backward pass on an accelerator returns when its kernels are queued. Announced that early, a
    device that is slow would be taken for fast, and all would wait for it in the sum.
    """
    for device in set(devices):
        if device.type not in {"cpu", "meta"}:
            torch.accelerator.synchronize(device)


def members_key(epoch: int) -> str:
    """Key of the members of an epoch; never removed, so that the late can read it."""
    return f"members/{epoch}"


def _workers_in(mask: int) -> frozenset[int]:
    return frozenset(place for place in range(mask.bit_length()) if mask >> place & 1)
