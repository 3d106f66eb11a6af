"""A tiny language model job that trains in a second, and how to run it on forked ranks."""

import os
from pathlib import Path
from typing import Any

import torch
import transformers.models.llama.modeling_llama  # noqa: F401  (loaded once, before ranks fork)
from forked import run_ranks

from outlast.distributed.ranks import ranks_from
from outlast.job import Job, load_job
from outlast.records import AttemptStarted, Evaluated, read_run
from outlast.train.export import load_trained
from outlast.train.run import Start, run_directory, work

SETTINGS = [
    "train.steps=6",
    "train.batch_size=12",
    "data.sequence_length=16",
    "model.settings.hidden_size=32",
    "model.settings.intermediate_size=64",
    "model.settings.num_hidden_layers=4",
    "model.settings.max_position_embeddings=32",
    "schedule.warmup_steps=1",
    "optimizer.name=adamw",
    "optimizer.learning_rate=0.003",
    "evaluate.every_steps=0",
    "evaluate.samples=20",
    "sample.tokens=0",
    "export.huggingface=false",
    "log.every_steps=1",
    "checkpoint.every_steps=2",
    "checkpoint.writer='thread'",
    "data.source=text",
]


def corpus(folder: Path) -> None:
    """Write a small text corpus below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(12):
        lines = [f"def function_{i}(x):\n    return x * {i % 7} + {number}\n" for i in range(40)]
        (folder / f"file{number}.txt").write_text("\n".join(lines))


def tiny_job(folder: Path, name: str, *overrides: str) -> Job:
    """The tiny job, with its run below `folder`."""
    if not (folder / "corpus").exists():
        corpus(folder / "corpus")
    places = [
        f'run.directory="{folder}/runs"',
        f"run.name={name}",
        f'data.train=["{folder}/corpus/*.txt"]',
        "data.validation_fraction=0.25",
    ]
    return load_job(None, [*SETTINGS, *places, *overrides])


def _work(job: Job) -> int:
    return work(Start(job), ranks_from(os.environ))


def train(job: Job, size: int) -> int:
    """Train `job` on `size` forked processes; returns the exit code on which they agree."""
    codes = run_ranks(size, _work, job)
    assert len(set(codes)) == 1
    return int(codes[0])


def losses(job: Job) -> list[float]:
    """Training loss of every step."""
    return [loss for _, loss in read_run(Path(job.run.directory) / job.run.name).losses()]


def evaluations(job: Job) -> list[float]:
    """Validation losses in order."""
    run = read_run(Path(job.run.directory) / job.run.name)
    return [event.loss for _, event in run.of(Evaluated)]


def layouts(job: Job) -> list[dict[str, Any]]:
    """The parallel layout of every attempt."""
    run = read_run(Path(job.run.directory) / job.run.name)
    return [event.parallel for _, event in run.of(AttemptStarted)]


def weights(job: Job) -> dict[str, torch.Tensor]:
    model, step = load_trained(job, run_directory(job))
    assert step == job.train.steps
    return dict(model.state_dict())


def assert_equal_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), f"{name} differs"
