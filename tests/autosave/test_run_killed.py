"""Scripts under `outlast run` that are killed and started again, against plain Python."""

import random
import re
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
    assert f"({what}); the same command continues from there" in ended.said
    assert not (script.parent / "result0.pt").exists()
    ended = outlast("run", "--every", 1000, script)
    assert ended.code == 0, ended.said
    assert "resumed at step" in ended.said
    same(result(script), expected)


def test_process_without_a_group_keeps_its_own_state(script):
    expected = undisturbed(script)
    (script.parent / "versions").mkdir()
    ranked = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    command = ("run", "--every", 3, "--directory", script.parent / "versions", script)
    disturb(script, 11, "SIGKILL")
    ended = outlast(*command, environment=ranked)
    assert ended.code == -signal.SIGKILL, ended.said
    assert list((script.parent / "versions/checkpoints/rank1").glob("step-*"))
    disturb(script, 4, "SIGKILL")
    ended = outlast(*command, environment=ranked)
    assert ended.code == 0, ended.said
    # It continued behind the step in which it would have been killed.
    assert (script.parent / "plan").exists()
    (script.parent / "result1.pt").rename(script.parent / "result0.pt")
    same(result(script), expected)


@pytest.mark.parametrize("every", [4, 1000])
def test_log_of_a_killed_run_is_that_of_an_uninterrupted_one(script, every):
    text = script.read_text().replace(
        "        losses.append(loss.item())",
        "        losses.append(loss.item())\n"
        "        with open(HERE / 'log.txt', 'a') as log:\n"
        "            log.write(f'{len(losses)} {loss.item()}\\n')",
    )
    script.write_text(text)
    log = script.parent / "log.txt"
    log.write_text("of an earlier run\n")
    undisturbed(script)
    expected = log.read_text()
    assert len(expected.splitlines()) == 1 + STEPS
    log.write_text("of an earlier run\n")
    disturb(script, 13, "SIGKILL")
    assert outlast("run", "--every", every, script).code == -signal.SIGKILL
    assert len(log.read_text().splitlines()) == 1 + 13
    ended = outlast("run", "--every", every, script)
    assert ended.code == 0, ended.said
    # A run that was killed before its first save begins anew.
    assert ("resumed at step" in ended.said) is (every < STEPS)
    assert ("log.txt is again as it was before the run" in ended.said) is (every > STEPS)
    assert log.read_text() == expected


def test_training_loop_in_a_module_beside_the_script(script):
    head, rest = SCRIPT.split("def reached", 1)
    functions, main = rest.split("def main", 1)
    package = script.parent / "engine"
    package.mkdir()
    (package / "__init__.py").write_text("from .steps import train_epoch\n")
    text = f"{head}def reached{functions}".replace("__file__).parent", "__file__).parent.parent")
    (package / "steps.py").write_text(text)
    script.write_text(f"{head}from engine import train_epoch\n\n\ndef main{main}")
    expected = undisturbed(script)
    disturb(script, 9, "SIGKILL")
    ended = outlast("run", "--every", 4, script)
    assert ended.code == -signal.SIGKILL, ended.said
    ended = outlast("run", "--every", 4, script)
    assert ended.code == 0, ended.said
    # Of step 8, which was being saved, or of the one before, if the kill was faster.
    assert re.search(r"resumed at step [48] ", ended.said), ended.said
    same(result(script), expected)


def test_run_killed_behind_its_last_step_does_the_rest_and_has_finished(script):
    # Under `outlast run` the end waits for the save behind the last step.
    wait = (
        "    while (HERE / '.outlast').exists() and not any(\n"
        "        HERE.glob('.outlast/*/checkpoints/step-*18-*/version.json')\n"
        "    ):\n"
        "        torch.ones(1).item()\n"
    )
    text = script.read_text().replace("    rank = os.", f"{wait}    reached(-1)\n    rank = os.")
    script.write_text(text)
    expected = undisturbed(script)
    disturb(script, -1, "SIGKILL")
    ended = outlast("run", "--every", STEPS, script)
    assert ended.code == -signal.SIGKILL, ended.said
    ended = outlast("run", "--every", STEPS, script)
    assert ended.code == 0, ended.said
    assert f"resumed at step {STEPS}" in ended.said
    ended = outlast("run", "--every", STEPS, script)
    assert ended.code == 0, ended.said
    assert "this run has finished" in ended.said
    same(result(script), expected)


def test_folder_that_was_moved_and_script_with_other_lines_go_on(script, tmp_path_factory):
    text = script.read_text().replace(
        "    losses = []", "    losses = []\n    log = open(HERE / 'log.txt', 'w')"
    )
    text = text.replace(
        "        best = min(best",
        "        log.write(f'{losses[-1]}\\n'); log.flush()\n        best = min(best",
    )
    script.write_text(text)
    expected = undisturbed(script)
    log = script.parent / "log.txt"
    logged = log.read_text()
    log.unlink()
    disturb(script, 15, "SIGTERM")
    ended = outlast("run", "--every", 1000, script)
    assert ended.code == 3, ended.said
    moved = tmp_path_factory.mktemp("moved") / "project"
    script.parent.rename(moved)
    script = moved / "train.py"
    script.write_text("# One line\n" * 11 + text)
    ended = outlast("run", script)
    assert ended.code == 2, ended.said
    ended = outlast("run", "--accept-changes", script)
    assert ended.code == 0, ended.said
    assert "resumed at step 15" in ended.said
    same(result(script), expected)
    assert (moved / "log.txt").read_text() == logged
