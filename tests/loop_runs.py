"""Hand-written loops under `outlast.Run`, in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from running import Ended, plain

from outlast.records import CheckpointSaved, Run, read_run

QUIET = ["checkpoint.writer=thread", "energy.measure=false", "log.every_steps=3"]
"""Settings that make short runs short."""

SCRIPT = '''
import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import outlast
from outlast.guard.inject import inject, parse_faults
from outlast.records import Predicted
from outlast.tensorize import tensorize

HERE = Path(__file__).parent
HOW = json.loads(sys.argv[1])


def planned(step):
    """What the next line of the file `plan` says, if it is for this step."""
    plan = HERE / "plan"
    if plan.exists():
        line, *lines = plan.read_text().splitlines()
        at, what = line.split()
        if step == int(at):
            plan.write_text("\\n".join(lines)) if lines else plan.unlink()
            return what
    return ""


class Stream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


torch.manual_seed(7)
model = nn.Sequential(
    nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
)
if "form" in HOW:
    tensorize(model, form=HOW["form"], rank=2, force=True)
average = torch.optim.swa_utils.AveragedModel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.8)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=7)
data = TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
if HOW.get("stream"):
    loader = DataLoader(Stream(data), 8)
else:
    workers = HOW.get("workers", 0)
    # What starts the processes of tests would have workers begin with this script.
    start = "fork" if workers else None
    loader = DataLoader(
        data, 8, shuffle=True, num_workers=workers, multiprocessing_context=start
    )
accumulate = HOW.get("accumulate", 1)
prediction = Predicted(0.5, 0.4, 0.6, 1e8, 5e7, 1e12, 64.0) if HOW.get("predicted") else None

with outlast.Run(
    model=model,
    optimizer=optimizer,
    loader=loader,
    state={"schedule": schedule, "scaler": scaler, "average": average},
    epochs=HOW.get("epochs", 3),
    steps=HOW.get("steps"),
    settings=[f'run.directory="{HERE}/runs"', "run.name=it", *HOW["settings"]],
    tokens_per_step=HOW.get("tokens", 0),
    fresh=HOW.get("fresh", False),
    prediction=prediction,
) as run:
    if "fault" in HOW:
        inject(run.guard, parse_faults([HOW["fault"]]), seed=1)
    for features, targets in run:
        step = run.step
        what = planned(step)
        if what == "leave":
            break
        loss = nn.functional.mse_loss(model(features), targets)
        if what == "infinite":
            loss = loss * torch.inf
        scaler.scale(loss / accumulate).backward()
        if (step + 1) % accumulate == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
            average.update_parameters(model)
        if not HOW.get("silent"):
            run.log(loss)
        with (HERE / "steps.jsonl").open("a") as file:
            file.write(json.dumps([step + 1, loss.item()]) + "\\n")
        if "joules" in HOW:
            meter = Path(HOW["joules"])
            meter.write_text(f"{float(meter.read_text()) + 10.0}\\n")
        if what.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, what))
        elif what == "flip":
            words = optimizer.state[model[0].weight]["exp_avg"].data.view(-1).view(torch.int32)
            words[5:6].bitwise_xor_(1 << 21)
        elif what == "back":
            (HERE / "mount").unlink()
        elif what == "break":
            break
        elif what == "raise":
            raise ValueError("it went wrong")

torch.save({"model": model.state_dict(), "average": average.state_dict()}, HERE / "result.pt")
'''
"""Does 12 steps an epoch."""


def start(folder: Path, *settings: str, plan: str = "", **how: Any) -> Ended:
    """Run the script in `folder` once.

    Args:
        folder: Of the script, its runs and results.
        settings: Of the run, beside `QUIET`.
        plan: Lines of a step and what happens in it: the name of a signal, ``break``, ``leave``
            (before anything is done with the batch), ``raise``, ``infinite``, ``flip``, of a bit
            in memory, or ``back``, which takes the file ``mount`` out of the way.
        how: Options of the script.
    """
    script = folder / "train.py"
    script.write_text(SCRIPT)
    if plan:
        (folder / "plan").write_text(plan)
    ended = plain(script, json.dumps({**how, "settings": [*QUIET, *settings]}))
    assert not (folder / "plan").exists(), ended.said
    return ended


def finish(folder: Path, *settings: str, **how: Any) -> None:
    """Run the script in `folder` to its end."""
    ended = start(folder, *settings, **how)
    assert ended.code == 0, ended.said


def undisturbed(folder: Path, *settings: str, **how: Any) -> Path:
    """A run beside `folder` that nothing happens to."""
    other = folder / "undisturbed"
    other.mkdir()
    finish(other, *settings, **how)
    return other


def losses(folder: Path) -> dict[int, float]:
    """Loss by step; of a step that was done again, the last one."""
    lines = (folder / "steps.jsonl").read_text().splitlines()
    return dict(json.loads(each) for each in lines)


def assert_same(folder: Path, other: Path) -> None:
    """Weights, averages and losses are the same, bit for bit."""
    assert losses(folder) == losses(other)
    one, two = (torch.load(each / "result.pt", weights_only=True) for each in (folder, other))
    for name in ("model", "average"):
        assert one[name].keys() == two[name].keys()
        for key, tensor in two[name].items():
            assert torch.equal(one[name][key], tensor), (name, key)


def records(folder: Path) -> Run:
    """What the run has recorded."""
    return read_run(folder / "runs" / "it")


def saved_steps(folder: Path) -> list[int]:
    """The steps of all saves."""
    return [event.step for _, event in records(folder).of(CheckpointSaved)]
