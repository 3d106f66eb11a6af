"""Chains on the tests' own Slurm: submitting, waiting, looking."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outlast.cluster.chain_files import (
    ChainFiles,
    ChainPlan,
    Entry,
    chain_files,
    entries,
    finished,
    of_kind,
)
from outlast.job import load_job, to_toml

OUTLAST = [sys.executable, "-m", "outlast"]
TINY = [
    "train.batch_size=12",
    "data.source=text",
    "data.sequence_length=16",
    "data.validation_fraction=0.25",
    "model.settings.hidden_size=32",
    "model.settings.intermediate_size=64",
    "model.settings.max_position_embeddings=32",
    "schedule.warmup_steps=1",
    "optimizer.name=adamw",
    "optimizer.learning_rate=0.003",
    "evaluate.every_steps=0",
    "evaluate.samples=12",
    "sample.tokens=0",
    "export.huggingface=false",
    "energy.measure=false",
    "log.every_steps=1",
    "checkpoint.writer='thread'",
    "slurm.restart_seconds=5.0",
    "slurm.lead_seconds=2.0",
]


def job_file(folder: Path, name: str, *overrides: str) -> Path:
    """A tiny job in `folder`, as a user would write it."""
    corpus = folder / "corpus"
    if not corpus.exists():
        corpus.mkdir()
        for number in range(12):
            lines = [f"def f{i}(x):\n    return x * {i % 7} + {number}\n" for i in range(60)]
            (corpus / f"file{number}.txt").write_text("\n".join(lines))
    places = [
        f'run.directory="{folder}/runs"',
        f"run.name={name}",
        f'data.train=["{corpus}/*.txt"]',
    ]
    file = folder / f"{name}.toml"
    file.write_text(to_toml(load_job(None, [*TINY, *places, *overrides])))
    return file


def outlast(*arguments: object, code: int = 0) -> str:
    """Output of a command, which must end with `code`."""
    done = subprocess.run(
        [*OUTLAST, *(str(each) for each in arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout if code == 0 else done.stderr


def files_of(folder: Path, name: str) -> ChainFiles:
    """The chain's files of a run."""
    return chain_files((folder / "runs" / name).resolve())


def wait(condition: Callable[[], Any], files: ChainFiles, seconds: float = 120.0) -> Any:
    """What `condition` gives when it first gives something; the logs where it does not."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            logs = "\n".join(
                f"== {log.name}\n{log.read_text()[-1500:]}"
                for log in sorted(files.path.glob("link-*.log"))
            )
            raise AssertionError(f"not in {seconds} s; {journal_text(files)}\n{logs}")
        time.sleep(0.2)
    return found


def journal_text(files: ChainFiles) -> str:
    """The journal for a person who reads a failed test."""
    return "\n".join(str(each) for each in entries(files))


def ending(files: ChainFiles) -> Entry | None:
    """How the chain has ended, if it has."""
    return finished(entries(files))


def noted(files: ChainFiles, kind: str) -> list[Entry]:
    """The journal's entries of one kind."""
    return of_kind(entries(files), kind)


def program_plan(folder: Path, command: str, **settings: Any) -> tuple[ChainFiles, ChainPlan]:
    """A chain of a program of one's own, which needs no torch."""
    files = chain_files((folder / "runs" / "own").resolve())
    plan = ChainPlan(
        chain=f"{abs(hash(str(folder))) % 16**8:08x}",
        name="own",
        kind=settings.pop("kind", "dependent"),
        nodes=settings.pop("nodes", (1,)),
        tasks_per_node=1,
        limit_seconds=settings.pop("limit_seconds", 300.0),
        directory=str(folder),
        python=sys.executable,
        command=command,
        **settings,
    )
    return files, plan
