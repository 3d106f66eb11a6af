"""What CUDA's units and libraries add to the bounds of `outlast.guard.threshold`.

*Truncation.* Tensor cores cut off where other units round to nearest, so errors lean towards zero
and add up (Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ
Computer Science 2021). An error of a share b of every y_j makes the checked sum wrong by ``b sum_j
v_j y_j``; over the random signs v that has the variance ``b^2 sum_j y_j^2``, at most 4 b^2 powers.

- Every instruction adds some products to the partial sum S_t and cuts it off, on average by u_acc
  |S_t| with u_acc = 2^-24. For S_t growing evenly to y this makes a share of u_acc / 2 for each
  instruction: small beside the rounding of a 16-bit output, but not beside an accumulator's.
- The 32-bit operands of TF32 lose the bits behind the 11th (PTX ISA, wgmma: "will truncate lower 13
  bits of the 32-bit input data"): each operand at most 2^-10 of itself, half of that on average.
  Libraries may round before; that is not documented.

*Splitting.* Where the tiles of an output are too few for a device, cuBLAS splits sums over tiles,
and may keep the parts in the stored type (``allow_bf16_reduced_precision_reduction``; the same for
fp16). A part p_s has the variance u^2 4^e / 3 of its rounding, and sum_s p_s^2 is at most the
walk's sum_t p_t^2 plus the drift's y^2 / 2. That a device with `_WAVES` tiles of 128 x 128 for each
multiprocessor gets no split is an assumption about cuBLAS, which the tests on devices check.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from outlast.guard.elements import name_of
from outlast.guard.product import rounding_of
from outlast.guard.threshold import Bound, product_bound, unit_roundoff

if TYPE_CHECKING:
    from torch import Tensor

_TERMS_PER_INSTRUCTION = 8
"""The fewest: 8 for TF32, 16 for 16-bit types."""
_WAVES = 4


def bound_on(x: Tensor, shape: tuple[int, int, int], summed: torch.dtype = torch.float32) -> Bound:
    """The bound of a library's product of tensors like `x` on their device.

    Args:
        x: An operand.
        shape: Rows and outputs of the product, and terms of its sums.
        summed: Type of the check's own sums.
    """
    rows, outputs, terms = shape
    rounding = rounding_of(x, summed)
    if (
        x.is_cuda
        and x.dtype == torch.float16
        and torch.backends.cuda.matmul.allow_fp16_accumulation
    ):
        rounding = replace(rounding, accumulated="float16")
    bound = _truncated(x, terms, product_bound(rounding, terms, outputs), rounding.accumulated)
    if x.device.type == "cuda" and _may_split(x.dtype):
        tiles = -(-rows // 128) * -(-outputs // 128)
        if tiles < _WAVES * _multiprocessors(x.device):
            return split(bound, name_of(x.dtype))
    return bound


def bound_of_own(x: Tensor, terms: int, outputs: int, *, unrounded: bool) -> Bound:
    """The bound of a product by `outlast.guard.kernels.matmul`.

    Args:
        x: As in `bound_on`.
        terms: Of each sum.
        outputs: Of each row.
        unrounded: The accumulator is checked, before it is rounded to the type of `x`.
    """
    rounding = rounding_of(x)
    if unrounded:
        rounding = replace(rounding, stored=rounding.accumulated)
    return _truncated(x, terms, product_bound(rounding, terms, outputs), rounding.accumulated)


def truncation(terms: int, read: str = "", accumulated: str = "float32") -> float:
    """Variance by truncation in tensor cores, as a share of a row's ``powers``.

    Args:
        terms: Of each sum.
        read: ``tf32`` where 32-bit operands are cut off, or empty.
        accumulated: Type of the partial sums.
    """
    share = unit_roundoff(accumulated) * terms / _TERMS_PER_INSTRUCTION / 2.0
    if read:
        share += 2.0 * unit_roundoff(read)
    return 4.0 * share**2


def split(bound: Bound, stored: str) -> Bound:
    """`bound` for sums whose parts are rounded to the type `stored`, too."""
    rounding = unit_roundoff(stored) ** 2 / 3.0
    return replace(
        bound, by_power=bound.by_power + 2.0 * rounding, by_square=bound.by_square + rounding
    )


def _truncated(x: Tensor, terms: int, bound: Bound, accumulated: str) -> Bound:
    read = rounding_of(x).read
    if x.device.type != "cuda" or (x.element_size() >= 4 and not read):
        return bound
    return replace(bound, by_power=bound.by_power + truncation(terms, read, accumulated))


def _may_split(dtype: torch.dtype) -> bool:
    matmul = torch.backends.cuda.matmul
    if dtype == torch.bfloat16:
        return bool(matmul.allow_bf16_reduced_precision_reduction)
    if dtype == torch.float16:
        return bool(matmul.allow_fp16_reduced_precision_reduction)
    return False


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
