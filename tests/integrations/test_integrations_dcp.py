"""FSDP2 training that saves and loads by torch.distributed.checkpoint through Outlast's classes."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from outlast.checkpoint import dcp as dcp_storage
from outlast.checkpoint import list_versions, storage_of
from outlast.checkpoint.dcp import OutlastReader, OutlastWriter
from outlast.errors import CheckpointError

pytestmark = pytest.mark.distributed

SYMBOLS, WIDTH, STEPS, EVERY = 48, 24, 6, 2


class Training(Stateful):
    """As PyTorch's own tutorial on DCP has it: model and optimizer as one entry of the state."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Embedding(SYMBOLS, WIDTH), nn.Linear(WIDTH, 50), nn.Tanh(), nn.Linear(50, SYMBOLS)
        )
        for layer in (self.model[1], self.model[3], self.model):
            fully_shard(layer)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]

    def do_step(self) -> float:
        """One step on this rank's share of the step's samples; the mean loss of all ranks."""
        samples = torch.randint(SYMBOLS, (8, 5), generator=torch.Generator().manual_seed(self.step))
        mine = samples.chunk(dist.get_world_size())[dist.get_rank()]
        logits = self.model(mine[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        return mean.item()


def train(place: Path, saves: bool) -> dict[int, float]:
    """Continue from the newest checkpoint to the last step; loss by step."""
    dist.init_process_group("gloo")
    background = dist.new_group(backend="gloo")
    training = Training()
    reader = OutlastReader(place)
    if reader.newest() is not None:
        dcp.load({"training": training}, storage_reader=reader)
    writer = OutlastWriter(place, keep=2)
    losses, saving = {}, None
    while training.step < STEPS:
        loss = training.do_step()
        losses[training.step] = loss
        if saves and training.step % EVERY == 0:
            if saving is not None:
                saving.result()
            saving = dcp.async_save(
                {"training": training},
                storage_writer=writer,
                checkpoint_id=f"step-{training.step}",
                process_group=background,
            )
    if saving is not None:
        saving.result()
    return losses


def train_and_die(place: Path) -> None:
    """As `train`, but rank 0 is killed in its second save, when all parts are written."""
    real, calls = dcp_storage.metadata_file, []

    def kill_in_the_second(metadata: Any) -> bytes:
        calls.append(metadata)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(metadata)

    dcp_storage.metadata_file = kill_in_the_second
    # Rank 1 finds that nobody answers.
    with contextlib.suppress(Exception):
        train(place, True)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose training was killed in the midst of the save of step 4."""
    place = tmp_path_factory.mktemp("killed")
    outcomes = run_ranks(2, train_and_die, place, may_die={0})
    assert outcomes[0] is None
    return place


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Loss of every step of a training that nothing befalls."""
    first, second = run_ranks(2, train, tmp_path_factory.mktemp("whole"), True)
    assert first == second
    assert sorted(first) == list(range(1, STEPS + 1))
    return first


@pytest.mark.supports("dcp", "checkpoint", "resume")
def test_after_a_kill_in_a_save_the_losses_are_those_of_a_run_without(
    killed: Path, whole: dict[int, float]
) -> None:
    assert [each.step for each in list_versions(storage_of(killed))] == [2, 4]
    reader = OutlastReader(killed)
    found = reader.newest()
    assert found is not None
    assert found.step == 2
    expected = {step: loss for step, loss in whole.items() if step > 2}
    assert run_ranks(2, train, killed, False) == [expected, expected]


@pytest.mark.supports("dcp", "malleable")
def test_one_rank_goes_on_where_two_were(killed: Path, whole: dict[int, float]) -> None:
    [losses] = run_ranks(1, train, killed, False)
    assert losses == pytest.approx({step: loss for step, loss in whole.items() if step > 2}, 1e-5)


def test_what_can_be_loaded_is_known_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> bytes:
        raise OSError("no more")

    place = tmp_path / "none yet"
    assert OutlastReader(place).newest() is None
    state = {"a": torch.ones(3)}
    with monkeypatch.context() as patched:
        patched.setattr(dcp_storage, "metadata_file", fail)
        with pytest.raises(dcp.CheckpointException, match="no more"):
            dcp.save(state, storage_writer=OutlastWriter(place, step=1), no_dist=True)
    # Its only save was cut short: there is nothing to load, and nothing is lost.
    assert OutlastReader(place).newest() is None
    dcp.save(state, storage_writer=OutlastWriter(place, step=2), no_dist=True)
    newest = OutlastReader(place).newest()
    assert newest is not None
    assert newest.step == 2
    # What was complete and is no longer must not look like a new start.
    (place / newest.folder / "dcp.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used"):
        OutlastReader(place).newest()
