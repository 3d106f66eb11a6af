"""Ranks for tests: forked processes that find each other by the environment."""

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import psutil

DEADLINE_SECONDS = 120.0
DUMP_SECONDS = 2.0


class RanksFailedError(AssertionError):
    """A rank raised, died or did not end in time."""


def _prepare_to_fork(*modules: str) -> None:
    """Import what forked processes would each import, and put torch's kernels back.

    Guards that earlier tests have left to the garbage collector hold other kernels.
    """
    for name in modules:
        importlib.import_module(name)
    operations = sys.modules.get("outlast.guard.operations")
    # What one collection finalizes may be what holds a guard.
    for _ in range(3):
        if operations is not None and operations._installed:
            gc.collect()
            operations.release_kernels()


class Ended(NamedTuple):
    """How torchrun has ended, and all that it and its ranks have printed."""

    code: int | None
    said: str


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
    # The first optimizer of a process imports it, which takes longer than most of these tests.
    _prepare_to_fork("torch._dynamo")
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


def torchrun(output: Path, *arguments: object, deadline: float = 240.0) -> Ended:
    """Run ``torchrun --standalone ARGUMENTS`` forked; its ranks are forks of it, at each start.

    They run the script as a program, with what this process has imported: a new interpreter
    takes longer to import torch and a framework than to train here.

    Args:
        output: Gets what they print.
        arguments: Options of torchrun, a script and its arguments.
        deadline: Seconds that it may take.
    """
    _prepare_to_fork("torch._dynamo", "torch.distributed.run")
    process: Any = multiprocessing.get_context("fork").Process(
        target=_torchrun, args=(output, [str(each) for each in arguments])
    )
    gc.freeze()
    process.start()
    gc.unfreeze()
    try:
        process.join(deadline)
        if process.exitcode is None:
            _dump_stacks([process])
            raise RanksFailedError(f"torchrun did not end in {deadline} s:\n{output.read_text()}")
        return Ended(process.exitcode, output.read_text())
    finally:
        if process.exitcode is None:
            for each in psutil.Process(process.pid).children(recursive=True):
                each.kill()
            process.kill()
            process.join()


def _torchrun(output: Path, arguments: list[str]) -> None:
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args, run_script_path

    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # What pytest has put in their place captures for the test process.
    sys.stdout, sys.stderr = (open(each, "w", buffering=1, closefd=False) for each in (1, 2))  # noqa: SIM115
    faulthandler.register(signal.SIGQUIT, file=sys.stderr)
    # A restarted group must not find the addresses of a dead one, as the documentation says.
    os.environ.update(OMP_NUM_THREADS="1", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

    def rank(script: str, *its: str) -> None:
        # A process that is forked while a thread looks an address up may hang at its own look-up.
        start = f"{output}-start{os.environ['TORCHELASTIC_RESTART_COUNT']}"
        Path(f"{start}-rank{os.environ['RANK']}").touch()
        while len([*output.parent.glob(f"{Path(start).name}-*")]) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.01)
        run_script_path(script, *its)

    try:
        given = parse_args(["--standalone", "--start-method=fork", "--run-path", *arguments])
        config, _, its = config_from_args(given)
        config.run_id, config.rdzv_backend, config.rdzv_endpoint = "tests", "c10d", "localhost:0"
        elastic_launch(config, rank)(*its)
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # No interpreter shutdown: handlers inherited from the test process must not run here.
    os._exit(code)
