"""`outlast run` in processes of the tests' own, and the same scripts under plain Python."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess

DEADLINE_SECONDS = 120.0
_PAUSE_SECONDS = 0.02

SCRIPT = '''
import argparse
import os
import signal
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent


def reached(step):
    """Does what the file `plan` says for this step, once."""
    plan = HERE / "plan"
    if plan.exists():
        at, what = plan.read_text().split()
        if step == int(at):
            plan.unlink()
            os.kill(os.getpid(), getattr(signal, what))


def train_epoch(model, loader, optimizer, losses):
    model.train()
    for features, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(features), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        reached(len(losses))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    data = torch.utils.data.TensorDataset(torch.randn(48, 8), torch.randn(48, 1))
    loader = torch.utils.data.DataLoader(data, 8, shuffle=True)
    losses = []
    best = float("inf")
    for _ in range(arguments.epochs):
        begun = len(losses)
        train_epoch(model, loader, optimizer, losses)
        best = min(best, sum(losses[begun:]))
        schedule.step()
    rank = os.environ.get("RANK", "0")
    result = {"model": model.state_dict(), "losses": losses, "best": best}
    torch.save(result, HERE / f"result{rank}.pt")


if __name__ == "__main__":
    main()
'''
"""Trains for 6 steps an epoch."""


RANKS_SCRIPT = """
import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

HERE = Path(__file__).parent


def reached(step):
    plan = HERE / f"plan{dist.get_rank()}"
    if plan.exists():
        at, what = plan.read_text().split()
        if step == int(at):
            plan.unlink()
            os.kill(os.getpid(), getattr(signal, what))


def main():
    how = argparse.ArgumentParser()
    how.add_argument("how")
    how = how.parse_args().how
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
    data = TensorDataset(torch.randn(96, 8), torch.randn(96, 4))
    torch.manual_seed(100 + rank)
    if how == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, 8, sampler=sampler)
    losses = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for features, targets in loader:
            loss = nn.functional.mse_loss(model(features), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) % 2 == 0:
                # FSDP2 leaves the parameters gathered behind this.
                with torch.no_grad():
                    losses[-1] += model(features).sum().item()
            reached(len(losses))
    state = {
        name: each.to_local() if hasattr(each, "to_local") else each
        for name, each in model.state_dict().items()
    }
    torch.save({"model": state, "losses": losses}, HERE / f"result{rank}.pt")
    dist.barrier()
    # A replicated model that outlives its process group may keep the process from ending.
    del model, optimizer, loss
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
"""Trains for 6 steps an epoch on two ranks."""

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


class Ended(NamedTuple):
    """How a process ended: its exit code, minus the signal's number where one killed it."""

    code: int
    said: str


def outlast(*arguments: object, environment: dict[str, str] | None = None) -> Ended:
    """Run ``outlast ARGUMENTS`` in a process of its own."""
    return in_process(run_command, [str(each) for each in arguments], environment or {})


def plain(script: Path, *arguments: object) -> Ended:
    """Run ``python SCRIPT ARGUMENTS`` in a process of its own."""
    return in_process(_plain, [str(script), *map(str, arguments)], {})


def run_command(arguments: list[str]) -> None:
    """``outlast ARGUMENTS`` in this process."""
    from outlast.cli.main import main

    sys.argv = ["outlast", *arguments]
    main()


def _plain(arguments: list[str]) -> None:
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).parent)
    runpy.run_path(arguments[0], run_name="__main__")


def in_process(
    work: Callable[[list[str]], None], arguments: list[str], environment: dict[str, str]
) -> Ended:
    """Run a function of a module in a new process, forked from one that has done nothing yet.

    Libraries that have threads, as blosc2, hang in forks of a process that has used them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "torch",
            # An optimizer imports it when it is made, which takes longer than a training here.
            "torch._dynamo",
            "outlast.autosave.keeper",
            "outlast.autosave.run",
            "outlast.integrations.run",
        ]
    )
    reading, writing = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(work, arguments, environment, writing))
    process.start()
    writing.close()
    try:
        return _ended(process, reading.fileno())
    finally:
        reading.close()
        process.kill()
        process.join()


def _child(
    work: Callable[[list[str]], None],
    arguments: list[str],
    environment: dict[str, str],
    writing: Connection,
) -> None:
    os.dup2(writing.fileno(), 1)
    os.dup2(writing.fileno(), 2)
    writing.close()
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.update(environment)
    # A script forks its workers; the server's way names semaphores, which a kill leaves behind.
    multiprocessing.set_start_method(None, force=True)
    torch.set_num_threads(1)
    code = 1
    try:
        work(arguments)
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    # No interpreter shutdown: what the server of forks has registered must not run here.
    os._exit(code)


def _ended(process: ForkServerProcess, reading: int) -> Ended:
    os.set_blocking(reading, False)
    said = b""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        ended = process.exitcode is not None
        with contextlib.suppress(BlockingIOError):
            while part := os.read(reading, 1 << 16):
                said += part
        if ended:
            return Ended(process.exitcode, said.decode())
        time.sleep(_PAUSE_SECONDS)
    raise AssertionError(f"the process did not end in time; it said:\n{said.decode()}")
