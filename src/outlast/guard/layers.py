"""Embeddings and norms: layers whose rows are checked one by one, forward and backward.

Embeddings are checked by gathering rows a second time and by sums of gradient rows. Forward,
every output must have the bits of its row of the table. Backward, with random signs u over
features, each row w of the table that n_w tokens use obeys::

    sum_j u_j dW_wj = sum over its tokens of sum_j u_j dY_tj

and all other rows are zero. Roundings: the first addition to zero is exact, so a row used once is
its dY; the t-th partial sum of a row is rounded, t = 2 .. n_w, in the table's type. With
S_t = (t / n) y + bridge as in `threshold`, ``sum_t S_t^2 = y^2 (n + 1)(2 n + 1) / 6 n +
sum_t p_t^2 (n^2 - 1) / 6 n``, less the first.

Outputs are compared bit for bit with a second gather rather than by hashes of rows: that reads the
same memory and has no collisions.

Layer norms and root-mean-square norms are checked by their closed forms.
With x_hat = (x - mean) r, r = (var + eps)^-1/2 (mean = 0 and var = mean of x^2 for RMSNorm), gain
g, random signs v and D features, each row obeys::

    sum_j v_j y_j  = r sum_j v_j g_j (x_j - mean) + sum_j v_j b_j
    sum_j v_j dx_j = r (sum_j v_j g_j dy_j - m1 sum_j v_j - m2 sum_j v_j x_hat_j)
    m1 = mean of g dy (0 for RMSNorm),  m2 = mean of g dy x_hat

Without signs the second is the known ``sum dx = 0``, and weighted by x_hat it is
``sum dx x_hat = eps r^3 sum g dy x_hat``; with signs it also sees errors along these directions, a
wrong r for one. The gradients of gain and bias are summed a second time, feature by feature.

Roundings, beside those of `threshold`: the statistics have a relative error common to a row, and
where the mean is t standard deviations, every (x - mean) r is off by t roundings of its own. Below
the smallest normal number of the type that keeps the mean, roundings no longer shrink with it, so
it counts as that large. Rows that are alike round alike, and their errors add up in dg. What
autograd makes of an RMSNorm without a kernel of its own contains r^3, whose own rounding grows as
it leaves the normal numbers, until nothing is left of it.

On the CPU norms are computed twice instead, and compared bit for bit.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn import functional

from outlast.guard.autograd_hooks import (
    Seen,
    corrected,
    corrected_output,
    floor_of,
    judge_only,
    powers_squared,
    repeated_gradients,
    repeated_output,
    same_bits,
    stagnation,
    watched,
)
from outlast.guard.forward_patch import ForwardPatch
from outlast.guard.replica_hashes import hash64
from outlast.guard.residual import (
    ResidualTest,
    accumulating,
    bits,
    equality_test,
    is_half,
    name_of,
    residual_test,
    summing,
)
from outlast.guard.threshold import Rounding, product_bound, unit_roundoff
from outlast.guard.watch import computing
from outlast.state.sharded import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from outlast.guard.autograd_hooks import Gradients
    from outlast.guard.watch import Watch

Kind = Literal["layer", "rms", "rms_like"]
_COMMON = 4.0
"""Roundings that all elements of a row share: of its mean, of its variance, of r."""
_TURNED = 12.0
"""Times t^2 / D: squared relative error of r, in roundings, where a mean is not small."""
_SERIAL = 128
"""Sums of D terms are made of at least D / this many at a time in vectors or threads."""


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
    """Replaces the ``forward`` of one `nn.Embedding`.

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
            or is_dtensor(weight)
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
            rows, expected = given.reshape(-1, given.shape[-1]), table.index_select(0, flat)
            differs = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
            if rows.device.type != "cpu" or not same_bits(rows, expected):
                differs = (bits(rows) != bits(expected)).any(dim=1)
            return equality_test(differs, torch.zeros_like(differs))

        corrected_output(self.watch, self.forward_site, y, again, check)
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
        return tuple(corrected(self.watch, self.dw_site, given, again, check, beyond=beyond))

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
        dots = (dy.to(dtype) @ u).double()
        squares = torch.linalg.vector_norm(dy, dim=1, dtype=dtype).double().square()
        used = torch.ones_like(dots)
        if self.module.padding_idx is not None:
            used = (ids != self.module.padding_idx).double()
        sums = torch.zeros((rows, 4), dtype=torch.float64, device=dy.device)
        parts = torch.stack([dots, squares, used, dots.square()], dim=1)
        sums.index_add_(0, ids, parts * used[:, None])
        # Rows that no token uses are zero, all of them as one more check.
        idle = gradient.any(dim=1) & (sums[:, 2] == 0)
        # Those that tokens use, where these are fewer.
        made = gradient
        if len(ids) < rows:
            made, sums = gradient.index_select(0, ids), sums.index_select(0, ids)
        expected, terms, count, alike = sums.unbind(dim=1)
        found = made.to(dtype)
        power = powers_squared(made, dtype).sum(dim=1).double()
        square = torch.linalg.vecdot(found, found).double()
        signed = (found @ u).double()
        n = count.clamp(min=1.0)
        stored = unit_roundoff(name_of(gradient.dtype)) ** 2 / 3.0
        own = unit_roundoff(name_of(dtype)) ** 2 / 3.0 * 4.0 * (32.0 + features / 64.0)
        # Partial sums without the first, which is exact, and the last, whose powers are known.
        drift = (n + 1.0) * (2.0 * n + 1.0) / (6.0 * n) - 1.0 / n.square() - 1.0
        walk = (n.square() - 1.0) / (6.0 * n) - (n - 1.0) / n.square()
        several = (n > 1.0).double()
        # Features whose gradients are alike are rounded alike: then the signed sums themselves
        # are what is rounded, and signs do not cancel the errors.
        value = signed.square()
        variance = several * stored * (power + drift.clamp(min=0.0) * (square + value))
        variance = variance + several * stored * walk.clamp(min=0.0) * (terms + alike)
        if is_half(gradient.dtype) and gradient.device.type == "cpu":
            unit = unit_roundoff(name_of(gradient.dtype))
            variance = variance + several * stagnation(n, unit, terms)
        variance = variance + own * (power + terms) + floor_of(features, gradient.dtype, dtype)
        difference = signed - expected
        # Finite: infinities are taken for the data's own.
        stray = torch.where(idle.any(), 1e30, 0.0).double()[None]
        return residual_test(
            torch.cat([difference, stray]),
            torch.cat([variance, torch.ones_like(stray)]),
            torch.cat([power, torch.zeros_like(stray)]),
        )


def norm_kind(module: nn.Module) -> Kind | None:
    """Kind of a module's forward: LayerNorm, RMSNorm, or a class that looks like RMSNorm.

    None for other modules and for norms over more than the last dimension.
    """
    forward = type(module).forward
    if forward is nn.LayerNorm.forward or forward is nn.RMSNorm.forward:
        if len(module.normalized_shape) != 1:  # type: ignore[arg-type]
            return None
        return "layer" if isinstance(module, nn.LayerNorm) else "rms"
    parameters = dict(module.named_parameters())
    alike = (
        type(module).__name__.endswith("RMSNorm")
        and list(parameters) == ["weight"]
        and parameters["weight"].dim() == 1
        and _eps_like(module) is not None
    )
    return "rms_like" if alike else None


def _eps_like(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


@dataclass(frozen=True)
class _Row:
    """Statistics of rows: x - mean as (rows, D), r and t = |mean| r as (rows,)."""

    centred: Tensor
    r: Tensor
    t: Tensor


class NormChecks(ForwardPatch):
    """Replaces the ``forward`` of one normalisation layer.

    Args:
        watch: What all checks of the guard share.
        module: A layer with a `norm_kind`.
        name: Its name in the model.
    """

    def __init__(self, watch: Watch, module: nn.Module, name: str) -> None:
        super().__init__(watch, module, name)
        self.forward_site = watch.ledger.site(name, "norm.forward")
        self.dx_site = watch.ledger.site(name, "norm.dx")
        self.dw_site = watch.ledger.site(name, "norm.dw")
        self._kind = norm_kind(module)
        # What is added to the weight to give the gain; None before it is known.
        self._shift: float | None = None if self._kind == "rms_like" else 0.0
        self._known = True

    def __deepcopy__(self, memo: dict[int, Any]) -> NormChecks:
        """As `ForwardPatch`, for a copy that has no settings yet."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.module = memo.get(id(self.module), self.module)
        return twin

    def _own(self, x: Tensor) -> Tensor:
        output: Tensor = type(self.module).forward(self.module, x)
        return output

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output for x (..., D)."""
        if torch.compiler.is_compiling() or not self._applies(x):
            output: Tensor = self._own(x)
            return output
        weight, bias = self._parameters()
        inputs = (x, weight, bias)
        # Whose forward is written in torch operations may use x more than once.
        separate = self._kind != "layer" and not is_half(x.dtype)
        used: list[Tensor] = []
        y = watched(self._compute, inputs, inputs, partial(self._backward, used), separate=separate)
        self.watch.touch("norm.output", self.name, y.data)
        flat_x, again = _rows(x), partial(self._again, x.detach())
        if self.watch.repeats_on(y.device):
            repeated_output(self.watch, self.forward_site, y, again)
        else:
            corrected_output(
                self.watch,
                self.forward_site,
                y,
                again,
                lambda given: self._judge_forward(flat_x, _rows(given)),
            )
        if y.device.type == "cpu" and y.requires_grad:
            # Elsewhere nothing is computed again at once.
            used.append(self.watch.timed(hash64, [y]))
        return y

    def _applies(self, x: Tensor) -> bool:
        weight, bias = self._parameters()
        if not self.trains(x, weight, bias) or not self._known:
            return False
        if x.numel() == 0 or is_dtensor(x):
            return False
        if is_dtensor(weight) or is_dtensor(bias):
            return False
        if weight is not None and x.shape[-1] != weight.shape[0]:
            return False
        if self._shift is None:
            self._recognise(x)
        return self._known

    def _parameters(self) -> tuple[Tensor | None, Tensor | None]:
        return getattr(self.module, "weight", None), getattr(self.module, "bias", None)

    def _compute(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The module's own forward, which finds these tensors in place of its parameters."""
        module = self.module
        shadows = {
            name: given
            for name, given in (("weight", weight), ("bias", bias))
            if given is not None and given is not getattr(module, name)
        }
        # What stands in an object's own dict is found before the module's parameters.
        module.__dict__.update(shadows)
        try:
            output: Tensor = self._own(x)
        finally:
            for name in shadows:
                del module.__dict__[name]
        return output

    def _again(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y: Tensor = self._own(x)
        self.watch.touch("norm.output", self.name, y)
        return y

    @computing("check")
    def _recognise(self, x: Tensor) -> None:
        """Find which formula a class that looks like RMSNorm has, by its output for random rows."""
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn((8, x.shape[-1]), generator=generator, dtype=torch.float32, device="cpu")
        rows = (rows * torch.logspace(-3, 1, 8, dtype=torch.float32, device="cpu")[:, None]).to(
            x.device, x.dtype
        )
        with torch.no_grad():
            y = self._own(rows)
        for shift in (0.0, 1.0):
            self._shift = shift
            with torch.autocast(x.device.type, enabled=False):
                if y.shape == rows.shape and not int(self._judge_forward(rows, y).exceeded):
                    return
        self._known = False
        warnings.warn(
            f"{self.name} ({type(self.module).__name__}) is not guarded: its output is neither "
            "x r weight nor x r (1 + weight) with r = (mean x^2 + eps)^-1/2",
            stacklevel=5,
        )

    def _gain(self, features: int, like: Tensor) -> Tensor:
        weight, _ = self._parameters()
        if weight is None:
            return torch.ones(features, dtype=like.dtype, device=like.device)
        return weight.detach().to(like.dtype) + (self._shift or 0.0)

    def _statistics(self, x: Tensor, dtype: torch.dtype) -> _Row:
        wide = x.detach().to(dtype)
        eps = self._eps(x)
        least = 0.0
        if self._kind == "layer":
            mean = wide.mean(dim=1)
            wide = wide - mean[:, None]
            least = torch.finfo(self._kept_type(x)).smallest_normal
        else:
            mean = torch.zeros(len(x), dtype=dtype, device=x.device)
        r = (torch.linalg.vecdot(wide, wide) / x.shape[1] + eps).rsqrt()
        return _Row(wide, r, (mean.abs() + least) * r)

    def _eps(self, x: Tensor) -> float:
        eps = getattr(self.module, "eps", None) if self._kind != "rms_like" else None
        eps = eps if eps is not None else _eps_like(self.module)
        if eps is None:
            return torch.finfo(accumulating(x)).eps
        return float(eps)

    def _inner(self, x: Tensor) -> float:
        """Unit roundoff of 16-bit numbers on the way, in classes that round x_hat to x's type."""
        rounds = is_half(x.dtype) and self._kind == "rms_like" and self._shift == 0.0
        return unit_roundoff(name_of(x.dtype)) if rounds else 0.0

    def _kept_type(self, x: Tensor) -> torch.dtype:
        """Type of mean and r as the backward pass reads them."""
        weight, _ = self._parameters()
        # The CPU keeps them in the type of the data, unless the weight has another.
        if self._halves_on_cpu(x) and (weight is None or weight.dtype == x.dtype):
            return x.dtype
        return accumulating(x)

    def _kept_statistics(self, x: Tensor) -> float:
        return unit_roundoff(name_of(self._kept_type(x)))

    def _halves_on_cpu(self, x: Tensor) -> bool:
        return self._kind == "layer" and is_half(x.dtype) and x.device.type == "cpu"

    def _judge_forward(self, x: Tensor, y: Tensor) -> ResidualTest:
        features = x.shape[1]
        dtype = summing(x, y)
        row = self._statistics(x, dtype)
        v = self.watch.signs.take("output", features, x.device).to(dtype)
        gain = self._gain(features, row.r)
        signed = v * gain
        _, bias = self._parameters()
        offset = 0.0 if bias is None else bias.detach().to(dtype) @ v
        product = row.r * (row.centred @ signed)
        difference = y.to(dtype) @ v - product - offset
        powers = powers_squared(y, dtype).sum(dim=1)
        squares = row.r.square() * (row.centred.square() @ gain.square())
        gains, shared = gain.square().sum(), signed.sum().square()
        unit = unit_roundoff(_accumulated(x)) ** 2 / 3.0
        own = unit_roundoff(name_of(dtype)) ** 2 / 3.0 * (32.0 + features / 64.0)
        stored = unit_roundoff(name_of(y.dtype))
        common = _COMMON + _TURNED / features * row.t.square()
        variance = (
            stored**2 / 3.0 * powers
            + unit * (common * product.square() + 2.0 * squares)
            + unit * row.t.square() * (_COMMON * shared + gains)
            + self._inner(x) ** 2 / 3.0 * squares
            + own * 4.0 * (powers + squares + row.t.square() * gains)
            + floor_of(features, y.dtype, dtype)
        )
        return residual_test(difference, variance, powers)

    def _backward(self, used: list[Tensor], seen: Seen) -> Gradients:
        """Check what goes back, through the layer whose output has had the hash in `used`."""
        if self.watch.repeats_on(seen.dy.device) and seen.exact:
            digest = used[0] if used else None
            checks = [(self.dx_site, (0,)), (self.dw_site, (1, 2))]
            return repeated_gradients(self.watch, seen, digest, self.forward_site, checks)

        def changed() -> bool:
            # From an X or a weight that is another now, nothing right can be computed again.
            return bool(used) and bool(hash64([seen.again(seen.kept)[0]]) != used[0])

        check_gradients = corrected if seen.replaceable else judge_only
        x, weight, _ = seen.kept
        dx, dw, db = seen.gradients
        flat_x, flat_dy = _rows(x), _rows(seen.dy)
        dtype = summing(x, seen.dy, weight)
        row = self._statistics(flat_x, dtype)
        normal = row.centred * row.r[:, None]
        dy = flat_dy.to(dtype)
        products = dy * normal
        if dx is not None:
            check = _DxCheck(self, flat_x, row, (dy, normal, products))
            (dx,) = check_gradients(
                self.watch,
                self.dx_site,
                self._touched("norm.dx", [dx]),
                lambda: self._touched("norm.dx", seen.again(seen.kept)[1][:1]),
                lambda given: check.judge(_rows(given[0])),
                changed=changed,
            )
        pair = [item for item in (dw, db) if item is not None]
        if pair:
            pair = self._touched("norm.dw", pair)
            right = check_gradients(
                self.watch,
                self.dw_site,
                pair,
                lambda: self._touched("norm.dw", seen.again(seen.kept)[1][1:]),
                partial(self._judge_dw, flat_x, row, (dy, products), dw is not None),
                changed=changed,
            )
            dw = right[0] if dw is not None else None
            db = right[-1] if db is not None else None
        return dx, dw, db

    def _touched(self, site: str, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        touched = self.watch.touched
        return [
            touched(site, self.name, gradient) for gradient in gradients if gradient is not None
        ]

    def _judge_dw(
        self,
        x: Tensor,
        row: _Row,
        sums: tuple[Tensor, Tensor],
        has_weight: bool,
        given: Sequence[Tensor],
    ) -> ResidualTest:
        dy, products = sums
        inner = self._inner(x)
        half = name_of(x.dtype) if inner else ""
        # On the CPU, LayerNorm adds up rows in the type of the data.
        accumulated = name_of(x.dtype) if self._halves_on_cpu(x) else _accumulated(x)
        lost = floor_of(len(dy), x.dtype, dy.dtype)
        differences, variances, scales = [], [], []
        for index, gradient in enumerate(given):
            of_weight = has_weight and index == 0
            terms = products if of_weight else dy
            squares = terms.square().sum(dim=0)
            powers = powers_squared(gradient, terms.dtype)
            expected = terms.sum(dim=0)
            rounding = Rounding(name_of(gradient.dtype), accumulated, half, name_of(terms.dtype))
            variance = product_bound(rounding, len(terms), 1).variance(powers, squares) + lost
            unit = unit_roundoff(accumulated) ** 2 / 3.0
            # A term has been rounded as x - mean, as x_hat and as their product with dY.
            variance = variance + unit * (_partial_sums(terms) + 3.0 * squares)
            if self._halves_on_cpu(x):
                lost_terms = stagnation(len(terms), unit_roundoff(accumulated), squares)
                variance = variance + lost_terms
            if of_weight:
                kept = self._kept_statistics(x) ** 2 / 3.0
                t = row.t.square()
                common = _COMMON + _TURNED / x.shape[1] * t
                by_row = kept * common, kept * _COMMON * t
                variance = variance + by_row[0] @ terms.square() + by_row[1] @ dy.square()
                # Rows that are alike round alike.
                shared = common.sqrt() @ terms, row.t @ dy
                variance = variance + kept * (shared[0].square() + _COMMON * shared[1].square())
                variance = variance + inner**2 / 3.0 * expected.square()
            differences.append(gradient.to(terms.dtype) - expected)
            variances.append(variance)
            scales.append(powers)
        return residual_test(torch.cat(differences), torch.cat(variances), torch.cat(scales))


class _DxCheck:
    """The check of dx, with what it needs computed once."""

    def __init__(
        self, layer: NormChecks, x: Tensor, row: _Row, matrices: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        dy, normal, products = matrices
        features, dtype = x.shape[1], dy.dtype
        self._u = layer.watch.signs.take("input", features, x.device).to(dtype)
        gain = layer._gain(features, row.r)
        total = self._u.sum()
        along = normal @ self._u
        direct = dy @ (gain * self._u)
        m2 = (products @ gain) / features
        m1 = (dy @ gain) / features if layer._kind == "layer" else torch.zeros_like(m2)
        self._expected = row.r * (direct - m1 * total - m2 * along)
        t = row.t.square()
        gains = gain.square()
        squares = dy.square() @ gains
        # What roundings of the single terms of m1 and m2 add up to, and those of their sums.
        walk = 1.0 + features / (6.0 * 8.0)
        drift = _COMMON + features / _SERIAL
        turned = (products.square() @ gains + t * squares) * walk / features**2
        shifted = squares * walk / features**2
        along, total = along.square(), total.square()
        r = _COMMON + _TURNED / features * t
        # r enters the last term three times, so with nine times the variance.
        common = r * (direct.square() + m1.square() * total + 9.0 * m2.square() * along)
        if layer._kind != "layer":
            # The spacing of r^3 below the normal numbers, as a share of it; in roundings.
            types = accumulating(x)
            cubed = row.r**3
            vanished = torch.finfo(types).smallest_normal / cubed.clamp(min=1e-300)
            vanished = vanished.clamp(max=1.0 / unit_roundoff(name_of(types)))
            common = common + torch.where(vanished > 0.5, vanished.square(), 0.0) * (
                m2.square() * along
            )
        common = common + drift * t * (m1.square() * along + m2.square() * total)
        single = squares + m2.square() * features * (1.0 + t) + m1.square() * features
        accumulated = unit_roundoff(_accumulated(x)) ** 2 / 3.0
        kept = layer._kept_statistics(x) ** 2 / 3.0
        inner = layer._inner(x) ** 2 / 3.0
        own = unit_roundoff(name_of(dtype)) ** 2 / 3.0 * (32.0 + features / 64.0)
        moved = turned * along + shifted * total
        self._fixed = (
            kept * common
            + accumulated * (2.0 * single + moved)
            + inner * (2.0 * squares + moved)
            + own * 4.0 * (single + moved)
            + floor_of(features, x.dtype, dtype)
        ) * row.r.square()

    def judge(self, dx: Tensor) -> ResidualTest:
        """Judge dx (rows, D)."""
        dtype = self._u.dtype
        powers = powers_squared(dx, dtype).sum(dim=1)
        stored = unit_roundoff(name_of(dx.dtype))
        floor = floor_of(dx.shape[1], dx.dtype, dtype)
        difference = dx.to(dtype) @ self._u - self._expected
        return residual_test(difference, self._fixed + stored**2 / 3.0 * powers + floor, powers)


def _partial_sums(terms: Tensor) -> Tensor:
    """Sum of squares of all partial sums of terms (rows, D), twice, from every 32nd part's.

    Tokens of one sequence are no exchangeable order: where all of them sum to zero, as behind keys
    of attention, their first half need not; and few terms of unlike size keep all partial sums as
    large as the largest. Twice, since threads begin in the middle.
    """
    parts = torch.stack([part.sum(dim=0) for part in terms.tensor_split(32)])
    return parts.cumsum(dim=0).square().sum(dim=0) * (2.0 * len(terms) / 32.0)


def _rows(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1])


def _accumulated(x: Tensor) -> str:
    return name_of(accumulating(x))
