"""Micro-coverage: exact gradients without waiting for slow processes.

A chunk is a micro-batch of gradient accumulation. Every process works through its own chunks; who
is done takes over unfinished ones of others that it holds. The first to finish a chunk claims it,
and only its gradient counts. When every chunk is claimed, the sums of all processes are added once.
Redundancy costs nothing while nobody is slow, and the weights are 0 and 1, so nothing is amplified.
It is the case of whole messages (l = 1) of Ramamoorthy, Meng and Girimaji (NeurIPS 2024), with
claims in place of a server.

So it is work stealing with redundant micro-batches. Claims are keys of one round (a step, or its
repetition) in the key-value store, under the round's prefix:

- ``c<chunk>``: the first who has finished the chunk, with the gradient's fingerprint;
- ``b<chunk>``: how many helpers have begun it;
- ``o<owner>``: how many of an owner's chunks are finished;
- ``n``: how many owners have all theirs finished;
- ``done``: written once when every chunk is covered, or when the round cannot be completed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import statistics
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from outlast.coding.assignment import spread
from outlast.coding.certificate import certify
from outlast.coding.protocol.gradients import Abandoned, ChunkGradients, Fingerprint, ReplicaGroup
from outlast.coding.protocol.key_value_store import (
    KeyValueStore,
    KeyWatcher,
    StoreLostError,
    store_name,
)
from outlast.coding.protocol.membership import Members, PeerLostError, Rendezvous
from outlast.errors import CodingError, LostChunksError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import nn
    from torch.distributed import ProcessGroup, Store

    from outlast.coding.assignment import Spread
    from outlast.coding.certificate import Certificate

COVERED = "covered"
BROKEN = "broken"
NOBODY = -1
_COMMITTED = "committed"
_REMEMBERED_CHUNKS = 32
_LOOK_UP_SECONDS, _LOOK_UP_CHUNK_SECONDS = 1.0, 1e-3


@dataclass(frozen=True)
class Disagreement:
    """Two processes have computed one chunk and got different gradients.

    Attributes:
        chunk: The chunk.
        ranks: The process whose gradient counts, and the one that found the difference.
        difference: Estimate of the difference's 2-norm as a share of the gradient's.
    """

    chunk: int
    ranks: tuple[int, int]
    difference: float


@dataclass(frozen=True)
class CoverageOutcome:
    """Result of one step.

    Attributes:
        loss: Sum of the losses of the chunks whose gradients this process has given, a scalar.
        certificate: Exact, or the error that lost chunks leave.
        lost: Chunks whose gradients are not in the result.
        taken_over: Chunks of others whose gradients this process has given.
        yielded: Chunks of this process that others have done.
        duplicates: Chunks that this process computed although another was first.
        disagreements: Chunks that two processes have computed with different results.
        ranks: Processes that take part after this step.
        seconds: Time from the begin of the step to its end.
        own_seconds: Time that this process would have needed at least for all its own chunks, from
            the chunks that it has computed or begun.
        waited_seconds: Of `seconds`: waiting for others, and summing.
    """

    loss: torch.Tensor
    certificate: Certificate
    lost: tuple[int, ...]
    taken_over: int
    yielded: int
    duplicates: int
    disagreements: tuple[Disagreement, ...]
    ranks: tuple[int, ...]
    seconds: float
    own_seconds: float
    waited_seconds: float


@dataclass
class Progress:
    """This process's work in the step so far."""

    loss: torch.Tensor
    begun: float
    won: list[int] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    duplicates: int = 0
    waited_seconds: float = 0.0
    chunk_seconds: list[float] = field(default_factory=list)
    slow_seconds: float = 0.0
    disagreements: list[Disagreement] = field(default_factory=list)

    def outcome(
        self, held: Spread, worker: int, *, ranks: tuple[int, ...], dtype: str, scale: float
    ) -> CoverageOutcome:
        """The outcome of the step for one process.

        Args:
            held: Who owns which chunks.
            worker: This process's place among the owners.
            ranks: Processes that take part after the step.
            dtype: Type of the gradients.
            scale: What the sum was multiplied by.
        """
        coefficients = np.full(held.chunks, scale)
        coefficients[sorted(self.lost)] = 0.0
        norms = np.full(held.workers, np.sqrt(held.chunks_per_worker))
        kept = sum(chunk in held.own(worker) for chunk in self.won)
        # Of this step alone: a process that was slow once has not stayed so. A chunk that was given
        # up would have taken longer than it had when it was.
        typical = min(self.chunk_seconds, default=self.slow_seconds)
        return CoverageOutcome(
            loss=self.loss,
            certificate=certify(coefficients, np.ones(held.workers), norms, dtype),
            lost=tuple(sorted(self.lost)),
            taken_over=len(self.won) - kept,
            yielded=held.chunks_per_worker - kept,
            duplicates=self.duplicates,
            disagreements=tuple(self.disagreements),
            ranks=ranks,
            seconds=time.monotonic() - self.begun,
            own_seconds=typical * held.chunks_per_worker,
            waited_seconds=self.waited_seconds,
        )


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
        key_values: Where they are written.
        prefix: The round, different for every one.
        worker: This process's place in the spread.
        spread: Owners and holders.
        wanted: Chunks that are to be covered in this round.

    Attributes:
        helped: Whether others are known to have finished chunks of this worker.
        made: Keys that this process may have brought into being, to be removed after the round.
    """

    def __init__(
        self,
        key_values: KeyValueStore,
        prefix: str,
        worker: int,
        spread: Spread,
        wanted: Collection[int],
    ) -> None:
        self._key_values = key_values
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
        """Return whether all of these chunks are finished."""
        return not chunks or self._key_values.has(*(self.key(f"c{chunk}") for chunk in chunks))

    def begin(self, chunk: int) -> int:
        """Announce that this worker begins another's chunk; returns how many have, with it."""
        self.made.add(self.key(f"b{chunk}"))
        return self._key_values.add(self.key(f"b{chunk}"))

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
        there = self._key_values.publish(key, mine)
        winner, _, found = there.partition(":")
        if there != mine:
            return Claim(False, int(winner), found)
        self.made.add(key)
        self._count(chunk)
        return Claim(True, int(winner), found)

    def _count(self, chunk: int) -> None:
        owner = chunk // self._size
        finished = self._key_values.add(self.key(f"o{owner}"))
        if owner == self.worker:
            self._own_claims += 1
            self.helped = finished > self._own_claims
        if finished == self._per_owner[owner]:
            self.made.add(self.key(f"o{owner}"))
            if self._key_values.add(self.key("n")) == len(self._per_owner):
                self.made |= {self.key("n"), self.key("done")}
                self.close(COVERED)

    def ended(self) -> str | None:
        """End of the round, which is closed here if all is claimed; None while it is open.

        A process that dies between a claim and its count leaves that to the others.
        """
        if self._key_values.has(self.key("done")) or self.finished(*self.wanted):
            return self.close(COVERED)
        return None

    def close(self, how: str) -> str:
        """End the round; returns how it has ended, which the first to end it decides."""
        return self._key_values.publish(self.key("done"), how)

    def closed(self) -> set[int]:
        """Chunks that were closed without a result; only after all are claimed."""
        chunks = sorted(self.wanted)
        texts = self._key_values.read_all([self.key(f"c{chunk}") for chunk in chunks])
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
        return self._key_values.add(key, 0)

    def _owner_is_at(self, chunk: int) -> int:
        """1 where the owner works on this chunk now: all its earlier ones are finished."""
        first = chunk - chunk % self._size
        return int(self.finished(*(index for index in range(first, chunk) if index in self.wanted)))


class Coverage:
    """Computes steps by micro-coverage, over any process group.

        coverage = Coverage(model, chunks_per_rank=8)
        for step in range(steps):
            outcome = coverage.step(step, lambda chunk: loss_of(model, batch(step, chunk)))
            optimizer.step()

    The gradient is the sum over chunks of the gradients of what the function returns, so a mean
    over the global batch divides by its size there. Which process computes a chunk is not known
    before; the function must give the same loss on any of them, and torch's random numbers inside
    depend on (seed, step, chunk) alone. Sums are made in another order when chunks change hands,
    so gradients agree up to rounding, not bit for bit, with those of an undisturbed step.

    Args:
        model: Equal on all processes; not wrapped in DDP. With FSDP2 the processes that share one
            replica are `team`, and `group` holds the same shard of every replica.
        chunks_per_rank: Micro-batches that every process (team) owns, k; chunk c of a step belongs
            to process c // k of the group.
        copies: Processes that may compute each chunk, its owner among them, d; 3 if None (fewer
            where there are fewer processes).
        lost: What to do when chunks are lost with a dead process: ``recompute`` them on other
            holders, or ``commit`` without them, and without those that nobody has finished by the
            deadline, with a certified error.
        deadline_seconds: With ``commit``: the longest time from the begin of a step to the end of
            its computation; none if None.
        rescale: Whether to scale a gradient that lacks chunks by chunks / (chunks - lost).
        group: The processes; the default process group if None.
        team: Processes that compute one replica together (FSDP2, tensor parallel), if any.
        store: Where claims are made; the default process group's store if None.
        seed: Seed of the spread of chunks and of random numbers.
        patience: Own chunk times that an idle process waits before it computes a chunk that
            another is still working on.
        tolerance: Relative difference of two computations of a chunk that is called wrong; 1e-3
            if None, 3e-2 for gradients of 16 bits.
        timeout_seconds: Longest wait for the other processes.
        grace_seconds: After a process was lost: longest wait for others to report themselves.

    Raises:
        CodingError: For settings that cannot be, with the nearest right ones.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        chunks_per_rank: int,
        copies: int | None = None,
        lost: Literal["recompute", "commit"] = "recompute",
        deadline_seconds: float | None = None,
        rescale: bool = True,
        group: ProcessGroup | None = None,
        team: ProcessGroup | None = None,
        store: Store | None = None,
        seed: int = 0,
        patience: float = 0.25,
        tolerance: float | None = None,
        timeout_seconds: float = 300.0,
        grace_seconds: float = 10.0,
    ) -> None:
        if hasattr(model, "require_backward_grad_sync"):
            raise CodingError(
                "the model is wrapped in DistributedDataParallel, which would sum gradients a "
                "second time; give Coverage the model inside (model.module)"
            )
        self.members = Members(group, timeout_seconds)
        workers = len(self.members)
        if chunks_per_rank < 1:
            raise CodingError(f"chunks_per_rank = {chunks_per_rank} is below 1")
        copies = min(3, workers) if copies is None else copies
        self.spread = spread(workers, chunks_per_rank, copies, seed=seed)
        self.lost, self.deadline_seconds, self.rescale = lost, deadline_seconds, rescale
        if deadline_seconds is not None and lost != "commit":
            raise CodingError(
                f"deadline_seconds = {deadline_seconds:g} needs lost = 'commit': what is not "
                "finished by then is left out, with a certified error"
            )
        self.seed, self.patience = seed, patience
        self.timeout_seconds = timeout_seconds
        self._model = model
        self._team = ReplicaGroup(team)
        self._worker = self.members.index
        self._origin = self.members.ranks
        self._gradients = ChunkGradients(
            model,
            self._team,
            seed=seed,
            unwanted=lambda: self._decided() or time.monotonic() > self._ends,
        )
        usual = 3e-2 if self._gradients.dtype in {"bfloat16", "float16"} else 1e-3
        self.tolerance = usual if tolerance is None else tolerance
        self._chunk_seconds: deque[float] = deque(maxlen=_REMEMBERED_CHUNKS)
        name = store_name("coverage", group)
        key_values = KeyValueStore(self._team.told(lambda: name), store)
        self._key_values, self._watcher = key_values, KeyWatcher(key_values)
        self._rendezvous = Rendezvous(key_values, self.members, timeout_seconds, grace_seconds)
        self._alone = len(self.members) == 1
        self._round = 0
        self._made: list[set[str]] = []
        self._ends = math.inf
        self._idle_seconds = timeout_seconds
        self._looked_up = 0.0

    @property
    def chunks(self) -> int:
        """Chunks of a step."""
        return self.spread.workers * self.spread.chunks_per_worker

    def step(self, step: int, compute: Callable[[int], torch.Tensor]) -> CoverageOutcome:
        """Make the parameters' gradients the sum over all chunks; all processes call it together.

        Args:
            step: The optimizer step; random numbers depend on it.
            compute: Runs the forward pass of one chunk, 0 to `chunks` - 1, and returns its loss,
                a scalar with a graph.

        Raises:
            LostChunksError: When nobody is left who could compute a chunk, unless lost = "commit".
            LeftBehindError: When the others have continued without this process.
            CodingError: When the others do not answer, or a process of a team is lost.
        """
        self._round += 1
        begun = time.monotonic()
        while True:
            if self.deadline_seconds is not None:
                self._ends = time.monotonic() + self.deadline_seconds
            progress = Progress(torch.zeros((), device=self._gradients.device), begun)
            try:
                self._gather(step, compute, progress)
                break
            except StoreLostError:
                if self._committed_meanwhile():
                    break
        return self._finish(progress)

    def close(self) -> None:
        """Take the hooks off the model."""
        self._gradients.close()
        self._watcher.stop()

    def _committed_meanwhile(self) -> bool:
        """Continue at a restarted store; whether the others have committed this step already."""
        self._watcher.stop()
        self._watcher = KeyWatcher(self._key_values)
        while True:
            try:
                meeting = self._rendezvous.after_store_loss(self._round)
                break
            except StoreLostError:
                continue
        for _ in range(meeting.sums_behind):
            # Takes part in what others have given up: the next sum of all must meet its like.
            with contextlib.suppress(PeerLostError):
                self.members.sum_(self._gradients.like())
        return meeting.committed

    def _gather(
        self, step: int, compute: Callable[[int], torch.Tensor], progress: Progress
    ) -> None:
        """Rounds of covering and summing until all members have the sum."""
        wanted = set(range(self.chunks))
        wanted -= self._given_up(self._orphaned(wanted), progress)
        for attempt in itertools.count():
            # If nobody was lost, somebody may only be slower than was thought.
            self._idle_seconds = self.timeout_seconds * 2.0**attempt
            prefix = f"{self._rendezvous.life}/{self._round}/{attempt}"
            claims = Claims(self._key_values, prefix, self._worker, self.spread, wanted)
            how = self._cover(claims, step, compute, progress) if wanted else COVERED
            if not self._alone:
                self._made.append(claims.made)
            summing = time.monotonic()
            summed = how == COVERED and self._summed(claims, progress)
            progress.waited_seconds += time.monotonic() - summing
            if summed:
                return
            won = self._rendezvous.after_loss(prefix, progress.won)
            wanted = set(range(self.chunks)) - won - progress.lost
            again = self._orphaned(wanted) if self.lost == "recompute" else wanted
            wanted -= self._given_up(again, progress)

    def _orphaned(self, wanted: set[int]) -> set[int]:
        """Chunks that no living process holds."""
        if len(self.members) == self.spread.workers:
            return set()
        living = {self._origin.index(rank) for rank in self.members.ranks}
        return {chunk for chunk in wanted if living.isdisjoint(self.spread.holders(chunk).tolist())}

    def _given_up(self, gone: set[int], progress: Progress) -> set[int]:
        """Do without these chunks, or refuse to."""
        if gone and self.lost == "recompute":
            raise LostChunksError(
                f"all {self.spread.copies} holders of chunks {sorted(gone)} are gone; "
                "restart from a checkpoint, or allow a certified error with lost = 'commit', "
                "or more copies",
                tuple(sorted(gone)),
            )
        progress.lost |= gone
        return gone

    def _cover(
        self, claims: Claims, step: int, compute: Callable[[int], torch.Tensor], progress: Progress
    ) -> str:
        """Compute and claim chunks until all are claimed; returns how the round has ended."""
        if self._alone:
            for chunk in claims.own:
                self._try_alone(chunk, step, compute, progress)
            return COVERED
        obsolete = self._made.pop(0) if len(self._made) > 1 else set()
        if self._team.leads:
            self._watcher.watch(claims.key("done"), obsolete)
        for chunk in claims.own:
            if self._team.told(functools.partial(self._over, claims)):
                break
            if not self._team.told(functools.partial(self._helped_with, claims, chunk)):
                self._try(claims, chunk, step, compute, progress)
        idle_since = time.monotonic()
        while not self._team.told(functools.partial(self._over, claims)):
            chosen = self._team.told(functools.partial(self._next, claims, idle_since, progress))
            if chosen is not None:
                self._try(claims, chosen, step, compute, progress)
                idle_since = time.monotonic()
        how = self._team.told(lambda: self._watcher.value)
        if self.deadline_seconds is not None and how == COVERED:
            freezer = claims.key("freezer")
            progress.lost |= self._team.told(
                lambda: claims.closed() if self._key_values.has(freezer) else set()
            )
        return str(how)

    @staticmethod
    def _helped_with(claims: Claims, chunk: int) -> bool:
        """Return whether another has finished an own chunk; asked only where others help at all."""
        return claims.helped and claims.finished(chunk)

    def _next(self, claims: Claims, idle_since: float, progress: Progress) -> int | None:
        """A chunk to take over; None after a short wait for the end of the round."""
        now = time.monotonic()
        pause = max(statistics.median(self._chunk_seconds or [0.01]) * self.patience, 1e-3)
        if now < self._ends:
            pause = min(pause, max(self._ends - now, 1e-3))
            chunk = claims.choose(patient=now - idle_since < pause)
            if chunk is not None:
                return chunk
        # Nothing changes for this process before its patience ends.
        idle = now - idle_since
        if not self._watcher.wait(pause - idle if idle < pause else pause):
            self._look_up(claims)
            if now - idle_since > self._idle_seconds:
                self._watcher.tell(claims.close(BROKEN))
        progress.waited_seconds += time.monotonic() - now
        return None

    def _look_up(self, claims: Claims) -> None:
        """Now and then: whether the others have ended the round, or continued, unheard."""
        now = time.monotonic()
        if now - self._looked_up < max(_LOOK_UP_SECONDS, self.chunks * _LOOK_UP_CHUNK_SECONDS):
            return
        self._looked_up = now
        self._rendezvous.check_left_behind()
        if (ended := claims.ended()) is not None:
            self._watcher.tell(ended)

    def _over(self, claims: Claims) -> bool:
        """Return whether the round has ended, which it does soon after the deadline."""
        if not self._decided() and time.monotonic() > self._ends:
            self._freeze(claims)
        return self._decided()

    def _freeze(self, claims: Claims) -> None:
        """Close all unfinished chunks; one process does it for all, if it lives."""
        mine = str(self._worker)
        first = self._key_values.publish(claims.key("freezer"), mine) == mine
        if not first and time.monotonic() < self._ends + _LOOK_UP_SECONDS:
            return
        claims.made.add(claims.key("freezer"))
        for chunk in sorted(claims.wanted):
            if not claims.finished(chunk):
                claims.claim(chunk, by=NOBODY)

    def _try_alone(
        self, chunk: int, step: int, compute: Callable[[int], torch.Tensor], progress: Progress
    ) -> None:
        """Compute a chunk that nobody else could, if there is time."""
        if not self._team.told(lambda: time.monotonic() > self._ends):
            with contextlib.suppress(Abandoned):
                loss, _ = self._gradients.compute(step, chunk, compute)
                self._count(chunk, loss, progress)
                return
        progress.lost.add(chunk)

    def _try(
        self,
        claims: Claims,
        chunk: int,
        step: int,
        compute: Callable[[int], torch.Tensor],
        progress: Progress,
    ) -> None:
        """Compute a chunk and claim it; what another has claimed before is compared and dropped."""
        begun = time.monotonic()
        try:
            loss, mine = self._gradients.compute(step, chunk, compute)
        except Abandoned:
            progress.slow_seconds = time.monotonic() - begun
            return
        progress.chunk_seconds.append(time.monotonic() - begun)
        self._chunk_seconds.append(progress.chunk_seconds[-1])
        claim = self._team.told(lambda: claims.claim(chunk, mine.text()))
        if claim.won:
            self._count(chunk, loss, progress)
            return
        progress.duplicates += 1
        # The fingerprint is that of the leader's share of a replica's gradient.
        if claim.by != NOBODY and self._team.leads:
            difference = mine.difference(Fingerprint.read(claim.fingerprint))
            if not difference <= self.tolerance:
                ranks = (self._origin[claim.by], self.members.rank)
                progress.disagreements.append(Disagreement(chunk, ranks, difference))

    def _count(self, chunk: int, loss: torch.Tensor, progress: Progress) -> None:
        self._gradients.count(first=not progress.won)
        progress.won.append(chunk)
        progress.loss += loss

    def _decided(self) -> bool:
        return bool(self._watcher.value)

    def _summed(self, claims: Claims, progress: Progress) -> bool:
        """Add up all members' sums; whether all of them have the result."""
        buffers = self._gradients.buffers(empty=not progress.won)
        if self._alone:
            return True
        verdict = claims.key("verdict")
        try:
            self.members.sum_(buffers, broken=lambda: self._key_values.has(verdict))
        except (PeerLostError, StoreLostError) as error:
            self._gradients.give_up()
            if isinstance(error, StoreLostError):
                raise
            self._key_values.publish(verdict, BROKEN)
            if self._team.size > 1:
                raise
            return self._verdict(verdict)
        if self._key_values.add(claims.key("summed")) == len(self.members) * self._team.size:
            claims.made |= {claims.key("summed"), verdict}
            self._key_values.publish(verdict, _COMMITTED)
        return self._verdict(verdict)

    def _verdict(self, key: str) -> bool:
        try:
            found = self._key_values.read(key, self.timeout_seconds, "the other processes' sums")
        except StoreLostError:
            raise
        except CodingError:
            found = self._key_values.publish(key, BROKEN)
        return found == _COMMITTED

    def _finish(self, progress: Progress) -> CoverageOutcome:
        lost = len(progress.lost)
        if lost == self.chunks:
            raise LostChunksError(
                f"no chunk was finished within deadline_seconds = {self.deadline_seconds}; "
                "allow more time",
                tuple(sorted(progress.lost)),
            )
        scale = self.chunks / (self.chunks - lost) if self.rescale else 1.0
        self._gradients.finish(scale)
        return progress.outcome(
            self.spread,
            self._worker,
            ranks=self.members.ranks,
            dtype=self._gradients.dtype,
            scale=scale,
        )
