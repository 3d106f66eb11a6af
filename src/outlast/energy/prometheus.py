"""Energy counters and gauges for Prometheus, and the HTTP exporter that serves them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

from outlast.errors import EnergyError
from outlast.extras import require
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

    from outlast.energy.window import DeviceState


class Labels(NamedTuple):
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


class Sample(NamedTuple):
    """One device now.

    Attributes:
        labels: Where it is.
        state: What it reads.
    """

    labels: Labels
    state: DeviceState


_METRICS = {
    "joules": ("joules", "Energy counter of the device in joules."),
    "watts": ("power_watts", "Power of the device in watts."),
    "celsius": ("temperature_celsius", "Temperature of the chip in degrees Celsius."),
    "sm_clock_mhz": ("sm_clock_mhz", "Clock of the compute units in MHz."),
    "memory_clock_mhz": ("memory_clock_mhz", "Clock of the memory in MHz."),
}
"""Fields of `DeviceState`, with the name and the help text of their metric."""


def registry_of(read: Callable[[], Sequence[Sample]]) -> CollectorRegistry:
    """A registry of prometheus_client whose metrics are read anew for every scrape.

    A metric that no device has keeps its HELP line, which says why, and has no sample: a 0 would
    be read as a measurement.

    Raises:
        MissingExtraError: Without prometheus_client.
    """
    # Imported here: it is slow, and most runs are not scraped.
    require("energy", "an exporter of metrics", "prometheus_client")
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector, CollectorRegistry

    class Devices(Collector):
        def collect(self) -> Iterator[Metric]:
            samples = read()
            for field, (name, about) in _METRICS.items():
                values = [(sample.labels, getattr(sample.state, field)) for sample in samples]
                missing = [value.reason for _, value in values if isinstance(value, Unavailable)]
                note = f" Unavailable: {'; '.join(dict.fromkeys(missing))}." if missing else ""
                kind, suffix = ("counter", "_total") if field == "joules" else ("gauge", "")
                metric = Metric(f"outlast_energy_{name}", about + note, kind)
                for labels, value in values:
                    if not isinstance(value, Unavailable):
                        given = {key: text for key, text in labels._asdict().items() if text}
                        metric.add_sample(metric.name + suffix, given, value)
                yield metric

    registry = CollectorRegistry()
    registry.register(Devices())
    return registry


class Exporter:
    """Serves `/metrics` from a thread until it is closed.

    Args:
        read: Called for every request, in a thread of the server.
        port: 0 takes a free one.
        host: Address to listen at; only this machine by default.

    Attributes:
        port: That it listens at.
        url: Of the metrics.

    Raises:
        EnergyError: When the port cannot be had.
        MissingExtraError: Without prometheus_client.
    """

    def __init__(
        self, read: Callable[[], Sequence[Sample]], *, port: int = 0, host: str = "127.0.0.1"
    ) -> None:
        registry = registry_of(read)
        from prometheus_client import start_http_server

        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise EnergyError(
                f"port = {port} of {host} cannot be had ({error}): choose another, or 0 for any"
            ) from error
        self.port: int = self._server.server_port
        self.url = f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop to listen."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
