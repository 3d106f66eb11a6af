"""What goes wrong while a meter is open: it never ends the program, and never gives a wrong sum."""

import gc
import threading
import time
from types import SimpleNamespace

import pytest
from energy_fake_nvml import Clock, FakeNvml, Gpu
from energy_fakes import Counter

from outlast.energy.meter import EnergyMeter
from outlast.energy.sources import (
    FileSource,
    PowerIntegral,
    UnreadableSource,
    amd_sources,
    available_sources,
    nvml_sources,
    rapl_sources,
)
from outlast.energy.window import Energy, Still
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

NEVER = 3600.0
"""Seconds between two samples of the meter's own thread: the test alone takes samples."""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for vendor in ("CUDA", "HIP", "ROCR"):
        monkeypatch.delenv(f"{vendor}_VISIBLE_DEVICES", raising=False)


class Failing:
    """A GPU whose driver fails in every way, once it is told to."""

    name, part, kind, update_seconds, poll_seconds = "bad gpu", "gpu", "measured", 0.0, 0.2

    def __init__(self, error):
        self.error, self.failing, self.asked = error, False, set()

    def _give(self, what, value):
        self.asked.add(what)
        if self.failing:
            raise self.error
        return value

    def joules(self):
        return self._give("joules", 5.0)

    def watts(self):
        return self._give("watts", 100.0)

    def state(self):
        return self._give("state", None)

    def throttle_reasons(self):
        return self._give("throttle_reasons", ())


@pytest.mark.parametrize("error", [KeyError("counter"), ValueError("N/A"), RuntimeError("gone")])
def test_whatever_a_source_raises_is_a_reason_and_the_program_goes_on(error):
    clock = Clock()
    source = Failing(error)
    good = Counter("node", lambda: 100 * clock(), update_seconds=0.1)
    with EnergyMeter("w", [source, good], clock=clock) as meter:
        source.failing = True
        source.asked.clear()
        clock.advance(10)
        meter.watch.poll()
        lap = meter.lap()
        clock.advance(10)
    assert source.asked == {"joules", "watts", "state", "throttle_reasons"}
    for window in (lap, meter.read()):
        reason = window.joules["bad gpu"].reason
        assert reason == f"bad gpu cannot be read ({type(error).__name__}: {error})"
    assert meter.total("node").joules == pytest.approx(2000)


def test_a_failing_thread_task_does_not_stop_the_others():
    source = Failing(RuntimeError("gone"))
    source.poll_seconds = 0.001
    source.failing = True
    reads = []
    polled = Counter("node", lambda: float(len(reads)), update_seconds=0)
    polled.poll_seconds = 0.001
    polled.read = lambda: reads.append(1) or float(len(reads))
    with EnergyMeter("w", [source, polled]):
        begin, deadline = len(reads), time.monotonic() + 60
        while len(reads) < begin + 5:
            assert time.monotonic() < deadline, "the thread died"
            time.sleep(0.005)


def test_amd_without_a_figure_says_so():
    fake = SimpleNamespace(
        AmdSmiException=RuntimeError,
        amdsmi_init=lambda: None,
        amdsmi_get_processor_handles=lambda: ["a"],
        amdsmi_get_gpu_device_uuid=lambda handle: handle,
        amdsmi_get_energy_count=lambda handle: {"power": "N/A", "counter_resolution": 15.3},
    )
    (source,), _ = amd_sources(fake)
    assert "N/A" in source.joules().reason


def test_meters_that_cannot_be_looked_for_are_reasons(tmp_path):
    class Broken:
        NVMLError = OSError

        def nvmlInit(self):  # noqa: N802
            raise AttributeError("undefined symbol")

    sources, missing = available_sources(nvml=Broken(), powercap=tmp_path)
    assert sources == []
    assert any("undefined symbol" in why.reason for why in missing)


def test_a_gpu_that_is_not_listed_is_refused():
    clock = Clock()
    nvml = FakeNvml([Gpu("GPU-a")], clock)
    with pytest.raises(EnergyError, match="asks for GPU 3, but 1 are visible"):
        available_sources(gpus=[3], cpus=False, nvml=nvml, clock=clock)


def test_a_reset_that_a_lap_saw_makes_the_whole_window_unavailable_but_not_later_laps():
    clock, count = Clock(), [1000.0]
    node = Counter("node", lambda: count[0], update_seconds=0.1)
    with EnergyMeter("w", [node], clock=clock) as meter:
        laps = []
        for value in (2000.0, 50.0, 1500.0):
            count[0] = value
            clock.advance(10)
            laps.append(meter.lap().total("node"))
    first, across, after = laps
    assert first.joules == 1000
    assert "reset" in across.reason
    assert after.joules == 1450
    assert "reset" in meter.total("node").reason


def test_a_reset_between_two_marks_is_seen_by_the_thread():
    clock = Clock()
    gpu = Gpu("GPU-a", 300.0)
    sources, _ = nvml_sources(FakeNvml([gpu], clock), clock)
    with EnergyMeter("w", sources, clock=clock, power_check_seconds=NEVER) as meter:
        clock.advance(5)
        meter.watch.poll()
        gpu.reloaded_joules = 301_500.0
        clock.advance(0.2)
        meter.watch.poll()
        gpu.reloaded_joules = 0.0
        clock.advance(100)
        with EnergyMeter("after", sources, clock=clock) as inner:
            clock.advance(10)
    assert "reset" in meter.total("gpu").reason
    assert inner.total("gpu").joules == pytest.approx(3000, rel=0.02)


def test_a_counter_that_stands_is_still_and_an_absence_is_not():
    clock = Clock()
    node = Counter("gpu a", lambda: 7.0, update_seconds=1.0, part="gpu")
    moving = Counter("gpu b", clock, update_seconds=1.0, part="gpu")
    hidden = UnreadableSource("gpu c", "gpu", Unavailable("root only"))
    for sources, kind in (([node], Still), ([moving, node], Still), ([node, hidden], Unavailable)):
        with EnergyMeter("w", sources, clock=clock) as meter:
            clock.advance(5)
        assert type(meter.total("gpu")) is kind


def test_only_windows_across_a_failed_power_sample_are_unavailable():
    clock, watts = Clock(), [100.0]
    source = PowerIntegral("gpu", "gpu", lambda: watts[0], clock=clock)
    laps = []
    with EnergyMeter("w", [source], clock=clock) as meter:
        for value in (100.0, Unavailable("the sensor is busy"), 100.0, 100.0):
            watts[0] = value
            clock.advance(10)
            meter.watch.poll()
            laps.append(meter.lap().total("gpu"))
    assert laps[0].joules == pytest.approx(1000)
    assert laps[1] == Unavailable("the sensor is busy")
    assert isinstance(laps[2], Unavailable)
    assert laps[3].joules == pytest.approx(1000)
    assert any("power samples failed" in flag for flag in laps[3].flags)
    assert isinstance(meter.total("gpu"), Unavailable)


def test_a_rapl_counter_that_was_not_read_in_time_counts_again_from_there(tmp_path):
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    for name, text in (("name", "package-0"), ("max_energy_range_uj", "262143328850")):
        (zone / name).write_text(text)
    counter = zone / "energy_uj"
    counter.write_text("0")
    clock, joules = Clock(), 0
    (source,), _ = rapl_sources(tmp_path, clock)
    laps = []
    with EnergyMeter("w", [source], clock=clock, power_check_seconds=None) as meter:
        for seconds in (10, 3600, 10):
            joules += 500
            counter.write_text(f"{joules * 1_000_000}")
            clock.advance(seconds)
            laps.append(meter.lap().total("cpu"))
    assert [getattr(lap, "joules", None) for lap in laps] == [500, None, 500]
    assert "wrapped" in laps[1].reason
    assert "wrapped" in meter.total("cpu").reason


def test_a_power_check_whose_samples_failed_says_so():
    clock = Clock()
    nvml = FakeNvml([Gpu("GPU-a", 300.0)], clock)
    sources, _ = nvml_sources(nvml, clock)
    with EnergyMeter("w", sources, clock=clock, power_check_seconds=NEVER) as meter:
        for sample in range(50):
            if sample == 10:
                nvml.refuse = {"nvmlDeviceGetPowerUsage", "nvmlDeviceGetFieldValues"}
            if sample == 12:
                nvml.refuse = set()
            clock.advance(0.2)
            meter.watch.poll()
    reading = meter.total("gpu")
    assert reading.joules == pytest.approx(3000, rel=0.02)
    (flag,) = reading.flags
    assert flag.startswith("power check stopped: 2 of ")


def test_laps_read_no_states():
    clock = Clock()
    nvml = FakeNvml([Gpu("GPU-a", 300.0)], clock)
    sources, _ = nvml_sources(nvml, clock)
    with EnergyMeter("w", sources, clock=clock, power_check_seconds=NEVER) as meter:
        clock.advance(5)
        nvml.calls.clear()
        assert meter.lap().states == {}
        assert "nvmlDeviceGetTemperature" not in nvml.calls


@pytest.mark.slow
def test_an_open_meter_that_is_dropped_leaves_no_thread(tmp_path):
    (tmp_path / "joules").write_text("1")
    before = set(threading.enumerate())
    meter = EnergyMeter("w", [FileSource(tmp_path / "joules")])
    meter.__enter__()
    (thread,) = set(threading.enumerate()) - before
    del meter
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_a_measured_figure_that_no_machine_draws_is_refused(tmp_path):
    clock, file = Clock(), tmp_path / "energy_uj"
    file.write_text("0")

    def joules(**settings):
        with EnergyMeter("w", [FileSource(file, clock=clock, **settings)], clock=clock) as meter:
            for second in range(20):
                clock.advance(1)
                file.write_text(f"{(second + 1) * 400_000_000 + int(clock()) * 10**12}")
                meter.lap()
        return meter.total("node")

    refused = joules(update_seconds=1.0)
    assert isinstance(refused, Unavailable)
    assert "joules_per_unit = 1e-6" in refused.remedy
    assert isinstance(joules(update_seconds=1.0, joules_per_unit=1e-12), Energy)
