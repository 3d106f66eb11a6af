"""A sum of gradients that needs some of the workers only: encode, agree on survivors, decode.

Data-parallel training in which worker w computes the chunks that a code gives it, in any loop::

    coded = CodedAllReduce(model, code)
    for step in range(steps):
        for chunk, weight in coded.chunks():
            (weight * loss_of(model(data(step, chunk)))).backward()
        outcome = coded.reduce(step)
        optimizer.step()
        optimizer.zero_grad()

`reduce` leaves in every parameter's ``grad`` the *sum* of the chunks' gradients, so a mean over the
batch takes losses that are divided by the number of chunks. It is bit for bit the same on all
workers.

How a step goes. A worker that has done its chunks says so on the board. The one whose word makes
the announced workers sufficient publishes them as the survivors (any other does when a deadline
passes); the others learn of it between two chunks, drop their work, and join the sum with zeros.
Survivors join with their message times their decoding weight. A member that is dead, or silent for
longer than the timeout, breaks the sum: those who are left agree on who they are, and repeat it
from the messages, which are still in ``grad``, with weights for the survivors among them.

What can be hoped for. A process that is slow but alive takes part in the sum, so the others wait
until it notices, at most one chunk (or one layer, inside `computing`). Redundant work is computed
always; where slowness is proportional to work, that costs more than it saves.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from outlast.coding.protocol.board import Board, board_name
from outlast.coding.protocol.decider import Decider, Decision, synchronise
from outlast.coding.protocol.decoding import Decoding, OnLost, Rules
from outlast.coding.protocol.flat import FlatGradients, local
from outlast.coding.protocol.interrupt import Abandoned, Interrupt
from outlast.coding.protocol.members import Members, PeerLostError
from outlast.coding.protocol.weighting import LossWeights
from outlast.errors import CodingError, LeftBehindError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt
    from torch import nn
    from torch.distributed import ProcessGroup

    from outlast.coding.certificate import Certificate
    from outlast.coding.code import Decoder, GradientCode

_LOOK_SECONDS = 0.01
_LONGEST_LOOK_SECONDS = 0.5
_LOOK_SHARE = 0.01


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a step's gradient is made of. Equal on all workers, but for the times.

    Attributes:
        step: The training step.
        survivors: Workers whose messages were added up, ascending.
        late: Members that were not among them: they joined with zeros.
        lost: Workers that were members before this step and are no more.
        weights: (workers,) what each message was multiplied by; 0 for who did not survive.
        scale: 1, or `Certificate.scale` where the decoding is not exact and `on_lost` says rescale;
            it is contained in `weights`.
        certificate: What the decoding is worth, before scaling.
        exact: Whether the gradient is that of the whole batch.
        decided_seconds: From the beginning of the step on this worker until it knew the survivors.
        saved_seconds: How much longer the slowest of the late workers would have taken for its
            chunks: its own estimate, from the mean time of those that it had done, less the time
            that passed until it gave up. None if nobody was late or no late worker could tell.
    """

    step: int
    survivors: tuple[int, ...]
    late: tuple[int, ...]
    lost: tuple[int, ...]
    weights: npt.NDArray[np.float64]
    scale: float
    certificate: Certificate
    exact: bool
    decided_seconds: float
    saved_seconds: float | None


class CodedAllReduce:
    """Sums gradients over workers, of which some may be slow or dead.

    All processes make it with equal arguments, in the same order if they make several. The model's
    parameters must be equal on all of them, or be equally placed shards of such (FSDP2 over a mesh
    whose other dimension is `group`): then a worker is a replica, nobody gives up in the middle of
    a step, since the replica's collectives are under way, and each shard decides for itself.

    Args:
        model: Its trained parameters' gradients are summed.
        code: A real scalar code with as many workers as `group` has processes; the number of a
            worker is its rank in the group.
        group: The processes; all if None.
        board: Where they agree; one of its own in the process group's store if None.
        deadline_seconds: How long a worker that is done waits for others before the step is decided
            with who is done by then; `timeout_seconds` if None.
        timeout_seconds: How long a silent process is waited for before the others go on without it
            for good.
        on_lost: When the survivors do not decode well enough: ``raise`` `LostChunksError`, or
            ``rescale`` the decoded gradient by `Certificate.scale` and go on. Where
            `largest_error` admits an approximate gradient, ``rescale`` scales that too.
        largest_error: The `Certificate.error` that is good enough to decide a step with; 0 asks for
            the exact gradient.
        decoder: See `GradientCode.decode`.

    Attributes:
        worker: This process's number in the code.

    Raises:
        CodingError: For a code that does not fit the group, the gradients' type, or complex; for
            settings out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        code: GradientCode,
        *,
        group: ProcessGroup | None = None,
        board: Board | None = None,
        deadline_seconds: float | None = None,
        timeout_seconds: float = 60.0,
        on_lost: OnLost = "raise",
        largest_error: float = 0.0,
        decoder: Decoder = "optimal",
    ) -> None:
        deadline = timeout_seconds if deadline_seconds is None else deadline_seconds
        _check_times(deadline, timeout_seconds)
        self._parameters = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        self._decoding = Decoding(
            code,
            Rules(on_lost, largest_error, decoder),
            {parameter.dtype for parameter in self._parameters},
        )
        if board is None:
            board = Board(board_name("coded", group))
        self._members = Members(group, timeout_seconds)
        self._ranks = self._members.ranks
        if len(self._ranks) != code.workers:
            raise CodingError(
                f"the code is for {code.workers} workers, but the group has {len(self._ranks)} "
                f"processes: build it for {len(self._ranks)}"
            )
        self.worker = self._members.index
        self._losses = LossWeights(code, self.worker)
        self._model = model
        self._decider = Decider(
            board,
            worker=self.worker,
            workers=code.workers,
            timeout_seconds=timeout_seconds,
        )
        self._deadline_seconds = deadline
        self._sharded = any(local(parameter) is not parameter for parameter in self._parameters)
        # Two, since gradients of the step before may still live in the other one.
        self._buffers = [FlatGradients(self._parameters), FlatGradients(self._parameters)]
        self._interrupt: Interrupt | None = None
        self._unwanted, self._next_look = False, 0.0
        self._begin_round(0)

    def chunks(self) -> Iterator[tuple[int, float]]:
        """This worker's chunks of the step and the weights B[w, c] of their losses.

        Ends early when the step was decided without this worker. A loop that is left before the end
        makes the worker join with zeros.
        """
        self._chunks_done, self._finished = 0, False
        self._begun = time.monotonic()
        for chunk, weight in self._losses.coefficients.items():
            if self.decided():
                return
            yield chunk, weight
            self._chunks_done += 1
        self._finished = True

    def sample_weights(self, chunk_of_sample: torch.Tensor) -> torch.Tensor:
        """What to multiply each sample's loss by, for one batch with all of this worker's chunks.

        Args:
            chunk_of_sample: (samples,) integers, the chunk that each sample belongs to.

        Returns:
            (samples,) weights, float32, or float64 where a parameter is.

        Raises:
            CodingError: For a chunk that is not this worker's.
        """
        dtypes = (parameter.dtype for parameter in self._parameters)
        wide = torch.float64 if torch.float64 in dtypes else torch.float32
        return self._losses.of_samples(chunk_of_sample, wide)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Give up between two layers, not between two chunks only, when the step is decided.

        Goes around the loop over `chunks`, or around the passes of a batch that holds all chunks.
        It must not be nested in other users of the model's hooks that need every pass to end.
        """
        if self._sharded:
            yield
            return
        if self._interrupt is None:
            self._interrupt = Interrupt(self._model, self.decided)
        try:
            with self._interrupt.listening():
                yield
        except Abandoned:
            self._finished = False

    def decided(self) -> bool:
        """Whether the step was decided without this worker, so that its work is not wanted.

        Looks at the board now and then: every 10 ms at most, and so seldom that looking takes 1 %
        of the time, but twice a second however slow one look was.
        """
        now = time.monotonic()
        if not self._unwanted and not self._sharded and now >= self._next_look:
            self._unwanted = self._decider.is_decided_without(self._round, self._members.epoch)
            ended = time.monotonic()
            pause = max((ended - now) / _LOOK_SHARE, _LOOK_SECONDS)
            self._next_look = ended + min(pause, _LONGEST_LOOK_SECONDS)
        return self._unwanted

    @torch.no_grad()
    def reduce(self, step: int, *, finished: bool = True) -> Outcome:
        """Make every parameter's ``grad`` the decoded sum over the workers.

        All members call it once per step, with the same number.

        Args:
            step: The training step.
            finished: Whether ``grad`` holds this worker's whole message. It does not after `chunks`
                or `computing` ended early, whatever is said here.

        Returns:
            What the gradient is made of.

        Raises:
            LostChunksError: On all members alike, when the survivors do not decode well enough and
                `on_lost` is ``raise``, or when there are none. It is also what is left when a
                survivor dies before the sum, after others have dropped their work because of it.
                The step can be computed again, from gradients of zero.
            LeftBehindError: When the others have gone on without this process.
            CodingError: When members disagree about the step, the board does not answer, those who
                are left cannot make a process group, or this worker's message was announced before
                an error and is not whole any more.
        """
        finished = finished and self._finished
        before = self._alive()
        if self._decider.has_gone_on(self._members.epoch):
            raise self._left_behind()
        remaining = None if finished else self._remaining_seconds()
        if finished:
            synchronise(parameter.device for parameter in self._parameters)
        decision = self._decider.agree(
            self._round,
            self._members.epoch,
            step=step,
            members=before,
            sufficient=self._decoding.good_enough,
            seconds=self._deadline_seconds if finished else None,
        )
        decided_seconds = time.monotonic() - self._begun
        if remaining is not None and self.worker not in decision.survivors:
            self._decider.publish_late(self._round, remaining)
        while not self._add_up(decision):
            decision = self._decider.decide(
                self._round,
                self._members.epoch,
                Decision(step, self._decider.announced(self._round) & self._alive()),
            )
        decoded = self._decoding.of(decision.survivors)
        scale = self._decoding.scale(decision.survivors)
        round_ = self._round
        # All members' votes on this round say that they have left the one before.
        self._decider.forget(round_ - 1, self._members.epoch, self._alive())
        self._begin_round(round_ + 1)
        if scale is None:
            raise self._decoding.lost(decision.survivors, step)
        self._buffers[round_ % 2].write_back()
        late = self._alive() - decision.survivors
        return Outcome(
            step=step,
            survivors=tuple(sorted(decision.survivors)),
            late=tuple(sorted(late)),
            lost=tuple(sorted(before - self._alive())),
            weights=scale * np.asarray(decoded.weights, np.float64),
            scale=scale,
            certificate=decoded.certificate,
            exact=decoded.certificate.exact,
            decided_seconds=decided_seconds,
            saved_seconds=self._saved_seconds(round_, late),
        )

    def close(self) -> None:
        """Take the hooks of `computing` off the model."""
        if self._interrupt is not None:
            self._interrupt.remove()
            self._interrupt = None

    def _alive(self) -> frozenset[int]:
        return frozenset(self._ranks.index(rank) for rank in self._members.ranks)

    def _begin_round(self, round_: int) -> None:
        self._round = round_
        self._begun = time.monotonic()
        self._next_look = 0.0
        self._unwanted = False
        self._finished = True
        self._chunks_done = 0

    def _add_up(self, decision: Decision) -> bool:
        """Sum the messages into this round's buffer; False if members were lost in it."""
        round_, epoch = self._round, self._members.epoch
        begun = time.monotonic()
        if self.worker not in decision.survivors:
            self._decider.enter(round_, epoch)
        # A decision that is of no use needs no sum, but a vote all the same: it finds the dead.
        scale = self._decoding.scale(decision.survivors)
        well = scale is None or self._sum(decision, scale)
        if self._decider.vote(round_, epoch, voters=len(self._members), well=well):
            return True
        self._regroup(decision, begun)
        return False

    def _sum(self, decision: Decision, scale: float) -> bool:
        round_, epoch = self._round, self._members.epoch
        buffer = self._buffers[round_ % 2]
        buffer.zero_()
        if self.worker in decision.survivors:
            weights = self._decoding.of(decision.survivors).weights
            buffer.add_(scale * float(weights[self.worker]))
        elif self._decider.is_broken(round_, epoch):
            return False
        try:
            self._members.sum_(buffer.buffers, lambda: self._decider.is_broken(round_, epoch))
        except PeerLostError:
            # The sum may still end one day and write to its buffer, which therefore is no longer
            # this round's.
            self._buffers[round_ % 2] = FlatGradients(self._parameters)
            return False
        return True

    def _regroup(self, decision: Decision, begun: float) -> None:
        """Go on with the members that answer, until a group of them stands."""
        before: frozenset[int] = frozenset()
        while True:
            epoch = self._members.epoch
            present = self._decider.roll_call(
                self._round,
                epoch,
                members=self._alive(),
                survivors=decision.survivors,
                begun=None if before else begun,
            )
            if self.worker not in present:
                raise self._left_behind()
            if self._meet(present):
                return
            # One of them died since, or else it would fail again.
            if present == before:
                raise CodingError(
                    f"workers {sorted(present)} are alive, but no process group of them can be "
                    "made; restart from a checkpoint"
                )
            before = present

    def _meet(self, present: frozenset[int]) -> bool:
        """Make a process group of these workers; whether all of them have it."""
        name = f"{self._decider.name}/{self._round}/{self._members.epoch + 1}"
        try:
            self._members.keep([self._ranks[worker] for worker in present], name)
            well = True
        except RuntimeError:
            well = False
        epoch = self._members.epoch
        return self._decider.vote(-1 - epoch, epoch, voters=len(present), well=well)

    def _left_behind(self) -> LeftBehindError:
        return LeftBehindError(
            f"worker {self.worker} (rank {self._members.rank}) was silent for more than "
            f"timeout_seconds = {self._members.timeout_seconds:g}, and the others have gone on "
            "without it: restart it from a checkpoint, or set a longer timeout"
        )

    def _remaining_seconds(self) -> float | None:
        """This worker's estimate of the time that its other chunks would have taken."""
        if not self._chunks_done:
            return None
        elapsed = time.monotonic() - self._begun
        total = elapsed * len(self._losses.coefficients) / self._chunks_done
        return max(total - elapsed, 0.0)

    def _saved_seconds(self, round_: int, late: frozenset[int]) -> float | None:
        estimates = [self._decider.read_late(round_, worker) for worker in sorted(late)]
        known = [estimate for estimate in estimates if estimate is not None]
        return max(known) if known else None


def _check_times(deadline: float, timeout: float) -> None:
    if not 0 < timeout < math.inf:
        raise CodingError(f"timeout_seconds = {timeout} is not a positive, finite number")
    if not 0 < deadline <= timeout:
        raise CodingError(
            f"deadline_seconds = {deadline} is not in (0, timeout_seconds = {timeout:g}]"
        )
