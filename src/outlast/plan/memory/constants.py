"""The constants of the memory model: what each means, its prior and its bound."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np

from outlast.plan.cases import Array
from outlast.plan.constants import Prior

_MIB = 2.0**20

MEMORY_PRIORS: dict[str, Prior] = {
    "bucket_bytes": Prior(
        "B per parameter",
        0.2,
        1.5,
        {},
        8.0,
        "gradient buckets beside the gradients where replicas sum them: nearly nothing in DDP with "
        "views and in Megatron-LM, one bf16 copy in nanotron",
    ),
    "copy_bytes": Prior(
        "B per parameter",
        0.2,
        1.5,
        {},
        4.0,
        "copies that gathering the new weights of a sharded optimizer leaves behind",
    ),
    "gather_buffers": Prior(
        "1",
        1.0,
        0.7,
        {},
        math.inf,
        "buffers of one undivided hidden tensor that tensor-parallel layers keep for gathering",
    ),
    "workspace_bytes": Prior(
        "B", 64.0 * _MIB, 0.7, {}, math.inf, "workspaces of libraries that count as allocated"
    ),
    "hidden_values": Prior(
        "1",
        4.0,
        0.04,
        {},
        math.inf,
        "tensors of the hidden width that a block keeps: inputs of two norms and two products "
        "(2205.05198, section 4.1; dropout masks would add 1)",
    ),
    "attention_values": Prior(
        "1",
        2.25,
        0.1,
        {},
        math.inf,
        "tensors of the query and of the key width that attention keeps: 2 in theory (query, key, "
        "value, output), more where rotation or a transposition copies",
    ),
    "logit_copies": Prior(
        "1",
        1.0,
        0.25,
        {},
        math.inf,
        "share of logits kept once in the run's precision and twice in that of the loss",
    ),
    "backward_blocks": Prior(
        "1",
        1.0,
        0.4,
        {},
        math.inf,
        "gradients of activations that exist at once, in what one block keeps",
    ),
    "buffers_ahead": Prior(
        "1",
        5.0,
        1.5,
        {"framework": 2.0},
        64.0,
        "undivided hidden tensors that wait for tensor-parallel collectives while the host has "
        "started later kernels: a stream's queue of 1,024 launches holds 64 blocks' collectives "
        "at most",
    ),
    "fragment_share": Prior(
        "1",
        0.12,
        0.6,
        {},
        1.0,
        "memory that the allocator holds in pieces that fit no tensor, over activations",
    ),
    "step_copy_bytes": Prior(
        "B per parameter",
        0.3,
        1.2,
        {},
        4.0,
        "buffers of the step of a sharded optimizer that exist only while it runs",
    ),
    "library_bytes": Prior(
        "B", 300.0 * _MIB, 0.6, {}, math.inf, "what is reserved beside everything else"
    ),
    "process_bytes": Prior(
        "B",
        550.0 * _MIB,
        0.3,
        {},
        math.inf,
        "on processors in place of library_bytes: resident memory of a process with torch and "
        "transformers that trains a tiny model (0.6 GB measured, the reference trainer)",
    ),
    "stuck_share": Prior(
        "1",
        0.6,
        0.25,
        {"framework": 0.5},
        1.0,
        "part of the fragments that the allocator cannot give back when memory runs out: nearly "
        "none with expandable segments, most of them without, which is the program's setting",
    ),
    "usable_share": Prior(
        "1",
        0.972,
        0.008,
        {"framework": 0.008},
        1.0,
        "memory that the allocator can get over the device's: the context and NCCL's buffers of "
        "the program's communicators need the rest",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConstants:
    """Values of the constants of `MEMORY_PRIORS`, of shape (1,), or (cases,) where runs differ.

    Attributes:
        moment_bytes: Of the optimizer's state beside the fp32 weights, per parameter: 8 for Adam,
            4 for momentum alone (SGD). It is known, and never fitted; hidden matrices that Muon
            updates have 4 anyway.
    """

    bucket_bytes: Array
    copy_bytes: Array
    gather_buffers: Array
    workspace_bytes: Array
    hidden_values: Array
    attention_values: Array
    logit_copies: Array
    backward_blocks: Array
    buffers_ahead: Array
    fragment_share: Array
    step_copy_bytes: Array
    library_bytes: Array
    process_bytes: Array
    stuck_share: Array
    usable_share: Array
    moment_bytes: Array = field(default_factory=lambda: np.full(1, 8.0))


MEMORY_NAMES: tuple[str, ...] = tuple(
    item.name for item in fields(MemoryConstants) if item.name in MEMORY_PRIORS
)


def memory_constants(
    values: Mapping[str, float | Array] | None = None,
    *,
    moment_bytes: float | Array = 8.0,
) -> MemoryConstants:
    """Constants with the priors' medians where nothing is given.

    Args:
        values: By name, of shape (), (1,) or (cases,).
        moment_bytes: Of the optimizer's state per parameter.
    """
    given = values or {}
    return MemoryConstants(
        **{
            name: np.atleast_1d(
                np.asarray(given.get(name, MEMORY_PRIORS[name].median), dtype=np.float64)
            )
            for name in MEMORY_NAMES
        },
        moment_bytes=np.atleast_1d(np.asarray(moment_bytes, dtype=np.float64)),
    )
