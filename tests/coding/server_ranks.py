"""Ranks that may die, and a small problem whose gradient is known, for tests of the protocols."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from outlast.errors import CodingError

KILLED = "killed"


def start() -> int:
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    return dist.get_rank()


def mortal(work: Callable[..., Any], *args: Any) -> Any:
    """What `work` returns in a process of its own, or `KILLED`: the test's rank lives on."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            content = (True, work(*args))
        except BaseException as error:
            content = (False, error)
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(content, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        content = pipe.read()
    os.waitpid(child, 0)
    if not content:
        return KILLED
    well, result = pickle.loads(content)
    if not well:
        raise result
    return result


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(seconds: float) -> None:
    """SIGSTOP this process, and let another one continue it."""
    target = os.getpid()
    helper = multiprocessing.get_context("fork").Process(target=_wake, args=(target, seconds))
    helper.start()
    os.kill(target, signal.SIGSTOP)
    helper.join()


def _wake(target: int, seconds: float) -> None:
    time.sleep(seconds)
    os.kill(target, signal.SIGCONT)
    os._exit(0)


def tried(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `work` returns, or the error's type, text and chunks."""
    try:
        return work(*args, **kwargs)
    except CodingError as error:
        return type(error).__name__, str(error), getattr(error, "chunks", None)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))


def chunk_loss(model: nn.Module, step: int, chunk: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + chunk)
    x = torch.randn(8, 6, generator=generator)
    return (model(x) - x.sum(dim=1, keepdim=True).sin() - 0.1 * chunk).square().mean()


def full_gradient(model: nn.Module, step: int, chunks: int) -> np.ndarray:
    """The gradient of the sum of the chunks' losses, in this process alone."""
    losses = [chunk_loss(model, step, chunk) for chunk in range(chunks)]
    grads = torch.autograd.grad(torch.stack(losses).sum(), list(model.parameters()))
    return np.concatenate([each.double().numpy().ravel() for each in grads])


def numbers(tensors: Any) -> np.ndarray:
    return np.concatenate([each.detach().double().numpy().ravel() for each in tensors])
