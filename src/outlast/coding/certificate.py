"""Certificates: bounds of the distance between a decoded gradient and the true one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from outlast.errors import CodingError

if TYPE_CHECKING:
    import numpy.typing as npt

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Largest relative error of rounding to nearest, by type of the messages."""

EXACT = 1e-9
"""What coefficients may lack to 1, as a root mean square, and still be exact; times the
amplification."""

_LARGE = 1e3
"""Amplification beyond which `EXACT` does not grow with it."""


@dataclass(frozen=True)
class Certificate:
    """Bounds of one decoding, known before any gradient is seen.

    With g = g_1 + ... + g_k the sum of the chunks' gradients, G the matrix with columns g_i, alpha
    the coefficients with which the decoded gradient contains them, and ``|.|`` the 2-norm (of a
    matrix: its largest singular value):

    - ``|decoded - g| <= sqrt(error) |G|`` with error = sum (alpha_i - 1)^2;
    - ``|scale decoded - g| <= sqrt(centred) |G - mean|`` with scale = k / sum alpha_i and centred =
      sum (scale alpha_i - 1)^2, since then sum (scale alpha_i - 1) mean = 0: the error after
      rescaling depends on how much chunks differ only.

    Attributes:
        error: See above; 0 up to rounding where `exact`.
        centred: See above; infinite where the coefficients sum to nothing.
        scale: Factor that makes the coefficients sum to the number of chunks.
        exact: Whether every coefficient is 1 up to the rounding of float64.
        amplification: Sum of the decoding weights' absolute values.
        rounding: Largest error of rounding all messages to `dtype`, as a share of ``|g|`` where
            chunks' gradients are orthogonal and of equal norm:
            unit roundoff x sum_w |a_w| |B_w| / sqrt(k).
        dtype: Type of the messages.
    """

    error: float
    centred: float
    scale: float
    exact: bool
    amplification: float
    rounding: float
    dtype: str

    def bound(self, spectral_norm: float) -> float:
        """Largest ``|decoded - g|`` when the matrix of chunk gradients has this spectral norm."""
        return math.sqrt(self.error) * spectral_norm


@dataclass(frozen=True, eq=False)
class Decoded:
    """The outcome of decoding for one set of survivors; unpacks into ``weights, error``.

    Attributes:
        weights: (workers,) numbers that the messages are multiplied by; 0 for workers that are
            gone.
        coefficients: (chunks,) how often each chunk's gradient is in the sum; 1 is right.
        certificate: What follows for the gradient.
    """

    weights: npt.NDArray[Any]
    coefficients: npt.NDArray[Any]
    certificate: Certificate

    @property
    def error(self) -> float:
        """See `Certificate.error`; exactly 0 where the decoding is exact."""
        return 0.0 if self.certificate.exact else self.certificate.error

    def __iter__(self) -> Iterator[Any]:
        return iter((self.weights, self.error))


def certify(
    coefficients: npt.NDArray[Any],
    weights: npt.NDArray[Any],
    message_norms: npt.NDArray[np.float64],
    dtype: str = "float32",
) -> Certificate:
    """The certificate of a decoding.

    Args:
        coefficients: (chunks,) real or complex, the decoding weights times the encoding matrix.
        weights: (workers,) the decoding weights.
        message_norms: (workers,) 2-norm of each row of the encoding matrix.
        dtype: Type of the messages, a key of `UNIT_ROUNDOFF`.

    Raises:
        CodingError: For a type that messages cannot have.
    """
    chunks = len(coefficients)
    error = float(np.sum(np.abs(coefficients - 1.0) ** 2))
    total = float(np.sum(coefficients).real)
    scale = chunks / total if total > 0 else math.inf
    centred = math.inf
    if total > 0:
        centred = float(np.sum(np.abs(scale * coefficients - 1.0) ** 2))
    magnitude = np.abs(weights)
    rounding = roundoff(dtype) * float(magnitude @ message_norms) / math.sqrt(chunks)
    amplification = float(magnitude.sum())
    exact = exact_up_to_rounding(error, chunks, amplification)
    return Certificate(error, centred, scale, exact, amplification, rounding, dtype)


def exact_up_to_rounding(error: float, chunks: int, amplification: float) -> bool:
    """Return whether decoding in float64 alone explains an error.

    The more weights amplify, the more digits are lost; but only what float64 must lose anyhow is
    granted to huge weights, or those of 1e9 would excuse any error.
    """
    lost = EXACT * min(max(amplification, 1.0), _LARGE)
    unavoidable = 4.0 * UNIT_ROUNDOFF["float64"] * amplification
    return error <= chunks * max(lost, unavoidable) ** 2


def roundoff(dtype: str) -> float:
    """Unit roundoff of a message type.

    Raises:
        CodingError: For an unknown type.
    """
    if dtype not in UNIT_ROUNDOFF:
        raise CodingError(f"dtype = {dtype!r} is not one of {', '.join(UNIT_ROUNDOFF)}")
    return UNIT_ROUNDOFF[dtype]
