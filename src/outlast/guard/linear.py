"""Linear layers with every product checked, forward and backward, with unchanged numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional

from outlast.guard.product import Encoding, Gradients, Projections, product_for

if TYPE_CHECKING:
    from torch import Tensor

    from outlast.guard.judged import Judged
    from outlast.guard.watch import Watch


class LinearChecks:
    """Stands in for the ``forward`` of one `nn.Linear`.

    Args:
        watch: What all checks of the guard share.
        module: The layer.
        name: Its name in the model.
    """

    def __init__(self, watch: Watch, module: nn.Linear, name: str) -> None:
        self.watch = watch
        self.module = module
        self.name = name
        self.forward_site = watch.ledger.site(name, "linear.forward")
        self.dx_site = watch.ledger.site(name, "linear.dx")
        self.dw_site = watch.ledger.site(name, "linear.dw")
        self._encoding: Encoding | None = None
        self._encoded: tuple[object, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """The layer's output for x (..., inputs)."""
        module = self.module
        weight, bias = module.weight, module.bias
        if not module.training or isinstance(weight, DTensor) or x.numel() == 0:
            return functional.linear(x, weight, bias)
        device = x.device.type
        if not torch.is_autocast_enabled(device):
            return _checked(x, weight, bias, self)
        # As autocast would cast them, but seen by autograd outside the checked product.
        dtype = torch.get_autocast_dtype(device)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        with torch.autocast(device, enabled=False):
            return _checked(x, weight, bias, self)

    def encoding(self, weight: Tensor, bias: Tensor | None) -> Encoding:
        """The weight's sums, made once per step and kept while the parameter is not written to.

        A weight that changes in any other way while they are kept no longer fits them.
        """
        parameter = self.module.weight
        key = (self.watch.step, parameter._version, parameter.data_ptr(), weight.dtype)
        if self._encoding is None or key != self._encoded:
            self._encoding = product_for(weight).encode(weight, bias, self.watch.signs)
            self._encoded = key
        return self._encoding

    def seen(self, encoding: Encoding) -> Encoding:
        """`encoding` as the check reads it: itself, unless a seam changes the check."""
        if self.watch.seam is None:
            return encoding
        return replace(encoding, left=self.watch.touched("linear.check", self.name, encoding.left))

    def compare_encodings(self, weight: Tensor, bias: Tensor | None, judged: Judged) -> None:
        """After a product that stays wrong: has the weight changed since it was encoded?"""
        kept = self._encoding
        assert kept is not None
        fresh = product_for(weight).encode(weight, bias, self.watch.signs)
        if not torch.equal(fresh.left, kept.left) and not torch.equal(fresh.right, kept.right):
            site = self.watch.ledger.site(self.name, "weight")
            rows, worst = int(judged.exceeded), float(judged.worst)
            self.watch.find(site, weight.device, rows, worst, "detected")


def _checked(x: Tensor, weight: Tensor, bias: Tensor | None, layer: LinearChecks) -> Tensor:
    output: Tensor = CheckedLinear.apply(x, weight, bias, layer)  # type: ignore[no-untyped-call]
    return output


class CheckedLinear(torch.autograd.Function):
    """y = x W^T + b with the products of `outlast.guard.product` checked.

    The same torch operations as autograd's own, in the same order, so also the same bits.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: LinearChecks
    ) -> Tensor:
        """x: (..., inputs), weight: (outputs, inputs), bias: (outputs,)."""
        watch, product = layer.watch, product_for(x)
        encoding = layer.encoding(weight, bias)
        watch.touch("weight", layer.name, weight)
        y = functional.linear(watch.touched("linear.operand", layer.name, x), weight, bias)
        watch.touch("linear.output", layer.name, y)
        flat_x, flat_y = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        seen = layer.seen(encoding)
        projections, judged = product.forward(flat_x, flat_y, seen)
        if watch.wants(layer.forward_site, judged):

            def redo(first: int, last: int) -> Tensor:
                again = functional.linear(flat_x[first:last], weight, bias)
                watch.touch("linear.output", layer.name, again)
                return again

            def check() -> Judged:
                return product.forward(flat_x, flat_y, encoding)[1]

            outcome = watch.correct(layer.forward_site, judged, flat_y, redo, check)
            if outcome == "persistent":
                layer.compare_encodings(weight, bias, judged)
        ctx.save_for_backward(x, weight, projections.dots, projections.squares)
        ctx.encoding, ctx.layer, ctx.has_bias = encoding, layer, bias is not None
        watch.touch("linear.saved", layer.name, x)
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy: (..., outputs)."""
        x, weight, dots, squares = ctx.saved_tensors
        layer: LinearChecks = ctx.layer
        watch, encoding, product = layer.watch, ctx.encoding, product_for(x)
        wants_dx, wants_dw, wants_db, _ = ctx.needs_input_grad
        flat_x, flat_dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        watch.touch("linear.dy", layer.name, flat_dy)
        dx = flat_dy.mm(weight) if wants_dx else None
        dw = flat_dy.t().mm(flat_x) if wants_dw else None
        db = flat_dy.sum(0) if wants_db else None
        if dx is not None:
            watch.touch("linear.dx", layer.name, dx)
        if dw is not None:
            watch.touch("linear.dw", layer.name, dw)
        projections = Projections(dots, squares)
        # A bias that is frozen is no part of what the gradient's sums hold.
        if ctx.has_bias and db is None:
            projections = Projections(dots - encoding.beta, squares)
        dx_judged, dw_judged = product.backward(
            flat_dy, Gradients(dx, dw, db), encoding, projections
        )
        if dx is not None and dx_judged is not None and watch.wants(layer.dx_site, dx_judged):

            def redo_dx(first: int, last: int) -> Tensor:
                again = flat_dy[first:last].mm(weight)
                watch.touch("linear.dx", layer.name, again)
                return again

            def check_dx() -> Judged:
                judged, _ = product.backward(
                    flat_dy, Gradients(dx, None, None), encoding, projections
                )
                assert judged is not None
                return judged

            watch.correct(layer.dx_site, dx_judged, dx, redo_dx, check_dx)
        if dw is not None and dw_judged is not None and watch.wants(layer.dw_site, dw_judged):

            def redo_dw(first: int, last: int) -> Tensor:
                if db is not None:
                    db.copy_(flat_dy.sum(0))
                again = flat_dy[:, first:last].t().mm(flat_x)
                watch.touch("linear.dw", layer.name, again)
                return again

            def check_dw() -> Judged:
                _, judged = product.backward(
                    flat_dy, Gradients(None, dw, db), encoding, projections
                )
                assert judged is not None
                return judged

            watch.correct(layer.dw_site, dw_judged, dw, redo_dw, check_dw)
        return None if dx is None else dx.view(x.shape), dw, db, None
