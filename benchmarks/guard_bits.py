"""One matrix product, many single flips: which bits a check sees, and how tight its threshold is.

Every row of one stored output gets one flipped bit, so that one check judges as many injections as
there are rows. Positions are uniform: signs, and flips from 1 to 0, which shrink a number, are part
of every figure. A flip from 1 to 0 in the upper exponent removes its number, and can be seen only
where that number is beyond the detection point.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn import functional

from outlast.guard.inject.campaign import Rate
from outlast.guard.inject.fault import flip, integers
from outlast.guard.linear import product_for
from outlast.guard.product import Gradients
from outlast.guard.threshold import DEVIATIONS
from outlast.guard.watch import RandomSigns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from outlast.guard.product import Encoding, Projections
    from outlast.guard.residual import ResidualTest

Which = Literal["forward", "dx", "dw"]
"""forward: Y = X W^T; dx: dX = dY W; dw: dW = dY^T X."""

_WEIGHT_DEVIATION = 0.02
_MEASURED_ROUNDS = 4


@dataclass(frozen=True)
class Detection:
    """What the check of one product found.

    Attributes:
        which: The product.
        dtype: Of all its matrices.
        bits: Detected of injected, by bit from 0, the lowest.
        clean: False alarms among the checks of rows without a fault.
        spread: Root mean square of the clean differences, in standard deviations of the model.
        threshold_ratio: Threshold over mean |clean difference|, both relative to their rows'
            standard deviations.
        detection_point: Largest error that a check might miss, as a share of the row's 2-norm.
    """

    which: Which
    dtype: torch.dtype
    bits: dict[int, Rate]
    clean: Rate
    spread: float
    threshold_ratio: float
    detection_point: float


@dataclass(frozen=True)
class _Product:
    """One product, its output and its check."""

    which: Which
    x: Tensor
    dy: Tensor
    encoding: Encoding
    projections: Projections
    output: Tensor

    def check(self, output: Tensor, rows: slice = slice(None)) -> ResidualTest:
        """Judge rows of an output of this product."""
        product = product_for(self.x)
        if self.which == "forward":
            return product.forward(self.x[rows], output[rows], self.encoding)[1]
        if self.which == "dx":
            dy, gradients = self.dy[rows], Gradients(output[rows], None, None)
        else:
            dy, gradients = self.dy[:, rows], Gradients(None, output[rows], None)
        pair = product.backward(dy, gradients, self.encoding, self.projections)
        judged = pair[0] if self.which == "dx" else pair[1]
        assert judged is not None
        return judged


def bit_detection(
    dtype: torch.dtype,
    bits: Sequence[int],
    *,
    which: Which = "forward",
    rows: int = 256,
    inputs: int = 1024,
    outputs: int = 1024,
    trials: int = 100_000,
    scale: float = 1.0,
    mean: float = 0.0,
    seed: int = 0,
) -> Detection:
    """Flip bits of a linear layer's stored output, or gradients, and count what its check finds.

    The data are like those of a GPT: X normal with deviation 1, W with deviation 0.02. Data and
    signs of the check are drawn anew in every round.

    Args:
        dtype: Of X, W, dY and the products.
        bits: To flip, one at a time.
        which: Product whose output is struck.
        rows: Of X and dY.
        inputs: Columns of X.
        outputs: Columns of dY.
        trials: Flips per bit, at least; rounded up to whole outputs.
        scale: Factor of X (forward) or dY (dx, dw).
        mean: Of X, and of dY, in deviations.
        seed: Of data, signs and positions.
    """
    generator = torch.Generator().manual_seed(seed)
    signs = RandomSigns(seed)
    weight = (torch.randn(outputs, inputs, generator=generator) * _WEIGHT_DEVIATION).to(dtype)
    length = outputs if which == "dw" else rows
    rounds = -(-trials // length)
    found = dict.fromkeys(bits, 0)
    alarms, total, widest = 0, 0.0, 0.0
    ratios: list[float] = []
    for number in range(rounds):
        signs.renew()
        x = torch.randn(rows, inputs, generator=generator) + mean
        dy = torch.randn(rows, outputs, generator=generator) + mean
        case = _product(
            which,
            (x * (scale if which == "forward" else 1.0)).to(dtype),
            (dy * scale).to(dtype),
            weight,
            product_for(weight).encode(weight, None, signs),
        )
        judged = case.check(case.output)
        alarms += int(judged.exceeded)
        total += float(judged.total)
        widest = max(widest, float(judged.widest))
        if number < _MEASURED_ROUNDS:
            rows_alone = (slice(row, row + 1) for row in range(length))
            ratios += [float(case.check(case.output, row).worst) for row in rows_alone]
        for bit in bits:
            found[bit] += _flipped(case, bit, generator)
    injected = rounds * length
    return Detection(
        which=which,
        dtype=dtype,
        bits={bit: Rate(count, injected) for bit, count in found.items()},
        clean=Rate(alarms, injected),
        spread=(total / injected) ** 0.5,
        threshold_ratio=DEVIATIONS * len(ratios) / sum(ratios),
        detection_point=widest,
    )


def _product(which: Which, x: Tensor, dy: Tensor, weight: Tensor, encoding: Encoding) -> _Product:
    y = functional.linear(x, weight)
    projections, _ = product_for(x).forward(x, y, encoding)
    outputs = {"forward": lambda: y, "dx": lambda: dy.mm(weight), "dw": lambda: dy.t().mm(x)}
    return _Product(which, x, dy, encoding, projections, outputs[which]())


def _flipped(case: _Product, bit: int, generator: torch.Generator) -> int:
    """Flip `bit` once in every row; returns how many rows the check finds."""
    length, width = case.output.shape
    columns = torch.randint(0, width, (length,), generator=generator)
    places = torch.arange(length), columns
    struck = case.output[places]
    flip(struck, (bit,))
    wrong = case.output.clone()
    integers(wrong)[places] = integers(struck)
    return int(case.check(wrong).flags.sum())
