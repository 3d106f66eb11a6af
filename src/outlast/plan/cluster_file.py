"""Clusters from a TOML file, a shorthand or this machine, every number with its source.

    cluster_of("h100x64")                  # a shipped example, a shorthand, or the path of a file
    read_cluster(Path("mine.toml"))        # strict: unknown keys and contradictions are refused
    this_cluster()                         # the machine at hand

What a file leaves out comes from the catalogue of `outlast.hardware`, from priors and from
published failures, and says so in `sources`: each figure is a `Source` with the catalogue's own
kind and words ("unverified" stays "unverified"), or `Unavailable` with the reason. What is derived
from other parts is a "prior" and says how.

Failure rates differ by 2.8 times between two clusters of one owner (RSC-1 and RSC-2), so published
ones are a start and no forecast: every such cause is flagged as assumed in `Cluster.sources`.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

from outlast.errors import HardwareError, PlanError
from outlast.hardware import (
    Device,
    Figure,
    Machine,
    Node,
    Quantity,
    Unavailable,
    device,
    devices,
    link,
    node,
    nodes,
    this_machine,
)
from outlast.paths import read_text
from outlast.plan.cluster import Cluster, FailureCause, Power, Prices, Storage
from outlast.plan.estimate import Source
from outlast.plan.facts import facts

Known: TypeAlias = Source | Unavailable
PRECISIONS = ("fp32", "fp16", "bf16", "fp8")
RATES = ("peak_flop_per_s", "matmul_flop_per_s")
COUNTS = ("nodes", "devices", "devices_per_node", "fast_domain", "spares", "host_cores")
AMOUNTS = (
    "memory_bytes",
    "memory_bytes_per_s",
    "fast_bytes_per_s",
    "fabric_bytes_per_s",
    "fabric_latency_seconds",
)
TEXT, COUNT, AMOUNT, TABLE, YES_NO = "text", "count", "amount", "table", "yes or no"
_TYPES = {"str": TEXT, "int": COUNT, "bool": YES_NO, "float": AMOUNT, "float | None": AMOUNT}
"""By the type of a field."""
_TABLES = {"power": Power, "prices": Prices, "storage": Storage, "failures": FailureCause}

SECTIONS: Mapping[str, Mapping[str, str]] = {
    "cluster": {
        **dict.fromkeys(("name", "node", "device"), TEXT),
        **dict.fromkeys(COUNTS, COUNT),
        "processor": YES_NO,
        "failure_rates": TEXT,
        **dict.fromkeys(RATES, TABLE),
        **dict.fromkeys(AMOUNTS, AMOUNT),
    },
    **{
        section: {field.name: _TYPES[str(field.type)] for field in fields(kind)}
        for section, kind in _TABLES.items()
    },
}
"""What a cluster file may say; `[sources]` may name any of its numbers beside."""

_MAY_BE_ZERO = {"spares", "host_cores", "fabric_latency_seconds", "node_watts", "idle_watts"}


def parsed(text: str, source: str) -> dict[str, Any]:
    """The tables of a cluster file, with every key known and every value of its kind.

    Raises:
        PlanError: Naming the first key that is wrong, its value and what would be right.
    """
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{source} is no TOML: {error}") from None
    for section, content in tables.items():
        if section == "failures":
            if not isinstance(content, list):
                raise PlanError(f"failures of {source}: write [[failures]], one table per cause")
            for entry in content:
                _checked(section, entry, source)
        elif section == "sources":
            if not isinstance(content, dict) or not all(
                isinstance(text, str) for text in content.values()
            ):
                raise PlanError(
                    f'sources of {source}: give texts, as in fabric_bytes_per_s = "measured"'
                )
        elif section in SECTIONS:
            _checked(section, content, source)
        else:
            raise PlanError(_unknown((), section, source))
    if "cluster" not in tables:
        raise PlanError(f'{source} has no [cluster]: give at least node = "dgx-h100" and nodes = 1')
    return tables


def _checked(section: str, content: Any, source: str) -> None:
    if not isinstance(content, dict):
        raise PlanError(f"{section} of {source} must be a section: write [{section}]")
    for key, value in content.items():
        kind = SECTIONS[section].get(key)
        if kind is None:
            raise PlanError(_unknown((section,), key, source))
        where = f"{section}.{key}"
        if kind != TABLE:
            zero = section in ("storage", "prices", "failures") or key in _MAY_BE_ZERO
            _checked_value(f"{where} = {value!r} of {source}", value, kind, zero=zero)
            continue
        if not isinstance(value, dict):
            raise PlanError(
                f"{where} = {value!r} of {source}: give it by precision, as in [{where}] bf16 = "
                "989e12"
            )
        for precision, amount in value.items():
            if precision not in PRECISIONS:
                raise PlanError(
                    f"{where}.{precision} of {source} is no precision: known are "
                    f"{', '.join(PRECISIONS)}"
                )
            said = f"{where}.{precision} = {amount!r} of {source}"
            _checked_value(said, amount, AMOUNT, zero=False)


def _checked_value(said: str, value: Any, kind: str, *, zero: bool) -> None:
    if kind == TEXT:
        if not isinstance(value, str) or not value:
            raise PlanError(f"{said}: give text in quotes")
    elif kind == YES_NO:
        if not isinstance(value, bool):
            raise PlanError(f"{said}: give true or false")
    else:
        wanted = "a whole number" if kind == COUNT else "a number"
        kinds = int if kind == COUNT else (int, float)
        number = isinstance(value, kinds) and not isinstance(value, bool)
        # A whole number may be larger than any float.
        if not number or not abs(value) <= sys.float_info.max:
            raise PlanError(f"{said}: give {wanted}")
        if value < 0 or (value == 0 and not zero):
            raise PlanError(f"{said}: give {wanted} {'of at least' if zero else 'above'} 0")


def _unknown(inside: tuple[str, ...], key: str, source: str) -> str:
    """The sentence about a key that is not known, with the nearest one that is."""
    known = list(SECTIONS[inside[0]]) if inside else [*SECTIONS, "sources"]
    elsewhere = [f"{name}.{key}" for name, keys in SECTIONS.items() if key in keys]
    near = get_close_matches(key, known, n=1)
    kind = "key" if inside else "section"
    said = f"{'.'.join([*inside, key])} of {source} is not a known {kind}"
    if near:
        return f"{said}: did you mean {'.'.join([*inside, near[0]])}?"
    if elsewhere:
        return f"{said}: did you mean {elsewhere[0]}?"
    return f"{said}: known here are {', '.join(known)}"


_REMEDY = "run `outlast plan calibrate --run`, which measures it"


def here(ranks: int, machine: Machine | None = None) -> dict[str, Any]:
    """Tables as of a cluster file with one node.

    Without GPUs, each rank has its share of the cores, and of a processor's figures that share.

    Args:
        ranks: Processes that train; 0: one, or one per visible GPU.
        machine: What was read of the machine; by default it is read now.

    Raises:
        PlanError: Nothing is known of its processors or GPUs.
    """
    machine = machine or this_machine()
    visible = () if isinstance(machine.gpus, Unavailable) else machine.gpus.visible
    table = {"nodes": 1, "host_cores": int(machine.usable_cores)}
    if visible:
        count = ranks or len(visible)
        if count > len(visible):
            raise PlanError(f"{count} ranks need as many GPUs, and {len(visible)} are visible here")
        part = visible[0].facts
        if isinstance(part, Unavailable):
            raise PlanError(f"{part.reason}: {_REMEDY}")
        names = sorted({gpu.name for gpu in visible})
        if len(names) > 1:
            raise PlanError(
                f"GPUs of several kinds are visible ({', '.join(names)}): show one kind to the run"
            )
        return {"cluster": {**table, "device": part.key, "devices_per_node": count}}
    ranks, part = ranks or 1, machine.cpu_facts
    if isinstance(part, Unavailable) or isinstance(part.core_count, Unavailable):
        reason = part.reason if isinstance(part, Unavailable) else "its cores are not recorded"
        raise PlanError(
            f"how fast this machine computes is not known ({reason}; it has "
            f"{machine.usable_cores:g} cores and {machine.usable_memory_bytes / 2**30:.0f} GiB): "
            f"{_REMEDY}"
        )
    share = machine.usable_cores / part.core_count.value / ranks
    peaks = {kind: getattr(part, f"{kind}_peak_flop_per_s") for kind in ("fp32", "bf16")}
    peaks = {kind: peak for kind, peak in peaks.items() if isinstance(peak, Figure)}
    memory = part.memory_peak_bytes_per_s
    if not peaks or isinstance(memory, Unavailable):
        raise PlanError(f"the peak of {part.name} is not recorded: {_REMEDY}")
    bandwidth = memory.value * min(share, 1.0)
    return {
        "cluster": {
            **table,
            "device": part.key,
            "devices_per_node": ranks,
            "peak_flop_per_s": {kind: peak.value * min(share, 1.0) for kind, peak in peaks.items()},
            "memory_bytes": machine.usable_memory_bytes / ranks,
            "memory_bytes_per_s": bandwidth,
            # A message is written once and read once in memory that ranks share.
            "fast_bytes_per_s": bandwidth / 2.0,
        },
        "sources": {
            **{
                f"peak_flop_per_s.{kind}": (
                    f"{peak.kind}: {peak.source}; {share:.3g} of the processor's cores"
                )
                for kind, peak in peaks.items()
            },
            "memory_bytes": "measured: read from this machine",
            "memory_bytes_per_s": f"{memory.kind}: {memory.source}",
            "fast_bytes_per_s": "prior: a copy in memory that the ranks share",
        },
    }


_OTHER_PART = "or give `device` the name of the part that it is"
_Range: TypeAlias = tuple[float, float, str]
"""Least and most share of the catalogue's figure of the same part, and what to check beyond."""
_MEMORY = (0.75, 1.1, f"correct it, {_OTHER_PART}")
"""A driver keeps some, and GB and GiB differ by 7 %; more is another part."""
_PEAK = (0.1, 1.1, f"give FLOP/s of the dense peak, without sparsity, {_OTHER_PART}")
"""A vendor's sparse peak is twice the dense one; a thousandth is a peak in another unit."""
_MATMUL = (0.1, 1.1, f"give FLOP/s of the best dense product, {_OTHER_PART}")
_BANDWIDTH = (0.1, 1.2, f"give bytes (not bits) per second in one direction, {_OTHER_PART}")
"""Memory and fast links: bits are 8 times, both directions twice as many."""
_FABRIC = (0.0, 4.0, "are these bits? Give bytes per second of one device, in one direction")
"""Networks are chosen freely: slow ones are real, and none has four times the usual adapter."""
_LIMIT_WATTS = (0.1, 1.2, f"give watts of one device, {_OTHER_PART}")
_IDLE_WATTS = (0.1, 3.0, f"give watts of one device, {_OTHER_PART}")
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
    yield from _amounts(cluster)
    yield from _other_part(cluster)
    yield from _power(cluster)
    for name in ("per_device_hour", "per_kwh", "grams_per_kwh"):
        price = getattr(cluster.prices, name)
        if price is not None and not 0.0 <= price < math.inf:
            yield f"prices.{name} = {price:g}: give at least 0"
    for cause in cluster.failures:
        if cause.per_node_day > _MOST_FAILURES:
            yield (
                f"failures.{cause.name}.per_node_day = {cause.per_node_day:g} is more than a "
                "failure of every node in every minute, so that none ever starts: give failures of "
                "one node in one day, e.g. 0.0065"
            )


def _amounts(cluster: Cluster) -> Iterator[str]:
    amounts = {name: getattr(cluster, name) for name in AMOUNTS[:-1]}
    for table in RATES:
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
        if not isinstance(known, Figure) or (cluster.processor and bounds is not _PEAK):
            continue
        # As PyTorch counts devices: a part with two dies is two of them.
        usual = known.value / part.logical_devices
        least, most, remedy = bounds
        # A processor's devices are shares of it, and its sockets may be several.
        least = 0.0 if cluster.processor else least
        if not least * usual <= value <= most * usual:
            yield f"{name} = {value:g} is not that of {cluster.device} ({usual:g}): {remedy}"


def _compared(
    cluster: Cluster, part: Device
) -> Iterator[tuple[str, float, Quantity | None, _Range]]:
    """Each figure with its name, the catalogue's of the whole part, and how far it may be off."""
    yield "memory_bytes", cluster.memory_bytes, part.memory_bytes, _MEMORY
    for field, bounds in zip(RATES, (_PEAK, _MATMUL), strict=True):
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


RACKS: Mapping[str, tuple[int, int]] = {"gb200": (4, 72)}
"""Parts whose fast link joins a rack: devices of a node, devices of the rack (GB200 NVL72)."""
_DEVICES_PER_NODE = 8
_TRAINING_SHARE = 0.76
"""Power of an 8x H100 node in heavy training over its rating (2506.14551, abstract)."""
_BLOCKED_SHARE = 83.64 / 400.0
"""Power of a blocked A100 over its limit (Perseus' artefact), the only part on record."""
_HOST_LINK = {"a100-sxm-80": "pcie4-x16", "mi250x": "pcie4-x16"}
_SHARED_BYTES_PER_S_PER_NODE = 1e9
_SHARED_BYTES_PER_S = 2e12
RECORDS: Mapping[str, Any] = facts("failures")
"""Failure rates that others published, by the name that `failure_rates` of a cluster file gives."""
SPARE_EVERY = 50
"""Own assumption: of so many nodes one stands by, where nobody says."""
POWER = tuple(field.name for field in fields(Power))
STORAGE = tuple(field.name for field in fields(Storage))
_ORIGINS = ("datasheet", "measured", "published", "unverified", "calibrated", "prior")
_UNITS = {
    "flop_per_s": "FLOP/s",
    "bytes_per_s": "B/s",
    "bytes": "B",
    "seconds": "s",
    "watts": "W",
    "device_hour": "/h",
    "kwh": "/kWh",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Number of devices in a node and in a fast domain, and the links between them.

    Attributes:
        nodes: Nodes of the run.
        devices_per_node: Devices of a node, as PyTorch counts them.
        fast_domain: Devices that the fast link joins.
    """

    nodes: int
    devices_per_node: int
    fast_domain: int


def _source(quantity: Quantity, share: float = 1.0) -> Known:
    if isinstance(quantity, Unavailable):
        return quantity
    return Source(quantity.value * share, quantity.unit, quantity.kind, quantity.source)


def _of_device(part: Device, quantity: Quantity) -> Known:
    """A figure of one device as PyTorch counts them: of a die, where a part has several."""
    found = _source(quantity, 1.0 / part.logical_devices)
    if isinstance(found, Unavailable) or part.logical_devices == 1:
        return found
    return replace(found, text=f"1/{part.logical_devices} of the whole part; {found.text}")


def _median_share(field: str, whole: str) -> float:
    """A figure over another one, the median over the parts of the catalogue that have both."""
    pairs = [(getattr(part, field), getattr(part, whole)) for part in devices()]
    return statistics.median(
        value.value / most.value
        for value, most in pairs
        if isinstance(value, Figure) and isinstance(most, Figure)
    )


def _part_figures(part: Device) -> dict[str, Known]:
    """Compute and memory of one device, by the names of `Cluster`; sub-keys follow a dot."""
    found: dict[str, Known] = {}
    for precision in PRECISIONS:
        key = "bf16" if precision == "fp16" and part.category == "gpu" else precision
        absent = Unavailable(f"no {precision} figure is recorded for {part.name}")
        for table in RATES:
            found[f"{table}.{precision}"] = _of_device(
                part, getattr(part, f"{key}_{table}", absent)
            )
    found["memory_bytes"] = _of_device(part, part.memory_bytes)
    found["memory_bytes_per_s"] = _of_device(part, part.memory_peak_bytes_per_s)
    return found


def _matmul_prior(peak: Source, known: Mapping[str, Known]) -> Source:
    """The best matrix product of a precision that nobody measured, as a share of its peak.

    The lowest share of the part's own measured precisions; else the median over measured parts.
    """
    pairs = [[known.get(f"{table}.{other}") for table in RATES] for other in PRECISIONS]
    own = [
        matmul.value / limit.value
        for limit, matmul in pairs
        if isinstance(matmul, Source) and isinstance(limit, Source) and matmul.origin != "prior"
    ]
    share = min(own) if own else _median_share("bf16_matmul_flop_per_s", "bf16_peak_flop_per_s")
    of_whom = "the part's other precisions" if own else "the median over measured parts"
    text = f"{share:.2f} of the peak, as of {of_whom}: measure it: `outlast plan calibrate --run`"
    return Source(peak.value * share, "FLOP/s", "prior", text)


def _link_figures(part: Device | None, sold: Node | None) -> dict[str, Known]:
    """Bandwidths between devices, of one device and in one direction."""
    nothing = Unavailable("it is not in the catalogue", "give it in the cluster file")
    fabric: Known = _of_device(part, part.fabric_bytes_per_s) if part else nothing
    if sold is not None and isinstance(sold.network_bytes_per_s, Figure):
        fabric = _source(sold.network_bytes_per_s, 1.0 / sold.device_count)
    return {
        "fast_bytes_per_s": _of_device(part, part.scale_up_bytes_per_s) if part else nothing,
        "fabric_bytes_per_s": fabric,
        "fabric_latency_seconds": Source(
            5e-6, "s", "prior", "a message over a switched network, with its software"
        ),
    }


def _power_figures(part: Device, sold: Node | None) -> dict[str, Known]:
    """Power draw of a device and of the rest of its node."""
    limit, idle, blocked = (
        _of_device(part, quantity)
        for quantity in (part.power_limit_watts, part.idle_watts, part.blocked_watts)
    )
    rest = Source(0.0, "W", "prior", "not known and left out: energy is the devices' alone")
    if isinstance(limit, Source) and part.category == "gpu":
        if isinstance(idle, Unavailable):
            share = _median_share("idle_watts", "power_limit_watts")
            text = f"{share:.2f} of the limit, the median over parts on record"
            idle = Source(share * limit.value, "W", "prior", text)
        if isinstance(blocked, Unavailable):
            text = (
                f"{_BLOCKED_SHARE:.2f} of the limit, as of an A100 (Perseus' artefact), idle at "
                "least"
            )
            blocked = Source(max(_BLOCKED_SHARE * limit.value, idle.value), "W", "prior", text)
    rating = sold.power_limit_watts if sold else None
    if sold is not None and isinstance(rating, Figure) and isinstance(limit, Source):
        watts = _TRAINING_SHARE * rating.value - sold.device_count * limit.value
        if watts > 0.0:
            text = (
                f"{_TRAINING_SHARE:.0%} of the node's {rating.value:g} W (2506.14551) without its "
                "devices at their limit"
            )
            rest = Source(watts, "W", "prior", text)
    return {
        "power.limit_watts": limit,
        "power.blocked_watts": blocked,
        "power.idle_watts": idle,
        "power.node_watts": rest,
        "power.pue": Source(1.0, "1", "prior", "nobody gave it: energy is the computers' alone"),
    }


def _storage_figures(
    part: Device | None, fabric_bytes_per_s: float, shape: Shape
) -> dict[str, Known]:
    """Storage for checkpoints; there is a local disk only where a file says so."""
    host_link = link(_HOST_LINK.get(part.key if part else "", "pcie5-x16"))
    host = host_link.peak_bytes_per_s.value * shape.devices_per_node
    words = f"one {host_link.name} per device, at its peak"
    if part and part.category == "cpu" and isinstance(part.memory_peak_bytes_per_s, Figure):
        # A copy within main memory reads and writes it.
        host, words = part.memory_peak_bytes_per_s.value / 2.0, "a copy within main memory"
    shared = min(_SHARED_BYTES_PER_S_PER_NODE * shape.nodes, _SHARED_BYTES_PER_S)
    peer = fabric_bytes_per_s * shape.devices_per_node if shape.nodes > 1 else 0.0
    shared_words = (
        "assumed: 1 GB/s per node up to 2 TB/s, as of Llama 3's file system (2407.21783, from "
        "memory)"
    )
    tiers = {
        "memory": (host, "prior", words),
        "peer": (peer, "prior", "the node's network, at its peak; 0 where there is one node"),
        "local": (0.0, "prior", "no local disk: give storage.local_bytes_per_s where there is one"),
        "shared": (shared, "unverified", shared_words),
    }
    return {
        f"storage.{tier}_bytes_per_s": Source(rate, "B/s", origin, text)
        for tier, (rate, origin, text) in tiers.items()
    }


def _given_figures(tables: Mapping[str, Any], name: str) -> dict[str, Known]:
    """The numbers of the file that a source can be named for."""
    numbers: dict[str, float] = {}
    for section in ("cluster", "power", "prices", "storage"):
        prefix = "" if section == "cluster" else f"{section}."
        for key, value in tables.get(section, {}).items():
            if isinstance(value, dict):
                numbers |= {f"{key}.{inner}": float(item) for inner, item in value.items()}
            elif not isinstance(value, (str, bool)) and key not in COUNTS:
                numbers[f"{prefix}{key}"] = float(value)
    found: dict[str, Known] = {}
    for field, number in numbers.items():
        text = tables.get("sources", {}).get(field, "")
        origin = next((kind for kind in _ORIGINS if text.startswith(kind)), "given")
        stem = field.removeprefix("power.").removeprefix("storage.").split(".")[0]
        unit = next((unit for ending, unit in _UNITS.items() if stem.endswith(ending)), "1")
        found[field] = Source(number, unit, origin, text or f"the cluster file of {name}")
    return found


def _figures(
    tables: Mapping[str, Any], part: Device | None, sold: Node | None, name: str
) -> dict[str, Known]:
    """Every figure by its name: the file's own, else the catalogue's."""
    given = _given_figures(tables, name)
    known = {**_part_figures(part), **_power_figures(part, sold)} if part else {}
    known |= _link_figures(part, sold) | given
    nameable = set(known) | {f"storage.{item}" for item in STORAGE}
    if unknown := sorted(set(tables.get("sources", {})) - nameable):
        raise PlanError(f"cluster {name}: sources.{unknown[0]} names no number of the cluster")
    for precision in PRECISIONS:
        peak, matmul = (f"{table}.{precision}" for table in RATES)
        limit = known.get(peak)
        if not isinstance(limit, Source):
            if matmul in given:
                raise PlanError(
                    f"cluster {name}: {matmul} is given, but {peak} is not known: give it too"
                )
            known.pop(peak, None)
            known.pop(matmul, None)
        # A measured product says nothing of another peak than the catalogue's.
        elif not isinstance(known.get(matmul), Source) or (peak in given and matmul not in given):
            known[matmul] = _matmul_prior(limit, {**known, matmul: Unavailable("")})
    if not any(field.startswith("peak_flop_per_s.") for field in known):
        reason = part.bf16_peak_flop_per_s if part else Unavailable("it is not in the catalogue")
        raise PlanError(
            f"cluster {name}: no peak_flop_per_s is known ({reason}); give "
            "[cluster.peak_flop_per_s] bf16"
        )
    return known


def cluster_of(text: str) -> Cluster:
    """A cluster by the path of its file, the name of a shipped example, or a shorthand.

    Args:
        text: "my.toml", "h100x64", "64xh100-sxm" (that many devices), or "here" for this machine.

    Raises:
        PlanError: It is none of these, or what `read_cluster` raises.
    """
    if text == "here":
        return this_cluster()
    if text.endswith(".toml") or "/" in text or Path(text).is_file():
        return read_cluster(Path(text))
    shipped = _shipped()
    if text in shipped:
        return _built(parsed(shipped[text], f"the shipped {text}.toml"), text)
    found = re.fullmatch(r"(\d+)\s*x\s*(\S+)", text)
    if found:
        return _shorthand(found[2], int(found[1]), text)
    if found := re.fullmatch(r"(\S+?)\s*x\s*(\d+)", text):
        return _shorthand(found[1], int(found[2]), text)
    near = get_close_matches(text, shipped, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise PlanError(
        f"no cluster is named {text!r}: {hint}give the path of a TOML file, a shorthand such as "
        f"h100x64 (devices), `here`, or one of {', '.join(shipped)}"
    )


def read_cluster(source: Path | str) -> Cluster:
    """A cluster from a TOML file.

    Args:
        source: A path, or the text of such a file.

    Raises:
        PlanError: The file cannot be read, has a key or value that is wrong, leaves out what no
            catalogue knows, or contradicts itself.
    """
    if isinstance(source, str) and ("\n" in source or "[" in source):
        return _built(parsed(source, "the cluster file"), "unnamed")
    path = Path(source)
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise PlanError(f"cluster file {path} cannot be read: {reason}") from None
    return _built(parsed(text, str(path)), path.stem)


def this_cluster(ranks: int = 0) -> Cluster:
    """The machine at hand as a cluster of one node; its GPUs, or its processors without any.

    Args:
        ranks: Processes that train, each a device with its share of a machine without GPUs; 0: one,
            or one per visible GPU.

    Raises:
        PlanError: Nothing is known of its processors or GPUs; the remedy is to measure them.
    """
    return _built(here(ranks), "this machine")


def shipped_clusters() -> tuple[str, ...]:
    """Names of the example clusters, each a file to copy and change."""
    return tuple(_shipped())


def _shipped() -> dict[str, str]:
    folder = files("outlast.plan").joinpath("clusters")
    found = [entry for entry in folder.iterdir() if entry.name.endswith(".toml")]
    return {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in sorted(found, key=lambda entry: entry.name)
    }


def _shorthand(part: str, count: int, text: str) -> Cluster:
    """`count` devices of one part, in whole nodes of its usual size."""
    if count < 1:
        raise PlanError(f"cluster {text!r} has no device: give a count of at least 1")
    known = _part_named(part, text)
    usual = next((item for item in nodes() if item.device == known.key), None)
    per_node = RACKS.get(known.key, (usual.device_count if usual else _DEVICES_PER_NODE, 0))[0]
    if count > per_node and count % per_node:
        raise PlanError(
            f"cluster {text!r}: {count} devices are no whole number of nodes of {per_node}; give "
            f"{count // per_node * per_node} or {(count // per_node + 1) * per_node}, or a file"
        )
    table: dict[str, Any] = {"nodes": -(-count // per_node), "devices_per_node": per_node}
    if count < per_node:
        table["devices_per_node"] = count
    table |= {"node": usual.key} if usual else {"device": known.key}
    return _built({"cluster": table}, text)


def _part_named(text: str, where: str) -> Device:
    """A device by its key or the beginning of it, where nodes of the catalogue decide ties."""
    wanted = text.casefold()
    found = [part for part in devices() if part.key == wanted]
    found = found or [part for part in devices() if part.key.startswith(wanted)]
    sold = {item.device for item in nodes()}
    found = [part for part in found if part.key in sold] or found
    if len(found) != 1:
        keys = [part.key for part in devices()]
        near = [part.key for part in found] or get_close_matches(wanted, keys, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(keys)}"
        raise PlanError(f"cluster {where!r}: no device is named {text!r}; {hint}")
    return found[0]


def _built(tables: Mapping[str, Any], name: str) -> Cluster:
    """A cluster from tables whose keys and kinds are right."""
    given: Mapping[str, Any] = tables["cluster"]
    name = given.get("name", name)
    part, sold, key = _part(given, name)
    shape = _shape(given, part, sold, name)
    known = _figures(tables, part, sold, name)

    def value(field: str) -> float:
        figure = known.get(field, Unavailable("it is not in the catalogue"))
        if isinstance(figure, Unavailable):
            place, _, key = field.rpartition(".")
            section = f"cluster.{place}" if place.endswith("flop_per_s") else place or "cluster"
            raise PlanError(
                f"cluster {name}: {key} is not known ({figure.reason}); give it in [{section}]"
            )
        return figure.value

    # Stand-ins for links over which nothing is sent, so that nothing divides by zero.
    memory, devices = value("memory_bytes_per_s"), shape.nodes * shape.devices_per_node
    if isinstance(known["fast_bytes_per_s"], Unavailable) and devices == 1:
        text = "one device sends nothing: its memory's stands in"
        known["fast_bytes_per_s"] = Source(memory, "B/s", "prior", text)
    fast = value("fast_bytes_per_s")
    if isinstance(known["fabric_bytes_per_s"], Unavailable) and devices <= shape.fast_domain:
        text = "all devices are in one fast domain: the fast link's stands in"
        known["fabric_bytes_per_s"] = Source(fast, "B/s", "prior", text)
    for field, figure in _storage_figures(part, value("fabric_bytes_per_s"), shape).items():
        known.setdefault(field, figure)
    processor = given.get("processor", part is not None and part.category == "cpu")
    causes, causes_from = _failures(tables, key, accelerators=not processor)
    # Power is known where the file gives it, or the catalogue all that a device draws.
    drawn = [isinstance(known.get(f"power.{item}"), Source) for item in POWER[:3]]
    power = None
    if all(drawn) or "power" in tables:
        for field, fallback in (("power.node_watts", 0.0), ("power.pue", 1.0)):
            known.setdefault(field, Source(fallback, "1", "prior", "nobody gave it"))
        power = Power(**{item: value(f"power.{item}") for item in POWER})
    numbers: dict[str, Any] = {}
    for table in RATES:
        fields = {precision: f"{table}.{precision}" for precision in PRECISIONS}
        numbers[table] = {key: value(field) for key, field in fields.items() if field in known}
    numbers |= {field: value(field) for field in AMOUNTS}
    sources = {
        field: figure
        for field, figure in known.items()
        if isinstance(figure, Source) and (power or not field.startswith("power."))
    }
    sources |= causes_from
    spares = given.get("spares", 0)
    if "spares" not in given and not processor and shape.nodes >= 2:
        # Shared clusters can usually lend as many.
        spares = math.ceil(shape.nodes / SPARE_EVERY)
        text = "assumed: one node in fifty can be had in place of a broken one; give spares"
        sources["spares"] = Source(float(spares), "1", "prior", text)
    return checked(
        Cluster(
            name=name,
            device=key,
            nodes=shape.nodes,
            devices_per_node=shape.devices_per_node,
            fast_domain=shape.fast_domain,
            **numbers,
            host_cores=given.get("host_cores", 0),
            spares=spares,
            power=power,
            prices=Prices(**tables.get("prices", {})),
            storage=Storage(**{item: value(f"storage.{item}") for item in STORAGE}),
            processor=processor,
            failures=causes,
            sources=sources,
        )
    )


def _part(given: Mapping[str, Any], name: str) -> tuple[Device | None, Node | None, str]:
    """The catalogue's device and node, and the device's key; one's own part has no catalogue."""
    try:
        sold = node(given["node"]) if "node" in given else None
    except HardwareError as error:
        raise PlanError(f"cluster {name}: {error}") from None
    key = given.get("device") or (sold.device if sold else None)
    if key is None:
        said = f"node = {sold.key!r} has no device" if sold else "neither node nor device is given"
        raise PlanError(f'cluster {name}: {said}; give for example device = "h100-sxm"')
    if sold and sold.device is not None and key != sold.device:
        raise PlanError(
            f"cluster {name}: node = {sold.key!r} holds {sold.device}, not device = {key!r}: give "
            "one of them, or device and devices_per_node"
        )
    try:
        return device(key), sold, key
    except HardwareError as error:
        if "peak_flop_per_s" in given:
            return None, sold, key
        raise PlanError(
            f"cluster {name}: {error}; of a part of your own, give all figures, "
            "[cluster.peak_flop_per_s] first"
        ) from None


def _shape(given: Mapping[str, Any], part: Device | None, sold: Node | None, name: str) -> Shape:
    rack = RACKS.get(part.key if part else "")
    usual = sold.device_count if sold else rack[0] if rack else 0
    per_node = given.get("devices_per_node", usual)
    if not per_node:
        raise PlanError(f"cluster {name}: devices_per_node is not given, and no node that has it")
    if sold and sold.device_count and per_node > sold.device_count:
        raise PlanError(
            f"cluster {name}: devices_per_node = {per_node}, but node = {sold.key!r} holds "
            f"{sold.device_count}"
        )
    if "nodes" not in given and given.get("devices", per_node) % per_node:
        raise PlanError(
            f"cluster {name}: devices = {given['devices']} is no multiple of devices_per_node = "
            f"{per_node}"
        )
    count = given.get("nodes", given.get("devices", per_node) // per_node)
    if given.get("devices", count * per_node) != count * per_node:
        raise PlanError(
            f"cluster {name}: devices = {given['devices']} is not nodes = {count} x "
            f"devices_per_node = {per_node} = {count * per_node}"
        )
    domain = given.get("fast_domain", rack[1] if rack and per_node == rack[0] else per_node)
    # What the fast link could join beyond the devices that are there joins nothing.
    return Shape(count, per_node, min(domain, count * per_node) if count > 0 else domain)


def _failures(
    tables: Mapping[str, Any], key: str, *, accelerators: bool
) -> tuple[tuple[FailureCause, ...], dict[str, Source]]:
    """The file's causes, or published ones that are flagged as assumed."""
    record = tables["cluster"].get("failure_rates")
    if record is not None and record not in RECORDS:
        raise PlanError(
            f"cluster.failure_rates = {record!r} is none of {', '.join(RECORDS)}: give one of "
            "these, or your own [[failures]]"
        )
    if "failures" in tables:
        if record is not None:
            raise PlanError(
                f"cluster.failure_rates = {record!r} and [[failures]] are both given: keep one"
            )
        for entry in tables["failures"]:
            if missing := {"name", "per_node_day"} - set(entry):
                raise PlanError(f"[[failures]] {entry} has no {sorted(missing)[0]}: give it")
        causes = tuple(FailureCause(**entry) for entry in tables["failures"])
        if len({cause.name for cause in causes}) < len(causes):
            raise PlanError("two [[failures]] have one name: give each its own")
        origin, text = "given", "the cluster file"
    else:
        # Of the same part where there is a record of it; without accelerators, the causes of hosts
        # and software alone.
        own = accelerators and key.startswith("a100")
        published = RECORDS[record or ("rsc-1" if own else "llama-3")]
        causes = tuple(
            FailureCause(per_node_day=failures / published["node_days"], **cause)
            for cause in map(dict, published["causes"])
            for failures in [cause.pop("failures")]
            if accelerators or cause["name"] in ("host", "software", "node")
        )
        origin, text = "unverified", f"assumed: {published['text']}"
    return causes, {
        f"failures.{cause.name}": Source(cause.per_node_day, "1/node-day", origin, text)
        for cause in causes
    }
