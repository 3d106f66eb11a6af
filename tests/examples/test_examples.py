"""The examples run as they stand."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.job import load_job
from outlast.records import Sampled, read_run

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


def run_python(*arguments: str | Path, folder: Path | None = None) -> str:
    """Run Python with these arguments to a good end; gives what it printed."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.distributed
def test_a_model_of_ones_own_trains_and_writes(tmp_path: Path) -> None:
    folder = tmp_path / "own_model"
    shutil.copytree(EXAMPLES / "own_model", folder)
    short = ["train.steps=12", "schedule.warmup_steps=2", "evaluate.samples=32", "sample.tokens=8"]
    run_python("-m", "outlast", "train", "job.toml", *short, folder=folder)
    run = read_run(folder / "runs" / "own-model")
    assert run.losses()[-1][0] == 12
    assert run.losses()[-1][1] < 5.6
    [(_, sampled)] = run.of(Sampled)
    assert sampled.text


def test_every_job_file_is_a_job() -> None:
    files = list(EXAMPLES.rglob("*.toml"))
    assert files
    for file in files:
        load_job(file)


def test_shell_scripts_parse() -> None:
    for file in EXAMPLES.rglob("*.sh"):
        subprocess.run(["bash", "-n", str(file)], check=True)


@pytest.mark.distributed
@pytest.mark.alone
def test_training_does_not_wait_for_a_slow_process() -> None:
    said = run_python(*TORCHRUN, "--nproc-per-node=4", EXAMPLES / "coverage.py")
    lines = [line for line in said.splitlines() if line.startswith("step")]
    assert len(lines) == 5
    assert all("gradient exact" in line for line in lines)
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in lines]
    assert losses[-1] < losses[0]
    seconds = sorted(float(line.split(", ")[1].split(" s")[0]) for line in lines)
    assert seconds[1] < 1.2  # two of five steps at least are shorter than waiting's 1.6 s


@pytest.mark.distributed
def test_a_tensorized_model_is_trained_exported_and_writes(tmp_path: Path) -> None:
    short = ["train.steps=12", "schedule.warmup_steps=2", "evaluate.samples=16"]
    short += ["model.settings.num_hidden_layers=1", "data.sequence_length=32"]
    said = run_python(EXAMPLES / "pretrain_tensorized.py", *short, folder=tmp_path)
    assert "\ndef " in said
    page = (tmp_path / "runs" / "monarch-dense.html").read_text()
    assert "Loss for equal effort" in page
    assert "monarch, rank 8: 7 layers replaced." in page
    assert (tmp_path / "runs" / "monarch" / "model" / "model.safetensors").is_file()


@pytest.mark.distributed
def test_a_loop_of_ones_own_goes_on_from_memory(tmp_path: Path) -> None:
    script = EXAMPLES / "restart_from_memory.py"
    several = (*TORCHRUN, "--nproc-per-node=2", "--max-restarts=3")
    said = run_python(*several, script, tmp_path / "memory")
    [found] = re.findall(r"continues from step (\d+), found in memory", said)
    # Six steps were done; of the last one the copy may have been under way.
    assert int(found) in (5, 6)
    steps = [int(each) for each in re.findall(r"step (\d+): loss", said)]
    assert steps == [*range(1, 7), *range(int(found) + 1, 11)]
    assert list((tmp_path / "memory").rglob("rank-*")) == []


@pytest.mark.distributed
def test_three_kills_leave_no_trace_in_the_curve(tmp_path: Path) -> None:
    script = EXAMPLES / "three_kills.py"
    said = run_python(script, "--steps=40", "--picture=kills.svg", folder=tmp_path)
    assert said.count("kill -9 after step") == 3
    assert said.count("the same bits") == 2
    assert "kill -9" in (tmp_path / "kills.svg").read_text()
