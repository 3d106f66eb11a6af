"""Loops of Lightning Fabric, in forked processes."""

from __future__ import annotations

import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
from forked import run_ranks
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from outlast.guard.inject import inject, parse_faults
from outlast.integrations.fabric import Run, StoreCheckpointIO, StoreModelParallelStrategy
from outlast.job import CheckpointSection
from outlast.records import Predicted, read_run
from outlast.records import Run as Recorded
from outlast.tensorize import tensorize

QUIET = ["checkpoint.writer=thread", "energy.measure=false", "log.every_steps=3"]
QUICK = CheckpointSection(writer="thread")


def sharded(model: nn.Module, mesh: Any) -> nn.Module:
    """FSDP2, layer by layer."""
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def fabric_of(folder: Path, how: dict[str, Any]) -> Fabric:
    """One process, DDP, FSDP2 of Fabric, or FSDP2 with a store."""
    ranks = how["ranks"]
    sizes: dict[str, Any] = {"data_parallel_size": ranks, "tensor_parallel_size": 1}
    strategy: Any = {
        "alone": "auto",
        "ddp": "ddp",
        "fsdp": ModelParallelStrategy(sharded, **sizes),
        "store": StoreModelParallelStrategy(sharded, folder / "store", QUICK, **sizes),
    }[how["strategy"]]
    plugins = [StoreCheckpointIO(folder / "store", QUICK)] if how.get("files") else []
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy, plugins=plugins)
    fabric.launch()
    return fabric


def parts(fabric: Fabric, how: dict[str, Any]) -> tuple[nn.Module, Any, Any]:
    """The model, its optimizer and the loader, as a script makes them."""
    torch.manual_seed(7)
    dropout = 0.2 if how["strategy"] == "alone" else 0.0
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 2))
    if how.get("tensorize"):
        tensorize(model, form="low_rank", rank=0.5, match="0", force=True)
    data = TensorDataset(torch.randn(96, 8), torch.randn(96, 2))
    loader = DataLoader(data, 16 // how["ranks"], shuffle=how["strategy"] == "alone")
    if how["strategy"] in ("fsdp", "store"):
        module = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(module.parameters(), lr=1e-2))
    else:
        module, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return module, optimizer, fabric.setup_dataloaders(loader)


def train_step(fabric: Fabric, model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
    """One step; the mean loss of all processes."""
    features, targets = batch
    loss = nn.functional.mse_loss(model(features), targets)
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    mean = fabric.all_reduce(loss.detach())
    assert isinstance(mean, torch.Tensor)
    return mean


def note(folder: Path, fabric: Fabric, step: int, loss: torch.Tensor) -> None:
    """Write the loss of a step down, and do what the plan says for it."""
    with (folder / f"losses{fabric.global_rank}.jsonl").open("a") as file:
        file.write(json.dumps([step, loss.item()]) + "\n")
    plan = folder / "plan"
    if plan.exists():
        at, what, rank = plan.read_text().split()
        if step == int(at) and fabric.global_rank == int(rank):
            plan.unlink()
            os.kill(os.getpid(), getattr(signal, what))


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights, whole, by their plain names."""
    found = {}
    for name, each in model.state_dict().items():
        full = each.full_tensor() if hasattr(each, "full_tensor") else each
        found[name] = full.detach().clone()
    return found


def train(folder: Path, settings: list[str], how: dict[str, Any]) -> int:
    """A loop with everything; the exit code."""
    warnings.simplefilter("ignore")
    fabric = fabric_of(folder, how)
    model, optimizer, loader = parts(fabric, how)
    place = [f'run.directory="{folder}/runs"', "run.name=it"]
    try:
        with Run(
            fabric,
            model=model,
            optimizer=optimizer,
            loader=loader,
            epochs=3,
            settings=[*QUIET, *place, *settings],
            prediction=Predicted(0.5, 0.4, 0.6, 1e8, 5e7, 1e12, 64.0) if "fault" in how else None,
        ) as run:
            if "fault" in how:
                inject(run.guard, parse_faults([how["fault"]]), seed=1)
            for batch in run:
                loss = train_step(fabric, model, optimizer, batch)
                run.log(loss)
                if "joules" in how:
                    meter = Path(how["joules"])
                    meter.write_text(f"{float(meter.read_text()) + 10.0}\n")
                note(folder, fabric, run.step + 1, loss)
    except SystemExit as end:
        return int(end.code or 0)
    except Exception:
        if how["ranks"] == 1:
            raise
        # The other process is gone.
        return 1
    weights = whole(model)
    if fabric.global_rank == 0:
        torch.save(weights, folder / "result.pt")
    return 0


def train_by_files(folder: Path, how: dict[str, Any]) -> int:
    """A loop that saves and loads by `fabric.save` and `fabric.load`; the exit code."""
    warnings.simplefilter("ignore")
    fabric = fabric_of(folder, how)
    model, optimizer, loader = parts(fabric, how)
    state = {"model": model, "optimizer": optimizer, "step": 0, "names": ("a", 1)}
    last = folder / "last.ckpt"
    if last.exists():
        left = fabric.load(last, state)
        assert left == {}
        assert state["names"] == ("a", 1)
    batches = [*loader]
    try:
        while state["step"] < how.get("steps", 18):
            loss = train_step(fabric, model, optimizer, batches[state["step"] % len(batches)])
            state["step"] += 1
            if state["step"] % 4 == 0:
                fabric.save(last, state)
                if how["strategy"] == "store":
                    fabric.strategy.wait()
                else:
                    fabric.strategy.checkpoint_io.wait()
            note(folder, fabric, state["step"], loss)
    except Exception:
        if how["ranks"] == 1:
            raise
        return 1
    # A load waits for the save, which the first process may be at.
    fabric.save(folder / "end.ckpt", state)
    if how["strategy"] != "store":
        assert fabric.load(folder / "end.ckpt")["step"] == state["step"]
    else:
        found = {**state, "step": 0}
        fabric.load(folder / "end.ckpt", found)
        assert found["step"] == state["step"]
    weights = whole(model)
    if fabric.global_rank == 0:
        torch.save(weights, folder / "result.pt")
        (folder / "end.ckpt").unlink()
    fabric.strategy.teardown()
    return 0


def start(folder: Path, *settings: str, plan: str = "", **how: Any) -> list[int | None]:
    """Start a loop once; exit codes by rank, None where it was killed.

    Args:
        folder: Of its files.
        settings: Of the run, beside `QUIET`.
        plan: Steps done, the name of the signal that comes then, and the rank that it comes to.
        how: `ranks`, `strategy`, and options of the script.
    """
    folder.mkdir(exist_ok=True)
    if plan:
        (folder / "plan").write_text(plan if len(plan.split()) == 3 else f"{plan} 0")
    ranks = how.setdefault("ranks", 1)
    how.setdefault("strategy", "alone")
    by_files = how.get("files") or how["strategy"] == "store"
    work: Any = train_by_files if by_files else train
    arguments = (folder, how) if by_files else (folder, [*settings], how)
    codes = run_ranks(ranks, work, *arguments, may_die=range(ranks))
    assert not (folder / "plan").exists()
    return codes


def finish(folder: Path, *settings: str, **how: Any) -> None:
    """Run the loop to its end."""
    assert set(start(folder, *settings, **how)) == {0}


def losses(folder: Path) -> dict[int, float]:
    """Loss by step; of a step that was done again, the last one."""
    lines = (folder / "losses0.jsonl").read_text().splitlines()
    return dict(json.loads(each) for each in lines)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Those at the end."""
    found: dict[str, torch.Tensor] = torch.load(folder / "result.pt", weights_only=True)
    return found


def assert_same(folder: Path, other: Path) -> None:
    """Losses and weights are the same, bit for bit."""
    assert losses(folder) == losses(other)
    one, two = weights(folder), weights(other)
    assert one.keys() == two.keys()
    for key, tensor in two.items():
        assert torch.equal(one[key], tensor), key


def records(folder: Path) -> Recorded:
    """What the run has recorded."""
    return read_run(folder / "runs" / "it")
