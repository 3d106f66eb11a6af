"""What is saved comes back bit for bit, and saving changes nothing."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import Net, bits, digest, make_state, train
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from outlast.checkpoint import CheckpointStore, list_versions, verify
from outlast.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class WritingHeld:
    """Keeps the background from making a directory until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        make = os.mkdir

        def held(*args: Any, **kwargs: Any) -> None:
            if threading.current_thread().name.startswith("checkpoint"):
                assert self.gate.wait(30)
            make(*args, **kwargs)

        monkeypatch.setattr(os, "mkdir", held)


def test_everything_comes_back_in_new_objects(tmp_path: Path) -> None:
    state = make_state()
    train(state, 1, 3)
    expected = bits(state)
    result = CheckpointStore(tmp_path).save(3, state)
    assert result.step == 3
    assert result.error is None
    assert 0 < result.blocked_seconds <= result.seconds
    files = [path for path in (tmp_path / "step-00000003").iterdir() if path.suffix != ".json"]
    assert result.bytes == sum(path.stat().st_size for path in files)

    other = make_state(seed=7)
    restored = CheckpointStore(tmp_path).restore(other)
    assert restored is not None
    assert (restored.step, restored.skipped) == (3, [])
    assert bits(other) == expected
    assert other["model"].head.weight is other["model"].embedding.weight


def test_a_restored_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    state = make_state()
    train(state, 1, 2)
    CheckpointStore(tmp_path).save(2, state)
    train(state, 3, 5)
    other = make_state(seed=7)
    CheckpointStore(tmp_path).restore(other)
    train(other, 3, 5)
    assert bits(other) == bits(state)


def test_saving_before_the_first_step_changes_no_training(tmp_path: Path) -> None:
    unsaved, saved, restored = make_state(), make_state(), make_state(seed=7)
    store = CheckpointStore(tmp_path)
    store.save(0, saved)
    assert all(not optimizer.state for optimizer in saved["optimizer"])
    store.restore(restored)
    for state in (unsaved, saved, restored):
        train(state, 1, 3)
    assert bits(saved) == bits(unsaved)
    assert bits(restored) == bits(unsaved)


def test_saving_between_backward_and_step_keeps_the_gradients(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    expected = [digest(parameter.grad) for parameter in model.parameters()]
    CheckpointStore(tmp_path).save(1, {"model": model, "optimizer": optimizer})
    assert [digest(parameter.grad) for parameter in model.parameters()] == expected
    other = nn.Linear(3, 2)
    again = {"model": other, "optimizer": torch.optim.AdamW(other.parameters())}
    assert CheckpointStore(tmp_path).restore(again)
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
    CheckpointStore(tmp_path).save(1, state)
    assert CheckpointStore(tmp_path).restore(other)
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
    handle = CheckpointStore(tmp_path / "store").save_async(2, state)
    assert not handle.done()
    train(state, 3, 4)
    with torch.no_grad():
        for tensor in [*state["model"].parameters(), *state["model"].buffers()]:
            tensor.zero_()
        for optimizer in state["optimizer"]:
            for values in optimizer.state.values():
                for value in values.values():
                    if isinstance(value, torch.Tensor):
                        value.fill_(9)
    state["data"].state["epochs"].clear()
    assert list_versions(tmp_path / "store") == []
    writing.gate.set()
    assert handle.wait().step == 2
    assert handle.done()
    other = make_state(seed=7)
    CheckpointStore(tmp_path / "store").restore(other)
    assert bits(other) == expected


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state()
    writing = WritingHeld(monkeypatch)
    store = CheckpointStore(tmp_path / "store")
    first = store.save_async(1, state)
    second: list[Any] = []
    thread = threading.Thread(target=lambda: second.append(store.save_async(2, state)))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert not first.done()
    writing.gate.set()
    thread.join(30)
    assert first.done()
    assert second[0].wait().blocked_seconds > 0.15
    assert [version.step for version in list_versions(tmp_path / "store")] == [1, 2]


def test_restore_and_close_wait_for_the_save_under_way(tmp_path: Path) -> None:
    state = make_state()
    store = CheckpointStore(tmp_path)
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
    handle = CheckpointStore(tmp_path, asynchronous=False).save_async(1, make_state())
    assert handle.done()
    [version] = list_versions(tmp_path)
    verify(version)


def test_a_model_alone_comes_back_from_a_full_version(tmp_path: Path) -> None:
    state = make_state()
    train(state, 1, 1)
    CheckpointStore(tmp_path).save(1, state)
    model = Net(seed=7)
    CheckpointStore(tmp_path).restore({"model": model})
    assert bits({"model": model}) == bits({"model": state["model"]})


DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def _buffers(dtype: torch.dtype, shape: list[int], seed: int) -> nn.Module:
    """Random bits (so NaN payloads, infinities, negative zeros), contiguous and as a view."""
    generator = torch.Generator().manual_seed(seed)
    plain = torch.empty(shape, dtype=dtype)
    if dtype == torch.bool:
        plain.copy_(torch.randint(2, shape, generator=generator))
    elif plain.numel():
        raw = plain.reshape(-1).view(torch.uint8)
        raw.copy_(torch.randint(256, raw.shape, generator=generator))
    module = nn.Module()
    module.register_buffer("plain", plain)
    module.register_buffer("view", plain.mT[..., 1:] if len(shape) > 1 else plain[..., :1])
    return module


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    seed=st.integers(0, 2**31),
)
def test_any_tensor_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, dtype: torch.dtype, shape: list[int], seed: int
) -> None:
    directory = tmp_path_factory.mktemp("store")
    saved, other = _buffers(dtype, shape, seed), _buffers(dtype, shape, seed + 1)
    CheckpointStore(directory).save(1, {"model": saved})
    CheckpointStore(directory).restore({"model": other})
    assert digest(other.plain) == digest(saved.plain)
    assert digest(other.view) == digest(saved.view)


class _Unsavable:
    pass


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"thing": _Unsavable()}, "neither a module"),
        ({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}, "holds 2 modules"),
        ({"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())}, "needs its model"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once(
    tmp_path: Path, state: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        CheckpointStore(tmp_path).save_async(1, state)


class _Other(nn.Module):
    def __init__(self, **shapes: tuple[torch.dtype, tuple[int, ...]]) -> None:
        super().__init__()
        for name, (dtype, shape) in shapes.items():
            self.register_buffer(name, torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        ({"a": (torch.float32, (3,)), "b": (torch.float32, (4,))}, r"model\.b.*\(2,\).*\(4,\)"),
        ({"a": (torch.float32, (3,)), "c": (torch.float32, (2,))}, r"has no `model\.c`"),
        ({"a": (torch.float32, (3,))}, r"the model has no `model\.b`"),
        ({"a": (torch.bfloat16, (3,)), "b": (torch.float32, (2,))}, r"model\.a.*float32.*bfloat16"),
    ],
)
def test_a_model_that_does_not_fit_is_named(
    tmp_path: Path, shapes: dict[str, Any], sentence: str
) -> None:
    saved = _Other(a=(torch.float32, (3,)), b=(torch.float32, (2,)))
    CheckpointStore(tmp_path).save(1, {"model": saved})
    with pytest.raises(CheckpointError, match=f"does not fit.*{sentence}"):
        CheckpointStore(tmp_path).restore({"model": _Other(**shapes)})
    assert len(list_versions(tmp_path)) == 1, "a version that does not fit is not damaged"
