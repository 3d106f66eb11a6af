"""The same parts inside other training loops: a script's own, or another framework's.

A module that is named after a framework is the only one that imports it. Here is what each of them
begins with: the check of the framework's version, and the settings that a script gives.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.errors import IntegrationError

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from outlast.job import CheckpointSection, LoopJob


def require(package: str, lowest: str, below: str) -> None:
    """See that `package` is installed in a version of at least `lowest` and below `below`.

    Raises:
        IntegrationError: With the versions that work and the command that installs one.
    """
    wanted = f'{package} from {lowest} to below {below}: pip install "{package}>={lowest},<{below}"'
    try:
        found = version(package)
    except PackageNotFoundError:
        raise IntegrationError(
            f"{package} is not installed; this adapter works with {wanted}"
        ) from None
    if not _release(lowest) <= _release(found) < _release(below):
        raise IntegrationError(f"{package} {found} is installed; this adapter works with {wanted}")


def _release(text: str) -> tuple[int, ...]:
    """The leading numbers of a version, e.g. (0, 3, 1) of ``0.3.1.dev2+cpu``."""
    numbers: list[int] = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def loop_job_of(
    job: str | os.PathLike[str] | LoopJob | None,
    settings: Sequence[str] = (),
    sections: Mapping[str, Mapping[str, Any]] | None = None,
) -> LoopJob:
    """The settings of a run.

    Args:
        job: A file that ends in ``.toml``, a run directory, or the settings as they are; None: all
            defaults.
        settings: Overrides of the form ``section.key=value``.
        sections: Values by section and key.

    Raises:
        JobError: When a setting is wrong, or is one that the script decides.
        IntegrationError: When there are overrides and nothing that they go with, or `job` names no
            run directory.
    """
    from outlast.job import LoopJob, load_loop_job

    if isinstance(job, LoopJob):
        given = {**({"settings": [*settings]} if settings else {}), **(sections or {})}
        if given:
            said = ", ".join(f"{name} = {values}" for name, values in given.items())
            raise IntegrationError(
                f"{said} change a file's settings, but job is a LoopJob already; leave them out"
            )
        return job
    if job is None or Path(job).suffix == ".toml" or Path(job).is_file():
        return load_loop_job(None if job is None else Path(job), [*settings], sections)
    folder = Path(job).absolute()
    if folder.suffix in (".json", ".yaml", ".yml"):
        raise IntegrationError(f"{job} is no run directory, and a job file ends in .toml")
    own = {"name": folder.name, "directory": str(Path(job).parent)}
    return load_loop_job(None, [*settings], {**(sections or {}), "run": own})


def with_section(section: str, values: dict[str, Any]) -> LoopJob:
    """The defaults with `values` for keys of one section.

    Raises:
        JobError: When a setting is wrong.
    """
    from outlast.job import load_loop_job

    return load_loop_job(sections={section: values})


def unfollowed(
    settings: CheckpointSection, followed: Collection[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Keys of [checkpoint] that differ from their defaults but have no effect, and their values.

    Args:
        settings: As the script gives them.
        followed: Keys that have an effect in its framework.
    """
    for name, field in type(settings).model_fields.items():
        if name not in followed and (value := getattr(settings, name)) != field.default:
            yield name, value


def in_folder(
    job: LoopJob, folder: str, *, setting: str, framework: str, owner: str = ""
) -> LoopJob:
    """`job` with a folder that the framework names as its run directory.

    Args:
        job: The settings.
        folder: Of the framework's own files.
        setting: Of the framework, which names it.
        framework: For the errors.
        owner: Of the setting, for the errors.

    Raises:
        IntegrationError: When the job names another, or the folder's name does not do.
    """
    from outlast.job.sections import RunSection

    plain, own = RunSection(), job.run
    if (own.name, own.directory) != (plain.name, plain.directory):
        raise IntegrationError(
            f'run.name = "{own.name}" and run.directory = "{own.directory}" have no effect in '
            f"{framework}: its run lives in {owner}{setting}; remove them"
        )
    path = Path(folder).absolute()
    try:
        run = RunSection(**{**own.model_dump(), "name": path.name, "directory": str(path.parent)})
    except ValueError:
        raise IntegrationError(
            f"{setting} = {folder!r} cannot hold a run's records: its last part must consist of "
            "letters, digits, dots, dashes and underscores, with a letter or a digit first"
        ) from None
    return job.model_copy(update={"run": run})
