"""Who goes on after a process, or the store, was lost.

Assumption: a process that does not report itself within the grace time is dead, or will find out
that it was left behind before it does any harm. The first to see all members, or the end of the
grace time, decides who goes on; what it writes down first holds for all.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.coding.protocol.board import StoreLostError
from outlast.errors import CodingError, LeftBehindError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outlast.coding.protocol.board import Board
    from outlast.coding.protocol.members import Members

_LOOK_SECONDS = 0.02
_STANDING, _FALLEN = "standing", "fallen"


@dataclass(frozen=True)
class Meeting:
    """What a process learns when all have found the restarted store.

    Attributes:
        committed: Whether the others have committed its step already, so that it need not be
            repeated.
        sums_behind: Sums that others have begun, and perhaps given up, but this process has not.
    """

    committed: bool
    sums_behind: int


class Reunion:
    """Brings the survivors together again.

    Args:
        board: Where they report themselves.
        members: The group that has lost a member.
        timeout_seconds: Longest wait for a decision.
        grace_seconds: Longest wait for members to report themselves.

    Attributes:
        life: Changes when the store has been restarted empty.
    """

    def __init__(
        self, board: Board, members: Members, timeout_seconds: float, grace_seconds: float
    ) -> None:
        self._board = board
        self._members = members
        self._timeout_seconds = timeout_seconds
        self._grace_seconds = grace_seconds
        self.life = self._board.publish("life", uuid.uuid4().hex[:8])

    def after_loss(self, prefix: str, won: Iterable[int]) -> set[int]:
        """Agree on who goes on, and make a process group of them.

        Args:
            prefix: The round in which a member was lost.
            won: Chunks whose gradients this process keeps.

        Returns:
            Chunks whose gradients are kept by those who go on.

        Raises:
            LeftBehindError: When the others have decided without this process.
            CodingError: When those who go on cannot make a group.
        """
        before: Sequence[int] = ()
        for meeting in itertools.count():
            # At a further meeting, some may still be waiting for the group of the one before.
            grace = self._grace_seconds + (self._timeout_seconds if meeting else 0.0)
            going_on, kept = self._met(f"{prefix}/meeting{meeting}", won, grace)
            if self._stands(f"{prefix}/group{meeting}", going_on):
                return kept
            # One of them died since, or else it would fail again.
            if going_on == before:
                break
            before = going_on
        raise CodingError(
            f"ranks {before} are alive, but no process group of them can be made; restart from a "
            "checkpoint"
        )

    def _met(self, prefix: str, won: Iterable[int], grace: float) -> tuple[list[int], set[int]]:
        """Who goes on after this many seconds, and the chunks that they keep."""
        ranks = self._members.ranks
        report = {rank: f"{prefix}/here{rank}" for rank in ranks}
        self._board.publish(report[self._members.rank], json.dumps(list(won)))
        decided = f"{prefix}/members"
        deadline = time.monotonic() + grace
        while not self._board.has(decided):
            here = [rank for rank in ranks if self._board.has(report[rank])]
            if len(here) == len(ranks) or time.monotonic() > deadline:
                self._board.publish(decided, json.dumps(here))
                break
            time.sleep(_LOOK_SECONDS)
        text = self._board.read(decided, self._timeout_seconds, "the decision on who goes on")
        going_on = json.loads(text)
        for rank in set(ranks) - set(going_on):
            self._board.publish(f"left{rank}", prefix)
        self.check_left_behind()
        if 2 * len(going_on) < len(ranks):
            raise CodingError(
                f"only ranks {going_on} of {list(ranks)} answered within {grace:g} s; the others "
                "may be going on by themselves: restart from a checkpoint, or allow more "
                "grace_seconds"
            )
        kept = self._board.read_all([report[rank] for rank in going_on])
        return going_on, {chunk for text in kept for chunk in json.loads(text)}

    def _stands(self, key: str, ranks: Sequence[int]) -> bool:
        """Make a group of these ranks; whether all of them have it."""
        try:
            self._members.keep(ranks, f"{self._board.name}/{key}", self._board.below)
        except RuntimeError:
            return self._board.publish(key, _FALLEN) == _STANDING
        if self._board.add(f"{key}/in") == len(ranks):
            self._board.publish(key, _STANDING)
        try:
            return self._board.read(key, self._timeout_seconds, "a new group") == _STANDING
        except StoreLostError:
            raise
        except CodingError:
            return self._board.publish(key, _FALLEN) == _STANDING

    def check_left_behind(self) -> None:
        """Refuse to go on where the others have decided against it.

        Raises:
            LeftBehindError: Then.
        """
        rank = self._members.rank
        if self._board.has(f"left{rank}"):
            raise LeftBehindError(
                f"rank {rank} was silent for more than grace_seconds = {self._grace_seconds:g} "
                "after a process was lost, and the others have gone on without it; restart it "
                "from a checkpoint"
            )

    def after_store_loss(self, round_number: int) -> Meeting:
        """Meet again at a restarted store.

        Args:
            round_number: The step that this process was in when the store was lost.

        Raises:
            StoreLostError: When the store is lost again meanwhile.
            CodingError: When the store, or a member, does not come back.
        """
        self._board.reopen(self._timeout_seconds)
        self.life = self._board.publish("life", uuid.uuid4().hex[:8])
        keys = {rank: f"{self.life}/round{rank}" for rank in self._members.ranks}
        mine = json.dumps([round_number, self._members.sums])
        self._board.publish(keys[self._members.rank], mine)
        reports = [
            json.loads(self._board.read(key, self._timeout_seconds, f"rank {rank} to come back"))
            for rank, key in keys.items()
        ]
        rounds, sums = zip(*reports, strict=True)
        if max(rounds) - min(rounds) > 1:
            raise CodingError(
                f"the processes are in steps {sorted(set(rounds))} after the store was restarted; "
                "restart from a checkpoint"
            )
        return Meeting(max(rounds) > round_number, max(sums) - self._members.sums)
