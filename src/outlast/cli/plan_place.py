"""Where a run is planned: a cluster by name or file, or this machine as it was measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from outlast.errors import PlanError

if TYPE_CHECKING:
    from outlast.plan.cluster import Cluster
    from outlast.records import Run

HERE = "here"


def place_of(name: str, ranks: int = 0) -> Cluster:
    """A cluster by its name or file; `here` is this machine, as `calibrate --run` measured it.

    Args:
        name: As `--cluster` says it.
        ranks: Processes among which a machine without accelerators is shared; 0: as it stands.

    Raises:
        PlanError: It cannot be read, or nothing is known of this machine.
    """
    from outlast.cli.forecast import calibration_home
    from outlast.plan.calibration.here import divided
    from outlast.plan.cluster_file import cluster_of, read_cluster, this_cluster

    measured = calibration_home() / "cluster.toml"
    if name == HERE and not measured.exists():
        try:
            return this_cluster(ranks)
        except PlanError as error:
            raise PlanError(f"{error}; or name a cluster, as --cluster h100x64") from None
    found = read_cluster(measured) if name == HERE else cluster_of(name)
    shared = ranks and (found.processor or name == HERE) and found.devices != ranks
    return divided(found, ranks) if shared else found


def calibration_for(name: str, given: str | Path | None) -> str | Path | None:
    """The calibration to use: the one given; on this machine, its own where there is one."""
    from outlast.cli.forecast import calibration_home

    own = calibration_home() / "calibration.toml"
    return own if given is None and name == HERE and own.exists() else given


def ranks_of(run: Run) -> int:
    """Processes of the last start of a run; 0 where there is none."""
    from outlast.records import AttemptStarted

    started = [event.world_size for _, event in run.of(AttemptStarted)]
    return started[-1] if started else 0
