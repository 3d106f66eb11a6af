"""Rows from run directories of `outlast train` and from other frameworks' training logs.

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
fit; where a step follows these words, the run went on and did. If it timed no step, the settings
must name the `framework`.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outlast.errors import PlanError
from outlast.job.load import job_from_text
from outlast.plan.api import run_of
from outlast.plan.batch import Array
from outlast.plan.calibration import check_keys, kinds_of
from outlast.plan.cluster import Cluster
from outlast.plan.cluster_file import cluster_of
from outlast.plan.configuration import Configuration
from outlast.plan.constraints import calibrated_as
from outlast.plan.huggingface import published, transformer_of
from outlast.plan.memory_fit import COMPILED, OUTLAST
from outlast.plan.rows import Row
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
    degrees: dict[str, Any] = {
        name: last.parallel[name]
        for name in ("replicate", "shard", "tensor", "pipeline")
        if name in last.parallel
    }
    model, configuration = run_of(
        job.model_copy(update={"parallel": job.parallel.model_copy(update=degrees)}),
        last.world_size,
    )
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
    most = {kind: events[-1].most(kind) for kind in ("reserved", "allocated", "resident")}
    found = {kind: None if largest is None else largest[1] for kind, largest in most.items()}
    if found["reserved"] is None:
        return found["resident"], None
    return found["reserved"], found["allocated"]


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
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}") from None


def _model(table: Mapping[str, Any], settings: Path) -> Transformer:
    where = f"{settings}: model"
    if "published" in table or "huggingface" in table:
        check_keys(
            table, {"published": str, "huggingface": str}, {"published", "huggingface"}, where
        )
        if len(table) > 1:
            raise PlanError(f"{where} names both published and huggingface: keep one")
        if "published" in table:
            return published(table["published"])
        return transformer_of(settings.parent / table["huggingface"])
    check_keys(table, *kinds_of(Transformer), where)
    return Transformer(**table)
