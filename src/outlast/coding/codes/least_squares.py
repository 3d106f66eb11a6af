"""Decoding weights of least error, and of least norm among these, by conjugate gradients.

Both functions minimise |B_S^T a - 1| through the normal equations B_S B_S^T a = B_S 1. Every
iterate is a combination of images of B_S, so what they converge to has no part that decoding does
not see: it is the shortest of all minima, also where messages are dependent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    from scipy.sparse import csr_array

_RIDGE = 1e-5
_DENSE_STEPS = 40
_DENSE_ACCURACY = 1e-11
_FLAT = 1e-6
_SPARSE_STEPS = 2000
_SPARSE_ACCURACY = 1e-5
_EXACT = 1e-10


def by_gram(
    gram: npt.NDArray[np.float64], target: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64] | None:
    """The shortest solution of consistent normal equations, from one Cholesky factorisation.

    The factor is that of gram + ridge, which exists for dependent messages as well; with it as a
    preconditioner all eigenvalues far above the ridge are nearly 1, and few steps are needed.

    Args:
        gram: (survivors, survivors) B_S B_S^T.
        target: (survivors,) B_S 1.

    Returns:
        (survivors,) weights; None where they did not settle to 1e-11 of their size, as messages
        that are nearly dependent prevent.
    """
    # Imported here, since it takes longer than most codes take to build.
    from scipy.linalg.lapack import dpotrf, dpotrs

    size = float(gram.diagonal().max(initial=0.0))
    if not size:
        return np.zeros(len(target))
    ridged = gram.copy()
    ridged.flat[:: len(target) + 1] += _RIDGE * size
    # The transpose of a symmetric matrix is itself, in the order that LAPACK need not copy.
    factor = dpotrf(ridged.T, lower=1, clean=0, overwrite_a=1)[0]
    weights = np.zeros(len(target))
    residual = target.copy()
    step = direction = dpotrs(factor, residual, lower=1)[0]
    slope = float(residual @ step)
    for _ in range(_DENSE_STEPS):
        if np.abs(step).max() <= _DENSE_ACCURACY * np.abs(weights).max():
            return weights
        image = gram @ direction
        curvature = float(direction @ image)
        if curvature <= _FLAT * size * float(direction @ direction):
            # What is left is rounding, which points to where messages depend on each other.
            settled = np.abs(residual).max() <= _DENSE_ACCURACY * np.abs(target).max()
            return weights if settled else None
        weights = weights + slope / curvature * direction
        residual = target - gram @ weights
        step = dpotrs(factor, residual, lower=1)[0]
        before, slope = slope, float(residual @ step)
        direction = step + slope / before * direction
    return None


def by_products(matrix: csr_array, alive: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """(workers,) weights of a code that is too large for dense matrices (Hestenes, Stiefel 1952).

    From weights of zero the first step is along B_S 1, which are equal weights of the best length
    where loads are equal. The last is where the error could fall by about a 1e-8th of itself only,
    or where coefficients are 1 to 1e-10 (root mean square), well within what is certified as exact.

    Args:
        matrix: (workers, chunks) encoding matrix.
        alive: (workers,) mask.
    """
    transposed, conjugate = matrix.T, matrix.conj()
    weights = np.zeros(matrix.shape[0], dtype=matrix.dtype)
    off = np.ones(matrix.shape[1], dtype=matrix.dtype)
    gradient = direction = np.where(alive, conjugate @ off, 0.0)
    slope = float(np.vdot(gradient, gradient).real)
    # |B_S 1|^2 / |1|^2, about the largest squared singular value where loads are alike.
    enough = _SPARSE_ACCURACY**2 * slope / len(off)
    for _ in range(_SPARSE_STEPS):
        error = float(np.vdot(off, off).real)
        if slope <= enough * error or error <= len(off) * _EXACT**2:
            break
        image = transposed @ direction
        length = slope / float(np.vdot(image, image).real)
        weights = weights + length * direction
        off = off - length * image
        gradient = np.where(alive, conjugate @ off, 0.0)
        before, slope = slope, float(np.vdot(gradient, gradient).real)
        direction = gradient + slope / before * direction
    return weights
