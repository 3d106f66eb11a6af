"""The simulator starts jobs when a real Slurm does, within one interval of its backfill."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from local_slurm import missing
from scheduler_trace import INTERVAL_SECONDS, clusters, differences, telling_workloads

WORKLOADS = 3
HANDOVER_SECONDS = 0.8
"""From a job's end to the next start on its nodes; the benchmark measures it anew."""


@pytest.mark.slurm
@pytest.mark.alone
def test_starts_agree_with_slurm() -> None:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    workloads = telling_workloads(WORKLOADS, jobs=6, longest=12)
    with clusters(WORKLOADS) as slurms, ThreadPoolExecutor(WORKLOADS) as threads:
        found = list(threads.map(differences, slurms, workloads, [HANDOVER_SECONDS] * WORKLOADS))
    for late in found:
        assert max(map(abs, late)) <= INTERVAL_SECONDS, found
