"""What is saved comes back bit for bit, and saving changes nothing."""

import io
import json
import pickletools
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_states import (
    Holder,
    Net,
    WritingHeld,
    bits,
    digest,
    make_state,
    open_store,
    restore_step,
    save_once,
    steps_in,
    train,
)
from torch import nn

from outlast.checkpoint import CheckpointStore
from outlast.errors import CheckpointError


def test_everything_comes_back_in_new_objects(tmp_path: Path) -> None:
    state = make_state()
    train(state, 1, 3)
    expected = bits(state)
    result = save_once(tmp_path, 3, state)
    assert result.step == 3
    assert result.error is None
    assert result.skipped == ""
    assert 0 < result.blocked_seconds <= result.seconds
    folder = tmp_path / "step-00000003-a1"
    written = [path for path in folder.iterdir() if path.name.startswith("rank-")]
    assert result.bytes == sum(path.stat().st_size for path in written)

    other = make_state(seed=7)
    restored = open_store(tmp_path).restore(other)
    assert restored is not None
    assert (restored.step, restored.skipped) == (3, [])
    assert bits(other) == expected
    assert other["model"].head.weight is other["model"].embedding.weight


def test_a_restored_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    state = make_state()
    with open_store(tmp_path) as store:
        for step in range(1, 5):
            train(state, step, step)
            store.save(step, state)
    train(state, 5, 7)
    other = make_state(seed=7)
    assert restore_step(tmp_path, other) == 4
    train(other, 5, 7)
    assert bits(other) == bits(state)


@pytest.mark.distributed
def test_the_writer_process_does_the_same(tmp_path: Path) -> None:
    state = make_state()
    with CheckpointStore(tmp_path) as store:
        for step in range(1, 4):
            train(state, step, step)
            assert store.save(step, state).error is None
    other = make_state(seed=7)
    assert restore_step(tmp_path, other) == 3
    assert bits(other) == bits(state)


def test_saving_before_the_first_step_changes_no_training(tmp_path: Path) -> None:
    unsaved, saved, restored = make_state(), make_state(), make_state(seed=7)
    save_once(tmp_path, 0, saved)
    assert all(not optimizer.state for optimizer in saved["optimizer"])
    assert restore_step(tmp_path, restored) == 0
    for state in (unsaved, saved, restored):
        train(state, 1, 3)
    assert bits(saved) == bits(unsaved)
    assert bits(restored) == bits(unsaved)


def test_saving_between_backward_and_step_keeps_the_gradients(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    expected = [digest(parameter.grad) for parameter in model.parameters()]
    save_once(tmp_path, 1, {"model": model, "optimizer": optimizer})
    assert [digest(parameter.grad) for parameter in model.parameters()] == expected
    other = nn.Linear(3, 2)
    again = {"model": other, "optimizer": torch.optim.AdamW(other.parameters())}
    assert restore_step(tmp_path, again) == 1
    assert torch.equal(other.weight, model.weight)


def test_a_parameter_that_never_had_a_gradient_is_no_hindrance(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        model = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Linear(3, 3)})
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    def step(state: dict[str, Any], name: str) -> None:
        state["model"][name](torch.ones(1, 3)).square().sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()

    state, other = make(), make()
    step(state, "used")
    # What the restored optimizer has of its own must go.
    step(other, "unused")
    save_once(tmp_path, 1, state)
    assert restore_step(tmp_path, other) == 1
    for each in (state, other):
        step(each, "unused")
    for name, parameter in state["model"].named_parameters():
        assert torch.equal(parameter, other["model"].get_parameter(name))


def test_later_changes_do_not_reach_the_version_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state()
    train(state, 1, 2)
    expected = bits(state)
    writing = WritingHeld(monkeypatch)
    with open_store(tmp_path) as store:
        handle = store.save_async(2, state)
        assert not handle.done()
        train(state, 3, 4)
        with torch.no_grad():
            for tensor in [*state["model"].parameters(), *state["model"].buffers()]:
                tensor.zero_()
            for optimizer in state["optimizer"]:
                for group in optimizer.param_groups:
                    group["lr"] = 99.0
                for values in optimizer.state.values():
                    for value in values.values():
                        value.fill_(9)
        state["data"].state["generator"].fill_(0)
        state["data"].state["epochs"].clear()
        assert steps_in(tmp_path) == []
        writing.gate.set()
        assert handle.wait().step == 2
        assert handle.done()
    other = make_state(seed=7)
    restore_step(tmp_path, other)
    assert bits(other) == expected


def test_restore_and_close_wait_for_the_save_under_way(tmp_path: Path) -> None:
    state = make_state()
    store = open_store(tmp_path)
    store.save_async(1, state)
    restored = store.restore(state)
    assert restored is not None
    assert restored.step == 1
    store.save_async(2, state)
    store.close()
    newest = store.newest()
    assert newest is not None
    assert newest.step == 2


def test_a_synchronous_store_has_published_when_it_returns(tmp_path: Path) -> None:
    with open_store(tmp_path, asynchronous=False) as store:
        assert store.save_async(1, make_state()).done()
        assert steps_in(tmp_path) == [1]


def test_parts_of_a_state_come_back_alone(tmp_path: Path) -> None:
    state = make_state()
    train(state, 1, 1)
    save_once(tmp_path, 1, state)
    model = Net(seed=7)
    assert restore_step(tmp_path, {"model": model}) == 1
    assert bits({"model": model}) == bits({"model": state["model"]})
    data = Holder()
    assert restore_step(tmp_path, {"data": data}) == 1
    assert data.state["position"] == 1


def test_values_of_every_kind_come_back(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    generator.random(5)
    state = {
        "tuple": (1, (2.5, None)),
        5: {"integer key": True, (1, "pair"): "tuple key", None: 0},
        "bytes": b"\x80\x04\xff",
        "set": {3, 1, 2},
        "frozen": frozenset({8, 7}),
        "special": [float("inf"), float("-inf"), -0.0, 1e-320, 2**100],
        "complex": complex(-0.0, float("inf")),
        "!tensor": "a key like a tag",
        "text": 'quote " and \ud800 surrogate',
        "empty": [{}, [], (), set(), ""],
        "array": np.arange(6, dtype=np.uint16).reshape(2, 3)[:, ::-1],
        "zero-dimensional": np.array(3.5),
        "scalar": np.float32(0.1),
        "python": random.Random(4).getstate(),
        "numpy": generator.bit_generator.state,
        "legacy numpy": np.random.RandomState(5).get_state(),
        "torch": torch.Generator().manual_seed(6).get_state(),
    }
    save_once(tmp_path, 1, {"data": Holder(state)})
    found = Holder()
    restore_step(tmp_path, {"data": found})
    back = found.state
    assert list(back) == list(state)
    plain = [key for key in state if key not in ("array", "legacy numpy", "torch")]
    # repr tells -0.0 from 0.0 and tuples from lists.
    assert [repr(back[key]) for key in plain] == [repr(state[key]) for key in plain]
    assert back["array"].dtype == np.uint16
    assert np.array_equal(back["array"], state["array"])
    assert type(back["scalar"]) is np.float32
    random.Random().setstate(back["python"])
    again = np.random.default_rng()
    again.bit_generator.state = back["numpy"]
    assert again.random() == generator.random()
    legacy = np.random.RandomState()
    legacy.set_state(back["legacy numpy"])
    assert legacy.random_sample() == np.random.RandomState(5).random_sample()
    assert torch.equal(back["torch"], state["torch"])


def test_not_a_number_comes_back(tmp_path: Path) -> None:
    save_once(tmp_path, 1, {"data": Holder({"loss": float("nan")})})
    found = Holder()
    restore_step(tmp_path, {"data": found})
    assert found.state["loss"] != found.state["loss"]


def test_a_state_without_any_tensor_comes_back(tmp_path: Path) -> None:
    save_once(tmp_path, 1, {"data": Holder({"position": 7})})
    found = Holder()
    restore_step(tmp_path, {"data": found})
    assert found.state == {"position": 7}


def test_a_learning_rate_schedule_comes_back(tmp_path: Path) -> None:
    def make() -> tuple[Any, dict[str, Any]]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
        return schedule, {"model": model, "optimizer": optimizer, "schedule": schedule}

    schedule, state = make()
    for _ in range(3):
        state["optimizer"].step()
        schedule.step()
    save_once(tmp_path, 3, state)
    other, again = make()
    restore_step(tmp_path, again)
    again["optimizer"].step()
    for each in (schedule, other):
        each.step()
    assert other.get_last_lr() == schedule.get_last_lr()


def test_no_file_of_a_version_is_a_pickle(tmp_path: Path) -> None:
    state = make_state()
    train(state, 1, 2)
    save_once(tmp_path, 2, state)
    files = list((tmp_path / "step-00000002-a1").iterdir())
    assert {path.suffix for path in files} == {".json", ".pack"}
    for path in files:
        content = path.read_bytes()
        if path.suffix == ".json":
            assert isinstance(json.loads(content), dict)
        assert not content.startswith(b"PK"), "torch.save makes archives"
        with pytest.raises(ValueError, match=r"."):
            list(pickletools.genops(io.BytesIO(content)))


class _Unsavable:
    pass


def _state_of_two_models() -> dict[str, Any]:
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    return {"a": first, "b": second, "optimizer": torch.optim.SGD(first.parameters())}


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"thing": _Unsavable()}, "neither a module"),
        ({"data": Holder({"a": [_Unsavable()]})}, r"`data\.a\.0` is of type _Unsavable"),
        ({"data": Holder({"a": torch.eye(2).to_sparse()})}, r"data\.a.*sparse"),
        ({"data": Holder({"a": torch.empty(2, device="meta")})}, r"data\.a.*meta"),
        ({"data": Holder({"a": np.array([None])})}, r"data\.a.*ndarray of object"),
        (_state_of_two_models(), "holds 2 modules"),
        ({"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())}, "needs its model"),
        (
            {"model": nn.Linear(1, 1), "o": torch.optim.SGD(nn.Linear(1, 1).parameters())},
            "none of the model's",
        ),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once(
    tmp_path: Path, state: dict[str, Any], sentence: str
) -> None:
    with open_store(tmp_path) as store, pytest.raises(CheckpointError, match=sentence):
        store.save_async(1, state)
    assert steps_in(tmp_path) == []


def test_an_array_of_the_other_byte_order_comes_back_or_is_refused(tmp_path: Path) -> None:
    array = np.arange(3, dtype=">f4")
    with open_store(tmp_path) as store:
        try:
            store.save(1, {"data": Holder({"a": array})})
        except CheckpointError as error:
            assert "`data.a`" in str(error)  # noqa: PT017
            return
    found = Holder()
    restore_step(tmp_path, {"data": found})
    assert np.array_equal(found.state["a"], array)


def test_many_threads_may_ask_for_the_result(tmp_path: Path) -> None:
    found = []
    with open_store(tmp_path) as store:
        handle = store.save_async(1, make_state())
        threads = [threading.Thread(target=lambda: found.append(handle.result())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert [result.error for result in found] == [None] * 4
