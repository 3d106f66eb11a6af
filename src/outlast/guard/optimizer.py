"""Bounds that an optimizer's state and updates never exceed, whatever the gradients were.

*Moments* of Adam and AdamW (Kingma and Ba 2015, algorithm 1), with weights w_i = (1-b1) b1^(t-i)
and u_i = (1-b2) b2^(t-i)::

    m_t = sum_i w_i g_i,   v_t = sum_i u_i g_i^2

Cauchy and Schwarz give ``m_t^2 <= R_t^2 v_t`` with R_t^2 = sum_i w_i^2 / u_i, a geometric series::

    R_t^2 = c (1 - r^t) / (1 - r),   c = (1-b1)^2 / (1-b2),   r = b1^2 / b2

attained by g_i ~ w_i / u_i = (b1/b2)^(t-i), and by every gradient when t = 1. It is bounded in t
when b1^2 < b2 and grows with t otherwise. (Kingma and Ba's max(1, (1-b1)/sqrt(1-b2)) is the case of
one gradient after nothing but zeros.) As a recursion, R_t^2 = r R_(t-1)^2 + c, it also holds for
betas that change from step to step, with the largest r and c among them.

Rounding keeps the form: a step stores ``|m| <= b1' |m| + w' |g|`` and ``v >= b2' v + u' g^2`` with
coefficients that are off by a few unit roundoffs of the state's type; r and c are made of those.
Numbers too small for the type vanish from v before they vanish from m: v is granted a floor.

*Update.* Adam moves a parameter by at most lr R_t sqrt(1 - b2^t) / (1 - b1^t). Muon moves a matrix
by lr times a matrix whose singular values the Newton-Schulz polynomial has mapped from [0, 1].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from outlast.guard.residual import ResidualTest, name_of
from outlast.guard.threshold import DEVIATIONS, unit_roundoff

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

Kind = Literal["adam", "muon", "sgd", "other"]
Number = Any
"""A float, or a 0-dim tensor where the device that holds it is not waited for."""

_UPDATE_ROUNDINGS = 8
"""Of root, bias correction, eps, step size and quotient, in any of torch's implementations."""

_VANISHING = 3
"""Products of a step's second moment that may each lose one smallest normal number."""


def kind_of(optimizer: Optimizer) -> Kind:
    """Name of the bounds that hold for an optimizer; ``other`` where none is known."""
    kinds: dict[type, Kind] = {
        torch.optim.Adam: "adam",
        torch.optim.AdamW: "adam",
        torch.optim.Muon: "muon",
        torch.optim.SGD: "sgd",
    }
    return kinds.get(type(optimizer), "other")


def idle_optimizer(kind: Kind, parameter: Tensor) -> Optimizer:
    """One of this kind, with the state that it has before its first step."""
    optimizers: dict[Kind, Any] = {
        "adam": torch.optim.AdamW,
        "muon": torch.optim.Muon,
        "sgd": torch.optim.SGD,
        "other": torch.optim.Adagrad,
    }
    optimizer: Optimizer = optimizers[kind]([parameter], lr=1e-3)
    names = ("exp_avg", "exp_avg_sq") if kind == "adam" else ("momentum_buffer",)
    state = {name: torch.zeros_like(parameter) for name in names}
    # Fused steps count on the parameter's device, where nothing waits for them.
    steps = torch.zeros((), dtype=torch.float32, device=parameter.device)
    optimizer.state[parameter] = {"step": steps, **state}
    return optimizer


@dataclass(frozen=True)
class Decay:
    """Bound of first moments by second ones: R_t^2 = c (1 - r^t) / (1 - r), rounded.

    Attributes:
        ratio: r, one step's growth of R^2.
        start: c, R^2 after one step.
        floor: What v may have lost because it was too small for its type.
    """

    ratio: float
    start: float
    floor: float

    def widest(self, other: Decay) -> Decay:
        """Holds for any mixture of steps of both."""
        return Decay(
            max(self.ratio, other.ratio), max(self.start, other.start), max(self.floor, other.floor)
        )

    def squared(self, steps: Number) -> Number:
        """R_t^2 after `steps` steps, a float or a tensor; infinite where v says nothing."""
        if not math.isfinite(self.ratio) or not math.isfinite(self.start):
            return math.inf
        if isinstance(steps, torch.Tensor):
            return self.start * _series(self.ratio, steps)
        if self.ratio > 1.0 and steps * math.log(self.ratio) > 700.0:
            return math.inf
        return self.start * _series(self.ratio, steps)


def _series(ratio: float, steps: Number) -> Number:
    """Sum of ratio^i for i below `steps`, from above where the closed form cancels."""
    if ratio == 0.0:
        return 1.0
    power = ratio**steps
    if abs(1.0 - ratio) < 1e-9:
        return steps * (power if ratio > 1.0 else 1.0)
    return (1.0 - power) / (1.0 - ratio)


def decay_of(betas: tuple[float, float], dtype: torch.dtype) -> Decay:
    """The decay of moments stored as `dtype`.

    A step computes m + w (g - m) and v b2 + (1-b2) g g. At most three roundings (of the coefficient
    and of two operations) come before the last one of the first sum; in the second sum, two come
    before it on the left and three on the right.
    """
    beta1, beta2 = betas
    unit = unit_roundoff(name_of(dtype))
    weight = 1.0 - beta1
    # For w >= 1/2 torch computes g - (g - m)(1 - w), with the other coefficient.
    share = ((1.0 + unit) ** 3 - 1.0) * max(weight, beta1)
    kept_first = (1.0 + unit) * (beta1 + share)
    new_first = (1.0 + unit) * (weight + share)
    kept_second = (1.0 - unit) ** 3 * beta2
    new_second = (1.0 - unit) ** 4 * (1.0 - beta2)
    if beta1 == 0.0 and weight == 1.0:
        # lerp with weight 1 returns g itself.
        kept_first, new_first = 0.0, 1.0
    if kept_second == 0.0 and kept_first > 0.0:
        return Decay(math.inf, math.inf, torch.finfo(dtype).smallest_normal)
    ratio = kept_first**2 / kept_second if kept_second else 0.0
    vanished = _VANISHING * torch.finfo(dtype).smallest_normal / (1.0 - kept_second)
    return Decay(ratio, new_first**2 / new_second, vanished)


def adam_reach(decay: Decay, betas: tuple[float, float], eps: float, steps: Number) -> Number:
    """Largest |m_hat| / (sqrt(v_hat) + eps) after `steps` steps: the update per learning rate.

    Where v has vanished, eps is the denominator.
    """
    first, second = 1.0 - betas[0] ** steps, 1.0 - betas[1] ** steps
    ratio = decay.squared(steps) ** 0.5 * second**0.5 / first
    if eps == 0.0:
        return math.inf
    vanished = (decay.floor / second) ** 0.5 / eps
    if isinstance(vanished, torch.Tensor):
        return ratio * vanished.clamp(min=1.0)
    return ratio * max(1.0, vanished)


@lru_cache(maxsize=64)
def stored_eps(eps: float, dtype: torch.dtype) -> float:
    """`eps` as it may be where v = 0: torch adds it in the moments' type, where it may vanish.

    In fp16 Adam's default of 1e-8 does. The update is then m / 0 wherever g^2 has vanished as well,
    which is the data's own.
    """
    return min(eps, float(torch.tensor(eps, dtype=torch.float64, device="cpu").to(dtype)))


def update_slack(dtype: torch.dtype) -> float:
    """By what factor rounding in `dtype` may lengthen an update."""
    return (1.0 + unit_roundoff(name_of(dtype))) ** _UPDATE_ROUNDINGS


@lru_cache(maxsize=256)
def orthogonal_reach(
    coefficients: tuple[float, float, float], iterations: int, longest: int
) -> float:
    """Largest singular value that Newton-Schulz iterations in bf16 make of a matrix of norm 1.

    The iteration maps singular values by x -> a x + b x^3 + c x^5, which is continuous, so [0, s]
    becomes an interval again. Storing X, X X^T and b X X^T + c (X X^T)^2 adds independent
    roundings. A matrix with singular values up to s has entries of root mean square at most
    s / sqrt(longest), and to first order a rounding E moves a singular value by u^T E v with unit
    vectors u and v: `DEVIATIONS` standard deviations of that are allowed each time.

    Args:
        coefficients: a, b and c.
        iterations: Of Newton and Schulz.
        longest: The longer side of the matrix.

    Returns:
        Infinity where the iteration may leave its basin, as for sides of a few numbers.
    """
    a, b, c = coefficients
    stored = DEVIATIONS * unit_roundoff("bfloat16") / math.sqrt(3.0 * longest)
    largest = 1.0 + 4.0 * unit_roundoff("bfloat16")
    for _ in range(iterations):
        x = np.linspace(0.0, largest, 4097)
        image = np.abs(a * x + b * x**3 + c * x**5)
        middle = np.abs(b * x**2 + c * x**4).max()
        gram = largest**2 * x * (abs(b) + 2.0 * abs(c) * x**2)
        largest = float((image + stored * (gram + middle * x + image.max())).max())
        if not largest < 1e3:
            return math.inf
    return largest


def muon_factor(adjustment: str | None, shape: torch.Size) -> float:
    """Factor of the learning rate in `torch.optim.Muon` for a matrix of this shape."""
    rows, columns = shape[:2]
    if adjustment is None or adjustment == "original":
        return math.sqrt(max(1.0, rows / columns))
    if adjustment == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return 1.0


@dataclass(frozen=True)
class Examined:
    """Result of a check of some numbers.

    Attributes:
        judged: Its worst difference is in multiples of the bound.
        not_finite: How many numbers are not finite in a way that gradients can bring about.
    """

    judged: ResidualTest
    not_finite: int | Tensor


@lru_cache(maxsize=64)
def adam_reach_ever(decay: Decay, betas: tuple[float, float], eps: float) -> float:
    """Largest `adam_reach` over all steps, infinite where it grows without end."""
    if not decay.ratio < 1.0 or eps == 0.0:
        return math.inf
    # Beyond this many steps all powers are below the rounding of one half.
    last = math.ceil(-55.0 / math.log2(max(*betas, decay.ratio, 0.5)))
    steps = np.arange(1.0, last + 1.0)
    first, second = 1.0 - betas[0] ** steps, 1.0 - betas[1] ** steps
    squared = decay.start * (1.0 - decay.ratio**steps) / (1.0 - decay.ratio)
    reach = np.sqrt(squared * second) / first * np.maximum(1.0, np.sqrt(decay.floor / second) / eps)
    return float(reach.max())


def check_moments(first: Tensor, second: Tensor, squared: Number, floor: float) -> Examined:
    """m^2 <= R^2 (v + floor) and v >= 0, per coordinate.

    A gradient that is not finite leaves both moments so, and one whose square is not leaves v
    infinite: those are the data's. One moment of the two that is not finite, or v = -inf, is not.

    Args:
        first: (numbers,) m.
        second: (numbers,) v.
        squared: R^2 of `Decay.squared`.
        floor: Of `Decay`.
    """
    if second.device.type == "cpu" and not isinstance(squared, torch.Tensor):
        least = float(torch.addcmul(second, first, first, value=-1.0 / squared).amin())
        low, high = map(float, torch.aminmax(second))
        # NaN compares as false; what is only suspicious is examined.
        if least >= 0.0 and low >= 0.0 and high < math.inf:
            return Examined(_passed(first.numel(), 0.0), 0)
    m, v = first.double(), second.double()
    allowed = squared * (v + floor) * (1.0 + 2.0**-50)
    excess = ~(m.square() <= allowed) | ~(v >= 0.0)
    m_finite, v_finite = torch.isfinite(m), torch.isfinite(v)
    natural = (~m_finite & ~v_finite & (v != -torch.inf)) | (m_finite & (v == torch.inf))
    flags = (excess & ~natural) | (~m_finite & v_finite)
    ratio = torch.where(v_finite & (v >= 0.0), (m.square() / allowed).sqrt(), torch.inf)
    return Examined(_judged(flags, ratio), natural.sum())


def check_update(
    new: Tensor, old: Tensor, keep: Number, limit: Number, moments: tuple[Tensor, ...] = ()
) -> Examined:
    """|p_new - keep p_old| <= limit and the rounding of p, per coordinate.

    Args:
        new: (numbers,) the parameter after the step.
        old: (numbers,) before it.
        keep: 1 - lr weight_decay.
        limit: Longest update.
        moments: (numbers,) each, what the update is made of; a parameter that was finite, as they
            are, and no longer is, was made so by a fault.
    """
    numbers = not isinstance(limit, torch.Tensor) and not isinstance(keep, torch.Tensor)
    if new.device.type == "cpu" and numbers:
        longest = float(torch.sub(new, old, alpha=keep).abs_().amax())
        if longest <= limit * (1.0 - unit_roundoff(name_of(new.dtype))):
            return Examined(_passed(new.numel(), longest / limit if limit else 0.0), 0)
    unit = unit_roundoff(name_of(new.dtype))
    after, before = new.double(), old.double()
    # Half the spacing of the numbers at keep p_old and at p_new.
    rounding = (1.0 + unit) * unit * (after.abs() + before.abs())
    allowed = limit + rounding + torch.finfo(new.dtype).smallest_normal
    difference = (after - keep * before).abs()
    known = torch.isfinite(before)
    for moment in moments:
        known &= torch.isfinite(moment)
    flags = ~(difference <= allowed) & known
    natural = ~torch.isfinite(after) & ~known
    ratio = torch.where(known, difference / allowed, 0.0)
    return Examined(_judged(flags, ratio), natural.sum())


def check_norm(new: Tensor, old: Tensor, keep: float, limit: float) -> ResidualTest:
    """||p_new - keep p_old|| <= limit and the rounding of p, as one row; for finite numbers."""
    unit = unit_roundoff(name_of(new.dtype))
    after, before = new.double(), old.double()
    allowed = limit + (1.0 + unit) * unit * (after.norm() + before.norm())
    length = (after - keep * before).norm()
    # Entries that are not finite are judged one by one.
    flags = (length > allowed).reshape(1) & torch.isfinite(length)
    return _judged(flags, (length / allowed).nan_to_num(0.0, 0.0, 0.0).reshape(1))


def check_range(
    largest: Tensor, before: Tensor, steps: int, growth: float, distance: float
) -> ResidualTest:
    """Largest parameters have grown by no more than decay, updates and roundings can have done.

    Args:
        largest: () of a block now.
        before: () of the same block, some steps ago.
        steps: Since then.
        growth: Logarithm of what weight decay may have stretched parameters by.
        distance: How far updates may have moved them.
    """
    unit = unit_roundoff(name_of(largest.dtype))
    stretched = math.exp(min(growth + 2.0 * steps * math.log1p(unit), 700.0))
    allowed = stretched * (before.double() + distance)
    if largest.device.type == "cpu" and (size := float(largest)) <= (limit := float(allowed)):
        return _passed(1, size / limit if limit else 0.0)
    # What is not finite is judged by other checks.
    flags = ((largest > allowed) & torch.isfinite(before) & torch.isfinite(largest)).reshape(1)
    return _judged(flags, (largest / allowed).nan_to_num(0.0, 0.0))


def check_finite(numbers: Tensor, before: Tensor, gradient: Tensor | None) -> Examined:
    """A momentum is finite, or its parameter or gradient is not either.

    A momentum that a gradient has spoilt spoils the parameter in the same step. So where it is not
    finite, though the parameter was finite before the step and the gradient is, it is a fault.

    Args:
        numbers: (numbers,) after the step.
        before: (numbers,) the parameter before it.
        gradient: (numbers,) of the step, or None where there was none.
    """
    # A sum is finite only if all of its terms are; where it overflows, all terms are looked at.
    if numbers.device.type == "cpu" and bool(torch.isfinite(numbers.sum())):
        return Examined(_passed(numbers.numel(), 0.0), 0)
    wrong = ~torch.isfinite(numbers)
    known = torch.isfinite(before)
    if gradient is not None:
        known &= torch.isfinite(gradient)
    flags = wrong & known
    return Examined(_judged(flags, torch.where(flags, torch.inf, 0.0)), (wrong & ~known).sum())


def check_count(before: Number, after: Number, device: torch.device) -> ResidualTest:
    """A step count goes up by one, or stays where the step was left out."""
    if isinstance(before, torch.Tensor) or isinstance(after, torch.Tensor):
        flags = ((after != before + 1) & (after != before)).reshape(1)
    else:
        wrong = after not in (before, before + 1)
        if not wrong and device.type == "cpu":
            return _passed(1, 0.0)
        flags = torch.tensor([wrong], device=device)
    return _judged(flags, torch.where(flags, torch.inf, 0.0))


def matrix_rank_limit(shape: torch.Size, start: int, numbers: int) -> int:
    """Largest rank that a run of `numbers` entries of a matrix stored by rows may have."""
    columns = shape[-1]
    rows = (start + numbers - 1) // columns - start // columns + 1
    return min(rows, columns, numbers)


def _passed(rows: int, worst: float) -> ResidualTest:
    return ResidualTest(
        torch.zeros(1, dtype=torch.bool, device="cpu").expand(rows), 0, worst, 0.0, 0.0
    )


def _judged(flags: Tensor, ratio: Tensor) -> ResidualTest:
    zero = torch.zeros((), dtype=torch.float32, device=flags.device)
    worst = ratio.nan_to_num(torch.inf).amax()
    return ResidualTest(flags, flags.sum(), worst, zero, zero)
