"""One optimizer step's forward and backward passes, on whatever layout.

Two engines with the same two methods: `ReplicaEngine` for a model that every data rank holds whole
or sharded, `PipelineEngine` for one that is cut into stages. The loss is always the sum of the
tokens' cross-entropies over the tokens of the *global* batch, so the gradient does not depend on
how the batch is divided among ranks and micro-batches.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from outlast.data import MicroBatch
from outlast.recover.phase_page import EnterPhase, ignore_phase
from outlast.train.gradients import average_over
from outlast.train.model import logits_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.pipelining.schedules import _PipelineSchedule

    from outlast.runtime.communication import CommunicationWait
    from outlast.train.dropout import DropoutStream
    from outlast.train.pipeline import StageModule

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


@dataclass
class ReplicaEngine:
    """Every data rank runs the whole model (plain, DDP, FSDP2 or tensor-parallel).

    Args:
        model: What is called in training: the model or its wrapper.
        inner: What is called in evaluation: the model without DDP.
        data_ranks: Number of ranks over which DDP or FSDP2 averages gradients.
        mark: Told of each forward and backward pass.
    """

    model: nn.Module
    inner: nn.Module
    device: torch.device
    dropout: DropoutStream
    waits: CommunicationWait
    data_ranks: int
    bf16_autocast: bool
    mark: EnterPhase = ignore_phase

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
                loss = self.loss(batch, step)
                self.mark("backward")
                with self.waits.backward() if last else contextlib.nullcontext():
                    (loss * scale).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total / global_tokens

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


@dataclass
class PipelineEngine:
    """Every rank runs its stages; micro-batches flow through `schedule`.

    Args:
        loss_scale: One number by which the schedule's loss function multiplies; set before each
            run, because a schedule takes its loss function once.
        replicas: Ranks that hold the same stages and see other samples.
        mark: Told of the passes, which are one phase since they overlap, and of the reduction.
    """

    schedule: _PipelineSchedule
    stages: list[StageModule]
    device: torch.device
    replicas: ProcessGroup
    loss_scale: list[float]
    mark: EnterPhase = ignore_phase

    def forward_backward(
        self, batches: Sequence[MicroBatch], step: int, global_tokens: int
    ) -> torch.Tensor:
        """See `Engine`; on ranks without the last stage the returned share is 0."""
        for stage in self.stages:
            stage.step = step
        replicas = self.replicas.size()
        self.loss_scale[0] = replicas / global_tokens
        self.mark("forward")
        loss = self._run(batches, training=True)
        if replicas > 1:
            self.mark("reduce")
            for stage in self.stages:
                average_over(stage.parameters(), self.replicas)
        return loss / replicas

    def evaluate(self, batch: MicroBatch) -> torch.Tensor:
        """See `Engine`; on ranks without the last stage the returned sum is 0."""
        self.loss_scale[0] = 1.0
        with torch.no_grad():
            return self._run([batch], training=False)

    def _run(self, batches: Sequence[MicroBatch], *, training: bool) -> torch.Tensor:
        parts = [tensors(batch, self.device) for batch in batches]
        inputs, targets, sample_ids = (torch.cat(item) for item in zip(*parts, strict=True))
        first = (inputs,) if any(stage.first for stage in self.stages) else ()
        is_last = any(stage.last for stage in self.stages)
        losses: list[torch.Tensor] = []
        run = self.schedule.step if training else self.schedule.eval
        run(
            *first,
            target=targets if is_last else None,
            losses=losses if is_last else None,
            return_outputs=False,
            sample_ids=sample_ids,
        )
        if not losses:
            return torch.zeros((), device=self.device)
        return torch.stack([loss.detach() for loss in losses]).sum()


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
