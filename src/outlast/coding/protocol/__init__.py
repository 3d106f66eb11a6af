"""Gradient coding over torch.distributed.

from outlast.coding.protocol import Coverage
coverage = Coverage(model, chunks_per_rank=8)
outcome = coverage.step(step, lambda chunk: loss_of(model, batch(step, chunk)))
optimizer.step()
"""

from outlast.coding.protocol.all_reduce import CodedAllReduce, CodedReduce, ReduceOutcome
from outlast.coding.protocol.coverage import Coverage, CoverageOutcome, Disagreement
from outlast.coding.protocol.peers import CodedGossip, CodedServer

__all__ = [
    "CodedAllReduce",
    "CodedGossip",
    "CodedReduce",
    "CodedServer",
    "Coverage",
    "CoverageOutcome",
    "Disagreement",
    "ReduceOutcome",
]
