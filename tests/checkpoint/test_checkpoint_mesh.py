"""A version saved on one mesh restores on any other, reading little more than it needs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkpoint_meshes import (
    Mlp,
    mlp_state,
    restore_layout,
    restore_matrix,
    restore_mlp,
    save_layout,
    save_matrix,
    save_mlp,
)
from checkpoint_states import bits, make_state, open_store, save_once, total_bytes, train
from torch import nn

from outlast.checkpoint import CheckpointStore

pytestmark = pytest.mark.distributed

Group = Callable[[int], Callable[..., list[Any]]]


def restore_alone(directory: Path) -> dict[str, Any] | None:
    """Rank 1 of 2 restores by itself, the other rank takes no part."""
    dist.init_process_group("gloo")
    return None if dist.get_rank() == 0 else restore_plain(directory, collective=False)


def restore_plain(directory: Path, *, collective: bool = True) -> dict[str, Any]:
    state = make_state(seed=3)
    del state["data"]
    restored = CheckpointStore(directory, collective=collective).restore(state)
    assert restored is not None
    return bits(state)


def test_four_sharded_ranks_restore_on_any_number(ranks: Group, tmp_path: Path) -> None:
    saved = ranks(4)(save_layout, tmp_path, "fsdp")
    expected = saved[0][0]
    assert all(content == expected for content, _ in saved)
    for count in (1, 2, 3, 5):
        assert ranks(count)(restore_layout, tmp_path, "fsdp") == [(expected, 2)] * count
    assert ranks(2)(restore_alone, tmp_path)[1] == expected
    assert restore_plain(tmp_path) == expected


@pytest.mark.parametrize("count", [1, 5])
def test_a_mesh_grows_and_shrinks_again(ranks: Group, tmp_path: Path, count: int) -> None:
    saved = ranks(count)(save_layout, tmp_path, "fsdp")[0][0]
    for other in (4, 2):
        assert ranks(other)(restore_layout, tmp_path, "fsdp") == [(saved, 2)] * other


@pytest.mark.parametrize(
    ("before", "after"),
    [("ddp", "fsdp"), ("fsdp", "ddp"), ("hsdp", "fsdp"), ("fsdp", "hsdp"), ("hsdp", "plain")],
)
def test_layouts_share_their_versions(
    ranks: Group, tmp_path: Path, before: str, after: str
) -> None:
    saved = ranks(4)(save_layout, tmp_path, before)[0][0]
    assert ranks(4)(restore_layout, tmp_path, after) == [(saved, 2)] * 4


def test_a_plain_version_restores_on_replicas_and_shards(ranks: Group, tmp_path: Path) -> None:
    state = make_state()
    del state["data"]
    train(state, 1, 2)
    save_once(tmp_path, 2, state)
    for layout in ("ddp", "fsdp"):
        assert ranks(2)(restore_layout, tmp_path, layout) == [(bits(state), 2)] * 2


@pytest.mark.parametrize("layout", ["ddp", "hsdp"])
def test_replicas_are_stored_once_in_total(ranks: Group, tmp_path: Path, layout: str) -> None:
    state = make_state()
    del state["data"]
    train(state, 1, 1)
    save_once(tmp_path / "alone", 1, state)
    results = ranks(4)(save_layout, tmp_path / "many", layout, 1)
    packs = [total_bytes_of_packs(tmp_path / name) for name in ("alone", "many")]
    assert packs[1] < 1.25 * packs[0]
    assert sum(written > 0 for _, written in results) >= 2, "the ranks share the work"


def total_bytes_of_packs(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*.pack"))


SHAPES = [(1, 4), (2, 2), (1, 2), (2, 1), (1, 1)]


@pytest.mark.parametrize("saved", [(1, 4), (2, 2)])
def test_tensor_parallel_layers_restore_on_other_meshes(
    ranks: Group, tmp_path: Path, saved: tuple[int, int]
) -> None:
    expected = ranks(saved[0] * saved[1])(save_mlp, tmp_path, saved)[0]
    for shape in SHAPES:
        found = ranks(shape[0] * shape[1])(restore_mlp, tmp_path, shape)
        assert found == [expected] * len(found), shape


def save_stage(directory: Path) -> int:
    """A pipeline: every rank has a stage of its own, under names of its own."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = stage_state(rank, seed=0)
    with open_store(directory) as store:
        written = store.save(1, state).bytes
        dist.barrier()
    return written


def stage_state(*stages: int, seed: int) -> dict[str, Any]:
    model = nn.ModuleDict({f"stage{stage}": Mlp(seed + stage) for stage in stages})
    return {"model": model}


def restore_stages(directory: Path) -> list[bytes]:
    """Two ranks take the three stages over: one and two of them."""
    dist.init_process_group("gloo")
    state = stage_state(*([0] if dist.get_rank() == 0 else [1, 2]), seed=50)
    assert open_store(directory).restore(state) is not None
    return [each.detach().numpy().tobytes() for each in state["model"].parameters()]


def test_stages_of_a_pipeline_move_to_other_ranks(ranks: Group, tmp_path: Path) -> None:
    assert all(written > 0 for written in ranks(3)(save_stage, tmp_path))
    first, second = ranks(2)(restore_stages, tmp_path)
    expected = stage_state(0, 1, 2, seed=0)["model"]
    contents = [each.detach().numpy().tobytes() for each in expected.parameters()]
    assert first + second == contents
    whole = stage_state(0, 1, 2, seed=50)
    assert open_store(tmp_path).restore(whole) is not None
    found = [each.detach().numpy().tobytes() for each in whole["model"].parameters()]
    assert found == contents


@pytest.mark.parametrize(
    ("shape", "writers", "dimension", "readers"),
    [
        ((512, 512), 3, 0, [1, 2, 4]),
        ((1500, 640), 3, 0, [1, 2, 4]),
    ],
    ids=str,
)
def test_shards_of_rows_read_little_more_than_they_need(
    ranks: Group,
    tmp_path: Path,
    shape: tuple[int, int],
    writers: int,
    dimension: int,
    readers: list[int],
) -> None:
    # Rank 0 counts what all have written.
    written = max(ranks(writers)(save_matrix, tmp_path, shape, dimension))
    assert written < 1.1 * 4 * shape[0] * shape[1]
    for count in readers:
        for read, needed in ranks(count)(restore_matrix, tmp_path, shape, 0):
            assert needed <= -(-shape[0] // count) * shape[1] * 4
            assert read <= 1.1 * needed, (shape, writers, count)


@pytest.mark.parametrize("shape", [(512, 512), (1024, 1024), (2048, 640)], ids=str)
def test_shards_of_columns_read_little_more_of_rows_than_they_need(
    ranks: Group, tmp_path: Path, shape: tuple[int, int]
) -> None:
    ranks(4)(save_matrix, tmp_path, shape, 0)
    for read, needed in ranks(4)(restore_matrix, tmp_path, shape, 1):
        assert needed == shape[0] * shape[1]
        assert read <= 1.1 * needed


def test_a_rank_alone_reads_the_whole_once(ranks: Group, tmp_path: Path) -> None:
    ranks(3)(save_matrix, tmp_path, (512, 512), 0)
    [(read, needed)] = ranks(1)(restore_matrix, tmp_path, (512, 512), None)
    assert needed == 512 * 512 * 4
    assert read <= 1.1 * needed
    assert total_bytes(tmp_path) <= 1.1 * needed


def test_mlp_states_differ_by_seed() -> None:
    first, second = (mlp_state(seed, (1, 1))["model"].up.weight for seed in (0, 1))
    assert not first.equal(second), "or the tests above could not fail"
