"""Execution of a chain of cores: one route forward, one or several backward.

`outlast.tensorize.contraction.execution_plan` says what is done between two stages, and in which
dimensions. A plain chain of matrices has nothing between them, and costs little more than its
products even for one token. The cores of a stage are merged into its matrix again in the backward
pass, since they are small. A bias is one more column of the last factor where that pays: adding it
to y, and summing dy, read and write whole activations, a fifth of the time of narrow factors.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn import functional

from outlast.tensorize.contraction import ExecutionPlan, execution_plan, steps

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from torch import Tensor

    from outlast.tensorize.contraction import MatrixProduct, Merging, PairProduct
    from outlast.tensorize.network import Network, Route


Sizes = tuple[tuple[str, int], ...]


def contract(terms: tuple[str, ...], result: str, sizes: Sizes, operands: list[Tensor]) -> Tensor:
    """An einsum of several small tensors along the path with the fewest operations."""
    if terms == (result,):
        return operands[0]
    operands = list(operands)
    for step in steps(terms, result, sizes):
        taken = [operands.pop(place) for place in step.places]
        operands.append(torch.einsum(step.equation, *taken))
    return operands[0]


def widest(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype that products of these tensors are made in."""
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


def _alike(cores: Sequence[Tensor], members: Sequence[int]) -> list[Tensor]:
    """Some cores in the dtype that products of all are made in."""
    first = cores[0].dtype
    if all(core.dtype is first for core in cores):
        return [cores[core] for core in members]
    dtype = widest(cores)
    return [cores[core].to(dtype) for core in members]


def merge(merging: Merging, cores: Sequence[Tensor]) -> Tensor:
    """The matrix of a stage, of shape (b, m, k), or (m, k) where b is one; differentiable.

    Args:
        merging: Of which stage, and how.
        cores: All cores of the network.
    """
    tensors = _alike(cores, merging.cores)
    _make(merging.ahead, tensors)
    matrix = tensors[-1] if merging.last is None else merging.last(tensors[-1])
    columns, rows = merging.padding
    if columns or rows:
        matrix = matrix[..., : matrix.shape[-2] - rows, : matrix.shape[-1] - columns]
    return matrix


def unmerge(
    merging: Merging, cores: Sequence[Tensor], gradient: Tensor, wanted: Collection[int]
) -> dict[int, Tensor]:
    """The gradients of a stage's cores from that of its matrix: the merging backwards.

    Args:
        merging: Of which stage, and how.
        cores: All cores of the network.
        gradient: That of the matrix that `merge` gives, of its shape.
        wanted: Of which cores gradients are asked for.

    Returns:
        Those of the wanted cores of the stage, in the cores' own dtypes.
    """
    if any(merging.padding):
        columns, rows = merging.padding
        gradient = torch.nn.functional.pad(gradient, (0, columns, 0, rows))
    back = merging.back_to(frozenset(wanted))
    tensors = _alike(cores, merging.cores) if back else []
    # The matrix itself is not needed.
    _make(merging.ahead[:-1], tensors)
    gradients = {len(merging.cores) + len(merging.ahead) - 1: gradient}
    if back:
        gradients = {
            number: gradient.to(tensors[0].dtype) for number, gradient in gradients.items()
        }
    for making in back:
        if making.of == 0:
            left, right = gradients[making.first], tensors[making.second]
        else:
            left, right = tensors[making.first], gradients[making.second]
        gradients[making.result] = _multiplied(making.product, left, right)
    found = {}
    for number, (core, closing) in enumerate(zip(merging.cores, merging.closing, strict=True)):
        if core in wanted:
            mine = gradients[number]
            mine = mine if closing is None else closing(mine)
            found[core] = mine.to(cores[core].dtype)
    return found


def _make(ahead: Sequence[PairProduct], tensors: list[Tensor]) -> None:
    """Append what is made of the tensors, one after the other."""
    for making in ahead:
        left, right = tensors[making.first], tensors[making.second]
        tensors.append(_multiplied(making.product, left, right))


def _multiplied(product: MatrixProduct, left: Tensor, right: Tensor) -> Tensor:
    left = left if product.left is None else product.left(left)
    right = right if product.right is None else product.right(right)
    return torch.bmm(left, right) if len(product.gives) == 3 else torch.mm(left, right)


# With fewer numbers in y, starting two operations costs more than reading y.
_MANY = 1 << 20


def folds(tokens: int, out_features: int) -> bool:
    """Return whether y is so large that folding the bias in pays."""
    return tokens * out_features >= _MANY


def with_ones(act: Tensor) -> Tensor:
    """One more feature, which is one; (tokens, k) -> (tokens, k + 1)."""
    return functional.pad(act, (0, 1), value=1.0)


def with_bias(matrix: Tensor, bias: Tensor) -> Tensor:
    """The bias as one more column; (out, k) -> (out, k + 1)."""
    return torch.cat([matrix, bias.unsqueeze(1)], 1)


def unfolded(total: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the matrix, (out, k), and of the bias from that of both."""
    return total[:, :-1], total[:, -1]


BIAS = -1
"""The bias among the cores, in what `differentiate` gives."""

_HALF = (torch.bfloat16, torch.float16)


class MergedPath:
    """A route whose groups have been merged.

    Args:
        network: What the route is one of.
        route: The way through the chain.
        cores: The network's cores, in their own dtype.
        dtype: That of x; the matrices get it after they were merged.
    """

    def __init__(
        self, network: Network, route: Route, cores: Sequence[Tensor], dtype: torch.dtype
    ) -> None:
        self.network = network
        self.route = route
        self.execution: ExecutionPlan = execution_plan(network, route)
        self._stages = self.execution.stages
        self._features = self.execution.features
        self._matrices = [
            _ready(merge(planned.merging, cores).to(dtype)) for planned in self._stages
        ]
        last = self._stages[-1].stage
        # Whether the last product can add the bias.
        self.adds_bias = (
            last.b == 1
            and not self._features
            and self.execution.leave is None
            and last.m == network.out_features
        )

    @property
    def matrices(self) -> list[Tensor]:
        """The matrix of every stage, (b, m, k)."""
        return [matrix if matrix.dim() == 3 else matrix.unsqueeze(0) for matrix in self._matrices]

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: (tokens, in_features) -> (tokens, out_features); differentiable."""
        return self.through(x, bias)[0].contiguous()

    def through(
        self, x: Tensor, bias: Tensor | None = None, *, fold: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """As `forward`; also what went into every stage, with a one at the end if folded."""
        inputs = self.inputs_of(x)
        if self.adds_bias and fold and bias is not None and len(inputs) > 1:
            inputs[-1] = with_ones(inputs[-1])
            return functional.linear(inputs[-1], with_bias(self._matrices[-1], bias)), inputs
        if self.adds_bias:
            return functional.linear(inputs[-1], self._matrices[-1], bias), inputs
        act = self._multiply(self._matrices[-1], inputs[-1])
        leave = self.execution.leave
        act = act if leave is None else leave(act)
        act = act.t() if self._features else act
        wide = act.shape[1] > self.network.out_features
        y = act[:, : self.network.out_features] if wide else act
        return (y if bias is None else y + bias), inputs

    def inputs_of(self, x: Tensor) -> list[Tensor]:
        """Return the inputs of all stages."""
        inputs = [self.entered(x)]
        for planned, matrix in zip(self._stages[1:], self._matrices, strict=False):
            act = self._multiply(matrix, inputs[-1])
            inputs.append(act if planned.enter is None else _ready(planned.enter(act)))
        return inputs

    def entered(self, x: Tensor) -> Tensor:
        """Return the input of the first stage."""
        if x.shape[1] < self.execution.width:
            x = functional.pad(x, (0, self.execution.width - x.shape[1]))
        if self._features:
            x = x.t().contiguous()
        enter = self._stages[0].enter
        return x if enter is None else _ready(enter(x))

    def gradients_of(self, dy: Tensor) -> Iterator[Tensor]:
        """The gradient of what every stage gives, the last stage's first, then that of x.

        Args:
            dy: (tokens, out_features).
        """
        if dy.shape[1] < self.execution.out_width:
            dy = functional.pad(dy, (0, self.execution.out_width - dy.shape[1]))
        leave = self.execution.leave_back
        if self._features:
            dy = dy.t() if leave is None else dy.t().contiguous()
        act = dy if leave is None else _ready(leave(dy))
        for position in reversed(range(len(self._stages))):
            yield act
            matrix = self._matrices[position]
            left, right = (matrix.mT, act) if self._features else (act, matrix)
            act = torch.mm(left, right) if matrix.dim() == 2 else torch.bmm(left, right)
            back = self._stages[position].back
            if back is not None:
                act = back(act)
                act = _ready(act) if position else act
        dx = act.t() if self._features else act
        yield dx[:, : self.network.in_features]

    def weight_gradient(self, du: Tensor, act: Tensor) -> Tensor:
        """The gradient of a stage's matrix from that of its result and its input."""
        left, right = (du, act.mT) if self._features else (du.mT, act)
        return torch.mm(left, right) if left.dim() == 2 else torch.bmm(left, right)

    def add_weight_gradient(self, total: Tensor, du: Tensor, act: Tensor) -> None:
        """Add a chunk's `weight_gradient` to a sum."""
        if total.dtype in _HALF or total.dtype != du.dtype:
            total.add_(self.weight_gradient(du, act))
            return
        left, right = (du, act.mT) if self._features else (du.mT, act)
        if left.dim() == 2:
            total.addmm_(left, right)
        else:
            total.baddbmm_(left, right)

    def _multiply(self, matrix: Tensor, act: Tensor) -> Tensor:
        # A product of matrices is faster than a batch of one.
        if matrix.dim() == 2:
            return torch.mm(matrix, act) if self._features else functional.linear(act, matrix)
        return torch.bmm(matrix, act) if self._features else torch.bmm(act, matrix.mT)


def _ready(act: Tensor) -> Tensor:
    """Copy what no batched product takes as it lies: it would copy it itself, slice by slice."""
    return act if 1 in (act.stride(-1), act.stride(-2)) else act.contiguous()


def apply(
    path: MergedPath, x: Tensor, bias: Tensor | None = None, *, fold: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Go forward; not differentiable.

    Args:
        path: The way.
        x: (tokens, in_features).
        bias: (out_features,).
        fold: Whether the last stage may take the bias as a column, see `folding`; `differentiate`
            then gives its gradient if it is given the inputs.

    Returns:
        y: (tokens, out_features), and what went into every stage unless the tokens went in chunks.
    """
    chunk, tokens = path.route.chunk, x.shape[0]
    if not 0 < chunk < tokens:
        y, inputs = path.through(x, bias, fold=fold)
        return y.contiguous(), inputs
    y = x.new_empty(tokens, path.network.out_features)
    for begin in range(0, tokens, chunk):
        y[begin : begin + chunk] = path.through(x[begin : begin + chunk], bias)[0]
    return y, []


def differentiate(
    path: MergedPath,
    x: Tensor,
    dy: Tensor,
    *,
    cores: Sequence[Tensor],
    wanted: Sequence[int],
    want_x: bool,
    inputs: Sequence[Tensor] = (),
) -> tuple[Tensor | None, dict[int, Tensor]]:
    """Go backward: the gradients of x and of some cores.

    Args:
        path: The way.
        x: (tokens, in_features).
        dy: (tokens, out_features).
        cores: All cores.
        wanted: Cores whose gradients are asked for.
        want_x: Whether that of x is.
        inputs: What went into every stage, if it was kept.

    Returns:
        The gradient of x, (tokens, in_features), or None, and those of the wanted cores; under
        `BIAS` that of the bias, if it was folded in.
    """
    tokens, chunk = x.shape[0], path.route.chunk or x.shape[0]
    planned_stages = path.execution.stages
    asked = [any(core in wanted for core in planned.stage.cores) for planned in planned_stages]
    first = asked.index(True) if any(asked) else len(planned_stages)
    whole = chunk >= tokens
    dx = x.new_empty(x.shape) if want_x and not whole else None
    totals: dict[int, Tensor] = {}
    for begin in range(0, tokens, max(chunk, 1)) if tokens else (0,):
        part = slice(begin, begin + chunk)
        acts = list(inputs) or (path.inputs_of(x[part]) if any(asked) else [])
        gradients = path.gradients_of(dy[part])
        for position in reversed(range(len(planned_stages))):
            if position < first and not want_x:
                break
            du = next(gradients)
            if not asked[position]:
                continue
            if position in totals:
                path.add_weight_gradient(totals[position], du, acts[position])
            else:
                total = path.weight_gradient(du, acts[position])
                totals[position] = total if whole or total.dtype not in _HALF else total.float()
        if want_x and whole:
            dx = next(gradients).contiguous()
        elif dx is not None:
            dx[part] = next(gradients)
    found: dict[int, Tensor] = {}
    last = len(planned_stages) - 1
    folded = path.adds_bias and inputs and inputs[-1].shape[1] > planned_stages[-1].stage.k
    if folded and last in totals:
        totals[last], found[BIAS] = unfolded(totals[last])
    for position, total in totals.items():
        found |= unmerge(planned_stages[position].merging, cores, total, wanted)
    return dx, found


Result = TypeVar("Result")


def transformed() -> bool:
    """Return whether derivatives are taken that need plain operations.

    These are the transforms of ``torch.func``, and forward mode (``forward_ad.dual_level``).
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def autocasts(device: torch.device) -> bool:
    """Return whether autocast is on for a device."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which operations on a device have the dtypes of their operands."""
    if not autocasts(device):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def has_values(tensor: Tensor) -> bool:
    """Return whether numbers can be read from a tensor: it is neither on meta nor fake."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def without_autocast(backward: Callable[..., Result]) -> Callable[..., Result]:
    """Make the backward pass of an autograd function the same inside autocast and outside.

    The forward pass has its dtypes by then, and merging small cores again in a shorter one would
    change their gradients.

    Args:
        backward: A function of the context and the gradients.
    """

    @functools.wraps(backward)
    def wrapped(ctx: Any, *gradients: Tensor) -> Result:
        with no_autocast(gradients[0].device):
            return backward(ctx, *gradients)

    return wrapped
