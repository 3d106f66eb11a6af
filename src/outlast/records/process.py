"""What tells a process from all others, also from a later one with the same number."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil


def boot_identity() -> str:
    """What tells this boot of this machine from others; empty where it is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def started_seconds(process: psutil.Process) -> float:
    """Seconds after the boot when a process was started, to a hundredth."""
    import psutil

    # psutil adds the boot time, which moves when the clock is set; the difference does not.
    return round(process.create_time() - psutil.boot_time(), 2)


def age_seconds(process: psutil.Process) -> float:
    """How long ago a process was started, to a hundredth of a second."""
    # Not by the wall clock: the kernel tells when it booted in whole seconds only.
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started_seconds(process), 0.0)
