"""A file as a meter: it learns how often the file changes, and never waits for it."""

import os
from types import SimpleNamespace

import pytest
from energy_fake_nvml import Clock

from outlast.energy.meter import EnergyMeter
from outlast.energy.sources import FileSource, amd_sources
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable


def node_file(path, clock, watts=100.0, period_seconds=2.0):
    """Puts what a meter of this period shows now into the file."""
    shown = clock() // period_seconds * period_seconds
    path.write_text(f"{shown * watts:.1f} J\n")


def test_the_period_is_learned_and_the_truth_lies_in_the_interval(tmp_path):
    clock, file = Clock(1000.1), tmp_path / "energy"
    node_file(file, clock)
    source = FileSource(file, clock=clock)
    source.poll_seconds = 3600.0  # the test alone reads
    with EnergyMeter("w", [source], clock=clock) as meter:
        for _ in range(100):
            clock.advance(0.1)
            node_file(file, clock)
            source.joules()
        assert source.update_seconds == pytest.approx(2.0, abs=0.11)
        meter.lap()
        clock.advance(4.3)
        node_file(file, clock)
        short = meter.lap().total("node")
    assert short.low_joules <= 430 <= short.high_joules
    assert short.low_joules < short.high_joules
    assert any("is short for a counter that changes every 2" in flag for flag in short.flags)


def test_rare_looks_bound_the_period_until_it_is_watched(tmp_path):
    clock, file = Clock(1000.1), tmp_path / "energy"
    source = FileSource(file, clock=clock)
    for seconds, known in ((30.0, 30.0), (0.1, 2.0), (30.0, 2.0)):
        for _ in range(40):
            node_file(file, clock)
            source.joules()
            clock.advance(seconds)
        assert source.update_seconds == pytest.approx(known, abs=0.11)


def test_before_the_file_was_seen_to_change_its_period_is_a_flagged_guess(tmp_path):
    clock, file = Clock(), tmp_path / "energy"
    file.write_text("0")
    source = FileSource(file, clock=clock)
    source.poll_seconds = 3600.0  # the test alone reads
    with EnergyMeter("w", [source], clock=clock) as meter:
        file.write_text("300")
        clock.advance(3)
    reading = meter.total("node")
    assert reading.low_joules < 300 < reading.high_joules
    assert any("is not known" in flag for flag in reading.flags)


def test_a_stated_period_stands_and_must_be_one(tmp_path):
    clock, file = Clock(), tmp_path / "energy"
    source = FileSource(file, update_seconds=0.5, clock=clock)
    for second in range(5):
        file.write_text(f"{second}")
        source.joules()
        clock.advance(3)
    assert source.update_seconds == 0.5
    assert source.flags == ()
    with pytest.raises(EnergyError, match="update_seconds = -1"):
        FileSource(file, update_seconds=-1)


def test_a_pipe_or_directory_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        found = FileSource(path).joules()
        assert isinstance(found, Unavailable)
        assert "not a regular file" in found.reason


def test_little_is_read_of_a_file_that_is_no_meter(tmp_path):
    file = tmp_path / "large"
    with file.open("wb") as large:
        large.truncate(1 << 40)
    assert "holds no number" in FileSource(file).joules().reason
    file.write_bytes(b"12 J " + b"x" * 10_000)
    assert FileSource(file).joules() == 12
    file.write_text("1" * 200)
    assert isinstance(FileSource(file).joules(), Unavailable)


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ({}, [0, 1, 2, 3]),
        ({"CUDA": "2,1"}, [2, 1]),
        ({"HIP": "3", "CUDA": "2"}, [3]),
        ({"ROCR": "3,1", "CUDA": "1"}, [1]),
    ],
)
def test_hip_honours_cuda_visible_devices_unless_its_own_is_set(monkeypatch, setting, shown):
    for vendor in ("CUDA", "HIP", "ROCR"):
        monkeypatch.delenv(f"{vendor}_VISIBLE_DEVICES", raising=False)
    for vendor, value in setting.items():
        monkeypatch.setenv(f"{vendor}_VISIBLE_DEVICES", value)
    handles = range(4)
    fake = SimpleNamespace(
        AmdSmiException=RuntimeError,
        amdsmi_init=lambda: None,
        amdsmi_get_processor_handles=lambda: handles,
        amdsmi_get_gpu_device_uuid=str,
    )
    sources, _ = amd_sources(fake)
    assert [source.name for source in sources] == [
        f"gpu {number} ({index})" for number, index in enumerate(shown)
    ]
