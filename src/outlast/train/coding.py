"""Engines whose gradients do not wait for slow replicas, and what they have to say about it.

Both wrap a `ReplicaEngine`, which knows how to run a micro-batch. `CoverageEngine` hands out
micro-batches dynamically (`outlast.coding.protocol.coverage`); `CodedEngine` gives every replica a
fixed, larger load (`outlast.coding.protocol.all_reduce` and `outlast.coding.protocol.peers`).
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from outlast.coding import (
    CyclicMDS,
    CyclicRepetition,
    FractionalRepetition,
    GradientCode,
    GraphCode,
)
from outlast.coding.protocol import (
    CodedAllReduce,
    CodedGossip,
    CodedReduce,
    CodedServer,
    Coverage,
    CoverageOutcome,
    ReduceOutcome,
)
from outlast.distributed.group import gather_on_first
from outlast.errors import CodingError
from outlast.records import CorruptionDetected, GradientsCoded
from outlast.records.totals import DUPLICATE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.data import BatchLoader, MicroBatch
    from outlast.job import Job
    from outlast.job.sections import CodingSection
    from outlast.train.engine import ReplicaEngine
    from outlast.train.layout import Layout

PROTOCOLS: dict[str, type[CodedReduce]] = {
    "all_reduce": CodedAllReduce,
    "server": CodedServer,
    "gossip": CodedGossip,
}
"""Ways of the sum of a fixed code, by ``coding.protocol``."""

_SLOWNESS = 1.2
"""A replica is slow when it takes so many times as long as the median of them."""


def code_of(job: Job, replicas: int) -> GradientCode:
    """The fixed-load code of [coding] for so many replicas.

    Raises:
        CodingError: When the replicas do not fit the code, with the nearest that do.
    """
    scheme, copies = job.coding.scheme, job.coding.copies
    try:
        match scheme:
            case "fractional_repetition":
                return FractionalRepetition(workers=replicas, stragglers=copies - 1)
            case "cyclic_repetition":
                return CyclicRepetition(workers=replicas, stragglers=copies - 1)
            case "cyclic_mds":
                return CyclicMDS(workers=replicas, stragglers=copies - 1)
            case _:
                seed = job.run.seed
                return GraphCode.random_regular(workers=replicas, degree=copies, seed=seed)
    except CodingError as error:
        raise CodingError(
            f'coding.scheme = "{scheme}" with coding.copies = {copies} (1 more than stragglers) '
            f"does not fit {replicas} replicas (workers): {error}"
        ) from None


@dataclass
class _Step:
    """One step as this replica has seen it."""

    claims: int = 0
    yielded: bool = False
    late: tuple[int, ...] = ()
    duplicates: int = 0
    lost: int = 0
    error: float = 0.0
    seconds: float = 0.0
    own_seconds: float = 0.0


@dataclass
class CodingNotes:
    """Gradient coding since the last record, put together from all ranks.

    Args:
        settings: The scheme and its protocol.
        replica: This rank's replica.
        replicas: Number of replicas.
        speaks: Whether this rank's notes count: one rank of every replica.
    """

    settings: CodingSection
    replica: int
    replicas: int
    speaks: bool
    _steps: dict[int, _Step] = field(default_factory=dict)
    _wrong: list[CorruptionDetected] = field(default_factory=list)

    def covered(self, step: int, outcome: CoverageOutcome) -> None:
        """Note a step of coverage; of one that the guard repeats, the last time counts."""
        self._steps[step] = _Step(
            claims=outcome.taken_over,
            yielded=outcome.yielded > 0,
            duplicates=outcome.duplicates,
            lost=len(outcome.lost),
            error=0.0 if outcome.certificate.exact else outcome.certificate.error,
            seconds=outcome.seconds,
            own_seconds=outcome.own_seconds,
        )
        for disagreement in outcome.disagreements:
            self._wrong.append(
                CorruptionDetected(
                    step=step,
                    module=f"chunk {disagreement.chunk}",
                    operation=DUPLICATE,
                    device=f"ranks {disagreement.ranks[0]} and {disagreement.ranks[1]}",
                    found_on=disagreement.ranks[1],
                    rows=1,
                    magnitude=disagreement.difference,
                    outcome="detected",
                )
            )

    def decoded(self, outcome: ReduceOutcome, seconds: float, own_seconds: float) -> None:
        """Note a step of a fixed code; of one that the guard repeats, the last time counts.

        Args:
            outcome: What the gradient is made of.
            seconds: Time of the step's gradient.
            own_seconds: Time that this replica has needed, or would have needed at least, for its
                load.
        """
        certificate = outcome.certificate
        # `centred` is also the error of the scaled decoding, with coefficients scale x alpha.
        error = certificate.error if outcome.scale == 1.0 else certificate.centred
        self._steps[outcome.step] = _Step(
            late=outcome.late,
            error=0.0 if outcome.exact else error,
            seconds=seconds,
            own_seconds=own_seconds,
        )

    def take(self, step: int) -> list[GradientsCoded | CorruptionDetected]:
        """All ranks' notes since the last call; all ranks call it together.

        Args:
            step: Steps done so far.

        Returns:
            Events on rank 0, nothing on the others.
        """
        mine = (self.replica, list(self._steps.values()) if self.speaks else [], self._wrong)
        self._steps, self._wrong = {}, []
        everyone = gather_on_first(mine)
        spoken = [(replica, steps) for replica, steps, _ in everyone if steps]
        if not spoken:
            return []
        wrong = [event for _, _, events in everyone for event in events]
        rows = list(zip(*(steps for _, steps in spoken), strict=True))
        names = [replica for replica, _ in spoken]
        coded = GradientsCoded(
            step=step,
            scheme=self.settings.scheme,
            replicas=self.replicas,
            stragglers=[_stragglers(names, row) for row in rows],
            claims=[sum(item.claims for item in row) for row in rows],
            duplicates=[sum(item.duplicates for item in row) for row in rows],
            lost=[max(item.lost for item in row) for row in rows],
            errors=[max(item.error for item in row) for row in rows],
            coded_seconds=[round(max(item.seconds for item in row), 6) for row in rows],
            waiting_seconds=[round(max(item.own_seconds for item in row), 6) for row in rows],
            protocol=self.settings.protocol,
        )
        return [coded, *wrong]


def _stragglers(names: Sequence[int], row: Sequence[_Step]) -> list[int]:
    """Of the replicas that were not waited for, those that were slow.

    Somebody is always last, and done without where the others happen to suffice.
    """
    spared = {name for name, item in zip(names, row, strict=True) if item.yielded}
    spared.update(*(step.late for step in row))
    typical = statistics.median_low(step.own_seconds for step in row)
    slow = (
        name
        for name, item in zip(names, row, strict=True)
        if item.own_seconds > _SLOWNESS * typical
    )
    return sorted(spared.intersection(slow))


@dataclass
class CoverageEngine:
    """Replicas that take over one another's micro-batches.

    Args:
        inner: Runs one micro-batch.
        coverage: Hands out chunks; chunk c is micro-batch c % k of replica c // k.
        loader: Gathers any rank's micro-batches.
        layout: The degrees of parallelism.
        shard_rank: This rank's place in its replica.
        notes: Where steps are noted.
    """

    inner: ReplicaEngine
    coverage: Coverage
    loader: BatchLoader
    layout: Layout
    shard_rank: int
    notes: CodingNotes

    def forward_backward(
        self, batches: Sequence[MicroBatch], step: int, global_tokens: int
    ) -> torch.Tensor:
        """See `Engine`; sums over replicas, and FSDP2 averages over the ranks of each."""
        scale = self.layout.shard / global_tokens

        def compute(chunk: int) -> torch.Tensor:
            replica, number = divmod(chunk, self.loader.microbatches)
            rank = replica * self.layout.shard + self.shard_rank
            own = rank == self.loader.rank
            batch = batches[number] if own else self.loader.part(step, rank, number)
            return self.inner.loss(batch, step) * scale

        outcome = self.coverage.step(step, compute)
        self.inner.waits.add(outcome.waited_seconds)
        self.notes.covered(step, outcome)
        # The gradient without the lost chunks is scaled up, and so is its loss.
        kept = self.coverage.chunks - len(outcome.lost)
        return outcome.loss / self.layout.shard * (self.coverage.chunks / kept)

    def evaluate(self, batch: MicroBatch) -> torch.Tensor:
        """See `Engine`."""
        return self.inner.evaluate(batch)


@dataclass
class CodedEngine:
    """Replicas that each compute several shares of the batch and send one combination of them.

    Args:
        inner: Runs one micro-batch.
        coded: Encodes, agrees on survivors, decodes.
        loader: Gathers micro-batches; its `ranks` are the code's chunks.
        load: Chunks that this replica computes.
        notes: Where steps are noted.
        prefetched: Whether the batches that a step is given are chunk `loader.rank`.
    """

    inner: ReplicaEngine
    coded: CodedReduce
    loader: BatchLoader
    load: int
    notes: CodingNotes
    prefetched: bool = False

    def forward_backward(
        self, batches: Sequence[MicroBatch], step: int, global_tokens: int
    ) -> torch.Tensor:
        """See `Engine`; the losses are encoded and decoded like the gradients."""
        begun, passes = time.monotonic(), []
        encoded = torch.zeros((), device=self.inner.device)
        with self.coded.computing():
            for chunk, weight in self.coded.chunks():
                own = self.prefetched and chunk == self.loader.rank
                for number in range(self.loader.microbatches):
                    batch = batches[number] if own else self.loader.part(step, chunk, number)
                    loss = self.inner.loss(batch, step)
                    self.inner.mark("backward")
                    (loss * (weight / global_tokens)).backward()  # type: ignore[no-untyped-call]
                    encoded += weight * loss.detach()
                    passes.append(time.monotonic() - begun)
        computed = time.monotonic()
        self.inner.mark("reduce")
        outcome = self.coded.reduce(step)
        ended = time.monotonic()
        self.inner.waits.add(ended - computed)
        own_seconds = self._own_seconds(passes, computed - begun)
        self.notes.decoded(outcome, ended - begun, own_seconds)
        weight = float(outcome.weights[self.coded.worker])
        if weight == 0.0:
            # Not a product, since passes that were given up may have left infinity or NaN.
            return torch.zeros_like(encoded)
        return encoded * weight / global_tokens

    def _own_seconds(self, passes: Sequence[float], spent_seconds: float) -> float:
        """Time of the whole load, from when the passes that were done have ended."""
        total = self.load * self.loader.microbatches
        if not passes:
            # The first alone would have taken longer.
            return spent_seconds * total
        return max(spent_seconds, passes[-1] / len(passes) * total)

    def evaluate(self, batch: MicroBatch) -> torch.Tensor:
        """See `Engine`."""
        return self.inner.evaluate(batch)
