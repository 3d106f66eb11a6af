"""Timing the plans that the prices put first, for prices are off by some percent.

Never in a training step: only where it is asked for.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from outlast.tensorize.operator import Merged, chain
from outlast.tensorize.planner.choose import (
    PRICED_DEVICES,
    bucket_of,
    keep,
    plan_for,
    prices_of,
)
from outlast.tensorize.planner.fused import warm
from outlast.tensorize.planner.measure import Clock
from outlast.tensorize.planner.search import Search
from outlast.tensorize.planner.walk import Walker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from outlast.tensorize.network import Network
    from outlast.tensorize.plan import Plan

# Plans that are predicted to take this many times as long as the best are not timed.
_NEAR = 1.7
_MOST = 24
# Those that took this many times as long as the fastest at first are not timed again.
_HOPE = 1.3
# A repeat lasts this many seconds at least.
_LEAST = 2e-3
_ROUNDS = 12
_GAIN = 1.05
_PAIRS = 7
# With more tokens than this the time is in proportion to them, nearly.
_ENOUGH = 2048

_SPEEDS: dict[tuple[str, ...], float] = {}


def tune(
    network: Network,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    learns: bool = True,
    seconds: float = 2.0,
    anew: bool = False,
) -> Plan:
    """Time the plans that are predicted to be fastest, and the dense layer; keep the fastest.

    `plan_for` gives it from then on, in later processes as well: it is kept in a file by network,
    power of two of tokens, dtype, machine, number of threads and version of torch.

    Args:
        network: How the cores make the weight.
        tokens: Rows of x.
        dtype: Of x and the cores.
        device: Where.
        learns: Whether there is a way back.
        seconds: How long to go on timing, once every plan has run.
        anew: Time again what was timed before.

    Returns:
        The fastest plan; that of `plan_for` on devices that are neither a CPU nor CUDA's.
    """
    known = plan_for(network, tokens, dtype, device, learns)
    if device.type not in PRICED_DEVICES or (known.timed and not anew):
        return known
    search = Search(Walker(network, prices_of(dtype, device)), 1 << bucket_of(tokens))
    ranked = search.joint() if learns else search.forward_only()
    near = [plan for cost, plan in ranked if cost <= _NEAR * ranked[0][0]][:_MOST]
    if warm(network, tokens, dtype, device):
        near.append(replace(near[0], plain=False, fused=True))
    rows = min(tokens, _ENOUGH)
    layer = _Layer(network, rows, {"dtype": dtype, "device": device}, learns)
    actions = [layer.dense, *(layer.along(plan) for plan in near)]
    dense, *found = fastest(actions, device, seconds)
    best = min(range(len(near)), key=found.__getitem__)
    # Less is noise, and the prices may know better.
    if found[0] <= _GAIN * found[best] or not _wins(actions[1 + best], actions[1], device):
        best = 0
    scale = tokens / rows
    plan = replace(
        near[best],
        seconds=found[best] * scale,
        dense_seconds=dense * scale,
        timed=True,
        reason=f"{found[best] / dense:.2f} x the dense layer's time, the fastest of {len(near)} "
        "plans that were timed",
    )
    keep(network, tokens, dtype, device, {learns: plan})
    return plan


def fastest(
    actions: Sequence[Callable[[], object]], device: torch.device, seconds: float
) -> list[float]:
    """The least seconds of every action, in turns; of the first and the fastest ones often.

    Args:
        actions: What to time.
        device: Where they run.
        seconds: How long to go on once all have run.
    """
    clock = Clock(device, 1)
    best, times = [], []
    for action in actions:
        action()
        first = clock.once(action, 1)
        times.append(max(1, math.ceil(_LEAST / max(first, 1e-7))))
        best.append(min(first, clock.once(action, times[-1])))
    end = time.perf_counter() + seconds
    for number in range(_ROUNDS):
        limit = (_HOPE if number else 2 * _HOPE) * min(best[1:], default=math.inf)
        for place, action in enumerate(actions):
            if time.perf_counter() > end:
                return best
            if place == 0 or best[place] <= limit:
                best[place] = min(best[place], clock.once(action, times[place]))
    return best


def _wins(
    challenger: Callable[[], object], holder: Callable[[], object], device: torch.device
) -> bool:
    """Whether one is faster in most pairs of runs, for others' load is on both of a pair."""
    clock = Clock(device, 1)
    first = clock.once(holder, 1)
    times = max(1, math.ceil(_LEAST / max(first, 1e-7)))
    ratios = [clock.once(holder, times) / clock.once(challenger, times) for _ in range(_PAIRS)]
    return statistics.median(ratios) > _GAIN


class _Layer:
    """Random tensors of a layer, and its steps."""

    def __init__(self, network: Network, tokens: int, options: Any, learns: bool) -> None:
        self.network = network
        self.learns = learns
        self.x = torch.randn(tokens, network.in_features, **options)
        self.dy = torch.randn(tokens, network.out_features, **options)
        self.weight = torch.randn(network.out_features, network.in_features, **options)
        self.bias = torch.randn(network.out_features, **options)
        self.cores = [
            torch.randn(network.shape(core), **options) for core in range(len(network.cores))
        ]
        for tensor in (self.x, self.weight, self.bias, *self.cores):
            tensor.requires_grad_(learns)
        self.merged = Merged()

    def dense(self) -> None:
        """A step of a plain linear layer."""
        with torch.set_grad_enabled(self.learns):
            self.back(functional.linear(self.x, self.weight, self.bias), [self.weight])

    def along(self, plan: Plan) -> Callable[[], None]:
        """A step along a plan."""

        def step() -> None:
            with torch.set_grad_enabled(self.learns):
                y = chain(self.x, self.cores, self.network, self.bias, plan, merged=self.merged)
                self.back(y, self.cores)

        return step

    def back(self, y: Tensor, weights: list[Tensor]) -> None:
        """The gradients of all that is learned, and of x."""
        if self.learns:
            torch.autograd.grad(y, [self.x, self.bias, *weights], self.dy, allow_unused=True)


def timed_speed(
    layer: nn.Module, tokens: int, dtype: torch.dtype, device: torch.device
) -> float | None:
    """Time a layer that has no plan beside the dense one, forward and backward.

    Args:
        layer: A structured linear layer, on any device; a copy of it is timed.
        tokens: Rows of x.
        dtype: Of x and the factors.
        device: Where.

    Returns:
        Seconds of the dense layer over its own; None on devices that are neither a CPU nor CUDA's.
    """
    if device.type not in PRICED_DEVICES:
        return None
    structured: Any = layer
    options: Any = {"dtype": dtype, "device": device}
    key = (
        structured.form,
        repr(sorted(structured.settings().items())),
        bucket_of(tokens),
        *map(str, options.values()),
    )
    if key not in _SPEEDS:
        rows = min(tokens, _ENOUGH)
        tensors = _Layer(structured.network, rows, options, True)
        made = type(structured)(**structured.settings(), **options)

        def step() -> None:
            tensors.back(made(tensors.x), [*made.parameters()])

        dense, own = fastest([tensors.dense, step], device, 2.0)
        _SPEEDS[key] = dense / own
    return _SPEEDS[key]


def tune_model(
    model: nn.Module,
    tokens: int,
    *,
    dtype: torch.dtype | None = None,
    learns: bool = True,
    seconds: float = 2.0,
    progress: Callable[[str], None] | None = None,
) -> list[Plan]:
    """Time the plans of all layers of a model, each shape once; see `tune`.

    Args:
        model: With tensorized layers, where they will run.
        tokens: In one pass.
        dtype: Of activations; None: that of each layer's factors.
        learns: Whether there is a way back.
        seconds: How long to go on with each shape.
        progress: Is told about every shape in a line.

    Returns:
        The plans.
    """
    found = {}
    for layer in _planned_layers(model):
        first = layer.factors()[0]
        setting = layer.network, dtype or first.dtype, first.device
        if setting in found:
            continue
        network, kind, device = setting
        plan = tune(network, tokens, kind, device, learns=learns, seconds=seconds)
        found[setting] = plan
        if progress is not None:
            ends = f"{layer.in_features} -> {layer.out_features}"
            progress(f"{layer.form} {ends}: {plan.forward}, {plan.reason}")
    return list(found.values())


def _planned_layers(model: nn.Module) -> list[Any]:
    """The layers that go along plans: neither those with their own kernels nor their parts."""
    from outlast.tensorize.forms.latent import LatentLinear
    from outlast.tensorize.forms.low_rank import BottleneckLinear
    from outlast.tensorize.forms.sparse import SparseLowRankLinear
    from outlast.tensorize.layer import StructuredLinear

    others = BottleneckLinear | LatentLinear | SparseLowRankLinear
    return [
        module
        for module in model.modules()
        if isinstance(module, StructuredLinear) and not isinstance(module, others)
    ]
