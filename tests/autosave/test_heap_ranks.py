"""Models on several ranks: sharded with FSDP2, and replicated with DDP."""

import pytest
import torch
import torch.distributed as dist
from heap_runs import resume
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.distributed

kept = []
"""Models and groups of a rank until its process ends: a group that is let go of while its threads
still need the interpreter may wait for them forever."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)
        self.second = nn.Linear(7, 6)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.second(torch.tanh(self.norm(self.first(x))))


def network():
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.BatchNorm1d(6), Block())


def steps(run, count=3):
    for _ in range(count):
        batch = torch.eye(6) + dist.get_rank() + len(run["losses"])
        run["optimizer"].zero_grad()
        loss = run["model"](batch).square().mean()
        loss.backward()
        run["optimizer"].step()
        run["losses"].append(loss.item())


def whole(tensor):
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone()


def state(run):
    model, optimizer = run["model"], run["optimizer"]
    tensors = [*model.parameters(), *model.buffers()]
    for each in model.parameters():
        tensors += [optimizer.state[each]["exp_avg"], optimizer.state[each]["exp_avg_sq"]]
    return [whole(each) for each in tensors]


def goes_on(setup):
    dist.init_process_group("gloo")
    runs = resume(setup, steps, __name__)
    kept.append(runs)
    equal = all(map(torch.equal, state(runs.saved), state(runs.resumed)))
    bytes_saved = sum(row.nbytes for row in runs.captured.tensors.values())
    for run in (runs.saved, runs.resumed):
        steps(run)
    equal = equal and all(map(torch.equal, state(runs.saved), state(runs.resumed)))
    same = runs.saved["losses"] == runs.resumed["losses"]
    dist.destroy_process_group()
    return equal, same, bytes_saved


def setup_sharded():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = network()
    for each in (model[0], model[2]):
        fully_shard(each, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "losses": [],
    }


def setup_replicated():
    model = DistributedDataParallel(network())
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "losses": [],
    }


def later_dtensors():
    dist.init_process_group("gloo")

    def setup():
        return {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}

    def train(run):
        torch.manual_seed(0)
        sharded = distribute_tensor(torch.randn(5, 2), run["mesh"], [Shard(0)])
        weight = nn.Parameter(sharded)
        weight.grad = sharded * 2
        run |= {"sharded": sharded, "weight": weight}

    runs = resume(setup, train, __name__)
    kept.append(runs)
    run = runs.resumed
    equal = [
        torch.equal(whole(runs.saved[name]), whole(run[name])) for name in ("sharded", "weight")
    ]
    equal.append(torch.equal(whole(runs.saved["weight"].grad), whole(run["weight"].grad)))
    kinds = isinstance(run["weight"], nn.Parameter) and isinstance(run["weight"], DTensor)
    same = run["sharded"].device_mesh is run["mesh"] and run["weight"].placements == (Shard(0),)
    dist.destroy_process_group()
    return all(equal), kinds, same


def test_sharded_models_go_on(ranks):
    done = ranks(2)(goes_on, setup_sharded)
    assert [each[:2] for each in done] == [(True, True)] * 2
    replicated = ranks(2)(goes_on, setup_replicated)
    assert max(each[2] for each in done) < 0.7 * min(each[2] for each in replicated)


def test_replicated_models_go_on(ranks):
    assert [each[:2] for each in ranks(2)(goes_on, setup_replicated)] == [(True, True)] * 2


def test_sharded_tensors_made_after_set_up_come_back(ranks):
    assert ranks(2)(later_dtensors) == [(True, True, True)] * 2
