"""Rows from run directories of `outlast train`, training logs of others, and published tables.

    row = read_log_row("train.log", "train.toml")

where train.toml says what no log does:

    cluster = "h100x64"

    [model]
    published = "llama-3-8b"         # or huggingface = "config.json", or the sizes themselves

    [run]                            # fields of `Configuration`
    data = 8
    tensor = 4
    sequence = 8192
    micro_batch = 1
    batch = 256

A log that ends for want of memory says so in words of torch, and gives a row of a run that did not
fit; where a step follows these words, the run continued and did. If it timed no step, the settings
must name the `framework`. Tables of published runs have the columns of `throughput.csv`.
"""

from __future__ import annotations

import csv
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outlast.errors import PlanError
from outlast.hardware import Device, Figure, device
from outlast.job.load import job_from_text
from outlast.paths import check_regular
from outlast.plan.api import run_of
from outlast.plan.batch import Array
from outlast.plan.calibration import check_keys, kinds_of
from outlast.plan.cluster import Cluster
from outlast.plan.cluster_file import cluster_of
from outlast.plan.configuration import Balance, Configuration, Precision, Recompute, Sharding
from outlast.plan.constraints import calibrated_as
from outlast.plan.estimate import Source
from outlast.plan.facts import facts
from outlast.plan.huggingface import published, transformer_of
from outlast.plan.memory_fit import COMPILED, OUTLAST
from outlast.plan.rows import Refused, Row
from outlast.plan.transformer import Transformer
from outlast.records import AttemptStarted, MemoryMeasured, StepsDone, read_run

if TYPE_CHECKING:
    from outlast.job import Job
    from outlast.records import Run


_WARM_UP = 3
_SHARE = 0.1
FRAMEWORK = OUTLAST


def steady_median(series: Sequence[Array]) -> float:
    """Median of several starts' values, without the first ones of each.

    Left out are a tenth of a start's values and at least three: compilation, allocation and caches
    make them slow. A start with fewer than eight keeps the later half.

    Args:
        series: (n,) of each start, in order; at least one value in all.
    """
    kept = []
    for values in series:
        count = len(values)
        few = count < 2 * _WARM_UP + 2
        kept.append(values[count // 2 if few else max(_WARM_UP, int(_SHARE * count)) :])
    return float(np.median(np.concatenate(kept)))


def read_run_row(path: Path | str, cluster: Cluster) -> Row:
    """One run as a row: the median time of its steps once they are steady.

    Of a run with several starts, those count that had as many processes and as they were divided
    in the last; the first steps of each start are left out. Memory is the largest of a process's
    peaks in the last start; on a CPU, `reserved_bytes` is the resident memory of the process.

    Args:
        path: A run directory.
        cluster: Where it ran.

    Raises:
        PlanError: No step was timed, or the model is not one that the planner can express.
        RunError: `path` is not a run directory.
        JobError: Its job cannot be read.
    """
    run = read_run(path)
    job = job_from_text(run.job_text, f"the job of {path}")
    started = {record.attempt: event for record, event in run.of(AttemptStarted)}
    if not started:
        raise PlanError(f"{path} holds no start of the run: train some steps first")
    last = started[max(started)]
    if job.tensorize.form != "off":
        raise PlanError(
            f'tensorize.form = "{job.tensorize.form}" of {path}: constants are fitted to dense '
            'models; run the probe with tensorize.form = "off"'
        )
    alike = {
        number
        for number, event in started.items()
        if (event.world_size, event.parallel) == (last.world_size, last.parallel)
    }
    reserved, allocated = _memory_bytes(run, max(started))
    # The job with the degrees that the start resolved, e.g. `replicate` in place of 0.
    names = {"replicate", "shard", "tensor", "pipeline"} & set(last.parallel)
    degrees: dict[str, Any] = {name: last.parallel[name] for name in names}
    resolved = job.model_copy(update={"parallel": job.parallel.model_copy(update=degrees)})
    model, configuration = run_of(resolved, last.world_size)
    return Row(
        name=run.name,
        model=model,
        run=configuration,
        cluster=cluster,
        source=str(path),
        framework=COMPILED if job.train.compile else FRAMEWORK,
        version=last.versions.get("outlast", ""),
        step_seconds=_step_seconds(run, alike),
        reserved_bytes=reserved,
        allocated_bytes=allocated,
        stated_devices=last.world_size,
        time_flags=_time_flags(run.name, job),
    )


def _step_seconds(run: Run, attempts: set[int]) -> float:
    by_attempt: dict[int, list[float]] = {}
    for record, event in run.steps():
        if record.attempt in attempts and isinstance(event, StepsDone):
            by_attempt.setdefault(record.attempt, []).extend(event.step_seconds)
    series = [np.array(seconds) for seconds in by_attempt.values() if seconds]
    if not series:
        raise PlanError(f"{run.path} holds no timed step: train at least a few steps")
    return steady_median(series)


def _memory_bytes(run: Run, attempt: int) -> tuple[float | None, float | None]:
    """Reserved (on a CPU, resident) and allocated bytes of the fullest process."""
    events = [event for record, event in run.of(MemoryMeasured) if record.attempt == attempt]
    if not events:
        return None, None
    largest = (events[-1].most(kind) for kind in ("reserved", "allocated", "resident"))
    reserved, allocated, resident = (None if item is None else item[1] for item in largest)
    return (resident, None) if reserved is None else (reserved, allocated)


def _time_flags(name: str, job: Job) -> tuple[str, ...]:
    """Work beside training in a run, whose time the constants must not take up."""
    flags = []
    if job.guard.policy in {"linear", "full"}:
        flags.append(
            f'row {name}: guard.policy = "{job.guard.policy}" checks every step, which the '
            'constants would take up; run the probe with "light" or "off"'
        )
    if job.coding.scheme not in {"off", "coverage"}:
        flags.append(
            f'row {name}: coding.scheme = "{job.coding.scheme}" computes parts of the batch more '
            'than once; run the probe with "off"'
        )
    return tuple(flags)


_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "S/IT": 1.0}
# What frameworks call MB and GB are binary units.
_UNITS |= {"MB": 2.0**20, "MIB": 2.0**20, "GB": 2.0**30, "GIB": 2.0**30}
_NUMBER = r"([\d][\d.,]*(?:[eE][-+]?\d+)?)"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class LogFigures:
    """Figures of a log.

    Attributes:
        framework: Whose lines they are.
        values: By name, one per line that states it: seconds of a step, tokens per second and FLOPs
            per second of one device, samples per second of all devices, bytes of one device
            (reserved, most allocated, held between steps), samples of a step.
    """

    framework: str
    values: Mapping[str, list[float]]

    @property
    def lines(self) -> int:
        """Lines that say how fast it goes."""
        names = ("step_seconds", "tokens_per_s", "samples_per_s")
        return max(len(self.values.get(name, ())) for name in names)

    def median(self, name: str) -> float | None:
        """Of one figure, once the run is steady; None where the log does not say it."""
        values = self.values.get(name)
        return steady_median([np.array(values)]) if values else None

    def most(self, name: str) -> float | None:
        """Largest of one figure, or None."""
        return max(self.values.get(name, ()), default=None)


def read_lines(text: str, framework: str = "") -> LogFigures:
    """The figures of a log.

    Args:
        text: Of the log, of one rank or of several.
        framework: One of `FRAMEWORKS`; empty to take the one with most lines.

    Raises:
        PlanError: No line of a known framework says how fast it goes.
    """
    if framework and framework not in FRAMEWORKS:
        raise PlanError(f"framework = {framework!r} is none of {', '.join(FRAMEWORKS)}")
    plain = _ESCAPES.sub("", text)
    names = [framework] if framework else list(FRAMEWORKS)
    found = []
    for name in names:
        values: dict[str, list[float]] = {}
        for figure, pattern, scale in FRAMEWORKS[name]:
            for match in re.finditer(pattern, plain, re.MULTILINE):
                if (value := scale(_number(*match.groups()))) > 0:
                    values.setdefault(figure, []).append(value)
        found.append(LogFigures(name, values))
    best = max(found, key=lambda log: log.lines)
    if not best.lines:
        raise PlanError(
            f"the log has no line of {' or '.join(names)} that says the time or the throughput of "
            "a step: give the log of the last rank, or name the framework"
        )
    return best


def _number(digits: str, unit: str = "") -> float:
    """`1,234.5`, `3.45` with `K`, `21.5` with `GiB`, or `1.23` with `s/it` or `it/s`."""
    value = float(digits.replace(",", ""))
    if unit == "it/s":
        return 1.0 / value if value else 0.0
    return value * _UNITS[unit.upper()]


def _milli(value: float) -> float:
    return value / 1e3


def _tera(value: float) -> float:
    return value * 1e12


def _mebi(value: float) -> float:
    return value * 2.0**20


_Line = tuple[str, str, Callable[[float], float]]
_HUMAN = rf"{_NUMBER}([KMGBT]?)\b"

FRAMEWORKS: Mapping[str, tuple[_Line, ...]] = {
    # "step: 10  loss:  8.1  memory: 21.54GiB(27.3%)  tps: 3,412  tflops: 200.1  mfu: 20.3%": tokens
    # per second and device, largest reserved memory. The first step is logged too and left out.
    "torchtitan": (
        ("tokens_per_s", rf"step:\s*\d+\s.*?\btps:\s*{_NUMBER}", float),
        ("flop_per_s", rf"step:\s*\d+\s.*?\btflops:\s*{_NUMBER}", _tera),
        ("reserved_bytes", rf"step:\s*\d+\s.*?\bmemory:\s*{_NUMBER}\s*(GiB)", float),
    ),
    # "iteration 20/ 100 | ... | elapsed time per iteration (ms): 1234.5 | throughput per GPU
    # (TFLOP/s/GPU): 150.1 | ... | global batch size: 512 |", Megatron-DeepSpeed as well.
    "Megatron-LM": (
        ("step_seconds", rf"elapsed time per iteration \(ms\): {_NUMBER}", _milli),
        ("flop_per_s", rf"throughput per GPU \(TFLOP/s/GPU\): {_NUMBER}", _tera),
        ("batches", rf"global batch size:\s*{_NUMBER}", float),
        ("allocated_bytes", rf"\bmax allocated: {_NUMBER}", _mebi),
        ("held_bytes", rf"\| allocated: {_NUMBER}", _mebi),
        ("reserved_bytes", rf"\bmax reserved: {_NUMBER}", _mebi),
    ),
    # "iteration: 10 / 100 | ... | elapsed_time_per_iteration_ms: 3.45K | tokens_per_sec_per_gpu:
    # 37.9K | ... | model_tflops_per_gpu: 367 |" and "Peak allocated 17992.1MiB. Peak reserved: ..".
    "nanotron": (
        ("step_seconds", rf"elapsed_time_per_iteration_ms: {_HUMAN}", _milli),
        ("tokens_per_s", rf"tokens_per_sec_per_gpu: {_HUMAN}", float),
        ("flop_per_s", rf"model_tflops_per_gpu: {_HUMAN}", _tera),
        ("batches", rf"global_batch_size: {_HUMAN}", float),
        ("allocated_bytes", rf"Peak allocated:? {_NUMBER}\s*(MiB)", float),
        ("reserved_bytes", rf"Peak reserved:? {_NUMBER}\s*(MiB)", float),
    ),
    # "global_step=10, RunningAvgSamplesPerSec=12.3, CurrSamplesPerSec=12.5, MemAllocated=5.1GB,
    # MaxMemAllocated=20.3GB": samples of all devices.
    "DeepSpeed": (
        ("samples_per_s", rf"CurrSamplesPerSec={_NUMBER}", float),
        ("allocated_bytes", rf"MaxMemAllocated={_NUMBER}\s*(GB)", float),
        ("held_bytes", rf"\bMemAllocated={_NUMBER}\s*(GB)", float),
    ),
    # " 10%|# | 100/1000 [02:03<18:27,  1.23s/it]", and at the end {..., 'train_samples_per_second':
    # 25.9, ...}.
    "HF Trainer": (
        ("step_seconds", rf"\d+/\d+ \[[\d:]+<[\d:?]+,\s*{_NUMBER}(s/it|it/s)", float),
        ("samples_per_s", rf"'train_samples_per_second':\s*'?{_NUMBER}", float),
    ),
}

_TOP = {"name": str, "framework": str, "version": str, "cluster": str, "model": dict, "run": dict}
_OUT_OF_MEMORY = re.compile(r"\b(?:CUDA|HIP) out of memory")
_BAR = re.compile(r"\b(\d+/\d+) \[")


def read_log_row(log: Path | str, settings: Path | str, cluster: Cluster | None = None) -> Row:
    """One training log as a row.

    Args:
        log: Of a rank that writes the lines of steps; torchtitan, Megatron-LM, Megatron-DeepSpeed,
            nanotron, DeepSpeed or Hugging Face Trainer.
        settings: TOML as above; `framework` names one of these where several could have written
            the log, `version` is the framework's.
        cluster: Where it ran; None to take `cluster` of the settings.

    Raises:
        PlanError: A file cannot be read, a setting is wrong, or no line says the time of a step.
    """
    path = Path(settings)
    try:
        table = tomllib.loads(_text(path))
    except ValueError as error:
        raise PlanError(f"{path} is not valid TOML: {error}") from None
    check_keys(table, _TOP, {"name", "framework", "version", "cluster"}, str(path))
    text, where = _text(Path(log)), str(settings)
    failed = _ran_out(text, table.get("framework", ""))
    figures = _figures(text, table.get("framework", ""), failed, where)
    model = _model(table["model"], Path(settings))
    check_keys(table["run"], *kinds_of(Configuration), f"{where}: run")
    run = Configuration(**table["run"])
    if cluster is None:
        if "cluster" not in table:
            raise PlanError(f'{where} lacks cluster: name one, for example cluster = "h100x64"')
        cluster = cluster_of(table["cluster"])
    name = table.get("name", Path(log).stem)
    seconds = _seconds(figures, run)
    return Row(
        name=name,
        model=model,
        run=run,
        cluster=cluster,
        source=str(log),
        framework=calibrated_as(figures.framework),
        version=table.get("version", ""),
        step_seconds=seconds,
        # What a run held as it failed is not what it needs.
        reserved_bytes=None if failed else figures.most("reserved_bytes"),
        allocated_bytes=None if failed else figures.most("allocated_bytes"),
        held_bytes=None if failed else figures.most("held_bytes"),
        out_of_memory=failed,
        stated_flop_per_s=figures.median("flop_per_s"),
        stated_tokens_per_s=figures.median("tokens_per_s"),
        flags=_flags(name, figures, run),
    )


def _ran_out(text: str, framework: str) -> bool:
    """True if no step follows the last line that reports out of memory."""
    words = list(_OUT_OF_MEMORY.finditer(text))
    if not words:
        return False
    # A progress bar that is closed as the program ends is printed once more: no further step.
    before = set(_BAR.findall(text, 0, words[-1].start()))
    after = _BAR.sub(lambda bar: "" if bar[1] in before else bar[0], text[words[-1].end() :])
    try:
        read_lines(after, framework)
    except PlanError:
        return True
    return False


def _figures(text: str, framework: str, failed: bool, settings: str) -> LogFigures:
    """Figures of the log; none of a run that ran out of memory before a step was timed."""
    try:
        return read_lines(text, framework)
    except PlanError:
        if not failed or (framework and framework not in FRAMEWORKS):
            raise
    if not framework:
        raise PlanError(
            f"{settings} lacks framework: the log ends for want of memory before a step, and does "
            f"not say whose it is; name one of {', '.join(FRAMEWORKS)}"
        )
    return LogFigures(framework, {})


def _seconds(figures: LogFigures, run: Configuration) -> float | None:
    """Time of a step; None where no line says it."""
    seconds = figures.median("step_seconds")
    if seconds is not None:
        return seconds
    tokens = figures.median("tokens_per_s")
    if tokens is not None:
        return run.tokens / (tokens * run.devices)
    # Of Hugging Face's Trainer with start, evaluation and checkpoints.
    samples = figures.median("samples_per_s")
    return None if samples is None else run.batch / samples


def _flags(name: str, figures: LogFigures, run: Configuration) -> tuple[str, ...]:
    batch = figures.median("batches")
    # Logs write 1.02K for 1024: three digits.
    if batch is None or math.isclose(batch, run.batch, rel_tol=0.005):
        return ()
    text = f"row {name}: the log has a global batch of {batch:g}, the settings say {run.batch}"
    return (f"{text}; correct run.batch",)


def _text(path: Path) -> str:
    try:
        check_regular(path)
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}") from None


def _model(table: Mapping[str, Any], settings: Path) -> Transformer:
    where = f"{settings}: model"
    named = {"published": str, "huggingface": str}
    if set(named) & set(table):
        check_keys(table, named, named, where)
        if len(table) > 1:
            raise PlanError(f"{where} names both published and huggingface: keep one")
        if "published" in table:
            return published(table["published"])
        return transformer_of(settings.parent / table["huggingface"])
    check_keys(table, *kinds_of(Transformer), where)
    return Transformer(**table)


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


def read_rows(path: Path | str) -> tuple[list[Row], list[Refused]]:
    """The rows of a table, and those that cannot be read with the reason.

    Args:
        path: A CSV file with the columns of `throughput.csv`; an empty cell is "not stated".

    Raises:
        PlanError: The file cannot be read, or lacks a column without which no row can be.
    """
    try:
        check_regular(path)
        with Path(path).open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines)
            columns = reader.fieldnames or []
            table = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise PlanError(f"{path} cannot be read as a table of runs: {reason}") from None
    missing = [name for name in _NEEDED if name not in columns]
    if missing:
        raise PlanError(f"{path} lacks the columns {', '.join(missing)}: add them")
    rows: list[Row] = []
    refused: list[Refused] = []
    for number, cells in enumerate(table, 2):
        name = (cells.get("row_id") or "").strip() or f"line {number}"
        try:
            rows.append(_row(name, _Cells(cells)))
        except PlanError as error:
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
            raise PlanError(f"{column} = {text!r} is no number: correct it") from None

    def whole(self, column: str, default: int | None = None) -> int:
        value = self.number(column)
        if value is None:
            if default is None:
                raise PlanError(f"{column} is not stated")
            return default
        if value != int(value):
            raise PlanError(f"{column} = {value:g} is no whole number: correct it")
        return int(value)


def _row(name: str, cells: _Cells) -> Row:
    group = cells.text("group")
    if group in REFUSED_GROUPS:
        raise PlanError(REFUSED_GROUPS[group])
    if group not in CONVENTIONS:
        known = ", ".join(CONVENTIONS)
        raise PlanError(f"group = {group!r} has no known conventions: known are {known}")
    if "LoRA" in cells.text("notes"):
        raise PlanError("only adapters are trained, which a configuration cannot say")
    convention = CONVENTIONS[group]
    model = _table_model(cells, convention)
    cluster = published_cluster(cells.text("gpu"), cells.whole("num_gpus"), group)
    if cluster is None:
        raise PlanError(f"gpu = {cells.text('gpu')!r}: no peak of it is known")
    run = _configuration(cells, convention)
    allocated, held, reserved = _table_memory_bytes(cells)
    flop_per_s = cells.number("tflops_gpu")
    accumulation = cells.number("grad_accum")
    flags, time_flags = _table_flags(cells, convention, run)
    return Row(
        name=name,
        model=model,
        run=run,
        cluster=cluster,
        source=group,
        framework=convention.framework,
        version=_version(cells),
        step_seconds=_table_seconds(cells, model, run),
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


def _table_model(cells: _Cells, convention: Convention) -> Transformer:
    name = cells.text("model")
    if not cells.text("layers"):
        known = mixture(name)
        if known is None:
            raise PlanError(f"model = {name!r}: its shape is not stated and not known")
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
        raise PlanError(f"recompute = {recompute!r} is none of {known}")
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
            raise PlanError(f"zero_stage = {stage} is not 0 to 3")
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
    raise PlanError(f"precision = {text!r} is none of fp16, bf16, fp8")


def _table_seconds(cells: _Cells, model: Transformer, run: Configuration) -> float | None:
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


def _table_memory_bytes(cells: _Cells) -> tuple[float | None, float | None, float | None]:
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


def _table_flags(
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
