"""Joules of a CUDA device: measured by NVML, of the right GPU, near its power, cheap, read only."""

import subprocess
import sys
import time

import pytest
import torch

from outlast.energy.meter import EnergyMeter
from outlast.energy.sources import PowerIntegral, nvml_sources
from outlast.energy.window import Energy
from outlast.hardware.figure import Unavailable

pynvml = pytest.importorskip("pynvml")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LOAD_SECONDS = 3.0
LAPS = 200


def load(seconds, between=lambda: None):
    """Multiplies matrices for so long, and calls `between` after every few."""
    left = torch.randn(4096, 4096, device="cuda:0", dtype=torch.bfloat16)
    right = torch.randn(4096, 4096, device="cuda:0", dtype=torch.bfloat16)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for _ in range(50):
            torch.mm(left, right)
        torch.cuda.synchronize()
        between()


@pytest.fixture(scope="module")
def source():
    """The meter of cuda:0, where it has a counter."""
    sources, missing = nvml_sources()
    assert sources, missing
    joules = sources[0].joules()
    if isinstance(joules, Unavailable) or sources[0].kind != "measured":
        pytest.skip(f"{sources[0].name} has no energy counter")
    return sources[0]


def test_a_load_has_measured_joules(source):
    with EnergyMeter("load", [source]) as meter:
        load(LOAD_SECONDS)
    reading = meter.total("gpu")
    assert isinstance(reading, Energy)
    assert reading.kind == "measured"
    assert 0 < reading.low_joules <= reading.joules <= reading.high_joules
    (states,) = meter.read().states.values()
    assert states.end.sm_clock_mhz > 0


def test_the_counter_agrees_with_integrated_power(source):
    if isinstance(source.watts(), Unavailable):
        pytest.skip(f"{source.name} shows no power")
    integral = PowerIntegral("power", "gpu", source.watts)
    # The load stands when the window begins: the power reading lags behind a change.
    load(1.0)
    with EnergyMeter("load", [source], power_check_seconds=None) as meter:
        begin = integral.interval()
        load(LOAD_SECONDS, integral.interval)
        end = integral.interval()
    reading = meter.total("gpu")
    assert reading.joules == pytest.approx(end.joules - begin.joules, rel=0.3)


def test_a_lap_takes_less_than_a_millisecond(source):
    with EnergyMeter("laps", [source]) as meter:
        meter.lap()
        taken = []
        for _ in range(LAPS):
            begin = time.perf_counter()
            meter.lap()
            taken.append(time.perf_counter() - begin)
    assert sorted(taken)[LAPS // 2] < 1e-3


def test_a_gpu_chosen_by_uuid_is_the_one_that_cuda_uses(source, monkeypatch):
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    assert source.name == f"gpu 0 ({uuid})"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", uuid)
    ((chosen,), _) = nvml_sources()
    assert chosen.name == source.name
    code = "import torch; print(torch.cuda.get_device_properties(0).uuid)"
    seen = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert f"GPU-{seen.stdout.strip()}" == uuid


def test_measuring_calls_no_setter(monkeypatch):
    called = []
    for name in dir(pynvml):
        if not name.startswith("nvml") or not callable(getattr(pynvml, name)):
            continue
        if any(word in name for word in ("Set", "Reset", "Clear")):
            monkeypatch.setattr(pynvml, name, lambda *_, name=name: called.append(name))
    sources, _ = nvml_sources(pynvml)
    with EnergyMeter("load", sources) as meter:
        load(0.5)
        meter.read()
    assert meter.joules
    assert called == []
