"""One run as the arrays and totals that the report shows.

An `Overview` reads a run's events once; figures and tables only look at it.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from outlast.data import samples_until
from outlast.errors import RunError
from outlast.records import (
    LOST,
    PURPOSES,
    AttemptEnded,
    AttemptStarted,
    Evaluated,
    RanksChanged,
    Run,
    StepsDone,
    read_run,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from outlast.records import Record


UNRECORDED = "unrecorded"


_SHORTEST_REST_SECONDS = 1e-3


@dataclass(frozen=True, eq=False)
class Training:
    """Arrays of the step events, one element per event; redone steps left out.

    Attributes:
        step: Steps done.
        tokens: Tokens trained on; all 0 where those of a step are not known.
        seconds: Running time since the run's first start, gaps between attempts left out.
        loss: Nats per token.
        gradient_norm: Before clipping.
        learning_rate: As applied.
        tokens_per_second: Over the event's own steps; NaN where tokens are not known.
        metrics: What else the loop told, by its own names; NaN where it did not.
    """

    step: Integers
    tokens: Integers
    seconds: Floats
    loss: Floats
    gradient_norm: Floats
    learning_rate: Floats
    tokens_per_second: Floats
    metrics: dict[str, Floats]


@dataclass(frozen=True, eq=False)
class Validation:
    """Arrays of the evaluations, one element per evaluation that counts.

    Attributes:
        step: Steps done.
        tokens: Tokens trained on.
        seconds: Running time, as in `Training`.
        loss: Nats per token.
        bits_per_byte: NaN where it is not known.
    """

    step: Integers
    tokens: Integers
    seconds: Floats
    loss: Floats
    bits_per_byte: Floats


@dataclass(frozen=True)
class TimeSplit:
    """Wall time by purpose.

    Attributes:
        seconds: Seconds by purpose; with ``unrecorded``, the rest that no event accounts for.
        recorded_seconds: Sum of the purposes without that rest.
        wall_seconds: From start to last event, summed over the attempts.
    """

    seconds: dict[str, float]
    recorded_seconds: float
    wall_seconds: float


@dataclass(frozen=True, eq=False)
class Overview:
    """A run, its name in the report, and what was drawn from its events.

    Attributes:
        step_seconds: Wall time of every step done, the redone ones included.
        elapsed_seconds: From the first start to the last event, gaps included.
    """

    run: Run
    label: str
    training: Training
    validation: Validation
    step_seconds: Floats
    split: TimeSplit
    elapsed_seconds: float

    @property
    def starts(self) -> dict[int, AttemptStarted]:
        """The first event of each attempt, by its number."""
        return {record.attempt: event for record, event in self.run.of(AttemptStarted)}

    @property
    def ends(self) -> dict[int, AttemptEnded]:
        """The last event of each attempt that ended in an orderly way, by its number."""
        return {record.attempt: event for record, event in self.run.of(AttemptEnded)}

    @property
    def world_sizes(self) -> list[int]:
        """World size of each attempt, neighbours that are equal named once."""
        sizes = (attempt.world_size for attempt in self.run.attempts)
        return [size for size, _ in itertools.groupby(sizes)]


def load(paths: Sequence[Path | str]) -> list[Overview]:
    """Read the run directories, each once, in the order given.

    Raises:
        RunError: When one is not a run directory, or none is given.
    """
    runs: dict[Path, Run] = {}
    for path in paths:
        run = read_run(path)
        # `.` and relative paths have no telling name of their own.
        runs.setdefault(run.path.resolve(), dataclasses.replace(run, path=run.path.resolve()))
    if not runs:
        raise RunError("no run directory is given; name at least one, e.g. runs/quickstart")
    names = [run.name for run in runs.values()]
    return [
        overview(run, run.name if names.count(run.name) == 1 else str(run.path))
        for run in runs.values()
    ]


def overview(run: Run, label: str) -> Overview:
    """Draw from `run` all that the report shows."""
    clock = running_clock(run)
    attempts = run.attempts
    elapsed_seconds = attempts[-1].end_time - attempts[0].start_time if attempts else 0.0
    every_step = [float(value) for _, event in run.of(StepsDone) for value in event.step_seconds]
    found = [
        (record, event)
        for record, event in run.of(Evaluated)
        if not any(
            later.number > record.attempt
            and later.first_step is not None
            and later.first_step < event.step
            for later in run.attempts
        )
    ]
    events = [event for _, event in found]
    return Overview(
        run,
        label,
        _training(run, clock),
        Validation(
            _integers(event.step for event in events),
            _integers(event.tokens for event in events),
            _floats(clock(record) for record, _ in found),
            _floats(event.loss for event in events),
            _floats(event.bits_per_byte for event in events),
        ),
        np.array(every_step, dtype=np.float64),
        time_split(run),
        elapsed_seconds,
    )


def running_clock(run: Run) -> Callable[[Record], float]:
    """A function from a record to the run's running time, in seconds, without gaps."""
    starts: dict[int, tuple[float, float]] = {}
    before = 0.0
    for attempt in run.attempts:
        starts[attempt.number] = (before, attempt.start_time)
        before += max(attempt.end_time - attempt.start_time, 0.0)

    def clock(record: Record) -> float:
        before, start_time = starts[record.attempt]
        return before + max(record.time - start_time, 0.0)

    return clock


def flops_of(overview: Overview, tokens: Integers) -> Floats | None:
    """Model FLOPs that training on so many tokens has taken, or None where that is not known."""
    starts = overview.starts
    per_token = starts[max(starts)].flops_per_token if starts else 0.0
    if per_token <= 0:
        return None
    # By the tokens before it, where another number of FLOPs begins; of steps that were done several
    # times the last time counts.
    since, changes = {0: per_token}, overview.run.of(RanksChanged)
    sizes = overview.run.batch_sizes
    for attempt in overview.run.attempts:
        start = starts.get(attempt.number)
        if start is None or attempt.first_step is None:
            continue
        mine = {attempt.first_step: start.flops_per_token or per_token}
        mine |= {e.step: e.flops_per_token for r, e in changes if r.attempt == attempt.number}
        length = start.tokens_per_step // max(start.samples_per_step, 1)
        earlier = [size for number, size in sizes.items() if number < attempt.number]
        first = samples_until(attempt.first_step, earlier) * length
        since = {place: flops for place, flops in since.items() if place < first}
        since |= {
            first + (step - attempt.first_step) * start.tokens_per_step: flops
            for step, flops in mine.items()
        }
    # Where it stays as it is, nothing begins.
    runs = [next(run) for _, run in itertools.groupby(sorted(since.items()), lambda item: item[1])]
    places, rates = np.array(runs, dtype=np.float64).T
    before = np.concatenate([[0.0], np.cumsum(np.diff(places) * rates[:-1])])
    at = np.searchsorted(places, tokens, side="right") - 1
    flops: Floats = before[at] + (tokens - places[at]) * rates[at]
    return flops


def time_split(run: Run) -> TimeSplit:
    """Seconds by purpose, completed by the rest up to the wall time of all attempts."""
    found = run.seconds()
    order = [*PURPOSES, *(name for name in found if name not in (*PURPOSES, LOST)), LOST]
    seconds = {name: found.get(name, 0.0) for name in order}
    recorded_seconds = sum(seconds.values())
    wall_seconds = sum(max(attempt.end_time - attempt.start_time, 0.0) for attempt in run.attempts)
    rest_seconds = wall_seconds - recorded_seconds
    if rest_seconds > max(_SHORTEST_REST_SECONDS, 1e-4 * wall_seconds):
        seconds[UNRECORDED] = rest_seconds
    return TimeSplit(seconds, recorded_seconds, wall_seconds)


def _training(run: Run, clock: Callable[[Record], float]) -> Training:
    found = run.steps()
    tokens_per_step = {
        record.attempt: event.tokens_per_step for record, event in run.of(AttemptStarted)
    }

    def rate(record: Record, event: StepsDone) -> float:
        tokens = tokens_per_step.get(record.attempt)
        step_seconds = sum(event.step_seconds)
        if not tokens or step_seconds <= 0:
            return float("nan")
        return tokens * event.steps / step_seconds

    events = [event for _, event in found]
    names = dict.fromkeys(name for event in events for name in event.metrics)
    return Training(
        _integers(event.step for event in events),
        _integers(event.tokens for event in events),
        _floats(clock(record) for record, _ in found),
        _floats(event.loss for event in events),
        _floats(event.gradient_norm for event in events),
        _floats(event.learning_rate for event in events),
        _floats(rate(record, event) for record, event in found),
        {name: _floats(event.metrics.get(name) for event in events) for name in names},
    )


def _floats(values: Iterable[Any]) -> Floats:
    # The log writes NaN and infinities as strings, and an unknown value as null.
    return np.array([float("nan") if v is None else float(v) for v in values], dtype=np.float64)


def _integers(values: Iterable[int]) -> Integers:
    return np.array(list(values), dtype=np.int64)


if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]


OUTCOME_WORDS = {
    "completed": "completed",
    "to_be_continued": "to be continued",
    "left": "left before its last step",
    "failed": "failed",
    "died": "died",
}


T = TypeVar("T")


MAX_POINTS = 4000
"""Longer curves are thinned to about this many points before they go into the page."""


_SMOOTHED_SHARE = 0.02


_TALLEST_BINS = 60


def downsample(values: Floats, limit: int = MAX_POINTS) -> Integers:
    """Indices, ascending, of at most about `limit` values that show the same curve.

    The values are cut into ``limit // 4`` buckets of equal length. Each bucket keeps its first
    value, its smallest, its largest and its first non-finite one, so no spike or NaN disappears.
    The first and the last value always stay.

    Args:
        values: (n,), may hold NaN and infinities.
        limit: At least 4; a curve that is not longer is kept whole.
    """
    total = len(values)
    if total <= limit:
        return np.arange(total)
    edges = np.linspace(0, total, limit // 4 + 1).astype(np.int64)
    finite = np.isfinite(values)
    kept = {0, total - 1}
    for start, end in itertools.pairwise(edges):
        good = start + np.flatnonzero(finite[start:end])
        kept.add(int(start))
        if len(good):
            kept.update((int(good[values[good].argmin()]), int(good[values[good].argmax()])))
        if len(good) < end - start:
            kept.add(int(start + (~finite[start:end]).argmax()))
    return np.array(sorted(kept), dtype=np.int64)


def smoothing_window(total: int) -> int:
    """Odd number of neighbouring records over which a curve of `total` records is averaged.

    It is 2 % of them; a short curve takes up to five, one below twenty records none but its own.
    """
    return 2 * int(max(total * _SMOOTHED_SHARE / 2, min(total / 20, 2))) + 1


def smooth(values: Floats, window: int) -> Floats:
    """Centred moving mean over `window` values (odd); NaN and infinities are left out.

    Near the ends the window shrinks on both sides alike, so the curve neither lags nor bends; only
    the last eighth of a window at each end is averaged over what there is, or noise would show
    there. A window without a finite value gives NaN.
    """
    total = len(values)
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(total)
    half = np.minimum(np.minimum(index, total - 1 - index), window // 2)
    half = np.maximum(half, window // 8)
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, total)
    number = counts[high] - counts[low]
    mean = (sums[high] - sums[low]) / np.maximum(number, 1)
    return np.where(number > 0, mean, np.nan)


@dataclass(frozen=True)
class Percentiles:
    """Median, 90th and 99th percentile (linear interpolation), in the unit of the values."""

    median: float
    p90: float
    p99: float


def percentiles(values: Floats) -> Percentiles | None:
    """Percentiles of the finite values; None when there is none."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    return Percentiles(*(float(item) for item in np.percentile(finite, (50, 90, 99))))


@dataclass(frozen=True)
class Histogram:
    """Counts of values between neighbouring edges.

    Attributes:
        edges: (bins + 1,), ascending.
        counts: (bins,).
        above: Values beyond the last edge, which would flatten the picture.
        highest: The largest value.
    """

    edges: Floats
    counts: Integers
    above: int
    highest: float


def histogram_edges(values: Floats) -> Floats:
    """Edges for `values`, up to 1.25 times their 99th percentile; the largest values may exceed."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return np.array([0.0, 1.0])
    low, high = float(finite.min()), float(finite.max())
    high = min(high, 1.25 * float(np.percentile(finite, 99)))
    if high <= low:
        low, high = low * 0.95, low * 1.05 or 1.0
    bins = int(min(max(np.sqrt(len(finite)) * 1.5, 8), _TALLEST_BINS))
    return np.linspace(low, high, bins + 1)


def histogram(values: Floats, edges: Floats) -> Histogram:
    """Counts of the finite `values` between `edges`."""
    finite = values[np.isfinite(values)]
    counts, _ = np.histogram(finite, edges)
    above = int((finite > edges[-1]).sum())
    highest = float(finite.max()) if len(finite) else float("nan")
    return Histogram(edges, counts.astype(np.int64), above, highest)


def thin(items: Sequence[T], limit: int) -> list[T]:
    """At most `limit` of `items`, evenly spread, first and last included."""
    if len(items) <= limit:
        return list(items)
    return [items[int(index)] for index in np.linspace(0, len(items) - 1, limit).round()]
