"""Very many ranks: sealed by groups, opened by an index, and nobody reads all manifests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_meshes import matrix_state
from checkpoint_states import open_store

from outlast.checkpoint import storage_of
from outlast.checkpoint.inspection import verify
from outlast.checkpoint.version import Version

Group = Callable[[int], Callable[..., list[Any]]]


def save_steps(directory: Path, *steps: int) -> None:
    dist.init_process_group("gloo")
    with open_store(directory, keep=9) as store:
        for step in steps:
            store.save(step, matrix_state(step, (64, 64), 0))
        dist.barrier()


def restore_matrix(directory: Path) -> tuple[int, list[str], bool]:
    dist.init_process_group("gloo")
    state = matrix_state(9, (64, 64), 0)
    restored = open_store(directory).restore(state, warn=False)
    assert restored is not None
    whole = state["model"].weight.full_tensor()
    expected = torch.randn((64, 64), generator=torch.Generator().manual_seed(restored.step))
    return restored.step, restored.skipped, torch.equal(whole, expected)


@pytest.mark.distributed
@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("now", [1, 3, 4])
def test_ranks_in_groups_save_and_others_restore(ranks: Group, tmp_path: Path, now: int) -> None:
    ranks(4)(save_steps, tmp_path, 1, 2)
    files = sorted(path.name for path in (tmp_path / "step-00000002-a1").glob("*.json"))
    assert [name for name in files if name.startswith(("group", "index", "version"))] == [
        "group-00000-of-00004.json",
        "group-00001-of-00004.json",
        "index-of-00004.json",
        "version.json",
    ]
    for step, skipped, right in ranks(now)(restore_matrix, tmp_path):
        assert (step, skipped, right) == (2, [], True)
    storage = storage_of(tmp_path)
    assert verify(storage, Version(1, 2)).state == "ok"
