"""Submission policies: one long job, a chain, an anchor with fillers, or a planned shape.

    queue = ...                                       # of squeue and sinfo, or of a simulation
    job = MalleableJob(work_seconds=40 * 3600, reference_nodes=8, sizes=(2, 4, 8, 16, 32),
                       speed=PowerSpeed(8, 0.9))
    choice = choose(Situation(queue=queue, job=job, limits=Limits(max_wall_seconds=86400)))
    print(choice.reason)                              # choice.ranking: all shapes with P10/P50/P90

Policies are pure: `decide(situation)` says what to submit, cancel, shorten or end, from what is
seen. `SimulatedRun` carries decisions out on the simulator; on a cluster the caller does.
"""

from outlast.cluster.policies.automatic import (
    AnchorFiller,
    Automatic,
    Choice,
    Planned,
    candidates,
    choose,
)
from outlast.cluster.policies.decision import (
    Decision,
    FixedLinks,
    Limits,
    MalleableJob,
    OneLongJob,
    OwnJob,
    Policy,
    PowerSpeed,
    Situation,
    TableSpeed,
    hours,
)
from outlast.cluster.policies.forecast import (
    LEVELS,
    QUICK,
    Behaviour,
    Correction,
    Outlook,
    StartForecast,
    as_slurm,
    forecast_waits,
    learn_correction,
    queue_at,
    queue_now,
)
from outlast.cluster.policies.replay import PolicyResult, replay

__all__ = [
    "LEVELS",
    "QUICK",
    "AnchorFiller",
    "Automatic",
    "Behaviour",
    "Choice",
    "Correction",
    "Decision",
    "FixedLinks",
    "Limits",
    "MalleableJob",
    "OneLongJob",
    "Outlook",
    "OwnJob",
    "Planned",
    "Policy",
    "PolicyResult",
    "PowerSpeed",
    "Situation",
    "StartForecast",
    "TableSpeed",
    "as_slurm",
    "candidates",
    "choose",
    "forecast_waits",
    "hours",
    "learn_correction",
    "queue_at",
    "queue_now",
    "replay",
]
