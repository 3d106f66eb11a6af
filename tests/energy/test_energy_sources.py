"""Counters other than NVML's: RAPL files, AMD, nodes, integrated and stated power."""

import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from energy_fake_nvml import Clock
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.energy.meter import EnergyMeter
from outlast.energy.sources import (
    FileSource,
    Interval,
    PowerIntegral,
    amd_sources,
    rapl_sources,
)
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

RANGE_UJ = 262_143_328_850  # of a Xeon: wraps after 262 kJ


def zone(root, directory, name, counter_uj=0, range_uj=RANGE_UJ):
    path = root / directory
    path.mkdir(parents=True)
    (path / "name").write_text(f"{name}\n")
    (path / "energy_uj").write_text(f"{counter_uj}\n")
    (path / "max_energy_range_uj").write_text(f"{range_uj}\n")
    return path / "energy_uj"


@pytest.fixture
def two_sockets(tmp_path):
    """A tree as Linux shows it, with psys and the mirror of package 0."""
    (tmp_path / "intel-rapl").mkdir()
    return tmp_path, {
        "cpu 0": zone(tmp_path, "intel-rapl:0", "package-0"),
        "core": zone(tmp_path, "intel-rapl:0:0", "core"),
        "memory 0": zone(tmp_path, "intel-rapl:0:1", "dram"),
        "cpu 1": zone(tmp_path, "intel-rapl:1", "package-1"),
        "memory 1": zone(tmp_path, "intel-rapl:1:0", "dram"),
        "psys": zone(tmp_path, "intel-rapl:2", "psys"),
        "mirror": zone(tmp_path, "intel-rapl-mmio:0", "package-0"),
    }


def test_packages_and_memory_are_told_apart_and_nothing_counts_twice(two_sockets):
    root, files = two_sockets
    clock = Clock()
    sources, missing = rapl_sources(root, clock)
    assert missing == []
    assert [(source.name, source.part) for source in sources] == [
        ("cpu package 0", "cpu"),
        ("memory of package 0", "memory"),
        ("cpu package 1", "cpu"),
        ("memory of package 1", "memory"),
    ]
    with EnergyMeter("w", sources, clock=clock) as meter:
        for joules, file in enumerate(files.values(), start=1):
            file.write_text(f"{joules * 1_000_000}\n")
        clock.advance(1)
    assert meter.total("cpu").joules == pytest.approx(1 + 4)
    assert meter.total("memory").joules == pytest.approx(3 + 5)
    everything = meter.total()
    assert everything.joules == pytest.approx(13), "the platform contains the packages"
    assert any("without gpu" in flag for flag in everything.flags)


@settings(max_examples=25, deadline=None)
@given(
    start=st.integers(0, RANGE_UJ), steps=st.lists(st.integers(0, RANGE_UJ), min_size=1, max_size=8)
)
def test_wrap_around_loses_nothing(start, steps):
    with tempfile.TemporaryDirectory() as folder:
        file = zone(Path(folder), "intel-rapl:0", "package-0", start)
        clock = Clock()
        (source,), _ = rapl_sources(Path(folder), clock)
        assert source.joules() == 0
        counter = start
        for step in steps:
            counter = (counter + step) % (RANGE_UJ + 1)
            file.write_text(f"{counter}\n")
            clock.advance(1)
            source.joules()
        assert source.joules() == pytest.approx(sum(steps) * 1e-6)


def test_a_wrap_that_nobody_could_see_makes_the_counter_unavailable(tmp_path):
    zone(tmp_path, "intel-rapl:0", "package-0")
    clock = Clock()
    (source,), _ = rapl_sources(tmp_path, clock)
    source.joules()
    clock.advance(3600)
    reading = source.joules()
    assert isinstance(reading, Unavailable)
    assert "wrapped" in reading.reason
    assert source.poll_seconds < 262_143 / 2000, "an open meter reads it often enough"


def test_counters_of_root_only_tell_the_remedy():
    root = Path(tempfile.mkdtemp())
    was_root = os.geteuid() == 0
    try:
        file = zone(root, "intel-rapl:0", "package-0")
        root.chmod(0o755)
        file.chmod(0o400 if was_root else 0o000)
        if was_root:
            os.seteuid(65534)
        sources, _ = rapl_sources(root)
    finally:
        if was_root:
            os.seteuid(0)
        shutil.rmtree(root)
    with EnergyMeter("w", sources) as meter:
        pass
    reading = meter.total("cpu")
    assert isinstance(reading, Unavailable)
    assert "chmod a+r" in reading.remedy
    assert str(file) in reading.remedy


def test_no_rapl_tells_why(tmp_path):
    assert rapl_sources(tmp_path)[1][0].reason == f"no RAPL counters in {tmp_path}"
    assert "modprobe" in rapl_sources(tmp_path / "none")[1][0].remedy


def test_a_damaged_counter_is_unavailable(tmp_path):
    file = zone(tmp_path, "intel-rapl:0", "package-0")
    (source,), _ = rapl_sources(tmp_path)
    file.write_text("nonsense\n")
    assert isinstance(source.joules(), Unavailable)
    (tmp_path / "intel-rapl:0" / "max_energy_range_uj").unlink()
    (source,), _ = rapl_sources(tmp_path)
    assert isinstance(source.joules(), Unavailable)


class AmdSmiError(Exception):
    pass


def fake_amdsmi(key="energy_accumulator", count=1_000_000, **changes):
    answers = {
        "AmdSmiException": AmdSmiError,
        "amdsmi_init": lambda: None,
        "amdsmi_get_processor_handles": lambda: ["a", "b", "c"],
        "amdsmi_get_gpu_device_uuid": lambda handle: f"uuid-{handle}",
        "amdsmi_get_energy_count": lambda handle: {key: count, "counter_resolution": 15.259},
    }
    return SimpleNamespace(**{**answers, **changes})


@pytest.mark.parametrize("key", ["energy_accumulator", "power"])
def test_amd_counts_in_microjoules_by_either_name(key, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES", raising=False)
    sources, _ = amd_sources(fake_amdsmi(key))
    assert [source.joules() for source in sources] == pytest.approx([15.259] * 3)


def test_amd_shows_what_hip_shows_of_what_rocr_shows(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "2,0")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    (source,), _ = amd_sources(fake_amdsmi())
    assert source.name == "gpu 0 (uuid-a)"
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "GPU-77")
    sources, _ = amd_sources(fake_amdsmi())
    assert all(isinstance(source.joules(), Unavailable) for source in sources)


def test_amd_failures_are_reasons(tmp_path):
    def fail(*_):
        raise AmdSmiError("no driver")

    assert "does not start" in amd_sources(fake_amdsmi(amdsmi_init=fail))[1][0].reason
    (source, *_), _ = amd_sources(fake_amdsmi(amdsmi_get_energy_count=fail))
    assert isinstance(source.joules(), Unavailable)
    assert "no AMD GPU" in amd_sources(driver=tmp_path / "kfd")[1][0].reason


def test_amd_without_its_package_names_the_remedy(tmp_path):
    (tmp_path / "kfd").touch()
    try:
        import amdsmi  # noqa: F401
    except ImportError:
        assert "pip install amdsmi" in amd_sources(driver=tmp_path / "kfd")[1][0].remedy


def test_a_file_of_joules_is_a_node_meter(tmp_path):
    file = tmp_path / "energy"
    file.write_text("1500 J 1700000000 us\n")
    source = FileSource(file, update_seconds=0.1)
    assert source.part == "node"
    assert source.joules() == 1500
    assert FileSource(file, joules_per_unit=1e-6).joules() == pytest.approx(0.0015)
    for damaged in ("", "none\n", "nan\n", "-3\n"):
        file.write_text(damaged)
        assert isinstance(source.joules(), Unavailable)
    file.unlink()
    assert "cannot be read" in source.joules().reason


def test_a_source_of_ones_own_that_knows_its_error_keeps_its_interval_and_flags():
    class Stated:
        name, part, kind, update_seconds = "cpu", "cpu", "modelled", 0.0
        flags = ("not measured: 100 to 200 W were stated",)

        def joules(self):
            return self.interval().joules

        def interval(self):
            return Interval(100 * clock(), 150 * clock(), 200 * clock())

    clock = Clock()
    with EnergyMeter("w", [Stated()], clock=clock) as meter:
        clock.advance(10)
    reading = meter.total("cpu")
    assert (reading.kind, reading.joules) == ("modelled", pytest.approx(1500))
    assert (reading.low_joules, reading.high_joules) == pytest.approx((1000, 2000))
    assert any("not measured" in flag for flag in reading.flags)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 5), st.floats(1, 700)), min_size=1, max_size=20))
def test_integrated_power_that_is_piecewise_linear_is_exact(points):
    clock, now = Clock(), [50.0]
    integral = PowerIntegral("gpu", "gpu", lambda: now[0], clock=clock)
    integral.joules()
    truth = 0.0
    for seconds, watts in points:
        truth += (now[0] + watts) / 2 * seconds
        now[0] = watts
        clock.advance(seconds)
        low, joules, high = integral.interval()
    assert joules == pytest.approx(truth)
    assert low <= truth <= high


def test_a_gap_between_power_samples_is_flagged_and_a_failure_is_told_once():
    clock, answers = Clock(), [100.0, 100.0, Unavailable("lost"), 100.0]
    integral = PowerIntegral("gpu", "gpu", lambda: answers.pop(0), clock=clock)
    integral.joules()
    clock.advance(30)
    integral.joules()
    assert any("up to 30.0 s" in flag for flag in integral.flags)
    assert integral.joules() == Unavailable("lost")
    assert integral.joules() == 3000
    assert integral.losses == 1
    with pytest.raises(EnergyError, match=r"at least 0\.1 s"):
        PowerIntegral("gpu", "gpu", lambda: 1.0, period_seconds=0.01)
