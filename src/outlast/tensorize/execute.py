"""Going through a chain of cores: one route forward, one or several backward.

Between two stages, what is on its way has the shape (b, k, f t) in the feature-major layout and
(b, t f, k) in the other, where t are the tokens of a chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from outlast.tensorize.merge import merge, unmerge
from outlast.tensorize.network import lower

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from outlast.tensorize.network import Lowered, Network, Route, Stage

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
        self.lowered: Lowered = lower(network, route)
        self.stages = self.lowered.stages
        self.matrices = [_ready(merge(network, stage, cores).to(dtype)) for stage in self.stages]
        self._features = route.layout == "features"

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: (tokens, in_features) -> (tokens, out_features); differentiable."""
        return self.through(x, bias)[0].contiguous()

    def through(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """As `forward`; also what went into every stage."""
        act = self._enter(x)
        inputs = []
        tokens = x.shape[0]
        last = len(self.stages) - 1
        for position, (stage, matrix) in enumerate(zip(self.stages, self.matrices, strict=True)):
            act = self._arranged(act, stage, tokens)
            inputs.append(act)
            ends = position == last and stage.is_plain and not self._features
            if ends and stage.m == self.network.out_features:
                return functional.linear(act[0], matrix[0], bias), inputs
            act = self._multiply(matrix, act)
        y = self._leave(act, tokens)
        return (y if bias is None else y + bias), inputs

    def inputs_of(self, x: Tensor) -> list[Tensor]:
        """What goes into every stage."""
        act = self._enter(x)
        inputs = []
        for position, stage in enumerate(self.stages):
            act = self._arranged(act, stage, x.shape[0])
            inputs.append(act)
            if position < len(self.stages) - 1:
                act = self._multiply(self.matrices[position], act)
        return inputs

    def gradients_of(self, dy: Tensor) -> Iterator[Tensor]:
        """The gradient of what every stage gives, the last stage's first, then that of x.

        Args:
            dy: (tokens, out_features).
        """
        tokens = dy.shape[0]
        act = self._leave_back(dy)
        for position in reversed(range(len(self.stages))):
            yield act
            act = self._multiply(self.matrices[position].transpose(1, 2), act)
            act = self._arranged_back(act, position, tokens)
        yield self._enter_back(act, tokens)

    def weight_gradient(self, du: Tensor, act: Tensor) -> Tensor:
        """The gradient of a stage's matrix, (b, m, k), from that of its result and its input."""
        left, right = (du, act.mT) if self._features else (du.mT, act)
        if left.shape[0] == 1:
            return torch.mm(left[0], right[0]).unsqueeze(0)
        return torch.bmm(left, right)

    def add_weight_gradient(self, total: Tensor, du: Tensor, act: Tensor) -> None:
        """Add a chunk's `weight_gradient` to a sum."""
        if total.dtype in _HALF or total.dtype != du.dtype:
            total.add_(self.weight_gradient(du, act))
        elif self._features:
            total.baddbmm_(du, act.transpose(1, 2))
        else:
            total.baddbmm_(du.transpose(1, 2), act)

    def entered(self, x: Tensor) -> Tensor:
        """What goes into the first stage."""
        return self._arranged(self._enter(x), self.stages[0], x.shape[0])

    def _multiply(self, matrix: Tensor, act: Tensor) -> Tensor:
        left, right = (matrix, act) if self._features else (act, matrix.mT)
        # A product of matrices is faster than a batch of one.
        if left.shape[0] == 1:
            return torch.mm(left[0], right[0]).unsqueeze(0)
        return torch.bmm(left, right)

    def _enter(self, x: Tensor) -> Tensor:
        """Give x as (in, t) or (t, in), padded where the first stage has columns for that."""
        wanted = self.stages[0].width
        if x.shape[1] < wanted:
            x = functional.pad(x, (0, wanted - x.shape[1]))
        return x.t().contiguous() if self._features else x

    def _enter_back(self, act: Tensor, tokens: int) -> Tensor:
        width = self.stages[0].width
        dx = act.reshape(width, tokens).t() if self._features else act.reshape(tokens, width)
        return dx[:, : self.network.in_features]

    def _sizes(self, letters: str) -> list[int]:
        return [self.network.size(letter) for letter in letters]

    def _arranged(self, act: Tensor, stage: Stage, tokens: int) -> Tensor:
        """What the stage before gives as what this one takes."""
        if self._features:
            wanted = stage.batch + stage.contracted + stage.free
            if wanted != stage.before:
                act = act.reshape(*self._sizes(stage.before), tokens)
                places = [stage.before.index(letter) for letter in wanted]
                act = act.permute(*places, len(places))
            return _ready(act.reshape(stage.b, stage.k, stage.f * tokens))
        given, wanted = self._with_tokens(stage)
        if given == wanted:
            return act.reshape(stage.b, tokens * stage.f, stage.k)
        act = act.reshape(
            [tokens if letter == "." else self.network.size(letter) for letter in given]
        )
        act = act.permute([given.index(letter) for letter in wanted])
        return _ready(act.reshape(stage.b, tokens * stage.f, stage.k))

    def _with_tokens(self, stage: Stage) -> tuple[str, str]:
        """Token-major orders of indices before and in a stage; a dot stands for the tokens."""
        place = self.stages.index(stage)
        batch = self.stages[place - 1].batch if place else ""
        given = batch + "." + stage.before[len(batch) :]
        return given, stage.batch + "." + stage.free + stage.contracted

    def _arranged_back(self, act: Tensor, position: int, tokens: int) -> Tensor:
        """The gradient of what a stage takes as that of what the one before gives."""
        stage = self.stages[position]
        before = self.stages[position - 1] if position else None
        if self._features:
            wanted = stage.batch + stage.contracted + stage.free
            if wanted != stage.before:
                act = act.reshape(*self._sizes(wanted), tokens)
                places = [wanted.index(letter) for letter in stage.before]
                act = act.permute(*places, len(places))
            if before is None:
                return act
            return _ready(act.reshape(before.b, before.m, before.f * tokens))
        given, wanted = self._with_tokens(stage)
        if given != wanted:
            sizes = [tokens if letter == "." else self.network.size(letter) for letter in wanted]
            act = act.reshape(sizes).permute([wanted.index(letter) for letter in given])
        if before is None:
            return act
        return _ready(act.reshape(before.b, tokens * before.f, before.m))

    def _leave(self, act: Tensor, tokens: int) -> Tensor:
        """What the last stage gives as (tokens, out_features)."""
        stage, outputs, after = self.stages[-1], self.network.outputs, self.lowered.after
        if stage.is_plain and stage.new == outputs:
            y = act[0].t() if self._features else act[0]
        elif self._features:
            act = act.reshape(*self._sizes(after), tokens)
            places = [after.index(letter) for letter in outputs]
            y = act.permute(*places, len(places)).reshape(stage.out_width, tokens).t()
        else:
            given = stage.batch + "." + after[len(stage.batch) :]
            sizes = [tokens if letter == "." else self.network.size(letter) for letter in given]
            wanted = "." + outputs
            y = act.reshape(sizes).permute([given.index(letter) for letter in wanted])
            y = y.reshape(tokens, stage.out_width)
        return y[:, : self.network.out_features]

    def _leave_back(self, dy: Tensor) -> Tensor:
        """The gradient of y as that of what the last stage gives."""
        stage, outputs, after = self.stages[-1], self.network.outputs, self.lowered.after
        tokens = dy.shape[0]
        if stage.is_plain and stage.new == outputs:
            return dy.t().unsqueeze(0) if self._features else dy.unsqueeze(0)
        if dy.shape[1] < self.network.size(outputs):
            dy = functional.pad(dy, (0, self.network.size(outputs) - dy.shape[1]))
        if self._features:
            act = dy.t().contiguous().reshape(*self._sizes(outputs), tokens)
            places = [outputs.index(letter) for letter in after]
            act = act.permute(*places, len(places))
            return _ready(act.reshape(stage.b, stage.m, stage.f * tokens))
        given = stage.batch + "." + after[len(stage.batch) :]
        wanted = "." + outputs
        act = dy.reshape(tokens, *self._sizes(outputs))
        act = act.permute([wanted.index(letter) for letter in given])
        return _ready(act.reshape(stage.b, tokens * stage.f, stage.m))


def _ready(act: Tensor) -> Tensor:
    """Copy what no batched product takes as it lies: it would copy it itself, slice by slice."""
    return act if 1 in (act.stride(1), act.stride(2)) else act.contiguous()


def apply(path: Path, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """Go forward; not differentiable.

    Args:
        path: The way.
        x: (tokens, in_features).
        bias: (out_features,).

    Returns:
        y: (tokens, out_features), and what went into every stage unless the tokens went in chunks.
    """
    chunk, tokens = path.route.chunk, x.shape[0]
    if not 0 < chunk < tokens:
        y, inputs = path.through(x, bias)
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
        The gradient of x, (tokens, in_features), or None, and those of the wanted cores.
    """
    tokens, chunk = x.shape[0], path.route.chunk or x.shape[0]
    stages = path.stages
    asked = [any(core in wanted for core in stage.cores) for stage in stages]
    first = asked.index(True) if any(asked) else len(stages)
    whole = chunk >= tokens
    dx = x.new_empty(x.shape) if want_x and not whole else None
    totals: dict[int, Tensor] = {}
    for begin in range(0, tokens, max(chunk, 1)) if tokens else (0,):
        part = slice(begin, begin + chunk)
        acts = list(inputs) or (path.inputs_of(x[part]) if any(asked) else [])
        gradients = path.gradients_of(dy[part])
        for position in reversed(range(len(stages))):
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
    found = {}
    for position, total in totals.items():
        stage = stages[position]
        for core in stage.cores:
            if core in wanted:
                gradient = unmerge(path.network, stage, cores, total, core)
                found[core] = gradient.to(cores[core].dtype)
    return dx, found
