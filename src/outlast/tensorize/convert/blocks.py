"""Dense to two-core block tensor train (BTT) and Monarch: one small matrix problem per block.

With input features read as (m1, m0) and output features as (n0, n1), both row-major, a two-core
BTT of rank r ("Compute Better Spent", arXiv 2406.06248) holds the weight

    W[(n0 n1), (m1 m0)] = sum_r L[n0, n1, m1, r] R[m1, n0, r, m0].

For fixed (m1, n0) that is a product of an (n1, r) and an (r, m0) matrix which no other block
shares. So truncated singular value decompositions of all m1 x n0 blocks are together the best BTT
of that rank, exactly; Monarch projection (arXiv 2204.00595, theorem 1) is the same at one rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outlast.errors import TensorizeError
from outlast.tensorize.convert.factored import (
    Factored,
    balanced,
    choose_rank,
    matrix_copy,
    padded,
    singular,
    split,
    tails,
)
from outlast.tensorize.convert.whitening import (
    DAMPING,
    checked_moment,
    moment_root,
    output_change,
)
from outlast.tensorize.shapes import monarch_modes, monarch_rank


def to_blocks(
    weight: Tensor,
    *,
    in_modes: tuple[int, int],
    out_modes: tuple[int, int],
    rank: int | None = None,
    error: float | None = None,
) -> Factored:
    """The best two-core block tensor train of a weight in the Frobenius norm.

    Args:
        weight: (out, in), any floating type.
        in_modes: (m1, m0), product >= in.
        out_modes: (n0, n1), product >= out.
        rank: Rank of every block, 1 to min(n1, m0); or
        error: largest ``|W - W'| / |W|``, for which the smallest rank is taken.

    Returns:
        ``R`` (m1, n0, r, m0) and ``L`` (n0, n1, m1, r) in the weight's type, balanced block by
        block. The error is exactly ``sqrt(sum of discarded sigma^2)`` over all blocks, also where
        modes are padded: padding only adds rows and columns of zeros to blocks.

    Raises:
        TensorizeError: For modes that are too small, a rank or error out of range, or a weight
            that cannot be converted.
    """
    blocks = _blocks(matrix_copy(weight), in_modes, out_modes)
    u, sigma, vh = singular(blocks)
    discarded = tails(sigma)
    norm = float(discarded[0])
    kept = choose_rank(discarded, rank=rank, error=error, norm=norm)
    left, right = split(sigma[..., :kept])
    first = right[..., None] * vh[..., :kept, :]
    second = (u[..., :kept] * left[..., None, :]).permute(1, 2, 0, 3)
    return Factored(
        (first.to(weight.dtype).contiguous(), second.to(weight.dtype).contiguous()),
        float(discarded[kept]),
        norm,
    )


def to_blocks_for_inputs(
    weight: Tensor,
    moment: Tensor,
    *,
    in_modes: tuple[int, int],
    out_modes: tuple[int, int],
    rank: int,
    damping: float = DAMPING,
) -> Factored:
    """A two-core block tensor train that weighs errors by the inputs' second moment.

    Each block minimises the change of its own part of the outputs, see
    `outlast.tensorize.convert.whitening`. That is the best train where inputs of different blocks
    of m0 features are uncorrelated; what they correlate is left out of account.

    Args:
        weight: (out, in), any floating type.
        moment: (in, in) E[x x^T], or (in,) E[x^2] of every feature.
        in_modes: (m1, m0), product >= in.
        out_modes: (n0, n1), product >= out.
        rank: Rank of every block, 1 to min(n1, m0).
        damping: Added to the moment's diagonal, as a share of the diagonal's mean.

    Returns:
        Cores as of `to_blocks`. Error and norm are ``sqrt(E |(W - W') x|^2)`` and
        ``sqrt(E |W x|^2)``, with all correlations.

    Raises:
        TensorizeError: As `to_blocks`, or for a moment out of range.
    """
    matrix = matrix_copy(weight)
    wide_moment = checked_moment(moment, matrix, damping)
    blocks = _blocks(matrix, in_modes, out_modes)
    m0 = in_modes[1]
    firsts, seconds = [], []
    for index, block in enumerate(blocks):
        multiply, solve = moment_root(_part(wide_moment, index * m0, m0, damping), damping)
        u, sigma, vh = singular(multiply(block))
        kept = choose_rank(tails(sigma), rank=rank, error=None, norm=1.0)
        first, second = balanced(solve(vh[:, :kept]), u[..., :kept] * sigma[:, None, :kept])
        firsts.append(first)
        seconds.append(second)
    first, second = torch.stack(firsts), torch.stack(seconds, dim=2)
    out_features, in_features = matrix.shape
    change = matrix - blocks_weight(first, second, in_features, out_features)
    return Factored(
        (first.to(weight.dtype).contiguous(), second.to(weight.dtype).contiguous()),
        output_change(change, wide_moment),
        output_change(matrix, wide_moment),
    )


def _part(moment: Tensor, start: int, count: int, damping: float) -> Tensor:
    """The moment of `count` features; padded ones, and blocks never seen, count a little."""
    part = moment[start : start + count]
    if moment.dim() == 2:
        part = part[:, start : start + count]
    diagonal = moment if moment.dim() == 1 else moment.diagonal()
    little = max(damping, torch.finfo(moment.dtype).eps) * diagonal.mean()
    whole = part.new_zeros((count,) * moment.dim())
    whole[tuple(slice(size) for size in part.shape)] = part
    (whole if whole.dim() == 1 else whole.diagonal()).add_(little)
    return whole


def to_monarch(weight: Tensor, *, blocks: int) -> Factored:
    """The best Monarch matrix of `blocks` blocks on both sides, in the Frobenius norm.

    Args:
        weight: (out, in), any floating type.
        blocks: Blocks of both block-diagonal factors.

    Returns:
        As `to_blocks`, for the modes and rank of `outlast.tensorize.shapes.monarch_modes` and
        `monarch_rank`.

    Raises:
        TensorizeError: For a number of blocks out of range, or a weight that cannot be converted.
    """
    if weight.dim() != 2:
        raise TensorizeError(
            f"weight has shape {tuple(weight.shape)}, and conversion wants (out, in) features"
        )
    out_features, in_features = weight.shape
    in_modes, out_modes = monarch_modes(in_features, out_features, blocks)
    rank = monarch_rank(in_features, out_features, blocks)
    return to_blocks(weight, in_modes=in_modes, out_modes=out_modes, rank=rank)


def blocks_weight(first: Tensor, second: Tensor, in_features: int, out_features: int) -> Tensor:
    """The weight (out, in) that the two cores hold, without padding.

    Args:
        first: R (m1, n0, r, m0).
        second: L (n0, n1, m1, r).
        in_features: At most m1 m0.
        out_features: At most n0 n1.
    """
    product = second.permute(2, 0, 1, 3) @ first
    m1, n0, n1, m0 = product.shape
    dense = product.permute(1, 2, 0, 3).reshape(n0 * n1, m1 * m0)
    return dense[:out_features, :in_features]


def _blocks(matrix: Tensor, in_modes: tuple[int, int], out_modes: tuple[int, int]) -> Tensor:
    """(out, in) as blocks (m1, n0, n1, m0)."""
    (m1, m0), (n0, n1) = in_modes, out_modes
    return padded(matrix, n0 * n1, m1 * m0).reshape(n0, n1, m1, m0).permute(2, 0, 1, 3)
