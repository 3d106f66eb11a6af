"""Rows from a table of published runs with the columns of `throughput.csv`."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from outlast.errors import PlanError
from outlast.hardware import Device, Figure, device
from outlast.plan.cluster import Cluster
from outlast.plan.configuration import Balance, Configuration, Precision, Recompute, Sharding
from outlast.plan.estimate import Source
from outlast.plan.facts import facts
from outlast.plan.huggingface import published
from outlast.plan.rows import Refused, Row
from outlast.plan.transformer import Transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """Rules for reading the rows of one group.

    Attributes:
        framework: Name without version; None to take the column.
        fused_attention: A FlashAttention kind of kernel.
        sequence_parallel: Norms divided along the sequence where matrices are divided.
        gradient_bytes: Of the accumulated gradient.
        balance: Of the pipeline's stages.
        recompute: Where the column is empty.
        sequence: Where the column is empty; 0 to refuse such rows.
        micro_batch: Where the column is empty; 0 to refuse such rows.
        vocabulary: Where the column is empty.
        time_flag: Why no time of the group is fitted; empty where it is.
    """

    framework: str
    fused_attention: bool
    sequence_parallel: bool
    gradient_bytes: int
    balance: Balance = "layers"
    recompute: Recompute = "none"
    sequence: int = 0
    micro_batch: int = 0
    vocabulary: int = 0
    time_flag: str = ""


_TABLES = facts("published_runs")
CONVENTIONS: Mapping[str, Convention] = {
    group: Convention(**table) for group, table in _TABLES["conventions"].items()
}

REFUSED_GROUPS: Mapping[str, str] = _TABLES["refused"]


def mixture(name: str) -> Transformer | None:
    """A mixture model that the table names without its sizes.

    A remark in brackets does not count, except whether DeepSeek-V3 predicts a second token.

    Returns:
        None for a model that is not known, or that is not all attention (Nemotron 3).
    """
    base, _, remark = name.partition(" (")
    alone = _TABLES["mixtures"].get(f"{base} w/o MTP") if "w/o MTP" in remark else None
    known = alone or _TABLES["mixtures"].get(base)
    return known and replace(published(known["model"]), **known.get("changes", {}))


# DGX-A100 with eight 200 Gb/s adapters is the catalogue's. MosaicML states 1600 Gb/s per node of
# eight, the same. H100 and later: 400 Gb/s per device.
_FABRIC_BYTES_PER_S = 50e9
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
    if gpu in _TABLES["catalogue"]:
        part = _from_catalogue(_TABLES["catalogue"][gpu])
    elif gpu in _TABLES["parts"]:
        part = _from_table(_TABLES["parts"][gpu])
    else:
        return None
    # A tray of the rack has four devices; the rack's 72 are one domain of the fast link.
    rack = gpu.startswith(("GB200", "GB300"))
    per_node = 4 if rack else 16 if gpu == "V100-32GB" else 8
    return Cluster(
        name=site,
        nodes=-(-devices // per_node),
        devices_per_node=per_node,
        fast_domain=72 if rack else per_node,
        **part,
    )


@cache
def _from_catalogue(key: str) -> dict[str, Any]:
    """Fields of a `Cluster` that a part of the catalogue decides."""
    part = device(key)
    fabric = part.fabric_bytes_per_s
    return {
        "device": key,
        "peak_flop_per_s": _by_precision(part, "peak"),
        "matmul_flop_per_s": _by_precision(part, "matmul"),
        "memory_bytes": part.memory_bytes.value,
        "memory_bytes_per_s": part.memory_peak_bytes_per_s.value,
        "fast_bytes_per_s": part.scale_up_bytes_per_s.value,
        "fabric_bytes_per_s": fabric.value if isinstance(fabric, Figure) else _FABRIC_BYTES_PER_S,
        "sources": {
            name: Source(
                figure.value,
                figure.unit,
                figure.kind if figure.kind in ("measured", "datasheet") else "published",
                figure.source,
            )
            for name in ("memory_bytes", "scale_up_bytes_per_s", "bf16_matmul_flop_per_s")
            for figure in [getattr(part, name)]
            if isinstance(figure, Figure)
        },
    }


def _by_precision(part: Device, what: str) -> dict[str, float]:
    """Rates by precision; fp16 runs at bf16's, fp32 outside the matrix units."""
    rates = {name: f"{name}_{what}_flop_per_s" for name in ("bf16", "fp8")}
    rates = {"fp16": rates["bf16"]} | rates | {"fp32": "fp32_peak_flop_per_s"}
    known = {precision: getattr(part, name) for precision, name in rates.items()}
    return {name: rate.value for name, rate in known.items() if isinstance(rate, Figure)}


def _from_table(part: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `Cluster` for a part that the catalogue lacks."""
    fields = dict(part)
    peak, share = fields["peak_flop_per_s"], fields.pop("matmul_share")
    half = peak["fp16"]
    sources = {
        "peak_flop_per_s": Source(half, "FLOP/s", "published", _UNCHECKED),
        "matmul_flop_per_s": Source(
            half * share, "FLOP/s", "prior", "the nearest measured part's share of its peak"
        ),
        "memory_bytes": Source(part["memory_bytes"], "B", "published", _UNCHECKED),
        "fabric_bytes_per_s": Source(part["fabric_bytes_per_s"], "B/s", "published", _UNCHECKED),
    }
    matmul = {name: value * (1.0 if name == "fp32" else share) for name, value in peak.items()}
    return fields | {"matmul_flop_per_s": matmul, "sources": sources}


_NEEDED = ("row_id", "group", "status", "model", "gpu", "num_gpus", "tp", "pp", "dp", "gbs")
_GIB = 2**30

_RECOMPUTE: Mapping[str, Recompute] = {
    "none": "none",
    "full": "full",
    "selective": "attention",
    "selective+SP": "attention",
}

_ZERO: Mapping[int, Sharding] = {0: "none", 1: "optimizer", 2: "gradients", 3: "parameters"}


class _RefusedRowError(Exception):
    """A row that cannot be read; the text says why."""


def read_rows(path: Path | str) -> tuple[list[Row], list[Refused]]:
    """The rows of a table, and those that cannot be read with the reason.

    Args:
        path: A CSV file with the columns of `throughput.csv`; an empty cell is "not stated".

    Raises:
        PlanError: The file cannot be read, or lacks a column without which no row can be.
    """
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines)
            columns = reader.fieldnames or []
            table = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PlanError(f"{path} cannot be read as a table of runs: {error}") from None
    missing = [name for name in _NEEDED if name not in columns]
    if missing:
        raise PlanError(f"{path} lacks the columns {', '.join(missing)}: add them")
    rows: list[Row] = []
    refused: list[Refused] = []
    for number, cells in enumerate(table, 2):
        name = (cells.get("row_id") or "").strip() or f"line {number}"
        try:
            rows.append(_row(name, _Cells(cells)))
        except (_RefusedRowError, PlanError) as error:
            refused.append(Refused(name, str(error)))
    return rows, refused


class _Cells:
    """One line of the table, by column."""

    def __init__(self, cells: Mapping[str, Any]) -> None:
        self._cells = cells

    def text(self, column: str) -> str:
        return str(self._cells.get(column) or "").strip()

    def number(self, column: str) -> float | None:
        text = self.text(column)
        if not text:
            return None
        try:
            return float(text)
        except ValueError:
            raise _RefusedRowError(f"{column} = {text!r} is no number: correct it") from None

    def whole(self, column: str, default: int | None = None) -> int:
        value = self.number(column)
        if value is None:
            if default is None:
                raise _RefusedRowError(f"{column} is not stated")
            return default
        if value != int(value):
            raise _RefusedRowError(f"{column} = {value:g} is no whole number: correct it")
        return int(value)


def _row(name: str, cells: _Cells) -> Row:
    group = cells.text("group")
    if group in REFUSED_GROUPS:
        raise _RefusedRowError(REFUSED_GROUPS[group])
    if group not in CONVENTIONS:
        known = ", ".join(CONVENTIONS)
        raise _RefusedRowError(f"group = {group!r} has no known conventions: known are {known}")
    if "LoRA" in cells.text("notes"):
        raise _RefusedRowError("only adapters are trained, which a configuration cannot say")
    convention = CONVENTIONS[group]
    model = _model(cells, convention)
    cluster = published_cluster(cells.text("gpu"), cells.whole("num_gpus"), group)
    if cluster is None:
        raise _RefusedRowError(f"gpu = {cells.text('gpu')!r}: no peak of it is known")
    run = _configuration(cells, convention)
    allocated, held, reserved = _memory_bytes(cells)
    flop_per_s = cells.number("tflops_gpu")
    accumulation = cells.number("grad_accum")
    flags, time_flags = _flags(cells, convention, run)
    return Row(
        name=name,
        model=model,
        run=run,
        cluster=cluster,
        source=group,
        framework=convention.framework,
        version=_version(cells),
        step_seconds=_seconds(cells, model, run),
        reserved_bytes=reserved,
        allocated_bytes=allocated,
        held_bytes=held,
        out_of_memory=cells.text("status") == "oom",
        stated_devices=cells.whole("num_gpus"),
        stated_micro_batches=None if accumulation is None else int(accumulation),
        stated_flop_per_s=None if flop_per_s is None else flop_per_s * 1e12,
        stated_tokens_per_s=cells.number("tok_s_gpu"),
        flags=flags,
        time_flags=time_flags,
    )


def _model(cells: _Cells, convention: Convention) -> Transformer:
    name = cells.text("model")
    if not cells.text("layers"):
        known = mixture(name)
        if known is None:
            raise _RefusedRowError(f"model = {name!r}: its shape is not stated and not known")
        return replace(known, name=name)
    heads, hidden = cells.whole("heads"), cells.whole("hidden")
    vocabulary = cells.whole("vocab", convention.vocabulary or None)
    shape: dict[str, Any] = {
        "name": name,
        "layers": cells.whole("layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": cells.whole("kv_heads", heads),
        "head_width": hidden // heads,
        "intermediate": cells.whole("ffn", 4 * hidden),
        "gated": cells.text("swiglu") == "1",
        "vocabulary": vocabulary,
    }
    untied, tied = Transformer(**shape), Transformer(**shape, tied=True)
    stated = cells.number("params_b")
    # No table says whether head and embedding are one matrix; the stated size tells.
    if stated is None or abs(tied.parameters - 1e9 * stated) < abs(
        untied.parameters - 1e9 * stated
    ):
        return tied
    return untied


def _configuration(cells: _Cells, convention: Convention) -> Configuration:
    stages = cells.whole("vp", 1) if cells.whole("pp") > 1 else 1
    recompute = cells.text("recompute")
    if recompute and recompute not in _RECOMPUTE:
        known = ", ".join(_RECOMPUTE)
        raise _RefusedRowError(f"recompute = {recompute!r} is none of {known}")
    data, sequence = cells.whole("dp"), convention.sequence
    if cells.text("group") == "uci":
        batch = 524288 // sequence  # The notes: 524288 tokens per step by arithmetic.
    else:
        batch, sequence = cells.whole("gbs"), cells.whole("seq_len", sequence or None)
    micro_batch = convention.micro_batch if convention.micro_batch > 0 else None
    if convention.micro_batch < 0:
        micro_batch = max(1, batch // data)
    return Configuration(
        data=data,
        tensor=cells.whole("tp"),
        sequence_parallel=convention.sequence_parallel or recompute.endswith("+SP"),
        context=cells.whole("cp", 1),
        pipeline=cells.whole("pp"),
        stages_per_rank=stages,
        schedule="interleaved" if stages > 1 else "1f1b",
        balance=convention.balance,
        expert=cells.whole("ep", 1),
        sharding=_sharding(cells),
        sequence=sequence,
        micro_batch=cells.whole("mbs", micro_batch),
        batch=batch,
        recompute=_RECOMPUTE[recompute] if recompute else convention.recompute,
        precision=_precision(cells.text("precision")),
        # "PURE" rows of llm-foundry keep and reduce everything in bf16.
        gradient_bytes=2
        if cells.text("precision") == "bf16" and "PURE" in cells.text("notes")
        else convention.gradient_bytes,
        fused_attention=convention.fused_attention,
    )


def _sharding(cells: _Cells) -> Sharding:
    words = cells.text("sharding")
    if cells.text("zero_stage"):
        stage = cells.whole("zero_stage")
        if stage not in _ZERO:
            raise _RefusedRowError(f"zero_stage = {stage} is not 0 to 3")
        return _ZERO[stage]
    if "dist-optim" in words:
        return "optimizer"
    return "parameters" if words.startswith("FSDP") else "none"


def _precision(text: str) -> Precision:
    # "FP8-CS", "FP8-MX", "MXFP8", "amp_fp8" and a longer remark about FP8 are spellings of fp8;
    # NVFP4 is read as fp8 too and flagged, since its peak is another.
    spellings: dict[str, Precision] = {"fp8": "fp8", "fp4": "fp8", "bf16": "bf16", "fp16": "fp16"}
    for spelling, precision in spellings.items():
        if spelling in text.casefold():
            return precision
    raise _RefusedRowError(f"precision = {text!r} is none of fp16, bf16, fp8")


def _seconds(cells: _Cells, model: Transformer, run: Configuration) -> float | None:
    seconds = cells.number("iter_time_s")
    if seconds is not None or cells.text("status") != "ok":
        return seconds
    rate = cells.number("tok_s_gpu")
    if rate:
        return run.tokens / (rate * run.devices)
    hardware = cells.number("tflops_gpu")
    if hardware and cells.text("group") == "megatron2021":
        # With full recomputation: Narayanan et al. 2021 (2104.04473), equation 3.
        hidden, layers, sequence = model.hidden, model.layers, run.sequence
        widths = 1 + sequence / (6 * hidden) + model.vocabulary / (16 * layers * hidden)
        flops = 96.0 * run.batch * sequence * layers * hidden**2 * widths
        return flops / (hardware * 1e12 * run.devices)
    return None


def _memory_bytes(cells: _Cells) -> tuple[float | None, float | None, float | None]:
    """Most allocated, allocated between steps, and reserved, by the words of `mem_kind`; in GiB."""
    value, kind = cells.number("mem_gb"), cells.text("mem_kind")
    if value is None:
        return None, None, None
    if "figure-read" in kind:
        return value * _GIB, None, None
    inside = re.search(r"allocated ([\d.]+)", kind)
    return None, (float(inside[1]) * _GIB if inside else None), value * _GIB


def _version(cells: _Cells) -> str:
    release = re.search(r"release ([\d.]+)", cells.text("source_ref"))
    if release:
        return release[1]
    fixed = re.search(r"after_pp_fix=(True|False)", cells.text("notes"))
    return {"True": "after its pipeline fix", "False": "before its pipeline fix"}.get(
        fixed[1] if fixed else "", ""
    )


def _flags(
    cells: _Cells, convention: Convention, run: Configuration
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Reasons to keep a row out of every fit, and out of that of time."""
    whole, time = [], []
    name = cells.text("row_id")
    if convention.time_flag:
        time.append(f"row {name}: {convention.time_flag}")
    if "fp4" in cells.text("precision").casefold():
        time.append(f"row {name}: NVFP4 is read as fp8, whose peak is another; leave it out")
    if run.pipeline > 1 and "after_pp_fix=False" in cells.text("notes"):
        time.append(
            f"row {name}: run before nanotron's pipeline was repaired, several times too slow; "
            "leave its time out"
        )
    if cells.text("how_known") == "memory":
        whole.append(f"row {name}: recalled and not read; leave it out")
    return tuple(whole), tuple(time)
