"""How far a gradient decoded block by block can be from the true one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from outlast.coding.certificate import Certificate, Decoded, exact_up_to_rounding, roundoff

if TYPE_CHECKING:
    import numpy.typing as npt

_SAME = 1e-9


@dataclass(frozen=True, eq=False)
class DecodedBlocks(Decoded):
    """The outcome of decoding for one set of survivors; unpacks into ``weights, error``.

    Attributes:
        weights: (parts, workers) numbers A that messages are multiplied by; 0 for workers that are
            gone.
        coefficients: (parts, chunks, parts): block b of the decoded gradient contains block b' of
            g_c this often, at [b, c, b']; 1 is right where b = b', else 0.
        certificate: What follows for the gradient; see `certify_blocks`.
    """

    @property
    def mean_error(self) -> float:
        """Expected ``|decoded - g|^2`` over uncorrelated chunk gradients of norm 1.

        Their blocks are uncorrelated, too, and of equal size: |coefficients - identity|_F^2 /
        parts. `Certificate.error` bounds the worst case instead.
        """
        if self.certificate.exact:
            return 0.0
        missing = _missing(self.coefficients)
        return float(np.sum(np.abs(missing) ** 2)) / len(self.weights)


def certify_blocks(
    coefficients: npt.NDArray[Any],
    weights: npt.NDArray[Any],
    message_norms: npt.NDArray[np.float64],
    dtype: str = "float32",
) -> Certificate:
    """The certificate of a block decoding; `outlast.coding.certificate.certify` for blocks.

    Let E_c be the parts x parts matrix coefficients[:, c, :] - I, so that the decoded gradient is
    off by sum_c (E_c x I) g_c, and G the matrix with columns g_c, ``|.|`` its largest singular
    value. Then ``|decoded - g| <= sqrt(error) |G|`` with the smaller of two errors:

    - ``parts sum_c |E_c|_F^2``, since the chunks' blocks side by side have at most sqrt(parts)
      times the largest singular value of G;
    - ``(sum_i s_i |P_i|)^2`` where E = sum_i s_i P_i v_i^T is the singular value decomposition of E
      as a (parts^2, chunks) matrix, P_i its left vectors as matrices: the error is
      sum_i s_i (P_i x I) G v_i and v_i has norm 1. It is the number of lost chunks where whole
      chunks are lost.

    ``centred`` bounds ``|scale decoded - g|`` by G with its mean removed, as for scalar codes; it
    is infinite where no factor makes the mean's coefficients sum to the identity. ``rounding`` is
    the largest error of rounding all messages to `dtype` as a share of ``|g|`` where the blocks of
    all chunks are orthogonal and of equal norm: unit roundoff x
    sqrt(sum_b (sum_w |A[b, w]| |C_w|_F)^2 / (parts chunks)). ``amplification`` is the largest sum
    of absolute weights of a block.

    Args:
        coefficients: (parts, chunks, parts), as in `DecodedBlocks`.
        weights: (parts, workers).
        message_norms: (workers,) 2-norms of the coefficients of each message.
        dtype: Type of the messages.

    Raises:
        CodingError: For a type that messages cannot have.
    """
    parts, chunks = coefficients.shape[:2]
    error = _worst_error(_missing(coefficients))
    totals = coefficients.sum(axis=1)
    total = float(np.trace(totals).real) / parts
    scale = chunks / total if total > 0 else math.inf
    centred = math.inf
    if total > 0 and np.abs(scale * totals - chunks * np.eye(parts)).max() <= _SAME * chunks:
        centred = _worst_error(_missing(scale * coefficients))
    magnitude = np.abs(weights)
    amplification = float(magnitude.sum(axis=1).max(initial=0.0))
    rounded = float(np.linalg.norm(magnitude @ message_norms)) / math.sqrt(parts * chunks)
    exact = exact_up_to_rounding(error, chunks, amplification)
    return Certificate(
        error, centred, scale, exact, amplification, roundoff(dtype) * rounded, dtype
    )


def _missing(coefficients: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """(parts, chunks, parts) coefficients minus what they should be."""
    return np.asarray(coefficients - np.eye(len(coefficients))[:, None, :])


def _worst_error(missing: npt.NDArray[Any]) -> float:
    """The smaller of the two errors of `certify_blocks`."""
    parts, chunks = missing.shape[:2]
    frobenius = float(np.sum(np.abs(missing) ** 2))
    if parts == 1:
        return frobenius
    tall = missing.transpose(0, 2, 1).reshape(parts**2, chunks)
    left, values, _ = np.linalg.svd(tall, full_matrices=False)
    norms = np.linalg.norm(left.T.reshape(-1, parts, parts), ord=2, axis=(1, 2))
    return float(min(parts * frobenius, np.square(values @ norms)))
