"""``outlast run`` in one process: the script, what keeps its state, and how the run then stands."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.errors import EXIT_DONE, EXIT_TO_BE_CONTINUED
from outlast.integrations.pace import every_of, pace_of, seconds_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outlast.autosave.program.sites import Rewritten
    from outlast.cli.run_folder import RunFolder, Word
    from outlast.cli.run_handover import Library
    from outlast.cli.run_keeper import ScriptKeeper
    from outlast.cli.run_meeting import Begun
    from outlast.cli.run_start import Asked
    from outlast.distributed.ranks import Ranks
    from outlast.integrations.handed import HandedOver


@dataclass
class _Standing:
    """How a run stands that is under way, to be written down when it ends."""

    word: Word = "failed"
    step: int = 0


@dataclass
class _Stepped:
    """Whether an optimizer has made a step."""

    called: bool = False


def work(
    asked: Asked, files: list[Rewritten], folder: RunFolder, ranks: Ranks, begun: Begun
) -> int:
    """Run a script with training loops of its own; gives the exit code."""
    from outlast.autosave.execute import execute
    from outlast.autosave.resume.first_sizes import FirstSizes
    from outlast.cli.run_keeper import ScriptKeeper
    from outlast.integrations.stop import Stop

    pace = pace_of(every_of(asked.every), folder.pace, nodes=ranks.nodes, failed_before=begun.died)
    with _under_way(folder, ranks) as standing, Stop(_limit_seconds(asked)) as stop:
        keeper = ScriptKeeper(
            folder,
            pace,
            stop,
            rank=ranks.rank,
            world_size=ranks.world_size,
            keep=asked.keep,
        )
        try:
            code = execute(
                asked.script,
                files,
                asked.arguments,
                keeper,
                resuming=begun.resuming,
                first_sizes=FirstSizes(folder.path, ranks.rank),
            )
            keeper.raise_problem()
            code, standing.word = _ended(code, keeper, interrupted=stop.interrupted)
        finally:
            keeper.close(failed=standing.word == "failed")
            standing.step = keeper.step
    return code


def work_of_library(
    asked: Asked, files: list[Rewritten], folder: RunFolder, ranks: Ranks, library: Library
) -> int:
    """Run a script that is trained by a library's loop; gives the exit code."""
    from outlast.autosave.execute import execute_plainly
    from outlast.cli.run_handover import handing_over
    from outlast.integrations.handed import HandedOver

    handed = HandedOver(
        every=every_of(asked.every),
        stores=folder.library_stores,
        root=files[0].source.path.parent,
        limit_seconds=_limit_seconds(asked),
    )
    with _under_way(folder, ranks) as standing:
        if ranks.is_first:
            _say(f"{library.name} trains this script: it saves to Outlast's store and resumes")
        try:
            watching = _watching_steps(library, handed, speaks=ranks.is_first)
            with handing_over(library, handed), watching as stepped:
                code = execute_plainly(asked.script, files[0].source, asked.arguments)
            if code == EXIT_TO_BE_CONTINUED:
                standing.word = "stopped"
            elif code == EXIT_DONE:
                standing.word = "finished" if handed.trained else "stopped"
        finally:
            standing.step = handed.step
    if code == EXIT_DONE and ranks.is_first:
        if handed.trained:
            _say(f"finished after {handed.step} steps")
        else:
            kind = "warning: " if stepped.called else ""
            _say(
                f"{kind}the script ended without a training by {library.name}, so nothing was saved"
            )
    return code


@contextlib.contextmanager
def _watching_steps(library: Library, handed: HandedOver, *, speaks: bool) -> Iterator[_Stepped]:
    """Within, warn at once when the first step of an optimizer is none of the library's."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    stepped = _Stepped()

    def first(*_: object) -> None:
        watch.remove()
        stepped.called = True
        if speaks and not handed.trained:
            _say(
                f"warning: an optimizer steps before a training by {library.name} has begun; what "
                "is trained so is not saved, and is done anew at the next start"
            )

    watch = register_optimizer_step_pre_hook(first)
    try:
        yield stepped
    finally:
        watch.remove()


@contextlib.contextmanager
def _under_way(folder: RunFolder, ranks: Ranks) -> Iterator[_Standing]:
    """Within, the run is this process's, and is written down as running."""
    before = folder.outcome(ranks.rank)
    standing = _Standing(step=before.step if before else 0)
    lock = folder.lock() if ranks.is_first else None
    if lock is not None:
        lock.acquire()
    folder.record("running", standing.step, ranks.rank)
    try:
        yield standing
    finally:
        folder.record(standing.word, standing.step, ranks.rank)
        if lock is not None:
            lock.release()


def _limit_seconds(asked: Asked) -> float | None:
    limit = asked.time_limit
    return None if limit is None else seconds_of("--time-limit", limit)


def _ended(code: int, keeper: ScriptKeeper, *, interrupted: bool) -> tuple[int, Word]:
    """The exit code of the run, and how it stands."""
    if keeper.stopped:
        return keeper.code, "stopped"
    if code == EXIT_DONE and interrupted:
        # The script has caught it, and ends in its own way before its time.
        keeper.say(f"interrupted after {keeper.step} steps; the same command goes on")
        return EXIT_TO_BE_CONTINUED, "stopped"
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
