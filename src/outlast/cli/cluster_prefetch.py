"""``outlast cluster prefetch``: the tokens of a job on this node before its processes ask."""

from __future__ import annotations

from outlast.cli.train import JobFile, Overrides, jobs_arguments


def prefetch(job_file: JobFile = None, overrides: Overrides = None) -> None:
    """Copy the tokens of a job to this node, where its section staging says.

    Run it once on each node, e.g. `srun --overlap --ntasks-per-node=1 outlast cluster prefetch
    job.toml &`, while an earlier job is still training; the processes that start later find the
    copies, or wait for those that are on their way. Text that no run has tokenised yet is left out.
    """
    from outlast.cluster.staging import prefetch as fetch
    from outlast.cluster.staging import told
    from outlast.job import load_job

    job_file, settings = jobs_arguments(job_file, overrides)
    job = load_job(job_file, settings)
    print("\n".join(told(job, fetch(job))))
