"""Which operation is covered by which check, and what the check cannot see."""

from __future__ import annotations

from dataclasses import dataclass

from outlast.guard.policy import Level


@dataclass(frozen=True)
class Operation:
    """One kind of check.

    Attributes:
        level: The lowest policy level that makes it.
        check: The identity that must hold.
        sees: Which wrong numbers it finds.
        blind: Which it cannot find.
        corrects: Whether what it finds is computed again and put right.
    """

    level: Level
    check: str
    sees: str
    blind: str
    corrects: bool


OPERATIONS: dict[str, Operation] = {
    "linear.forward": Operation(
        "linear",
        "Y v = X (v W) + b v for random signs v, per row",
        "any wrong number in Y above the detection point",
        "errors of one row whose signed sum vanishes (half of the steps' draws show them); "
        "an X that was wrong before",
        corrects=True,
    ),
    "linear.dx": Operation(
        "linear",
        "dX u = dY (W u) for random signs u, per row",
        "any wrong number in dX above the detection point",
        "as above; a dY that was wrong before",
        corrects=True,
    ),
    "linear.dw": Operation(
        "linear",
        "dW u + db = dY^T (X u + 1), per output feature, X u from the forward pass",
        "any wrong number in dW or db above the detection point; a saved X that has changed",
        "as above; what happens to dW after it was computed",
        corrects=True,
    ),
    "weight": Operation(
        "linear",
        "the weight summed along both sides equals its sums from the step's first use",
        "a weight that changed in memory during the step",
        "a weight that was wrong before the step's first use",
        corrects=False,
    ),
}
"""All checks, by the name of what they check; printed as the table of the documentation."""


@dataclass(frozen=True)
class Coverage:
    """Whether one module is checked, and why not.

    Attributes:
        module: Its name in the model.
        kind: Its class.
        operations: The checks that it gets; empty for a module without any.
        why_not: In a few words, where `operations` is empty.
    """

    module: str
    kind: str
    operations: tuple[str, ...]
    why_not: str = ""
