"""Engines: one optimizer step's forward and backward passes, and evaluation, on whatever layout.

Engines with the same two methods: `ReplicaEngine` for a model that every data rank holds whole or
sharded, and in `outlast.train.pipeline` one for a model that is cut into stages. Two more wrap a
`ReplicaEngine` so that gradients do not wait for slow replicas: `CoverageEngine` hands out
micro-batches dynamically (`outlast.coding.protocol.coverage`), and `CodedEngine` gives every
replica a fixed, larger load (`outlast.coding.protocol.all_reduce` and
`outlast.coding.protocol.peers`). The loss is always the sum of the tokens' cross-entropies over the
tokens of the *global* batch, so the gradient does not depend on how the batch is divided among
ranks and micro-batches.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from outlast.data import MicroBatch, SampleWindow, share
from outlast.distributed.group import gather_on_first
from outlast.records import CorruptionDetected, Evaluated, GradientsCoded
from outlast.records.totals import DUPLICATE
from outlast.recover.phase_page import EnterPhase, ignore_phase
from outlast.train.dropout import DropoutStream
from outlast.train.model import logits_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from outlast.coding.protocol import CodedReduce, Coverage, CoverageOutcome, ReduceOutcome
    from outlast.data import BatchLoader
    from outlast.job.sections import CodingSection
    from outlast.runtime.agreement import StepAgreement
    from outlast.runtime.watching import CommunicationWait
    from outlast.train.layout import Layout

    Passes = Callable[[MicroBatch], torch.Tensor]
    Audited = Callable[[Passes, MicroBatch], torch.Tensor]

IGNORED_TARGET = -100
"""Target of positions that do not count, as in torch's cross_entropy."""


class Engine(Protocol):
    """Computes gradients and losses of one step's micro-batches."""

    def forward_backward(
        self, batches: Sequence[MicroBatch], step: int, global_tokens: int
    ) -> torch.Tensor:
        """Accumulate gradients; returns this rank's share of the mean loss, a float32 scalar."""

    def evaluate(self, batch: MicroBatch) -> torch.Tensor:
        """Sum of the tokens' losses (nats) of one batch without dropout, a float32 scalar."""


def loss_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum of cross-entropies in nats, in fp32.

    Args:
        logits: (batch, sequence, vocabulary).
        targets: (batch, sequence) token ids; `IGNORED_TARGET` does not count.
    """
    return functional.cross_entropy(
        logits.flatten(0, 1).float(),
        targets.flatten(),
        reduction="sum",
        ignore_index=IGNORED_TARGET,
    )


def unaudited(passes: Passes, batch: MicroBatch) -> torch.Tensor:
    """Do the passes of a micro-batch, which give the sum of its tokens' losses."""
    return passes(batch)


@dataclass
class ReplicaEngine:
    """Every data rank runs the whole model (plain, DDP, FSDP2 or tensor-parallel).

    Args:
        model: What is called in training: the model or its wrapper.
        inner: What is called in evaluation: the model without DDP.
        data_ranks: Number of ranks over which DDP or FSDP2 averages gradients.
        mark: Told of each forward and backward pass.
        audit: Does the passes of a micro-batch, and audits them where that is due; see
            `outlast.guard.Guard.audit`.
    """

    model: nn.Module
    inner: nn.Module
    device: torch.device
    dropout: DropoutStream
    waits: CommunicationWait
    data_ranks: int
    bf16_autocast: bool
    mark: EnterPhase = ignore_phase
    audit: Audited = unaudited

    def forward_backward(
        self, batches: Sequence[MicroBatch], step: int, global_tokens: int
    ) -> torch.Tensor:
        """See `Engine`."""
        total = torch.zeros((), device=self.device)
        # Gradients are averaged over data ranks, but the loss is a share of a global mean.
        scale = self.data_ranks / global_tokens
        for batch in batches:
            last = batch is batches[-1]
            with self._synchronise_gradients(last):
                total += self.audit(partial(self._passes, step, scale, last), batch)
        return total / global_tokens

    def _passes(self, step: int, scale: float, last: bool, batch: MicroBatch) -> torch.Tensor:
        loss = self.loss(batch, step)
        self.mark("backward")
        with self.waits.backward() if last else contextlib.nullcontext():
            (loss * scale).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def loss(self, batch: MicroBatch, step: int) -> torch.Tensor:
        """Sum of the tokens' losses (nats) of one micro-batch in training, with its graph."""
        self.mark("forward")
        inputs, targets, sample_ids = tensors(_never_empty(batch), self.device)
        with self.dropout.for_samples(step, sample_ids), self._autocast():
            return loss_sum(logits_of(self.model(inputs)), targets)

    def evaluate(self, batch: MicroBatch) -> torch.Tensor:
        """See `Engine`."""
        inputs, targets, _ = tensors(batch, self.device)
        with torch.no_grad(), self._autocast():
            return loss_sum(logits_of(self.inner(inputs)), targets)

    def _autocast(self) -> AbstractContextManager[object]:
        if not self.bf16_autocast:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def _synchronise_gradients(self, last: bool) -> AbstractContextManager[None]:
        """Reduce gradients over ranks in the last micro-batch's backward pass only."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        elif isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        return contextlib.nullcontext()


def _never_empty(batch: MicroBatch) -> MicroBatch:
    """`batch`, or one row that does not count where this rank has no sample left.

    Ranks with fewer samples than micro-batches still take part in every collective operation.
    """
    if len(batch.sample_ids):
        return batch
    shape = (1, batch.inputs.shape[1])
    return MicroBatch(
        sample_ids=np.zeros(1, dtype=np.int64),
        inputs=np.zeros(shape, dtype=np.int64),
        targets=np.full(shape, IGNORED_TARGET, dtype=np.int64),
    )


def tensors(
    batch: MicroBatch, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, targets (both (samples, sequence)) and sample ids (samples,) on `device`."""
    arrays = (batch.inputs, batch.targets, batch.sample_ids)
    inputs, targets, ids = (
        torch.from_numpy(array).to(device, non_blocking=True) for array in arrays
    )
    return inputs, targets, ids


@dataclass(frozen=True)
class Evaluation:
    """Measures the mean loss over samples spread evenly over the validation data.

    Attributes:
        windows: Validation samples.
        samples: How many of them are used.
        batch_size: Samples per forward on one rank, the same on all ranks.
        rank: This data-parallel rank of `ranks`.
    """

    windows: SampleWindow
    samples: int
    batch_size: int
    rank: int
    ranks: int

    def measure(self, model: nn.Module, engine: Engine, agreement: StepAgreement) -> float:
        """Mean loss in nats per token, equal on all ranks; all ranks call it together."""
        total = torch.zeros(())
        model.eval()
        try:
            for batch in self._batches():
                total += engine.evaluate(batch).cpu()
        finally:
            model.train()
        return agreement.sum(total.to(agreement.device)) / self.tokens

    @property
    def tokens(self) -> int:
        """Tokens whose loss is averaged."""
        return self.samples * self.windows.sequence_length

    def bits_per_byte(self, loss: float) -> float | None:
        """`loss` in bits per byte of source text, where the number of bytes is known."""
        source_bytes = self.windows.file.bytes
        if source_bytes is None:
            return None
        return loss / math.log(2) * len(self.windows.file.tokens) / source_bytes

    def measured(self, step: int, loss: float, seconds: float) -> Evaluated:
        """The event of what `measure` has found after `step` steps, in so many seconds."""
        return Evaluated(step, loss, self.bits_per_byte(loss), self.tokens, seconds)

    def _batches(self) -> Iterator[MicroBatch]:
        """This rank's part, in equally many batches of equal shape on every rank."""
        together = self.batch_size * self.ranks
        for start in range(0, self.samples, together):
            stop = min(start + together, self.samples)
            first, last = share(start, stop, self.rank, self.ranks)
            # Rows beyond the share repeat sample 0 and do not count.
            ids = np.zeros(self.batch_size, dtype=np.int64)
            # Evenly spread over the data, whose beginning may be unlike the rest.
            ids[: last - first] = np.arange(first, last) * self.windows.samples // self.samples
            inputs, targets = self.windows.gather(ids)
            targets[last - first :] = IGNORED_TARGET
            yield MicroBatch(ids, inputs, targets)


_SLOWNESS = 1.2
"""A replica is slow when it takes so many times as long as the median of them."""


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
