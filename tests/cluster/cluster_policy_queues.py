"""Queues and jobs that the tests of policies are worked out by hand on."""

import numpy as np

from outlast.cluster.policies.decision import Limits, MalleableJob, OwnJob, PowerSpeed, Situation
from outlast.cluster.simulate import Queue

HOUR = 3600.0


def queue(nodes, running=(), pending=(), now=0.0):
    """Running: (nodes, hours until its limit); pending: (nodes, hours asked for).

    Running jobs are numbered from 0, pending ones from 100.
    """
    return Queue(
        now_seconds=now,
        nodes=nodes,
        running_nodes=np.array([each[0] for each in running], np.int64),
        running_end_seconds=np.array([now + each[1] * HOUR for each in running], np.float64),
        running_start_seconds=np.array([now - HOUR for _ in running], np.float64),
        running_jobs=np.arange(len(running), dtype=np.int64),
        pending_nodes=np.array([each[0] for each in pending], np.int64),
        pending_limit_seconds=np.array([each[1] * HOUR for each in pending], np.float64),
        pending_jobs=np.arange(100, 100 + len(pending), dtype=np.int64),
    )


def job(hours=20.0, nodes=4, sizes=(1, 2, 4), **settings):
    """A job of some hours on its reference nodes; restart 300 s, save 60 s, speed (p / N0)^0.9."""
    return MalleableJob(
        work_seconds=hours * HOUR,
        reference_nodes=nodes,
        sizes=sizes,
        speed=PowerSpeed(nodes),
        **settings,
    )


def own(number, role, nodes, hours, started=None, ending=False):
    """One of the run's jobs; `started` in hours."""
    return OwnJob(
        number=number,
        role=role,
        nodes=nodes,
        limit_seconds=hours * HOUR,
        started_seconds=None if started is None else started * HOUR,
        ending=ending,
    )


def situation(seen, work, *jobs, limits=None, **settings):
    """What a policy is asked about."""
    return Situation(queue=seen, job=work, limits=limits or Limits(), own=jobs, **settings)
