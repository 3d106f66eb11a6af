"""The checks of a matrix product Y = X W^T + b, forward and backward.

With random signs u over inputs and v over outputs, and W encoded once per step as ``W u`` and
``v W``, the identities are::

    Y v = X (v W) + b v          one sum per row of Y
    dX u = dY (W u)              one sum per row of dX
    dW u + db = dY^T (X u + 1)   one sum per row of dW

(Huang and Abraham 1984, with random signs after Freivalds.) ``X u`` is summed in the forward pass,
so the last one also sees a saved activation that changed since. Every matrix is read once.

Two implementations with the same methods: `NativeProduct` in compiled code for the CPU, and
`TorchProduct` in torch operations for everything else, which never waits for the device.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from outlast.guard.elements import name_of, rows_contiguous
from outlast.guard.judged import Judged, judge
from outlast.guard.native import Backward, Encode, Forward, Library, Verdict, library
from outlast.guard.threshold import Bound, Rounding, product_bound

if TYPE_CHECKING:
    from torch import Tensor

    from outlast.guard.signs import Signs

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Below so many elements a second thread costs more than it saves.
_ELEMENTS_PER_THREAD = 1 << 18
_PADDING = 32


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
    """What the forward pass keeps for the check of dW: X u + beta, and |X_i|^2; both (rows,)."""

    dots: Tensor
    squares: Tensor

    @property
    def masses(self) -> Tensor:
        """What weights dY^2 in the bound of dW.

        Signs cancel the errors of unlike terms only: like ones are rounded as their sum is.
        """
        return self.squares + self.dots.square()


@dataclass(frozen=True)
class Gradients:
    """What a backward pass gives: dx (rows, inputs), dw (outputs, inputs), db (outputs,)."""

    dx: Tensor | None
    dw: Tensor | None
    db: Tensor | None


class Product(Protocol):
    """The three checks of one product."""

    def encode(self, weight: Tensor, bias: Tensor | None, signs: Signs) -> Encoding:
        """Sum the weight (outputs, inputs) along both sides."""

    def forward(self, x: Tensor, y: Tensor, encoding: Encoding) -> tuple[Projections, Judged]:
        """Check y (rows, outputs), the product of x (rows, inputs)."""

    def backward(
        self,
        dy: Tensor,
        gradients: Gradients,
        encoding: Encoding,
        projections: Projections,
    ) -> tuple[Judged | None, Judged | None]:
        """Check the gradients that follow from dy (rows, outputs): dx, and dw with db."""


@functools.cache
def _on_cpu(dtype: torch.dtype) -> Product:
    compiled = library() if dtype in _TYPES else None
    if compiled is None or not compiled.knows(_TYPES[dtype]):
        return TorchProduct()
    return NativeProduct(compiled)


def product_for(x: Tensor) -> Product:
    """The fastest implementation for tensors like `x`."""
    if x.device.type == "cpu":
        return _on_cpu(x.dtype)
    from outlast.guard.kernels import product_on

    return product_on(x)


def rounding_of(x: Tensor, summed: torch.dtype = torch.float32) -> Rounding:
    """How products of tensors like `x` are rounded on their device, checked by sums in `summed`."""
    name = name_of(x.dtype)
    tf32 = (
        x.dtype == torch.float32
        and x.device.type == "cuda"
        and torch.backends.cuda.matmul.fp32_precision == "tf32"
    )
    return Rounding(
        stored=name,
        accumulated="float64" if x.dtype == torch.float64 else "float32",
        read="tf32" if tf32 else "",
        summed=name_of(summed),
    )


def _signs(weight: Tensor, signs: Signs) -> tuple[Tensor, Tensor]:
    outputs, inputs = weight.shape
    return (
        signs.take("input", inputs, weight.device),
        signs.take("output", outputs, weight.device),
    )


class NativeProduct:
    """The checks in compiled code: all matrices on the CPU, in fp32, bf16 or fp16."""

    def __init__(self, compiled: Library) -> None:
        self._compiled = compiled
        self._bounds: dict[tuple[torch.dtype, int, int, bool], Bound] = {}

    def encode(self, weight: Tensor, bias: Tensor | None, signs: Signs) -> Encoding:
        """See `Product`."""
        weight = rows_contiguous(weight)
        outputs, inputs = weight.shape
        u, v = _signs(weight, signs)
        if bias is not None:
            bias = bias.to(weight.dtype).contiguous()
        # Read in whole vectors, so with room behind the last number.
        both = torch.zeros(outputs + inputs + 2 * _PADDING)
        right, left = both[: outputs + _PADDING], both[outputs + _PADDING :]
        call = Encode(
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            _TYPES[weight.dtype],
            outputs,
            inputs,
            weight.stride(0),
            _threads(weight),
            u.data_ptr(),
            v.data_ptr(),
            right.data_ptr(),
            left.data_ptr(),
        )
        self._done(self._compiled.encode(ctypes.byref(call)))
        beta = 0.0 if bias is None else 1.0
        return Encoding(
            u, v, right, left, call.rows_largest, call.columns_largest, beta, call.offset
        )

    def forward(self, x: Tensor, y: Tensor, encoding: Encoding) -> tuple[Projections, Judged]:
        """See `Product`."""
        x, y = rows_contiguous(x), rows_contiguous(y)
        (rows, inputs), outputs = x.shape, y.shape[1]
        projections, squares = torch.empty((2, rows), dtype=torch.float64)
        flags = torch.empty(rows, dtype=torch.bool)
        call = Forward(
            x.data_ptr(),
            y.data_ptr(),
            _TYPES[x.dtype],
            rows,
            inputs,
            outputs,
            x.stride(0),
            y.stride(0),
            _threads(x),
            encoding.left.data_ptr(),
            encoding.input_signs.data_ptr(),
            encoding.output_signs.data_ptr(),
            encoding.beta,
            encoding.offset,
            projections.data_ptr(),
            squares.data_ptr(),
            flags.data_ptr(),
            self._limits(x, inputs, outputs, encoding.columns_largest),
        )
        self._done(self._compiled.forward(ctypes.byref(call)))
        return Projections(projections, squares), _judged(call.verdict, flags)

    def backward(
        self,
        dy: Tensor,
        gradients: Gradients,
        encoding: Encoding,
        projections: Projections,
    ) -> tuple[Judged | None, Judged | None]:
        """See `Product`."""
        dx, dw, db = gradients.dx, gradients.dw, gradients.db
        dy = rows_contiguous(dy)
        rows, outputs = dy.shape
        inputs = len(encoding.input_signs)
        dx_flags = torch.empty(rows, dtype=torch.bool)
        dw_flags = torch.empty(outputs, dtype=torch.bool)
        call = Backward(
            dy=dy.data_ptr(),
            type=_TYPES[dy.dtype],
            rows=rows,
            inputs=inputs,
            outputs=outputs,
            dy_stride=dy.stride(0),
            threads=_threads(dy),
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
            call.dx_verdict = self._limits(dy, outputs, inputs, encoding.rows_largest)
        if dw is not None:
            dw = rows_contiguous(dw)
            call.dw, call.dw_stride = dw.data_ptr(), dw.stride(0)
            call.dw_verdict = self._limits(dy, rows, inputs, 1.0, alike=True)
            if db is not None:
                call.db = db.data_ptr()
        self._done(self._compiled.backward(ctypes.byref(call)))
        return (
            None if dx is None else _judged(call.dx_verdict, dx_flags),
            None if dw is None else _judged(call.dw_verdict, dw_flags),
        )

    def _limits(
        self, x: Tensor, terms: int, outputs: int, largest: float | Tensor, *, alike: bool = False
    ) -> Verdict:
        key = (x.dtype, terms, outputs, alike)
        bound = self._bounds.get(key)
        if bound is None:
            bound = product_bound(rounding_of(x), terms, outputs, alike=alike)
            self._bounds[key] = bound
        return Verdict(
            bound.by_power,
            bound.by_square * float(largest),
            bound.by_value,
            bound.floor,
            bound.limit,
        )

    def _done(self, code: int) -> None:
        if code:
            raise MemoryError("no memory is left for the sums of a check")


def _threads(matrix: Tensor) -> int:
    return min(torch.get_num_threads(), max(matrix.numel() // _ELEMENTS_PER_THREAD, 1))


def _judged(verdict: Verdict, flags: Tensor) -> Judged:
    return Judged(flags, verdict.exceeded, verdict.worst, verdict.total, verdict.widest)


class TorchProduct:
    """The checks in torch operations, on any device and for any floating-point type."""

    def encode(self, weight: Tensor, bias: Tensor | None, signs: Signs) -> Encoding:
        """See `Product`."""
        u, v = (sign.to(_summed(weight)) for sign in _signs(weight, signs))
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

    def forward(self, x: Tensor, y: Tensor, encoding: Encoding) -> tuple[Projections, Judged]:
        """See `Product`."""
        wide = x.to(encoding.left.dtype)
        squares = wide.square().sum(dim=1)
        bound = product_bound(rounding_of(x, wide.dtype), x.shape[1], y.shape[1])
        expected = wide @ encoding.left + encoding.offset
        found, powers = _output(y, encoding.output_signs)
        by_row = squares * encoding.columns_largest
        judged = judge(found - expected, bound.variance(powers, by_row), powers)
        return Projections(wide @ encoding.input_signs + encoding.beta, squares), judged

    def backward(
        self,
        dy: Tensor,
        gradients: Gradients,
        encoding: Encoding,
        projections: Projections,
    ) -> tuple[Judged | None, Judged | None]:
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
            dx_judged = judge(found - wide @ encoding.right, variance, powers)
        if dw is not None:
            bound = product_bound(rounding, dy.shape[0], dw.shape[1], alike=True)
            found, powers = _output(dw, encoding.input_signs)
            if db is not None:
                found = found + encoding.beta * db
                powers = powers + powers_of(db.to(powers.dtype)).square()
            by_column = projections.masses.to(wide.dtype) @ squares
            variance = bound.variance(powers, by_column, found)
            dw_judged = judge(found - projections.dots.to(wide.dtype) @ wide, variance, powers)
        return dx_judged, dw_judged


def _summed(matrix: Tensor) -> torch.dtype:
    wide = matrix.dtype in (torch.float32, torch.float64)
    return torch.float64 if wide else torch.float32


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
