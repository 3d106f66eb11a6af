"""The clusters behind the published tables: `gpu` and `group` of a row to a `Cluster`."""

from __future__ import annotations

from functools import cache

from outlast.hardware import Device, Figure, Quantity, device
from outlast.plan.cluster import Cluster
from outlast.plan.estimate import Source

_NODE_DEVICES = 8
_RACK_DEVICES = 72

# DGX-A100 with eight 200 Gb/s adapters is the catalogue's. MosaicML states 1600 Gb/s per node of
# eight, the same. H100 and later: 400 Gb/s per device.
_FABRIC_BYTES_PER_S = 50e9

_PARTS = {
    "A100-80GB": "a100-sxm-80",
    "A100": "a100-sxm-80",
    "H100-80GB": "h100-sxm",
    "B200-180GB": "b200-sxm",
    "GB200-186GB": "gb200",
}
_UNCHECKED = "vendor's product page, quoted from memory and not checked"


def published_cluster(gpu: str, devices: int, site: str = "published tables") -> Cluster | None:
    """The cluster of a published row.

    Args:
        gpu: As `throughput.csv` writes it, e.g. "A100-80GB".
        devices: Accelerators of the run: the cluster has whole nodes for them.
        site: Whose cluster it is: its name.

    Returns:
        The cluster, or None for a part that nothing is known of.
    """
    if gpu in _PARTS:
        facts = _from_catalogue(_PARTS[gpu])
    elif gpu in _OWN:
        facts = _own(gpu)
    else:
        return None
    key, peak, matmul, memory, fast, fabric, sources = facts
    per_node = 16 if gpu == "V100-32GB" else _NODE_DEVICES
    rack = gpu.startswith(("GB200", "GB300"))
    # A tray of the rack has four devices; the rack's 72 are one domain of the fast link.
    per_node = 4 if rack else per_node
    return Cluster(
        name=site,
        device=key,
        nodes=-(-devices // per_node),
        devices_per_node=per_node,
        fast_domain=_RACK_DEVICES if rack else per_node,
        peak_flop_per_s=peak,
        matmul_flop_per_s=matmul,
        memory_bytes=memory[0],
        memory_bytes_per_s=memory[1],
        fast_bytes_per_s=fast,
        fabric_bytes_per_s=fabric,
        sources=sources,
    )


_Facts = tuple[
    str,
    dict[str, float],
    dict[str, float],
    tuple[float, float],
    float,
    float,
    dict[str, Source],
]


@cache
def _from_catalogue(key: str) -> _Facts:
    part = device(key)
    peak = _by_precision(part, "peak")
    matmul = _by_precision(part, "matmul")
    sources = {
        name: Source(figure.value, figure.unit, _origin(figure), figure.source)
        for name in ("memory_bytes", "scale_up_bytes_per_s", "bf16_matmul_flop_per_s")
        for figure in [getattr(part, name)]
        if isinstance(figure, Figure)
    }
    fabric = part.fabric_bytes_per_s
    return (
        key,
        peak,
        matmul,
        (part.memory_bytes.value, part.memory_peak_bytes_per_s.value),
        part.scale_up_bytes_per_s.value,
        fabric.value if isinstance(fabric, Figure) else _FABRIC_BYTES_PER_S,
        sources,
    )


def _origin(figure: Figure) -> str:
    return {"measured": "measured", "datasheet": "datasheet"}.get(figure.kind, "published")


def _by_precision(part: Device, what: str) -> dict[str, float]:
    """Rates by precision; fp16 runs at bf16's, fp32 outside the matrix units."""
    found = {}
    for precision, name in (("fp16", "bf16"), ("bf16", "bf16"), ("fp8", "fp8"), ("fp32", "fp32")):
        known = part.fp32_peak_flop_per_s if name == "fp32" else _rate(part, name, what)
        if isinstance(known, Figure):
            found[precision] = known.value
    return found


def _rate(part: Device, precision: str, what: str) -> Quantity:
    figure: Quantity = getattr(part, f"{precision}_{what}_flop_per_s")
    return figure


# Key, dense peaks (fp16 or bf16, fp8, fp32), best product over the peak, memory bytes and bytes/s,
# fast link and fabric bytes/s. The share of the peak is that of the nearest part measured (B200,
# GB200, A100); the V100's is a guess from its published GEMM benchmarks.
_OWN: dict[str, tuple[str, tuple[float, float, float], float, tuple[float, ...]]] = {
    "A100-40GB": (
        "a100-sxm-40",
        (312e12, 0.0, 19.5e12),
        0.869,
        (40 * 2**30, 1.555e12, 300e9, 25e9),
    ),
    "V100-32GB": (
        "v100-sxm3-32",
        (125e12, 0.0, 15.7e12),
        0.8,
        (32 * 2**30, 0.9e12, 150e9, 6.25e9),
    ),
    "B300-288GB": ("b300-sxm", (2250e12, 4500e12, 80e12), 0.77, (288e9, 8e12, 900e9, 100e9)),
    "GB300-288GB": ("gb300", (2500e12, 5000e12, 80e12), 0.727, (288e9, 8e12, 900e9, 100e9)),
}


def _own(gpu: str) -> _Facts:
    key, (half, quarter, single), share, (memory, rate, fast, fabric) = _OWN[gpu]
    peak = {"fp32": single, "fp16": half}
    if key != "v100-sxm3-32":
        peak["bf16"] = half
    if quarter:
        peak["fp8"] = quarter
    matmul = {name: value * (1.0 if name == "fp32" else share) for name, value in peak.items()}
    sources = {
        "peak_flop_per_s": Source(half, "FLOP/s", "published", _UNCHECKED),
        "matmul_flop_per_s": Source(
            half * share, "FLOP/s", "prior", "the nearest measured part's share of its peak"
        ),
        "memory_bytes": Source(memory, "B", "published", _UNCHECKED),
        "fabric_bytes_per_s": Source(fabric, "B/s", "published", _UNCHECKED),
    }
    return key, peak, matmul, (memory, rate), fast, fabric, sources
