"""Which layers can change their ranks, and what stands in the way of the others."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from outlast.errors import TensorizeError
from outlast.tensorize.forms.embedding import StructuredEmbedding
from outlast.tensorize.forms.latent import LatentLinear
from outlast.tensorize.layer import StructuredLinear
from outlast.tensorize.parallel.fsdp import WholeCores
from outlast.tensorize.parallel.grouped import HeldFactor
from outlast.tensorize.ranks.gates import Gate
from outlast.tensorize.ranks.spectrum import cut
from outlast.tensorize.rules.layers import factor_parameters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

Layer = StructuredLinear | StructuredEmbedding


def is_linear(layer: Layer) -> bool:
    """Whether nothing but products is between the factors."""
    return getattr(layer, "activation", None) is None


def check_free(layer: Layer, name: str = "", *, model: nn.Module | None = None) -> None:
    """Refuse a layer whose ranks cannot change as it is now.

    Args:
        layer: Of which a rank is to change.
        name: Its name in the model.
        model: That it belongs to.

    Raises:
        TensorizeError: Saying what is in the way, and what to do.
    """
    check_here(layer, name, model=model)
    if gated := _gated(layer, name or layer.form):
        raise TensorizeError(gated)
    if bound := _bound(layer, name or layer.form, model):
        raise TensorizeError(bound)


def check_here(layer: Layer, name: str = "", *, model: nn.Module | None = None) -> None:
    """Refuse layers that are sharded or were given another forward; gates are no matter.

    Raises:
        TensorizeError: Saying so, and what to do.
    """
    name = name or layer.form
    if _is_sharded(layer) or (model is not None and _has_units(model)):
        raise TensorizeError(
            f"{name} is in a model that is sharded by FSDP or split over ranks, which would undo a "
            "change of rank at the next step: change the ranks of the whole model and shard it "
            "again (outlast.tensorize.ranks.change_sharded)"
        )
    if any(isinstance(module, HeldFactor) for module in layer.modules()):
        raise TensorizeError(
            f"{name} is in a group whose products are cut by its rank: change ranks before "
            "group_projections or parallelize_bottleneck"
        )


def _is_sharded(layer: Layer) -> bool:
    if _has_units(layer):
        return True
    return any(
        isinstance(factor, DTensor) or any(map(_averages, _hooks(factor)))
        for factor in factor_parameters(layer)
    )


def _has_units(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())


def _hooks(parameter: Tensor) -> list[object]:
    return list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


def _averages(hook: object) -> bool:
    """Whether a hook is that of a parameter which FSDP leaves whole."""
    return isinstance(getattr(hook, "__self__", None), WholeCores)


def _gated(layer: Layer, name: str) -> str | None:
    """Why cores that are computed from something else cannot be exchanged."""
    for owner in layer.modules():
        if parametrize.is_parametrized(owner):
            if any(isinstance(module, Gate) for module in owner.modules()):
                return f"the ranks of {name} are gated: call RankControl.finish first"
            return f"a factor of {name} has a parametrization: remove it before ranks change"
    if not all(isinstance(factor, nn.Parameter) for factor in layer.factors()):
        return (
            f"the factors of {name} are computed from others or shown in another dtype: change "
            "ranks before what does so"
        )
    return None


def _bound(layer: Layer, name: str, model: nn.Module | None) -> str | None:
    """Why a layer must keep the rank that another one has."""
    if isinstance(layer, LatentLinear) and layer.is_linked:
        return (
            f"{name} is in a line of latent crossing, whose layers add their latents and so must "
            "keep one rank and one basis: build the model anew with the other rank, or take every "
            "layer of the line out of it first (link_latents([layer]))"
        )
    if model is None:
        return None
    held = {id(factor) for factor in factor_parameters(layer)}
    inside = {id(module) for sharer in sharers(layer, model) for module in sharer.modules()}
    for other, module in model.named_modules():
        if id(module) not in inside and _holds(module, held):
            return (
                f"{name} shares a factor with {other}, which is another kind of layer or has other "
                "factors besides: untie them, or build the model anew with the other rank"
            )
    return None


def _holds(module: nn.Module, held: set[int]) -> bool:
    return any(id(parameter) in held for parameter in module._parameters.values())


def sharers(layer: Layer, model: nn.Module | None) -> tuple[Layer, ...]:
    """The layer and all others of a model that compute the same with the same factors."""
    if model is None:
        return (layer,)
    mine = [id(factor) for factor in factor_parameters(layer)]
    found = [
        other
        for other in model.modules()
        if isinstance(other, Layer)
        and other is not layer
        and any(_holds(module, set(mine)) for module in other.modules())
        and [id(factor) for factor in factor_parameters(other)] == mine
        and _kind(other) == _kind(layer)
    ]
    return (layer, *found)


def _kind(layer: Layer) -> tuple[object, ...]:
    scaled = getattr(layer, "alpha", None) is not None
    return layer.network, getattr(layer, "activation", None), scaled


def bonds_of(model: nn.Module) -> Iterator[tuple[str, StructuredLinear, str]]:
    """Every bond of a model's linear layers that can be resized: (name of the layer, layer, bond).

    Layers that share their factors come once. Layers that must keep the rank of another (a line of
    latent crossing, one tied factor of two) are passed over with a warning. Embeddings are not
    among them: rows of rare tokens would decide.

    Raises:
        TensorizeError: See `check_free`, for what holds for the model as a whole.
    """
    seen = set()
    for name, layer in model.named_modules():
        bonds = _cuttable(layer) if isinstance(layer, StructuredLinear) else []
        if not bonds:
            continue
        assert isinstance(layer, StructuredLinear)
        check_here(layer, name, model=model)
        if gated := _gated(layer, name or layer.form):
            raise TensorizeError(gated)
        identity = tuple(map(id, layer.factors()))
        if identity in seen:
            continue
        seen.add(identity)
        if bound := _bound(layer, name or layer.form, model):
            warnings.warn(f"ranks stay as they are: {bound}", stacklevel=3)
            continue
        for bond in bonds:
            yield name, layer, bond


def _cuttable(layer: StructuredLinear) -> list[str]:
    found = []
    for bond in layer.network.bonds:
        try:
            cut(layer.network, bond)
        except TensorizeError:
            continue
        found.append(bond)
    return found
