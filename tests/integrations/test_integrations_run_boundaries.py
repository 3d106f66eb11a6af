"""Where `outlast.Run` saves: never in the middle of an optimizer's step, whatever the loop does."""

from pathlib import Path

import pytest
import torch
from loop_runs import QUIET, assert_same, finish, saved_steps, start, undisturbed
from torch import nn
from torch.utils.data import DataLoader

import outlast
from outlast.records import CheckpointSaved, Warned, read_run

pytestmark = pytest.mark.distributed

EVERY_5 = "checkpoint.every_steps=5"


@pytest.mark.supports("pytorch", "checkpoint", "resume")
def test_an_accumulation_is_never_saved_in_its_middle(tmp_path: Path) -> None:
    other = undisturbed(tmp_path, EVERY_5, accumulate=4)
    assert start(tmp_path, EVERY_5, plan="21 SIGKILL", accumulate=4).code == -9
    finish(tmp_path, EVERY_5, accumulate=4)
    assert_same(tmp_path, other)
    # What was due at 5, 10, 15, 25 and 30 came with the optimizer's next step.
    assert saved_steps(other) == [8, 12, 16, 20, 28, 32, 36]


@pytest.mark.supports("pytorch", "checkpoint", "resume")
def test_a_step_that_a_scaler_skips_is_no_boundary(tmp_path: Path) -> None:
    other = undisturbed(tmp_path, EVERY_5, plan="9 infinite")
    assert saved_steps(other)[:3] == [5, 11, 15]
    assert start(tmp_path, EVERY_5, plan="9 infinite\n22 SIGKILL").code == -9
    finish(tmp_path, EVERY_5)
    assert_same(tmp_path, other)


@pytest.mark.supports("pytorch", "resume")
def test_a_stream_without_a_length_goes_on_in_its_middle(tmp_path: Path) -> None:
    other = undisturbed(tmp_path, EVERY_5, stream=True)
    assert start(tmp_path, EVERY_5, plan="19 SIGKILL", stream=True).code == -9
    finish(tmp_path, EVERY_5, stream=True)
    assert_same(tmp_path, other)


@pytest.mark.supports("pytorch", "tensorize", "resume")
def test_a_tensorized_model_is_saved_in_its_factors(tmp_path: Path) -> None:
    how = {"form": "low_rank", "steps": 9}
    other = undisturbed(tmp_path, EVERY_5, **how)
    assert start(tmp_path, EVERY_5, plan="7 SIGKILL", **how).code == -9
    finish(tmp_path, EVERY_5, **how)
    assert_same(tmp_path, other)
    weights = torch.load(tmp_path / "result.pt", weights_only=True)["model"]
    assert sum(each.numel() for name, each in weights.items() if name.startswith("0.")) < 8 * 16


def _accumulating(folder: Path, leave_at: int, per_epoch: int = 12) -> list[float]:
    """Do a step of the optimizer every four iterations; the samples of this start."""
    torch.manual_seed(3)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(torch.arange(float(per_epoch))[:, None], 1, shuffle=True)
    settings = [f'run.directory="{folder}"', *QUIET]
    seen = []
    with outlast.Run(
        model=model, optimizer=optimizer, loader=loader, epochs=2, settings=settings
    ) as run:
        for batch in run:
            seen.append(batch.item())
            model(batch).sum().backward()
            if (run.step + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
            if run.step + 1 == leave_at:
                break
    return seen


def _saved(folder: Path) -> list[int]:
    return [event.step for _, event in read_run(folder / "run").of(CheckpointSaved)]


@pytest.mark.supports("pytorch", "resume")
def test_a_loop_that_is_left_in_an_accumulation_uses_its_batches_again(tmp_path: Path) -> None:
    whole = _accumulating(tmp_path / "whole", 0)
    # The first of an accumulation, one in its middle, and one in the second epoch.
    first = _accumulating(tmp_path / "left", 5)
    second = _accumulating(tmp_path / "left", 11)
    third = _accumulating(tmp_path / "left", 19)
    assert (first, second, third) == (whole[:5], whole[4:11], whole[8:19])
    assert _accumulating(tmp_path / "left", 0) == whole[16:]
    assert _saved(tmp_path / "left") == [4, 8, 16, 24]


@pytest.mark.supports("pytorch", "resume")
def test_an_accumulation_over_an_epochs_end_that_is_left_is_not_saved(tmp_path: Path) -> None:
    first = _accumulating(tmp_path, 5, 6)
    second = _accumulating(tmp_path, 7, 6)
    assert second == [*_accumulating(tmp_path / "whole", 0, 6)[4:7]]
    assert len(first) == 5
    assert _saved(tmp_path) == [4]
    [(_, told)] = read_run(tmp_path / "run").of(Warned)
    assert "that an epoch's end is in: step 6 is not saved" in told.message
    assert _accumulating(tmp_path, 0, 6)[:2] == second[:2]
