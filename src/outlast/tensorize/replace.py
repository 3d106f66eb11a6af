"""Replacing the linear layers of a model in place.

Three passes, of which the first two change nothing: choose and describe what each layer would
become, on the meta device; make the new layers; put them in. So a model is either replaced as asked
or as it was.
"""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from outlast.distributed.group import Group
from outlast.errors import TensorizeError
from outlast.tensorize.accounting import forward_flops
from outlast.tensorize.forms.embedding import StructuredEmbedding, TiedHead
from outlast.tensorize.forms.low_rank import Gate, link_by_name
from outlast.tensorize.layer import StructuredLayer
from outlast.tensorize.network import Network
from outlast.tensorize.planner.choose import (
    FORMS_WITHOUT_PLANS,
    PRICED_DEVICES,
    basis_of,
    extra_seconds,
    plan_for,
)
from outlast.tensorize.planner.measure import calibrate as calibrate_machine
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
from outlast.tensorize.table import (
    KeptLayer,
    Replacement,
    Replacements,
    check_convertible,
    convert,
    draw,
    generator_for,
    seed_of,
    starting_std,
)


def is_bias(name: str) -> bool:
    """Return whether a parameter is a bias, by its name."""
    return name.rpartition(".")[2] == "bias"


def share_factors(layer: nn.Module, leader: nn.Module) -> None:
    """Give a layer the very factors of another."""
    for name, parameter in list(leader.named_parameters()):
        if is_bias(name):
            continue
        owner, _, last = name.rpartition(".")
        home = layer.get_submodule(owner)
        if isinstance(home, nn.ParameterList):
            home[int(last)] = parameter
        else:
            setattr(home, last, parameter)
    for name, buffer in leader.named_buffers():
        owner, _, last = name.rpartition(".")
        setattr(layer.get_submodule(owner), last, buffer)


def put_in(model: nn.Module, target: Target, module: nn.Module) -> None:
    """Put a layer where another one is, under all its names."""
    for name in target.names:
        owner, _, last = name.rpartition(".")
        parent = model.get_submodule(owner)
        setattr(parent, last, module)
        if isinstance(parent, nn.TransformerEncoderLayer):
            # Its fused kernel for inference, which reads dense weights, is for these two alone.
            parent.activation_relu_or_gelu = 0


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
    shared_out: dict[str, int]
    timed: bool


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
    slower. Whatever stays dense has a row in the result, parameters of other modules (experts,
    ``in_proj_weight``, convolutions) among them; what is slower, and large matrices that match but
    cannot be replaced, are warned of as well. New layers keep device, dtype, bias, `requires_grad`
    and training mode of the old. Layers that share a weight share factors; a head that is tied to
    an embedding becomes a `TiedHead`.

    Call it before the optimizer, DDP, `fully_shard` and `torch.compile`, and on all ranks alike:
    with the same generator state they get the same values, whatever the order of layers. What is
    predicted to be slower depends on the machine's table of costs (`planner.calibrate`).

    Args:
        model: Any module.
        form: ``low_rank``, ``cola``, ``lax``, ``tt``, ``ttm``, ``btt``, ``monarch``, ``tucker``,
            ``cp`` or ``sltrain``.
        rank: An integer (of ``monarch`` the number of blocks); a fraction, with two factors of the
            narrower side, else of the dense parameters; a budget for every layer such as
            ``"parameters=0.3"``, ``"flops=0.3"`` or ``"error=0.1"``; or a `Budget` for all.
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
        activation: Between the factors of ``cola`` (None: SiLU) and ``lax`` (None: nothing).
        cores: Modes on each side, of forms that have them.
        density: Share of the weight's entries in the sparse part of ``sltrain``; None: 0.03.
        gate: Of the latent of the layer before, for ``lax``: ``identity``, ``scalar`` or
            ``vector``.
        calibrate: Measure this machine first if that was not done yet (about ten seconds), and time
            the best plans and the dense layer for every shape (a few seconds each, with a way
            back), so that what stays dense is what was timed to be slower. Without it, or for
            decoding (``learns=False``), ``planner.measure.tune_model(model, tokens)`` times the
            plans of a model that was tensorized, with a callback for progress; later runs on this
            machine know the results. Of several ranks one must do it first, for two that time the
            same may decide differently.
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
    settings = _Settings(init, multiple, tokens, dtype, {}, calibrate)
    if isinstance(rank, Budget) and init == "from_dense" and form == "low_rank":
        settings = replace(settings, shared_out=_shared_out(selection, rank, settings))
    if calibrate:
        for kind, device in {_computed(target, dtype) for target, _ in selection.chosen}:
            calibrate_machine(kind, device)
    planned = _planned(selection, settings, force)
    refused = {one.target.name: one.against for one in planned if one.against}
    if collective:
        check_ranks_agree({one.target.name: one.said() for one in planned})
    made = _gaining(planned)
    kept = _kept(model, selection, {one.target.name for one in made}, refused)
    before = _numbers(model)
    base = seed_of(generator)
    modules: dict[str, nn.Module] = {}
    rows = []
    for one in made:
        modules[one.target.name], row = _made(one, model, modules, init, base)
        rows.append(row)
    _put_in(model, made, modules, gate)
    basis = basis_of(*_computed(made[0].target, dtype), timed=calibrate)
    found = Replacements(
        tuple(rows), refused, modules, _numbers(model), before, tokens, kept, basis
    )
    frozen = [one.target.name for one in made if init == "scratch" and _is_frozen(one.target)]
    random = (
        f"{frozen[0]} and {len(frozen) - 1} other layers are frozen, and their factors random"
        if frozen
        else ""
    )
    for warning in (_slow(found), _untouched(found, match, selection), random):
        if warning:
            warnings.warn(warning, stacklevel=2)
    return found


def _gaining(planned: Sequence[_Planned]) -> list[_Planned]:
    """Those that nothing speaks against.

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
    return made


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


def _is_frozen(target: Target) -> bool:
    return not target.parameter.requires_grad


def _computed(target: Target, dtype: torch.dtype | None) -> tuple[torch.dtype, torch.device]:
    """Type and device of a layer's activations."""
    device = target.weight.device
    if device.type == "meta":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return dtype or target.weight.dtype, device


def _multiple(target: Target, settings: _Settings) -> int:
    if settings.multiple is not None:
        return settings.multiple
    kind, _ = _computed(target, settings.dtype)
    return MULTIPLE_OF_PRECISION.get(str(kind).removeprefix("torch."), 1)


def _shared_out(selection: Selection, budget: Budget, settings: _Settings) -> dict[str, int]:
    """Ranks by the spectra of all layers, each weight once."""
    leaders: dict[int, Target] = {}
    for target, _ in selection.chosen:
        if target.name != selection.likely_head:
            leaders.setdefault(id(target.parameter), target)
    return shared_ranks(
        {target.name: target.weight for target in leaders.values()},
        budget.share,
        {target.name: _multiple(target, settings) for target in leaders.values()},
    )


def _planned(selection: Selection, settings: _Settings, force: bool) -> list[_Planned]:
    """Describe all layers.

    Raises:
        TensorizeError: One cannot be replaced as asked.
    """
    leaders: dict[int, _Planned] = {}
    found = []
    # Embeddings first: a head that shares the weight of one takes its factors from it.
    for target, choice in sorted(selection.chosen, key=lambda pair: not pair[0].is_embedding):
        check_target(target)
        leader = leaders.get(id(target.parameter))
        if leader is not None and leader.target.is_embedding and not target.is_embedding:
            one = _tied(target, leader, settings, force)
        elif leader is not None:
            row = replace(leader.row, name=target.name, parameters=0, dense_parameters=0)
            one = replace(leader, target=target, row=row, leader=leader.target.name)
        else:
            one = _described(target, choice, settings, force)
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


def _tied(target: Target, leader: _Planned, settings: _Settings, force: bool) -> _Planned:
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
    against = "" if force else _too_slow(row, target, settings)
    return replace(leader, target=target, row=row, leader=leader.target.name, against=against)


def _too_slow(row: Replacement, target: Target, settings: _Settings) -> str:
    """Why a layer should stay dense that is predicted to be slower; empty: it should not."""
    if row.speed is None or row.speed >= 1.0 or row.form == "sltrain":
        return ""
    into, out = target.features
    return (
        f"{row.form} at rank {row.rank} is predicted to run at {row.speed:.2f}x the speed of "
        f"dense ({into} x {out}, {settings.tokens} tokens)"
    )


def _described(target: Target, choice: Choice, settings: _Settings, force: bool) -> _Planned:
    """Build the layer on the meta device and look what it costs."""
    form = form_named(choice.form)
    if settings.init == "from_dense":
        check_convertible(form.name)
    into, out = target.features
    shape = LayerShape(form, into, out, choice.cores, _multiple(target, settings), choice.density)
    weight = target.weight if settings.init == "from_dense" else None
    if weight is not None and target.is_embedding:
        weight = weight.t()
    row = Replacement(target.name, form.name, 0, 0, into * out, 0.0, 0.0)
    try:
        rank = settings.shared_out.get(target.name)
        resolved = resolved_rank(choice.rank, shape, weight) if rank is None else rank
        layer = _build(target, choice, form, resolved)
    except TensorizeError as error:
        if target.is_embedding:
            # It is here because it was named.
            raise TensorizeError(f"{target.name}: {error}") from error
        return _Planned(target, choice, form, 0, row, against=str(error), impossible=True)
    parameters = sum(
        parameter.numel() for name, parameter in layer.named_parameters() if not is_bias(name)
    )
    dense = into * out
    flops, speed = 0.0, None
    if not target.is_embedding:
        network: Any = layer.network
        flops, speed = _work(target, form, layer, network, settings)
    shown: Ranks = layer.blocks if form.blocks else layer.rank  # type: ignore[assignment]
    row = Replacement(
        target.name,
        form.name,
        shown,
        parameters,
        dense,
        flops,
        0.0 if target.is_embedding else 2.0 * dense,
        speed,
    )
    against = ""
    if not force and parameters >= dense:
        against = f"{form.name} at rank {row.rank} has {parameters} parameters, dense {dense}"
    elif not force and settings.init == "scratch" and _is_frozen(target):
        against = (
            "is frozen, so its new random factors would never be trained: use init = 'from_dense'"
        )
    elif not force:
        against = _too_slow(row, target, settings)
    return _Planned(target, choice, form, resolved, row, against=against)


def _work(
    target: Target, form: Form, layer: nn.Module, network: Network, settings: _Settings
) -> tuple[float, float | None]:
    """Forward operations of a linear layer per token, and its speed over the dense one's."""
    kind, device = _computed(target, settings.dtype)
    speed = None
    if settings.timed:
        from outlast.tensorize.planner.measure import timed_speed, tune

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
    target = one.target
    device = target.weight.device
    leader: Any = modules.get(one.leader)
    tied = isinstance(leader, StructuredEmbedding) and not target.is_embedding
    layer: Any
    if tied:
        options: dict[str, Any] = {"device": device, "dtype": target.weight.dtype}
        layer = TiedHead(leader, bias=target.bias is not None, **options)
    else:
        # Made on meta, so that constructors draw no numbers.
        layer = _build(target, one.choice, one.form, one.rank).to_empty(device=device)
    row = one.row
    if tied:
        pass
    elif one.leader:
        share_factors(layer, leader)
    elif init == "from_dense":
        weight = target.weight.t() if target.is_embedding else target.weight
        try:
            row = replace(row, error=convert(layer, one.form.name, weight))
        except TensorizeError as error:
            raise TensorizeError(f"{target.name}: {error}") from error
    else:
        std = starting_std(target, model)
        if not math.isfinite(std):
            raise TensorizeError(
                f"{target.name} has a dense weight with numbers that are not finite, which say "
                "nothing of how large its factors shall be: initialise it anew, or exclude it"
            )
        draw(layer, std, generator_for(target.name, base, device))
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


def _put_in(
    model: nn.Module, made: Sequence[_Planned], modules: dict[str, nn.Module], gate: Gate
) -> None:
    for one in made:
        put_in(model, one.target, modules[one.target.name])
    crossing = [modules[one.target.name] for one in made if one.form.name == "lax"]
    if crossing:
        link_by_name(model, gate, among=crossing)
