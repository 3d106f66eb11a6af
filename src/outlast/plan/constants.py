"""The constants of the time model: what each means, its prior, its bounds, and whose it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

import numpy as np

from outlast.plan.cases import Array

Level: TypeAlias = Literal["chip", "cluster", "framework"]
LEVELS: tuple[Level, ...] = ("chip", "cluster", "framework")


@dataclass(frozen=True, slots=True)
class Prior:
    """What is believed of a constant before any run was measured.

    Attributes:
        unit: Of the value.
        median: Of a log-normal distribution.
        log_deviation: Its standard deviation in log space.
        spreads: How far (log standard deviation, in the unbounded scale of `unbounded`) it differs
            between chips, clusters or frameworks; it is the same where a level is not named.
        most: Physical upper bound.
        text: What it is, and where the prior comes from.
    """

    unit: str
    median: float
    log_deviation: float
    spreads: Mapping[Level, float]
    most: float
    text: str

    def unbounded(self, value: Array) -> Array:
        """The value on the scale on which it is fitted: logit of its share of a bound, or log."""
        most = self.most
        return np.log(value) if math.isinf(most) else np.log(value / (most - value))

    def bounded(self, position: Array) -> Array:
        """The inverse of `unbounded`: never above the bound."""
        most = self.most
        return np.exp(position) if math.isinf(most) else most / (1.0 + np.exp(-position))


PRIORS: dict[str, Prior] = {
    "matmul_efficiency": Prior(
        "1",
        0.85,
        0.15,
        {"chip": 0.1, "framework": 0.25},
        1.0,
        "rate of large matrix products in a model over the best one measured alone",
    ),
    "matmul_half_side": Prior(
        "features",
        200.0,
        0.8,
        {"chip": 0.3, "framework": 0.3},
        math.inf,
        "shortest side at which a product reaches half of its rate",
    ),
    "memory_efficiency": Prior(
        "1",
        0.75,
        0.25,
        {"chip": 0.2, "framework": 0.4},
        1.0,
        "rate of elementwise kernels over the memory's peak",
    ),
    "attention_efficiency": Prior(
        "1",
        0.45,
        0.3,
        {"chip": 0.3, "framework": 0.4},
        1.0,
        "rate of fused attention over the peak (FlashAttention-2 reaches 0.5 to 0.73 on an A100: "
        "2307.08691)",
    ),
    "score_passes": Prior(
        "1",
        8.0,
        0.5,
        {"framework": 0.4},
        math.inf,
        "times that unfused attention moves its scores, forward",
    ),
    "kernel_seconds": Prior(
        "s", 1.5e-5, 0.7, {"framework": 0.8}, math.inf, "host time to start one kernel"
    ),
    "fast_efficiency": Prior(
        "1",
        0.7,
        0.3,
        {"cluster": 0.5},
        1.0,
        "bus bandwidth over the fast link's rate (0.78 on an 8x A100 node)",
    ),
    "fabric_efficiency": Prior(
        "1", 0.55, 0.4, {"cluster": 0.5}, 1.0, "bus bandwidth over the network's rate"
    ),
    "collective_seconds": Prior(
        "s",
        2e-5,
        0.7,
        {"cluster": 0.7},
        math.inf,
        "latency of a collective per doubling of its ranks",
    ),
    "tail_per_doubling": Prior(
        "1",
        0.008,
        0.8,
        {"cluster": 0.7},
        math.inf,
        "share by which a step waits for its slowest node, per doubling of nodes",
    ),
    "pipelined_wait_seconds": Prior(
        "s",
        1e-4,
        1.6,
        {"framework": 1.5},
        math.inf,
        "wait of a tensor-parallel collective, per rank of its group, while transfers between "
        "pipeline stages cross nodes",
    ),
    "tensor_exposed": Prior(
        "1",
        0.9,
        0.1,
        {"framework": 0.2},
        1.0,
        "share of tensor-parallel collectives that products do not hide (below 1 where a framework "
        "sends parts of a product while it computes others)",
    ),
    "cast_passes": Prior(
        "1",
        1.0,
        0.5,
        {"chip": 0.3, "framework": 0.5},
        math.inf,
        "times that casting to fp8 moves what goes into each product",
    ),
    "expert_imbalance": Prior(
        "1",
        1.25,
        0.15,
        {"framework": 0.3},
        math.inf,
        "tokens of the busiest rank of an expert group over their mean",
    ),
    "transfer_exposed": Prior(
        "1",
        0.4,
        0.6,
        {"framework": 0.8},
        1.0,
        "share of transfers between stages that is not hidden",
    ),
    "gradient_exposed": Prior(
        "1", 0.6, 0.5, {"framework": 0.8}, 1.0, "share of the gradients' sum that is not hidden"
    ),
    "gather_exposed": Prior(
        "1",
        0.15,
        0.7,
        {"framework": 1.0},
        1.0,
        "share of the weights' gathering that is not hidden where computing takes longer",
    ),
    "optimizer_efficiency": Prior(
        "1", 0.6, 0.35, {"framework": 0.5}, 1.0, "rate of the optimizer over the memory's peak"
    ),
    "step_seconds": Prior(
        "s", 0.02, 1.0, {"framework": 0.5}, math.inf, "what a step takes beside everything else"
    ),
}

KNOWN_OF_CHIPS: dict[tuple[str, str], float] = {
    ("attention_efficiency", chip): 0.35 / 0.6 for chip in ("h100-sxm", "h200-sxm")
}
"""A chip's constant over the prior's median, before any run was measured.

FlashAttention-2, the kernel that most frameworks call, uses none of Hopper's own instructions: it
reaches 0.35 of an H100's peak (2407.08608, section 1), and 0.5 to 0.73 of an A100's (2307.08691).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Values of the constants of `PRIORS`, of shape (1,), or (cases,) where groups differ."""

    matmul_efficiency: Array
    matmul_half_side: Array
    memory_efficiency: Array
    attention_efficiency: Array
    score_passes: Array
    kernel_seconds: Array
    fast_efficiency: Array
    fabric_efficiency: Array
    collective_seconds: Array
    tail_per_doubling: Array
    pipelined_wait_seconds: Array
    tensor_exposed: Array
    cast_passes: Array
    expert_imbalance: Array
    transfer_exposed: Array
    gradient_exposed: Array
    gather_exposed: Array
    optimizer_efficiency: Array
    step_seconds: Array


NAMES: tuple[str, ...] = tuple(field.name for field in fields(Constants))


def constants(values: Mapping[str, float | Array] | None = None) -> Constants:
    """Constants with the priors' medians where nothing is given.

    Args:
        values: By name, of shape (), (1,) or (cases,).
    """
    given = values or {}
    return Constants(
        **{name: np.atleast_1d(np.asarray(given.get(name, PRIORS[name].median))) for name in NAMES}
    )


def unbounded(name: str, value: Array) -> Array:
    """A constant on the scale on which it is fitted: logit of its share of a bound, or logarithm.

    Args:
        name: Of the constant.
        value: Below its bound and above zero.
    """
    return PRIORS[name].unbounded(value)


def bounded(name: str, position: Array) -> Array:
    """The inverse of `unbounded`: never above the bound."""
    return PRIORS[name].bounded(position)


def unbounded_deviation(name: str, log_deviation: float) -> float:
    """A log standard deviation at the prior's median, on the scale of `unbounded`."""
    prior = PRIORS[name]
    # The derivative of the logit by the logarithm; where the median is close to the bound it is
    # cut, or noise of a few per cent would count for nothing.
    return log_deviation / max(1.0 - prior.median / prior.most, 0.2)
