"""Tucker layers: a factor for every mode and one core over all their ranks."""

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
_RANKS = "mnopqrstuvwxyzMNOPQRSTUVWXYZ"


def tucker_network(
    in_features: int,
    out_features: int,
    rank: int | tuple[int, ...],
    *,
    in_modes: tuple[int, ...],
    out_modes: tuple[int, ...],
) -> Network:
    """W[AB, ab] = sum U[a, p] V[b, q] C[p, q, r, s] Y[r, A] Z[s, B] (Tucker 1966).

    A rank above its mode adds nothing and is cut to it.

    Raises:
        TensorizeError: A rank below 1, or not one number and not one per mode.
    """
    modes = (*in_modes, *out_modes)
    asked = (rank,) * len(modes) if isinstance(rank, int) else rank
    if len(asked) != len(modes) or min(asked) < 1:
        raise TensorizeError(
            f"rank = {rank} of a tucker layer must be one number of at least 1, or one for each "
            f"of the {len(modes)} modes"
        )
    inputs, outputs = _MODES[: len(in_modes)], _OUT_MODES[: len(out_modes)]
    ranks = _RANKS[: len(modes)]
    into, out = ranks[: len(in_modes)], ranks[len(in_modes) :]
    cores = (
        *(mode + bond for mode, bond in zip(inputs, into, strict=True)),
        ranks,
        *(bond + mode for mode, bond in zip(outputs, out, strict=True)),
    )
    cut = (min(one, mode) for one, mode in zip(asked, modes, strict=True))
    sizes = (*zip(inputs + outputs, modes, strict=True), *zip(ranks, cut, strict=True))
    return Network(inputs, outputs, cores, sizes, in_features, out_features)


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
            in_modes=in_modes or balanced_modes(in_features, modes),
            out_modes=out_modes or balanced_modes(out_features, modes),
        )
        super().__init__(network, bias=bias, device=device, dtype=dtype)
