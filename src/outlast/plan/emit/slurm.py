"""A Slurm batch script: the run as a chain of starts, each of which saves before its limit.

Outlast's ranks are started by srun itself: Slurm's warning reaches every rank, which saves and
ends with exit code 3. All others are started by torchrun, one on every node. The warning then goes
to the batch script, which leaves a file that the nodes look for: a signal to the step would end
torchrun, and with some of Slurm's ways to follow processes also data loaders.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from outlast.errors import EXIT_TO_BE_CONTINUED, PlanError
from outlast.plan.emit.settings import commented, head, nodes_of, render

if TYPE_CHECKING:
    from outlast.plan.cluster import Cluster
    from outlast.plan.configuration import Configuration
    from outlast.plan.emit.settings import EmitSettings
    from outlast.plan.transformer import Transformer


SAVES = {"megatron": True, "deepspeed": True, "accelerate": True, "torchtitan": False}
"""True for targets whose workers save when they get SIGTERM."""


def batch_files(
    model: Transformer, run: Configuration, cluster: Cluster, settings: EmitSettings
) -> dict[str, str]:
    """Text of job.sbatch, and of node.sh where torchrun starts the ranks.

    Raises:
        PlanError: The run does not fill its nodes, or is warned before its time limit begins.
    """
    nodes, per_node = nodes_of(run, cluster)
    minutes, starts = _limit(settings)
    alone = settings.launches == "outlast"
    tasks = per_node if alone else 1
    days, rest = divmod(minutes, 24 * 60)
    # A task's share of the node; 0 where nobody said how many cores a node has.
    cores = cluster.host_cores * per_node / cluster.devices_per_node // tasks
    options = [
        ("job-name", settings.name),
        ("nodes", nodes),
        ("ntasks-per-node", tasks),
        ("gpus-per-node", per_node),
        ("cpus-per-task", int(cores)),
        ("time", f"{days}-{rest // 60:02}:{rest % 60:02}:00"),
        ("signal", f"{'' if alone else 'B:'}USR1@{settings.warn_seconds}"),
        ("partition", settings.partition),
        ("account", settings.account),
        ("output", f"{settings.name}-%j.log"),
        ("open-mode", "append"),
    ]
    notes = ["Submit it from its own folder: sbatch job.sbatch", *_length_notes(settings, starts)]
    job = render(
        "job.sbatch",
        options=[f"{name}={_word(name, value)}" for name, value in options if value],
        head=commented(head(model, run, settings, *notes)),
        cores=bool(options[4][1]),
        alone=alone,
        to_be_continued=EXIT_TO_BE_CONTINUED,
    )
    if alone:
        return {"job.sbatch": job}
    note = "Runs on every node: starts torchrun, and tells its workers to save when warned."
    node = render(
        "node.sh",
        head=commented(head(model, run, settings, note)),
        target=settings.launches,
        saves=SAVES[settings.launches],
    )
    return {"job.sbatch": job, "node.sh": node}


def _limit(settings: EmitSettings) -> tuple[int, int]:
    """Minutes of one start, and starts of the whole run."""
    hours, starts = settings.longest_hours, 1
    if settings.predicted_hours is not None:
        wanted = settings.predicted_hours * (1.0 + settings.margin) + settings.warn_seconds / 3600
        starts = math.ceil(wanted / hours)
        hours = min(wanted, hours)
    minutes = math.ceil(hours * 60)
    if settings.warn_seconds >= minutes * 60:
        raise PlanError(
            f"warn_seconds = {settings.warn_seconds} is not below the time limit of "
            f"{minutes * 60} s: warn later or allow more with longest_hours"
        )
    return minutes, starts


def _length_notes(settings: EmitSettings, starts: int) -> list[str]:
    if settings.predicted_hours is None:
        limit = f"the limit is longest_hours = {settings.longest_hours:g}."
        return [f"How long the run takes was not predicted; {limit}"]
    note = (
        f"Time limit: {settings.predicted_hours:.3g} predicted hours and {settings.margin:.0%} "
        "margin"
    )
    if starts > 1:
        note += f", in about {starts} starts of {settings.longest_hours:g} h"
    lost = "" if SAVES.get(settings.launches, True) else " (torchtitan does not save on a warning)"
    return [f"{note}{lost}."]


def _word(name: str, value: object) -> str:
    text = str(value)
    if any(character.isspace() or character in "\"'`$\\#" for character in text):
        raise PlanError(
            f"{name} = {text!r} cannot stand in a batch script: use letters, digits, dots, dashes "
            "and underscores"
        )
    return text
