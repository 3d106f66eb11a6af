"""Training data on the nodes that read it: the section [staging] of a job.

    from outlast.cluster.staging import Stage
    stage = Stage(Path("/local/scratch"), limit_bytes=200 << 30)
    copy = stage.fetch("s3://corpus/train.bin", beside=["train.json"])   # one process copies
    copy.path                                                            # on the node's own disk

A stager for the trainer, prefetching, burst-buffer directives. As a program, ``python -m
outlast.cluster.staging [--beside-training] JOB.TOML [section.key=value ...]`` prefetches on this
node, for `prefetch_command`, once on each; ``outlast cluster prefetch`` does the same for a person.
With --beside-training it makes way for what else runs there.

A burst buffer: Slurm hands the lines that begin with the site's directive to its plugin, which
makes room and copies files while the job still waits in the queue. They are in the plugin's own
language: DataWarp's and Rabbit's are known here, another site's comes from the job file. Sources:
Slurm's Burst Buffer Guide; DataWarp User Guide (S-2558); the Near Node Flash project's "Rabbit User
Interactions".
"""

from __future__ import annotations

import glob
import json
import math
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.cluster.copying import ReadAhead, is_url
from outlast.cluster.pace import GentlePace, TokenBucket
from outlast.cluster.stage import Stage, StagedCopy
from outlast.errors import EXIT_BAD_INPUT, EXIT_DONE, ClusterError, OutlastError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from outlast.cluster.copying import Pace
    from outlast.job import Job, StagingSection


BESIDE = "--beside-training"
_NICE = 19
_NOT_YET = "this node has no copy yet"
_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})")


@dataclass(frozen=True)
class NodeStager:
    """Gets one token file to this node, as [staging] says; travels to worker processes.

    Attributes:
        settings: The section, with a directory.
        most_bytes_per_s: Most that a node may take by a plan; 0: no limit but that of the section.
        pace: Of all copies together, for a prefetch that makes way for others; it does not travel.
    """

    settings: StagingSection
    most_bytes_per_s: float = 0.0
    pace: Pace | None = None

    @property
    def timeout_seconds(self) -> float:
        """Longest time that one file may take."""
        return self.settings.timeout_seconds

    def __call__(
        self,
        source: str,
        beside: tuple[str, ...] = (),
        digest: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> StagedCopy:
        """Get a file to this node; with staging.wait = false, only if it is there already.

        With a burst buffer, a file of its name and size in staging.directory is the site's copy
        and is used as it is.

        Args:
            source: Path, or URL.
            beside: Names beside it that belong to it.
            digest: xxh3-128 that it must have, where that is known.
            progress: Called with (bytes there, bytes in all).

        Raises:
            ClusterError: There can be no copy, and it is required or the source is a URL.
        """
        try:
            if (given := self._given(source, beside)) is not None:
                return given
            stage = self._stage()
            if not self.settings.wait and not is_url(source):
                found = stage.find(source, beside=beside, digest=digest)
                return found if found is not None else _in_place(source, _NOT_YET)
            return stage.fetch(source, beside=beside, digest=digest, progress=progress)
        except ClusterError as error:
            if self.settings.required or is_url(source) or not Path(source).exists():
                raise
            return _in_place(source, f"{error}", "staging.required = false")

    def _stage(self) -> Stage:
        """The stage of this node."""
        settings, pace = self.settings, self.pace
        if pace is None:
            caps = [1e6 * settings.megabytes_per_s, self.most_bytes_per_s]
            pace = TokenBucket(min(cap for cap in caps if cap)) if any(caps) else None
        return Stage(
            directory_of(settings),
            limit_bytes=round(settings.limit_gigabytes * 1e9),
            keep_free_bytes=round(settings.keep_free_gigabytes * 1e9),
            timeout_seconds=settings.timeout_seconds,
            read_back=settings.read_back,
            ahead=ReadAhead(settings.block_megabytes << 20, settings.read_ahead),
            pace=pace,
        )

    def _given(self, source: str, beside: tuple[str, ...]) -> StagedCopy | None:
        if self.settings.burst_buffer == "off" or is_url(source):
            return None
        folder, original = directory_of(self.settings), Path(source)
        wanted = [original, *(original.with_name(name) for name in beside)]
        size = 0
        for item in (file for file in wanted if file.exists()):
            path = folder / item.name
            if not path.is_file() or path.samefile(item):
                return None
            if path.stat().st_size != item.stat().st_size:
                return None
            size += path.stat().st_size
        return StagedCopy(folder / original.name, source, size) if size else None


def stager_for(settings: StagingSection, most_bytes_per_s: float = 0.0) -> NodeStager | None:
    """The stager that [staging] asks for; None where it names no directory.

    Args:
        settings: The section.
        most_bytes_per_s: Most that a node may take by a plan; 0: no limit but that of the section.
    """
    return NodeStager(settings, most_bytes_per_s) if settings.directory else None


def _in_place(source: str, why: str, setting: str = "staging.wait = false") -> StagedCopy:
    size = Path(source).stat().st_size
    return StagedCopy(
        Path(source), source, size, problem=f"{why}; {source} is read in place ({setting})"
    )


def directory_of(settings: StagingSection, environment: Mapping[str, str] = os.environ) -> Path:
    """staging.directory with this node's environment variables in it.

    Raises:
        ClusterError: A variable is not set, or the path is not absolute.
    """

    def value(match: re.Match[str]) -> str:
        name = match.group(1).strip("{}")
        if not environment.get(name):
            raise ClusterError(
                f"staging.directory = {settings.directory!r} needs the environment variable "
                f"{name}, which is not set on this node; set it or name a directory"
            )
        return environment[name]

    return Path(_VARIABLE.sub(value, settings.directory)).expanduser().absolute()


def token_files_of(job: Job) -> list[str]:
    """The token files that the processes of a job will open, as far as they are there now.

    Text is tokenised into the run's directory when it first starts; before that there are none.
    """
    if job.data.source == "tokens":
        found = []
        for name in (*job.data.train, *job.data.validation):
            path = name if is_url(name) else str(Path(name).expanduser())
            matches = [] if is_url(name) else sorted(glob.glob(path, recursive=True))  # noqa: PTH207
            found += matches or [path]
        return found
    folder = Path(job.run.directory) / job.run.name / "data"
    files = [folder / name for name in ("train.bin", "validation.bin")]
    return [str(file) for file in files if file.is_file()]


def header_name(file: str) -> str:
    """Name of the header beside a `.bin` file; empty for others, which have none."""
    name = file.rpartition("/")[2]
    return name.removesuffix(".bin") + ".json" if name.endswith(".bin") else ""


def stated_digest(file: str) -> str | None:
    """The xxh3-128 that a token file's header states (docs/data.md); None without one."""
    if is_url(file) or not header_name(file):
        return None
    try:
        header = json.loads(Path(file).with_name(header_name(file)).read_bytes())
        return str(header["file_hash"]) if header["format"] == "outlast-tokens" else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def prefetch(
    job: Job, *, beside_training: bool = False, progress: Callable[[int, int], None] | None = None
) -> list[StagedCopy]:
    """Get the tokens of a job to this node before its processes ask for them.

    To be called once on each node (`srun --ntasks-per-node=1`) while the link before is still
    training, or as the first thing of a link; processes that start meanwhile wait for what is
    already on its way. The copies stay when this process ends. Nothing is done where
    staging.directory is empty, and nothing is tokenised.

    Args:
        job: Checked.
        beside_training: Whether to take at most staging.prefetch_megabytes_per_s, and less where
            others want the same bandwidth.
        progress: Called with (bytes there, bytes in all) of a file.

    Raises:
        ClusterError: A copy cannot be made.
    """
    if not job.staging.directory:
        return []
    settings = job.staging.model_copy(update={"required": True, "wait": True})
    pace = None
    if beside_training:
        # What one copy has learnt of the file system, the next one knows.
        pace = GentlePace.below(1e6 * settings.prefetch_megabytes_per_s)
    required = NodeStager(settings, pace=pace)
    found = []
    for source in token_files_of(job):
        beside = tuple(name for name in (header_name(source),) if name)
        found.append(required(source, beside, stated_digest(source), progress))
    return found


def told(job: Job, copies: Sequence[StagedCopy]) -> list[str]:
    """Report of `prefetch` for a job, a line for each file."""
    if not job.staging.directory:
        return ["nothing to do: staging.directory is empty, so tokens are read where they are"]
    if not copies:
        return ["nothing to do yet: the text is tokenised when the run first starts"]
    lines = []
    for copy in copies:
        size = f"{copy.bytes / 1e6:,.1f} MB"
        if not copy.copied_bytes:
            lines.append(f"{copy.source}: {size} are at {copy.path} already")
            continue
        rate = copy.copied_bytes / 1e6 / max(copy.seconds, 1e-9)
        line = f"{copy.source}: {size} to {copy.path} in {copy.seconds:.1f} s ({rate:,.0f} MB/s)"
        lines.append(line + "".join(f"; evicted {name}" for name in copy.evicted))
    return lines


def prefetch_command(
    python: str, job_file: Path, nodes: int, *, beside_training: bool = False
) -> tuple[str, ...]:
    """The words that prefetch on every node of a Slurm job, beside what else runs there.

    Args:
        python: The interpreter.
        job_file: The job, as every node sees it.
        nodes: Number of nodes.
        beside_training: As for `prefetch`.
    """
    spread = ("--overlap", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1")
    options = (BESIDE,) if beside_training else ()
    return ("srun", *spread, python, "-m", "outlast.cluster.staging", *options, str(job_file))


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
    wanted = settings.burst_buffer_gigabytes or sum([size for _, size in files]) * _SPARE / 1e9
    capacity = str(max(math.ceil(wanted), 1))
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
    found: list[tuple[str, int]] = []
    for file in token_files_of(job) if job.staging.burst_buffer != "off" else ():
        if is_url(file):
            raise ClusterError(
                f"{file} is a URL, which a burst buffer cannot copy; set staging.burst_buffer to "
                '"off", and each node copies it itself'
            )
        path = Path(file).absolute()
        if not path.is_file():
            raise ClusterError(f"{path} does not exist, so no burst buffer can copy it")
        header = path.with_name(header_name(file) or path.name)
        both = [path, header] if header != path and header.is_file() else [path]
        found += [(str(item), item.stat().st_size) for item in both]
    return directives(job.staging, found)


def main(arguments: list[str]) -> int:
    """Prefetch the tokens of a job; returns the exit code."""
    from outlast.job import load_job

    beside = arguments[:1] == [BESIDE]
    arguments = arguments[1:] if beside else arguments
    if not arguments:
        print(__doc__, file=sys.stderr)
        return EXIT_BAD_INPUT
    try:
        job = load_job(Path(arguments[0]), arguments[1:])
        if beside:
            os.nice(_NICE)
        print("\n".join(told(job, prefetch(job, beside_training=beside))), flush=True)
    except OutlastError as error:
        print(f"outlast: {error}", file=sys.stderr, flush=True)
        return EXIT_BAD_INPUT
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
