"""The checkpoint store with a state on CUDA devices."""

from pathlib import Path

import pytest
import torch
from torch import nn

from outlast.checkpoint import CheckpointStore, ReplayLog
from outlast.checkpoint.lane import StagingMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def make(device: str, **settings: bool) -> dict[str, object]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to(device)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), **settings)}


def step(state: dict[str, object], number: int, replay: ReplayLog | None = None) -> None:
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(number)
    batch = torch.randn(32, 256, generator=generator).to(device)
    model(batch).square().mean().backward()
    if replay is None:
        optimizer.step()
    else:
        replay.step(number)
    optimizer.zero_grad()


def content(state: dict[str, object]) -> list[torch.Tensor]:
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    parts = [each for state in optimizer.state.values() for each in state.values()]
    return [each.detach().clone() for each in [*model.parameters(), *parts]]


@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"capturable": True}], ids=str)
def test_later_steps_do_not_reach_what_was_saved(tmp_path: Path, settings: dict[str, bool]) -> None:
    state = make("cuda", **settings)
    step(state, 1)
    with CheckpointStore(tmp_path) as store:
        saved = content(state)
        handle = store.save_async(1, state)
        for number in range(2, 12):
            step(state, number)
        handle.wait()
    for device, same in (("cuda", settings), ("cuda", {})):
        fresh = make(device, **same)
        with CheckpointStore(tmp_path) as store:
            assert store.restore(fresh) is not None
        for before, after in zip(saved, content(fresh), strict=True):
            assert before.device == after.device
            assert torch.equal(before, after)
        # Counters lie where the restored settings need them.
        step(fresh, 2)


def test_a_cuda_state_comes_back_on_the_host(tmp_path: Path) -> None:
    state = make("cuda")
    step(state, 1)
    with CheckpointStore(tmp_path) as store:
        store.save(1, state)
        fresh = make("cpu")
        assert store.restore(fresh) is not None
    for before, after in zip(content(state), content(fresh), strict=True):
        assert torch.equal(before.cpu(), after)


def test_replayed_steps_have_the_bits_of_the_training(tmp_path: Path) -> None:
    state = make("cuda")
    with CheckpointStore(tmp_path) as store:
        replay = ReplayLog(store, state)
        step(state, 1, replay)
        store.save(1, state)
        for number in range(2, 6):
            step(state, number, replay)
    fresh = make("cuda")
    with CheckpointStore(tmp_path) as store:
        restored = store.restore(fresh)
    assert restored is not None
    assert (restored.step, restored.skipped) == (5, [])
    assert all(map(torch.equal, content(state), content(fresh)))


def test_memory_that_cannot_be_pinned_twice_leaves_no_error_behind() -> None:
    device = torch.device("cuda")
    first = StagingMemory(1 << 20, 1, device)
    assert first._pinned
    # Pinning the same memory again is refused by CUDA.
    assert not first._pin(device)
    torch.ones(8, device=device).add_(1)
    torch.cuda.synchronize()
    first.close()
