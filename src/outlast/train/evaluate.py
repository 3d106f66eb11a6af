"""The validation loss, the same on any number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from outlast.data import MicroBatch, SampleWindow, share
from outlast.records import Evaluated
from outlast.train.engine import IGNORED_TARGET, Engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from outlast.runtime.agreement import StepAgreement


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
