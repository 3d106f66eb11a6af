"""Measured runs as the fit reads them: one row per run, and why a row could not be read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from outlast.errors import PlanError
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
        assumptions: What the source does not say and was taken to be so, a phrase each.
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
    assumptions: tuple[str, ...] = ()
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
        """Equal for rows of one configuration, whatever the release, so that no fold splits it."""
        return configuration_key(self.model, self.run, self.cluster)

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


def configuration_key(model: Transformer, run: Configuration, cluster: Cluster) -> str:
    """A text that two runs share where the model, the division of work and the chip are equal.

    Names, the framework and its version do not count, and neither does the way in which a source
    fills in `gradient_bytes` and the like: rows of several releases fall in one fold.
    """
    sizes = [
        str(getattr(model, field.name))
        for field in fields(model)
        if field.compare and field.name != "name"
    ]
    ignored = ("gradient_bytes", "loss_bytes", "balance", "fused_attention", "sharding_ranks")
    ways = [str(getattr(run, field.name)) for field in fields(run) if field.name not in ignored]
    return "/".join([cluster.device, *sizes, *ways])


def flagged(row: Row, sentences: Iterable[str]) -> Row:
    """The row with more flags; a sentence that it already has is not repeated."""
    merged = dict.fromkeys([*row.flags, *sentences])
    return replace(row, flags=tuple(merged))


def forced(rows: Iterable[Row]) -> list[Row]:
    """The rows without their flags: they take part in every fit."""
    return [replace(row, flags=(), time_flags=()) for row in rows]
