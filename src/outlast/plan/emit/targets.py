"""Frameworks that a plan can be written out for, and what the configuration of each can say.

The search asks `can_express` to stay within a framework; `problem` says the same of one run, in a
sentence. What a framework itself can run, by hand-written code too, is in
`outlast.plan.constraints`: that is asked of runs that were made elsewhere, and is wider.

Checked against torchtitan 0.3.0, Megatron-Core 0.16, DeepSpeed 0.19.8 and Accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outlast.errors import PlanError
from outlast.plan.batch import RECOMPUTE, SHARDING, WEIGHT_BYTES, Array, Cases, cases
from outlast.plan.cluster import Cluster
from outlast.plan.facts import facts

if TYPE_CHECKING:
    from outlast.plan.configuration import Configuration
    from outlast.plan.transformer import Transformer


Flags: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Limit:
    """One thing that cannot be said.

    Attributes:
        settings: Names in `Configuration` or `Transformer`; their values open the sentence.
        beyond: (cases,) -> (cases,) or (1,) of bool: where it would have to be said.
        why: What the framework does in place of it.
        nearest: What can be said.
    """

    settings: tuple[str, ...]
    beyond: Callable[[Cases], Flags] = field(repr=False)
    why: str
    nearest: str


def split(cases: Cases) -> Flags:
    """Mask of cases with stages on different ranks."""
    return cases.pipeline > 1.0


def interleaved(cases: Cases) -> Flags:
    """Mask of cases with several stages on a rank."""
    return split(cases) & (cases.stages_per_rank > 1.0)


def sharded_as(name: str) -> Callable[[Cases], Flags]:
    """Mask of cases whose data-parallel ranks divide exactly this, and are several."""
    return lambda cases: (cases.sharding == SHARDING[name]) & (cases.data > 1.0)


def replicated_groups(cases: Cases) -> Flags:
    """Mask of cases with several sharding groups, each with all of the model (HSDP)."""
    return (cases.sharding > 0.0) & (cases.sharding_ranks < cases.data)


def recomputed_as(name: str) -> Callable[[Cases], Flags]:
    """Mask of cases that recompute exactly this."""
    return lambda cases: cases.recompute == RECOMPUTE[name]


def remainder(dividend: Array, divisor: Array) -> Flags:
    """Mask of cases in which a division of whole numbers leaves a remainder."""
    return np.asarray(np.mod(dividend, divisor) > 0.0)


def kv_heads(cases: Cases) -> Array:
    """Key and value heads."""
    return np.rint(cases.kv_width * cases.heads / cases.query_width)


WHOLE_BATCH = Limit(
    ("batch", "data", "micro_batch"),
    lambda cases: remainder(cases.batch, cases.data * cases.micro_batch),
    "every replica computes equally many whole micro-batches",
    "a batch that is a multiple of data x micro_batch",
)

SHARDING_GROUPS = Limit(
    ("sharding_ranks", "data"),
    lambda cases: (cases.sharding > 0.0) & remainder(cases.data, cases.sharding_ranks),
    "sharding groups are equally large",
    "sharding_ranks that divides data",
)

ENOUGH_BLOCKS = Limit(
    ("layers", "pipeline", "stages_per_rank"),
    lambda cases: split(cases) & (cases.layers < cases.pipeline * cases.stages_per_rank),
    "every stage has a block at least",
    "fewer stages",
)

GPIPE_STAGES = Limit(
    ("stages_per_rank", "schedule"),
    lambda cases: interleaved(cases) & (cases.gpipe > 0.0),
    "the schedule has one stage per rank",
    'schedule = "interleaved" or stages_per_rank = 1',
)

HEADS = Limit(
    ("tensor", "heads", "kv_heads"),
    lambda cases: remainder(cases.heads, cases.tensor) | remainder(kv_heads(cases), cases.tensor),
    "tensor-parallel ranks take whole heads",
    "a tensor that divides both",
)

EXPERTS = Limit(
    ("expert", "experts", "data"),
    lambda cases: (
        (cases.expert > 1.0)
        & (
            (cases.experts < 1.0)
            | remainder(cases.experts, cases.expert)
            | remainder(cases.data, cases.expert)
        )
    ),
    "expert ranks are data-parallel ranks with equally many experts each",
    "an expert that divides experts and data, or 1",
)

SEQUENCE_HALVES = Limit(
    ("sequence", "context"),
    lambda cases: (cases.context > 1.0) & remainder(cases.sequence, 2.0 * cases.context),
    "every rank takes one part of a sequence's first half and one of its second",
    "a sequence that is a multiple of 2 x context",
)

SUMMED_IN_FP32 = Limit(
    ("gradient_bytes",),
    lambda cases: cases.gradient_bytes != 4.0,
    "gradients are summed in fp32",
    "gradient_bytes = 4",
)

NO_CONTEXT = Limit(
    ("context",),
    lambda cases: cases.context > 1.0,
    "a sequence stays on one rank",
    'context = 1 with recompute = "full"',
)

NO_EXPERT = Limit(
    ("expert",),
    lambda cases: cases.expert > 1.0,
    "experts are sharded like all other weights",
    'expert = 1 with sharding = "parameters"',
)

NO_PIPELINE = Limit(
    ("pipeline",), split, "its blocks stay together", 'pipeline = 1 with sharding = "parameters"'
)

NO_ATTENTION_RECOMPUTE = Limit(
    ("recompute",),
    recomputed_as("attention"),
    "whole blocks are computed again, or nothing",
    'recompute = "full", or "none" since fused attention keeps no scores',
)

NO_OPTIMIZER_SHARDING = Limit(
    ("sharding",),
    sharded_as("optimizer"),
    "optimizer states are sharded together with gradients",
    'sharding = "gradients"',
)

SEQUENCE_WHOLE = Limit(
    ("sequence_parallel", "tensor"),
    lambda cases: (cases.tensor > 1.0) & (cases.sequence_parallel > 0.0),
    "norms are computed in full on every tensor-parallel rank",
    "sequence_parallel = false",
)

ONLY_FUSED = Limit(
    ("fused_attention",),
    lambda cases: cases.fused_attention == 0.0,
    "its attention never writes the scores to memory",
    "fused_attention = true",
)

NO_FP8 = Limit(
    ("precision",), lambda cases: cases.quantized > 0.0, "it has no fp8 products", '"bf16"'
)

EVERYWHERE = (SHARDING_GROUPS, ENOUGH_BLOCKS, GPIPE_STAGES, HEADS, EXPERTS)


def _uneven_rounds(cases: Cases) -> Flags:
    """Mask of interleaved cases whose micro-batches are no whole rounds of ranks."""
    rounds = np.maximum(np.floor(cases.micro_batches / cases.pipeline), 1.0)
    return interleaved(cases) & remainder(cases.micro_batches, rounds)


HALF_SUMS = Limit(
    ("gradient_bytes", "precision"),
    lambda cases: (
        (cases.gradient_bytes != 4.0) & ((cases.gradient_bytes != 2.0) | (cases.half == 0.0))
    ),
    "gradients are summed in fp32 or in the half precision of the products",
    "gradient_bytes = 4",
)

OUTLAST = (
    Limit(
        ("batch", "data", "micro_batch"),
        lambda cases: cases.batch < cases.data * cases.micro_batch,
        "every replica gets a micro-batch",
        "a batch of at least data x micro_batch",
    ),
    Limit(
        ("batch", "data", "micro_batch", "pipeline"),
        lambda cases: split(cases) & WHOLE_BATCH.beyond(cases),
        "a pipeline takes whole micro-batches",
        "a batch that is a multiple of data x micro_batch",
    ),
    NO_CONTEXT,
    NO_EXPERT,
    Limit(
        ("tensor", "pipeline"),
        lambda cases: split(cases) & (cases.tensor > 1.0),
        "the two are not combined",
        "tensor = 1 or pipeline = 1",
    ),
    Limit(
        ("sharding", "pipeline"),
        lambda cases: split(cases) & (cases.sharding > 0.0) & (cases.data > 1.0),
        "replicas of a pipeline keep all their states",
        'sharding = "none", or pipeline = 1',
    ),
    Limit(
        ("experts", "gated", "tied", "pipeline"),
        lambda cases: (
            split(cases) & ((cases.experts > 0.0) | (cases.matrices < 3.0) | (cases.tied > 0.0))
        ),
        "only dense gated models with a head of their own are cut into stages",
        'pipeline = 1 with sharding = "parameters"',
    ),
    Limit(
        ("tensor", "sharding", "sharding_ranks"),
        lambda cases: (
            (cases.tensor > 1.0)
            & (cases.data > 1.0)
            & ((cases.sharding < 1.0) | (cases.sharding_ranks < 2.0))
        ),
        "replicas of a tensor-parallel model are sharded",
        'sharding = "parameters" with sharding_ranks = 0',
    ),
    Limit(
        ("tensor", "experts"),
        lambda cases: (cases.tensor > 1.0) & (cases.experts > 0.0),
        "mixtures of experts are not divided by tensor-parallel ranks",
        'tensor = 1 with sharding = "parameters"',
    ),
    Limit(
        ("sharding",),
        lambda cases: sharded_as("optimizer")(cases) | sharded_as("gradients")(cases),
        "FSDP2 shards parameters, gradients and optimizer states together",
        'sharding = "parameters"',
    ),
    Limit(
        ("schedule",),
        lambda cases: split(cases) & ((cases.zero_bubble > 0.0) | (cases.gpipe > 0.0)),
        "it has the schedules 1f1b and interleaved",
        'schedule = "1f1b"',
    ),
    Limit(
        ("micro_batch", "batch", "pipeline", "stages_per_rank"),
        lambda cases: interleaved(cases) & remainder(cases.micro_batches, cases.pipeline),
        "the interleaved schedule takes a multiple of pipeline micro-batches",
        "a batch that is a multiple of data x micro_batch x pipeline",
    ),
    Limit(
        ("balance",),
        lambda cases: split(cases) & (cases.by_cost > 0.0),
        "stages have equally many blocks",
        'balance = "layers"',
    ),
    SEQUENCE_WHOLE,
    NO_ATTENTION_RECOMPUTE,
    NO_FP8,
    SUMMED_IN_FP32,
)

TORCHTITAN = (
    WHOLE_BATCH,
    SEQUENCE_HALVES,
    NO_OPTIMIZER_SHARDING,
    Limit(
        ("sharding", "context"),
        lambda cases: (cases.context > 1.0) & (cases.sharding < 3.0),
        "the ranks of a sequence shard the parameters among themselves",
        'sharding = "parameters"',
    ),
    Limit(
        ("expert", "sharding", "sharding_ranks"),
        lambda cases: (
            (cases.expert > 1.0)
            & ((cases.sharding < 1.0) | remainder(cases.sharding_ranks, cases.expert))
        ),
        "expert ranks are taken from one sharding group",
        'sharding = "parameters" with sharding_ranks that expert divides',
    ),
    Limit(
        ("expert", "tensor"),
        lambda cases: (cases.expert > 1.0) & (cases.tensor > 1.0),
        "experts are not divided by tensor-parallel ranks when they are spread over ranks",
        "tensor = 1",
    ),
    Limit(
        ("schedule", "stages_per_rank"),
        lambda cases: split(cases) & (cases.zero_bubble > 0.0) & (cases.stages_per_rank < 2.0),
        "its zero-bubble schedule has two stages per rank or more",
        "stages_per_rank = 2",
    ),
    Limit(
        ("batch", "data", "micro_batch", "pipeline"),
        _uneven_rounds,
        "micro-batches go through several stages per rank in equal rounds",
        "a batch that is a multiple of data x micro_batch x pipeline",
    ),
    Limit(
        ("tied", "pipeline"),
        lambda cases: split(cases) & (cases.tied > 0.0),
        "embedding and head on different stages share no weights",
        "tied = false, or pipeline = 1",
    ),
    Limit(
        ("gated",),
        lambda cases: cases.matrices < 3.0,
        "its language models have gated feed-forward layers",
        "gated = true, or the target megatron",
    ),
    NO_ATTENTION_RECOMPUTE,
    ONLY_FUSED,
    SUMMED_IN_FP32,
)

MEGATRON = (
    WHOLE_BATCH,
    SEQUENCE_HALVES,
    Limit(
        ("schedule",),
        lambda cases: split(cases) & ((cases.zero_bubble > 0.0) | (cases.gpipe > 0.0)),
        "it has the schedules 1f1b and interleaved",
        'schedule = "interleaved"',
    ),
    Limit(
        ("sharding", "pipeline"),
        lambda cases: split(cases) & (cases.sharding > 1.0) & (cases.data > 1.0),
        "with a pipeline it shards the optimizer only",
        'sharding = "optimizer"',
    ),
    Limit(
        ("batch", "data", "micro_batch", "pipeline"),
        lambda cases: interleaved(cases) & remainder(cases.micro_batches, cases.pipeline),
        "the interleaved schedule takes a multiple of pipeline micro-batches",
        "a batch that is a multiple of data x micro_batch x pipeline",
    ),
    Limit(
        ("sequence_parallel", "tensor", "experts"),
        lambda cases: (
            (cases.experts > 0.0) & (cases.tensor > 1.0) & (cases.sequence_parallel == 0.0)
        ),
        "experts go with tensor parallelism only where the sequence is divided, too",
        "sequence_parallel = true",
    ),
    HALF_SUMS,
)

DEEPSPEED = (
    WHOLE_BATCH,
    NO_CONTEXT,
    NO_PIPELINE,
    NO_EXPERT,
    Limit(
        ("sharding_ranks", "data"),
        replicated_groups,
        "ZeRO shards over all data-parallel ranks",
        "sharding_ranks = 0",
    ),
    Limit(
        ("tensor", "experts"),
        lambda cases: (cases.tensor > 1.0) & (cases.experts > 0.0),
        "its automatic tensor parallelism divides dense blocks",
        'tensor = 1 with sharding = "parameters"',
    ),
    SEQUENCE_WHOLE,
    NO_ATTENTION_RECOMPUTE,
    NO_FP8,
    ONLY_FUSED,
    HALF_SUMS,
)

ACCELERATE = (
    WHOLE_BATCH,
    SEQUENCE_HALVES,
    NO_PIPELINE,
    NO_EXPERT,
    NO_OPTIMIZER_SHARDING,
    Limit(
        ("sharding", "tensor", "context"),
        lambda cases: (
            ((cases.tensor > 1.0) | (cases.context > 1.0))
            & ((cases.sharding < 2.0) | ((cases.sharding_ranks < 2.0) & (cases.context < 2.0)))
        ),
        "plain FSDP divides neither matrices nor sequences, and FSDP2 does with a sharding group "
        "of two ranks at least",
        'tensor = 1 and context = 1, or data of at least 2 with sharding = "parameters"',
    ),
    Limit(
        ("sharding_ranks", "tensor", "context"),
        lambda cases: (
            ((cases.tensor > 1.0) | (cases.context > 1.0))
            & (cases.data > 1.0)
            & (cases.sharding_ranks < 2.0)
        ),
        "replicas without sharding are not combined with divided matrices or sequences",
        "sharding_ranks = 0",
    ),
    SEQUENCE_WHOLE,
    NO_ATTENTION_RECOMPUTE,
    ONLY_FUSED,
    SUMMED_IN_FP32,
)


@dataclass(frozen=True, slots=True)
class Target:
    """One framework.

    Attributes:
        name: As on the command line.
        title: As its authors write it.
        files: What `emit` writes, by name.
        expresses: What it can say, for people.
        fp16: Whether it trains in fp16.
        limits: What it cannot say.
    """

    name: str
    title: str
    files: tuple[str, ...]
    expresses: str
    fp16: bool
    limits: tuple[Limit, ...]


_LIMITS = {
    "outlast": OUTLAST,
    "torchtitan": TORCHTITAN,
    "megatron": MEGATRON,
    "deepspeed": DEEPSPEED,
    "accelerate": ACCELERATE,
}
TARGETS: Mapping[str, Target] = {
    name: Target(
        name, files=tuple(table.pop("files")), limits=(*EVERYWHERE, *_LIMITS.get(name, ())), **table
    )
    for name, table in ((name, dict(table)) for name, table in facts("targets").items())
}

_ANY_CLUSTER = Cluster(
    name="any",
    device="any",
    nodes=1,
    devices_per_node=1,
    fast_domain=1,
    peak_flop_per_s=dict.fromkeys(WEIGHT_BYTES, 1.0),
    matmul_flop_per_s=dict.fromkeys(WEIGHT_BYTES, 1.0),
    memory_bytes=1.0,
    memory_bytes_per_s=1.0,
    fast_bytes_per_s=1.0,
    fabric_bytes_per_s=1.0,
)


def target_named(name: str) -> Target:
    """The target of this name.

    Raises:
        PlanError: There is none.
    """
    if name not in TARGETS:
        raise PlanError(f"target = {name!r} is none of {', '.join(TARGETS)}")
    return TARGETS[name]


def can_express(target: str, cases: Cases, *, fp16: Flags | bool = False) -> Flags:
    """Mask of cases that the configuration of a target can express.

    Args:
        target: Name in `TARGETS`.
        cases: (cases,).
        fp16: (cases,) or one: where the precision is fp16, which `Cases` does not tell from bf16.

    Returns:
        (cases,).

    Raises:
        PlanError: There is no such target.
    """
    chosen = target_named(target)
    able = np.ones(len(cases), dtype=np.bool_)
    if not chosen.fp16:
        able &= ~np.asarray(fp16, dtype=np.bool_)
    for limit in chosen.limits:
        able &= ~limit.beyond(cases)
    return able


def problem(target: str, model: Transformer, run: Configuration) -> str | None:
    """Why the configuration of a target cannot say this run, in one sentence; None where it can.

    Args:
        target: Name in `TARGETS`.
        model: What is trained.
        run: How.

    Raises:
        PlanError: There is no such target.
    """
    chosen = target_named(target)
    if run.precision == "fp16" and not chosen.fp16:
        return _sentence(
            chosen, Limit(("precision",), split, "it has no loss scaling", '"bf16"'), model, run
        )
    one = cases([(model, run, _ANY_CLUSTER)])
    for limit in chosen.limits:
        if bool(limit.beyond(one).any()):
            return _sentence(chosen, limit, model, run)
    return None


def unwritten(target: str, model: Transformer) -> str | None:
    """Why no run of a model can be written for a target, in one sentence; None where some can.

    Args:
        target: Name in `TARGETS`.
        model: What is trained.
    """
    if not model.projection_parameters or target not in ("torchtitan", "megatron"):
        return None
    return (
        f"projection_parameters = {model.projection_parameters} of {model.name}, an attention "
        f"with other matrices than query, key, value and output, is not written for "
        f"{target}: the nearest is accelerate with the model's own config"
    )


def divides_sequences(target: str) -> bool:
    """True if tensor-parallel ranks of a target divide the norms' work (sequence parallelism).

    Raises:
        PlanError: There is no such target.
    """
    return SEQUENCE_WHOLE not in target_named(target).limits


def _sentence(target: Target, limit: Limit, model: Transformer, run: Configuration) -> str:
    said = ", ".join(f"{name} = {_shown(_value(name, model, run))}" for name in limit.settings)
    return (
        f"{said} cannot be expressed for {target.title}: {limit.why}; "
        f"the nearest is {limit.nearest}"
    )


def _value(name: str, model: Transformer, run: Configuration) -> Any:
    return getattr(run, name) if hasattr(run, name) else getattr(model, name)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)
