"""Comparing what was found with what was expected, against a variance."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outlast.guard.threshold import DEVIATIONS

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class ResidualTest:
    """Result of one check by rows; numbers are 0-dim tensors where the device is not waited for.

    Attributes:
        flags: (rows,) bool, which rows exceeded their threshold.
        exceeded: Their number.
        worst: Largest |difference| in standard deviations.
        total: Sum of squared differences in standard deviations, of rows that passed.
        widest: Largest threshold of a row that passed, as a share of its scale; an error of twice
            as much is surely found.
        bitwise: Whether numbers were compared that must be equal, whatever they are.
    """

    flags: Tensor
    exceeded: int | Tensor
    worst: float | Tensor
    total: float | Tensor
    widest: float | Tensor
    bitwise: bool = False


def residual_test(difference: Tensor, variance: Tensor, scale_squared: Tensor) -> ResidualTest:
    """Judge differences, on any device without waiting for it.

    Args:
        difference: (rows,) found minus expected.
        variance: (rows,) what rounding makes of it, above 0.
        scale_squared: (rows,) squared norm of what is checked.
    """
    limit = DEVIATIONS**2
    ratio = difference.square() / variance
    # A NaN is not at most the limit, and an infinite variance allows nothing.
    flags = ~(ratio <= limit) | ~torch.isfinite(variance)
    width = torch.where(flags | (scale_squared == 0), 0.0, variance / scale_squared)
    return ResidualTest(
        flags,
        flags.sum(),
        ratio.max().sqrt(),
        torch.where(flags, 0.0, ratio).sum(),
        (limit * width.max()).sqrt(),
    )


def compared_bits(judged: ResidualTest, made: Tensor, again: Tensor) -> ResidualTest:
    """`judged`, and rows whose bits a second computation gives otherwise, on the CPU.

    Args:
        judged: Of the rows of `made`.
        made: Of any shape with as many rows.
        again: Of the same shape.
    """
    if torch.equal(bits(made), bits(again)):
        return judged
    rows = len(judged.flags)
    other = ~equal_bits(made.reshape(rows, -1), again.reshape(rows, -1)).all(dim=1)
    if not bool(other.any()):
        return judged
    flags = judged.flags | other
    return replace(judged, flags=flags, exceeded=int(flags.sum()), worst=math.inf)


def equality_test(found: Tensor, expected: Tensor) -> ResidualTest:
    """Judge values (rows,) that must be equal bit for bit, such as hashes."""
    flags = found != expected
    zero = torch.zeros((), dtype=torch.float32, device=flags.device)
    worst = torch.where(flags.any(), torch.inf, 0.0)
    return ResidualTest(flags, flags.sum(), worst, zero, zero, bitwise=True)


def exact_test(wrong: Sequence[bool]) -> ResidualTest:
    """Judge what was compared bit for bit on the host: which rows are wrong."""
    count = sum(wrong)
    worst = math.inf if count else 0.0
    return ResidualTest(torch.tensor(wrong, device="cpu"), count, worst, 0.0, 0.0, bitwise=True)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def name_of(dtype: torch.dtype) -> str:
    """A type's name as `outlast.guard.threshold` knows it."""
    return str(dtype).removeprefix("torch.")


def bits(values: Tensor) -> Tensor:
    """`values` as integers of the same size, so that NaN equals itself and -0.0 is not 0.0."""
    return values.view(_INTEGERS[values.element_size()])


def equal_bits(first: Tensor, second: Tensor) -> Tensor:
    """Mask of equal bits, or both NaN, whose payload depends on the kernel."""
    return (bits(first) == bits(second)) | (torch.isnan(first) & torch.isnan(second))


def accumulating(like: Tensor) -> torch.dtype:
    """The type in which kernels sum numbers like these."""
    return torch.float64 if like.dtype == torch.float64 else torch.float32


def summing(*tensors: Tensor | None) -> torch.dtype:
    """The type in which to sum these: wide enough that the sums' own rounding is small."""
    wide = any(t is not None and t.dtype in (torch.float32, torch.float64) for t in tensors)
    return torch.float64 if wide else torch.float32


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """Plain arrays with all numbers of a tensor of any layout; none of one without memory."""
    tensor = tensor.detach()
    if tensor.is_meta:
        return []
    if tensor.is_quantized:
        return [tensor.int_repr()]
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.layout is not torch.strided:
        return [tensor.to_dense()]
    return [tensor.resolve_conj().resolve_neg()]


def same_content(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors of the same layout and device have the same bytes."""
    pairs = list(itertools.zip_longest(plain_parts(first), plain_parts(second)))
    return all(
        one is not None
        and two is not None
        and one.shape == two.shape
        and torch.equal(_bytes_of(one), _bytes_of(two))
        for one, two in pairs
    )


def _bytes_of(array: Tensor) -> Tensor:
    return array.contiguous().view(-1).view(torch.uint8)


def is_half(dtype: torch.dtype) -> bool:
    """Return whether numbers of this type are 16 bits wide."""
    return dtype in (torch.bfloat16, torch.float16)


def rows_contiguous(matrix: Tensor) -> Tensor:
    """`matrix`, or a copy whose rows are contiguous."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
