"""A small sharded training whose states are kept, for tests."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from outlast.distributed.group import Group
from outlast.errors import RecoverError
from outlast.recover.redundancy import Redundancy
from outlast.recover.restart import Keeper


def join() -> int:
    """Join the group that the environment names; returns the rank."""
    dist.init_process_group("gloo")
    return dist.get_rank()


def model_and_optimizer(*, sharded: bool = False, seed: int = 0) -> dict[str, Any]:
    """Layers of odd sizes, a bf16 one and a buffer, on this rank."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13), nn.Linear(13, 5).bfloat16())
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for each in (model[0], model[2]):
            fully_shard(each, mesh=mesh)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}


def gradients(state: dict[str, Any], step: int) -> None:
    """Gradients and running means that depend on the step alone, on any number of ranks."""
    torch.manual_seed(step)
    model = state["model"]
    # Every rank sees all rows, so that their mean is the same whatever their number.
    hidden = model[1](model[0](torch.randn(8, 7)))
    model[2](hidden.bfloat16()).float().square().sum().backward()


def train(
    keeper: Keeper | None,
    state: dict[str, Any],
    first: int,
    last: int,
    *,
    die_before: tuple[int, str] | None = None,
) -> None:
    """Train from step `first` to `last`; a process that `die_before` names kills itself there."""
    for step in range(first, last):
        gradients(state, step)
        _die(die_before, step, "settle")
        if keeper is not None:
            keeper.settle()
        _die(die_before, step, "step")
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        _die(die_before, step, "keep")
        if keeper is not None:
            keeper.keep(step + 1)
        _die(die_before, step, "next")


def _die(at: tuple[int, str] | None, step: int, phase: str) -> None:
    if at == (step, phase):
        os.kill(os.getpid(), signal.SIGKILL)


def whole_state(state: dict[str, Any]) -> dict[str, bytes]:
    """The bits of all tensors of model and optimizer, whole, on every rank."""
    found = {f"model.{name}": each for name, each in state["model"].state_dict().items()}
    for number, parts in enumerate(state["optimizer"].state.values()):
        for name, each in parts.items():
            found[f"optimizer.{number}.{name}"] = each
    return {
        name: _bits(each.full_tensor() if isinstance(each, DTensor) else each)
        for name, each in found.items()
    }


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def reference(steps: int) -> dict[str, bytes]:
    """The state after `steps` steps of one process."""
    state = model_and_optimizer()
    train(None, state, 0, steps)
    return whole_state(state)


def keeper_for(
    state: dict[str, Any],
    memory: Path,
    node: str = "one",
    *,
    identity: str = "job",
    redundancy: Redundancy | None = None,
) -> Keeper:
    """A keeper whose memory lies below `memory`, one folder for each node."""
    peers = Group(error=RecoverError, node=node)
    return Keeper(state, "run", identity, memory=memory / node, peers=peers, redundancy=redundancy)
