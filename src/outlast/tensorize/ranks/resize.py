"""Changing the rank of one layer, with its optimizer's moments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from outlast.errors import TensorizeError
from outlast.tensorize.layer import StructuredLinear
from outlast.tensorize.ranks.spectrum import Cut, cut, decompose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from outlast.tensorize.network import Network

_SQUARES = ("exp_avg_sq", "max_exp_avg_sq")


@dataclass(frozen=True)
class RankChange:
    """What happened to a layer.

    Attributes:
        name: The layer's name in the model.
        bond: The bond's letter in the layer's network.
        before: Its size before.
        after: Its size after.
        error: Relative change of the weight in the Frobenius norm; nan where there is no weight.
        parameters: (old, new) parameter objects, which whoever holds the old ones must exchange.
    """

    name: str
    bond: str
    before: int
    after: int
    error: float
    parameters: tuple[tuple[nn.Parameter, nn.Parameter], ...]

    def __str__(self) -> str:
        return f"{self.name}: rank {self.before} -> {self.after}"


@dataclass(frozen=True)
class _Map:
    """The new coordinates of a bond.

    Attributes:
        left: (batch..., r, r') for the core that meets x first.
        right: (batch..., r', r) for the other.
        dropped: Relative norm of what is lost.
    """

    left: Tensor
    right: Tensor
    dropped: float


@torch.no_grad()
def resize(
    layer: StructuredLinear,
    rank: int,
    *,
    bond: str | None = None,
    optimizers: Sequence[Optimizer] = (),
    name: str = "",
    on_change: Callable[[RankChange], None] | None = None,
    generator: torch.Generator | None = None,
) -> RankChange:
    """Give a bond of a layer another size, in place.

    A smaller one keeps the largest singular values of the weight over the bond, which is the best
    that this rank can do (Eckart and Young); with a nonlinearity in the middle, the units with the
    largest products of norms. A larger one leaves the function as it is: what is new meets zeros
    in the core after it, and learns from there.

    Moments follow: a gradient of the old coordinates is mapped to the new ones, m -> m P^T, and a
    mean of squares by the squares of the map, as if entries were independent. Steps are kept.

    Args:
        layer: What to change.
        rank: The new size.
        bond: Which; None: the only one.
        optimizers: Those that may hold the layer's parameters.
        name: The layer's name in the model, for the change.
        on_change: Told about the change at its end.
        generator: For the entries that are new.

    Raises:
        TensorizeError: The rank is not positive, or the bond is not one that can be changed.
    """
    network, cores = layer.network, layer.factors()
    at = cut(network, bond or _only_bond(layer))
    before = network.size(at.bond)
    if rank < 1:
        raise TensorizeError(f"rank = {rank} of {name or layer.form} must be at least 1")
    if rank == before:
        return RankChange(name, at.bond, before, rank, 0.0, ())
    mapped = (
        _narrower(layer, cores, at, rank)
        if rank < before
        else _wider(network, at, rank, cores[at.left].device)
    )
    exchanged = []
    for core, way in ((at.left, mapped.left), (at.right, mapped.right.mT)):
        back = mapped.right.mT if core == at.left else mapped.left
        old = cores[core]
        assert isinstance(old, nn.Parameter)
        value = _along(old, network.cores[core], at, way)
        if rank > before and core == at.left:
            value = _with_new_entries(value, old, network.cores[core].index(at.bond), generator)
        fresh = nn.Parameter(value, requires_grad=old.requires_grad)
        for optimizer in optimizers:
            _exchange(optimizer, old, fresh, (network.cores[core], at, back))
        exchanged.append((old, fresh))
    _install(layer, network, at, rank, exchanged)
    change = RankChange(name, at.bond, before, rank, mapped.dropped, tuple(exchanged))
    if on_change is not None:
        on_change(change)
    return change


def _only_bond(layer: StructuredLinear) -> str:
    bonds = layer.network.bonds
    if len(bonds) != 1:
        raise TensorizeError(f"a {layer.form} layer has the bonds {', '.join(bonds)}: name one")
    return bonds


def is_linear(layer: StructuredLinear) -> bool:
    """Whether nothing but products is between the factors."""
    return getattr(layer, "activation", None) is None


def _narrower(layer: StructuredLinear, cores: Sequence[Tensor], at: Cut, rank: int) -> _Map:
    """Keep what carries most."""
    if not is_linear(layer):
        units = importance(cores, layer.network, at)
        kept = units.topk(rank).indices.sort().values
        chosen = torch.eye(len(units), dtype=torch.float64, device=units.device)[kept]
        return _Map(chosen.mT, chosen, float("nan"))
    u, s, v = decompose(layer.network, cores, at)
    tiny = torch.finfo(cores[0].dtype).eps * s.amax()
    scale = s[..., :rank].clamp_min(max(float(tiny), 1e-300)).rsqrt()
    lost = s[..., rank:].square().sum() / s.square().sum().clamp_min(1e-300)
    left, right = v[..., :rank] * scale.unsqueeze(-2), u[..., :rank, :] * scale.unsqueeze(-1)
    return _Map(left, right, float(lost.sqrt()))


def importance(cores: Sequence[Tensor], network: Network, at: Cut) -> Tensor:
    """The product of norms of what leads into and out of every unit of a bond; (r,)."""
    norms = []
    for core in (at.left, at.right):
        place = network.cores[core].index(at.bond)
        norms.append(cores[core].double().movedim(place, 0).flatten(1).norm(dim=1))
    product: Tensor = norms[0] * norms[1]
    return product


def _wider(network: Network, at: Cut, rank: int, device: torch.device) -> _Map:
    """The old coordinates, followed by new ones that nothing comes out of."""
    before = network.size(at.bond)
    same = torch.eye(before, rank, dtype=torch.float64, device=device)
    same = same.expand(*(network.size(letter) for letter in at.batch), before, rank)
    return _Map(same, same.mT, 0.0)


def _with_new_entries(
    value: Tensor, old: Tensor, place: int, generator: torch.Generator | None
) -> Tensor:
    """Fill what was added to the core that meets x first like the rest of it."""
    fresh = value.narrow(place, old.shape[place], value.shape[place] - old.shape[place])
    fresh.normal_(0.0, float(old.square().mean().sqrt()), generator=generator)
    return value


def _along(tensor: Tensor, letters: str, at: Cut, way: Tensor) -> Tensor:
    """Map a core's bond by (batch..., r, r')."""
    result = letters.replace(at.bond, "_")
    names = dict.fromkeys(letters + at.batch + "_")
    plain = {letter: chr(ord("a") + place) for place, letter in enumerate(names)}
    equation = (
        f"{_named(letters, plain)},{_named(at.batch + at.bond + '_', plain)}"
        f"->{_named(result, plain)}"
    )
    mapped: Tensor = torch.einsum(equation, tensor.double(), way)
    return mapped.to(tensor.dtype).contiguous()


def _named(letters: str, names: Mapping[str, str]) -> str:
    return "".join(names[letter] for letter in letters)


def _exchange(
    optimizer: Optimizer, old: nn.Parameter, new: nn.Parameter, way: tuple[str, Cut, Tensor]
) -> None:
    """Put a parameter in the place of another, with its state in the new coordinates."""
    letters, at, back = way
    for group in optimizer.param_groups:
        group["params"] = [new if each is old else each for each in group["params"]]
    state = optimizer.state.pop(old, None)
    if state is None:
        return
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == old.shape:
            factor = back.square() if key in _SQUARES else back
            state[key] = _along(value, letters, at, factor)
    optimizer.state[new] = state


def _install(
    layer: StructuredLinear,
    network: Network,
    at: Cut,
    rank: int,
    exchanged: Iterable[tuple[nn.Parameter, nn.Parameter]],
) -> None:
    """Put the new parameters and the new network into a layer."""
    new_of = dict(exchanged)
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter in new_of:
                setattr(module, name, new_of[parameter])
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
    sizes = tuple((letter, rank if letter == at.bond else size) for letter, size in network.sizes)
    layer.network = replace(network, sizes=sizes)


def match_ranks(
    model: nn.Module, state: Mapping[str, Tensor], optimizers: Sequence[Optimizer] = ()
) -> list[RankChange]:
    """Give every structured layer the ranks that a state dict of another rank has.

    After that `load_state_dict` fits. Only shapes are looked at.

    Args:
        model: Its layers are changed in place.
        state: Of the same model with other ranks; prefixes as in ``model.state_dict()``.
        optimizers: Those of the model; their state is resized as well.

    Raises:
        TensorizeError: A shape differs in something that is no rank.
    """
    changes = []
    for name, layer in model.named_modules():
        if not isinstance(layer, StructuredLinear):
            continue
        for bond, rank in _ranks_in(state, name, layer).items():
            if rank != layer.network.size(bond):
                changes.append(resize(layer, rank, bond=bond, optimizers=optimizers, name=name))
        for key, parameter in layer.named_parameters(prefix=name):
            if key in state and state[key].shape != parameter.shape:
                raise TensorizeError(
                    f"{key} has the shape {tuple(state[key].shape)} in the checkpoint and "
                    f"{tuple(parameter.shape)} here, which other ranks do not explain: build the "
                    "layer with the modes of the checkpoint"
                )
    return changes


def _ranks_in(state: Mapping[str, Tensor], name: str, layer: StructuredLinear) -> dict[str, int]:
    """The sizes of a layer's bonds in a state dict, as far as that has them."""
    keys = {id(parameter): key for key, parameter in layer.named_parameters(prefix=name)}
    ranks: dict[str, int] = {}
    for letters, core in zip(layer.network.cores, layer.factors(), strict=True):
        saved = state.get(keys[id(core)])
        if saved is not None and saved.ndim == core.ndim:
            sizes = zip(letters, saved.shape, strict=True)
            ranks |= {letter: size for letter, size in sizes if letter in layer.network.bonds}
    return ranks
