"""Sharded training states for the checkpoint tests, and runs of them on forked ranks."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_states import Net, bits, make_optimizers, open_store, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from outlast.checkpoint import Compression, Reduction


def fsdp(seed: int) -> dict[str, Any]:
    """Sharded over all ranks; odd sizes leave gaps, and some ranks hold nothing of some tensors."""
    model = Net(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.hidden:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": make_optimizers(model)}


def hsdp(seed: int) -> dict[str, Any]:
    """Replicated over half of the ranks, sharded over pairs."""
    model = Net(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("r", "s"))
    for layer in model.hidden:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": make_optimizers(model)}


def ddp(seed: int) -> dict[str, Any]:
    model = Net(seed)
    return {"model": DistributedDataParallel(model), "optimizer": make_optimizers(model)}


def plain(seed: int) -> dict[str, Any]:
    model = Net(seed)
    return {"model": model, "optimizer": make_optimizers(model)}


LAYOUTS = {"fsdp": fsdp, "hsdp": hsdp, "ddp": ddp, "plain": plain}


def save_layout(directory: Path, layout: str, steps: int = 2) -> tuple[dict[str, Any], int]:
    """Train and save on all ranks; returns the bits of the state and the bytes written here."""
    dist.init_process_group("gloo")
    state = LAYOUTS[layout](0)
    written = 0
    with open_store(directory) as store:
        for step in range(1, steps + 1):
            train(state, step, step)
            written = store.save(step, state).bytes
        dist.barrier()
    return bits(state), written


def restore_layout(directory: Path, layout: str) -> tuple[dict[str, Any], int]:
    """Restore on all ranks; returns the bits of the state and the step."""
    dist.init_process_group("gloo")
    state = LAYOUTS[layout](1)
    restored = open_store(directory).restore(state)
    assert restored is not None
    return bits(state), restored.step


class Mlp(nn.Module):
    def __init__(self, seed: int, width: int = 12) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(6, width)
        self.down = nn.Linear(width, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def mlp_state(seed: int, shape: tuple[int, int]) -> dict[str, Any]:
    """An MLP with its data dimension sharded `shape[0]` and its layers `shape[1]` times."""
    model = Mlp(seed)
    if shape != (1, 1):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        if shape[1] > 1:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(model, mesh["tensor"], plan)
        if shape[0] > 1:
            fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer}


def save_mlp(directory: Path, shape: tuple[int, int]) -> dict[str, Any]:
    dist.init_process_group("gloo")
    state = mlp_state(0, shape)
    for step in range(2):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        state["model"](x).square().sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
    with open_store(directory) as store:
        store.save(2, state)
        dist.barrier()
    return named_bits(state)


def restore_mlp(directory: Path, shape: tuple[int, int]) -> dict[str, Any]:
    if shape != (1, 1):
        dist.init_process_group("gloo")
    state = mlp_state(1, shape)
    restored = open_store(directory).restore(state)
    assert restored is not None
    return named_bits(state)


def named_bits(state: dict[str, Any]) -> dict[str, Any]:
    """Whole tensors as bytes, by parameter."""
    found = {}
    for name, parameter in state["model"].named_parameters():
        tensors = {"": parameter, **state["optimizer"].state[parameter]}
        for part, tensor in tensors.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found[f"{name}.{part}"] = whole.detach().numpy().tobytes()
    return found


def matrix_state(seed: int, shape: tuple[int, int], dimension: int | None) -> dict[str, Any]:
    """A module with one large matrix, sharded along a dimension over all ranks."""
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    module = nn.Module()
    if dimension is None:
        module.weight = nn.Parameter(whole)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        module.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(dimension)]))
    return {"model": module}


def save_matrix(directory: Path, shape: tuple[int, int], dimension: int) -> int:
    dist.init_process_group("gloo")
    # Of random numbers without coding, a byte stored is a byte needed.
    with open_store(directory, reduction=Reduction(Compression("none"))) as store:
        written = store.save(1, matrix_state(0, shape, dimension)).bytes
        dist.barrier()
    return written


def restore_matrix(
    directory: Path, shape: tuple[int, int], dimension: int | None
) -> tuple[int, int]:
    """Restore and check the bits; returns the bytes read and needed."""
    dist.init_process_group("gloo")
    state = matrix_state(1, shape, dimension)
    restored = open_store(directory).restore(state)
    assert restored is not None
    weight = state["model"].weight
    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
    expected = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(whole, expected)
    return restored.read_bytes, restored.needed_bytes
