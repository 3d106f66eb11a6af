"""Known devices, links and nodes: typed facts read from the TOML files in `facts/`.

A figure that nobody published is absent, and reading it gives `Unavailable(reason)`. Vendors' peaks
are dense (no sparsity); rates are per device and in one direction.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib.resources import files
from typing import Any, Literal, TypeVar

from outlast.errors import HardwareError
from outlast.hardware.figure import KINDS, NOT_RECORDED, Figure, Quantity, Unavailable, unit_of


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU or a CPU socket.

    Attributes:
        key: Name in this catalogue, for example "h200-sxm".
        name: Name for people.
        vendor: "NVIDIA", "AMD" or "Intel".
        category: "gpu" or "cpu".
        reported_names: Names that NVML, PyTorch or the kernel give it.
        reported_memory_bytes: Least and most memory that one *logical* device reports, or None.
        logical_devices: How many devices PyTorch sees in it (2 for the MI250X); the figures are of
            the whole, so divide by it.
        fp32_peak_flop_per_s: Vendor's dense peak outside the matrix units.
        tf32_peak_flop_per_s: Vendor's dense peak.
        bf16_peak_flop_per_s: Vendor's dense peak.
        fp8_peak_flop_per_s: Vendor's dense peak.
        bf16_matmul_flop_per_s: Best matrix product measured: the ceiling to plan with.
        fp8_matmul_flop_per_s: Best matrix product measured.
        memory_bytes: Capacity.
        memory_peak_bytes_per_s: Vendor's bandwidth of the device memory.
        memory_achieved_bytes_per_s: Bandwidth that a copy kernel reached.
        scale_up_bytes_per_s: To all peers of the node together, one direction.
        pairwise_bytes_per_s: To one peer of the node, one direction.
        fabric_bytes_per_s: Share of the node's network, one direction.
        power_limit_watts: Board limit (GPU) or TDP (CPU); no statement about real use.
        idle_watts: Without any work.
        blocked_watts: Waiting inside a communication kernel.
        max_clock_hz: Highest compute clock.
        core_count: CPU cores.
    """

    key: str
    name: str
    vendor: str
    category: Literal["gpu", "cpu"]
    reported_names: tuple[str, ...] = ()
    reported_memory_bytes: tuple[int, int] | None = None
    logical_devices: int = 1
    fp32_peak_flop_per_s: Quantity = NOT_RECORDED
    tf32_peak_flop_per_s: Quantity = NOT_RECORDED
    bf16_peak_flop_per_s: Quantity = NOT_RECORDED
    fp8_peak_flop_per_s: Quantity = NOT_RECORDED
    bf16_matmul_flop_per_s: Quantity = NOT_RECORDED
    fp8_matmul_flop_per_s: Quantity = NOT_RECORDED
    memory_bytes: Quantity = NOT_RECORDED
    memory_peak_bytes_per_s: Quantity = NOT_RECORDED
    memory_achieved_bytes_per_s: Quantity = NOT_RECORDED
    scale_up_bytes_per_s: Quantity = NOT_RECORDED
    pairwise_bytes_per_s: Quantity = NOT_RECORDED
    fabric_bytes_per_s: Quantity = NOT_RECORDED
    power_limit_watts: Quantity = NOT_RECORDED
    idle_watts: Quantity = NOT_RECORDED
    blocked_watts: Quantity = NOT_RECORDED
    max_clock_hz: Quantity = NOT_RECORDED
    core_count: Quantity = NOT_RECORDED


@dataclass(frozen=True, kw_only=True)
class Link:
    """A kind of link, seen from one device, one direction.

    Attributes:
        key: Name in this catalogue, for example "nvlink4".
        name: Name for people.
        scope: "scale-up" (between the devices of a node), "host" or "network".
        peak_bytes_per_s: Vendor's rate to all peers together.
        pairwise_bytes_per_s: Vendor's rate to one peer.
        allreduce_bytes_per_s: Bus bandwidth of an all-reduce over the whole node.
        pairwise_allreduce_bytes_per_s: Bus bandwidth of an all-reduce over two devices.
        latency_seconds: Of the adapter or link alone, without software.
    """

    key: str
    name: str
    scope: Literal["scale-up", "host", "network"]
    peak_bytes_per_s: Quantity = NOT_RECORDED
    pairwise_bytes_per_s: Quantity = NOT_RECORDED
    allreduce_bytes_per_s: Quantity = NOT_RECORDED
    pairwise_allreduce_bytes_per_s: Quantity = NOT_RECORDED
    latency_seconds: Quantity = NOT_RECORDED


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node as it is sold.

    Attributes:
        key: Name in this catalogue, for example "dgx-h100".
        name: Name for people.
        device: Key of its devices, or None for a machine without accelerators.
        device_count: How many of them.
        scale_up: Key of the link between them, or None.
        network: Key of the link of one adapter, or None where it differs between sites.
        network_bytes_per_s: Of all adapters of the node together, one direction.
        power_limit_watts: Rated power of the node.
        training_watts: Power while training large models.
        highest_measured_watts: Highest power that anyone measured on it.
        host_memory_bytes: Memory of the host processors.
    """

    key: str
    name: str
    device: str | None = None
    device_count: int = 0
    scale_up: str | None = None
    network: str | None = None
    network_bytes_per_s: Quantity = NOT_RECORDED
    power_limit_watts: Quantity = NOT_RECORDED
    training_watts: Quantity = NOT_RECORDED
    highest_measured_watts: Quantity = NOT_RECORDED
    host_memory_bytes: Quantity = NOT_RECORDED


Fact = TypeVar("Fact", Device, Link, Node)


def device(key: str) -> Device:
    """Return the facts about one device.

    Raises:
        HardwareError: No such device; the message suggests near names.
    """
    return _pick(_known(Device), key)


def link(key: str) -> Link:
    """Return the facts about one kind of link.

    Raises:
        HardwareError: No such link; the message suggests near names.
    """
    return _pick(_known(Link), key)


def node(key: str) -> Node:
    """Return the facts about one kind of node.

    Raises:
        HardwareError: No such node; the message suggests near names.
    """
    return _pick(_known(Node), key)


def devices() -> tuple[Device, ...]:
    """Return every known device."""
    return tuple(_known(Device).values())


def links() -> tuple[Link, ...]:
    """Return every known kind of link."""
    return tuple(_known(Link).values())


def nodes() -> tuple[Node, ...]:
    """Return every known kind of node."""
    return tuple(_known(Node).values())


def device_reported_as(name: str, memory_bytes: float | None = None) -> Device | Unavailable:
    """Find a device by the name that NVML, PyTorch or the kernel report.

    "H100" is not one device: parts that share a name are told apart by their memory.

    Args:
        name: For example "NVIDIA H100 80GB HBM3"; letter case is ignored.
        memory_bytes: Memory that the device reports, if known.

    Returns:
        The device, or Unavailable where the name is unknown, is a MIG slice, or does not go with
        that much memory.
    """
    wanted = " ".join(name.split()).casefold()
    names = {part.key: [known.casefold() for known in part.reported_names] for part in devices()}
    named = [part for part in devices() if wanted in names[part.key]]
    if not named:
        slice_of = " (a MIG slice has only a share of its device)" if " mig " in wanted else ""
        return Unavailable(f"no facts are recorded for a device named {name!r}{slice_of}")
    if memory_bytes is None:
        others = (known for key, own in names.items() if key != named[0].key for known in own)
        if any(known.startswith(wanted) for known in others):
            return Unavailable(f"several parts report names like {name!r}: give memory_bytes too")
        return named[0]
    for part in named:
        least, most = part.reported_memory_bytes or (0, math.inf)
        if least <= memory_bytes <= most:
            return part
    return Unavailable(
        f"a device named {name!r} with {memory_bytes / 1e9:.1f} GB of memory is not the "
        f"{named[0].name} that facts are recorded for"
    )


def _pick(known: Mapping[str, Fact], key: str) -> Fact:
    if key in known:
        return known[key]
    near = get_close_matches(key.casefold(), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"
    kind = type(next(iter(known.values()))).__name__.lower()
    raise HardwareError(f"no {kind} is named {key!r}: {hint}")


_LOADED: dict[type, Mapping[str, Any]] = {}


def _known(kind: type[Fact]) -> Mapping[str, Fact]:
    """All facts of a kind by key, read once."""
    if kind not in _LOADED:
        file = files("outlast.hardware").joinpath("facts", f"{kind.__name__.lower()}s.toml")
        _LOADED[kind] = parse_facts(file.read_text(encoding="utf-8"), kind)
    return _LOADED[kind]


def parse_facts(text: str, kind: type[Fact]) -> dict[str, Fact]:
    """Build facts from the text of one TOML file.

    Args:
        text: Tables as in `facts/*.toml`, with one table `sources`.
        kind: Device, Link or Node.

    Returns:
        Facts by key.

    Raises:
        HardwareError: A figure has an unknown name, kind or source.
    """
    tables = tomllib.loads(text)
    sources: dict[str, str] = tables.pop("sources", {})
    names = [field.name for field in fields(kind) if field.default is NOT_RECORDED]
    facts: dict[str, Fact] = {}
    for key, table in tables.items():
        raw: dict[str, Any] = table.pop("figures", {})
        if unknown := sorted(set(raw) - set(names)):
            raise HardwareError(f"{key} has unknown figures: {', '.join(unknown)}")
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in table.items()
        }
        for name in names:
            values[name] = _quantity(f"{key}.{name}", table["name"], raw.get(name), sources)
        facts[key] = kind(key=key, **values)
    return facts


def _quantity(
    path: str, label: str, raw: Mapping[str, Any] | None, sources: Mapping[str, str]
) -> Quantity:
    name = path.rpartition(".")[2]
    if raw is None:
        return Unavailable(f"no {name} is recorded for {label}", "measure it, or give your own")
    if "absent" in raw:
        return Unavailable(f"no {name} for {label}: {raw['absent']}")
    if raw["kind"] not in KINDS:
        raise HardwareError(f"{path}.kind = {raw['kind']!r} is none of {', '.join(KINDS)}")
    if raw["source"] not in sources:
        raise HardwareError(f"{path}.source = {raw['source']!r} is not in [sources]")
    return Figure(float(raw["value"]), unit_of(name), raw["kind"], sources[raw["source"]])
