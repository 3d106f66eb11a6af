"""The section [staging]: where each node keeps its own copy of the data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from outlast.job.section import Positive, Section, setting

Gigabytes = Annotated[float, Field(ge=0.0)]
MegabytesPerSecond = Annotated[float, Field(ge=0.0)]


def _directive(line: str) -> str:
    if line.startswith("#") and not line.startswith(("#!", "#SBATCH")) and line.isprintable():
        return line
    right = (
        'one line that begins with the site\'s directive, such as "#BB ...", "#DW ...", "#DB ..."'
    )
    raise PydanticCustomError("directive", "{right}", {"right": right})


Directive = Annotated[str, AfterValidator(_directive)]


class StagingSection(Section):
    """Where each node keeps its own copy of the tokens, made once for all its processes."""

    directory: str = setting(
        "",
        "directory of the node's own disk or memory, e.g. $SLURM_TMPDIR, /local or /dev/shm; "
        "empty: tokens are read where they are",
        identity=False,
    )
    limit_gigabytes: Gigabytes = setting(
        0.0,
        "most that all copies of this user may take there (10^9 bytes); those used longest ago go "
        "first, never one that a live process uses; 0: no limit but the disk",
        identity=False,
    )
    keep_free_gigabytes: Gigabytes = setting(
        1.0, "what is to stay free on that disk (10^9 bytes)", identity=False
    )
    required: bool = setting(
        False,
        "stop where a copy cannot be made; false: read in place, with a warning (a URL is always "
        "required)",
        identity=False,
    )
    wait: bool = setting(
        True,
        "begin when the copies are there; false: where there is none yet, read in place and leave "
        "the copying to the prefetch beside training, for the next link (a URL is waited for)",
        identity=False,
    )
    prefetch: bool = setting(
        True,
        "in a chain, copy what a node lacks beside training, once that is under way, for the next "
        "link",
        identity=False,
    )
    prefetch_megabytes_per_s: Annotated[float, Field(gt=0.0)] = setting(
        200.0,
        "most that a node takes for the next link; half of what it gets when others want it too",
        identity=False,
    )
    megabytes_per_s: MegabytesPerSecond = setting(
        0.0,
        "most that a node takes while its processes wait for a copy; 0: no limit",
        identity=False,
    )
    read_back: bool = setting(
        True, "read each new copy from the disk once and compare its digest", identity=False
    )
    timeout_seconds: Annotated[float, Field(gt=0.0)] = setting(
        3600.0, "longest time for one copy, and for waiting for it", identity=False
    )
    block_megabytes: Positive = setting(8, "size of one read of the source (MiB)", identity=False)
    read_ahead: Positive = setting(4, "reads of the source on the way at once", identity=False)
    burst_buffer: Literal["off", "datawarp", "rabbit", "lines"] = setting(
        "off",
        "have the site copy the files of data.train and data.validation before the job starts: "
        "directives for DataWarp or Rabbit, or those of staging.burst_buffer_lines; "
        "staging.directory is then where they appear, e.g. $DW_JOB_STRIPED or $DW_JOB_outlast",
        identity=False,
    )
    burst_buffer_gigabytes: Gigabytes = setting(
        0.0, "capacity to ask for; 0: the size of the files and a tenth more", identity=False
    )
    burst_buffer_lines: list[Directive] = setting(
        [],
        "the site's own directives, as in its manual; {gigabytes} is the capacity, and a line with "
        "{source} is repeated for every file, {name} being its name without folders",
        identity=False,
    )
