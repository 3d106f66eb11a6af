"""Group that are gone, silent or slow: an error within the deadline, never a wait without end."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkpoint_states import Net, open_store, steps_in

from outlast.checkpoint.encoder import Encoder
from outlast.distributed import group
from outlast.errors import CheckpointError

pytestmark = pytest.mark.distributed

Group = Callable[[int], Callable[..., list[Any]]]


def save_after_the_other_left(directory: Path) -> str | None:
    dist.init_process_group("gloo")
    store = open_store(directory, timeout_seconds=5.0)
    store.save(1, {"model": Net(0)})
    dist.barrier()
    if dist.get_rank():
        return None
    try:
        return store.save_async(2, {"model": Net(0)}).result().error
    except CheckpointError as error:
        return str(error)


def test_a_rank_that_is_gone_is_an_error_not_a_wait(ranks: Group, tmp_path: Path) -> None:
    error, _ = ranks(2)(save_after_the_other_left, tmp_path)
    assert error
    assert steps_in(tmp_path) == [1]


def save_while_the_other_sleeps(directory: Path) -> tuple[str, bool]:
    """Rank 1 lives but saves no more; returns what rank 0 learns, and whether it did in time."""
    dist.init_process_group("gloo")
    store = open_store(directory, timeout_seconds=2.0)
    store.save(1, {"model": Net(0)})
    dist.barrier()
    learned = directory.with_name(f"{directory.name}-learned")
    told: list[str] = []

    def save() -> None:
        try:
            told.append(str(store.save_async(2, {"model": Net(0)}).result().error))
        except CheckpointError as error:
            told.append(str(error))

    if dist.get_rank() == 0:
        thread = threading.Thread(target=save, daemon=True)
        thread.start()
        thread.join(10)
        in_time = not thread.is_alive()
        learned.touch()
        return "".join(told), in_time
    until = time.monotonic() + 60.0
    while not learned.exists() and time.monotonic() < until:
        time.sleep(0.05)
    return "", True


def test_a_rank_that_saves_no_more_is_an_error_within_the_deadline(
    ranks: Group, tmp_path: Path
) -> None:
    (error, in_time), _ = ranks(2)(save_while_the_other_sleeps, tmp_path)
    assert in_time, "rank 0 waited for longer than timeout_seconds"
    assert error


def save_while_the_other_writes_for_ever(directory: Path) -> str:
    """Rank 1's storage hangs in the background; the others learn it by the deadline."""
    dist.init_process_group("gloo")
    write = Encoder.write

    def slow(*args: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(4)
        return write(*args)

    Encoder.write = slow  # type: ignore[method-assign]
    store = open_store(directory, timeout_seconds=1.0)
    begun = time.monotonic()
    error = store.save_async(1, {"model": Net(0)}).result().error or ""
    assert dist.get_rank() == 1 or time.monotonic() - begun < 3.5
    time.sleep(5)
    return error


def test_a_rank_whose_storage_hangs_is_named_by_the_deadline(ranks: Group, tmp_path: Path) -> None:
    first, second, third = ranks(3)(save_while_the_other_writes_for_ever, tmp_path)
    assert "rank 1 did not report on the save within 1 s (timeout_seconds = 1)" in first
    assert "rank 1 did not report" in third
    assert second
    assert not list(tmp_path.rglob("version.json"))


def save_last(directory: Path) -> str | None:
    """All ranks end right after their last save; the others look again when rank 0 has ended."""
    dist.init_process_group("gloo")
    write = Encoder.write

    def slow(*args: Any) -> Any:
        time.sleep(0.2 * (dist.get_rank() == 0))
        return write(*args)

    Encoder.write = slow  # type: ignore[method-assign]
    group._FIRST_PAUSE_SECONDS = group._LONGEST_PAUSE_SECONDS = 1.0
    with open_store(directory) as store:
        return store.save_async(1, {"model": Net(0)}).result().error


def test_rank_zero_may_end_right_after_the_last_save(ranks: Group, tmp_path: Path) -> None:
    assert ranks(4)(save_last, tmp_path) == [None] * 4
