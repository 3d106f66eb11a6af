"""Two factors: a plain product, or one with a nonlinearity between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from outlast.errors import TensorizeError
from outlast.tensorize.bottleneck import ACTIVATIONS, FEW, autocast_dtype, bottleneck
from outlast.tensorize.initialize import activation_gain
from outlast.tensorize.layer import StructuredLinear
from outlast.tensorize.network import Network
from outlast.tensorize.networks import one_rank
from outlast.tensorize.operator import chain

if TYPE_CHECKING:
    from torch import Tensor


def low_rank_network(in_features: int, out_features: int, rank: int) -> Network:
    """Give y = (x A^T) B^T with A of shape (rank, in) and B of shape (out, rank)."""
    sizes = (("i", in_features), ("r", rank), ("o", out_features))
    return Network("i", "o", ("ri", "or"), sizes, in_features, out_features)


class LowRankLinear(StructuredLinear):
    """y = (x A^T) B^T + b: two matrix products.

    The factors are those of the children ``down`` and ``up``, two `nn.Linear`, so that whatever
    replaces linear layers (float8, tensor parallelism, a guard) replaces these as well.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        rank: Features between.
        bias: Whether there is a bias.
        device: Where the parameters lie.
        dtype: Theirs.
    """

    form: ClassVar[str] = "low_rank"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        one_rank(rank, self.form)
        super().__init__(low_rank_network(in_features, out_features, rank))
        self.down = nn.Linear(in_features, rank, bias=False, device=device, dtype=dtype)
        self.up = nn.Linear(rank, out_features, bias=bias, device=device, dtype=dtype)
        self.reset_parameters()

    def factors(self) -> tuple[Tensor, ...]:
        """The weights of `down` and `up`."""
        return self.down.weight, self.up.weight

    @property
    def bias(self) -> Tensor | None:
        """That of `up`."""
        return self.up.bias

    def check_children(self) -> None:
        """Refuse to take the children's weights for all that they do.

        Raises:
            TensorizeError: One is no linear layer any more, as where LoRA wraps it.
        """
        for name, child in (("down", self.down), ("up", self.up)):
            if not isinstance(child, nn.Linear):
                raise TensorizeError(
                    f"{name} has become a {type(child).__name__}, which does more than multiply "
                    "with its weight: merge it first (merge_and_unload of adapters)"
                )

    def to_dense(self) -> Tensor:
        """The weight, of shape (out_features, in_features); exact and differentiable."""
        self.check_children()
        return super().to_dense()

    def _replaced(self) -> bool:
        """Whether the children are not plain linear layers any more, or are listened to."""
        return any(
            type(item) is not nn.Linear
            or item._forward_hooks
            or item._forward_pre_hooks
            or item._backward_hooks
            or item._backward_pre_hooks
            or "forward" in item.__dict__
            for item in (self.down, self.up)
        )

    def _suits(self, x: Tensor) -> bool:
        """Whether the children can multiply x themselves, which `nn.Linear` does in one dtype."""
        same = self.down.weight.dtype == self.up.weight.dtype == x.dtype
        return same or autocast_dtype(x) is not None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply; x: (..., in_features) -> (..., out_features), in the dtype of x."""
        if self._replaced():
            return self._by_children(x)
        if (torch.compiler.is_compiling() or x.numel() <= FEW) and self._suits(x):
            result: Tensor = self.up(self.down(x))
            return result
        bias = self.bias
        if bias is not None and autocast_dtype(x) is None:
            bias = bias.to(x.dtype)
        return chain(x, self.factors(), self.network, bias)

    def _by_children(self, x: Tensor, activation: str | None = None) -> Tensor:
        """As the children do it; stored in another dtype than x, each gets x in its own."""
        kinds = [_dtype_of(child) for child in (self.down, self.up)]
        mixed = None not in kinds and {*kinds} != {x.dtype} and autocast_dtype(x) is None
        latent = self.down(x.to(kinds[0]) if mixed else x)
        latent = latent if activation is None else ACTIVATIONS[activation](latent)
        result: Tensor = self.up(latent.to(kinds[1]) if mixed else latent)
        return result.to(x.dtype) if mixed else result


def _dtype_of(child: nn.Module) -> torch.dtype | None:
    """The floating-point dtype that a factor is stored in; None where something hides it."""
    weight = getattr(child, "weight", None)
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
        return None
    return weight.dtype


class BottleneckLinear(LowRankLinear):
    """y = act(x A^T) B^T + b: low rank with a nonlinearity in the middle (Liu et al. 2025, CoLA).

    Not a linear map any more, so there is no `to_dense`; a dense layer is turned into one by
    distillation alone.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        rank: Features between.
        activation: ``silu``, ``gelu``, ``relu`` or ``tanh``.
        bias: Whether there is a bias.
        device: Where the parameters lie.
        dtype: Theirs.
    """

    form: ClassVar[str] = "cola"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        activation: str = "silu",
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise TensorizeError(f"activation = {activation!r} is not one of {known}")
        self.activation = activation
        super().__init__(in_features, out_features, rank, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply; x: (..., in_features) -> (..., out_features)."""
        if self._replaced():
            return self._by_children(x, self.activation)
        return bottleneck(x, self.down.weight, self.up.weight, self.bias, self.activation)

    def to_dense(self) -> Tensor:
        """Refuse.

        Raises:
            TensorizeError: Always.
        """
        raise TensorizeError(
            f"a layer with {self.activation} between its factors is no matrix: export its two "
            "factors as they are, or use form = 'low_rank'"
        )

    @torch.no_grad()
    def reset_parameters(
        self, std: float | None = None, generator: torch.Generator | None = None
    ) -> None:
        """Draw the factors anew; for x of unit variance y varies as after a weight of `std`."""
        super().reset_parameters(std, generator)
        self.up.weight.div_(activation_gain(self.activation))

    def settings(self) -> dict[str, Any]:
        """The arguments that build such a layer."""
        return {**super().settings(), "activation": self.activation}

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"{super().extra_repr()}, activation={self.activation}"
