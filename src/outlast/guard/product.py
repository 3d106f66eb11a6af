"""The checks of a matrix product Y = X W^T + b, forward and backward.

With random signs u over inputs and v over outputs, and W encoded once per step as ``W u`` and
``v W``, the identities are::

    Y v = X (v W) + b v          one sum per row of Y
    dX u = dY (W u)              one sum per row of dX
    dW u + db = dY^T (X u + 1)   one sum per row of dW

(Huang and Abraham 1984, with random signs after Freivalds.) ``X u`` is summed in the forward pass,
so the last one also sees a saved activation that changed since. Every matrix is read once.

Two implementations with the same methods: `NativeProduct` for the CPU, in the passes of ``sweep.c``
that the system's C compiler compiles once per machine, and `TorchProduct` in torch operations for
everything else, which read every matrix several times and never wait for the device;
`outlast.guard.linear` chooses.

CUDA's units and libraries add to the bounds of `outlast.guard.threshold`:

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

import ctypes
import functools
import math
from dataclasses import dataclass, replace
from importlib import resources
from typing import TYPE_CHECKING, Protocol

import torch

from outlast.guard.residual import (
    ResidualTest,
    accumulating,
    name_of,
    residual_test,
    rows_contiguous,
    summing,
)
from outlast.guard.threshold import DEVIATIONS, Bound, Rounding, product_bound, unit_roundoff
from outlast.hardware.native import load

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from outlast.guard.watch import RandomSigns

NATIVE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Below so many elements a second thread costs more than it saves.
_ELEMENTS_PER_THREAD = 1 << 18
_PADDING = 32
_TERMS_PER_INSTRUCTION = 8
"""The fewest: 8 for TF32, 16 for 16-bit types."""
_WAVES = 4


@dataclass(frozen=True)
class Encoding:
    """A weight as its checks see it, for one step.

    Attributes:
        input_signs: u (inputs,).
        output_signs: v (outputs,).
        right: ``W u`` (outputs,), perhaps with zeros behind.
        left: ``v W`` (inputs,), perhaps with zeros behind.
        rows_largest: Largest squared norm of a row of W.
        columns_largest: Largest squared norm of a column of W.
        beta: Sign that stands for the bias among the inputs; 0 without a bias.
        offset: ``b v``.
    """

    input_signs: Tensor
    output_signs: Tensor
    right: Tensor
    left: Tensor
    rows_largest: float | Tensor
    columns_largest: float | Tensor
    beta: float
    offset: float | Tensor


@dataclass(frozen=True)
class Projections:
    """Sums of the forward pass for the check of dW: X u + beta, and |X_i|^2; both (rows,)."""

    dots: Tensor
    squares: Tensor

    @property
    def masses(self) -> Tensor:
        """Weights of dY^2 in the bound of dW.

        Signs cancel the errors of unlike terms only: like ones are rounded as their sum is.
        """
        return self.squares + self.dots.square()


@dataclass(frozen=True)
class Gradients:
    """Results of a backward pass: dx (rows, inputs), dw (outputs, inputs), db (outputs,)."""

    dx: Tensor | None
    dw: Tensor | None
    db: Tensor | None


class Product(Protocol):
    """The three checks of one product."""

    def encode(self, weight: Tensor, bias: Tensor | None, signs: RandomSigns) -> Encoding:
        """Sum the weight (outputs, inputs) along both sides."""

    def forward(self, x: Tensor, y: Tensor, encoding: Encoding) -> tuple[Projections, ResidualTest]:
        """Check y (rows, outputs), the product of x (rows, inputs)."""

    def backward(
        self, dy: Tensor, gradients: Gradients, encoding: Encoding, projections: Projections
    ) -> tuple[ResidualTest | None, ResidualTest | None]:
        """Check the gradients that follow from dy (rows, outputs): dx, and dw with db."""


def rounding_of(x: Tensor, summed: torch.dtype = torch.float32) -> Rounding:
    """Rounding of products of tensors like `x` on their device, checked by sums in `summed`."""
    name = name_of(x.dtype)
    tf32 = (
        x.dtype == torch.float32
        and x.device.type == "cuda"
        and torch.backends.cuda.matmul.fp32_precision == "tf32"
    )
    return Rounding(
        stored=name,
        accumulated=name_of(accumulating(x)),
        read="tf32" if tf32 else "",
        summed=name_of(summed),
    )


def signs_of(weight: Tensor, signs: RandomSigns) -> tuple[Tensor, Tensor]:
    """The signs of the inputs and of the outputs of a weight (outputs, inputs)."""
    outputs, inputs = weight.shape
    return (
        signs.take("input", inputs, weight.device),
        signs.take("output", outputs, weight.device),
    )


def bound_on(x: Tensor, shape: tuple[int, int, int]) -> Bound:
    """The bound of a library's product of tensors like `x` on their device.

    Args:
        x: An operand.
        shape: Rows and outputs of the product, and terms of its sums.
    """
    rows, outputs, terms = shape
    rounding = rounding_of(x)
    if (
        x.is_cuda
        and x.dtype == torch.float16
        and torch.backends.cuda.matmul.allow_fp16_accumulation
    ):
        rounding = replace(rounding, accumulated="float16")
    bound = product_bound(rounding, terms, outputs)
    if x.device.type == "cuda" and (x.element_size() < 4 or rounding.read):
        cut_off = truncation(terms, rounding.read, rounding.accumulated)
        bound = replace(bound, by_power=bound.by_power + cut_off)
    if x.device.type == "cuda" and _may_split(x.dtype):
        tiles = -(-rows // 128) * -(-outputs // 128)
        if tiles < _WAVES * _multiprocessors(x.device):
            return split(bound, name_of(x.dtype))
    return bound


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


_FILES = ("attention.c", "matmul.c", "sweep.c", "rows.h", "view.h")
# Sums in any order, but NaN and infinity as they are.
_SUMS = ("-O3", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-Wno-psabi")
_FLAGS = (*_SUMS, *("-march=native", "-mprefer-vector-width=512", "-fopenmp", "-fno-math-errno"))


def _fields(*groups: tuple[type, str]) -> list[tuple[str, type]]:
    return [(name, kind) for kind, names in groups for name in names.split()]


_POINTER, _INTEGER, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class NativeVerdict(ctypes.Structure):
    """``verdict`` of `sweep.c`."""

    _fields_ = _fields(
        (_REAL, "by_power by_square by_value constant limit worst total widest"),
        (_INTEGER, "exceeded"),
    )


class NativeForward(ctypes.Structure):
    """``forward`` of `sweep.c`."""

    _fields_ = _fields(
        (_POINTER, "x y"),
        (_INTEGER, "type rows inputs outputs x_stride y_stride threads"),
        (_POINTER, "encoded input_signs output_signs"),
        (_REAL, "beta offset"),
        (_POINTER, "projections squares flags"),
        (NativeVerdict, "verdict"),
    )


class NativeBackward(ctypes.Structure):
    """``backward`` of `sweep.c`."""

    _fields_ = _fields(
        (_POINTER, "dy dx dw db"),
        (_INTEGER, "type rows inputs outputs dy_stride dx_stride dw_stride threads"),
        (_POINTER, "encoded input_signs projections squares"),
        (_REAL, "beta"),
        (_POINTER, "dx_flags dw_flags"),
        (NativeVerdict, "dx_verdict dw_verdict"),
    )


class NativeEncode(ctypes.Structure):
    """``encoding`` of `sweep.c`."""

    _fields_ = _fields(
        (_POINTER, "weight bias"),
        (_INTEGER, "type outputs inputs stride threads"),
        (_POINTER, "input_signs output_signs right left"),
        (_REAL, "rows_largest columns_largest offset"),
    )


class _Matrices(ctypes.Structure):
    """``matrices`` of `matmul.c`."""

    _fields_ = _fields((_POINTER, "data"), (_INTEGER, "batch_stride row_stride column_stride"))


class NativeMultiply(ctypes.Structure):
    """``product`` of `matmul.c`."""

    _fields_ = _fields(
        (_Matrices, "a b c d"),
        (_INTEGER, "type batches rows terms columns threads"),
        (_REAL, "alpha beta"),
        (_POINTER, "signs flags"),
        (NativeVerdict, "verdict"),
    )


class NativeHeads(ctypes.Structure):
    """``heads`` of `attention.c`."""

    _fields_ = _fields((_POINTER, "data"), (_INTEGER, "batch_stride head_stride row_stride"))


class NativeRounding(ctypes.Structure):
    """``rounding`` of `attention.c`."""

    _fields_ = _fields((_REAL, "stored terms summed values constant"))


class NativeAttention(ctypes.Structure):
    """``attention`` of `attention.c`."""

    _fields_ = _fields(
        (NativeHeads, "q k v o dy dq dk dv"),
        (_POINTER, "logsum"),
        (_INTEGER, "logsum_batch logsum_head logsum_row"),
        (_POINTER, "mask"),
        (_INTEGER, "mask_batch mask_head mask_row"),
        (_INTEGER, "type batches heads key_heads queries keys channels causal threads"),
        (_REAL, "scale"),
        (_POINTER, "signs"),
        (NativeRounding, "by_key by_query"),
        (_REAL, "unit spacing partial"),
        (_INTEGER, "block"),
        (_POINTER, "o_flags dq_flags dk_flags dv_flags"),
        (NativeVerdict, "o_verdict dq_verdict dk_verdict dv_verdict"),
    )


class Library:
    """The loaded functions; each returns 0, 1 for an unknown type or 2 without memory."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self.forward = loaded.outlast_forward
        self.forward.argtypes = (ctypes.POINTER(NativeForward),)
        self.backward = loaded.outlast_backward
        self.backward.argtypes = (ctypes.POINTER(NativeBackward),)
        self.knows = loaded.outlast_knows
        self.knows.argtypes = (_INTEGER,)
        self.encode = loaded.outlast_encode
        self.encode.argtypes = (ctypes.POINTER(NativeEncode),)
        self.multiply = loaded.outlast_multiply
        self.multiply.argtypes = (ctypes.POINTER(NativeMultiply),)
        self.attention = loaded.outlast_attention
        self.attention.argtypes = (ctypes.POINTER(NativeAttention),)
        self.attention_sums = loaded.outlast_attention_sums
        self.attention_sums.argtypes = (ctypes.POINTER(NativeAttention),)


@functools.cache
def library() -> Library | None:
    """The compiled passes, or None where they cannot be had."""
    loaded, _ = load(resources.files("outlast.guard") / "native", _FILES, _FLAGS, _SUMS)
    return Library(loaded) if loaded is not None else None


def library_for(dtype: torch.dtype) -> Library | None:
    """The compiled passes over numbers of this type, or None where they cannot be had."""
    compiled = library() if dtype in NATIVE_TYPES else None
    return compiled if compiled is not None and compiled.knows(NATIVE_TYPES[dtype]) else None


def raise_if_failed(code: int) -> None:
    """Raise an error where the result of a compiled pass says so."""
    if code:
        raise MemoryError("no memory is left for the sums of a check")


class NativeProduct:
    """The checks in compiled code: all matrices on the CPU, in fp32, bf16 or fp16."""

    def __init__(self, compiled: Library) -> None:
        self._compiled = compiled

    def encode(self, weight: Tensor, bias: Tensor | None, signs: RandomSigns) -> Encoding:
        """See `Product`."""
        weight = rows_contiguous(weight)
        outputs, inputs = weight.shape
        u, v = signs_of(weight, signs)
        if bias is not None:
            bias = bias.to(weight.dtype).contiguous()
        # Read in whole vectors, so with room behind the last number.
        both = torch.zeros(outputs + inputs + 2 * _PADDING, dtype=torch.float32, device="cpu")
        right, left = both[: outputs + _PADDING], both[outputs + _PADDING :]
        call = NativeEncode(
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            NATIVE_TYPES[weight.dtype],
            outputs,
            inputs,
            weight.stride(0),
            threads_for(weight),
            u.data_ptr(),
            v.data_ptr(),
            right.data_ptr(),
            left.data_ptr(),
        )
        raise_if_failed(self._compiled.encode(ctypes.byref(call)))
        beta = 0.0 if bias is None else 1.0
        return Encoding(
            u, v, right, left, call.rows_largest, call.columns_largest, beta, call.offset
        )

    def forward(self, x: Tensor, y: Tensor, encoding: Encoding) -> tuple[Projections, ResidualTest]:
        """See `Product`."""
        x, y = rows_contiguous(x), rows_contiguous(y)
        (rows, inputs), outputs = x.shape, y.shape[1]
        projections, squares = torch.empty((2, rows), dtype=torch.float64, device="cpu")
        flags = torch.empty(rows, dtype=torch.bool, device="cpu")
        call = NativeForward(
            x.data_ptr(),
            y.data_ptr(),
            NATIVE_TYPES[x.dtype],
            rows,
            inputs,
            outputs,
            x.stride(0),
            y.stride(0),
            threads_for(x),
            encoding.left.data_ptr(),
            encoding.input_signs.data_ptr(),
            encoding.output_signs.data_ptr(),
            encoding.beta,
            encoding.offset,
            projections.data_ptr(),
            squares.data_ptr(),
            flags.data_ptr(),
            _limits(x.dtype, inputs, outputs, encoding.columns_largest),
        )
        raise_if_failed(self._compiled.forward(ctypes.byref(call)))
        return Projections(projections, squares), judged_rows(call.verdict, flags)

    def backward(
        self, dy: Tensor, gradients: Gradients, encoding: Encoding, projections: Projections
    ) -> tuple[ResidualTest | None, ResidualTest | None]:
        """See `Product`."""
        dx, dw, db = gradients.dx, gradients.dw, gradients.db
        dy = rows_contiguous(dy)
        rows, outputs = dy.shape
        inputs = len(encoding.input_signs)
        dx_flags = torch.empty(rows, dtype=torch.bool, device="cpu")
        dw_flags = torch.empty(outputs, dtype=torch.bool, device="cpu")
        call = NativeBackward(
            dy=dy.data_ptr(),
            type=NATIVE_TYPES[dy.dtype],
            rows=rows,
            inputs=inputs,
            outputs=outputs,
            dy_stride=dy.stride(0),
            threads=threads_for(dy),
            encoded=encoding.right.data_ptr(),
            input_signs=encoding.input_signs.data_ptr(),
            projections=projections.dots.data_ptr(),
            squares=projections.squares.data_ptr(),
            beta=encoding.beta,
            dx_flags=dx_flags.data_ptr(),
            dw_flags=dw_flags.data_ptr(),
        )
        if dx is not None:
            dx = rows_contiguous(dx)
            call.dx, call.dx_stride = dx.data_ptr(), dx.stride(0)
            call.dx_verdict = _limits(dy.dtype, outputs, inputs, encoding.rows_largest)
        if dw is not None:
            dw = rows_contiguous(dw)
            call.dw, call.dw_stride = dw.data_ptr(), dw.stride(0)
            call.dw_verdict = _limits(dy.dtype, rows, inputs, alike=True)
            if db is not None:
                call.db = db.data_ptr()
        raise_if_failed(self._compiled.backward(ctypes.byref(call)))
        return (
            None if dx is None else judged_rows(call.dx_verdict, dx_flags),
            None if dw is None else judged_rows(call.dw_verdict, dw_flags),
        )


@functools.lru_cache(4096)
def _bound_on_cpu(dtype: torch.dtype, terms: int, outputs: int, alike: bool) -> Bound:
    return product_bound(
        rounding_of(torch.empty(0, dtype=dtype, device="cpu")), terms, outputs, alike=alike
    )


def _limits(
    dtype: torch.dtype,
    terms: int,
    outputs: int,
    largest: float | Tensor = 1.0,
    *,
    alike: bool = False,
) -> NativeVerdict:
    """The bound of a native check, whose squares are to be multiplied by `largest`."""
    bound = _bound_on_cpu(dtype, terms, outputs, alike)
    by_square = bound.by_square * float(largest)
    return NativeVerdict(bound.by_power, by_square, bound.by_value, bound.floor, bound.limit)


def check_multiplied(  # noqa: PLR0917
    a: Tensor,
    b: Tensor,
    c: Tensor,
    added: tuple[Tensor, float] | None,
    alpha: float,
    signs: Tensor,
) -> ResidualTest:
    """Check c = alpha a b + beta d, per row of every batch: c v = alpha a (b v) + beta d v.

    Args:
        a: (batches, rows, terms).
        b: (batches, terms, columns).
        c: (batches, rows, columns).
        added: d, of the shape of c, and beta; None without.
        alpha: See above.
        signs: v (columns,), with 31 more finite numbers behind, as of `RandomSigns.take`.
    """
    compiled = library_for(a.dtype) if a.device.type == "cpu" else None
    if compiled is None:
        judged = _check_multiplied(a, b, c, added, alpha, signs)
    else:
        judged = _check_natively(compiled, a, b, c, added, alpha, signs)
    if not is_doubtful(judged):
        return judged

    def row(number: int) -> Row:
        batch, own = divmod(number, a.shape[1])
        given = None if added is None else added[1] * added[0][batch, own].double()
        return Row(c[batch, own], alpha * a[batch, own].double(), b[batch], given)

    return second_look(judged, row, signs)


def _check_natively(  # noqa: PLR0917
    compiled: Library,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    added: tuple[Tensor, float] | None,
    alpha: float,
    signs: Tensor,
) -> ResidualTest:
    (batches, rows, terms), columns = a.shape, c.shape[2]
    d, beta = (None, 0.0) if added is None else added
    a, b, c = _strided(a), _strided(b), _strided(c)
    d = None if d is None else _strided(d)
    flags = torch.empty(batches * rows, dtype=torch.bool, device="cpu")
    call = NativeMultiply(
        _matrices(a),
        _matrices(b),
        _matrices(c),
        _Matrices() if d is None else _matrices(d),
        NATIVE_TYPES[a.dtype],
        batches,
        rows,
        terms,
        columns,
        threads_for(c),
        alpha,
        beta,
        signs.data_ptr(),
        flags.data_ptr(),
        _limits(a.dtype, terms, columns),
    )
    raise_if_failed(compiled.multiply(ctypes.byref(call)))
    return judged_rows(call.verdict, flags)


@dataclass(frozen=True)
class Row:
    """A row of a product, and what it is computed from.

    Attributes:
        stored: (columns,).
        left: (terms,).
        right: (terms, columns).
        added: (columns,), or None.
    """

    stored: Tensor
    left: Tensor
    right: Tensor
    added: Tensor | None = None


_DOUBTFUL = 64.0
"""Deviations that the rounding of a check's own sums in fp32 can explain.

Of 64 equal terms, which a lane adds one after the other, the partial sums have 64^3 / 3 squares of
a term, where the bound has 64 * 32: 6.5 deviations are one. Signs that point along the terms' mean
make up to 3 of it, and the rounding itself 3 deviations.
"""
_MOST_TERMS = 1 << 28
"""Of all rows of a second look: a few seconds."""
_PRODUCTS_AT_A_TIME = 2**20


def is_doubtful(judged: ResidualTest) -> bool:
    """Return whether rows have failed by so little that the check's own sums may be the reason."""
    exceeded = judged.exceeded
    if not isinstance(exceeded, int) and exceeded.device.type != "cpu":
        # Not known yet, and not waited for.
        return False
    return bool(exceeded > 0) and float(judged.worst) <= _DOUBTFUL


def second_look(judged: ResidualTest, row_of: Callable[[int], Row], signs: Tensor) -> ResidualTest:
    """Judge flagged rows anew by sums in fp64, before anything is made of them.

    The sums of the first look round like those of the product. Their bound takes the terms as they
    are on average over signs; where the terms are like each other (tokens that share their mean,
    padding) partial sums grow with their number, not with its root, and the signed sum of a row may
    point along them (as Higham and Mary say, the probabilistic bounds are those of errors of mean
    zero that are independent). In fp64 nothing is left of that, and the partial sums S_t themselves
    can be afforded for a few rows. The product's own rounding has the variance::

        u^2 / 3 sum_j 4^e(y_j) + u_acc^2 / 3 sum_t (|p_t|^2 + |S_t|^2 + (v S_t)^2)

    for storing, rounding the terms (without FMA) and adding them; the last for sums of proportional
    terms, which are rounded alike. Numbers of one row that are equal before they are stored are
    stored with the same error, so of k of them whose signs sum to s, the first sum counts the
    larger of s^2 and k. A term that equals the one before it (equal tokens, a constant
    feature) is also rounded like it, so errors of such terms add up: of them the squares of sums of
    |S_t| and |v S_t| count, as in the worst case (Higham, Accuracy and Stability, 4.2). What fails
    this as well is computed again. An error that passes is below the threshold of this look, which
    the certificate counts like the first one's.

    Args:
        judged: The first look, which `is_doubtful`.
        row_of: Gives a row by its number.
        signs: (columns,).
    """
    flags = judged.flags.clone()
    worst, widest = 0.0, float(judged.widest)
    v = signs.double()
    spent = 0
    for number in judged.flags.nonzero()[:, 0].tolist():
        row = row_of(number)
        spent += row.right.numel()
        if spent > _MOST_TERMS:
            break
        ratio, width = _deviation(row, v)
        if ratio <= DEVIATIONS:
            flags[number] = False
            worst, widest = max(worst, ratio), max(widest, DEVIATIONS * width)
    left = int(flags.sum())
    return replace(
        judged,
        flags=flags,
        exceeded=left,
        worst=float(judged.worst) if left else worst,
        widest=widest,
    )


def _deviation(row: Row, v: Tensor) -> tuple[float, float]:
    """The difference of a row in standard deviations, and the latter as a share of the row."""
    rounding = rounding_of(row.stored)
    stored = row.stored.double()
    total = torch.zeros_like(stored) if row.added is None else row.added.double()
    squares, repeated = (
        torch.zeros((), dtype=torch.float64, device=total.device),
        torch.zeros_like(total),
    )
    along = torch.zeros_like(squares)
    at_a_time = max(_PRODUCTS_AT_A_TIME // len(stored), 1)
    parts = (torch.split(part, at_a_time) for part in (row.left, row.right))
    last = torch.zeros_like(stored)
    for left, right in zip(*parts, strict=True):
        terms = left.double()[:, None] * right.double()
        squares += terms.square().sum()
        before = torch.cat([last[None], terms[:-1]])
        again, last = (terms == before) & (terms != 0), terms[-1].clone()
        terms[0] += total
        sums = terms.cumsum(0)
        squares += sums.square().sum() + (sums @ v).square().sum()
        total = sums[-1]
        if bool(again.any()):
            alike = sums * again
            repeated += alike.abs().sum(0)
            along += (alike @ v).abs().sum()
    squares += repeated.square().sum() + along.square()
    powers = powers_of(stored).square()
    bound = product_bound(rounding, 1, len(stored))
    unit = unit_roundoff(rounding.accumulated) ** 2 / 3.0
    storing = unit_roundoff(rounding.stored) ** 2 / 3.0 * (powers * _alike(total, v)).sum()
    powers = powers.sum()
    variance = storing + unit * squares + bound.floor
    ratio = ((stored - total) @ v).abs() / variance.sqrt()
    share = (variance / powers).sqrt() if powers > 0 else variance.new_zeros(())
    # Numbers that are not finite are for the first look.
    return (float(ratio), float(share)) if bool(torch.isfinite(ratio)) else (math.inf, 0.0)


def _alike(exact: Tensor, v: Tensor) -> Tensor:
    """By how much the squared errors of storing these numbers count, for what is equal among them.

    1 for numbers that stand alone; see `second_look`.
    """
    values, places, counts = torch.unique(exact.abs(), return_inverse=True, return_counts=True)
    sums = torch.zeros_like(values).index_add_(0, places, v * exact.sign())
    counted: Tensor = (sums.square() / counts).clamp(min=1.0)[places]
    return counted


def _strided(matrices: Tensor) -> Tensor:
    """`matrices` (batches, rows, columns), or a copy with one inner stride of 1."""
    _, row, column = matrices.stride()
    return matrices if column == 1 or row == 1 else matrices.contiguous()


def _matrices(matrices: Tensor) -> _Matrices:
    return _Matrices(matrices.data_ptr(), *matrices.stride())


def _check_multiplied(  # noqa: PLR0917
    a: Tensor,
    b: Tensor,
    c: Tensor,
    added: tuple[Tensor, float] | None,
    alpha: float,
    signs: Tensor,
) -> ResidualTest:
    """Do the same by torch operations, for any device and type."""
    dtype = summing(a)
    bound = bound_on(a, (a.shape[0] * a.shape[1], c.shape[2], a.shape[2]))
    v, left, right = signs.to(dtype), a.to(dtype), b.to(dtype)
    expected = alpha * torch.matmul(left, (right @ v)[..., None])[..., 0]
    squares = torch.matmul(left.square(), right.square().sum(2)[..., None])[..., 0] * alpha**2
    if added is not None:
        d, beta = added[0].to(dtype), added[1]
        expected = expected + beta * (d @ v)
        squares = squares + beta**2 * d.square().sum(2)
    found, powers = _output(c.reshape(-1, c.shape[2]), v)
    variance = bound.variance(powers, squares.flatten())
    return residual_test(found - expected.flatten(), variance, powers)


def threads_for(matrix: Tensor) -> int:
    """Return the number of threads that a pass over `matrix` is worth."""
    return min(torch.get_num_threads(), max(matrix.numel() // _ELEMENTS_PER_THREAD, 1))


def judged_rows(verdict: NativeVerdict, flags: Tensor) -> ResidualTest:
    """Findings of a native check in rows with these flags."""
    return ResidualTest(flags, verdict.exceeded, verdict.worst, verdict.total, verdict.widest)


class TorchProduct:
    """The checks in torch operations, on any device and for any floating-point type."""

    def encode(self, weight: Tensor, bias: Tensor | None, signs: RandomSigns) -> Encoding:
        """See `Product`."""
        u, v = (sign.to(summing(weight)) for sign in signs_of(weight, signs))
        wide = weight.to(u.dtype)
        squares = wide.square()
        return Encoding(
            u,
            v,
            wide @ u,
            v @ wide,
            squares.sum(dim=1).max(),
            squares.sum(dim=0).max(),
            beta=0.0 if bias is None else 1.0,
            offset=0.0 if bias is None else bias.to(v.dtype) @ v,
        )

    def forward(self, x: Tensor, y: Tensor, encoding: Encoding) -> tuple[Projections, ResidualTest]:
        """See `Product`."""
        wide = x.to(encoding.left.dtype)
        squares = wide.square().sum(dim=1)
        bound = product_bound(rounding_of(x, wide.dtype), x.shape[1], y.shape[1])
        expected = wide @ encoding.left + encoding.offset
        found, powers = _output(y, encoding.output_signs)
        by_row = squares * encoding.columns_largest
        judged = residual_test(found - expected, bound.variance(powers, by_row), powers)
        return Projections(wide @ encoding.input_signs + encoding.beta, squares), judged

    def backward(
        self, dy: Tensor, gradients: Gradients, encoding: Encoding, projections: Projections
    ) -> tuple[ResidualTest | None, ResidualTest | None]:
        """See `Product`."""
        dx, dw, db = gradients.dx, gradients.dw, gradients.db
        wide = dy.to(encoding.right.dtype)
        squares = wide.square()
        dx_judged = dw_judged = None
        rounding = rounding_of(dy, wide.dtype)
        if dx is not None:
            bound = product_bound(rounding, dy.shape[1], dx.shape[1])
            found, powers = _output(dx, encoding.input_signs)
            by_row = squares.sum(dim=1) * encoding.rows_largest
            variance = bound.variance(powers, by_row)
            dx_judged = residual_test(found - wide @ encoding.right, variance, powers)
        if dw is not None:
            bound = product_bound(rounding, dy.shape[0], dw.shape[1], alike=True)
            found, powers = _output(dw, encoding.input_signs)
            if db is not None:
                found = found + encoding.beta * db
                powers = powers + powers_of(db.to(powers.dtype)).square()
            by_column = projections.masses.to(wide.dtype) @ squares
            variance = bound.variance(powers, by_column, found)
            dw_judged = residual_test(
                found - projections.dots.to(wide.dtype) @ wide, variance, powers
            )
        return dx_judged, dw_judged


def _output(matrix: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    wide = matrix.to(signs.dtype)
    return wide @ signs, powers_of(wide).square().sum(dim=1)


def powers_of(values: Tensor) -> Tensor:
    """2^floor(log2 |x|) of every element, and 0 for 0."""
    significands, exponents = torch.frexp(values)
    # frexp's significands are in [1/2, 1).
    powers = torch.ldexp(torch.full_like(significands, 0.5), exponents)
    powers = torch.where(significands == 0, 0.0, powers)
    return torch.where(torch.isfinite(values), powers, torch.inf)
