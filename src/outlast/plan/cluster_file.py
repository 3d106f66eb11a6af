"""From a TOML file, a shorthand or this machine to a `Cluster` whose every number has a source.

    cluster_of("h100x64")                  # a shipped example, a shorthand, or the path of a file
    read_cluster(Path("mine.toml"))        # strict: unknown keys and contradictions are refused
    this_cluster()                         # the machine at hand

What a file leaves out comes from the catalogue of `outlast.hardware`, and says so in `sources`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

from outlast.errors import HardwareError, PlanError
from outlast.hardware import Device, Node, device, devices, node, nodes
from outlast.plan.assumed_failures import (
    RECORDS,
    assumed_causes,
    assumed_record,
    assumed_sources,
)
from outlast.plan.cluster import Cluster, Prices, Storage
from outlast.plan.cluster_checks import checked
from outlast.plan.cluster_defaults import (
    DEVICES_PER_NODE,
    PRECISIONS,
    RACKS,
    Shape,
    storage_figures,
)
from outlast.plan.cluster_figures import STORAGE, figures, fill_links, power, value
from outlast.plan.cluster_here import here
from outlast.plan.cluster_keys import parsed
from outlast.plan.estimate import Source
from outlast.plan.reliability.failures import FailureCause

SPARE_EVERY = 50
"""Own assumption: of so many nodes one stands by, where nobody says."""


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
        text = path.read_text(encoding="utf-8-sig")
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
    per_node = RACKS.get(known.key, (usual.device_count if usual else DEVICES_PER_NODE, 0))[0]
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
    known = figures(tables, part, sold, name)
    fill_links(known, shape, name)
    fabric = value(known, "fabric_bytes_per_s", name)
    for field, figure in storage_figures(part, fabric, shape).items():
        known.setdefault(field, figure)
    processor = given.get("processor", part is not None and part.category == "cpu")
    causes, causes_from = _failures(tables, key, accelerators=not processor)
    spares, spares_from = _spares(given, shape.nodes, processor=processor)
    precisions = [precision for precision in PRECISIONS if f"peak_flop_per_s.{precision}" in known]
    drawn = power(known, tables, name)
    prices = tables.get("prices", {})
    sources = {field: figure for field, figure in known.items() if isinstance(figure, Source)}
    if drawn is None:
        sources = {field: source for field, source in sources.items() if field[:6] != "power."}
    return checked(
        Cluster(
            name=name,
            device=key,
            nodes=shape.nodes,
            devices_per_node=shape.devices_per_node,
            fast_domain=shape.fast_domain,
            peak_flop_per_s={
                precision: value(known, f"peak_flop_per_s.{precision}", name)
                for precision in precisions
            },
            matmul_flop_per_s={
                precision: value(known, f"matmul_flop_per_s.{precision}", name)
                for precision in precisions
            },
            memory_bytes=value(known, "memory_bytes", name),
            memory_bytes_per_s=value(known, "memory_bytes_per_s", name),
            fast_bytes_per_s=value(known, "fast_bytes_per_s", name),
            fabric_bytes_per_s=fabric,
            fabric_latency_seconds=value(known, "fabric_latency_seconds", name),
            host_cores=given.get("host_cores", 0),
            spares=spares,
            power=drawn,
            prices=Prices(**prices),
            storage=Storage(**{item: value(known, f"storage.{item}", name) for item in STORAGE}),
            processor=processor,
            failures=causes,
            sources={**sources, **causes_from, **spares_from},
        )
    )


def _spares(
    given: Mapping[str, Any], nodes: int, *, processor: bool
) -> tuple[int, Mapping[str, Source]]:
    """Nodes that stand by: as given, else one in fifty, as shared clusters can usually lend."""
    if "spares" in given or processor or nodes < 2:
        return given.get("spares", 0), {}
    assumed = math.ceil(nodes / SPARE_EVERY)
    text = "assumed: one node in fifty can be had in place of a broken one; give spares"
    return assumed, {"spares": Source(float(assumed), "1", "prior", text)}


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
    if "failures" not in tables:
        record = record or assumed_record(key, accelerators=accelerators)
        causes = assumed_causes(record, accelerators=accelerators)
        return causes, assumed_sources(record, causes)
    if record is not None:
        raise PlanError(
            f"cluster.failure_rates = {record!r} and [[failures]] are both given: keep one"
        )
    entries = tables["failures"]
    for entry in entries:
        if missing := {"name", "per_node_day"} - set(entry):
            raise PlanError(f"[[failures]] {entry} has no {sorted(missing)[0]}: give it")
    own = tuple(FailureCause(**entry) for entry in entries)
    if len({cause.name for cause in own}) < len(own):
        raise PlanError("two [[failures]] have one name: give each its own")
    text = "the cluster file"
    return own, {
        f"failures.{cause.name}": Source(cause.per_node_day, "1/node-day", "given", text)
        for cause in own
    }
