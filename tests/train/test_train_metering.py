"""What a rank reads and writes down about energy, without a training around it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from forked import run_ranks

from outlast.energy.devices.protocol import DeviceState
from outlast.energy.meter import EnergyMeter
from outlast.hardware.figure import Unavailable
from outlast.job import load_job
from outlast.train.metering import RunMeter, find_sources
from outlast.train.ranks import Ranks, join, leave, ranks_from

if TYPE_CHECKING:
    from outlast.energy.reading import Kind
    from outlast.energy.sources.protocol import Part
    from outlast.train.guarding import RunGuard

STATE = DeviceState(
    joules=Unavailable("not asked"),
    watts=640.0,
    sm_clock_mhz=1755,
    memory_clock_mhz=Unavailable("the driver does not say"),
    celsius=71.0,
    throttle_reasons=("software power cap",),
)


class Device:
    """A GPU that takes 10 J between two looks at it."""

    part: Part = "gpu"
    kind: Kind = "measured"
    update_seconds = 0.0

    def __init__(self, name: str = "gpu 0 (GPU-8f6e)") -> None:
        self.name = name
        self._joules = 1e6

    def joules(self) -> float | Unavailable:
        self._joules += 10.0
        return self._joules

    def state(self) -> DeviceState:
        return STATE

    def throttle_reasons(self) -> tuple[str, ...] | Unavailable:
        return STATE.throttle_reasons


def meter_of(*sources: Any, rank: int = 0, every_steps: int = 2, guard: Any = None) -> RunMeter:
    meter = EnergyMeter("run", sources, power_check_seconds=None)
    meter.__enter__()
    return RunMeter(meter, {}, rank, 100, every_steps, cast("RunGuard", guard))


def ranks(local_rank: int = 0) -> Ranks:
    return Ranks(local_rank, 2, local_rank, 2, "nproc")


def test_records_come_with_enough_steps_and_hold_them_all() -> None:
    meter = meter_of(Device(), every_steps=3)
    assert meter.begin(7) is not None
    assert meter.steps_done(9, 2, {"compute": 1.0}) is None
    event = meter.steps_done(11, 2, {"compute": 2.0, "data": 0.5})
    assert event is not None
    assert (event.step, event.steps, event.tokens) == (11, 4, 400)
    assert event.joules == 10.0
    assert event.devices[0]["purposes"] == {"compute": 3.0, "data": 0.5}
    assert meter.steps_done(12, 1, {"compute": 1.0}) is None
    last = meter.finish(12, {"checkpoint": 1.0})
    assert last is not None
    assert (last.steps, last.devices[0]["purposes"]) == (1, {"compute": 1.0, "checkpoint": 1.0})


def test_what_a_device_says_of_its_state_is_recorded_and_the_rest_is_left_out() -> None:
    meter = meter_of(Device())
    event = meter.begin(0)
    assert event is not None
    assert event.devices[0]["state"] == {
        "watts": 640.0,
        "celsius": 71.0,
        "sm_clock_mhz": 1755,
        "throttle_reasons": ["software power cap"],
    }


def test_time_of_the_guard_is_told_apart_from_that_of_computing() -> None:
    ledger = SimpleNamespace(seconds=0.5)
    meter = meter_of(Device(), guard=SimpleNamespace(guard=ledger))
    meter.begin(0)
    ledger.seconds = 0.9
    event = meter.steps_done(2, 2, {"compute": 3.0})
    assert event is not None
    assert event.devices[0]["purposes"] == pytest.approx({"compute": 2.6, "guard": 0.4})


def test_time_of_the_guard_that_is_not_known_stays_in_computing() -> None:
    meter = meter_of(Device(), guard=SimpleNamespace(guard=SimpleNamespace(seconds=None)))
    meter.begin(0)
    event = meter.steps_done(2, 2, {"compute": 3.0})
    assert event is not None
    assert event.devices[0]["purposes"] == {"compute": 3.0}


def test_without_a_source_nothing_is_read_after_the_first_record() -> None:
    meter = meter_of()
    first = meter.begin(0)
    assert first is not None
    assert first.joules is None
    assert meter.steps_done(2, 2, {"compute": 3.0}) is None
    assert meter.finish(2, {}) is None


def _sharing() -> list[dict[str, Any]]:
    import os

    mine = ranks_from(os.environ)
    join(mine, torch.device("cpu"), 60.0)
    names = ["gpu 0 (GPU-a)"] if mine.rank < 2 else ["gpu 1 (GPU-b)"]
    event = meter_of(*map(Device, names), rank=mine.rank).begin(0)
    leave()
    assert event is not None
    return event.devices


def test_a_gpu_that_two_ranks_share_counts_once() -> None:
    for devices in run_ranks(3, _sharing):
        assert [(each["name"], each["rank"]) for each in devices] == [
            ("gpu 0 (GPU-a)", 0),
            ("gpu 1 (GPU-b)", 2),
        ]


def test_only_the_first_rank_of_a_host_reads_what_the_host_has_once() -> None:
    settings = load_job(None, ['energy.sources=["cpu", "file:/tmp/joules"]']).energy
    cpu = torch.device("cpu")
    first, missing = find_sources(settings, ranks(0), cpu)
    assert "file /tmp/joules" in [each.name for each in first]
    assert "gpu" not in missing
    assert find_sources(settings, ranks(1), cpu) == ([], {})


def test_a_source_that_is_named_twice_is_read_once() -> None:
    settings = load_job(None, ['energy.sources=["file:/a", "file:/a"]']).energy
    sources, _ = find_sources(settings, ranks(0), torch.device("cpu"))
    assert [each.name for each in sources] == ["file /a"]
