"""Loops on storage that is away at the first save, and comes back or does not."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from loop_runs import finish, records, saved_steps, start
from torch import nn

import outlast
from outlast.checkpoint import list_versions, storage_of
from outlast.records import CheckpointFailed, CheckpointSaved, read_run

EVERY_5 = "checkpoint.every_steps=5"


def failed_steps(folder: Path) -> list[int]:
    return [event.step for _, event in records(folder).of(CheckpointFailed)]


@pytest.mark.distributed
@pytest.mark.supports("pytorch", "checkpoint")
def test_a_loop_ends_with_an_error_where_nothing_could_be_saved(tmp_path: Path) -> None:
    (tmp_path / "mount").write_text("no directory")
    ended = start(tmp_path, EVERY_5, f'checkpoint.fast="{tmp_path}/mount/fast"')
    assert ended.code == 1, ended.said
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 36
    assert failed_steps(tmp_path) == [5, 10, 15, 20, 25, 30, 35, 36]
    assert "UserWarning: the checkpoint of step 5" in ended.said
    assert "CheckpointError: step 36 could not be saved: the checkpoint of step 36" in ended.said
    assert "no save of this start has succeeded" in ended.said
    assert records(tmp_path).attempts[-1].outcome == "failed"


@pytest.mark.distributed
@pytest.mark.supports("pytorch", "checkpoint")
def test_a_loop_saves_to_storage_that_comes_back(tmp_path: Path) -> None:
    (tmp_path / "mount").write_text("no directory")
    finish(tmp_path, EVERY_5, f'checkpoint.fast="{tmp_path}/mount/fast"', plan="12 back")
    assert failed_steps(tmp_path) == [5, 10]
    assert saved_steps(tmp_path) == [15, 20, 25, 30, 35, 36]


@pytest.mark.slow
def test_a_loop_saves_to_an_object_store_that_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    from s3_server import s3_server

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = ["checkpoint.writer=thread", "energy.measure=false", "checkpoint.every_steps=2"]
    with ExitStack() as server:
        place = server.enter_context(s3_server("looped"))
        port = int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2])
        with (  # noqa: PT031
            pytest.warns(UserWarning, match="checkpoint of step 2 .*training continues"),
            outlast.Run(
                model=model,
                optimizer=optimizer,
                loader=[torch.ones(3, 2)] * 5,
                settings=[*settings, f'checkpoint.fast="{place}/fast"'],
            ) as run,
        ):
            for batch in run:
                if run.step == 1:
                    server.close()
                if run.step == 2:
                    server.enter_context(s3_server("looped", port))
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
        found = read_run(run.directory)
        assert [event.step for _, event in found.of(CheckpointFailed)] == [2]
        assert found.attempts[-1].outcome == "completed"
        assert [event.step for _, event in found.of(CheckpointSaved)] == [4, 5]
        kept = list_versions(storage_of(run.directory / "checkpoints"))
        assert [version.step for version in kept] == [5]


ACCELERATED = """
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from outlast.integrations.accelerate import add_checkpoints

place, ends = Path(sys.argv[1]), sys.argv[2]
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
saving = add_checkpoints(accelerator, place / "mount" / "store", writer="thread")
for step in range(4):
    model(torch.ones(3, 2)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if ends == "back" and step == 2:
        (place / "mount").unlink()
    accelerator.save_state(str(place / f"state-{step}"))
if ends == "told":
    accelerator.end_training()
print("all steps done")
"""


@pytest.mark.distributed
@pytest.mark.supports("accelerate", "checkpoint")
@pytest.mark.parametrize(("ends", "code"), [("told", 1), ("silent", 1), ("back", 0)])
def test_an_accelerated_loop_never_ends_well_with_its_last_save_lost(
    tmp_path: Path, ends: str, code: int
) -> None:
    (tmp_path / "mount").write_text("no directory")
    script = tmp_path / "accelerated.py"
    script.write_text(ACCELERATED)
    # Not a fork, which runs nothing at exit.
    ended = subprocess.run(
        [sys.executable, str(script), str(tmp_path), ends], capture_output=True, text=True
    )
    assert ended.returncode == code, ended.stderr
    assert "UserWarning: the checkpoint of step 1" in ended.stderr
    assert ("all steps done" in ended.stdout) is (ends != "told")
    if code:
        assert "the checkpoint of step 4" in ended.stderr.splitlines()[-1]
        return
    kept = list_versions(storage_of(tmp_path / "mount" / "store"))
    assert [version.step for version in kept] == [3, 4]
