"""Why a layer computes as it does, as a table to print."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from outlast.tensorize.network import lower
from outlast.tensorize.plan import Plan
from outlast.tensorize.planner.choose import plan_for, prices_of
from outlast.tensorize.planner.fused import is_ready, kernel_seconds
from outlast.tensorize.planner.search import Search
from outlast.tensorize.planner.walk import Walker, route_flops

if TYPE_CHECKING:
    import torch

    from outlast.tensorize.network import Network, Route

_ALTERNATIVES = 4


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _count(flops: float) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if flops >= unit:
            return f"{flops / unit:.3g} {name}FLOP"
    return f"{flops:.0f} FLOP"


def _why(route: Route, best: Route, search: Search) -> str:
    """What one route has more of than another."""
    network, tokens, walker = search.network, search.tokens, search.walker
    terms = {}
    for name, item in (("this", route), ("best", best)):
        stages = lower(network, replace(item, chunk=0)).stages
        parts = walker.chunks(item, tokens)
        one = walker.one_pass(item, parts[0], chunked=len(parts) > 1)
        times = len(parts)
        moved = one.enter + sum(one.arrange) + one.leave
        terms[name] = {
            "products": sum(one.multiply) * times,
            "moving numbers between products": moved * times,
            "merging cores": walker.merging(item),
        }
        terms[name + " flops"] = {"": float(sum(s.b * s.m * s.k * s.f for s in stages))}
    more = {name: terms["this"][name] - terms["best"][name] for name in terms["this"]}
    worst = max(more, key=lambda name: more[name])
    if more[worst] <= 0:
        return "slower on the way back"
    if worst == "products" and terms["this flops"][""] <= terms["best flops"][""]:
        return f"{_time(more[worst])} more for products of worse shapes"
    return f"{_time(more[worst])} more for {worst}"


def explain(network: Network, tokens: int, dtype: torch.dtype, device: torch.device) -> str:
    """The plan of a layer for a number of tokens, forward and backward, and what it beats.

    Args:
        network: How the cores make the weight.
        tokens: Rows of x; rounded up to a power of two.
        dtype: Of x.
        device: Of x.
    """
    prices = prices_of(dtype, device)
    table = prices.table
    plan = plan_for(network, tokens, dtype, device, True)
    bucket = 1 << max(tokens - 1, 0).bit_length()
    walker = Walker(network, prices)
    search = Search(walker, bucket)
    source = "measured on this machine" if table.measured else "built in, not measured here"
    dense_flops = 2 * bucket * network.in_features * network.out_features

    def flops(route: Route) -> str:
        return _count(route_flops(network, route) * bucket)

    ends = f"{network.in_features} -> {network.out_features}"
    forward = _time(walker.forward(plan.forward, bucket))
    lines = [
        f"{ends}, {network.parameters:,} parameters, up to {bucket} tokens, {table.dtype}",
        f"prices: {table.machine}, {source}",
        f"forward:        {plan.forward}, {forward}, {flops(plan.forward)}",
    ]
    if plan.fused:
        # What is not fused is said as well, for other tensors go that way.
        lines[-1] = f"fused kernel:   {_time(plan.seconds)} forward and backward, {plan.reason}"
    elif plan.plain:
        lines.append("backward:       left to autograd, which starts fewer operations")
    else:
        nothing: frozenset[int] = frozenset()
        seconds = walker.backward(plan.input_gradient, bucket, nothing, want_x=True)
        back = plan.input_gradient
        lines.append(f"gradient of x:  {back}, {_time(seconds)}, {flops(back)}")
        for core, route in enumerate(plan.core_gradients):
            seconds = walker.backward(route, bucket, frozenset((core,)), want_x=False)
            lines.append(f"gradient of {network.cores[core]}: {route}, {_time(seconds)} alone")
    dense, known = plan.dense_seconds, "timed on this machine" if plan.timed else "predicted"
    ratio = dense / plan.seconds
    lines += [
        f"together:       {_time(plan.seconds)} {known}",
        f"dense layer:    {_time(dense)} {known}, {ratio:.2f} x as long, {_count(dense_flops)}",
        "what else there is:",
    ]
    chosen = replace(plan)
    others = [pair for pair in search.uniform() if pair[1] != chosen]
    shown: list[tuple[float, Plan]] = []
    names: set[tuple[object, ...]] = set()
    for seconds, other in others:
        name = (other.forward.groups, other.forward.backwards, other.forward.layout, other.plain)
        if name not in names and len(shown) < _ALTERNATIVES:
            names.add(name)
            shown.append((seconds, other))
    rebuilt = [other for other in others if len(other[1].forward.groups) == 1]
    shown += [pair for pair in rebuilt[:1] if pair not in shown]
    for seconds, other in shown:
        label = f"{other.forward}{', by autograd' if other.plain else ''}"
        lines.append(f"  {_time(seconds)}: {label}; {_why(other.forward, plan.forward, search)}")
    if not plan.fused and is_ready(network, bucket, dtype, device):
        lines.append(f"  {_time(kernel_seconds(network, bucket, prices, True))}: fused kernel")
    return "\n".join(lines)
