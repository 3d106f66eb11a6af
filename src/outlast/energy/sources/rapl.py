"""Joules of CPU packages and their memory: RAPL through Linux' powercap files, Intel and AMD."""

from __future__ import annotations

import os
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.energy.sources.protocol import UnreadableSource
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.energy.sources.protocol import Part, Source
    from outlast.energy.window import Kind

POWERCAP = Path("/sys/class/powercap")

# The counters change every millisecond (Intel SDM vol. 3, "RAPL interfaces"; Linux amd_energy.rst).
_UPDATE_SECONDS = 0.001
# No package draws more for long: a counter that wraps at R joules wraps no sooner than R / 2000 W.
_HIGHEST_WATTS = 2000.0


class RaplSource:
    """One counter of joules that wraps around.

    Args:
        name: Unique in a meter.
        part: "cpu" of a package, "memory" of its DRAM.
        directory: The powercap zone: holds `energy_uj` and `max_energy_range_uj`.
        clock: Monotonic seconds.

    Raises:
        OSError: The counter or its range cannot be read.
        ValueError: It holds no number.
    """

    kind: Kind = "measured"
    update_seconds = _UPDATE_SECONDS
    description = "RAPL through powercap"

    def __init__(
        self, name: str, part: Part, directory: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self.part: Part = part
        self._clock = clock
        self._range_uj = int((directory / "max_energy_range_uj").read_text(encoding="ascii"))
        self._wrap_seconds = self._range_uj * 1e-6 / _HIGHEST_WATTS
        self.poll_seconds = self._wrap_seconds / 2
        # The open file is read again and again at its beginning: 10 times cheaper than opening it.
        self._file = os.open(directory / "energy_uj", os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._lock = threading.Lock()
        self._total_uj = 0
        self._last: tuple[float, int] | None = None
        self.losses = 0
        self._counter_uj()

    def joules(self) -> float | Unavailable:
        """Joules since the first read.

        A read that comes so late that the counter may have wrapped unseen is Unavailable, and
        counting goes on from there, without the joules that were not seen.
        """
        with self._lock:
            try:
                counter_uj = self._counter_uj()
            except (OSError, ValueError) as error:
                return Unavailable(f"the RAPL counter of {self.name} cannot be read ({error})")
            now = self._clock()
            last, self._last = self._last, (now, counter_uj)
            if last is not None:
                before, before_uj = last
                if now - before >= self._wrap_seconds:
                    self.losses += 1
                    return Unavailable(
                        f"{self.name} was not read for {now - before:.0f} s, in which its counter "
                        "may have wrapped around",
                        f"read it every {self.poll_seconds:.0f} s, as an open EnergyMeter does",
                    )
                # After the highest value of the range comes 0.
                self._total_uj += (counter_uj - before_uj) % (self._range_uj + 1)
            return self._total_uj * 1e-6

    def _counter_uj(self) -> int:
        return int(os.pread(self._file, 32, 0))


def rapl_sources(
    root: Path = POWERCAP, clock: Callable[[], float] = time.monotonic
) -> tuple[list[Source], list[Unavailable]]:
    """Finds the packages and their memory.

    Cores and the uncore are parts of a package and left out; so are the `intel-rapl-mmio` zones,
    which count the joules of a package again, and the platform (psys), which contains packages but
    not the cards, so that it is neither a part nor the node.

    Args:
        root: The powercap directory.
        clock: Monotonic seconds.

    Returns:
        The sources, also those that may not be read; and why there are none at all.
    """
    zones = sorted(path.parent for path in root.glob("intel-rapl:*/energy_uj"))
    if not zones:
        where = f"no RAPL counters in {root}" if root.is_dir() else f"no {root}"
        remedy = "modprobe intel_rapl_msr (as root); a virtual machine or container hides them"
        return [], [Unavailable(where, remedy)]
    sources: list[Source] = []
    for zone in zones:
        named = _name_and_part(zone)
        if named is None:
            continue
        name, part = named
        try:
            sources.append(RaplSource(name, part, zone, clock))
        except PermissionError:
            why = Unavailable(
                f"only root may read the RAPL counter of {name}",
                f"chmod a+r {zone}/energy_uj (as root, after each boot)",
            )
            sources.append(UnreadableSource(name, part, why))
        except (OSError, ValueError) as error:
            why = Unavailable(f"the RAPL counter of {name} cannot be read ({error})")
            sources.append(UnreadableSource(name, part, why))
    if not sources:
        return [], [Unavailable(f"no package or DRAM counter in {root}")]
    return sources, []


def _name_and_part(zone: Path) -> tuple[str, Part] | None:
    kind = _line(zone / "name")
    if kind.startswith("package"):
        return f"cpu {kind.replace('-', ' ')}", "cpu"
    if kind == "dram":
        # Zone intel-rapl:0:2 lies inside package zone intel-rapl:0.
        package = _line(zone.parent / zone.name.rsplit(":", 1)[0] / "name") or zone.name
        return f"memory of {package.replace('-', ' ')}", "memory"
    return None


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
