"""Long training as chains of short, malleable jobs on a cluster that others share.

from outlast.cluster import should_stop
should_stop()      # in any training loop, once a step: whether to save and end now

The parts are packages of their own: `slurm` talks to Slurm, `chain` runs a long training as a chain
of jobs, `workload` and `simulate` are a cluster to try policies on, `policies` choose time limits
and nodes, `tasks`, `storage` and `staging` schedule tasks, saves and data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.cluster.stopping import report_outcome, report_progress, should_stop

__all__ = ["report_outcome", "report_progress", "should_stop"]


def __getattr__(name: str) -> Any:
    # Importing a part of the package should not load the others.
    if name in __all__:
        from outlast.cluster import stopping

        return getattr(stopping, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
