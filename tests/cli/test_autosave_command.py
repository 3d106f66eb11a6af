"""What ``outlast autosave check`` finds in real scripts, run in processes of their own."""

import subprocess
import sys

import pytest

from outlast.cli.main import main

pytestmark = pytest.mark.distributed

SCRIPT = """
import time

import torch
from torch import nn


class Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mean = torch.zeros(4)

    def forward(self, x):
        self.mean.lerp_(x.mean(0), 0.1)
        return self.linear(x - self.mean)


def main():
    torch.manual_seed(1)
    model = Centered()
    optimizer = torch.optim.AdamW(model.parameters())
    begun, best = time.time(), 1e9
    for step in range(12):
        loss = model(torch.randn(8, 4) + 1.0).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        best = min(best, loss.item())
        spent = time.time() - begun
        print(step, best)
    print(begun)


main()
"""

UNSAVED = """
import os
import random

import torch
from torch import nn

torch.manual_seed(1)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pipe_out, pipe_in = os.pipe()
os.write(pipe_in, bytes(range(1, 100)))
for step in range(12):
    scale = os.read(pipe_out, 1)[0]
    loss = model(torch.randn(8, 4)).square().mean() * scale
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def check(tmp_path, monkeypatch, capfd):
    """Runs the command on a script; gives its exit code and what it printed."""

    def run(text, *options, arguments=()):
        script = tmp_path / "train.py"
        if text is not None:
            script.write_text(text)
        command = ["outlast", "autosave", "check", *options, str(script), *arguments]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capfd.readouterr()
        return ended.value.code or 0, printed.out + printed.err

    return run


def test_a_script_that_resumes_is_shown_with_what_state_dict_would_lose(check):
    code, printed = check(SCRIPT, "--tensors")
    assert code == 0, printed
    assert "are the same bit for bit in each of 3 steps" in printed
    assert "`model.mean` changes in training" in printed
    assert "lost by state_dict() alone after 4 steps (measured): 1 tensors" in printed
    assert "model.mean (tensor)" in printed
    assert "random numbers (torch)" in printed
    (weight,) = [line for line in printed.splitlines() if line.startswith("model.linear.weight ")]
    assert "must-save" in weight
    assert "up to the optimizer's step" in weight


def test_state_outside_of_the_program_is_found_by_what_it_changes(check):
    code, printed = check(UNSAVED, "--steps", "2")
    assert code == 1, printed
    assert "NOT the same after a restore" in printed
    assert "step 5: " in printed


def test_what_is_lost_is_found_in_a_script_without_a_seed_too(check):
    code, printed = check(UNSAVED.replace("torch.manual_seed(1)\n", ""), "--steps", "2")
    assert code == 1, printed
    assert "NOT the same after a restore" in printed


def test_clocks_are_told_apart_from_what_is_lost(check):
    code, printed = check(SCRIPT.replace("spent = time.time() - begun", "begun = time.time()"))
    assert code == 0, printed
    assert "differ between two uninterrupted runs, too" in printed
    assert "begun" in printed


def test_a_script_that_ends_too_early_is_refused(check):
    code, printed = check(SCRIPT, "--at", "11")
    assert code == 2
    assert "ended before step 14; check fewer steps" in printed


def test_a_script_that_fails_is_quoted(check):
    code, printed = check(SCRIPT.replace("begun, best =", "begun, best = 1 / 0,"))
    assert code == 2
    assert "exit code 1" in printed
    assert "ZeroDivisionError: division by zero" in printed


def test_what_cannot_be_checked_is_one_sentence(check):
    code, printed = check(None)
    assert code == 2
    assert "there is no script" in printed
    code, printed = check("print('nothing trains here')")
    assert code == 2
    assert "no training loop was found" in printed
    assert "Traceback" not in printed


def test_the_group_lists_its_command_without_torch():
    code = (
        "import sys; from outlast.cli.app import app; from typer.testing import CliRunner; "
        "done = CliRunner().invoke(app, ['autosave', '--help']); print(done.output); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "check" in done.stdout


TWO_LOOPS = SCRIPT.replace(
    "    for step in range(12):",
    "    for _ in range(3):\n"
    "        loss = model(torch.randn(8, 4)).square().mean()\n"
    "        optimizer.zero_grad()\n"
    "        loss.backward()\n"
    "        optimizer.step()\n"
    "    for step in range(12):",
)


@pytest.mark.parametrize("at", [4, 6])
def test_one_of_several_loops_is_chosen(check, at):
    # Its set-up leaves gradients, and what the loop does with them is learnt in its first steps.
    line = 1 + TWO_LOOPS.splitlines().index("    for step in range(12):")
    code, printed = check(TWO_LOOPS, f"--loop=train.py:{line}", "--steps=2", f"--at={at}")
    assert code == 0, printed
    # Only those steps of the second loop are before the save: the first one is set-up.
    assert f"lost by state_dict() alone after {at} steps" in printed
    assert "are the same bit for bit in each of 2 steps" in printed
    code, printed = check(None, "--loop=train.py:1")
    assert code == 2
    assert "no `for` or `while` begins there" in printed


def test_what_was_measured_is_shown_by_explain(check, tmp_path, monkeypatch, capfd):
    def explained():
        script = str(tmp_path / "train.py")
        monkeypatch.setattr(sys, "argv", ["outlast", "run", "--explain", script])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        return capfd.readouterr().out

    (tmp_path / "train.py").write_text(SCRIPT)
    printed = explained()
    (heading,) = (n for n, line in enumerate(printed.splitlines()) if "names alive" in line)
    names = printed.splitlines()[heading + 1]
    assert "step loop  begun, best, model, optimizer; not needed: " in names
    assert names.endswith("loss, spent, step")
    assert "outlast autosave check" in printed
    assert "an image of the process" not in printed
    code, _ = check(None)
    assert code == 0
    printed = explained()
    for name in ("must-save", "a first save", "each later save", "an image of the process"):
        assert any(line.startswith(f"{name} ") and "B " in line for line in printed.splitlines())
    assert "`model.mean` changes in training" in printed
    assert "earlier text" not in printed
    (tmp_path / "train.py").write_text(SCRIPT.replace("0.1", "0.2"))
    assert "the figures are of an earlier text of the script" in explained()
