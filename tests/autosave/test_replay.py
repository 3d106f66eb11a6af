"""The oracle for step functions: restored by its plan, a program continues bit for bit."""

from collections import deque

import numpy as np
import pytest
import torch
from step_replay import replay
from torch import nn

from outlast.errors import AutosaveError

pytestmark = pytest.mark.distributed


class Everything(nn.Module):
    """State of many kinds: statistics, a mask, an attribute, a counter."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("mask", torch.rand(4).round(), persistent=False)
        self.hidden = torch.zeros(4)
        self.drop = nn.Dropout(0.2)
        self.seen = 0

    def forward(self, x):
        x = self.norm(self.linear(self.frozen(x)) * self.mask)
        self.hidden.mul_(0.9).add_(x.detach().mean(0))
        self.seen += 1
        return self.drop(x + self.hidden / self.seen)


def everything():
    torch.manual_seed(3)
    model = Everything()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    average = torch.optim.swa_utils.AveragedModel(model.linear)
    counts, recent, scratch = np.zeros(3), deque(maxlen=2), torch.zeros(4)
    generator = torch.Generator().manual_seed(5)

    def step():
        scratch.zero_()
        scratch.add_(sum(recent, torch.zeros(())))
        x = torch.randn(8, 4, generator=generator) + scratch.mean()
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        average.update_parameters(model.linear)
        recent.append(loss.detach())
        counts[0] += loss.item()

    return step, {"model": model, "optimizer": optimizer, "schedule": schedule}


def accumulating():
    torch.manual_seed(3)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    done = [0]

    def step():
        model(torch.randn(8, 4)).square().mean().backward()
        done[0] += 1
        if done[0] % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return step, [model, optimizer]


def reading_late():
    torch.manual_seed(3)
    model, total, done = nn.Linear(4, 4), torch.zeros(()), [0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        done[0] += 1
        # Written before it is read, but for the fifth step.
        loss = model(torch.randn(8, 4)).square().mean()
        if done[0] == 5:
            loss = loss * total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            total.copy_(loss)

    return step, [model, optimizer]


def failing():
    def step():
        raise ValueError("no data")

    return step, []


@pytest.mark.parametrize("set_up", [everything, accumulating])
def test_a_plan_holds_all_that_the_next_steps_need(set_up):
    found = replay(set_up, steps=4, start="fork")
    assert found.identical, [each.sentence() for each in found.differences]
    assert found.tensors >= 3


def test_what_is_dead_and_derivable_is_left_out():
    plan = replay(everything, start="fork").plan
    assert plan.find("scratch").kind == "dead"
    assert plan.find("model.mask").kind == "derivable"
    assert plan.find("model.frozen.weight").kind == "save-once"
    assert plan.find("model.hidden").kind == "must-save"


def test_a_process_that_is_started_anew_is_the_same():
    assert replay(everything, steps=2, start="spawn").identical


def test_a_class_that_does_not_hold_is_found_out():
    found = replay(reading_late, steps=4, start="fork")
    assert found.plan.find("total").kind == "dead"
    assert not found.identical
    assert {each.name: each.step for each in found.differences}["model.weight"] == 1


def test_an_error_of_the_step_is_one_sentence():
    with pytest.raises(AutosaveError, match=r"failed in its replay: .*no data"):
        replay(failing, start="fork")
