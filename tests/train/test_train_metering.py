"""What a rank reads and writes down about energy, without a training around it."""

from __future__ import annotations

import os
import socket
import urllib.request
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from forked import run_ranks

from outlast.distributed.ranks import Ranks, join, leave, ranks_from
from outlast.energy.meter import EnergyMeter
from outlast.energy.sources import FileSource
from outlast.energy.window import DeviceState
from outlast.hardware.figure import Unavailable
from outlast.job import load_job
from outlast.runtime.energy import RunMeter, boot, find_sources, run_meter

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.energy.sources import Part
    from outlast.energy.window import Kind
    from outlast.runtime.guarding import RunGuard

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


def _waiting() -> list[dict[str, Any]]:
    mine = ranks_from(os.environ)
    join(mine, torch.device("cpu"), 60.0)
    meter = meter_of(Device(f"gpu {mine.rank}"), rank=mine.rank, every_steps=1)
    meter.begin(0)
    # Rank 1 is slow: the other two wait for it.
    seconds = {"compute": 1.0, "communication": 0.5} if mine.rank != 1 else {"communication": 0.1}
    event = meter.steps_done(1, 1, seconds)
    leave()
    assert event is not None
    return event.devices


def test_waiting_for_a_slow_rank_is_told_apart_from_what_all_wait() -> None:
    for devices in run_ranks(3, _waiting):
        assert [each["purposes"] for each in devices] == [
            {"compute": 1.0, "communication": 0.1, "straggler": 0.4},
            {"communication": 0.1},
            {"compute": 1.0, "communication": 0.1, "straggler": 0.4},
        ]


def test_the_machine_is_known_by_its_boot_too() -> None:
    event = meter_of(Device()).begin(0)
    assert event is not None
    assert (event.devices[0]["host"], event.devices[0]["boot"]) == (socket.gethostname(), boot())


def _lacking() -> dict[str, str]:
    mine = ranks_from(os.environ)
    join(mine, torch.device("cpu"), 60.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: f"node-{mine.rank}")
        meter = meter_of(rank=mine.rank)
        meter.unavailable = {"gpu": "none here", "cpu": f"reason {mine.rank}"}
        event = meter.begin(0)
    leave()
    assert event is not None
    return event.unavailable


def test_hosts_that_lack_different_meters_are_named() -> None:
    assert run_ranks(2, _lacking)[0] == {
        "gpu": "none here",
        "cpu of node-0": "reason 0",
        "cpu of node-1": "reason 1",
    }


def test_the_tariff_is_in_the_first_event_only(tmp_path: Path) -> None:
    tariff, joules = tmp_path / "tariff.toml", tmp_path / "joules"
    tariff.write_text('currency = "EUR"\nprice_per_kwh = 0.2\n')
    joules.write_text("1\n")
    sources = f'energy.sources=["file:{joules}"]'
    job = load_job(None, [sources, f'energy.tariff="{tariff}"', "energy.every_steps=1"])
    meter = run_meter(job.energy, ranks(), torch.device("cpu"), tokens_per_step=1)
    assert meter is not None
    first, second = meter.begin(0), meter.steps_done(1, 1, {"compute": 1.0})
    meter.close()
    assert first is not None
    assert second is not None
    assert (first.tariff, second.tariff) == (tariff.read_text(), "")


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text: str = answer.read().decode()
    return text


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port


def test_prometheus_reads_the_last_record_and_no_meter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    joules = tmp_path / "joules"
    joules.write_text("100\n")
    port = free_port()
    meter = meter_of(FileSource(str(joules)), Device(), rank=3)
    meter.stage = "1"
    meter.serve(port)
    try:
        joules.write_text("250\n")
        event = meter.begin(0)
        assert event is not None
        assert meter.warnings == []
        joules.write_text("900\n")
        said = scraped(port)
    finally:
        meter.close()
    labels = f'device="file {joules}",job="4711",rank="3",stage="1"'
    assert f"outlast_energy_joules_total{{{labels}}} 250.0" in said
    assert 'device="gpu 0 (GPU-8f6e)",job="4711",rank="3",stage="1"} 640.0' in said
    with pytest.raises(OSError, match="refused"):
        scraped(port)


def test_a_port_that_is_taken_is_a_warning() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        meter = meter_of(Device())
        meter.serve(port)
        event = meter.begin(0)
        meter.close()
    assert event is not None
    assert len(meter.warnings) == 1
    assert f"port = {port} of 127.0.0.1 cannot be had" in meter.warnings[0]
