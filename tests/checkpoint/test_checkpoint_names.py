"""Names do not depend on wrappers, ties and groups, and what does not fit is named."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import (
    Net,
    bits,
    make_state,
    open_store,
    restore_step,
    save_once,
    steps_in,
    train,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from outlast.checkpoint import list_versions, load, storage_of
from outlast.errors import CheckpointError


def names_in(directory: Path) -> set[str]:
    storage = storage_of(directory)
    catalogue = load(storage, list_versions(storage)[-1]).catalogue
    return {*catalogue.tensors, *catalogue.values}


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model)


def compiled_inside(model: nn.Module) -> nn.Module:
    model.hidden[0] = torch.compile(model.hidden[0])
    return model


def recomputed(model: nn.Module) -> nn.Module:
    model.hidden[1] = checkpoint_wrapper(model.hidden[1])
    return checkpoint_wrapper(model)


def parallel(model: nn.Module) -> nn.Module:
    return nn.DataParallel(model)


WRAPPINGS = [compiled, compiled_inside, recomputed, parallel]


@pytest.mark.parametrize("wrap", WRAPPINGS)
def test_wrapped_and_plain_models_share_names(tmp_path: Path, wrap: Any) -> None:
    plain = make_state()
    train(plain, 1, 2)
    wrapped = {**plain, "model": wrap(plain["model"])}
    save_once(tmp_path / "wrapped", 2, wrapped)
    other = make_state(seed=7)
    assert restore_step(tmp_path / "wrapped", other) == 2
    assert bits(other) == bits(plain)
    save_once(tmp_path / "plain", 2, other)
    assert names_in(tmp_path / "plain") == names_in(tmp_path / "wrapped")
    assert "model.hidden.0.weight" in names_in(tmp_path / "plain")
    target = make_state(seed=5)
    target["model"] = wrap(target["model"])
    assert restore_step(tmp_path / "plain", target) == 2
    assert bits(target) == bits(plain)


def test_a_model_may_have_a_child_of_the_name_module(tmp_path: Path) -> None:
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    save_once(tmp_path, 1, {"model": model})
    assert "model.module.weight" in names_in(tmp_path)


class Pair(nn.Module):
    def __init__(self, *, tied: bool, value: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        if tied:
            self.second.weight = self.first.weight
        for parameter in self.parameters():
            nn.init.constant_(parameter, value)


@pytest.mark.parametrize("saved_tied", [True, False])
@pytest.mark.parametrize("restored_tied", [True, False])
def test_tied_weights_come_back_tied_and_untied(
    tmp_path: Path, saved_tied: bool, restored_tied: bool
) -> None:
    save_once(tmp_path, 1, {"model": Pair(tied=saved_tied, value=4.0)})
    model = Pair(tied=restored_tied, value=-1.0)
    assert restore_step(tmp_path, {"model": model}) == 1
    for layer in (model.first, model.second):
        assert torch.equal(layer.weight, torch.full((3, 3), 4.0))
    assert (model.first.weight is model.second.weight) == restored_tied


class Counting(nn.Module):
    """A module with a state that is no tensor."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = {"calls": calls, "scale": torch.full((2,), float(calls))}

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


@pytest.mark.parametrize("nested", [False, True])
def test_extra_states_of_modules_come_back(tmp_path: Path, nested: bool) -> None:
    saved, other = Counting(3), Counting(0)
    wrap = (lambda each: nn.Sequential(nn.Linear(1, 1), each)) if nested else (lambda each: each)
    save_once(tmp_path, 1, {"model": wrap(saved)})
    restore_step(tmp_path, {"model": wrap(other)})
    assert other.calls["calls"] == 3
    assert torch.equal(other.calls["scale"], torch.full((2,), 3.0))


def test_buffers_that_are_not_persistent_are_left_out(tmp_path: Path) -> None:
    def make(value: float) -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("cache", torch.full((3,), value), persistent=False)
        model.register_buffer("kept", torch.full((3,), value))
        return model

    save_once(tmp_path, 1, {"model": make(1.0)})
    other = make(2.0)
    restore_step(tmp_path, {"model": other})
    assert "model.cache" not in names_in(tmp_path)
    assert torch.equal(other.cache, torch.full((3,), 2.0))
    assert torch.equal(other.kept, torch.full((3,), 1.0))


def test_settings_of_every_group_come_back(tmp_path: Path) -> None:
    def make(lr: float, beta: float) -> dict[str, Any]:
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        groups = [
            {"params": model["a"].parameters(), "betas": (beta, 0.99), "weight_decay": lr},
            {"params": model["b"].parameters(), "lr": torch.tensor(2 * lr), "note": "slow"},
        ]
        optimizer = torch.optim.Adam(groups, lr=torch.tensor(lr), foreach=False, capturable=True)
        return {"model": model, "optimizer": optimizer}

    saved, other = make(0.25, 0.5), make(0.5, 0.75)
    rates = [group["lr"] for group in other["optimizer"].param_groups]
    save_once(tmp_path, 1, saved)
    assert restore_step(tmp_path, other) == 1
    for before, after in zip(
        saved["optimizer"].param_groups, other["optimizer"].param_groups, strict=True
    ):
        settings = [{k: v for k, v in each.items() if k != "params"} for each in (before, after)]
        assert repr(settings[0]) == repr(settings[1])
        assert type(after["betas"]) is tuple
    # Whoever holds the tensor of a learning rate, such as a compiled step, keeps it.
    assert all(
        group["lr"] is rate
        for group, rate in zip(other["optimizer"].param_groups, rates, strict=True)
    )


def test_an_optimizer_may_have_other_groups_than_the_saved_one(tmp_path: Path) -> None:
    saved = make_state()
    train(saved, 1, 2)
    save_once(tmp_path, 2, {key: saved[key] for key in ("model", "optimizer")})
    model = Net(seed=7)
    adam = [each for each in model.parameters() if each.ndim != 2]
    matrices = [p for name, p in model.named_parameters() if "hidden" in name and p.ndim == 2]
    regrouped = [
        torch.optim.AdamW([{"params": [each]} for each in [model.embedding.weight, *adam]]),
        torch.optim.Muon(matrices[::-1]),
    ]
    assert restore_step(tmp_path, {"model": model, "optimizer": regrouped}) == 2
    expected = saved["optimizer"][1].state[saved["model"].embedding.weight]["exp_avg"]
    assert torch.equal(regrouped[0].state[model.embedding.weight]["exp_avg"], expected)
    assert regrouped[0].param_groups[0]["lr"] == 0.01
    assert regrouped[1].param_groups[0]["lr"] == 0.02


class Buffers(nn.Module):
    def __init__(self, value: float = 0.0, **shapes: tuple[torch.dtype, tuple[int, ...]]) -> None:
        super().__init__()
        for name, (dtype, shape) in shapes.items():
            self.register_buffer(name, torch.full(shape, value, dtype=dtype))


FLOAT = torch.float32
SAVED = {"a": (FLOAT, (3,)), "b": (FLOAT, (2,))}
MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "reshaped": ({"a": (FLOAT, (3,)), "b": (FLOAT, (4,))}, r"model\.b.*\(2,\).*\(4,\)"),
    "missing": ({**SAVED, "c": (FLOAT, (2,))}, r"has no `model\.c`"),
    "unexpected": ({"a": (FLOAT, (3,))}, r"the model has no `model\.b`"),
    "retyped": (
        {"a": (torch.bfloat16, (3,)), "b": (FLOAT, (2,))},
        r"model\.a.*float32.*bfloat16",
    ),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_a_model_that_does_not_fit_is_named_and_untouched(tmp_path: Path, kind: str) -> None:
    shapes, sentence = MISFITS[kind]
    save_once(tmp_path, 1, {"model": Buffers(1.0, **SAVED)})
    model = Buffers(5.0, **shapes)
    with pytest.raises(CheckpointError, match=f'does not fit.*{sentence}.*"{kind}"'):
        restore_step(tmp_path, {"model": model})
    assert all(bool((buffer == 5).all()) for buffer in model.buffers())
    assert steps_in(tmp_path) == [1], "a version that does not fit is not damaged"


@pytest.mark.parametrize("kind", MISFITS)
def test_an_allowed_misfit_restores_the_rest(tmp_path: Path, kind: str) -> None:
    shapes, _ = MISFITS[kind]
    save_once(tmp_path, 1, {"model": Buffers(1.0, **SAVED)})
    model = Buffers(5.0, **shapes)
    assert restore_step(tmp_path, {"model": model}, allow=[kind]) == 1
    fits = {"reshaped": "a", "missing": "ab", "unexpected": "a", "retyped": "ab"}[kind]
    for name, buffer in model.named_buffers():
        assert bool((buffer == (1 if name in fits else 5)).all()), name


def test_a_misfit_leaves_the_optimizer_alone(tmp_path: Path) -> None:
    saved, other = make_state(), make_state(seed=7)
    train(saved, 1, 2)
    save_once(tmp_path, 2, saved)
    train(other, 1, 1)
    other["model"].register_buffer("extra", torch.zeros(2))
    expected = bits(other)
    with pytest.raises(CheckpointError, match=r"has no `model\.extra`"):
        restore_step(tmp_path, other)
    assert bits(other) == expected


def test_a_key_that_was_not_saved_is_named(tmp_path: Path) -> None:
    state = make_state()
    del state["data"]
    save_once(tmp_path, 1, state)
    with pytest.raises(CheckpointError, match="`data`"):
        restore_step(tmp_path, make_state())


def test_a_step_that_is_not_there_is_named(tmp_path: Path) -> None:
    save_once(tmp_path, 1, {"model": Net()})
    with pytest.raises(CheckpointError, match=r"step = 5 is not in .*; the steps there are 1"):
        open_store(tmp_path).restore({"model": Net()}, step=5)


def test_a_misfit_below_a_key_with_a_dot_is_named(tmp_path: Path) -> None:
    save_once(tmp_path, 1, {"ema.model": Buffers(1.0, **SAVED)})
    with pytest.raises(CheckpointError, match=r"the model has no `ema\.model\.b`"):
        restore_step(tmp_path, {"ema.model": Buffers(5.0, a=SAVED["a"])})
