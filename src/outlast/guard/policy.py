"""Levels of the guard, exceptions by module name, and the checks that each level makes."""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from outlast.errors import GuardError

if TYPE_CHECKING:
    from collections.abc import Iterable

Level = Literal["off", "light", "linear", "full"]
LEVELS: tuple[Level, ...] = ("off", "light", "linear", "full")
"""Each covers what the one before covers, and more.

light: optimizer state and parameters at rest, and the optimizer's updates, a slice per round.
linear: every matrix product, convolution, recurrent layer and embedding, forward and backward;
    gradient reductions.
full: attention by rows, normalisation and loss as well, and the whole optimizer every step.
"""


@dataclass(frozen=True)
class Policy:
    """Choice of checks, and of the action on findings.

    Attributes:
        level: Of all modules.
        modules: Name patterns (as in a shell: ``*.mlp.*``) and the level of the modules that match;
            the last that matches counts. A module's level is never above `level`'s reach for what
            is not a module (optimizer, collectives).
        correct: Compute flagged numbers again and put the right ones in place. Without it
            findings are counted only, as ``detected``, and stop nothing.
        persistent: Done when numbers stay wrong: ``raise`` DataCorruptionError on every rank,
            or ``drop`` the gradient of the ranks concerned and rescale the others'.
        seed: Of the check vectors.
        light_budget: Share of a step's time that level ``light`` may take.
        audit: Share of a step's time that audits may take, at every level that checks; 0: none are
            made. See `outlast.guard.audit`.
        audit_steps: Repeat a whole step's passes in `Guard.attempts`, where micro-batches are not
            given to `Guard.audit`; what else the loop's body does is then done twice, too.
        audit_period: Steps per audit, whatever it costs; 0: as many as `audit` asks for.
    """

    level: Level = "linear"
    modules: dict[str, Level] = field(default_factory=dict)
    correct: bool = True
    persistent: Literal["raise", "drop"] = "raise"
    seed: int = 0
    light_budget: float = 0.0005
    audit: float = 0.0
    audit_steps: bool = True
    audit_period: int = 0

    def __post_init__(self) -> None:
        for name, level in (("policy", self.level), *self.modules.items()):
            if level not in LEVELS:
                near = difflib.get_close_matches(str(level), LEVELS, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise GuardError(f"{name} = {level!r} is not one of {', '.join(LEVELS)}{hint}")
        if self.persistent not in ("raise", "drop"):
            raise GuardError(f"persistent = {self.persistent!r} is not raise or drop")
        if not 0.0 < self.light_budget <= 1.0:
            raise GuardError(f"light_budget = {self.light_budget} is not above 0 and at most 1")
        if not 0.0 <= self.audit <= 1.0:
            raise GuardError(
                f"audit = {self.audit} is no share of the time from 0 to 1; give 0.005 for 0.5 %"
            )
        if self.audit_period < 0:
            raise GuardError(f"audit_period = {self.audit_period} is not 0 or more steps")

    @property
    def audits(self) -> bool:
        """Return whether audits are made."""
        return self.level != "off" and (self.audit > 0.0 or self.audit_period > 0)

    def level_of(self, module: str) -> Level:
        """The level of the module of this name."""
        found = self.level
        for pattern, level in self.modules.items():
            if fnmatch.fnmatchcase(module, pattern):
                found = level
        return found

    def reaches(self, level: Level, module: str | None = None) -> bool:
        """Return whether checks of `level` are made (in the module of this name)."""
        own = self.level if module is None else self.level_of(module)
        return LEVELS.index(own) >= LEVELS.index(level)


def policy_of(given: Policy | Level) -> Policy:
    """A policy from itself or from the name of a level."""
    return given if isinstance(given, Policy) else Policy(level=given)


@dataclass(frozen=True)
class Operation:
    """One kind of check.

    Attributes:
        level: The lowest policy level that makes it.
        check: The identity that must hold.
        sees: Which wrong values it finds.
        blind: Which it cannot find.
        corrects: Whether what it finds is computed again and corrected.
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
        "any wrong value in Y above the detection point; at level full any bit of a Y of at most "
        "65,536 numbers in 16 bits that a transient fault has changed (CPU), as in all products",
        "errors of one row whose signed sum vanishes (half of the steps' draws show them); "
        "an X that was wrong before; the same wrong values twice, if the worst case of rounding "
        "could give them; the addition of a bias where X has 3 or more dimensions and gaps",
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
        "as above; what happens to dW after it was computed; db of a layer whose weight is frozen",
        corrects=True,
    ),
    "linear.saved": Operation(
        "linear",
        "X u of the saved X equals X u of the forward pass, where a dW has failed its check",
        "an X that changed in memory between forward and backward",
        "a change below the detection point of dW",
        corrects=False,
    ),
    "linear.recompute": Operation(
        "linear",
        "X u of the forward pass equals X u of its recomputation (activation checkpointing), bit "
        "for bit on the CPU and with deterministic algorithms, else up to rounding",
        "whatever made the two forward passes of a block differ before any of its linear layers",
        "differences behind the block's last linear layer; compiled blocks, whose recomputation is "
        "the compiler's",
        corrects=False,
    ),
    "product": Operation(
        "linear",
        "C v = alpha A (B v) + beta D v for random signs v, per row, of every mm, addmm, bmm, "
        "baddbmm and mv that is not of a linear layer, forward and backward, whoever calls it",
        "any wrong value in C above the detection point",
        "errors of one row whose signed sum vanishes; operands that were wrong before; products in "
        "float8 or of sparse tensors, and those that a compiler has fused into other kernels",
        corrects=True,
    ),
    "bias.gradient": Operation(
        "linear",
        "the gradient of what was added to a larger tensor, such as a bias, summed a second time",
        "any wrong bit",
        "the same wrong values twice; a dY that was wrong before",
        corrects=True,
    ),
    "convolution": Operation(
        "linear",
        "sum_p r_p Y_p = W (sum_p r_p X_q(p)) + b for random signs r over positions, per output "
        "channel of each sample (transposed ones likewise)",
        "any wrong value in Y above the detection point",
        "errors of one channel whose signed sum vanishes; an X that was wrong before",
        corrects=True,
    ),
    "convolution.dx": Operation(
        "linear",
        "the same for dX, from dY, per input channel of each sample",
        "any wrong number in dX above the detection point",
        "as above; a dY that was wrong before",
        corrects=True,
    ),
    "convolution.dw": Operation(
        "linear",
        "dW (u t) + db = dY (X (u t) + 1) for random signs u over input channels and t over the "
        "kernel, per output channel",
        "any wrong number in dW or db above the detection point",
        "as above; db of a transposed convolution elsewhere than on the CPU",
        corrects=True,
    ),
    "recurrent": Operation(
        "linear",
        "a layer of LSTM or GRU that is one operation of oneDNN: its outputs and gradients, "
        "computed a second time, bit for bit; a third time decides",
        "any wrong bit",
        "the same wrong values twice",
        corrects=True,
    ),
    "embedding.forward": Operation(
        "linear",
        "every output row has the bits of its row of the table, gathered a second time",
        "any wrong bit of the output",
        "a table that was wrong before; wrong ids",
        corrects=True,
    ),
    "embedding.dw": Operation(
        "linear",
        "dW u = sum of dY u over a row's tokens, for random signs u, per token; other rows are 0",
        "any wrong number in dW above the detection point; any number in a row without tokens",
        "errors of one row whose signed sum vanishes; a dY that was wrong before; on the CPU in 16 "
        "bits, most of rows that hundreds of tokens use",
        corrects=True,
    ),
    "norm.forward": Operation(
        "full",
        "computed a second time with the same bits (CPU); elsewhere Y v = r (X - mean) (v g) + b v "
        "for random signs v, mean and r found again, per row",
        "any bit that a transient fault has changed (CPU); any wrong value in Y above the "
        "detection point, a wrong mean or variance; an X that changed before the backward pass",
        "the same wrong value twice (CPU); errors of one row whose signed sum vanishes; an X that "
        "was wrong before; running statistics; batch, group and instance norms elsewhere",
        corrects=True,
    ),
    "norm.dx": Operation(
        "full",
        "computed a second time with the same bits (CPU); elsewhere "
        "dX u = r (dY (g u) - m1 sum u - m2 x_hat u) for random signs u, per row",
        "any bit that a transient fault has changed (CPU); any wrong number in dX above the "
        "detection point, a wrong saved mean or r",
        "as above; a dY that was wrong before; corrects no RMSNorm of fp32 data, since its parts "
        "of dX have continued already (detected)",
        corrects=True,
    ),
    "norm.dw": Operation(
        "full",
        "computed a second time with the same bits (CPU); elsewhere "
        "dg = sum dY x_hat and db = sum dY, summed again, per feature",
        "any bit that a transient fault has changed (CPU); any wrong number in dg or db above the "
        "detection point",
        "as for norm.dx; what happens to dg and db after they were computed",
        corrects=True,
    ),
    "norm.repeated": Operation(
        "full",
        "batch and group normalisation, running statistics, layer norms that are not of a module "
        "that norm.forward knows, and their gradients, computed a second time, bit for bit; a "
        "third time decides (on the CPU)",
        "any wrong bit",
        "the same wrong values twice; an input that was wrong before; norms that are written in "
        "element-wise operations",
        corrects=True,
    ),
    "attention.sums": Operation(
        "linear",
        "fused attention on the CPU, going back, per channel of each head: sum dV = sum dO, "
        "sum V dV = sum dO O, sum dK = 0 and sum Q dQ = sum K dK; where one fails, the checks of "
        "level full decide",
        "a wrong dQ, dK or dV above the detection point, and an O that was wrong when it was used "
        "(detected)",
        "an O, or a dQ, where dO or Q is near 0; errors whose sums vanish (there are no random "
        "signs here); an O that no gradient comes back to, and the first of two that activation "
        "checkpointing computes",
        corrects=True,
    ),
    "attention.forward": Operation(
        "full",
        "O v = P (V v) for random signs v over the channels, with P made again (CPU, fused); "
        "elsewhere every O lies between the smallest and largest V of its channel",
        "a wrong O or log-sum-exp above the detection point, before it is used (CPU); elsewhere an "
        "O out of that range or not finite: high exponent bits",
        "errors below the detection point (CPU); elsewhere all errors within the range, and wrong "
        "scores: attention.dv sees those later; dropout",
        corrects=True,
    ),
    "attention.output": Operation(
        "full",
        "the same going back, with O, Q, K, V and the log-sum-exp that are used there (CPU, "
        "fused); elsewhere a 64-bit hash of O as it is handed on, and again going back",
        "what changed of them after O was handed on, above the detection point (CPU); elsewhere "
        "any bit of O",
        "an O that was wrong when it was handed on, by less; elsewhere, without deterministic "
        "kernels, one that activation checkpointing has computed again",
        corrects=False,
    ),
    "attention.dq": Operation(
        "full",
        "dQ v = s dS (K v), with dS made again (CPU, fused)",
        "a wrong dQ above the detection point",
        "errors below it; elsewhere than on the CPU: attention.dk",
        corrects=True,
    ),
    "attention.dv": Operation(
        "full",
        "dV v = P^T (dO v), with P made again (CPU, fused); elsewhere sum dV = sum dO (without "
        "dropout) and sum V dV = sum dO O, per channel of each head",
        "a wrong dV above the detection point; elsewhere also a log-sum-exp that changed, and an O "
        "that was wrong when it was used (detected)",
        "errors below it; elsewhere scores that are wrong in both passes alike; errors whose sums "
        "vanish (there are no random signs here); an O that was used and wrong by less",
        corrects=True,
    ),
    "attention.dk": Operation(
        "full",
        "dK v = s dS^T (Q v), with dS made again (CPU, fused); elsewhere sum dK = 0 and sum Q dQ = "
        "sum K dK, per channel of each head",
        "a wrong dK above the detection point; elsewhere also a wrong dQ or D = sum dO O",
        "errors below it; elsewhere a dS that is wrong and still sums to zero; as above; a dQ "
        "where Q is near 0, or whose keys are frozen; a gradient of the mask",
        corrects=True,
    ),
    "loss.forward": Operation(
        "full",
        "computed a second time with the same bits (CPU, with all options, and mse, l1, smooth l1, "
        "huber, nll, kl_div and binary cross-entropy); elsewhere cross-entropy of two dimensions: "
        "log-sum-exp - logit of the target, found again",
        "any bit that a transient fault has changed (CPU); a wrong loss above the detection point",
        "the same wrong value twice (CPU); elsewhere class weights, probabilities as targets, "
        "logits of more than two dimensions, other losses; targets that need a gradient",
        corrects=True,
    ),
    "loss.dlogits": Operation(
        "full",
        "computed a second time with the same bits (CPU); elsewhere each row sums to zero",
        "any bit that a transient fault has changed (CPU), logits that changed before; any wrong "
        "number in dlogits above the detection point",
        "the same wrong value twice (CPU); errors of one row whose sum vanishes; a row of the "
        "right shape with a wrong factor; what loss.forward does not cover",
        corrects=True,
    ),
    "softmax.forward": Operation(
        "full",
        "softmax and log_softmax computed a second time have the same bits (on the CPU)",
        "any bit that a transient fault has changed, before it is used",
        "the same wrong value twice; an input that was wrong before; other devices",
        corrects=True,
    ),
    "softmax.dlogits": Operation(
        "full",
        "the gradient computed a second time has the same bits (on the CPU)",
        "any bit that a transient fault has changed; an input or output that changed since",
        "as above",
        corrects=True,
    ),
    "weight": Operation(
        "linear",
        "the weight summed along both sides equals its sums from the step's first use",
        "a weight that changed in memory during the step",
        "a weight that was wrong before the step's first use",
        corrects=False,
    ),
    "optimizer.moments": Operation(
        "light",
        "m^2 <= R^2 v (Cauchy and Schwarz) and v >= 0 (Adam, AdamW); step counts go up by one",
        "a first moment that is too large for its second one, a negative v, one of both not finite",
        "a second moment that became larger; one that became smaller after a few steps, since "
        "gradients fill it again; other optimizers; at level light, what has spread as infinities "
        "before its slice's turn, which is reported as not finite",
        corrects=False,
    ),
    "optimizer.update": Operation(
        "light",
        "|p_new - (1 - lr wd) p_old| <= lr reach per coordinate (Adam, AdamW), or in norm (Muon)",
        "a step that moved a parameter further than any gradients could",
        "wrong updates that are not longer than that; other optimizers; learning rates on a device",
        corrects=False,
    ),
    "optimizer.finite": Operation(
        "light",
        "momentum is finite where gradient and parameter are (SGD, Muon); all numbers are finite",
        "a momentum spoilt by no gradient; a training that has diverged, which is no fault",
        "finite errors; for unknown optimizers, whether a fault or the data did it",
        corrects=False,
    ),
    "weight.range": Operation(
        "light",
        "no parameter of a slice is larger than its largest was, and as far as it can have moved",
        "a parameter that has grown at rest, within the scrubber's period (Adam, AdamW, Muon)",
        "changes within the range; betas that change, or with b1^2 >= b2; programs that write",
        corrects=False,
    ),
    "rest": Operation(
        "light",
        "a 64-bit hash of parameters and optimizer state after a step, and before the next one",
        "any bit that changed between steps in the slice that is watched (at level full: anywhere)",
        "bits that changed where the scrubber was not: a lasting one is left to the other checks",
        corrects=True,
    ),
    "buffer.rest": Operation(
        "full",
        "every buffer equals its copy: from a step's end until `attempts()` begins the next, and "
        "until the update where the step before has not changed it",
        "a single bit that changed; where the passes have used it, they are repeated",
        "more than one changed bit, which counts as written by the program; counters (integers of "
        "one element); statistics of batch norms while passes run, or without `attempts()`",
        corrects=True,
    ),
    "replicas": Operation(
        "light",
        "the same hashes on all replicas (DDP)",
        "any difference between replicas, within the scrubber's period",
        "what is wrong on all of them; which of two is right, unless another check tells",
        corrects=True,
    ),
    "all_reduce": Operation(
        "linear",
        "s y = sum_r s b_r per bucket of DDP, or per module of HSDP's replicas, for random signs s",
        "a part that changed on its way, and a result that is wrong on any rank: all ranks know it",
        "a bucket that changed before it was summed, or after, as it was copied to the gradients; "
        "errors whose signed sum vanishes (at least a quarter of the steps' draws show them); "
        "sparse gradients; results that are not finite in a step whose gradients are not",
        corrects=False,
    ),
    "reduce_scatter": Operation(
        "linear",
        "the same per FSDP2 module and destination, added up over a step's microbatches",
        "as above",
        "as above",
        corrects=False,
    ),
    "all_gather": Operation(
        "linear",
        "64-bit hashes of each shard, sent and received, chained over a step's all-gathers",
        "any bit that changed on its way, on any rank",
        "a shard that was wrong before it was sent; what happens as it is copied to the parameters",
        corrects=False,
    ),
    "audit.gradient": Operation(
        "light",
        "gradients and buffers of a micro-batch that was drawn equal those of its second "
        "computation, on another rank where there is one; bit for bit with deterministic "
        "algorithms and on a CPU with one thread, else within a measured tolerance",
        "whatever was wrong in either computation, also in element-wise and custom operations",
        "what happens between two audits; a fault that repeats itself on the same device where "
        "there is no other rank; what happens to gradients after the passes (sums, clipping)",
        corrects=False,
    ),
    "audit.loss": Operation(
        "light",
        "the loss of that micro-batch equals that of its second computation",
        "as above",
        "as above; loops whose passes are repeated by attempts(), which does not know the loss",
        corrects=False,
    ),
    "audit.data": Operation(
        "light",
        "a 64-bit hash of that micro-batch as it arrived, after its passes and, in `outlast "
        "train`, as it is read again",
        "a batch that changed in memory after it had arrived, or was read wrongly",
        "data that are wrong where they are stored; without a second reading, what was wrong when "
        "it arrived",
        corrects=False,
    ),
    "audit.update": Operation(
        "light",
        "parameters and state of a slice after an optimizer's step equal, bit for bit, those of a "
        "second step of copies of what was there before",
        "any wrong bit of the update, of any optimizer that updates parameters one by one",
        "what happens between two audits, and outside of the slice; a fault that repeats itself; "
        "hooks of the optimizer",
        corrects=True,
    ),
}
"""All checks, by the name of what they check; printed as the table of the documentation."""


@dataclass(frozen=True)
class Coverage:
    """The checks of one module, or the reason why it has none.

    Attributes:
        module: Its name in the model.
        kind: Its class.
        operations: The checks that were made in its optimizer's last step, or since; before the
            first step those that are expected. Empty for a module without any.
        why_not: In a few words, where `operations` is empty.
    """

    module: str
    kind: str
    operations: tuple[str, ...]
    why_not: str = ""


@dataclass(frozen=True)
class StepCoverage:
    """Operations of one step, and the share of them that was checked.

    FLOPs of products, convolutions and the like are those of their sums; all other operations count
    one per element of their output or input. Bytes are those of inputs and outputs.

    Attributes:
        step: The surveyed step, from 1.
        flops: Of all operations that were executed, forward, backward and in the optimizer.
        bytes: Of the same.
        unchecked: Share of the FLOPs without a check, by operation, the largest first.
        unchecked_bytes: Share of the bytes without a check, likewise.
        places: By operation and module: FLOPs and bytes that were checked, and those that were not.
            Modules that differ in numbers alone are one.
    """

    step: int
    flops: float
    bytes: float
    unchecked: dict[str, float]
    unchecked_bytes: dict[str, float]
    places: dict[tuple[str, str], tuple[float, float, float, float]] = field(default_factory=dict)

    @property
    def covered(self) -> float:
        """Share of the FLOPs that was checked."""
        return 1.0 - sum(self.unchecked.values())

    @property
    def covered_bytes(self) -> float:
        """Share of the bytes that was checked."""
        return 1.0 - sum(self.unchecked_bytes.values())

    def __str__(self) -> str:
        said = (
            f"{_percent(self.covered)} of the step's FLOPs checked "
            f"({_percent(self.covered_bytes)} of its bytes)"
        )
        if self.unchecked:
            said += f"; not checked: {_shares(self.unchecked)}"
        only_moved = {
            name: share
            for name, share in self.unchecked_bytes.items()
            if name not in self.unchecked
        }
        if only_moved:
            said += f"; moved without a check, of the bytes: {_shares(only_moved)}"
        return said


_NAMED = 8


def _shares(shares: dict[str, float]) -> str:
    """The largest by name, and what the others are together, so that nothing is missing."""
    named = [*shares.items()]
    shown, rest = named[:_NAMED], named[_NAMED:]
    texts = [f"{name} ({_percent(share)})" for name, share in shown]
    if rest:
        others = "others" if len(rest) > 1 else "other"
        texts.append(f"{len(rest)} {others} ({_percent(sum(share for _, share in rest))})")
    return ", ".join(texts)


def _percent(share: float) -> str:
    """In percent, with a decimal, or with two digits where that would give 0 or 100."""
    text = f"{100.0 * share:.1f}"
    if text in {"0.0", "100.0"} and 0.0 < share < 1.0:
        # Of the smaller part, whichever it is.
        rest = min(share, 1.0 - share)
        digits = min(1 - math.floor(math.log10(100.0 * rest)), 12)
        text = f"{100.0 * share:.{digits}f}"
    return f"{text} %"


class Coverages(list[Coverage]):
    """Every module with its checks; as a string, what was checked of the last surveyed step.

    Attributes:
        step: Of all operations of that step; None before the first, at level ``light``, and where
            it could not be counted.
        why_not: Why it could not.
    """

    def __init__(
        self, items: Iterable[Coverage], step: StepCoverage | None = None, why_not: str = ""
    ) -> None:
        super().__init__(items)
        self.step, self.why_not = step, why_not

    def __str__(self) -> str:
        covered = sum(bool(item.operations) for item in self)
        said = f"{covered} of {len(self)} modules with parameters have checks"
        if self.step is not None:
            said = f"step {self.step.step}: {self.step}; {said}"
        return f"{said}; {self.why_not}" if self.why_not else said


@dataclass(frozen=True)
class Uncovered:
    """Everything that no executed check has watched in the last step of each optimizer.

    Checks of optimizer state and of weights at rest are no part of it: they do not see what a
    module computes.

    Attributes:
        modules: Modules with parameters in which no check was made, and why.
        parameters: Parameters with a gradient that was made, in whole or in part, by an operation
            without a check, and why.
        operations: Matrix products and the like without a check, of the last step whose graph was
            looked at, and how often each was called.
        count: Number of parameters with a gradient.
        elements: Their elements.
        unwatched: Elements of `parameters`.
        flops: Share of the operations without a check in the FLOPs of the forward passes' matrix
            products that gradients go through; None where it is not known, as in compiled graphs.
    """

    modules: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    operations: dict[str, int] = field(default_factory=dict)
    count: int = 0
    elements: int = 0
    unwatched: int = 0
    flops: float | None = None

    def __bool__(self) -> bool:
        return bool(self.modules or self.parameters or self.operations)

    def __str__(self) -> str:
        parts = []
        if self.parameters:
            share = self.unwatched / max(self.elements, 1)
            parts.append(
                f"{len(self.parameters)} of {self.count} parameters ({share:.3g} of the trained "
                f"elements) got a gradient that no check watched: {summarized(self.parameters)}"
            )
        # The others are in the names of their parameters.
        holders = {name.rpartition(".")[0] for name in self.parameters}
        idle = {name: why for name, why in self.modules.items() if name not in holders}
        if idle:
            parts.append(f"no check ran in {summarized(idle)}")
        if self.operations:
            calls = {name: f"{count}x" for name, count in sorted(self.operations.items())}
            parts.append(f"operations without a check: {summarized(calls)}")
        if self.flops:
            parts.append(f"{self.flops:.3g} of the matrix products' FLOPs had no check")
        return "; ".join(parts)


def summarized(named: dict[str, str]) -> str:
    """The first of them in one line; see `collapsed`."""
    texts = [f"{name} ({said})" for name, said in collapsed(named).items()]
    more = f" and {len(texts) - 6} more" if len(texts) > 6 else ""
    return ", ".join(texts[:6]) + more


def collapsed(named: dict[str, str]) -> dict[str, str]:
    """Names with what is said of each; those that differ in numbers alone are one, and counted."""
    alike: dict[str, list[str]] = {}
    for name in named:
        alike.setdefault(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name), []).append(name)
    found = {}
    for pattern, names in alike.items():
        said = " or ".join(dict.fromkeys(named[name] for name in names))
        if len(names) > 1:
            found[pattern] = f"{len(names)} of them, {said}"
        else:
            found[names[0] or "the model itself"] = said
    return found


def table() -> str:
    """`OPERATIONS` as the Markdown table of the documentation."""
    heads = ("check", "level", "identity", "sees", "cannot see", "corrects")
    rows = [
        (
            f"`{name}`",
            operation.level,
            operation.check,
            operation.sees,
            operation.blind,
            "yes" if operation.corrects else "no",
        )
        for name, operation in OPERATIONS.items()
    ]
    # A bar inside a cell would end it.
    cells = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    lines = [heads, ("---",) * len(heads), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table())
