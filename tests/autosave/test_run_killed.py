"""Scripts under `outlast run` that are killed and started again, against plain Python."""

import random
import signal

import pytest
import torch
from running import SCRIPT, outlast, plain

pytestmark = pytest.mark.distributed

STEPS = 18


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def result(script):
    return torch.load(script.parent / "result0.pt", weights_only=True)


def undisturbed(script, *arguments):
    ended = plain(script, *arguments)
    assert ended.code == 0, ended.said
    found = result(script)
    (script.parent / "result0.pt").unlink()
    return found


def same(found, expected):
    assert found["losses"] == expected["losses"]
    assert found["best"] == expected["best"]
    assert found["model"].keys() == expected["model"].keys()
    for name, tensor in expected["model"].items():
        assert torch.equal(found["model"][name], tensor), name


def disturb(script, step, what):
    (script.parent / "plan").write_text(f"{step} {what}")


def test_script_killed_again_and_again_ends_with_the_weights_of_plain_python(script):
    expected = undisturbed(script, "--lr", "0.02")
    points = sorted(random.Random(11).sample(range(4, STEPS), 3))
    for point in points:
        disturb(script, point, "SIGKILL")
        ended = outlast("run", "--every", 2, script, "--lr", "0.02")
        assert ended.code == -signal.SIGKILL, ended.said
    ended = outlast("run", "--every", 2, script, "--lr", "0.02")
    assert ended.code == 0, ended.said
    assert "resumed at step" in ended.said
    same(result(script), expected)


@pytest.mark.parametrize("what", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_stop_signal_saves_at_the_next_step_and_ends_with_3(script, what):
    expected = undisturbed(script)
    disturb(script, 8, what)
    ended = outlast("run", "--every", 1000, script)
    assert ended.code == 3, ended.said
    assert f"({what}); the same command goes on from there" in ended.said
    assert not (script.parent / "result0.pt").exists()
    ended = outlast("run", "--every", 1000, script)
    assert ended.code == 0, ended.said
    assert "resumed at step" in ended.said
    same(result(script), expected)
