"""The state of a run in memory, beside its checkpoints."""

from pathlib import Path

import torch
from torch import nn

from outlast.checkpoint import CheckpointStore
from outlast.distributed.ranks import Ranks
from outlast.job import loop_job_from_text
from outlast.records import RunDirectory
from outlast.runtime.memory import MemoryCheckpoint

STARTED = Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1, launch="nproc")


def opened(folder: Path, weight: float) -> tuple[MemoryCheckpoint, CheckpointStore, nn.Linear]:
    job = loop_job_from_text(f'[recover]\nmemory = "{folder}/memory"\n')
    directory = RunDirectory(folder / "run")
    directory.create()
    model = nn.Linear(64, 64)
    nn.init.constant_(model.weight, weight)
    store = CheckpointStore(directory.checkpoints, writer="thread")
    memory = MemoryCheckpoint(job, STARTED, directory, store, {"model": model})
    return memory, store, model


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
