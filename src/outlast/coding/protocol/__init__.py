"""Gradient coding over torch.distributed.

from outlast.coding.protocol import Coverage
coverage = Coverage(model, chunks_per_rank=8)
outcome = coverage.step(step, lambda chunk: loss_of(model, batch(step, chunk)))
optimizer.step()

`Coverage`, `CodedAllReduce` and, inside DDP, `coded_hook` work by collectives; `Hub` and
`Worker`, `TreeRoot` and `TreeNode`, and `Gossip` by messages between two processes.
"""

from outlast.coding.protocol.coded import CodedAllReduce, Outcome
from outlast.coding.protocol.coverage import Coverage
from outlast.coding.protocol.covered import Covered, Disagreement
from outlast.coding.protocol.gossip import Gossip
from outlast.coding.protocol.hook import DecodingState, coded_hook
from outlast.coding.protocol.server import Hub
from outlast.coding.protocol.tree import TreeRoot
from outlast.coding.protocol.tree_node import TreeNode
from outlast.coding.protocol.worker import Worker

__all__ = [
    "CodedAllReduce",
    "Coverage",
    "Covered",
    "DecodingState",
    "Disagreement",
    "Gossip",
    "Hub",
    "Outcome",
    "TreeNode",
    "TreeRoot",
    "Worker",
    "coded_hook",
]
