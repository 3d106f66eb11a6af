"""Dense to two factors, where the inputs of the layer say which errors matter.

A layer's output changes by (W - W') x, so the factors that keep the model's function minimise

    E |(W - W') x|^2 = |(W - W') M^(1/2)|_F^2   with M = E[x x^T],

not |W - W'|. With M = L L^T the minimiser is the truncated singular value decomposition of W L
times L^-1 (SVD-LLM, arXiv 2403.07378; with M diagonal: ASVD, arXiv 2312.05821).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outlast.errors import TensorizeError
from outlast.tensorize.convert.factored import (
    Factored,
    balanced,
    choose_rank,
    matrix_copy,
    root_sum,
    singular,
    tails,
    working_copy,
)

DAMPING = 1e-6
"""Share of the mean second moment that is added to every feature's: directions that calibration
never showed then count a little, so W' follows W there."""


def low_rank_for_inputs(
    weight: Tensor,
    moment: Tensor,
    *,
    rank: int | None = None,
    error: float | None = None,
    damping: float = DAMPING,
) -> Factored:
    """The factors that change the outputs least for inputs with this second moment.

    Args:
        weight: (out, in), any floating type.
        moment: (in, in) E[x x^T], or (in,) E[x^2] of every feature; see
            `outlast.tensorize.convert.moments.InputMoments`.
        rank: Inner size, 1 to min(out, in); or
        error: largest root mean square change of the outputs, as a share of theirs.
        damping: Added to the diagonal, as a share of the diagonal's mean.

    Returns:
        Balanced ``down`` (rank, in) and ``up`` (out, rank) in the weight's type. Error and norm
        are ``sqrt(E |(W - W') x|^2)`` and ``sqrt(E |W x|^2)``, without damping.

    Raises:
        TensorizeError: For a rank, an error or a moment out of range, or a weight that cannot be
            converted.
    """
    matrix = matrix_copy(weight)
    wide_moment = checked_moment(moment, matrix, damping)
    multiply, solve = moment_root(wide_moment, damping)
    u, sigma, vh = singular(multiply(matrix))
    discarded = tails(sigma)
    kept = choose_rank(discarded, rank=rank, error=error, norm=float(discarded[0]))
    down, up = balanced(solve(vh[:kept]), u[:, :kept] * sigma[:kept])
    return Factored(
        (down.to(weight.dtype).contiguous(), up.to(weight.dtype).contiguous()),
        output_change(matrix - up @ down, wide_moment),
        output_change(matrix, wide_moment),
    )


def output_change(difference: Tensor, moment: Tensor) -> float:
    """``sqrt(E |D x|^2) = sqrt(trace(D M D^T))`` of a change of the weight.

    Args:
        difference: (out, in) change D.
        moment: (in, in) or (in,), see `low_rank_for_inputs`.
    """
    wide = working_copy(difference, "difference")
    by = working_copy(moment, "moment").to(wide.device)
    weighted = wide * by if by.dim() == 1 else wide @ by
    return root_sum(float((weighted * wide).sum()))


def checked_moment(moment: Tensor, matrix: Tensor, damping: float) -> Tensor:
    """The second moment in the type and on the device of a weight.

    Args:
        moment: (in, in) or (in,).
        matrix: (out, in).
        damping: See `low_rank_for_inputs`.

    Raises:
        TensorizeError: For another shape, values that no second moment has, or negative damping.
    """
    features = matrix.shape[1]
    if moment.shape not in ((features,), (features, features)):
        raise TensorizeError(
            f"moment has shape {tuple(moment.shape)}, and a weight of {features} input features "
            f"wants ({features}, {features}) or ({features},)"
        )
    if damping < 0.0:
        raise TensorizeError(f"damping = {damping} must be 0 or more")
    wide = working_copy(moment, "moment").to(matrix.device)
    diagonal = wide if wide.dim() == 1 else wide.diagonal()
    if bool((diagonal < 0).any()) or not bool((diagonal > 0).any()):
        raise TensorizeError(
            "moment has a negative or no positive mean square: run calibration batches first"
        )
    return wide


def moment_root(
    moment: Tensor, damping: float
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Multiplication from the right by a root L of the damped moment, and by its inverse.

    Args:
        moment: (in, in) M, or (in,) its diagonal.
        damping: Added to the diagonal, as a share of the diagonal's mean.

    Returns:
        Two functions of (.., in) matrices, X -> X L and X -> X L^-1, where L L^T is the moment.
    """
    diagonal = moment if moment.dim() == 1 else moment.diagonal()
    # Zero damping still needs every feature to be positive, for the inverse.
    added = max(damping, torch.finfo(moment.dtype).eps) * diagonal.mean()
    if moment.dim() == 1:
        scale = (moment + added).sqrt()
        return (lambda matrix: matrix * scale), (lambda matrix: matrix / scale)
    symmetric = (moment + moment.mT) / 2
    symmetric.diagonal().add_(added)
    root, failed = torch.linalg.cholesky_ex(symmetric)
    if not int(failed):
        return (
            lambda matrix: matrix @ root,
            lambda matrix: torch.linalg.solve_triangular(root, matrix, upper=False, left=False),
        )
    values, vectors = torch.linalg.eigh(symmetric)
    scale = values.clamp(min=float(added)).sqrt()
    return (
        lambda matrix: (matrix @ vectors) * scale,
        lambda matrix: (matrix / scale) @ vectors.mT,
    )
