"""What a save does while the one before is under way, and what it says about it."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import Holder, WritingHeld, open_store, restore_step, steps_in

from outlast.checkpoint.encoder import Encoder, PartJob, Written


def state_of(value: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(value)
    return {"data": Holder({"x": torch.rand(9000, generator=generator), "value": value})}


def check(directory: Path, step: int) -> None:
    found: dict[str, Any] = {"data": Holder()}
    assert restore_step(directory, found, step=step) == step
    expected = state_of(step)["data"].state
    assert found["data"].state["value"] == step
    assert torch.equal(found["data"].state["x"], expected["x"])


def test_by_default_a_save_waits_for_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = WritingHeld(monkeypatch)
    with open_store(tmp_path) as store:
        first = store.save_async(1, state_of(1))
        second: list[Any] = []
        thread = threading.Thread(target=lambda: second.append(store.save_async(2, state_of(2))))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert not first.done()
        writing.gate.set()
        thread.join(30)
        assert first.done()
        result = second[0].wait()
    assert result.blocked_seconds > 0.15
    assert (result.error, result.skipped) == (None, "")
    assert steps_in(tmp_path) == [1, 2]


def test_skip_makes_no_version_and_says_so_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = WritingHeld(monkeypatch)
    with open_store(tmp_path, when_busy="skip") as store:
        first = store.save_async(1, state_of(1))
        skipped = store.save_async(2, state_of(2))
        assert skipped.done()
        assert not first.done()
        result = skipped.wait()
        assert result.skipped == "the save of step 1 was still under way"
        assert (result.step, result.error, result.bytes) == (2, None, 0)
        writing.gate.set()
        first.wait()
        assert store.save_async(3, state_of(3)).result().skipped == ""
    assert steps_in(tmp_path) == [1, 3]
    check(tmp_path, 1)
    check(tmp_path, 3)


class Halting:
    """Stops the writer of one step at its first tile until it is told to give up or continue."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        write = Encoder.write

        def halting(encoder: Encoder, job: PartJob, check: Callable[[], None]) -> Written:
            def slow_check() -> None:
                if job.version.step == step and not self.begun.is_set():
                    self.begun.set()
                    assert self.go_on.wait(30)
                check()

            return write(encoder, job, slow_check)

        monkeypatch.setattr(Encoder, "write", halting)


def replaced(
    store: Any, halting: Halting, monkeypatch: pytest.MonkeyPatch, newer: int
) -> tuple[Any, Any]:
    """Save step 2, and `newer` while it is halted; returns both handles."""
    older = store.save_async(2, state_of(2))
    assert halting.begun.wait(30)
    lane_abandon = store._states.abandon

    def abandon_and_release() -> None:
        lane_abandon()
        halting.go_on.set()

    monkeypatch.setattr(store._states, "abandon", abandon_and_release)
    return older, store.save_async(newer, state_of(newer))


def test_replace_never_publishes_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halting = Halting(monkeypatch, step=2)
    with open_store(tmp_path, keep=9, when_busy="replace") as store:
        store.save(1, state_of(1))
        older, newer = replaced(store, halting, monkeypatch, 3)
        result = older.result()
        assert result.skipped == "a newer save replaced it"
        assert (result.error, result.bytes) == (None, 0)
        assert newer.wait().skipped == ""
        store.save(4, state_of(4))
    assert steps_in(tmp_path) == [1, 3, 4]
    assert not list(tmp_path.rglob("*.tmp"))
    for step in (1, 3, 4):
        check(tmp_path, step)


def test_replace_gives_up_a_save_that_has_not_begun_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path, keep=9, when_busy="replace") as store:
        store.save(1, state_of(1))
        lane = store._states
        gate = threading.Event()
        # The background is still at something else when the second save is asked for.
        lane._executor.submit(gate.wait, 30)
        older = store.save_async(2, state_of(2))
        settle = lane.settle

        def settle_now() -> None:
            gate.set()
            settle()

        monkeypatch.setattr(lane, "settle", settle_now)
        newer = store.save_async(3, state_of(3))
        assert older.result().skipped == "a newer save replaced it"
        assert newer.wait().error is None
    assert steps_in(tmp_path) == [1, 3]
    check(tmp_path, 3)


def test_a_step_that_was_replaced_can_be_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halting = Halting(monkeypatch, step=2)
    with open_store(tmp_path, keep=9, when_busy="replace") as store:
        store.save(1, state_of(1))
        older, newer = replaced(store, halting, monkeypatch, 2)
        assert older.result().skipped
        assert newer.wait().error is None
    assert steps_in(tmp_path) == [1, 2]
    check(tmp_path, 2)


def test_an_idle_store_replaces_and_skips_nothing(tmp_path: Path) -> None:
    for policy in ("skip", "replace"):
        directory = tmp_path / policy
        with open_store(directory, keep=9, when_busy=policy) as store:
            for step in range(1, 4):
                result = store.save(step, state_of(step))
                assert (result.error, result.skipped) == (None, "")
        assert steps_in(directory) == [1, 2, 3]
