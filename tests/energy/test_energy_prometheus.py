"""Metrics, scraped over HTTP."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client import generate_latest

from outlast.energy.prometheus import Exporter, Labels, Sample, registry_of
from outlast.energy.window import DeviceState
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable


def state(joules: float | Unavailable, celsius: float | Unavailable = 51.0) -> DeviceState:
    return DeviceState(
        joules=joules,
        watts=312.5,
        sm_clock_mhz=1410,
        memory_clock_mhz=Unavailable("not supported"),
        celsius=celsius,
        throttle_reasons=(),
    )


def scrape(url: str) -> tuple[str, str]:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


def exposition(samples: list[Sample]) -> str:
    return generate_latest(registry_of(lambda: samples)).decode()


def test_scrape_sees_the_counter_advance() -> None:
    labels = Labels.from_environment(
        {"SLURM_JOB_ID": "71", "SLURM_PROCID": "9", "RANK": "3"}, stage="1", device="GPU-a"
    )
    joules = [10.0]
    with Exporter(lambda: [Sample(labels, state(joules[0]))]) as exporter:
        line = 'outlast_energy_joules_total{device="GPU-a",job="71",rank="3",stage="1"} '
        text, kind = scrape(exporter.url)
        assert kind.startswith("text/plain; version=0.0.4")
        assert line + "10.0\n" in text
        joules[0] = 25.5
        assert line + "25.5\n" in scrape(exporter.url)[0]
        assert "outlast_energy_power_watts{" in text
        assert "outlast_energy_sm_clock_mhz{" in text
    with pytest.raises(urllib.error.URLError):
        scrape(exporter.url)


def test_what_is_not_measured_has_no_sample() -> None:
    samples = [
        Sample(Labels(rank="0"), state(1.0)),
        Sample(Labels(rank="1"), state(Unavailable("no counter"))),
    ]
    lines = exposition(samples).splitlines()
    joules = [line for line in lines if line.startswith("outlast_energy_joules_total")]
    assert joules == ['outlast_energy_joules_total{rank="0"} 1.0']
    assert any("Unavailable: no counter." in line for line in lines if line.startswith("# HELP"))
    assert not any(line.startswith("outlast_energy_memory_clock_mhz") for line in lines)
    # Types come once per metric, before its samples.
    assert lines.count("# TYPE outlast_energy_joules_total counter") == 1


def test_labels_are_escaped() -> None:
    text = exposition([Sample(Labels(job='a"b\\c\nd'), state(1.0))])
    assert r'{job="a\"b\\c\nd"}' in text


def test_a_failing_read_is_an_error_answer_and_the_server_lives() -> None:
    fails = [True]

    def read() -> list[Sample]:
        if fails[0]:
            raise RuntimeError("no driver")
        return []

    with Exporter(read) as exporter:
        with pytest.raises(urllib.error.HTTPError, match="500"):
            scrape(exporter.url)
        fails[0] = False
        assert "# TYPE" in scrape(exporter.url)[0]


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EnergyError, match=f"port = {port} "):
            Exporter(list, port=port)
