"""Loops on Accelerate with a checkpoint store: killed, resumed, on other numbers of processes."""

from __future__ import annotations

import hashlib
import math
import os
import signal
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration

from outlast.errors import IntegrationError
from outlast.guard.inject import inject, parse_faults
from outlast.integrations.accelerate import (
    add_checkpoints,
    add_guard,
    add_records,
    add_recover,
    add_stop,
)
from outlast.job import load_loop_job
from outlast.records import (
    AttemptEnded,
    CheckpointRestored,
    CheckpointSaved,
    CorruptionDetected,
    EnergyMeasured,
    Guarded,
    StepsDone,
    read_run,
)

pytestmark = pytest.mark.distributed

SAMPLES, GLOBAL_BATCH, EPOCHS = 64, 8, 2

kept: list[Any] = []
"""Models and groups of a process until it ends: a group that is let go of while its threads still
need the interpreter may wait for them forever."""


@dataclass
class Plan:
    """What each process is to do; see `hf_training.Plan`."""

    folder: Path
    ours: bool = True
    dropout: float = 0.1
    dies_at: int = 0
    signals_at: int = 0
    fault: str = ""
    records: bool = False
    every: int = 3
    load: Any = None
    resume: bool = False
    remembers: bool = False
    waits: bool = True


def looped(plan: Plan) -> tuple[int, list[float], str, int]:
    """The loop: steps done before, losses of the others, final weights and exit code."""
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    seeds = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5)
    accelerator = Accelerator(cpu=True, dataloader_config=seeds)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(plan.dropout), nn.Linear(16, 1))
    x = torch.randn(SAMPLES, 4)
    batch = GLOBAL_BATCH // accelerator.num_processes
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch, shuffle=True)
    torch.manual_seed(2 + accelerator.process_index)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(schedule)
    saving = (
        add_checkpoints(accelerator, plan.folder / "store", writer="thread") if plan.ours else None
    )
    memory = None
    settings = [f'run.directory="{plan.folder}"', "log.every_steps=2", "energy.every_steps=1"]
    settings += [f'energy.sources=["file:{plan.folder}/joules0"]']
    settings += [f'recover.memory="{plan.folder}/memory"']
    job = load_loop_job(None, settings)
    if plan.remembers:
        assert saving is not None
        memory = add_recover(accelerator, saving, job)
    if plan.resume or (memory is not None and saving is not None and saving.newest() is not None):
        accelerator.load_state(plan.load)
    first = 0 if saving is None else saving.steps
    guard = tracker = None
    if plan.records:
        meter = plan.folder / f"joules{accelerator.process_index}"
        meter.write_text("1.0\n")
        guard = add_guard(accelerator, "linear")
        if plan.fault:
            inject(guard.guard, parse_faults([plan.fault]), rank=accelerator.process_index)
        tracker = add_records(accelerator, job, steps=16, guard=guard, saving=saving)
    stop = add_stop(accelerator, saving=saving, tracker=tracker)
    kept.extend([accelerator, model, optimizer, loader, saving, guard, tracker, stop])
    losses, step = [], first
    per_epoch = len(loader)
    for epoch in range(first // per_epoch, EPOCHS):
        loader.set_epoch(epoch)
        for features, targets in accelerator.skip_first_batches(loader, step - epoch * per_epoch):
            loss = nn.functional.mse_loss(model(features), targets)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            mean = accelerator.gather(loss.detach().reshape(1)).mean().item()
            losses.append(mean)
            if plan.records:
                meter.write_text(f"{float(meter.read_text()) + 1.0}\n")
                accelerator.log({"loss": mean, "lr": schedule.get_last_lr()[0]}, step=step)
            if step % plan.every == 0:
                accelerator.save_state(str(plan.folder / f"state-{step}"))
            if memory is not None:
                memory.keep()
            if step == plan.dies_at:
                if plan.waits and saving is not None:
                    saving.finish()
                    accelerator.wait_for_everyone()
                elif memory is not None:
                    # As the next step's update would do.
                    memory._runtime.before_update()
                os.kill(os.getpid(), signal.SIGKILL)
            if step == plan.signals_at and accelerator.process_index == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            if stop(step):
                accelerator.save_state(str(plan.folder / "stopped"))
                try:
                    stop.leave()
                except SystemExit as end:
                    return first, losses, _digest(model), int(end.code or 0)
    digest = _digest(model)
    accelerator.end_training()
    return first, losses, digest, 0


def _digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for each in model.parameters():
        found.update(each.detach().numpy().tobytes())
    return found.hexdigest()


def _alone(plan: Plan) -> Any:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name, None)
    return looped(plan)


def run(processes: int, plan: Plan) -> list[Any]:
    plan.folder.mkdir(exist_ok=True)
    dies = set(range(processes)) if plan.dies_at else set()
    if processes == 1 and not plan.remembers:
        return run_ranks(1, _alone, plan, may_die=dies)
    return run_ranks(processes, looped, plan, may_die=dies)


@pytest.mark.supports("accelerate", "checkpoint", "resume")
def test_killed_processes_go_on_to_the_same_bits(tmp_path: Path) -> None:
    [whole, other] = run(2, Plan(tmp_path / "whole"))
    assert whole[1] == other[1]
    assert len(whole[1]) == 16
    folder = tmp_path / "killed"
    assert run(2, Plan(folder, dies_at=11)) == [None, None]
    [resumed, _] = run(2, Plan(folder, resume=True))
    assert resumed[0] == 9
    assert resumed[1] == whole[1][9:]
    assert resumed[2] == whole[2]
    # A folder leads to its state; what was never published, to the one before.
    [older, _] = run(2, Plan(folder, resume=True, load=str(folder / "state-6")))
    assert older[0] == 6
    assert older[2] == whole[2]
    # So does one of another run, whose own store is empty yet.
    [branched, _] = run(2, Plan(tmp_path / "new", resume=True, load=str(folder / "state-6")))
    assert branched[0] == 6
    assert branched[2] == whole[2]


@pytest.mark.supports("accelerate", "malleable")
def test_one_process_goes_on_where_two_were(tmp_path: Path) -> None:
    [whole, _] = run(2, Plan(tmp_path / "whole", dropout=0.0))
    folder = tmp_path / "killed"
    assert run(2, Plan(folder, dropout=0.0, dies_at=10)) == [None, None]
    [shrunk] = run(1, Plan(folder, dropout=0.0, resume=True))
    assert shrunk[0] == 9
    assert shrunk[1] == pytest.approx(whole[1][9:], rel=1e-4)
    [grown, _] = run(2, Plan(folder, dropout=0.0, resume=True, load=str(folder / "state-12")))
    assert grown[0] == 12
    assert grown[1] == pytest.approx(whole[1][12:], rel=1e-4)


@pytest.mark.supports("accelerate", "chain", "records", "guard", "energy")
def test_stopped_recorded_and_guarded(tmp_path: Path) -> None:
    fault = "linear.output:module=3:bit=30:step=2"
    whole = run(2, Plan(tmp_path / "whole", every=100))[0]
    folder = tmp_path / "run"
    stopped = run(2, Plan(folder, records=True, fault=fault, signals_at=7, every=100))
    assert [each[3] for each in stopped] == [3, 3]
    resumed = run(2, Plan(folder, records=True, resume=True, every=100))[0]
    # Ranks look at each other's flags now and then, not at every step.
    last = resumed[0]
    assert 7 <= last < 16
    assert resumed[2] == whole[2]
    found = read_run(folder / "run")
    assert [each.outcome for each in found.attempts] == ["to_be_continued", "completed"]
    assert [event.step for _, event in found.of(CheckpointSaved)] == [last]
    assert [event.step for _, event in found.of(CheckpointRestored)] == [last]
    losses = dict(found.losses())
    # Each record has the mean of its own steps.
    assert losses[2] == pytest.approx(sum(whole[1][:2]) / 2, rel=1e-5)
    assert losses[16] == pytest.approx(sum(whole[1][14:]) / 2, rel=1e-5)
    assert [event.step for _, event in found.of(CorruptionDetected)] == [2]
    assert found.of(Guarded)
    assert found.of(EnergyMeasured)


STEPS_PER_EPOCH = 40


def asked(left_by_stop: bool) -> tuple[tuple[int, int], int, bool]:
    """Where a loop stopped that counts from 1 in each epoch, the exit code, whether Ctrl-C is back.

    The signal comes to the second process, in the second epoch.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    accelerator = Accelerator(cpu=True)
    stop = add_stop(accelerator)
    kept.extend([accelerator, stop])
    taken = signal.getsignal(signal.SIGTERM) != before[0]
    code, where = 0, (0, 0)
    for epoch in range(2):
        for step, _ in enumerate(range(STEPS_PER_EPOCH), 1):
            if epoch == 1 and step == 1 and accelerator.process_index == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if not where[0] and stop(step):
                where = (epoch, step)
    try:
        if left_by_stop:
            stop.leave()
        else:
            accelerator.end_training()
    except SystemExit as end:
        code = int(end.code or 0)
    after = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    return where, code, taken and after == before


@pytest.mark.supports("accelerate", "chain")
def test_a_signal_in_the_second_epoch_stops_all_processes() -> None:
    [first, second] = run_ranks(2, asked, True)
    assert first == second
    (epoch, step), code, restored = first
    assert epoch == 1
    assert 1 <= step <= STEPS_PER_EPOCH
    assert code == 3
    assert restored
    assert [each[2] for each in run_ranks(2, asked, False)] == [True, True]


def prepared(folder: Path) -> tuple[Accelerator, Any]:
    """An accelerator of a small model, and its store."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    saving = add_checkpoints(accelerator, folder / "store", writer="thread")
    kept.extend([accelerator, saving])
    return accelerator, saving


def stopped_first(folder: Path) -> int:
    """After how many steps a loop stops that is asked to before its first, far in its run."""
    accelerator, saving = prepared(folder)
    saving.steps = 10**6
    stop = add_stop(accelerator)
    job = load_loop_job(None, [f'run.directory="{folder}"', "energy.measure=false"])
    add_records(accelerator, job, saving=saving)
    if accelerator.process_index == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    calls = next((call for call in range(1, 1000) if stop(call)), 0)
    accelerator.end_training()
    return calls


@pytest.mark.supports("accelerate", "chain")
def test_a_stop_that_is_added_before_the_records_is_seen_after_a_resume(tmp_path: Path) -> None:
    assert run_ranks(2, stopped_first, tmp_path) == [1, 1]


def test_the_first_step_has_no_set_up_in_it_and_no_guard_is_one(tmp_path: Path) -> None:
    def work() -> tuple[bool, Any]:
        accelerator, saving = prepared(tmp_path)
        guard = add_guard(accelerator, "off")
        time.sleep(0.5)
        stop = add_stop(accelerator)
        stop(1)
        seconds = saving._runtime.clock.seconds
        accelerator.end_training()
        return seconds < 0.5, guard

    assert run_ranks(1, _plain, work) == [(True, None)]


def test_an_error_that_ends_training_in_a_finally_is_recorded(tmp_path: Path) -> None:
    def work() -> None:
        accelerator, saving = prepared(tmp_path)
        settings = [f'run.directory="{tmp_path}"', "energy.measure=false"]
        add_records(accelerator, load_loop_job(None, settings), saving=saving)

        def loop() -> None:
            try:
                raise ValueError("bad batch")
            finally:
                accelerator.end_training()

        with pytest.raises(ValueError, match="bad batch"):
            loop()

    run_ranks(1, _plain, work)
    [(_, ended)] = read_run(tmp_path / "run").of(AttemptEnded)
    assert (ended.outcome, ended.reason) == ("failed", "ValueError: bad batch")


def _plain(work: Any, *arguments: Any) -> Any:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name, None)
    return work(*arguments)


def test_a_loss_that_is_no_number_is_passed_over(tmp_path: Path) -> None:
    def work() -> list[float]:
        accelerator, saving = prepared(tmp_path)
        settings = [f'run.directory="{tmp_path}"', "energy.measure=false", "log.every_steps=1"]
        add_records(accelerator, load_loop_job(None, settings), saving=saving)
        for loss in (2.0, "nan?", torch.ones(2)):
            accelerator._models[0](torch.ones(2)).sum().backward()
            accelerator._optimizers[0].step()
            accelerator.log({"loss": loss, "lr": 0.5, "grad_norm": None})
        accelerator.end_training()
        return [event.loss for _, event in read_run(tmp_path / "run").of(StepsDone)]

    [losses] = run_ranks(1, _plain, work)
    assert losses == pytest.approx([2.0, math.nan, math.nan], nan_ok=True)


def test_folders_of_accelerate_itself_are_loaded(tmp_path: Path) -> None:
    def work() -> tuple[bool, int]:
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(2, 2)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.save_state(str(tmp_path / "own"))
        weight = model.weight.detach().clone()
        saving = add_checkpoints(accelerator, tmp_path / "store", writer="thread")
        with torch.no_grad():
            model.weight.zero_()
        accelerator.load_state(str(tmp_path / "own"))
        saving.close()
        return torch.equal(model.weight, weight), saving.steps

    assert run_ranks(1, _plain, work) == [(True, 0)]


WITHOUT_EFFECT = {
    "mtbf_hours": 5.0,
    "slowdown_budget": 0.1,
    "longest_minutes": 5.0,
    "when_busy": "skip",
    "fast_private": True,
    "fast_keep": 2,
    "drain_every": 2,
    "drain_megabytes_per_s": 1.0,
    "mirror_every": 2,
    "mirror_megabytes_per_s": 1.0,
}
"""Settings of [checkpoint] that a script on an Accelerator decides itself."""


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    with pytest.raises(IntegrationError, match="after accelerator"):
        add_checkpoints(accelerator, tmp_path)
    with pytest.raises(IntegrationError, match="total_limit how many states are kept"):
        add_checkpoints(accelerator, tmp_path, keep=7)
    for name, value in WITHOUT_EFFECT.items():
        with pytest.raises(IntegrationError, match=rf"checkpoint\.{name} = .* has no effect"):
            add_checkpoints(accelerator, tmp_path, **{name: value})
    with (
        pytest.raises(IntegrationError, match="after accelerator"),
        warnings.catch_warnings(),
    ):
        add_records(accelerator)
