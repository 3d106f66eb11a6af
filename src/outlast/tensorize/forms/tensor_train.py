"""Tensor-train and tensor-train matrix layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from outlast.tensorize.layer import CoredLinear
from outlast.tensorize.networks import (
    Ranks,
    chosen_modes,
    train_matrix_network,
    train_network,
)

if TYPE_CHECKING:
    import torch


class TTLinear(CoredLinear):
    """Tensor train: the modes of the inputs one after the other, then those of the outputs.

    The rank between the two halves is the rank of the weight.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        rank: Size of all bonds, or of each of them.
        cores: Modes on each side, where they are not given.
        in_modes: Factors of the input features; None: as even as possible.
        out_modes: Likewise of the output features.
        bias: Whether there is a bias.
        device: Where the parameters lie.
        dtype: Theirs.
    """

    form: ClassVar[str] = "tt"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: Ranks,
        cores: int = 3,
        *,
        in_modes: tuple[int, ...] | None = None,
        out_modes: tuple[int, ...] | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        network = train_network(
            in_features,
            out_features,
            rank,
            in_modes=chosen_modes(in_modes, in_features, cores, name="cores"),
            out_modes=chosen_modes(out_modes, out_features, cores, name="cores"),
        )
        super().__init__(network, bias=bias, device=device, dtype=dtype)


class TTMLinear(CoredLinear):
    """Tensor-train matrix: every core has a mode of the inputs and one of the outputs.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        rank: Size of all bonds, or of each of them.
        cores: Cores, where the modes are not given.
        in_modes: Factors of the input features; None: as even as possible.
        out_modes: Likewise of the output features.
        bias: Whether there is a bias.
        device: Where the parameters lie.
        dtype: Theirs.
    """

    form: ClassVar[str] = "ttm"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: Ranks,
        cores: int = 3,
        *,
        in_modes: tuple[int, ...] | None = None,
        out_modes: tuple[int, ...] | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        network = train_matrix_network(
            in_features,
            out_features,
            rank,
            in_modes=chosen_modes(in_modes, in_features, cores, name="cores"),
            out_modes=chosen_modes(out_modes, out_features, cores, name="cores"),
        )
        super().__init__(network, bias=bias, device=device, dtype=dtype)
