"""Tucker layers: a factor for every mode and one core over all their ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from outlast.tensorize.layer import CoredLinear
from outlast.tensorize.networks import chosen_modes, tucker_network

if TYPE_CHECKING:
    import torch


class TuckerLinear(CoredLinear):
    """A factor for each mode of inputs and outputs, and one core between them.

    The core has a dimension per mode: with more than two modes on a side it soon is the largest
    part.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        rank: Of every mode, or of each of them, those of the inputs first.
        modes: Modes on each side, where they are not given.
        in_modes: Factors of the input features; None: as even as possible.
        out_modes: Likewise of the output features.
        bias: Whether there is a bias.
        device: Where the parameters lie.
        dtype: Theirs.
    """

    form: ClassVar[str] = "tucker"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int | tuple[int, ...],
        modes: int = 2,
        *,
        in_modes: tuple[int, ...] | None = None,
        out_modes: tuple[int, ...] | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        network = tucker_network(
            in_features,
            out_features,
            rank,
            in_modes=chosen_modes(in_modes, in_features, modes, name="modes"),
            out_modes=chosen_modes(out_modes, out_features, modes, name="modes"),
        )
        super().__init__(network, bias=bias, device=device, dtype=dtype)
