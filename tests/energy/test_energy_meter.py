"""The meter: windows inside windows, laps, short windows, sums, checks and absence."""

import json
import subprocess
import sys
import threading
import time

import pytest
from energy_fake_nvml import Clock, FakeNvml, Gpu
from energy_fakes import Counter
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.energy.meter import EnergyMeter
from outlast.energy.sources import UnreadableSource, nvml_sources
from outlast.energy.window import Energy
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def gpu_meter(clock, *gpus, **settings):
    sources, _ = nvml_sources(FakeNvml(gpus, clock), clock)
    return EnergyMeter("train", sources, clock=clock, **settings)


@settings(deadline=None)
@given(
    phase=st.floats(0, 0.1),
    begin=st.floats(1000, 1001),
    seconds=st.floats(0.001, 30),
    watts=st.floats(50, 1000),
)
def test_the_truth_lies_in_the_interval(phase, begin, seconds, watts):
    clock = Clock(begin)
    with gpu_meter(clock, Gpu("GPU-a", watts, phase=phase), power_check_seconds=None) as meter:
        clock.advance(seconds)
    reading = meter.total("gpu")
    if isinstance(reading, Unavailable):
        assert seconds < 0.11, "only a window within one update may show nothing"
        return
    truth = watts * seconds
    assert reading.low_joules - 0.01 <= truth <= reading.high_joules + 0.01
    assert (reading.flags != ()) == (seconds < 1.0)


def test_gpus_add_up_and_seconds_are_those_of_the_clock():
    clock = Clock()
    with gpu_meter(clock, Gpu("GPU-a", 300.0), Gpu("GPU-b", 500.0)) as meter:
        clock.advance(20)
    assert meter.seconds == pytest.approx(20)
    assert [r.joules for r in meter.joules.values()] == pytest.approx([6000, 10000], rel=0.01)
    total = meter.total("gpu")
    assert total.joules == pytest.approx(16000, rel=0.01)
    assert total.kind == "measured"
    assert "GPU-a" in total.source
    assert "GPU-b" in total.source


def test_meters_inside_do_not_disturb_the_outer_one():
    clock = Clock()
    gpu = Gpu("GPU-a", 100.0)
    with gpu_meter(clock, gpu) as outer:
        clock.advance(10)
        with EnergyMeter("evaluate", outer.sources, clock=clock) as inner:
            gpu_joules = outer.total("gpu").joules
            clock.advance(5)
            outer.lap()
        clock.advance(10)
    assert gpu_joules == pytest.approx(1000, rel=0.02)
    assert inner.total("gpu").joules == pytest.approx(500, rel=0.03)
    assert inner.read().name == "evaluate"
    assert outer.total("gpu").joules == pytest.approx(2500, rel=0.02)


def test_laps_add_up_to_the_whole():
    clock = Clock()
    laps = []
    with gpu_meter(clock, Gpu("GPU-a", 300.0)) as meter:
        for step in range(5):
            clock.advance(2.03)
            laps.append(meter.lap(f"step {step}"))
    assert sum(lap.total("gpu").joules for lap in laps) == pytest.approx(meter.total("gpu").joules)
    assert sum(lap.seconds for lap in laps) == pytest.approx(meter.seconds)
    assert laps[3].name == "step 3"


def test_a_window_shorter_than_the_counter_is_flagged_or_unavailable_and_never_zero():
    clock = Clock(1000.05)
    with gpu_meter(clock, Gpu("GPU-a", 300.0)) as meter:
        clock.advance(0.02)
        nothing = meter.lap().total("gpu")
        clock.advance(0.4)
        short = meter.lap().total("gpu")
        clock.advance(10)
        long = meter.lap().total("gpu")
    assert isinstance(nothing, Unavailable)
    assert "did not move" in nothing.reason
    assert any("short" in flag for flag in short.flags)
    assert short.high_joules - short.low_joules >= 2 * 0.1 * 290
    assert long.flags == ()


def test_a_counter_that_falls_is_unavailable():
    clock = Clock()
    gpu = Gpu("GPU-a", 300.0)
    with gpu_meter(clock, gpu) as meter:
        clock.advance(5)
        gpu.reloaded_joules = 300_000.0
    assert "fell" in meter.total("gpu").reason


def test_a_sum_with_an_unreadable_device_is_unavailable():
    clock = Clock()
    sources, _ = nvml_sources(FakeNvml([Gpu("GPU-a")], clock), clock)
    hidden = UnreadableSource("gpu 1 (GPU-b)", "gpu", Unavailable("it is split", "unsplit it"))
    with EnergyMeter("w", [*sources, hidden], clock=clock) as meter:
        clock.advance(10)
    assert isinstance(meter.joules["gpu 0 (GPU-a)"], Energy)
    assert meter.total("gpu") == Unavailable(
        "gpu 1 (GPU-b) cannot be added: it is split", "unsplit it"
    )
    assert isinstance(meter.total(), Unavailable)


def test_a_node_meter_stands_alone():
    clock = Clock()
    sources, _ = nvml_sources(FakeNvml([Gpu("GPU-a", 300.0)], clock), clock)
    node = Counter("node", lambda: 1000 * clock(), update_seconds=1.0)
    with EnergyMeter("w", [*sources, node], clock=clock) as meter:
        clock.advance(20)
    assert meter.total("node").joules == pytest.approx(20_000)
    assert meter.total().joules == pytest.approx(6000, rel=0.01)
    assert "cpu" in meter.total().flags[0]


def sampled(clock, gpu, seconds):
    with gpu_meter(clock, gpu) as meter:
        for _ in range(int(seconds / 0.2)):
            clock.advance(0.2)
            meter.watch.poll()
    return meter.total("gpu")


def test_a_counter_that_disagrees_with_integrated_power_is_flagged_and_its_interval_widened():
    gpu = Gpu("GPU-a", 300.0)
    gpu.sensor_watts = 180.0
    reading = sampled(Clock(), gpu, 10)
    (flag,) = reading.flags
    assert "-40%" in flag
    assert "25 % of the time" in flag
    assert reading.joules == pytest.approx(3000, rel=0.02)
    assert reading.low_joules == pytest.approx(1800, rel=0.02)


def test_a_counter_that_agrees_is_not_flagged_nor_one_with_few_samples():
    gpu = Gpu("GPU-a", 300.0)
    gpu.sensor_watts = 310.0
    assert sampled(Clock(), gpu, 10).flags == ()
    gpu.sensor_watts = 100.0
    assert sampled(Clock(), gpu, 2).flags == ()


def test_states_hold_both_ends_and_every_throttle_reason_in_between():
    clock = Clock()
    gpu = Gpu("GPU-a", 300.0)
    gpu.throttling = 0x1
    with gpu_meter(clock, gpu) as meter:
        clock.advance(5)
        gpu.throttling = 0x40
        meter.watch.poll()
        clock.advance(5)
        gpu.throttling = 0x4
    (states,) = meter.read().states.values()
    assert states.start.throttle_reasons == ("gpu idle",)
    assert states.end.throttle_reasons == ("software power cap",)
    assert set(states.throttle_reasons) == {
        "gpu idle",
        "hardware thermal slowdown",
        "software power cap",
    }
    assert states.end.sm_clock_mhz == 1980


def test_a_window_is_plain_json_with_its_absences():
    clock = Clock()
    sources, _ = nvml_sources(
        FakeNvml([Gpu("GPU-a")], clock, refuse={"nvmlDeviceGetTemperature"}), clock
    )
    hidden = UnreadableSource("cpu", "cpu", Unavailable("root only", "chmod"))
    with EnergyMeter("w", [*sources, hidden], clock=clock) as meter:
        clock.advance(10)
    told = json.loads(json.dumps(meter.read().as_json(), allow_nan=False))
    assert told["joules"]["cpu"] == {"unavailable": "root only", "remedy": "chmod"}
    assert told["joules"]["gpu 0 (GPU-a)"]["kind"] == "measured"
    assert told["seconds"] == pytest.approx(10)
    state = told["states"]["gpu 0 (GPU-a)"]["end"]
    assert "unavailable" in state["celsius"]
    assert state["memory_clock_mhz"] == 3201


def test_no_source_is_unavailable_and_cannot_be_summed():
    with EnergyMeter("w", []) as meter:
        pass
    assert len(meter.joules) == 1
    assert all(isinstance(reading, Unavailable) for reading in meter.joules.values())
    assert isinstance(meter.total("gpu"), Unavailable)
    with pytest.raises(TypeError):
        sum(meter.joules.values())


def test_this_machine_gives_joules_or_every_reason():
    with EnergyMeter() as meter:
        pass
    assert meter.joules
    if meter.sources:
        assert all(
            isinstance(reading, Unavailable) or reading.joules > 0
            for reading in meter.joules.values()
        )
        return
    (reading,) = meter.joules.values()
    assert "NVML" in reading.reason or "nvidia-ml-py" in reading.reason
    assert "powercap" in reading.reason
    assert "AMD" in reading.reason or "amdsmi" in reading.reason
    assert reading.remedy
    assert isinstance(meter.total(), Unavailable)


class Draining:
    """A counter that must be read often; remembers how often it was."""

    name, part, kind, update_seconds, poll_seconds = "pump", "node", "measured", 0.0, 0.01

    def __init__(self):
        self.reads = 0

    def joules(self):
        self.reads += 1
        return float(self.reads)


def test_an_open_meter_keeps_polled_sources_alive_and_its_thread_ends_with_it():
    source = Draining()
    with EnergyMeter("w", [source]):
        reads, deadline = source.reads, time.monotonic() + 20
        while source.reads < reads + 5:
            assert time.monotonic() < deadline, "nobody polls the source"
            time.sleep(0.01)
    assert "outlast-energy" not in [thread.name for thread in threading.enumerate()]


def test_an_exception_passes_through_and_the_energy_until_then_is_kept():
    clock = Clock()
    meter = gpu_meter(clock, Gpu("GPU-a", 300.0))

    def work():
        clock.advance(10)
        raise ValueError("the run failed")

    with pytest.raises(ValueError, match="the run failed"), meter:
        work()
    assert meter.total("gpu").joules == pytest.approx(3000, rel=0.02)


def test_wrong_use_is_told():
    meter = EnergyMeter("w", [])
    with pytest.raises(EnergyError, match="use it in a with statement"):
        _ = meter.joules
    with pytest.raises(EnergyError, match="no laps"):
        meter.lap()
    with meter:
        pass
    with pytest.raises(EnergyError, match="no laps"):
        meter.lap()
    with pytest.raises(EnergyError, match="used before"), meter:
        pass
    with pytest.raises(EnergyError, match='"pump"'):
        EnergyMeter("w", [Draining(), Draining()])
    clock = Clock()
    with pytest.raises(EnergyError, match=r"0\.05 s is too short"):
        gpu_meter(clock, Gpu("GPU-a"), power_check_seconds=0.05)


def test_the_meter_needs_no_torch():
    code = "import sys, outlast.energy.meter; print({'torch', 'scipy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "set()"
