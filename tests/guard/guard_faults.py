"""A fault_hook for tests of collectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Fault:
    """Spoils one site on one rank, as often as said.

    Args:
        element: Which number of the site.
        after: Uses of the site that are left alone first.
    """

    def __init__(
        self,
        site: str,
        rank: int,
        *,
        times: int = 1,
        value: Any = None,
        after: int = 0,
        element: int = 3,
    ) -> None:
        self.site, self.rank, self.times = site, rank, times
        self.value, self.after, self.element = value, after, element

    def __call__(self, site: str, module: str, numbers: torch.Tensor) -> None:
        if site != self.site or dist.get_rank() != self.rank or self.times == 0:
            return
        if self.after:
            self.after -= 1
            return
        self.times -= 1
        flat = numbers.view(-1)
        spoilt = flat[self.element] * 1.5 + 0.01
        flat[self.element] = spoilt if self.value is None else self.value
