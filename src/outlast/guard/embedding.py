"""Embeddings, checked by gathering rows a second time and by sums of gradient rows.

Forward, every output must have the bits of its row of the table. Backward, with random signs u over
features, each row w of the table that n_w tokens use obeys::

    sum_j u_j dW_wj = sum over its tokens of sum_j u_j dY_tj

and all other rows are zero. Roundings: the first addition to zero is exact, so a row used once is
its dY; the t-th partial sum of a row is rounded, t = 2 .. n_w, in the table's type. With
S_t = (t / n) y + bridge as in `threshold`, ``sum_t S_t^2 = y^2 (n + 1)(2 n + 1) / 6 n +
sum_t p_t^2 (n^2 - 1) / 6 n``, less the first.

Outputs are compared bit for bit with a second gather rather than by hashes of rows: that reads the
same memory and has no collisions.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from outlast.guard.autograd_hooks import (
    Seen,
    floor_of,
    powers_squared,
    put_output_right,
    put_right,
    stagnation,
    summing,
    watched,
)
from outlast.guard.forward_patch import ForwardPatch
from outlast.guard.residual import (
    ResidualTest,
    bits,
    equality_test,
    is_half,
    name_of,
    residual_test,
)
from outlast.guard.threshold import unit_roundoff

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from outlast.guard.autograd_hooks import Gradients
    from outlast.guard.watch import Watch


def why_no_embedding(module: nn.Module) -> str:
    """Why an embedding cannot be checked, in a few words; empty where it can."""
    if type(module).forward is not nn.Embedding.forward:
        return "no check for this kind of module"
    assert isinstance(module, nn.Embedding)
    for setting in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, setting) not in (None, False):
            return f"{setting} is set"
    return ""


class EmbeddingChecks(ForwardPatch):
    """Stands in for the ``forward`` of one `nn.Embedding`.

    Args:
        watch: What all checks of the guard share.
        module: The layer; see `why_no_embedding`.
        name: Its name in the model.
    """

    module: nn.Embedding

    def __init__(self, watch: Watch, module: nn.Embedding, name: str) -> None:
        super().__init__(watch, module, name)
        self.forward_site = watch.ledger.site(name, "embedding.forward")
        self.dw_site = watch.ledger.site(name, "embedding.dw")

    def forward(self, ids: Tensor) -> Tensor:
        """The rows (..., features) of ids (...)."""
        weight = self.module.weight
        unchecked = (
            torch.compiler.is_compiling()
            or not self.trains(weight)
            or ids.numel() == 0
            or isinstance(weight, DTensor)
        )
        if unchecked:
            return self._gather(weight, ids)
        y = watched(partial(self._gather, ids=ids), (weight,), (ids,), self._backward)
        self.watch.touch("embedding.output", self.name, y.data)
        flat, table = ids.reshape(-1), weight.detach()

        def again() -> Tensor:
            rows = functional.embedding(ids, table)
            return self.watch.touched("embedding.output", self.name, rows)

        def check(given: Tensor) -> ResidualTest:
            rows = bits(given.reshape(-1, given.shape[-1]))
            differs = (rows != bits(table.index_select(0, flat))).any(dim=1)
            return equality_test(differs, torch.zeros_like(differs))

        put_output_right(self.watch, self.forward_site, y, again, check)
        return y

    def _gather(self, weight: Tensor, ids: Tensor) -> Tensor:
        return functional.embedding(ids, weight, self.module.padding_idx)

    def _backward(self, seen: Seen) -> Gradients:
        (ids,) = seen.kept
        gradient = seen.gradients[0]
        if gradient is None:
            return seen.gradients
        dy, flat = seen.dy.reshape(-1, seen.dy.shape[-1]), ids.reshape(-1)

        def again() -> list[Tensor]:
            # The values of the table do not matter to its gradient.
            table = torch.empty_like(gradient).requires_grad_()
            with torch.enable_grad():
                y = self._gather(table, ids)
                (fresh,) = torch.autograd.grad(y, table, seen.dy)
            return [self.watch.touched("embedding.dw", self.name, fresh)]

        given = [self.watch.touched("embedding.dw", self.name, gradient)]
        check = partial(self._judge_backward, flat, dy)
        beyond = partial(self._beyond_rounding, flat, dy)
        return tuple(put_right(self.watch, self.dw_site, given, again, check, beyond=beyond))

    def _beyond_rounding(self, ids: Tensor, dy: Tensor, given: Sequence[Tensor]) -> bool:
        """Return whether dW is further from its sums in float64 than rounding can ever be.

        Higham, Accuracy and Stability, 4.4: n additions are off by at most n u sum |dY|.
        """
        (gradient,) = given
        wide = dy.double()
        if self.module.padding_idx is not None:
            wide = wide * (ids != self.module.padding_idx)[:, None]
        zeros = torch.zeros(gradient.shape, dtype=torch.float64, device=dy.device)
        expected = zeros.index_add(0, ids, wide)
        sizes = zeros.index_add(0, ids, wide.abs())
        count = torch.bincount(ids, minlength=len(gradient))[:, None]
        unit = unit_roundoff(name_of(gradient.dtype))
        limit = (count + 1.0) * unit * sizes + torch.finfo(gradient.dtype).smallest_normal
        free = ~torch.isfinite(expected) | (sizes > torch.finfo(gradient.dtype).max)
        return not bool((((gradient.double() - expected).abs() <= limit) | free).all())

    def _judge_backward(self, ids: Tensor, dy: Tensor, given: Sequence[Tensor]) -> ResidualTest:
        (gradient,) = given
        rows, features = gradient.shape
        dtype = summing(gradient)
        u = self.watch.signs.take("input", features, dy.device).to(dtype)
        wide = dy.to(dtype)
        dots, squares = (wide @ u).double(), wide.square().sum(dim=1).double()
        used = torch.ones_like(dots)
        if self.module.padding_idx is not None:
            used = (ids != self.module.padding_idx).double()
        sums = torch.zeros((rows, 4), dtype=torch.float64, device=dy.device)
        parts = torch.stack([dots, squares, used, dots.square()], dim=1)
        sums.index_add_(0, ids, parts * used[:, None])
        expected, terms, count, alike = sums.index_select(0, ids).unbind(dim=1)
        own_rows = gradient.index_select(0, ids)
        found = own_rows.to(dtype)
        power = powers_squared(own_rows, dtype).sum(dim=1).double()
        square = found.square().sum(dim=1).double()
        n = count.clamp(min=1.0)
        stored = unit_roundoff(name_of(gradient.dtype)) ** 2 / 3.0
        own = unit_roundoff(name_of(dtype)) ** 2 / 3.0 * 4.0 * (32.0 + features / 64.0)
        # Partial sums without the first, which is exact, and the last, whose powers are known.
        drift = (n + 1.0) * (2.0 * n + 1.0) / (6.0 * n) - 1.0 / n.square() - 1.0
        walk = (n.square() - 1.0) / (6.0 * n) - (n - 1.0) / n.square()
        several = (n > 1.0).double()
        # Features whose gradients are alike are rounded alike: then the signed sums themselves
        # are what is rounded, and signs do not cancel the errors.
        value = (found @ u).double().square()
        variance = several * stored * (power + drift.clamp(min=0.0) * (square + value))
        variance = variance + several * stored * walk.clamp(min=0.0) * (terms + alike)
        if is_half(gradient.dtype) and gradient.device.type == "cpu":
            unit = unit_roundoff(name_of(gradient.dtype))
            variance = variance + several * stagnation(n, unit, terms)
        variance = variance + own * (power + terms) + floor_of(features, gradient.dtype, dtype)
        difference = (found @ u).double() - expected
        # Rows that no token uses are zero, all of them as one more check.
        idle = (gradient != 0).any(dim=1) & (sums[:, 2] == 0)
        # Finite: infinities are taken for the data's own.
        stray = torch.where(idle.any(), 1e30, 0.0).double()[None]
        return residual_test(
            torch.cat([difference, stray]),
            torch.cat([variance, torch.ones_like(stray)]),
            torch.cat([power, torch.zeros_like(stray)]),
        )
