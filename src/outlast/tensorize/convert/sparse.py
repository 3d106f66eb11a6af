"""Dense to low rank plus sparse: two factors and a few entries that they cannot hold.

Alternates between the best factors of W - S and the best entries of W - BA (GoDec, Zhou and Tao
2011): each is exact for the other, so the error never rises. It can end in a local minimum, so it
starts twice, with no sparse part and with the largest entries of W. Singular vectors hold what
many entries share, the sparse part single large ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outlast.errors import TensorizeError
from outlast.tensorize.convert.factored import Factored, choose_rank, matrix_copy, tails
from outlast.tensorize.convert.factored import singular as decomposed
from outlast.tensorize.convert.svd import low_rank

SWEEPS = 5
"""Rounds from each start; each costs a singular value decomposition."""


def low_rank_and_sparse(
    weight: Tensor,
    *,
    rank: int,
    density: float | None = None,
    support: Tensor | None = None,
    sweeps: int = SWEEPS,
) -> Factored:
    """Factors and sparse entries of a weight.

    Args:
        weight: (out, in), any floating type.
        rank: Inner size of the factors.
        density: Share of the entries in the sparse part, at the places that serve best; or
        support: (entries,) given places, as ascending flat indices ``row in + column``.
        sweeps: Rounds of the alternation from each start.

    Returns:
        ``down`` (rank, in), ``up`` (out, rank), ``values`` (entries,) and ``indices`` (entries,)
        int64, ascending and flat, with W' = up down + the values at the indices.

    Raises:
        TensorizeError: Unless exactly one of density and support is given, for numbers out of
            range, or a weight that cannot be converted.
    """
    matrix = matrix_copy(weight)
    if (density is None) == (support is None) or sweeps < 1:
        raise TensorizeError(
            f"density = {density} and support of the sparse part: give one of them, "
            f"and sweeps = {sweeps} must be 1 or more"
        )
    indices = None if support is None else _checked(support, matrix)
    entries = 0
    if density is not None:
        if not 0.0 <= density <= 1.0:
            raise TensorizeError(f"density = {density} must be between 0 and 1")
        entries = round(density * matrix.numel())
    best: tuple[Factored, Tensor, Tensor] | None = None
    for start in (torch.zeros_like(matrix), _entries(matrix, entries, indices)[0]):
        sparse, places = start, indices
        for _ in range(sweeps):
            residual = matrix - _cut(matrix - sparse, rank)
            sparse, places = _entries(residual, entries, indices)
        # The factors last: they are balanced, and best for the entries that are returned.
        found = low_rank(matrix - sparse, rank=rank)
        assert places is not None
        if best is None or found.error < best[0].error:
            best = (found, sparse.reshape(-1)[places], places)
    assert best is not None
    found, values, places = best
    down, up = found.cores
    return Factored(
        (down.to(weight.dtype), up.to(weight.dtype), values.to(weight.dtype), places),
        found.error,
        float(matrix.norm()),
    )


def _entries(residual: Tensor, count: int, indices: Tensor | None) -> tuple[Tensor, Tensor]:
    """The largest entries, or those at the indices, in a matrix of zeros; and where they are."""
    flat = residual.reshape(-1)
    places = flat.abs().topk(count).indices.sort().values if indices is None else indices
    kept = torch.zeros_like(flat).index_copy(0, places, flat[places])
    return kept.reshape(residual.shape), places


def _cut(matrix: Tensor, rank: int) -> Tensor:
    u, sigma, vh = decomposed(matrix)
    kept = choose_rank(tails(sigma), rank=rank, error=None, norm=1.0)
    return (u[:, :kept] * sigma[:kept]) @ vh[:kept]


def _checked(support: Tensor, matrix: Tensor) -> Tensor:
    indices = support.to(device=matrix.device, dtype=torch.int64)
    ascending = bool((indices.diff() > 0).all())
    if (
        indices.dim() != 1
        or not ascending
        or bool(((indices < 0) | (indices >= matrix.numel())).any())
    ):
        raise TensorizeError(
            f"support must be ascending flat indices below {matrix.numel()}, each once"
        )
    return indices
