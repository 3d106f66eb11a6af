"""Facts of a cluster that contradict each other or the part that they are said to be of."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from outlast.errors import HardwareError, PlanError
from outlast.hardware import Device, Figure, Quantity, device
from outlast.plan.cluster import Cluster

_OTHER_PART = "or give `device` the name of the part that it is"


@dataclass(frozen=True, slots=True)
class _Range:
    """How far a figure may be from the catalogue's of the same part.

    Attributes:
        least: Share of the catalogue's.
        most: Share of the catalogue's.
        remedy: What to check, for people.
    """

    least: float
    most: float
    remedy: str


_MEMORY = _Range(0.75, 1.1, f"correct it, {_OTHER_PART}")
"""A driver keeps some, and GB and GiB differ by 7 %; more is another part."""
_PEAK = _Range(0.1, 1.1, f"give FLOP/s of the dense peak, without sparsity, {_OTHER_PART}")
"""A vendor's sparse peak is twice the dense one; a thousandth is a peak in another unit."""
_MATMUL = _Range(0.1, 1.1, f"give FLOP/s of the best dense product, {_OTHER_PART}")
_BANDWIDTH = _Range(0.1, 1.2, f"give bytes (not bits) per second in one direction, {_OTHER_PART}")
"""Memory and fast links: bits are 8 times, both directions twice as many."""
_FABRIC = _Range(0.0, 4.0, "are these bits? Give bytes per second of one device, in one direction")
"""Networks are chosen freely: slow ones are real, and none has four times the usual adapter."""
_LIMIT_WATTS = _Range(0.1, 1.2, f"give watts of one device, {_OTHER_PART}")
_IDLE_WATTS = _Range(0.1, 3.0, f"give watts of one device, {_OTHER_PART}")
"""A device that holds memory or a context idles at up to twice its least."""
_MOST_PUE = 5.0
"""More is a percentage."""
_LATENCY_SECONDS = 1.0
"""Between continents light takes a tenth of that."""
_MOST_FAILURES = 1440.0
"""Of a node in a day: one every minute, in which no process starts again."""


def checked(cluster: Cluster) -> Cluster:
    """The cluster, if nothing in it contradicts the rest.

    Raises:
        PlanError: With the first contradiction and its remedy.
    """
    for problem in contradictions(cluster):
        raise PlanError(f"cluster {cluster.name}: {problem}")
    return cluster


def contradictions(cluster: Cluster) -> Iterator[str]:
    """One sentence for each contradiction."""
    yield from _counts(cluster)
    yield from _amounts(cluster)
    yield from _other_part(cluster)
    yield from _power(cluster)
    yield from _prices(cluster)
    yield from _failures(cluster)


def _counts(cluster: Cluster) -> Iterator[str]:
    for name in ("nodes", "devices_per_node", "fast_domain"):
        if getattr(cluster, name) < 1:
            yield f"{name} = {getattr(cluster, name)}: give at least 1"
    if cluster.spares < 0 or cluster.host_cores < 0:
        yield f"spares = {cluster.spares}, host_cores = {cluster.host_cores}: give at least 0"
    domain, node = cluster.fast_domain, cluster.devices_per_node
    if domain >= 1 and node >= 1 and domain % node and node % domain:
        yield (
            f"fast_domain = {domain} is neither a multiple nor a part of devices_per_node = "
            f"{node}: give the devices that the fast link joins, of whole nodes or within one"
        )


def _amounts(cluster: Cluster) -> Iterator[str]:
    amounts = {
        name: getattr(cluster, name)
        for name in ("memory_bytes", "memory_bytes_per_s", "fast_bytes_per_s", "fabric_bytes_per_s")
    }
    for table in ("peak_flop_per_s", "matmul_flop_per_s"):
        amounts |= {f"{table}.{key}": item for key, item in getattr(cluster, table).items()}
    for name, value in amounts.items():
        if not 0.0 < value < math.inf:
            yield f"{name} = {value:g}: give a finite number above 0"
    for field in fields(cluster.storage):
        rate = getattr(cluster.storage, field.name)
        if not 0.0 <= rate < math.inf:
            yield (
                f"storage.{field.name} = {rate:g}: give a finite number of at least 0, a tier that "
                "is not there has 0"
            )
    if not 0.0 <= cluster.fabric_latency_seconds < math.inf:
        yield f"fabric_latency_seconds = {cluster.fabric_latency_seconds:g}: give at least 0"
    if _LATENCY_SECONDS < cluster.fabric_latency_seconds < math.inf:
        yield (
            f"fabric_latency_seconds = {cluster.fabric_latency_seconds:g} is more than any network "
            "takes for a message: give seconds, e.g. 5e-6 for 5 microseconds"
        )
    for key, matmul in cluster.matmul_flop_per_s.items():
        peak = cluster.peak_flop_per_s.get(key)
        if peak is None:
            yield f"matmul_flop_per_s.{key} is given without peak_flop_per_s.{key}: give both"
        elif matmul > peak:
            yield (
                f"matmul_flop_per_s.{key} = {matmul:g} exceeds peak_flop_per_s.{key} = {peak:g}: "
                "no product is faster than the peak, so correct one of them"
            )
    if cluster.devices > cluster.fast_domain and (
        cluster.fabric_bytes_per_s > cluster.fast_bytes_per_s
    ):
        yield (
            f"fabric_bytes_per_s = {cluster.fabric_bytes_per_s:g} exceeds fast_bytes_per_s = "
            f"{cluster.fast_bytes_per_s:g}: a device's share of the network is not faster than "
            "the fast link; give bytes (not bits) per second of one device"
        )


def _other_part(cluster: Cluster) -> Iterator[str]:
    """Figures that cannot be those of the catalogue's part; a part of one's own has none."""
    try:
        part = device(cluster.device)
    except HardwareError:
        return
    for name, value, known, bounds in _compared(cluster, part):
        if not isinstance(known, Figure):
            continue
        # As PyTorch counts devices: a part with two dies is two of them.
        usual = known.value / part.logical_devices
        # A processor's devices are shares of it, and its sockets may be several.
        least = 0.0 if cluster.processor else bounds.least * usual
        if cluster.processor and bounds is not _PEAK:
            continue
        if not least <= value <= bounds.most * usual:
            yield f"{name} = {value:g} is not that of {cluster.device} ({usual:g}): {bounds.remedy}"


def _compared(
    cluster: Cluster, part: Device
) -> Iterator[tuple[str, float, Quantity | None, _Range]]:
    """Each figure with its name, the catalogue's of the whole part, and how far it may be off."""
    yield "memory_bytes", cluster.memory_bytes, part.memory_bytes, _MEMORY
    for field, bounds in (("peak_flop_per_s", _PEAK), ("matmul_flop_per_s", _MATMUL)):
        for key, value in getattr(cluster, field).items():
            stem = "bf16" if key == "fp16" else key
            yield f"{field}.{key}", value, getattr(part, f"{stem}_{field}", None), bounds
    bandwidth = cluster.memory_bytes_per_s
    yield "memory_bytes_per_s", bandwidth, part.memory_peak_bytes_per_s, _BANDWIDTH
    yield "fast_bytes_per_s", cluster.fast_bytes_per_s, part.scale_up_bytes_per_s, _BANDWIDTH
    yield "fabric_bytes_per_s", cluster.fabric_bytes_per_s, part.fabric_bytes_per_s, _FABRIC
    if cluster.power is not None:
        limit, idle = cluster.power.limit_watts, cluster.power.idle_watts
        yield "power.limit_watts", limit, part.power_limit_watts, _LIMIT_WATTS
        yield "power.idle_watts", idle, part.idle_watts, _IDLE_WATTS


def _power(cluster: Cluster) -> Iterator[str]:
    power = cluster.power
    if power is None:
        return
    if not 0.0 <= power.idle_watts <= power.blocked_watts <= power.limit_watts < math.inf:
        yield (
            f"power.idle_watts = {power.idle_watts:g}, blocked_watts = {power.blocked_watts:g} and "
            f"limit_watts = {power.limit_watts:g}: give finite numbers of at least 0 in this order"
        )
    if not 0.0 <= power.node_watts < math.inf:
        yield f"power.node_watts = {power.node_watts:g}: give a finite number of at least 0"
    if not 1.0 <= power.pue <= _MOST_PUE:
        yield (
            f"power.pue = {power.pue:g}: give a ratio of at least 1, which is a building that "
            "takes nothing, e.g. 1.2"
        )


def _prices(cluster: Cluster) -> Iterator[str]:
    for name in ("per_device_hour", "per_kwh", "grams_per_kwh"):
        value = getattr(cluster.prices, name)
        if value is not None and not 0.0 <= value < math.inf:
            yield f"prices.{name} = {value:g}: give at least 0"


def _failures(cluster: Cluster) -> Iterator[str]:
    for cause in cluster.failures:
        if cause.per_node_day > _MOST_FAILURES:
            yield (
                f"failures.{cause.name}.per_node_day = {cause.per_node_day:g} is more than a "
                "failure of every node in every minute, so that none ever starts: give failures of "
                "one node in one day, e.g. 0.0065"
            )
