"""Structured layers and their factors, as optimizers see them: rates and decay of each.

Which rate and which decay each parameter gets.

In muP mode (Qiu et al. 2024, arXiv 2406.06248, section 4: the maximal-update rules of Yang and Hu,
one core at a time) core k with fan in f_k and fan out o_k of c cores in a layer with d_in inputs
has ::

    std  = f_k^(-1/2) min(1, sqrt(o_k / f_k))
    rate = (d_in / f_k) / c  x  rate of the dense layer

Adam moves every entry of a core by about the rate, so its output by the rate times the f_k terms
that are summed: dividing by f_k makes features move alike whatever the core's shape. The c cores
move at once, and each gets a share of 1 / c. The dense layer's own muP rule, for Adam and from
width to width, is a rate of base_width / d_in times that of the base width.
"""

from __future__ import annotations

import fnmatch
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outlast.errors import TensorizeError
from outlast.tensorize.initialize import activation_gain, fans, fill_
from outlast.tensorize.layer import StructuredLinear
from outlast.tensorize.network import Network
from outlast.tensorize.sharded import as_stored

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Generator, Tensor


@dataclass(frozen=True, eq=False)
class StructuredPart:
    """A structured layer.

    Attributes:
        name: Its name in the model.
        module: The layer.
    """

    name: str
    module: nn.Module

    @property
    def network(self) -> Network:
        """Network of its factors as it is now; ranks can change between steps."""
        network: Network = self.module.network  # type: ignore[assignment]
        return network

    @property
    def looks_up(self) -> bool:
        """True for an embedding, whose input modes are picked from and not summed over."""
        return not isinstance(self.module, StructuredLinear)

    @property
    def factors(self) -> tuple[Tensor, ...]:
        """The cores as they are now; wrappers such as FSDP2 exchange parameters."""
        factors: tuple[Tensor, ...] = self.module.factors()  # type: ignore[operator]
        return factors

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Parameters that store the cores, in their order; see `factor_parameters`."""
        return factor_parameters(self.module)

    @property
    def is_two_factor(self) -> bool:
        """True if it is linear with two matrices, A of (rank, in) and B of (out, rank)."""
        network = self.network
        first, last = network.inputs, network.outputs
        bonds = network.bonds
        return len(first) == len(last) == len(bonds) == 1 and network.cores == (
            bonds + first,
            last + bonds,
        )


def structured_layers(model: nn.Module) -> Iterator[StructuredPart]:
    """All modules that are made of factors: those with a `Network` and a method ``factors``.

    Modules that share all their factors with an earlier one (tied weights) are left out.
    """
    # Parameters, which live on: what is computed at every look has identities that come again.
    seen: set[tuple[int, ...]] = set()
    for name, module in model.named_modules():
        network = getattr(module, "network", None)
        if isinstance(network, Network) and callable(getattr(module, "factors", None)):
            layer = StructuredPart(name, module)
            identity = tuple(map(id, layer.parameters))
            if identity not in seen:
                seen.add(identity)
                yield layer


def factor_parameters(layer: nn.Module) -> tuple[Tensor, ...]:
    """The parameters that the factors of a structured layer are stored in, one per factor.

    A factor usually is its parameter; one that is shown in another dtype
    (`outlast.tensorize.fsdp`) is a tensor of its own at every look.

    Args:
        layer: With a method ``factors``.
    """
    with as_stored():
        return layer.factors()  # type: ignore[operator,no-any-return]


def some_layers(layers: list[StructuredPart], wanted: str) -> list[StructuredPart]:
    """The layers, of which there must be at least one.

    Raises:
        TensorizeError: There are none.
    """
    if not layers:
        raise TensorizeError(f"the model has no {wanted}: call tensorize before this rule")
    return layers


def parameter_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float,
    mup: bool = False,
    *,
    base_width: int | None = None,
) -> list[dict[str, Any]]:
    """Groups for an optimizer: factors, dense matrices and vectors, by rate.

    Factors get no decay here: decaying both shrinks their product twice as fast as a dense weight,
    and penalises another norm of it. `ProductDecay` shrinks the product instead. Biases, norms and
    all other vectors are not decayed.

    Args:
        model: Frozen parameters are left out.
        lr: Rate of the dense layers (at the width `base_width` in muP mode).
        weight_decay: Of dense matrices.
        mup: Whether cores (and with `base_width` dense layers) get rates of their own.
        base_width: Input features of the model that `lr` was tuned for; None: of this very one.

    Returns:
        Dicts with ``params``, ``lr``, ``initial_lr``, ``weight_decay`` and ``name``, none of them
        empty. The name says what is in it and its rate: ``factors x 2``.

    Raises:
        TensorizeError: A negative rate or decay, or a base width without muP.
    """
    if not (lr >= 0.0 and weight_decay >= 0.0):
        raise TensorizeError(f"lr = {lr} and weight_decay = {weight_decay} must both be at least 0")
    if base_width is not None and not mup:
        raise TensorizeError(f"base_width = {base_width} needs mup = True: without, no rate scales")
    multipliers = factor_multipliers(model, base_width=base_width) if mup else {}
    factors = {id(core) for layer in structured_layers(model) for core in layer.parameters}
    # Rates by muP of dense hidden layers under Adam; embeddings keep theirs.
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    dense: dict[Tensor, float] = {}
    if base_width is not None:
        for module in model.modules():
            if isinstance(module, nn.Linear) and id(module.weight) not in embeddings:
                dense[module.weight] = base_width / module.in_features
    groups: dict[tuple[str, float], list[Tensor]] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in factors:
            key = ("factors", multipliers.get(parameter, 1.0))
        elif parameter.ndim >= 2:
            key = ("matrices", dense.get(parameter, 1.0))
        else:
            key = ("vectors", 1.0)
        groups.setdefault(key, []).append(parameter)
    return [
        {
            "params": parameters,
            "lr": lr * multiplier,
            "initial_lr": lr * multiplier,
            "weight_decay": weight_decay if kind == "matrices" else 0.0,
            "name": kind if multiplier == 1.0 else f"{kind} x {multiplier:.4g}",
        }
        for (kind, multiplier), parameters in groups.items()
    ]


def factor_multipliers(model: nn.Module, *, base_width: int | None = None) -> dict[Tensor, float]:
    """Return the multiplier of each factor's rate in muP mode; see the module's formula.

    Args:
        model: With structured layers; others are passed over.
        base_width: See `parameter_groups`.
    """
    found: dict[Tensor, float] = {}
    for layer in structured_layers(model):
        network, dense = layer.network, 1.0
        if base_width is not None and not layer.looks_up:
            dense = base_width / network.in_features
        shares = mup_multipliers(network, one_hot=layer.looks_up)
        for factor, share in zip(layer.parameters, shares, strict=True):
            found[factor] = share * dense
    return found


def mup_multipliers(network: Network, *, one_hot: bool = False) -> tuple[float, ...]:
    """Each core's rate over that of the dense layer: (d_in / fan in) / cores.

    Args:
        network: The layer's.
        one_hot: x picks rows (an embedding): neither the dense layer nor a core sums over them, and
            d_in is 1.
    """
    cores = len(network.cores)
    width = 1 if one_hot else network.in_features
    return tuple(width / fan_in / cores for fan_in, _ in fans(network, one_hot=one_hot))


def mup_stds(network: Network) -> tuple[float, ...]:
    """Each core's standard deviation in muP mode: fan_in^(-1/2) min(1, sqrt(fan_out / fan_in))."""
    return tuple(
        min(1.0, math.sqrt(fan_out / fan_in)) / math.sqrt(fan_in)
        for fan_in, fan_out in fans(network)
    )


@torch.no_grad()
def mup_initialize_(
    model: nn.Module, generator: Generator | None = None, *, zero: Sequence[str] = ()
) -> None:
    """Draw the factors of all structured linear layers anew, for muP mode; biases become zero.

    Embeddings and dense layers are left as they are. After a nonlinearity the last factor is
    divided by `activation_gain`.

    Args:
        model: With structured layers.
        generator: Source of the numbers; torch's own by default.
        zero: Name patterns of layers that start at zero, usually the last of each residual block:
            their last factor alone is zero, or nothing could ever be learned.

    Raises:
        TensorizeError: The model has no structured layers, or a pattern fits none of them.
    """
    layers = [layer for layer in structured_layers(model) if not layer.looks_up]
    some_layers(layers, "structured linear layers")
    for pattern in zero:
        if not any(fnmatch.fnmatchcase(layer.name, pattern) for layer in layers):
            raise TensorizeError(f"zero = {pattern!r} fits the name of no structured layer")
    for layer in layers:
        deviations = list(mup_stds(layer.network))
        activation = getattr(layer.module, "activation", None)
        if activation is not None:
            deviations[-1] /= activation_gain(activation)
        if any(fnmatch.fnmatchcase(layer.name, pattern) for pattern in zero):
            deviations[-1] = 0.0
        fill_(layer.parameters, deviations, generator)
        bias = getattr(layer.module, "bias", None)
        if bias is not None:
            bias.zero_()
