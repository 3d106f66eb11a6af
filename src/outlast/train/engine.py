"""Engines: one optimizer step's forward and backward passes, and evaluation, on whatever layout.

Two engines with the same two methods: `ReplicaEngine` for a model that every data rank holds whole
or sharded, and in `outlast.train.pipeline` one for a model that is cut into stages. The loss is
always the sum of the tokens' cross-entropies over the tokens of the *global* batch, so the gradient
does not depend on how the batch is divided among ranks and micro-batches.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from outlast.data import MicroBatch, SampleWindow, share
from outlast.records import Evaluated
from outlast.recover.phase_page import EnterPhase, ignore_phase
from outlast.train.dropout import DropoutStream
from outlast.train.model import logits_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from outlast.runtime.agreement import StepAgreement
    from outlast.runtime.watching import CommunicationWait

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
