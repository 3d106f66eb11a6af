"""The checks of a matrix product on CUDA devices, in Triton: every matrix is read once.

They stand next to products that others compute. Three launches check a forward product and five a
backward one; nothing waits for the device. The same passes as in ``native/sweep.c``: a program adds
into lanes in fp32, never more than 64 numbers or 1/32 of a row one after the other, and adds lanes
and parts in fp64 where it ends. Parts are kept by place and added in a fixed order, so sums have
the same bits every time; no atomics.

    operand   X e, X u + beta and |X_i|^2 of every row
    output    A v and sum_j 4^floor(log2 |A_ij|) of every row, compared with what is expected
    both      dY e and |dY_i|^2 of every row; sum_i p_i dY_ij and sum_i m_i dY_ij^2 of every column
    fold      the counts of all programs of output
"""

# ruff: noqa: PLR0917 -- a kernel's parameters are what its launch names

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from outlast.guard.product import Encoding, Projections, bound_on, rounding_of, signs_of
from outlast.guard.residual import ResidualTest, rows_contiguous
from outlast.guard.threshold import product_bound

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    from outlast.guard.product import Gradients
    from outlast.guard.threshold import Bound, Rounding
    from outlast.guard.watch import RandomSigns


ROWS = 4
"""Rows of one program of operand and output."""

LONGEST_TILE = 512
"""Most columns that such a program reads at a time."""

BOTH_ROWS = 64
"""Rows of one program of both: so many are added in fp32 before fp64 takes over."""

BOTH_TILE = 128
BOTH_TILES = 8
"""Tiles of columns of one program of both."""
PARTS = 64
"""Parts of a sum that are read at a time."""

FOLDED = 1024


@triton.jit  # type: ignore[untyped-decorator]
def square_of_power(x: tl.tensor) -> tl.tensor:
    """4^floor(log2 |x|) of fp32 numbers: 0 for 0 and subnormals, infinity for infinity and NaN."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return power * power


@triton.jit  # type: ignore[untyped-decorator]
def _factors(place: tl.tensor, used: tl.tensor) -> tl.tensor:
    """Factors of columns, in fp32 however they are kept: (1, columns)."""
    return tl.load(place, mask=used, other=0.0).to(tl.float32)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def operand_kernel(
    matrix: tl.tensor,
    encoded: tl.tensor,
    signs: tl.tensor,
    dots: tl.tensor,
    seconds: tl.tensor,
    squares: tl.tensor,
    beta: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    height: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """Store matrix @ encoded, matrix @ signs + beta, and |row|^2; all fp64."""
    row = tl.program_id(0) * height + tl.arange(0, height)
    inside = row < rows
    start = matrix + row.to(tl.int64)[:, None] * stride
    dot = tl.zeros((height, width), tl.float32)
    second = tl.zeros((height, width), tl.float32)
    square = tl.zeros((height, width), tl.float32)
    for first in range(0, columns, width):
        column = first + tl.arange(0, width)
        used = column < columns
        x = tl.load(start + column[None, :], mask=inside[:, None] & used[None, :], other=0.0)
        x = x.to(tl.float32)
        dot += x * _factors(encoded + column, used)
        second += x * _factors(signs + column, used)
        square += x * x
    tl.store(dots + row, tl.sum(dot.to(tl.float64), axis=1), mask=inside)
    tl.store(seconds + row, tl.sum(second.to(tl.float64), axis=1) + beta, mask=inside)
    tl.store(squares + row, tl.sum(square.to(tl.float64), axis=1), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_of_parts(
    parts: tl.tensor, count: tl.tensor, row: tl.tensor, rows: tl.tensor, block: tl.constexpr
) -> tl.tensor:
    """Sum of parts (count, rows) over the first axis, for these rows; fp64."""
    total = tl.zeros((row.shape[0],), tl.float64)
    for first in range(0, count, block):
        part = first + tl.arange(0, block)
        place = parts + part.to(tl.int64)[:, None] * rows + row[None, :]
        used = (part < count)[:, None] & (row < rows)[None, :]
        total += tl.sum(tl.load(place, mask=used, other=0.0).to(tl.float64), axis=0)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _judge(
    found: tl.tensor,
    powers: tl.tensor,
    expected: tl.tensor,
    squares: tl.tensor,
    parts: tl.tensor,
    offset: tl.tensor,
    largest: tl.tensor,
    flags: tl.tensor,
    counts: tl.tensor,
    by_power: tl.tensor,
    by_square: tl.tensor,
    floor: tl.tensor,
    limit: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Flag rows, and leave this program's count, worst, total and widest in counts (4, programs).

    The same rule as `residual_test`; worst and widest are squares here. Where either
    of `offset` and `largest` is None, it is 0 or 1.
    """
    inside = row < rows
    difference = found - _sum_of_parts(expected, parts, row, rows, block)
    if offset is not None:
        difference -= tl.load(offset).to(tl.float64)
    square = _sum_of_parts(squares, parts, row, rows, block)
    if largest is not None:
        square *= tl.load(largest).to(tl.float64)
    variance = by_power * powers + by_square * square + floor
    ratio = difference * difference / variance
    # A NaN is not at most the limit, and an infinite variance allows nothing.
    passed = (ratio <= limit) & (variance < float("inf"))
    tl.store(flags + row, (~passed).to(tl.uint8), mask=inside)
    # Maxima skip NaN, which stands for any difference.
    ratio = tl.where(ratio >= 0, ratio, float("inf"))
    kept = passed & inside
    width = tl.where(kept & (powers > 0), variance / powers, 0.0)
    program, programs = tl.program_id(0), tl.num_programs(0)
    counts += program
    tl.store(counts, tl.sum(tl.where(inside & ~passed, 1.0, 0.0).to(tl.float64), axis=0))
    tl.store(counts + programs, tl.max(tl.where(inside, ratio, 0.0), axis=0))
    tl.store(counts + 2 * programs, tl.sum(tl.where(kept, ratio, 0.0), axis=0))
    tl.store(counts + 3 * programs, tl.max(width, axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def output_kernel(
    matrix: tl.tensor,
    signs: tl.tensor,
    bias_gradient: tl.tensor,
    expected: tl.tensor,
    squares: tl.tensor,
    parts: tl.tensor,
    offset: tl.tensor,
    largest: tl.tensor,
    flags: tl.tensor,
    counts: tl.tensor,
    beta: tl.float64,
    by_power: tl.float64,
    by_square: tl.float64,
    floor: tl.float64,
    limit: tl.float64,
    rows: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    height: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Judge matrix @ signs + beta bias_gradient against expected (parts, rows)."""
    row = tl.program_id(0) * height + tl.arange(0, height)
    inside = row < rows
    start = matrix + row.to(tl.int64)[:, None] * stride
    dot = tl.zeros((height, width), tl.float32)
    power = tl.zeros((height, width), tl.float32)
    for first in range(0, columns, width):
        column = first + tl.arange(0, width)
        used = column < columns
        x = tl.load(start + column[None, :], mask=inside[:, None] & used[None, :], other=0.0)
        x = x.to(tl.float32)
        dot += x * _factors(signs + column, used)
        power += square_of_power(x)
    found = tl.sum(dot.to(tl.float64), axis=1)
    powers = tl.sum(power.to(tl.float64), axis=1)
    if bias_gradient is not None:
        x = tl.load(bias_gradient + row, mask=inside, other=0.0).to(tl.float32)
        found += beta * x.to(tl.float64)
        powers += square_of_power(x).to(tl.float64)
    _judge(
        found,
        powers,
        expected,
        squares,
        parts,
        offset,
        largest,
        flags,
        counts,
        by_power,
        by_square,
        floor,
        limit,
        row,
        rows,
        block,
    )


@triton.jit  # type: ignore[untyped-decorator]
def fold_kernel(
    counts: tl.tensor,
    verdict: tl.tensor,
    programs: tl.tensor,
    limit: tl.float64,
    block: tl.constexpr,
) -> None:
    """Store exceeded, worst, total and widest of a `ResidualTest` in verdict (4,); one program."""
    exceeded = tl.zeros((block,), tl.float64)
    worst = tl.zeros((block,), tl.float64)
    total = tl.zeros((block,), tl.float64)
    widest = tl.zeros((block,), tl.float64)
    for first in range(0, programs, block):
        place = first + tl.arange(0, block)
        used = place < programs
        exceeded += tl.load(counts + place, mask=used, other=0.0)
        worst = tl.maximum(worst, tl.load(counts + programs + place, mask=used, other=0.0))
        total += tl.load(counts + 2 * programs + place, mask=used, other=0.0)
        widest = tl.maximum(widest, tl.load(counts + 3 * programs + place, mask=used, other=0.0))
    tl.store(verdict, tl.sum(exceeded, axis=0))
    tl.store(verdict + 1, tl.sqrt(tl.max(worst, axis=0)))
    tl.store(verdict + 2, tl.sum(total, axis=0))
    tl.store(verdict + 3, tl.sqrt(limit * tl.max(widest, axis=0)))


@triton.jit  # type: ignore[untyped-decorator]
def both_kernel(
    matrix: tl.tensor,
    right: tl.tensor,
    left: tl.tensor,
    masses: tl.tensor,
    dots: tl.tensor,
    squares: tl.tensor,
    sums: tl.tensor,
    spreads: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    height: tl.constexpr,
    width: tl.constexpr,
    tiles: tl.constexpr,
) -> None:
    """Parts of row and column sums of one block of rows and `tiles` tiles of columns; all fp32.

    dots = matrix @ right and squares = |row|^2: (blocks of columns, rows). sums = left @ matrix and
    spreads = masses @ matrix^2: (blocks of rows, columns).
    """
    block = tl.program_id(0)
    span = tl.program_id(1)
    row = block * height + tl.arange(0, height)
    inside = row < rows
    start = matrix + row.to(tl.int64)[:, None] * stride
    factor = tl.load(left + row, mask=inside, other=0.0).to(tl.float32)[:, None]
    mass = tl.load(masses + row, mask=inside, other=0.0).to(tl.float32)[:, None]
    dot = tl.zeros((height, width), tl.float32)
    square = tl.zeros((height, width), tl.float32)
    behind = block.to(tl.int64) * columns
    for tile in range(tiles):
        column = (span * tiles + tile) * width + tl.arange(0, width)
        used = column < columns
        x = tl.load(start + column[None, :], mask=inside[:, None] & used[None, :], other=0.0)
        x = x.to(tl.float32)
        squared = x * x
        dot += x * _factors(right + column, used)
        square += squared
        tl.store(sums + behind + column, tl.sum(factor * x, axis=0), mask=used)
        tl.store(spreads + behind + column, tl.sum(mass * squared, axis=0), mask=used)
    place = span.to(tl.int64) * rows + row
    tl.store(dots + place, tl.sum(dot, axis=1), mask=inside)
    tl.store(squares + place, tl.sum(square, axis=1), mask=inside)


TYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonProduct:
    """The checks by the passes of `outlast.guard.checksum_kernels`; see `outlast.guard.product`.

    For matrices in fp32, bf16 or fp16. All results are tensors on the device of the matrices.
    """

    def encode(self, weight: Tensor, bias: Tensor | None, signs: RandomSigns) -> Encoding:
        """See `Product`."""
        u, v = signs_of(weight, signs)
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

    def forward(self, x: Tensor, y: Tensor, encoding: Encoding) -> tuple[Projections, ResidualTest]:
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
        self, dy: Tensor, gradients: Gradients, encoding: Encoding, projections: Projections
    ) -> tuple[ResidualTest | None, ResidualTest | None]:
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
        operand_kernel[(triton.cdiv(rows, ROWS),)](
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
            height=ROWS,
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
) -> ResidualTest:
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
    flags = torch.empty(rows, dtype=torch.uint8, device=matrix.device)
    counts = torch.empty((4, triton.cdiv(rows, ROWS)), dtype=torch.float64, device=matrix.device)
    with on_device_of(matrix):
        output_kernel[(counts.shape[1],)](
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
            height=ROWS,
            width=_tile(columns),
            block=min(int(triton.next_power_of_2(len(expected))), PARTS),
        )
    verdict = torch.empty(4, dtype=torch.float64, device=flags.device)
    with on_device_of(flags):
        fold_kernel[(1,)](counts, verdict, counts.shape[1], bound.limit, block=FOLDED)
    exceeded, worst, total, widest = verdict.unbind()
    return ResidualTest(flags.view(torch.bool), exceeded, worst, total, widest)


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
    span = BOTH_TILE * BOTH_TILES
    blocks, spans = triton.cdiv(rows, BOTH_ROWS), triton.cdiv(columns, span)
    dots, squares = torch.empty((2, spans, rows), dtype=torch.float32, device=matrix.device)
    sums, spreads = torch.empty((2, blocks, columns), dtype=torch.float32, device=matrix.device)
    with on_device_of(matrix):
        both_kernel[(blocks, spans)](
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
            height=BOTH_ROWS,
            width=BOTH_TILE,
            tiles=BOTH_TILES,
            num_warps=8,
        )
    return dots, squares, sums, spreads


def on_device_of(matrix: Tensor) -> AbstractContextManager[object]:
    """Context in which kernels run on the matrix's device instead of the current one."""
    return torch.cuda.device(matrix.device) if matrix.is_cuda else nullcontext()


def _pointer(value: float | Tensor, neutral: float, device: torch.device) -> Tensor | None:
    """`value` in the memory of the device, or None for what changes nothing."""
    if isinstance(value, float):
        return (
            None if value == neutral else torch.full((), value, dtype=torch.float32, device=device)
        )
    return value


def _tile(columns: int) -> int:
    return min(max(int(triton.next_power_of_2(columns)), 32), LONGEST_TILE)


def _total(parts: Tensor) -> Tensor:
    return parts.sum(dim=0, dtype=torch.float64)
