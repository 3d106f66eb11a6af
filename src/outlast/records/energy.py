"""Energy totals of a run over all its attempts, by device and by purpose."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from outlast.records.events import EnergyMeasured

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from outlast.records.log import Record, Run

REDONE = "redone"
"""The purpose of energy that went into steps which a later attempt has done again."""
_KINDS = ("simulated", "replayed", "modelled", "measured")


@dataclass(frozen=True)
class EnergyWindow:
    """One record, with the share of it that was done again later.

    Attributes:
        record: Who wrote it when, at the end of the window.
        first_attempt: Whether no attempt was before.
        share_redone: Of its steps, those that a later attempt did again.
        event: What the meters said.
        counted: The devices whose joules add up.
        carried: The devices that stood here, and whose next figure has the joules.
        lacking: The devices whose joules here are in no figure.
    """

    record: Record
    first_attempt: bool
    share_redone: float
    event: EnergyMeasured
    counted: tuple[dict[str, Any], ...]
    carried: tuple[dict[str, Any], ...]
    lacking: tuple[dict[str, Any], ...]

    @property
    def joules(self) -> float:
        """Sum of what counts."""
        return math.fsum(float(item["joules"]) for item in self.counted)

    def seconds_of(self, device: dict[str, Any]) -> dict[str, float]:
        """Seconds by purpose of the rank that has read `device`, with what was redone."""
        found: dict[str, float] = {}
        for name, value in device.get("purposes", {}).items():
            seconds = max(float(value), 0.0)
            again = name == "startup" and not self.first_attempt
            shares = {"restart" if again else name: 1 - self.share_redone}
            for purpose, share in (*shares.items(), (REDONE, self.share_redone)):
                if share:
                    found[purpose] = found.get(purpose, 0.0) + seconds * share
        return found

    def purposes(self) -> Iterator[tuple[str, float]]:
        """Joules by purpose: each device's are shared out by the time of the rank that reads it.

        A purpose may come several times. Without any time all is ``other``.
        """
        for device in self.counted:
            joules = float(device["joules"])
            seconds = self.seconds_of(device)
            whole = math.fsum(seconds.values())
            for purpose, part in seconds.items() if whole > 0 else [("other", 1.0)]:
                yield purpose, joules * part / (whole or 1.0)


@dataclass(frozen=True)
class DeviceEnergy:
    """One meter over the whole run.

    Attributes:
        host: Machine that it is in.
        name: As the meter calls it.
        part: ``gpu``, ``cpu``, ``memory`` or ``node``.
        counted: Whether it is in the sum; what a node's meter covers too is not.
        joules: All of it; None where no window has a figure.
        seconds: Length of the windows that have one.
        kind: ``measured``, ``modelled``, ``replayed`` or ``simulated``.
        hottest_celsius: Highest temperature at the end of a window; None where none is known.
        clocks_mhz: Lowest and highest clock at the end of a window.
        throttled: Windows that ended with a reason for a lower clock, by reason.
        flags: What to know before trusting the figure.
        missing: Why windows have no figure.
    """

    host: str
    name: str
    part: str
    counted: bool
    joules: float | None
    seconds: float
    kind: str
    hottest_celsius: float | None
    clocks_mhz: tuple[int, int] | None
    throttled: dict[str, int]
    flags: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def watts(self) -> float | None:
        """Mean power over its windows."""
        return None if self.joules is None or self.seconds <= 0 else self.joules / self.seconds


@dataclass(frozen=True)
class EnergyTotals:
    """All that was read from meters in a run.

    An attempt that was killed counts up to its last reading.

    Attributes:
        windows: In order; those without a figure too.
        unavailable: What was asked for and has no meter -> why not, of the last attempt.
        killed: Attempts whose energy was measured and whose end is not recorded.
        killed_seconds: Recorded time after their last reading; they may have continued for longer.
        tariff: Text of the job's tariff file when an attempt began last; empty if none was named.
    """

    windows: tuple[EnergyWindow, ...]
    unavailable: dict[str, str]
    killed: int = 0
    killed_seconds: float = 0.0
    tariff: str = ""

    @cached_property
    def read(self) -> tuple[EnergyWindow, ...]:
        """The windows with a figure."""
        return tuple(window for window in self.windows if window.counted)

    @cached_property
    def covered(self) -> tuple[EnergyWindow, ...]:
        """The windows whose joules are in figures, be it those of later windows.

        Meters that never had a figure are not asked for: the sum is of the others.
        """
        metered = {_meter(row) for window in self.windows for row in window.counted}
        return tuple(
            window
            for window in self.windows
            if (window.counted or window.carried)
            and not any(_meter(row) in metered for row in window.lacking)
        )

    @property
    def joules(self) -> float | None:
        """Sum of all counted devices; None where nothing could be read."""
        return self._sum("joules")

    @property
    def low_joules(self) -> float | None:
        """Lower end of the interval, the devices' errors taken to agree."""
        return self._sum("low_joules")

    @property
    def high_joules(self) -> float | None:
        """Upper end of the interval."""
        return self._sum("high_joules")

    def _sum(self, name: str) -> float | None:
        found = [
            float(device.get(name, device["joules"]))
            for window in self.read
            for device in window.counted
        ]
        return math.fsum(found) if found else None

    @property
    def seconds(self) -> float:
        """Length of the windows that figures cover."""
        return math.fsum(window.event.seconds for window in self.covered)

    @property
    def tokens(self) -> int:
        """Tokens that count, each once, of the windows that figures cover."""
        found = (window.event.tokens * (1 - window.share_redone) for window in self.covered)
        return round(math.fsum(found))

    @property
    def joules_per_token(self) -> float | None:
        """All joules, start-up and redone steps too, over the tokens that count.

        Of windows with tokens only those that all meters cover are in it.
        """
        if self.joules is None or not self.tokens:
            return None
        covered = {id(window) for window in self.covered}
        joules = (
            window.joules
            for window in self.read
            if id(window) in covered or not window.event.tokens
        )
        return math.fsum(joules) / self.tokens

    @property
    def lacking_seconds(self) -> float:
        """Length of the windows in which a meter that was there had no figure."""
        return math.fsum(window.event.seconds for window in self.windows if window.lacking)

    @cached_property
    def purposes(self) -> dict[str, float]:
        """Joules by purpose; the purposes sum to `joules`."""
        found: dict[str, float] = {}
        for window in self.read:
            for purpose, joules in window.purposes():
                found[purpose] = found.get(purpose, 0.0) + joules
        return found

    @property
    def kind(self) -> str:
        """The least trustworthy way in which a counted figure came about."""
        counted = (device for device in self.devices if device.counted)
        return _worst_kind(device.kind for device in counted if device.joules is not None)

    @cached_property
    def devices(self) -> tuple[DeviceEnergy, ...]:
        """Every meter, by host, part and name."""
        found: dict[_Meter, list[tuple[EnergyWindow, dict[str, Any]]]] = {}
        for window in self.windows:
            for device in window.event.devices:
                found.setdefault(_meter(device), []).append((window, device))
        return tuple(_device(key, found[key]) for key in sorted(found))

    @property
    def incomplete(self) -> bool:
        """True if joules are known to be in no figure: the sum is too low.

        Those of a window in which a meter that was there could not be read, or those of the end
        of an attempt that was killed.
        """
        return self.killed > 0 or any(window.lacking for window in self.windows)

    def to_dict(self) -> dict[str, Any]:
        """The totals as JSON; what is not known is null, with the reason in ``unavailable``."""
        return {
            "joules": self.joules,
            "low_joules": self.low_joules,
            "high_joules": self.high_joules,
            "kind": self.kind if self.joules is not None else None,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "joules_per_token": self.joules_per_token,
            "joules_by_purpose": self.purposes,
            "incomplete": self.incomplete,
            "lacking_seconds": self.lacking_seconds,
            "killed_attempts": self.killed,
            "killed_seconds": self.killed_seconds,
            "devices": [
                {"host": device.host, "name": device.name, "part": device.part,
                 "counted": device.counted, "joules": device.joules, "flags": list(device.flags),
                 "unavailable": "; ".join(device.missing)}
                for device in self.devices
            ],
            "unavailable": self.unavailable,
        }  # fmt: skip


_Meter = tuple[str, str, str, str]
_Row = dict[str, Any]


def _meter(row: _Row) -> _Meter:
    """Identity of a meter in a run: machine (host and boot), part and name."""
    return (*_machine(row), str(row.get("part")), str(row.get("name")))


def _machine(row: _Row) -> tuple[str, str]:
    return str(row.get("host")), str(row.get("boot", ""))


def _worst_kind(kinds: Iterable[str]) -> str:
    """The least trustworthy of the ways in which figures came about."""
    found = {*kinds}
    return next((kind for kind in _KINDS if kind in found), "measured")


def _device(key: _Meter, rows: list[tuple[EnergyWindow, _Row]]) -> DeviceEnergy:
    host, _, part, name = key
    known = [(window, row) for window, row in rows if row.get("joules") is not None]
    lacking = [row for window, row in rows if _among(row, window.lacking)]
    states = [row.get("state", {}) for _, row in rows]
    heat = [float(state["celsius"]) for state in states if "celsius" in state]
    clocks = [int(state["sm_clock_mhz"]) for state in states if "sm_clock_mhz" in state]
    reasons = (reason for state in states for reason in state.get("throttle_reasons", []))
    return DeviceEnergy(
        host=host,
        name=name,
        part=part,
        counted=any(_among(row, window.counted) for window, row in known),
        joules=math.fsum(float(row["joules"]) for _, row in known) if known else None,
        seconds=math.fsum(w.event.seconds for w, r in rows if not _among(r, w.lacking)),
        kind=_worst_kind(str(row.get("kind", "measured")) for _, row in known),
        hottest_celsius=max(heat, default=None),
        clocks_mhz=(min(clocks), max(clocks)) if clocks else None,
        throttled=dict(Counter(reasons)),
        flags=tuple(dict.fromkeys(str(item) for _, row in known for item in row.get("flags", []))),
        missing=tuple(dict.fromkeys(str(row.get("unavailable")) for row in lacking)),
    )


def _among(row: _Row, rows: tuple[_Row, ...]) -> bool:
    return any(row is item for item in rows)


def energy_totals(run: Run) -> EnergyTotals | None:
    """Energy totals of `run`, or None where nothing about energy is recorded."""
    found = run.of(EnergyMeasured)
    if not found:
        return None
    last = [event for record, event in found if record.attempt == found[-1][0].attempt]
    # Recorded seconds after the last reading of every attempt that has meters and no end.
    ends = []
    for attempt in run.attempts:
        own = [(record, event) for record, event in found if record.attempt == attempt.number]
        # An attempt without any meter reads nothing after its first event.
        if attempt.outcome == "died" and (not own or any(event.devices for _, event in own)):
            since = own[-1][0].time if own else attempt.start_time
            ends.append(max(attempt.end_time - since, 0.0))
    return EnergyTotals(
        windows=tuple(_windows(run, found)),
        unavailable={name: why for event in last for name, why in event.unavailable.items()},
        killed=len(ends),
        killed_seconds=math.fsum(ends),
        tariff=next((event.tariff for _, event in reversed(found) if event.tariff), ""),
    )


def _windows(run: Run, found: list[tuple[Record, EnergyMeasured]]) -> Iterator[EnergyWindow]:
    first = run.attempts[0].number
    carried = _carried([(record.attempt, event) for record, event in found])
    nodes = {
        (record.attempt, _machine(row))
        for record, event in found
        for row in event.devices
        if row.get("part") == "node" and row.get("joules") is not None
    }
    for record, event in found:
        # What a node's meter has a figure of anywhere in an attempt is never added beside it: a
        # figure after windows without one may hold the joules of these.
        own = tuple(
            row
            for row in event.devices
            if row.get("part") == "node" or (record.attempt, _machine(row)) not in nodes
        )
        yield EnergyWindow(
            record=record,
            first_attempt=record.attempt == first,
            share_redone=run.share_redone(record, event),
            event=event,
            counted=tuple(row for row in own if row.get("joules") is not None),
            carried=tuple(row for row in own if id(row) in carried),
            lacking=tuple(
                row for row in own if row.get("joules") is None and id(row) not in carried
            ),
        )


def _carried(found: list[tuple[int, EnergyMeasured]]) -> set[int]:
    """Identities of the rows whose counter stood, and which a later figure of the attempt covers.

    A reading that failed in between loses them: the counter is then taken up anew.
    """
    covered: set[tuple[int, _Meter]] = set()
    rows = set()
    for attempt, event in reversed(found):
        for row in event.devices:
            key = (attempt, _meter(row))
            if row.get("joules") is not None:
                covered.add(key)
            elif not row.get("carried"):
                covered.discard(key)
            elif key in covered:
                rows.add(id(row))
    return rows
