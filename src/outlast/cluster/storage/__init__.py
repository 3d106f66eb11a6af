"""Manners on a file system that others share: how often to save, in what order, and how fast.

from outlast.cluster.storage import turn
with turn("/scratch/project/.turns", size_bytes, nodes=8, deadline_seconds=120.0):
    write()
"""

from outlast.cluster.storage.backoff import Backoff, GentlePace
from outlast.cluster.storage.job import FolderTurns, turns_for
from outlast.cluster.storage.pace import TokenBucket
from outlast.cluster.storage.periods import (
    Periods,
    SavingJob,
    jittered,
    shared_periods,
    waste_of,
    young_daly,
)
from outlast.cluster.storage.savers import Saver
from outlast.cluster.storage.simulate import Wasted, simulate_saves
from outlast.cluster.storage.slurm_jobs import SlurmJobs
from outlast.cluster.storage.turns import Request, ask, turn

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
    "Wasted",
    "ask",
    "jittered",
    "shared_periods",
    "simulate_saves",
    "turn",
    "turns_for",
    "waste_of",
    "young_daly",
]
