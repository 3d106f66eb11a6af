"""Low rank plus sparse: two factors and a few entries at random places (SLTrain).

W = alpha / r B A + S, where the places of S are drawn once and stay (Han et al. 2024, arXiv
2406.02214). Training has the operations of a dense layer and some more, since the weight is built
for every product; what is saved is memory: parameters, gradients and optimizer state of
r (in + out) + density in out numbers, and no activation but x is kept. A few tokens at a time, as
in generating text, go through the factors and the entries themselves and are cheap.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from outlast.errors import TensorizeError
from outlast.tensorize.bottleneck import autocast_dtype
from outlast.tensorize.forms.low_rank import LowRankLinear
from outlast.tensorize.surroundings import has_values, no_autocast, transformed, without_autocast

# An entry that is gathered, multiplied and scattered takes about as long as this many operations
# of a matrix product.
_SCATTER = 400


class SparseLowRankLinear(LowRankLinear):
    """y = x (alpha / r B A + S)^T + b.

    The children ``down`` and ``up`` only hold the factors: they are never called, so hooks on them
    do not run and what takes their place must keep a `weight`.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        rank: Features between the factors.
        density: Share of the weight's entries that S has.
        alpha: Scales the factors' product by alpha / rank; None: not.
        bias: Whether there is a bias.
        device: Where the parameters lie.
        dtype: Theirs.

    Attributes:
        values: (entries,) of S.
        alpha: As given.
        scale: alpha / r with the rank as it is now, or 1.
        indices: (entries,) their places in the flattened weight, ascending; a buffer.
    """

    form: ClassVar[str] = "sltrain"
    indices: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        density: float = 0.03,
        *,
        alpha: float | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not 0.0 < density <= 1.0:
            raise TensorizeError(f"density = {density} must be above 0 and at most 1")
        self.density = density
        self.alpha = alpha
        self.entries = max(1, round(density * in_features * out_features))
        super().__init__(in_features, out_features, rank, bias=bias, device=device, dtype=dtype)
        self.values = nn.Parameter(torch.empty(self.entries, device=device, dtype=dtype))
        small = in_features * out_features < 2**31
        kind = torch.int32 if small else torch.int64
        self.register_buffer("indices", torch.empty(self.entries, device=device, dtype=kind))
        self.reset_parameters()

    @property
    def scale(self) -> float:
        """What the factors' product is multiplied by."""
        return 1.0 if self.alpha is None else self.alpha / self.network.size(self.network.bonds)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply; x: (..., in_features) -> (..., out_features).

        Raises:
            TensorizeError: A child is no linear layer any more: it would not be called.
        """
        self.check_children()
        dtype = autocast_dtype(x)
        if dtype is None:
            return self._multiply(x)
        with torch.autocast(x.device.type, enabled=False):
            return self._multiply(x.to(dtype))

    def _multiply(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        factors = self.down.weight, self.up.weight, self.values
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if torch.compiler.is_compiling() or transformed():
            weight = _dense(*factors, self.indices, self.scale)
            y = functional.linear(rows, weight.to(x.dtype), bias)
        else:
            y = _SparseLowRank.apply(  # type: ignore[no-untyped-call]
                rows, *factors, self.indices, bias, self.scale
            )
        return y.view(*x.shape[:-1], self.out_features)

    def to_dense(self) -> Tensor:
        """The weight, of shape (out_features, in_features); exact and differentiable."""
        self.check_children()
        factors = self.down.weight, self.up.weight, self.values
        with no_autocast(self.values.device):
            return _dense(*factors, self.indices, self.scale)

    @torch.no_grad()
    def reset_parameters(
        self, std: float | None = None, generator: torch.Generator | None = None
    ) -> None:
        """Draw factors, entries and their places anew.

        Args:
            std: Root mean square of the weight's entries, those of S being of this size, too; None:
                1 / sqrt(3 in_features), that of a new `nn.Linear`.
            generator: Where the numbers come from; None: torch's own.
        """
        if "indices" not in self._buffers:
            return
        std = 1 / math.sqrt(3 * self.in_features) if std is None else std
        share = self.entries / (self.in_features * self.out_features)
        super().reset_parameters(std * math.sqrt(1.0 - share) / self.scale, generator)
        self.values.normal_(0.0, std, generator=generator)
        if has_values(self.indices):
            size = self.in_features * self.out_features
            self.indices.copy_(_places(self.entries, size, self.indices.device, generator))

    def settings(self) -> dict[str, Any]:
        """The arguments that build such a layer, whose entries then are at other places."""
        return {**super().settings(), "density": self.density, "alpha": self.alpha}

    def extra_repr(self) -> str:
        """What `print` shows."""
        share = (self.network.parameters + self.entries) / (self.in_features * self.out_features)
        return (
            f"{self.in_features}, {self.out_features}, rank={self.rank}, density={self.density}, "
            f"bias={self.bias is not None}, {share:.1%} of the dense parameters"
        )


def _places(
    count: int, size: int, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """So many different numbers below `size`, ascending, all sets of them equally likely."""
    if 2 * count > size:
        chosen = torch.randperm(size, device=device, generator=generator)[:count]
        return chosen.sort().values
    # Without a permutation of all entries of a large weight.
    found = torch.empty(0, dtype=torch.int64, device=device)
    while found.numel() < count:
        more = torch.randint(size, (count,), device=device, generator=generator)
        found = torch.unique(torch.cat((found, more)))
    kept = torch.randperm(found.numel(), device=device, generator=generator)[:count]
    return found[kept].sort().values


def _dense(down: Tensor, up: Tensor, values: Tensor, indices: Tensor, scale: float) -> Tensor:
    """The weight; differentiable."""
    weight = up @ down if scale == 1.0 else (up * scale) @ down
    return weight.flatten().index_add(0, indices, values).view_as(weight)


def _is_split(tokens: int, down: Tensor, up: Tensor, values: Tensor) -> bool:
    """Whether so few tokens are cheaper without building the weight."""
    rank, out, into = down.shape[0], up.shape[0], down.shape[1]
    split = tokens * (rank * (out + into) + _SCATTER * values.shape[0])
    return split < out * into * (rank + tokens)


class _SparseLowRank(Function):
    """Keeps x, the factors and the entries; the weight is built again."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, down, up, values, indices, bias, scale = inputs
        ctx.save_for_backward(x, down, up, values, indices)
        ctx.scale, ctx.biased = scale, bias is not None
        if not _is_split(x.shape[0], down, up, values):
            weight = _dense(down, up, values, indices, scale).to(x.dtype)
            return functional.linear(x, weight, bias)
        down, up, values = down.to(x.dtype), up.to(x.dtype), values.to(x.dtype)
        row, column = _split_places(indices, down.shape[1])
        y = functional.linear(functional.linear(x, down).mul_(scale), up, bias)
        return y.index_add_(1, row, x.index_select(1, column).mul_(values))

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        x, down, up, values, indices = ctx.saved_tensors
        dbias = dy.sum(0) if ctx.biased and ctx.needs_input_grad[5] else None
        if torch.is_grad_enabled():
            found = _differentiable(dy, x, (down, up, values), indices, ctx)
        elif _is_split(x.shape[0], down, up, values):
            found = _split_gradients(dy, x, (down, up, values), indices, ctx.scale)
        else:
            found = _dense_gradients(dy, x, (down, up, values), indices, ctx)
        return (*found, None, dbias, None)


def _split_places(indices: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The rows and columns of places in a flattened weight."""
    row = torch.div(indices, columns, rounding_mode="floor")
    return row, indices - row * columns


Found = tuple[Tensor | None, ...]


def _split_gradients(
    dy: Tensor, x: Tensor, factors: tuple[Tensor, Tensor, Tensor], indices: Tensor, scale: float
) -> Found:
    """The gradients of x, both factors and the entries, for a few tokens."""
    down, up, values = (factor.to(x.dtype) for factor in factors)
    row, column = _split_places(indices, down.shape[1])
    dh = (dy @ up).mul_(scale)
    of_row = dy.index_select(1, row)
    dvalues = (of_row * x.index_select(1, column)).sum(0)
    dx = (dh @ down).index_add_(1, column, of_row * values)
    dup = (dy.t() @ functional.linear(x, down)).mul_(scale)
    ddown = dh.t() @ x
    kinds = (factor.dtype for factor in factors)
    given = zip((ddown, dup, dvalues), kinds, strict=True)
    return (dx, *(gradient.to(kind) for gradient, kind in given))


def _dense_gradients(
    dy: Tensor, x: Tensor, factors: tuple[Tensor, Tensor, Tensor], indices: Tensor, ctx: Any
) -> Found:
    """The gradients of x, both factors and the entries, by that of the weight."""
    down, up, values = factors
    need_x, *needs = ctx.needs_input_grad[:4]
    dx = ddown = dup = dvalues = None
    if need_x:
        dx = dy @ _dense(down, up, values, indices, ctx.scale).to(x.dtype)
    if any(needs):
        dweight = (dy.t() @ x).to(down.dtype)
        ddown = (up.t() @ dweight).mul_(ctx.scale) if needs[0] else None
        dup = (dweight @ down.t()).mul_(ctx.scale) if needs[1] else None
        dvalues = dweight.flatten().index_select(0, indices) if needs[2] else None
    return dx, ddown, dup, dvalues


def _differentiable(
    dy: Tensor, x: Tensor, factors: tuple[Tensor, Tensor, Tensor], indices: Tensor, ctx: Any
) -> Found:
    """The gradients of x, both factors and the entries, which have gradients themselves."""
    # Views, so that a factor which depends on x does not count twice.
    own = [tensor.view_as(tensor) for tensor in (x, *factors)]
    weight = _dense(own[1], own[2], own[3], indices, ctx.scale)
    y = functional.linear(own[0], weight.to(x.dtype))
    needs = ctx.needs_input_grad[:4]
    wanted = [tensor for tensor, need in zip(own, needs, strict=True) if need]
    found = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
    return tuple(next(found) if need else None for need in needs)
