"""What the hub knows of one step: who has sent what, and whether that gives the gradient."""

from __future__ import annotations

import time
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outlast.coding.protocol.leader import Gathering
from outlast.coding.protocol.messages import Kind, Letter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import numpy.typing as npt

    from outlast.coding.certificate import Certificate
    from outlast.coding.codes.block_certificate import DecodedBlocks
    from outlast.coding.codes.blocks import BlockCode
    from outlast.coding.codes.partial import PartialCode, PartialDecoding

_LOST = 1e-6


@dataclass(frozen=True)
class Collected:
    """How one step went at the hub.

    Attributes:
        step: The step.
        survivors: Workers whose messages are in the gradient.
        stragglers: The others.
        gone: Workers whose connection is closed.
        late: Messages of earlier steps or plans, or second ones, that came meanwhile and were
            dropped; without those of which the same worker's newer one took the place before.
        plans: How often workers were told what to encode; 0 for codes that need no plan.
        certificate: What is known of the gradient's error.
        scale: What the decoded gradient was multiplied by; 1 unless it was rescaled.
        payload_bytes: Length of one worker's coded message.
        received_bytes: What the hub received since the last outcome, headers included.
        seconds: From publishing the step to its gradient.
    """

    step: int
    survivors: tuple[int, ...]
    stragglers: tuple[int, ...]
    gone: tuple[int, ...]
    late: int
    plans: int
    certificate: Certificate
    scale: float
    payload_bytes: int
    received_bytes: int
    seconds: float

    @property
    def error(self) -> float:
        """See `Certificate.error`; exactly 0 where the gradient is exact."""
        return 0.0 if self.certificate.exact else self.certificate.error


class Round(Gathering):
    """One step at the hub.

    Args:
        step: The step's number.
        largest_error: The step is settled when decoding leaves no more error than this.

    Attributes:
        plans: See `Collected.plans`.
    """

    def __init__(self, step: int, largest_error: float) -> None:
        super().__init__(step)
        self.largest_error = largest_error
        self.plans = 0
        self._decoded: DecodedBlocks | None = None

    @abstractmethod
    def code(self) -> BlockCode:
        """The code that the letters are encoded with."""

    def decoded(self) -> DecodedBlocks:
        """Decoding weights of what is there, and what they are worth."""
        if self._decoded is None:
            self._decoded = self.code().decode(list(self.letters))
        return self._decoded

    @property
    def good(self) -> bool:
        """Whether what is there leaves a small enough error."""
        return self.decoded().error <= self.largest_error

    def lost(self) -> tuple[int, ...]:
        """Chunks that the decoded gradient contains otherwise than once."""
        coefficients = self.decoded().coefficients
        off = np.abs(coefficients - np.eye(len(coefficients))[:, None, :]).max(axis=(0, 2))
        return tuple(int(chunk) for chunk in np.flatnonzero(off > _LOST))

    def _keep(self, letter: Letter) -> bool:
        if letter.header.worker in self.letters:
            return False
        self.letters[letter.header.worker] = letter
        self._decoded = None
        return True


class WholeRound(Round):
    """A step in which each worker sends one message when all its chunks are in it."""

    def __init__(self, code: BlockCode, step: int, largest_error: float) -> None:
        super().__init__(step, largest_error)
        self._code = code

    def code(self) -> BlockCode:
        """The code of all steps."""
        return self._code

    def take(self, letter: Letter) -> bool:
        """See `Gathering.take`."""
        header = letter.header
        return header.kind == Kind.CODED and header.step == self.step and self._keep(letter)

    def settled(self, gone: Collection[int]) -> bool:
        """See `Gathering.settled`."""
        return self.good or len(self.letters.keys() | set(gone)) == self._code.workers


class PartialRound(Round):
    """A step in which workers tell what they have finished, and encode it when they are told to.

    As soon as the finished chunks would give the gradient, a plan is announced. When a worker that
    it counts on is gone, or silent for `answer_seconds`, another one is made without that worker.

    Args:
        code: The partial-straggler code.
        step: The step's number.
        largest_error: See `Round`.
        announce: Called with each plan and its number, from 1.
        answer_seconds: Longest wait for the messages of a plan.
        incomplete: Whether to announce what there is at the deadline.
    """

    def __init__(
        self,
        code: PartialCode,
        step: int,
        largest_error: float,
        *,
        announce: Callable[[PartialDecoding, int], None],
        answer_seconds: float,
        incomplete: bool,
    ) -> None:
        super().__init__(step, largest_error)
        self._partial = code
        self._announce = announce
        self._answer_seconds = answer_seconds
        self._incomplete = incomplete
        self._finished = np.zeros((code.workers, code.chunks), dtype=bool)
        self._silent: set[int] = set()
        self._plan: PartialDecoding | None = None
        self._asked = 0.0
        self._planned = False
        self._final = False

    def code(self) -> BlockCode:
        """The block code of the plan in force, or of no finished chunks."""
        if self._plan is not None:
            return self._plan
        return self._partial.plan(np.zeros_like(self._finished))

    def take(self, letter: Letter) -> bool:
        """See `Gathering.take`."""
        header = letter.header
        if header.step != self.step:
            return False
        if header.kind == Kind.FINISHED:
            self.finish(header.worker, header.chunk)
            return True
        wanted = header.kind == Kind.CODED and header.plan == self.plans and self._plan is not None
        return wanted and self._keep(letter)

    def finish(self, worker: int, chunk: int) -> None:
        """A worker has finished a chunk."""
        self._finished[worker, chunk] = True
        self._silent.discard(worker)
        self._planned = False

    @property
    def patience(self) -> float:
        """See `Gathering.patience`."""
        if self._plan is None:
            return float("inf")
        return max(self._asked + self._answer_seconds - time.monotonic(), 0.0)

    def settled(self, gone: Collection[int]) -> bool:
        """See `Gathering.settled`; announces plans."""
        if self._plan is not None:
            missing = self._missing()
            lost = missing & set(gone) if self.patience > 0 else missing
            if lost == missing and (self._final or not missing):
                return True
            if not lost or self._final:
                return False
            self._silent |= lost
            self._plan, self._planned = None, False
            self.letters.clear()
            self._decoded = None
        if not self._planned:
            self._planned = True
            plan = self._partial.plan(self._usable(gone))
            if self._error(plan) <= self.largest_error:
                self._adopt(plan)
                return not self._missing()
        if self._exhausted(gone):
            return not self._conclude(gone)
        return False

    def extension(self, gone: Collection[int]) -> float:
        """Announce what there is, if that is wanted, and wait for it once."""
        self._conclude(gone)
        return 0.0 if self._plan is None else self.patience

    def _conclude(self, gone: Collection[int]) -> bool:
        """Make the last plan, decoded as far as it is answered; whether to wait for answers."""
        self._final = True
        usable = self._usable(gone)
        if self._plan is None and self._incomplete and usable.any():
            self._adopt(self._partial.plan(usable))
        return self._plan is not None and bool(self._missing())

    def _adopt(self, plan: PartialDecoding) -> None:
        self._plan = plan
        self._decoded = None
        self.plans += 1
        self._asked = time.monotonic()
        self._announce(plan, self.plans)

    def _error(self, plan: PartialDecoding) -> float:
        # Without a missing copy there is no error; the certificate is computed only to accept one.
        if not plan.residuals.any():
            return 0.0
        return plan.certificate.error if self.largest_error > 0 else float("inf")

    def _missing(self) -> set[int]:
        """Workers that the plan counts on and that have not answered."""
        assert self._plan is not None
        senders = np.flatnonzero(self._plan.message_norms > 0)
        return {int(worker) for worker in senders} - self.letters.keys()

    def _usable(self, gone: Collection[int]) -> npt.NDArray[np.bool_]:
        """(workers, chunks) finished chunks of workers that answer."""
        usable = self._finished.copy()
        usable[list(self._silent | set(gone))] = False
        return usable

    def _exhausted(self, gone: Collection[int]) -> bool:
        """Whether everybody has finished everything or is gone."""
        left = self._finished.sum(axis=1) < self._partial.assignment.loads
        left[list(gone)] = False
        return not left.any()
