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

Nobody is in charge of the agreement on whose messages make a step and on its commit, which goes
through a key-value store. What must be equal everywhere is written once by compare-and-set, so any
worker may write it and all read what the first one wrote:

- the decision of a round: whose messages are added up;
- its outcome: committed if every member's sum succeeded, broken as soon as one says that its own
  did not. Without this vote a sum could be done for some members and lost for others;
- the members of the next epoch, after a broken one.

A *round* is one use of the protocol, a training step. An *epoch* is the time between two losses of
members. Every wait ends at a deadline.
"""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from outlast.coding.certificate import Decoded, certify, roundoff
from outlast.coding.protocol.gradients import Abandoned, FlatGradients, Interrupt, local
from outlast.coding.protocol.key_value_store import KeyValueStore, store_name
from outlast.coding.protocol.membership import Members, PeerLostError
from outlast.errors import CodingError, LeftBehindError, LostChunksError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    import numpy.typing as npt
    from torch import nn
    from torch.distributed import ProcessGroup

    from outlast.coding.certificate import Certificate
    from outlast.coding.code import GradientCode


OnLost = Literal["raise", "rescale"]
_WORD_BITS = 62
_COMMITTED, _BROKEN = "committed", "broken"
_GRACE = 1.25
_POLL_SECONDS, _SHORTEST_POLL_SECONDS, _POLL_SHARE = 0.05, 0.001, 0.02
_LOOK_SECONDS, _LONGEST_LOOK_SECONDS, _LOOK_SHARE = 0.01, 0.5, 0.01
_WHOLE = 1e-6

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
        meanwhile: Called now and then during waits.
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
        self.meanwhile: Callable[[], object] = lambda: None

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

    def outcome(
        self, round_: int, epoch: int, seconds: float, given_up: Callable[[], bool]
    ) -> bool | None:
        """Return whether a round is committed; None where that is open after so many seconds.

        Args:
            round_: The round.
            epoch: The epoch.
            seconds: Longest wait.
            given_up: Whether there is nobody any more who could commit it.
        """
        text = self._await(f"{round_}/{epoch}/outcome", seconds, given_up)
        return None if text is None else text == _COMMITTED

    def vote(self, round_: int, epoch: int, *, voters: int, well: bool) -> bool:
        """Say whether this worker's sum succeeded; returns whether all of them did.

        A round is committed when all voters say so, and broken when one does not or is silent for
        longer than the timeout.
        """
        key = f"{round_}/{epoch}/outcome"
        outcome = None if well else _BROKEN
        if well and self._key_values.add(f"{round_}/{epoch}/well") == voters:
            outcome = _COMMITTED
        elif well and (found := self._await(key, self._timeout_seconds)):
            return found == _COMMITTED
        return self._key_values.publish(key, outcome or _BROKEN) == _COMMITTED

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

    def lose(self, worker: int) -> None:
        """Say that `worker` is dead or silent, and that the others continue without it for good."""
        if self._key_values.add(f"losing/{worker}") == 1:
            self._marks.join("lost", worker)

    def lost(self) -> frozenset[int]:
        """Workers that the others continue without."""
        return self._marks.read("lost")

    def forget(self, round_: int, epoch: int, members: Collection[int]) -> None:
        """Remove what nobody reads any more, if it is this worker's turn.

        Args:
            round_: A round that all members have left: they have all taken part in a later one.
            epoch: The epoch of that round.
            members: Who takes turns, equal on all of them.
        """
        if round_ >= 0 and sorted(members)[round_ % len(members)] == self._worker:
            late = self._marks.read(f"{round_}/{epoch}/entered")
            self._remove(round_, range(epoch, epoch + 1), late)

    def ask(self, round_: int) -> None:
        """Say that this worker has lost who was to pass the sum of a round on to it."""
        self._key_values.publish(f"{round_}/asked/{self._worker}", "")

    def is_asked(self, round_: int, worker: int) -> bool:
        """Return whether `worker` has said so."""
        return self._key_values.has(f"{round_}/asked/{worker}")

    def behind(self, round_: int, members: frozenset[int]) -> frozenset[int]:
        """Members that are not done with a round, one of this worker's last two."""
        return members - self._marks.read(f"{round_}/left")

    def leave(self, round_: int, epochs: int, members: frozenset[int]) -> None:
        """Say that this worker is done with a round; the last member to do so removes its keys."""
        if members <= self._join("left", f"{round_}/left"):
            late = members - self.announced(round_)
            self._key_values.remove(f"{round_}/asked/{worker}" for worker in late)
            self._remove(round_, range(epochs), late)
            # Nobody asks any more who is done with the round before the last.
            self._key_values.remove(self._marks.keys(f"{round_ - 2}/left"))

    def _remove(self, round_: int, epochs: Iterable[int], late: Iterable[int]) -> None:
        names = ("decision", "well", "outcome")
        keys = [f"{round_}/{epoch}/{name}" for epoch in epochs for name in names]
        for epoch in epochs:
            keys += self._marks.keys(f"{round_}/{epoch}/entered")
        keys += self._marks.keys(f"{round_}/announced")
        self._key_values.remove([*keys, *(f"{round_}/late/{worker}" for worker in late)])

    def _await(
        self, key: str, seconds: float, given_up: Callable[[], bool] = lambda: False
    ) -> str | None:
        """Return the text under `key`; None if nothing is written within `seconds`, or `given_up`.

        It asks again and again, after 2 % of the time that has passed. A wait of torch's TCPStore
        that expires looks up the store's host name for its message, which takes five seconds where
        the name server does not answer; here waits expire as a matter of course.
        """
        begun = time.monotonic()
        while not self._key_values.has(key):
            waited = time.monotonic() - begun
            if waited >= seconds or given_up():
                return None
            self.meanwhile()
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


class Decoding:
    """A code's decoder with the rules of its use.

    Args:
        code: The code.
        dtypes: Types of the gradients.
        on_lost: When the survivors do not decode well enough: ``raise``, or ``rescale``.
        largest_error: The `Certificate.error` that is good enough.

    Raises:
        CodingError: For an `on_lost` that does not exist, a `largest_error` that admits a gradient
            of nothing, and gradients that round more than the type that the code was examined for.
    """

    def __init__(
        self,
        code: GradientCode,
        dtypes: Iterable[torch.dtype],
        on_lost: OnLost = "raise",
        largest_error: float = 0.0,
    ) -> None:
        if on_lost not in {"raise", "rescale"}:
            raise CodingError(f'on_lost = {on_lost!r} is neither "raise" nor "rescale"')
        if not 0 <= largest_error < code.chunks:
            raise CodingError(
                f"largest_error = {largest_error} is not in [0, {code.chunks}): with an "
                f"error of {code.chunks}, the number of chunks, no gradient at all would do"
            )
        self._code = code
        self._on_lost, self._largest_error = on_lost, largest_error
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        if not names:
            raise CodingError("the model has no parameter that is trained")
        self._dtype = max(names, key=roundoff)
        if not code.binary and roundoff(self._dtype) > roundoff(code.dtype):
            raise CodingError(
                f"{code.name} was examined for messages in {code.dtype}, but gradients are "
                f'{self._dtype}; build it with dtype = "{self._dtype}", which refuses a code that '
                "loses too much"
            )
        self._last: tuple[frozenset[int], Decoded] | None = None

    def of(self, survivors: frozenset[int]) -> Decoded:
        """The decoding for these survivors, certified for the gradients' type."""
        if self._last is None or self._last[0] != survivors:
            decoded = self._code.decode(sorted(survivors))
            weights, coefficients = decoded.weights, decoded.coefficients
            worth = certify(coefficients, weights, self._code.message_norms, self._dtype)
            self._last = survivors, Decoded(weights, coefficients, worth)
        return self._last[1]

    def good_enough(self, survivors: frozenset[int]) -> bool:
        """Return whether the error that these survivors leave is allowed."""
        return bool(survivors) and self.of(survivors).error <= self._largest_error

    def scale(self, survivors: frozenset[int]) -> float | None:
        """Factor of the decoding under the rules; None if they cannot use it.

        An approximate gradient that is good enough is scaled too where rescaling is asked for.
        """
        certificate = self.of(survivors).certificate
        good_enough = self.good_enough(survivors)
        if good_enough and (certificate.exact or self._on_lost == "raise"):
            return 1.0
        if self._on_lost == "rescale" and math.isfinite(certificate.scale):
            return certificate.scale
        return None

    def lost(self, survivors: frozenset[int], step: int) -> LostChunksError:
        """The error that says what these survivors do not have."""
        decoded = self.of(survivors)
        missing = tuple(np.flatnonzero(np.abs(decoded.coefficients - 1.0) > _WHOLE).tolist())
        return LostChunksError(
            f"step {step} has messages from workers {sorted(survivors)} of {self._code.workers} "
            f"only, in which chunks {list(missing)} are missing or not whole (error "
            f"{decoded.error:.3g}, largest_error = {self._largest_error:g}): "
            'wait longer, take a code with more copies, or set on_lost = "rescale"',
            missing,
        )


def loss_weights(code: GradientCode, worker: int) -> dict[int, float]:
    """B[w, c] by chunk c, for the chunks of worker w in ascending order.

    Raises:
        CodingError: For a code with complex coefficients.
    """
    if np.iscomplexobj(code.matrix.data):
        raise CodingError(
            f"{code.name} has complex coefficients, which losses cannot be multiplied by; "
            "take a real code with the same tolerance, such as cyclic MDS"
        )
    start, stop = code.matrix.indptr[worker : worker + 2]
    chunks = code.matrix.indices[start:stop].tolist()
    return dict(sorted(zip(chunks, code.matrix.data[start:stop].tolist(), strict=True)))


@dataclass(frozen=True, eq=False)
class ReduceOutcome:
    """Composition of a step's gradient. Equal on all workers, but for the times.

    Where messages go from process to process, `late` and `lost` are what this worker knows of.

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


class CodedReduce(ABC):
    """Sums gradients over workers, of which some may be slow or dead.

    Subclasses say on which way the messages become one sum. All processes make it with equal
    arguments, in the same order if they make several. The model's parameters must be equal on all
    of them, or be equally placed shards of such (FSDP2 over a mesh whose other dimension is
    `group`): then a worker is a replica, nobody gives up in the middle of a step, since the
    replica's collectives are under way, and each shard decides for itself.

    Args:
        model: Its trained parameters' gradients are summed.
        code: A real code with as many workers as `group` has processes; the number of a worker is
            its rank in the group.
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
        dtypes = {parameter.dtype for parameter in self._parameters}
        self._decoding = Decoding(code, dtypes, on_lost, largest_error)
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
        self._weights = loss_weights(code, self.worker)
        self._model = model
        self._consensus = Consensus(
            key_values, worker=self.worker, workers=code.workers, timeout_seconds=timeout_seconds
        )
        self._deadline_seconds = deadline
        self._sharded = any(local(parameter) is not parameter for parameter in self._parameters)
        self._interrupt: Interrupt | None = None
        self._unwanted, self._next_look = False, 0.0
        self._set_up()
        self._begin_round(0)

    def chunks(self) -> Iterator[tuple[int, float]]:
        """This worker's chunks of the step and the weights B[w, c] of their losses.

        Ends early when the step was decided without this worker. A loop that is left before the end
        makes the worker join without a message.
        """
        self._chunks_done, self._finished = 0, False
        self._begun = time.monotonic()
        for chunk, weight in self._weights.items():
            if self.decided():
                return
            yield chunk, weight
            self._chunks_done += 1
        self._finished = True

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
            self._unwanted = self._consensus.is_decided_without(self._round, self._epoch)
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
            LeftBehindError: When the others have continued without this process.
            CodingError: When members disagree about the step, the store does not answer, those who
                are left cannot make a process group, or this worker's message was announced before
                an error and is not whole any more.
        """
        finished = finished and self._finished
        before = self._alive()
        if self._is_left_behind():
            raise self._left_behind()
        remaining = None
        if not finished and self._chunks_done:
            # This worker's estimate of the time that its other chunks would have taken.
            elapsed = time.monotonic() - self._begun
            remaining = max(elapsed * len(self._weights) / self._chunks_done - elapsed, 0.0)
        if finished:
            synchronise(parameter.device for parameter in self._parameters)
        round_ = self._round
        decision = self._consensus.agree(
            round_,
            self._epoch,
            step=step,
            members=self._alive(),
            sufficient=self._decoding.good_enough,
            seconds=self._deadline_seconds if finished else None,
        )
        decided_seconds = time.monotonic() - self._begun
        if remaining is not None and self.worker not in decision.survivors:
            self._consensus.publish_late(round_, remaining)
        while not self._add_up(decision):
            decision = self._consensus.decide(
                round_,
                self._epoch,
                Decision(step, self._consensus.announced(round_) & self._alive()),
            )
        decoded = self._decoding.of(decision.survivors)
        scale = self._decoding.scale(decision.survivors)
        late = self._alive() - decision.survivors
        estimates = [self._consensus.read_late(round_, worker) for worker in sorted(late)]
        self._leave()
        self._begin_round(round_ + 1)
        if scale is None:
            raise self._decoding.lost(decision.survivors, step)
        self._write_back(round_)
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

    def _set_up(self) -> None:
        """Make the buffers, and what else this way of summing needs."""
        # Two, since gradients of the step before may still live in the other one.
        self._buffers = [FlatGradients(self._parameters), FlatGradients(self._parameters)]

    @property
    @abstractmethod
    def _epoch(self) -> int:
        """Number of the present use of the round's keys."""

    @abstractmethod
    def _alive(self) -> frozenset[int]:
        """Workers that are members."""

    @abstractmethod
    def _is_left_behind(self) -> bool:
        """Return whether the others have left this worker behind, after a look at the store."""

    @abstractmethod
    def _add_up(self, decision: Decision) -> bool:
        """Sum the messages; False if members were lost in it, so that a new decision is needed."""

    @abstractmethod
    def _leave(self) -> None:
        """Forget what nobody reads any more, at the end of a round."""

    def _write_back(self, round_: int) -> None:
        """Make the sum of a round the parameters' gradients."""
        self._buffers[round_ % 2].write_back()

    def _begin_round(self, round_: int) -> None:
        self._round, self._begun = round_, time.monotonic()
        self._unwanted, self._next_look = False, 0.0
        self._finished, self._chunks_done = True, 0

    def _message(self, decision: Decision, scale: float) -> FlatGradients:
        """This round's buffer with this worker's share of the decoded sum; zeros where it has none.

        The share is the message, which is still in ``grad``, times its decoding weight.
        """
        buffer = self._buffers[self._round % 2]
        buffer.zero_()
        if self.worker in decision.survivors:
            buffer.add_(scale * float(self._decoding.of(decision.survivors).weights[self.worker]))
        return buffer

    def _left_behind(self) -> LeftBehindError:
        return LeftBehindError(
            f"worker {self.worker} (rank {self._members.rank}) was silent for more than "
            f"timeout_seconds = {self._members.timeout_seconds:g}, and the others have continued "
            "without it: restart it from a checkpoint, or set a longer timeout"
        )


class CodedAllReduce(CodedReduce):
    """A coded sum by one all-reduce, which late workers join with zeros; see `CodedReduce`."""

    @property
    def _epoch(self) -> int:
        return self._members.epoch

    def _alive(self) -> frozenset[int]:
        return frozenset(self._ranks.index(rank) for rank in self._members.ranks)

    def _is_left_behind(self) -> bool:
        return self._consensus.has_gone_on(self._epoch)

    def _leave(self) -> None:
        # All members' votes on this round say that they have left the one before.
        self._consensus.forget(self._round - 1, self._epoch, self._alive())

    def _add_up(self, decision: Decision) -> bool:
        """Sum the messages into this round's buffer; False if members were lost in it."""
        round_, epoch = self._round, self._epoch
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
        round_, epoch = self._round, self._epoch
        buffer = self._message(decision, scale)
        if self.worker not in decision.survivors and self._consensus.is_broken(round_, epoch):
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
        """Continue with the members that answer, once a group of them stands."""
        before: frozenset[int] = frozenset()
        while True:
            present = self._consensus.roll_call(
                self._round,
                self._epoch,
                members=self._alive(),
                survivors=decision.survivors,
                begun=None if before else begun,
            )
            if self.worker not in present:
                raise self._left_behind()
            name, well = f"{self._consensus.name}/{self._round}/{self._epoch + 1}", True
            try:
                self._members.keep([self._ranks[worker] for worker in present], name)
            except RuntimeError:
                well = False
            epoch = self._epoch
            if self._consensus.vote(-1 - epoch, epoch, voters=len(present), well=well):
                return
            # One of them died since, or else it would fail again.
            if present == before:
                raise CodingError(
                    f"workers {sorted(present)} are alive, but no process group of them can be "
                    "made; restart from a checkpoint"
                )
            before = present
