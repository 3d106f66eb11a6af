"""A script with state in many corners, killed under `outlast run`, against plain Python."""

import signal
from pathlib import Path

import pytest
import torch
from running import outlast, plain

pytestmark = pytest.mark.distributed

SCRIPT = """
import csv
import functools
import logging
import os
import queue
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

HERE = Path(__file__).parent
folder = HERE / "runs" / str(time.time_ns())
folder.mkdir(parents=True)
log = open(folder / "log.txt", "w")
replay = queue.Queue()
steps = 0


def reached(step):
    plan = HERE / "plan"
    if plan.exists() and step == int(plan.read_text()):
        plan.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


@functools.lru_cache
def noise(number):
    return torch.randn(4)


def timed(function):
    def wrapper(fold):
        begun = steps
        function(fold)
        log.write(f"fold {fold} took {steps - begun} steps\\n")
    return wrapper


@timed
def train(fold):
    global steps
    model = weight_norm(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    logger = logging.getLogger("folds")
    logger.addHandler(logging.FileHandler(HERE / f"fold{fold}.log", mode="w"))
    with open(HERE / f"fold{fold}.csv", "w", newline="") as file:
        rows = csv.writer(file, delimiter=";")
        for step in range(5):
            replay.put(noise(step % 3) + step)
            loss = model(torch.stack(list(replay.queue))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if replay.qsize() > 3:
                replay.get()
            rows.writerow([fold, step, loss.item()])
            log.write(f"{loss.item()}\\n")
            logger.warning("step %d: %r", step, loss.item())
            steps += 1
            reached(steps)
    logger.handlers.pop().close()
    torch.save(model.state_dict(), HERE / f"fold{fold}.pt")


torch.manual_seed(3)
for fold in range(3):
    train(fold)
log.close()
(HERE / "where").write_text(str(folder))
"""


def results(place):
    found = {each.name: each.read_bytes() for each in sorted(place.glob("fold*.[cl]*"))}
    for each in sorted(place.glob("fold*.pt")):
        found[each.name] = {k: v.tolist() for k, v in torch.load(each).items()}
    found["log"] = Path((place / "where").read_text(), "log.txt").read_bytes()
    return found


def test_a_script_with_hidden_state_ends_as_under_plain_python(tmp_path):
    places = [tmp_path / each for each in ("plain", "killed")]
    for each in places:
        each.mkdir()
        (each / "train.py").write_text(SCRIPT)
    ended = plain(places[0] / "train.py")
    assert ended.code == 0, ended.said
    for step in (4, 8, 13):
        (places[1] / "plan").write_text(str(step))
        ended = outlast("run", "--every", 1, places[1] / "train.py")
        assert ended.code == -signal.SIGKILL, ended.said
    ended = outlast("run", "--every", 1, places[1] / "train.py")
    assert ended.code == 0, ended.said
    assert "resumed at step" in ended.said
    assert results(places[1]) == results(places[0])
