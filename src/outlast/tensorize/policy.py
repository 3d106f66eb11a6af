"""Selection of layers and of their forms and ranks: patterns, rules, or a function of your own.

A rank is a number, a fraction, or a budget of one layer or of all.

A budget is solved on the closed forms of `outlast.tensorize.cost`, which grow with the rank, by
bisection; an error budget on the spectrum of the weight itself. Ranks are rounded to multiples that
matrix units want: fractions up, budgets down, so that they are kept.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.utils import parametrize

from outlast.errors import TensorizeError
from outlast.tensorize.cost import SLTRAIN_DENSITY, layer_cost
from outlast.tensorize.decompose import rank_for_error
from outlast.tensorize.layer import StructuredLayer
from outlast.tensorize.low_rank import GATES, Gate
from outlast.tensorize.shapes import (
    Form,
    Ranks,
    form_named,
    rounded_rank,
)
from outlast.tensorize.svd import spectrum

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


QUANTITIES = ("parameters", "flops", "error")
"""Quantities that a budget can limit."""

_WORTH_ROUNDING = 2
"""A rank below so many multiples is left as it is: rounding would change it by much."""


@dataclass(frozen=True)
class Budget:
    """A budget of all layers together, for `tensorize`.

    Dense weights that are kept (``init="from_dense"``) have spectra, by which the budget is shared
    out: each step of rank goes to the layer where it recovers the largest share of the layer's
    energy per parameter. Without, every layer gets the same share.

    Attributes:
        parameters: Share of the dense layers' parameters; or
        flops: of their operations.
    """

    parameters: float | None = None
    flops: float | None = None

    def __post_init__(self) -> None:
        given = [share for share in (self.parameters, self.flops) if share is not None]
        if len(given) != 1 or not 0.0 < given[0] < 1.0:
            raise TensorizeError(
                f"Budget(parameters={self.parameters}, flops={self.flops}): give one of them, a "
                "share above 0 and below 1"
            )

    @property
    def share(self) -> float:
        """Of the dense layers."""
        return self.parameters if self.parameters is not None else self.flops  # type: ignore[return-value]

    def per_layer(self) -> str:
        """The same budget for every layer, as `resolved_rank` takes it."""
        name = "parameters" if self.parameters is not None else "flops"
        return f"{name}={self.share}"


Rank = int | float | str | tuple[int, ...]
"""``64``, ``0.25``, ``"parameters=0.3"``, ``"flops=0.3"``, ``"error=0.1"``, or one per bond."""


@dataclass(frozen=True)
class LayerShape:
    """Layer for which a rank is wanted.

    Attributes:
        form: The form.
        in_features: Features of x.
        out_features: Features of y.
        cores: Modes on each side; None: the form's own number.
        multiple: See `shapes.MULTIPLE_OF_PRECISION`; 1: no rounding.
        density: Share of entries in the sparse part; None: the form's own.
    """

    form: Form
    in_features: int
    out_features: int
    cores: int | None = None
    multiple: int = 1
    density: float | None = None

    @property
    def modes(self) -> int:
        """Modes on each side."""
        return self.cores or self.form.modes or 1

    @property
    def most(self) -> int:
        """The largest useful rank."""
        return self.form.largest_rank(self.in_features, self.out_features, self.modes)

    def used(self, quantity: str, rank: int) -> float:
        """Parameters or forward operations at a rank, over those of the dense layer."""
        sizes = (self.in_features, self.out_features)
        density = SLTRAIN_DENSITY if self.density is None else self.density
        cost = layer_cost(self.form.name, *sizes, rank, cores=self.modes, density=density)
        dense = math.prod(sizes)
        if quantity == "parameters":
            return cost.parameters / dense
        return cost.forward_flops_per_token / (2 * dense)

    def __str__(self) -> str:
        return f"a {self.form.name} layer of {self.in_features} x {self.out_features} features"


def resolved_rank(rank: Rank, shape: LayerShape, weight: Tensor | None = None) -> Ranks:
    """The rank or ranks that a user means.

    Args:
        rank: See `Rank`. A fraction is one of the narrower side for forms of two factors, and of
            the dense parameters for others; of ``monarch`` an integer is the number of blocks.
        shape: Of which layer.
        weight: (out, in) dense weight, for error budgets.

    Raises:
        TensorizeError: The rank is none of these, or too small a budget for rank 1.
    """
    if isinstance(rank, bool) or not isinstance(rank, int | float | str | tuple):
        raise TensorizeError(f"rank = {rank!r}: {_MEANT}")
    if isinstance(rank, tuple):
        return rank
    if isinstance(rank, int):
        if rank < 1:
            raise TensorizeError(f"rank = {rank} must be at least 1")
        return rank
    if isinstance(rank, float):
        if not 0.0 < rank <= 1.0:
            raise TensorizeError(
                f"rank = {rank} is no fraction above 0 and at most 1: for that many features write "
                f"an integer, rank = {max(1, round(rank)) if math.isfinite(rank) else 64}"
            )
        if not shape.form.two_factor:
            return _within(shape, "parameters", rank)
        wanted = max(1, round(rank * min(shape.in_features, shape.out_features)))
        return _rounded_up(wanted, shape)
    quantity, limit = parsed_budget(rank)
    if quantity != "error":
        return _within(shape, quantity, limit)
    if weight is None:
        raise TensorizeError(
            f"rank = 'error={limit}' needs the dense weight to compare with: set "
            "init = 'from_dense', or give a rank"
        )
    fitting = rank_for_error(shape.form.name, weight, limit, shape.modes)
    if isinstance(fitting, int) and shape.form.name == "low_rank":
        return _rounded_up(fitting, shape)
    return fitting


_MEANT = (
    "give an integer, a fraction such as 0.25, or a budget such as 'parameters=0.3', 'flops=0.3' "
    "or 'error=0.1'"
)


def parsed_budget(text: str) -> tuple[str, float]:
    """("parameters", 0.3) from "parameters=0.3".

    Raises:
        TensorizeError: It is no budget.
    """
    name, _, number = text.partition("=")
    try:
        limit = float(number)
    except ValueError:
        limit = math.nan
    if name.strip() not in QUANTITIES or not 0.0 < limit < 1.0:
        raise TensorizeError(f"rank = {text!r}: {_MEANT}")
    return name.strip(), limit


def _rounded_up(rank: int, shape: LayerShape) -> int:
    if not shape.form.aligned or rank < _WORTH_ROUNDING * shape.multiple:
        return rank
    return rounded_rank(rank, shape.multiple, largest=shape.most)


def _within(shape: LayerShape, quantity: str, limit: float) -> int:
    """The largest rank (fewest blocks) that keeps to a budget."""
    best = 1
    if shape.form.blocks:
        for blocks in range(1, shape.most + 1):
            used = shape.used(quantity, blocks)
            if used <= limit:
                return blocks
            # Neither end: from the square root of the width on, more blocks are more again.
            best = blocks if used < shape.used(quantity, best) else best
    least = shape.used(quantity, best)
    if least > limit:
        raise TensorizeError(
            f"rank = '{quantity}={limit}' is too little for {shape}, which takes at least "
            f"{least:.4g} of the dense {quantity} (at {'blocks' if shape.form.blocks else 'rank'} "
            f"= {best}): allow more, or choose another form"
        )
    # The largest rank that fits, where all below one that fits do.
    rank, high = 1, shape.most
    while rank < high:
        middle = (rank + high + 1) // 2
        rank, high = (middle, high) if shape.used(quantity, middle) <= limit else (rank, middle - 1)
    if not shape.form.aligned or rank < _WORTH_ROUNDING * shape.multiple:
        return rank
    return rank // shape.multiple * shape.multiple


def shared_ranks(
    weights: Mapping[str, Tensor], share: float, multiples: Mapping[str, int]
) -> dict[str, int]:
    """Ranks of low-rank layers that recover the most energy within a budget (water filling).

    A step of rank in a layer recovers the squares of the next singular values, as a share of the
    sum of all of that layer. Since they fall with the rank, taking the step with the largest gain
    per parameter first is optimal up to the last step. Every layer gets one step, and none so many
    that it would have as many parameters as the dense one.

    Args:
        weights: (out, in) of every layer.
        share: Of the layers' dense parameters, which is that of their operations as well.
        multiples: Size of a step in every layer.

    Returns:
        A rank for every layer.

    Raises:
        TensorizeError: The budget is too small for one step per layer.
    """
    budget = share * sum(weight.numel() for weight in weights.values())
    ranks: dict[str, int] = {}
    steps: list[tuple[float, str, int]] = []
    spent = 0
    for name, weight in weights.items():
        energies = spectrum(weight).square().tolist()
        whole = sum(energies) or 1.0
        size = sum(weight.shape)
        most = max(1, (weight.numel() - 1) // size)
        step = min(multiples[name], most)
        ranks[name] = step
        spent += step * size
        for begin in range(step, most - step + 1, step):
            gain = sum(energies[begin : begin + step]) / whole / (step * size)
            steps.append((-gain, name, step))
    if spent > budget:
        raise TensorizeError(
            f"a budget of {share} is too little for {len(weights)} layers, which take "
            f"{spent / sum(weight.numel() for weight in weights.values()):.4g} at the smallest "
            "ranks: allow more, or set multiple = 1"
        )
    full: set[str] = set()
    for _, name, step in sorted(steps, key=lambda one: one[0]):
        cost = step * sum(weights[name].shape)
        if name in full or spent + cost > budget:
            full.add(name)
            continue
        ranks[name] += step
        spent += cost
    return ranks


_ALWAYS_HEADS = ("lm_head", "output_projection", "embed_out")

_HEADS = ("classifier", "score", "qa_outputs", "fc", "head", "heads", "logits", "to_logits")
"""Parts of names of heads in models that do not say which module theirs is; the latter outside
numbered blocks."""

NAME_IT = "stays dense unless match names it"


@dataclass(frozen=True)
class Choice:
    """Form and rank of a layer's replacement.

    Attributes:
        form: See `outlast.tensorize.shapes.FORMS`.
        rank: See `outlast.tensorize.policy.Rank`.
        activation: Between the factors of ``cola`` and ``lax``; None: SiLU and none.
        cores: Modes on each side, of forms that have them; None: the form's own number.
        density: Share of the weight's entries in the sparse part of ``sltrain``; None: 0.03.
        gate: What ``lax`` multiplies the latent of the layer before with: ``identity`` (nothing),
            ``scalar`` or ``vector``.
    """

    form: str = "low_rank"
    rank: Rank = 0.25
    activation: str | None = None
    cores: int | None = None
    density: float | None = None
    gate: str = "identity"

    def __post_init__(self) -> None:
        form_named(self.form)


Rule = tuple[str, str, Rank]
"""(pattern, form, rank)."""

Policy = Callable[[str, nn.Module], Choice | None] | Sequence[Rule | tuple[str, Choice | None]]
"""A function of a layer's name and the layer, or rules of which the first that fits decides.

What no rule fits, and what is given None, stays dense.
"""


@dataclass(frozen=True, eq=False)
class Target:
    """A layer that can be replaced.

    Attributes:
        module: The layer.
        names: All its names in the model, as one module can stand in several places.
        transposed: Whether its weight is (in, out), as in GPT-2's Conv1D.
        is_embedding: Whether it is an embedding.
    """

    module: nn.Module
    names: tuple[str, ...]
    transposed: bool = False
    is_embedding: bool = False

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]

    @property
    def parameter(self) -> nn.Parameter:
        """The weight as it lies in the layer."""
        return self.module.weight  # type: ignore[return-value]

    @property
    def weight(self) -> Tensor:
        """(out, in) of a linear layer, (rows, features) of an embedding."""
        weight = self.parameter.detach()
        return weight.t() if self.transposed else weight

    @property
    def bias(self) -> Tensor | None:
        """(out,), or None."""
        return getattr(self.module, "bias", None)

    @property
    def features(self) -> tuple[int, int]:
        """(in, out) of a linear layer, (rows, features) of an embedding."""
        rows, columns = self.weight.shape
        return (rows, columns) if self.is_embedding else (columns, rows)


@dataclass(frozen=True)
class Selection:
    """Layers to replace.

    Attributes:
        chosen: Layers with what they become, in the order of the model.
        targets: All layers that could be, chosen or not.
        left: First name of each layer that was not chosen -> why not.
        likely_head: Name of a chosen layer that no pattern names and that seems to be the head;
            empty: none.
    """

    chosen: tuple[tuple[Target, Choice], ...]
    targets: tuple[Target, ...] = field(repr=False)
    left: dict[str, str] = field(repr=False)
    likely_head: str = ""


def select(
    model: nn.Module,
    choice: Choice,
    match: str | Sequence[str] = "*",
    *,
    exclude: str | Sequence[str] | None = None,
    policy: Policy | None = None,
) -> Selection:
    """Find the layers.

    Embeddings and heads are left alone unless a pattern names them: contains the last part of
    their name, as ``lm_head`` and ``*.embed_tokens`` do and ``*`` does not. Heads are what the
    model says (`get_output_embeddings`), what is tied to an embedding, what gives
    ``config.num_labels`` features, and what has a usual name such as ``classifier`` or ``fc``.

    Args:
        model: Any module.
        choice: What the layers become where there is no policy.
        match: Shell patterns of names (`fnmatch`, case matters, ``*`` fits dots as well).
        exclude: Patterns of names that stay as they are.
        policy: See `Policy`; asked about layers that fit `match`.

    Raises:
        TensorizeError: A pattern fits no layer, or a rule is none.
    """
    targets = replaceable(model)
    patterns = _patterns(match, "match")
    excluded = _patterns(exclude, "exclude") if exclude else []
    rules = None if policy is None or callable(policy) else _rules(policy)
    _check_used([*patterns, *excluded], targets, model)
    named = patterns + [pattern for pattern, _ in rules or []]
    heads = _heads(model, targets)
    linear = [target for target in targets if not target.is_embedding]
    # The last linear layer, if no other layer has as many features as it gives.
    last = linear[-1] if len(linear) > 1 else None
    widths = {width for target in linear[:-1] for width in target.features}
    widths |= {target.features[1] for target in targets if target.is_embedding}
    likely_head = ""
    chosen = []
    left: dict[str, str] = {}
    for target in targets:
        kept = _fitting(target, excluded)
        if kept or not _fitting(target, patterns):
            left[target.name] = f"exclude = {kept[0]!r}" if kept else "match does not fit it"
            continue
        # A pattern has the last part of its name, or of a head in it.
        parts = {name.rpartition(".")[2] for name in target.names}
        parts |= {_head_part(name) for name in target.names} - {""}
        fitting = _fitting(target, named)
        is_named = any(part in pattern for part in parts for pattern in fitting)
        if not is_named and (target.is_embedding or id(target.module) in heads):
            kind = "an embedding" if target.is_embedding else "a head"
            left[target.name] = f"is {kind}, which {NAME_IT}"
            continue
        if not is_named and target is last and not callable(policy):
            likely_head = "" if target.features[1] in widths else target.name
        found: Choice | None = choice
        if rules is not None:
            fits = (ruled for pattern, ruled in rules if _fitting(target, [pattern]))
            found = next(fits, None)
        elif callable(policy):
            found = policy(target.name, target.module)
            if found is not None and not isinstance(found, Choice):
                raise TensorizeError(
                    f"policy gave {found!r} for {target.name}: it must give a Choice or None"
                )
        if found is None:
            left[target.name] = "policy leaves it dense"
        else:
            chosen.append((target, found))
    return Selection(tuple(chosen), tuple(targets), left, likely_head)


def common_gate(selection: Selection) -> Gate:
    """The gate of the layers with latent crossing.

    Raises:
        TensorizeError: They have different ones, or it is unknown.
    """
    gates = {choice.gate for _, choice in selection.chosen if choice.form == "lax"}
    if len(gates) > 1:
        raise TensorizeError(
            f"gates {', '.join(sorted(gates))} of lax layers cannot go together: choose one of "
            "them, or call tensorize for each"
        )
    gate = min(gates, default="identity")
    if gate not in GATES:
        raise TensorizeError(f"gate = {gate!r} is not one of {', '.join(GATES)}")
    return gate


def replaceable(model: nn.Module) -> list[Target]:
    """All linear layers and embeddings of a model that are not parts of structured layers."""
    names: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    parts: set[int] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, StructuredLayer):
            parts.update(id(part) for part in module.modules())
        names.setdefault(id(module), []).append(name)
        modules[id(module)] = module
    found = []
    for identity, module in modules.items():
        kind = type(module)
        transposed = kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers")
        if identity in parts or not names[identity][0]:
            continue
        if transposed or kind in (nn.Linear, nn.Embedding):
            every = tuple(names[identity])
            found.append(Target(module, every, transposed, is_embedding=kind is nn.Embedding))
    return found


def _heads(model: nn.Module, targets: list[Target]) -> set[int]:
    """Output layers: what the model says, what shares an embedding's weight, and usual names."""
    heads = set()
    labels = getattr(getattr(model, "config", None), "num_labels", None)
    for module in model.modules():
        said = getattr(module, "get_output_embeddings", None)
        if callable(said):
            try:
                head = said()
            except (NotImplementedError, AttributeError):
                head = None
            if head is not None:
                heads.add(id(head))
    embedded = {id(target.parameter) for target in targets if target.is_embedding}
    for target in targets:
        if id(target.parameter) in embedded or _head_part(target.name):
            heads.add(id(target.module))
    linear = [target for target in targets if not target.is_embedding]
    classifying = [target for target in linear if target.features[1] == labels]
    for target in classifying:
        # A layer of many blocks may be as wide by chance.
        if target is classifying[-1] or not _in_blocks(target.name):
            heads.add(id(target.module))
    return heads


def _in_blocks(name: str) -> bool:
    return any(part.isdigit() for part in name.split(".")[:-1])


def _head_part(name: str) -> str:
    """The part of a name that is usual of heads, unless that is in one of many blocks."""
    parts = name.split(".")
    if parts[-1] in _ALWAYS_HEADS:
        return parts[-1]
    if _in_blocks(name):
        return ""
    usual = parts[-1] if parts[-1].endswith(("_head", "_classifier")) else ""
    return next((part for part in parts if part in _HEADS), usual)


def _patterns(given: str | Sequence[str], setting: str) -> list[str]:
    patterns = [given] if isinstance(given, str) else list(given)
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise TensorizeError(f"{setting} = {given!r} must be a pattern of names or a list of them")
    return patterns


def _rules(policy: Policy) -> list[tuple[str, Choice | None]]:
    rules: list[tuple[str, Choice | None]] = []
    for rule in policy:  # type: ignore[union-attr]
        match rule:
            case (str(pattern), Choice() | None as choice):
                rules.append((pattern, choice))
            case (str(pattern), str(form), rank):
                rules.append((pattern, Choice(form, rank)))
            case _:
                raise TensorizeError(
                    f"policy has the rule {rule!r}: write (pattern, form, rank), or "
                    "(pattern, None) for what stays dense"
                )
    return rules


def _fitting(target: Target, patterns: Sequence[str]) -> list[str]:
    return [
        pattern
        for pattern in patterns
        if any(fnmatch.fnmatchcase(name, pattern) for name in target.names)
    ]


def _check_used(patterns: list[str], targets: list[Target], model: nn.Module) -> None:
    """Refuse patterns that fit no layer."""
    for pattern in patterns:
        if any(_fitting(target, [pattern]) for target in targets):
            continue
        for name, parameter in model.named_parameters():
            if fnmatch.fnmatchcase(name, pattern) and parameter.ndim > 1:
                why = why_dense(model.get_submodule(name.rpartition(".")[0]), name, parameter)
                raise TensorizeError(
                    f"the pattern {pattern!r} fits {name}, which {why}, and no layer that can be "
                    "replaced"
                )
        some = ", ".join(target.name for target in targets[:4]) or "none"
        more = f" and {len(targets) - 4} more" if len(targets) > 4 else ""
        raise TensorizeError(
            f"the pattern {pattern!r} fits no linear layer or embedding of the model: its layers "
            f"are {some}{more}"
        )


def why_dense(owner: nn.Module, name: str, parameter: Tensor) -> str:
    """Why a parameter is none that `tensorize` replaces.

    Args:
        owner: The module that holds it.
        name: Its name.
        parameter: A matrix, or with more dimensions.
    """
    kind = type(owner).__name__
    if parametrize.is_parametrized(owner) or isinstance(owner, parametrize.ParametrizationList):
        return "is parametrized: remove the parametrization first (remove_parametrizations)"
    if isinstance(owner, nn.Linear | nn.Embedding):
        plain = "nn.Linear" if isinstance(owner, nn.Linear) else "nn.Embedding"
        return f"is of {kind}, a subclass of {plain} whose own code would be lost"
    return f"is a {parameter.ndim}-D parameter of {kind}, which tensorize cannot replace"
