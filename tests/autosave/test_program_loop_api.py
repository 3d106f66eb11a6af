from __future__ import annotations

from itertools import islice

import pytest
import torch
from rerun import DictKeeper, run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from outlast import autosave
from outlast.checkpoint import CheckpointStore
from outlast.errors import AutosaveError


class Training:
    """A small training of several epochs, all of which save to one store."""

    def __init__(self, folder, wrap=lambda loader: loader):
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
        self.loader = DataLoader(data, 4, shuffle=True)
        self.store = CheckpointStore(folder, keep=2)
        self.wrap = wrap
        self.losses = []

    def run(self, until=None):
        state = {"model": self.model, "optimizer": self.optimizer}
        for _ in range(3):
            batches = self.wrap(self.loader)
            for x, y in autosave.loop(batches, state=state, store=self.store, every_steps=4):
                loss = nn.functional.mse_loss(self.model(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.losses.append(loss.item())
                if len(self.losses) == until:
                    self.store.close()
                    return self
        self.store.close()
        return self


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda each: each, lambda each: islice(each, 6)])
@pytest.mark.parametrize("until", [3, 5, 11])
def test_another_process_goes_on_from_the_last_save(tmp_path, until, wrap):
    whole = Training(tmp_path / "whole", wrap).run()
    Training(tmp_path / "run", wrap).run(until)

    again = Training(tmp_path / "run", wrap).run()

    done = until // 4 * 4 if until > 4 else 0
    assert again.losses == whole.losses[done:]
    for one, other in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_in_a_program_that_is_run_with_a_session_it_is_the_step_loop(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "from outlast import autosave\n"
        "seen = []\n"
        "for epoch in range(2):\n"
        "    for batch in autosave.loop([1, 2, 3], state={}, store=None):\n"
        "        seen.append((epoch, batch))\n"
        "print(seen)\n"
    )
    whole = DictKeeper()
    printed = run(script, whole)
    assert whole.asked == list(range(7))

    stopped = DictKeeper(4)
    assert run(script, stopped) == ""
    assert run(script, DictKeeper(), stopped.saved) == printed


def test_what_saves_never_is_refused(tmp_path):
    store = CheckpointStore(tmp_path)
    with pytest.raises(AutosaveError, match="every_steps = 0 saves never"):
        autosave.loop([1], state={}, store=store, every_steps=0)
    store.close()


@pytest.mark.slow
def test_a_save_that_fails_is_a_warning_and_the_loop_goes_on(tmp_path):
    model, seen = nn.Linear(2, 2), []

    def train():
        with CheckpointStore(tmp_path / "run") as store:
            for item in autosave.loop(range(8), state={"model": model}, store=store, every_steps=2):
                seen.append(item)
                if item == 3:
                    (tmp_path / "run").rename(tmp_path / "gone")
                    (tmp_path / "run").write_text("in the way")

    with pytest.warns(UserWarning, match=r"a save of outlast\.autosave\.loop failed"):
        train()
    assert seen == list(range(8))
