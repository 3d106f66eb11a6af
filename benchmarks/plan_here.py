"""The main job on this machine: calibrated in five minutes, then 20 settings that it has not seen.

Probes and runs are real `outlast train` on the processors; with `--keep DIR` they stay there and a
second call continues where the first was stopped.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from harness import Bar, publish

from outlast.cli.plan_calibrate import Here, most_ranks, probed
from outlast.errors import PlanError
from outlast.job import load_job
from outlast.plan.probes import (
    LONGEST_STEP_SECONDS,
    SHORTEST_STEP_SECONDS,
    Probe,
    Setting,
    family,
    numbers_of,
    run_probe,
)
from outlast.plan.run_rows import FRAMEWORK
from outlast.plan.step_fit import Belonging

PROBE_SECONDS = 300.0
UNSEEN = 20
SEED = 11
"""Of the unseen settings; the probes are chosen without any."""
MOST_SECONDS = 270.0
"""Of the unseen runs together: with the probes, under ten minutes."""
_DEADLINE_SECONDS = 120.0
_STEPS = (10, 30)
_MEASURED_SECONDS = 4.0


def here_bars(quick: bool, keep: Path | None = None, seed: int = SEED) -> Iterator[Bar]:
    """Errors of step time and peak memory, and what the intervals cover.

    Args:
        quick: Fewer probes and settings: the figures are not those of the bar.
        keep: Folder of the runs; None for a temporary one.
        seed: Of the unseen settings.
    """
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="here-")))
        begun = time.monotonic()
        found, _ = probed(None, 90.0 if quick else PROBE_SECONDS, folder / "probes", _say)
        calibrated = time.monotonic() - begun
        runs = _unseen(found, folder / "unseen", 3 if quick else UNSEEN, seed)
    yield _reported("wall time of the calibration", calibrated, "s", 330.0, len(found.probes))
    yield from _bars(found, runs)


def _unseen(found: Here, folder: Path, count: int, seed: int) -> list[Probe]:
    """Settings of the job's family that no probe was, as a seed draws them, really run."""
    known = {probe.setting.name for probe in found.probes}
    drawn = [
        each for each in family(load_job(None), most_ranks(found.cluster)) if each.name not in known
    ]
    seconds, _ = _predicted(found, drawn)
    within = (seconds <= LONGEST_STEP_SECONDS) & (seconds >= SHORTEST_STEP_SECONDS)
    places = np.random.default_rng(seed).permutation(np.flatnonzero(within))
    deadline = time.monotonic() + MOST_SECONDS
    runs: list[Probe] = []
    for place in places[:count]:
        setting, expected = drawn[int(place)], float(seconds[place])
        if time.monotonic() > deadline:
            _say(f"{len(runs)} of {count} settings were run in time")
            break
        steps = int(np.clip(np.ceil(_MEASURED_SECONDS / expected), *_STEPS))
        try:
            run = run_probe(setting, found.cluster, folder, steps, _DEADLINE_SECONDS)
        except PlanError as error:
            _say(str(error))
            continue
        runs.append(run)
        measured = run.row.step_seconds or float("nan")
        _say(f"{setting.name}: {measured:.3f} s, predicted {expected:.3f} s")
    return runs


def _say(text: str) -> None:
    print(text, flush=True)


def _predicted(found: Here, settings: Sequence[Setting]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of a step, and half of the interval in log space."""
    whose = Belonging(found.cluster.device, found.cluster.name, FRAMEWORK)
    numbers = numbers_of(settings, found.cluster)
    seconds = found.step.seconds(numbers, [whose] * len(settings))
    return seconds, found.step.half_widths(numbers, whose)


def _bars(found: Here, runs: Sequence[Probe]) -> Iterator[Bar]:
    settings = [run.setting for run in runs]
    predicted, widths = _predicted(found, settings)
    measured = np.array([run.row.step_seconds for run in runs], dtype=np.float64)
    # What tokens per second of the probes' median would say, as a constant utilisation does.
    rates = [_flop_per_s(probe) for probe in found.probes]
    work = np.array([_flops(run) for run in runs])
    constant = _words(work / float(np.median(rates)) / measured - 1.0)
    yield from _three("step time", predicted, measured, f"constant utilisation {constant}")
    yield _coverage("step time", predicted, measured, widths)
    if found.memory is not None:
        numbers = numbers_of(settings, found.cluster)
        peaks = np.array([run.row.reserved_bytes or np.nan for run in runs])
        known = np.isfinite(peaks)
        bytes_ = found.memory.bytes(numbers)
        mean = np.mean([probe.row.reserved_bytes or np.nan for probe in found.probes])
        constant = _words((mean / peaks - 1.0)[known])
        yield from _three(
            "peak memory", bytes_[known], peaks[known], f"the probes' mean {constant}"
        )
        half = found.memory.half_widths(numbers)
        yield _coverage("peak memory", bytes_[known], peaks[known], half[known])


def _flops(run: Probe) -> float:
    return run.row.run.tokens * run.row.model.flops_per_token(run.row.run.sequence)


def _flop_per_s(run: Probe) -> float:
    return _flops(run) / (run.row.step_seconds or float("nan"))


def _words(errors: np.ndarray) -> str:
    absolute = 100.0 * np.abs(errors)
    return (
        f"{np.median(absolute):.1f} / {absolute.mean():.1f} / {np.quantile(absolute, 0.9):.1f} "
        "(median / mean / p90)"
    )


def _three(name: str, predicted: np.ndarray, measured: np.ndarray, peer: str) -> Iterator[Bar]:
    absolute = 100.0 * np.abs(predicted / measured - 1.0)
    figure = float(np.median(absolute))
    where = f"{name} here, {len(measured)} unseen settings"
    yield Bar(f"{where}: median error", round(figure, 2), "%", "<= 8", figure <= 8.0, peer)
    for label, value in (("mean", absolute.mean()), ("p90", np.quantile(absolute, 0.9))):
        yield Bar(f"{where}: {label} error", round(float(value), 2), "%", "reported", True, peer)


def _coverage(name: str, predicted: np.ndarray, measured: np.ndarray, widths: np.ndarray) -> Bar:
    share = 100.0 * float(np.mean(np.abs(np.log(measured / predicted)) <= widths))
    peer = f"median half-width {100.0 * float(np.median(np.expm1(widths))):.1f} %"
    return Bar(f"{name} here: coverage of 90 % intervals", share, "%", "reported", True, peer)


def _reported(name: str, figure: float, unit: str, most: float, probes: int) -> Bar:
    holds = figure <= most
    return Bar(name, round(figure, 1), unit, f"<= {most:g}", holds, f"{probes} probes")


def main() -> None:
    """Run and print the bars."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="five probes, three settings")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep the runs, and continue there"
    )
    parser.add_argument("--seed", type=int, default=SEED, help="of the unseen settings")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the bars to FILE")
    asked = parser.parse_args()
    publish("plan here", list(here_bars(asked.quick, asked.keep, asked.seed)), asked.json)


if __name__ == "__main__":
    main()
