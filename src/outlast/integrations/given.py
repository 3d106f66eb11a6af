"""The settings that a script gives to what Outlast adds to it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.errors import IntegrationError
from outlast.job import LoopJob, load_loop_job
from outlast.job.section import toml_value

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence


def loop_job_of(
    job: str | os.PathLike[str] | LoopJob | None, settings: Sequence[str] = ()
) -> LoopJob:
    """The settings of a run, from a file and overrides or as they are.

    Raises:
        JobError: When a setting is wrong, or is one that the script decides.
        IntegrationError: When there are overrides and nothing that they go with.
    """
    if not isinstance(job, LoopJob):
        return load_loop_job(None if job is None else Path(job), [*settings])
    if settings:
        raise IntegrationError(
            f"settings = {[*settings]} change a file's settings, but job is a LoopJob already; "
            "leave them out"
        )
    return job


def with_section(section: str, values: dict[str, Any]) -> LoopJob:
    """The defaults with `values` for keys of one section.

    Raises:
        JobError: When a setting is wrong.
    """
    return load_loop_job(
        None, [f"{section}.{key}={toml_value(value)}" for key, value in values.items()]
    )
