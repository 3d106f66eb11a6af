"""Rows from training logs of other frameworks, with the configuration as TOML beside them.

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
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

from outlast.errors import PlanError
from outlast.plan.calibration.log_lines import FRAMEWORKS, LogFigures, read_lines
from outlast.plan.calibration.rows import Row
from outlast.plan.calibration.strict import check_keys
from outlast.plan.cluster import Cluster
from outlast.plan.cluster_file import cluster_of
from outlast.plan.configuration import Configuration
from outlast.plan.context import calibrated_as
from outlast.plan.huggingface import transformer_of
from outlast.plan.known_models import published
from outlast.plan.transformer import Transformer

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
    table = _settings(Path(settings))
    text, where = _text(Path(log)), str(settings)
    failed = _ran_out(text, table.get("framework", ""))
    figures = _figures(text, table.get("framework", ""), failed, where)
    model, run = _model(table["model"], Path(settings)), _run(table["run"], where)
    if cluster is None:
        if "cluster" not in table:
            raise PlanError(f'{where} lacks cluster: name one, for example cluster = "h100x64"')
        cluster = cluster_of(table["cluster"])
    name = table.get("name", Path(log).stem)
    seconds, assumptions = _seconds(figures, run)
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
        assumptions=assumptions,
        flags=_flags(name, figures, run),
    )


def _ran_out(text: str, framework: str) -> bool:
    """Whether no step follows the last word that memory ran out."""
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
    """What the log says; nothing of a run that ran out of memory before a step was timed."""
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
    return LogFigures(framework)


def _seconds(figures: LogFigures, run: Configuration) -> tuple[float | None, tuple[str, ...]]:
    """Time of a step, and what was assumed to have it; None where no line says it."""
    seconds = figures.median("step_seconds")
    if seconds is not None:
        return seconds, ()
    tokens = figures.median("tokens_per_s")
    if tokens is not None:
        return run.tokens / (tokens * run.devices), ()
    samples = figures.median("samples_per_s")
    if samples is None:
        return None, ()
    whole = ("time includes start, evaluation and checkpoints",)
    return run.batch / samples, whole if figures.framework == "HF Trainer" else ()


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


def _settings(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(_text(path))
    except ValueError as error:
        raise PlanError(f"{path} is not valid TOML: {error}") from None
    check_keys(table, _TOP, {"name", "framework", "version", "cluster"}, str(path))
    return table


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
    check_keys(table, *_kinds(Transformer), where)
    return Transformer(**table)


def _run(table: Mapping[str, Any], where: str) -> Configuration:
    check_keys(table, *_kinds(Configuration), f"{where}: run")
    return Configuration(**table)


def _kinds(cls: type[Transformer] | type[Configuration]) -> tuple[dict[str, type], set[str]]:
    """Type of each field, choices being texts; and the fields that have a default."""
    hints = get_type_hints(cls)
    kinds = {
        field.name: hints[field.name] if hints[field.name] in (int, bool, str) else str
        for field in fields(cls)
        if field.compare
    }
    return kinds, {field.name for field in fields(cls) if field.default is not MISSING}
