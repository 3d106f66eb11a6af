"""The state of a run in memory, beside its checkpoints."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from outlast.checkpoint import CheckpointStore
from outlast.checkpoint.restore import ReplayLog
from outlast.distributed.ranks import Ranks
from outlast.job import loop_job_from_text
from outlast.records import RunDirectory
from outlast.runtime.memory import MemoryCheckpoint
from outlast.runtime.saves import RunSaves

STARTED = Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1, launch="nproc")


State = dict[str, Any]


def opened(folder: Path, weight: float) -> tuple[MemoryCheckpoint, CheckpointStore, nn.Linear]:
    memory, store, state = opened_with_optimizer(folder, weight, optimizer=False)
    return memory, store, state["model"]


def opened_with_optimizer(
    folder: Path, weight: float, *, optimizer: bool = True
) -> tuple[MemoryCheckpoint, CheckpointStore, State]:
    job = loop_job_from_text(f'[recover]\nmemory = "{folder}/memory"\n')
    directory = RunDirectory(folder / "run")
    directory.create()
    model = nn.Linear(64, 64)
    nn.init.constant_(model.weight, weight)
    store = CheckpointStore(directory.checkpoints, writer="thread")
    state: State = {"model": model}
    if optimizer:
        state["optimizer"] = torch.optim.AdamW(model.parameters())
    return MemoryCheckpoint(job, STARTED, directory, store, state), store, state


def test_memory_taken_for_a_damaged_checkpoint_still_serves_and_has_to_be_saved(
    tmp_path: Path,
) -> None:
    memory, store, model = opened(tmp_path, 1.0)
    memory.keep(16)
    memory.settle()
    with store:
        assert not store.save(20, {"model": model}).error
    memory.close(forget=False)
    (pack,) = (tmp_path / "run" / "checkpoints").rglob("*.pack")
    content = bytearray(pack.read_bytes())
    content[len(content) // 2] ^= 1
    pack.write_bytes(content)
    memory, store, model = opened(tmp_path, 0.0)
    assert memory.restore()[0] == 16
    assert torch.all(model.weight == 1.0)
    assert memory.unsaved
    # As for an entry of the state that is given later.
    assert memory.find() == 16
    memory.close(forget=True)
    store.close()


def logged(folder: Path) -> State:
    """A run with a checkpoint of step 4, a state in memory of step 5, and logs up to step 7."""
    memory, store, state = opened_with_optimizer(folder, 1.0)
    with store:
        replay = ReplayLog(store, state)
        for step in range(1, 8):
            state["model"](torch.ones(64) * step).sum().backward()
            replay.step(step).result()
            state["optimizer"].zero_grad()
            if step == 4:
                store.save(step, state)
            if step == 5:
                memory.keep(step)
                memory.settle()
    memory.close(forget=False)
    return state


def test_replay_logs_that_lead_further_than_memory_are_taken(tmp_path: Path) -> None:
    trained = logged(tmp_path)
    memory, store, state = opened_with_optimizer(tmp_path, 0.0)
    assert store.newest_step() == 7
    assert memory.find() is None, "not the older state in memory"
    assert memory.restore()[0] == 7
    assert torch.equal(state["model"].weight, trained["model"].weight)
    memory.close(forget=True)
    store.close()


def test_memory_is_taken_where_replay_logs_end_before_it(tmp_path: Path) -> None:
    logged(tmp_path)
    (pack,) = (tmp_path / "run" / "checkpoints" / "replay").glob("step-00000005-*/*.pack")
    content = bytearray(pack.read_bytes())
    content[len(content) // 2] ^= 1
    pack.write_bytes(content)
    memory, store, _ = opened_with_optimizer(tmp_path, 0.0)
    assert memory.restore()[0] == 5
    memory.close(forget=True)
    store.close()


def test_what_was_logged_after_the_step_to_which_a_run_went_back_is_not_restored(
    tmp_path: Path,
) -> None:
    logged(tmp_path)
    memory, store, state = opened_with_optimizer(tmp_path, 0.0)
    saves = RunSaves(store, lambda *_: None, state)
    assert store.restore(state, until=5) is not None
    saves.go_back(5)
    memory.close(forget=True)
    store.close()
    _, store, state = opened_with_optimizer(tmp_path, 0.0)
    restored = store.restore(state)
    assert restored is not None
    assert restored.step == 5
