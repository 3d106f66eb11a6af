"""Linear layers with every product checked, forward and backward, with unchanged numbers."""

from __future__ import annotations

import warnings
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from outlast.guard import compiled
from outlast.guard.autocast import cast, forget, region
from outlast.guard.doubt import beyond_rounding, compared, overflowed
from outlast.guard.elements import bits, name_of
from outlast.guard.judged import exact, judge
from outlast.guard.product import Encoding, Gradients, Projections, product_for, rounding_of
from outlast.guard.standin import StandIn
from outlast.guard.threshold import product_bound, unit_roundoff

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from outlast.guard.findings import Outcome, Site
    from outlast.guard.judged import Judged
    from outlast.guard.watch import Watch

_ROUNDINGS = 16
"""How often a block rounds an activation between its input and any layer in it, about."""

LINEAR_OPERATIONS = (
    "linear.forward",
    "linear.dx",
    "linear.dw",
    "linear.saved",
    "linear.recompute",
    "weight",
)
"""What is checked of a layer; keys of `outlast.guard.coverage.OPERATIONS`."""

TENSOR_PARALLEL = "split over ranks by tensor parallelism"


class LinearChecks(StandIn):
    """Whose `forward` stands in for that of one `nn.Linear`.

    Args:
        watch: What all checks of the guard share.
        module: The layer.
        name: Its name in the model.

    Attributes:
        why_not: Why calls were not checked, in a few words; empty as long as all were.
    """

    def __init__(self, watch: Watch, module: nn.Module, name: str) -> None:
        super().__init__(watch, module, name)
        self.why_not = ""
        self.forward_site = watch.ledger.site(name, "linear.forward")
        self.dx_site = watch.ledger.site(name, "linear.dx")
        self.dw_site = watch.ledger.site(name, "linear.dw")
        self.number = compiled.enroll(self)
        self._encoding: Encoding | None = None
        self._encoded: tuple[object, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output for x (..., inputs)."""
        weight: Any = self.module.weight
        bias: Any = self.module.bias
        if not self.trains(x, weight, bias):
            return functional.linear(x, weight, bias)
        return self.multiply(x, weight, bias)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Give x W^T + b, checked; x: (..., inputs), weight: (outputs, inputs)."""
        nothing = x.numel() == 0 or weight.numel() == 0
        if isinstance(weight, DTensor) or nothing or torch._C._are_functorch_transforms_active():
            if isinstance(weight, DTensor):
                self._leave_out(TENSOR_PARALLEL)
            elif nothing:
                # Its gradients are zero: there is nothing to check in this step.
                self.dw_site.last = self.watch.period
            return functional.linear(x, weight, bias)
        compiling = torch.compiler.is_compiling()
        device = x.device.type
        if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
            if compiling:
                return compiled.checked(x, weight, bias, self.number)
            return _checked(x, weight, bias, self)
        # As autocast would cast them, but seen by autograd outside the checked product.
        dtype = torch.get_autocast_dtype(device)
        if compiling:
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
            return compiled.checked(x, weight, bias, self.number)
        within = region(device, dtype)
        x, weight = x.to(dtype), cast(weight, dtype, within)
        bias = None if bias is None else cast(bias, dtype, within)
        with torch.autocast(device, enabled=False):
            return _checked(x, weight, bias, self)

    def product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Projections, Encoding]:
        """X W^T + b, checked; x: (..., inputs), weight: (outputs, inputs), bias: (outputs,)."""
        watch, product = self.watch, product_for(x)
        began = perf_counter()
        encoding = self.encoding(weight, bias)
        watch.touch("weight", self.name, weight)
        later: Tensor | None = None
        if bias is not None and x.dim() > 2 and not x.is_contiguous():
            # torch does this in two steps, the second of which rounds a second time.
            bias, later = None, bias
        start = perf_counter()
        y = functional.linear(watch.touched("linear.operand", self.name, x), weight, bias)
        end = perf_counter()
        watch.touch("linear.output", self.name, y)
        fitting = encoding if later is None else replace(encoding, offset=0.0)
        flat_x, flat_y = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        projections, judged = product.forward(flat_x, flat_y, self.seen(fitting))
        failed = watch.wants(self.forward_site, judged)
        watch.seconds += perf_counter() - end + start - began
        if failed:

            def redo(first: int, last: int) -> Tensor:
                # All rows in the shape that they had, which may choose the kernel.
                part = x if last - first == len(flat_x) else flat_x[first:last]
                again = functional.linear(part, weight, bias).view(last - first, -1)
                watch.touch("linear.output", self.name, again)
                return again

            def check() -> Judged:
                return product.forward(flat_x, flat_y, fitting)[1]

            def beyond(left: Judged) -> Judged:
                return beyond_rounding(left, flat_y, (flat_x, weight.t()), bias)

            changed = self.compare_weight(weight, encoding, judged)
            if not changed:
                watch.correct(self.forward_site, judged, flat_y, redo, check, beyond=beyond)
        if later is not None:
            y += later
        watch.touch("linear.saved", self.name, x)
        return y, projections, encoding

    def gradients(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        kept: tuple[Encoding, Projections],
        wants: Sequence[bool],
    ) -> Gradients:
        """Those that are wanted of x, weight and bias, for dy (..., outputs), checked.

        Args:
            dy: The gradient of y.
            x: As given to `product`.
            weight: As given to `product`.
            kept: What `product` returned.
            wants: Whether x, weight and bias get a gradient.
        """
        watch, product = self.watch, product_for(x)
        encoding, projections = kept
        flat_x, flat_dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        forget()
        if not watch.driven:
            # FSDP2 gathers changed weights into the same memory, under the same version.
            self._encoded = ()
        watch.touch("linear.dy", self.name, flat_dy)
        dx = _dx(flat_dy, weight, flat_x) if wants[0] else None
        dw = _dw(flat_dy, weight, flat_x) if wants[1] else None
        db = flat_dy.sum(0) if wants[2] else None
        if watch.seam is not None:
            if dx is not None:
                watch.touch("linear.dx", self.name, dx)
            if dw is not None:
                watch.touch("linear.dw", self.name, dw)
        began = perf_counter()
        # A bias that is frozen is no part of what the gradient's sums hold.
        if encoding.beta and db is None:
            projections = Projections(projections.dots - encoding.beta, projections.squares)
        made = Gradients(dx, dw, db)
        dx_judged, dw_judged = product.backward(flat_dy, made, encoding, projections)
        dx_failed = dx_judged is not None and watch.wants(self.dx_site, dx_judged)
        dw_failed = dw_judged is not None and watch.wants(self.dw_site, dw_judged)
        watch.seconds += perf_counter() - began
        operands, kept = (flat_dy, flat_x, weight), (encoding, projections)
        if dx_failed and dx is not None and dx_judged is not None:
            self._correct_dx(operands, dx, kept, dx_judged)
        if dw_failed and dw is not None and dw_judged is not None:
            self._correct_dw(operands, Gradients(None, dw, db), kept, dw_judged)
        return Gradients(None if dx is None else dx.view(x.shape), dw, db)

    def _correct_dx(
        self,
        operands: tuple[Tensor, Tensor, Tensor],
        dx: Tensor,
        kept: tuple[Encoding, Projections],
        judged: Judged,
    ) -> None:
        dy, x, weight = operands

        def redo(first: int, last: int) -> Tensor:
            again = _dx(dy[first:last], weight, x)
            self.watch.touch("linear.dx", self.name, again)
            return again

        def check() -> Judged:
            found, _ = product_for(x).backward(dy, Gradients(dx, None, None), *kept)
            assert found is not None
            return found

        def beyond(left: Judged) -> Judged:
            return beyond_rounding(left, dx, (dy, weight))

        changed = self.compare_weight(weight, kept[0], judged)
        if not changed:
            self.watch.correct(self.dx_site, judged, dx, redo, check, beyond=beyond)

    def _correct_dw(
        self,
        operands: tuple[Tensor, Tensor, Tensor],
        made: Gradients,
        kept: tuple[Encoding, Projections],
        judged: Judged,
    ) -> None:
        (dy, x, weight), dw, db = operands, made.dw, made.db
        assert dw is not None
        beta = kept[0].beta if db is not None else 0.0
        if self._input_changed(x, kept[0].input_signs, kept[1].dots - beta, judged):
            return
        if db is not None and overflowed(dy, db, judged):
            self._find(self.dw_site, judged, "not_finite")
            return

        def redo(first: int, last: int) -> Tensor:
            if db is not None:
                db.copy_(dy.sum(0))
            again = _dw(dy[:, first:last], weight, x)
            self.watch.touch("linear.dw", self.name, again)
            return again

        def check() -> Judged:
            _, found = product_for(x).backward(dy, made, *kept)
            assert found is not None
            return found

        def beyond(left: Judged) -> Judged:
            return beyond_rounding(left, dw, (dy.t(), x))

        self.watch.correct(self.dw_site, judged, dw, redo, check, beyond=beyond)

    def encoding(self, weight: Tensor, bias: Tensor | None) -> Encoding:
        """The weight's sums, made once per step and kept while the parameter is not written to.

        Without an optimizer that tells of its steps they are made again after a backward pass.

        A weight that changes in any other way while they are kept no longer fits them.
        """
        parameters = self.module._parameters
        parameter, offset = parameters.get("weight"), parameters.get("bias")
        if parameter is None or (offset is None) != (bias is None):
            # Computed from other parameters for every call.
            return product_for(weight).encode(weight, bias, self.watch.signs)
        key = (
            self.watch.generation,
            parameter._version,
            parameter.data_ptr(),
            weight.dtype,
            0 if offset is None else offset._version,
        )
        if self._encoding is None or key != self._encoded:
            self._encoding = product_for(weight).encode(weight, bias, self.watch.signs)
            self._encoded = key
        return self._encoding

    def seen(self, encoding: Encoding) -> Encoding:
        """`encoding` as the check reads it: itself, unless a seam changes the check."""
        if self.watch.seam is None:
            return encoding
        return replace(encoding, left=self.watch.touched("linear.check", self.name, encoding.left))

    def latest(self, otherwise: Encoding) -> Encoding:
        """The sums of the last call, as they are after a recomputation in a later step."""
        return self._encoding or otherwise

    def compare_recomputed(self, first: Tensor, again: Tensor, squares: Tensor, x: Tensor) -> None:
        """Compare X u (rows,) of the forward pass with that of its recomputation.

        Where kernels are deterministic both have the same bits; elsewhere both may have been
        rounded differently on the way from the block's input.
        """
        site = self.watch.ledger.site(self.name, "linear.recompute")
        if x.device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
            self.watch.judge(site, exact(bits(again), bits(first)))
            return
        u = unit_roundoff(name_of(x.dtype))
        bound = product_bound(rounding_of(x, first.dtype), x.shape[-1], 1)
        variance = (2 * _ROUNDINGS * u**2 / 3 + 2 * bound.by_square) * squares + bound.floor
        self.watch.judge(site, judge(again - first, variance, squares))

    def compare_weight(self, weight: Tensor, encoding: Encoding, judged: Judged) -> bool:
        """After a wrong product: has the weight changed since it was encoded?"""
        sums = encoding.right[: len(weight)]
        changed = bool(compared(weight, encoding.input_signs, sums).exceeded)
        if changed and len(encoding.left):
            sums = encoding.left[: weight.shape[1]]
            changed = bool(compared(weight.t(), encoding.output_signs, sums).exceeded)
        if changed:
            self._find(self.watch.ledger.site(self.name, "weight"), judged, "detected")
        return changed

    def _input_changed(self, x: Tensor, signs: Tensor, dots: Tensor, judged: Judged) -> bool:
        """After a wrong dW: is x (rows, inputs) no longer what the forward pass has read?

        Then nothing is left from which to compute dW again.
        """
        changed = bool(compared(x, signs, dots).exceeded)
        if changed:
            self._find(self.watch.ledger.site(self.name, "linear.saved"), judged, "detected")
        return changed

    def _find(self, site: Site, judged: Judged, outcome: Outcome) -> None:
        rows, worst = int(judged.exceeded), float(judged.worst)
        self.watch.find(site, judged.flags.device, rows, worst, outcome)

    def _leave_out(self, why: str) -> None:
        if not self.why_not:
            self.why_not = why
            if not torch.compiler.is_compiling():
                warnings.warn(f"{self.name} is not guarded: {why}", stacklevel=5)


def _dx(dy: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """The gradient of x (rows, inputs), by the product that autograd takes for its strides."""
    if x.stride() == (1, len(x)):
        return weight.t().mm(dy.t()).t()
    return dy.mm(weight)


def _dw(dy: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """The gradient of the weight, by the product that autograd takes for its strides."""
    if weight.stride() == (weight.shape[1], 1):
        return dy.t().mm(x)
    return x.t().mm(dy).t()


def keep(
    ctx: Any,
    operands: tuple[Tensor, Tensor],
    kept: tuple[Encoding, Projections],
    layer: LinearChecks,
) -> None:
    """Keep x and weight, and what their product's check has made, for `CheckedLinear.backward`."""
    encoding, projections = kept
    ctx.save_for_backward(*operands, projections.dots, projections.squares)
    # Apart from what torch saves, which activation checkpointing throws away and makes again.
    ctx.encoding, ctx.first = encoding, projections.dots
    ctx.generation, ctx.layer = layer.watch.generation, layer


class CheckedLinear(torch.autograd.Function):
    """y = x W^T + b with the products of `outlast.guard.product` checked.

    The same torch operations as autograd's own, in the same order, so also the same bits.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: LinearChecks
    ) -> Tensor:
        """x: (..., inputs), weight: (outputs, inputs), bias: (outputs,)."""
        y, projections, encoding = layer.product(x, weight, bias)
        keep(ctx, (x, weight), (encoding, projections), layer)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy: (..., outputs)."""
        x, weight, dots, squares = ctx.saved_tensors
        layer: LinearChecks = ctx.layer
        encoding: Encoding = ctx.encoding
        # Made again by a second forward pass; torch has matched its calls with those of the first.
        if dots.data_ptr() != ctx.first.data_ptr():
            if ctx.generation == layer.watch.generation:
                layer.compare_recomputed(ctx.first, dots, squares, x)
            else:
                encoding = layer.latest(encoding)
        kept = (encoding, Projections(dots, squares))
        made = layer.gradients(dy, x, weight, kept, ctx.needs_input_grad)
        return made.dx, made.dw, made.db, None


# Function.apply without its handling of functorch's transformations, which these checks refuse.
_apply = super(torch.autograd.Function, CheckedLinear).apply


def _checked(x: Tensor, weight: Tensor, bias: Tensor | None, layer: LinearChecks) -> Tensor:
    output: Tensor = _apply(x, weight, bias, layer)  # type: ignore[no-untyped-call]
    return output
