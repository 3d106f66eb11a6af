"""Peak memory of a run's processes, from the counters of torch and of the kernel."""

from __future__ import annotations

import resource
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from outlast.distributed.group import gather_objects
from outlast.records import MemoryMeasured

if TYPE_CHECKING:
    from outlast.distributed.ranks import Ranks

_STATUS = Path("/proc/self/status")
_GROWTH = 1.01


@dataclass
class MemoryWatch:
    """This process's peak memory, and whether it is worth a record.

    Args:
        ranks: Who this process is.
        device: What it computes on.
    """

    ranks: Ranks
    device: torch.device
    _recorded: dict[str, int] = field(default_factory=dict)

    def grown(self) -> bool:
        """Whether a peak is more than 1 % above what was recorded last; takes 0.1 ms at most."""
        return any(
            peak > _GROWTH * self._recorded.get(name, 0) for name, peak in self._peaks().items()
        )

    def measured(self, step: int) -> MemoryMeasured:
        """The peaks of all processes since they began; all ranks call it together."""
        self._recorded = self._peaks()
        mine = {"rank": self.ranks.rank, "host": socket.gethostname(), **self._recorded}
        on_device = "torch.cuda.max_memory_allocated and max_memory_reserved, "
        what = f"{on_device if self.device.type == 'cuda' else ''}{resident_peak()[1]}"
        return MemoryMeasured(step, gather_objects(mine), what)

    def _peaks(self) -> dict[str, int]:
        found = {"resident_bytes": resident_peak()[0]}
        if self.device.type == "cuda":
            found["allocated_bytes"] = torch.cuda.max_memory_allocated(self.device)
            found["reserved_bytes"] = torch.cuda.max_memory_reserved(self.device)
        return found


def resident_peak(status: Path = _STATUS) -> tuple[int, str]:
    """This process's peak resident set in bytes, and where the figure is from.

    Linux hands the maximum of getrusage(2) on through execve(2): a small program that a large one
    starts begins with the large one's peak. VmHWM (proc_pid_status(5)) is this program's own.
    """
    try:
        for line in status.read_bytes().splitlines():
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) * 1024, "VmHWM of /proc/self/status"
    except (OSError, ValueError, IndexError):
        pass
    # Kilobytes, but on macOS, which has bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * unit, "ru_maxrss of getrusage, which may be that of the program that started it"
