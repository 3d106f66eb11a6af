"""All legal ways to run a model on a cluster, as arrays.

Axes are crossed one after the other, and rows that cannot run are dropped at once, so that few of
them are ever built. No Python loop runs over candidates: one is made an object when it is asked
for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias, get_args

import numpy as np

from outlast.errors import PlanError
from outlast.plan.batch import (
    SHARDING,
    Cases,
    Integers,
    Mask,
    case,
    refuse_unknown_precision,
)
from outlast.plan.cluster import Cluster
from outlast.plan.configuration import (
    Balance,
    Configuration,
    Mechanisms,
    Precision,
    Recompute,
    Schedule,
    Settings,
    Sharding,
)
from outlast.plan.constraints import legal
from outlast.plan.targets import TARGETS, can_express, divides_sequences, problem, unwritten
from outlast.plan.transformer import Transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The choices of each field of a configuration; empty for the usual ones.

    Attributes:
        devices: Devices of the run; usually the whole cluster. `divisors(cluster.devices)` tries
            all numbers that divide it.
        tensor: Usually what divides the heads, up to the fast domain.
        context: Usually 1 to 16, where it divides the sequence.
        pipeline: Usually all that divide the devices, up to the number of layers.
        stages_per_rank: Usually 1 to 8; more than 1 only where it divides the layers.
        schedule: Usually all but gpipe, which is never better than 1f1b.
        balance: Usually both, where there is a pipeline.
        expert: Usually what divides the experts.
        sharding: Usually all.
        sharding_ranks: Usually 0 (all), and a node's, eight nodes' and 64 nodes' devices.
        micro_batch: Usually powers of two up to 16.
        recompute: Usually all.
        precision: Usually bf16 and fp8, as far as the cluster knows them.
        sequence_parallel: Usually on, and off in frameworks that do not have it.
    """

    devices: tuple[int, ...] = ()
    tensor: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    pipeline: tuple[int, ...] = ()
    stages_per_rank: tuple[int, ...] = ()
    schedule: tuple[Schedule, ...] = ()
    balance: tuple[Balance, ...] = ()
    expert: tuple[int, ...] = ()
    sharding: tuple[Sharding, ...] = ()
    sharding_ranks: tuple[int, ...] = ()
    micro_batch: tuple[int, ...] = ()
    recompute: tuple[Recompute, ...] = ()
    precision: tuple[Precision, ...] = ()
    sequence_parallel: tuple[bool, ...] = ()


WORDS: dict[str, tuple[str, ...]] = {
    "schedule": get_args(Schedule),
    "balance": get_args(Balance),
    "sharding": get_args(Sharding),
    "recompute": get_args(Recompute),
    "precision": get_args(Precision),
}
"""Fields of a configuration that are words, which a table holds by their number."""


def divisors(number: int) -> tuple[int, ...]:
    """All whole numbers that divide `number`, rising."""
    small = [index for index in range(1, int(number**0.5) + 1) if number % index == 0]
    return tuple(sorted({*small, *(number // item for item in small)}))


def usual(
    axes: Axes, model: Transformer, base: Configuration, cluster: Cluster, framework: str = "any"
) -> Axes:
    """`axes` with the usual choices where there are none, and without what cannot be.

    Raises:
        PlanError: A choice is not known, is not of the cluster, or none is given.
    """
    counts, node = axes.devices or (cluster.devices,), cluster.devices_per_node
    stages = sorted({p for count in counts if count > 0 for p in divisors(count)})
    precisions = [
        word
        for word in ("bf16", "fp8")
        if word in cluster.peak_flop_per_s and word in cluster.matmul_flop_per_s
    ]
    choices: dict[str, Sequence[Any]] = {
        "devices": counts,
        "tensor": [t for t in divisors(model.heads) if t <= cluster.fast_domain],
        "context": (1, 2, 4, 8, 16),
        "pipeline": [p for p in stages if p <= model.layers],
        "stages_per_rank": range(1, 9),
        "schedule": ("1f1b", "interleaved", "zero_bubble"),
        "balance": get_args(Balance),
        "expert": divisors(model.experts) if model.experts else (1,),
        "sharding": get_args(Sharding),
        "sharding_ranks": sorted({0, node, 8 * node, 64 * node} - {1}),
        "micro_batch": [m for m in (1, 2, 4, 8, 16) if m <= base.batch],
        "recompute": get_args(Recompute),
        "precision": precisions or (base.precision,),
        "sequence_parallel": (framework not in TARGETS or divides_sequences(framework),),
    }
    filled = Axes(**{name: tuple(getattr(axes, name) or usual) for name, usual in choices.items()})
    _check(filled, cluster)

    def divides_heads(tensor: int) -> bool:
        # Key heads are divided among the ranks, or each is held by an equal number of ranks.
        grouped = model.kv_heads % tensor == 0 or tensor % model.kv_heads == 0
        return model.heads % tensor == 0 and grouped

    return replace(
        filled,
        tensor=tuple(t for t in filled.tensor if divides_heads(t)),
        context=tuple(c for c in filled.context if c == 1 or base.sequence % (2 * c) == 0),
        pipeline=tuple(p for p in filled.pipeline if p <= model.layers),
        expert=tuple(e for e in filled.expert if e == 1 or model.experts % e == 0),
    )


def _check(axes: Axes, cluster: Cluster) -> None:
    for field in fields(axes):
        choices = getattr(axes, field.name)
        if not choices or len(set(choices)) < len(choices):
            raise PlanError(
                f"{field.name} = {choices}: give at least one choice, and each of them once"
            )
        if field.name in WORDS:
            words = WORDS[field.name]
            wrong = [choice for choice in choices if choice not in words]
            if wrong:
                raise PlanError(f"{field.name} = {wrong[0]!r} is none of {', '.join(words)}")
            continue
        least = 0 if field.name in ("sharding_ranks", "sequence_parallel") else 1
        if min(choices) < least:
            raise PlanError(f"{field.name} = {min(choices)}: give at least {least}")
    if max(axes.devices) > cluster.devices:
        raise PlanError(
            f"devices = {max(axes.devices):,} is more than the {cluster.devices:,} of "
            f"{cluster.name}: give fewer, or a larger cluster"
        )
    for word in axes.precision:
        refuse_unknown_precision(cluster, word)


Table: TypeAlias = dict[str, Integers]
LIMIT = 4_000_000
"""Most candidates of one space: more would take gigabytes."""


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
    table = _kept(table, table["devices"] % table["tensor"] == 0)
    table = _crossed(table, "pipeline", axes.pipeline)
    table = _kept(table, table["devices"] % (table["tensor"] * table["pipeline"]) == 0)
    table = _crossed(table, "context", axes.context)
    shards = table["tensor"] * table["pipeline"] * table["context"]
    table = _kept(table, table["devices"] % shards == 0)
    table["data"] = table["devices"] // (table["tensor"] * table["pipeline"] * table["context"])
    table = _kept(table, base.batch % table["data"] == 0)
    table = _crossed(table, "micro_batch", axes.micro_batch)
    table = _kept(table, base.batch % (table["data"] * table["micro_batch"]) == 0)
    table = _scheduled(model, base, axes, table)
    table = _sharded(model, axes, table)
    table = _crossed(table, "sequence_parallel", axes.sequence_parallel)
    one = max(axes.sequence_parallel)
    table = _kept(table, (table["tensor"] > 1) | (table["sequence_parallel"] == one))
    table = _crossed(table, "recompute", axes.recompute)
    table = _crossed(table, "precision", axes.precision)
    del table["devices"]
    return table


def _scheduled(model: Transformer, base: Configuration, axes: Axes, table: Table) -> Table:
    """With schedules, stages of a rank, and balance; all the same without a pipeline."""
    names = WORDS["schedule"]
    one, interleaved = names.index("1f1b"), names.index("interleaved")
    piped = table["pipeline"] > 1
    alone = {name: column[~piped] for name, column in table.items()}
    alone |= {name: np.zeros_like(alone["data"]) for name in ("schedule", "balance")}
    alone["schedule"] += one
    alone["stages_per_rank"] = np.ones_like(alone["data"])
    table = _crossed(_kept(table, piped), "schedule", axes.schedule)
    table = _crossed(table, "stages_per_rank", axes.stages_per_rank)
    several = table["stages_per_rank"] > 1
    stages = table["pipeline"] * table["stages_per_rank"]
    micro_batches = base.batch // (table["data"] * table["micro_batch"])
    # Interleaving deals micro-batches out in groups of as many as there are stages.
    goes = (model.layers % stages == 0) & (micro_batches % table["pipeline"] == 0)
    table = _kept(table, (several == (table["schedule"] == interleaved)) & (~several | goes))
    table = _crossed(table, "balance", axes.balance)
    # Equal chunks leave nothing to balance.
    table = _kept(table, (table["balance"] == 0) | (table["stages_per_rank"] == 1))
    return {name: np.concatenate([alone[name], table[name]]) for name in alone}


def _sharded(model: Transformer, axes: Axes, table: Table) -> Table:
    """With expert ranks and with what the data-parallel ranks divide among themselves."""
    table = _crossed(table, "expert", axes.expert if model.experts else (1,))
    table = _kept(table, table["data"] % table["expert"] == 0)
    table = _crossed(table, "sharding", axes.sharding)
    # A single replica has nobody to share with: one of the choices stands for all.
    one = min(SHARDING[name] for name in axes.sharding)
    table = _kept(table, (table["data"] > 1) | (table["sharding"] == one))
    table = _crossed(table, "sharding_ranks", axes.sharding_ranks)
    ranks = np.maximum(table["sharding_ranks"], 1)
    hybrid = (table["sharding"] == SHARDING["parameters"]) & (table["data"] % ranks == 0)
    hybrid &= table["data"] > ranks
    return _kept(table, (table["sharding_ranks"] == 0) | hybrid)


def _crossed(table: Table, name: str, options: Sequence[Any]) -> Table:
    """Each row with each option."""
    numbers = [WORDS[name].index(option) for option in options] if name in WORDS else options
    chosen = np.array(numbers, dtype=np.int64)
    count = len(next(iter(table.values())))
    if count * len(chosen) > LIMIT:
        raise PlanError(
            f"{count:,} layouts with {len(chosen)} choices of {name} are more than {LIMIT:,}: give "
            f"fewer choices of {name}, or fewer device counts"
        )
    crossed = {key: np.repeat(column, len(chosen)) for key, column in table.items()}
    return {**crossed, name: np.tile(chosen, count)}


def _kept(table: Table, mask: Mask) -> Table:
    """The rows where a mask holds."""
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
        framework: See `outlast.plan.constraints`.
        target: What they are written for, where that is another one.

    Returns:
        The rows that stay, as a table and as cases; there may be none.

    Raises:
        PlanError: Some layouts can run, but none of them can be written for the framework.
    """
    layouts = as_cases(model, base, cluster, table)
    stays = legal(layouts, devices=cluster.devices, framework=framework)
    table, layouts = _kept(table, stays), layouts.taken(stays)
    for name in dict.fromkeys((framework, target)):
        if name not in TARGETS or not len(table["data"]):
            continue
        if unsaid := unwritten(name, model):
            raise PlanError(unsaid)
        fp16 = table["precision"] == WORDS["precision"].index("fp16")
        able = can_express(name, layouts, fp16=fp16)
        if not able.any():
            first = problem(name, model, configuration_of(base, table, 0))
            raise PlanError(
                f"none of {len(able):,} layouts of {model.name} can be written for {name}: for "
                f"example, {first}"
            )
        # Launchers start equally many processes on every node.
        node = cluster.devices_per_node
        able = able & ((layouts.devices <= node) | (layouts.devices % node == 0.0))
        table, layouts = _kept(table, able), layouts.taken(able)
    return table, layouts


def as_cases(model: Transformer, base: Configuration, cluster: Cluster, table: Table) -> Cases:
    """Build from arrays what `outlast.plan.batch.cases` gives for the same layouts."""
    used = {name: np.unique(table[name]) for name in WORDS}
    first = replace(base, **{name: WORDS[name][numbers[0]] for name, numbers in used.items()})
    found = {name: np.array([float(value)]) for name, value in case(model, first, cluster).items()}
    for name, numbers in used.items():
        # What depends on a word is what it changes in a case.
        rows = [
            case(model, replace(first, **{name: WORDS[name][number]}), cluster)
            for number in numbers
        ]
        places = np.searchsorted(numbers, table[name])
        for field in found:
            values = np.array([float(row[field]) for row in rows])
            if np.ptp(values):
                found[field] = values[places]
    column = {name: values.astype(float) for name, values in table.items()}
    direct = ("data", "tensor", "sequence_parallel", "context", "pipeline", "stages_per_rank")
    found |= {name: column[name] for name in (*direct, "expert", "micro_batch")}
    found["sharding_ranks"] = np.where(
        table["sharding_ranks"] > 0, column["sharding_ranks"], column["data"]
    )
    found["micro_batches"] = base.batch // (column["data"] * column["micro_batch"])
    found["devices"] = column["data"] * column["tensor"] * column["context"] * column["pipeline"]
    # One column stays long, so that the number of rows is never lost.
    return Cases(
        **{
            name: values[:1] if name != "data" and (values == values[0]).all() else values
            for name, values in found.items()
        }
    )


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run, with everything that was chosen.

    Attributes:
        cluster: Its name.
        configuration: The layout.
        settings: The mechanisms.
    """

    cluster: str
    configuration: Configuration
    settings: Settings


@dataclass(frozen=True, slots=True)
class Block:
    """Some candidates, to be judged together; every layout's candidates are in one block.

    Attributes:
        layouts: (layouts,) what step time and memory depend on, before any mechanism.
        settings: The combinations of mechanism settings.
        layout: (candidates,) index into `layouts`, rising.
        setting: (candidates,) index into `settings`.
    """

    layouts: Cases
    settings: tuple[Settings, ...]
    layout: Integers
    setting: Integers

    def __len__(self) -> int:
        return len(self.layout)

    def spread(self, values: np.ndarray) -> np.ndarray:
        """(candidates,) of a number of each layout, (layouts,) or (1,)."""
        return np.broadcast_to(values, (len(self.layouts),))[self.layout]

    def by_setting(self, value: Callable[[Settings], float]) -> np.ndarray:
        """(candidates,) of a number that follows from the settings."""
        return np.asarray([value(setting) for setting in self.settings])[self.setting]


@dataclass(frozen=True, slots=True)
class Space:
    """All candidates of one model on one cluster.

    Attributes:
        cluster: On what.
        base: What all candidates share: batch, sequence, and what no axis varies.
        table: (layouts,) of each field that varies; words by their number in `WORDS`.
        whole: All candidates together, in order.
        framework: Whose limits all candidates keep to; "any" where none was named.
    """

    cluster: Cluster
    base: Configuration
    table: Table
    whole: Block
    framework: str = "any"

    def __len__(self) -> int:
        return len(self.whole)

    def candidate(self, row: int) -> Candidate:
        """Everything about a candidate."""
        run = configuration_of(self.base, self.table, int(self.whole.layout[row]))
        return Candidate(self.cluster.name, run, self.whole.settings[self.whole.setting[row]])

    def blocks(self, size: int) -> Iterator[Block]:
        """All candidates in order, about `size` of them at a time, layouts never split."""
        whole, begin = self.whole, 0
        while begin < len(self):
            end = min(begin + size, len(self))
            first, last = int(whole.layout[begin]), int(whole.layout[end - 1])
            end = int(np.searchsorted(whole.layout, last, side="right"))
            yield Block(
                whole.layouts.taken(np.arange(first, last + 1)),
                whole.settings,
                whole.layout[begin:end] - first,
                whole.setting[begin:end],
            )
            begin = end


def space(
    model: Transformer,
    base: Configuration,
    cluster: Cluster,
    axes: Axes | None = None,
    mechanisms: Mechanisms | None = None,
    *,
    framework: str = "any",
    target: str = "",
) -> Space:
    """All legal candidates.

    Args:
        model: What is trained.
        base: Batch, sequence and whatever no axis varies; its parallel sizes do not matter.
        cluster: On what.
        axes: What is varied; fields without a choice get the usual ones.
        mechanisms: Their settings, all combinations of which go with every layout (coding with so
            many copies only where there are as many replicas); None for the defaults.
        framework: Whose limits to keep to, see `constraints`; of one that `emit` writes
            for, only what can be written.
        target: What they are to be written for, where that is another one.

    Raises:
        PlanError: No configuration is legal, or none can be written for the framework; an option is
            unknown to the cluster, or there are more than `LIMIT` candidates.
    """
    axes = usual(axes or Axes(), model, base, cluster, framework)
    table = layouts_of(model, base, axes)
    if len(table["data"]):
        table, layouts = runnable(model, base, cluster, table, framework=framework, target=target)
    count = len(table["data"])
    if not count:
        counts = ", ".join(f"{number:,}" for number in axes.devices[:6])
        if (more := len(axes.devices) - 6) > 0:
            counts += f" or {more} other numbers of"
        raise PlanError(
            f"no legal configuration of {model.name} with batch = {base.batch} and sequence = "
            f"{base.sequence} takes {counts} devices of {cluster.name}: give other "
            "device counts, or a batch that they divide"
        )
    settings = (mechanisms or Mechanisms()).settings()
    if count * len(settings) > LIMIT:
        raise PlanError(
            f"{count:,} layouts with {len(settings):,} settings each are more than {LIMIT:,} "
            "candidates: give fewer choices of mechanisms or parallel sizes"
        )
    layout = np.repeat(np.arange(count), len(settings))
    setting = np.tile(np.arange(len(settings)), count)
    copies = np.array([setting.coding_copies for setting in settings])
    if copies.max() > 1:
        possible = copies[setting] <= table["data"][layout]
        layout, setting = layout[possible], setting[possible]
    whole = Block(layouts, settings, layout, setting)
    return Space(cluster, base, table, whole, framework)
