"""Lines of other frameworks' training logs: time, throughput and memory per step."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from outlast.errors import PlanError
from outlast.plan.calibration.steady import steady_median

_SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_BYTES = {
    "MB": 2.0**20,
    "MIB": 2.0**20,
    "GB": 2.0**30,
    "GIB": 2.0**30,
    "": 1.0,
}
_NUMBER = r"([\d][\d.,]*(?:[eE][-+]?\d+)?)"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class LogFigures:
    """What a log says, a list entry per line that says it, units as in the names.

    Attributes:
        framework: Whose lines they are.
        step_seconds: Time of a step.
        tokens_per_s: Of one device.
        samples_per_s: Of all devices.
        flop_per_s: Of one device.
        reserved_bytes: Of one device; the largest counts.
        allocated_bytes: Likewise, of the most that tensors held.
        held_bytes: Likewise, of what they hold between steps.
        batches: Samples of a step, as the framework says it.
    """

    framework: str
    step_seconds: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    samples_per_s: list[float] = field(default_factory=list)
    flop_per_s: list[float] = field(default_factory=list)
    reserved_bytes: list[float] = field(default_factory=list)
    allocated_bytes: list[float] = field(default_factory=list)
    held_bytes: list[float] = field(default_factory=list)
    batches: list[float] = field(default_factory=list)

    @property
    def lines(self) -> int:
        """Lines that say how fast it goes."""
        return max(len(self.step_seconds), len(self.tokens_per_s), len(self.samples_per_s))

    def median(self, name: str) -> float | None:
        """Of one of the lists, once the run is steady; None where the log does not say it."""
        values = getattr(self, name)
        return steady_median([np.array(values)]) if values else None

    def most(self, name: str) -> float | None:
        """Largest of one of the lists, or None."""
        return max(getattr(self, name), default=None)


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
    found = [_figures(plain, name) for name in names]
    best = max(found, key=lambda log: log.lines)
    if not best.lines:
        raise PlanError(
            f"the log has no line of {' or '.join(names)} that says the time or the throughput of "
            "a step: give the log of the last rank, or name the framework"
        )
    return best


def _figures(text: str, framework: str) -> LogFigures:
    found = LogFigures(framework)
    for name, pattern, value_of in FRAMEWORKS[framework]:
        values = [value_of(match) for match in re.finditer(pattern, text, re.MULTILINE)]
        getattr(found, name).extend(value for value in values if value > 0)
    return found


def _plain(match: re.Match[str]) -> float:
    """`1,234.5`."""
    return float(match[1].replace(",", ""))


def _milli(match: re.Match[str]) -> float:
    return _plain(match) / 1e3


def _tera(match: re.Match[str]) -> float:
    return _plain(match) * 1e12


def _human(match: re.Match[str]) -> float:
    """`3.45K`."""
    return _plain(match) * _SCALES[match[2].upper()]


def _human_milli(match: re.Match[str]) -> float:
    return _human(match) / 1e3


def _human_tera(match: re.Match[str]) -> float:
    return _human(match) * 1e12


def _bytes(match: re.Match[str]) -> float:
    """`21.5GiB`; what frameworks call MB and GB are binary units."""
    return _plain(match) * _BYTES[match[2].upper()]


def _mebibytes(match: re.Match[str]) -> float:
    return _plain(match) * 2.0**20


def _per_iteration(match: re.Match[str]) -> float:
    """`1.23s/it` or `1.23it/s` of a progress bar."""
    value = _plain(match)
    if not value:
        return 0.0
    return value if match[2] == "s/it" else 1.0 / value


_Line = tuple[str, str, Callable[[re.Match[str]], float]]
_HUMAN = rf"{_NUMBER}([KMGBT]?)\b"

FRAMEWORKS: Mapping[str, tuple[_Line, ...]] = {
    # "step: 10  loss:  8.1  memory: 21.54GiB(27.3%)  tps: 3,412  tflops: 200.1  mfu: 20.3%": tokens
    # per second and device, largest reserved memory. The first step is logged too and left out.
    "torchtitan": (
        ("tokens_per_s", rf"step:\s*\d+\s.*?\btps:\s*{_NUMBER}", _plain),
        ("flop_per_s", rf"step:\s*\d+\s.*?\btflops:\s*{_NUMBER}", _tera),
        ("reserved_bytes", rf"step:\s*\d+\s.*?\bmemory:\s*{_NUMBER}\s*(GiB)", _bytes),
    ),
    # "iteration 20/ 100 | ... | elapsed time per iteration (ms): 1234.5 | throughput per GPU
    # (TFLOP/s/GPU): 150.1 | ... | global batch size: 512 |", Megatron-DeepSpeed as well.
    "Megatron-LM": (
        ("step_seconds", rf"elapsed time per iteration \(ms\): {_NUMBER}", _milli),
        ("flop_per_s", rf"throughput per GPU \(TFLOP/s/GPU\): {_NUMBER}", _tera),
        ("batches", rf"global batch size:\s*{_NUMBER}", _plain),
        ("allocated_bytes", rf"\bmax allocated: {_NUMBER}", _mebibytes),
        ("held_bytes", rf"\| allocated: {_NUMBER}", _mebibytes),
        ("reserved_bytes", rf"\bmax reserved: {_NUMBER}", _mebibytes),
    ),
    # "iteration: 10 / 100 | ... | elapsed_time_per_iteration_ms: 3.45K | tokens_per_sec_per_gpu:
    # 37.9K | ... | model_tflops_per_gpu: 367 |" and "Peak allocated 17992.1MiB. Peak reserved: ..".
    "nanotron": (
        ("step_seconds", rf"elapsed_time_per_iteration_ms: {_HUMAN}", _human_milli),
        ("tokens_per_s", rf"tokens_per_sec_per_gpu: {_HUMAN}", _human),
        ("flop_per_s", rf"model_tflops_per_gpu: {_HUMAN}", _human_tera),
        ("batches", rf"global_batch_size: {_HUMAN}", _human),
        ("allocated_bytes", rf"Peak allocated:? {_NUMBER}\s*(MiB)", _bytes),
        ("reserved_bytes", rf"Peak reserved:? {_NUMBER}\s*(MiB)", _bytes),
    ),
    # "global_step=10, RunningAvgSamplesPerSec=12.3, CurrSamplesPerSec=12.5, MemAllocated=5.1GB,
    # MaxMemAllocated=20.3GB": samples of all devices.
    "DeepSpeed": (
        ("samples_per_s", rf"CurrSamplesPerSec={_NUMBER}", _plain),
        ("allocated_bytes", rf"MaxMemAllocated={_NUMBER}\s*(GB)", _bytes),
        ("held_bytes", rf"\bMemAllocated={_NUMBER}\s*(GB)", _bytes),
    ),
    # " 10%|# | 100/1000 [02:03<18:27,  1.23s/it]", and at the end {..., 'train_samples_per_second':
    # 25.9, ...}.
    "HF Trainer": (
        ("step_seconds", rf"\d+/\d+ \[[\d:]+<[\d:?]+,\s*{_NUMBER}(s/it|it/s)", _per_iteration),
        ("samples_per_s", rf"'train_samples_per_second':\s*'?{_NUMBER}", _plain),
    ),
}
