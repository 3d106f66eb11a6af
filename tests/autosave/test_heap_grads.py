"""A program that reads gradients where no step is done is told from one that does not."""

import pytest

from outlast.autosave.program.calls import reads_gradients_between_steps
from outlast.autosave.program.source import read_program
from outlast.autosave.program.training import find_training

PROGRAM = """\
import torch

def norms(model):
    return [each.grad.norm() for each in model.parameters()]

class Trainer:
    def report(self):
        return norms(self.model)

def train(model, loader, optimizer):
    for epoch in range(3):
        {before}
        for batch in loader:
            optimizer.zero_grad()
            model(batch).sum().backward()
            {inside}
            optimizer.step()
        {after}

train(model, loader, optimizer)
"""
IN_STEPS = ["norms(model)", "torch.nn.utils.clip_grad_norm_(model.parameters(), 1)", "w.grad"]


def program(tmp_path, **parts):
    lines = {"before": "pass", "inside": "pass", "after": "pass"} | parts
    (tmp_path / "train.py").write_text(PROGRAM.format(**lines))
    files = read_program(tmp_path / "train.py")
    return reads_gradients_between_steps(files, find_training(files))


@pytest.mark.parametrize("line", IN_STEPS)
def test_what_a_step_reads_is_no_matter(tmp_path, line):
    assert not program(tmp_path, inside=line)


def test_a_condition_on_a_variable_called_step_is_no_matter(tmp_path):
    assert not program(tmp_path, inside="if step % 100 == 0: print(step)")


@pytest.mark.parametrize("use", ["scaler.step(optimizer)", "backward(loss)", "w.grad.norm()"])
def test_a_condition_on_which_gradients_depend_is_seen(tmp_path, use):
    assert program(tmp_path, inside=f"if epoch % 2: {use}")


@pytest.mark.parametrize("line", [*IN_STEPS, "trainer.report()", "hooks = [norms]"])
@pytest.mark.parametrize("place", ["before", "after"])
def test_what_is_read_around_the_steps_is_seen(tmp_path, line, place):
    assert program(tmp_path, **{place: line})


@pytest.mark.parametrize(
    "line", ["model.zero_grad()", "w.grad = None", "torch.autograd.grad(loss, weights)"]
)
def test_what_drops_gradients_or_makes_others_reads_none(tmp_path, line):
    assert not program(tmp_path, after=line)
