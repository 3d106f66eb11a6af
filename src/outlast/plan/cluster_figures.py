"""Every figure of a cluster by its name: the file's own, else the catalogue's, else a prior."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outlast.errors import PlanError
from outlast.hardware import Device, Node, Unavailable
from outlast.plan.cluster import Power
from outlast.plan.cluster_defaults import (
    PRECISIONS,
    Known,
    Shape,
    link_figures,
    matmul_prior,
    part_figures,
    power_figures,
)
from outlast.plan.estimate import Source

POWER = ("limit_watts", "blocked_watts", "idle_watts", "node_watts", "pue")
STORAGE = ("memory_bytes_per_s", "peer_bytes_per_s", "local_bytes_per_s", "shared_bytes_per_s")

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
    memory = value(known, "memory_bytes_per_s", name)
    if isinstance(known["fast_bytes_per_s"], Unavailable) and shape.devices == 1:
        known["fast_bytes_per_s"] = Source(
            memory, "B/s", "prior", "one device sends nothing: its memory's stands in"
        )
    fast = value(known, "fast_bytes_per_s", name)
    if isinstance(known["fabric_bytes_per_s"], Unavailable) and shape.devices <= shape.fast_domain:
        known["fabric_bytes_per_s"] = Source(
            fast, "B/s", "prior", "all devices are in one fast domain: the fast link's stands in"
        )


def value(known: Mapping[str, Known], field: str, name: str) -> float:
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
    """What devices draw; None where neither file nor catalogue knows."""
    fields = [f"power.{item}" for item in POWER[:3]]
    absent = [
        field for field in fields if isinstance(known.get(field, Unavailable("")), Unavailable)
    ]
    if absent and "power" not in tables:
        return None
    for field, fallback in (("power.node_watts", 0.0), ("power.pue", 1.0)):
        known.setdefault(field, Source(fallback, "1", "prior", "nobody gave it"))
    return Power(**{item: value(known, f"power.{item}", name) for item in POWER})
