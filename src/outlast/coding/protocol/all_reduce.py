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

How a step goes. A worker that has done its chunks says so in the store. The one whose word makes
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
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from outlast.coding.certificate import Decoded, certify, roundoff
from outlast.coding.protocol.consensus import Consensus, Decision, synchronise
from outlast.coding.protocol.gradients import Abandoned, FlatGradients, Interrupt, local
from outlast.coding.protocol.key_value_store import KeyValueStore, store_name
from outlast.coding.protocol.membership import Members, PeerLostError
from outlast.errors import CodingError, LeftBehindError, LostChunksError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt
    from torch import nn
    from torch.distributed import ProcessGroup

    from outlast.coding.certificate import Certificate
    from outlast.coding.code import Decoder, GradientCode


OnLost = Literal["raise", "rescale"]
_WHOLE = 1e-6
_LOOK_SECONDS = 0.01
_LONGEST_LOOK_SECONDS = 0.5
_LOOK_SHARE = 0.01


@dataclass(frozen=True)
class DecodingRules:
    """Settings of the decoding.

    Attributes:
        on_lost: When the survivors do not decode well enough: ``raise``, or ``rescale``.
        largest_error: The `Certificate.error` that is good enough.
        decoder: See `GradientCode.decode`.

    Raises:
        CodingError: For an `on_lost` that does not exist.
    """

    on_lost: OnLost = "raise"
    largest_error: float = 0.0
    decoder: Decoder = "optimal"

    def __post_init__(self) -> None:
        if self.on_lost not in {"raise", "rescale"}:
            raise CodingError(f'on_lost = {self.on_lost!r} is neither "raise" nor "rescale"')


class Decoding:
    """A code's decoder with the rules of its use.

    Args:
        code: The code.
        rules: What is asked.
        dtypes: Types of the gradients.

    Attributes:
        rules: As given.

    Raises:
        CodingError: For a `largest_error` that admits a gradient of nothing, and for gradients that
            round more than the type that the code was examined for.
    """

    def __init__(
        self, code: GradientCode, rules: DecodingRules, dtypes: Iterable[torch.dtype]
    ) -> None:
        if not 0 <= rules.largest_error < code.chunks:
            raise CodingError(
                f"largest_error = {rules.largest_error} is not in [0, {code.chunks}): with an "
                f"error of {code.chunks}, the number of chunks, no gradient at all would do"
            )
        self._code = code
        self.rules = rules
        self._dtype = _message_dtype(code, dtypes)
        self._last: tuple[frozenset[int], Decoded] | None = None

    def of(self, survivors: frozenset[int]) -> Decoded:
        """The decoding for these survivors, certified for the gradients' type."""
        if self._last is None or self._last[0] != survivors:
            decoded = self._code.decode(sorted(survivors), self.rules.decoder)
            weights, coefficients = decoded.weights, decoded.coefficients
            worth = certify(coefficients, weights, self._code.message_norms, self._dtype)
            self._last = survivors, Decoded(weights, coefficients, worth)
        return self._last[1]

    def good_enough(self, survivors: frozenset[int]) -> bool:
        """Return whether these survivors meet `DecodingRules.largest_error`."""
        return bool(survivors) and self.of(survivors).error <= self.rules.largest_error

    def scale(self, survivors: frozenset[int]) -> float | None:
        """Factor of the decoding under the rules; None if they cannot use it.

        An approximate gradient that is good enough is scaled too where rescaling is asked for.
        """
        certificate = self.of(survivors).certificate
        good_enough = self.good_enough(survivors)
        if good_enough and (certificate.exact or self.rules.on_lost == "raise"):
            return 1.0
        if self.rules.on_lost == "rescale" and math.isfinite(certificate.scale):
            return certificate.scale
        return None

    def lost(self, survivors: frozenset[int], step: int) -> LostChunksError:
        """The error that says what these survivors do not have."""
        decoded = self.of(survivors)
        missing = tuple(np.flatnonzero(np.abs(decoded.coefficients - 1.0) > _WHOLE).tolist())
        return LostChunksError(
            f"step {step} has messages from workers {sorted(survivors)} of {self._code.workers} "
            f"only, in which chunks {list(missing)} are missing or not whole (error "
            f"{decoded.error:.3g}, largest_error = {self.rules.largest_error:g}): "
            'wait longer, take a code with more copies, or set on_lost = "rescale"',
            missing,
        )


def _message_dtype(code: GradientCode, dtypes: Iterable[torch.dtype]) -> str:
    """The gradients' type that rounds most."""
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    if not names:
        raise CodingError("the model has no parameter that is trained")
    coarsest = max(names, key=roundoff)
    if not code.binary and roundoff(coarsest) > roundoff(code.dtype):
        raise CodingError(
            f"{code.name} was examined for messages in {code.dtype}, but gradients are {coarsest}; "
            f'build it with dtype = "{coarsest}", which refuses a code that loses too much'
        )
    return coarsest


class LossWeights:
    """One worker's row of the encoding matrix, as weights of losses.

    Args:
        code: A code with real coefficients.
        worker: The worker's number.

    Attributes:
        coefficients: B[w, c] by chunk c, for the chunks of this worker in ascending order.

    Raises:
        CodingError: For a complex code, or a worker that the code does not have.
    """

    def __init__(self, code: GradientCode, worker: int) -> None:
        if np.iscomplexobj(code.matrix.data):
            raise CodingError(
                f"{code.name} has complex coefficients, which losses cannot be multiplied by; "
                "take a real code with the same tolerance, such as cyclic MDS"
            )
        if not 0 <= worker < code.workers:
            raise CodingError(
                f"worker = {worker} is not in [0, {code.workers}), the code's workers"
            )
        self.code = code
        self.worker = worker
        start, stop = code.matrix.indptr[worker : worker + 2]
        chunks = code.matrix.indices[start:stop].tolist()
        values = code.matrix.data[start:stop].tolist()
        self.coefficients: dict[int, float] = dict(sorted(zip(chunks, values, strict=True)))

    def of_samples(
        self, chunk_of_sample: torch.Tensor, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Weights of the samples' losses, where one batch holds all of a worker's chunks.

        Args:
            chunk_of_sample: (samples,) integers, the chunk that each sample belongs to.
            dtype: Of the result.

        Returns:
            (samples,) weights on the same device.

        Raises:
            CodingError: For a chunk that is not this worker's.
        """
        foreign = set(chunk_of_sample.tolist()) - self.coefficients.keys()
        if foreign:
            raise CodingError(
                f"worker {self.worker} was given samples of chunks {sorted(foreign)}, but its "
                f"chunks are {list(self.coefficients)}"
            )
        table = torch.zeros(self.code.chunks, dtype=dtype)
        for chunk, coefficient in self.coefficients.items():
            table[chunk] = coefficient
        return table.to(chunk_of_sample.device)[chunk_of_sample.long()]


@dataclass(frozen=True, eq=False)
class ReduceOutcome:
    """Composition of a step's gradient. Equal on all workers, but for the times.

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
        key_values: Where they agree; one of its own in the process group's store if None.
        deadline_seconds: How long a worker that is done waits for others before the step is decided
            with who is done by then; `timeout_seconds` if None.
        timeout_seconds: How long a silent process is waited for before the others continue without
            it for good.
        on_lost: When the survivors do not decode well enough: ``raise`` `LostChunksError`, or
            ``rescale`` the decoded gradient by `Certificate.scale` and continue. Where
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
        key_values: KeyValueStore | None = None,
        deadline_seconds: float | None = None,
        timeout_seconds: float = 60.0,
        on_lost: OnLost = "raise",
        largest_error: float = 0.0,
        decoder: Decoder = "optimal",
    ) -> None:
        deadline = timeout_seconds if deadline_seconds is None else deadline_seconds
        if not 0 < timeout_seconds < math.inf:
            raise CodingError(
                f"timeout_seconds = {timeout_seconds} is not a positive, finite number"
            )
        if not 0 < deadline <= timeout_seconds:
            raise CodingError(
                f"deadline_seconds = {deadline} is not in (0, timeout_seconds = "
                f"{timeout_seconds:g}]"
            )
        self._parameters = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        self._decoding = Decoding(
            code,
            DecodingRules(on_lost, largest_error, decoder),
            {parameter.dtype for parameter in self._parameters},
        )
        if key_values is None:
            key_values = KeyValueStore(store_name("coded", group))
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
        self._consensus = Consensus(
            key_values, worker=self.worker, workers=code.workers, timeout_seconds=timeout_seconds
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
        """Weights of the samples' losses, for one batch with all of this worker's chunks.

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
        """True if the step was decided without this worker, so that its work is not wanted.

        Looks at the store now and then: every 10 ms at most, and so seldom that looking takes 1 %
        of the time, but twice a second however slow one look was.
        """
        now = time.monotonic()
        if not self._unwanted and not self._sharded and now >= self._next_look:
            self._unwanted = self._consensus.is_decided_without(self._round, self._members.epoch)
            ended = time.monotonic()
            pause = max((ended - now) / _LOOK_SHARE, _LOOK_SECONDS)
            self._next_look = ended + min(pause, _LONGEST_LOOK_SECONDS)
        return self._unwanted

    @torch.no_grad()
    def reduce(self, step: int, *, finished: bool = True) -> ReduceOutcome:
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
            CodingError: When members disagree about the step, the store does not answer, those who
                are left cannot make a process group, or this worker's message was announced before
                an error and is not whole any more.
        """
        finished = finished and self._finished
        before = self._alive()
        if self._consensus.has_gone_on(self._members.epoch):
            raise self._left_behind()
        remaining = None
        if not finished and self._chunks_done:
            # This worker's estimate of the time that its other chunks would have taken.
            elapsed = time.monotonic() - self._begun
            total = elapsed * len(self._losses.coefficients) / self._chunks_done
            remaining = max(total - elapsed, 0.0)
        if finished:
            synchronise(parameter.device for parameter in self._parameters)
        decision = self._consensus.agree(
            self._round,
            self._members.epoch,
            step=step,
            members=before,
            sufficient=self._decoding.good_enough,
            seconds=self._deadline_seconds if finished else None,
        )
        decided_seconds = time.monotonic() - self._begun
        if remaining is not None and self.worker not in decision.survivors:
            self._consensus.publish_late(self._round, remaining)
        while not self._add_up(decision):
            decision = self._consensus.decide(
                self._round,
                self._members.epoch,
                Decision(step, self._consensus.announced(self._round) & self._alive()),
            )
        decoded = self._decoding.of(decision.survivors)
        scale = self._decoding.scale(decision.survivors)
        round_ = self._round
        # All members' votes on this round say that they have left the one before.
        self._consensus.forget(round_ - 1, self._members.epoch, self._alive())
        self._begin_round(round_ + 1)
        if scale is None:
            raise self._decoding.lost(decision.survivors, step)
        self._buffers[round_ % 2].write_back()
        late = self._alive() - decision.survivors
        estimates = [self._consensus.read_late(round_, worker) for worker in sorted(late)]
        return ReduceOutcome(
            step=step,
            survivors=tuple(sorted(decision.survivors)),
            late=tuple(sorted(late)),
            lost=tuple(sorted(before - self._alive())),
            weights=scale * np.asarray(decoded.weights, np.float64),
            scale=scale,
            certificate=decoded.certificate,
            exact=decoded.certificate.exact,
            decided_seconds=decided_seconds,
            saved_seconds=max((item for item in estimates if item is not None), default=None),
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
            self._consensus.enter(round_, epoch)
        # A decision that is of no use needs no sum, but a vote all the same: it finds the dead.
        scale = self._decoding.scale(decision.survivors)
        well = scale is None or self._sum(decision, scale)
        if self._consensus.vote(round_, epoch, voters=len(self._members), well=well):
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
        elif self._consensus.is_broken(round_, epoch):
            return False
        try:
            self._members.sum_(buffer.buffers, lambda: self._consensus.is_broken(round_, epoch))
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
            present = self._consensus.roll_call(
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
        name = f"{self._consensus.name}/{self._round}/{self._members.epoch + 1}"
        try:
            self._members.keep([self._ranks[worker] for worker in present], name)
            well = True
        except RuntimeError:
            well = False
        epoch = self._members.epoch
        return self._consensus.vote(-1 - epoch, epoch, voters=len(present), well=well)

    def _left_behind(self) -> LeftBehindError:
        return LeftBehindError(
            f"worker {self.worker} (rank {self._members.rank}) was silent for more than "
            f"timeout_seconds = {self._members.timeout_seconds:g}, and the others have gone on "
            "without it: restart it from a checkpoint, or set a longer timeout"
        )
