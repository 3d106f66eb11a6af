"""Going through a chain of cores: one route forward, one or several backward.

What is done between two stages, and in which dimensions, is in `course`. A plain chain of matrices
has nothing between them, and costs little more than its products even for one token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from outlast.tensorize.course import Course, course
from outlast.tensorize.folding import unfolded, with_bias, with_ones
from outlast.tensorize.merge import merge, unmerge

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from outlast.tensorize.network import Network, Route

BIAS = -1
"""The bias among the cores, in what `differentiate` gives."""

_HALF = (torch.bfloat16, torch.float16)


class Path:
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
        self.course: Course = course(network, route)
        self._legs = self.course.legs
        self._features = self.course.features
        self._matrices = [_ready(merge(leg.merging, cores).to(dtype)) for leg in self._legs]
        last = self._legs[-1].stage
        # Whether the last product can add the bias.
        self.adds_bias = (
            last.b == 1
            and not self._features
            and self.course.leave is None
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
        y = self._leave(self._multiply(self._matrices[-1], inputs[-1]))
        return (y if bias is None else y + bias), inputs

    def inputs_of(self, x: Tensor) -> list[Tensor]:
        """What goes into every stage."""
        inputs = [self.entered(x)]
        for leg, matrix in zip(self._legs[1:], self._matrices, strict=False):
            act = self._multiply(matrix, inputs[-1])
            inputs.append(act if leg.enter is None else _ready(leg.enter(act)))
        return inputs

    def entered(self, x: Tensor) -> Tensor:
        """What goes into the first stage."""
        if x.shape[1] < self.course.width:
            x = functional.pad(x, (0, self.course.width - x.shape[1]))
        if self._features:
            x = x.t().contiguous()
        enter = self._legs[0].enter
        return x if enter is None else _ready(enter(x))

    def gradients_of(self, dy: Tensor) -> Iterator[Tensor]:
        """The gradient of what every stage gives, the last stage's first, then that of x.

        Args:
            dy: (tokens, out_features).
        """
        act = self._leave_back(dy)
        for position in reversed(range(len(self._legs))):
            yield act
            act = self._multiply_back(self._matrices[position], act)
            back = self._legs[position].back
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

    def _multiply_back(self, matrix: Tensor, act: Tensor) -> Tensor:
        left, right = (matrix.mT, act) if self._features else (act, matrix)
        return torch.mm(left, right) if matrix.dim() == 2 else torch.bmm(left, right)

    def _leave(self, act: Tensor) -> Tensor:
        """What the last stage gives as (tokens, out_features)."""
        leave = self.course.leave
        act = act if leave is None else leave(act)
        act = act.t() if self._features else act
        wide = act.shape[1] > self.network.out_features
        return act[:, : self.network.out_features] if wide else act

    def _leave_back(self, dy: Tensor) -> Tensor:
        """The gradient of y as that of what the last stage gives."""
        if dy.shape[1] < self.course.out_width:
            dy = functional.pad(dy, (0, self.course.out_width - dy.shape[1]))
        leave = self.course.leave_back
        if self._features:
            dy = dy.t() if leave is None else dy.t().contiguous()
        return dy if leave is None else _ready(leave(dy))


def _ready(act: Tensor) -> Tensor:
    """Copy what no batched product takes as it lies: it would copy it itself, slice by slice."""
    return act if 1 in (act.stride(-1), act.stride(-2)) else act.contiguous()


def apply(
    path: Path, x: Tensor, bias: Tensor | None = None, *, fold: bool = False
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
    path: Path,
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
    legs = path.course.legs
    asked = [any(core in wanted for core in leg.stage.cores) for leg in legs]
    first = asked.index(True) if any(asked) else len(legs)
    whole = chunk >= tokens
    dx = x.new_empty(x.shape) if want_x and not whole else None
    totals: dict[int, Tensor] = {}
    for begin in range(0, tokens, max(chunk, 1)) if tokens else (0,):
        part = slice(begin, begin + chunk)
        acts = list(inputs) or (path.inputs_of(x[part]) if any(asked) else [])
        gradients = path.gradients_of(dy[part])
        for position in reversed(range(len(legs))):
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
    last = len(legs) - 1
    folded = path.adds_bias and inputs and inputs[-1].shape[1] > legs[-1].stage.k
    if folded and last in totals:
        totals[last], found[BIAS] = unfolded(totals[last])
    for position, total in totals.items():
        found |= unmerge(legs[position].merging, cores, total, wanted)
    return dx, found
