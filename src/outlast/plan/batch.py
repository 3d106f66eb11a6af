"""Many runs at once: numbers that formulas read, one array each, and what ranks and stages hold."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outlast.errors import PlanError
from outlast.plan.facts import facts

if TYPE_CHECKING:
    from outlast.plan.cluster import Cluster
    from outlast.plan.configuration import Configuration
    from outlast.plan.transformer import Transformer


Array: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]
SHARDING = {"none": 0, "optimizer": 1, "gradients": 2, "parameters": 3}
RECOMPUTE = {"none": 0, "attention": 1, "full": 2}
WEIGHT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cases:
    """Fields have shape (cases,), or (1,) where all cases agree: they broadcast.

    Attributes:
        layers: Blocks; the next fields are of `Transformer`, with widths in features.
        attention_parameters: Of one block.
        data: Replicas; the next fields are of `Configuration`.
        zero_bubble: 1 for that schedule, else 0; `gpipe` likewise.
        by_cost: 1 where stages are balanced by cost, else 0.
        sharding: 0 to 3, as ZeRO counts.
        sharding_ranks: Ranks of one sharding group.
        recompute: 0 none, 1 attention, 2 full.
        value_bytes: Of an activation or a weight in a product.
        half: 1 where an optimizer keeps fp32 copies of weights beside those of the products.
        quantized: 1 for fp8.
        muon: 1 where hidden matrices are updated by Muon, else 0.
        micro_batches: Passes of one replica in a step.
        peak_flop_per_s: Of the products' precision; the next fields are of `Cluster`.
        processor: 1 where devices are shares of a node's processors, whose threads compute and
            start kernels in turn.
        cores: Of a node, for each device; at least 1.
        fp32_flop_per_s: Best fp32 product.
        newton_flop_per_s: Best bf16 product, in which Muon computes whatever the run's precision.
        devices: Accelerators of the run.
    """

    layers: Array
    hidden: Array
    heads: Array
    query_width: Array
    kv_width: Array
    attention_parameters: Array
    intermediate: Array
    matrices: Array
    vocabulary: Array
    tied: Array
    mixture_layers: Array
    experts: Array
    experts_per_token: Array
    expert_intermediate: Array
    shared_intermediate: Array

    data: Array
    tensor: Array
    sequence_parallel: Array
    context: Array
    pipeline: Array
    stages_per_rank: Array
    zero_bubble: Array
    gpipe: Array
    by_cost: Array
    expert: Array
    sharding: Array
    sharding_ranks: Array
    sequence: Array
    micro_batch: Array
    batch: Array
    micro_batches: Array
    recompute: Array
    value_bytes: Array
    half: Array
    quantized: Array
    gradient_bytes: Array
    fused_attention: Array
    loss_bytes: Array
    muon: Array

    devices: Array
    devices_per_node: Array
    fast_domain: Array
    peak_flop_per_s: Array
    matmul_flop_per_s: Array
    memory_bytes: Array
    memory_bytes_per_s: Array
    fast_bytes_per_s: Array
    fabric_bytes_per_s: Array
    fabric_latency_seconds: Array
    processor: Array
    cores: Array
    fp32_flop_per_s: Array
    newton_flop_per_s: Array

    def __len__(self) -> int:
        return int(max(getattr(self, field.name).size for field in fields(self)))

    @property
    def rank_tokens(self) -> Array:
        """Tokens of one micro-batch on one rank."""
        return np.asarray(self.micro_batch * self.sequence / self.context)

    @property
    def mixture(self) -> Array:
        """Share of the blocks that have routed experts."""
        return np.asarray(self.mixture_layers / self.layers)

    @property
    def active_width(self) -> Array:
        """Inner features of a mean block's feed-forward part that a token goes through."""
        routed = self.experts_per_token * self.expert_intermediate + self.shared_intermediate
        return np.asarray((1.0 - self.mixture) * self.intermediate + self.mixture * routed)

    @property
    def shards(self) -> Array:
        """Ranks of one sharding group, with the context ranks that hold the same weights."""
        return np.asarray(self.sharding_ranks * self.context)

    @property
    def gathers_once(self) -> NDArray[np.bool_]:
        """Mask of cases that keep gathered weights and whole gradients for all passes.

        A pipeline would otherwise gather its stage again for every micro-batch (torchtitan, whose
        default is `reshard_after_forward = "default"`).
        """
        return np.asarray((self.pipeline > 1.0) & (self.micro_batches > 1.0))

    def taken(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> Cases:
        """The cases of some rows.

        Args:
            rows: (n,) indices, or (cases,) of bool.
        """
        return Cases(
            **{
                field.name: value if value.size == 1 else value[rows]
                for field in fields(self)
                for value in [getattr(self, field.name)]
            }
        )


def once_each(function: Callable[..., Any], *columns: Array) -> Array:
    """(cases, ...) of a function of the numbers of each case, asked once for all that are equal.

    Args:
        function: Of one number of each column, as a float.
        columns: (cases,) each.
    """
    rows, places = np.unique(np.column_stack(columns), axis=0, return_inverse=True)
    return np.array([function(*row) for row in rows.tolist()])[places.ravel()]


def remainder(dividend: Array, divisor: Array) -> Mask:
    """Mask of cases in which a division of whole numbers leaves a remainder."""
    return np.asarray(np.mod(dividend, divisor) != 0.0)


def case(model: Transformer, run: Configuration, cluster: Cluster) -> dict[str, float]:
    """The numbers of one run, by the names of `Cases`.

    Raises:
        PlanError: The cluster says nothing of the precision.
    """
    refuse_unknown_precision(cluster, run.precision)
    products = cluster.matmul_flop_per_s
    derived = {
        "zero_bubble": run.schedule == "zero_bubble",
        "gpipe": run.schedule == "gpipe",
        "by_cost": run.balance == "cost",
        "sharding": SHARDING[run.sharding],
        "sharding_ranks": run.sharding_ranks or run.data,
        "recompute": RECOMPUTE[run.recompute],
        "value_bytes": WEIGHT_BYTES[run.precision],
        "half": run.precision != "fp32",
        "quantized": run.precision == "fp8",
        "muon": run.optimizer == "muon",
        "peak_flop_per_s": cluster.peak_flop_per_s[run.precision],
        "matmul_flop_per_s": products[run.precision],
        "cores": max(cluster.host_cores / cluster.devices_per_node, 1.0),
        "fp32_flop_per_s": products.get("fp32", min(products.values())),
        "newton_flop_per_s": products.get("bf16", min(products.values())),
    }
    # All others have one name here and there; devices are the run's.
    plain = [item.name for item in fields(Cases) if item.name not in derived]
    owners = (model, run, cluster)
    return derived | {
        name: next(getattr(owner, name) for owner in owners if hasattr(owner, name))
        for name in plain
    }


def refuse_unknown_precision(cluster: Cluster, precision: str) -> None:
    """Refuse a precision whose rates nobody knows.

    Raises:
        PlanError: The cluster says nothing of it.
    """
    for name in ("peak_flop_per_s", "matmul_flop_per_s"):
        known = getattr(cluster, name)
        if precision not in known:
            raise PlanError(
                f"precision = {precision!r}: {name} of {cluster.name} is known for "
                f"{', '.join(known) or 'nothing'} only; give it in the cluster file"
            )


def cases(runs: Sequence[tuple[Transformer, Configuration, Cluster]]) -> Cases:
    """The numbers of several runs.

    Raises:
        PlanError: No run, or what `case` raises.
    """
    if not runs:
        raise PlanError("there is no run to predict: give at least one configuration")
    rows = [case(*run) for run in runs]
    return Cases(**{name: np.array([float(row[name]) for row in rows]) for name in rows[0]})


@dataclass(frozen=True, slots=True)
class Part:
    """A term of many cases; `estimate.Term` is the same of one.

    Attributes:
        name: In the field's words.
        values: (cases,) or (1,), in the unit of the total.
        formula: As a reader would write it down.
        inputs: (cases,) or (1,) each: the values in the formula, by their names in it.
        constants: Names of the constants in the formula.
        source: Paper and equation, or "own".
    """

    name: str
    values: Array
    formula: str
    inputs: Mapping[str, Array] = field(default_factory=dict)
    constants: tuple[str, ...] = ()
    source: str = "own"


def total_of(parts: Iterable[Part], count: int, names: Container[str] | None = None) -> Array:
    """(count,) sum of the values of parts, or of those of some names."""
    total = np.zeros(count)
    for part in parts:
        if names is None or part.name in names:
            total = total + part.values
    return total


class Text(NamedTuple):
    """Text that `explain` prints beside a term's value."""

    formula: str
    constants: tuple[str, ...] = ()
    source: str = "own"
    inputs: tuple[str, ...] = ()

    def part(self, name: str, values: Array, inputs: Mapping[str, Array]) -> Part:
        """The term of many cases beside which it is printed."""
        return Part(name, values, self.formula, inputs, self.constants, self.source)


def texts(figure: str) -> dict[str, Text]:
    """Texts of the terms of a figure, by their names."""
    return {
        name: Text(
            table["formula"],
            tuple(table.get("constants", ())),
            table.get("source", "own"),
            tuple(table.get("inputs", ())),
        )
        for name, table in facts("terms")[figure].items()
    }


_WHOLE = 0.05
"""Share of a block that is not moved to another stage."""


def block_parameters(cases: Cases) -> Array:
    """Of an average block, all its experts counted, on all ranks together."""
    dense = cases.matrices * cases.hidden * cases.intermediate
    routed = cases.experts * cases.matrices * cases.hidden * cases.expert_intermediate
    shared = cases.hidden * (cases.matrices * cases.shared_intermediate + cases.experts)
    mixture = cases.mixture
    return cases.attention_parameters + (1.0 - mixture) * dense + mixture * (routed + shared)


def routed_parameters(cases: Cases) -> Array:
    """Of an average block, those of its routed experts, on all ranks together."""
    routed = cases.experts * cases.matrices * cases.hidden * cases.expert_intermediate
    return cases.mixture * routed


def embedding_parameters(cases: Cases) -> Array:
    """Of the embedding; the head has as many."""
    return cases.vocabulary * cases.hidden


def most_blocks(cases: Cases, head_blocks: Array) -> Array:
    """Blocks of the stage that has most of them.

    Args:
        cases: (cases,).
        head_blocks: (cases,) what the head costs, in blocks: stages that are balanced by cost
            leave room for it.
    """
    even = np.ceil(cases.layers / cases.pipeline)
    fair = np.ceil((cases.layers + head_blocks) / cases.pipeline - _WHOLE)
    return np.where(cases.by_cost > 0.0, np.minimum(fair, cases.layers), even)


def last_blocks(cases: Cases, head_blocks: Array) -> Array:
    """Blocks of the stage that has the head.

    A stage that is balanced by cost begins with the block after the one at which the cost of all
    before reaches its share of the whole, embedding and norms for nothing (nanotron's
    `build_model`).

    Args:
        cases: (cases,).
        head_blocks: As of `most_blocks`.
    """
    even = np.floor(cases.layers / cases.pipeline)
    before = (cases.layers + head_blocks) * (cases.pipeline - 1.0) / cases.pipeline
    by_cost = np.maximum(cases.layers - np.ceil(before - _WHOLE), 0.0)
    return np.where(cases.by_cost > 0.0, by_cost, even)


def stage_parameters(cases: Cases, blocks: Array, ends: Array) -> Array:
    """Parameters of one rank of a stage, before any sharding among data-parallel ranks.

    Args:
        cases: (cases,).
        blocks: (cases,) blocks of the stage.
        ends: (cases,) how many of embedding and head it has.
    """
    routed = routed_parameters(cases)
    others = block_parameters(cases) - routed
    held = blocks * (others + routed / cases.expert) + ends * embedding_parameters(cases)
    return held / cases.tensor


Place: TypeAlias = Literal["first", "middle", "last"]
PLACES: tuple[Place, ...] = ("first", "middle", "last")


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of each case; fields have shape (cases,) or (1,).

    Attributes:
        blocks: How many it has.
        ends: How many of embedding and head it has; one where they share weights.
        head: 1 where it computes logits.
        in_flight: Micro-batches whose activations it keeps at once.
    """

    blocks: Array
    ends: Array
    head: Array
    in_flight: Array


def in_flight(cases: Cases, index: Array) -> Array:
    """Micro-batches whose activations a stage keeps at once.

    1F1B keeps `p - i` on stage i (Narayanan et al. 2021, 2104.04473, section 2.2); the interleaved
    schedule starts `2 (p - i - 1) + (v - 1) p + 1` chunks of 1 / v before its first backward pass,
    on the first stage `p (1 + (p - 1) / (p v))` (Korthikanti et al. 2022, 2205.05198, section
    4.2.3); GPipe keeps all; the zero-bubble schedule ZB-H1 as many as 1F1B (2401.10241).

    Args:
        cases: (cases,).
        index: (cases,) or (1,) number of the stage, from 0.
    """
    ranks, chunks = cases.pipeline, cases.stages_per_rank
    after = ranks - index
    started = np.where(
        chunks > 1.0, (2.0 * (after - 1.0) + (chunks - 1.0) * ranks + 1.0) / chunks, after
    )
    started = np.where(cases.gpipe > 0.0, cases.micro_batches, started)
    return np.minimum(started, cases.micro_batches)


def head_blocks(cases: Cases) -> Array:
    """Cost of the head in blocks, where stages are balanced by cost."""
    return cases.vocabulary / (4.0 * cases.query_width + cases.matrices * cases.active_width)


def stage(cases: Cases, place: Place) -> Stage:
    """The first, the second, or the last stage; a pipeline without one there has the first.

    The second keeps the most activations of all stages between the ends.

    Args:
        cases: (cases,).
        place: Which.
    """
    piped = cases.pipeline > 1.0
    head, whole = head_blocks(cases), np.where(cases.tied > 0.0, 1.0, 2.0)
    most = np.where(piped, most_blocks(cases, head), cases.layers)
    last = np.where(piped, last_blocks(cases, head), cases.layers)
    ends = np.where(piped, 1.0, whole)
    first = Stage(most, ends, np.where(piped, 0.0, 1.0), in_flight(cases, np.zeros(1)))
    if place == "first":
        return first
    if place == "last":
        return Stage(last, ends, np.ones(1), in_flight(cases, cases.pipeline - 1.0))
    between = cases.pipeline > 2.0
    inner = np.clip(
        (cases.layers - most - last) / np.where(between, cases.pipeline - 2.0, 1.0), 0.0, most
    )
    return Stage(
        np.where(between, inner, first.blocks),
        np.where(between, 0.0, first.ends),
        np.where(between, 0.0, first.head),
        np.where(between, in_flight(cases, np.ones(1)), first.in_flight),
    )


def stages_of(case: Cases) -> tuple[Stage, ...]:
    """All stages of one case, the first one first.

    Args:
        case: (1,).
    """
    ranks = int(case.pipeline[0])
    middle = stage(case, "middle")
    inner = [
        replace(middle, in_flight=in_flight(case, np.full(1, float(index))))
        for index in range(1, ranks - 1)
    ]
    last = [stage(case, "last")] if ranks > 1 else []
    return (stage(case, "first"), *inner, *last)
