"""Measured runs as the fit reads them, and those that cannot be true or that peers contradict.

Published tables hold swapped columns, wrong batch sizes and times in the wrong unit. A flagged row
is kept out of the fits unless the caller forces it (`forced`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from outlast.errors import PlanError
from outlast.plan.batch import Array, Cases, cases
from outlast.plan.cluster import Cluster
from outlast.plan.configuration import Configuration
from outlast.plan.transformer import Transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run that somebody measured.

    The fields from `stated_` on repeat what the source says beside the numbers that the model
    reads, so that `clean` can hold the two against each other.

    Attributes:
        name: Of the row in its source.
        model: What was trained.
        run: How.
        cluster: Where.
        source: Table, log or run directory that it comes from.
        framework: Software that trained it.
        version: Of the framework; empty where not stated.
        step_seconds: Of one optimizer step; None where not measured.
        reserved_bytes: Largest memory of a device that the allocator held; None likewise.
        allocated_bytes: Largest memory of a device that tensors held at once; None likewise.
        held_bytes: Memory of a device that tensors hold between two steps; None likewise.
        out_of_memory: The run did not fit.
        stated_devices: Accelerators; None where not stated, as with the next ones.
        stated_micro_batches: Passes of one replica in a step.
        stated_flop_per_s: Of one device, in whatever convention the source counts.
        stated_tokens_per_s: Of one device.
        flags: Why the row is kept out of every fit, a sentence each; empty where it is not.
        time_flags: Why its time alone is.
    """

    name: str
    model: Transformer
    run: Configuration
    cluster: Cluster
    source: str
    framework: str
    version: str = ""
    step_seconds: float | None = None
    reserved_bytes: float | None = None
    allocated_bytes: float | None = None
    held_bytes: float | None = None
    out_of_memory: bool = False
    stated_devices: int | None = None
    stated_micro_batches: int | None = None
    stated_flop_per_s: float | None = None
    stated_tokens_per_s: float | None = None
    flags: tuple[str, ...] = ()
    time_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in ("step_seconds", "reserved_bytes", "allocated_bytes", "held_bytes"):
            value = getattr(self, field)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise PlanError(
                    f"{field} = {value:g} of row {self.name} is no positive number: "
                    "correct it or leave it out"
                )

    @property
    def chip(self) -> str:
        """Kind of the devices."""
        return self.cluster.device

    @property
    def key(self) -> str:
        """Equal for rows of one configuration, whatever the release, so that no fold splits it.

        Model, division of work and chip count; names, the framework and its version do not, and
        neither does the way in which a source fills in `gradient_bytes` and the like.
        """
        sizes = [
            str(getattr(self.model, field.name))
            for field in fields(self.model)
            if field.compare and field.name != "name"
        ]
        ignored = ("gradient_bytes", "loss_bytes", "balance", "fused_attention", "sharding_ranks")
        names = [field.name for field in fields(self.run) if field.name not in ignored]
        ways = [str(getattr(self.run, name)) for name in names]
        return "/".join([self.cluster.device, *sizes, *ways])

    @property
    def fits_time(self) -> bool:
        """True if the time may be fitted."""
        return self.step_seconds is not None and not self.flags and not self.time_flags

    @property
    def fits_memory(self) -> bool:
        """True if the memory may be fitted."""
        known = (self.reserved_bytes, self.allocated_bytes, self.held_bytes)
        return any(name is not None for name in known) and not self.flags

    @property
    def tokens_per_s(self) -> float | None:
        """Of one device, from the time of a step."""
        if self.step_seconds is None:
            return None
        return self.run.tokens / (self.step_seconds * self.run.devices)

    @property
    def model_flop_per_s(self) -> float | None:
        """Of one device: `6 N + 12 L d s` per token, no recomputation, attention in full."""
        rate = self.tokens_per_s
        return None if rate is None else rate * self.model.flops_per_token(self.run.sequence)

    @property
    def model_flops_share(self) -> float | None:
        """MFU: model FLOPs per second over the vendor's peak of the run's precision."""
        rate = self.model_flop_per_s
        return None if rate is None else rate / self.cluster.peak_flop_per_s[self.run.precision]


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that could not be read.

    Attributes:
        name: Of the row in its source.
        reason: One sentence.
    """

    name: str
    reason: str


def cases_of(rows: Sequence[Row]) -> Cases:
    """The rows' runs as the models read them."""
    return cases([(row.model, row.run, row.cluster) for row in rows])


def forced(rows: Iterable[Row]) -> list[Row]:
    """The rows without their flags: they take part in every fit."""
    return [replace(row, flags=(), time_flags=()) for row in rows]


_FEW_LINK_CLASSES = 4
_FACTOR = 1.5
_SIGMAS = 4.0


def link_classes(row: Row) -> frozenset[str]:
    """Link classes that a run uses: ranks are placed tensor first, then context.

    Returns:
        Of "tensor", "context", "pipeline", "data"; empty where all is inside the fast domain.
    """
    run, domain = row.run, row.cluster.fast_domain
    crossing = {
        "tensor": run.tensor > domain,
        "context": run.context > 1 and run.tensor * run.context > domain,
        "pipeline": run.pipeline > 1 and run.devices > domain,
        "data": run.data > 1 and run.devices > domain,
    }
    return frozenset(name for name, crosses in crossing.items() if crosses)


def slow_links(rows: Sequence[Row], away: Array) -> Iterator[tuple[int, str]]:
    """Rows of a class of links that is slow on their cluster.

    Within one cluster, the rows that use the class are compared with those that do not: a
    difference of medians of more than 1.5 times and 4 robust standard errors is a slow link.

    Args:
        rows: (n,).
        away: (n,) log of measured over predicted seconds; NaN to leave a row out.

    Yields:
        Index and sentence of each such row.
    """
    clusters = np.array([f"{row.source}/{row.cluster.name}/{row.chip}" for row in rows])
    classes = [link_classes(row) for row in rows]
    for cluster in np.unique(clusters):
        here = (clusters == cluster) & np.isfinite(away)
        using = {
            name: np.array([name in klass for klass in classes]) & here
            for name in ("tensor", "context", "pipeline", "data")
        }
        scores = {name: _score(away[uses], away[here & ~uses]) for name, uses in using.items()}
        name = max(scores, key=lambda score: scores[score])
        if scores[name] <= _SIGMAS:
            continue
        uses = using[name]
        usual = float(np.median(away[here & ~uses]))
        shift = float(np.median(away[uses])) - usual
        for index in np.flatnonzero(uses & (away > usual + shift / 2)).tolist():
            text = (
                f"row {rows[index].name}: {name} ranks over the network of "
                f"{rows[index].cluster.name} take {math.exp(shift):.1f} times as long as its other "
                "rows suggest; measure the link or correct fabric_bytes_per_s"
            )
            yield index, text


def _score(some: Array, others: Array) -> float:
    """Difference of medians in robust standard errors; 0 where it is small or rows are few."""
    if min(some.size, others.size) < _FEW_LINK_CLASSES:
        return 0.0
    shift = float(np.median(some) - np.median(others))
    if shift < math.log(_FACTOR):
        return 0.0
    both = np.concatenate([some - np.median(some), others - np.median(others)])
    spread = 1.4826 * float(np.median(np.abs(both)))
    # The standard error of a median is 1.2533 times that of a mean.
    error = 1.2533 * max(spread, 0.01) * math.sqrt(1 / some.size + 1 / others.size)
    return shift / error


# FLOPs are counted with or without recomputation, causal halving, the head: at most this factor.
_CONVENTION = 1.8
_SAME_FIGURE = 1.25


# Releases of one framework differ by up to 1.49 on one configuration (nemo_moe rows).
_BETWEEN_RELEASES = 1.6
_WITHIN_RELEASE = 1.3
_SLIP = 100.0
_LIKELY_SHARE = 0.35
_CLIFF = 0.87
_FEW = 3


def clean(rows: Sequence[Row], predicted_seconds: Array | None = None) -> list[Row]:
    """The rows with a flag for each thing that is wrong with them.

    Without predictions, peers are compared by their share of the peak, which a sweep spreads
    widely: then slow links are not looked for.

    Args:
        rows: (n,) in any order.
        predicted_seconds: (n,) of a model for these rows, calibrated or not; a common factor of
            one framework on one chip does not matter.
    """
    away = _residuals(rows, predicted_seconds)
    found: list[list[str]] = [list(_alone(row)) for row in rows]
    for index, row in enumerate(rows):
        text = _swapped(row, away[index]) or _slipped(row, away[index])
        found[index] = [text] if text else [*found[index], *_impossible(row)]
    for index, text in _disagreeing(rows):
        found[index].append(text)
    if predicted_seconds is not None:
        doubtful = np.array([bool(texts) for texts in found])
        for index, text in slow_links(rows, np.where(doubtful, np.nan, away)):
            found[index].append(text)
    return [
        replace(
            row,
            flags=tuple(dict.fromkeys([*row.flags, *texts])),
            time_flags=tuple(dict.fromkeys([*row.time_flags, *_retrying(row, distance)])),
        )
        for row, texts, distance in zip(rows, found, away, strict=True)
    ]


def _retrying(row: Row, away: float) -> Iterator[str]:
    """A run that reserves nearly all memory and is slow: its allocator frees and asks again.

    Runs of the H100 sweep that reserve 70 of 80 GiB take several times as long as their
    neighbours; with 68 GiB they do not.
    """
    limit = _CLIFF * row.cluster.memory_bytes
    if row.reserved_bytes is not None and row.reserved_bytes > limit and away > math.log(2.0):
        yield (
            f"row {row.name}: {row.reserved_bytes / 2**30:.1f} GiB of "
            f"{row.cluster.memory_bytes / 2**30:.0f} are reserved and the step takes "
            f"{math.exp(away):.1f} times as long as its peers suggest; leave its time out"
        )


def _residuals(rows: Sequence[Row], predicted_seconds: Array | None) -> Array:
    """(n,) log of the time over what peers lead to expect; NaN where there is no time.

    The middle of the rows of one framework on one chip is 0; of few rows without predictions it is
    where 35 % of the peak would be.
    """
    seconds = np.array([row.step_seconds or math.nan for row in rows])
    expected = predicted_seconds
    if expected is None:
        ideal = [
            row.run.tokens
            * row.model.flops_per_token(row.run.sequence)
            / (row.run.devices * row.cluster.peak_flop_per_s[row.run.precision])
            for row in rows
        ]
        expected = np.array(ideal) / _LIKELY_SHARE
    away = np.asarray(np.log(seconds / expected))
    groups = np.array([f"{row.framework}/{row.chip}/{row.run.precision}" for row in rows])
    for group in np.unique(groups):
        members = (groups == group) & np.isfinite(away)
        if members.sum() >= _FEW:
            away[members] -= np.median(away[members])
    return away


def _alone(row: Row) -> Iterator[str]:
    """Contradictions of a row in itself."""
    run = row.run
    if row.stated_devices is not None and row.stated_devices != run.devices:
        yield (
            f"row {row.name}: {row.stated_devices} devices are stated, but tensor x pipeline x "
            f"data x context = {run.devices}; correct the one that is wrong"
        )
    group = run.data * run.micro_batch
    if row.stated_micro_batches is not None and run.batch != group * row.stated_micro_batches:
        yield (
            f"row {row.name}: batch = {run.batch} is not data x micro-batch x accumulation = "
            f"{run.data} x {run.micro_batch} x {row.stated_micro_batches}; correct the one that "
            "is wrong"
        )
    elif run.batch % group:
        yield (
            f"row {row.name}: batch = {run.batch} is no multiple of data x micro-batch = {group}; "
            "correct the one that is wrong"
        )
    held, reserved = max(row.allocated_bytes or 0.0, row.held_bytes or 0.0), row.reserved_bytes
    if reserved is not None and held > reserved:
        yield (
            f"row {row.name}: {held / 2**30:.1f} GiB allocated exceed {reserved / 2**30:.1f} GiB "
            "reserved; swap the columns"
        )
    most = max(held, reserved or 0.0)
    if most > 1.05 * row.cluster.memory_bytes:
        yield (
            f"row {row.name}: {most / 2**30:.1f} GiB do not fit in a device of "
            f"{row.cluster.memory_bytes / 2**30:.0f} GiB; it was computed and not measured, or "
            "the unit is wrong"
        )


def _rate_agrees(row: Row) -> bool | None:
    """Compare the stated tokens per second with the time; None where not stated."""
    if row.stated_tokens_per_s is None or row.tokens_per_s is None:
        return None
    return abs(math.log(row.tokens_per_s / row.stated_tokens_per_s)) < math.log(_SAME_FIGURE)


def _swapped(row: Row, away: float) -> str:
    """Time and TFLOPs in each other's column.

    Their product is the work, swapped or not, so the work cannot tell; but the time is far from
    its peers', and the other figure is near.
    """
    if row.step_seconds is None or not row.stated_flop_per_s or _rate_agrees(row):
        return ""
    other = row.stated_flop_per_s / 1e12
    back = away + math.log(other / row.step_seconds)
    work = (row.model_flop_per_s or 0.0) / row.stated_flop_per_s
    if not 1 / _CONVENTION < work < _CONVENTION or abs(away) - abs(back) < math.log(2.0):
        return ""
    if abs(back) > math.log(3.0) or abs(away) < math.log(3.0):
        return ""
    return (
        f"row {row.name}: a step of {row.step_seconds:g} s at {other:g} TFLOP/s is far from its "
        f"peers, {other:g} s at {row.step_seconds:g} TFLOP/s is not; swap the columns"
    )


def _slipped(row: Row, away: float) -> str:
    """Milliseconds for seconds, or the reverse."""
    if row.step_seconds is None:
        return ""
    agrees = _rate_agrees(row)
    if agrees is False and row.tokens_per_s and row.stated_tokens_per_s:
        away = math.log(row.stated_tokens_per_s / row.tokens_per_s)
    elif agrees or abs(away) < math.log(_SLIP):
        return ""
    if abs(abs(away) - math.log(1000.0)) > math.log(1000.0 / _SLIP):
        return ""
    long = away > 0
    return (
        f"row {row.name}: a step of {row.step_seconds:g} s is about 1000 times too "
        f"{'long' if long else 'short'}; {'divide' if long else 'multiply'} the time by 1000 "
        f"if it is in {'milliseconds' if long else 'thousands of seconds'}"
    )


def _impossible(row: Row) -> Iterator[str]:
    """A rate beyond the device, or against what the same row states."""
    if row.step_seconds is None:
        return
    rate = row.tokens_per_s or 0.0
    run, ceiling = row.run, row.cluster.matmul_flop_per_s[row.run.precision]
    # Half of the attention, since kernels may leave out what the causal mask hides.
    whole = row.model.flops_per_token(run.sequence)
    least = rate * (6.0 * row.model.active_parameters + whole) / 2.0
    if least > 1.02 * ceiling:
        yield (
            f"row {row.name}: {least / 1e12:.0f} TFLOP/s exceed the {ceiling / 1e12:.0f} TFLOP/s "
            f"of {row.chip} in {run.precision}; check time, batch and model size"
        )
    if _rate_agrees(row) is False:
        yield (
            f"row {row.name}: time and batch give {rate:.4g} tokens/s per device, stated are "
            f"{row.stated_tokens_per_s:.4g}; correct the one that is wrong"
        )
    elif row.stated_flop_per_s:
        share = rate * whole / row.stated_flop_per_s
        if not 1 / _CONVENTION < share < _CONVENTION:
            yield (
                f"row {row.name}: time, batch and model give {rate * whole / 1e12:.3g} TFLOP/s per "
                f"device, stated are {row.stated_flop_per_s / 1e12:.3g}; correct the one that is "
                "wrong"
            )


def _disagreeing(rows: Sequence[Row]) -> Iterator[tuple[int, str]]:
    """Rows of one configuration whose times differ by more than releases do."""
    alike: dict[tuple[str, str, str], list[int]] = {}
    for index, row in enumerate(rows):
        if row.step_seconds is not None:
            alike.setdefault((row.framework, row.cluster.name, row.key), []).append(index)
    for members in alike.values():
        if len(members) < 2:
            continue
        times = np.array([rows[index].step_seconds for index in members])
        one_release = len({rows[index].version for index in members}) == 1
        most = _WITHIN_RELEASE if one_release else _BETWEEN_RELEASES
        # Of two, nobody can say which is wrong: both are compared with the other.
        middle = np.median(times) if len(members) >= _FEW else times[::-1]
        for index, factor in zip(members, times / middle, strict=True):
            if abs(math.log(factor)) > math.log(most):
                row = rows[index]
                text = (
                    f"row {row.name}: a step of {row.step_seconds:g} s is {factor:.2f} times what "
                    f"{len(members) - 1} other row{'s' if len(members) > 2 else ''} of the same "
                    "configuration took; measure again or drop the wrong one"
                )
                yield index, text
