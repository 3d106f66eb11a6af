"""The story of examples/story: from a config.json to text, with a chain on a real Slurm."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from local_slurm import LocalSlurm

from outlast.guard.findings import HARMFUL
from outlast.records import (
    AttemptStarted,
    CorruptionDetected,
    Guarded,
    StepsDone,
    Tensorized,
    read_run,
)

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

STORY = Path(__file__).parents[2] / "examples" / "story"
SMALL = (
    "train.steps=24",
    "train.stop_after_steps=12",
    "train.batch_size=4",
    "data.sequence_length=32",
    "checkpoint.every_steps=4",
    "evaluate.samples=4",
    "log.every_steps=1",
    "sample.tokens=0",
    "energy.measure=false",
    "slurm.restart_seconds=5.0",
    "slurm.lead_seconds=2.0",
)


def test_story_from_a_config_to_text(tmp_path: Path, slurm: LocalSlurm, empty_queue: None) -> None:
    folder = shutil.copytree(STORY, tmp_path / "story")
    # As after `source .venv/bin/activate`.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "story.sh", *SMALL],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "2 of 2 survived" in done.stdout
    assert "bit for bit" in done.stdout
    written = done.stdout.rsplit("\n", maxsplit=2)
    assert "def " in done.stdout.split("== The model")[1], written
    run = read_run(folder / "runs" / "story")
    # Two jobs of the queue, each with half of the steps, and no step twice.
    assert len(run.of(AttemptStarted)) == 2
    assert [event.step for _, event in run.of(StepsDone)] == [*range(1, 25)]
    [tensorized, *_] = [event for _, event in run.of(Tensorized)]
    assert tensorized.parameters < tensorized.dense_parameters
    assert run.of(Guarded)[-1][1].checks > 0
    assert not [event for _, event in run.of(CorruptionDetected) if event.outcome in HARMFUL]
    assert (folder / "runs" / "story" / "report.html").exists()
    assert (folder / "model" / "config.json").exists()
