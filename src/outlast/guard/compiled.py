"""The checked product as custom operations, for graphs that torch.compile makes.

The compiler sees two opaque operations, ``outlast::checked_linear`` and its backward. At run time
they do what the eager code does, counting and correcting included, so no side effect is left in the
graph. The numbers come out of the operation that checks them: the compiler cannot drop the check
and keep the product.

An operation finds its layer by a number in a tensor on the CPU. A Python integer would be part of
the graph; so equal blocks share one.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.library import custom_op

from outlast.errors import GuardError
from outlast.guard.product import Encoding, NativeProduct, Projections, product_for

if TYPE_CHECKING:
    from outlast.guard.linear import LinearChecks

_PADDING = 32
_layers: weakref.WeakValueDictionary[int, LinearChecks] = weakref.WeakValueDictionary()
_made = 0


def enroll(layer: LinearChecks) -> Tensor:
    """Make a layer known to the operations; returns its number, int64 of no dimension, on the CPU.

    It is known for as long as it lives.
    """
    global _made, _refuse  # noqa: PLW0603
    if WHY_NOT:
        # A call that the compiler cannot look into: it stops there, and gives the reason. Made
        # where it is needed only, since it loads the compiler.
        _refuse = torch.compiler.disable(  # type: ignore[no-untyped-call]
            _refuse, reason=_refusal()
        )
    _made += 1
    _layers[_made] = layer
    return torch.tensor(_made)


def checked(x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor) -> Tensor:
    """X W^T + b for x (..., inputs), checked by the layer of this number, inside a graph.

    Raises:
        GuardError: When the operations could not be registered; with ``fullgraph=True`` torch's own
            error, with the same sentence.
    """
    if WHY_NOT:
        _refuse()
    y: Tensor = torch.ops.outlast.checked_linear(x, weight, bias, number)[0]
    return y


def _layer(number: Tensor) -> LinearChecks:
    found = _layers.get(int(number))
    if found is None:
        raise GuardError(
            "a compiled graph runs whose guard is gone; compile the model again after remove()"
        )
    return found


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, site: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast(x.device.type, enabled=False):
        y, projections, encoding = _layer(site).product(x, weight, bias)
        return y.contiguous(), _packed(projections, encoding, len(weight))


def _forward_shapes(
    x: Tensor, weight: Tensor, bias: Tensor | None, site: Tensor
) -> tuple[Tensor, Tensor]:
    outputs, inputs = weight.shape
    rows = x.numel() // inputs
    kept = x.new_empty(2 * rows + inputs + outputs + _PADDING + 1, dtype=torch.float64)
    return x.new_empty((*x.shape[:-1], outputs)), kept


def _backward(  # noqa: PLR0917
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    kept: Tensor,
    site: Tensor,
    has_bias: bool,
    wants: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(x.device.type, enabled=False):
        projections, encoding = _unpacked(kept, x, weight, has_bias)
        made = _layer(site).gradients(dy, x, weight, (encoding, projections), wants)
    dx, dw, db = (
        x.new_empty(0) if gradient is None else gradient.contiguous()
        for gradient in (made.dx, made.dw, made.db)
    )
    return dx, dw, db


def _backward_shapes(  # noqa: PLR0917
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    kept: Tensor,
    site: Tensor,
    has_bias: bool,
    wants: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (x.shape, weight.shape, weight.shape[:1])
    dx, dw, db = (
        x.new_empty(shape if wanted else 0) for shape, wanted in zip(shapes, wants, strict=True)
    )
    return dx, dw, db


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, site = inputs
    ctx.save_for_backward(x, weight, output[1], site)
    ctx.has_bias = bias is not None
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dy: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None, None
    x, weight, kept, site = ctx.saved_tensors
    wants = list(ctx.needs_input_grad[:3])
    made = torch.ops.outlast.checked_linear_backward(dy, x, weight, kept, site, ctx.has_bias, wants)
    dx, dw, db = (item if wanted else None for item, wanted in zip(made, wants, strict=True))
    return dx, dw, db, None


def _packed(projections: Projections, encoding: Encoding, outputs: int) -> Tensor:
    """What the backward check needs of the forward, as one float64 tensor that a graph can carry.

    X u + beta and |X_i|^2 (rows each), u (inputs), W u (outputs) with zeros behind, and the largest
    squared norm of a row of W.
    """
    numbers = [projections.dots, projections.squares, encoding.input_signs]
    numbers.append(encoding.right[:outputs])
    tail = encoding.right.new_zeros(_PADDING + 1, dtype=torch.float64)
    tail[-1] = encoding.rows_largest
    return torch.cat([*(number.double() for number in numbers), tail])


def _unpacked(
    kept: Tensor, x: Tensor, weight: Tensor, has_bias: bool
) -> tuple[Projections, Encoding]:
    outputs, inputs = weight.shape
    rows = x.numel() // inputs
    dots, squares, encoded = kept[:rows], kept[rows : 2 * rows], kept[2 * rows :]
    native = isinstance(product_for(x), NativeProduct)
    if native or x.dtype in (torch.bfloat16, torch.float16):
        encoded = encoded.float()
    right = encoded[inputs:]
    encoding = Encoding(
        encoded[:inputs],
        encoded[:0],
        right if native else right[:outputs],
        encoded[:0],
        float(encoded[-1]) if native else encoded[-1],
        0.0,
        1.0 if has_bias else 0.0,
        0.0,
    )
    return Projections(dots, squares), encoding


def _refuse() -> None:
    raise GuardError(_refusal())


def _refusal() -> str:
    return (
        "torch.compile of a guarded model needs the operation outlast::checked_linear, which could "
        f"not be registered ({WHY_NOT}); call remove() of the guard or do not compile"
    )


def _register() -> str:
    """Make the operations known to torch; returns why that failed, or an empty text."""
    try:
        forward = custom_op(
            "outlast::checked_linear",
            _forward,
            mutates_args=(),
            schema="(Tensor x, Tensor weight, Tensor? bias, Tensor site) -> (Tensor, Tensor)",
        )
        forward.register_fake(_forward_shapes)
        forward.register_autograd(_differentiate, setup_context=_save)
        backward = custom_op(
            "outlast::checked_linear_backward",
            _backward,
            mutates_args=(),
            schema="(Tensor dy, Tensor x, Tensor weight, Tensor kept, Tensor site, bool has_bias, "
            "bool[] wants) -> (Tensor, Tensor, Tensor)",
        )
        backward.register_fake(_backward_shapes)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        return str(error).partition("\n")[0]
    return ""


WHY_NOT = _register()
"""Why torch does not know the operations; empty where it does. torch refuses them when a library
of this process, such as a second copy of Outlast, has defined operations of the same names."""
