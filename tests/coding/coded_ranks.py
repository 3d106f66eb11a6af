"""Workers for tests of the coded all-reduce: small codes, a model, and processes that may die."""

import os
import pickle
import signal
import time
import traceback
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from scipy.sparse import csr_array
from torch import nn

from outlast.coding.code import FractionalRepetition, GradientCode
from outlast.coding.cyclic import CyclicRepetition
from outlast.coding.protocol.all_reduce import CodedAllReduce
from outlast.errors import CodingError

STOPPED_SECONDS = 3.0
DECISION_SECONDS = 30.0
"""Longest time that anything waits for what other workers do without one."""


class Code(GradientCode):
    name = "a code of the tests"
    source = "rows given by the test"

    def __init__(self, rows, tolerance, dtype="float32"):
        self.matrix = csr_array(np.asarray(rows, np.float64))
        self.tolerance = tolerance
        self.dtype = dtype


def repetition(workers, stragglers):
    return FractionalRepetition(workers, stragglers)


def cyclic(workers, stragglers, dtype="float64"):
    return CyclicRepetition(workers, stragglers, dtype=dtype)


def model_of(dtype=torch.float64):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 3)]
    return nn.Sequential(*layers).to(dtype)


def samples_of(step, chunk, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 * step + chunk)
    return torch.randn(5, 6, generator=generator, dtype=dtype) + chunk


def losses_of(model, samples):
    """(samples,)"""
    return model(samples).square().mean(dim=1)


def gradient_of(model):
    return np.concatenate([each.grad.detach().numpy().ravel() for each in model.parameters()])


def full_gradient(step, coefficients, dtype=torch.float64):
    """The sum over chunks with these coefficients, by one process that nothing happens to."""
    model = model_of(dtype)
    for chunk, coefficient in enumerate(coefficients):
        samples = samples_of(step, chunk, dtype)
        (float(coefficient) * losses_of(model, samples).sum()).backward()
    return gradient_of(model)


def relative(found, right):
    return float(np.linalg.norm(found - right) / np.linalg.norm(right))


@dataclass
class Record:
    """What a worker saw."""

    outcomes: list = field(default_factory=list)
    gradients: list = field(default_factory=list)
    seconds: list = field(default_factory=list)
    error: CodingError | None = None


def start(timeout_seconds=60.0):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return dist.get_rank()


def wait_for_the_others(coded):
    """Return when the others have decided the step without this worker."""
    deadline = time.monotonic() + DECISION_SECONDS
    while not coded.decided():
        assert time.monotonic() < deadline, "the others did not decide without this worker"
        time.sleep(0.005)


def work(
    code,
    steps,
    *,
    protocol=CodedAllReduce,
    pause=None,
    slow=None,
    at=None,
    after=None,
    patient=False,
    **settings,
):
    """Train for some steps on the same weights; the record ends at the first CodingError.

    Args:
        protocol: The class that sums.
        pause: (worker, step, chunk) -> seconds that the chunk takes.
        slow: (worker, step) -> whether its first chunk lasts until the others do without it.
        at: (worker, step) -> None, called before the worker's last chunk.
        after: (worker, step) -> None, called between `reduce` and the use of the gradient.
        patient: Whether workers finish their chunks when the others need them no more.
    """
    rank = start()
    model = model_of()
    coded = protocol(model, code, **settings)
    record = Record()
    chunks = code.assignment.chunks_of(rank).tolist()
    every = [(chunk, float(code.matrix[rank, chunk])) for chunk in chunks]
    dist.barrier()
    for step in range(steps):
        begun = time.monotonic()
        try:
            for chunk, weight in every if patient else coded.chunks():
                if at is not None and chunk == every[-1][0]:
                    at(rank, step)
                (weight * losses_of(model, samples_of(step, chunk)).sum()).backward()
                if pause is not None:
                    time.sleep(pause(rank, step, chunk))
                if slow is not None and chunk == chunks[0] and slow(rank, step):
                    wait_for_the_others(coded)
            outcome = coded.reduce(step)
        except CodingError as error:
            record.error = error
            break
        record.seconds.append(time.monotonic() - begun)
        if after is not None:
            after(rank, step)
        record.outcomes.append(outcome)
        record.gradients.append(gradient_of(model))
        model.zero_grad()
    if record.error is None:
        coded.close()
    return record


def supervised(work, *args, stopped_seconds=STOPPED_SECONDS, through=0, **settings):
    """Run `work` in a child of this rank, which may kill or stop itself.

    The store lives in rank 0's supervisor, as it does in torchrun's agent, until all children have
    ended. A child that is stopped continues after `stopped_seconds`, or as soon as `through` others
    have called `get_through`.

    Returns:
        What `work` gave, or None for a child that was killed.
    """
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = None
    if rank == 0:
        store = dist.TCPStore(*address, is_master=True, wait_for_workers=False)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            outcome = (True, work(*args, **settings))
        except BaseException:
            outcome = (False, traceback.format_exc())
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(outcome, pipe)
        os._exit(0)
    os.close(writing)
    while True:
        _, status = os.waitpid(child, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            break
        if through:
            store = store or dist.TCPStore(*address, is_master=False, wait_for_workers=False)
            deadline = time.monotonic() + DECISION_SECONDS
            while store.add("through", 0) < through and time.monotonic() < deadline:
                time.sleep(0.02)
        else:
            time.sleep(stopped_seconds)
        os.kill(child, signal.SIGCONT)
    with os.fdopen(reading, "rb") as pipe:
        written = pipe.read()
    store = store or dist.TCPStore(*address, is_master=False, wait_for_workers=False)
    store.add("ended", 1)
    while rank == 0 and store.add("ended", 0) < size:
        time.sleep(0.02)
    if os.WIFSIGNALED(status):
        return None
    well, result = pickle.loads(written)
    if not well:
        raise AssertionError(result)
    return result


def get_through():
    """Tell the supervisors that this worker has done what it can do without a stopped one."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    dist.TCPStore(*address, is_master=False, wait_for_workers=False).add("through", 1)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def die():
    os.kill(os.getpid(), signal.SIGKILL)
