"""What may be copied while the next step runs, in training loops of all kinds."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from outlast.autosave.keeper import CopyWindows
from outlast.checkpoint import CheckpointStore, SaveResult

Ranks = Callable[[int], Callable[..., list[Any]]]
Save = Callable[[], frozenset[str]]


@pytest.fixture
def windows() -> Iterator[CopyWindows]:
    made = CopyWindows()
    yield made
    made.remove()


def row(tensor: torch.Tensor) -> torch.Tensor:
    """The storage of a tensor, by a tensor with a version counter of its own."""
    storage = tensor.untyped_storage()
    made = torch.empty(0, dtype=tensor.dtype)
    return made.set_(storage, 0, (storage.nbytes() // tensor.element_size(),))


def rows(*parts: nn.Module | torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for number, part in enumerate(parts):
        if isinstance(part, nn.Module):
            found |= {f"{number}.{name}": row(each) for name, each in part.state_dict().items()}
            continue
        for place, state in enumerate(part.state.values()):
            found |= {
                f"{number}.{place}.{name}": row(each)
                for name, each in state.items()
                if isinstance(each, torch.Tensor)
            }
    return found


class Held:
    """An object whose state is what it is given."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state or {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Saver:
    """Saves at step boundaries, and knows what the saved versions must hold."""

    def __init__(self, directory: Path, windows: CopyWindows, **settings: Any) -> None:
        self.directory = directory
        self.windows = windows
        self.store = CheckpointStore(directory, writer="thread", keep=99, **settings)
        self.late: list[frozenset[str]] = []
        self.results: list[SaveResult] = []
        self.expected: list[dict[str, torch.Tensor]] = []
        self._handle: Any = None

    def save(self, *parts: Any) -> frozenset[str]:
        """One save; returns what was late."""
        tensors = rows(*parts)
        self.end()
        late = self.windows.late(tensors)
        self.expected.append({name: each.clone() for name, each in tensors.items()})
        self._handle = self.store.save_async(
            len(self.late), {"all": Held(tensors)}, late=lambda name: name[4:] in late
        )
        self.windows.opened(self._handle)
        self.late.append(late)
        return late

    def end(self) -> None:
        self.windows.close()
        if self._handle is not None:
            self.results.append(self._handle.result())
            self._handle = None

    def check(self) -> list[int]:
        """The steps whose save failed; all others hold what was there at their boundary."""
        self.end()
        self.store.close()
        failed = [result.step for result in self.results if result.error is not None]
        for step, expected in enumerate(self.expected):
            if step in failed:
                continue
            held = Held()
            with CheckpointStore(self.directory, writer="thread") as store:
                assert store.restore({"all": held}, step=step) is not None
            assert held.state is not None
            assert held.state.keys() == expected.keys()
            for name, each in expected.items():
                assert torch.equal(held.state[name], each), (step, name)
        return failed


@pytest.fixture
def saver(tmp_path: Path, windows: CopyWindows) -> Saver:
    return Saver(tmp_path, windows)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))


def loss(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(8, 6)).square().mean()


@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_weights_and_moments_are_late_once_they_were_seen_to_lie_still(
    saver: Saver, settings: dict[str, bool]
) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **settings)
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(5):
        saver.save(model, optimizer, average)
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
        average.update_parameters(model)
    assert saver.check() == []
    # Not known, watched, late.
    assert saver.late[:2] == [frozenset()] * 2
    weights = {name for name, _ in model.named_parameters()}
    moments = {
        f"{n}.{name}" for n in range(len(weights)) for name in ("step", "exp_avg", "exp_avg_sq")
    }
    late = {f"0.{name}" for name in weights} | {f"1.{name}" for name in moments}
    assert saver.late[2:] == [late] * 3


def test_weights_that_are_clipped_without_counting_are_never_late(saver: Saver) -> None:
    model = network()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.1)
    for _ in range(5):
        saver.save(model, optimizer)
        for parameter in model.parameters():
            parameter.data.clamp_(-0.01, 0.01)
        loss(model).backward()
        optimizer.step()
    assert saver.check() == []
    assert all(name.startswith("1.") for name in saver.late[-1])
    assert saver.late[-1]


def test_weights_that_are_moved_and_put_back_are_never_late(saver: Saver) -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        saver.save(model)
        with torch.no_grad():
            for parameter in model.parameters():
                kept = parameter.clone()
                parameter.add_(0.1)
                loss(model)
                parameter.copy_(kept)
        loss(model).backward()
        optimizer.step()
    assert saver.check() == []
    assert saver.late == [frozenset()] * 5


def test_a_write_that_comes_now_and_then_fails_one_save_and_is_awaited_then(saver: Saver) -> None:
    model = nn.Linear(600, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        saver.save(model)
        if step % 2 and step > 2:
            with torch.no_grad():
                # None of the bytes that the store compares.
                model.weight[0, 100:102].mul_(2)
        model(torch.randn(8, 600)).square().mean().backward()
        optimizer.step()
    assert saver.check() == [3]
    assert "`all.0.weight` was written before its copy was made" in (saver.results[3].error or "")
    assert saver.late[3] == {"0.weight", "0.bias"}
    assert saver.late[4:] == [{"0.bias"}] * 4


def test_optimizers_that_take_turns_close_the_windows_of_all(saver: Saver) -> None:
    first, second = network(), network()
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (first, second)]
    for _ in range(5):
        saver.save(first, second, *optimizers)
        for model, optimizer in zip((first, second), optimizers, strict=True):
            optimizer.zero_grad()
            (loss(first) + loss(second)).backward()
            optimizer.step()
            # Between the two steps, by hand.
            for parameter in model.parameters():
                parameter.data.mul_(0.9)
    assert saver.check() == []
    assert len(saver.late[-1]) == 2 * 6 + 2 * 3 * 6


def test_boundaries_between_accumulated_gradients_close_windows_too(saver: Saver) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(12):
        saver.save(model)
        if step % 4 == 1:
            # Never between a boundary and an optimizer step alone.
            for parameter in model.parameters():
                parameter.data.mul_(1.1)
        loss(model).backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    assert saver.check() == []


def test_steps_in_the_backward_pass_close_windows(saver: Saver) -> None:
    model = network()
    own = {each: torch.optim.Adam([each], lr=0.1) for each in model.parameters()}
    for parameter, optimizer in own.items():
        parameter.register_post_accumulate_grad_hook(
            lambda _, optimizer=optimizer: optimizer.step()
        )
    for _ in range(5):
        saver.save(model, *own.values())
        loss(model).backward()
        model.zero_grad()
    assert saver.check() == []
    assert len(saver.late[-1]) == 6 + 3 * 6


def test_weights_that_lie_in_one_storage_are_late_together(saver: Saver) -> None:
    model = nn.Linear(6, 1)
    flat = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
    model.weight.data = flat[:6].view(1, 6)
    model.bias.data = flat[6:]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        saver.save(model)
        if step == 3:
            flat.mul_(2.0)
        loss(model).backward()
        optimizer.step()
    assert saver.late[2] == {"0.weight", "0.bias"}
    # The counter of the whole is none of the weights', but the bytes tell.
    assert saver.check() == [3]


def test_what_is_made_anew_each_step_is_not_watched_for_ever(
    saver: Saver, windows: CopyWindows
) -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(8):
        saver.save(model, optimizer)
        loss(model).backward()
        optimizer.step()
        for state in optimizer.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].clone()
    assert saver.late[-1] == {"0.weight", "0.bias"}
    assert windows._watched == []
    assert saver.check() == []


class Recorded:
    """A save that notes what the weights are when its copies are made."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self.seen: list[float] = []

    def copied(self) -> None:
        self.seen.append(self._weight.sum().item())


def test_any_save_is_told_before_the_first_write(windows: CopyWindows) -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizers = [torch.optim.SGD([weight], lr=1.0) for _ in range(2)]
    save = Recorded(weight)
    windows.opened(save)
    for optimizer in optimizers:
        weight.grad = torch.ones(1)
        optimizer.step()
    assert save.seen == [1.0]
    assert weight.item() == -1.0


def test_a_boundary_and_the_end_close_windows(windows: CopyWindows) -> None:
    saves = [Recorded(torch.ones(1)) for _ in range(3)]
    windows.opened(saves[0])
    windows.close()
    windows.opened(saves[1])
    windows.late({})
    windows.opened(saves[2])
    windows.remove()
    assert [each.seen for each in saves] == [[1.0]] * 3
    later = Recorded(torch.ones(1))
    windows.opened(later)
    weight = nn.Parameter(torch.ones(1))
    torch.optim.SGD([weight]).step()
    assert later.seen == []


def test_an_evaluation_or_the_end_of_a_loop_has_the_copies_made(windows: CopyWindows) -> None:
    plain = nn.Module.eval
    saves = [Recorded(torch.ones(1)) for _ in range(2)]
    windows.opened(saves[0])
    nn.Linear(2, 2).eval()
    assert [each.seen for each in saves] == [[1.0], []]
    windows.opened(saves[1])
    windows.hurry()
    assert saves[1].seen == [1.0]
    windows.remove()
    assert nn.Module.eval is not plain
    model = nn.Linear(2, 2)
    assert not model.eval().training


def test_programs_that_evaluate_in_each_step_have_late_tensors_too(saver: Saver) -> None:
    model, teacher = network(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        saver.save(model)
        teacher.eval()
        loss(model).backward()
        optimizer.step()
    assert saver.check() == []
    assert saver.late[-1] == {f"0.{name}" for name, _ in model.named_parameters()}


def test_steps_that_are_compiled_are_saved_right(saver: Saver) -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def train() -> None:
        loss(model).backward()
        optimizer.step()

    for _ in range(5):
        saver.save(model)
        train()
    torch._dynamo.reset()
    assert saver.check() == []
    # Their steps run no hooks, so what they write to is not known to lie still.
    assert saver.late == [frozenset()] * 5


def sharded(directory: Path) -> list[int]:
    dist.init_process_group("gloo")
    windows = CopyWindows()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    saver = Saver(directory / str(dist.get_rank()), windows, collective=False)
    counts = []
    for step in range(5):
        parts = [*model.parameters(), *(s["exp_avg"] for s in optimizer.state.values())]
        local = {str(n): each._local_tensor for n, each in enumerate(parts)}
        assert all(isinstance(each, DTensor) for each in parts)
        counts.append(len(saver.save(_Tensors(local))))
        if step == 4:
            with torch.no_grad():
                next(model.parameters()).add_(1)
        loss(model).backward()
        optimizer.step()
    assert saver.check() == [4]
    windows.remove()
    return counts


class _Tensors(nn.Module):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, each in tensors.items():
            if each.numel():
                self.register_buffer(name, each)


@pytest.mark.distributed
def test_shards_are_late_as_their_tensors_are(ranks: Ranks, tmp_path: Path) -> None:
    for counts in ranks(2)(sharded, tmp_path):
        assert counts[:2] == [0, 0]
        assert counts[2:] == [counts[2]] * 3
        assert counts[2] >= 4
