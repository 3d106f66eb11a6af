"""Where `outlast.Run` saves: never in the middle of an optimizer's step, whatever the loop does."""

from pathlib import Path

import pytest
import torch
from loop_runs import assert_same, finish, saved_steps, start, undisturbed

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
