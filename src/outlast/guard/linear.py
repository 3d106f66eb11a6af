"""Linear layers with every product checked, forward and backward, with unchanged numbers.

*Autocast.* Inside one ``torch.autocast`` region torch casts a parameter once and keeps the copy, so
the gradients of several uses (a layer called twice, two layers with one weight) are summed in the
low precision and cast back once. A checked layer casts by itself and must do the same to keep the
bits.

*torch.compile.* The compiler sees two opaque operations, ``outlast::checked_linear`` and its
backward. At run time they do what the eager code does, counting and correcting included, so no side
effect is left in the graph. The numbers come out of the operation that checks them: the compiler
cannot drop the check and keep the product. An operation finds its layer by a number in a tensor on
the CPU. A Python integer would be part of the graph; so equal blocks share one.

*False positives.* Whether something other than a fault has made a check fail is asked only after it
has failed, and in float64.

*Implementations.* `product_for` chooses the fastest for a device and a type: compiled code on the
CPU; on CUDA devices the kernels of `outlast.guard.checksum_kernels`, which sum next to cuBLAS and
leave its numbers as they are. Elsewhere, and without Triton, Inductor fuses the torch operations of
`TorchProduct`. Importing this module imports neither Triton nor Inductor.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
import weakref
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.library import custom_op
from torch.nn import functional

from outlast.errors import GuardError
from outlast.guard.forward_patch import ForwardPatch
from outlast.guard.parameter_writes import data_writes
from outlast.guard.product import (
    Encoding,
    Gradients,
    NativeProduct,
    Projections,
    Row,
    TorchProduct,
    is_doubtful,
    library_for,
    rounding_of,
    second_look,
)
from outlast.guard.residual import (
    ResidualTest,
    accumulating,
    bits,
    compared_bits,
    equality_test,
    is_half,
    name_of,
    residual_test,
)
from outlast.guard.threshold import product_bound, unit_roundoff
from outlast.guard.watch import computing
from outlast.state.sharded import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outlast.guard.product import Product
    from outlast.guard.watch import Watch


_OLDEST = (8, 0)
"""Compute capability: the first with units for bf16."""
_PADDING = 32
_ROUNDINGS = 16
"""How often a block rounds an activation between its input and any layer in it, about."""
LINEAR_OPERATIONS = (
    *("linear.forward", "linear.dx", "linear.dw", "linear.saved", "linear.recompute", "weight"),
)
"""What is checked of a layer; keys of `outlast.guard.policy.OPERATIONS`."""
TENSOR_PARALLEL = "split over ranks by tensor parallelism"

P = ParamSpec("P")
T = TypeVar("T")


def product_for(x: Tensor) -> Product:
    """Return the fastest checks for tensors like `x`."""
    return _product(x.device, x.dtype)


@functools.cache
def _product(device: torch.device, dtype: torch.dtype) -> Product:
    if device.type == "cpu":
        compiled = library_for(dtype)
        return TorchProduct() if compiled is None else NativeProduct(compiled)
    if device.type == "cuda" and dtype.itemsize <= 4 and has_triton():
        from outlast.guard.checksum_kernels import TYPES, TritonProduct

        if dtype in TYPES and torch.cuda.get_device_capability(device) >= _OLDEST:
            return TritonProduct()
    return CompiledProduct()


@functools.cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


class CompiledProduct(TorchProduct):
    """`TorchProduct` with its passes compiled, or as it is where they cannot be."""

    def forward(self, x: Tensor, y: Tensor, encoding: Encoding) -> tuple[Projections, ResidualTest]:
        """See `Product`."""
        return _compiled_forward(x, y, encoding)

    def backward(
        self, dy: Tensor, gradients: Gradients, encoding: Encoding, projections: Projections
    ) -> tuple[ResidualTest | None, ResidualTest | None]:
        """See `Product`."""
        return _compiled_backward(dy, gradients, encoding, projections)


def or_eager(function: Callable[P, T]) -> Callable[P, T]:
    """`function` compiled at its first call; if that fails, once a warning, and as it is."""
    chosen: Callable[P, T] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal chosen
        if chosen is None:
            chosen = torch.compile(function)
        try:
            return chosen(*args, **kwargs)
        except Exception as error:  # whatever the compiler meets, training continues
            if chosen is function:
                raise
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(
                f"the guard's checks are not compiled and cost more time: {reason}", stacklevel=3
            )
            chosen = function
            return function(*args, **kwargs)

    return call


_compiled_forward = or_eager(TorchProduct().forward)
_compiled_backward = or_eager(TorchProduct().backward)


def beyond_rounding(
    judged: ResidualTest,
    stored: Tensor,
    factors: tuple[Tensor, Tensor],
    added: Tensor | None = None,
) -> ResidualTest:
    """Of flagged rows, those that no rounding whatever explains.

    Sums of many nearly equal terms round in the same direction again and again, which the model of
    independent roundings does not allow for. So numbers that a second computation has given again
    are compared, element by element, with the product in float64, against the worst case of
    rounding ``k u sum |a b|`` (Higham, Accuracy and Stability, 3.5), which nothing clean exceeds.

    Args:
        judged: Of the rows of `stored`.
        stored: (rows, columns) the product of the factors.
        factors: (rows, terms) and (terms, columns).
        added: (columns,) a bias.
    """
    rows = judged.flags.nonzero()[:, 0]
    if not len(rows):
        return judged
    left, right = factors[0][rows].double(), factors[1].double()
    expected, sizes = left @ right, left.abs() @ right.abs()
    if added is not None:
        expected, sizes = expected + added.double(), sizes + added.double().abs()
    return unexplained(judged, stored, (expected, sizes), left.shape[1])


def unexplained(
    judged: ResidualTest, stored: Tensor, exact: tuple[Tensor, Tensor], terms: int
) -> ResidualTest:
    """Of flagged rows, those further from an exact computation than rounding can ever be.

    Args:
        judged: Of the rows of `stored`.
        stored: (rows, columns).
        exact: The flagged rows in float64 (flagged, columns), and the sums of their terms'
            magnitudes.
        terms: Number of terms of each sum.
    """
    rows = judged.flags.nonzero()[:, 0]
    expected, sizes = exact
    rounding = rounding_of(stored)
    unit = (terms + 1) * unit_roundoff(rounding.accumulated)
    if rounding.read:
        unit += 2 * unit_roundoff(rounding.read)
    spacing = torch.finfo(stored.dtype).smallest_normal
    last = unit_roundoff(rounding.stored)
    limit = unit * sizes + last * (expected.abs() + unit * sizes + spacing)
    # What overflows in float64's terms, or begins with no finite number, may be anything.
    free = ~torch.isfinite(expected) | (sizes > torch.finfo(stored.dtype).max)
    within = (stored[rows].double() - expected).abs() <= limit
    wrong = ~(within | free).all(dim=1)
    flags = judged.flags.clone()
    flags[rows] = wrong
    return replace(judged, flags=flags, exceeded=int(wrong.sum()))


def overflowed(again: Tensor, db: Tensor, judged: ResidualTest) -> bool:
    """Return whether only the bias's gradient is wrong, by sums of dy that are too large.

    Otherwise `db` holds `again`, what a second computation gives.
    """
    if bool(torch.isfinite(db[judged.flags]).any()):
        return False
    if torch.equal(bits(again), bits(db)):
        return True
    db.copy_(again)
    return False


def compared(matrix: Tensor, signs: Tensor, kept: Tensor) -> ResidualTest:
    """Judge kept sums (rows,) of a matrix (rows, columns) over signs (columns,).

    Sums that were not finite say nothing.
    """
    wide = matrix.double()
    squares = wide.square().sum(dim=1)
    bound = product_bound(rounding_of(matrix, accumulating(matrix)), matrix.shape[1], 1)
    known = torch.isfinite(kept)
    difference = torch.where(known, wide @ signs.double() - kept, 0.0)
    variance = torch.where(known, bound.by_square * squares + bound.floor, 1.0)
    return residual_test(difference, variance, squares)


_kept: dict[tuple[int, torch.dtype], tuple[object, Tensor, Tensor]] = {}
"""By parameter and type: the region, the parameter, and its copy in it."""
_probes: dict[tuple[str, torch.dtype], tuple[Tensor, Tensor, Tensor]] = {}
"""Operands by which `region` tells regions apart, by device and type."""


def region(device: str, dtype: torch.dtype) -> object:
    """An object that stays the same for as long as autocast keeps its copies on `device`.

    torch does not tell where a region begins. But it casts this parameter anew in every region, by
    a node of the graph that a region's calls share.
    """
    probe = _probes.get((device, dtype))
    if probe is None:
        factors = torch.zeros((2, 1), dtype=dtype, device=device)
        parameter = torch.zeros((1, 1), dtype=torch.float32, device=device, requires_grad=True)
        probe = _probes[device, dtype] = (parameter, factors[:0].t(), factors[:0])
    # A sum without terms: nothing is computed, and nothing saved for the backward pass.
    node = torch.addmm(*probe).grad_fn
    return None if node is None else node.next_functions[0][0]


def cast(parameter: Tensor, dtype: torch.dtype, within: object) -> Tensor:
    """`parameter` in `dtype`, the same tensor for every use in the region `within`.

    As torch, keeps copies only of float32 leaves that get a gradient.
    """
    keeps = (
        within is not None
        and parameter.requires_grad
        and parameter.is_leaf
        and parameter.dtype == torch.float32
        and torch.is_autocast_cache_enabled()
    )
    if not keeps:
        return parameter if parameter.dtype == torch.float64 else parameter.to(dtype)
    key = (id(parameter), dtype)
    found = _kept.get(key)
    if found is not None and found[0] is within:
        return found[2]
    if found is not None:
        # Of a region that has ended.
        forget()
    copy = parameter.to(dtype)
    _kept[key] = (within, parameter, copy)
    return copy


def forget() -> None:
    """Let go of all copies: a backward pass has begun, so their gradients are on their way."""
    _kept.clear()


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
    return torch.tensor(_made, device="cpu")


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
    """Pack what the backward check needs of the forward into one float64 tensor for the graph.

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
    if native or is_half(x.dtype):
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


class LinearChecks(ForwardPatch):
    """Replaces the `forward` of one `nn.Linear`.

    Args:
        watch: What all checks of the guard share.
        module: The layer.
        name: Its name in the model.
        transposed: Whether its weight is (inputs, outputs), as that of GPT-2's `Conv1D`.

    Attributes:
        why_not: Why calls were not checked, in a few words; empty as long as all were.
    """

    def __init__(
        self, watch: Watch, module: nn.Module, name: str, *, transposed: bool = False
    ) -> None:
        super().__init__(watch, module, name)
        self.transposed = transposed
        self.why_not = ""
        self.forward_site = watch.ledger.site(name, "linear.forward")
        self.dx_site = watch.ledger.site(name, "linear.dx")
        self.dw_site = watch.ledger.site(name, "linear.dw")
        self.number = enroll(self)
        self._encoding: Encoding | None = None
        self._encoded: tuple[object, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Of a copied model; see `ForwardPatch`."""
        copied = super().__deepcopy__(memo)
        copied.transposed = self.transposed
        return copied

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output for x (..., inputs)."""
        weight: Any = self.module.weight
        bias: Any = self.module.bias
        if self.transposed:
            # As the layer itself, whose product has a bias and two dimensions.
            flat, weight = x.view(-1, x.shape[-1]), weight.t()
            return self._forward(flat, weight, bias).view(*x.shape[:-1], len(weight))
        return self._forward(x, weight, bias)

    def _forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self.trains(x, weight, bias):
            return functional.linear(x, weight, bias)
        return self.multiply(x, weight, bias)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Give x W^T + b, checked; x: (..., inputs), weight: (outputs, inputs)."""
        nothing = x.numel() == 0 or weight.numel() == 0
        if is_dtensor(weight) or nothing or torch._C._are_functorch_transforms_active():
            if is_dtensor(weight):
                # Its local products are checked at torch's dispatcher.
                if self.watch.operations is None:
                    self._leave_out(TENSOR_PARALLEL)
            elif nothing:
                # Its gradients are zero: there is nothing to check in this step.
                self.dw_site.last = self.watch.period
            return functional.linear(x, weight, bias)
        compiling = torch.compiler.is_compiling()
        device = x.device.type
        if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
            if compiling:
                return checked(x, weight, bias, self.number)
            return _checked(x, weight, bias, self)
        # As autocast would cast them, but seen by autograd outside the checked product.
        dtype = torch.get_autocast_dtype(device)
        if compiling:
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
            return checked(x, weight, bias, self.number)
        within = region(device, dtype)
        # In torch's order: what was cast last gets its gradient first.
        bias = None if bias is None else cast(bias, dtype, within)
        weight = cast(weight, dtype, within)
        x = x.to(dtype)
        with torch.autocast(device, enabled=False):
            return _checked(x, weight, bias, self)

    @computing("check")
    def product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Projections, Encoding]:
        """X W^T + b, checked; x: (..., inputs), weight: (outputs, inputs), bias: (outputs,)."""
        watch, product = self.watch, product_for(x)
        began = perf_counter()
        encoding = self.encoding(weight, bias)
        watch.touch("weight", self.name, weight)
        later: Tensor | None = None
        if bias is not None and adds_later(x):
            # The second step rounds a second time.
            bias, later = None, bias
        start = perf_counter()
        y = _linear(watch.touched("linear.operand", self.name, x), weight, bias)
        end = perf_counter()
        watch.touch("linear.output", self.name, y)
        fitting = encoding if later is None else replace(encoding, offset=0.0)
        # Not `y` itself: selective checkpointing, which has kept it, refuses what was written to.
        flat_x, flat_y = x.reshape(-1, x.shape[-1]), y.data.view(-1, y.shape[-1])
        projections, judged = product.forward(flat_x, flat_y, self.seen(fitting))
        if is_doubtful(judged) and not self._weight_changed(weight, encoding):
            judged = second_look(
                judged,
                lambda row: Row(flat_y[row], flat_x[row], weight.t(), bias),
                encoding.output_signs,
            )
        if watch.repeats_product(y):
            judged = compared_bits(judged, y, functional.linear(x, weight, bias))
        failed = watch.wants(self.forward_site, judged)
        watch.seconds += perf_counter() - end + start - began
        if failed:

            def redo(first: int, last: int) -> Tensor:
                # All rows in the shape that they had, which may choose the kernel.
                part = x if last - first == len(flat_x) else flat_x[first:last]
                again = functional.linear(part, weight, bias).view(last - first, -1)
                watch.touch("linear.output", self.name, again)
                return again

            def check() -> ResidualTest:
                return product.forward(flat_x, flat_y, fitting)[1]

            def beyond(left: ResidualTest) -> ResidualTest:
                return beyond_rounding(left, flat_y, (flat_x, weight.t()), bias)

            if not self.compare_weight(weight, encoding, judged):
                watch.correct(self.forward_site, judged, flat_y, redo, check, beyond=beyond)
        if later is not None:
            y += later
        watch.touch("linear.saved", self.name, x)
        return y, projections, encoding

    @computing("check")
    def gradients(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        kept: tuple[Encoding, Projections],
        wants: Sequence[bool],
        *,
        added_later: bool = False,
    ) -> Gradients:
        """Those that are wanted of x, weight and bias, for dy (..., outputs), checked.

        Args:
            dy: The gradient of y.
            x: As given to `product`.
            weight: As given to `product`.
            kept: What `product` returned.
            wants: Whether x, weight and bias get a gradient.
            added_later: Whether `adds_later` holds for the x of the forward pass.
        """
        watch, product = self.watch, product_for(x)
        encoding, projections = kept
        flat_x, flat_dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        forget()
        if not watch.driven:
            # FSDP2 gathers changed weights into the same memory, under the same version.
            self._encoded = ()
        watch.touch("linear.dy", self.name, flat_dy)
        dx = _checked_dx(flat_dy, weight, flat_x) if wants[0] else None
        dw = _checked_dw(flat_dy, weight, flat_x) if wants[1] else None
        # As autograd, which sums dy as it lies in memory where the bias was added to y.
        summed = dy if added_later else flat_dy
        db = _db(summed) if wants[2] else None
        if watch.fault_hook is not None:
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
        operands = (flat_dy, flat_x, weight)
        if dx_judged is not None and is_doubtful(dx_judged):
            dx_judged = self._look_at_dx(operands, made, encoding, dx_judged)
        if dw_judged is not None and is_doubtful(dw_judged):
            dw_judged = self._look_at_dw(operands, made, (encoding, projections), dw_judged)
        if dx is not None and dx_judged is not None and watch.repeats_product(dx):
            dx_judged = compared_bits(dx_judged, dx, _dx(flat_dy, weight, flat_x))
        if dw is not None and dw_judged is not None and watch.repeats_product(dw):
            dw_judged = compared_bits(dw_judged, dw, _dw(flat_dy, weight, flat_x))
        dx_failed = dx_judged is not None and watch.wants(self.dx_site, dx_judged)
        dw_failed = dw_judged is not None and watch.wants(self.dw_site, dw_judged)
        watch.seconds += perf_counter() - began
        kept = encoding, projections
        if dx_failed and dx is not None and dx_judged is not None:
            self._correct_dx(operands, dx, kept, dx_judged)
        if dw_failed and dw is not None and dw_judged is not None:
            self._correct_dw(operands, Gradients(None, dw, db), kept, dw_judged, summed)
        return Gradients(None if dx is None else dx.view(x.shape), dw, db)

    def _look_at_dx(
        self,
        operands: tuple[Tensor, Tensor, Tensor],
        made: Gradients,
        encoding: Encoding,
        judged: ResidualTest,
    ) -> ResidualTest:
        (dy, _, weight), dx = operands, made.dx
        if dx is None or self._weight_changed(weight, encoding):
            return judged
        return second_look(judged, lambda row: Row(dx[row], dy[row], weight), encoding.input_signs)

    def _look_at_dw(
        self,
        operands: tuple[Tensor, Tensor, Tensor],
        made: Gradients,
        kept: tuple[Encoding, Projections],
        judged: ResidualTest,
    ) -> ResidualTest:
        (dy, x, _), dw, db = operands, made.dw, made.db
        signs, dots = kept[0].input_signs, kept[1].dots
        beta = kept[0].beta if db is not None else 0.0
        if dw is None or bool(compared(x, signs, dots - beta).exceeded):
            return judged
        if db is None or not beta:
            return second_look(judged, lambda row: Row(dw[row], dy[:, row], x), signs)
        # The bias's gradient is a further column, of an input that is one.
        wide = torch.cat([x, x.new_ones((len(x), 1))], 1)

        def row(number: int) -> Row:
            return Row(torch.cat([dw[number], db[number : number + 1]]), dy[:, number], wide)

        return second_look(judged, row, torch.cat([signs, signs.new_tensor([beta])]))

    def _correct_dx(
        self,
        operands: tuple[Tensor, Tensor, Tensor],
        dx: Tensor,
        kept: tuple[Encoding, Projections],
        judged: ResidualTest,
    ) -> None:
        dy, x, weight = operands

        def redo(first: int, last: int) -> Tensor:
            again = _dx(dy[first:last], weight, x)
            self.watch.touch("linear.dx", self.name, again)
            return again

        def check() -> ResidualTest:
            found, _ = product_for(x).backward(dy, Gradients(dx, None, None), *kept)
            assert found is not None
            return found

        def beyond(left: ResidualTest) -> ResidualTest:
            return beyond_rounding(left, dx, (dy, weight))

        if not self.compare_weight(weight, kept[0], judged):
            self.watch.correct(self.dx_site, judged, dx, redo, check, beyond=beyond)

    def _correct_dw(
        self,
        operands: tuple[Tensor, Tensor, Tensor],
        made: Gradients,
        kept: tuple[Encoding, Projections],
        judged: ResidualTest,
        summed: Tensor,
    ) -> None:
        (dy, x, weight), dw, db = operands, made.dw, made.db
        assert dw is not None
        beta = kept[0].beta if db is not None else 0.0
        if bool(compared(x, kept[0].input_signs, kept[1].dots - beta).exceeded):
            # X is not what the forward pass has read: nothing is left to compute dW again from.
            self.watch.note(self.watch.ledger.site(self.name, "linear.saved"), judged, "detected")
            return
        if db is not None and overflowed(_db(summed), db, judged):
            self.watch.note(self.dw_site, judged, "not_finite")
            return

        def redo(first: int, last: int) -> Tensor:
            if db is not None:
                db.copy_(_db(summed))
            again = _dw(dy[:, first:last], weight, x)
            self.watch.touch("linear.dw", self.name, again)
            return again

        def check() -> ResidualTest:
            _, found = product_for(x).backward(dy, made, *kept)
            assert found is not None
            return found

        def beyond(left: ResidualTest) -> ResidualTest:
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
            parameter._version + data_writes(parameter),
            parameter.data_ptr(),
            weight.dtype,
            0 if offset is None else offset._version + data_writes(offset),
        )
        if self._encoding is None or key != self._encoded:
            self._encoding = product_for(weight).encode(weight, bias, self.watch.signs)
            self._encoded = key
        return self._encoding

    def seen(self, encoding: Encoding) -> Encoding:
        """`encoding` as the check reads it: itself, unless a fault_hook changes the check."""
        if self.watch.fault_hook is None:
            return encoding
        return replace(encoding, left=self.watch.touched("linear.check", self.name, encoding.left))

    def compare_recomputed(self, first: Tensor, again: Tensor, squares: Tensor, x: Tensor) -> None:
        """Compare X u (rows,) of the forward pass with that of its recomputation.

        Where kernels are deterministic both have the same bits; elsewhere both may have been
        rounded differently on the way from the block's input.
        """
        site = self.watch.ledger.site(self.name, "linear.recompute")
        if x.device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
            self.watch.judge(site, equality_test(bits(again), bits(first)))
            return
        u = unit_roundoff(name_of(x.dtype))
        bound = product_bound(rounding_of(x, first.dtype), x.shape[-1], 1)
        variance = (2 * _ROUNDINGS * u**2 / 3 + 2 * bound.by_square) * squares + bound.floor
        self.watch.judge(site, residual_test(again - first, variance, squares))

    def compare_weight(self, weight: Tensor, encoding: Encoding, judged: ResidualTest) -> bool:
        """After a wrong product, find whether the weight has changed since it was encoded."""
        changed = self._weight_changed(weight, encoding)
        if changed:
            self.watch.note(self.watch.ledger.site(self.name, "weight"), judged, "detected")
        return changed

    def _weight_changed(self, weight: Tensor, encoding: Encoding) -> bool:
        sums = encoding.right[: len(weight)]
        changed = bool(compared(weight, encoding.input_signs, sums).exceeded)
        if changed and len(encoding.left):
            sums = encoding.left[: weight.shape[1]]
            changed = bool(compared(weight.t(), encoding.output_signs, sums).exceeded)
        return changed

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


def _db(dy: Tensor) -> Tensor:
    """The gradient of the bias: dy (..., outputs), summed."""
    return dy.sum(tuple(range(dy.dim() - 1)))


_linear = computing("checked")(functional.linear)
_checked_dx, _checked_dw = computing("checked")(_dx), computing("checked")(_dw)


def adds_later(x: Tensor) -> bool:
    """Return whether torch adds the bias of a linear layer to its product with x afterwards."""
    return x.dim() > 2 and not x.is_contiguous()


class CheckedLinear(torch.autograd.Function):
    """y = x W^T + b with the products of `outlast.guard.product` checked.

    The same torch operations as autograd's own, in the same order, so also the same bits. Gradients
    arrive in the order of the inputs, and DDP puts them into buckets as they arrive, where a
    number's place decides in which order the ranks are added: so the bias comes first, as in
    ``addmm``.
    """

    @staticmethod
    def forward(
        ctx: Any, bias: Tensor | None, x: Tensor, weight: Tensor, layer: LinearChecks
    ) -> Tensor:
        """x: (..., inputs), weight: (outputs, inputs), bias: (outputs,)."""
        y, projections, encoding = layer.product(x, weight, bias)
        ctx.save_for_backward(x, weight, projections.dots, projections.squares)
        # Apart from what torch saves, which activation checkpointing throws away and makes again.
        ctx.encoding, ctx.first = encoding, projections.dots
        ctx.generation, ctx.layer = layer.watch.generation, layer
        # Hooks of saved tensors may give x back in another layout.
        ctx.added_later = adds_later(x)
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
                # The sums of the last call, which was the recomputation.
                encoding = layer._encoding or encoding
        kept = (encoding, Projections(dots, squares))
        wants_db, wants_dx, wants_dw, _ = ctx.needs_input_grad
        wants = (wants_dx, wants_dw, wants_db)
        made = layer.gradients(dy, x, weight, kept, wants, added_later=ctx.added_later)
        return made.db, made.dx, made.dw, None


# Function.apply without its handling of functorch's transformations, which these checks refuse.
_apply = super(torch.autograd.Function, CheckedLinear).apply


def _checked(x: Tensor, weight: Tensor, bias: Tensor | None, layer: LinearChecks) -> Tensor:
    output: Tensor = _apply(bias, x, weight, layer)  # type: ignore[no-untyped-call]
    return output
