"""Constants of the time and memory models: meanings, priors, bounds, owners."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

import numpy as np

from outlast.plan.batch import Array
from outlast.plan.facts import facts

Level: TypeAlias = Literal["chip", "cluster", "framework"]
LEVELS: tuple[Level, ...] = ("chip", "cluster", "framework")


@dataclass(frozen=True, slots=True)
class Prior:
    """Prior of a constant, before any run was measured.

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

    def unbounded_deviation(self, log_deviation: float) -> float:
        """A log standard deviation at the median, on the scale of `unbounded`."""
        # The derivative of the logit by the logarithm; where the median is close to the bound it
        # is cut, or noise of a few per cent would count for nothing.
        return log_deviation / max(1.0 - self.median / self.most, 0.2)


def _priors(model: str) -> dict[str, Prior]:
    return {
        name: Prior(**{"spreads": {}, "most": math.inf} | table)
        for name, table in facts("priors")[model].items()
    }


def _filled(priors: Mapping[str, Prior], given: Mapping[str, float | Array]) -> dict[str, Array]:
    return {
        name: np.atleast_1d(np.asarray(given.get(name, prior.median), dtype=np.float64))
        for name, prior in priors.items()
    }


PRIORS: dict[str, Prior] = _priors("time")

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


NAMES: tuple[str, ...] = tuple(constant.name for constant in fields(Constants))


def constants(values: Mapping[str, float | Array] | None = None) -> Constants:
    """Constants with the priors' medians where nothing is given.

    Args:
        values: By name, of shape (), (1,) or (cases,).
    """
    return Constants(**_filled(PRIORS, values or {}))


MEMORY_PRIORS: dict[str, Prior] = _priors("memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConstants:
    """Values of the constants of `MEMORY_PRIORS`, of shape (1,), or (cases,) where runs differ."""

    bucket_bytes: Array
    copy_bytes: Array
    gather_buffers: Array
    workspace_bytes: Array
    hidden_values: Array
    attention_values: Array
    logit_copies: Array
    backward_blocks: Array
    buffers_ahead: Array
    fragment_share: Array
    step_copy_bytes: Array
    library_bytes: Array
    process_bytes: Array
    stuck_share: Array
    usable_share: Array


MEMORY_NAMES: tuple[str, ...] = tuple(item.name for item in fields(MemoryConstants))


def memory_constants(values: Mapping[str, float | Array] | None = None) -> MemoryConstants:
    """Constants with the priors' medians where nothing is given.

    Args:
        values: By name, of shape (), (1,) or (cases,).
    """
    return MemoryConstants(**_filled(MEMORY_PRIORS, values or {}))
