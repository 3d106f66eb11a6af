"""Joules of training: measured, planned on the time-energy frontier, and reported.

For example::

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

from outlast.extras import require
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from outlast.energy import example as example
    from outlast.energy.account import EnergyReport as EnergyReport
    from outlast.energy.control import DryRun as DryRun
    from outlast.energy.control import Setting as Setting
    from outlast.energy.control import applied as applied
    from outlast.energy.control import device_settings as device_settings
    from outlast.energy.controllers import NvmlController as NvmlController
    from outlast.energy.controllers import ZeusdController as ZeusdController
    from outlast.energy.lease import lease_path as lease_path
    from outlast.energy.meter import EnergyMeter as EnergyMeter
    from outlast.energy.model import Calibration as Calibration
    from outlast.energy.model import DeviceConstants as DeviceConstants
    from outlast.energy.model import Work as Work
    from outlast.energy.model import calibrate as calibrate
    from outlast.energy.model import margin_of as margin_of
    from outlast.energy.model import predicted_profile as predicted_profile
    from outlast.energy.model import predictions as predictions
    from outlast.energy.plan import ClockPlan as ClockPlan
    from outlast.energy.plan import Frontier as Frontier
    from outlast.energy.plan import save_picture as save_picture
    from outlast.energy.planner import EnergyPlanner as EnergyPlanner
    from outlast.energy.profile import Curve as Curve
    from outlast.energy.profile import Key as Key
    from outlast.energy.profile import Point as Point
    from outlast.energy.profile import Profile as Profile
    from outlast.energy.profile import margin_for as margin_for
    from outlast.energy.profile import read_profile as read_profile
    from outlast.energy.profile import smoothed as smoothed
    from outlast.energy.profile import write_profile as write_profile
    from outlast.energy.schedule import Schedule as Schedule
    from outlast.energy.schedule import explained as explained
    from outlast.energy.schedule import from_torch as from_torch
    from outlast.energy.schedule import gpipe as gpipe
    from outlast.energy.schedule import interleaved as interleaved
    from outlast.energy.schedule import one_f_one_b as one_f_one_b
    from outlast.energy.schedule import sharded as sharded
    from outlast.energy.schedule import single_stage as single_stage
    from outlast.energy.schedule import with_tail as with_tail
    from outlast.energy.schedule import with_transfers as with_transfers
    from outlast.energy.schedule import zero_bubble as zero_bubble
    from outlast.energy.sources import FileSource as FileSource
    from outlast.energy.sources import available_sources as available_sources
    from outlast.energy.window import Energy as Energy
    from outlast.energy.window import Window as Window

_MODULES = {
    "account": "EnergyReport",
    "control": "DryRun Setting applied device_settings",
    "controllers": "NvmlController ZeusdController",
    "lease": "lease_path",
    "meter": "EnergyMeter",
    "model": "Calibration DeviceConstants Work calibrate margin_of predicted_profile predictions",
    "plan": "ClockPlan Frontier save_picture",
    "planner": "EnergyPlanner",
    "profile": "Curve Key Point Profile margin_for read_profile smoothed write_profile",
    "schedule": "Schedule explained from_torch gpipe interleaved one_f_one_b sharded single_stage "
    "with_tail with_transfers zero_bubble",
    "sources": "FileSource available_sources",
    "window": "Energy Window",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = ["Unavailable", "example"]
__all__ += list(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "example":
        return importlib.import_module(f"{__name__}.example")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "EnergyPlanner":
        require("energy", "a plan of clocks", "scipy", "highspy")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
