"""What all ranks agree on at the end of a step: the loss, and whether to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from outlast.train.layout import Layout


class Agreement:
    """One small all-reduce a step.

    Args:
        layout: Tells which ranks' losses are summed, so that tensor-parallel and pipeline peers
            do not count twice.
        rank: This rank.
        device: Where the reduction runs.
    """

    def __init__(self, layout: Layout, rank: int, device: torch.device) -> None:
        self._counts = layout.counts_loss(rank)
        self.device = device
        self._alone = layout.world_size == 1

    def sum(self, value: torch.Tensor, *flags: float) -> list[float]:
        """The sum over ranks of `value` (counted once per sample), then that of each flag."""
        own = value.detach().float().reshape(1)
        if self._alone:
            return [float(own), *flags]
        if not self._counts:
            own = torch.zeros_like(own)
        shared = torch.cat([own, torch.tensor(flags, device=self.device)])
        dist.all_reduce(shared)
        return [float(item) for item in shared.tolist()]
