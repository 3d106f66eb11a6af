"""Deltas and content addresses: small versions, bounded chains, no leak of disk space."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import Holder, make_state, open_store, restore_step, total_bytes, train

from outlast.checkpoint import Compression, Reduction

PLAIN = Compression("none")


def noise(seed: int, count: int = 40_000) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def restored(directory: Path, step: int) -> Any:
    found = Holder()
    assert restore_step(directory, {"data": found}, step=step) == step
    return found.state


def test_frozen_tensors_are_stored_once(tmp_path: Path) -> None:
    with open_store(tmp_path, reduction=Reduction(PLAIN)) as store:
        state = {"frozen": noise(0), "changing": torch.zeros(10)}
        first = store.save(1, {"data": Holder(state)})
        assert first.bytes > 160_000
        for step in range(2, 7):
            state["changing"] += 1
            later = store.save(step, {"data": Holder(state)})
            assert later.bytes < 3000
            assert later.raw_bytes == first.raw_bytes
    assert torch.equal(restored(tmp_path, 6)["frozen"], noise(0))
    assert total_bytes(tmp_path) < 200_000


def test_a_frozen_tensor_leaks_no_space_over_many_versions(tmp_path: Path) -> None:
    most = 0
    with open_store(tmp_path, keep=2, reduction=Reduction(PLAIN)) as store:
        for step in range(30):
            state = {"frozen": noise(0), "changing": noise(step + 1)}
            store.save(step, {"data": Holder(state)})
            most = max(most, total_bytes(tmp_path))
    # Two versions of 320 kB; a file half of which is in use may stay.
    assert most < 4 * 320_000
    assert torch.equal(restored(tmp_path, 29)["frozen"], noise(0))


def test_a_small_frozen_tensor_keeps_no_large_file_alive(tmp_path: Path) -> None:
    most = 0
    with open_store(tmp_path, keep=1, reduction=Reduction(PLAIN)) as store:
        for step in range(30):
            state = {"frozen": noise(0, 4000), "changing": noise(step + 1)}
            store.save(step, {"data": Holder(state)})
            most = max(most, total_bytes(tmp_path))
    assert most < 3 * 176_000
    assert torch.equal(restored(tmp_path, 29)["frozen"], noise(0, 4000))


def test_equal_tensors_are_stored_once(tmp_path: Path) -> None:
    state = {f"copy{number}": noise(0) for number in range(5)}
    with open_store(tmp_path, reduction=Reduction(PLAIN)) as store:
        result = store.save(1, {"data": Holder(state)})
    assert result.raw_bytes == 5 * 160_000
    assert result.bytes < 165_000
    assert all(torch.equal(each, noise(0)) for each in restored(tmp_path, 1).values())


def test_constant_tensors_take_no_space(tmp_path: Path) -> None:
    with open_store(tmp_path, reduction=Reduction(PLAIN)) as store:
        state = {"zeros": torch.zeros(100_000), "ones": torch.ones(100_000, dtype=torch.bfloat16)}
        assert store.save(1, {"data": Holder(state)}).bytes < 3000
    assert torch.equal(restored(tmp_path, 1)["ones"], torch.ones(100_000, dtype=torch.bfloat16))


def test_content_that_comes_back_after_a_change_is_right(tmp_path: Path) -> None:
    with open_store(tmp_path, keep=9) as store:
        for step, seed in enumerate([1, 2, 1, 1, 2, 3, 1], start=1):
            store.save(step, {"data": Holder({"x": noise(seed)})})
    for step, seed in enumerate([1, 2, 1, 1, 2, 3, 1], start=1):
        assert torch.equal(restored(tmp_path, step)["x"], noise(seed))


def test_tensors_that_swap_their_contents_are_right(tmp_path: Path) -> None:
    with open_store(tmp_path, keep=9) as store:
        for step in range(1, 5):
            state = {"a": noise(step), "b": noise(step + 1)}
            store.save(step, {"data": Holder(state)})
    for step in range(1, 5):
        found = restored(tmp_path, step)
        assert torch.equal(found["a"], noise(step))
        assert torch.equal(found["b"], noise(step + 1))


CHANGES: dict[str, list[dict[str, torch.Tensor]]] = {
    "type": [{"x": noise(0)}, {"x": noise(0).bfloat16()}, {"x": noise(0).double()}],
    "type of the same bits": [{"x": noise(0)}, {"x": noise(0).view(torch.int32)}],
    "shape": [{"x": noise(0)}, {"x": noise(0)[:999]}, {"x": noise(0)}],
    "shape of the same bits": [{"x": noise(0)}, {"x": noise(0).view(200, 200)}],
    "larger": [{"x": noise(0)}, {"x": noise(0, 90_000)}, {"x": noise(1, 90_000)}],
    "name": [{"x": noise(0)}, {"y": noise(0)}, {"y": noise(1)}],
    "one more": [{"x": noise(0)}, {"x": noise(0), "w": noise(1)}, {"x": noise(2), "w": noise(2)}],
    "one less": [{"w": noise(1), "x": noise(0)}, {"x": noise(3)}, {"x": noise(4)}],
    "other order": [{"x": noise(0), "y": noise(1)}, {"y": noise(2), "x": noise(3)}],
    "to nothing": [{"x": noise(0)}, {}, {"x": noise(1)}],
    "to empty": [{"x": noise(0)}, {"x": noise(0)[:0]}, {"x": noise(1)}],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_may_change_between_versions(tmp_path: Path, change: str) -> None:
    with open_store(tmp_path, keep=9) as store:
        for step, state in enumerate(CHANGES[change], start=1):
            store.save(2 * step, {"data": Holder(state)})
            again = {name: tensor.clone() for name, tensor in state.items()}
            for tensor in again.values():
                tensor[:7] = 0
            store.save(2 * step + 1, {"data": Holder(again)})
    for step, state in enumerate(CHANGES[change], start=1):
        found = restored(tmp_path, 2 * step)
        assert list(found) == list(state)
        for name, tensor in state.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)
            assert not restored(tmp_path, 2 * step + 1)[name][:7].any()


def test_the_optimizer_may_appear_between_versions(tmp_path: Path) -> None:
    state = make_state()
    with open_store(tmp_path) as store:
        for step in range(4):
            if step:
                train(state, step, step)
            store.save(step, state)
    other = make_state(seed=7)
    assert restore_step(tmp_path, other, step=3) == 3
    for optimizer, saved in zip(other["optimizer"], state["optimizer"], strict=True):
        assert len(optimizer.state) == len(saved.state) > 0


def test_a_failed_save_does_not_spoil_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = noise(0)
    with open_store(tmp_path, keep=9) as store:
        for step in range(1, 9):
            values[step::50] += 1.0
            with monkeypatch.context() as patch:
                if step in (3, 5, 6):

                    def fail(*args: object) -> None:
                        raise OSError(5, "Input/output error")

                    patch.setattr(type(store.storage), "create", fail)
                result = store.save_async(step, {"data": Holder({"x": values})}).result()
            assert (result.error is not None) == (step in (3, 5, 6))
            if result.error is None:
                assert torch.equal(restored(tmp_path, step)["x"], values)


def test_a_step_whose_seal_failed_can_be_saved_again_with_another_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"kept": noise(0), "changing": noise(1), "slowly": noise(2)}
    with open_store(tmp_path, keep=9) as store:
        store.save(1, {"data": Holder(values)})
        values["kept"] = noise(10)
        create = type(store.storage).create

        def fail(storage: Any, name: str) -> Any:
            if name.endswith("version.json"):
                raise OSError(5, "Input/output error")
            return create(storage, name)

        with monkeypatch.context() as patch:
            patch.setattr(type(store.storage), "create", fail)
            assert store.save_async(2, {"data": Holder(values)}).result().error
        values["changing"] = noise(11)
        values["slowly"][::70] += 1
        assert store.save_async(2, {"data": Holder(values)}).result().error is None
        found = restored(tmp_path, 2)
        assert all(torch.equal(found[name], tensor) for name, tensor in values.items())
