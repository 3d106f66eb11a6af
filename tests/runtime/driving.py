"""One small training for every driver of the runtime, in forked processes that meet an accident.

A driver trains `network()` on `samples()` and calls `Way.done` after each step; what happens to it
there is written in the file `plan` of its folder, so that it happens once.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from forked import run_ranks
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

from outlast import cluster
from outlast.checkpoint.tiers import Place
from outlast.records import CheckpointSaved, Run, read_run

SAMPLES, BATCH, PER_EPOCH, EPOCHS = 48, 8, 6, 2
STEPS = PER_EPOCH * EPOCHS
EVERY = 4

SAVE_SECONDS = 10.0
"""Longest time that a save takes."""

QUIET = ("checkpoint.writer=thread", "energy.measure=false", "log.every_steps=1")

ALONE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Way:
    """How one start of a training goes.

    Attributes:
        folder: Of all its files.
        settings: Of its job, beside `QUIET` and its place.
        ranks: Processes.
        steps: Of the run; None: `EPOCHS` times through the data.
        dropout: Of the network.
        accumulate: Batches of a step.
        every: Steps between saves.
        fault: That is injected into the guard.
        metrics: Whether figures of other kinds than floats are logged.
        kept: Whether a launcher would start it again, and steps are kept in memory.
        start: Number of this start by its launcher.
    """

    folder: Path
    settings: tuple[str, ...] = ()
    ranks: int = 1
    steps: int | None = None
    dropout: float = 0.2
    accumulate: int = 1
    every: int = EVERY
    fault: str = ""
    metrics: bool = False
    kept: bool = False
    start: int = 0

    @property
    def total(self) -> int:
        """Steps of the whole run."""
        return self.steps or STEPS // self.accumulate

    def job(self) -> list[str]:
        """Settings of a job with a run directory of its own."""
        place = [f'run.directory="{self.folder}/runs"', "run.name=it"]
        return [*self.elsewhere(), *place, f"checkpoint.every_steps={self.every}"]

    def elsewhere(self) -> list[str]:
        """Settings of a job whose framework says where it runs, and when it saves."""
        return [*QUIET, f'recover.memory="{self.folder}/memory"', *self.settings]

    def network(self) -> nn.Module:
        """The model, with the same first weights each time."""
        torch.manual_seed(7)
        return nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), nn.Dropout(self.dropout), nn.Linear(16, 1)
        )

    def samples(self) -> TensorDataset:
        """What is learnt."""
        drawn = torch.Generator().manual_seed(8)
        features = torch.randn(SAMPLES, 8, generator=drawn)
        return TensorDataset(features, features.sum(1, keepdim=True))

    def loader(self) -> DataLoader[Any]:
        """The batches of this rank; all ranks together have as many samples in each."""
        data, batch = self.samples(), BATCH // self.ranks
        if not self.dropout:
            # In an order that is the same for any number of processes.
            rank = int(os.environ.get("RANK", 0)) if self.ranks > 1 else 0
            return DataLoader(data, batch, sampler=DistributedSampler(data, self.ranks, rank))
        torch.manual_seed(9)
        return DataLoader(data, batch, sampler=RandomSampler(data))

    def wrote(self, step: int, loss: float) -> None:
        """Write down what a step gave; on rank 0."""
        with (self.folder / "losses").open("a") as file:
            file.write(json.dumps([step, loss]) + "\n")

    def done(self, step: int, loss: float, rank: int = 0) -> str:
        """Write down what a step gave, and let happen what is planned for it.

        Returns:
            What the driver is to do: ``break``, or nothing.
        """
        if rank == 0:
            self.wrote(step, loss)
        return self.meet(step, rank)

    def meet(self, step: int, rank: int = 0) -> str:
        """Let happen what is planned for a step; gives what the driver is to do."""
        what = self._planned(step, rank)
        if what == "kill_saved":
            wait_for_save(self.folder, step - self.every)
            os.kill(os.getpid(), signal.SIGKILL)
        elif what.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, what))
        elif what == "raise":
            raise ValueError("it went wrong")
        elif what == "end":
            (self.folder / "job_ends").touch()
        return what

    def _planned(self, step: int, rank: int) -> str:
        plan = self.folder / "plan"
        if not plan.exists():
            return ""
        at, what, of_rank = plan.read_text().split()
        if step != int(at) or rank != int(of_rank):
            return ""
        plan.unlink()
        return what

    def result(self, model: nn.Module, rank: int = 0) -> None:
        """Write the last weights down."""
        whole = {
            name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            for name, tensor in model.state_dict().items()
        }
        if rank == 0:
            torch.save(whole, self.folder / "result.pt")

    def losses(self) -> dict[int, float]:
        """Loss by step; of a step that was done again, the last one."""
        lines = (self.folder / "losses").read_text().splitlines()
        return dict(json.loads(line) for line in lines)

    def weights(self) -> dict[str, torch.Tensor]:
        """Those at the end."""
        found: dict[str, torch.Tensor] = torch.load(self.folder / "result.pt", weights_only=True)
        return found


def versions(folder: Path) -> dict[int, Path]:
    """Folders of the versions that are complete, by step."""
    found = {}
    for sealed in folder.rglob("version.json"):
        if step := re.search(r"step-0*(\d+)", sealed.parent.name):
            found[int(step[1])] = sealed.parent
    return found


def wait_for_save(folder: Path, step: int) -> None:
    """Wait for a version after `step` to be complete: steps here are quicker than saves."""
    deadline = time.monotonic() + SAVE_SECONDS
    while time.monotonic() < deadline and max(versions(folder), default=0) <= step:
        time.sleep(0.01)


@dataclass(frozen=True)
class Driver:
    """Something that drives a runtime.

    Attributes:
        name: Of it.
        train: Does one start in this process and returns its exit code.
        lacks: Cases that it cannot have, each with the reason.
        run: Its run directory in the folder.
        alone: Whether one process of it needs no process group.
        kills: When it is killed, one start after the other.
        counts_batches: Whether a step of it is a batch, also in an accumulation.
        sees_errors: Whether its records say how a program has failed.
        loads: Modules that are imported once, before its processes are forked.
        starts: Another way to start it, in place of forked ranks: gives exit codes by rank.
    """

    name: str
    train: Callable[[Way], int]
    lacks: dict[str, str]
    run: str = "runs/it"
    alone: bool = True
    kills: tuple[str, ...] = ("3 SIGKILL", "2 update", "8 save", "11 kill_saved")
    counts_batches: bool = False
    sees_errors: bool = True
    loads: tuple[str, ...] = ()
    starts: Callable[[Way], list[int | None]] | None = None

    def start(self, way: Way, plan: str = "") -> list[int | None]:
        """Start a training once; exit codes by rank, None where it was killed.

        Args:
            way: How it goes.
            plan: Steps done, what happens then, and optionally to which rank: the name of a signal;
                ``raise``; ``break``; ``end``, of its job's time; ``update`` or ``save``, in which
                it is killed; ``kill_saved``, as soon as its last save is complete; ``flip``: a bit
                of a weight flips behind the update, and SIGTERM comes.
        """
        way.folder.mkdir(exist_ok=True)
        if plan:
            text = plan if len(plan.split()) == 3 else f"{plan} 0"
            (way.folder / "plan").write_text(text)
        if self.starts is not None:
            codes = self.starts(way)
        else:
            codes = run_ranks(way.ranks, _in_process, self, way, may_die=range(way.ranks))
        assert not (way.folder / "plan").exists(), f"the plan was not carried out: {codes}"
        return codes

    def finish(self, way: Way) -> Way:
        """Train to the end."""
        assert set(self.start(way)) == {0}
        return way

    def finish_after(self, way: Way, plan: str) -> Way:
        """Train to the end, although something happens."""
        assert set(self.start(way, plan)) == {0}
        return way

    def records(self, way: Way) -> Run:
        """What the run has recorded."""
        return read_run(way.folder / self.run)

    def saved(self, way: Way) -> list[int]:
        """The steps of all saves."""
        return [event.step for _, event in self.records(way).of(CheckpointSaved)]


def _in_process(driver: Driver, way: Way) -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if way.kept:
        os.environ["TORCHELASTIC_MAX_RESTARTS"] = "9"
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(way.start)
    elif way.ranks == 1 and driver.alone:
        for name in ALONE:
            os.environ.pop(name, None)
    with accidents(way):
        try:
            return driver.train(way)
        except SystemExit as ended:
            return int(ended.code or 0)
        except Exception as error:
            said = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            (way.folder / f"error{os.environ.get('RANK', 0)}").write_text(said)
            return 1


@contextmanager
def accidents(way: Way) -> Iterator[None]:
    """Within, what is planned happens in a step's update or save, and the job's time may end."""
    rank = int(os.environ.get("RANK", 0))
    plan = way.folder / "plan"
    at, what, of_rank = plan.read_text().split() if plan.exists() else ("-1", "", "0")
    seal, updates = Place.seal, [0]

    def die() -> None:
        plan.unlink(missing_ok=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def update(*_: Any) -> None:
        updates[0] += 1
        if updates[0] == int(at):
            die()

    def flip(optimizer: Any, *_: Any) -> None:
        updates[0] += 1
        if updates[0] == int(at):
            plan.unlink()
            weight = optimizer.param_groups[0]["params"][0]
            own = weight.to_local() if hasattr(weight, "to_local") else weight
            # A view of its own: the program has not written to the weight.
            own.data.view(torch.int32).view(-1)[0] ^= 1 << 20
            os.kill(os.getpid(), signal.SIGTERM)

    def sealed(place: Place, version: Any) -> None:
        if what == "full" and version.step == int(at):
            plan.unlink(missing_ok=True)
            raise OSError(28, "No space left on device")
        if what == "save" and version.step == int(at):
            die()
        seal(place, version)

    hook = None
    if what == "update" and rank == int(of_rank):
        hook = register_optimizer_step_pre_hook(update)
    if what == "flip":
        hook = register_optimizer_step_post_hook(flip)
    if what in ("save", "full") and rank == 0:
        Place.seal = sealed  # type: ignore[method-assign]
    own = {name: getattr(cluster, name) for name in ("should_stop", "report_progress")}
    own["report_outcome"] = cluster.report_outcome
    if what == "end":
        os.environ["OUTLAST_CHAIN"] = "1"
    for name in own:
        setattr(cluster, name, lambda *_, **__: None)
    cluster.should_stop = lambda *_: what == "end" and (way.folder / "job_ends").exists()
    try:
        yield
    finally:
        os.environ.pop("OUTLAST_CHAIN", None)
        Place.seal = seal  # type: ignore[method-assign]
        for name, call in own.items():
            setattr(cluster, name, call)
        if hook is not None:
            hook.remove()


def assert_same(one: Way, other: Way) -> None:
    """Losses and weights are the same, bit for bit."""
    assert one.losses() == other.losses()
    first, second = one.weights(), other.weights()
    assert first.keys() == second.keys()
    for name, tensor in second.items():
        assert torch.equal(first[name], tensor), name
