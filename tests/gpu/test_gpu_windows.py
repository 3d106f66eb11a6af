"""Late tensors on CUDA devices: copied on a stream of their own while training continues."""

from pathlib import Path

import pytest
import torch
from torch import nn

from outlast.checkpoint import CheckpointStore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def everything(name: str) -> bool:
    return True


@pytest.mark.parametrize("fused", [False, True])
def test_what_is_saved_is_the_state_of_the_call(tmp_path: Path, fused: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 2048)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    state = {"model": model, "optimizer": optimizer}
    expected = {}
    with CheckpointStore(tmp_path, keep=9) as store:
        for step in range(4):
            if step:
                expected[step] = [each.detach().clone() for each in model.parameters()]
                handle = store.save_async(step, state, late=everything)
            model(torch.randn(512, 2048, device="cuda")).square().mean().backward()
            if step:
                handle.copied()
            optimizer.step()
            optimizer.zero_grad()
        assert handle.wait().error is None
        for step, weights in expected.items():
            assert store.restore(state, step=step) is not None
            for parameter, weight in zip(model.parameters(), weights, strict=True):
                assert torch.equal(parameter, weight)


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_step_in_the_window_is_never_published(tmp_path: Path, fused: bool) -> None:
    model = nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    with CheckpointStore(tmp_path) as store:
        for step in range(2):
            model(torch.randn(8, 1024, device="cuda")).sum().backward()
            if step:
                handle = store.save_async(
                    step, {"model": model, "optimizer": optimizer}, late=everything
                )
            optimizer.step()
        assert "before" in (handle.result().error or "")
        assert store.newest() is None
