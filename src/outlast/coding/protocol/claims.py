"""Who has computed which chunk of a step: claims on the board.

Keys of one round (a step, or its repetition), under the round's prefix:

- ``c<chunk>``: the first who has finished the chunk, with the gradient's fingerprint;
- ``b<chunk>``: how many helpers have begun it;
- ``o<owner>``: how many of an owner's chunks are finished;
- ``n``: how many owners have all theirs finished;
- ``done``: written once when every chunk is covered, or when the round cannot be completed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from outlast.coding.protocol.board import Board
    from outlast.coding.spread import Spread

COVERED = "covered"
BROKEN = "broken"
NOBODY = -1


@dataclass(frozen=True)
class Claim:
    """The answer to a claim.

    Attributes:
        won: Whether this process was the first, so that its gradient counts.
        by: Who was.
        fingerprint: Text of the first's fingerprint, or empty.
    """

    won: bool
    by: int
    fingerprint: str


class Claims:
    """The claims of one round.

    Args:
        board: Where they are written.
        prefix: The round, different for every one.
        worker: This process's place in the spread.
        spread: Owners and holders.
        wanted: Chunks that are to be covered in this round.

    Attributes:
        helped: Whether others are known to have finished chunks of this worker.
        made: Keys that this process may have brought into being, to be removed after the round.
    """

    def __init__(
        self, board: Board, prefix: str, worker: int, spread: Spread, wanted: Collection[int]
    ) -> None:
        self._board = board
        self._prefix = prefix
        self.worker = worker
        self.wanted = frozenset(wanted)
        self._per_owner = Counter(chunk // spread.chunks_per_worker for chunk in self.wanted)
        self._size = spread.chunks_per_worker
        self._spread = spread
        self.made: set[str] = set()
        self.helped = False
        self._own_claims = 0

    def key(self, name: str) -> str:
        """A key of this round."""
        return f"{self._prefix}/{name}"

    @property
    def own(self) -> list[int]:
        """This worker's own wanted chunks, in order."""
        return [number for number in self._spread.own(self.worker) if number in self.wanted]

    @property
    def backups(self) -> list[int]:
        """Wanted chunks of others that this worker may compute."""
        held = self._spread.backups(self.worker).tolist()
        return [row for row in held if row in self.wanted]

    def finished(self, *chunks: int) -> bool:
        """Whether all of these chunks are finished."""
        return not chunks or self._board.has(*(self.key(f"c{chunk}") for chunk in chunks))

    def begin(self, chunk: int) -> int:
        """Announce that this worker begins another's chunk; returns how many have, with it."""
        self.made.add(self.key(f"b{chunk}"))
        return self._board.add(self.key(f"b{chunk}"))

    def claim(self, chunk: int, fingerprint: str = "", *, by: int | None = None) -> Claim:
        """Say that a chunk is finished; the first to say so owns the result.

        Args:
            chunk: The chunk.
            fingerprint: Text of its gradient's fingerprint.
            by: Who has finished it: this worker if None, `NOBODY` to close it without a result.
        """
        key = self.key(f"c{chunk}")
        claimant = self.worker if by is None else by
        # Who closes a chunk signs as well: the counts must be those of one process.
        mine = f"{claimant}:{fingerprint if by is None else self.worker}"
        there = self._board.publish(key, mine)
        winner, _, found = there.partition(":")
        if there != mine:
            return Claim(False, int(winner), found)
        self.made.add(key)
        self._count(chunk)
        return Claim(True, int(winner), found)

    def _count(self, chunk: int) -> None:
        owner = chunk // self._size
        finished = self._board.add(self.key(f"o{owner}"))
        if owner == self.worker:
            self._own_claims += 1
            self.helped = finished > self._own_claims
        if finished == self._per_owner[owner]:
            self.made.add(self.key(f"o{owner}"))
            if self._board.add(self.key("n")) == len(self._per_owner):
                self.made |= {self.key("n"), self.key("done")}
                self.close(COVERED)

    def ended(self) -> str | None:
        """How the round has ended, which is ended here where all is claimed; None if it goes on.

        A process that dies between a claim and its count leaves that to the others.
        """
        if self._board.has(self.key("done")) or self.finished(*self.wanted):
            return self.close(COVERED)
        return None

    def close(self, how: str) -> str:
        """End the round; returns how it has ended, which the first to end it decides."""
        return self._board.publish(self.key("done"), how)

    def closed(self) -> set[int]:
        """Chunks that were closed without a result; only after all are claimed."""
        chunks = sorted(self.wanted)
        texts = self._board.read_all([self.key(f"c{chunk}") for chunk in chunks])
        return {
            chunk
            for chunk, text in zip(chunks, texts, strict=True)
            if text.startswith(f"{NOBODY}:")
        }

    def choose(self, *, patient: bool) -> int | None:
        """Take on a chunk of another worker, or None where nothing is to be taken.

        Chunks that nobody works on come first, of the owner that is furthest behind; chunks that
        somebody works on only without patience. What is chosen is announced.
        """
        behind: list[tuple[int, int, int]] = []
        progress: dict[int, int] = {}
        for chunk in self._unfinished(self.backups):
            owner = chunk // self._size
            if owner not in progress:
                progress[owner] = self._count_at(self.key(f"o{owner}"))
            begun = self._count_at(self.key(f"b{chunk}")) + self._owner_is_at(chunk)
            if begun == 0 or not patient:
                behind.append((begun, progress[owner], chunk))
        # Chunks of one owner stay in their order: its last ones, which it comes to last, first.
        for begun, _, chunk in sorted(behind, key=lambda row: row[:2]):
            before = self.begin(chunk) - 1 + self._owner_is_at(chunk)
            if before <= begun or not patient:
                return chunk
        return None

    def _unfinished(self, chunks: list[int]) -> list[int]:
        """Those of `chunks` that are not finished: few questions where they are few."""
        if self.finished(*chunks):
            return []
        if len(chunks) == 1:
            return chunks
        half = len(chunks) // 2
        return self._unfinished(chunks[:half]) + self._unfinished(chunks[half:])

    def _count_at(self, key: str) -> int:
        # Reading a counter writes it where it was not there.
        self.made.add(key)
        return self._board.add(key, 0)

    def _owner_is_at(self, chunk: int) -> int:
        """1 where the owner works on this chunk now: all its earlier ones are finished."""
        first = chunk - chunk % self._size
        return int(self.finished(*(index for index in range(first, chunk) if index in self.wanted)))
