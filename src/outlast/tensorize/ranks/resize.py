"""Change of the rank of one layer, with its optimizer's moments.

A bond's new coordinates map the cores, their gradients and what optimizers hold of them.

The singular values of a weight over one of the bonds that hold its cores together.

Cutting a bond of size r leaves two sides, W = L R with L of shape (p, r) and R of shape (r, q).
With the Gram matrices L^T L = C_L^T C_L and R R^T = C_R^T C_R, the singular values of W are those
of the r x r matrix C_L C_R^T (Oseledets 2011, section 3, with Gram matrices in place of QR):
nothing of the size of W is ever built. Where features are shared by both sides, as in block tensor
trains, there is one such problem per block.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from outlast.errors import TensorizeError
from outlast.tensorize.execute import contract
from outlast.tensorize.forms.embedding import StructuredEmbedding
from outlast.tensorize.forms.low_rank import LatentLinear
from outlast.tensorize.initialize import fans
from outlast.tensorize.layer import StructuredLinear
from outlast.tensorize.parallel.fsdp import WholeCores
from outlast.tensorize.parallel.grouped import HeldFactor
from outlast.tensorize.parameters import factor_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from outlast.tensorize.network import Network


_SPARE = "ZYXWVUTSRQPONMLKJIHGFEDCBA"


@dataclass(frozen=True)
class Cut:
    """A bond of a network and the two cores that it joins.

    Attributes:
        bond: Its letter.
        left: The core on one side, which meets x first.
        right: The one on the other.
        batch: Features that both sides have: one cut per value of these.
        sides: All cores of either side.
    """

    bond: str
    left: int
    right: int
    batch: str
    sides: tuple[tuple[int, ...], tuple[int, ...]]


def cut(network: Network, bond: str) -> Cut:
    """Cut a network at a bond.

    Raises:
        TensorizeError: The bond does not join exactly two sides (as in CP, whose one index is on
            all cores).
    """
    ends = [core for core, letters in enumerate(network.cores) if bond in letters]
    sides = [_reachable(network, end, bond) for end in ends]
    if len(ends) != 2 or set(sides[0]) & set(sides[1]):
        raise TensorizeError(
            f"the bond {bond!r} of {network} does not hold two sides together: its rank can be "
            "changed by building the layer anew only"
        )
    letters = ["".join(network.cores[core] for core in side) for side in sides]
    batch = "".join(
        letter for letter in dict.fromkeys(letters[0]) if letter != bond and letter in letters[1]
    )
    if any(set(batch) - set(network.cores[end]) for end in ends):
        raise TensorizeError(
            f"the bond {bond!r} of {network} joins cores that have not all of the features that "
            "its sides share: its rank can be changed by building the layer anew only"
        )
    return Cut(bond, ends[0], ends[1], batch, (sides[0], sides[1]))


def _reachable(network: Network, start: int, bond: str) -> tuple[int, ...]:
    """The cores that are held together with one when a bond is cut."""
    links = set(network.bonds) - {bond}
    found, waiting = {start}, [start]
    while waiting:
        held = links & set(network.cores[waiting.pop()])
        for core, letters in enumerate(network.cores):
            if core not in found and held & set(letters):
                found.add(core)
                waiting.append(core)
    return tuple(sorted(found))


def _gram(network: Network, cores: Sequence[Tensor], at: Cut, side: int) -> Tensor:
    """The side's entries multiplied with themselves: (batch..., bond, bond)."""
    members = at.sides[side]
    used = set("".join(network.cores)) | {letter for letter, _ in network.sizes}
    spare = iter(letter for letter in _SPARE if letter not in used)
    twins = {bond: next(spare) for bond in network.bonds}
    sizes = dict(network.sizes) | {twins[bond]: network.size(bond) for bond in twins}
    terms, operands = [], []
    for core in members:
        letters = network.cores[core]
        terms += [letters, "".join(twins.get(letter, letter) for letter in letters)]
        operands += [cores[core].detach().double()] * 2
    result = at.batch + at.bond + twins[at.bond]
    return contract(tuple(terms), result, tuple(sizes.items()), operands)


def _root(gram: Tensor) -> Tensor:
    """C with C^T C = gram; what is rounding alone becomes zero.

    Scaled to a diagonal of ones, so that units of any size keep their digits.
    """
    norms = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0.0).sqrt()
    inverse = torch.where(norms > 0.0, norms.reciprocal(), 0.0)
    values, vectors = torch.linalg.eigh(gram * inverse.unsqueeze(-1) * inverse.unsqueeze(-2))
    rounding = values.shape[-1] * torch.finfo(values.dtype).eps * values.amax(-1, keepdim=True)
    values = torch.where(values > rounding, values, 0.0)
    root: Tensor = values.sqrt().unsqueeze(-1) * vectors.mT * norms.unsqueeze(-2)
    return root


@torch.no_grad()
def decompose(network: Network, cores: Sequence[Tensor], at: Cut) -> tuple[Tensor, Tensor, Tensor]:
    """The singular value decomposition over a bond, in the coordinates of the bond.

    Returns:
        u: (batch..., r, r) with U^T C_L, so that ``S^(-1/2) u`` maps the right core's bond to the
            singular directions; s: (batch..., r) descending; v: (batch..., r, r) with C_R^T V, so
            that ``v S^(-1/2)`` maps the left core's. All float64.
    """
    left, right = (_root(_gram(network, cores, at, side)) for side in (0, 1))
    u, s, vh = torch.linalg.svd(left @ right.mT)
    return u.mT @ left, s, right.mT @ vh.mT


def singular_values(network: Network, cores: Sequence[Tensor], bond: str) -> Tensor:
    """The singular values of the weight over a bond, descending; (r,), float64.

    With one problem per block the values of the same place are joined as the root of their sum of
    squares, so that the squares always add up to those of the weight.
    """
    _, s, _ = decompose(network, cores, cut(network, bond))
    return s.reshape(-1, s.shape[-1]).square().sum(0).sqrt()


# Below this a singular value of any weight counts as zero: moments divide by it, in float32.
_NOTHING = 1e-30


@dataclass(frozen=True)
class Coordinates:
    """The new coordinates of a bond, for the core that meets x first and for the other.

    Attributes:
        ways: (batch..., r, r') each; what the cores are multiplied with.
        backs: Likewise, what gradients are multiplied with.
        fresh: (batch..., r') of bools; coordinates that are to be drawn anew in the first core. The
            maps are zero there, so that the other core is.
        dropped: Relative norm of what is lost.
    """

    ways: tuple[Tensor, Tensor]
    backs: tuple[Tensor, Tensor]
    fresh: Tensor
    dropped: float

    def scaled(self, factor: float) -> Coordinates:
        """The same where the product of the cores is multiplied by `factor` more than before."""
        (left, right), (of_left, of_right), root = self.ways, self.backs, factor**0.5
        ways, backs = (left / root, right / root), (of_left * root, of_right * root)
        return replace(self, ways=ways, backs=backs)


def narrower(network: Network, cores: Sequence[Tensor], at: Cut, rank: int) -> Coordinates:
    """The largest singular values, evenly shared by both cores.

    Directions that carry nothing are drawn anew on one side and zero on the other, so that they
    learn again; with zeros on both they never would.
    """
    u, s, v = decompose(network, cores, at)
    rounding = s.shape[-1] * torch.finfo(s.dtype).eps * s.amax(-1, keepdim=True)
    alive = (s > rounding.clamp_min(_NOTHING))[..., :rank]
    scale = torch.where(alive, s[..., :rank].rsqrt(), 0.0)
    left, right = v[..., :rank] * scale.unsqueeze(-2), u[..., :rank, :] * scale.unsqueeze(-1)
    lost = s[..., rank:].square().sum() / s.square().sum().clamp_min(_NOTHING**2)
    return Coordinates((left, right.mT), (right.mT, left), ~alive, float(lost.sqrt()))


def chosen(network: Network, at: Cut, units: Tensor) -> Coordinates:
    """Some of the coordinates as they are; units: (r',) their indices."""
    return _selected(network, at, units, len(units), float("nan"))


def wider(network: Network, at: Cut, rank: int, device: torch.device) -> Coordinates:
    """The old coordinates, followed by new ones that nothing comes out of."""
    return _selected(network, at, torch.arange(network.size(at.bond), device=device), rank, 0.0)


def _selected(network: Network, at: Cut, units: Tensor, rank: int, dropped: float) -> Coordinates:
    batch = [network.size(letter) for letter in at.batch]
    size, places = network.size(at.bond), torch.arange(rank, device=units.device)
    same = torch.zeros(size, rank, dtype=torch.float64, device=units.device)
    same[units, places[: len(units)]] = 1.0
    same = same.expand(*batch, size, rank)
    fresh = (places >= len(units)).expand(*batch, rank)
    return Coordinates((same, same), (same, same), fresh, dropped)


def importance(network: Network, cores: Sequence[Tensor], at: Cut) -> Tensor:
    """The product of norms of what leads into and out of every unit of a bond; (r,)."""
    norms = []
    for core in (at.left, at.right):
        place = network.cores[core].index(at.bond)
        norms.append(cores[core].double().movedim(place, 0).flatten(1).norm(dim=1))
    product: Tensor = norms[0] * norms[1]
    return product


def with_fresh_entries(
    value: Tensor,
    old: Tensor,
    fresh: Tensor,
    where: tuple[Network, Cut],
    generator: torch.Generator | None,
) -> Tensor:
    """The first core with its fresh coordinates drawn, as large as its entries were on average."""
    network, at = where
    deviation = float(old.double().square().mean().sqrt()) or fans(network)[at.left][0] ** -0.5
    named, letters = at.batch + at.bond, network.cores[at.left]
    order = sorted(range(len(named)), key=lambda place: letters.index(named[place]))
    shape = [
        size if letter in named else 1 for letter, size in zip(letters, value.shape, strict=True)
    ]
    drawn = torch.empty_like(value).normal_(0.0, deviation, generator=generator)
    return torch.where(fresh.permute(order).reshape(shape), drawn, value)


def along(tensor: Tensor, letters: str, at: Cut, way: Tensor) -> Tensor:
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


# Means and sums of squares, of the Adams, Adagrad, RMSprop and Adadelta.
_SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg", "acc_delta"})

# Absolute sizes, of Adamax and Rprop.
_SIZES = frozenset({"exp_inf", "step_size"})

# Averages of the parameter itself, of ASGD.
_VALUES = frozenset({"ax"})


@dataclass(frozen=True)
class Moved:
    """Change of a core and its gradient to new coordinates.

    Attributes:
        letters: The core's, in the layer's network.
        at: The bond.
        way: (batch..., r, r') for the core.
        back: (batch..., r, r') for its gradient.
    """

    letters: str
    at: Cut
    way: Tensor
    back: Tensor

    def value(self, core: Tensor) -> Tensor:
        """The core in the new coordinates."""
        return along(core, self.letters, self.at, self.way)

    def state(self, key: str, value: Tensor) -> Tensor:
        """An optimizer's state of the shape of the core; what is not known is like a gradient."""
        back = self.way if key in _VALUES else self.back
        if key in _SQUARES:
            back = back.square()
        elif key in _SIZES:
            back = back.abs()
        return along(value, self.letters, self.at, back)


def check_states(optimizers: Iterable[Optimizer], parameters: Iterable[Tensor]) -> None:
    """Refuse optimizers that hold something of a core that cannot be mapped.

    Raises:
        TensorizeError: Naming the optimizer and the state.
    """
    wanted = list(parameters)
    for optimizer in optimizers:
        for parameter in wanted:
            for key, value in optimizer.state.get(parameter, {}).items():
                for tensor in _tensors(value):
                    nested = tensor is not value
                    if tensor.numel() > 1 and (nested or tensor.shape != parameter.shape):
                        raise TensorizeError(
                            f"{type(optimizer).__name__} holds {key!r} of shape "
                            f"{tuple(tensor.shape)} for a factor of shape "
                            f"{tuple(parameter.shape)}, which cannot follow a change of rank: "
                            "clear the optimizer's state or take AdamW, SGD or UnfoldedMuon for "
                            "factors"
                        )


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def exchange(
    optimizers: Sequence[Optimizer], old: nn.Parameter, new: nn.Parameter, moved: Moved
) -> None:
    """Put a parameter in the place of another, with its states in the new coordinates.

    An optimizer that keeps more of its parameters than torch's do is told of it, if it has a method
    ``exchange`` that takes pairs (old, new).
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [
                new if parameter is old else parameter for parameter in group["params"]
            ]
        told = getattr(optimizer, "exchange", None)
        if callable(told):
            told([(old, new)])
        state = optimizer.state.pop(old, None)
        if state is None:
            continue
        optimizer.state[new] = {
            key: moved.state(key, value)
            if isinstance(value, torch.Tensor) and value.shape == old.shape
            else value
            for key, value in state.items()
        }


ParameterPlace = tuple[nn.Module, str]
"""A module and the name of a parameter of its own."""


class Gate(nn.Module):
    """Multiply one dimension of a core by the gate."""

    def __init__(self, size: int, place: int, like: Tensor) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(size, device=like.device, dtype=like.dtype))
        self.place = place

    def forward(self, core: Tensor) -> Tensor:
        """The core with its bond gated."""
        shape = [-1 if place == self.place else 1 for place in range(core.ndim)]
        return core * self.gate.view(shape)


def places_of(parameter: Tensor, model: nn.Module) -> list[ParameterPlace]:
    """Return the modules that hold a parameter; more than one where layers are tied."""
    return [
        (module, name)
        for module in model.modules()
        for name, held in module._parameters.items()
        if held is parameter
    ]


def put_on(gate: Gate, places: Iterable[ParameterPlace]) -> None:
    """Let a core be seen through a gate, wherever it is held."""
    for owner, name in places:
        parametrize.register_parametrization(owner, name, gate)


@torch.no_grad()
def take_off(places: Iterable[ParameterPlace]) -> None:
    """Multiply gates in; the cores keep their places and their moments in the optimizers."""
    originals, values = {}, {}
    # Another gate of the same core is multiplied in together with the first.
    for owner, name in dict.fromkeys(places):
        held: Any = owner.parametrizations[name]  # type: ignore[index]
        original = held.original
        if id(original) not in values:
            originals[id(original)] = original
            values[id(original)] = getattr(owner, name).clone()
        parametrize.remove_parametrizations(owner, name, leave_parametrized=False)
    for key, original in originals.items():
        original.copy_(values[key])


def forget(gate: nn.Parameter, optimizers: Sequence[Optimizer]) -> None:
    """Take a gate out of optimizers, with its name and its state."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            kept = [
                place for place, parameter in enumerate(group["params"]) if parameter is not gate
            ]
            for key in {"params", "param_names"} & group.keys():
                group[key] = [group[key][place] for place in kept]
        optimizer.state.pop(gate, None)


Layer = StructuredLinear | StructuredEmbedding


def is_linear(layer: Layer) -> bool:
    """Return whether nothing but products is between the factors."""
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
    for factor in factor_parameters(layer):
        hooks = (getattr(factor, "_post_accumulate_grad_hooks", None) or {}).values()
        if isinstance(factor, DTensor) or any(map(_averages, hooks)):
            return True
    return False


def _has_units(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())


def _averages(hook: object) -> bool:
    """Return whether a hook is that of a parameter which FSDP leaves whole."""
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


@dataclass(frozen=True)
class RankChange:
    """Change of a layer's rank.

    Attributes:
        name: The layer's name in the model.
        bond: The bond's letter in the layer's network.
        before: Its size before.
        after: Its size after.
        error: Relative change of the factors' product in the Frobenius norm; nan where units were
            chosen.
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


@torch.no_grad()
def resize(
    layer: Layer,
    rank: int,
    *,
    bond: str | None = None,
    units: Tensor | None = None,
    model: nn.Module | None = None,
    optimizers: Sequence[Optimizer] = (),
    name: str = "",
    on_change: Callable[[RankChange], None] | None = None,
    generator: torch.Generator | None = None,
) -> RankChange:
    """Give a bond of a layer another size, in place.

    A smaller one keeps the largest singular values of the weight over the bond, which is the best
    that this rank can do (Eckart and Young); with a nonlinearity in the middle, the units with the
    largest products of norms. A larger one leaves the function as it is: what is new meets zeros
    in the core after it, and learns from there. So does what carries nothing and yet is kept.

    Moments follow: a gradient of the old coordinates is mapped to the new ones, m -> m P^T, and a
    mean of squares by the squares of the map, as if entries were independent. Steps are kept. What
    an optimizer holds of the shape of the factor under a name that is not known is taken for a
    gradient.

    Where factors are scaled by alpha / rank, alpha stays and the factors take up the difference.

    Args:
        layer: What to change.
        rank: The new size.
        bond: Which; None: the only one.
        units: (rank,) the places of the bond that stay; None: the best ones.
        model: That the layer belongs to: all layers that share its factors change with it. None: no
            other does.
        optimizers: Those that may hold the layer's parameters.
        name: The layer's name in the model, for the change.
        on_change: Told about the change at its end.
        generator: For the entries that are new.

    Raises:
        TensorizeError: The rank is not positive, the units are not so many different ones, the
            bond is not one that can be changed, something holds the layer to its rank (see
            `outlast.tensorize.ranks.resize.check_free`), or an optimizer's state cannot follow;
            nothing is changed then.
    """
    network, named = layer.network, name or layer.form
    if not bond and len(network.bonds) != 1:
        raise TensorizeError(
            f"a {layer.form} layer has the bonds {', '.join(network.bonds)}: name one"
        )
    at = cut(network, bond or network.bonds)
    before = network.size(at.bond)
    if rank < 1:
        raise TensorizeError(f"rank = {rank} of {named} must be at least 1")
    if rank == before:
        return RankChange(name, at.bond, before, rank, 0.0, ())
    check_free(layer, named, model=model)
    cores = layer.factors()
    check_states(optimizers, (cores[at.left], cores[at.right]))
    new = _coordinates(layer, at, rank, units)
    if getattr(layer, "alpha", None) is not None:
        new = new.scaled(before / rank)
    exchanged = []
    for core, way, back in zip((at.left, at.right), new.ways, new.backs, strict=True):
        old = cores[core]
        assert isinstance(old, nn.Parameter)
        moved = Moved(network.cores[core], at, way, back)
        value = moved.value(old)
        if core == at.left and bool(new.fresh.any()):
            value = with_fresh_entries(value, old, new.fresh, (network, at), generator)
        fresh = nn.Parameter(value, requires_grad=old.requires_grad)
        exchange(optimizers, old, fresh, moved)
        exchanged.append((old, fresh))
    sizes = tuple((letter, rank if letter == at.bond else size) for letter, size in network.sizes)
    for sharer in sharers(layer, model):
        _install(sharer, replace(network, sizes=sizes), dict(exchanged))
    change = RankChange(name, at.bond, before, rank, new.dropped, tuple(exchanged))
    if on_change is not None:
        on_change(change)
    return change


def _coordinates(layer: Layer, at: Cut, rank: int, units: Tensor | None) -> Coordinates:
    network, cores = layer.network, layer.factors()
    before, device = network.size(at.bond), cores[at.left].device
    if units is not None:
        kept = {int(unit) for unit in units}
        if len(kept) != rank or not kept <= set(range(before)):
            raise TensorizeError(
                f"units = {sorted(kept)} are not {rank} different ones of {before}"
            )
        return chosen(network, at, torch.tensor(sorted(kept), device=device))
    if rank > before:
        return wider(network, at, rank, device)
    if is_linear(layer):
        return narrower(network, cores, at, rank)
    best = importance(network, cores, at).topk(rank).indices
    return chosen(network, at, best.sort().values)


def _install(layer: Layer, network: Network, new_of: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Put the new parameters and the new network into a layer."""
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter in new_of:
                setattr(module, name, new_of[parameter])
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, nn.Embedding):
            module.num_embeddings, module.embedding_dim = module.weight.shape
    layer.network = network
