"""Cross-entropy, other losses and softmax.

On the CPU all of them are computed twice, forward and backward, and compared bit for bit
(`RepeatedCall`). Elsewhere cross-entropy with class indices as targets is checked by a second
log-sum-exp and by the rows of its gradient.

With class indices as targets, P = softmax(logits) and C classes, the loss of a row is
``lse - (1 - e) x_target - e mean(x)`` for label smoothing e, where lse is computed again. Every row
of the gradient sums to zero, since P and the smoothed targets both sum to one::

    sum_v dlogits_v = 0

Roundings, with S the sum of a row's exponentials relative to its largest logit, lse = log S, L the
log-probabilities, H = -sum P L, and u of the loss's type. What torch computes was measured on the
CPU for bf16, fp16 and fp32: 16-bit logits are widened, and S is summed in fp32, but S, log S and L
are each rounded to the loss's type before they are used::

    L_v = round(x_v - max - round(log(round(S))))

So a log-probability is off by at most ``u (1 + |lse| + |L_v|)``. In fp32, whose exp and log have
errors of a last place and whose differences round, too, it is ``u (2 + 2 |lse| + |x_v - max| +
|L_v|)``. The sum of a row's P is off by ``u (1 + |lse| + H)`` of its weight, in fp32 by twice that.
Storing dlogits adds ``u sum |dlogits_v|`` and half the smallest spacing per class. These are worst
cases, which rows and classes that are alike attain together: roundings are independent only where
numbers differ. With so few roundings they are no wider than `DEVIATIONS` standard deviations.

The sum S of C exponentials in at least `_LANES` lanes rounds in fp32 as in `threshold`. Where a
share a of neighbouring classes have equal logits, its steps round alike: another ``a C / 2 lanes``
roundings; and what is smaller than a rounding of its lane's sum is lost. Rows' losses are added up
in the loss's type, `_BRANCHES` at a time in a tree (nll_loss of the CPU), so that each level of it
adds the roundings of so many partial sums.

Numbers that come out a second time with the same bits are compared with fp64, element by element,
and are called rounding only within the worst case of all of these with a sum of C terms in series.
"""

from __future__ import annotations

import math
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from outlast.guard.attention import calling_attention
from outlast.guard.autograd_hooks import (
    Seen,
    corrected,
    corrected_output,
    floor_of,
    powers_squared,
    repeated_gradients,
    repeated_output,
    same_bits,
    watched,
)
from outlast.guard.forward_patch import FunctionPatch
from outlast.guard.replica_hashes import hash64
from outlast.guard.residual import accumulating, is_half, name_of, residual_test, summing
from outlast.guard.threshold import DEVIATIONS, unit_roundoff
from outlast.state.sharded import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from outlast.guard.autograd_hooks import Gradients
    from outlast.guard.residual import ResidualTest
    from outlast.guard.watch import Watch

_REPLACED = FunctionPatch(functional, "cross_entropy")
_LOSSES = tuple(
    FunctionPatch(functional, name)
    for name in (
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "nll_loss", "kl_div"),
        *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
    )
)
_SOFTMAX = tuple(
    FunctionPatch(owner, name)
    for owner in (functional, torch, torch.Tensor)
    for name in ("softmax", "log_softmax")
)
_LANES = 8
_BRANCHES = 16
"""Rows whose losses torch's nll_loss adds one after the other, on each level of a tree."""
_MASKED = -1e4
"""Logits relative to the largest, below which exponentials vanish in every type."""
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
        logits, target = given["input"], given["target"]
        options = {name: value for name, value in options.items() if value is not None}
        applies = (
            not torch.compiler.is_compiling()
            and torch.is_grad_enabled()
            and logits.requires_grad
            and logits.numel() > 0
            and not is_dtensor(logits)
            and not is_dtensor(target)
        )
        if applies and self.watch.repeats_on(logits.device):
            compute = partial(original, **options)
            return RepeatedCall(self.watch, "loss", compute).run(logits, target)
        applies = (
            applies
            and logits.dim() == 2
            and target.dim() == 1
            and set(options) <= {"ignore_index", "reduction", "label_smoothing"}
        )
        if not applies:
            return original(logits, target, **options)
        return _Call(self.watch, original, options).run(logits, target)


_CALLS = threading.local()


class RepeatChecks:
    """Checks softmax and losses other than cross-entropy by computing them twice, on the CPU.

    Args:
        watch: What all checks of the guard share.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def replacing(self) -> AbstractContextManager[object]:
        """Put the check in place of the functions for all callers, until the context ends."""
        undo = ExitStack()
        for function, stand_in in self._functions():
            undo.enter_context(function.by(stand_in))
        return undo

    def prefer(self) -> None:
        """Of several that replace the functions, be the one that is called."""
        for function, stand_in in self._functions():
            function.prefer(stand_in)

    def _functions(self) -> Iterator[tuple[FunctionPatch, Callable[..., Tensor]]]:
        yield from ((function, self._loss) for function in _LOSSES)
        yield from ((function, self._softmax) for function in _SOFTMAX)

    def _loss(self, original: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        return self._run("loss", "loss", original, args, options)

    def _softmax(self, original: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        within = calling_attention("")
        name = f"{within}.softmax" if within else "softmax"
        return self._run("softmax", name, original, args, options)

    def _run(
        self,
        kind: str,
        name: str,
        original: Callable[..., Tensor],
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> Tensor:
        if "input" in options:
            args = (options.pop("input"), *args)
        if not args or not isinstance(args[0], torch.Tensor):
            return original(*args, **options)
        first, *others = args
        applies = (
            not getattr(_CALLS, "inside", False)
            and torch.is_grad_enabled()
            and first.requires_grad
            and first.numel() > 0
            and self.watch.repeats_on(first.device)
            and not is_dtensor(first)
            # Those may be used several times; see `outlast.guard.autograd_hooks`.
            and not any(
                isinstance(item, torch.Tensor) and (item.requires_grad or is_dtensor(item))
                for item in (*others, *options.values())
            )
            and (name == kind or self.watch.policy.reaches("full", name.removesuffix(".softmax")))
        )
        if not applies:
            return original(*args, **options)

        def compute(given: Tensor) -> Tensor:
            _CALLS.inside = True
            try:
                return original(given, *others, **options)
            finally:
                _CALLS.inside = False

        return RepeatedCall(self.watch, name, compute, kind).run(first)


@dataclass(eq=False)
class RepeatedCall:
    """One call of a function that is computed twice.

    Attributes:
        name: Under which it counts.
        compute: The function of the tensors that may need a gradient.
        kind: First part of the names of its checks.
        digest: Hash of the output as it was handed on.
    """

    watch: Watch
    name: str
    compute: Callable[..., Tensor]
    kind: str = "loss"
    digest: Tensor | None = None

    def run(self, *inputs: Tensor) -> Tensor:
        """The function's value."""
        y = watched(self.compute, inputs, inputs, self.backward)
        self.watch.touch(f"{self.kind}.output", self.name, y.data)

        def again() -> Tensor:
            return self.watch.touched(f"{self.kind}.output", self.name, self.compute(*inputs))

        site = self.watch.ledger.site(self.name, f"{self.kind}.forward")
        repeated_output(self.watch, site, y, again)
        self.digest = self.watch.timed(hash64, [y])
        return y

    def backward(self, seen: Seen) -> Gradients:
        """Compute the gradients a second time, and the output: inputs may have changed since."""
        forward, backward = (
            self.watch.ledger.site(self.name, f"{self.kind}.{part}")
            for part in ("forward", "dlogits")
        )
        places = tuple(range(len(seen.gradients)))
        return repeated_gradients(self.watch, seen, self.digest, forward, [(backward, places)])


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
        kept = (*inputs, rows.valid, rows.logsum, rows.size, rows.entropy, rows.drift)
        loss = watched(self.compute, inputs, kept, self.backward)
        self.watch.touch("loss.output", "loss", loss.data)

        def again() -> Tensor:
            with torch.no_grad():
                return self.watch.touched("loss.output", "loss", self.compute(*inputs))

        def beyond(found: Tensor) -> bool:
            return self._beyond_rounding(logits.detach(), target, found)

        site = self.watch.ledger.site("loss", "loss.forward")
        check = partial(self._judge_forward, rows)
        corrected_output(self.watch, site, loss, again, check, beyond=beyond)
        return loss

    def _rows(self, logits: Tensor, target: Tensor, dtype: torch.dtype | None = None) -> _Rows:
        valid = target != int(self.options.get("ignore_index", -100))
        index = torch.where(valid, target, 0)[:, None]
        parts = []
        step = max(_CHUNK // logits.shape[1], 1)
        dtype = dtype or accumulating(logits)
        for first in range(0, len(logits), step):
            wide = logits[first : first + step].to(dtype)
            largest = wide.amax(dim=1, keepdim=True)
            picked = (wide.gather(1, index[first : first + step]) - largest).double()
            # Without smoothing it does not matter, and may be infinite.
            mean = torch.zeros_like(picked)
            if self.smoothing:
                mean = (wide.mean(dim=1, keepdim=True) - largest).double()
            # Classes that are masked have neither probability nor share in the entropy.
            below = (wide - largest).clamp_(min=_MASKED)
            powers = below.exp()
            total = powers.sum(dim=1, keepdim=True).double()
            logsum = total.log()
            entropy = logsum - torch.linalg.vecdot(powers, below)[:, None].double() / total
            size = largest.double().abs() + logsum
            drift = torch.zeros_like(size) if is_half(logits.dtype) else _drift(powers, total)
            parts.append(torch.cat([picked, logsum, mean, size, entropy, drift], dim=1))
        picked, logsum, mean, size, entropy, drift = torch.cat(parts).unbind(dim=1)
        return _Rows(
            valid, picked, logsum, mean, size, entropy, drift, name_of(dtype), logits.shape[1]
        )

    def _expected(self, rows: _Rows) -> Tensor:
        """Each row's loss (rows,)."""
        likely, even = rows.picked - rows.logsum, rows.mean - rows.logsum
        expected = -(1.0 - self.smoothing) * likely - self.smoothing * even
        return torch.where(rows.valid, expected, 0.0)

    def _worst(self, rows: _Rows, dtype: torch.dtype) -> Tensor:
        """Bound of the rounding to the loss's type in each row's loss, but for its sum S."""
        smooth, unit = self.smoothing, unit_roundoff(name_of(dtype))
        common, differences = (1.0, 0.0) if is_half(dtype) else (2.0, 1.0)
        likely, even = rows.picked - rows.logsum, rows.mean - rows.logsum
        shares = (1.0 - smooth) * (likely.abs() + differences * rows.picked.abs())
        # The sum over classes is rounded as well.
        shares = shares + smooth * (2.0 * even.abs() + differences * rows.mean.abs())
        return torch.where(rows.valid, unit * (common * (1.0 + rows.logsum) + shares), 0.0)

    def _operations(self, loss: Tensor) -> Tensor:
        """Bound of the rounding of a loss behind the sum over rows: mean, weights, their sum."""
        unit = unit_roundoff(name_of(loss.dtype))
        return unit * (7.0 if self.smoothing else 3.0) * loss.detach().double().abs()

    def _reduced(self, rows: _Rows) -> tuple[Tensor | int, int]:
        """Divisor of the sum over rows, and number of roundings on the way to it."""
        count = rows.valid.sum() if self.reduction == "mean" else 1
        levels = max(math.ceil(math.log(max(len(rows.valid), 1), _BRANCHES)), 1)
        return count, min(len(rows.valid) - 1, _BRANCHES) * levels

    def _judge_forward(self, rows: _Rows, loss: Tensor) -> ResidualTest:
        smooth, expected = self.smoothing, self._expected(rows)
        single = unit_roundoff(rows.summed)
        serial = 2.0 + rows.classes / (16.0 * _LANES**2)
        # Of the original and of this check: logits minus the largest, the sum, and its logarithm.
        shifted = ((1.0 - smooth) * rows.picked).square() + (smooth * rows.mean).square() * serial
        spread = 2.0 * single**2 / 3.0 * (shifted + serial + rows.size.square())
        spread = torch.where(rows.valid, spread.sqrt(), 0.0)
        worst = self._worst(rows, loss.dtype) + torch.where(rows.valid, 2.0 * rows.drift, 0.0)
        found = loss.double()
        lost = floor_of(1, loss.dtype, torch.float64)
        if self.reduction == "none":
            powers = powers_squared(loss, torch.float64)
            worst = (worst + self._operations(loss)) / DEVIATIONS
            return residual_test(found - expected, spread.square() + worst.square() + lost, powers)
        count, added = self._reduced(rows)
        powers = powers_squared(loss[None], torch.float64)
        # Rows that are alike round alike: their errors add up.
        spread = (spread.sum() / count)[None]
        worst = (worst.sum() / count)[None] + self._operations(loss)[None]
        stored = unit_roundoff(name_of(loss.dtype)) ** 2 / 3.0
        variance = spread.square() + (worst / DEVIATIONS).square() + stored * added * powers + lost
        return residual_test(found[None] - (expected.sum() / count)[None], variance, powers)

    def _beyond_rounding(self, logits: Tensor, target: Tensor, loss: Tensor) -> bool:
        """Return whether a loss is further from fp64 than rounding can ever bring it."""
        rows = self._rows(logits, target, torch.float64)
        expected, unit = self._expected(rows), unit_roundoff(name_of(loss.dtype))
        summed = unit_roundoff(name_of(accumulating(loss)))
        worst = self._worst(rows, loss.dtype) + summed * (rows.classes + 2.0 * rows.size)
        # Sums over classes and rows that overflow on the way.
        largest = ((1.0 - self.smoothing) * (rows.picked - rows.logsum).abs()).sum()
        largest = largest + rows.classes * (rows.mean - rows.logsum).abs().sum() * bool(
            self.smoothing
        )
        if self.reduction != "none":
            count, added = self._reduced(rows)
            worst = worst.sum() / count + unit * added * expected.sum() / count
            expected = expected.sum() / count
        smallest = 4.0 * unit * torch.finfo(loss.dtype).smallest_normal
        limit = worst + unit * 8.0 * expected.abs() + smallest
        within = (loss.double() - expected).abs() <= limit
        free = ~torch.isfinite(expected) | (largest > torch.finfo(loss.dtype).max)
        return not bool((within | free).all())

    def backward(self, seen: Seen) -> Gradients:
        """Check the rows of dlogits."""
        logits, target, valid, logsum, size, entropy, drift = seen.kept
        gradient = seen.gradients[0]
        if gradient is None:
            return seen.gradients
        weights = seen.dy.detach().double().abs()
        if self.reduction == "mean":
            weights = weights / valid.sum()
        weights = torch.where(valid, weights, 0.0)

        def changed() -> bool:
            # The loss has been used, and the gradient would be that of other logits.
            rows = self._rows(logits, target)
            return not (same_bits(rows.logsum, logsum) and same_bits(rows.size, size))

        def again() -> list[Tensor | None]:
            _, (fresh, *_) = seen.again((logits, target))
            return [fresh if fresh is None else self._touched(fresh)]

        def beyond(given: Sequence[Tensor]) -> bool:
            return self._gradient_beyond_rounding(logits, target, weights, given[0])

        site = self.watch.ledger.site("loss", "loss.dlogits")
        name, classes = name_of(seen.dy.dtype), logits.shape[1]
        unit, single = unit_roundoff(name), min(unit_roundoff(name), unit_roundoff("float32"))
        # Every class adds the same small part to a row's sum of gradients: roundings to one side.
        smoothed = (classes / (2.0 * _LANES)) ** 2 if self.smoothing else 0.0
        serial = 2.0 + classes / (16.0 * _LANES**2)
        common, terms = (1.0, 1.0) if is_half(seen.dy.dtype) else (2.0, 2.0)
        worst = unit * (common * (1.0 + logsum) + terms * entropy)
        worst = worst + drift
        spread = single**2 / 3.0 * (serial + smoothed + size.square())
        judged = partial(_judge_rows, weights.square() * spread, weights * worst)
        given = [self._touched(gradient)]
        right = corrected(self.watch, site, given, again, judged, beyond=beyond, changed=changed)
        return (*right, None)

    def _gradient_beyond_rounding(
        self, logits: Tensor, target: Tensor, weights: Tensor, gradient: Tensor
    ) -> bool:
        """Return whether any of dlogits is further from fp64 than rounding can ever bring it.

        Its sign is that of the loss's own gradient, which is positive or negative for all rows of a
        mean or a sum.
        """
        classes, dtype = logits.shape[1], gradient.dtype
        unit = unit_roundoff(name_of(dtype))
        summed = unit_roundoff(name_of(accumulating(gradient)))
        rows = self._rows(logits, target, torch.float64)
        index = torch.where(rows.valid, target, 0)[:, None]
        smallest = 4.0 * unit * torch.finfo(dtype).smallest_normal
        step = max(_CHUNK // classes, 1)
        for first in range(0, len(logits), step):
            part = slice(first, first + step)
            wide = logits[part].double()
            below = wide - wide.amax(dim=1, keepdim=True)
            likely = below - rows.logsum[part, None]
            share, weight = likely.exp(), weights[part, None]
            target_share = torch.full_like(share, self.smoothing / classes)
            target_share.scatter_add_(
                1, index[part], torch.full_like(share[:, :1], 1.0 - self.smoothing)
            )
            relative = unit * (8.0 + 2.0 * rows.logsum[part, None])
            relative = relative + summed * (classes + 2.0 * rows.size[part, None])
            sizes = weight * (share + target_share)
            off = weight * share * (2.0 * unit * likely.clamp(min=_MASKED).abs())
            limit = relative * sizes + off + smallest
            found, expected = gradient[part].double(), weight * (share - target_share)
            difference = torch.minimum((found - expected).abs(), (found + expected).abs())
            free = ~torch.isfinite(expected) | (sizes > torch.finfo(dtype).max)
            if not bool(((difference <= limit) | free).all()):
                return True
        return False

    def _touched(self, gradient: Tensor) -> Tensor:
        return self.watch.touched("loss.dlogits", "loss", gradient)


@dataclass(frozen=True)
class _Rows:
    """Sums of rows, relative to each row's largest logit; all (rows,) in fp64.

    Attributes:
        valid: Bool: whether the target is not the one to ignore.
        picked: The target's logit.
        logsum: Logarithm of the sum of exponentials.
        mean: Mean logit.
        size: What the log-sum-exp is rounded at where it is one number: |largest| + logsum.
        entropy: -sum P log P.
        drift: How far roundings of the sum that do not cancel can move the loss.
        summed: Type of the sums that these were found with.
        classes: Logits per row.
    """

    valid: Tensor
    picked: Tensor
    logsum: Tensor
    mean: Tensor
    size: Tensor
    entropy: Tensor
    drift: Tensor
    summed: str
    classes: int


def _judge_rows(spread: Tensor, worst: Tensor, given: Sequence[Tensor]) -> ResidualTest:
    """Check that rows of dlogits (rows, classes) sum to zero.

    Args:
        spread: (rows,) variance of what rounds independently.
        worst: (rows,) how far the rest can move a sum, but for the storing of dlogits.
        given: dlogits.
    """
    (gradient,) = given
    dtype, classes = summing(gradient), gradient.shape[1]
    step = max(_CHUNK // classes, 1)
    sums, powers, sizes = [], [], []
    for first in range(0, len(gradient), step):
        part = gradient[first : first + step]
        wide = part.to(dtype)
        sums.append(wide.sum(dim=1))
        sizes.append(wide.abs().sum(dim=1))
        powers.append(powers_squared(part, dtype).sum(dim=1))
    power = torch.cat(powers).double()
    unit = unit_roundoff(name_of(gradient.dtype))
    own = unit_roundoff(name_of(dtype)) ** 2 / 3.0 * 4.0 * (32.0 + classes / 64.0)
    # Classes that are alike are rounded alike, and so are those below the normal numbers.
    spacing = torch.finfo(gradient.dtype).smallest_normal * unit
    worst = worst + unit * torch.cat(sizes).double() + classes * spacing * worst.gt(0)
    variance = (worst / DEVIATIONS).square() + own * power + spread
    variance = variance + floor_of(1, gradient.dtype, dtype)
    return residual_test(torch.cat(sums).double(), variance, power)


def _drift(powers: Tensor, total: Tensor) -> Tensor:
    """Bound of a row's roundings to one side, relative to its sum; (rows, 1) in fp64.

    Steps by equal exponentials round alike, and those of less than a rounding of a lane's sum are
    lost; nearly as much as one lane's share of them, where one lane holds most of the sum.
    """
    unit, classes = unit_roundoff(name_of(powers.dtype)), powers.shape[1]
    equal = ((powers[:, 1:] == powers[:, :-1]) & (powers[:, 1:] > 0)).sum(dim=1, keepdim=True)
    lost = torch.where(powers < unit * total, powers, 0.0).sum(dim=1, keepdim=True) / total
    shares: Tensor = unit * equal.double() / (2.0 * _LANES) + 2.0 * lost.double() / _LANES
    return shares if classes > _LANES else torch.zeros_like(shares)
