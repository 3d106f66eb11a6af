"""Joules of training: measured, planned on the time-energy frontier, and reported.

with EnergyMeter() as meter:
    train_some_steps()
meter.joules                                     # per device, or Unavailable(reason); never 0

plan = EnergyPlanner(example.profile("a100")).plan(one_f_one_b(8, 12), deadline="+2%")
plan.saving, plan.gap                            # of top clocks; above what any plan can reach

Names are loaded when they are used. Nothing here needs torch but `from_torch` and the counting of a
step's work (`outlast.energy.capture`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from outlast.energy import example
    from outlast.energy.account import EnergyReport
    from outlast.energy.control import applied
    from outlast.energy.frontier.plan import ClockPlan
    from outlast.energy.frontier.planner import EnergyPlanner
    from outlast.energy.frontier.smoothing import margin_for, smoothed
    from outlast.energy.frontier.stragglers import Frontier
    from outlast.energy.meter import EnergyMeter
    from outlast.energy.model import (
        Calibration,
        DeviceConstants,
        Work,
        calibrate,
        predicted_profile,
    )
    from outlast.energy.profile import Curve, Key, Point, Profile, read_profile, write_profile
    from outlast.energy.schedule.graph import Schedule
    from outlast.energy.schedule.measured import explained
    from outlast.energy.schedule.pipelines import (
        from_torch,
        gpipe,
        interleaved,
        one_f_one_b,
        sharded,
        single_stage,
        with_tail,
        with_transfers,
        zero_bubble,
    )
    from outlast.energy.sources import available_sources
    from outlast.energy.window import Energy, Window

_HOMES = {
    "Calibration": "model",
    "ClockPlan": "frontier.plan",
    "Curve": "profile",
    "DeviceConstants": "model",
    "Energy": "window",
    "EnergyMeter": "meter",
    "EnergyPlanner": "frontier.planner",
    "EnergyReport": "account",
    "Frontier": "frontier.stragglers",
    "Key": "profile",
    "Point": "profile",
    "Profile": "profile",
    "Schedule": "schedule.graph",
    "Window": "window",
    "Work": "model",
    "applied": "control",
    "available_sources": "sources",
    "calibrate": "model",
    "explained": "schedule.measured",
    "from_torch": "schedule.pipelines",
    "gpipe": "schedule.pipelines",
    "interleaved": "schedule.pipelines",
    "margin_for": "frontier.smoothing",
    "one_f_one_b": "schedule.pipelines",
    "predicted_profile": "model",
    "read_profile": "profile",
    "sharded": "schedule.pipelines",
    "single_stage": "schedule.pipelines",
    "smoothed": "frontier.smoothing",
    "with_tail": "schedule.pipelines",
    "with_transfers": "schedule.pipelines",
    "write_profile": "profile",
    "zero_bubble": "schedule.pipelines",
}

__all__ = [
    "Calibration",
    "ClockPlan",
    "Curve",
    "DeviceConstants",
    "Energy",
    "EnergyMeter",
    "EnergyPlanner",
    "EnergyReport",
    "Frontier",
    "Key",
    "Point",
    "Profile",
    "Schedule",
    "Unavailable",
    "Window",
    "Work",
    "applied",
    "available_sources",
    "calibrate",
    "example",
    "explained",
    "from_torch",
    "gpipe",
    "interleaved",
    "margin_for",
    "one_f_one_b",
    "predicted_profile",
    "read_profile",
    "sharded",
    "single_stage",
    "smoothed",
    "with_tail",
    "with_transfers",
    "write_profile",
    "zero_bubble",
]


def __getattr__(name: str) -> Any:
    if name == "example":
        return importlib.import_module(f"{__name__}.example")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
