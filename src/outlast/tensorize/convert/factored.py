"""What every conversion of a dense weight returns, and the linear algebra that all share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from outlast.errors import TensorizeError

_LIVE = 1e-8
"""Singular values below this share of the largest count as zero when they are split."""

_ATTEMPTS = 3
_WORTHWHILE = 1e-3
"""A budget that is larger by less than this share changes no rank that matters."""

_MOST = 1.0 - 1e-6
"""The largest relative error that is a budget."""


@dataclass(frozen=True, eq=False)
class Factored:
    """The factors of a weight; unpacks into them.

    Attributes:
        cores: In the chain order and with the index order of the form they are for.
        error: Norm of what was discarded: Frobenius norm of weight - product, or the root mean
            square of the outputs' change where the conversion weighs by activations. Exact up to
            rounding, without what padding of modes holds.
        norm: The same norm of the weight.
    """

    cores: tuple[Tensor, ...]
    error: float
    norm: float

    @property
    def relative_error(self) -> float:
        """`error` as a share of `norm`; 0 for a weight of zeros."""
        return self.error / self.norm if self.norm > 0.0 else 0.0

    @property
    def parameters(self) -> int:
        """Numbers in all cores."""
        return sum(core.numel() for core in self.cores)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.cores)


def working_copy(weight: Tensor, name: str = "weight") -> Tensor:
    """A detached copy in the type that conversions compute in.

    Args:
        weight: Any shape and floating type.
        name: What messages call it.

    Returns:
        float64, or float32 on devices that have no float64 (mps).

    Raises:
        TensorizeError: For values that are not finite, and for meta tensors, which have none.
    """
    if weight.is_meta:
        raise TensorizeError(
            f"{name} is on the meta device and has no values to convert: load it first"
        )
    wide = torch.float32 if weight.device.type == "mps" else torch.float64
    copy = weight.detach().to(wide)
    if not bool(torch.isfinite(copy).all()):
        raise TensorizeError(
            f"{name} holds values that are not finite and cannot be converted: "
            f"restore a checkpoint from before they appeared"
        )
    return copy


def matrix_copy(weight: Tensor) -> Tensor:
    """`working_copy` of a weight (out, in).

    Raises:
        TensorizeError: For anything but two dimensions of at least one element.
    """
    if weight.dim() != 2 or weight.numel() == 0:
        raise TensorizeError(
            f"weight has shape {tuple(weight.shape)}, and conversion wants (out, in) features"
        )
    return working_copy(weight)


def singular(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Reduced singular value decomposition U, S, Vh of (..., rows, columns).

    LAPACK's divide and conquer (gesdd), which torch uses on CPU, fails to converge on a few finite
    matrices; the slower QR iteration (gesvd) then does it.
    """
    try:
        return torch.linalg.svd(matrix, full_matrices=False)  # type: ignore[no-any-return]
    except torch.linalg.LinAlgError:
        return _by_iteration(matrix)


def _by_iteration(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from scipy.linalg import svd

    rows, columns = matrix.shape[-2:]
    parts = [
        svd(one.cpu().numpy(), full_matrices=False, lapack_driver="gesvd")
        for one in matrix.reshape(-1, rows, columns)
    ]
    batch = matrix.shape[:-2]
    left, values, right = (
        torch.stack([torch.as_tensor(part[index]) for part in parts]).to(matrix)
        for index in range(3)
    )
    return (
        left.reshape(*batch, *left.shape[1:]),
        values.reshape(*batch, *values.shape[1:]),
        right.reshape(*batch, *right.shape[1:]),
    )


def tails(values: Tensor) -> Tensor:
    """Norm of what remains when the first k singular values are kept, for k = 0..len.

    Args:
        values: (..., k) singular values in descending order; leading dimensions are summed over.

    Returns:
        (k + 1,) Frobenius norms; the last is 0.
    """
    squares = values.square().reshape(-1, values.shape[-1]).sum(0)
    kept_last = torch.cat([squares, squares.new_zeros(1)])
    return kept_last.flip(0).cumsum(0).flip(0).sqrt()


def choose_rank(discarded: Tensor, *, rank: int | None, error: float | None, norm: float) -> int:
    """The rank asked for, or the smallest that keeps to an error.

    Args:
        discarded: (most + 1,) what each rank discards, see `tails`.
        rank: Between 1 and `most`.
        error: Largest discarded share of `norm`.
        norm: Norm of the whole.

    Raises:
        TensorizeError: Unless exactly one of both is given, or where it is out of range.
    """
    most = len(discarded) - 1
    check_one_of(rank=rank, error=error)
    if rank is not None:
        if not 1 <= rank <= most:
            raise TensorizeError(
                f"rank = {rank} must be between 1 and {most}, at which nothing is lost"
            )
        return rank
    assert error is not None
    fitting = int((discarded > error * norm).sum())
    return max(1, min(fitting, most))


def check_one_of(*, rank: object | None, error: float | None) -> None:
    """Refuse both or none of a rank and an error, and errors outside 0 to 1.

    Raises:
        TensorizeError: See above.
    """
    if (rank is None) == (error is None):
        raise TensorizeError(
            f"rank = {rank} and error = {error}: give one of them, a rank or the share to lose"
        )
    if error is not None and not 0.0 <= error < 1.0:
        raise TensorizeError(f"error = {error} must be between 0 and 1, the share that is lost")


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split singular values in two factors, equally where they are not zero.

    Both factors of a zero would be zero with ``sqrt``, and their gradients too: a part of the
    layer that never learns. So the right factor keeps a little, and the left takes the rest; a
    matrix of zeros becomes 0 times 1.

    Args:
        values: (..., k) singular values.

    Returns:
        Left and right (..., k), whose product is `values`.
    """
    largest = values.amax(-1, keepdim=True)
    floor = torch.where(largest > 0, largest * _LIVE, torch.ones_like(largest))
    right = torch.maximum(values, floor).sqrt()
    return values / right, right


def balanced(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The factors with the same product and equal Gram matrices, ``up^T up = down down^T``.

    Balanced factors have the smallest sum of squares for their product, learn at the same speed,
    and gradient flow keeps them balanced (Du et al. 2018, arXiv 1806.00900).

    Args:
        down: (.., rank, in).
        up: (.., out, rank).
    """
    q_up, r_up = torch.linalg.qr(up)
    q_down, r_down = torch.linalg.qr(down.mT)
    u, s, vh = singular(r_up @ r_down.mT)
    left, right = split(s)
    return right[..., None] * (vh @ q_down.mT), (q_up @ u) * left[..., None, :]


def padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """(out, in) extended with zeros to (rows, columns).

    Raises:
        TensorizeError: Where the modes hold fewer features than the weight has.
    """
    out_features, in_features = matrix.shape
    if rows < out_features or columns < in_features:
        raise TensorizeError(
            f"modes hold {columns} input and {rows} output features, but the weight has "
            f"{in_features} and {out_features}: take modes whose product is at least that"
        )
    return torch.nn.functional.pad(matrix, (0, columns - in_features, 0, rows - out_features))


def spend(convert: Callable[[float], Factored], error: float) -> Factored:
    """The smallest of a few conversions that keep to an error, where padding does not count.

    A conversion of a padded weight spends its budget on the padding too, so that the weight itself
    comes out nearer than was asked for. It is tried with as much more as it left over, three times
    at most.

    Args:
        convert: From a budget, a share of the norm of the padded weight, to factors whose `error`
            is that of the weight itself.
        error: Largest relative error of the weight.
    """
    best = convert(error)
    enough, budget = error, error
    for _ in range(_ATTEMPTS):
        left = error / best.relative_error if best.relative_error > 0.0 else 1.0
        budget = min(enough * left, _MOST) if budget == enough else (enough + budget) / 2.0
        if budget <= enough * (1.0 + _WORTHWHILE):
            break
        found = convert(budget)
        if found.relative_error <= error:
            enough = budget
            best = found if found.parameters <= best.parameters else best
    return best


def root_sum(squares: float) -> float:
    """Square root of a sum that rounding may have made slightly negative."""
    return math.sqrt(max(squares, 0.0))
