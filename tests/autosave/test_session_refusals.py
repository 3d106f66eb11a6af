"""What cannot be saved is named with its line; what need not be saved is left out."""

import re
from pathlib import Path

import pytest
from rerun import DictKeeper, run

from outlast.errors import AutosaveError

LOOP = """
import threading
import torch
from torch import nn

class Watch:
    pass

def main():
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = Watch()
    for step in range(6):
        {first}
        loss = model(torch.ones(64)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        {last}
    {after}
    print(loss.item())

main()
"""


def script(place: Path, first: str = "pass", last: str = "pass", after: str = "pass") -> Path:
    path = place / "train.py"
    path.write_text(LOOP.format(first=first, last=last, after=after).lstrip())
    return path


def line_of(path: Path, text: str) -> int:
    return 1 + next(n for n, line in enumerate(path.read_text().splitlines()) if text in line)


def test_a_local_name_is_named_with_the_line_that_binds_it(tmp_path: Path) -> None:
    path = script(tmp_path, "mine = threading.Lock() if step == 0 else mine", "mine.locked()")
    line = line_of(path, "threading.Lock()")
    with pytest.raises(AutosaveError, match=rf"train\.py, line {line}: `mine`, a _thread\.lock,"):
        run(path, DictKeeper(2))


@pytest.mark.slow
def test_an_attribute_is_named_with_the_line_that_sets_it(tmp_path: Path) -> None:
    path = script(tmp_path, last="watch.lock = threading.Lock()", after="print(watch)")
    line = line_of(path, "watch.lock =")
    found = re.escape(f"line {line}: `") + r".*watch.*lock.*`, a _thread\.lock, cannot be saved"
    with pytest.raises(AutosaveError, match=found):
        run(path, DictKeeper(2))


def saved_bytes(path: Path, step: int) -> int:
    keeper = DictKeeper(step)
    run(path, keeper)
    assert keeper.saved is not None
    return sum(each.numel() * each.element_size() for each in keeper.saved.tensors.values())


@pytest.mark.slow
def test_gradients_that_the_next_step_drops_are_not_saved(tmp_path: Path) -> None:
    path = script(tmp_path)
    weights = 4 * (64 * 64 + 64)
    assert saved_bytes(path, 4) < saved_bytes(path, 1) <= saved_bytes(path, 4) + weights


@pytest.mark.slow
def test_gradients_that_are_read_after_the_loop_are_saved(tmp_path: Path) -> None:
    path = script(tmp_path, after="print(model.weight.grad.sum())")
    assert saved_bytes(path, 4) == saved_bytes(path, 1)
