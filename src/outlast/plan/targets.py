"""Frameworks that a plan can be written out for, and what the configuration of each can say.

The search asks `can_express` to stay within a framework; `problem` says the same of one run, in a
sentence. What a framework itself can run, by hand-written code too, is in
`outlast.plan.constraints`: that is asked of runs that were made elsewhere, and is wider.

Which limits a target has and how they are said is in `facts/targets.toml`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outlast.errors import PlanError
from outlast.plan.batch import RECOMPUTE, SHARDING, WEIGHT_BYTES, Cases, Mask, cases, remainder
from outlast.plan.cluster import Cluster
from outlast.plan.facts import facts

if TYPE_CHECKING:
    from outlast.plan.configuration import Configuration
    from outlast.plan.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Target:
    """One framework.

    Attributes:
        name: As on the command line.
        title: As its authors write it.
        files: What `emit` writes, by name.
        expresses: What it can say, for people.
        fp16: Whether it trains in fp16.
        limits: What it cannot say, by the names of `beyond`.
    """

    name: str
    title: str
    files: Sequence[str]
    expresses: str
    fp16: bool
    limits: Sequence[str]


TARGETS: Mapping[str, Target] = {
    name: Target(name=name, **table) for name, table in facts("targets")["targets"].items()
}


def beyond(many: Cases) -> dict[str, Mask]:
    """Masks of the cases in which a target would have to say what it cannot, by limit.

    Returns:
        (cases,) or (1,) each.
    """
    piped, several = many.pipeline > 1.0, many.data > 1.0
    chunked = piped & (many.stages_per_rank > 1.0)
    tensor, context, expert = many.tensor > 1.0, many.context > 1.0, many.expert > 1.0
    sharded, experts = many.sharding > 0.0, many.experts > 0.0
    optimizer = (many.sharding == SHARDING["optimizer"]) & several
    gradients = (many.sharding == SHARDING["gradients"]) & several
    whole_batch = remainder(many.batch, many.data * many.micro_batch)
    other_schedule = piped & ((many.zero_bubble > 0.0) | (many.gpipe > 0.0))
    rounds = np.maximum(np.floor(many.micro_batches / many.pipeline), 1.0)
    uneven_rounds = chunked & remainder(many.micro_batches, many.pipeline)
    kv_heads = np.rint(many.kv_width * many.heads / many.query_width)
    few_ranks = many.sharding_ranks < 2.0
    return {
        "whole_batch": whole_batch,
        "sharding_groups": sharded & remainder(many.data, many.sharding_ranks),
        "enough_blocks": piped & (many.layers < many.pipeline * many.stages_per_rank),
        "gpipe_stages": chunked & (many.gpipe > 0.0),
        "heads": remainder(many.heads, many.tensor) | remainder(kv_heads, many.tensor),
        "experts": expert
        & (
            (many.experts < 1.0)
            | remainder(many.experts, many.expert)
            | remainder(many.data, many.expert)
        ),
        "sequence_halves": context & remainder(many.sequence, 2.0 * many.context),
        "summed_in_fp32": many.gradient_bytes != 4.0,
        "no_context": context,
        "no_expert": expert,
        "no_pipeline": piped,
        "no_attention_recompute": many.recompute == RECOMPUTE["attention"],
        "no_optimizer_sharding": optimizer,
        "sequence_whole": tensor & (many.sequence_parallel > 0.0),
        "only_fused": many.fused_attention == 0.0,
        "no_fp8": many.quantized > 0.0,
        "half_sums": (many.gradient_bytes != 4.0)
        & ((many.gradient_bytes != 2.0) | (many.half == 0.0)),
        "a_micro_batch_each": many.batch < many.data * many.micro_batch,
        "whole_batch_in_pipeline": piped & whole_batch,
        "no_tensor_in_pipeline": piped & tensor,
        "no_sharding_in_pipeline": piped & sharded & several,
        "only_dense_in_pipeline": piped & (experts | (many.matrices < 3.0) | (many.tied > 0.0)),
        "sharded_with_tensor": tensor & several & ((many.sharding < 1.0) | few_ranks),
        "no_experts_with_tensor": tensor & experts,
        "fully_sharded": optimizer | gradients,
        "plain_schedules": other_schedule,
        "whole_rounds": uneven_rounds,
        "even_stages": piped & (many.by_cost > 0.0),
        "sharded_with_context": context & (many.sharding < 3.0),
        "experts_in_sharding_group": expert
        & ((many.sharding < 1.0) | remainder(many.sharding_ranks, many.expert)),
        "no_tensor_with_experts": expert & tensor,
        "zero_bubble_chunks": piped & (many.zero_bubble > 0.0) & (many.stages_per_rank < 2.0),
        "equal_rounds": chunked & remainder(many.micro_batches, rounds),
        "untied_in_pipeline": piped & (many.tied > 0.0),
        "gated": many.matrices < 3.0,
        "interleaved_schedules": other_schedule,
        "optimizer_sharding_in_pipeline": piped & (many.sharding > 1.0) & several,
        "interleaved_rounds": uneven_rounds,
        "sequence_parallel_experts": experts & tensor & (many.sequence_parallel == 0.0),
        "one_sharding_group": sharded & (many.sharding_ranks < many.data),
        "dense_with_tensor": tensor & experts,
        "fsdp_group": (tensor | context)
        & ((many.sharding < 2.0) | (few_ranks & (many.context < 2.0))),
        "sharded_when_divided": (tensor | context) & several & few_ranks,
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


def can_express(target: str, many: Cases, *, fp16: Mask | bool = False) -> Mask:
    """Mask of cases that the configuration of a target can express.

    Args:
        target: Name in `TARGETS`.
        many: (cases,).
        fp16: (cases,) or one: where the precision is fp16, which `Cases` does not tell from bf16.

    Returns:
        (cases,).

    Raises:
        PlanError: There is no such target.
    """
    chosen, masks = target_named(target), beyond(many)
    able = np.ones(len(many), dtype=np.bool_)
    if not chosen.fp16:
        able &= ~np.asarray(fp16, dtype=np.bool_)
    for limit in chosen.limits:
        able &= ~masks[limit]
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
    chosen, masks = target_named(target), beyond(cases([(model, run, _ANY_CLUSTER)]))
    found = [limit for limit in chosen.limits if masks[limit].any()]
    if run.precision == "fp16" and not chosen.fp16:
        found.insert(0, "no_fp16")
    if not found:
        return None
    limit = facts("targets")["limits"][found[0]]
    # As JSON: true and false, and texts in quotes.
    values = {
        name: getattr(run if hasattr(run, name) else model, name) for name in limit["settings"]
    }
    said = ", ".join(f"{name} = {json.dumps(value)}" for name, value in values.items())
    return (
        f"{said} cannot be expressed for {chosen.title}: {limit['why']}; the nearest is "
        f"{limit['nearest']}"
    )


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
    """True if tensor-parallel ranks of a target divide the norms' work (sequence parallelism)."""
    return "sequence_whole" not in target_named(target).limits
