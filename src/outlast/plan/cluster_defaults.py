"""Figures of a cluster that its file leaves out: catalogue, priors, published failures.

Each is a `Source` with the catalogue's own kind and words ("unverified" stays "unverified"), or
`Unavailable` with the reason. What is derived from other parts is a "prior" and says how.

Rates differ by 2.8 times between two clusters of one owner (RSC-1 and RSC-2), so they are a start
and no forecast: every cause from here is flagged as assumed in `Cluster.sources`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

from outlast.errors import PlanError
from outlast.hardware import Device, Figure, Node, Quantity, Unavailable, devices, link
from outlast.plan.cluster import FailureCause, Power, Storage
from outlast.plan.estimate import Source
from outlast.plan.facts import facts

Known: TypeAlias = Source | Unavailable
PRECISIONS = ("fp32", "fp16", "bf16", "fp8")
RACKS: Mapping[str, tuple[int, int]] = {"gb200": (4, 72)}
"""Parts whose fast link joins a rack: devices of a node, devices of the rack (GB200 NVL72)."""
DEVICES_PER_NODE = 8
_TRAINING_SHARE = 0.76
"""Power of an 8x H100 node in heavy training over its rating (2506.14551, abstract)."""
_BLOCKED_SHARE = 83.64 / 400.0
"""Power of a blocked A100 over its limit (Perseus' artefact), the only part on record."""
_HOST_LINK = {"a100-sxm-80": "pcie4-x16", "mi250x": "pcie4-x16"}
_SHARED_BYTES_PER_S_PER_NODE = 1e9
_SHARED_BYTES_PER_S = 2e12


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

    @property
    def devices(self) -> int:
        """All devices."""
        return self.nodes * self.devices_per_node


def part_figures(part: Device) -> dict[str, Known]:
    """Compute and memory of one device, by the names of `Cluster`; sub-keys follow a dot."""
    found: dict[str, Known] = {}
    for precision in PRECISIONS:
        key = "bf16" if precision == "fp16" and part.category == "gpu" else precision
        absent = Unavailable(f"no {precision} figure is recorded for {part.name}")
        for table in ("peak_flop_per_s", "matmul_flop_per_s"):
            found[f"{table}.{precision}"] = _one(part, getattr(part, f"{key}_{table}", absent))
    found["memory_bytes"] = _one(part, part.memory_bytes)
    found["memory_bytes_per_s"] = _one(part, part.memory_peak_bytes_per_s)
    return found


def matmul_prior(precision: str, known: Mapping[str, Known]) -> Known:
    """The best matrix product of a precision that nobody measured, as a share of its peak.

    The lowest share of the part's own measured precisions; else the median over measured parts.

    Args:
        precision: One of `PRECISIONS`, whose peak is known.
        known: Figures of the part, as `part_figures` names them.
    """
    peak = known[f"peak_flop_per_s.{precision}"]
    if isinstance(peak, Unavailable):
        return peak
    pairs = [
        (known.get(f"matmul_flop_per_s.{other}"), known.get(f"peak_flop_per_s.{other}"))
        for other in PRECISIONS
    ]
    own = [
        matmul.value / limit.value
        for matmul, limit in pairs
        if isinstance(matmul, Source) and isinstance(limit, Source) and matmul.origin != "prior"
    ]
    share = min(own) if own else median_share()
    of_whom = "the part's other precisions" if own else "the median over measured parts"
    text = f"{share:.2f} of the peak, as of {of_whom}: measure it: `outlast plan calibrate --run`"
    return Source(peak.value * share, "FLOP/s", "prior", text)


def median_share() -> float:
    """Best bf16 matrix product over the vendor's peak, the median over measured parts."""
    shares = [
        part.bf16_matmul_flop_per_s.value / part.bf16_peak_flop_per_s.value
        for part in devices()
        if isinstance(part.bf16_matmul_flop_per_s, Figure)
        and isinstance(part.bf16_peak_flop_per_s, Figure)
    ]
    return statistics.median(shares)


def link_figures(part: Device | None, node: Node | None) -> dict[str, Known]:
    """Bandwidths between devices, of one device and in one direction."""
    nothing = Unavailable("it is not in the catalogue", "give it in the cluster file")
    fast = _one(part, part.scale_up_bytes_per_s) if part else nothing
    fabric: Known = nothing
    if node is not None and isinstance(node.network_bytes_per_s, Figure):
        fabric = _source(node.network_bytes_per_s, 1.0 / node.device_count)
    elif part is not None:
        fabric = _one(part, part.fabric_bytes_per_s)
    return {"fast_bytes_per_s": fast, "fabric_bytes_per_s": fabric}


def power_figures(part: Device, node: Node | None) -> dict[str, Known]:
    """Power draw of a device and of the rest of its node."""
    limit, idle = _one(part, part.power_limit_watts), _one(part, part.idle_watts)
    blocked = _one(part, part.blocked_watts)
    if part.category == "gpu":
        idle = _idle(limit) if isinstance(idle, Unavailable) else idle
        blocked = _blocked(limit, idle) if isinstance(blocked, Unavailable) else blocked
    return {
        "power.limit_watts": limit,
        "power.blocked_watts": blocked,
        "power.idle_watts": idle,
        "power.node_watts": _rest_of_node(node, limit),
        "power.pue": Source(1.0, "1", "prior", "nobody gave it: energy is the computers' alone"),
    }


def storage_figures(
    part: Device | None, fabric_bytes_per_s: float, shape: Shape
) -> dict[str, Known]:
    """Storage for checkpoints; there is a local disk only where a file says so."""
    key = _HOST_LINK.get(part.key if part else "", "pcie5-x16")
    host = link(key).peak_bytes_per_s.value * shape.devices_per_node
    words = f"one {link(key).name} per device, at its peak"
    if part and part.category == "cpu" and isinstance(part.memory_peak_bytes_per_s, Figure):
        # A copy within main memory reads and writes it.
        host, words = part.memory_peak_bytes_per_s.value / 2.0, "a copy within main memory"
    shared = min(_SHARED_BYTES_PER_S_PER_NODE * shape.nodes, _SHARED_BYTES_PER_S)
    peer = fabric_bytes_per_s * shape.devices_per_node if shape.nodes > 1 else 0.0
    return {
        "storage.memory_bytes_per_s": Source(host, "B/s", "prior", words),
        "storage.peer_bytes_per_s": Source(
            peer, "B/s", "prior", "the node's network, at its peak; 0 where there is one node"
        ),
        "storage.local_bytes_per_s": Source(
            0.0, "B/s", "prior", "no local disk: give storage.local_bytes_per_s where there is one"
        ),
        "storage.shared_bytes_per_s": Source(
            shared,
            "B/s",
            "unverified",
            "assumed: 1 GB/s per node up to 2 TB/s, as of Llama 3's file system (2407.21783, from "
            "memory)",
        ),
    }


def _one(part: Device | None, quantity: Quantity) -> Known:
    """A figure of one device as PyTorch counts them: of a die, where a part has several."""
    if isinstance(quantity, Unavailable) or part is None or part.logical_devices == 1:
        return quantity if isinstance(quantity, Unavailable) else _source(quantity)
    found = _source(quantity, 1.0 / part.logical_devices)
    return replace(found, text=f"1/{part.logical_devices} of the whole part; {found.text}")


def _source(figure: Figure, share: float = 1.0) -> Source:
    return Source(figure.value * share, figure.unit, figure.kind, figure.source)


def _idle(limit: Known) -> Known:
    if isinstance(limit, Unavailable):
        return limit
    share = statistics.median(
        part.idle_watts.value / part.power_limit_watts.value
        for part in devices()
        if isinstance(part.idle_watts, Figure) and isinstance(part.power_limit_watts, Figure)
    )
    text = f"{share:.2f} of the limit, the median over parts on record"
    return Source(share * limit.value, "W", "prior", text)


def _blocked(limit: Known, idle: Known) -> Known:
    if isinstance(limit, Unavailable):
        return limit
    floor = idle.value if isinstance(idle, Source) else 0.0
    text = f"{_BLOCKED_SHARE:.2f} of the limit, as of an A100 (Perseus' artefact), idle at least"
    return Source(max(_BLOCKED_SHARE * limit.value, floor), "W", "prior", text)


def _rest_of_node(node: Node | None, limit: Known) -> Known:
    rating = node.power_limit_watts if node else None
    if node is not None and isinstance(rating, Figure) and isinstance(limit, Source):
        rest = _TRAINING_SHARE * rating.value - node.device_count * limit.value
        if rest > 0.0:
            text = (
                f"{_TRAINING_SHARE:.0%} of the node's {rating.value:g} W (2506.14551) without its "
                "devices at their limit"
            )
            return Source(rest, "W", "prior", text)
    return Source(0.0, "W", "prior", "not known and left out: energy is the devices' alone")


POWER = tuple(field.name for field in fields(Power))
STORAGE = tuple(field.name for field in fields(Storage))
_COUNTS = {"nodes", "devices", "devices_per_node", "fast_domain", "spares", "host_cores"}
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


def figures(
    tables: Mapping[str, Any], part: Device | None, sold: Node | None, name: str
) -> dict[str, Known]:
    """Every figure by its name: the file's own, else the catalogue's."""
    said = tables.get("sources", {})
    given: dict[str, Known] = {
        field: _given(field, number, said, name) for field, number in _given_numbers(tables)
    }
    known: dict[str, Known] = dict(part_figures(part)) if part else {}
    known |= power_figures(part, sold) if part else {}
    known |= link_figures(part, sold)
    known["fabric_latency_seconds"] = Source(
        5e-6, "s", "prior", "a message over a switched network, with its software"
    )
    known |= given
    if unknown := sorted(set(said) - set(known) - {f"storage.{item}" for item in STORAGE}):
        raise PlanError(f"cluster {name}: sources.{unknown[0]} names no number of the cluster")
    for precision in PRECISIONS:
        peak, matmul = f"peak_flop_per_s.{precision}", f"matmul_flop_per_s.{precision}"
        if isinstance(known.get(peak, Unavailable("")), Unavailable):
            if matmul in given:
                raise PlanError(
                    f"cluster {name}: {matmul} is given, but {peak} is not known: give it too"
                )
            known.pop(peak, None)
            known.pop(matmul, None)
        elif isinstance(known.get(matmul, Unavailable("")), Unavailable) or (
            peak in given and matmul not in given
        ):
            known[matmul] = matmul_prior(precision, {**known, matmul: Unavailable("")})
    if not any(field.startswith("peak_flop_per_s.") for field in known):
        reason = part.bf16_peak_flop_per_s if part else Unavailable("it is not in the catalogue")
        raise PlanError(
            f"cluster {name}: no peak_flop_per_s is known ({reason}); give "
            "[cluster.peak_flop_per_s] bf16"
        )
    return known


def _given_numbers(tables: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The numbers of the file that a source can be named for."""
    found: list[tuple[str, float]] = []
    for section in ("cluster", "power", "prices", "storage"):
        prefix = "" if section == "cluster" else f"{section}."
        for key, value in tables.get(section, {}).items():
            if isinstance(value, dict):
                found += [(f"{key}.{inner}", float(item)) for inner, item in value.items()]
            elif not isinstance(value, (str, bool)) and key not in _COUNTS:
                found.append((f"{prefix}{key}", float(value)))
    return found


def _given(field: str, number: float, said: Mapping[str, str], name: str) -> Source:
    text = said.get(field, "")
    origin = next((kind for kind in _ORIGINS if text.startswith(kind)), "given")
    stem = field.removeprefix("power.").removeprefix("storage.").split(".")[0]
    unit = next((unit for ending, unit in _UNITS.items() if stem.endswith(ending)), "1")
    return Source(number, unit, origin, text or f"the cluster file of {name}")


def fill_links(known: dict[str, Known], shape: Shape, name: str) -> None:
    """Stand-ins for links over which nothing is sent, so that nothing divides by zero."""
    memory = figure_value(known, "memory_bytes_per_s", name)
    if isinstance(known["fast_bytes_per_s"], Unavailable) and shape.devices == 1:
        known["fast_bytes_per_s"] = Source(
            memory, "B/s", "prior", "one device sends nothing: its memory's stands in"
        )
    fast = figure_value(known, "fast_bytes_per_s", name)
    if isinstance(known["fabric_bytes_per_s"], Unavailable) and shape.devices <= shape.fast_domain:
        known["fabric_bytes_per_s"] = Source(
            fast, "B/s", "prior", "all devices are in one fast domain: the fast link's stands in"
        )


def figure_value(known: Mapping[str, Known], field: str, name: str) -> float:
    """One figure.

    Args:
        known: Figures by name.
        field: Its name.
        name: The cluster's, for the sentence.

    Raises:
        PlanError: It is not known; the sentence says where to give it.
    """
    figure = known.get(field, Unavailable("it is not in the catalogue"))
    if isinstance(figure, Unavailable):
        place, _, key = field.rpartition(".")
        section = f"cluster.{place}" if place.endswith("flop_per_s") else place or "cluster"
        raise PlanError(
            f"cluster {name}: {key} is not known ({figure.reason}); give it in [{section}]"
        )
    return figure.value


def power(known: dict[str, Known], tables: Mapping[str, Any], name: str) -> Power | None:
    """Power draw of devices; None where neither file nor catalogue knows."""
    fields = [f"power.{item}" for item in POWER[:3]]
    absent = [
        field for field in fields if isinstance(known.get(field, Unavailable("")), Unavailable)
    ]
    if absent and "power" not in tables:
        return None
    for field, fallback in (("power.node_watts", 0.0), ("power.pue", 1.0)):
        known.setdefault(field, Source(fallback, "1", "prior", "nobody gave it"))
    return Power(**{item: figure_value(known, f"power.{item}", name) for item in POWER})


RECORDS: Mapping[str, Any] = facts("failures")
"""Failure rates that others published, by the name that `failure_rates` of a cluster file gives."""


def assumed_record(device: str, *, accelerators: bool) -> str:
    """Choose the record to assume: of the same part where there is one.

    Args:
        device: Key of the part.
        accelerators: Whether it is none of a machine's own processors.
    """
    return "rsc-1" if accelerators and device.startswith("a100") else "llama-3"


def assumed_causes(record: str, *, accelerators: bool) -> tuple[FailureCause, ...]:
    """The causes of a record; without accelerators, those of hosts and software alone."""
    return tuple(
        FailureCause(per_node_day=failures / RECORDS[record]["node_days"], **cause)
        for cause in map(dict, RECORDS[record]["causes"])
        for failures in [cause.pop("failures")]
        if accelerators or cause["name"] in ("host", "software", "node")
    )


def assumed_sources(record: str, causes: tuple[FailureCause, ...]) -> dict[str, Source]:
    """The sources of causes that nobody gave, by their name in a cluster."""
    return {
        f"failures.{cause.name}": Source(
            cause.per_node_day, "1/node-day", "unverified", f"assumed: {RECORDS[record]['text']}"
        )
        for cause in causes
    }
