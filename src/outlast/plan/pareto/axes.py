"""What a search varies, and the usual choices."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from outlast.errors import PlanError
from outlast.plan.cluster import Cluster
from outlast.plan.configuration import (
    Balance,
    Configuration,
    Precision,
    Recompute,
    Schedule,
    Sharding,
)
from outlast.plan.emit.targets import TARGETS, divides_sequences
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


_WORDS = {
    "schedule": Schedule,
    "balance": Balance,
    "sharding": Sharding,
    "recompute": Recompute,
    "precision": Precision,
}


def divisors(number: int) -> tuple[int, ...]:
    """All whole numbers that divide `number`, rising."""
    small = [index for index in range(1, int(number**0.5) + 1) if number % index == 0]
    return tuple(sorted({*small, *(number // item for item in small)}))


def usual(
    axes: Axes,
    model: Transformer,
    base: Configuration,
    cluster: Cluster,
    framework: str = "any",
) -> Axes:
    """`axes` with the usual choices where there are none, and without what cannot be.

    Raises:
        PlanError: A choice is not known, is not of the cluster, or none is given.
    """
    if not axes.sequence_parallel:
        divided = framework not in TARGETS or divides_sequences(framework)
        axes = replace(axes, sequence_parallel=(divided,))
    filled = replace(
        axes,
        **{
            name: choices
            for name, choices in _usual(model, base, cluster, axes.devices).items()
            if not getattr(axes, name)
        },
    )
    _check(filled, cluster)
    grouped = [t for t in filled.tensor if _divides_heads(t, model)]
    return replace(
        filled,
        tensor=tuple(grouped),
        context=tuple(c for c in filled.context if c == 1 or base.sequence % (2 * c) == 0),
        pipeline=tuple(p for p in filled.pipeline if p <= model.layers),
        expert=tuple(e for e in filled.expert if e == 1 or model.experts % e == 0),
    )


def _divides_heads(tensor: int, model: Transformer) -> bool:
    # Key heads are divided among the ranks, or each is held by an equal number of ranks.
    grouped = model.kv_heads % tensor == 0 or tensor % model.kv_heads == 0
    return model.heads % tensor == 0 and grouped


def _usual(
    model: Transformer, base: Configuration, cluster: Cluster, devices: tuple[int, ...]
) -> dict[str, Any]:
    counts = devices or (cluster.devices,)
    stages = sorted({p for count in counts if count > 0 for p in divisors(count)})
    node = cluster.devices_per_node
    known = [
        word
        for word in ("bf16", "fp8")
        if word in cluster.peak_flop_per_s and word in cluster.matmul_flop_per_s
    ]
    return {
        "devices": counts,
        "tensor": tuple(t for t in divisors(model.heads) if t <= cluster.fast_domain),
        "context": (1, 2, 4, 8, 16),
        "pipeline": tuple(p for p in stages if p <= model.layers),
        "stages_per_rank": tuple(range(1, 9)),
        "schedule": ("1f1b", "interleaved", "zero_bubble"),
        "balance": get_args(Balance),
        "expert": divisors(model.experts) if model.experts else (1,),
        "sharding": get_args(Sharding),
        "sharding_ranks": tuple(sorted({0, node, 8 * node, 64 * node} - {1})),
        "micro_batch": tuple(m for m in (1, 2, 4, 8, 16) if m <= base.batch),
        "recompute": get_args(Recompute),
        "precision": tuple(known) or (base.precision,),
    }


def _check(axes: Axes, cluster: Cluster) -> None:
    for field in fields(axes):
        choices = getattr(axes, field.name)
        if not choices or len(set(choices)) < len(choices):
            raise PlanError(
                f"{field.name} = {choices}: give at least one choice, and each of them once"
            )
        if field.name in _WORDS:
            words = get_args(_WORDS[field.name])
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
    for name in ("peak_flop_per_s", "matmul_flop_per_s"):
        known = getattr(cluster, name)
        for word in axes.precision:
            if word not in known:
                raise PlanError(
                    f"precision = {word!r}: {name} of {cluster.name} is known for "
                    f"{', '.join(known) or 'nothing'} only; give it in the cluster file"
                )
