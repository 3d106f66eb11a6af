"""``outlast plan calibrate --run``: probes of this machine, and the files that they give."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.errors import PlanError

if TYPE_CHECKING:
    from outlast.plan.calibration.memory_fit import Resident
    from outlast.plan.calibration.probes import Probe
    from outlast.plan.calibration.step_model import StepModel
    from outlast.plan.cluster import Cluster

SECONDS = 300.0
CALIBRATION, CLUSTER = "calibration.toml", "cluster.toml"


@dataclass(frozen=True)
class Here:
    """What probes of this machine have taught.

    Attributes:
        cluster: The machine with one rank, or one rank per GPU; `here.divided` shares it out.
        probes: What was run, or read again.
        step: The calibrated time model.
        memory: The peak resident memory of ranks; None on GPUs.
        seconds: Wall time of everything.
        failures: Sentences about settings that did not run.
    """

    cluster: Cluster
    probes: tuple[Probe, ...]
    step: StepModel
    memory: Resident | None
    seconds: float
    failures: tuple[str, ...]


def calibrate_here(
    job: Path | None, out: Path, seconds: float = SECONDS, keep: Path | None = None
) -> Here:
    """Run probes of this machine, fit the model to them, and write both files down.

    Args:
        job: Whose model and batch are varied; None for the quickstart's.
        out: The calibration's file; the cluster's is written beside it. A folder takes both.
        seconds: Wall time of everything that runs.
        keep: Folder for the probes' runs; what it holds already is not run again. None for a
            temporary one.

    Raises:
        PlanError: The machine or the job cannot be probed, or too few probes finish in time.
    """
    from outlast.cli.figures import output

    console = output()
    calibration, cluster = places(out)
    calibration.parent.mkdir(parents=True, exist_ok=True)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say("measuring products and memory of this machine")
    found, text = probed(job, seconds, keep, say)
    write(found, text, (calibration, cluster))
    say(
        f"{len(found.probes)} probes took {found.seconds:.0f} s; wrote {calibration}"
        + (f" and {cluster}" if text else "")
    )
    return found


def places(out: Path) -> tuple[Path, Path]:
    """Where the calibration and the cluster are written."""
    if out.is_dir() or not out.suffix:
        return out / CALIBRATION, out / CLUSTER
    stem = out.name.removesuffix(".toml").removesuffix(".calibration")
    return out, out.with_name(f"{stem}.{CLUSTER}")


def probed(
    job: Path | None, seconds: float, keep: Path | None, say: Callable[[str], None]
) -> tuple[Here, str]:
    """Probes of this machine and what they teach; the text of its cluster file.

    Args:
        job: As of `calibrate_here`.
        seconds: Likewise.
        keep: Likewise.
        say: Told in words what happens.

    Raises:
        PlanError: As `calibrate_here`.
    """
    from outlast.job import load_job
    from outlast.plan.calibration.here import kept_cluster
    from outlast.plan.calibration.memory_fit import fit_resident
    from outlast.plan.calibration.probes import Probing, family
    from outlast.plan.calibration.step_model import step_model

    if not seconds > 0.0:
        raise PlanError(f"seconds = {seconds:g}: give more than 0, 300 are usual")
    begun = time.monotonic()
    base = load_job(job)
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="probes-")))
        cluster, text = kept_cluster(folder / CLUSTER)
        settings = family(base, most_ranks(cluster))
        left = seconds - (time.monotonic() - begun)
        probing = Probing(cluster, settings, folder, left, say)
        probes = probing.run()
    rows = [probe.row for probe in probes]
    found = Here(
        cluster=cluster,
        probes=tuple(probes),
        step=step_model(rows),
        memory=fit_resident(rows) if cluster.processor else None,
        seconds=time.monotonic() - begun,
        failures=tuple(probing.failures),
    )
    return found, text


def most_ranks(cluster: Cluster) -> int:
    """Ranks that probes start at most: one per GPU, or two where there are two cores."""
    return min(cluster.host_cores, 2) if cluster.processor else cluster.devices_per_node


def write(found: Here, cluster_text: str, files: tuple[Path, Path]) -> None:
    """Write the calibration, and the cluster's file where the catalogue does not know it.

    Args:
        found: By `probed`.
        cluster_text: Likewise.
        files: By `places`.
    """
    from outlast.plan.calibration.calibration_file import Provenance, write_calibration
    from outlast.plan.calibration.memory_fit import (
        device_constants,
        fit_device_memory,
        resident_constants,
    )
    from outlast.plan.calibration.step_model import calibration_of
    from outlast.records import replace_file
    from outlast.version import __version__

    provenance = Provenance(
        date=datetime.now(UTC).date().isoformat(),
        version=__version__,
        rows=tuple(probe.setting.name for probe in found.probes),
        sources=(found.cluster.name,),
        flagged=found.failures,
        text=f"outlast plan calibrate --run, {len(found.probes)} probes",
    )
    calibration = calibration_of(found.step, provenance)
    learned = fit_device_memory([probe.row for probe in found.probes])
    memory = device_constants({name: item.fit for name, item in learned.items()})
    if found.memory is not None:
        memory |= resident_constants(found.memory, found.cluster.name)
    constants = {**calibration.constants, **memory}
    write_calibration(replace(calibration, constants=constants), files[0])
    if cluster_text:
        replace_file(files[1], cluster_text.encode())
