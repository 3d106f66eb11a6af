"""A small training with DeepSpeed on the CPU, whose losses are written down before it is killed."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer

from outlast.integrations.deepspeed import OutlastCheckpointEngine, Run

BATCH, STEPS, EVERY = 12, 12, 4
DEADLINE_SECONDS = 60.0


@pytest.fixture(scope="session", autouse=True)
def built():
    """DeepSpeed's operator for the CPU, before any rank would have to wait for its build."""
    if shutil.which("g++") is None:
        pytest.skip("DeepSpeed compiles its operators with g++, which is not installed")
    build()


def build():
    """Build that operator, or load it.

    A rank that builds it takes minutes, and one that is killed meanwhile leaves a lock that all
    others wait for.
    """
    deepspeed.accelerator.get_accelerator().create_op_builder("ShareMemCommBuilder").load()


def begin():
    torch.set_num_threads(1)
    deepspeed.logger.setLevel("ERROR")
    dist.init_process_group("gloo")
    deepspeed.init_distributed("gloo")


def model_of(dropout=0.0):
    """A model whose parameters do not divide by the ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, 3))


def engine_of(stage, model=None, dataset=None, **settings):
    """ZeRO of a model; with a loader of its own, where it is given a dataset."""
    model = model_of() if model is None else model
    config = {
        "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(),
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 6}},
        "zero_optimization": {"stage": stage},
        **settings,
    }
    return deepspeed.initialize(model=model, config=config, training_data=dataset)[0]


def data():
    samples = BATCH * STEPS
    drawn = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 5, generator=drawn)
    return inputs, torch.stack([inputs.sum(1), inputs.prod(1), inputs.amax(1)], 1)


def learn(engine, inputs, targets):
    """One step; the loss over all ranks."""
    half = next(engine.module.parameters()).dtype
    loss = nn.functional.mse_loss(engine(inputs.to(half)), targets.to(half))
    engine.backward(loss)
    engine.step()
    mean = loss.detach().float() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()


def write_down(place, step, loss):
    if dist.get_rank() == 0:
        with (Path(place) / "losses").open("a") as file:
            file.write(f"{step} {loss.hex()}\n")


def losses(place):
    """Step to loss; a step that was done twice must have given the same."""
    found = {}
    for line in (Path(place) / "losses").read_text().splitlines():
        step, loss = line.split()
        assert found.setdefault(int(step), float.fromhex(loss)) == float.fromhex(loss), step
    return found


def train(place, stage, until=STEPS, die_after=0, keep=True):
    """A loop that saves and loads by DeepSpeed's calls; how many steps were restored."""
    begin()
    engine = engine_of(stage)
    if keep:
        engine.checkpoint_engine = OutlastCheckpointEngine(place)
    _, client = engine.load_checkpoint(place)
    step = restored = client["step"] if client else 0
    inputs, targets = (each.split(BATCH) for each in data())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    while step < until:
        mine = (each[step].chunk(ranks)[rank] for each in (inputs, targets))
        loss = learn(engine, *mine)
        step += 1
        write_down(place, step, loss)
        if step % EVERY == 0:
            engine.save_checkpoint(place, client_state={"step": step})
            if keep and step == EVERY:
                engine.checkpoint_engine.wait()
        if step == die_after:
            os.kill(os.getpid(), signal.SIGKILL)
    if keep:
        engine.checkpoint_engine.cleanup()
    dist.barrier()
    return restored


def run(
    place,
    stage,
    settings=(),
    stop_after=0,
    die_after=0,
    during=None,
    accumulate=1,
    own_loader=False,
):
    """A loop under `Run`; the exit code."""
    begin()
    dataset = TensorDataset(*data())
    engine = engine_of(
        stage, model_of(dropout=0.2), dataset, gradient_accumulation_steps=accumulate
    )
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, BATCH // dist.get_world_size(), sampler=sampler)
    loader = engine.training_dataloader if own_loader else loader
    keeping = (f"run.directory={place}", "run.name=r", f"checkpoint.every_steps={EVERY}", *settings)
    try:
        with Run(engine=engine, loader=loader, epochs=2, settings=keeping) as outlast:
            for batch in outlast:
                if during is not None:
                    during(outlast, engine)
                loss = learn(engine, *batch)
                outlast.log(loss)
                step = outlast.step + 1
                write_down(place, step, loss)
                if step == die_after:
                    await_version(place, (step - 1) // EVERY * EVERY)
                    os.kill(os.getpid(), signal.SIGKILL)
                if step == stop_after and dist.get_rank() == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
    except SystemExit as stopped:
        return stopped.code
    torch.save(engine.module.state_dict(), Path(place) / f"weights{dist.get_rank()}.pt")
    return 0


def kill(before_step, run, engine):
    """Kills the last rank before a step of the first start of the group."""
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and run.step == before_step - 1 and dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)


def await_version(place, step):
    """Until the version of this step is whole: there is something to continue from."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not any((Path(place) / "r" / "checkpoints").glob(f"step-{step:08}-*/version.json")):
        assert time.monotonic() < deadline, f"no version of step {step} was published"
        time.sleep(0.02)
