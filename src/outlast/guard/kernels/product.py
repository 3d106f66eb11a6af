"""The checks of a matrix product on CUDA devices, next to products that others compute.

Three launches check a forward product and five a backward one; nothing waits for the device.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import triton

from outlast.guard.elements import rows_contiguous
from outlast.guard.judged import Judged
from outlast.guard.kernels import sweeps
from outlast.guard.kernels.bounds import bound_on
from outlast.guard.product import Encoding, Projections, rounding_of
from outlast.guard.threshold import product_bound

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    from outlast.guard.product import Gradients
    from outlast.guard.signs import Signs
    from outlast.guard.threshold import Bound, Rounding

TYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonProduct:
    """The checks by the passes of `outlast.guard.kernels.sweeps`; see `outlast.guard.product`.

    For matrices in fp32, bf16 or fp16. All results are tensors on the device of the matrices.
    """

    def encode(self, weight: Tensor, bias: Tensor | None, signs: Signs) -> Encoding:
        """See `Product`."""
        outputs, inputs = weight.shape
        u = signs.take("input", inputs, weight.device)
        v = signs.take("output", outputs, weight.device)
        right, rows, left, columns = both_sums(weight, u, v, torch.ones_like(v))
        offset = 0.0 if bias is None else bias.double() @ v.double()
        return Encoding(
            u,
            v,
            _total(right).float(),
            _total(left).float(),
            _total(rows).max(),
            _total(columns).max(),
            beta=0.0 if bias is None else 1.0,
            offset=offset,
        )

    def forward(self, x: Tensor, y: Tensor, encoding: Encoding) -> tuple[Projections, Judged]:
        """See `Product`."""
        expected, projections = operand_sums(x, encoding)
        bound = bound_on(x, (*y.shape, x.shape[1]))
        judged = output_sums(
            y,
            encoding.output_signs,
            expected[None],
            projections.squares[None],
            bound,
            offset=encoding.offset,
            largest=encoding.columns_largest,
        )
        return projections, judged

    def backward(
        self,
        dy: Tensor,
        gradients: Gradients,
        encoding: Encoding,
        projections: Projections,
    ) -> tuple[Judged | None, Judged | None]:
        """See `Product`."""
        dx, dw, db = gradients.dx, gradients.dw, gradients.db
        dots, squares, sums, spreads = both_sums(
            dy, encoding.right, projections.dots, projections.masses
        )
        dx_judged = dw_judged = None
        if dx is not None:
            dx_judged = output_sums(
                dx,
                encoding.input_signs,
                dots,
                squares,
                bound_on(dy, (*dx.shape, dy.shape[1])),
                largest=encoding.rows_largest,
            )
        if dw is not None:
            dw_judged = output_sums(
                dw,
                encoding.input_signs,
                sums,
                spreads,
                _alike(bound_on(dy, (*dw.shape, dy.shape[0])), rounding_of(dy), dy.shape[0]),
                bias_gradient=db,
                beta=encoding.beta,
            )
        return dx_judged, dw_judged


def _alike(bound: Bound, rounding: Rounding, terms: int) -> Bound:
    """`bound` of rows whose terms are nearly proportional; see `product_bound`.

    The kernels judge without the rows' own sums, whose squares are below 20 times the powers up to
    three deviations.
    """
    common = product_bound(rounding, terms, 1, alike=True).by_value
    return replace(bound, by_power=bound.by_power + 20.0 * common)


def operand_sums(x: Tensor, encoding: Encoding) -> tuple[Tensor, Projections]:
    """X (v W), and X u + beta with |X_i|^2; all (rows,) fp64, for x (rows, inputs)."""
    x = rows_contiguous(x)
    rows, columns = x.shape
    dots, seconds, squares = torch.empty((3, rows), dtype=torch.float64, device=x.device)
    with on_device_of(x):
        sweeps.operand_kernel[(triton.cdiv(rows, sweeps.ROWS),)](
            x,
            encoding.left,
            encoding.input_signs,
            dots,
            seconds,
            squares,
            encoding.beta,
            rows,
            columns,
            x.stride(0),
            height=sweeps.ROWS,
            width=_tile(columns),
        )
    return dots, Projections(seconds, squares)


def output_sums(
    matrix: Tensor,
    signs: Tensor,
    expected: Tensor,
    squares: Tensor,
    bound: Bound,
    *,
    offset: float | Tensor = 0.0,
    largest: float | Tensor = 1.0,
    bias_gradient: Tensor | None = None,
    beta: float = 0.0,
) -> Judged:
    """Judge every row's signed sum.

    Args:
        matrix: (rows, columns).
        signs: (columns,) fp32.
        expected: (parts, rows), to be added over parts.
        squares: (parts, rows), likewise.
        bound: What rounding makes of `squares` times `largest` and of the rows' powers.
        offset: Added to what is expected.
        largest: See `bound`.
        bias_gradient: (rows,), of which `beta` times are added to the sums.
        beta: See `bias_gradient`.
    """
    matrix = rows_contiguous(matrix)
    rows, columns = matrix.shape
    flags, counts = _results(rows, sweeps.ROWS, matrix.device)
    with on_device_of(matrix):
        sweeps.output_kernel[(counts.shape[1],)](
            matrix,
            signs,
            None if bias_gradient is None else bias_gradient.contiguous(),
            expected,
            squares,
            len(expected),
            _pointer(offset, 0.0, matrix.device),
            _pointer(largest, 1.0, matrix.device),
            flags,
            counts,
            beta,
            bound.by_power,
            bound.by_square,
            bound.floor,
            bound.limit,
            rows,
            columns,
            matrix.stride(0),
            height=sweeps.ROWS,
            width=_tile(columns),
            block=_parts(expected),
        )
    return _fold(flags, counts, bound)


def compare(
    found: Tensor,
    powers: Tensor,
    expected: Tensor,
    squares: Tensor,
    bound: Bound,
    *,
    offset: float | Tensor = 0.0,
    largest: float | Tensor = 1.0,
) -> Judged:
    """Judge sums (tiles, rows) that a product has left behind; else as `output_sums`."""
    rows = found.shape[1]
    flags, counts = _results(rows, sweeps.COMPARE_ROWS, found.device)
    with on_device_of(found):
        sweeps.compare_kernel[(counts.shape[1],)](
            found,
            powers,
            len(found),
            expected,
            squares,
            len(expected),
            _pointer(offset, 0.0, found.device),
            _pointer(largest, 1.0, found.device),
            flags,
            counts,
            bound.by_power,
            bound.by_square,
            bound.floor,
            bound.limit,
            rows,
            height=sweeps.COMPARE_ROWS,
            block=min(_parts(found), 16),
        )
    return _fold(flags, counts, bound)


def both_sums(
    matrix: Tensor, right: Tensor, left: Tensor, masses: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums of a matrix (rows, columns) along both sides, in fp32 parts.

    Args:
        matrix: As it is in memory.
        right: (columns,) fp32, perhaps longer.
        left: (rows,).
        masses: (rows,).

    Returns:
        matrix @ right and |row|^2, both (parts, rows); left @ matrix and masses @ matrix^2, both
        (parts, columns); each to be added over parts.
    """
    matrix = rows_contiguous(matrix)
    rows, columns = matrix.shape
    span = sweeps.BOTH_TILE * sweeps.BOTH_TILES
    blocks, spans = triton.cdiv(rows, sweeps.BOTH_ROWS), triton.cdiv(columns, span)
    dots, squares = torch.empty((2, spans, rows), device=matrix.device)
    sums, spreads = torch.empty((2, blocks, columns), device=matrix.device)
    with on_device_of(matrix):
        sweeps.both_kernel[(blocks, spans)](
            matrix,
            right,
            left,
            masses,
            dots,
            squares,
            sums,
            spreads,
            rows,
            columns,
            matrix.stride(0),
            height=sweeps.BOTH_ROWS,
            width=sweeps.BOTH_TILE,
            tiles=sweeps.BOTH_TILES,
            num_warps=8,
        )
    return dots, squares, sums, spreads


def on_device_of(matrix: Tensor) -> AbstractContextManager[object]:
    """Where kernels must be started: they go to the current device, whatever their tensors'."""
    return torch.cuda.device(matrix.device) if matrix.is_cuda else nullcontext()


def _results(rows: int, height: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Flags (rows,) and counts (4, programs) for programs of `height` rows."""
    flags = torch.empty(rows, dtype=torch.uint8, device=device)
    counts = torch.empty((4, triton.cdiv(rows, height)), dtype=torch.float64, device=device)
    return flags, counts


def _fold(flags: Tensor, counts: Tensor, bound: Bound) -> Judged:
    verdict = torch.empty(4, dtype=torch.float64, device=flags.device)
    with on_device_of(flags):
        sweeps.fold_kernel[(1,)](counts, verdict, counts.shape[1], bound.limit, block=sweeps.FOLDED)
    exceeded, worst, total, widest = verdict.unbind()
    return Judged(flags.view(torch.bool), exceeded, worst, total, widest)


def _pointer(value: float | Tensor, neutral: float, device: torch.device) -> Tensor | None:
    """`value` in the memory of the device, or None for what changes nothing."""
    if isinstance(value, float):
        return None if value == neutral else torch.full((), value, device=device)
    return value


def _tile(columns: int) -> int:
    return min(max(int(triton.next_power_of_2(columns)), 32), sweeps.LONGEST_TILE)


def _parts(parts: Tensor) -> int:
    return min(int(triton.next_power_of_2(len(parts))), sweeps.PARTS)


def _total(parts: Tensor) -> Tensor:
    return parts.sum(dim=0, dtype=torch.float64)
