"""Ranks for tests: forked processes that find each other by the environment."""

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

DEADLINE_SECONDS = 120.0


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
    try:
        pipe.send((True, work(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    pipe.close()
    # No interpreter shutdown: handlers inherited from the test process must not run here.
    os._exit(0)


def run_ranks(size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``work(*args)`` in `size` forked processes; returns their results by rank."""
    context = multiprocessing.get_context("fork")
    port = free_port()
    children, pipes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        child = context.Process(target=_child, args=(rank, size, port, theirs, work, args))
        child.start()
        theirs.close()
        children.append(child)
        pipes.append(ours)
    deadline = time.monotonic() + DEADLINE_SECONDS
    outcomes: list[Any] = []
    try:
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(max(deadline - time.monotonic(), 0.0)):
                raise RanksFailedError(
                    f"rank {rank} of {size} gave no result in {DEADLINE_SECONDS} s"
                )
            try:
                well, result = pipe.recv()
            except EOFError:
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
