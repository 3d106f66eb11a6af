"""Small fingerprints of gradients, by which two computations of one chunk are compared.

The projection of x, cut into rows of a fixed width, is sum_ij u_i v_j x_ij with random signs u and
v: every number counts with weight 1 or -1, so a single wrong number always shows, and the square of
a projection of an error e is |e|^2 on average (a product of Rademacher vectors).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

PROJECTIONS = 4
_WIDTH = 1024


@dataclass(frozen=True)
class Fingerprint:
    """The norm of a gradient and its projections on random signs.

    Attributes:
        numbers: The 2-norm, then `PROJECTIONS` projections.
    """

    numbers: tuple[float, ...]

    def text(self) -> str:
        """As short text."""
        return ",".join(float(number).hex() for number in self.numbers)

    @classmethod
    def read(cls, text: str) -> Fingerprint:
        """The inverse of `text`."""
        return cls(tuple(float.fromhex(part) for part in text.split(",")))

    def difference(self, other: Fingerprint) -> float:
        """Root mean square difference of the projections, as a share of the larger norm.

        An estimate of ``|x - y| / |x|``; infinite where one of them is not finite. Where both are
        not, the data made them so, and nothing is said: 0.
        """
        ours, theirs = np.array(self.numbers), np.array(other.numbers)
        finite = np.isfinite(ours).all(), np.isfinite(theirs).all()
        if not all(finite):
            return math.inf if any(finite) else 0.0
        norm = max(ours[0], theirs[0])
        if norm == 0:
            return 0.0
        gap = max(abs(ours[0] - theirs[0]), float(np.sqrt(np.mean((ours - theirs)[1:] ** 2))))
        return float(gap / norm)


class Fingerprints:
    """Takes fingerprints of lists of tensors; the signs are equal on all processes."""

    def __init__(self) -> None:
        self._signs: dict[tuple[int, int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def take(self, tensors: Sequence[torch.Tensor]) -> Fingerprint:
        """The fingerprint of tensors of any shapes, on one device; reads each number once."""
        parts = [
            self._of(tensor.detach().reshape(-1), place) for place, tensor in enumerate(tensors)
        ]
        total = torch.stack(parts).sum(0)
        total[0] = total[0].sqrt()
        return Fingerprint(tuple(total.tolist()))

    def _of(self, flat: torch.Tensor, place: int) -> torch.Tensor:
        """Sum of squares and projections of one flat tensor, float64."""
        if flat.dtype in {torch.float16, torch.bfloat16}:
            flat = flat.float()
        rows, rest = divmod(flat.numel(), _WIDTH)
        columns, lines = self._draw(place, rows + 1, flat.device)
        columns = columns.to(flat.dtype)
        square = torch.linalg.vector_norm(flat).double().square()
        body = flat[: rows * _WIDTH].view(rows, _WIDTH) @ columns
        tail = flat[rows * _WIDTH :] @ columns[:rest]
        projected = (body.double() * lines[:rows]).sum(0) + tail.double() * lines[rows]
        return torch.cat([square.reshape(1), projected])

    def _draw(
        self, place: int, rows: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = (place, rows, device)
        if key not in self._signs:
            generator = np.random.PCG64([place, rows])
            columns, lines = _signs(generator, _WIDTH), _signs(generator, rows)
            self._signs[key] = (
                torch.tensor(columns, dtype=torch.float32, device=device),
                torch.tensor(lines, dtype=torch.float64, device=device),
            )
        return self._signs[key]


def _signs(generator: np.random.PCG64, lines: int) -> npt.NDArray[np.float64]:
    """(lines, PROJECTIONS) of 1 and -1, from raw bits, which all versions of numpy draw alike."""
    bits = generator.random_raw((lines, PROJECTIONS)) >> np.uint64(63)
    return np.where(bits == 1, 1.0, -1.0)
