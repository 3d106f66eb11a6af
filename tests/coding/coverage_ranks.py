"""Processes that train by micro-coverage, with faults on order, for its tests.

Every layer sleeps, forward and backward, as long as its process is told to be slow, so that many
processes share two cores without measuring the scheduler. The store is a process of its own, so
that any rank may die, and the store too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch._dynamo  # optimizers import it, slowly: forked ranks find it done
import torch.distributed as dist
from forked import free_port
from torch import nn

from outlast.coding.protocol.coverage import Coverage, CoverageOutcome
from outlast.coding.protocol.gradients import keyed

# torch asks for the name of whom it connects to, for its log; a name server may drop the question.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

KILLED = "killed"
LAYERS, WIDTH = 4, 12


class Pace:
    """How many seconds a chunk takes in this process, above computing."""

    seconds = 0.0


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(Pace.seconds / LAYERS / 3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(Pace.seconds / LAYERS * 2 / 3)
        return gradient


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(self.dropout(torch.tanh(self.linear(x))))


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(dropout) for _ in range(LAYERS)))


def loss_of(model: nn.Module, step: int, chunk: int, rows: slice = slice(None)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + chunk)
    x = torch.randn(4, WIDTH, generator=generator)[rows]
    return (model(x) - x.sin() * (1 + chunk)).square().sum()


def gradient_of(model: nn.Module) -> np.ndarray:
    return np.concatenate([each.grad.double().numpy().ravel() for each in model.parameters()])


def numbers_of(model: nn.Module) -> np.ndarray:
    return np.concatenate([each.detach().numpy().ravel() for each in model.parameters()])


def whole(model: nn.Module, step: int, chunks: Any, seed: int = 0) -> np.ndarray:
    """The gradient of the sum of the chunks' losses, in this process alone and at once."""
    total = np.zeros(sum(each.numel() for each in model.parameters()))
    seconds, Pace.seconds = Pace.seconds, 0.0
    for chunk in chunks:
        with keyed(seed, step, chunk):
            grads = torch.autograd.grad(loss_of(model, step, chunk), list(model.parameters()))
        total += np.concatenate([each.double().numpy().ravel() for each in grads])
    Pace.seconds = seconds
    return total


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@dataclass(frozen=True)
class Step:
    """What one process has seen of one step."""

    gradient: np.ndarray
    expected: np.ndarray
    parameters: np.ndarray
    outcome: CoverageOutcome
    began: tuple[int, ...]

    @property
    def error(self) -> float:
        return distance(self.gradient, self.expected)


@dataclass(frozen=True)
class Plan:
    """A training of one process.

    Attributes:
        settings: Of `Coverage`.
        seconds: Of one chunk, by rank.
        during: Called in every forward pass with the coverage, the step and the chunk.
        prepare: Called once with the coverage.
        after: Called after every step with the coverage and the step.
    """

    settings: dict[str, Any]
    steps: int = 3
    seconds: Callable[[int], float] = lambda rank: 0.0
    during: Callable[[Coverage, int, int], None] = lambda coverage, step, chunk: None
    prepare: Callable[[Coverage], None] = lambda coverage: None
    after: Callable[[Coverage, int], None] = lambda coverage, step: None
    dropout: float = 0.0


def join(port: int) -> int:
    torch.set_num_threads(1)
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=60)
    )
    dist.init_process_group(
        "gloo",
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=60),
    )
    return dist.get_rank()


def train(port: int, plan: Plan) -> list[Any]:
    """The steps of a process as `Step`; the last may be the error that ended it."""
    rank = join(port)
    model = network(plan.dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    coverage = Coverage(model, **plan.settings)
    plan.prepare(coverage)
    steps: list[Any] = []
    for step in range(plan.steps):
        began: list[int] = []

        def compute(chunk: int, step: int = step, began: list[int] = began) -> torch.Tensor:
            began.append(chunk)
            plan.during(coverage, step, chunk)
            return loss_of(model, step, chunk)

        Pace.seconds = plan.seconds(rank)
        try:
            outcome = coverage.step(step, compute)
        except Exception as error:
            return [*steps, error]
        gradient = gradient_of(model).copy()
        left = set(range(coverage.chunks)) - set(outcome.lost)
        steps.append(
            Step(
                gradient,
                whole(model, step, sorted(left), coverage.seed),
                numbers_of(model),
                dataclasses.replace(outcome, loss=float(outcome.loss)),
                tuple(began),
            )
        )
        optimizer.step()
        optimizer.zero_grad()
        plan.after(coverage, step)
    coverage.members.sum_([torch.zeros(1)])
    return steps


def mortal(work: Callable[..., Any], *args: Any) -> Any:
    """What `work` returns in a process of its own, or `KILLED`: the test's rank lives on."""
    ours, theirs = multiprocessing.Pipe()
    child = os.fork()
    if child == 0:
        ours.close()
        try:
            content: Any = (True, work(*args))
        except BaseException as error:
            content = (False, f"{type(error).__name__}: {error}")
        theirs.send_bytes(pickle.dumps(content))
        os._exit(0)
    theirs.close()
    try:
        well, result = pickle.loads(ours.recv_bytes())
    except EOFError:
        return KILLED
    finally:
        os.waitpid(child, 0)
    if not well:
        raise RuntimeError(result)
    return result


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def pause(seconds: float) -> None:
    """SIGSTOP this process; another one continues it."""
    stopped = os.getpid()
    helper = os.fork()
    if helper == 0:
        time.sleep(seconds)
        os.kill(stopped, signal.SIGCONT)
        os._exit(0)
    os.kill(stopped, signal.SIGSTOP)
    os.waitpid(helper, 0)


@dataclass(frozen=True)
class StoreProcess:
    """A store in a process of its own, and the process that looks after it."""

    port: int
    keeper: int

    def restart(self) -> None:
        """Kill the store with all its keys; it comes back empty at the same port."""
        os.kill(self.keeper, signal.SIGUSR1)

    def end(self) -> None:
        """Kill the store for good."""
        os.kill(self.keeper, signal.SIGTERM)


@contextlib.contextmanager
def store_process() -> Iterator[StoreProcess]:
    port = free_port()
    keeper = os.fork()
    if keeper == 0:
        # What it has inherited belongs to threads that it does not have.
        gc.freeze()
        _keep(port)
    try:
        _wait_for(port)
        yield StoreProcess(port, keeper)
    finally:
        os.kill(keeper, signal.SIGTERM)
        os.waitpid(keeper, 0)


def _wait_for(port: int) -> None:
    # A client that comes too early tries again after seconds.
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.01)


def _keep(port: int) -> None:
    wanted = {signal.SIGUSR1, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    while True:
        server = os.fork()
        if server == 0:
            served = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            while served.port:
                signal.pause()
        asked = signal.sigwait(wanted)
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
        if asked == signal.SIGTERM:
            os._exit(0)
