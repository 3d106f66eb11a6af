"""I/O on a file system that others share: save periods, turns to write, and rates.

from outlast.cluster.storage import turn
with turn("/scratch/project/.turns", size_bytes, nodes=8, deadline_seconds=120.0):
    write()
"""

from outlast.cluster.storage.io_lock import FolderTurns, Request, SlurmJobs, ask, turn, turns_for
from outlast.cluster.storage.pace import Backoff, GentlePace, TokenBucket
from outlast.cluster.storage.periods import (
    Periods,
    Saver,
    SavingJob,
    shared_periods,
    waste_of,
    young_daly,
)

__all__ = [
    "Backoff",
    "FolderTurns",
    "GentlePace",
    "Periods",
    "Request",
    "Saver",
    "SavingJob",
    "SlurmJobs",
    "TokenBucket",
    "ask",
    "shared_periods",
    "turn",
    "turns_for",
    "waste_of",
    "young_daly",
]
