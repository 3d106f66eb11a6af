"""Dense to canonical polyadic (CP): a sum of outer products, one vector per mode in each.

    W[a, b, .., c, d] = sum_r A[a, r] B[b, r] .. C[c, r] D[d, r]

By alternating least squares (Carroll and Chang 1970; Kolda and Bader 2009, figure 3.3): with all
factors but one fixed, the last has a closed form, so the error never rises. It can end in a local
minimum, and a best approximation need not exist, so several starts are tried and the best is kept;
the error is measured, never bounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outlast.errors import TensorizeError
from outlast.tensorize.convert.factored import Factored, matrix_copy, padded, working_copy
from outlast.tensorize.convert.tucker import leading_vectors

_RIDGE = 1e-12
"""Added to normal equations, as a share of their mean diagonal: terms may become parallel."""


def cp(
    tensor: Tensor,
    *,
    rank: int,
    restarts: int = 3,
    iterations: int = 100,
    tolerance: float = 1e-6,
    seed: int = 0,
) -> Factored:
    """A tensor as a sum of `rank` outer products.

    Args:
        tensor: (n_1, .., n_k) with k >= 2, any floating type.
        rank: Number of terms.
        restarts: Starts; the first from the unfoldings' singular vectors, the others random.
        iterations: Most rounds over all modes for each start.
        tolerance: A start ends when a round lowers the relative error by less.
        seed: Of the random starts.

    Returns:
        Factors (n_j, rank) in the tensor's type, whose columns share the norm of their term
        equally; the error is measured.

    Raises:
        TensorizeError: For numbers below 1, less than two modes, or values that are not finite.
    """
    if rank < 1 or restarts < 1 or iterations < 1:
        raise TensorizeError(
            f"rank = {rank}, restarts = {restarts} and iterations = {iterations} must be 1 or more"
        )
    if tensor.dim() < 2 or tensor.numel() == 0:
        raise TensorizeError(
            f"a tensor of shape {tuple(tensor.shape)} has no sum of outer products: give two modes"
        )
    wide = working_copy(tensor, "tensor")
    norm = float(wide.norm())
    generator = torch.Generator().manual_seed(seed)
    best: tuple[float, list[Tensor]] | None = None
    if norm == 0.0:
        # Factors that are all zero would have no gradient; one is enough.
        begun = _begin(wide, rank, 0, generator)
        factors = [*begun[:-1], torch.zeros_like(begun[-1])]
        return Factored(tuple(one.to(tensor.dtype) for one in factors), 0.0, 0.0)
    for start in range(restarts):
        found = _alternate(wide, _begin(wide, rank, start, generator), iterations, tolerance * norm)
        if best is None or found[0] < best[0]:
            best = found
    assert best is not None
    factors = _even(best[1])
    return Factored(tuple(one.to(tensor.dtype).contiguous() for one in factors), best[0], norm)


def to_cp(
    weight: Tensor,
    *,
    in_modes: Sequence[int],
    out_modes: Sequence[int],
    rank: int,
    restarts: int = 3,
    iterations: int = 100,
    seed: int = 0,
) -> Factored:
    """A weight as a CP chain: input factors, then output factors.

    Args:
        weight: (out, in), any floating type.
        in_modes: (d,) modes of the input features, row-major; product >= in.
        out_modes: (e,) modes of the output features, row-major; product >= out.
        rank: Number of terms.
        restarts: See `cp`.
        iterations: See `cp`.
        seed: See `cp`.

    Returns:
        Factors (in_1, rank), .., (in_d, rank), (out_1, rank), .., (out_e, rank) in the weight's
        type. The error is measured, without the padding of modes.

    Raises:
        TensorizeError: For modes that are too small, or as `cp`.
    """
    matrix = matrix_copy(weight)
    wide = padded(matrix, math.prod(out_modes), math.prod(in_modes))
    joined = wide.mT.reshape(*in_modes, *out_modes)
    found = cp(joined, rank=rank, restarts=restarts, iterations=iterations, seed=seed)
    error = found.error
    if wide.numel() > matrix.numel():
        out_features, in_features = matrix.shape
        dense = cp_weight(found.cores, in_features, out_features, inputs=len(in_modes))
        error = float((matrix - dense).norm())
    return Factored(tuple(one.to(weight.dtype) for one in found.cores), error, found.norm)


def cp_product(factors: Sequence[Tensor]) -> Tensor:
    """The tensor (n_1, .., n_k) that factors (n_j, rank) hold."""
    whole = factors[0]
    for factor in factors[1:-1]:
        whole = whole.unsqueeze(-2) * factor
    return whole @ factors[-1].mT


def cp_weight(
    factors: Sequence[Tensor], in_features: int, out_features: int, *, inputs: int
) -> Tensor:
    """The weight (out, in) of factors as `to_cp` returns them, without padding.

    Args:
        factors: Input factors, then output factors.
        in_features: At most the product of the input modes.
        out_features: At most the product of the output modes.
        inputs: Number of input factors.
    """
    whole = cp_product(factors)
    rows = math.prod(whole.shape[:inputs])
    return whole.reshape(rows, -1).mT[:out_features, :in_features]


def _begin(tensor: Tensor, rank: int, start: int, generator: torch.Generator) -> list[Tensor]:
    """Unit columns: singular vectors for the first start, completed with random ones."""
    factors = []
    for mode, size in enumerate(tensor.shape):
        drawn = torch.randn(size, rank, generator=generator, dtype=torch.float64).to(tensor)
        if start == 0:
            vectors = leading_vectors(tensor, mode, rank)
            drawn[:, : vectors.shape[1]] = vectors
        factors.append(drawn / drawn.norm(dim=0))
    return factors


def _alternate(
    tensor: Tensor, factors: list[Tensor], iterations: int, tolerance: float
) -> tuple[float, list[Tensor]]:
    before = math.inf
    for _ in range(iterations):
        for mode in range(len(factors)):
            gram = _gram_of_others(factors, mode)
            added = _RIDGE * gram.diagonal().mean()
            gram = gram + torch.eye(len(gram)).to(gram) * added
            answer = torch.linalg.lstsq(gram, _against_others(tensor, factors, mode).mT)
            factors[mode] = answer.solution.mT
            if mode < len(factors) - 1:
                sizes = factors[mode].norm(dim=0)
                factors[mode] = factors[mode] / torch.where(sizes > 0, sizes, 1.0)
        error = float((tensor - cp_product(factors)).norm())
        if before - error <= tolerance:
            break
        before = error
    return error, factors


def _gram_of_others(factors: Sequence[Tensor], mode: int) -> Tensor:
    gram = factors[0].new_ones(factors[0].shape[1], factors[0].shape[1])
    for other, factor in enumerate(factors):
        if other != mode:
            gram = gram * (factor.mT @ factor)
    return gram


def _against_others(tensor: Tensor, factors: Sequence[Tensor], mode: int) -> Tensor:
    """Contract all modes but one with the factors' columns: (n_mode, rank)."""
    others = [factor for other, factor in enumerate(factors) if other != mode]
    result = tensor.movedim(mode, 0) @ others[-1]
    for factor in reversed(others[:-1]):
        result = (result * factor).sum(-2)
    return result


def _even(factors: Sequence[Tensor]) -> list[Tensor]:
    """The same terms, each with equally long vectors in all modes."""
    sizes = [factor.norm(dim=0) for factor in factors]
    term = torch.stack(sizes).prod(0) ** (1.0 / len(factors))
    return [
        factor * (term / torch.where(size > 0, size, 1.0))
        for factor, size in zip(factors, sizes, strict=True)
    ]
