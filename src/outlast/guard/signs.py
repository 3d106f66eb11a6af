"""The random signs by which checks weight what they sum, drawn anew for every step."""

from __future__ import annotations

import torch

_SPARE = 1 << 17
"""How many windows of the drawn signs a step may choose from."""


class Signs:
    """+1 and -1 with probability 1/2 each: a window of one drawn sequence, at random per step.

    A fixed pattern of errors whose signed sum is zero escapes one draw with probability 1/2 at
    most (Freivalds 1977), and n independent draws with 2^-n; summing without signs would never see
    +d, -d. Windows of a step's two sides and of different steps are as good as independent: they
    overlap only at offsets, where one sign meets another.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._tables: dict[torch.device, torch.Tensor] = {}
        self._longest = 0
        self._offsets = {"input": 0, "output": 0}

    def renew(self) -> None:
        """Choose the windows of the next step."""
        chosen = torch.randint(0, _SPARE, (2,), generator=self._generator).tolist()
        self._offsets = dict(zip(("input", "output"), chosen, strict=True))

    def take(self, side: str, length: int, device: torch.device) -> torch.Tensor:
        """The step's float32 signs (length,) of one side of a product, ``input`` or ``output``.

        At least 31 more finite numbers lie behind them in memory.
        """
        if length > self._longest:
            self._longest = 2 * length
            self._tables.clear()
        table = self._tables.get(device)
        if table is None:
            total = _SPARE + self._longest + 32
            generator = torch.Generator().manual_seed(self._generator.initial_seed())
            bits = torch.randint(0, 2, (total,), generator=generator)
            table = self._tables[device] = (2 * bits - 1).to(device, torch.float32)
        offset = self._offsets[side]
        return table[offset : offset + length]
