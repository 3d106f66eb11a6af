"""The drivers of the runtime, each with a loop as its users write it."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from driving import BATCH, EPOCHS, PER_EPOCH, Driver, Way
from running import outlast as outlast_command
from tiny import SETTINGS, corpus
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import outlast
from outlast import cluster
from outlast.distributed.ranks import ALONE, ranks_from
from outlast.guard.inject import inject, parse_faults
from outlast.job import load_job, load_loop_job
from outlast.runtime.engine import Runtime
from outlast.train.export import load_trained
from outlast.train.run import Start, run_directory, work

kept: list[Any] = []
"""Models and groups of a process until it ends: a group that is let go of while its threads still
need the interpreter may wait for them forever."""


def rank_here() -> int:
    return int(os.environ.get("RANK", 0))


def mean(loss: torch.Tensor) -> float:
    """The mean over all ranks."""
    found = loss.detach().clone()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(found)
        found /= dist.get_world_size()
    return float(found)


def figures(way: Way, loss: torch.Tensor) -> dict[str, Any]:
    """What is logged of a step."""
    others = {"a": np.float32(2.0), "b": torch.tensor([[4.0]]), "c": np.array([np.nan])}
    return {"loss": loss, **(others if way.metrics else {})}


# The trainer.


def train_by_trainer(way: Way) -> int:
    if not (way.folder / "corpus").exists():
        corpus(way.folder / "corpus")
    job = load_job(
        None,
        [
            *SETTINGS,
            *way.job(),
            f"train.steps={way.total}",
            f'data.train=["{way.folder}/corpus/*.txt"]',
            "data.validation_fraction=0.25",
            f"train.micro_batch_size={12 // way.accumulate // way.ranks}",
            "model.settings.num_hidden_layers=2",
            "schedule.name=constant",
        ],
    )
    own = Runtime.after_update
    rank = rank_here()

    def after_update(runtime: Runtime, result: Any) -> Any:
        if way.fault and result.step == 1:
            inject(runtime.guard.guard, parse_faults([way.fault]), seed=1, rank=rank)
        way.meet(result.step, rank)
        decision = own(runtime, result)
        if rank == 0:
            way.wrote(result.step, float(result.loss))
        return decision

    Runtime.after_update = after_update  # type: ignore[method-assign]
    grouped = "RANK" in os.environ
    start = Start(job, stop_when=lambda: "its time" if cluster.should_stop() else "")
    code = work(start, ranks_from(os.environ) if grouped else ALONE)
    if code == 0 and rank == 0:
        way.result(load_trained(job, run_directory(job))[0])
    return code


TRAINER = Driver(
    "trainer",
    train_by_trainer,
    {
        "broken": "its loop is its own",
        "extended": "its job is fixed",
        "kept": "its launcher's tests show that",
        "metrics": "it logs what it knows",
    },
)


# `outlast.Run`.


def train_by_run(way: Way) -> int:
    if way.ranks > 1 or way.kept:
        dist.init_process_group("gloo")
    plain, loader, rank = way.network(), way.loader(), rank_here()
    model = DistributedDataParallel(plain) if way.ranks > 1 else plain
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    kept.append(model)
    with outlast.Run(
        model=model, optimizer=optimizer, loader=loader, epochs=EPOCHS, steps=way.steps,
        settings=way.job(),
    ) as run:  # fmt: skip
        if way.fault:
            inject(run.guard, parse_faults([way.fault]), seed=1, rank=rank)
        for features, targets in run:
            loss = mse_loss(model(features), targets)
            (loss / way.accumulate).backward()
            if (run.step + 1) % way.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
            run.log(figures(way, loss))
            if way.done(run.step + 1, mean(loss), rank) == "break":
                break
    way.result(plain, rank)
    return 0


RUN = Driver("run", train_by_run, {}, counts_batches=True)


# Hugging Face's Trainer.


class WithLoss(nn.Module):
    """A network that gives its loss, as models of transformers do."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.last: list[torch.Tensor] = []

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = mse_loss(self.layers(features), labels)
        self.last.append(loss.detach())
        return {"loss": loss}


def train_by_hf_trainer(way: Way) -> int:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from outlast.integrations.hf_trainer import add_outlast

    model = WithLoss(way.network())

    class Fate(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if way.fault:
                guard = trainer._outlast.runtime.guard.guard
                inject(guard, parse_faults([way.fault]), seed=1, rank=args.process_index)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            loss = torch.stack(model.last[-way.accumulate :]).mean()
            way.done(state.global_step, mean(loss), args.process_index)

    arguments = TrainingArguments(
        output_dir=str(way.folder / "out"), max_steps=way.total, learning_rate=1e-2,
        per_device_train_batch_size=BATCH // way.ranks, lr_scheduler_type="constant",
        gradient_accumulation_steps=way.accumulate, save_strategy="steps", save_steps=way.every,
        logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    data = [{"features": x, "labels": y} for x, y in way.samples()]
    trainer = Trainer(model, arguments, train_dataset=data)
    kept.append(trainer)
    saving = add_outlast(trainer, load_loop_job(None, way.elsewhere()))
    trainer.add_callback(Fate())
    trainer.train(resume_from_checkpoint=saving.has_checkpoint())
    way.result(model.layers, rank_here())
    return 0


HF_TRAINER = Driver(
    "hf_trainer",
    train_by_hf_trainer,
    {
        "broken": "the loop is the framework's",
        "metrics": "the framework logs what it knows",
    },
    run="out",
    # The framework imports DeepSpeed wherever it is installed.
    loads=("outlast.integrations.hf_trainer", "deepspeed"),
)


# Accelerate.


def train_by_accelerate(way: Way) -> int:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DataLoaderConfiguration

    from outlast.integrations.accelerate import (
        add_checkpoints,
        add_guard,
        add_records,
        add_recover,
        add_stop,
    )

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    seeds = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5)
    accelerator = Accelerator(
        cpu=True, dataloader_config=seeds, gradient_accumulation_steps=way.accumulate
    )
    model = way.network()
    data = torch.utils.data.DataLoader(way.samples(), BATCH // way.ranks, shuffle=True)
    torch.manual_seed(100 + accelerator.process_index)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, data)
    job = load_loop_job(None, way.job())
    saving = add_checkpoints(accelerator, way.folder / "store", writer="thread")
    memory = add_recover(accelerator, saving, job) if way.kept else None
    if saving.newest() is not None:
        accelerator.load_state()
    for setting in way.settings:
        guard = add_guard(accelerator, setting.removeprefix("guard.policy="))
        if way.fault:
            inject(guard.guard, parse_faults([way.fault]), rank=accelerator.process_index)
    add_records(accelerator, job, steps=way.total, saving=saving)
    stop = add_stop(accelerator)
    kept.extend([accelerator, model, optimizer, loader, saving])
    batches = saving.steps * way.accumulate
    for epoch in range(batches // PER_EPOCH, EPOCHS):
        loader.set_epoch(epoch)
        for x, y in accelerator.skip_first_batches(loader, batches - epoch * PER_EPOCH):
            with accelerator.accumulate(model):
                loss = mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            batches += 1
            step = saving.steps
            if batches % way.accumulate:
                continue
            accelerator.log({**figures(way, loss), "loss": mean(loss)}, step=step)
            # Behind the loop, nobody knows where in its epoch it was left.
            if step % way.every == 0 or step == way.total:
                accelerator.save_state(str(way.folder / f"state-{step}"))
            if memory is not None:
                memory.keep()
            way.done(step, mean(loss), accelerator.process_index)
            if stop(step):
                accelerator.save_state(str(way.folder / "stopped"))
                stop.leave()
            if step == way.total:
                break
        if saving.steps == way.total:
            break
    accelerator.end_training()
    way.result(accelerator.unwrap_model(model), rank_here())
    return 0


ACCELERATE = Driver(
    "accelerate",
    train_by_accelerate,
    {
        "broken": "nobody saves beside the program's own saves",
    },
    sees_errors=False,
    loads=("outlast.integrations.accelerate", "deepspeed", "datasets"),
)


# Lightning.


def train_by_lightning(way: Way) -> int:
    import lightning.pytorch as pl

    from outlast.integrations.lightning import with_outlast

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = way.network()
            self.last: list[torch.Tensor] = []

        def on_train_start(self) -> None:
            if way.fault:
                guard = arguments["callbacks"][0].guard
                inject(guard, parse_faults([way.fault]), seed=1, rank=self.global_rank)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = mse_loss(self.layers(batch[0]), batch[1])
            self.last.append(loss.detach())
            return loss

        def optimizer_step(self, *given: Any, **options: Any) -> None:
            super().optimizer_step(*given, **options)
            loss, self.last = torch.stack(self.last).mean(), []
            way.done(self.global_step + 1, mean(loss), self.global_rank)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module, loader = Module(), way.loader()
    torch.manual_seed(10)
    arguments = with_outlast(settings=way.job())
    trainer = pl.Trainer(
        max_epochs=EPOCHS, max_steps=way.steps or -1, accelerator="cpu", devices=way.ranks,
        strategy="ddp" if way.ranks > 1 else "auto", accumulate_grad_batches=way.accumulate,
        default_root_dir=way.folder, logger=False, enable_progress_bar=False,
        enable_model_summary=False, **arguments,
    )  # fmt: skip
    kept.append(trainer)
    trainer.fit(module, loader, ckpt_path="last")
    way.result(module.layers, rank_here())
    return 0


LIGHTNING = Driver(
    "lightning",
    train_by_lightning,
    {
        "broken": "the loop is the framework's",
        "extended": "the last save is where its ModelCheckpoint makes it, not at the last step",
        "metrics": "the framework logs what it knows",
    },
    loads=("outlast.integrations.lightning",),
)


# Fabric.


def train_by_fabric(way: Way) -> int:
    from lightning.fabric import Fabric

    from outlast.integrations.fabric import Run

    strategy = "ddp" if way.ranks > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=way.ranks, strategy=strategy)
    fabric.launch()
    plain, data = way.network(), way.loader()
    model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(data)
    kept.append(fabric)
    with Run(
        fabric, model=model, optimizer=optimizer, loader=loader, epochs=EPOCHS, steps=way.steps,
        settings=way.job(),
    ) as run:  # fmt: skip
        if way.fault:
            inject(run.guard, parse_faults([way.fault]), seed=1, rank=fabric.global_rank)
        for features, targets in run:
            loss = mse_loss(model(features), targets)
            fabric.backward(loss / way.accumulate)
            if (run.step + 1) % way.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
            run.log(figures(way, loss))
            if way.done(run.step + 1, mean(loss), fabric.global_rank) == "break":
                break
    way.result(plain, fabric.global_rank)
    return 0


FABRIC = Driver(
    "fabric",
    train_by_fabric,
    {},
    counts_batches=True,
    loads=("outlast.integrations.fabric",),
)


# DeepSpeed.


def train_by_deepspeed(way: Way) -> int:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    from outlast.integrations.deepspeed import Run

    deepspeed.logger.setLevel("ERROR")
    dist.init_process_group("gloo")
    deepspeed.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": BATCH // way.ranks,
        "gradient_accumulation_steps": way.accumulate,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    engine = deepspeed.initialize(model=way.network(), config=config)[0]
    loader = way.loader()
    kept.append(engine)
    with Run(
        engine=engine, loader=loader, epochs=EPOCHS, steps=way.steps, settings=way.job()
    ) as run:
        if way.fault:
            inject(run.guard, parse_faults([way.fault]), seed=1, rank=dist.get_rank())
        for features, targets in run:
            loss = mse_loss(engine(features), targets)
            engine.backward(loss)
            engine.step()
            run.log(figures(way, loss))
            if way.done(run.step + 1, mean(loss), dist.get_rank()) == "break":
                break
    way.result(engine.module, dist.get_rank())
    return 0


DEEPSPEED = Driver(
    "deepspeed",
    train_by_deepspeed,
    {"flipped": "DeepSpeed keeps the weights in parts that the guard does not know"},
    alone=False,
    counts_batches=True,
    loads=("deepspeed_training",),
)


# torchtitan.


def train_by_torchtitan(way: Way) -> int:
    from titan_trainer import onto_the_cpu, recipe

    from outlast.integrations.torchtitan import use_outlast

    onto_the_cpu()
    config = use_outlast(
        recipe(way.folder / "out", way.total), overrides=way.elsewhere()[1:], enable=True,
        interval=way.every, last_save_model_only=False, async_mode="async",
    )  # fmt: skip
    trainer = config.build()
    own_step, own_log, last = trainer.train_step, trainer.metrics_processor.log, [0.0]

    def train_step(batches: Any) -> None:
        guard = trainer._runtime.guard
        if way.fault and guard.guard.watch.fault_hook is None:
            inject(guard.guard, parse_faults([way.fault]), rank=dist.get_rank())
        own_step(batches)
        way.done(trainer.step, last[0], dist.get_rank())

    def log(step: int, loss: float, *rest: Any, **options: Any) -> None:
        last[0] = loss
        own_log(step, loss, *rest, **options)

    trainer.train_step, trainer.metrics_processor.log = train_step, log
    kept.append(trainer)
    try:
        trainer.train()
    finally:
        trainer.close()
    way.result(trainer.model_parts[0], dist.get_rank())
    return 0


TORCHTITAN = Driver(
    "torchtitan",
    train_by_torchtitan,
    {
        "broken": "the loop is the framework's",
        "extended": "its learning rates depend on its length",
        "metrics": "the framework logs what it knows",
        "resized": "its loaders continue with as many data-parallel ranks as before",
    },
    run="out",
    alone=False,
    loads=("titan_trainer",),
)


# `outlast run`.

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent
STEPS, ACCUMULATE = int(sys.argv[1]), int(sys.argv[2])


def reached(step):
    plan = HERE / "plan"
    if not plan.exists():
        return
    at, what, _ = plan.read_text().split()
    if step == int(at):
        plan.unlink()
        if what == "raise":
            raise ValueError("it went wrong")
        if what == "kill_saved":
            while len([*HERE.rglob("version.json")]) < 2:
                time.sleep(0.01)
            what = "SIGKILL"
        os.kill(os.getpid(), getattr(signal, what))


def main():
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    features = torch.randn(48, 8)
    data = torch.utils.data.TensorDataset(features, features.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, 8, shuffle=True)
    step = batches = 0
    for epoch in range(2):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            batches += 1
            if batches % ACCUMULATE == 0 and step < STEPS:
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                with (HERE / "losses").open("a") as file:
                    file.write(json.dumps([step, loss.item()]) + "\\n")
                reached(step)
    torch.save(model.state_dict(), HERE / "result.pt")


main()
"""


def start_script(way: Way) -> list[int | None]:
    """Start a script under `outlast run`; its own text is the loop."""
    script = way.folder / "train.py"
    script.write_text(SCRIPT)
    ended = outlast_command("run", "--every", way.every, script, way.total, way.accumulate)
    (way.folder / "error0").write_text(ended.said)
    return [None if ended.code < 0 else ended.code]


OUTLAST_RUN = Driver(
    "outlast_run",
    train_by_run,
    dict.fromkeys(("broken", "extended"), "a script says itself how far it trains")
    | dict.fromkeys(("job_ends", "kept"), "tests/autosave show that")
    | dict.fromkeys(("corrected", "wrong", "flipped", "full"), "there is nobody to inject it")
    | dict.fromkeys(("failed_on_one_rank", "resized"), "the script is of one process")
    | {"metrics": "a script logs what it likes"},
    kills=("3 SIGKILL", "7 SIGKILL", "11 kill_saved"),
    run="",
    starts=start_script,
)

NEEDS = {
    "hf_trainer": "transformers",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "fabric": "lightning",
    "deepspeed": "deepspeed",
    "torchtitan": "torchtitan",
}


def is_there(module: str) -> bool:
    """True if a module can be imported."""
    return find_spec(module.partition(".")[0]) is not None


def is_installed(driver: Driver) -> bool:
    """True if the driver's framework can be tested here."""
    needs = NEEDS.get(driver.name)
    compiles = driver.name != "deepspeed" or shutil.which("g++") is not None
    return (needs is None or find_spec(needs) is not None) and compiles
