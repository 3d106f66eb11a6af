"""Tensor-train and tensor-train matrix layers."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from outlast.errors import TensorizeError
from outlast.tensorize.layer import CoredLinear
from outlast.tensorize.network import Network
from outlast.tensorize.shapes import balanced_modes, bond_ranks

if TYPE_CHECKING:
    import torch

_MODES = "abcdefghijkl"
_OUT_MODES = "ABCDEFGHIJKL"
_BONDS = "pqrstuvwxyzPQRSTUVWXYZ"

Ranks = int | tuple[int, ...]


def train_network(
    in_features: int,
    out_features: int,
    rank: Ranks,
    *,
    in_modes: tuple[int, ...],
    out_modes: tuple[int, ...],
) -> Network:
    """One core per mode, those of the inputs before those of the outputs (Yang et al. 2024)."""
    inputs, outputs = _MODES[: len(in_modes)], _OUT_MODES[: len(out_modes)]
    modes = inputs + outputs
    bonds = _BONDS[: len(modes) - 1]
    ends = ["", *bonds, ""]
    cores = tuple(
        left + mode + right for mode, (left, right) in zip(modes, pairwise(ends), strict=True)
    )
    sizes = (
        *zip(modes, (*in_modes, *out_modes), strict=True),
        *zip(bonds, bond_ranks(rank, (*in_modes, *out_modes)), strict=True),
    )
    return Network(inputs, outputs, cores, sizes, in_features, out_features)


def train_matrix_network(
    in_features: int,
    out_features: int,
    rank: Ranks,
    *,
    in_modes: tuple[int, ...],
    out_modes: tuple[int, ...],
) -> Network:
    """One core per pair of modes, (r, out, in, r') (Novikov et al. 2015, arXiv 1509.06569).

    Raises:
        TensorizeError: There are not as many modes on one side as on the other.
    """
    if len(in_modes) != len(out_modes):
        raise TensorizeError(
            f"in_modes = {in_modes} and out_modes = {out_modes} of a ttm layer must be as many"
        )
    pairs = [into * out for into, out in zip(in_modes, out_modes, strict=True)]
    inputs, outputs = _MODES[: len(in_modes)], _OUT_MODES[: len(in_modes)]
    bonds = _BONDS[: len(in_modes) - 1]
    ends = ["", *bonds, ""]
    cores = tuple(
        left + out + into + right
        for out, into, (left, right) in zip(outputs, inputs, pairwise(ends), strict=True)
    )
    sizes = (
        *zip(inputs + outputs, (*in_modes, *out_modes), strict=True),
        *zip(bonds, bond_ranks(rank, pairs), strict=True),
    )
    return Network(inputs, outputs, cores, sizes, in_features, out_features)


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
            in_modes=in_modes or balanced_modes(in_features, cores),
            out_modes=out_modes or balanced_modes(out_features, cores),
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
            in_modes=in_modes or balanced_modes(in_features, cores),
            out_modes=out_modes or balanced_modes(out_features, cores),
        )
        super().__init__(network, bias=bias, device=device, dtype=dtype)
