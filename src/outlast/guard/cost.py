"""Cost and detection rate of the guard, as pure functions of its settings; needs no torch.

The planner composes these. All costs are of passes over memory: a check reads every matrix of a
product once (`outlast.guard.product`), beside a product whose time is arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outlast.errors import GuardError
from outlast.guard.policy import Level
from outlast.guard.threshold import Rounding, product_bound

LIGHT_SHARE = 0.0005
"""Share of a step that level ``light`` may take; see `Policy.light_budget`."""


@dataclass(frozen=True)
class LinearShape:
    """A linear layer in one step.

    Attributes:
        tokens: Rows per micro-batch.
        inputs: Features in.
        outputs: Features out.
        count: Layers of this shape.
    """

    tokens: int
    inputs: int
    outputs: int
    count: int = 1

    @property
    def flop(self) -> float:
        """Operations forward and backward of one micro-batch, all layers: 6 n k m."""
        return 6.0 * self.tokens * self.inputs * self.outputs * self.count


def check_bytes(shape: LinearShape, element_bytes: int, microbatches: int = 1) -> float:
    """Bytes that the checks of one step read.

    Forward X and Y, backward dY, dX and dW, and W once per step (twice read, summed along both
    sides in one pass).
    """
    tokens, inputs, outputs = shape.tokens, shape.inputs, shape.outputs
    activations = 2.0 * tokens * (inputs + outputs)
    per_microbatch = activations + inputs * outputs
    return shape.count * element_bytes * (microbatches * per_microbatch + inputs * outputs)


def check_seconds(
    shapes: Sequence[LinearShape],
    element_bytes: int,
    bytes_per_s: float,
    *,
    microbatches: int = 1,
    call_seconds: float = 5e-5,
) -> float:
    """Time that level ``linear`` adds to a step.

    Args:
        shapes: The model's linear layers.
        element_bytes: 2 for 16-bit training, 4 for fp32.
        bytes_per_s: What one pass over memory achieves (a GPU: most of its HBM bandwidth; one CPU
            core: 20 to 30 GB/s).
        microbatches: Micro-batches per step.
        call_seconds: Fixed cost of the checks of one layer and micro-batch, forward and backward.

    Raises:
        GuardError: For a rate that is not positive.
    """
    if bytes_per_s <= 0:
        raise GuardError(f"bytes_per_s = {bytes_per_s} is not above 0")
    read = sum(check_bytes(shape, element_bytes, microbatches) for shape in shapes)
    calls = microbatches * sum(shape.count for shape in shapes)
    return read / bytes_per_s + calls * call_seconds


def covered_share(level: Level, linear_flop: float, attention_flop: float) -> float:
    """Share of a step's operations whose results are checked (element-wise ones are too few).

    Args:
        level: The policy.
        linear_flop: Of all linear layers, forward and backward.
        attention_flop: Of the products of attention.
    """
    covered = {"off": 0.0, "light": 0.0, "linear": linear_flop}.get(
        level, linear_flop + attention_flop
    )
    return covered / (linear_flop + attention_flop)


def detection_point(stored: str, terms: int, outputs: int, *, read: str = "") -> float:
    """Smallest error surely found, as a share of the checked row's 2-norm.

    For rows of zero-mean numbers, where the squares of the products sum to about the row's own.

    Args:
        stored: The type of the product's output, e.g. ``bfloat16``.
        terms: Products summed for one number.
        outputs: Numbers in a row.
        read: The type to which the unit rounds its operands, e.g. ``tf32``; empty for none.
    """
    bound = product_bound(Rounding(stored, read=read, summed="float32"), terms, outputs)
    return bound.detection_point(square_share=1.0)
