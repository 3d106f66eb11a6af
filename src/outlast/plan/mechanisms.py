"""Effect of mechanisms on a step: structured layers, guard, gradient coding, clocks.

Prices come from the mechanisms' own `cost.py`; here they are asked for once per setting, or with
arrays, and spread over the candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from outlast.coding.cost import CostModel, coding_cost, straggler_factor
from outlast.errors import PlanError
from outlast.guard.cost import LIGHT_SHARE, LinearShape, check_seconds, covered_share
from outlast.plan.batch import Part, once_each, texts, total_of
from outlast.plan.energy import activity_at, clock_factors
from outlast.plan.step_time import half_side
from outlast.tensorize.cost import layer_cost, step_ratio

if TYPE_CHECKING:
    from outlast.guard.policy import Level
    from outlast.plan.batch import Array, Cases
    from outlast.plan.configuration import Settings
    from outlast.plan.constants import Constants
    from outlast.plan.model import Context
    from outlast.plan.space import Block
    from outlast.plan.transformer import Transformer


HELD = "held to the best published MFU"
TEXTS = texts("mechanisms")
WHOLE_PRODUCTS = ("sltrain",)
"""Forms that rebuild the dense weight, so that their products are as wide as the dense ones."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Some equal linear layers of a model.

    Attributes:
        inputs: Features in.
        outputs: Features out.
        count: How many, each expert by itself.
        expert: They are routed experts.
        used: Share of them that a token goes through.
        divides_inputs: Tensor ranks divide the inputs, else the outputs.
    """

    inputs: int
    outputs: int
    count: int
    expert: bool = False
    used: float = 1.0
    divides_inputs: bool = False


@dataclass(frozen=True, slots=True)
class Form:
    """Effect of a structured form on a model.

    Attributes:
        flops_ratio: Operations of the blocks' linear layers over those of the dense ones.
        parameters: Of the whole model.
        share: Parameters of the blocks' linear layers over those of the dense ones.
    """

    flops_ratio: float
    parameters: float
    share: float


def operations_ratio(model: Transformer, settings: Settings, flops_per_token: Any) -> Any:
    """Operations of a model with some settings over those of the dense one.

    Args:
        model: What is trained.
        settings: Of the mechanisms.
        flops_per_token: Of the dense model, forward and backward.
    """
    linear = sum(
        layer.used * 6.0 * layer.count * layer.inputs * layer.outputs
        for layer in linear_layers(model)
    )
    return 1.0 - linear / flops_per_token * (1.0 - form_of(model, settings).flops_ratio)


@cache
def linear_layers(model: Transformer) -> tuple[Linear, ...]:
    """The linear layers of all blocks, without the router of a mixture."""
    into = model.matrices - 1
    found = [
        Linear(model.hidden, model.query_width + 2 * model.kv_width, model.layers),
        Linear(model.query_width, model.hidden, model.layers, divides_inputs=True),
    ]
    for width, count, expert in (
        (model.intermediate, model.plain_layers, False),
        (model.expert_intermediate, model.mixture_layers * model.experts, True),
        (model.shared_intermediate, model.mixture_layers, False),
    ):
        if width and count:
            used = model.experts_per_token / model.experts if expert else 1.0
            found.append(Linear(model.hidden, width, into * count, expert, used))
            found.append(Linear(width, model.hidden, count, expert, used, divides_inputs=True))
    return tuple(found)


def time_ratios(
    model: Transformer, layouts: Cases, constants: Constants, settings: Sequence[Settings]
) -> Array:
    """Time of the blocks' products over that of the dense ones.

    Composes `outlast.tensorize.cost.step_ratio`. Its efficiency is that of the time model: a
    product whose shortest side is s reaches s / (s + s_half) of the best rate, and the features
    between two factors are fewer than those on their sides.

    Args:
        model: What is trained.
        layouts: (layouts,).
        constants: Of the time model.
        settings: Of the mechanisms.

    Returns:
        (layouts, settings), 1 for dense layers and never below the ratio of the operations.
    """
    known: dict[tuple[str, float], Array] = {("dense", 0.0): np.ones(len(layouts))}
    keys = [(setting.tensorize_form, setting.tensorize_rank) for setting in settings]
    for key, setting in zip(keys, settings, strict=True):
        if key in known:
            continue
        flops = form_of(model, setting).flops_ratio
        efficiency = product_efficiency(model, layouts, constants, setting)
        # Few layouts differ in tokens and ranks, so few numbers are different.
        ratio = partial(step_ratio, linear_share=1.0, flops_ratio=flops)
        known[key] = once_each(lambda level, of=ratio: of(efficiency=level), efficiency)
    return np.stack([known[key] for key in keys], axis=-1)


def product_efficiency(
    model: Transformer, layouts: Cases, constants: Constants, settings: Settings
) -> Array:
    """(layouts,) rate of the form's products over that of the dense ones, at most 1."""
    form, rank_share = settings.tensorize_form, settings.tensorize_rank
    half = half_side(layouts, constants, layouts.matmul_flop_per_s)
    tokens = layouts.rank_tokens
    dense = structured = operations = np.zeros(1)
    for layer in linear_layers(model):
        rows = tokens * layer.used * layouts.expert if layer.expert else tokens
        divided = layer.inputs if layer.divides_inputs else layer.outputs
        whole = layer.outputs if layer.divides_inputs else layer.inputs
        shortest = np.maximum(np.minimum(np.minimum(rows, whole), divided / layouts.tensor), 1.0)
        narrow = np.minimum(shortest, _width(form, rank_share, layer))
        work = layer.used * layer.count * layer.inputs * layer.outputs
        reduced = work * _flops_ratio(form, rank_share, layer)
        dense = dense + work * (1.0 + half / shortest)
        structured = structured + reduced * (1.0 + half / narrow)
        operations = operations + work
    flops = form_of(model, settings).flops_ratio
    efficiency = np.minimum(flops * dense / structured, 1.0)
    return np.array(np.broadcast_to(efficiency, (len(layouts),)))


@cache
def form_of(model: Transformer, settings: Settings) -> Form:
    """Operations and parameters of a model with some settings."""
    form, rank_share = settings.tensorize_form, settings.tensorize_rank
    whole = float(model.parameters)
    if form == "dense":
        return Form(1.0, whole, 1.0)
    dense = structured = flops = operations = 0.0
    for layer in linear_layers(model):
        size = layer.inputs * layer.outputs
        cost = layer_cost(form, layer.inputs, layer.outputs, _rank(rank_share, layer))
        dense += layer.count * size
        structured += layer.count * cost.parameters
        operations += layer.used * layer.count * size
        flops += layer.used * layer.count * size * _flops_ratio(form, rank_share, layer)
    return Form(flops / operations, whole - dense + structured, structured / dense)


def _rank(rank_share: float, layer: Linear) -> int:
    return max(round(rank_share * min(layer.inputs, layer.outputs)), 1)


@cache
def _flops_ratio(form: str, rank_share: float, layer: Linear) -> float:
    cost = layer_cost(form, layer.inputs, layer.outputs, _rank(rank_share, layer))
    return cost.training_flops_per_token / (6.0 * layer.inputs * layer.outputs)


def _width(form: str, rank_share: float, layer: Linear) -> float:
    """Narrowest side of the products inside a layer."""
    narrow = float(min(layer.inputs, layer.outputs))
    if form in WHOLE_PRODUCTS:
        return narrow
    rank = _rank(rank_share, layer)
    return max(narrow / rank, 1.0) if form == "monarch" else float(rank)


CHECK_SHARE = 0.6
"""Of the memory's peak that a check's pass over a matrix reaches."""
BELOW_LIMIT = 0.98
"""Of its power limit that a busy device draws at most: at the limit it runs below its clock."""
CHUNKS_PER_DECADE = 8.0
"""Seconds of a chunk, or of a step, for which late workers are simulated."""

BUSY = (
    "matrix products",
    "attention",
    "memory-bound operations",
    "head and loss",
    "gradient accumulation",
    "optimizer",
)
"""Terms in which a device computes; in the others it waits for links, hosts or stages."""

BY_PARAMETERS = ("gradient sum", "gathering of weights", "gradient accumulation", "optimizer")
"""Terms that are proportional to the parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step with its mechanisms; arrays have shape (candidates,).

    Attributes:
        parts: Terms in seconds; those of mechanisms may be negative.
        seconds: Their sum.
        busy_seconds: Of it, those in which a device computes.
        clocks: Factors of the clocks on busy seconds and busy watts; None for top clocks.
        guard_overhead: Share that the guard adds.
        guard_coverage: Share of wrong values that it finds.
        coding_ratio: Mean step with a code, its overhead included, to one that waits for
            stragglers.
        coding_overhead: Share that the code adds when nobody straggles.
        straggler_factor: Mean step that waits for stragglers, to one in which there are none, which
            is that of `seconds`.
        parameters: Of the whole model, factors in place of matrices.
    """

    parts: tuple[Part, ...]
    seconds: Array
    busy_seconds: Array
    clocks: tuple[Array, Array] | None
    guard_overhead: Array
    guard_coverage: Array
    coding_ratio: Array
    coding_overhead: Array
    straggler_factor: Array
    parameters: Array


def dense_flops(context: Context, layouts: Cases) -> Array:
    """(cases,) FLOPs of a token, forward and backward, in a model without structured layers."""
    model = context.model
    attention = 12.0 * model.layers * model.query_width * (layouts.sequence - 1.0)
    return np.asarray(model.flops_per_token(1) + attention)


def with_mechanisms(
    context: Context, block: Block, plain: tuple[Part, ...], least: Array | None = None
) -> Step:
    """The terms of a plain step, and what each candidate's settings change.

    Args:
        context: What the candidates share.
        block: The candidates.
        plain: Terms of each layout's step, (layouts,) or (1,).
        least: (layouts,) seconds that no dense step undercuts; structured layers lower them by
            their share of its operations. None: no such limit.
    """
    layouts, count = block.layouts, len(block.layouts)
    settings, setting = block.settings, block.setting
    whole = total_of(plain, count)
    products = total_of(plain, count, ("matrix products",))
    kept = block.by_setting(lambda setting: form_of(context.model, setting).parameters)
    spread = _fewer_parameters(plain, block, kept / float(context.model.parameters))
    structured = np.zeros(len(block))
    if any(setting.tensorize_form != "dense" for setting in settings):
        constants = context.step.constants.constants([context.whose])
        ratios = time_ratios(context.model, layouts, constants, settings)
        structured = products[block.layout] * (ratios[block.layout, setting] - 1.0)
    base = total_of(spread, len(block))
    if least is not None:
        dense, limits = dense_flops(context, layouts), np.broadcast_to(least, (count,))
        shares = [operations_ratio(context.model, setting, dense) for setting in settings]
        lowered = np.stack([limits * share for share in shares], axis=-1)[block.layout, setting]
        missing = np.maximum(lowered - (base + structured), 0.0)
        if missing.any():
            limit = {"seconds at the best published MFU": lowered}
            spread, base = (*spread, TEXTS[HELD].part(HELD, missing, limit)), base + missing
        whole = np.maximum(whole, limits)

    checks, coverage = _guard(layouts, settings)
    checks, coverage = checks[block.layout, setting], coverage[block.layout, setting]
    light = block.by_setting(
        lambda setting: (
            LIGHT_SHARE * (setting.guard == "light") + setting.audit * (setting.guard != "off")
        )
    )
    guarded = checks + light * (base + structured)

    computed = base + structured + guarded
    coding_ratio, claims = _coding(context, block, computed)

    busy = total_of(spread, len(block), BUSY) + structured + guarded
    clocks = _clocks(context, settings, (products / whole)[block.layout], block)
    slowed = np.zeros(len(block)) if clocks is None else busy * (clocks[0] - 1.0)

    extra = {
        "structured layers": structured,
        "guard": guarded,
        "gradient coding": claims,
        "lower clocks": slowed,
    }
    added = (TEXTS[name].part(name, values, {}) for name, values in extra.items() if values.any())
    parts = (*spread, *added)
    return Step(
        parts=parts,
        seconds=total_of(parts, len(block)),
        busy_seconds=busy,
        clocks=clocks,
        guard_overhead=guarded / (base + structured),
        guard_coverage=coverage,
        coding_ratio=coding_ratio,
        coding_overhead=claims / computed,
        straggler_factor=_straggling(context, block, computed),
        parameters=kept,
    )


def _fewer_parameters(plain: Sequence[Part], block: Block, ratio: Array) -> tuple[Part, ...]:
    """Terms of each candidate; those that grow with parameters shrink with them.

    Args:
        plain: Terms of each layout.
        block: The candidates.
        ratio: (candidates,) parameters over those of the dense model.
    """
    fewer, found = bool((ratio != 1.0).any()), []
    for part in plain:
        spread = replace(part, values=block.spread(part.values))
        if fewer and part.name in BY_PARAMETERS:
            spread = replace(
                spread,
                values=spread.values * ratio,
                formula=f"({part.formula}) * parameters / dense parameters",
                inputs={**part.inputs, "parameters / dense parameters": ratio},
            )
        found.append(spread)
    return tuple(found)


def _guard(layouts: Cases, settings: Sequence[Settings]) -> tuple[Array, Array]:
    """(layouts, settings): seconds of checking products in a step, and coverage of the guard.

    A structured layer counts as the dense one, whose checks are the dearer ones.
    """
    count = len(layouts)
    tokens = layouts.rank_tokens
    blocks = layouts.layers / layouts.pipeline
    wide = layouts.intermediate + layouts.experts_per_token * layouts.expert_intermediate
    attention_inputs = layouts.query_width + 2.0 * layouts.kv_width

    def shape(inputs: Array, outputs: Array) -> LinearShape:
        # The guard's formulas only multiply and add sizes, so that these may be arrays.
        sizes: list[Any] = [tokens, inputs, outputs / layouts.tensor, blocks]
        return LinearShape(*sizes)

    shapes = [
        shape(layouts.hidden, attention_inputs),
        shape(layouts.query_width, layouts.hidden),
        shape(layouts.hidden, wide * (layouts.matrices - 1.0)),
        shape(wide, layouts.hidden),
    ]
    # Queries, keys and values go into attention, and as wide as the queries comes out.
    inside = shape(attention_inputs / layouts.tensor, layouts.query_width)
    rate = float(layouts.memory_bytes_per_s.min()) * CHECK_SHARE
    bytes_each, batches = cast("int", layouts.value_bytes), cast("int", layouts.micro_batches)
    checked = {
        level: np.asarray(check_seconds(those, bytes_each, rate, microbatches=batches))
        for level, those in (("linear", shapes), ("full", [*shapes, inside]))
    }
    linear = sum(np.asarray(shape.flop) for shape in shapes)
    attention = 12.0 * tokens * layouts.sequence * layouts.query_width / layouts.tensor * blocks
    seconds, coverages = np.zeros((count, len(settings))), np.zeros((count, len(settings)))
    for column, setting in enumerate(settings):
        level = cast("Level", setting.guard)
        if level not in ("off", "light", "linear", "full"):
            raise PlanError(f"guard = {level!r} is none of off, light, linear, full")
        seconds[:, column] = checked.get(level, 0.0)
        coverages[:, column] = covered_share(level, cast("float", linear), cast("float", attention))
    return seconds, coverages


def _coding(context: Context, block: Block, computed: Array) -> tuple[Array, Array]:
    """(candidates,): ratio of gradient coding, and seconds of its claims in a step.

    Args:
        context: What the candidates share.
        block: The candidates.
        computed: (candidates,) seconds of a step without a code.
    """
    ratio, claims = np.ones(len(block)), np.zeros(len(block))
    copies = block.by_setting(lambda setting: setting.coding_copies)
    if copies.max() == 1:
        return ratio, claims
    data, batches = block.spread(block.layouts.data), block.spread(block.layouts.micro_batches)
    sharded = block.spread(block.layouts.sharding) > 0.0
    # Sharded states go with no code (`possible`), and simulating one takes a millisecond.
    coded = np.flatnonzero((copies > 1) & ~sharded)
    claims[coded] = (
        batches[coded] * CostModel(chunk_seconds=1.0, chunks_per_worker=1).claims_seconds
    )
    if context.delays is not None:
        delays = context.delays

        def step_ratio(holders: int, workers: int, parts: int, seconds: float) -> float:
            costs = CostModel(chunk_seconds=seconds, chunks_per_worker=parts)
            return coding_cost(workers, delays, costs, copies=holders).step_ratio

        held = np.minimum(copies[coded], data[coded])
        chunk = computed[coded] / batches[coded]
        ratio[coded] = _interpolated(step_ratio, (held, data[coded], batches[coded]), chunk)
    return ratio, claims


def _straggling(context: Context, block: Block, computed: Array) -> Array:
    """(candidates,) mean step that waits for the latest replica, to one in which none is late.

    The delays are those of `_coding`, whose ratio is to such a step.

    Args:
        context: What the candidates share.
        block: The candidates.
        computed: (candidates,) seconds of a step in which none is late.

    Raises:
        PlanError: For delays with which a step may never end.
    """
    delays = context.delays
    if delays is None:
        return np.ones(len(block))

    def factor(workers: int, seconds: float) -> float:
        found = straggler_factor(workers, delays, CostModel(seconds, chunks_per_worker=1))
        if not np.isfinite(found):
            raise PlanError(
                f"delays = {delays}: a step without a code never ends with workers that never "
                "begin; give workers that are late, and those that fail as failures of the cluster"
            )
        return found

    return _interpolated(factor, (block.spread(block.layouts.data),), computed)


def _interpolated(value: Callable[..., float], counts: Sequence[Array], seconds: Array) -> Array:
    """(rows,) of a function of counts and seconds, where no row depends on the others.

    It is smooth in the seconds, so it is simulated at `CHUNKS_PER_DECADE` of them and interpolated
    between.
    """
    place = np.log10(seconds) * CHUNKS_PER_DECADE
    below = np.floor(place)

    def at(*row: float) -> float:
        return value(*map(int, row[:-1]), 10.0 ** (row[-1] / CHUNKS_PER_DECADE))

    columns = (*counts, below), (*counts, below + 1.0)
    pairs = [np.concatenate(both) for both in zip(*columns, strict=True)]
    low, high = once_each(at, *pairs).reshape(2, -1)
    return np.asarray(low + (place - below) * (high - low))


def _clocks(
    context: Context, settings: Sequence[Settings], share: Array, block: Block
) -> tuple[Array, Array] | None:
    """(candidates,) factors of the clocks on busy seconds and watts."""
    asked = block.by_setting(lambda setting: setting.clock_mhz)
    if not asked.any():
        return None
    constants, power = context.clocks, context.cluster.power
    if constants is None or power is None:
        raise PlanError(
            f"clock_mhz = {asked.max():g}: what clocks do to {context.cluster.device} is not "
            "known; leave clocks out, or give constants fitted by `outlast energy`"
        )
    top = constants.top_clock_mhz
    drawn = min(power.limit_watts, BELOW_LIMIT * constants.power_limit_watts)
    activity = activity_at(constants, drawn, top)
    # Ten classes of compute share are enough: the factors are smooth in it.
    rounded = np.round(share, 1)
    return clock_factors(constants, activity, np.where(asked > 0.0, asked, top), rounded)
