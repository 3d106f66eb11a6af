"""Cross-entropy, checked by a second log-sum-exp and by the rows of its gradient.

With class indices as targets, P = softmax(logits) and C classes, the loss of a row is
``lse - (1 - e) x_target - e mean(x)`` for label smoothing e, where lse is computed again. Every row
of the gradient sums to zero, since P and the smoothed targets both sum to one::

    sum_v dlogits_v = 0

Roundings, beside those of `threshold`: log-probabilities L are kept in the loss's type and a row's
P = exp(L) are off by their roundings, which adds at most ``u^2 / 3 sum_v P_v^2 L_v^2 <= 4 / e^2
u^2 / 3`` relative to the row's weight. The sum of exponentials runs in at least `_LANES` lanes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional

from outlast.guard.elements import name_of
from outlast.guard.judged import judge
from outlast.guard.probes import (
    Seen,
    floor_of,
    powers_squared,
    put_output_right,
    put_right,
    summing,
    watched,
)
from outlast.guard.replaced import Replaced
from outlast.guard.threshold import Rounding, product_bound, unit_roundoff

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from outlast.guard.judged import Judged
    from outlast.guard.probes import Gradients
    from outlast.guard.watch import Watch

_REPLACED = Replaced(functional, "cross_entropy")
_LANES = 8
_CHUNK = 1 << 22
"""Logits that are read at a time by checks."""


class LossChecks:
    """Checks all calls of ``torch.nn.functional.cross_entropy`` whose logits require a gradient.

    Args:
        watch: What all checks of the guard share.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def replacing(self) -> AbstractContextManager[None]:
        """Put the check in place of the function for all callers, until the context ends."""
        return _REPLACED.by(self._stand_in)

    def prefer(self) -> None:
        """Of several that replace the function, be the one that is called."""
        _REPLACED.prefer(self._stand_in)

    def _stand_in(self, original: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        given = dict(zip(("input", "target"), args, strict=False))
        given |= {name: options.pop(name) for name in ("input", "target") if name in options}
        if len(args) > len(given) or len(given) < 2:
            return original(*args, **options)
        return _checked(self.watch, original, (given["input"], given["target"]), options)


def checked_cross_entropy(watch: Watch, logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    """``torch.nn.functional.cross_entropy`` with its bits, checked.

    Args:
        watch: What all checks of the guard share.
        logits: (rows, classes). Other shapes are not checked.
        target: (rows,) class indices. Probabilities are not checked.
        options: As of the original; a loss with class weights is not checked.
    """
    return _checked(watch, _REPLACED.original, (logits, target), options)


def _checked(
    watch: Watch,
    original: Callable[..., Tensor],
    given: tuple[Tensor, Tensor],
    options: dict[str, Any],
) -> Tensor:
    logits, target = given
    options = {name: value for name, value in options.items() if value is not None}
    applies = (
        not torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and logits.requires_grad
        and logits.dim() == 2
        and target.dim() == 1
        and logits.numel() > 0
        and set(options) <= {"ignore_index", "reduction", "label_smoothing"}
        and not isinstance(logits, DTensor)
    )
    if not applies:
        return original(logits, target, **options)
    return _Call(watch, original, options).run(logits, target)


@dataclass(frozen=True)
class _Call:
    """One call of cross-entropy."""

    watch: Watch
    original: Callable[..., Tensor]
    options: dict[str, Any]

    @property
    def smoothing(self) -> float:
        return float(self.options.get("label_smoothing", 0.0))

    @property
    def reduction(self) -> str:
        return str(self.options.get("reduction", "mean"))

    def compute(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.original(logits, target, **self.options)

    def run(self, logits: Tensor, target: Tensor) -> Tensor:
        """The loss of logits (rows, classes) and target (rows,)."""
        # Kept for the backward check: what it needs of each row, found in the forward pass.
        timed = self.watch.timed
        rows = timed(self._rows, logits.detach(), target)
        inputs = (logits, target)
        kept = (*inputs, rows.valid, rows.logsum, rows.size)
        loss = watched(self.compute, inputs, kept, self.timed_backward)
        self.watch.touch("loss.output", "loss", loss.data)

        def again() -> Tensor:
            with torch.no_grad():
                return self.watch.touched("loss.output", "loss", self.compute(*inputs))

        site = self.watch.ledger.site("loss", "loss.forward")
        put_output_right(self.watch, site, loss, again, partial(self._judge_forward, rows))
        return loss

    def _rows(self, logits: Tensor, target: Tensor) -> _Rows:
        valid = target != int(self.options.get("ignore_index", -100))
        index = torch.where(valid, target, 0)[:, None]
        parts = []
        step = max(_CHUNK // logits.shape[1], 1)
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        for first in range(0, len(logits), step):
            wide = logits[first : first + step].to(dtype)
            largest = wide.amax(dim=1, keepdim=True)
            picked = (wide.gather(1, index[first : first + step]) - largest).double()
            logsum = (wide - largest).exp_().sum(dim=1, keepdim=True).double().log_()
            # Without smoothing it does not matter, and may be infinite.
            mean = torch.zeros_like(picked)
            if self.smoothing:
                mean = (wide.mean(dim=1, keepdim=True) - largest).double()
            size = largest.double().abs() + logsum
            parts.append(torch.cat([picked, logsum, mean, size], dim=1))
        picked, logsum, mean, size = torch.cat(parts).unbind(dim=1)
        return _Rows(valid, picked, logsum, mean, size, name_of(dtype), logits.shape[1])

    def _judge_forward(self, rows: _Rows, loss: Tensor) -> Judged:
        smooth = self.smoothing
        likely, even = rows.picked - rows.logsum, rows.mean - rows.logsum
        expected = -(1.0 - smooth) * likely - smooth * even
        expected = torch.where(rows.valid, expected, 0.0)
        stored = unit_roundoff(name_of(loss.dtype))
        unit = unit_roundoff(rows.summed) ** 2 / 3.0
        serial = 2.0 + rows.classes / (16.0 * _LANES**2)
        # Of the original and of this check: logits minus the largest, the sum, and its logarithm.
        shifted = ((1.0 - smooth) * rows.picked).square() + (smooth * rows.mean).square() * serial
        variance = 2.0 * unit * (shifted + serial + rows.size.square())
        # The CPU rounds the logarithm, too, to the loss's type.
        variance = variance + stored**2 / 3.0 * (
            rows.logsum.square()
            + ((1.0 - smooth) * likely).square()
            + (smooth * even).square() * serial
        )
        variance = torch.where(rows.valid, variance, 0.0)
        found = loss.double()
        lost = floor_of(1, loss.dtype, torch.float64)
        if self.reduction == "none":
            powers = powers_squared(loss, torch.float64)
            return judge(found - expected, variance + stored**2 / 3.0 * powers + lost, powers)
        count = rows.valid.sum() if self.reduction == "mean" else 1
        total = (expected.sum() / count)[None]
        squares = (expected.square().sum() / count**2)[None]
        found = found[None]
        powers = powers_squared(loss[None], torch.float64)
        rounding = Rounding(name_of(loss.dtype), name_of(loss.dtype))
        bound = product_bound(rounding, len(expected), 1)
        spread = bound.variance(powers, squares) + variance.sum() / count**2
        return judge(found - total, spread, powers)

    def timed_backward(self, seen: Seen) -> Gradients:
        return self.watch.timed(self.backward, seen)

    def backward(self, seen: Seen) -> Gradients:
        """Check the rows of dlogits."""
        logits, target, valid, logsum, size = seen.kept
        gradient = seen.gradients[0]
        if gradient is None:
            return seen.gradients
        weights = seen.dy.detach().double().abs()
        if self.reduction == "mean":
            weights = weights / valid.sum()
        weights = torch.where(valid, weights, 0.0)

        def again() -> list[Tensor | None]:
            (fresh, *_) = seen.again((logits, target))
            return [fresh if fresh is None else self._touched(fresh)]

        site = self.watch.ledger.site("loss", "loss.dlogits")
        unit = unit_roundoff(name_of(seen.dy.dtype))
        # Every class adds the same small part to a row's sum of gradients: roundings to one side.
        smoothed = (logits.shape[1] / (2.0 * _LANES)) ** 2 if self.smoothing else 0.0
        accumulated = min(unit, unit_roundoff("float32")) ** 2 / 3.0
        # Of P in their logarithms and as they are multiplied, and of their common sum.
        probabilities = 1.0 + 4.0 * math.exp(-2.0) + logsum.square()
        serial = 2.0 + logits.shape[1] / (16.0 * _LANES**2)
        relative = unit**2 / 3.0 * probabilities
        relative = relative + accumulated * (serial + smoothed + size.square())
        judged = partial(_judge_rows, weights.square() * relative)
        given = [self._touched(gradient)]
        return (*put_right(self.watch, site, given, again, judged), None)

    def _touched(self, gradient: Tensor) -> Tensor:
        return self.watch.touched("loss.dlogits", "loss", gradient)


@dataclass(frozen=True)
class _Rows:
    """What a check knows of rows, relative to each row's largest logit; all (rows,) in fp64.

    Attributes:
        valid: Bool: whether the target is not the one to ignore.
        picked: The target's logit.
        logsum: Logarithm of the sum of exponentials.
        mean: Mean logit.
        size: What the log-sum-exp is rounded at where it is one number: |largest| + logsum.
        summed: Type of the sums that these were found with.
        classes: Logits per row.
    """

    valid: Tensor
    picked: Tensor
    logsum: Tensor
    mean: Tensor
    size: Tensor
    summed: str
    classes: int


def _judge_rows(fixed: Tensor, given: Sequence[Tensor]) -> Judged:
    """Whether rows of dlogits (rows, classes) sum to zero; `fixed`: variance beside storing."""
    (gradient,) = given
    dtype, classes = summing(gradient), gradient.shape[1]
    step = max(_CHUNK // classes, 1)
    sums, powers = [], []
    for first in range(0, len(gradient), step):
        part = gradient[first : first + step]
        sums.append(part.to(dtype).sum(dim=1))
        powers.append(powers_squared(part, dtype).sum(dim=1))
    power = torch.cat(powers).double()
    stored = unit_roundoff(name_of(gradient.dtype)) ** 2 / 3.0
    own = unit_roundoff(name_of(dtype)) ** 2 / 3.0 * 4.0 * (32.0 + classes / 64.0)
    variance = (stored + own) * power + fixed
    variance = variance + floor_of(classes, gradient.dtype, dtype)
    return judge(torch.cat(sums).double(), variance, power)
