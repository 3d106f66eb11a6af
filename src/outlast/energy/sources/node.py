"""Meters of a whole node: power supply, BMC (IPMI, Redfish), Slurm or a rack meter."""

from __future__ import annotations

import math
import os
import stat
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.energy.sources.protocol import Interval
from outlast.energy.sources.track import asked
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.energy.sources.protocol import Part
    from outlast.energy.window import Kind


class CallableSource:
    """A counter of joules that a function reads, e.g. over Redfish or from a command.

    Args:
        name: Unique in a meter, e.g. "node (Redfish)".
        read: Gives joules since any beginning; whatever it raises becomes Unavailable. It must be
            quick: every window waits for it, and a reset between two reads that ends above the
            last count goes unseen.
        update_seconds: How often the counter changes.
        part: What it measures; a node's joules are never added to those of its CPUs and GPUs.
        kind: "measured" for a meter; a function that computes says "modelled".

    Raises:
        EnergyError: `update_seconds` is negative or not a number.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[], float],
        *,
        update_seconds: float,
        part: Part = "node",
        kind: Kind = "measured",
    ) -> None:
        if not 0 <= update_seconds < math.inf:
            raise EnergyError(
                f'update_seconds = {update_seconds} of "{name}" is no period: state how often the '
                "counter changes"
            )
        self.name = name
        self.part: Part = part
        self.kind: Kind = kind
        self.update_seconds = update_seconds
        self._read = read

    def joules(self) -> float | Unavailable:
        """Joules as the function says now."""
        joules = asked(self.name, lambda: float(self._read()))
        if isinstance(joules, Unavailable):
            return joules
        if not 0 <= joules < math.inf:
            return Unavailable(f"{self.name} says {joules} J")
        return joules


_MOST_BYTES = 64
"""More than any number of joules needs; a file that is no meter may be long."""


_UNKNOWN_UPDATE_SECONDS = 1.0
"""Until the file was seen to change twice: BMCs renew their figures about every second."""


_REMEMBERED_CHANGES = 32


class FileSource:
    """A meter whose joules since any beginning stand in a file, as the first word of its text.

    HPE Cray nodes have such files, e.g. ``/sys/cray/pm_counters/energy``.

    Args:
        path: The file; something outside keeps it up to date.
        update_seconds: How often it changes, where that is known. Otherwise the longest time
            between two changes that were seen lately stands for it; an open meter looks often.
        joules_per_unit: 1e-6 for a file in microjoules.
        part: What it measures; a node's joules are never added to those of its CPUs and GPUs.
        clock: Monotonic seconds.

    Raises:
        EnergyError: `update_seconds` is negative or not a number.
    """

    kind: Kind = "measured"
    poll_seconds = 0.1

    def __init__(
        self,
        path: str | Path,
        *,
        update_seconds: float | None = None,
        joules_per_unit: float = 1.0,
        part: Part = "node",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if update_seconds is not None and not 0 <= update_seconds < math.inf:
            raise EnergyError(
                f'update_seconds = {update_seconds} of "{path}" is no period: state how often the '
                "file changes, or leave it out"
            )
        self.name = f"file {path}"
        self.part: Part = part
        self._stated = update_seconds is not None
        self.update_seconds = _UNKNOWN_UPDATE_SECONDS if update_seconds is None else update_seconds
        self._joules_per_unit = joules_per_unit
        self._path = Path(path)
        self._clock = clock
        self._last: float | None = None
        self._read = -math.inf
        self._changed: float | None = None
        self._watched = False
        self._gaps: deque[float] = deque(maxlen=_REMEMBERED_CHANGES)

    @property
    def flags(self) -> tuple[str, ...]:
        """Note that the period is a guess."""
        if self._stated or self._gaps:
            return ()
        return (
            f"how often {self._path} changes is not known: taken as {_UNKNOWN_UPDATE_SECONDS:g} s",
        )

    def joules(self) -> float | Unavailable:
        """Joules as the file says now."""
        try:
            text = self._text()
        except OSError as error:
            return Unavailable(f"{self._path} cannot be read: {error.strerror}")
        if text is None:
            return Unavailable(
                f"{self._path} is not a regular file", "name a file that holds joules"
            )
        try:
            joules = float(text.split()[0])
        except (ValueError, IndexError):
            return Unavailable(f"{self._path} holds no number of joules")
        if not 0 <= joules < math.inf:
            return Unavailable(f"{self._path} says {joules} J")
        self._learn(joules)
        return joules * self._joules_per_unit

    def _text(self) -> str | None:
        # Non-blocking: opening a pipe would wait for its writer.
        file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                return None
            text = os.read(file, _MOST_BYTES).decode("ascii", errors="replace")
        finally:
            os.close(file)
        # A word that fills all bytes may go on behind them.
        return text if len(text) < _MOST_BYTES or len(text.split()) > 1 else ""

    def _learn(self, joules: float) -> None:
        """Notes a change of the file, seen at this read."""
        now = self._clock()
        last, self._last = self._last, joules
        unseen_seconds, self._read = now - self._read, now
        if self._stated or last is None or joules == last:
            return
        if self._changed is not None:
            self._note(now - self._changed, unseen_seconds)
        self._changed = now

    def _note(self, gap_seconds: float, unseen_seconds: float) -> None:
        # In a gap that nobody looked into the file may have changed often: it is an upper bound,
        # which stands only until a change was watched.
        watched = unseen_seconds <= gap_seconds / 2
        if watched and not self._watched:
            self._gaps.clear()
            self._watched = True
        if watched or not self._watched:
            self._gaps.append(gap_seconds)
            self.update_seconds = max(self._gaps)


class ModelledSource:
    """A device that draws a power somewhere in a stated interval, in the middle as best guess.

    Args:
        name: Unique in a meter.
        part: What it stands for.
        low_watts: The least that it draws.
        high_watts: The most that it draws.
        clock: Monotonic seconds.

    Raises:
        EnergyError: The interval is not 0 <= low <= high, or its middle is 0.
    """

    kind: Kind = "modelled"
    update_seconds = 0.0

    def __init__(
        self,
        name: str,
        part: Part,
        *,
        low_watts: float,
        high_watts: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not (0 <= low_watts <= high_watts < math.inf and high_watts > 0):
            raise EnergyError(
                f'the power of "{name}" from low_watts = {low_watts} to high_watts = {high_watts} '
                "is no interval: state 0 <= low_watts <= high_watts"
            )
        self.name = name
        self.part: Part = part
        self.flags = (f"not measured: {low_watts:g} to {high_watts:g} W were stated",)
        self._watts = (low_watts, high_watts)
        self._clock = clock
        self._began = clock()

    def joules(self) -> float:
        """Stated power times the time since this source was made."""
        return self.interval().joules

    def interval(self) -> Interval:
        """As `joules`, with the stated interval."""
        low, high = self._watts
        seconds = self._clock() - self._began
        return Interval(low * seconds, (low + high) / 2 * seconds, high * seconds)
