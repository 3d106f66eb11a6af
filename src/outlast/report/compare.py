"""Runs against each other: their loss after equal steps, tokens, time in steps and FLOPs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outlast.report import text
from outlast.report.overview import flops_of
from outlast.report.series import smooth, smoothing_window
from outlast.report.tables import Cell, digits, table, words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.report.overview import Overview
    from outlast.report.series import Floats


@dataclass(frozen=True, eq=False)
class Measure:
    """What runs can have spent equally much of.

    Attributes:
        name: In words.
        spent: Of each run, what was spent at every step record; None where it is not known.
        kind: ``steps``, ``tokens``, ``seconds`` or ``flops``, which says how amounts are written.
    """

    name: str
    spent: list[Floats | None]
    kind: str

    def shown(self, amount: float) -> str:
        """An amount for people."""
        if self.kind == "seconds":
            return text.duration(amount)
        return text.number(amount) if self.kind == "flops" else text.count(round(amount))


def measures(overviews: Sequence[Overview]) -> list[Measure]:
    """Steps, tokens, time in steps and FLOPs."""
    return [
        Measure("steps", [overview.training.step.astype(float) for overview in overviews], "steps"),
        Measure("tokens", [_tokens_of(overview) for overview in overviews], "tokens"),
        Measure("time in steps", [step_seconds_of(overview) for overview in overviews], "seconds"),
        Measure(
            "FLOPs",
            [flops_of(overview, overview.training.tokens) for overview in overviews],
            "flops",
        ),
    ]


def _tokens_of(overview: Overview) -> Floats | None:
    tokens = overview.training.tokens
    return tokens.astype(float) if tokens.any() else None


def step_seconds_of(overview: Overview) -> Floats:
    """Seconds in the steps that count, up to every step record: no start-up and no evaluation."""
    return np.cumsum([sum(event.step_seconds) for _, event in overview.run.steps()], dtype=float)


def comparison(overviews: Sequence[Overview]) -> str:
    """Tables of the losses where all runs have spent as much, and of what a loss has cost."""
    if len(overviews) < 2 or not all(len(overview.training.loss) for overview in overviews):
        return '<p class="missing">unavailable: not every run has recorded a loss</p>'
    return _equal(overviews) + _spent(overviews)


def _equal(overviews: Sequence[Overview]) -> str:
    rows = []
    for measure in measures(overviews):
        known = [floats for floats in measure.spent if floats is not None and len(floats)]
        if len(known) < len(overviews):
            continue
        most = min(float(floats[-1]) for floats in known)
        losses = [
            float(np.interp(most, spent, smoothed(overview)))
            for overview, spent in zip(overviews, known, strict=True)
        ]
        row = [words(measure.name), digits(measure.shown(most))]
        row += [digits(text.number(loss)) for loss in losses]
        rows.append(row + [digits(f"{loss - losses[0]:+.4f}") for loss in losses[1:]])
    heads = [words("after equal"), digits("amount"), *_names(overviews)]
    heads += [
        Cell(f"{text.escape(overview.label)} - {text.escape(overviews[0].label)}", numeric=True)
        for overview in overviews[1:]
    ]
    return table(heads, rows, "Training loss (smoothed, nats per token) where all have spent alike")


def _spent(overviews: Sequence[Overview]) -> str:
    curves = [smoothed(overview) for overview in overviews]
    finite = [curve[np.isfinite(curve)] for curve in curves]
    if not all(len(item) for item in finite):
        return ""
    # What every run has reached, so that all can be asked for the way there.
    target = max(float(item.min()) for item in finite)
    rows = []
    for measure in measures(overviews):
        amounts = [
            None if spent is None else _reached(spent, curve, target)
            for spent, curve in zip(measure.spent, curves, strict=True)
        ]
        row = [words(measure.name)]
        row += [
            words("not known") if amount is None else digits(measure.shown(amount))
            for amount in amounts
        ]
        first = amounts[0]
        for amount in amounts[1:]:
            known = amount is not None and first is not None and first > 0
            row.append(digits(f"{amount / first:.3f}x") if known else words("not known"))  # type: ignore[operator]
        rows.append(row)
    heads = [words("spent"), *_names(overviews)]
    heads += [
        Cell(f"{text.escape(overview.label)} / {text.escape(overviews[0].label)}", numeric=True)
        for overview in overviews[1:]
    ]
    return table(
        heads, rows, f"What it took to a smoothed training loss of {text.number(target)}, the "
        "lowest that all have reached"
    )  # fmt: skip


def _names(overviews: Sequence[Overview]) -> list[Cell]:
    return [digits(overview.label) for overview in overviews]


def smoothed(overview: Overview) -> Floats:
    """The training loss as a moving mean, as the picture of the losses draws it."""
    losses = overview.training.loss
    return smooth(losses, smoothing_window(len(losses)))


def _reached(spent: Floats, losses: Floats, target: float) -> float | None:
    """What was spent when a loss first was at or below `target`, between records linearly."""
    below = np.flatnonzero(losses <= target)
    if not len(below):
        return None
    at = int(below[0])
    if at == 0 or not np.isfinite(losses[at - 1]):
        return float(spent[at])
    share = (losses[at - 1] - target) / (losses[at - 1] - losses[at])
    return float(spent[at - 1] + share * (spent[at] - spent[at - 1]))
