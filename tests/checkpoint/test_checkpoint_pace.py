"""Group that save at their own pace: nobody waits, and a version counts once it is whole."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_meshes import matrix_state
from checkpoint_states import open_store, steps_in

from outlast.checkpoint.encoder import Encoder

pytestmark = pytest.mark.distributed

Group = Callable[[int], Callable[..., list[Any]]]
SHAPE = (96, 40)


def whole(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


class Folder:
    """Words between ranks that are no collectives."""

    def __init__(self, place: Path) -> None:
        self._place = place
        place.mkdir(exist_ok=True)

    def say(self, word: str) -> None:
        (self._place / word).touch()

    def wait(self, word: str) -> None:
        deadline = time.monotonic() + 60
        while not (self._place / word).exists():
            assert time.monotonic() < deadline, word
            time.sleep(0.005)


def restored_alone(directory: Path) -> int:
    """The step that a single process restores, its bits checked; 0 for none."""
    state = matrix_state(99, SHAPE, None)
    restored = open_store(directory, collective=False).restore(state)
    if restored is None:
        return 0
    assert torch.equal(state["model"].weight, whole(restored.step))
    return restored.step


def save_at_own_pace(directory: Path, words: Path) -> list[Any]:
    """Rank 1 is held in its save of step 2 until rank 0 has saved steps 2, 3 and 4."""
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), Folder(words)
    write = Encoder.write

    def held(encoder: Any, job: Any, check: Any) -> Any:
        if rank == 1 and job.version.step == 2:
            folder.wait("rank 0 is ahead")
        return write(encoder, job, check)

    Encoder.write = held  # type: ignore[method-assign]
    found = []
    with open_store(directory, coordinated=False, keep=2) as store:
        state = matrix_state(1, SHAPE, 0)
        local = state["model"].weight.to_local()
        for step in range(1, 5):
            # Seeded anew without a collective, because ranks are at different steps.
            rows = SHAPE[0] // 2
            local.data.copy_(whole(step)[rank * rows : (rank + 1) * rows])
            result = store.save_async(step, state).result()
            assert result.error is None
            if step == 1:
                dist.barrier()
        if rank == 0:
            found.append(restored_alone(directory))
            folder.say("rank 0 is ahead")
            folder.wait("rank 1 has caught up")
            found.append(restored_alone(directory))
        else:
            folder.say("rank 1 has caught up")
        dist.barrier()
    return found


def test_a_slow_rank_keeps_nobody_waiting_and_is_used_when_it_catches_up(
    ranks: Group, tmp_path: Path
) -> None:
    found, _ = ranks(2)(save_at_own_pace, tmp_path / "store", tmp_path / "words")
    # Of the later ones only rank 0's part was there; then rank 1 caught up.
    assert found == [1, 4]
    assert restored_alone(tmp_path / "store") == 4


def save_and_say(directory: Path, words: Path) -> tuple[int, list[str]]:
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), Folder(words)
    with open_store(directory, coordinated=False, keep=9) as store:
        for step in (1, 2):
            if step == 2 and rank == 1:
                break
            store.save(step, matrix_state_locally(step, rank))
        dist.barrier()
        folder.say(f"{rank} saved")
        state = matrix_state(7, SHAPE, 0)
        restored = store.restore(state)
        assert restored is not None
        assert torch.equal(state["model"].weight.full_tensor(), whole(restored.step))
        return restored.step, restored.skipped


def matrix_state_locally(step: int, rank: int) -> dict[str, Any]:
    """The shard of this rank, without a collective after the first one."""
    if step == 1:
        return _remember(matrix_state(1, SHAPE, 0))
    rows = SHAPE[0] // 2
    local = _STATE["state"]["model"].weight.to_local()
    local.data.copy_(whole(step)[rank * rows : (rank + 1) * rows])
    return _STATE["state"]


_STATE: dict[str, Any] = {}


def _remember(state: dict[str, Any]) -> dict[str, Any]:
    _STATE["state"] = state
    return state


def test_ranks_restore_the_newest_version_that_all_have_saved(ranks: Group, tmp_path: Path) -> None:
    outcomes = ranks(2)(save_and_say, tmp_path / "store", tmp_path / "words")
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == 1


def save_many(directory: Path) -> int:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with open_store(directory, coordinated=False, keep=2) as store:
        for step in range(1, 9):
            if step == 1:
                store.save(step, matrix_state_locally(1, rank))
                dist.barrier()
            else:
                time.sleep(0.02 * rank)
                store.save(step, matrix_state_locally(step, rank))
        dist.barrier()
        if rank == 0:
            store.save(9, matrix_state_locally(9, rank))
        return store.newest().step if rank else 9


def test_old_versions_go_although_nobody_seals(ranks: Group, tmp_path: Path) -> None:
    ranks(2)(save_many, tmp_path)
    assert steps_in(tmp_path) == [7, 8, 9]
    assert restored_alone(tmp_path) == 8


def save_twice(directory: Path) -> str:
    dist.init_process_group("gloo")
    with open_store(directory, coordinated=False) as store:
        store.save(1, matrix_state_locally(1, dist.get_rank()))
        dist.barrier()
        again = store.save_async(1, matrix_state(5, SHAPE, 0)).result().error or ""
        dist.barrier()
    return again


def test_a_version_that_is_whole_is_never_overwritten(ranks: Group, tmp_path: Path) -> None:
    for error in ranks(2)(save_twice, tmp_path):
        assert "published already" in error
    assert restored_alone(tmp_path) == 1
