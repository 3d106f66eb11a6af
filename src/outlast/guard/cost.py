"""Cost and detection rate of the guard, as pure functions of its settings; needs no torch.

The planner composes these. All costs are of passes over memory: a check reads every matrix of a
product once (`outlast.guard.product`), beside a product whose time is arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outlast.errors import GuardError
from outlast.guard.policy import Level, Policy
from outlast.guard.threshold import Rounding, product_bound

LIGHT_SHARE = Policy.light_budget
"""Share of a step that level ``light`` may take."""


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


def audit_period(audit_seconds: float, step_seconds: float, budget: float) -> int:
    """Steps per audit, so that audits take the share `budget` of the time of steps.

    Args:
        audit_seconds: Of one audit: of a micro-batch's passes done again, and its comparison.
        step_seconds: Of one step without an audit.
        budget: Share of the time, above 0.

    Raises:
        GuardError: For a budget or a time that is not positive.
    """
    if not budget > 0.0:
        raise GuardError(f"budget = {budget} is not above 0")
    if not step_seconds > 0.0:
        raise GuardError(f"step_seconds = {step_seconds} is not above 0")
    return max(math.ceil(audit_seconds / (budget * step_seconds)), 1)


def detection_probability(share: float, faults: int = 1) -> float:
    """Probability that audits find at least one of some faults: ``1 - (1 - share)^faults``.

    For faults that change a bit of what is compared (or more than the tolerance), in computations
    that are independent of one another and of the draw of those that are audited.

    Args:
        share: Of the computations that are audited: one micro-batch of each period's.
        faults: Number of computations that are wrong.

    Raises:
        GuardError: For a share outside of 0 to 1, or a number below 0.
    """
    if not 0.0 <= share <= 1.0 or faults < 0:
        raise GuardError(
            f"share = {share} and faults = {faults} are no share from 0 to 1 and no number of 0 "
            "or more"
        )
    if share == 1.0:
        return float(faults > 0)
    return -math.expm1(faults * math.log1p(-share))


def steps_until_detected(period: int, *, every: float = 1.0, confidence: float = 0.95) -> int:
    """Steps within which a fault that stays is found, with probability `confidence`.

    Each period has one audit, at a step that is drawn. The fault may begin right after the audit of
    its period, so that n audits need n + 1 periods. An audit shows it with probability `every`, and
    n audits with ``1 - (1 - every)^n``.

    Args:
        period: Steps per audit.
        every: Share of the micro-batches that the fault hits; 1: all of them.
        confidence: Above 0, and below 1 unless `every` is 1.

    Raises:
        GuardError: For values outside of these limits.
    """
    if period < 1 or not 0.0 < every <= 1.0 or not 0.0 < confidence <= 1.0:
        raise GuardError(
            f"period = {period}, every = {every} and confidence = {confidence} must be 1 or more, "
            "and shares above 0 and at most 1"
        )
    if every == 1.0:
        audits = 1
    elif confidence == 1.0:
        raise GuardError("confidence = 1 needs every = 1: draws leave a chance to miss; give 0.95")
    else:
        audits = math.ceil(math.log1p(-confidence) / math.log1p(-every) - 1e-9)
    return (audits + 1) * period
