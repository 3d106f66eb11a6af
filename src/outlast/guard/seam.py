"""The places where numbers may go wrong, as one function that is called there.

Training has no seam: `Watch.seam` is None. `outlast.guard.inject` sets one to put faults where the
hardware would, between a computation and its check, also when the computation is done again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

SITES = (
    "linear.operand",  # x as the unit reads it; a copy, so that only this product sees the fault
    "linear.output",  # y before its check
    "linear.saved",  # x as kept for the backward pass
    "linear.dy",  # the incoming gradient
    "linear.dx",
    "linear.dw",
    "linear.check",  # sums of the check itself
    "weight",  # a parameter at rest, in the step
    "attention.output",
    "attention.dq",
    "attention.dk",
    "attention.dv",
    "norm.output",
    "norm.dx",
    "norm.dw",
    "loss.output",
    "loss.dlogits",
    "embedding.output",
    "embedding.dw",
    "weight.rest",  # a parameter at rest, between steps
    "optimizer.state",  # a moment at rest, between steps
    "bucket.before",  # a gradient bucket before its reduction
    "bucket.during",  # another rank's part of it
    "bucket.after",
    "gather.during",  # an own shard on its way to the other ranks
    "gather.after",  # gathered parameters
)


class Seam(Protocol):
    """Called with the numbers of a site; may change them in place."""

    def __call__(self, site: str, module: str, numbers: Tensor) -> None:
        """`numbers`: of any shape, about to be used by whatever follows the site."""
