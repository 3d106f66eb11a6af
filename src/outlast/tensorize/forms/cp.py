"""CP layers: a sum of products with one factor per mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from outlast.tensorize.layer import CoredLinear
from outlast.tensorize.networks import chosen_modes, cp_network

if TYPE_CHECKING:
    import torch


class CPLinear(CoredLinear):
    """A sum of `rank` products that have one factor per mode (canonical polyadic).

    The rank of the weight is at most `rank`, for far fewer parameters than two factors have.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        rank: Terms of the sum.
        modes: Modes on each side, where they are not given.
        in_modes: Factors of the input features; None: as even as possible.
        out_modes: Likewise of the output features.
        bias: Whether there is a bias.
        device: Where the parameters lie.
        dtype: Theirs.
    """

    form: ClassVar[str] = "cp"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        modes: int = 2,
        *,
        in_modes: tuple[int, ...] | None = None,
        out_modes: tuple[int, ...] | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        network = cp_network(
            in_features,
            out_features,
            rank,
            in_modes=chosen_modes(in_modes, in_features, modes, name="modes"),
            out_modes=chosen_modes(out_modes, out_features, modes, name="modes"),
        )
        super().__init__(network, bias=bias, device=device, dtype=dtype)
