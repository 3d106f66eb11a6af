"""Which layers are replaced, and by what: patterns, rules, or a function of your own."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.utils import parametrize

from outlast.errors import TensorizeError
from outlast.tensorize.budget import Rank
from outlast.tensorize.catalogue import form_named
from outlast.tensorize.forms.embedding import StructuredEmbedding
from outlast.tensorize.forms.latent import GATES, Gate
from outlast.tensorize.layer import StructuredLinear

if TYPE_CHECKING:
    from torch import Tensor

_ALWAYS_HEADS = ("lm_head", "output_projection", "embed_out")
_HEADS = ("classifier", "score", "qa_outputs", "fc", "head", "heads", "logits", "to_logits")
"""Parts of names of heads in models that do not say which module theirs is; the latter outside
numbered blocks."""

NAME_IT = "stays dense unless match names it"


@dataclass(frozen=True)
class Choice:
    """What a layer becomes.

    Attributes:
        form: See `outlast.tensorize.catalogue.FORMS`.
        rank: See `outlast.tensorize.budget.Rank`.
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
    """What is replaced.

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
    named = patterns + [pattern for pattern, _ in rules or []]
    heads = _heads(model, targets)
    last = _likely_head(targets)
    likely_head = ""
    used: set[str] = set()
    chosen = []
    left: dict[str, str] = {}
    for target in targets:
        fitting = _fitting(target, patterns)
        used.update(fitting)
        kept = _fitting(target, excluded)
        used.update(kept)
        if not fitting or kept:
            left[target.name] = f"exclude = {kept[0]!r}" if kept else "match does not fit it"
            continue
        is_named = _names(_fitting(target, named), target)
        if not is_named and (target.is_embedding or id(target.module) in heads):
            kind = "an embedding" if target.is_embedding else "a head"
            left[target.name] = f"is {kind}, which {NAME_IT}"
            continue
        if not is_named and target is last and not callable(policy):
            likely_head = target.name
        found: Choice | None = choice
        if rules is not None:
            found = None
            for pattern, ruled in rules:
                if _fitting(target, [pattern]):
                    used.add(pattern)
                    found = ruled
                    break
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
    _check_used([*patterns, *excluded], used, targets, model)
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
        if isinstance(module, StructuredLinear | StructuredEmbedding):
            parts.update(id(part) for part in module.modules())
        names.setdefault(id(module), []).append(name)
        modules[id(module)] = module
    found = []
    for identity, module in modules.items():
        if identity in parts or not names[identity][0]:
            continue
        every = tuple(names[identity])
        if type(module) is nn.Linear:
            found.append(Target(module, every))
        elif type(module).__name__ == "Conv1D" and type(module).__module__.startswith(
            "transformers"
        ):
            found.append(Target(module, every, transposed=True))
        elif type(module) is nn.Embedding:
            found.append(Target(module, every, is_embedding=True))
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


def _likely_head(targets: Sequence[Target]) -> Target | None:
    """The last linear layer, if no other layer has as many features as it gives."""
    linear = [target for target in targets if not target.is_embedding]
    if len(linear) < 2:
        return None
    last = linear[-1]
    widths = {width for target in linear[:-1] for width in target.features}
    widths |= {target.features[1] for target in targets if target.is_embedding}
    return None if last.features[1] in widths else last


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


def _names(patterns: Sequence[str], target: Target) -> bool:
    """Whether a pattern contains the last part of the target's name, or that of a head in it."""
    parts = {name.rpartition(".")[2] for name in target.names}
    parts |= {_head_part(name) for name in target.names} - {""}
    return any(part in pattern for part in parts for pattern in patterns)


def _check_used(
    patterns: list[str], used: set[str], targets: list[Target], model: nn.Module
) -> None:
    unused = [pattern for pattern in patterns if pattern not in used]
    if not unused:
        return
    for name, parameter in model.named_parameters():
        if fnmatch.fnmatchcase(name, unused[0]) and parameter.ndim > 1:
            why = why_dense(model.get_submodule(name.rpartition(".")[0]), name, parameter)
            raise TensorizeError(
                f"the pattern {unused[0]!r} fits {name}, which {why}, and no layer that can be "
                "replaced"
            )
    some = ", ".join(target.name for target in targets[:4]) or "none"
    more = f" and {len(targets) - 4} more" if len(targets) > 4 else ""
    raise TensorizeError(
        f"the pattern {unused[0]!r} fits no linear layer or embedding of the model: its layers "
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
