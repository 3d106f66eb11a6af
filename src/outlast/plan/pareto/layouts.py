"""Layouts as a table: one array per field, crossed axis by axis, with what cannot run dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, cast, get_args

import numpy as np

from outlast.errors import PlanError
from outlast.plan.cases import RECOMPUTE, SHARDING, WEIGHT_BYTES, Cases, case
from outlast.plan.cluster import Cluster
from outlast.plan.configuration import (
    Balance,
    Configuration,
    Precision,
    Recompute,
    Schedule,
    Sharding,
)
from outlast.plan.emit.targets import TARGETS, can_express, problem, unwritten
from outlast.plan.legal import legal
from outlast.plan.pareto.axes import Axes
from outlast.plan.pareto.front import Integers, Mask
from outlast.plan.transformer import Transformer

Table: TypeAlias = dict[str, Integers]

LIMIT = 4_000_000
"""Most candidates of one space: more would take gigabytes."""

WORDS: dict[str, tuple[str, ...]] = {
    "schedule": get_args(Schedule),
    "balance": get_args(Balance),
    "sharding": get_args(Sharding),
    "recompute": get_args(Recompute),
    "precision": get_args(Precision),
}
"""Columns of a table that stand for words, and the words by number."""


def layouts_of(model: Transformer, base: Configuration, axes: Axes) -> Table:
    """(layouts,) of each varied field, without what divisibility alone forbids.

    Args:
        model: What is trained.
        base: Batch and sequence.
        axes: The choices, filled in by `usual`.

    Raises:
        PlanError: There are more than `LIMIT`.
    """
    table: Table = {"devices": np.array(axes.devices, dtype=np.int64)}
    table = _crossed(table, "tensor", axes.tensor)
    table = kept(table, table["devices"] % table["tensor"] == 0)
    table = _crossed(table, "pipeline", axes.pipeline)
    table = kept(table, table["devices"] % (table["tensor"] * table["pipeline"]) == 0)
    table = _crossed(table, "context", axes.context)
    shards = table["tensor"] * table["pipeline"] * table["context"]
    table = kept(table, table["devices"] % shards == 0)
    table["data"] = table["devices"] // (table["tensor"] * table["pipeline"] * table["context"])
    table = kept(table, base.batch % table["data"] == 0)
    table = _crossed(table, "micro_batch", axes.micro_batch)
    table = kept(table, base.batch % (table["data"] * table["micro_batch"]) == 0)
    table = _scheduled(model, base, axes, table)
    table = _sharded(model, axes, table)
    table = _crossed(table, "sequence_parallel", axes.sequence_parallel)
    one = max(axes.sequence_parallel)
    table = kept(table, (table["tensor"] > 1) | (table["sequence_parallel"] == one))
    table = _crossed(table, "recompute", _numbers("recompute", axes.recompute))
    table = _crossed(table, "precision", _numbers("precision", axes.precision))
    del table["devices"]
    return table


def _scheduled(model: Transformer, base: Configuration, axes: Axes, table: Table) -> Table:
    """With schedules, stages of a rank, and balance; all the same without a pipeline."""
    names = WORDS["schedule"]
    one, interleaved = names.index("1f1b"), names.index("interleaved")
    piped = table["pipeline"] > 1
    schedules = _numbers("schedule", axes.schedule)
    alone = {name: column[~piped] for name, column in table.items()}
    alone |= {name: np.zeros_like(alone["data"]) for name in ("schedule", "balance")}
    alone["schedule"] += one
    alone["stages_per_rank"] = np.ones_like(alone["data"])
    table = _crossed(kept(table, piped), "schedule", schedules)
    table = _crossed(table, "stages_per_rank", axes.stages_per_rank)
    several = table["stages_per_rank"] > 1
    stages = table["pipeline"] * table["stages_per_rank"]
    micro_batches = base.batch // (table["data"] * table["micro_batch"])
    # Interleaving deals micro-batches out in groups of as many as there are stages.
    goes = (model.layers % stages == 0) & (micro_batches % table["pipeline"] == 0)
    table = kept(table, (several == (table["schedule"] == interleaved)) & (~several | goes))
    table = _crossed(table, "balance", _numbers("balance", axes.balance))
    # Equal chunks leave nothing to balance.
    table = kept(table, (table["balance"] == 0) | (table["stages_per_rank"] == 1))
    return {name: np.concatenate([alone[name], table[name]]) for name in alone}


def _sharded(model: Transformer, axes: Axes, table: Table) -> Table:
    """With expert ranks and with what the data-parallel ranks divide among themselves."""
    table = _crossed(table, "expert", axes.expert if model.experts else (1,))
    table = kept(table, table["data"] % table["expert"] == 0)
    sharding = _numbers("sharding", axes.sharding)
    table = _crossed(table, "sharding", sharding)
    # A single replica has nobody to share with: one of the choices stands for all.
    table = kept(table, (table["data"] > 1) | (table["sharding"] == min(sharding)))
    table = _crossed(table, "sharding_ranks", axes.sharding_ranks)
    ranks = np.maximum(table["sharding_ranks"], 1)
    hybrid = (table["sharding"] == SHARDING["parameters"]) & (table["data"] % ranks == 0)
    hybrid &= table["data"] > ranks
    return kept(table, (table["sharding_ranks"] == 0) | hybrid)


def _numbers(name: str, words: Sequence[str]) -> tuple[int, ...]:
    return tuple(WORDS[name].index(word) for word in words)


def _crossed(table: Table, name: str, options: Sequence[int]) -> Table:
    """Each row with each option."""
    chosen = np.array(tuple(options), dtype=np.int64)
    count = len(next(iter(table.values())))
    if count * len(chosen) > LIMIT:
        raise PlanError(
            f"{count:,} layouts with {len(chosen)} choices of {name} are more than {LIMIT:,}: give "
            f"fewer choices of {name}, or fewer device counts"
        )
    crossed = {key: np.repeat(column, len(chosen)) for key, column in table.items()}
    crossed[name] = np.tile(chosen, count)
    return crossed


def kept(table: Table, mask: Mask) -> Table:
    """The rows where `mask` holds."""
    return {name: column[mask] for name, column in table.items()}


def configuration_of(base: Configuration, table: Table, row: int) -> Configuration:
    """One layout as an object; what no column says is the base's."""
    found: dict[str, Any] = {}
    for name, column in table.items():
        value = int(column[row])
        found[name] = WORDS[name][value] if name in WORDS else value
    found["sequence_parallel"] = bool(found["sequence_parallel"])
    return replace(base, **found)


def runnable(
    model: Transformer,
    base: Configuration,
    cluster: Cluster,
    table: Table,
    *,
    framework: str = "any",
    target: str = "",
) -> tuple[Table, Cases]:
    """The layouts that can run, and, in a framework that `emit` writes for, be written out.

    Args:
        model: What is trained.
        base: Batch and sequence.
        cluster: On what.
        table: (layouts,) of each varied field, at least one.
        framework: See `outlast.plan.frameworks`.
        target: What they are written for, where that is another one.

    Returns:
        The rows that stay, as a table and as cases; there may be none.

    Raises:
        PlanError: Some layouts can run, but none of them can be written for the framework.
    """
    layouts = as_cases(model, base, cluster, table)
    shape = table["data"].shape
    stays = np.broadcast_to(legal(layouts, devices=cluster.devices, framework=framework), shape)
    table, layouts = kept(table, stays), layouts.taken(stays)
    for name in dict.fromkeys((framework, target)):
        if name in TARGETS and len(table["data"]):
            able = _written(name, model, base, cluster, table=table, layouts=layouts)
            table, layouts = kept(table, able), layouts.taken(able)
    return table, layouts


def _written(
    target: str,
    model: Transformer,
    base: Configuration,
    cluster: Cluster,
    *,
    table: Table,
    layouts: Cases,
) -> Mask:
    """(layouts,) which of them `emit` can write for a target."""
    fp16 = _is(table, "precision", "fp16") > 0.0
    able = np.broadcast_to(can_express(target, layouts, fp16=fp16), table["data"].shape)
    if unsaid := unwritten(target, model):
        raise PlanError(unsaid)
    if not able.any():
        first = problem(target, model, configuration_of(base, table, 0))
        raise PlanError(
            f"none of {len(able):,} layouts of {model.name} can be written for {target}: for "
            f"example, {first}"
        )
    # Launchers start equally many processes on every node.
    devices, node = np.broadcast_to(layouts.devices, able.shape), cluster.devices_per_node
    return np.asarray(able & ((devices <= node) | (devices % node == 0.0)))


def as_cases(model: Transformer, base: Configuration, cluster: Cluster, table: Table) -> Cases:
    """What `outlast.plan.cases.cases` gives for the same layouts, from arrays."""
    used = {WORDS["precision"][number] for number in np.unique(table["precision"])}
    one = case(model, replace(base, precision=cast("Precision", min(used))), cluster)
    found = {name: np.array([float(value)]) for name, value in one.items()}
    column = {name: values.astype(float) for name, values in table.items()}
    direct = ("data", "tensor", "sequence_parallel", "context", "pipeline", "stages_per_rank")
    for name in (*direct, "expert", "micro_batch"):
        found[name] = column[name]
    found["zero_bubble"] = _is(table, "schedule", "zero_bubble")
    found["gpipe"] = _is(table, "schedule", "gpipe")
    found["by_cost"] = _is(table, "balance", "cost")
    found["sharding"] = _looked_up(table, "sharding", SHARDING)
    found["recompute"] = _looked_up(table, "recompute", RECOMPUTE)
    found["sharding_ranks"] = np.where(
        table["sharding_ranks"] > 0, column["sharding_ranks"], column["data"]
    )
    found["micro_batches"] = base.batch // (column["data"] * column["micro_batch"])
    found["devices"] = column["data"] * column["tensor"] * column["context"] * column["pipeline"]
    for name in ("peak_flop_per_s", "matmul_flop_per_s"):
        known = getattr(cluster, name)
        found[name] = _looked_up(table, "precision", {word: known[word] for word in used})
    found["value_bytes"] = _looked_up(table, "precision", WEIGHT_BYTES)
    found["half"] = 1.0 - _is(table, "precision", "fp32")
    found["quantized"] = _is(table, "precision", "fp8")
    # One column stays long, so that the number of rows is never lost.
    return Cases(**{n: v if n == "data" else _narrow(v) for n, v in found.items()})


def _is(table: Table, name: str, word: str) -> np.ndarray:
    return np.asarray(table[name] == WORDS[name].index(word), dtype=float)


def _looked_up(table: Table, name: str, by_word: Mapping[str, float]) -> np.ndarray:
    values = np.array([float(by_word.get(word, 0.0)) for word in WORDS[name]])
    return np.asarray(values[table[name]])


def _narrow(values: np.ndarray) -> np.ndarray:
    """One value in place of many equal ones, which saves the formulas their arithmetic."""
    return values[:1] if values.size and (values == values[0]).all() else values
