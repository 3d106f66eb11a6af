"""Ranks that follow the training: shrink what carries nothing, grow what is too narrow.

`shrink` and `grow` change a model between two steps, `match_ranks` gives it the ranks of a
checkpoint, and `change_sharded` gathers a model that is sharded over ranks, changes it on one, and
shards it again. A change really changes the sizes of parameters and of the optimizer's moments,
with the function of the layer kept as far as the new rank allows. Whoever holds on to the old
parameters (compiled graphs, gradient codes, replicas) hears of it by a callback.

Cutting a bond of size r leaves two sides, W = L R with L of shape (p, r) and R of shape (r, q).
With the Gram matrices L^T L = C_L^T C_L and R R^T = C_R^T C_R, the singular values of W are those
of the r x r matrix C_L C_R^T (Oseledets 2011, section 3, with Gram matrices in place of QR):
nothing of the size of W is ever built. Where features are shared by both sides, as in block tensor
trains, there is one such problem per block. The bond's new coordinates map the cores, their
gradients and what optimizers hold of them.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from outlast.errors import TensorizeError
from outlast.tensorize.embedding import StructuredEmbedding
from outlast.tensorize.execute import contract
from outlast.tensorize.fsdp import WholeCores
from outlast.tensorize.initialize import fans
from outlast.tensorize.layer import MonarchLinear, StructuredLinear
from outlast.tensorize.low_rank import LatentLinear
from outlast.tensorize.parameters import factor_parameters
from outlast.tensorize.sharded import whole
from outlast.tensorize.tensor_parallel import HeldFactor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.optim import Optimizer

    from outlast.tensorize.network import Network


Layer = StructuredLinear | StructuredEmbedding

_SPARE = "ZYXWVUTSRQPONMLKJIHGFEDCBA"

# Below this a singular value of any weight counts as zero: moments divide by it, in float32.
_NOTHING = 1e-30


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
    links = set(network.bonds) - {bond}

    def reachable(start: int) -> tuple[int, ...]:
        """The cores that are held together with one when the bond is cut."""
        found, waiting = {start}, [start]
        while waiting:
            held = links & set(network.cores[waiting.pop()])
            for core, letters in enumerate(network.cores):
                if core not in found and held & set(letters):
                    found.add(core)
                    waiting.append(core)
        return tuple(sorted(found))

    ends = [core for core, letters in enumerate(network.cores) if bond in letters]
    sides = [reachable(end) for end in ends]
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


@torch.no_grad()
def decompose(network: Network, cores: Sequence[Tensor], at: Cut) -> tuple[Tensor, Tensor, Tensor]:
    """The singular value decomposition over a bond, in the coordinates of the bond.

    Returns:
        u: (batch..., r, r) with U^T C_L, so that ``S^(-1/2) u`` maps the right core's bond to the
            singular directions; s: (batch..., r) descending; v: (batch..., r, r) with C_R^T V, so
            that ``v S^(-1/2)`` maps the left core's. All float64.
    """
    used = set("".join(network.cores)) | {letter for letter, _ in network.sizes}
    spare = iter(letter for letter in _SPARE if letter not in used)
    twins = {bond: next(spare) for bond in network.bonds}
    sizes = dict(network.sizes) | {twins[bond]: network.size(bond) for bond in twins}
    roots = []
    for side in at.sides:
        terms: list[str] = []
        operands: list[Tensor] = []
        for core in side:
            letters = network.cores[core]
            terms += [letters, "".join(twins.get(letter, letter) for letter in letters)]
            operands += [cores[core].detach().double()] * 2
        # The side's entries multiplied with themselves: (batch..., bond, bond).
        result = at.batch + at.bond + twins[at.bond]
        gram = contract(tuple(terms), result, tuple(sizes.items()), operands)
        # C with C^T C = gram; what is rounding alone becomes zero. Scaled to a diagonal of ones, so
        # that units of any size keep their digits.
        norms = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0.0).sqrt()
        inverse = torch.where(norms > 0.0, norms.reciprocal(), 0.0)
        values, vectors = torch.linalg.eigh(gram * inverse.unsqueeze(-1) * inverse.unsqueeze(-2))
        rounding = values.shape[-1] * torch.finfo(values.dtype).eps * values.amax(-1, keepdim=True)
        values = torch.where(values > rounding, values, 0.0)
        roots.append(values.sqrt().unsqueeze(-1) * vectors.mT * norms.unsqueeze(-2))
    left, right = roots
    u, s, vh = torch.linalg.svd(left @ right.mT)
    return u.mT @ left, s, right.mT @ vh.mT


def singular_values(network: Network, cores: Sequence[Tensor], bond: str) -> Tensor:
    """The singular values of the weight over a bond, descending; (r,), float64.

    With one problem per block the values of the same place are joined as the root of their sum of
    squares, so that the squares always add up to those of the weight.
    """
    _, s, _ = decompose(network, cores, cut(network, bond))
    return s.reshape(-1, s.shape[-1]).square().sum(0).sqrt()


@torch.no_grad()
def importance(network: Network, cores: Sequence[Tensor], at: Cut) -> Tensor:
    """The product of norms of what leads into and out of every unit of a bond; (r,)."""
    norms = []
    for core in (at.left, at.right):
        place = network.cores[core].index(at.bond)
        norms.append(cores[core].double().movedim(place, 0).flatten(1).norm(dim=1))
    product: Tensor = norms[0] * norms[1]
    return product


def is_linear(layer: Layer) -> bool:
    """Return whether nothing but products is between the factors."""
    return getattr(layer, "activation", None) is None


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


def new_coordinates(layer: Layer, at: Cut, rank: int) -> Coordinates:
    """The largest singular values, evenly shared by both cores, or as many more as are wanted.

    Directions that carry nothing are drawn anew on one side and zero on the other, so that they
    learn again; with zeros on both they never would. With a nonlinearity in the middle, units are
    chosen as they are.
    """
    network, cores = layer.network, layer.factors()
    before, device = network.size(at.bond), cores[at.left].device
    if rank < before and is_linear(layer):
        u, s, v = decompose(network, cores, at)
        rounding = s.shape[-1] * torch.finfo(s.dtype).eps * s.amax(-1, keepdim=True)
        alive = (s > rounding.clamp_min(_NOTHING))[..., :rank]
        scale = torch.where(alive, s[..., :rank].rsqrt(), 0.0)
        left, right = v[..., :rank] * scale.unsqueeze(-2), u[..., :rank, :] * scale.unsqueeze(-1)
        lost = s[..., rank:].square().sum() / s.square().sum().clamp_min(_NOTHING**2)
        return Coordinates((left, right.mT), (right.mT, left), ~alive, float(lost.sqrt()))
    units, dropped = torch.arange(before, device=device), 0.0
    if rank < before:
        units = importance(network, cores, at).topk(rank).indices.sort().values
        dropped = float("nan")
    batch = [network.size(letter) for letter in at.batch]
    places = torch.arange(rank, device=device)
    same = torch.zeros(before, rank, dtype=torch.float64, device=device)
    same[units, places[: len(units)]] = 1.0
    same = same.expand(*batch, before, rank)
    fresh = (places >= len(units)).expand(*batch, rank)
    return Coordinates((same, same), (same, same), fresh, dropped)


def along(tensor: Tensor, letters: str, at: Cut, way: Tensor) -> Tensor:
    """Map a core's bond by (batch..., r, r')."""
    names = dict.fromkeys(letters + at.batch + "_")
    plain = str.maketrans({letter: chr(ord("a") + place) for place, letter in enumerate(names)})
    equation = f"{letters},{at.batch}{at.bond}_->{letters.replace(at.bond, '_')}".translate(plain)
    mapped: Tensor = torch.einsum(equation, tensor.double(), way)
    return mapped.to(tensor.dtype).contiguous()


# Means and sums of squares, of the Adams, Adagrad, RMSprop and Adadelta.
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg", "acc_delta")

# Absolute sizes, of Adamax and Rprop.
_SIZES = ("exp_inf", "step_size")


def check_states(optimizers: Iterable[Optimizer], parameters: Iterable[Tensor]) -> None:
    """Refuse optimizers that hold something of a core that cannot be mapped.

    Raises:
        TensorizeError: Naming the optimizer and the state.
    """
    wanted = list(parameters)
    for optimizer in optimizers:
        for parameter in wanted:
            for key, value in optimizer.state.get(parameter, {}).items():
                for tensor in tree_leaves(value):
                    if not isinstance(tensor, Tensor) or tensor.numel() <= 1:
                        continue
                    if tensor is not value or tensor.shape != parameter.shape:
                        raise TensorizeError(
                            f"{type(optimizer).__name__} holds {key!r} of shape "
                            f"{tuple(tensor.shape)} for a factor of shape "
                            f"{tuple(parameter.shape)}, which cannot follow a change of rank: "
                            "clear the optimizer's state or take AdamW, SGD or UnfoldedMuon for "
                            "factors"
                        )


def exchange(
    optimizers: Sequence[Optimizer],
    old: nn.Parameter,
    new: nn.Parameter,
    mapped: Callable[[str, Tensor], Tensor],
) -> None:
    """Put a parameter in the place of another, with its states in the new coordinates.

    An optimizer that keeps more of its parameters than torch's do is told of it, if it has a method
    ``exchange`` that takes pairs (old, new).

    Args:
        optimizers: Those that may hold the old one.
        old: Which parameter goes.
        new: Which comes.
        mapped: From a state's name and a tensor of the shape of the old parameter to one of the
            shape of the new.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [
                new if parameter is old else parameter for parameter in group["params"]
            ]
        told = getattr(optimizer, "exchange", None)
        if callable(told):
            told([(old, new)])
        if old in optimizer.state:
            optimizer.state[new] = {
                key: mapped(key, value)
                if isinstance(value, Tensor) and value.shape == old.shape
                else value
                for key, value in optimizer.state.pop(old).items()
            }


def check_free(layer: Layer, name: str, model: nn.Module | None = None) -> None:
    """Refuse layers that are sharded, given another forward, or computed from other parameters.

    Args:
        layer: Of which a rank is to change.
        name: Its name in the model.
        model: That it belongs to.

    Raises:
        TensorizeError: Saying what is in the way, and what to do.
    """
    factors = factor_parameters(layer)
    averaged = [
        getattr(hook, "__self__", None)
        for factor in factors
        for hook in (getattr(factor, "_post_accumulate_grad_hooks", None) or {}).values()
    ]
    if (
        any(isinstance(module, FSDPModule) for module in (model or layer).modules())
        or any(isinstance(factor, DTensor) for factor in factors)
        # Parameters that FSDP leaves whole.
        or any(isinstance(owner, WholeCores) for owner in averaged)
    ):
        raise TensorizeError(
            f"{name} is in a model that is sharded by FSDP or split over ranks, which would undo a "
            "change of rank at the next step: change the ranks of the whole model and shard it "
            "again (outlast.tensorize.ranks.change_sharded)"
        )
    if any(isinstance(module, HeldFactor) for module in layer.modules()):
        raise TensorizeError(
            f"{name} is in a group whose products are cut by its rank: change ranks before "
            "parallelize_bottleneck"
        )
    if not all(isinstance(factor, nn.Parameter) for factor in layer.factors()):
        raise TensorizeError(
            f"the factors of {name} are computed from others, as by a parametrization, or shown in "
            "another dtype: change ranks before what does so"
        )


def _holds(module: nn.Module, held: set[int]) -> bool:
    return any(id(parameter) in held for parameter in module._parameters.values())


def held_rank(layer: Layer, name: str, model: nn.Module | None) -> str:
    """Why a layer must keep the rank that another one has; empty where it need not."""
    if isinstance(layer, LatentLinear) and layer.is_linked:
        return (
            f"{name} is in a line of latent crossing, whose layers add their latents and so must "
            "keep one rank and one basis: build the model anew with the other rank, or take every "
            "layer of the line out of it first (link_latents([layer]))"
        )
    if isinstance(layer, MonarchLinear):
        return f"{name} has the rank that its blocks say: use form = 'btt', whose rank is free"
    if model is None:
        return ""
    held = {id(factor) for factor in factor_parameters(layer)}
    inside = {id(module) for sharer in sharers(layer, model) for module in sharer.modules()}
    for other, module in model.named_modules():
        if id(module) not in inside and _holds(module, held):
            return (
                f"{name} shares a factor with {other}, which is another kind of layer or has other "
                "factors besides: untie them, or build the model anew with the other rank"
            )
    return ""


def sharers(layer: Layer, model: nn.Module | None) -> tuple[Layer, ...]:
    """The layer and all others of a model that compute the same with the same factors."""

    def kind(one: Layer) -> tuple[object, ...]:
        scaled = getattr(one, "alpha", None) is not None
        return one.network, getattr(one, "activation", None), scaled

    mine = [id(factor) for factor in factor_parameters(layer)]
    found = [
        other
        for other in ([] if model is None else model.modules())
        if isinstance(other, Layer)
        and other is not layer
        and any(_holds(module, set(mine)) for module in other.modules())
        and [id(factor) for factor in factor_parameters(other)] == mine
        and kind(other) == kind(layer)
    ]
    return (layer, *found)


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


def resize(
    layer: Layer,
    rank: int,
    *,
    bond: str | None = None,
    model: nn.Module | None = None,
    optimizers: Sequence[Optimizer] = (),
    name: str = "",
    generator: torch.Generator | None = None,
) -> RankChange:
    """Give a bond of a layer another size, in place.

    A smaller one keeps the largest singular values of the weight over the bond, which is the best
    that this rank can do (Eckart and Young); with a nonlinearity in the middle, the units with the
    largest products of norms. A larger one leaves the function as it is: what is new meets zeros
    in the core after it, and learns from there. So does what carries nothing and yet is kept.

    Moments follow: a gradient of the old coordinates is mapped to the new ones, m -> m P^T, and a
    mean of squares by the squares of the map, as if entries were independent. Adam's are raised to
    the smallest that the means allow, see `_bound_moments`. Steps are kept. What an optimizer holds
    of the shape of the factor under a name that is not known is taken for a gradient.

    Where factors are scaled by alpha / rank, alpha stays and the factors take up the difference.

    Args:
        layer: What to change.
        rank: The new size.
        bond: Which; None: the only one.
        model: That the layer belongs to: all layers that share its factors change with it. None: no
            other does.
        optimizers: Those that may hold the layer's parameters.
        name: The layer's name in the model, for the change.
        generator: For the entries that are new.

    Raises:
        TensorizeError: The rank is not positive, the bond is not one that can be changed, something
            holds the layer to its rank (see `check_free` and `held_rank`), or an optimizer's state
            cannot follow; nothing is changed then.
    """
    change = _resize(
        layer,
        rank,
        bond=bond,
        model=model,
        optimizers=optimizers,
        name=name,
        generator=generator,
    )
    _bound_moments(optimizers, [change])
    return change


@torch.no_grad()
def _resize(
    layer: Layer,
    rank: int,
    *,
    bond: str | None,
    model: nn.Module | None,
    optimizers: Sequence[Optimizer],
    name: str,
    generator: torch.Generator | None,
) -> RankChange:
    """Do what `resize` does, with second moments as they were mapped."""
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
    check_free(layer, named, model)
    if held := held_rank(layer, named, model):
        raise TensorizeError(held)
    cores = layer.factors()
    check_states(optimizers, (cores[at.left], cores[at.right]))
    new = new_coordinates(layer, at, rank)
    # Where the factors' product is multiplied by alpha / rank.
    root = 1.0 if getattr(layer, "alpha", None) is None else (before / rank) ** 0.5
    exchanged = []
    for core, one_way, one_back in zip((at.left, at.right), new.ways, new.backs, strict=True):
        old, letters, way, back = cores[core], network.cores[core], one_way / root, one_back * root
        assert isinstance(old, nn.Parameter)
        value = along(old, letters, at, way)
        if core == at.left and bool(new.fresh.any()):
            # As large as its entries were on average.
            deviation = float(old.double().square().mean().sqrt()) or fans(network)[core][0] ** -0.5
            drawn = torch.empty_like(value).normal_(0.0, deviation, generator=generator)
            named_dims = at.batch + at.bond
            order = sorted(range(len(named_dims)), key=lambda i: letters.index(named_dims[i]))
            shape = [
                size if letter in named_dims else 1
                for letter, size in zip(letters, value.shape, strict=True)
            ]
            value = torch.where(new.fresh.permute(order).reshape(shape), drawn, value)
        backs = dict.fromkeys(_SQUARES, back.square()) | dict.fromkeys(_SIZES, back.abs())
        # Averages of the parameter itself, of ASGD.
        backs["ax"] = way
        fresh = nn.Parameter(value, requires_grad=old.requires_grad)
        exchange(
            optimizers,
            old,
            fresh,
            lambda key, state: along(state, letters, at, backs.get(key, back)),  # noqa: B023
        )
        exchanged.append((old, fresh))
    _install(layer, model, {at.bond: rank}, dict(exchanged))
    return RankChange(name, at.bond, before, rank, new.dropped, tuple(exchanged))


@torch.no_grad()
def _bound_moments(optimizers: Sequence[Optimizer], changes: Sequence[RankChange]) -> None:
    """Raise Adam's second moments of changed factors to the smallest that the first ones allow.

    Means of squares follow a change of coordinates as if entries were independent. Without this the
    next step could be longer than any gradients make one, which a guard takes for a fault. After
    t steps m^2 <= R^2 v with R^2 = (1 - b1)^2 / (1 - b2) * sum over k < t of (b1^2 / b2)^k (Cauchy
    and Schwarz); with b2 = 0 there is no such bound. Factors that a later change has replaced are
    in no optimizer any more.
    """
    changed = {id(new) for change in changes for _, new in change.parameters}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {}) if id(parameter) in changed else {}
                if not {"exp_avg", "exp_avg_sq", "step"} <= state.keys() or state["step"] < 1:
                    continue
                first, second = group.get("betas", (0.0, 0.0))
                if second == 0.0:
                    continue
                steps, ratio = int(state["step"]), first**2 / second
                ratios = steps if ratio == 1.0 else (1.0 - ratio**steps) / (1.0 - ratio)
                reach = (1.0 - first) ** 2 / (1.0 - second) * ratios
                least = state["exp_avg"].square() / reach
                torch.maximum(state["exp_avg_sq"], least, out=state["exp_avg_sq"])


def _install(
    layer: Layer,
    model: nn.Module | None,
    ranks: Mapping[str, int],
    new_of: Mapping[nn.Parameter, nn.Parameter],
) -> None:
    """Put new parameters and the new network into a layer and those that share its factors."""
    sizes = tuple((letter, ranks.get(letter, size)) for letter, size in layer.network.sizes)
    network = replace(layer.network, sizes=sizes)
    for sharer in sharers(layer, model):
        for module in sharer.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter in new_of:
                    setattr(module, name, new_of[parameter])
            if isinstance(module, nn.Linear):
                module.out_features, module.in_features = module.weight.shape
            elif isinstance(module, nn.Embedding):
                module.num_embeddings, module.embedding_dim = module.weight.shape
        sharer.network = network


def energy_rank(values: Tensor, energy: float) -> int:
    """Return how many of the largest singular values hold a share of the sum of squares.

    Args:
        values: (r,) descending.
        energy: The share, in (0, 1].
    """
    squares = values.double().square()
    total = float(squares.sum())
    if total == 0.0:
        return 1
    lost = squares.flip(0).cumsum(0).flip(0)  # lost[k]: what goes if k stay
    return max(int((lost > (1.0 - energy) * total).sum()), 1)


_EXPLAINED = 0.9
"""Share of a spectrum's energy by which `RankRule.used` is measured."""


@dataclass(frozen=True)
class RankRule:
    """A rule that gives every bond its next rank, by the singular values of the weight over it.

    A bond shrinks to the smallest rank that keeps a share of its spectrum's energy. The relative
    error of a layer's weight is at most sqrt(number of bonds (1 - energy)) (Oseledets 2011,
    corollary 2.4). (Cuttlefish, Wang et al. 2023, chooses ranks in the same way, once.) One that
    does not shrink grows where its spectrum is flat: where the rank that explains 0.9 of the energy
    is most of the rank (the explained variance of InRank, Zhao et al. 2023, arXiv 2306.11250).

    Attributes:
        energy: The share to keep, in (0, 1]; None: nothing shrinks.
        factor: How much wider bonds become that grow; None: nothing grows.
        used: Bonds grow that use at least this share of their rank.
        minimum: No rank shrinks below.
        maximum: No rank grows above; None: the largest that its sides can use.
        multiple: Ranks are rounded up to multiples of it, for the hardware's sake; the largest one
            is rounded down.

    Raises:
        TensorizeError: The energy is no share, the factor is not above 1, or the multiple is not
            positive.
    """

    energy: float | None = 0.99
    factor: float | None = 1.5
    used: float = 0.7
    minimum: int = 1
    maximum: int | None = None
    multiple: int = 1

    def __post_init__(self) -> None:
        if self.energy is not None and not 0.0 < self.energy <= 1.0:
            raise TensorizeError(f"energy = {self.energy} must be above 0 and at most 1")
        if self.factor is not None and self.factor <= 1.0:
            raise TensorizeError(f"factor = {self.factor} must be above 1 for ranks to grow")
        if self.multiple < 1:
            raise TensorizeError(f"multiple = {self.multiple} of ranks must be at least 1")

    def rank(self, layer: StructuredLinear, bond: str) -> int:
        """The next rank of a bond; a collective where the factors are sharded."""
        network, factors = layer.network, [whole(factor) for factor in factor_parameters(layer)]
        at, before = cut(network, bond), network.size(bond)
        if is_linear(layer):
            values = singular_values(network, factors, bond)
        else:
            # With a nonlinearity in the middle, its units' importance.
            values = importance(network, factors, at).sort(descending=True).values
        if self.energy is not None:
            smaller = self._rounded(max(energy_rank(values, self.energy), self.minimum))
            if smaller < before:
                return smaller
        if self.factor is None or energy_rank(values, _EXPLAINED) / before < self.used:
            return before
        # A bond that is wider than either core's other side carries nothing more.
        shared = network.size(at.batch + bond)
        ends = (network.cores[core] for core in (at.left, at.right))
        largest = min(network.size(letters) // shared for letters in ends)
        largest = min(largest, self.maximum or largest) // self.multiple * self.multiple
        return max(min(self._rounded(int(before * self.factor + 0.5)), largest), before)

    def _rounded(self, rank: int) -> int:
        return -(-rank // self.multiple) * self.multiple


def changes_ranks(model: nn.Module, rule: RankRule) -> bool:
    """Return whether a rule would change a rank of a model, which may be sharded.

    All ranks of a sharded model call this together; the answer of the first counts.
    """
    # All of them, since each is a collective.
    found = [
        rule.rank(layer, bond) != layer.network.size(bond) for _, layer, bond in bonds_of(model)
    ]
    return any(found)


def bonds_of(model: nn.Module) -> Iterator[tuple[str, StructuredLinear, str]]:
    """Every bond of a model's linear layers that can be resized: (name of the layer, layer, bond).

    Layers that share their factors come once. Layers that must keep the rank of another (a line of
    latent crossing, one tied factor of two) are passed over with a warning. Embeddings are not
    among them: rows of rare tokens would decide.
    """
    seen = set()
    for name, layer in model.named_modules():
        if not isinstance(layer, StructuredLinear):
            continue
        bonds = []
        for bond in layer.network.bonds:
            try:
                cut(layer.network, bond)
            except TensorizeError:
                continue
            bonds.append(bond)
        identity = tuple(map(id, factor_parameters(layer)))
        if not bonds or identity in seen:
            continue
        seen.add(identity)
        if held := held_rank(layer, name or layer.form, model):
            warnings.warn(f"ranks stay as they are: {held}", stacklevel=3)
            continue
        for bond in bonds:
            yield name, layer, bond


def adapt(
    model: nn.Module,
    rule: RankRule,
    optimizers: Sequence[Optimizer] = (),
    *,
    on_change: Callable[[RankChange], None] | None = None,
    generator: torch.Generator | None = None,
) -> list[RankChange]:
    """Give every bond of a model's linear layers the rank that a rule says, between two steps.

    Args:
        model: Changed in place; see `bonds_of`.
        rule: What decides.
        optimizers: Those of the model.
        on_change: Told of every change.
        generator: For the entries that are new.

    Raises:
        TensorizeError: See `resize`; nothing is changed then.
    """
    for name, module in model.named_modules():
        if isinstance(module, StructuredLinear):
            check_free(module, name or module.form, model)
            check_states(optimizers, module.factors())
    changes = []
    for name, layer, bond in list(bonds_of(model)):
        rank = rule.rank(layer, bond)
        if rank != layer.network.size(bond):
            change = _resize(
                layer,
                rank,
                bond=bond,
                model=model,
                optimizers=optimizers,
                name=name,
                generator=generator,
            )
            changes.append(change)
            if on_change is not None:
                on_change(change)
    _bound_moments(optimizers, changes)
    return changes


def shrink(
    model: nn.Module,
    energy: float = 0.99,
    *,
    minimum: int = 1,
    multiple: int = 1,
    optimizers: Sequence[Optimizer] = (),
    on_change: Callable[[RankChange], None] | None = None,
) -> list[RankChange]:
    """`adapt` by a `RankRule` with this energy, by which ranks go down alone."""
    rule = RankRule(energy, None, minimum=minimum, multiple=multiple)
    return adapt(model, rule, optimizers, on_change=on_change)


def grow(
    model: nn.Module,
    *,
    factor: float = 1.5,
    used: float = 0.7,
    maximum: int | None = None,
    multiple: int = 1,
    optimizers: Sequence[Optimizer] = (),
    on_change: Callable[[RankChange], None] | None = None,
    generator: torch.Generator | None = None,
) -> list[RankChange]:
    """`adapt` by a `RankRule` with these settings, by which ranks go up alone.

    The function of the model stays as it is.
    """
    rule = RankRule(None, factor, used, maximum=maximum, multiple=multiple)
    return adapt(model, rule, optimizers, on_change=on_change, generator=generator)


def match_ranks(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Give every structured layer and embedding the ranks that a state dict of other ranks has.

    After that `load_state_dict` fits; until then the factors whose shape has changed are zeros.
    Only shapes are looked at, so tensors on the meta device do. To be called before the optimizer
    is made.

    Args:
        model: Its layers are changed in place.
        state: Of the same model with other ranks; prefixes as in ``model.state_dict()``.

    Returns:
        The names of the layers that were changed.

    Raises:
        TensorizeError: A shape differs in something that is no rank, or something holds a layer to
            its rank; nothing is changed then.
    """
    wanted = []
    for name, layer in model.named_modules():
        if not isinstance(layer, Layer):
            continue
        ranks = _checked_ranks(state, name, layer)
        changed = {bond: rank for bond, rank in ranks.items() if rank != layer.network.size(bond)}
        for bond in changed:
            cut(layer.network, bond)
        if changed:
            check_free(layer, name, model)
            if held := held_rank(layer, name, model):
                raise TensorizeError(held)
            wanted.append((name, layer, changed))
    matched = []
    for name, layer, changed in wanted:
        network = layer.network
        if all(network.size(bond) == rank for bond, rank in changed.items()):
            continue  # changed with a layer that it shares with
        sizes = dict(network.sizes) | changed
        new_of = {}
        for letters, old in zip(network.cores, factor_parameters(layer), strict=True):
            assert isinstance(old, nn.Parameter)
            shape = [sizes[letter] for letter in letters]
            if list(old.shape) != shape:
                new_of[old] = nn.Parameter(old.new_zeros(shape), requires_grad=old.requires_grad)
        _install(layer, model, changed, new_of)
        matched.append(name)
    return matched


def _checked_ranks(state: Mapping[str, Tensor], name: str, layer: Layer) -> dict[str, int]:
    """The sizes of a layer's bonds in a state dict, as far as that has them."""
    own = dict(layer.named_parameters(prefix=name))
    keys = {id(parameter): key for key, parameter in own.items()}
    network = layer.network
    places = [keys.get(id(parameter), "") for parameter in factor_parameters(layer)]
    ranks: dict[str, int] = {}
    for letters, key in zip(network.cores, places, strict=True):
        if key in state and state[key].ndim == len(letters):
            sizes = zip(letters, state[key].shape, strict=True)
            ranks |= {letter: size for letter, size in sizes if letter in network.bonds}
    size = dict(network.sizes) | ranks
    shapes = {
        key: tuple(size[letter] for letter in letters)
        for letters, key in zip(network.cores, places, strict=True)
    }
    for key, parameter in own.items():
        expected = shapes.get(key, tuple(parameter.shape))
        if key in state and tuple(state[key].shape) != expected:
            raise TensorizeError(
                f"{key} has the shape {tuple(state[key].shape)} in the checkpoint and "
                f"{tuple(parameter.shape)} here, which other ranks do not explain: build the "
                "layer with the modes of the checkpoint"
            )
    return ranks


Optimizers = Any
"""An optimizer, or a list of those of one model."""


def change_sharded(
    model: nn.Module,
    optimizer: Optimizers,
    change: Callable[[nn.Module, Optimizers], object],
    *,
    build: Callable[[], nn.Module],
    shard: Callable[[nn.Module], Optimizers],
    plain: Callable[[nn.Module], Optimizers],
) -> tuple[nn.Module, Optimizers]:
    """Change the ranks of a sharded model and its optimizer's moments, between two steps.

    The first rank gathers both, changes them and sends them to all: ranks that each decompose by
    themselves could choose other signs and even other ranks. All ranks call this together::

        model, optimizer = change_sharded(
            model, optimizer, lambda whole, own: shrink(whole, 0.99, optimizers=[own]),
            build=build, shard=shard, plain=lambda whole: AdamW(whole.parameters(), lr=1e-3),
        )

    The model is a new object, and so are its hooks, compiled graphs and whatever else was put on
    the old one. Several optimizers of one model go in a list.

    Args:
        model: Sharded by FSDP2 or not, on one process or several.
        optimizer: Its one.
        change: What to do with the whole model and an optimizer of the same state; on rank 0.
        build: A new model that is not sharded, of any ranks.
        shard: Shards a model in place and gives its optimizer.
        plain: The same optimizer for a model that is not sharded, with the same groups.

    Returns:
        The model and its optimizer.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the optimizer holds shards, which a forward pass may have replaced
    several = dist.is_initialized()
    alone = StateDictOptions(full_state_dict=True)
    gathered = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = get_model_state_dict(model, options=gathered)
    moments = get_optimizer_state_dict(model, optimizer, options=gathered)
    entire = build()
    if not several or dist.get_rank() == 0:
        match_ranks(entire, weights)
        entire.load_state_dict(weights)
        own = plain(entire)
        set_optimizer_state_dict(entire, own, moments, options=alone)
        change(entire, own)
        weights = {name: item.detach().clone() for name, item in entire.state_dict().items()}
        moments = get_optimizer_state_dict(entire, own, options=alone)
    sent: list[Any] = [{name: tuple(weight.shape) for name, weight in weights.items()}]
    if several:
        dist.broadcast_object_list(sent)
    match_ranks(entire, {n: torch.empty(shape, device="meta") for n, shape in sent[0].items()})
    fresh = shard(entire)
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=several)
    set_optimizer_state_dict(entire, fresh, moments, options=spread)
    # After the optimizer, whose states come to be by a step of nothing.
    set_model_state_dict(entire, weights, options=spread)
    return entire, fresh
