"""CP layers: a sum of products with one factor per mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from outlast.errors import TensorizeError
from outlast.tensorize.layer import CoredLinear
from outlast.tensorize.network import Network
from outlast.tensorize.shapes import balanced_modes

if TYPE_CHECKING:
    import torch

_MODES = "abcdefghijkl"
_OUT_MODES = "ABCDEFGHIJKL"


def cp_network(
    in_features: int,
    out_features: int,
    rank: int,
    *,
    in_modes: tuple[int, ...],
    out_modes: tuple[int, ...],
) -> Network:
    """W[AB, ab] = sum_r U[a, r] V[b, r] Y[r, A] Z[r, B] (Lebedev et al. 2015, arXiv 1412.6553).

    Raises:
        TensorizeError: A rank below 1.
    """
    if rank < 1:
        raise TensorizeError(f"rank = {rank} of a cp layer must be at least 1")
    inputs, outputs = _MODES[: len(in_modes)], _OUT_MODES[: len(out_modes)]
    cores = (*(mode + "r" for mode in inputs), *("r" + mode for mode in outputs))
    sizes = (*zip(inputs + outputs, (*in_modes, *out_modes), strict=True), ("r", rank))
    return Network(inputs, outputs, cores, sizes, in_features, out_features)


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
            in_modes=in_modes or balanced_modes(in_features, modes),
            out_modes=out_modes or balanced_modes(out_features, modes),
        )
        super().__init__(network, bias=bias, device=device, dtype=dtype)
