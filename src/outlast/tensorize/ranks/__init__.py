"""Ranks that follow the training: shrink what carries nothing, grow what is too narrow.

A change really changes the sizes of parameters and of the optimizer's moments, at a step boundary
and with the function of the layer kept as far as the new rank allows. Whoever holds on to the old
parameters (FSDP units, compiled graphs, gradient codes, replicas) hears of it by a callback.
"""

from outlast.tensorize.ranks.control import RankControl
from outlast.tensorize.ranks.grow import explained_rank, grow
from outlast.tensorize.ranks.resize import RankChange, match_ranks, resize
from outlast.tensorize.ranks.shrink import energy_rank, shrink
from outlast.tensorize.ranks.spectrum import spectrum

__all__ = [
    "RankChange",
    "RankControl",
    "energy_rank",
    "explained_rank",
    "grow",
    "match_ranks",
    "resize",
    "shrink",
    "spectrum",
]
