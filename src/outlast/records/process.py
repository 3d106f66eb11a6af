"""Identity of a process: it tells later processes with the same number apart."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

# Twice the resolution of /proc; two processes with one pid are at least a round of pids
# apart.
_SAME_START_SECONDS = 0.02


def boot_identity() -> str:
    """Identity of this boot of this machine; empty where it is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def started_seconds(process: psutil.Process) -> float:
    """Seconds after the boot when a process was started, to a hundredth."""
    import psutil

    # psutil adds the boot time, which moves when the clock is set; the difference does not.
    return round(process.create_time() - psutil.boot_time(), 2)


def process_lives(pid: int, started: float) -> bool:
    """True if the process `pid` of this host runs and was started at `started` after the boot."""
    import psutil

    try:
        process = psutil.Process(pid)
        same = abs(started_seconds(process) - started) < _SAME_START_SECONDS
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def age_seconds(process: psutil.Process) -> float:
    """Seconds since a process was started, to a hundredth of a second."""
    # Not by the wall clock: the kernel tells when it booted in whole seconds only.
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started_seconds(process), 0.0)
