"""Distributed training of structured layers.

`parallelize_bottleneck` splits a model of low-rank layers over ranks with collectives as wide as
the rank; `group_projections` groups products on one rank; `shard_tensorized` is FSDP2 without empty
shards; `CountedCollectives` counts the bytes of all of them.
"""

from outlast.tensorize.accounting import CountedCollectives, Traffic
from outlast.tensorize.parallel.bottleneck import LLAMA, ModelPlan, parallelize_bottleneck
from outlast.tensorize.parallel.fsdp import (
    WholeCores,
    clip_gradients,
    placement,
    shard_tensorized,
    whole_cores,
)
from outlast.tensorize.parallel.grouped import (
    LLAMA_BLOCK,
    BlockPlan,
    group_projections,
    normalized_projection,
)

__all__ = [
    "LLAMA",
    "LLAMA_BLOCK",
    "BlockPlan",
    "CountedCollectives",
    "ModelPlan",
    "Traffic",
    "WholeCores",
    "clip_gradients",
    "group_projections",
    "normalized_projection",
    "parallelize_bottleneck",
    "placement",
    "shard_tensorized",
    "whole_cores",
]
