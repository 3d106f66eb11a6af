"""Burst-buffer directives of a batch script: the site copies the data before the job starts.

Slurm hands the lines that begin with the site's directive to its burst-buffer plugin, which makes
room and copies files while the job still waits in the queue. What stands in them is the plugin's
own language: DataWarp's and Rabbit's are known here, another site's comes from the job file.

Sources: Slurm's Burst Buffer Guide; DataWarp User Guide (S-2558); the Near Node Flash project's
"Rabbit User Interactions".
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.cluster.staging.job import header_name, token_files_of
from outlast.cluster.staging.source import is_url
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outlast.job import Job, StagingSection

_LINES = {
    "datawarp": (
        "#DW jobdw type=scratch access_mode=striped capacity={gigabytes}GB",
        "#DW stage_in type=file source={source} destination=$DW_JOB_STRIPED/{name}",
    ),
    "rabbit": (
        "#DW jobdw type=xfs capacity={gigabytes}GB name=outlast",
        "#DW copy_in source={source} destination=$DW_JOB_outlast/{name}",
    ),
}
_SAFE = re.compile(r"[A-Za-z0-9@%+=:,./_~-]+")
_SPARE = 1.1


def directives(settings: StagingSection, files: Sequence[tuple[str, int]]) -> list[str]:
    """The lines for a batch script.

    Args:
        settings: The section [staging].
        files: Absolute path and size in bytes of every file that is to be copied.

    Returns:
        The lines, which belong after the #SBATCH lines and before the first command; none where
        staging.burst_buffer is off.

    Raises:
        ClusterError: A path cannot stand in a directive, or two files have one name.
    """
    if settings.burst_buffer == "off":
        return []
    names = [Path(path).name for path, _ in files]
    for (path, _), name in zip(files, names, strict=True):
        if not _SAFE.fullmatch(path):
            raise ClusterError(
                f"{path!r} cannot stand in a burst-buffer directive; give the file a name of "
                "letters, digits, dots, dashes and underscores"
            )
        if names.count(name) > 1:
            raise ClusterError(
                f"two files are called {name}, which would be one in the burst buffer; rename one"
            )
    templates = _LINES.get(settings.burst_buffer, tuple(settings.burst_buffer_lines))
    capacity = str(_gigabytes(settings, [size for _, size in files]))
    lines = []
    for template in templates:
        line = template.replace("{gigabytes}", capacity)
        if "{source}" in line or "{name}" in line:
            lines += [
                line.replace("{source}", path).replace("{name}", name)
                for (path, _), name in zip(files, names, strict=True)
            ]
        else:
            lines.append(line)
    return lines


def job_directives(job: Job) -> list[str]:
    """The lines for the batch script of a job, for its token files and their headers.

    Raises:
        ClusterError: As `directives`; also where a file does not exist, or is a URL.
    """
    if job.staging.burst_buffer == "off":
        return []
    return directives(job.staging, list(_files_with_headers(token_files_of(job))))


def _files_with_headers(files: Iterable[str]) -> Iterable[tuple[str, int]]:
    for file in files:
        if is_url(file):
            raise ClusterError(
                f"{file} is a URL, which a burst buffer cannot copy; set staging.burst_buffer to "
                '"off", and each node copies it itself'
            )
        path = Path(file).absolute()
        if not path.is_file():
            raise ClusterError(f"{path} does not exist, so no burst buffer can copy it")
        yield str(path), path.stat().st_size
        header = path.with_name(header_name(file) or path.name)
        if header != path and header.is_file():
            yield str(header), header.stat().st_size


def _gigabytes(settings: StagingSection, sizes: Iterable[int]) -> int:
    """Whole gigabytes (10^9 bytes) to ask for, at least one."""
    wanted = settings.burst_buffer_gigabytes or sum(sizes) * _SPARE / 1e9
    return max(math.ceil(wanted), 1)
