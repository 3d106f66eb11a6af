"""What all layers share that stand in for an `nn.Linear` with a structured weight."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from outlast.tensorize.initialize import initialize_
from outlast.tensorize.merge import widest
from outlast.tensorize.operator import Merged, chain
from outlast.tensorize.planner import explain
from outlast.tensorize.weight import (
    accept_factors,
    dense_matrix,
    save_dense_weights_too,
    weight_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from outlast.tensorize.network import Network


class StructuredLinear(nn.Module):
    """A linear layer whose weight is made of factors; the base of the forms.

    Takes the place of an `nn.Linear`: any leading dimensions, autocast, the meta device.

    Attributes:
        form: The name that `tensorize` knows the form by.
        in_features: Size of the last dimension of x.
        out_features: Size of the last dimension of y.
        network: How the factors make the weight.
    """

    form: ClassVar[str]

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        self.in_features = network.in_features
        self.out_features = network.out_features
        save_dense_weights_too()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        save_dense_weights_too()

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: Any, *others: Any
    ) -> None:
        accept_factors(self, state, prefix, others[-1])
        super()._load_from_state_dict(state, prefix, metadata, *others)

    def factors(self) -> tuple[Tensor, ...]:
        """The cores, in the order and with the dimensions of the network's."""
        raise NotImplementedError

    @property
    def rank(self) -> int | tuple[int, ...]:
        """The size of what is between the factors: of all bonds, or of each if they differ."""
        sizes = tuple(self.network.size(bond) for bond in self.network.bonds)
        return sizes[0] if len(set(sizes)) == 1 else sizes

    def _bias(self) -> Tensor | None:
        return self.bias  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        """Multiply; x: (..., in_features) -> (..., out_features)."""
        return chain(x, self.factors(), self.network, self._bias())

    def to_dense(self) -> Tensor:
        """The weight, of shape (out_features, in_features); exact and differentiable."""
        return dense_matrix(self.network, self.factors())

    @property
    def weight(self) -> Tensor:
        """The weight of the `nn.Linear` in whose place this is; read-only.

        For code of models that looks at ``linear.weight.dtype`` and the like, which costs nothing.
        Its numbers are made when they are used, each time, and are differentiable.
        """
        return weight_of(self, (self.out_features, self.in_features))

    def dense_linear(self) -> nn.Linear:
        """A plain layer with the same weight and bias."""
        weight, bias = self.to_dense().detach(), self._bias()
        options: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        linear = nn.Linear(self.in_features, self.out_features, bias is not None, **options)
        with torch.no_grad():
            linear.weight.copy_(weight)
            if bias is not None:
                linear.bias.copy_(bias)
        return linear.train(self.training)

    @torch.no_grad()
    def reset_parameters(
        self, std: float | None = None, generator: torch.Generator | None = None
    ) -> None:
        """Draw the factors anew, so that the weight's entries have a standard deviation.

        Args:
            std: That of the weight; None: 1 / sqrt(3 in_features), that of a new `nn.Linear`.
            generator: Where the numbers come from; None: torch's own.
        """
        std = 1 / math.sqrt(3 * self.in_features) if std is None else std
        initialize_(self.factors(), self.network, std, generator=generator)
        bias = self._bias()
        if bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            bias.uniform_(-bound, bound, generator=generator)

    def settings(self) -> dict[str, Any]:
        """The arguments that build such a layer; ``type(layer)(**layer.settings())`` is another."""
        return {
            "in_features": self.in_features,
            "out_features": self.out_features,
            "rank": self.rank,
            "bias": self._bias() is not None,
        }

    def resized(self, rank: int | tuple[int, ...]) -> StructuredLinear:
        """A new layer of this form with another rank, on the same device and of the same dtype."""
        first = self.factors()[0]
        settings = {**self.settings(), "rank": rank, "device": first.device, "dtype": first.dtype}
        return type(self)(**settings)

    def explain(self, tokens: int = 4096) -> str:
        """What the layer does for a number of tokens, and what else it could do, with costs."""
        cores = self.factors()
        return explain(self.network, tokens, widest(cores), cores[0].device)

    def extra_repr(self) -> str:
        """What `print` shows."""
        dense = self.in_features * self.out_features
        share = self.network.parameters / dense
        biased = self._bias() is not None
        return (
            f"{self.in_features}, {self.out_features}, rank={self.rank}, bias={biased}, "
            f"{share:.1%} of the dense parameters"
        )


class CoredLinear(StructuredLinear):
    """A form whose factors are the parameters ``cores.0``, ``cores.1`` and so on.

    Args:
        network: How the cores make the weight.
        bias: Whether there is a bias.
        device: Where the parameters lie.
        dtype: Theirs.
    """

    bias: nn.Parameter | None
    _merged: Merged | None = None

    def __init__(
        self,
        network: Network,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(network)
        self.cores = nn.ParameterList(
            torch.empty(network.shape(core), device=device, dtype=dtype)
            for core in range(len(network.cores))
        )
        empty = torch.empty(network.out_features, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if empty is None else nn.Parameter(empty))
        self.reset_parameters()

    def factors(self) -> tuple[Tensor, ...]:
        """The cores."""
        return tuple(self.cores)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply; x: (..., in_features) -> (..., out_features)."""
        return chain(x, tuple(self.cores), self.network, self.bias, merged=self._merged)

    def __getstate__(self) -> dict[str, Any]:
        """Without merged cores: a copy has cores of its own."""
        return {name: value for name, value in self.__dict__.items() if name != "_merged"}

    def settings(self) -> dict[str, Any]:
        """The arguments that build such a layer."""
        sizes = dict(self.network.sizes)
        return {
            **super().settings(),
            "in_modes": tuple(sizes[letter] for letter in self.network.inputs),
            "out_modes": tuple(sizes[letter] for letter in self.network.outputs),
        }


@contextlib.contextmanager
def merged(model: nn.Module) -> Iterator[None]:
    """Within this context a model's layers merge their cores once and not at every call.

    For inference: with gradients nothing is kept. Updates in place, `load_state_dict` and ``.to()``
    are noticed; writing through ``parameter.data`` is not.

    Args:
        model: A model with tensorized layers.
    """
    layers = [module for module in model.modules() if isinstance(module, CoredLinear)]
    before = [layer._merged for layer in layers]
    for layer in layers:
        layer._merged = Merged()
    try:
        yield
    finally:
        for layer, old in zip(layers, before, strict=True):
            layer._merged = old
