"""Clusters from a TOML file, a shorthand or this machine, every number with its source.

    cluster_of("h100x64")                  # a shipped example, a shorthand, or the path of a file
    read_cluster(Path("mine.toml"))        # strict: unknown keys and contradictions are refused
    this_cluster()                         # the machine at hand

What a file leaves out comes from the catalogue of `outlast.hardware`, and says so in `sources`.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

from outlast.errors import HardwareError, PlanError
from outlast.hardware import (
    Device,
    Figure,
    Gpu,
    Machine,
    Node,
    Quantity,
    Unavailable,
    device,
    devices,
    node,
    nodes,
    this_machine,
)
from outlast.plan.cluster import Cluster, FailureCause, Power, Prices, Storage
from outlast.plan.cluster_defaults import (
    DEVICES_PER_NODE,
    PRECISIONS,
    RACKS,
    RECORDS,
    STORAGE,
    Shape,
    assumed_causes,
    assumed_record,
    assumed_sources,
    figure_value,
    figures,
    fill_links,
    power,
    storage_figures,
)
from outlast.plan.estimate import Source

TEXT, COUNT, AMOUNT, TABLE, YES_NO = "text", "count", "amount", "table", "yes or no"
_TYPES = {"str": TEXT, "int": COUNT, "bool": YES_NO, "float": AMOUNT, "float | None": AMOUNT}
"""By the type of a field."""

SECTIONS: Mapping[str, Mapping[str, str]] = {
    "cluster": {
        "name": TEXT,
        "node": TEXT,
        "device": TEXT,
        "nodes": COUNT,
        "devices": COUNT,
        "devices_per_node": COUNT,
        "fast_domain": COUNT,
        "spares": COUNT,
        "host_cores": COUNT,
        "processor": YES_NO,
        "failure_rates": TEXT,
        "peak_flop_per_s": TABLE,
        "matmul_flop_per_s": TABLE,
        "memory_bytes": AMOUNT,
        "memory_bytes_per_s": AMOUNT,
        "fast_bytes_per_s": AMOUNT,
        "fabric_bytes_per_s": AMOUNT,
        "fabric_latency_seconds": AMOUNT,
    },
    **{
        section: {field.name: _TYPES[str(field.type)] for field in fields(kind)}
        for section, kind in (
            ("power", Power),
            ("prices", Prices),
            ("storage", Storage),
            ("failures", FailureCause),
        )
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
        if kind == TABLE:
            _checked_precisions(where, value, source)
        else:
            zero = section in ("storage", "prices", "failures") or key in _MAY_BE_ZERO
            _checked_value(where, value, kind, zero=zero, source=source)


def _checked_precisions(where: str, value: Any, source: str) -> None:
    if not isinstance(value, dict):
        raise PlanError(
            f"{where} = {value!r} of {source}: give it by precision, as in [{where}] bf16 = 989e12"
        )
    for precision, amount in value.items():
        if precision not in PRECISIONS:
            raise PlanError(
                f"{where}.{precision} of {source} is no precision: known are "
                f"{', '.join(PRECISIONS)}"
            )
        _checked_value(f"{where}.{precision}", amount, AMOUNT, zero=False, source=source)


def _checked_value(where: str, value: Any, kind: str, *, zero: bool, source: str) -> None:
    said = f"{where} = {value!r} of {source}"
    if kind == TEXT:
        if not isinstance(value, str) or not value:
            raise PlanError(f"{said}: give text in quotes")
    elif kind == YES_NO:
        if not isinstance(value, bool):
            raise PlanError(f"{said}: give true or false")
    else:
        wanted = "a whole number" if kind == COUNT else "a number"
        kinds = int if kind == COUNT else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not _finite(value):
            raise PlanError(f"{said}: give {wanted}")
        if value < 0 or (value == 0 and not zero):
            raise PlanError(f"{said}: give {wanted} {'of at least' if zero else 'above'} 0")


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


def _unknown(inside: tuple[str, ...], key: str, source: str) -> str:
    """The sentence about a key that is not known, with the nearest one that is."""
    known = list(SECTIONS[inside[0]]) if inside else [*SECTIONS, "sources"]
    elsewhere = [f"{name}.{key}" for name, keys in SECTIONS.items() if key in keys]
    near = difflib.get_close_matches(key, known, n=1)
    kind = "key" if inside else "section"
    said = f"{'.'.join([*inside, key])} of {source} is not a known {kind}"
    if near:
        return f"{said}: did you mean {'.'.join([*inside, near[0]])}?"
    if elsewhere:
        return f"{said}: did you mean {elsewhere[0]}?"
    return f"{said}: known here are {', '.join(known)}"


_REMEDY = "run `outlast plan calibrate --run`, which measures it"
_KINDS = ("fp32", "bf16")


def here(ranks: int, machine: Machine | None = None) -> dict[str, Any]:
    """Tables as of a cluster file with one node.

    Args:
        ranks: Processes that train; 0: one, or one per visible GPU.
        machine: What was read of the machine; by default it is read now.

    Raises:
        PlanError: Nothing is known of its processors or GPUs.
    """
    machine = machine or this_machine()
    if not isinstance(machine.gpus, Unavailable) and machine.gpus.visible:
        return _with_gpus(machine, machine.gpus.visible, ranks)
    return _processors(machine, ranks or 1)


def _with_gpus(machine: Machine, visible: tuple[Gpu, ...], ranks: int) -> dict[str, Any]:
    count = ranks or len(visible)
    if count > len(visible):
        raise PlanError(f"{count} ranks need as many GPUs, and {len(visible)} are visible here")
    facts = visible[0].facts
    if isinstance(facts, Unavailable):
        raise PlanError(f"{facts.reason}: {_REMEDY}")
    if any(gpu.name != visible[0].name for gpu in visible):
        names = ", ".join(sorted({gpu.name for gpu in visible}))
        raise PlanError(f"GPUs of several kinds are visible ({names}): show one kind to the run")
    table = {
        "device": facts.key,
        "nodes": 1,
        "devices_per_node": count,
        "host_cores": int(machine.usable_cores),
    }
    return {"cluster": table}


def _processors(machine: Machine, ranks: int) -> dict[str, Any]:
    """Each rank has its share of the cores, and of a processor's figures that share."""
    facts = machine.cpu_facts
    if isinstance(facts, Unavailable) or isinstance(facts.core_count, Unavailable):
        reason = facts.reason if isinstance(facts, Unavailable) else "its cores are not recorded"
        raise PlanError(
            f"how fast this machine computes is not known ({reason}; it has "
            f"{machine.usable_cores:g} cores and {machine.usable_memory_bytes / 2**30:.0f} GiB): "
            f"{_REMEDY}"
        )
    share = machine.usable_cores / facts.core_count.value / ranks
    figures_here = {kind: getattr(facts, f"{kind}_peak_flop_per_s") for kind in _KINDS}
    known = {kind: figure for kind, figure in figures_here.items() if isinstance(figure, Figure)}
    peaks = {kind: figure.value * min(share, 1.0) for kind, figure in known.items()}
    texts = {
        f"peak_flop_per_s.{kind}": (
            f"{figure.kind}: {figure.source}; {share:.3g} of the processor's cores"
        )
        for kind, figure in known.items()
    }
    if not peaks or isinstance(facts.memory_peak_bytes_per_s, Unavailable):
        raise PlanError(f"the peak of {facts.name} is not recorded: {_REMEDY}")
    bandwidth = facts.memory_peak_bytes_per_s.value * min(share, 1.0)
    words = f"{facts.memory_peak_bytes_per_s.kind}: {facts.memory_peak_bytes_per_s.source}"
    return {
        "cluster": {
            "device": facts.key,
            "nodes": 1,
            "devices_per_node": ranks,
            "host_cores": int(machine.usable_cores),
            "peak_flop_per_s": peaks,
            "memory_bytes": machine.usable_memory_bytes / ranks,
            "memory_bytes_per_s": bandwidth,
            # A message is written once and read once in memory that ranks share.
            "fast_bytes_per_s": bandwidth / 2.0,
        },
        "sources": {
            **texts,
            "memory_bytes": "measured: read from this machine",
            "memory_bytes_per_s": words,
            "fast_bytes_per_s": "prior: a copy in memory that the ranks share",
        },
    }


_OTHER_PART = "or give `device` the name of the part that it is"


@dataclass(frozen=True, slots=True)
class _Range:
    """Allowed deviation of a figure from the catalogue's of the same part.

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
    yield from _prices(cluster)
    for cause in cluster.failures:
        if cause.per_node_day > _MOST_FAILURES:
            yield (
                f"failures.{cause.name}.per_node_day = {cause.per_node_day:g} is more than a "
                "failure of every node in every minute, so that none ever starts: give failures of "
                "one node in one day, e.g. 0.0065"
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
    fabric = figure_value(known, "fabric_bytes_per_s", name)
    for field, figure in storage_figures(part, fabric, shape).items():
        known.setdefault(field, figure)
    processor = given.get("processor", part is not None and part.category == "cpu")
    causes, causes_from = _failures(tables, key, accelerators=not processor)
    spares, spares_from = _spares(given, shape.nodes, processor=processor)
    drawn = power(known, tables, name)
    numbers: dict[str, Any] = {
        table: {
            precision: figure_value(known, f"{table}.{precision}", name)
            for precision in PRECISIONS
            if f"peak_flop_per_s.{precision}" in known
        }
        for table in ("peak_flop_per_s", "matmul_flop_per_s")
    }
    for field, kind in SECTIONS["cluster"].items():
        if kind == AMOUNT:
            numbers[field] = figure_value(known, field, name)
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
            **numbers,
            host_cores=given.get("host_cores", 0),
            spares=spares,
            power=drawn,
            prices=Prices(**prices),
            storage=Storage(
                **{item: figure_value(known, f"storage.{item}", name) for item in STORAGE}
            ),
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
