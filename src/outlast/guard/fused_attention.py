"""The CPU's fused attention, checked by random signs over its channels.

With P = exp(s Q K^T + mask - L) of the forward pass's log-sum-exp L, O = P V and, going back, dS =
P * (dO V^T - D), D_i = sum_d dO_id O_id, each row obeys, for random signs v over the channels::

    O v = P (V v)        dQ v = s dS (K v)        dV v = P^T (dO v)        dK v = s dS^T (Q v)

The kernel never stores P. ``native/attention.c`` computes it again, and dS going back: one of the
forward pass's two products and two of the backward pass's five. O is checked before it is used, and
again going back, together with the Q, K, V and L that are used there.

*Roundings*, beside those of `threshold` for outputs and sums: P and dS are rounded to the data's
type before they are multiplied; where P are alike, so are their errors, which then
add up to a relative one of the sum. In fp32 a score s q.k is off by a rounding of |s| |q| |k|, more
where its terms have one sign; P by that, by 20 units of the last place from the kernel's fast exp,
and by the rounding of L; dO V^T and D by roundings of |dO| max |V|. The kernel adds dV, dK and dQ
block by block in the data's type.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from outlast.guard.product import (
    NATIVE_TYPES,
    NativeAttention,
    NativeHeads,
    NativeRounding,
    judged_rows,
    library_for,
    raise_if_failed,
    rounding_of,
    threads_for,
)
from outlast.guard.residual import name_of
from outlast.guard.threshold import DEVIATIONS, Bound, product_bound, unit_roundoff

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from outlast.guard.residual import ResidualTest

KEY_BLOCK = 512
"""Keys that the kernel's backward pass takes at a time."""

_FAR_BELOW = 200.0
"""Difference of scores beyond which P is 0 in fp32, with room for errors."""
_CHANNELS = 4096
"""The most that the native pass has room for."""
_NEIGHBOURS = 1.5
"""Times the variance of P and dS in sums over queries: of neighbours they round nearly alike."""


@dataclass(frozen=True, eq=False)
class FusedAttention:
    """One call of ``aten::_scaled_dot_product_flash_attention_for_cpu``.

    Attributes:
        query: Q (batches, heads, queries, channels).
        key: K (batches, heads or fewer, keys, channels); as many heads of Q share one of K.
        value: V, of K's shape.
        causal: Whether a query sees only keys up to its own place.
        mask: Added to the scores; its shape broadcasts to (batches, heads, queries, keys).
        scale: s.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool
    mask: Tensor | None
    scale: float

    @classmethod
    def of(cls, args: Sequence[Any], options: dict[str, Any]) -> FusedAttention:
        """The call with these arguments of the kernel: Q, K, V, dropout, causal; mask, scale."""
        query, key, value, *rest = args
        scale = options.get("scale")
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        causal = len(rest) > 1 and bool(rest[1])
        return cls(query, key, value, causal, options.get("attn_mask"), scale)

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass's two products."""
        q, k, v = self.query, self.key, self.value
        return 2.0 * q[..., 0].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])

    def why_not(self) -> str:
        """Why the native pass cannot check it; empty where it can."""
        q, k, v = self.query, self.key, self.value
        if q.dtype not in NATIVE_TYPES or k.dtype != q.dtype or v.dtype != q.dtype:
            return f"of {name_of(q.dtype)}"
        if library_for(q.dtype) is None:
            return "without a C compiler"
        alike = k.shape == v.shape and (len(q), q.shape[3]) == (len(k), k.shape[3])
        if not alike or q.shape[1] % max(k.shape[1], 1):
            return "of heads of unlike shapes"
        if q.shape[3] > _CHANNELS:
            return f"of more than {_CHANNELS} channels"
        return ""

    def judge_output(self, out: Tensor, logsum: Tensor, signs: Tensor) -> ResidualTest:
        """Check O of the forward pass; one row is one of (batches, heads, queries)."""
        return self.judge_gradients(out, logsum, None, (None, None, None), signs)[0]

    def judge_gradients(
        self,
        out: Tensor,
        logsum: Tensor,
        dy: Tensor | None,
        gradients: Sequence[Tensor | None],
        signs: Tensor,
    ) -> list[ResidualTest]:
        """Check O as the backward pass has found it, and those of dQ, dK and dV that are given."""
        flags = [
            None
            if item is None
            else torch.empty(item[..., 0].numel(), dtype=torch.bool, device="cpu")
            for item in (out, *gradients)
        ]
        compiled = library_for(self.query.dtype)
        assert compiled is not None
        call = self._native(compiled.attention, (out, dy, *gradients), logsum, signs, flags)
        verdicts = (call.o_verdict, call.dq_verdict, call.dk_verdict, call.dv_verdict)
        return [
            judged_rows(verdict, own)
            for verdict, own in zip(verdicts, flags, strict=True)
            if own is not None
        ]

    def judge_sums(
        self, out: Tensor, logsum: Tensor, dy: Tensor, gradients: Sequence[Tensor]
    ) -> ResidualTest:
        """Check sums that hold without P; one row is (batches, heads of K, 4, channels).

        For each channel of each head sum dV = sum dO, sum V dV = sum dO O, sum dK = 0 and sum Q dQ
        = sum K dK. Their bounds are estimates: `judge_gradients` decides where one fails.
        """
        compiled = library_for(self.query.dtype)
        assert compiled is not None
        batches, heads, _, channels = self.key.shape
        flags = torch.empty(4 * batches * heads * channels, dtype=torch.bool, device="cpu")
        made = (out, dy, *gradients)
        call = self._native(compiled.attention_sums, made, logsum, None, (flags, None, None, None))
        return judged_rows(call.o_verdict, flags)

    def beyond_rounding(
        self,
        judged: ResidualTest,
        dy: Tensor | None = None,
        out: Tensor | None = None,
        **found: Tensor,
    ) -> ResidualTest:
        """Of flagged rows, those further from float64 than rounding can ever bring them.

        With scores that are off by ``e = u (24 + 4 s |q|.|k|)`` at most, where u is of fp32, each P
        is off by ``exp(2 max e) - 1`` of itself and a rounding to the data's type, dP and D by a
        few roundings of what they are sums of, and products by one per term and block. Worst cases
        all; P is computed head by head. Where a row sees only keys that a mask of -1e9 or less has
        closed, or has scores of 1e6, nothing is beyond that.

        Args:
            judged: Of the rows of what was found.
            dy: Gradient of O; not for ``o`` and ``l``.
            out: O as the backward pass has used it; not for ``o`` and ``l``.
            found: (batches, heads, rows, channels) by ``o``, ``dq``, ``dk``, ``dv``, or ``l`` for
                the log-sum-exp.
        """
        flags = torch.zeros_like(judged.flags)
        for name, numbers in found.items():
            _, heads, rows, _ = numbers.shape
            group, largest = self.query.shape[1] // heads, torch.finfo(numbers.dtype).max
            for number in sorted(set((judged.flags.nonzero()[:, 0] // rows).tolist())):
                head = divmod(number, heads)
                several = [
                    self._exact_head((head[0], own), name, dy, out)
                    for own in range(head[1] * group, (head[1] + 1) * group)
                ]
                expected, limit, sizes = (
                    torch.stack(items).sum(dim=0) for items in zip(*several, strict=True)
                )
                # What overflows on the way is no fault.
                free = ~torch.isfinite(expected) | ~(limit <= largest) | ~(sizes <= largest)
                within = (numbers[head].double() - expected).abs() <= limit
                own = slice(number * rows, (number + 1) * rows)
                flags[own] |= ~(within | free).all(dim=1)
        flags &= judged.flags
        return replace(judged, flags=flags, exceeded=int(flags.sum()))

    def _exact_head(
        self, head: tuple[int, int], name: str, dy: Tensor | None, out: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One head of queries of what `name` says, in float64.

        With it the limit of its rounding errors, and the largest number that its sums may reach.
        """
        batch, number = head
        shared = batch, number * self.key.shape[1] // self.query.shape[1]
        q, k, v = self.query[head].double(), self.key[shared].double(), self.value[shared].double()
        dtype = self.query.dtype
        queries, keys = len(q), len(k)
        unit, wide = unit_roundoff(name_of(dtype)), unit_roundoff("float32")
        if dtype == torch.float64:
            wide = unit
        spacing = torch.finfo(dtype).smallest_normal * unit * 2.0
        scores, sizes = self.scale * q @ k.T, abs(self.scale) * q.abs() @ k.abs().T
        if self.mask is not None:
            mask = self.mask.expand(*self.query.shape[:2], queries, keys)[head].double()
            scores, sizes = scores + mask, sizes + mask.abs().nan_to_num(posinf=0.0)
        if self.causal:
            open_keys = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~open_keys, -torch.inf)
        p = scores.softmax(dim=-1).nan_to_num()
        # Of keys that are far below a row's largest score P is 0, whatever the errors are.
        far = ~(scores > scores.amax(dim=-1, keepdim=True) - _FAR_BELOW)
        off = wide * (24.0 + 4.0 * sizes).masked_fill(far, 0.0)
        off = off.amax(dim=-1, keepdim=True)
        if name == "l":
            expected = scores.logsumexp(dim=-1, keepdim=True)
            # The kernel sums P as they are rounded.
            return expected, 2.0 * off + unit + wide * (keys + expected.abs()), expected.abs()
        off = torch.expm1(2.0 * off) + unit
        added = unit * (4.0 + queries / 32.0 + keys / 512.0) + wide * (queries + keys)
        p_off = p * off + spacing
        if name == "o":
            return p @ v, (p_off + added * p) @ v.abs() + spacing, p @ v.abs()
        assert dy is not None
        assert out is not None
        dy, out = dy[head].double(), out[head].double()
        if name == "dv":
            limit = (p_off + added * p).T @ dy.abs() + spacing * (1.0 + queries)
            return p.T @ dy, limit, p.T @ dy.abs()
        ds = p * (dy @ v.T - (dy * out).sum(dim=-1, keepdim=True))
        dp = dy.abs() @ v.abs().T + (dy * out).abs().sum(dim=-1, keepdim=True)
        terms = p * dp * (off + 6.0 * wide * (1.0 + q.shape[1])) + spacing * (1.0 + dp)
        terms = abs(self.scale) * (terms + added * p * dp)
        spacing = spacing * (1.0 + abs(self.scale) * max(queries, keys))
        # dS is stored in the data's type before it is scaled.
        most = (p * dp).amax()
        if name == "dq":
            sizes = (p * dp) @ k.abs() + most
            return self.scale * ds @ k, terms @ k.abs() + spacing, sizes
        sizes = (p * dp).T @ q.abs() + most
        return self.scale * ds.T @ q, terms.T @ q.abs() + spacing, sizes

    def _native(
        self,
        check: Callable[[Any], int],
        made: Sequence[Tensor | None],
        logsum: Tensor,
        signs: Tensor | None,
        flags: Sequence[Tensor | None],
    ) -> NativeAttention:
        """Call a native check of O, dO, dQ, dK and dV; its verdicts are in what is returned."""
        query, key = self.query, self.key
        batches, heads, queries, channels = query.shape
        keys = key.shape[2]
        # Copies must live as long as the call.
        tensors = [
            item if item is None or item.stride(3) == 1 else item.contiguous()
            for item in (query, key, self.value, *made)
        ]
        mask = self.mask
        if mask is not None:
            mask = mask.to(torch.float32).expand(batches, heads, queries, keys)
            mask = mask if mask.stride(3) == 1 else mask.contiguous()
        by_key, by_query, *others = _roundings(
            query.dtype, heads // key.shape[1], queries, keys, channels
        )
        call = NativeAttention(
            *(
                NativeHeads() if item is None else NativeHeads(item.data_ptr(), *item.stride()[:3])
                for item in tensors
            ),
            logsum.data_ptr(),
            *logsum.stride(),
            None if mask is None else mask.data_ptr(),
            *((0, 0, 0) if mask is None else mask.stride()[:3]),
            NATIVE_TYPES[query.dtype],
            batches,
            heads,
            key.shape[1],
            queries,
            keys,
            channels,
            int(self.causal),
            threads_for(query),
            self.scale,
            None if signs is None else signs.data_ptr(),
            NativeRounding(*by_key),
            NativeRounding(*by_query),
            *others,
            *(None if item is None else item.data_ptr() for item in flags),
        )
        for verdict in (call.o_verdict, call.dq_verdict, call.dk_verdict, call.dv_verdict):
            verdict.limit = DEVIATIONS**2
        raise_if_failed(check(ctypes.byref(call)))
        return call


@functools.lru_cache(4096)
def _roundings(
    dtype: torch.dtype, group: int, queries: int, keys: int, channels: int
) -> tuple[tuple[float, ...], tuple[float, ...], float, float, float, int]:
    """The numbers of ``attention`` in ``attention.c`` from ``by_key`` to ``block``."""
    rounding = rounding_of(torch.empty(0, dtype=dtype, device="cpu"))
    stored, accumulated = map(unit_roundoff, (rounding.stored, rounding.accumulated))
    block = query_block(queries)
    found = []
    sums = (
        (keys, -(-keys // KEY_BLOCK), 1.0),
        (group * queries, group * -(-queries // block), _NEIGHBOURS),
    )
    for terms, blocks, times in sums:
        bound = blockwise(product_bound(rounding, terms, channels), stored**2 / 3.0, blocks)
        unit = stored**2 / 3.0
        # Equal terms are rounded alike in every sum, and sums of equal values alike as a whole.
        drift = (terms * accumulated) ** 2
        stored_alike, alike = bound.by_power + drift / 48.0, unit + drift / 12.0
        of_terms = times * unit + bound.by_square
        found.append((stored_alike, of_terms, bound.by_square, alike, blocks * bound.floor))
    spacing = torch.finfo(dtype).smallest_normal * stored
    return found[0], found[1], accumulated, spacing, 4.0 * stored**2 / 3.0, block


def query_block(queries: int) -> int:
    """Queries that the kernel's backward pass takes at a time."""
    return 256 if queries >= 768 else 64 if queries >= 192 else 32


def blockwise(bound: Bound, stored: float, blocks: int) -> Bound:
    """`bound` where partial sums of as many blocks are stored in the outputs' type."""
    if blocks == 1:
        return bound
    return replace(
        bound,
        by_power=bound.by_power + stored * 4.0 * blocks / 3.0,
        by_square=bound.by_square + stored * blocks / 6.0,
    )
