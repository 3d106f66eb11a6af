"""Replacing the linear layers of a model in place, and a table of what became of each.

Three passes, of which the first two change nothing: choose and describe what each layer would
become, on the meta device; make the new layers; put them in. So a model is either replaced as asked
or as it was.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import itertools
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from outlast.distributed.group import Group
from outlast.errors import TensorizeError
from outlast.tensorize.accounting import forward_flops
from outlast.tensorize.decompose import check_convertible, convert
from outlast.tensorize.embedding import StructuredEmbedding, TiedHead
from outlast.tensorize.layer import StructuredLayer
from outlast.tensorize.low_rank import Gate, link_by_name
from outlast.tensorize.measure import calibrate as calibrate_machine
from outlast.tensorize.measure import timed_speed, tune
from outlast.tensorize.network import Network
from outlast.tensorize.planner import (
    FORMS_WITHOUT_PLANS,
    PRICED_DEVICES,
    basis_of,
    dtype_name,
    extra_seconds,
    plan_for,
)
from outlast.tensorize.policy import (
    NAME_IT,
    Budget,
    Choice,
    LayerShape,
    Policy,
    Rank,
    Selection,
    Target,
    common_gate,
    resolved_rank,
    select,
    shared_ranks,
    why_dense,
)
from outlast.tensorize.shapes import MULTIPLE_OF_PRECISION, Form, Ranks, form_named

_WIDTH = 132
"""Columns of the printed table."""


@dataclass(frozen=True)
class Replacement:
    """One replaced layer.

    Attributes:
        name: Its name in the model; of several, the first.
        form: What it became.
        rank: Its rank or ranks.
        parameters: Of its factors; 0 where they are another layer's.
        dense_parameters: Of the weight that was replaced; 0 where it was shared.
        flops_per_token: Forward, by the plan for the tokens that were asked about.
        dense_flops_per_token: Of the dense layer; 0 for an embedding.
        speed: Predicted time of the dense layer over its own, forward and backward; None: the
            planner does not know.
        error: ``|W - product| / |W|`` (Frobenius) of a converted weight; None: from scratch.
        std: Standard deviation that the product was drawn with; None: converted.
    """

    name: str
    form: str
    rank: int | tuple[int, ...]
    parameters: int
    dense_parameters: int
    flops_per_token: float
    dense_flops_per_token: float
    speed: float | None = None
    error: float | None = None
    std: float | None = None


@dataclass(frozen=True)
class KeptLayer:
    """Layer that stays dense.

    Attributes:
        name: Of a layer, or of a parameter that is no layer's weight.
        parameters: How many numbers it has; 0 where they are another's.
        why: Why, to follow the name.
    """

    name: str
    parameters: int
    why: str


@dataclass(frozen=True, eq=False)
class Replacements:
    """All that `tensorize` did; prints as a table.

    Attributes:
        replaced: The layers that were replaced, in the order of the model.
        refused: Name of each layer that was to be replaced and stays dense -> why.
        modules: The new layers by name.
        parameters: Of the whole model now, tied ones once.
        dense_parameters: Before.
        tokens: Number of tokens that speeds were predicted for.
        kept: All of the model that stays dense, those of `refused` among it. With the dense
            parameters of `replaced` it has every parameter of the dense model once.
        basis: How speeds are known: ``predicted`` or ``timed``, and from what.
    """

    replaced: tuple[Replacement, ...]
    refused: dict[str, str]
    modules: dict[str, nn.Module]
    parameters: int
    dense_parameters: int
    tokens: int
    kept: tuple[KeptLayer, ...] = ()
    basis: str = "predicted"

    def __len__(self) -> int:
        return len(self.replaced)

    def __iter__(self) -> Iterator[Replacement]:
        return iter(self.replaced)

    def to_dict(self) -> dict[str, Any]:
        """The same in plain types."""
        return {
            "replaced": [
                {**asdict(row), "share": self.share_of(row.dense_parameters)}
                for row in self.replaced
            ],
            "kept": [{**asdict(row), "share": self.share_of(row.parameters)} for row in self.kept],
            "refused": dict(self.refused),
            "parameters": self.parameters,
            "dense_parameters": self.dense_parameters,
            "tokens": self.tokens,
            "basis": self.basis,
        }

    def share_of(self, parameters: int) -> float:
        """Of the dense model's parameters."""
        return parameters / self.dense_parameters if self.dense_parameters else 0.0

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw the factors of layers from scratch anew, with the deviations of the first time.

        For models that were built on the meta device and have got memory since (`to_empty`), on
        all ranks with the same generator state; biases become zero.

        Args:
            generator: Source of the seed of all layers; None: torch's own.
        """
        base = seed_of(generator)
        for one in self.replaced:
            if one.std is None:
                continue
            layer: Any = self.modules[one.name]
            device = next(layer.parameters()).device
            layer.reset_parameters(one.std, generator_for(one.name, base, device))
            bias = getattr(layer, "bias", None)
            if bias is not None:
                nn.init.zeros_(bias)

    def __str__(self) -> str:
        """The table in plain text.

        Layers whose names differ in numbers alone share a line where all but their errors are
        equal. FLOPs are forward; speed is predicted for forward and backward.
        """
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False, show_footer=True)
        for heading, total in zip(_HEADINGS, self._totals(), strict=True):
            table.add_column(
                heading,
                total,
                justify="left" if heading in ("layers", "form") else "right",
                no_wrap=heading != "layers",
                overflow="fold",
            )
        for line in self._lines():
            table.add_row(*line)
        stream = io.StringIO()
        Console(file=stream, width=_WIDTH, color_system=None, markup=False).print(table)
        lines = [line.rstrip() for line in stream.getvalue().splitlines()]
        before, after = self.dense_parameters, self.parameters
        how, _, source = self.basis.partition(" ")
        lines.append(
            f"model: {_count(before)} -> {_count(after)} parameters "
            f"({after / before if before else 1.0:.1%}); speeds are {how} for {self.tokens} "
            "tokens, forward and backward"
        )
        lines += [f"{how} {source}"] if source else []
        reasons: dict[str, list[KeptLayer]] = {}
        for row in self.kept or [KeptLayer(name, 0, why) for name, why in self.refused.items()]:
            reasons.setdefault(row.why, []).append(row)
        for why, rows in reasons.items():
            numbers = sum(row.parameters for row in rows)
            part = f" ({self.share_of(numbers):.1%} of the parameters)" if numbers else ""
            lines.append(f"kept dense: {_grouped([row.name for row in rows])}: {why}{part}")
        return "\n".join(lines)

    def _lines(self) -> list[tuple[str, ...]]:
        groups: dict[tuple[str, ...], list[Replacement]] = {}
        for one in self.replaced:
            shared = one.parameters == 0
            cells = (
                _pattern(one.name),
                one.form,
                str(one.rank) if isinstance(one.rank, int) else "-".join(map(str, one.rank)),
                "shared" if shared else _count(one.parameters),
                "shared" if shared else _count(one.dense_parameters),
                _count(one.flops_per_token),
                _count(one.dense_flops_per_token),
                _speed(one.speed) if one.speed or not one.dense_flops_per_token else "unknown",
            )
            groups.setdefault(cells, []).append(one)
        lines: list[tuple[str, ...]] = []
        for group, ones in groups.items():
            share = self.share_of(sum(one.dense_parameters for one in ones))
            errors = [f"{one.error:.3f}" for one in ones if one.error is not None]
            # The error, or the smallest and the largest.
            spread = " to ".join(dict.fromkeys((min(errors), max(errors)))) if errors else ""
            names = _grouped([one.name for one in ones])
            lines.append((names, *group[1:5], f"{share:.1%}", *group[5:], spread))
        return lines

    def _totals(self) -> tuple[str, ...]:
        own, whole, flops, dense_flops = (
            sum(getattr(one, field) for one in self.replaced)
            for field in (
                "parameters", "dense_parameters", "flops_per_token", "dense_flops_per_token"
            )
        )  # fmt: skip
        # The speed of all layers together, where every one's is known.
        linear = [one for one in self.replaced if one.dense_flops_per_token]
        speed = None
        if linear and all(one.speed is not None for one in linear):
            # Dense layers of one model run at about the same rate, so their operations weigh.
            dense = sum(one.dense_flops_per_token for one in linear)
            speed = dense / sum(one.dense_flops_per_token / (one.speed or 1.0) for one in linear)
        count = len(self.replaced)
        return (
            f"{count} layer{'' if count == 1 else 's'}", "", "", _count(own), _count(whole),
            f"{self.share_of(int(whole)):.1%}", _count(flops), _count(dense_flops), _speed(speed),
            "",
        )  # fmt: skip


_HEADINGS = (
    "layers", "form", "rank", "parameters", "dense", "share", "FLOPs/token", "dense", "speed",
    "error",
)  # fmt: skip


def _pattern(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _grouped(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    counts: dict[str, int] = {}
    for name in names:
        counts[_pattern(name)] = counts.get(_pattern(name), 0) + 1
    return ", ".join(f"{name} x{count}" if count > 1 else name for name, count in counts.items())


def _speed(speed: float | None) -> str:
    return "" if speed is None else f"{speed:.2f}x"


def _count(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:.4g}"


def seed_of(generator: torch.Generator | None) -> int:
    """A seed for all layers, the next number of a generator; None: of torch's own."""
    device = torch.device("cpu") if generator is None else generator.device
    return int(torch.randint(1 << 62, (), generator=generator, device=device))


def generator_for(name: str, base: int, device: torch.device) -> torch.Generator | None:
    """A generator of a layer's own, whatever order layers are made in; None on meta."""
    if device.type == "meta":
        return None
    digest = hashlib.blake2b(f"{base}:{name}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)


def is_bias(name: str) -> bool:
    """Return whether a parameter is a bias, by its name."""
    return name.rpartition(".")[2] == "bias"


def check_sharing(selection: Selection) -> None:
    """Refuse to replace some of the layers that share a weight.

    Raises:
        TensorizeError: See above.
    """
    chosen = {id(target.module): choice for target, choice in selection.chosen}
    sharing: dict[int, list[Target]] = {}
    for target in selection.targets:
        sharing.setdefault(id(target.parameter), []).append(target)
    for targets in sharing.values():
        mine = [chosen.get(id(target.module)) for target in targets]
        if len(targets) == 1 or not any(mine):
            continue
        names = " and ".join(target.name for target in targets)
        kinds = {(target.is_embedding, target.transposed) for target in targets}
        if any(target.transposed for target in targets) and len(kinds) > 1:
            raise TensorizeError(
                f"{names} share a weight of which one is transposed, and cannot share factors: "
                "exclude them"
            )
        if len(set(mine)) > 1:
            raise TensorizeError(
                f"{names} share a weight, so all of them must become the same or none: match or "
                "exclude them together, or untie them (tie_word_embeddings = False)"
            )


def check_target(target: Target) -> None:
    """Refuse layers whose replacement would lose something.

    Raises:
        TensorizeError: The layer is sharded, cannot learn, has hooks, or does what embeddings of
            factors do not.
    """
    module = target.module
    if isinstance(target.parameter, DTensor):
        raise TensorizeError(
            f"{target.name} is sharded already: call tensorize before fully_shard and "
            "parallelize_module"
        )
    quantized = is_traceable_wrapper_subclass(target.parameter)
    if quantized or not target.parameter.is_floating_point():
        kind = type(target.parameter.data).__name__ if quantized else target.parameter.dtype
        raise TensorizeError(
            f"{target.name} has a weight of {kind}, which cannot be learned: exclude it"
        )
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    if any(hooks):
        raise TensorizeError(
            f"{target.name} has hooks, which would be lost: register them after tensorize"
        )
    if target.is_embedding and (module.max_norm or module.sparse or module.scale_grad_by_freq):
        raise TensorizeError(
            f"{target.name} has max_norm, sparse or scale_grad_by_freq, which embeddings of "
            "factors have not: exclude it"
        )


def check_ranks_agree(decided: Mapping[str, str]) -> None:
    """Refuse to continue where the processes of a run would replace the same layer differently.

    Collective, if there is a process group: first of a digest, and of all only if these differ.
    Layers that other processes do not have, as in a pipeline, need not agree.

    Args:
        decided: Name of every layer that was looked at -> what becomes of it.

    Raises:
        TensorizeError: Two processes differ, on all of them.
    """
    mine = repr(sorted(decided.items())).encode()
    group = Group()
    if len(set(group.gather(hashlib.blake2b(mine).hexdigest()))) == 1:
        return
    every = group.gather(dict(decided))
    for (one, first), (other, second) in itertools.combinations(enumerate(every), 2):
        for name in first:
            if first[name] != second.get(name, first[name]):
                raise TensorizeError(
                    f"{name} would become {first[name]} on rank {one} and {second[name]} on rank "
                    f"{other}: call tensorize alike on all ranks, and with force = True where "
                    "machines differ in what is faster"
                )


Start = Literal["scratch", "from_dense"]

_WORTH_A_WARNING = 0.1
"""Share of a model that matches and stays dense from which on a warning says so."""


@dataclass(frozen=True, eq=False)
class _Planned:
    """Planned replacement of a layer.

    Attributes:
        target: The layer.
        choice: What was chosen for it.
        form: The form of that name.
        rank: Its rank, resolved.
        row: Its line of the table, as far as known.
        leader: Name of an earlier layer that has the same weight; empty: none.
        against: Why it should stay dense; empty: nothing speaks against it.
        impossible: Whether it cannot be made at all.
    """

    target: Target
    choice: Choice
    form: Form
    rank: Ranks
    row: Replacement
    leader: str = ""
    against: str = ""
    impossible: bool = False

    def said(self) -> str:
        """Decision that all other ranks must have made as well."""
        return "dense" if self.against else f"{self.form.name} at rank {self.rank}"


@dataclass(frozen=True)
class _Settings:
    """Settings of all layers; see `tensorize`."""

    init: Start
    multiple: int | None
    tokens: int
    dtype: torch.dtype | None
    force: bool
    timed: bool

    def computed(self, target: Target) -> tuple[torch.dtype, torch.device]:
        """Type and device of a layer's activations."""
        device = target.weight.device
        if device.type == "meta":
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return self.dtype or target.weight.dtype, device

    def multiple_of(self, target: Target) -> int:
        """The number that an aligned rank of a layer is a multiple of."""
        kind, _ = self.computed(target)
        return self.multiple or MULTIPLE_OF_PRECISION.get(dtype_name(kind), 1)


def tensorize(
    model: nn.Module,
    form: str = "low_rank",
    rank: Rank | Budget = 0.25,
    match: str | Sequence[str] = "*",
    *,
    exclude: str | Sequence[str] | None = None,
    policy: Policy | None = None,
    init: Start = "scratch",
    force: bool = False,
    multiple: int | None = None,
    tokens: int = 4096,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
    activation: str | None = None,
    cores: int | None = None,
    density: float | None = None,
    gate: Gate = "identity",
    calibrate: bool = False,
    collective: bool = True,
) -> Replacements:
    """Replace linear layers by structured ones, in place.

    Replaced are `nn.Linear` itself (no subclass, whose own code would be lost), GPT-2's Conv1D,
    and, where a pattern names them, embeddings and heads. A layer that would not have fewer
    parameters, is predicted to be slower than the dense one, or is frozen and would get random
    factors that nothing trains, stays dense unless `force`; one of which the rank cannot be made
    stays dense. Layers of ``sltrain``, which saves memory and no time, are replaced though they are
    slower. Whatever stays dense has a row in the result; what is slower, and large matrices that
    match but cannot be replaced, are warned of as well. New layers keep device, dtype, bias,
    `requires_grad` and training mode of the old. Layers that share a weight share factors; a head
    that is tied to an embedding becomes a `TiedHead`.

    Call it before the optimizer, DDP, `fully_shard` and `torch.compile`, and on all ranks alike:
    with the same generator state they get the same values, whatever the order of layers. What is
    predicted to be slower depends on the machine's table of costs (`calibrate`).

    Args:
        model: Any module.
        form: A key of `outlast.tensorize.shapes.FORMS`.
        rank: See `outlast.tensorize.policy.Rank`; of ``monarch`` the number of blocks; or a
            `Budget` for all layers together.
        match: Patterns of names, see `policy.select`.
        exclude: Patterns of names that stay.
        policy: See `policy.Policy`; form and rank are not used then.
        init: ``scratch``: random, with the standard deviation of the weight in each product;
            ``from_dense``: nearest to the weight.
        force: Also replace what gains nothing.
        multiple: Of which aligned ranks shall be; None: what the matrix units want for `dtype`.
        tokens: In one pass, for the prediction of speeds.
        dtype: Of activations; None: that of each weight.
        generator: Source of the seed of all layers; None: torch's own.
        activation: See `outlast.tensorize.policy.Choice`.
        cores: See `Choice`.
        density: See `Choice`.
        gate: See `Choice`.
        calibrate: Measure this machine first if that was not done yet (about ten seconds), and time
            the best plans and the dense layer for every shape (a few seconds each), so that what
            stays dense is what was timed to be slower. For decoding, `measure.tune_model` times
            plans without a backward pass. Of several ranks one must do it first, for two that time
            the same may decide differently.
        collective: Whether all ranks of the default process group, if there is one, call it, and
            are compared; False: this process alone.

    Returns:
        What was done; prints as a table.

    Raises:
        TensorizeError: A setting is wrong, a layer cannot be replaced as asked, or none gains. The
            model is as it was then.
    """
    if init not in ("scratch", "from_dense"):
        raise TensorizeError(f"init = {init!r} must be 'scratch' or 'from_dense'")
    if tokens < 1 or (multiple is not None and multiple < 1) or (cores is not None and cores < 1):
        raise TensorizeError(
            f"tokens = {tokens}, multiple = {multiple} and cores = {cores} must be at least 1"
        )
    if isinstance(rank, Budget) and policy is not None:
        raise TensorizeError("rank = Budget(...) shares out among all layers: leave out policy")
    overall = rank.per_layer() if isinstance(rank, Budget) else rank
    choice = Choice(form, overall, activation, cores, density, gate)
    selection = select(model, choice, match, exclude=exclude, policy=policy)
    if not selection.chosen:
        raise TensorizeError(
            f"match = {match!r} leaves no layer to replace: name the head or embedding to have "
            "them replaced, or change exclude or policy"
        )
    check_sharing(selection)
    gate = common_gate(selection)
    settings = _Settings(init, multiple, tokens, dtype, force, calibrate)
    if calibrate:
        for kind, device in {settings.computed(target) for target, _ in selection.chosen}:
            calibrate_machine(kind, device)
    budget = rank if isinstance(rank, Budget) and form == "low_rank" else None
    planned = _planned(selection, settings, budget)
    if collective:
        check_ranks_agree({one.target.name: one.said() for one in planned})
    return _replaced(
        model, selection, planned, settings, gate=gate, generator=generator, match=match
    )


def _replaced(
    model: nn.Module,
    selection: Selection,
    planned: Sequence[_Planned],
    settings: _Settings,
    *,
    gate: Gate,
    generator: torch.Generator | None,
    match: str | Sequence[str],
) -> Replacements:
    """Make the layers that nothing speaks against, put them in, and warn where a user should know.

    Raises:
        TensorizeError: There are none.
    """
    made = [one for one in planned if not one.against]
    if not made and all(one.impossible for one in planned):
        raise TensorizeError(f"{planned[0].target.name}: {planned[0].against}")
    if not made:
        reasons = "; ".join(dict.fromkeys(one.against for one in planned[:8]))
        raise TensorizeError(
            f"none of {len(planned)} layers gains: {reasons}; choose a smaller rank or another "
            "form, or set force = True"
        )
    refused = {one.target.name: one.against for one in planned if one.against}
    kept = _kept(model, selection, {one.target.name for one in made}, refused)
    before = _numbers(model)
    base = seed_of(generator)
    modules: dict[str, nn.Module] = {}
    rows = []
    for one in made:
        modules[one.target.name], row = _made(one, model, modules, settings.init, base)
        rows.append(row)
    for one in made:
        for name in one.target.names:
            owner, _, last = name.rpartition(".")
            parent = model.get_submodule(owner)
            setattr(parent, last, modules[one.target.name])
            if isinstance(parent, nn.TransformerEncoderLayer):
                # Its fused kernel for inference, which reads dense weights, is for these two alone.
                parent.activation_relu_or_gelu = 0
    if crossing := [modules[one.target.name] for one in made if one.form.name == "lax"]:
        link_by_name(model, gate, among=crossing)
    basis = basis_of(*settings.computed(made[0].target), timed=settings.timed)
    numbers = _numbers(model)
    found = Replacements(
        tuple(rows), refused, modules, numbers, before, settings.tokens, kept, basis
    )
    frozen = [
        one.target.name
        for one in made
        if settings.init == "scratch" and not one.target.parameter.requires_grad
    ]
    random = (
        f"{frozen[0]} and {len(frozen) - 1} other layers are frozen, and their factors random"
        if frozen
        else ""
    )
    for warning in (_slow(found), _untouched(found, match, selection), random):
        if warning:
            warnings.warn(warning, stacklevel=3)
    return found


def _numbers(model: nn.Module) -> int:
    """Parameters of a model; those that have no shape yet are none."""
    return sum(
        parameter.numel()
        for parameter in model.parameters()
        if not isinstance(parameter, UninitializedParameter)
    )


def _kept(
    model: nn.Module, selection: Selection, replaced: set[str], refused: Mapping[str, str]
) -> tuple[KeptLayer, ...]:
    """All that stays dense: the layers that could be replaced, and every other parameter."""
    seen: set[int] = set()
    rows = []
    for target in sorted(selection.targets, key=lambda target: target.name not in replaced):
        if target.name not in replaced:
            why = refused.get(target.name) or selection.left[target.name]
            numbers = 0 if id(target.parameter) in seen else target.parameter.numel()
            rows.append(KeptLayer(target.name, numbers, why))
        seen.add(id(target.parameter))
    order = {target.name: place for place, target in enumerate(selection.targets)}
    rows.sort(key=lambda row: order[row.name])
    factors = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, StructuredLayer)
        for parameter in module.parameters()
    }
    vectors = 0
    for name, parameter in model.named_parameters():
        if id(parameter) in seen:
            continue
        if isinstance(parameter, UninitializedParameter):
            rows.append(KeptLayer(name, 0, "has no shape yet: run the model once before tensorize"))
        elif id(parameter) in factors:
            rows.append(KeptLayer(name, parameter.numel(), "is a factor already"))
        elif parameter.ndim < 2:
            vectors += parameter.numel()
        else:
            owner = model.get_submodule(name.rpartition(".")[0])
            rows.append(KeptLayer(name, parameter.numel(), why_dense(owner, name, parameter)))
    if vectors:
        rows.append(KeptLayer("norms, biases and other vectors", vectors, "are no matrices"))
    return tuple(rows)


def _slow(found: Replacements) -> str:
    """A warning of layers that are slower than dense, or of which nobody knows."""
    linear = [row for row in found if row.dense_flops_per_token]
    unknown = [row for row in linear if row.speed is None]
    slow = [row for row in linear if row.speed is not None and row.speed < 1.0]
    said = []
    if slow:
        worst = min(slow, key=lambda row: row.speed or 1.0)
        said.append(
            f"{len(slow)} of {len(linear)} replaced layers are slower than dense ones, the worst "
            f"{worst.name} ({worst.form}) at {worst.speed:.2f}x of dense speed with {found.tokens} "
            "tokens"
        )
    if unknown:
        said.append(f"the speed of {unknown[0].name} ({unknown[0].form}) and others is unknown")
    return f"{'; '.join(said)}: {found.basis}" if said else ""


def _untouched(found: Replacements, match: str | Sequence[str], selection: Selection) -> str:
    """A warning of large parameters that a pattern fits and that cannot be replaced."""
    patterns = [match] if isinstance(match, str) else list(match)
    layers = {target.name for target in selection.targets}
    rows = [
        row
        for row in found.kept
        if row.name not in layers and any(fnmatch.fnmatchcase(row.name, one) for one in patterns)
    ]
    share = found.share_of(sum(row.parameters for row in rows))
    if share < _WORTH_A_WARNING:
        return ""
    largest = max(rows, key=lambda row: row.parameters)
    return (
        f"{share:.0%} of the parameters match and stay dense: {largest.name} {largest.why}; "
        "print the result for all of them"
    )


def _planned(selection: Selection, settings: _Settings, budget: Budget | None) -> list[_Planned]:
    """Describe all layers.

    Args:
        selection: Which.
        settings: Of all.
        budget: Of all layers together, where their dense weights tell how to share it out.

    Raises:
        TensorizeError: One cannot be replaced as asked.
    """
    shared_out: dict[str, int] = {}
    if budget is not None and settings.init == "from_dense":
        # By the spectra of all layers, each weight once.
        owners: dict[int, Target] = {}
        for target, _ in selection.chosen:
            if target.name != selection.likely_head:
                owners.setdefault(id(target.parameter), target)
        weights = {target.name: target.weight for target in owners.values()}
        steps = {target.name: settings.multiple_of(target) for target in owners.values()}
        shared_out = shared_ranks(weights, budget.share, steps)
    leaders: dict[int, _Planned] = {}
    found = []
    # Embeddings first: a head that shares the weight of one takes its factors from it.
    for target, choice in sorted(selection.chosen, key=lambda pair: not pair[0].is_embedding):
        check_target(target)
        leader = leaders.get(id(target.parameter))
        if leader is not None and leader.target.is_embedding and not target.is_embedding:
            one = _tied(target, leader, settings)
        elif leader is not None:
            row = replace(leader.row, name=target.name, parameters=0, dense_parameters=0)
            one = replace(leader, target=target, row=row, leader=leader.target.name)
        else:
            one = _described(target, choice, settings, shared_out.get(target.name))
            leaders[id(target.parameter)] = one
        if target.name == selection.likely_head and not one.against:
            one = replace(one, against=f"seems to be the head, which {NAME_IT}")
        found.append(one)
    # Keep all layers of a weight dense of which one should stay so.
    refused = {one.leader or one.target.name: one for one in found if one.against}
    for place, one in enumerate(found):
        other = refused.get(one.leader or one.target.name)
        if other is not None and not one.against:
            why = f"shares its weight with {other.target.name}, which stays dense"
            found[place] = replace(one, against=f"{why}: {other.against}")
    return found


def _tied(target: Target, leader: _Planned, settings: _Settings) -> _Planned:
    """Describe a head that multiplies with the factors of an embedding."""
    if leader.against:
        row = replace(leader.row, name=target.name)
        return replace(leader, target=target, row=row, leader=leader.target.name)
    embedding: Any = _build(leader.target, leader.choice, leader.form, leader.rank)
    into, out = target.features
    flops, speed = _work(target, leader.form, embedding, embedding.scoring, settings)
    row = replace(
        leader.row,
        name=target.name,
        parameters=0,
        dense_parameters=0,
        flops_per_token=flops,
        dense_flops_per_token=2.0 * into * out,
        speed=speed,
    )
    against = _too_slow(row, target, settings)
    return replace(leader, target=target, row=row, leader=leader.target.name, against=against)


def _too_slow(row: Replacement, target: Target, settings: _Settings) -> str:
    """Why a layer should stay dense that is predicted to be slower; empty: it should not."""
    if settings.force or row.speed is None or row.speed >= 1.0 or row.form == "sltrain":
        return ""
    into, out = target.features
    return (
        f"{row.form} at rank {row.rank} is predicted to run at {row.speed:.2f}x the speed of "
        f"dense ({into} x {out}, {settings.tokens} tokens)"
    )


def _described(
    target: Target, choice: Choice, settings: _Settings, shared_out: int | None
) -> _Planned:
    """Build the layer on the meta device and look what it costs."""
    form, weight = form_named(choice.form), None
    into, out = target.features
    multiple = settings.multiple_of(target)
    shape = LayerShape(form, into, out, choice.cores, multiple, choice.density)
    if settings.init == "from_dense":
        check_convertible(form.name)
        weight = target.weight.t() if target.is_embedding else target.weight
    row = Replacement(target.name, form.name, 0, 0, into * out, 0.0, 0.0)
    try:
        rank = shared_out or resolved_rank(choice.rank, shape, weight)
        layer = _build(target, choice, form, rank)
    except TensorizeError as error:
        if target.is_embedding:
            # It is here because it was named.
            raise TensorizeError(f"{target.name}: {error}") from error
        return _Planned(target, choice, form, 0, row, against=str(error), impossible=True)
    shown: Ranks = layer.blocks if form.blocks else layer.rank  # type: ignore[assignment]
    parameters = sum(
        parameter.numel() for name, parameter in layer.named_parameters() if not is_bias(name)
    )
    row = replace(row, rank=shown, parameters=parameters)
    if not target.is_embedding:
        network: Any = layer.network
        flops, speed = _work(target, form, layer, network, settings)
        dense_flops = 2.0 * into * out
        row = replace(row, flops_per_token=flops, dense_flops_per_token=dense_flops, speed=speed)
    against = _too_slow(row, target, settings)
    if not settings.force and parameters >= into * out:
        against = f"{form.name} at rank {row.rank} has {parameters} parameters, dense {into * out}"
    elif not settings.force and weight is None and not target.parameter.requires_grad:
        against = (
            "is frozen, so its new random factors would never be trained: use init = 'from_dense'"
        )
    return _Planned(target, choice, form, rank, row, against=against)


def _work(
    target: Target, form: Form, layer: nn.Module, network: Network, settings: _Settings
) -> tuple[float, float | None]:
    """Forward operations of a linear layer per token, and its speed over the dense one's."""
    kind, device = settings.computed(target)
    speed = None
    if settings.timed:
        if form.name in FORMS_WITHOUT_PLANS:
            speed = timed_speed(layer, settings.tokens, kind, device)
        else:
            tune(network, settings.tokens, kind, device)
    plan = plan_for(network, settings.tokens, kind, device, True)
    flops = forward_flops(network, plan, settings.tokens) / settings.tokens
    if form.name == "sltrain":
        # Its weight is built for every product, whatever its factors would allow.
        into, out = target.features
        flops = 2.0 * into * out
    if speed is None and plan.seconds > 0.0 and device.type in PRICED_DEVICES:
        activated = getattr(layer, "activation", None) is not None
        entries = getattr(layer, "entries", 0)
        where = settings.tokens, kind, device
        extra = extra_seconds(form.name, network, *where, activated=activated, entries=entries)
        speed = plan.dense_seconds / (plan.seconds + extra)
    return flops, speed


def _build(target: Target, choice: Choice, form: Form, rank: Ranks) -> nn.Module:
    """The new layer on the meta device."""
    settings: dict[str, Any] = {
        "bias": target.bias is not None,
        "device": torch.device("meta"),
        "dtype": target.weight.dtype,
        "activation": choice.activation,
        "cores": choice.cores,
        "density": choice.density,
    }
    into, out = target.features
    if target.is_embedding:
        settings["padding_idx"] = target.module.padding_idx
        return form.build_embedding(into, out, rank, settings)  # type: ignore[no-any-return]
    return form.build(into, out, rank, settings)  # type: ignore[no-any-return]


def _made(
    one: _Planned, model: nn.Module, modules: dict[str, nn.Module], init: Start, base: int
) -> tuple[nn.Module, Replacement]:
    """The new layer with its values."""
    target, row = one.target, one.row
    device = target.weight.device
    leader: Any = modules.get(one.leader)
    layer: Any
    if isinstance(leader, StructuredEmbedding) and not target.is_embedding:
        options: dict[str, Any] = {"device": device, "dtype": target.weight.dtype}
        layer = TiedHead(leader, bias=target.bias is not None, **options)
    else:
        # Made on meta, so that constructors draw no numbers.
        layer = _build(target, one.choice, one.form, one.rank).to_empty(device=device)
        if one.leader:
            share_factors(layer, leader)
        elif init == "from_dense":
            weight = target.weight.t() if target.is_embedding else target.weight
            try:
                row = replace(row, error=convert(layer, one.form.name, weight))
            except TensorizeError as error:
                raise TensorizeError(f"{target.name}: {error}") from error
        else:
            std = starting_std(target, model)
            layer.reset_parameters(std, generator_for(target.name, base, device))
            row = replace(row, std=std)
    for name, parameter in layer.named_parameters():
        if not is_bias(name):
            parameter.requires_grad_(target.parameter.requires_grad)
    bias = target.bias
    if bias is not None:
        with torch.no_grad():
            layer.bias.copy_(bias)
        layer.bias.requires_grad_(bias.requires_grad)
    return layer.train(target.module.training), row


def share_factors(layer: nn.Module, leader: nn.Module) -> None:
    """Give a layer the very factors of another."""
    for name, parameter in list(leader.named_parameters()):
        owner, _, last = name.rpartition(".")
        home = layer.get_submodule(owner)
        if isinstance(home, nn.ParameterList):
            home[int(last)] = parameter
        elif not is_bias(name):
            setattr(home, last, parameter)
    for name, buffer in leader.named_buffers():
        owner, _, last = name.rpartition(".")
        setattr(layer.get_submodule(owner), last, buffer)


def starting_std(target: Target, model: nn.Module) -> float:
    """Root mean square of the dense weight: what the product of the factors gets.

    A weight without values (meta) counts as initialised the way its model says: by
    ``config.initializer_range``, or like a new `nn.Linear` or `nn.Embedding`.

    Raises:
        TensorizeError: The weight has numbers that are not finite.
    """
    weight = target.weight
    if not weight.is_meta:
        std = float(weight.to(torch.float32).square().mean().sqrt())
        if not math.isfinite(std):
            raise TensorizeError(
                f"{target.name} has a dense weight with numbers that are not finite, which say "
                "nothing of how large its factors shall be: initialise it anew, or exclude it"
            )
        return std
    said = getattr(getattr(model, "config", None), "initializer_range", None)
    if isinstance(said, int | float) and said > 0:
        return float(said)
    return 1.0 if target.is_embedding else 1.0 / math.sqrt(3 * target.features[0])
