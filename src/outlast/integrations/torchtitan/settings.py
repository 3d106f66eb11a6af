"""The job of a torchtitan recipe, and what of it the recipe or torchtitan itself contradicts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.distributed.activation_checkpoint import SelectiveAC

from outlast.errors import IntegrationError
from outlast.job import LoopJob, load_loop_job
from outlast.job.section import toml_value
from outlast.job.sections import RunSection

if TYPE_CHECKING:
    from outlast.integrations.torchtitan.trainer import OutlastTrainer


def job_of(config: OutlastTrainer.Config) -> LoopJob:
    """The settings of what Outlast does beside a training, with its dump folder as the run's.

    Raises:
        JobError: When a setting is wrong.
        IntegrationError: When one has no effect, or does not go with the recipe.
    """
    path = Path(config.outlast_job) if config.outlast_job else None
    job = load_loop_job(path, config.outlast_settings)
    plain = LoopJob().checkpoint
    for name in type(plain).model_fields:
        if (value := getattr(job.checkpoint, name)) != getattr(plain, name):
            raise IntegrationError(
                f"checkpoint.{name} = {toml_value(value)} in a job has no effect in torchtitan: "
                "the recipe's own checkpoint settings count; remove it"
            )
    _check_guard(config, job)
    return _in_dump_folder(job, config.dump_folder)


def _check_guard(config: OutlastTrainer.Config, job: LoopJob) -> None:
    """Refuse a guard where its checks would not run.

    Raises:
        IntegrationError: With the setting, its value and the remedy.
    """
    policy = job.guard.policy
    if policy == "off":
        return
    if (stages := config.parallelism.pipeline_parallel_degree) > 1:
        raise IntegrationError(
            f"parallelism.pipeline_parallel_degree = {stages} does not go with guard.policy = "
            f'"{policy}": in torchtitan the guard knows no pipelines; set it to "off"'
        )
    if policy == "light" and not job.guard.modules:
        return
    what = f'policy = "{policy}"' if policy != "light" else "modules"
    if isinstance(config.activation_checkpoint, SelectiveAC.Config):
        raise IntegrationError(
            f"guard.{what} does not go with activation_checkpoint = SelectiveAC: torch counts the "
            "operations of both passes there, and the checks are among them; set it to "
            "FullAC.Config() or None"
        )
    if not config.training.disable_cuda_graphs:
        raise IntegrationError(
            f"guard.{what} needs training.disable_cuda_graphs = True: passes that are replayed "
            "from a CUDA graph run without their checks"
        )


def _in_dump_folder(job: LoopJob, dump_folder: str) -> LoopJob:
    """`job` with a recipe's dump folder as its run directory.

    Raises:
        IntegrationError: When the job names another, or the folder's name does not do.
    """
    plain = RunSection()
    if (job.run.name, job.run.directory) != (plain.name, plain.directory):
        raise IntegrationError(
            f'run.name = "{job.run.name}" and run.directory = "{job.run.directory}" have no effect '
            "in torchtitan: its run lives in the recipe's dump_folder; remove them"
        )
    path = Path(dump_folder).absolute()
    try:
        run = RunSection(
            **{**job.run.model_dump(), "name": path.name, "directory": str(path.parent)}
        )
    except ValueError:
        raise IntegrationError(
            f"dump_folder = {dump_folder!r} cannot hold a run's records: its last part must "
            "consist of letters, digits, dots, dashes and underscores, with a letter or a digit "
            "first"
        ) from None
    return job.model_copy(update={"run": run})
