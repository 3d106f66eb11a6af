"""Memory of published runs, and which of them run out of it, by fits that have not seen them.

The rows are those of nanotron's H100 sweep in the published table that docs/plan.md names, failed
runs included. Folds are by configuration: no fit sees the configuration that it is scored on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from harness import Bar, at_least, at_most
from plan_models import first_stage_allocated, first_stage_reserved

from outlast.plan.batch import Array, cases, stage
from outlast.plan.conformal import folds
from outlast.plan.constants import memory_constants
from outlast.plan.memory import CLIFF_HEADROOM, memory_parts, room
from outlast.plan.memory_fit import MemoryRuns, fit_memory, runs_of
from outlast.plan.rows import Row
from outlast.plan.run_rows import read_rows

GIB = 2**30
NEAR = (40.0, 120.0)
"""Predicted GiB of 80 at which a run is near the limit."""
CLIFF = 70.0
"""Reserved GiB of 80 from which runs are several times slower."""
PEER = "llm-analysis 90.2 %, Calculon 83.0 %, RAPID-LLM about 95 % (its README)"
PUBLISHED = "korthikanti2022mem"


def rows(quick: bool, data: Path | None) -> list[Bar]:
    """The bars of memory.

    Args:
        quick: Fewer folds.
        data: The published table; None where it is not at hand.
    """
    if data is None:
        reason = "the published table of runs is not at hand"
        names = ("out-of-memory accuracy", "allocated, median error", "reserved, median error")
        return [Bar(f"memory: {name}", None, "%", "", False, reason) for name in names]
    table = read_rows(data)[0]
    sweep = [row for row in table if row.source == "nanotron"]
    # Which runs share a fold decides about those at the limit; three dealings count together.
    found = [held_out(sweep, 3 if quick else 10, seed) for seed in ((0,) if quick else (0, 1, 2))]
    return [*_sweep_bars(sweep, found), *_published_bars(table)]


@dataclass(frozen=True)
class HeldOut:
    """Predictions of shape (runs,), each by a fit without the run's configuration.

    Attributes:
        allocated, reserved: Bytes of rank 0.
        wanted: Bytes of the rank that wants most, whatever its device has.
        pressing: Over 1 where the run is said to fail.
        fitting: Runs that are said to fit with room to spare.
    """

    allocated: Array
    reserved: Array
    wanted: Array
    pressing: Array
    fitting: Array


def held_out(table: Sequence[Row], count: int, seed: int = 0) -> HeldOut:
    """All runs of a table, predicted.

    Args:
        table: Runs.
        count: Folds.
        seed: Of the folds.
    """
    runs = runs_of(table)
    place = folds([row.key for row in table], count, seed)
    found = np.empty((5, len(table)))
    for fold in range(count):
        inside = place == fold
        fitted = fit_memory(runs.taken(~inside))
        some = runs.taken(inside)
        constants = fitted.constants(some.software)
        found[0, inside] = first_stage_allocated(some.cases, constants)
        found[1, inside] = first_stage_reserved(some.cases, constants)
        memory = room(some.cases, constants)
        found[2, inside] = (1.0 - memory.headroom) * some.cases.memory_bytes
        found[3, inside] = memory.pressing
        found[4, inside] = (memory.headroom >= CLIFF_HEADROOM) & (memory.pressing < 1.0)
    return HeldOut(*found)


def _sweep_bars(sweep: Sequence[Row], dealings: Sequence[HeldOut]) -> list[Bar]:
    """Of all dealings of the folds together."""
    runs = runs_of(list(sweep) * len(dealings))
    found = HeldOut(
        *(
            np.concatenate([getattr(each, name.name) for each in dealings])
            for name in fields(HeldOut)
        )
    )
    known = ~runs.out_of_memory
    said = found.pressing > 1.0
    right = said == runs.out_of_memory
    missed = int((runs.out_of_memory & ~said).sum())
    false = int((known & said).sum())
    near = (found.wanted / GIB >= NEAR[0]) & (found.wanted / GIB <= NEAR[1])
    errors = {
        "allocated": np.abs(found.allocated / runs.allocated_bytes - 1.0)[known],
        "reserved": np.abs(found.reserved / runs.reserved_bytes - 1.0)[known],
    }
    bad = runs.out_of_memory | (np.nan_to_num(runs.reserved_bytes) >= CLIFF * GIB)
    trusted = found.fitting > 0.0
    refused = 100 * float((~trusted & ~bad).sum() / (~bad).sum())
    deals, count = len(dealings), len(runs.software)
    told = f"{PEER}; {missed} missed, {false} false of {count} ({deals} times {len(sweep)} runs)"
    bars = [
        at_least("memory: out-of-memory accuracy", 100 * float(right.mean()), "%", 98.5, told),
        at_least(
            f"memory: out-of-memory accuracy near the limit ({round(near.sum() / deals)} runs)",
            100 * float(right[near].mean()),
            "%",
            95.0,
            "predicted 40 to 120 GiB of 80",
        ),
        at_most("memory: missed out-of-memory", 100 * missed / count, "%", 0.5, PEER),
        at_most(
            "memory: said to fit with room, but failed or reserved 70 GiB of 80",
            float((trusted & bad).sum()) / deals,
            "runs",
            0.0,
            f"of {int(bad.sum()) // deals} such runs; {refused:.1f} % of the others are refused",
        ),
    ]
    for name, limit in (("allocated", 4.0), ("reserved", 6.0)):
        high = 100 * float(np.quantile(errors[name], 0.9))
        peer = f"p90 {high:.1f} %; llm-analysis 37 % (median, against reserved)"
        middle = 100 * float(np.median(errors[name]))
        bars.append(at_most(f"memory: {name}, median error", middle, "%", limit, peer))
    bars += _prior_bars(runs_of(sweep))
    return [replace(bar, kind="predicted") for bar in bars]


def _prior_bars(runs: MemoryRuns) -> list[Bar]:
    """What a user gets whose framework was not calibrated."""
    constants = memory_constants()
    known = ~runs.out_of_memory
    reserved = first_stage_reserved(runs.cases, constants)
    error = 100 * float(np.median(np.abs(reserved / runs.reserved_bytes - 1.0)[known]))
    right = (room(runs.cases, constants).pressing > 1.0) == runs.out_of_memory
    accuracy = 100 * float(right.mean())
    peer = "no run of the framework was fitted"
    return [
        Bar(
            "memory, priors alone: reserved, median error",
            round(error, 3),
            "%",
            "reported",
            True,
            peer,
        ),
        Bar(
            "memory, priors alone: out-of-memory accuracy",
            round(accuracy, 2),
            "%",
            "reported",
            True,
            peer,
        ),
    ]


def _published_bars(table: Sequence[Row]) -> list[Bar]:
    """Activations of Megatron-LM by the formulas alone: nothing is fitted."""
    stated = {"r0031": 59.25, "r0034": 12.3515625, "r0036": 23.076171875, "r0037": 131.25}
    chosen = [row for row in table if row.source == PUBLISHED and row.name in stated]
    runs = [
        (
            row.model,
            # The paper interleaves three stages on each rank of these pipelines, if its layers
            # divide by it.
            replace(row.run, stages_per_rank=3, schedule="interleaved")
            if row.run.pipeline > 1 and row.name != "r0037"
            else row.run,
            row.cluster,
        )
        for row in chosen
    ]
    # Dropout's masks are one value of two bytes beside the four of norms and products.
    constants = memory_constants({"hidden_values": 5.0, "attention_values": 2.0})
    numbers = cases(runs)
    terms = memory_parts(numbers, constants, stage(numbers, "first"))
    parts = {part.name: part.values for part in terms}
    errors = [
        abs(float(found) / GIB / stated[row.name] - 1.0)
        for row, found in zip(chosen, parts["activations"], strict=True)
    ]
    bar = at_most(
        "memory: activations of Megatron-LM, formulas alone, median error",
        100 * float(np.median(errors)),
        "%",
        8.7,
        f"Calculon 2.1 to 8.7 %; worst {100 * max(errors):.1f} %; figures of the paper's picture",
    )
    return [replace(bar, kind="predicted")]
