"""Energy of a run: from [energy] to meters that are read, and from these to the run's records.

Nothing is read within a step, and no rank waits for another because of energy but at a record.
"""

from __future__ import annotations

import os
import socket
import time
import warnings
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.distributed.group import gather_objects
from outlast.energy.meter import EnergyMeter
from outlast.energy.prices import Tariff, intensity
from outlast.energy.prometheus import Exporter, Labels, Sample
from outlast.energy.sources import FileSource, available_sources, rapl_sources, shown_state
from outlast.energy.window import Still
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable
from outlast.records import EnergyMeasured

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from outlast.distributed.ranks import Ranks
    from outlast.energy.sources import Source
    from outlast.energy.window import Reading
    from outlast.job import EnergySection
    from outlast.runtime.guarding import RunGuard


_BOOT = Path("/proc/sys/kernel/random/boot_id")


_STATE = ("watts", "celsius", "sm_clock_mhz", "memory_clock_mhz", "throttle_reasons")


def run_meter(
    settings: EnergySection,
    ranks: Ranks,
    device: torch.device,
    *,
    tokens_per_step: int,
    in_step: bool = True,
    stage: str = "",
) -> RunMeter | None:
    """The meters of [energy] that this rank reads; None with energy.measure = false.

    Each rank reads its own GPU, and the first of a host what the host has once.

    Raises:
        EnergyError: When energy.tariff cannot be read, or energy.region is not known.
    """
    if not settings.measure:
        return None
    tariff = ""
    if ranks.is_first:
        if settings.tariff:
            # The tariff file's text, checked: it may be gone when somebody asks what the run has
            # cost.
            path = settings.tariff
            Tariff.read(path)
            tariff = Path(path).read_text(encoding="utf-8")
        if settings.region:
            intensity(settings.region)
    sources, unavailable = find_sources(settings, ranks, device)
    meter = EnergyMeter("run", sources)
    meter.__enter__()
    found = RunMeter(
        meter,
        unavailable,
        ranks.rank,
        tokens_per_step,
        settings.every_steps,
        tariff=tariff,
        in_step=in_step,
        stage=stage,
    )
    if settings.prometheus_port:
        found.serve(settings.prometheus_port + ranks.local_rank)
    return found


def find_sources(
    settings: EnergySection, ranks: Ranks, device: torch.device
) -> tuple[list[Source], dict[str, str]]:
    """Return what this rank reads of energy.sources, and why the rest has no meter."""
    wanted = set(settings.sources)
    everything = "auto" in wanted
    found: list[Source] = []
    absent: dict[str, str] = {}
    if everything or "gpu" in wanted:
        own = [device.index or 0] if device.type == "cuda" else []
        gpus, missing = available_sources(gpus=own, cpus=False)
        found += gpus
        if not gpus and (device.type == "cuda" or ranks.local_rank == 0):
            reasons = "; ".join(name.reason for name in missing)
            absent["gpu"] = reasons or "the run computes on the CPU"
    if ranks.local_rank:
        return found, absent
    parts = [part for part in ("cpu", "memory", "node") if everything or part in wanted]
    if parts:
        counters, missing = rapl_sources()
        found += [counter for counter in counters if counter.part in parts]
        there = {source.part for source in found}
        # Few machines have meters of their memory or of the whole node: only who asks is told.
        asked = [part for part in parts if part in wanted or (everything and part == "cpu")]
        reason = "; ".join(name.reason for name in missing) or "RAPL has no counter of it"
        absent |= {part: reason for part in asked if part not in there}
    paths = [
        source.removeprefix("file:") for source in settings.sources if source.startswith("file:")
    ]
    return [*found, *map(FileSource, dict.fromkeys(paths))], absent


@dataclass
class RunMeter:
    """Meters of this rank, and what all ranks' meters have to say at a record.

    Args:
        meter: What this rank reads; open.
        unavailable: What was asked for and has no meter -> why not.
        rank: This rank.
        tokens_per_step: Tokens of an optimizer step, of all ranks.
        every_steps: Steps between two records at least.
        guard: Its checks' time is told apart from that of the other computing, where it is known.
        tariff: Text of the job's tariff file, for the first event.
        in_step: Whether ranks wait for the same things. Then what a rank waits for longer than the
            one that waits least is waiting for a straggler; with pipeline stages, which wait for
            different things, nothing is told apart.
        stage: Pipeline stage, for Prometheus.

    Attributes:
        warnings: What went wrong on any rank when the last window closed.
    """

    meter: EnergyMeter
    unavailable: dict[str, str]
    rank: int
    tokens_per_step: int
    every_steps: int
    guard: RunGuard | None = None
    tariff: str = ""
    in_step: bool = True
    stage: str = ""
    warnings: list[str] = field(default_factory=list)
    _samples: tuple[Sample, ...] = ()
    _exporter: Exporter | None = None
    _trouble: list[str] = field(default_factory=list)
    _steps: int = 0
    _seconds: dict[str, float] = field(default_factory=dict)
    _guard_seconds: float = 0.0
    _since: float = field(default_factory=time.perf_counter)
    _off: bool = False

    def serve(self, port: int) -> None:
        """Let Prometheus read the last recorded values; a port that is taken is a warning.

        A request reads no meter, so that it never disturbs a step.
        """
        try:
            self._exporter = Exporter(lambda: self._samples, port=port)
        except EnergyError as error:
            self._trouble.append(f"rank {self.rank} serves no metrics of energy: {error}")

    def begin(self, step: int) -> EnergyMeasured | None:
        """Close the set-up's window. All ranks call it together.

        Where no rank has a meter, nothing is read from then on.

        Returns:
            The event to record; ranks other than 0 may drop theirs.
        """
        seconds = time.perf_counter() - self._since
        event = self._window(step, {"startup": seconds})
        if not event.devices:
            self.close()
        return event

    def steps_done(self, step: int, steps: int, seconds: dict[str, float]) -> EnergyMeasured | None:
        """Take steps in that were recorded. All ranks call it together.

        Args:
            step: Steps done so far.
            steps: Steps since the last call.
            seconds: This rank's time by purpose since the last call (or `begin`).

        Returns:
            The event that covers them, when it is time for one.
        """
        self._add(seconds)
        self._steps += steps
        if self._off or self._steps < self.every_steps:
            return None
        return self._window(step, self._seconds)

    def finish(self, step: int, seconds: dict[str, float]) -> EnergyMeasured | None:
        """Close the last window of the attempt; arguments as for `steps_done`."""
        self._add(seconds)
        event = None if self._off else self._window(step, self._seconds)
        self.close()
        return event

    def close(self) -> None:
        """Read nothing more; a second call does nothing."""
        if not self._off:
            self._off = True
            self.meter.__exit__(None, None, None)
        if self._exporter is not None:
            self._exporter.close()
            self._exporter = None

    def _add(self, seconds: dict[str, float]) -> None:
        for purpose, value in seconds.items():
            self._seconds[purpose] = self._seconds.get(purpose, 0.0) + value

    def _window(self, step: int, seconds: dict[str, float]) -> EnergyMeasured:
        now = time.perf_counter()
        if self.guard is not None and (total := self.guard.guard.seconds) is not None:
            spent, self._guard_seconds = total - self._guard_seconds, total
            spent = min(max(spent, 0.0), seconds.get("compute", 0.0))
            if spent:
                seconds = {**seconds, "compute": seconds["compute"] - spent, "guard": spent}
        mine = _Said(
            self._read(seconds), self.unavailable, seconds, socket.gethostname(), self._trouble
        )
        everyone = gather_objects(mine)
        self.warnings, self._trouble = [name for one in everyone for name in one.trouble], []
        if self.in_step:
            _tell_stragglers(everyone)
        # Each meter once, although several ranks of a host may have read it (a shared GPU).
        devices: dict[tuple[str, ...], dict[str, Any]] = {}
        for device in (device for one in everyone for device in one.devices):
            key = (device["host"], device["boot"], device["part"], device["name"])
            devices.setdefault(key, device)
        event = EnergyMeasured(
            step=step,
            steps=self._steps,
            tokens=self._steps * self.tokens_per_step,
            seconds=now - self._since,
            devices=[*devices.values()],
            unavailable=_unavailable(everyone),
            tariff=self.tariff,
        )
        self._steps, self._seconds, self._since, self.tariff = 0, {}, now, ""
        return event

    def _read(self, purposes: dict[str, float]) -> list[dict[str, Any]]:
        lap = self.meter.lap()
        states = [shown_state(source) for source in self.meter.sources]
        if self._exporter is not None:
            job = os.environ.get("SLURM_JOB_ID", "")
            self._samples = tuple(
                Sample(
                    Labels(job=job, rank=str(self.rank), stage=self.stage, device=source.name),
                    state,
                )
                for source, state in zip(self.meter.sources, states, strict=True)
            )
        return [
            {
                "name": source.name,
                "part": source.part,
                "host": socket.gethostname(),
                "boot": boot(),
                "rank": self.rank,
                "purposes": {key: round(value, 6) for key, value in purposes.items()},
                **_figures(lap.joules[source.name]),
                "state": {
                    name: list(value) if isinstance(value, tuple) else value
                    for name in _STATE
                    if not isinstance(value := getattr(state, name), Unavailable)
                },
            }
            for source, state in zip(self.meter.sources, states, strict=True)
        ]


@dataclass(frozen=True)
class _Said:
    """The part of one rank in a record of energy."""

    devices: list[dict[str, Any]]
    unavailable: dict[str, str]
    seconds: dict[str, float]
    host: str
    trouble: list[str]


@cache
def boot() -> str:
    """The kernel's identifier of this boot, which two machines of one name do not share."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _tell_stragglers(everyone: list[_Said]) -> None:
    """Tell waiting for slow ranks apart from the waiting that all ranks have in common."""
    common = round(min(one.seconds.get("communication", 0.0) for one in everyone), 6)
    for device in (device for one in everyone for device in one.devices):
        purposes = device["purposes"]
        excess = round(purposes.get("communication", 0.0) - common, 6)
        if excess > 0:
            purposes |= {"communication": common, "straggler": excess}


def _unavailable(everyone: list[_Said]) -> dict[str, str]:
    """Reasons by name of what has no meter; with the host where hosts say different things."""
    found: dict[str, dict[str, str]] = {}
    for one in everyone:
        for name, why in one.unavailable.items():
            found.setdefault(name, {})[one.host] = why
    hosts = {one.host for one in everyone}
    said: dict[str, str] = {}
    for name, reasons in found.items():
        if reasons.keys() == hosts and len(set(reasons.values())) == 1:
            said[name] = next(iter(reasons.values()))
        else:
            said |= {f"{name} of {host}": why for host, why in reasons.items()}
    return said


def _figures(reading: Reading) -> dict[str, Any]:
    if isinstance(reading, Unavailable):
        # Energy of a window without an update of its counter is in the next figure, if one comes.
        return {"unavailable": reading.reason, "carried": isinstance(reading, Still)}
    return {
        "joules": reading.joules,
        "low_joules": reading.low_joules,
        "high_joules": reading.high_joules,
        "kind": reading.kind,
        "source": reading.source,
        "flags": list(reading.flags),
    }


class TrainingEnergy:
    """Energy of one training after the other, for the logs of a framework's trainer.

    Whatever a meter raises while it is looked for or read becomes a reason: training continues.

    Args:
        sources: What is read; all meters of this machine by default.

    Attributes:
        joules: Of the last training, or of this one until its last log.
    """

    def __init__(self, sources: Sequence[Source] | None = None) -> None:
        self.joules: Reading = Unavailable("the training has not begun")
        self._sources = sources
        self._meter: EnergyMeter | None = None
        self._step = 0
        self._joules = 0.0
        self._since = 0.0

    def begin(self, step: int) -> None:
        """Start to measure, after `step` steps; warns where nothing can be read.

        Raises:
            EnergyError: Two sources have one name.
        """
        self.close()
        meter = self._meter = EnergyMeter("training", self._sources)
        meter.__enter__()
        self._step, self._joules, self._since = step, 0.0, time.perf_counter()
        if not meter.sources:
            reasons = "; ".join(name.reason for name in meter.missing) or "no source is given"
            warnings.warn(f"energy is unavailable: {reasons}", stacklevel=3)

    def take(self, step: int) -> dict[str, float]:
        """Figures since the last call that gave some; none where nothing is known, and never 0.

        Args:
            step: Optimizer steps done so far.
        """
        if self._meter is None:
            return {}
        self.joules = total = self._total()
        now = time.perf_counter()
        # A counter that did not move yet has its joules in the next figure, with these steps.
        if isinstance(total, Unavailable) or step <= self._step or total.joules <= self._joules:
            return {}
        joules = total.joules - self._joules
        found = {
            "joules": total.joules,
            "joules_per_step": joules / (step - self._step),
            "watts": joules / max(now - self._since, 1e-9),
        }
        self._joules, self._step, self._since = total.joules, step, now
        return found

    def close(self) -> None:
        """Stop to measure; `joules` is that of the training."""
        if self._meter is not None:
            self._meter.__exit__()
            self.joules = self._total()
            self._meter = None

    def _total(self) -> Reading:
        assert self._meter is not None
        # A node's meter stands for all that is in the node.
        nodes = any(source.part == "node" for source in self._meter.sources)
        return self._meter.total("node" if nodes else None)
