"""Two torchft groups with Outlast's guard and checkpoints; one of them computes wrong values.

Run it: python examples/integrations/train_torchft.py
"""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.ddp import DistributedDataParallel

from outlast.errors import EXIT_DATA_CORRUPTION, DataCorruptionError
from outlast.guard import guard
from outlast.guard.inject import inject, parse_faults
from outlast.integrations.torchft import guarded_commit, kept_state
from outlast.recover.live import Lighthouse

STEPS = 40


def train(group: int, lighthouse: str, folder: str, begin) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state = {"model": model, "optimizer": adamw}
    handle = guard(model, adamw)
    if group == 1:  # a device that goes wrong at step 10, for good
        inject(handle, parse_faults(["linear.output:module=2:bit=27:permanent:step=10"]))

    def load(content):
        for name, each in state.items():
            each.load_state_dict(content[name])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=load,
        state_dict=lambda: {name: each.state_dict() for name, each in state.items()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"group{group}",
        hostname="127.0.0.1",
    )
    shared, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, adamw)
    begin.wait()
    try:
        with (
            kept_state(manager, folder, state, every=10),
            guarded_commit(manager, handle),
        ):
            while manager.current_step() < STEPS:
                optimizer.zero_grad()
                inputs = torch.randn(12, 8)
                loss = (shared(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean()
                loss.backward()
                optimizer.step()
    except DataCorruptionError as error:
        print(f"group {group}: {error}", flush=True)
        sys.exit(EXIT_DATA_CORRUPTION)
    print(f"group {group}: step {manager.current_step()}, loss {loss:.4f}", flush=True)
    manager.shutdown(wait=False)


def main() -> None:
    # Forked, so that neither group has to import torch again.
    context = multiprocessing.get_context("fork")
    begin = context.Barrier(2)
    with tempfile.TemporaryDirectory() as folder, Lighthouse() as lighthouse:
        arguments = f"http://{lighthouse.address}", folder, begin
        groups = [context.Process(target=train, args=(group, *arguments)) for group in (0, 1)]
        for each in groups:
            each.start()
        for each in groups:
            each.join()
        print("exit codes", *(each.exitcode for each in groups))


if __name__ == "__main__":
    main()
