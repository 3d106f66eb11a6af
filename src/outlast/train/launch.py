"""Starting the processes of a run on this machine with torch elastic.

A group of processes in which one dies is ended and started again, at most `launch.restarts` times;
the new group continues from memory, or from the newest complete checkpoint. Workers are forked
where no GPU is in use, which takes a tenth of a second because torch is loaded already.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from outlast.distributed.ranks import ranks_from
from outlast.errors import (
    EXIT_BAD_INPUT,
    EXIT_DATA_CORRUPTION,
    EXIT_TO_BE_CONTINUED,
    DataCorruptionError,
    OutlastError,
    RunError,
)
from outlast.records import AttemptEnded, read_run
from outlast.recover.resize import RESIZE, met, wish
from outlast.recover.slot import remove_run, run_folder
from outlast.runtime.memory import kept_run
from outlast.runtime.stop import TOLD_TO_STOP, signals_taken
from outlast.runtime.watching import Watcher
from outlast.train.model import load_code
from outlast.train.run import Start, run_directory, work

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

FAILURES = "failures.log"
"""File of a run directory: what ended its processes, with tracebacks."""


_TELLERS = ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn")
_EXITED = "torch.multiprocessing.spawn.ProcessExitedException: "
_MONITOR_SECONDS = 0.1
_FORKED_SECONDS = 5.0
_LOOK_SECONDS = 0.005
_interrupts: list[int] = []


def launch_group(start: Start) -> int:
    """Run `start` on `launch.nproc` processes of this machine and wait for them.

    SIGTERM, SIGUSR1 and SIGINT are passed on to the workers, which stop at the next step boundary.
    When the run is to be resized, they stop as well, and so many as wished for continue at once.

    Returns:
        The exit code on which the ranks agree.

    Raises:
        OutlastError: When the group failed more often than `launch.restarts` allows.
    """
    directory = run_directory(start.job)
    os.environ.pop(TOLD_TO_STOP, None)
    if (old := wish(directory.path)) is not None:
        # Who starts the run says with how many processes.
        met(directory.path, old)
    with signals_taken(forward_signal):
        while True:
            code = _launch(start)
            wished = wish(directory.path)
            # It may have stopped to be resized, and for no other reason.
            ended = read_run(directory.path).of(AttemptEnded) if wished is not None else []
            resizing = bool(ended) and ended[-1][1].reason == RESIZE
            if code != EXIT_TO_BE_CONTINUED or wished is None or not resizing:
                # All is saved. Where it is not, by an error, the next start finds it in memory.
                job = start.job
                with contextlib.suppress(RunError):
                    remove_run(run_folder(Path(job.recover.memory), kept_run(directory)))
                return code
            met(directory.path, wished)
            launch = start.job.launch.model_copy(update={"nproc": wished.processes})
            job = start.job.model_copy(update={"launch": launch})
            start = replace(start, job=job, fresh=False, again=True)


def _launch(start: Start) -> int:
    settings = start.job.launch
    method = "spawn" if torch.cuda.is_available() else "fork"
    if method == "fork":
        # Some 2 s of imports, at every restart, too.
        load_code(start.job.model)
        if start.job.recover.mode == "restart":
            importlib.import_module("outlast.recover.parity")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=settings.nproc,
        run_id=f"outlast-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=settings.restarts,
        monitor_interval=_MONITOR_SECONDS,
        start_method=method,
        # The stop signals are ours: elastic would kill the workers before they have saved.
        signals_to_handle="SIGQUIT",
    )
    directory = run_directory(start.job)
    try:
        with Watcher(start.job, directory), _failures_told(directory.path / FAILURES):
            outcomes = elastic_launch(config, _worker)(start)
    except ChildFailedError as error:
        raise OutlastError(_last_failure(error, settings.restarts)) from None
    for code, problem in outcomes.values():
        if problem is not None:
            raise (DataCorruptionError if code == EXIT_DATA_CORRUPTION else OutlastError)(problem)
    return int(outcomes[0][0])


@contextlib.contextmanager
def _failures_told(file: Path) -> Iterator[None]:
    """Torch elastic's reports of a process that has failed: a line on stderr, the rest in `file`.

    The group is mostly restarted. A page of traceback, often of a survivor whose connection broke,
    would bury what the run itself says of it.
    """

    def told(entry: logging.LogRecord) -> bool:
        """Return True where torch must tell it itself."""
        if entry.levelno < logging.ERROR:
            return False
        text = logging.Formatter("%(asctime)s %(message)s").format(entry).strip()
        try:
            with file.open("a", encoding="utf-8") as written:
                written.write(f"{text}\n\n")
        except OSError:
            return True
        line = text.splitlines()[-1].removeprefix(_EXITED)
        print(f"outlast: a process failed: {line} (all of it: {file})", file=sys.stderr, flush=True)
        return False

    loggers = [logging.getLogger(name) for name in _TELLERS]
    for logger in loggers:
        logger.addFilter(told)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(told)


@record
def _worker(start: Start) -> tuple[int, str | None]:
    """One worker: its exit code, and the sentence of a wrong input (no reason to restart)."""
    os.environ["OUTLAST_LAUNCH"] = "nproc"
    _await_siblings(int(os.environ["LOCAL_WORLD_SIZE"]))
    try:
        return work(start, ranks_from(os.environ)), None
    except DataCorruptionError as error:
        if error.in_versions:
            return EXIT_DATA_CORRUPTION, str(error)
        # A restart loads the state anew from a verified checkpoint, which may be the cure.
        raise
    except OutlastError as error:
        return EXIT_BAD_INPUT, str(error)


def _await_siblings(count: int) -> None:
    """Wait until all workers of the group are forked, before any of them uses the network.

    The launcher's store answers from a thread of its own, which looks names up. A worker that is
    forked at that moment inherits the lock of glibc's resolver held, and hangs at its own look-up.
    """
    with contextlib.suppress(psutil.Error):
        own = psutil.Process()
        launcher, command = own.parent(), own.cmdline()
        if launcher is None or launcher.cmdline() != command:
            # Spawned, or an orphan: nothing was inherited, or nobody forks any more.
            return
        deadline = time.monotonic() + _FORKED_SECONDS
        while time.monotonic() < deadline:
            forked = 0
            for child in launcher.children():
                # A forked process has the command line of its parent; other helpers have not.
                with contextlib.suppress(psutil.Error):
                    forked += child.cmdline() == command
            if forked >= count:
                return
            time.sleep(_LOOK_SECONDS)


def forward_signal(number: int, frame: FrameType | None) -> None:
    """Pass a stop signal on to the processes that this one has started."""
    if number == signal.SIGINT:
        _interrupts.append(number)
        if len(_interrupts) > 1:
            # A person who presses Ctrl-C twice wants the end; elastic ends the workers.
            raise KeyboardInterrupt
    # Ctrl-C reaches the workers from the terminal as well; SIGTERM may come twice without harm.
    passed = signal.SIGUSR1 if number == signal.SIGUSR1 else signal.SIGTERM
    os.environ[TOLD_TO_STOP] = passed.name
    for child in multiprocessing.active_children():
        if child.pid is not None:
            os.kill(child.pid, passed)


def _last_failure(error: ChildFailedError, restarts: int) -> str:
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        cause = f"was killed by {signal.Signals(-failure.exitcode).name}"
    else:
        # torch types this as text, but a recorded failure is a dictionary.
        message: Any = failure.message
        if isinstance(message, dict):
            message = message.get("message", "")
        lines = str(message).strip().splitlines()
        cause = f"failed: {lines[0] if lines else f'exit code {failure.exitcode}'}"
    return (
        f"rank {rank} {cause}; the group had been restarted {restarts} times already "
        "(launch.restarts), and the run can continue from its newest state: mend the cause and run "
        "the same command again"
    )
