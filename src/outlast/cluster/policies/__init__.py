"""What to submit: one long job, a chain, an anchor with fillers, or nodes and wall time planned.

    queue = ...                                       # of squeue and sinfo, or of a simulation
    job = MalleableJob(work_seconds=40 * 3600, reference_nodes=8, sizes=(2, 4, 8, 16, 32),
                       speed=PowerSpeed(8, 0.9))
    choice = choose(Situation(queue=queue, job=job, limits=Limits(max_wall_seconds=86400)))
    print(choice.reason)                              # choice.ranking: all shapes with P10/P50/P90

Policies are pure: `decide(situation)` says what to submit, cancel, shorten or end, from what is
seen. `Run` carries decisions out on the simulator; on a cluster the caller does.
"""

from outlast.cluster.policies.anchor_filler import AnchorFiller
from outlast.cluster.policies.automatic import Automatic, Choice, choose
from outlast.cluster.policies.behaviour import Behaviour
from outlast.cluster.policies.calibrate import learn_correction, queue_at
from outlast.cluster.policies.chains import FixedLinks, OneLongJob
from outlast.cluster.policies.decision import Decision, OwnJob, Policy, Situation, Submission
from outlast.cluster.policies.driver import Run
from outlast.cluster.policies.job import (
    AmdahlSpeed,
    Limits,
    MalleableJob,
    PowerSpeed,
    TableSpeed,
)
from outlast.cluster.policies.planned import Candidate, Planned, candidates
from outlast.cluster.policies.predict import Correction, StartForecast, forecast_waits
from outlast.cluster.policies.replay import Row, replay

__all__ = [
    "AmdahlSpeed",
    "AnchorFiller",
    "Automatic",
    "Behaviour",
    "Candidate",
    "Choice",
    "Correction",
    "Decision",
    "FixedLinks",
    "Limits",
    "MalleableJob",
    "OneLongJob",
    "OwnJob",
    "Planned",
    "Policy",
    "PowerSpeed",
    "Row",
    "Run",
    "Situation",
    "StartForecast",
    "Submission",
    "TableSpeed",
    "candidates",
    "choose",
    "forecast_waits",
    "learn_correction",
    "queue_at",
    "replay",
]
