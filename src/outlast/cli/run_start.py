"""The start of ``outlast run``: which run it is, whether it may go on, and how it is composed."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.cli.run_folder import RunFolder, folder_of
from outlast.errors import EXIT_DONE
from outlast.integrations.pace import every_of, pace_of, seconds_of

if TYPE_CHECKING:
    from outlast.autosave.program.sites import Rewritten
    from outlast.cli.run_folder import Word
    from outlast.cli.run_keeper import ScriptKeeper
    from outlast.train.ranks import Ranks


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
    from outlast.train.ranks import ALONE, Ranks, launched_by, ranks_from

    every_of(asked.every)
    if asked.time_limit is not None:
        seconds_of("--time-limit", asked.time_limit)
    files = read_and_rewrite(asked.script, asked.loop)
    folder = folder_of(asked.script.resolve(), asked.arguments, asked.directory)
    alone = launched_by(os.environ) == "alone"
    ranks = ALONE if alone else ranks_from(os.environ)
    if ranks.launch == "srun":
        _set_environment(ranks)
    launches = alone and processes is not None
    if launches:
        ranks = Ranks(0, processes or 1, 0, processes or 1, "nproc")
    if ranks.is_first:
        _prepare(asked, files, folder, ranks.world_size)
    if folder.is_finished:
        if ranks.is_first:
            last = folder.outcome()
            assert last is not None
            _say(
                f"this run has finished ({last.when}, {last.step} steps); --fresh moves it aside "
                "and starts anew"
            )
        return EXIT_DONE
    if launches:
        from outlast.cli.run_launch import launch

        return launch(ranks.world_size, asked.of_process())
    return _work(asked, files, folder, ranks)


def _set_environment(ranks: Ranks) -> None:
    """Under srun, what torchrun would have set for the script; what is set stays."""
    from outlast.train.ranks import rendezvous_address

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
    for sentence in folder.begin(now, accept_changes=asked.accept_changes):
        _say(f"warning: {sentence}")


def _work(asked: Asked, files: list[Rewritten], folder: RunFolder, ranks: Ranks) -> int:
    """Run the script in this process."""
    from outlast.autosave.execute import execute
    from outlast.cli.run_keeper import ScriptKeeper
    from outlast.integrations.stop import Stop

    before = folder.outcome()
    died = before is not None and before.word == "running"
    lock = folder.lock() if ranks.is_first else None
    if lock is not None:
        lock.acquire()
        folder.record("running", before.step if before else 0)
    pace = pace_of(every_of(asked.every), folder.pace, nodes=ranks.nodes, failed_before=died)
    limit = asked.time_limit
    with Stop(None if limit is None else seconds_of("--time-limit", limit)) as stop:
        keeper = ScriptKeeper(
            folder,
            pace,
            stop,
            rank=ranks.rank,
            world_size=ranks.world_size,
            keep=asked.keep,
        )
        code = 1
        word: Word = "failed"
        try:
            resuming = folder.has_versions()
            code = execute(asked.script, files, asked.arguments, keeper, resuming=resuming)
            keeper.raise_problem()
            code, word = _ended(code, keeper)
        finally:
            keeper.close(failed=word == "failed")
            if lock is not None:
                folder.record(word, keeper.step)
                lock.release()
    return code


def _ended(code: int, keeper: ScriptKeeper) -> tuple[int, Word]:
    """The exit code of the run, and how it stands."""
    if keeper.stopped:
        return keeper.code, "stopped"
    if code != EXIT_DONE:
        return code, "failed"
    if not keeper.has_begun:
        keeper.say(
            "the script ended without a step of the training loops that were found in it, so "
            "nothing was saved; processes that it starts itself are not seen: start them with "
            "--nproc or torchrun"
        )
        return code, "stopped"
    keeper.say(f"finished after {keeper.step} steps")
    return code, "finished"


def _say(text: str) -> None:
    print(f"outlast: {text}", file=sys.stderr, flush=True)
