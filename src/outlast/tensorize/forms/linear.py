"""Linear layers made of several cores: block tensor-train, Monarch, tensor train, Tucker, CP.

Block tensor-train and Monarch are two block-diagonal matrices with a permutation between; Tucker
has a factor for every mode and one core over all their ranks; CP is a sum of products with one
factor per mode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from outlast.tensorize.layer import CoredLinear
from outlast.tensorize.network import (
    Ranks,
    block_network,
    chosen_modes,
    cp_network,
    one_rank,
    train_matrix_network,
    train_network,
    tucker_network,
)
from outlast.tensorize.shapes import block_modes, monarch_modes, monarch_rank

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from outlast.tensorize.network import Network


class BTTLinear(CoredLinear):
    """Block tensor-train of two cores: full rank with few parameters.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        rank: Rank of each of the blocks that the weight is cut into.
        in_modes: Two factors of the input features; None: near the square root.
        out_modes: Likewise of the output features.
        bias: Whether there is a bias.
        device: Where the parameters lie.
        dtype: Theirs.
    """

    form: ClassVar[str] = "btt"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int = 1,
        *,
        in_modes: tuple[int, int] | None = None,
        out_modes: tuple[int, int] | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        one_rank(rank, self.form)
        usual = block_modes(in_features, out_features)
        network = block_network(
            in_features,
            out_features,
            rank,
            in_modes=usual[0] if in_modes is None else in_modes,
            out_modes=usual[1] if out_modes is None else out_modes,
        )
        super().__init__(network, bias=bias, device=device, dtype=dtype)


class MonarchLinear(BTTLinear):
    """Two block-diagonal matrices of `blocks` blocks each (Dao et al. 2022, arXiv 2204.00595).

    x goes through blocks of (in / blocks) features each, every one of which gives as many, and a
    transposition deals these out to the blocks of the second matrix.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        blocks: Blocks of each matrix. The parameters are (in + out) min(in, out) / blocks while
            blocks^2 divides min(in, out); from blocks^2 = min(in, out) on they grow again, as
            (in + out) blocks.
        bias: Whether there is a bias.
        device: Where the parameters lie.
        dtype: Theirs.
    """

    form: ClassVar[str] = "monarch"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        blocks: int = 4,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        in_modes, out_modes = monarch_modes(in_features, out_features, blocks)
        super().__init__(
            in_features,
            out_features,
            monarch_rank(in_features, out_features, blocks),
            in_modes=in_modes,
            out_modes=out_modes,
            bias=bias,
            device=device,
            dtype=dtype,
        )
        self.blocks = blocks

    def settings(self) -> dict[str, Any]:
        """The arguments that build such a layer."""
        modes = ("rank", "in_modes", "out_modes")
        rest = {key: value for key, value in super().settings().items() if key not in modes}
        return {**rest, "blocks": self.blocks}

    def resized(self, rank: int | tuple[int, ...]) -> BTTLinear:
        """A block tensor train with the same modes: a Monarch layer has no other rank."""
        first, settings = self.cores[0], super().settings()
        settings.update(rank=rank, device=first.device, dtype=first.dtype)
        return BTTLinear(**settings)


class _TrainLinear(CoredLinear):
    """A chain of cores over factors of the features.

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

    build: ClassVar[Callable[..., Network]]

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
        into = chosen_modes(in_modes, in_features, cores, name="cores")
        out = chosen_modes(out_modes, out_features, cores, name="cores")
        network = self.build(in_features, out_features, rank, in_modes=into, out_modes=out)
        super().__init__(network, bias=bias, device=device, dtype=dtype)


class TTLinear(_TrainLinear):
    """Tensor train: the modes of the inputs one after the other, then those of the outputs.

    The rank between the two halves is the rank of the weight. See `_TrainLinear` for the arguments.
    """

    form: ClassVar[str] = "tt"
    build = staticmethod(train_network)


class TTMLinear(_TrainLinear):
    """Tensor-train matrix: every core has a mode of the inputs and one of the outputs.

    See `_TrainLinear` for the arguments.
    """

    form: ClassVar[str] = "ttm"
    build = staticmethod(train_matrix_network)


class _ModesLinear(CoredLinear):
    """One factor per mode of inputs and outputs.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        rank: Of Tucker: of every mode, or of each of them, those of the inputs first; of CP: terms
            of the sum.
        modes: Modes on each side, where they are not given.
        in_modes: Factors of the input features; None: as even as possible.
        out_modes: Likewise of the output features.
        bias: Whether there is a bias.
        device: Where the parameters lie.
        dtype: Theirs.
    """

    build: ClassVar[Callable[..., Network]]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: Ranks,
        modes: int = 2,
        *,
        in_modes: tuple[int, ...] | None = None,
        out_modes: tuple[int, ...] | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        into = chosen_modes(in_modes, in_features, modes, name="modes")
        out = chosen_modes(out_modes, out_features, modes, name="modes")
        network = self.build(in_features, out_features, rank, in_modes=into, out_modes=out)
        super().__init__(network, bias=bias, device=device, dtype=dtype)


class TuckerLinear(_ModesLinear):
    """A factor for each mode of inputs and outputs, and one core between them.

    The core has a dimension per mode: with more than two modes on a side it soon is the largest
    part. See `_ModesLinear` for the arguments.
    """

    form: ClassVar[str] = "tucker"
    build = staticmethod(tucker_network)


class CPLinear(_ModesLinear):
    """A sum of `rank` products that have one factor per mode (canonical polyadic).

    The rank of the weight is at most `rank`, for far fewer parameters than two factors have. See
    `_ModesLinear` for the arguments.
    """

    form: ClassVar[str] = "cp"
    build = staticmethod(cp_network)
