"""Ranks for tests: forked processes that find each other by the environment."""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import psutil

DEADLINE_SECONDS = 120.0
DUMP_SECONDS = 2.0


class RanksFailedError(AssertionError):
    """A rank raised, died or did not end in time."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _child(rank: int, size: int, port: int, pipe: Any, work: Callable[..., Any], args: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    # For this process and those that it forks: say where they are when they are late.
    faulthandler.register(signal.SIGQUIT, file=sys.__stderr__)
    try:
        pipe.send((True, work(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    pipe.close()
    # No interpreter shutdown: handlers inherited from the test process must not run here.
    os._exit(0)


def _dump_stacks(children: list[Any]) -> None:
    """Make the ranks and their descendants write the stacks of their threads to stderr."""
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            rank = psutil.Process(child.pid)
            for process in (rank, *rank.children(recursive=True)):
                # A process that would die of the signal (a program started anew) is left alone.
                if _catches(process.pid, signal.SIGQUIT):
                    process.send_signal(signal.SIGQUIT)
    time.sleep(DUMP_SECONDS)


def _catches(pid: int, number: int) -> bool:
    with Path(f"/proc/{pid}/status").open() as status:
        caught = next(line.split()[1] for line in status if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def run_ranks(
    size: int, work: Callable[..., Any], *args: Any, may_die: Collection[int] = ()
) -> list[Any]:
    """Run ``work(*args)`` in `size` forked processes; returns their results by rank.

    The result of a rank that died is None, if it is one of `may_die`.
    """
    context = multiprocessing.get_context("fork")
    port = free_port()
    children, pipes = [], []
    # A rank that collected this process's garbage could wait for threads that it does not have.
    gc.freeze()
    for rank in range(size):
        ours, theirs = context.Pipe()
        child = context.Process(target=_child, args=(rank, size, port, theirs, work, args))
        child.start()
        theirs.close()
        children.append(child)
        pipes.append(ours)
    gc.unfreeze()
    deadline = time.monotonic() + DEADLINE_SECONDS
    outcomes: list[Any] = []
    try:
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(max(deadline - time.monotonic(), 0.0)):
                _dump_stacks(children)
                raise RanksFailedError(
                    f"rank {rank} of {size} gave no result in {DEADLINE_SECONDS} s"
                )
            try:
                well, result = pipe.recv()
            except EOFError:
                if rank in may_die:
                    outcomes.append(None)
                    continue
                raise RanksFailedError(f"rank {rank} of {size} died") from None
            if not well:
                raise RanksFailedError(f"rank {rank} of {size} raised:\n{result}")
            outcomes.append(result)
    finally:
        for child in children:
            child.join(timeout=1.0)
            if child.is_alive():
                child.kill()
                child.join()
    return outcomes
