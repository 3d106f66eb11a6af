"""What a folder of Accelerate leads to: other runs, second saves, limits, Accelerate's own."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_ranks
from torch import nn

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration

from outlast.checkpoint import CheckpointStore, list_versions, storage_of
from outlast.errors import OutlastError
from outlast.integrations.accelerate import Saving, add_checkpoints
from outlast.records import Warned

pytestmark = pytest.mark.distributed


class Counted:
    """An object that a script registers."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Script:
    """One run of a script that trains a number up."""

    def __init__(self, store: Path | None, **project: Any) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(**project))
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.model, self.optimizer = self.accelerator.prepare(self.model, optimizer)
        self.counted = Counted()
        self.accelerator.register_for_checkpointing(self.counted)
        self.saving: Saving | None = None
        if store is not None:
            self.saving = add_checkpoints(self.accelerator, store, writer="thread")

    def step(self, slope: float = 1.0) -> None:
        (-slope * self.model.weight).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def weight(self) -> float:
        return float(self.model.weight)

    def end(self) -> None:
        self.accelerator.end_training()


def alone(work: Any, *arguments: Any) -> Any:
    """Run `work` in a process of its own, without a group."""

    def without_ranks() -> Any:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
            os.environ.pop(name, None)
        return work(*arguments)

    return run_ranks(1, without_ranks)[0]


def versions_in(store: Path) -> list[int]:
    return [each.step for each in list_versions(storage_of(store))]


def test_a_folder_of_another_run_leads_to_that_run(tmp_path: Path) -> None:
    def work() -> None:
        for name, slope in (("a", 1.0), ("b", 10.0)):
            run = Script(tmp_path / name / "store")
            run.step(slope)
            run.accelerator.save_state(str(tmp_path / name / "step_1"))
            run.step(slope)
            run.accelerator.save_state(str(tmp_path / name / "step_2"))
            run.end()
        run = Script(tmp_path / "b" / "store")
        run.accelerator.load_state(str(tmp_path / "a" / "step_1"))
        assert run.saving is not None
        assert (run.weight, run.saving.steps) == (1.0, 1)
        # What it continues to save is its own.
        run.step(10.0)
        run.accelerator.save_state(str(tmp_path / "b" / "tuned"))
        run.end()
        for folder, expected in (("tuned", 11.0), ("step_1", 10.0)):
            run = Script(tmp_path / "b" / "store")
            run.accelerator.load_state(str(tmp_path / "b" / folder))
            assert run.weight == expected
            run.end()
        shutil.move(tmp_path / "a" / "step_2", tmp_path / "elsewhere")
        run = Script(tmp_path / "b" / "store")
        with pytest.raises(OutlastError, match="which is not there; move the two together"):
            run.accelerator.load_state(str(tmp_path / "elsewhere"))
        (tmp_path / "elsewhere" / "outlast.json").write_text("{")
        with pytest.raises(OutlastError, match=r"outlast\.json is damaged"):
            run.accelerator.load_state(str(tmp_path / "elsewhere"))
        assert run.weight == 0.0
        run.end()

    alone(work)


def test_each_folder_keeps_the_state_that_it_was_given(tmp_path: Path) -> None:
    def work() -> None:
        run = Script(tmp_path / "store")
        for value in (1, 2, 3):
            run.counted.value = value
            if value < 3:
                run.step()
            run.accelerator.save_state(str(tmp_path / f"value-{value}"))
        # Two saves came after the second step; the third step's has a number after both.
        run.step()
        run.counted.value = 4
        run.accelerator.save_state(str(tmp_path / "value-4"))
        run.end()
        assert versions_in(tmp_path / "store") == [1, 2, 3, 4]
        run = Script(tmp_path / "store")
        assert run.saving is not None
        for value, steps in ((1, 1), (2, 2), (3, 2), (4, 3)):
            run.accelerator.load_state(str(tmp_path / f"value-{value}"))
            assert (run.counted.value, run.saving.steps, run.weight) == (value, steps, steps)
        # The run goes back and saves the second step anew, in a folder of another name.
        run.accelerator.load_state(str(tmp_path / "value-1"))
        run.step(5.0)
        run.accelerator.save_state(str(tmp_path / "anew"))
        run.accelerator.load_state(str(tmp_path / "anew"))
        assert run.weight == 6.0
        told = run.saving._runtime.early
        assert not told[-1:] or not isinstance(told[-1], Warned)
        with pytest.warns(UserWarning, match="the run went back and saved that step again"):
            run.accelerator.load_state(str(tmp_path / "value-2"))
        run.end()

    alone(work)


def test_a_save_that_failed_is_tried_again(tmp_path: Path) -> None:
    def work() -> None:
        run = Script(tmp_path / "store")
        run.step()
        (tmp_path / "store").mkdir()
        (tmp_path / "store" / "step-00000001-a1").write_text("in the way")
        saving = run.saving
        assert saving is not None

        def save() -> None:
            """Save, and hear of it at the latest when it is waited for."""
            run.accelerator.save_state(str(tmp_path / "state"))
            saving.collect(wait=True)

        with pytest.warns(UserWarning, match="step 1 in .* failed"):
            save()
        run.accelerator.save_state(str(tmp_path / "state"))
        saving.finish()
        run.end()
        again = Script(tmp_path / "store")
        again.accelerator.load_state(str(tmp_path / "state"))
        assert again.weight == 1.0
        again.end()

    alone(work)


def test_a_limit_deletes_no_state_that_a_named_folder_leads_to(tmp_path: Path) -> None:
    def work() -> None:
        run = Script(tmp_path / "store", total_limit=1)
        for step in (1, 2, 3):
            run.step()
            run.accelerator.save_state(str(tmp_path / f"step-{step}"))
        run.end()
        run = Script(tmp_path / "store", total_limit=1)
        for step in (1, 2, 3):
            run.accelerator.load_state(str(tmp_path / f"step-{step}"))
            assert run.weight == step
        run.end()

    alone(work)


@pytest.mark.supports("accelerate", "resume")
def test_automatic_names_go_on_and_their_limit_holds(tmp_path: Path) -> None:
    folders = tmp_path / "checkpoints"
    project = {"project_dir": str(tmp_path), "automatic_checkpoint_naming": True, "total_limit": 2}

    def work() -> None:
        run = Script(tmp_path / "store", **project)
        for _ in range(3):
            run.step()
            run.accelerator.save_state()
        run.end()
        assert {each.name for each in folders.iterdir()} == {"checkpoint_1", "checkpoint_2"}
        assert versions_in(tmp_path / "store") == [2, 3]
        run = Script(tmp_path / "store", **project)
        run.accelerator.load_state()
        assert run.saving is not None
        assert (run.weight, run.saving.steps) == (3.0, 3)
        run.step()
        run.accelerator.save_state()
        run.end()
        assert {each.name for each in folders.iterdir()} == {"checkpoint_2", "checkpoint_3"}
        assert versions_in(tmp_path / "store") == [3, 4]
        run = Script(tmp_path / "store", **project)
        run.accelerator.load_state(str(folders / "checkpoint_2"))
        assert run.weight == 3.0
        run.end()

    alone(work)


def test_the_newest_may_be_a_folder_of_accelerate_itself(tmp_path: Path) -> None:
    project = {"project_dir": str(tmp_path), "automatic_checkpoint_naming": True}
    own = tmp_path / "checkpoints" / "checkpoint_1"

    def work() -> None:
        run = Script(tmp_path / "store", **project)
        run.step()
        run.accelerator.save_state()
        run.end()
        plain = Script(None, **project)
        plain.step(7.0)
        plain.accelerator.project_configuration.iteration = 1
        plain.accelerator.save_state()
        run = Script(tmp_path / "store", **project)
        for each in own.iterdir():
            os.utime(each, (4e9, 4e9))
        with pytest.warns(UserWarning, match=r"checkpoint_1, which Accelerate itself has written"):
            run.accelerator.load_state()
        assert run.weight == 7.0
        for each in own.iterdir():
            os.utime(each, (1e9, 1e9))
        run.accelerator.load_state()
        assert run.weight == 1.0
        run.end()

    alone(work)


def second_reads_what_the_first_still_writes(folder: Path) -> tuple[int, float]:
    """Load with another accelerator while the first one's only save is held up."""
    first = Script(folder / "store")
    first.step()
    release = threading.Event()
    publish = CheckpointStore._finish

    def slow(self: Any, *arguments: Any, **options: Any) -> str:
        release.wait(30)
        return publish(self, *arguments, **options)

    CheckpointStore._finish = slow
    first.accelerator.save_state(str(folder / "state"))
    second = Script(folder / "store")
    threading.Timer(0.3, release.set).start()
    assert second.saving is not None
    newest = second.saving.newest()
    second.accelerator.load_state(str(folder / "state"))
    second.step()
    with pytest.raises(OutlastError, match="that is this process: close what holds it first"):
        second.accelerator.save_state(str(folder / "other"))
    first.end()
    return newest, second.weight


def test_a_second_accelerator_waits_for_the_save_of_the_first(tmp_path: Path) -> None:
    assert alone(second_reads_what_the_first_still_writes, tmp_path) == (1, 2.0)
