"""Late tensors: copied while training continues, and never published when it wrote to them."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import (
    Holder,
    Net,
    WritingHeld,
    bits,
    make_state,
    open_store,
    restore_step,
    steps_in,
    train,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from outlast.checkpoint import Bound, CheckpointStore, Reduction, SaveHandle
from outlast.checkpoint.lane import CopyWindow
from outlast.errors import CheckpointError

Write = Callable[[torch.Tensor], None]
ODD = 2_500_001


def everything(name: str) -> bool:
    return True


def tensors_of(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"data": Holder(state)}


@pytest.fixture
def held() -> Iterator[Callable[[CheckpointStore], threading.Event]]:
    """Keeps the background thread of a store busy until the event is set, or the test ends."""
    gates: list[threading.Event] = []

    def hold(store: CheckpointStore) -> threading.Event:
        gates.append(threading.Event())
        store._states._executor.submit(gates[-1].wait, 60)
        return gates[-1]

    yield hold
    for gate in gates:
        gate.set()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def copied_by_the_background_thread(store: CheckpointStore) -> None:
    window = store._states._window
    assert window is not None
    wait_until(lambda: not window._pieces and not window._under_way)


@pytest.mark.parametrize("by", ["caller", "background", "both"])
def test_what_is_saved_is_the_state_of_the_call(
    tmp_path: Path, by: str, held: Callable[[CheckpointStore], threading.Event]
) -> None:
    state = make_state()
    train(state, 1, 2)
    with open_store(tmp_path) as store:
        before = bits(state)
        gate = held(store) if by == "caller" else None
        handle = store.save_async(2, state, late=everything)
        if by == "background":
            copied_by_the_background_thread(store)
        handle.copied()
        train(state, 3, 3)
        if gate is not None:
            gate.set()
        assert handle.wait().error is None
    fresh = make_state(9)
    assert restore_step(tmp_path, fresh) == 2
    assert bits(fresh) == before


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "row": lambda: torch.randn(1000),
    "transposed": lambda: torch.randn(30, 70).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "gaps": lambda: torch.randn(100)[::3],
    "bf16": lambda: torch.randn(33, dtype=torch.bfloat16),
    "bool": lambda: torch.rand(17) > 0.5,
    "conjugate": lambda: torch.randn(9, dtype=torch.complex64).conj(),
    "inference": lambda: _inference(),
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 4),
}


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(11)


@settings(max_examples=20)
@given(late=st.sets(st.sampled_from(sorted(LAYOUTS))))
def test_any_tensor_may_be_late(tmp_path_factory: pytest.TempPathFactory, late: set[str]) -> None:
    state = {name: make() for name, make in LAYOUTS.items()}
    expected = {name: each.clone() for name, each in state.items()}
    directory = tmp_path_factory.mktemp("store")
    with open_store(directory) as store:
        names = [f"data.{name}" for name in late]
        handle = store.save_async(1, tensors_of(state), late=names)
        handle.copied()
        with torch.inference_mode():
            for each in state.values():
                each.fill_(0)
        assert handle.wait().error is None
    found = Holder()
    assert restore_step(directory, {"data": found}) == 1
    for name, each in expected.items():
        assert torch.equal(found.state[name], each.resolve_conj()), name


def test_a_tensor_of_several_pieces_is_whole(tmp_path: Path) -> None:
    state = {"long": torch.arange(ODD, dtype=torch.int32), "short": torch.ones(3)}
    expected = state["long"].clone()
    with open_store(tmp_path) as store:
        handle = store.save_async(1, tensors_of(state), late=everything)
        handle.copied()
        state["long"].zero_()
        handle.wait()
    found = Holder()
    restore_step(tmp_path, {"data": found})
    assert torch.equal(found.state["long"], expected)


def test_tied_tensors_are_late_only_together(tmp_path: Path) -> None:
    model = Net(0)
    with open_store(tmp_path) as store:
        handle = store.save_async(1, {"model": model}, late=["model.head.weight"])
        # The other name of this memory was not late, so that it is copied.
        with torch.no_grad():
            model.head.weight.fill_(7)
        assert handle.wait().error is None
    assert restore_step(tmp_path, {"model": model}) == 1
    assert bits({"model": model}) == bits({"model": Net(0)})


WRITES: dict[str, Write] = {
    "in place": lambda each: each.add_(1),
    # Where no bytes are compared.
    "a view": lambda each: each.view(-1)[100:102].fill_(4),
    "by index": lambda each: each.__setitem__(0, 5),
    "of a list": lambda each: torch._foreach_mul_([each], 2.0),
    "without counting": lambda each: each.data.add_(1),
}


@pytest.mark.parametrize("when", ["before", "during", "after"])
@pytest.mark.parametrize("how", WRITES)
def test_a_write_in_the_window_is_never_published(
    tmp_path: Path,
    how: str,
    when: str,
    held: Callable[[CheckpointStore], threading.Event],
) -> None:
    model = nn.Linear(40, 40)
    with open_store(tmp_path) as store:
        store.save(1, {"model": model})
        gate = held(store) if when == "before" else None
        handle = store.save_async(2, {"model": model}, late=everything)
        if when == "after":
            copied_by_the_background_thread(store)
        with torch.no_grad():
            WRITES[how](model.weight)
        handle.copied()
        if gate is not None:
            gate.set()
        result = handle.result()
        assert result.error is not None
        assert "`model.weight` was written before its copy was made; call copied()" in result.error
        assert steps_in(tmp_path) == [1]
        again = bits({"model": model})
        assert store.save_async(2, {"model": model}).wait().error is None
    fresh = nn.Linear(40, 40)
    assert restore_step(tmp_path, {"model": fresh}) == 2
    assert bits({"model": fresh}) == again


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_forgotten_window_is_found_under_every_optimizer(
    tmp_path: Path, kind: Any, settings: dict[str, bool]
) -> None:
    model = nn.Linear(30, 30)
    optimizer = kind(model.parameters(), lr=0.1, **settings)
    state = {"model": model, "optimizer": optimizer}
    with open_store(tmp_path) as store:
        for step in range(1, 3):
            model(torch.randn(5, 30)).sum().backward()
            handle = store.save_async(step, state, late=everything)
            copied_by_the_background_thread(store)
            optimizer.step()
            assert "before" in (handle.result().error or "")
    assert steps_in(tmp_path) == []


def test_memory_given_back_in_the_window_is_an_error(
    tmp_path: Path, held: Callable[[CheckpointStore], threading.Event]
) -> None:
    state = {"x": torch.ones(1000)}
    with open_store(tmp_path) as store:
        gate = held(store)
        handle = store.save_async(1, tensors_of(state), late=everything)
        state["x"].untyped_storage().resize_(0)
        handle.copied()
        gate.set()
        assert "given back before its copy" in (handle.result().error or "")


def test_weights_that_are_exchanged_for_a_while_are_copied_as_they_were() -> None:
    weights, average = torch.randn(ODD), torch.randn(ODD)
    memory = weights.view(torch.uint8)
    before, target = memory.clone(), torch.empty_like(memory)
    window = CopyWindow(pinned=False, timeout_seconds=60.0)
    window.add("weights", target, memory, [weights])
    kept = weights.clone()
    weights.data.copy_(average)
    thread = threading.Thread(target=window.copy)
    thread.start()
    thread.join(60)
    weights.data.copy_(kept)
    assert window.close() == ""
    assert torch.equal(target, before)


def test_one_whose_name_is_unknown_cannot_be_late(tmp_path: Path) -> None:
    with (
        open_store(tmp_path) as store,
        pytest.raises(CheckpointError, match=r"late names the tensor `model\.wieght`, which the"),
    ):
        store.save_async(1, {"model": nn.Linear(2, 2)}, late=["model.wieght"])


def test_without_late_tensors_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        handle = store.save_async(1, {"model": Net(1)}, late=lambda name: False)
        assert handle._future.result(60).error is None
        handle.copied()


def test_copied_may_be_called_again_and_by_several_threads(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        handle = store.save_async(1, {"model": Net(1)}, late=everything)
        threads = [threading.Thread(target=handle.copied) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        handle.copied()
        assert handle.wait().step == 1


def test_the_wait_in_copied_counts_as_blocked(
    tmp_path: Path, held: Callable[[CheckpointStore], threading.Event]
) -> None:
    with open_store(tmp_path) as store:
        gate = held(store)
        handle = store.save_async(1, {"model": Net(1)}, late=everything)
        window = store._states._window
        assert window is not None
        # A copy that the background thread has begun.
        piece = window._next(last=False)
        assert piece is not None
        closing = threading.Thread(target=handle.copied)
        closing.start()
        wait_until(lambda: not window._pieces)
        until = time.perf_counter() + 0.05
        wait_until(lambda: time.perf_counter() > until)
        with window._accounted(piece):
            window._copy(piece, alone=True)
        closing.join(60)
        gate.set()
        assert handle.wait().blocked_seconds >= 0.05


def test_a_copy_that_does_not_end_fails_the_save() -> None:
    window = CopyWindow(pinned=False, timeout_seconds=0.05)
    window.add("x", torch.zeros(4, dtype=torch.uint8), torch.ones(4, dtype=torch.uint8), [])
    assert window._next(last=False) is not None
    assert window.close() == (
        "a copy in the background was not made within 0.05 s (timeout_seconds)"
    )


def test_a_copy_that_was_interrupted_is_made_by_the_next_call() -> None:
    window = CopyWindow(pinned=False, timeout_seconds=60)
    target = torch.zeros(4, dtype=torch.uint8)
    window.add("x", target, torch.ones(4, dtype=torch.uint8), [])
    piece = window._next(last=True)
    assert piece is not None
    with pytest.raises(KeyboardInterrupt), window._accounted(piece):
        raise KeyboardInterrupt
    assert window.close() == ""
    assert target.tolist() == [1, 1, 1, 1]


@pytest.mark.slow
def test_a_handle_keeps_no_memory(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    with open_store(tmp_path) as store:
        handle = store.save_async(1, {"model": model}, late=everything)
        handle.wait()
        watched = weakref.ref(model.weight)
        del model
        gc.collect()
        assert watched() is None
        assert handle.result().step == 1


class Saves:
    """Saves of a model whose numbers tell the step, with everything late."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self.model = nn.Linear(50, 50)

    def save(self, step: int) -> SaveHandle:
        with torch.no_grad():
            self.model.weight.fill_(step)
        return self.store.save_async(step, {"model": self.model}, late=everything)


def test_another_save_closes_the_window_first(tmp_path: Path) -> None:
    with open_store(tmp_path, keep=9) as store:
        model = nn.Linear(5, 5)
        first = store.save_async(1, {"model": model}, late=everything)
        second = store.save_async(2, {"model": model}, late=everything)
        assert first.done()
        assert first.result().error is None
        second.wait()
    assert steps_in(tmp_path) == [1, 2]


def test_a_save_that_is_skipped_closes_the_window_of_the_one_before(tmp_path: Path) -> None:
    with open_store(tmp_path, when_busy="skip") as store:
        model = nn.Linear(5, 5)
        first = store.save_async(1, {"model": model}, late=everything)
        second = store.save_async(2, {"model": model}, late=everything)
        second.copied()
        assert second.result().skipped == "the save of step 1 was still under way"
        assert first._future.result(60).error is None
    assert steps_in(tmp_path) == [1]


def test_a_save_that_is_replaced_is_copied_no_further(
    tmp_path: Path, held: Callable[[CheckpointStore], threading.Event]
) -> None:
    with open_store(tmp_path, when_busy="replace") as store:
        saves = Saves(store)
        saves.save(1).wait()
        gate = held(store)
        older = saves.save(2)
        window = store._states._window
        assert window is not None
        # Set only when the older save is given up, which must not have been copied before.
        gate_opener = threading.Thread(
            target=lambda: (wait_until(lambda: not window._pieces), gate.set())
        )
        gate_opener.start()
        newer = saves.save(3)
        gate_opener.join(60)
        assert older.result().skipped == "a newer save replaced it"
        assert older.result().error is None
        assert newer.wait().error is None
    assert steps_in(tmp_path) == [1, 3]


def test_one_that_is_being_written_is_replaced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = WritingHeld(monkeypatch)
    with open_store(tmp_path, when_busy="replace") as store:
        saves = Saves(store)
        older = saves.save(1)
        older.copied()
        assert writing.begun.wait(30)
        opener = threading.Thread(
            target=lambda: (wait_until(store._states._abandoned.is_set), writing.gate.set())
        )
        opener.start()
        newer = saves.save(2)
        opener.join(60)
        assert older.result().skipped
        assert newer.wait().error is None
    assert steps_in(tmp_path) == [2]


def test_restoring_closes_the_window_and_finds_the_version(tmp_path: Path) -> None:
    state = make_state()
    train(state, 1, 1)
    before = bits(state)
    with open_store(tmp_path) as store:
        store.save_async(1, state, late=everything)
        restored = store.restore(state)
        assert restored is not None
        assert restored.step == 1
        assert bits(state) == before


@pytest.mark.parametrize("error", [False, True])
def test_leaving_the_store_closes_the_window(tmp_path: Path, error: bool) -> None:
    with open_store(tmp_path) as store:
        try:
            with store:
                store.save_async(1, {"model": Net(4)}, late=everything)
                if error:
                    raise KeyError("the forward pass is at fault")
        except KeyError:
            assert error
    model = Net(0)
    assert restore_step(tmp_path, {"model": model}) == 1
    assert bits({"model": model}) == bits({"model": Net(4)})


def test_a_store_that_waits_makes_all_copies(tmp_path: Path) -> None:
    with open_store(tmp_path, asynchronous=False) as store:
        assert store.save_async(1, {"model": Net(1)}, late=everything).done()


def test_a_copy_that_came_too_late_spoils_no_other_version(tmp_path: Path) -> None:
    state = make_state()
    seen = {}
    with open_store(tmp_path, keep=20) as store:
        for step in range(1, 8):
            train(state, step, step)
            handle = store.save_async(step, state, late=everything)
            if step == 4:
                with torch.no_grad():
                    state["model"].embedding.weight.add_(1)
                assert handle.result().error is not None
                continue
            seen[step] = bits(state)
            handle.copied()
    assert steps_in(tmp_path) == list(seen)
    for step, expected in seen.items():
        fresh = make_state(5)
        assert restore_step(tmp_path, fresh, step=step) == step
        assert bits(fresh) == expected


def test_bounds_hold_for_late_tensors(tmp_path: Path) -> None:
    bound = 2.0**-6
    reduction = Reduction(lossy={"data.*": Bound(relative=bound)})
    state = {"x": torch.randn(3000), "y": torch.randn(3000)}
    before = {name: each.clone() for name, each in state.items()}
    with open_store(tmp_path, reduction=reduction) as store:
        handle = store.save_async(1, tensors_of(state), late=everything)
        handle.copied()
        for name, each in state.items():
            # What is rounded is the copy, not the state.
            assert torch.equal(each, before[name])
            each.zero_()
        handle.wait()
    found = Holder()
    restore_step(tmp_path, {"data": found})
    for name, each in before.items():
        difference = (found.state[name] - each).abs()
        assert difference.max() > 0
        assert bool((difference <= bound * each.abs()).all())


def test_a_state_that_grows_in_the_window_is_planned_anew(tmp_path: Path) -> None:
    state = make_state()
    with open_store(tmp_path, keep=9) as store:
        store.save_async(0, state, late=everything)
        store.save_async(1, {**state, "data": Holder({"x": torch.ones(40_000)})}, late=everything)
        store.save_async(2, state, late=everything)
    assert steps_in(tmp_path) == [0, 1, 2]
