"""Candidates and figures as short words, for tables, hovers and sentences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outlast.hardware import Unavailable
from outlast.plan.configuration import Configuration
from outlast.plan.pareto.objectives import FIGURES
from outlast.plan.pareto.search import Front
from outlast.plan.pareto.settings import Recovery, Settings

_SHARDED = {"none": "DDP", "optimizer": "ZeRO-1", "gradients": "ZeRO-2", "parameters": "FSDP"}


def layout_words(run: Configuration) -> str:
    """A layout in the field's abbreviations, e.g. ``8,192 GPU · TP 8 · PP 16x4 · DP 64 FSDP``."""
    parts = [f"{run.devices:,} GPU"]
    if run.tensor > 1:
        parts.append(f"TP {run.tensor}" + ("" if run.sequence_parallel else " without SP"))
    if run.pipeline > 1:
        chunks = f"x{run.stages_per_rank}" if run.stages_per_rank > 1 else ""
        schedule = {"zero_bubble": " zero-bubble", "gpipe": " GPipe"}.get(run.schedule, "")
        balance = " by cost" if run.balance == "cost" else ""
        parts.append(f"PP {run.pipeline}{chunks}{schedule}{balance}")
    if run.context > 1:
        parts.append(f"CP {run.context}")
    if run.expert > 1:
        parts.append(f"EP {run.expert}")
    if run.data > 1:
        grouped = 0 < run.sharding_ranks < run.data
        group = f" in groups of {run.sharding_ranks}" if grouped else ""
        parts.append(f"DP {run.data:,} {_SHARDED[run.sharding]}{group}")
    parts.append(f"micro-batch {run.micro_batch}")
    if run.recompute != "none":
        parts.append(f"recompute {run.recompute}")
    parts.append(run.precision)
    return " · ".join(parts)


def settings_words(settings: Settings) -> str:
    """The mechanisms that are in use."""
    every = (
        f"every {settings.checkpoint_seconds / 60:.3g} min"
        if settings.checkpoint_seconds
        else "at the best interval"
    )
    parts = [f"checkpoint {every} to {' + '.join(settings.tiers)}"]
    if settings.recovery.mode != "off":
        parts.append(_recovery_words(settings.recovery))
    if settings.guard != "off":
        parts.append(f"guard {settings.guard}")
    if settings.coding_copies > 1:
        parts.append(f"{settings.coding_copies} copies of gradients")
    if settings.tensorize_form != "dense":
        parts.append(f"{settings.tensorize_form} at {100 * settings.tensorize_rank:.3g} % rank")
    if settings.clock_mhz:
        parts.append(f"{settings.clock_mhz:,.0f} MHz")
    return " · ".join(parts)


def _recovery_words(recovery: Recovery) -> str:
    if recovery.mode == "live":
        return "live groups"
    every = "step" if recovery.every_steps == 1 else f"{recovery.every_steps} steps"
    parity = "" if recovery.parity is None else f", parity {recovery.parity}"
    return f"memory every {every}{parity}"


@dataclass(frozen=True, slots=True)
class Display:
    """Unit and format of a figure.

    Attributes:
        unit: The unit that reads well for the values at hand.
        factor: From the figure's own unit to it.
    """

    unit: str
    factor: float


_LADDERS: dict[str, tuple[tuple[float, str, float], ...]] = {
    "hours": ((96.0, "days", 1 / 24), (0.5, "h", 1.0), (0.0, "min", 60.0)),
    "lost_hours": ((96.0, "days", 1 / 24), (0.5, "h", 1.0), (0.0, "min", 60.0)),
    "kwh": ((2e6, "GWh", 1e-6), (2e3, "MWh", 1e-3), (0.0, "kWh", 1.0)),
    "device_hours": ((2e6, "million GPU h", 1e-6), (2e4, "kGPU h", 1e-3), (0.0, "GPU h", 1.0)),
    "money": ((2e6, "M", 1e-6), (2e4, "k", 1e-3), (0.0, "", 1.0)),
    "grams_co2": ((2e6, "tCO2", 1e-6), (2e3, "kgCO2", 1e-3), (0.0, "gCO2", 1.0)),
    "headroom_bytes": ((-np.inf, "GiB", 2.0**-30),),
    "miss_probability": ((-np.inf, "%", 100.0),),
}


def display(front: Front, name: str) -> Display:
    """The unit in which the median of a figure reads well."""
    column = front.objectives.column(name)
    if isinstance(column, Unavailable) or name not in _LADDERS or not len(front):
        return Display(front.unit(name), 1.0)
    middle = float(np.median(column))
    unit, factor = next(
        ((unit, factor) for least, unit, factor in _LADDERS[name] if middle >= least),
        (FIGURES[name].unit, 1.0),
    )
    return Display(f"{unit}{front.currency}" if name == "money" else unit, factor)
