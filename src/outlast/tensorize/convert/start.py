"""Where to start a layer with a nonlinearity in its middle, so that it acts like a dense one.

``up act(down x)`` is no linear map, so no decomposition of a weight gives its factors. But for
z ~ N(0, s^2) any activation is a constant, a slope and a rest that is uncorrelated with both
(Bussgang 1952):

    act(z) = c + g z + rest,    c = E[act(z)],    g = E[z act(z)] / s^2.

With low-rank factors D, U of the weight, rows of D scaled by a_j so that each z_j has root mean
square s, ``down = diag(a) D`` and ``up = U diag(1 / (a g))`` give W x + c up 1 + up rest; the bias
takes up the constant. For SiLU, whose odd part is exactly z / 2 since
silu(z) = z / 2 + (z / 2) tanh(z / 2), g is 1/2 whatever s is, and the rest is about z^2 / 4: its
variance is s^2 / 2 of the signal's (to lowest order), so a small s makes the layer act as linear
as wanted, at the price of large entries in `up`, which learn slowly next to small ones in `down`.

In pairs of channels with opposite signs the even part cancels: silu(z) - silu(-z) = z, and the
same for GELU and ReLU. So a bottleneck of rank r holds any linear map of rank r / 2 exactly.

What to expect: the layer sees x through r linear channels only. For normal x the best function of
these is the linear one, so no training of a bottleneck can get below the error of the best matrix
of rank r on such inputs; for others it can, by what their dependence is worth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from outlast.errors import TensorizeError
from outlast.tensorize.bottleneck import ACTIVATIONS
from outlast.tensorize.convert.factored import working_copy
from outlast.tensorize.convert.svd import low_rank
from outlast.tensorize.convert.whitening import low_rank_for_inputs

SIGNAL = 0.25
"""Root mean square before the activation: the rest is then 3 % of the variance for SiLU."""


class Bottleneck(Protocol):
    """What `outlast.tensorize.forms.low_rank.BottleneckLinear` has."""

    down: nn.Linear
    up: nn.Linear
    activation: str


@dataclass(frozen=True, eq=False)
class Start:
    """Factors to start from.

    Attributes:
        down: (rank, in).
        up: (out, rank).
        shift: (out,) to add to the dense layer's bias; it cancels the activation's mean.
    """

    down: Tensor
    up: Tensor
    shift: Tensor


def bottleneck_start(
    weight: Tensor,
    *,
    rank: int,
    activation: str = "silu",
    moment: Tensor | None = None,
    signal: float = SIGNAL,
    pairs: bool = False,
) -> Start:
    """Factors with which ``up act(down x) + shift`` is about the best ``W' x`` of that rank.

    Args:
        weight: (out, in) of the dense layer.
        rank: Inner size.
        activation: A key of `outlast.tensorize.bottleneck.ACTIVATIONS`.
        moment: (in, in) or (in,) second moment of the inputs, see
            `outlast.tensorize.convert.whitening`; None: independent inputs of variance 1.
        signal: Root mean square before the activation.
        pairs: Use channels in pairs of opposite signs: exact, but for rank / 2.

    Returns:
        The factors in the weight's type.

    Raises:
        TensorizeError: For an unknown activation, a rank or signal out of range, an odd rank with
            `pairs`, or a weight or moment that cannot be used.
    """
    if activation not in ACTIVATIONS:
        raise TensorizeError(f"activation = {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if not 0.0 < signal < math.inf:
        raise TensorizeError(f"signal = {signal} must be positive: 0.25 is usual")
    if pairs and rank % 2:
        raise TensorizeError(f"rank = {rank} must be even for channels in pairs")
    kept = rank // 2 if pairs else rank
    wide = working_copy(weight)
    found = (
        low_rank(wide, rank=kept)
        if moment is None
        else low_rank_for_inputs(wide, moment, rank=kept)
    )
    down, up = found.cores
    scale = signal / _root_mean_square(down, moment)
    mean, slope = linear_part(activation, signal)
    down, up = down * scale[:, None], up / (scale * slope)
    if pairs:
        # The mean cancels with the even part.
        down, up = torch.cat([down, -down]), torch.cat([up, -up], dim=1) / 2
    shift = -mean * up.sum(1)
    return Start(*(part.to(weight.dtype).contiguous() for part in (down, up, shift)))


@torch.no_grad()
def start_from_dense(
    student: Bottleneck,
    teacher: nn.Linear,
    *,
    moment: Tensor | None = None,
    signal: float = SIGNAL,
    pairs: bool = False,
) -> None:
    """Fill a bottleneck layer in place with `bottleneck_start` of a dense layer.

    Without a bias in the student, the activation's mean stays in its output.

    Args:
        student: The layer to fill.
        teacher: The dense layer it shall stand for.
        moment: See `bottleneck_start`.
        signal: See there.
        pairs: See there.

    Raises:
        TensorizeError: See `bottleneck_start`; or the shapes differ, or the teacher has a bias and
            the student none.
    """
    rank = student.down.out_features
    wanted = (student.up.out_features, student.down.in_features)
    if tuple(teacher.weight.shape) != wanted:
        raise TensorizeError(
            f"the dense layer's weight has shape {tuple(teacher.weight.shape)}, but the layer that "
            f"is to replace it has {wanted}"
        )
    if teacher.bias is not None and student.up.bias is None:
        raise TensorizeError("the dense layer has a bias, so what replaces it needs bias = True")
    start = bottleneck_start(
        teacher.weight,
        rank=rank,
        activation=student.activation,
        moment=moment,
        signal=signal,
        pairs=pairs,
    )
    student.down.weight.copy_(start.down)
    student.up.weight.copy_(start.up)
    if student.up.bias is not None:
        bias = 0.0 if teacher.bias is None else teacher.bias
        student.up.bias.copy_(start.shift + bias)


def linear_part(activation: str, signal: float) -> tuple[float, float]:
    """Mean and slope c, g of an activation for z ~ N(0, signal^2), by the trapezoidal rule.

    Raises:
        TensorizeError: For an activation without a linear part.
    """
    step = 1e-3
    points = torch.arange(-10_000, 10_001, dtype=torch.float64) * step
    density = torch.exp(-points.square() / 2.0) * (step / math.sqrt(2.0 * math.pi))
    values = ACTIVATIONS[activation](signal * points)
    mean = float((values * density).sum())
    slope = float((values * points * density).sum()) / signal
    if abs(slope) < 1e-6:
        raise TensorizeError(f"activation = {activation!r} has no linear part to start from")
    return mean, slope


def _root_mean_square(down: Tensor, moment: Tensor | None) -> Tensor:
    """sqrt(E z_j^2) of z = down x, 1 where it is zero."""
    if moment is None:
        squares = down.square().sum(1)
    else:
        wide = moment.to(down)
        weighted = down * wide if wide.dim() == 1 else down @ wide
        squares = (weighted * down).sum(1)
    return torch.where(squares > 0, squares, torch.ones_like(squares)).sqrt()
