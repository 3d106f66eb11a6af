"""Killing workers of a real run: restart from memory against reload from disk; goodput at rates.

The peer is a plain script under torchrun that reloads a DCP checkpoint (`recover_torchrun`): the
same model, optimizer, batch and processes, killed as often. Beside it stands Outlast's own trainer
without its memory, which starts again as fast and reads its newest version from disk. Predictions
come from the undisturbed run alone (`outlast drill`).
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

from harness import Bar, at_most, median
from recover_torchrun import reload_seconds

from outlast.cli.drill import DrillOptions, drill_processes
from outlast.job import load_job

_SMALL = ("train.steps=40", "checkpoint.every_steps=5")
_LARGE = (
    "train.steps=50",
    "checkpoint.every_steps=5",
    "train.batch_size=4",
    "data.sequence_length=32",
    "model.settings.hidden_size=512",
    "model.settings.intermediate_size=1536",
    "model.settings.num_hidden_layers=12",
    "model.settings.num_attention_heads=8",
    "model.settings.num_key_value_heads=8",
)
"""41 million parameters: 0.5 GB of weights and moments."""

_EVERY_STEPS = 5

_ALWAYS = (
    "optimizer.name=adamw",
    "optimizer.learning_rate=0.001",
    "evaluate.every_steps=0",
    "sample.tokens=0",
    "export.huggingface=false",
)
_PHASES = ("data", "forward", "backward", "reduce", "optimizer")
_RATES = {"2/min": 3_600, "4/min": 2_000, "8/min": 1_200}
"""Kills at a rate, and steps that last for `_KILLS` of them."""

_KILLS = 6
_POINTS = 5.0


def bars(quick: bool) -> list[Bar]:
    """Restarts against reloads."""
    with tempfile.TemporaryDirectory() as folder:
        return _reload(Path(folder), quick)


def goodput_bars(quick: bool) -> list[Bar]:
    """Measured against predicted goodput."""
    with tempfile.TemporaryDirectory() as folder:
        return _goodput(Path(folder), quick)


def _drilled(
    folder: Path, name: str, settings: tuple[str, ...], asked: DrillOptions
) -> dict[str, Any]:
    places = [f'run.directory="{folder}"', f"run.name={name}"]
    return drill_processes(None, [*_ALWAYS, *settings, *places], asked)


def _reload(folder: Path, quick: bool) -> list[Bar]:
    size, workers, trials = (_SMALL, 2, 1) if quick else (_LARGE, 4, 2)
    phases = _PHASES[-2:] if quick else _PHASES
    asked = DrillOptions("", phases, 0.0, trials, 0)
    found = {
        mode: _drilled(
            folder,
            f"reload-{mode}",
            (*size, f"launch.nproc={workers}", f"recover.mode={mode}"),
            asked,
        )
        for mode in ("restart", "off")
    }
    restart, off = found["restart"], found["off"]
    ours, own_disk = (each["median_seconds"] or math.inf for each in (restart, off))
    job = load_job(None, [*_ALWAYS, *size])
    model = {
        **job.model.settings,
        "batch_size": job.train.batch_size,
        "sequence_length": job.data.sequence_length,
    }
    waits, again = reload_seconds(model, workers, 2 if quick else 5, _EVERY_STEPS)
    theirs = median(waits)
    peer = f"torchrun and DCP: {theirs:.2f} s, {sum(again)} steps again in {len(again)} kills"
    disk = f"{own_disk:.2f} s, {off['lost_steps']} steps again in {off['struck']} kills"
    struck = restart["struck"]
    lost = max(each["lost_steps"] for each in restart["trials"])
    return [
        Bar(
            f"kill -9 of 1 of {workers} workers, {struck} times: survived",
            restart["survived"],
            "times",
            f"= {struck}",
            restart["survived"] == struck,
            f"reload from disk: {off['survived']} of {off['struck']}",
        ),
        at_most(
            "next step after a kill, restart from memory over reload from disk",
            ours / theirs,
            "",
            1.0 / 3.0,
            f"{ours:.2f} s; {peer}",
        ),
        Bar(
            "the same, over our own trainer with recover.mode = off",
            round(ours / own_disk, 4),
            "",
            "reported",
            True,
            disk,
        ),
        at_most("steps lost by a kill, restart from memory, at most", lost, "steps", 1.0, peer),
        Bar(
            "last weights after the kills equal the undisturbed run's",
            float(restart["bits_equal"]),
            "",
            "bit for bit",
            restart["bits_equal"],
            f"largest difference {restart['largest_difference']:g}",
        ),
    ]


def _goodput(folder: Path, quick: bool) -> list[Bar]:
    found = []
    for rate, steps in {"8/min": 400}.items() if quick else _RATES.items():
        settings = (f"train.steps={steps}", "launch.nproc=2", "checkpoint.every_steps=100")
        asked = DrillOptions(rate, (), 0.0, 1 if quick else _KILLS, 1)
        result = _drilled(folder, f"rate-{rate[0]}", settings, asked)
        measured, predicted = (
            100.0 * result["goodput"][name] for name in ("measured", "predicted")
        )
        found.append(
            at_most(
                f"goodput at {rate}: measured and predicted apart",
                abs(measured - predicted),
                "points",
                _POINTS,
                f"{measured:.1f} % measured, {predicted:.1f} % predicted",
            )
        )
    return found
