"""Scaled dot-product attention on devices, checked by identities of softmax and products.

On the CPU `outlast.guard.operations` checks its products, fused or not.

With P = softmax(s Q K^T + mask), O = P V and, going back, dV = P^T dO, dS = P * (dO V^T - D),
D_i = sum_d dO_id O_id, dQ = s dS K and dK = s dS^T Q, each channel d of each head obeys::

    sum_j dV_jd = sum_i dO_id               rows of P sum to one (not with dropout)
    sum_j V_jd dV_jd = sum_i dO_id O_id     both are sum_ij P_ij dO_id V_jd
    sum_j dK_jd = 0                         rows of dS sum to zero
    sum_i Q_id dQ_id = sum_j K_jd dK_jd     both are s sum_ij dS_ij Q_id K_jd

Heads that share keys and values are summed. No identity needs P, which fused kernels never store.
They compute it again from Q, K and the forward pass's log-sum-exp, so that the first one also sees
a score that was wrong in one of the passes alone. In the forward pass every O_id must lie between
the smallest and the largest V_jd. O itself is hashed as it is handed on, and again going back.

A wrong O that was used cannot be corrected going back: it is ``detected``, and the step repeated.
Where an identity of dV or dK fails, the forward pass is computed again first, and only if it gives
the O that was used do gradients that are computed again count as right.

Roundings, beside those of `threshold` for outputs and sums: P and dS are rounded to the data's type
before they are multiplied. What that adds to a sum over j has variance u^2 / 3 times a sum of
P_ij^2 dO_id^2 (dS_ij^2 Q_id^2), and that is the expectation of ``sum_j dV_jd^2`` (``dK``) when rows
are independent; the mean over a head's channels stands against channels where they are not. D is
the same rounded O's, so each row of dS is off by ``sum_d dO_id (rounding of O_id)``, exactly known.
In fp32 a score s q.k has an error of a rounding of |s| |q_i| max_j |k_j|, and the log-sum-exp one
of log(keys), which all P of the row share that were normalised in the other pass. The CPU adds dV,
dK and dQ block by block in the data's type.
"""

from __future__ import annotations

import math
import threading
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from outlast.guard.autograd_hooks import (
    KeptOutput,
    Seen,
    corrected,
    corrected_output,
    floor_of,
    powers_squared,
    same_bits,
    stored,
    watched,
)
from outlast.guard.forward_patch import FunctionPatch
from outlast.guard.fused_attention import KEY_BLOCK, blockwise, query_block
from outlast.guard.product import rounding_of
from outlast.guard.replica_hashes import hash64
from outlast.guard.residual import ResidualTest, equality_test, name_of, residual_test, summing
from outlast.guard.threshold import DEVIATIONS, product_bound, unit_roundoff
from outlast.guard.watch import CALLING, computing
from outlast.state.sharded import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn

    from outlast.guard.autograd_hooks import Gradients
    from outlast.guard.watch import Watch

_REPLACED = FunctionPatch(functional, "scaled_dot_product_attention")
_MARGIN = 4.0
"""Times what rounding P or dS adds by the data's second moments: rows are not independent."""
_BIAS = 16.0
"""Squared error, in roundings, that all rows share: exp of vector units is off to one side."""

_QUERY, _KEY, _VALUE = range(3)
"""Places of the inputs, before that of the mask."""
_LOCAL = threading.local()


class AttentionChecks:
    """Checks all calls of ``torch.nn.functional.scaled_dot_product_attention`` in a process.

    Args:
        watch: What all checks of the guard share.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def replacing(self) -> AbstractContextManager[None]:
        """Put the check in place of the function for all callers, until the context ends.

        To be held as long as the guard is installed, also in backward passes: there activation
        checkpointing runs forward passes again, which must keep the same tensors as the first.
        """
        return _REPLACED.by(self)

    def prefer(self) -> None:
        """Of several that replace the function, be the one that is called."""
        _REPLACED.prefer(self)

    def follow(self, model: nn.Module) -> Callable[[], None]:
        """Name checks after the modules that call attention; returns what undoes that.

        These are the modules whose class has ``Attention`` in its name. Calls outside of them are
        checked under the name ``attention``.
        """
        hooks = []
        for name, module in model.named_modules():
            if "Attention" in type(module).__name__:
                hooks.append(module.register_forward_pre_hook(partial(self._enter, name)))
                hooks.append(module.register_forward_hook(self._leave, always_call=True))

        def undo() -> None:
            for hook in hooks:
                hook.remove()

        return undo

    def __call__(  # noqa: PLR0917 - the signature of the function that it stands in for
        self,
        original: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """Attention of query (..., heads, queries, channels) to key and value (..., keys, ...)."""
        given = (query, key, value)
        gqa = bool(options.get("enable_gqa"))
        policy, name = self.watch.policy, calling_attention("attention")
        if policy.modules and not policy.reaches("full", name):
            return original(*given, attn_mask, dropout_p, is_causal, **options)
        if self.watch.repeats_on(query.device) or not _applies(given, gqa) or is_dtensor(attn_mask):
            return original(*given, attn_mask, dropout_p, is_causal, **options)
        device = query.device.type
        if torch.is_autocast_enabled(device):
            # As autocast would cast them, but seen by autograd outside the checked operation.
            dtype = torch.get_autocast_dtype(device)
            query, key, value = (
                tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in given
            )
        scale = options.get("scale")
        call = _Call(
            self.watch,
            name,
            original,
            {"dropout_p": dropout_p, "is_causal": is_causal, **options},
            query.shape[-1] ** -0.5 if scale is None else float(scale),
            KeptOutput(),
            torch.get_rng_state() if dropout_p and device == "cpu" else None,
        )
        return call.run(query, key, value, attn_mask)

    def _enter(self, name: str, *_: object) -> None:
        if torch.compiler.is_compiling():
            return
        if not hasattr(_LOCAL, "stack"):
            _LOCAL.stack = []
        _LOCAL.stack.append(name)

    def _leave(self, *_: object) -> None:
        if not torch.compiler.is_compiling() and getattr(_LOCAL, "stack", None):
            _LOCAL.stack.pop()


def calling_attention(otherwise: str) -> str:
    """Name of the attention module whose forward pass runs in this thread, or `otherwise`."""
    stack: list[str] = getattr(_LOCAL, "stack", [])
    return stack[-1] if stack else otherwise


def _applies(given: tuple[Tensor, Tensor, Tensor], gqa: bool) -> bool:
    query, key, value = given
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in given):
        return False
    if any(is_dtensor(tensor) or tensor.is_nested for tensor in given):
        return False
    if (
        query.dim() < 3
        or key.shape[:-1] != value.shape[:-1]
        or min(tensor.numel() for tensor in given) == 0
    ):
        return False
    if gqa and query.dim() >= 4:
        same = query.shape[:-3] == key.shape[:-3]
        return same and query.shape[-3] % key.shape[-3] == 0
    return query.shape[:-2] == key.shape[:-2]


@dataclass(eq=False)
class _Call:
    """One call of attention.

    Attributes:
        random: State of the CPU's generator before the call, where it draws what is dropped.
        digest: Hash of the output as it was handed on, and where that lay.
    """

    watch: Watch
    name: str
    original: Callable[..., Tensor]
    options: dict[str, Any]
    scale: float
    kept: KeptOutput
    random: Tensor | None
    digest: tuple[Tensor, int] | None = None

    @property
    def dropout(self) -> bool:
        return float(self.options["dropout_p"]) > 0.0

    def compute(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        original = self.original
        if not CALLING.purpose:
            original = computing("attention")(original)
        return original(query, key, value, attn_mask=mask, **self.options)

    def again(self, seen: Seen) -> tuple[Tensor, Gradients]:
        """Output and gradients from what was kept; with dropout, the same numbers are dropped."""
        with self.same_dropout():
            return seen.again(seen.kept)

    @contextmanager
    def same_dropout(self) -> Iterator[None]:
        """Have the CPU's generator where it was before the call, and back again behind."""
        if self.random is None:
            yield
            return
        now = torch.get_rng_state()
        torch.set_rng_state(self.random)
        try:
            yield
        finally:
            torch.set_rng_state(now)

    def run(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        inputs = (query, key, value, mask)
        covering = {_VALUE: "attention.dv"}
        if key.requires_grad:
            covering |= dict.fromkeys((_QUERY, _KEY), "attention.dk")
        o = watched(self.compute, inputs, inputs, self.backward, covering=covering)
        self.watch.touch("attention.output", self.name, o.data)
        site = self.watch.ledger.site(self.name, "attention.forward")
        if not self.dropout:

            def again() -> Tensor:
                with torch.no_grad():
                    return self.touched("attention.output", self.compute(*inputs))

            check = partial(_judge_hull, value.detach(), mask is not None)
            corrected_output(self.watch, site, o, again, check)
        self.digest = self._hashed(o), o.data_ptr()
        return self.kept.keep(o)

    def _hashed(self, o: Tensor) -> Tensor:
        return self.watch.timed(hash64, [stored(o)])

    def compare_output(self, o: Tensor) -> bool:
        """Return whether O is still as the forward pass handed it on; otherwise note a finding.

        After activation checkpointing it is another computation's, with the same bits where kernels
        are deterministic.
        """
        assert self.digest is not None
        (before, address), now = self.digest, self._hashed(o)
        site = self.watch.ledger.site(self.name, "attention.output")
        exactly = o.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
        if not exactly and o.data_ptr() != address:
            return True
        judged = equality_test(now[None], before[None])
        if self.watch.wants(site, judged):
            self.watch.find(site, o.device, 1, math.inf, "detected")
            return False
        return True

    def beyond_rounding(self, seen: Seen, names: str, given: Sequence[Tensor]) -> bool:
        """Return whether gradients are further from fp64 than rounding can ever bring them.

        With scores s q.k that are off by ``e = u (8 + 4 s |q|.|k|)`` at most, where u is of the
        data's type (the CPU's unfused kernel keeps every intermediate in it), each P is off by
        ``exp(2 max e) - 1`` of itself, dP and D by a few roundings of what they are sums of, and
        products by one per term and block. Worst cases all; P is computed head by head.

        Args:
            seen: The backward pass.
            names: Of the gradients in `given`: letters of ``qkv``.
            given: What is asked about.
        """
        query, key, value, mask = seen.kept
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.detach().double()
        wide = [item.detach().double().requires_grad_() for item in (query, key, value)]
        exact_types = torch.autocast(query.device.type, enabled=False)
        with self.same_dropout(), torch.enable_grad(), exact_types:
            o = self.compute(wide[0], wide[1], wide[2], mask)
            expected = torch.autograd.grad(o, wide, seen.dy.double())
        limits = self._worst([item.detach() for item in wide], mask, seen.dy.double(), value.dtype)
        largest = torch.finfo(value.dtype).max
        for name, found in zip(names, given, strict=True):
            index = "qkv".index(name)
            limit = limits[index]
            free = ~torch.isfinite(expected[index]) | ~(limit <= largest)
            if not bool((((found.double() - expected[index]).abs() <= limit) | free).all()):
                return True
        return False

    def _worst(
        self, inputs: list[Tensor], mask: Tensor | None, dy: Tensor, dtype: torch.dtype
    ) -> list[Tensor]:
        """Bound the rounding errors of dQ, dK and dV computed in `dtype`; all in fp64."""
        query, key = inputs[:2]
        queries, keys = query.shape[-2], key.shape[-2]
        unit = unit_roundoff(name_of(dtype))
        spacing = torch.finfo(dtype).smallest_normal * unit * 2.0
        kept = 1.0 - float(self.options["dropout_p"])
        seen = None
        if self.options["is_causal"]:
            seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
        # Contiguous, whatever the inputs are: heads are often a transposed view.
        limits = [torch.zeros(item.shape, dtype=item.dtype, device=item.device) for item in inputs]
        flat = [tensor_in.reshape(-1, *tensor_in.shape[-2:]) for tensor_in in (*inputs, dy)]
        into = [limit.view(-1, *limit.shape[-2:]) for limit in limits]
        group = len(flat[0]) // len(flat[1])
        if mask is not None:
            mask = mask.expand(*query.shape[:-1], keys).reshape(-1, queries, keys)
        added = unit * (4.0 + queries * group / 8.0 + keys / 8.0)
        for head in range(len(flat[0])):
            q, d, k, v = (
                flat[0][head],
                flat[3][head],
                flat[1][head // group],
                flat[2][head // group],
            )
            scores = self.scale * q @ k.T
            sizes = abs(self.scale) * q.abs() @ k.abs().T
            for part in (seen, None if mask is None else mask[head]):
                if part is None:
                    continue
                if part.dtype == torch.bool:
                    scores = scores.masked_fill(~part, -torch.inf)
                else:
                    scores = scores + part
                    sizes = sizes + part.abs().nan_to_num(posinf=0.0)
            p = scores.softmax(dim=-1).nan_to_num() / kept
            off = unit * (8.0 + 4.0 * sizes).masked_fill(~torch.isfinite(scores), 0.0)
            off = torch.expm1(2.0 * off.amax(dim=-1, keepdim=True))
            dp = d.abs() @ v.abs().T / kept
            dp = dp + (p * dp).sum(dim=-1, keepdim=True)
            p_off = p * off + spacing
            ds, ds_off = p * dp, p * dp * (off + 6.0 * unit) + spacing * (1.0 + dp)
            into[2][head // group] += (p_off + added * p).T @ d.abs() + spacing
            into[1][head // group] += abs(self.scale) * ((ds_off + added * ds).T @ q.abs())
            into[0][head] += abs(self.scale) * ((ds_off + added * ds) @ k.abs())
            for item, place in zip(into, (head, head // group, head // group), strict=True):
                item[place] += spacing * (1.0 + abs(self.scale) * queries)
        return limits

    def touched(self, site: str, numbers: Tensor) -> Tensor:
        return self.watch.touched(site, self.name, numbers)

    def backward(self, seen: Seen) -> Gradients:
        o = self.kept.take()
        dq, dk, dv, dmask = seen.gradients
        query, key, value, mask = seen.kept
        if o is None or not self.compare_output(o):
            # Nothing was kept, or what followed has used another O: the step must be run again.
            return seen.gradients
        head = _Heads(self, (query, key, value), seen.dy, o)
        rows = _open_rows(mask, query, key)

        def changed() -> bool:
            # What follows attention has used O: nothing that is computed again here cures that.
            return not same_bits(self.again(seen)[0], o)

        def again() -> Gradients:
            _, (fresh_dq, fresh_dk, fresh_dv, _) = self.again(seen)
            fresh = (fresh_dq, fresh_dk, fresh_dv)
            sites = ("attention.dq", "attention.dk", "attention.dv")
            return tuple(
                item if item is None else self.touched(site, item)
                for site, item in zip(sites, fresh, strict=True)
            )

        fresh: Gradients = ()

        def again_dv() -> list[Tensor | None]:
            nonlocal fresh
            fresh = again()
            return [fresh[2]]

        sites = self.watch.ledger.site
        if dv is not None:
            given = self.touched("attention.dv", dv)
            (right,) = corrected(
                self.watch,
                sites(self.name, "attention.dv"),
                [given],
                again_dv,
                lambda given: head.judge_dv(given[0], rows),
                beyond=partial(self.beyond_rounding, seen, "v"),
                changed=changed,
            )
            if fresh and right is not given and not same_bits(right, given):
                # The scores that spoilt dV are dK's and dQ's as well.
                dq, dk, _ = fresh
            dv = right
        if dk is not None:
            pair = [self.touched("attention.dk", dk)]
            if dq is not None:
                pair.append(self.touched("attention.dq", dq))
            both = corrected(
                self.watch,
                sites(self.name, "attention.dk"),
                pair,
                lambda: [tensor for tensor in again()[1::-1] if tensor is not None],
                head.judge_dk,
                beyond=partial(self.beyond_rounding, seen, "k" if dq is None else "kq"),
                changed=changed,
            )
            dk = both[0]
            dq = both[1] if dq is not None else None
        return dq, dk, dv, dmask


def _judge_hull(value: Tensor, masked: bool, o: Tensor) -> ResidualTest:
    """Check that every output lies between the smallest and largest value of its channel."""
    keys, dtype = value.shape[-2], summing(value)
    high, low = value.amax(dim=-2).to(dtype), value.amin(dim=-2).to(dtype)
    if masked:
        # The output of a row that may see nothing is zero.
        high, low = high.clamp(min=0.0), low.clamp(max=0.0)
    most, least = o.amax(dim=-2).to(dtype), o.amin(dim=-2).to(dtype)
    if most.dim() > 2 and most.shape[-2] != high.shape[-2]:
        group = most.shape[-2] // high.shape[-2]
        high, low = (item.repeat_interleave(group, dim=-2) for item in (high, low))
    largest = torch.maximum(high.abs(), low.abs())
    rounding = rounding_of(value)
    unit = _unit(value)
    # Weights that no longer sum to one, the output's own rounding, and the sum's.
    accumulated = unit_roundoff(rounding.accumulated)
    slack = largest * (2.0 * unit + unit_roundoff(rounding.stored) + 8.0 * keys**0.5 * accumulated)
    slack = slack + DEVIATIONS * floor_of(1, value.dtype, dtype) ** 0.5
    beyond = torch.maximum(most - high, low - least).clamp(min=0.0)
    # Found for sure is what is larger than the whole range.
    scale = slack * largest / (high - low + slack)
    return residual_test(
        beyond.flatten(), (slack / DEVIATIONS).square().flatten(), scale.square().flatten()
    )


def _unit(tensor: Tensor) -> float:
    """Unit roundoff of P and dS where they are multiplied."""
    rounding = rounding_of(tensor)
    return unit_roundoff(rounding.read or rounding.stored)


def _open_rows(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """1 for queries (..., queries, 1) that may see any key and 0 for others; None: all may."""
    if mask is None:
        return None
    mask = mask.detach()
    seen = mask if mask.dtype == torch.bool else mask > -torch.inf
    shape = (*query.shape[:-1], key.shape[-2])
    return seen.any(dim=-1, keepdim=True).expand((*shape[:-1], 1))


class _Heads:
    """The sums of one backward pass, per channel of each head of keys: (..., heads, channels)."""

    def __init__(
        self, call: _Call, inputs: tuple[Tensor, Tensor, Tensor], dy: Tensor, o: Tensor
    ) -> None:
        query, key, value = inputs
        self._call = call
        self._dtype = dtype = summing(*inputs)
        self._query, self._key, self._value = (tensor_in.detach().to(dtype) for tensor_in in inputs)
        self._dy = dy.to(dtype)
        self._heads = key.shape[-3] if key.dim() > 3 else 0
        self._unit = _unit(value) ** 2 / 3.0
        rounding = rounding_of(value, dtype)
        self._stored = unit_roundoff(rounding.stored) ** 2 / 3.0
        self._accumulated = unit_roundoff(rounding.accumulated) ** 2 / 3.0
        queries, keys = query.shape[-2], key.shape[-2]
        group = query.shape[-3] // key.shape[-3] if self._heads else 1
        of_query, of_key = group, 1
        if query.device.type == "cpu":
            of_query = -(-queries // query_block(queries)) * group
            of_key = -(-keys // KEY_BLOCK)
        self._by_query = blockwise(
            product_bound(rounding, queries * group, keys), self._stored, of_query
        )
        self._by_key = blockwise(product_bound(rounding, keys, queries), self._stored, of_key)
        self._lost = floor_of(keys + queries * group, value.dtype, dtype)
        largest = torch.linalg.vector_norm(self._key, dim=-1).amax(dim=-1)
        if self._heads:
            largest = largest.repeat_interleave(group, dim=-1)
        norms = torch.linalg.vector_norm(self._query, dim=-1) * abs(call.scale)
        # Squared relative error of a row's P, in roundings of the sums' type: (..., queries, 1).
        constant = 4.0 + math.log(keys) ** 2
        self._scores = (constant + (norms * largest[..., None]).square())[..., None]
        self._squares = self._dy.square()
        self._o = o.detach().to(dtype)
        self._powers = powers_squared(o, dtype)

    def _over_queries(self, terms: Tensor) -> Tensor:
        sums = terms.sum(dim=-2)
        return torch.unflatten(sums, -2, (self._heads, -1)).sum(dim=-2) if self._heads else sums

    def judge_dv(self, dv: Tensor, rows: Tensor | None) -> ResidualTest:
        """The first two identities."""
        wide, powers = dv.to(self._dtype), powers_squared(dv, self._dtype)
        squares, value = wide.square(), self._value.square()
        incoming = self._over_queries(self._squares)
        shared = self._share(squares.sum(dim=-2), incoming)
        moments = torch.maximum(squares.sum(dim=-2), shared * incoming)
        bound, errors = self._by_query, self._accumulated * self._scores
        differences, variances = [], []
        scores = self._accumulated * self._mean(self._scores)
        rounded = _MARGIN * self._unit + bound.by_square + scores
        bias = _BIAS * self._accumulated
        if not self._call.dropout:
            dy = self._dy if rows is None else self._dy * rows
            differences.append(wide.sum(dim=-2) - self._over_queries(dy))
            variances.append(
                bound.by_power * powers.sum(dim=-2)
                + rounded * moments
                + self._over_queries(errors * self._squares)
                + bias * self._over_queries(dy).square()
            )
        expected = self._over_queries(self._dy * self._o)
        own = (value * squares).sum(dim=-2)
        moments = torch.maximum(own, shared * incoming * value.mean(dim=-2))
        differences.append((self._value * wide).sum(dim=-2) - expected)
        variances.append(
            bound.by_power * (value * powers).sum(dim=-2)
            + self._by_key.by_power * self._over_queries(self._squares * self._powers)
            + (2.0 * rounded + self._by_key.by_square) * moments
            + self._over_queries(errors * self._squares * self._o.square())
            + bias * expected.square()
        )
        scales = [squares.sum(dim=-2), own][-len(differences) :]
        return self._judge(differences, variances, scales)

    def judge_dk(self, given: Any) -> ResidualTest:
        """The last two identities, or the third alone without dQ; `given`: dK and perhaps dQ."""
        dtype = self._dtype
        dk, key = given[0].to(dtype), self._key.square()
        powers, squares = powers_squared(given[0], dtype), dk.square()
        query = self._query.square()
        asked = self._over_queries(query)
        share = self._share(squares.sum(dim=-2), asked, bounded=False)
        moments = torch.maximum(squares.sum(dim=-2), share * asked)
        scores = self._mean(self._scores)
        rounded = _MARGIN * self._unit + self._by_query.by_square + self._accumulated * scores
        scale = self._call.scale**2
        variance = self._by_query.by_power * powers.sum(dim=-2) + rounded * moments
        variance = variance + scale * self._over_queries(query * self._row_errors())
        dots = (self._dy * self._o).sum(dim=-1, keepdim=True)
        shared = self._over_queries(self._query * dots).square()
        variance = variance + scale * _BIAS * self._accumulated * shared
        differences, variances = [dk.sum(dim=-2)], [variance]
        scales = [squares.sum(dim=-2)]
        if len(given) > 1:
            dq = given[1].to(dtype)
            by_query = self._over_queries(query * powers_squared(given[1], dtype))
            own = (key * squares).sum(dim=-2)
            differences.append(self._over_queries(self._query * dq) - (self._key * dk).sum(dim=-2))
            moments = torch.maximum(own, self._over_queries(query * dq.square()))
            variances.append(
                self._by_query.by_power * (key * powers).sum(dim=-2)
                + self._by_key.by_power * by_query
                + (rounded + self._by_key.by_square) * moments
            )
            scales.append(own)
        return self._judge(differences, variances, scales)

    def _row_errors(self) -> Tensor:
        """Variance of the sum of a row of dS, (..., queries, 1), from the errors of D and dP."""
        channels = self._dy.shape[-1]
        product = self._squares * self._o.square()
        total = (self._dy * self._o).sum(dim=-1, keepdim=True).square()
        stored = self._stored * (self._squares * self._powers).sum(dim=-1, keepdim=True)
        summed = self._accumulated * (1.0 + channels / 6.0) * product.sum(dim=-1, keepdim=True)
        largest = self._value.square().sum(dim=-1).amax(dim=-1)
        if self._heads:
            group = self._dy.shape[-3] // self._heads
            largest = largest.repeat_interleave(group, dim=-1)
        norms = self._squares.sum(dim=-1, keepdim=True) * largest[..., None, None]
        # D is found from P that were rounded before; at most half of sum_j P_ij^2 is rounded.
        of_rows = self._unit / 2.0 + self._accumulated * (_BIAS + self._scores)
        errors: Tensor = stored + summed + self._accumulated / 6.0 * norms + of_rows * total
        return errors

    def _mean(self, rows: Tensor) -> Tensor:
        mean = rows.mean(dim=-2)
        return torch.unflatten(mean, -2, (self._heads, -1)).amax(dim=-2) if self._heads else mean

    def _share(self, moments: Tensor, terms: Tensor, bounded: bool = True) -> Tensor:
        """Ratio of a head's moments to its terms' squares, over all channels."""
        share = moments.sum(dim=-1, keepdim=True) / terms.sum(dim=-1, keepdim=True).clamp(
            min=torch.finfo(terms.dtype).smallest_normal
        )
        return share.clamp(max=1.0) if bounded else share

    def _judge(
        self, differences: list[Tensor], variances: list[Tensor], scales: list[Tensor]
    ) -> ResidualTest:
        variance = torch.cat([variance.flatten() for variance in variances]) + self._lost
        return residual_test(
            torch.cat([difference.flatten() for difference in differences]),
            variance,
            torch.cat([scale.flatten() for scale in scales]),
        )
