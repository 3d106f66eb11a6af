"""Nearest orthogonal matrices, and upper bounds of spectral norms, with matrix products alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic that maps singular values towards one (Jordan et al. 2024, Muon)."""

_SQUARINGS = 5


def orthogonalize(
    matrices: Tensor,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    iterations: int = 5,
    eps: float = 1e-7,
) -> Tensor:
    """Matrices with the same singular vectors and singular values near one, by Newton-Schulz.

    X <- a X + b (X X^T) X + c (X X^T)^2 X, from X of unit Frobenius norm, in bfloat16 as Muon does.
    With the published coefficients five iterations bring singular values to between about 0.7 and
    1.2; those that are tiny beside the largest stay smaller.

    Args:
        matrices: (..., m, n) with at most one leading dimension.
        coefficients: a, b and c.
        iterations: Of the polynomial.
        eps: Smallest norm that is divided by; a zero matrix stays zero.

    Returns:
        The shape of `matrices`, in bfloat16.
    """
    a, b, c = coefficients
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(iterations):
        gram = x @ x.mT
        update = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, update, x, beta=a)
    return x.mT if tall else x


def norm_bound(matrix: Tensor) -> Tensor:
    """An upper bound of ``||M||_2``, at most k^(1/128) times too large: 4 % for k = 128.

    k is the smaller one of rows and columns; no more than one large singular value costs nothing.

    See `product_norm_bound`, with the identity as the other matrix.

    Args:
        matrix: (m, n).

    Returns:
        A scalar, in at least float32.
    """
    matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    scale = matrix.abs().max().clamp(min=torch.finfo(matrix.dtype).tiny)
    matrix = matrix / scale
    rows, columns = matrix.shape
    gram = matrix @ matrix.mT if rows < columns else matrix.mT @ matrix
    bound: Tensor = scale * gram_bound(gram).sqrt()
    return bound


def product_norm_bound(left_gram: Tensor, right_gram: Tensor) -> Tensor:
    """An upper bound of ``||P Q||_2`` from P^T P and Q Q^T.

    The squares of P Q's singular values are the eigenvalues of M = (P^T P)(Q Q^T), and for any
    power p the Frobenius norm of M^p is at least its largest eigenvalue to the p::

        ||P Q||_2 <= ||M^p||_F^(1 / 2p),   p = 32

    Squaring M five times gives that. A term for the rounding of both Gram matrices is added.

    Args:
        left_gram: (k, k), P^T P.
        right_gram: (k, k), Q Q^T.

    Returns:
        A scalar.
    """
    scales = [torch.linalg.matrix_norm(gram) for gram in (left_gram, right_gram)]
    units = [
        gram / scale.clamp(min=torch.finfo(gram.dtype).tiny)
        for gram, scale in zip((left_gram, right_gram), scales, strict=True)
    ]
    eigenvalue = gram_bound(units[0] @ units[1])
    # Of each unit Gram matrix, every entry is wrong by some of its type's spacing.
    eigenvalue = eigenvalue + len(left_gram) * torch.finfo(left_gram.dtype).eps
    bound: Tensor = eigenvalue.sqrt() * scales[0].sqrt() * scales[1].sqrt()
    return bound


def gram_bound(gram: Tensor) -> Tensor:
    """An upper bound of the largest eigenvalue of a matrix whose entries are at most about one.

    Args:
        gram: (k, k), with eigenvalues of at least zero; symmetric or a product of two such.

    Returns:
        A scalar.
    """
    size, info = gram.shape[0], torch.finfo(gram.dtype)
    logarithm = torch.zeros((), dtype=gram.dtype, device=gram.device)
    power = gram
    for squaring in range(_SQUARINGS):
        norm = torch.linalg.matrix_norm(power).clamp(min=info.tiny)
        logarithm = logarithm + norm.log() / 2**squaring
        power = power / norm
        power = power @ power
    last = torch.linalg.matrix_norm(power).clamp(min=info.tiny)
    largest = (logarithm + last.log() / 2**_SQUARINGS).exp()
    bound: Tensor = largest + size * info.eps * torch.linalg.matrix_norm(gram)
    return bound


def power_norm(
    matrices: Sequence[Tensor], start: Tensor, iterations: int = 2
) -> tuple[Tensor, Tensor]:
    """An estimate from below of the spectral norm of a product, by power iteration.

    Args:
        matrices: The factors of the product, in the order in which it is written.
        start: (n,) a vector to begin with: random at first, then that of the call before.
        iterations: Products with the transposed product times the product.

    Returns:
        The norm of the product times the unit vector that was reached, and that vector.
    """
    tiny = torch.finfo(start.dtype).tiny
    vector = start / torch.linalg.vector_norm(start).clamp(min=tiny)
    for _ in range(iterations):
        image = _applied(matrices, vector)
        pulled = _applied([matrix.mT for matrix in matrices[::-1]], image)
        length = torch.linalg.vector_norm(pulled)
        # A vector that the product maps to zero is kept: the next product may differ.
        vector = torch.where(length > tiny, pulled / length.clamp(min=tiny), vector)
    return torch.linalg.vector_norm(_applied(matrices, vector)), vector


def _applied(matrices: Sequence[Tensor], vector: Tensor) -> Tensor:
    for matrix in reversed(matrices):
        vector = matrix @ vector
    return vector


def bounded_root(linear: Tensor, quadratic: Tensor, limit: Tensor) -> Tensor:
    """The largest s with s linear + s^2 quadratic <= limit; infinite where both are zero.

    Args:
        linear: At least 0.
        quadratic: At least 0.
        limit: At least 0.
    """
    # Both are divided by the larger one, whose square could leave the range.
    scale = torch.maximum(linear, quadratic)
    one, two, most = linear / scale, quadratic / scale, limit / scale
    root = 2.0 * most / (one + (one.square() + 4.0 * most * two).sqrt())
    return torch.where(scale > 0.0, root, math.inf)
