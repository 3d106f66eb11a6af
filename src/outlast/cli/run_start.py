"""The start of ``outlast run``: which run it is, whether it may go on, and how it is composed."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.cli.misplaced import say_options_behind
from outlast.cli.run_folder import RunFolder, folder_of
from outlast.cli.run_meeting import Begun, begin_together
from outlast.cli.run_work import work, work_of_library
from outlast.errors import EXIT_BAD_INPUT, EXIT_CRASHED, EXIT_DONE
from outlast.integrations.pace import every_of, seconds_of

if TYPE_CHECKING:
    from outlast.autosave.program.sites import Rewritten
    from outlast.distributed.ranks import Ranks

_OWN = (
    "--every",
    "--directory",
    "--keep",
    "--time-limit",
    "--nproc",
    "--fresh",
    "--accept-changes",
    "--loop",
    "--explain",
)


@dataclass(frozen=True)
class Asked:
    """What the command line asks for; texts are as they stand there.

    Attributes:
        script: The script.
        arguments: Of the script.
        every: How often to save.
        directory: Where to save; None for the usual place.
        keep: Newest versions kept.
        time_limit: After how long to stop, or None.
        fresh: Whether to move an earlier run aside.
        accept_changes: Whether to go on with a changed program.
        loop: ``FILE:LINE`` of the script's step loop, or None.
    """

    script: Path
    arguments: tuple[str, ...] = ()
    every: str = "auto"
    directory: Path | None = None
    keep: int = 2
    time_limit: str | None = None
    fresh: bool = False
    accept_changes: bool = False
    loop: str | None = None

    def of_process(self) -> list[str]:
        """Arguments of ``outlast run`` for a process whose launcher has prepared the folder."""
        given = [f"--every={self.every}", f"--keep={self.keep}"]
        if self.directory is not None:
            given.append(f"--directory={self.directory}")
        if self.time_limit is not None:
            given.append(f"--time-limit={self.time_limit}")
        if self.loop is not None:
            given.append(f"--loop={self.loop}")
        return [*given, str(self.script), *self.arguments]


def run_script(asked: Asked, processes: int | None = None) -> int:
    """Run a script as the environment says: one process of several, a launcher, or alone.

    Returns:
        The exit code.
    """
    from outlast.cli.run_program import read_and_rewrite
    from outlast.distributed.ranks import ALONE, Ranks, launched_by, ranks_from

    every_of(asked.every)
    if asked.time_limit is not None:
        seconds_of("--time-limit", asked.time_limit)
    files, library = read_and_rewrite(asked.script, asked.loop)
    folder = folder_of(asked.script.resolve(), asked.arguments, asked.directory)
    # A library goes on with any number of processes.
    look = functools.partial(_begun, asked, files, folder, malleable=library is not None)
    alone = launched_by(os.environ) == "alone"
    ranks = ALONE if alone else ranks_from(os.environ)
    if ranks.launch == "srun":
        _set_environment(ranks)
    if ranks.is_first and (alone or ranks.launch != "nproc"):
        texts = [file.source.text for file in files]
        say_options_behind(asked.script, asked.arguments, _OWN, texts, "outlast run")
    if alone and processes is not None:
        ranks = Ranks(0, processes, 0, processes, "nproc")
        begun = look(ranks)
        if begun.finished:
            return EXIT_DONE
        from outlast.cli.run_launch import launch

        return launch(ranks.world_size, asked.of_process())
    begun = begin_together(ranks, folder.path, lambda: look(ranks))
    if begun.problem:
        return EXIT_CRASHED if begun.crashed else EXIT_BAD_INPUT
    if begun.finished:
        return EXIT_DONE
    if library is not None:
        return work_of_library(asked, files, folder, ranks, library)
    return work(asked, files, folder, ranks, begun)


def _begun(
    asked: Asked, files: list[Rewritten], folder: RunFolder, ranks: Ranks, *, malleable: bool
) -> Begun:
    """Prepare the run on rank 0, and see how it stands."""
    if ranks.is_first:
        _prepare(asked, files, folder, 1 if malleable else ranks.world_size)
    elif asked.fresh:
        # What is here is of the earlier run, which rank 0 may not have moved aside yet.
        return Begun()
    words = folder.words(ranks.world_size)
    finished = all(word == "finished" for word in words)
    if finished and ranks.is_first and (last := folder.outcome()) is not None:
        _say(
            f"this run has finished ({last.when}, {last.step} steps); --fresh moves it aside and "
            "starts anew"
        )
    return Begun(finished=finished, resuming=folder.has_versions(), died="running" in words)


def _set_environment(ranks: Ranks) -> None:
    """Under srun, what torchrun would have set for the script; what is set stays."""
    from outlast.distributed.ranks import rendezvous_address

    address, port = rendezvous_address(os.environ)
    values = {
        "RANK": ranks.rank,
        "WORLD_SIZE": ranks.world_size,
        "LOCAL_RANK": ranks.local_rank,
        "LOCAL_WORLD_SIZE": ranks.local_world_size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    for name, value in values.items():
        os.environ.setdefault(name, str(value))


def _prepare(asked: Asked, files: list[Rewritten], folder: RunFolder, world_size: int) -> None:
    """On rank 0: see that the run may go on as this program.

    Raises:
        AutosaveError: When it is a run of another one.
    """
    import torch

    from outlast.autosave.identity import identity_of

    if asked.fresh and (old := folder.move_aside()) is not None:
        _say(f"moved the earlier run to {old}")
    now = identity_of(files, asked.arguments, world_size, str(torch.__version__))
    root = files[0].source.path.parent
    for sentence in folder.begin(now, root, accept_changes=asked.accept_changes):
        _say(f"warning: {sentence}")


def _say(text: str) -> None:
    print(f"outlast: {text}", file=sys.stderr, flush=True)
