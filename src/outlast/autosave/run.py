"""``outlast run``: its start, the script in one process or several, and its outcome.

Rendezvous of the processes of ``outlast run``: rank 0 prepares the run, and all follow it.

Rank 0 may move an earlier run aside and makes the folder of this one; what others saw there before
or meanwhile means nothing. They hear of it before the script has made a process group: under
torchrun through the store of its agent, under srun through a file in the run's folder. Both outlive
a launch, so every word of rank 0 has a mark of its own, and no rank hears the same one twice.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.autosave.run_folder import RunFolder, folder_of
from outlast.errors import (
    EXIT_BAD_INPUT,
    EXIT_CRASHED,
    EXIT_DONE,
    EXIT_TO_BE_CONTINUED,
    AutosaveError,
    OutlastError,
)
from outlast.records import replace_file
from outlast.runtime.cadence import cadence_of, every_of, seconds_of
from outlast.runtime.stop import say_interrupted, signals_taken

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from types import FrameType

    from torch.distributed import PrefixStore

    from outlast.autosave.keeper import ScriptKeeper
    from outlast.autosave.libraries import HandedOver, Library
    from outlast.autosave.program.source import Rewritten
    from outlast.autosave.run_folder import Word
    from outlast.distributed.ranks import Ranks
    from outlast.runtime.stop import JobChain


_DEADLINE_SECONDS = 600.0


_PAUSE_SECONDS = 0.05


_WORD = "begun"


@dataclass(frozen=True)
class Begun:
    """Findings of rank 0.

    Attributes:
        finished: Whether the run has come to its end already.
        resuming: Whether there may be a state to go back to.
        died: Whether the start before this one came to no end on some rank.
        problem: Why the run cannot begin; rank 0 says it itself.
        crashed: Whether that is an error of the program, not of what it was given.
    """

    finished: bool = False
    resuming: bool = False
    died: bool = False
    problem: str = ""
    crashed: bool = False


def rendezvous(ranks: Ranks, folder: Path, look: Callable[[], Begun]) -> Begun:
    """Return the findings of rank 0, on every rank.

    Processes that are joined by neither torchrun nor srun look each for itself.

    Args:
        ranks: This process among the others.
        folder: Of the run.
        look: Prepares the run on rank 0.

    Raises:
        Exception: On rank 0, what `look` raises.
        AutosaveError: When rank 0 does not say within ten minutes, or cannot.
    """
    way = _way(os.environ, folder) if ranks.world_size > 1 else None
    if way is None:
        return look()
    names, board = way
    # The name of this launch, as far as its ranks know it.
    launch = ".".join([*(os.environ.get(name, "0") for name in names), str(ranks.world_size)])
    if not ranks.is_first:
        return _hear(board, launch, ranks.rank)

    def tell(begun: Begun) -> None:
        board.put(_WORD, json.dumps([launch, uuid.uuid4().hex, asdict(begun)]))

    try:
        begun = look()
    except Exception as error:
        known = isinstance(error, OutlastError)
        problem = str(error) if known else f"{type(error).__name__}: {error}"
        # That it cannot be told hides nothing of what has happened.
        with contextlib.suppress(Exception):
            tell(Begun(problem=problem, crashed=not known))
        raise
    tell(begun)
    return begun


def _way(environment: Mapping[str, str], folder: Path) -> tuple[list[str], _Store | _Files] | None:
    """Variables that tell this launch from others, and where its ranks meet."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"], _Store(environment)
    if "SLURM_STEP_ID" in environment and "SLURM_JOB_ID" in environment:
        return ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"], _Files(folder)
    return None


def _hear(board: _Store | _Files, launch: str, rank: int) -> Begun:
    """The word of rank 0 in this launch, which this rank has not heard before.

    Raises:
        AutosaveError: When there is none in time.
    """
    heard = f"{_WORD}.rank{rank}"
    deadline = time.monotonic() + _DEADLINE_SECONDS
    try:
        last = board.get(heard)
        while time.monotonic() < deadline:
            with contextlib.suppress(ValueError):
                of, mark, begun = json.loads(board.get(_WORD) or "[]")
                if of == launch and mark != last:
                    board.put(heard, mark)
                    return Begun(**begun)
            time.sleep(_PAUSE_SECONDS)
        reason = f"there is no word of this launch in {board.where}"
    # That of torch's store is the first.
    except (RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0]
    raise AutosaveError(
        f"rank 0 did not say within {_DEADLINE_SECONDS:g} s how the run begins ({reason}); see "
        "what it printed"
    )


class _Store:
    """The store of torchrun's agent."""

    where = "the store of torchrun's agent"

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])

    def put(self, name: str, text: str) -> None:
        """Write a text down under a name of its own."""
        self._store.set(name, text)

    def get(self, name: str) -> str | None:
        """The text of that name; None where there is none yet."""
        return str(self._store.get(name).decode()) if self._store.check([name]) else None

    @functools.cached_property
    def _store(self) -> PrefixStore:
        from torch.distributed import PrefixStore, TCPStore

        timeout = timedelta(seconds=_DEADLINE_SECONDS)
        store = TCPStore(*self._address, is_master=False, wait_for_workers=False, timeout=timeout)
        return PrefixStore("outlast/run", store)


class _Files:
    """Files in the folder of the run, which rank 0 makes if only to say why it is not made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.where = str(folder / f"{_WORD}.json")

    def put(self, name: str, text: str) -> None:
        """As that of the store."""
        self._folder.mkdir(parents=True, exist_ok=True)
        replace_file(self._folder / f"{name}.json", text.encode())

    def get(self, name: str) -> str | None:
        """As that of the store.

        Raises:
            OSError: When rank 0 cannot write here, so that there will never be one.
        """
        place = next(parent for parent in (self._folder, *self._folder.parents) if parent.exists())
        if not (place.is_dir() and os.access(place, os.W_OK)):
            raise OSError(f"{place} cannot be written")
        try:
            return (self._folder / f"{name}.json").read_text(encoding="utf-8")
        except FileNotFoundError:
            return None


@dataclass
class _Standing:
    """Outcome of a run under way, to be written down when it ends."""

    word: Word = "failed"
    step: int = 0


def work(
    asked: RunOptions,
    files: list[Rewritten],
    folder: RunFolder,
    ranks: Ranks,
    begun: Begun,
    *,
    chain: JobChain,
) -> int:
    """Run a script with training loops of its own; gives the exit code."""
    from outlast.autosave.keeper import ScriptKeeper
    from outlast.autosave.resume.files import FirstSizes
    from outlast.autosave.resume.session import execute
    from outlast.runtime.stop import Stop

    cadence = cadence_of(
        every_of(asked.every), folder.pace, nodes=ranks.nodes, failed_before=begun.died
    )
    with _under_way(folder, ranks) as standing, Stop(asked.limit_seconds, chain=chain) as stop:
        keeper = ScriptKeeper(folder, cadence, stop, ranks, keep=asked.keep, chain=chain)
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
    asked: RunOptions, files: list[Rewritten], folder: RunFolder, ranks: Ranks, library: Library
) -> int:
    """Run a script that is trained by a library's loop; gives the exit code."""
    from outlast.autosave.libraries import HandedOver, handing_over
    from outlast.autosave.resume.session import execute_plainly

    handed = HandedOver(
        every=every_of(asked.every),
        stores=folder.library_stores,
        root=files[0].source.path.parent,
        limit_seconds=asked.limit_seconds,
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
            kind = "warning: " if stepped else ""
            _say(
                f"{kind}the script ended without a training by {library.name}, so nothing was saved"
            )
    return code


@contextlib.contextmanager
def _watching_steps(library: Library, handed: HandedOver, *, speaks: bool) -> Iterator[list[bool]]:
    """Within, warn at once when the first step of an optimizer is none of the library's.

    What it gives holds something once there was a step.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    stepped: list[bool] = []

    def first(*_: object) -> None:
        watch.remove()
        stepped.append(True)
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
    with contextlib.ExitStack() as end:
        if ranks.is_first:
            lock = folder.lock()
            lock.acquire()
            end.callback(lock.release)
        folder.record("running", standing.step, ranks.rank)
        try:
            yield standing
        finally:
            folder.record(standing.word, standing.step, ranks.rank)


def _ended(code: int, keeper: ScriptKeeper, *, interrupted: bool) -> tuple[int, Word]:
    """The exit code of the run, and how it stands."""
    if keeper.stopped:
        return keeper.code, "stopped"
    if code == EXIT_DONE and interrupted:
        # The script has caught it, and ends in its own way before its time.
        keeper.say(f"interrupted after {keeper.step} steps; the same command continues")
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


_MONITOR_SECONDS = 0.1


_interrupts: list[int] = []


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Run ``outlast run ARGUMENTS`` in so many processes, and wait for them.

    SIGTERM, SIGUSR1 and SIGINT are passed on to them, so that they save and end together.

    Returns:
        0 when all have come to their end, else the exit code of the first that has not.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if processes > 1:
        # As torchrun does: the processes share the cores.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The processes need not say again what this one has said.
    os.environ["OUTLAST_LAUNCH"] = "nproc"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=f"outlast-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=_MONITOR_SECONDS,
        # The stop signals are ours: elastic would end the processes before they have saved.
        signals_to_handle="SIGQUIT",
    )
    try:
        with signals_taken(_forward):
            elastic_launch(config, sys.executable)("-m", "outlast", "run", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return int(failure.exitcode)
        name = signal.Signals(-failure.exitcode).name
        _say(
            f"rank {rank} was killed by {name}; the same command continues from the newest version"
        )
        return EXIT_CRASHED
    return EXIT_DONE


def _forward(number: int, frame: FrameType | None) -> None:
    import psutil

    if number == signal.SIGINT:
        _interrupts.append(number)
        if len(_interrupts) > 1:
            # A person who presses Ctrl-C twice wants the end; elastic ends the processes.
            raise KeyboardInterrupt
        say_interrupted()
    passed = signal.SIGUSR1 if number == signal.SIGUSR1 else signal.SIGTERM
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            child.send_signal(passed)


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
class RunOptions:
    """Options of ``outlast run``; texts are as they stand there.

    Attributes:
        script: The script.
        arguments: Of the script.
        every: How often to save.
        directory: Where to save; None for the usual place.
        keep: Newest versions kept.
        time_limit: After how long to stop, or None.
        fresh: Whether to move an earlier run aside.
        accept_changes: Whether to continue with a changed program.
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

    @property
    def limit_seconds(self) -> float | None:
        """The time limit, read."""
        limit = self.time_limit
        return None if limit is None else seconds_of("--time-limit", limit)

    def of_process(self) -> list[str]:
        """Arguments of ``outlast run`` for a process whose launcher has prepared the folder."""
        given = {
            "every": self.every,
            "keep": self.keep,
            "directory": self.directory,
            "time-limit": self.time_limit,
            "loop": self.loop,
        }
        options = [f"--{name}={value}" for name, value in given.items() if value is not None]
        return [*options, str(self.script), *self.arguments]


def run_script(asked: RunOptions, processes: int | None = None, *, chain: JobChain) -> int:
    """Run a script as the environment says: one process of several, a launcher, or alone.

    Args:
        asked: The command line.
        processes: To start here; None: this one is the run's, or one of several that are.
        chain: Knows when the Slurm job ends that this may be in (`outlast.cluster`).

    Returns:
        The exit code.
    """
    from outlast.autosave.libraries import read_and_rewrite
    from outlast.distributed.ranks import (
        ALONE,
        Ranks,
        launched_by,
        ranks_from,
        rendezvous_address,
    )

    every_of(asked.every)
    _ = asked.limit_seconds
    files, library = read_and_rewrite(asked.script, asked.loop)
    folder = folder_of(asked.script.resolve(), asked.arguments, asked.directory)
    # A library continues with any number of processes.
    look = functools.partial(_begun, asked, files, folder, malleable=library is not None)
    alone = launched_by(os.environ) == "alone"
    ranks = ALONE if alone else ranks_from(os.environ)
    if ranks.launch == "srun":
        # What torchrun would have set for the script; what is set stays.
        address, port = rendezvous_address(os.environ)
        os.environ.setdefault("RANK", str(ranks.rank))
        os.environ.setdefault("WORLD_SIZE", str(ranks.world_size))
        os.environ.setdefault("LOCAL_RANK", str(ranks.local_rank))
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(ranks.local_world_size))
        os.environ.setdefault("MASTER_ADDR", address)
        os.environ.setdefault("MASTER_PORT", str(port))
    if ranks.is_first and (alone or ranks.launch != "nproc"):
        texts = [file.source.text for file in files]
        say_options_behind(asked.script, asked.arguments, _OWN, texts, "outlast run")
    if alone and processes is not None:
        ranks = Ranks(0, processes, 0, processes, "nproc")
        begun = look(ranks)
        return EXIT_DONE if begun.finished else launch(ranks.world_size, asked.of_process())
    begun = rendezvous(ranks, folder.path, lambda: look(ranks))
    if begun.problem:
        return EXIT_CRASHED if begun.crashed else EXIT_BAD_INPUT
    if begun.finished:
        return EXIT_DONE
    if library is not None:
        return work_of_library(asked, files, folder, ranks, library)
    return work(asked, files, folder, ranks, begun, chain=chain)


def _begun(
    asked: RunOptions, files: list[Rewritten], folder: RunFolder, ranks: Ranks, *, malleable: bool
) -> Begun:
    """Prepare the run on rank 0, and see how it stands."""
    if ranks.is_first:
        # On rank 0: see that the run may continue as this program.
        world_size = 1 if malleable else ranks.world_size
        import torch

        from outlast.autosave.run_folder import identity_of

        if asked.fresh and (old := folder.move_aside()) is not None:
            _say(f"moved the earlier run to {old}")
        now = identity_of(files, asked.arguments, world_size, str(torch.__version__))
        root = files[0].source.path.parent
        for sentence in folder.begin(now, root, accept_changes=asked.accept_changes):
            _say(f"warning: {sentence}")
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


def say_options_behind(
    script: Path, arguments: Iterable[str], own: Sequence[str], texts: Sequence[str], command: str
) -> None:
    """Say which arguments of a script look like options of the command that runs it.

    Not where the script's text mentions the option, which it then has, too.

    Args:
        script: The script.
        arguments: Behind it.
        own: Options of the command.
        texts: Of the program.
        command: As it is called, e.g. ``outlast run``.
    """
    given = dict.fromkeys(argument.partition("=")[0] for argument in arguments)
    found = [name for name in given if name in own and not any(name in text for text in texts)]
    if found:
        names = ", ".join(found)
        stands = "stands" if len(found) == 1 else "stand"
        _say(
            f"note: {names} {stands} behind {script} and so is for the script; options of "
            f"{command} go before it: {command} {names} ... {script}"
        )
