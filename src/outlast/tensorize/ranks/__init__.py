"""Ranks that follow the training: shrink what carries nothing, grow what is too narrow.

A change really changes the sizes of parameters and of the optimizer's moments, at a step boundary
and with the function of the layer kept as far as the new rank allows. Whoever holds on to the old
parameters (compiled graphs, gradient codes, replicas) hears of it by a callback; a model that FSDP
has sharded is changed as a whole and sharded again (`change_sharded`).
"""

from outlast.tensorize.ranks.adapt import (
    change_sharded,
    energy_rank,
    explained_rank,
    grow,
    match_ranks,
    shrink,
)
from outlast.tensorize.ranks.control import RankControl
from outlast.tensorize.ranks.resize import RankChange, resize, singular_values

__all__ = [
    "RankChange",
    "RankControl",
    "change_sharded",
    "energy_rank",
    "explained_rank",
    "grow",
    "match_ranks",
    "resize",
    "shrink",
    "singular_values",
]
