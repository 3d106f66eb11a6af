"""What structured layers change: operations and their rate, parameters, memory of the states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from outlast.plan.memory.demand import Demand, demand
from outlast.plan.memory.stages import Stage, stage
from outlast.plan.terms.block import half_side
from outlast.plan.terms.held import embedding_parameters
from outlast.tensorize.cost import layer_cost, step_ratio

if TYPE_CHECKING:
    from outlast.plan.cases import Array, Cases
    from outlast.plan.constants import Constants
    from outlast.plan.memory.constants import MemoryConstants
    from outlast.plan.pareto.settings import Settings
    from outlast.plan.transformer import Transformer

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
        divides_inputs: Tensor ranks divide the inputs, else the outputs.
    """

    inputs: int
    outputs: int
    count: int
    expert: bool = False
    divides_inputs: bool = False


@dataclass(frozen=True, slots=True)
class Form:
    """What a form makes of a model.

    Attributes:
        flops_ratio: Operations of the blocks' linear layers over those of the dense ones.
        parameters: Of the whole model.
        share: Parameters of the blocks' linear layers over those of the dense ones.
    """

    flops_ratio: float
    parameters: float
    share: float


def form_of(model: Transformer, settings: Settings) -> Form:
    """Operations and parameters of a model with some settings."""
    return _form(model, settings.tensorize_form, settings.tensorize_rank)


def operations_ratio(model: Transformer, settings: Settings, flops_per_token: float) -> float:
    """Operations of a model with some settings over those of the dense one.

    Args:
        model: What is trained.
        settings: Of the mechanisms.
        flops_per_token: Of the dense model, forward and backward.
    """
    linear = sum(
        (model.experts_per_token / model.experts if layer.expert else 1.0)
        * 6.0
        * layer.count
        * layer.inputs
        * layer.outputs
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
            found.append(Linear(model.hidden, width, into * count, expert))
            found.append(Linear(width, model.hidden, count, expert, divides_inputs=True))
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
    found = np.ones((len(layouts), len(settings)))
    known: dict[tuple[str, float], Array] = {}
    for column, setting in enumerate(settings):
        key = setting.tensorize_form, setting.tensorize_rank
        if setting.tensorize_form == "dense":
            continue
        if key not in known:
            flops = form_of(model, setting).flops_ratio
            efficiency = product_efficiency(model, layouts, constants, setting)
            # Few layouts differ in tokens and ranks, so few numbers are different.
            levels, places = np.unique(efficiency, return_inverse=True)
            ratios = [
                step_ratio(linear_share=1.0, flops_ratio=flops, efficiency=float(level))
                for level in levels
            ]
            known[key] = np.array(ratios)[places.ravel()]
        found[:, column] = known[key]
    return found


def product_efficiency(
    model: Transformer, layouts: Cases, constants: Constants, settings: Settings
) -> Array:
    """(layouts,) rate of the form's products over that of the dense ones, at most 1."""
    form, rank_share = settings.tensorize_form, settings.tensorize_rank
    half = half_side(layouts, constants, layouts.matmul_flop_per_s)
    tokens = layouts.micro_batch * layouts.sequence / layouts.context
    dense = structured = operations = np.zeros(1)
    for layer in linear_layers(model):
        used = model.experts_per_token / model.experts if layer.expert else 1.0
        rows = tokens * used * layouts.expert if layer.expert else tokens
        divided = layer.inputs if layer.divides_inputs else layer.outputs
        whole = layer.outputs if layer.divides_inputs else layer.inputs
        shortest = np.maximum(np.minimum(np.minimum(rows, whole), divided / layouts.tensor), 1.0)
        narrow = np.minimum(shortest, _width(form, rank_share, layer))
        work = used * layer.count * layer.inputs * layer.outputs
        reduced = work * _flops_ratio(form, rank_share, layer)
        dense = dense + work * (1.0 + half / shortest)
        structured = structured + reduced * (1.0 + half / narrow)
        operations = operations + work
    flops = _form(model, form, rank_share).flops_ratio
    efficiency = np.minimum(flops * dense / structured, 1.0)
    return np.array(np.broadcast_to(efficiency, (len(layouts),)))


@dataclass(frozen=True, slots=True)
class Room:
    """Memory of candidates on their fullest stage, each (candidates,).

    Attributes:
        reserved_bytes: What the allocator holds.
        pressing: What a run needs and cannot give back, over what the allocator can get: above 1
            it runs out of memory.
        headroom: Share of the memory that nothing is reserved of.
    """

    reserved_bytes: Array
    pressing: Array
    headroom: Array


def room(
    layouts: Cases, constants: MemoryConstants, layout: np.ndarray, shares: Array | None
) -> Room:
    """Memory of candidates, that of the states less what structured layers do without.

    Args:
        layouts: (layouts,).
        constants: Of the memory model.
        layout: (candidates,) index into `layouts`.
        shares: (candidates,) parameters of the linear layers over those of the dense ones; None
            where all are dense.
    """
    first = stage(layouts, "first")
    stages = [first]
    if (layouts.pipeline > 1.0).any():
        stages.append(stage(layouts, "last"))
    found = []
    for item in stages:
        need = demand(layouts, constants, item)
        spared = 0.0 if shares is None else _spread(block_state_bytes(layouts, need, item), layout)
        less = 0.0 if shares is None else spared * (1.0 - shares)
        usable = _spread(need.usable * np.ones(len(layouts)), layout)
        found.append(
            (
                _spread(need.reserved * np.ones(len(layouts)), layout) - less,
                (_spread(need.pressing * np.ones(len(layouts)), layout) - less) / usable,
                _spread(need.wanted * np.ones(len(layouts)), layout) - less,
            )
        )
    reserved, pressing, wanted = (np.max(values, axis=0) for values in zip(*found, strict=True))
    memory = _spread(layouts.memory_bytes * np.ones(len(layouts)), layout)
    return Room(reserved, pressing, 1.0 - wanted / memory)


def block_state_bytes(cases: Cases, need: Demand, of: Stage) -> Array:
    """(cases,) weights, gradients and optimizer states of a stage's blocks, on one rank."""
    tables = of.ends * embedding_parameters(cases) / cases.tensor
    share = 1.0 - np.minimum(tables / np.maximum(need.states.parameters, 1.0), 1.0)
    held: Array = need.states.lasting * share * np.ones(len(cases))
    return held


def _spread(values: Array, layout: np.ndarray) -> Array:
    rows: Array = values[layout]
    return rows


@cache
def _form(model: Transformer, form: str, rank_share: float) -> Form:
    whole = float(model.parameters)
    if form == "dense":
        return Form(1.0, whole, 1.0)
    dense = structured = flops = operations = 0.0
    for layer in linear_layers(model):
        size = layer.inputs * layer.outputs
        used = model.experts_per_token / model.experts if layer.expert else 1.0
        dense += layer.count * size
        structured += layer.count * _parameters(form, rank_share, layer)
        operations += used * layer.count * size
        flops += used * layer.count * size * _flops_ratio(form, rank_share, layer)
    return Form(flops / operations, whole - dense + structured, structured / dense)


def _rank(rank_share: float, layer: Linear) -> int:
    return max(round(rank_share * min(layer.inputs, layer.outputs)), 1)


def _parameters(form: str, rank_share: float, layer: Linear) -> float:
    return layer_cost(form, layer.inputs, layer.outputs, _rank(rank_share, layer)).parameters


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
