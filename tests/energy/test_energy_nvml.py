"""NVIDIA GPUs for the meter: which are counted, what they tell, and that nothing is ever set."""

import ast
from pathlib import Path

import pynvml
import pytest
from energy_fake_nvml import Clock, FakeNvml, Gpu

import outlast.energy
from outlast.energy.meter import EnergyMeter
from outlast.energy.sources import NvmlSource, available_sources, nvml_sources, throttle_words
from outlast.energy.window import Energy
from outlast.errors import EnergyError
from outlast.hardware import nvml as hardware_nvml
from outlast.hardware.figure import Unavailable

PACKAGE = Path(outlast.energy.__file__).parent
READING_CODE = [
    PACKAGE / "meter.py",
    PACKAGE / "window.py",
    PACKAGE / "sources.py",
]


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(variable, raising=False)


def three(clock, **changes):
    gpus = [Gpu("GPU-aaaa", 100.0), Gpu("GPU-bbbb", 200.0), Gpu("GPU-cccc", 400.0)]
    return FakeNvml(gpus, clock, **changes)


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        (None, ["gpu 0 (GPU-aaaa)", "gpu 1 (GPU-bbbb)", "gpu 2 (GPU-cccc)"]),
        ("2,0", ["gpu 0 (GPU-cccc)", "gpu 1 (GPU-aaaa)"]),
        ("GPU-b", ["gpu 0 (GPU-bbbb)"]),
    ],
)
def test_the_joules_are_those_of_the_gpus_that_cuda_shows(clock, monkeypatch, setting, names):
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    sources, missing = nvml_sources(three(clock), clock)
    assert [source.name for source in sources] == names
    assert missing == []
    before = [source.joules() for source in sources]
    clock.advance(10)
    watts = [(s.joules() - b) / 10 for s, b in zip(sources, before, strict=True)]
    expected = {"GPU-aaaa": 100, "GPU-bbbb": 200, "GPU-cccc": 400}
    assert watts == pytest.approx([expected[name[7:-1]] for name in names], rel=0.02)


def test_hidden_gpus_give_a_reason(clock, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    sources, (why,) = nvml_sources(three(clock), clock)
    assert sources == []
    assert "shows none of 3" in why.reason


def test_a_mig_slice_has_no_joules_of_its_own(clock, monkeypatch):
    nvml = FakeNvml([Gpu("GPU-aaaa"), Gpu("GPU-bbbb", mig="MIG-1234")], clock)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1234")
    (source,), _ = nvml_sources(nvml, clock)
    assert source.name == "gpu 0 (GPU-bbbb)"
    reading = source.joules()
    assert isinstance(reading, Unavailable)
    assert "MIG" in reading.reason


def test_gh200_says_that_its_counter_is_the_module(clock):
    (source,), _ = nvml_sources(FakeNvml([Gpu("GPU-a", name="NVIDIA GH200 480GB")], clock), clock)
    with EnergyMeter("w", [source], clock=clock) as meter:
        clock.advance(10)
    (reading,) = meter.joules.values()
    assert any("whole module" in flag for flag in reading.flags)


def test_without_a_counter_power_is_integrated_and_called_modelled(clock):
    gpu = Gpu("GPU-aaaa", 250.0)
    nvml = FakeNvml([gpu], clock, refuse={"nvmlDeviceGetTotalEnergyConsumption"})
    sources, _ = nvml_sources(nvml, clock)
    with EnergyMeter("w", sources, clock=clock) as meter:
        for _ in range(50):
            clock.advance(0.1)
            meter.watch.poll()
    reading = meter.total("gpu")
    assert isinstance(reading, Energy)
    assert reading.kind == "modelled"
    assert reading.joules == pytest.approx(1250)
    assert reading.low_joules < 1250 < reading.high_joules
    assert any("no energy counter" in flag for flag in reading.flags)


def test_without_counter_and_power_the_gpu_is_unavailable_and_so_is_the_sum(clock):
    refused = {"nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetPowerUsage"}
    nvml = three(clock, refuse=refused | {"nvmlDeviceGetFieldValues"})
    sources, _ = nvml_sources(nvml, clock)
    with EnergyMeter("w", sources, clock=clock) as meter:
        clock.advance(10)
    assert isinstance(meter.total("gpu"), Unavailable)
    assert "GPU-aaaa" in meter.total("gpu").reason


def test_different_gpus_by_number_are_flagged_unless_cuda_counts_by_bus(clock, monkeypatch):
    nvml = FakeNvml([Gpu("GPU-a"), Gpu("GPU-b", name="NVIDIA A40")], clock)
    (first, _), _ = nvml_sources(nvml, clock)
    assert "CUDA_DEVICE_ORDER" in first.flags[0]
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    (first, _), _ = nvml_sources(nvml, clock)
    assert first.flags == ()


def test_a_rank_takes_its_own_gpu(clock, tmp_path):
    (source,), _ = available_sources(gpus=[1], cpus=False, nvml=three(clock), clock=clock)
    assert source.name == "gpu 1 (GPU-bbbb)"
    with pytest.raises(EnergyError, match="from 0 to 2"):
        available_sources(gpus=[3], nvml=three(clock), powercap=tmp_path, clock=clock)


def test_a_device_reads_every_field_and_each_can_be_missing(clock):
    gpu = Gpu("GPU-aaaa", 300.0)
    gpu.throttling = 0x4 | 0x40
    state = NvmlSource(FakeNvml([gpu], clock), gpu).state()
    assert (state.watts, state.sm_clock_mhz, state.memory_clock_mhz) == (300.0, 1980, 3201)
    assert state.celsius == 41.0
    assert state.throttle_reasons == ("software power cap", "hardware thermal slowdown")
    refused = {"nvmlDeviceGetClockInfo", "nvmlDeviceGetTemperature", "nvmlDeviceGetFieldValues"}
    state = NvmlSource(FakeNvml([gpu], clock, refused), gpu).state()
    assert isinstance(state.sm_clock_mhz, Unavailable)
    assert isinstance(state.celsius, Unavailable)
    assert state.watts == 300.0, "the mean power stands in for the instant one"
    assert isinstance(state.joules, float)


def test_a_field_that_fails_alone_is_not_read_as_zero_watts(clock):
    gpu = Gpu("GPU-aaaa", 300.0)
    gpu.instant = False
    refused = {"nvmlDeviceGetPowerUsage"}
    assert isinstance(NvmlSource(FakeNvml([gpu], clock, refused), gpu).watts(), Unavailable)


def test_every_throttle_reason_of_nvml_has_a_word():
    bits = [
        value
        for name, value in vars(pynvml).items()
        if name.startswith("nvmlClocksThrottleReason") and not name.endswith(("All", "None"))
    ]
    assert len(bits) >= 10
    assert all("reason" not in throttle_words(bit)[0] for bit in bits)
    assert throttle_words(0) == ()
    assert throttle_words(1 << 40) == (f"reason {1 << 40:#x}",)


def test_nvml_that_does_not_start_says_so(clock):
    sources, (why,) = nvml_sources(FakeNvml([], clock, refuse={"nvmlInit"}), clock)
    assert sources == []
    assert "NVML does not start" in why.reason
    assert why.remedy


def test_the_real_nvml_starts_or_tells_why():
    started = hardware_nvml.start_nvml()
    assert started is pynvml or "NVML does not start" in started.reason


def test_reading_names_no_setter_and_only_what_pynvml_has():
    used = {
        node.attr
        for path in READING_CODE
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr.lower().startswith("nvml")
    } - {"nvmlReturn"}
    assert "nvmlDeviceGetTotalEnergyConsumption" in used
    assert [name for name in used if not hasattr(pynvml, name)] == []
    calls = {name for name in used if name.startswith("nvml")}
    assert [name for name in calls if not name.startswith(("nvmlDeviceGet", "nvmlInit"))] == []


def test_a_whole_measurement_calls_no_setter(clock):
    nvml = three(clock)  # fails the test at the first setter
    sources, _ = nvml_sources(nvml, clock)
    with EnergyMeter("w", sources, clock=clock) as meter:
        clock.advance(2)
        meter.lap()
        meter.watch.poll()
    assert meter.read().states
    assert set(nvml.calls) >= {"nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetTemperature"}
    with pytest.raises(AssertionError, match="setter"):
        _ = nvml.nvmlDeviceSetPowerManagementLimit
