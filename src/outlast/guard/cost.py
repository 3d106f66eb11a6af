"""What the guard costs and finds, as pure functions of its settings; needs no torch.

The planner composes these. All costs are of passes over memory: a check reads every matrix of a
product once (`outlast.guard.product`), beside a product whose time is arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outlast.errors import GuardError
from outlast.guard.policy import LEVELS, Level
from outlast.guard.threshold import DEVIATIONS, Rounding, product_bound

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


def correction_seconds(shape: LinearShape, flop_per_s: float, *, rows: int = 128) -> float:
    """Time to put one flagged row right: its tile is computed again and the check made again."""
    share = min(rows / shape.tokens, 1.0)
    return share * shape.flop / shape.count / 3.0 / flop_per_s


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


def false_alarms(checks: float) -> float:
    """Expected clean checks that exceed the threshold, were the differences normal."""
    return checks * math.erfc(DEVIATIONS / math.sqrt(2.0))


def missed_probability(steps: int) -> float:
    """Probability that a fixed pattern of cancelling errors escapes the signs of so many steps."""
    if steps < 0:
        raise GuardError(f"steps = {steps} is below 0")
    return 0.5**steps


@dataclass(frozen=True)
class GuardCost:
    """A level's price and benefit for one run.

    Attributes:
        level: The policy.
        overhead: Share of a step's time that it adds.
        coverage: Share of the step's operations that are checked.
        detection_point: As `detection_point`; None where no product is checked.
        undetected_per_hour: Silent errors that hit unchecked operations, of `errors_per_hour`.
    """

    level: Level
    overhead: float
    coverage: float
    detection_point: float | None
    undetected_per_hour: float


def guard_cost(
    level: Level,
    shapes: Sequence[LinearShape],
    *,
    step_seconds: float,
    bytes_per_s: float,
    stored: str = "bfloat16",
    attention_flop: float = 0.0,
    microbatches: int = 1,
    errors_per_hour: float = 0.0,
) -> GuardCost:
    """Price and benefit of `level` for a model's linear layers.

    Args:
        level: The policy.
        shapes: The linear layers.
        step_seconds: Time of a step without a guard.
        bytes_per_s: See `check_seconds`.
        stored: Type of activations and gradients.
        attention_flop: Operations of attention's products in a step.
        microbatches: Micro-batches per step.
        errors_per_hour: Silent errors of the whole job; 6 in 54 days on 16,384 GPUs were reported
            for Llama 3 (table 5), one per 3.5 million GPU hours.

    Raises:
        GuardError: For an unknown level or a time or rate that is not positive.
    """
    if level not in LEVELS:
        raise GuardError(f"level = {level!r} is not one of {', '.join(LEVELS)}")
    if step_seconds <= 0:
        raise GuardError(f"step_seconds = {step_seconds} is not above 0")
    linear_flop = microbatches * sum(shape.flop for shape in shapes)
    overhead = {"off": 0.0, "light": LIGHT_SHARE}.get(level)
    if overhead is None:
        element_bytes = 4 if stored == "float32" else 2
        added = check_seconds(shapes, element_bytes, bytes_per_s, microbatches=microbatches)
        overhead = added / step_seconds
    coverage = covered_share(level, linear_flop, attention_flop)
    widest = None
    if level in ("linear", "full") and shapes:
        widest = max(detection_point(stored, shape.inputs, shape.outputs) for shape in shapes)
    return GuardCost(level, overhead, coverage, widest, errors_per_hour * (1.0 - coverage))
