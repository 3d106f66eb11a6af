"""Energy counters and gauges for Prometheus: the text format 0.0.4 and a small HTTP exporter."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from http.server import BaseHTTPRequestHandler
    from types import TracebackType

    from outlast.energy.window import DeviceState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Labels:
    """Origin of a sample; empty labels are left out.

    Attributes:
        job: Slurm's job number.
        rank: Global rank.
        stage: Pipeline stage.
        device: UUID of the device.
    """

    job: str = ""
    rank: str = ""
    stage: str = ""
    device: str = ""

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str], *, stage: str = "", device: str = ""
    ) -> Labels:
        """Job and rank of Slurm or torchrun."""
        rank = environment.get("RANK") or environment.get("SLURM_PROCID", "")
        return cls(environment.get("SLURM_JOB_ID", ""), rank, stage, device)

    def __str__(self) -> str:
        pairs = [(name, getattr(self, name)) for name in self.__slots__]
        text = ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs if value)
        return f"{{{text}}}" if text else ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One device now.

    Attributes:
        labels: Where it is.
        state: What it reads.
    """

    labels: Labels
    state: DeviceState


@dataclass(frozen=True, slots=True)
class _Metric:
    name: str
    kind: str
    help: str
    value: Callable[[DeviceState], float | int | Unavailable]


_METRICS = (
    _Metric(
        "outlast_energy_joules_total",
        "counter",
        "Energy counter of the device in joules.",
        lambda state: state.joules,
    ),
    _Metric(
        "outlast_energy_power_watts",
        "gauge",
        "Power of the device in watts.",
        lambda state: state.watts,
    ),
    _Metric(
        "outlast_energy_temperature_celsius",
        "gauge",
        "Temperature of the chip in degrees Celsius.",
        lambda state: state.celsius,
    ),
    _Metric(
        "outlast_energy_sm_clock_mhz",
        "gauge",
        "Clock of the compute units in MHz.",
        lambda state: state.sm_clock_mhz,
    ),
    _Metric(
        "outlast_energy_memory_clock_mhz",
        "gauge",
        "Clock of the memory in MHz.",
        lambda state: state.memory_clock_mhz,
    ),
)


def exposition(samples: Sequence[Sample]) -> str:
    """Samples in the text format; ends with a line feed.

    A metric that no device has keeps its HELP line, which says why, and has no sample: a 0 would
    be read as a measurement.
    """
    lines = []
    for metric in _METRICS:
        values = [(sample.labels, metric.value(sample.state)) for sample in samples]
        missing = [value.reason for _, value in values if isinstance(value, Unavailable)]
        note = f" Unavailable: {'; '.join(dict.fromkeys(missing))}." if missing else ""
        lines.append(f"# HELP {metric.name} {_escaped(metric.help + note, quotes=False)}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        for labels, value in values:
            if not isinstance(value, Unavailable):
                lines.append(f"{metric.name}{labels} {_number(value)}")
    return "\n".join(lines) + "\n"


class Exporter:
    """Serves `/metrics` from a thread until it is closed.

    Attributes:
        port: That it listens at.
        url: Of the metrics.
    """

    def __init__(
        self, read: Callable[[], Sequence[Sample]], *, port: int = 0, host: str = "127.0.0.1"
    ) -> None:
        """Starts to listen.

        Args:
            read: Called for every request, in a thread of the server.
            port: 0 takes a free one.
            host: Address to listen at; only this machine by default.

        Raises:
            EnergyError: When the port cannot be had.
        """
        # Imported here: it is slow, and most runs are not scraped.
        from http.server import ThreadingHTTPServer

        try:
            self._server = ThreadingHTTPServer((host, port), _handler(read))
        except (OSError, OverflowError) as error:
            raise EnergyError(
                f"port = {port} of {host} cannot be had ({error}): choose another, or 0 for any"
            ) from error
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self.url = f"http://{host}:{self.port}/metrics"
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.05},
            name="outlast-energy-exporter",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Stops to listen."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)

    def __enter__(self) -> Exporter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _handler(read: Callable[[], Sequence[Sample]]) -> type[BaseHTTPRequestHandler]:
    from http.server import BaseHTTPRequestHandler

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.split("?")[0] != "/metrics":
                self.send_error(404, "only /metrics is served")
                return
            try:
                body = exposition(read()).encode()
            except Exception as error:
                # A scrape must never end training; Prometheus shows the target as down.
                self.send_error(500, type(error).__name__)
                return
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing: requests are not the user's concern."""

    return Handler


def _escaped(text: str, *, quotes: bool = True) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
