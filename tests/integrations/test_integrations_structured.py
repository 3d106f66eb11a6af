"""Loops that train structured layers are saved and continue as others do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import outlast
from outlast.job import load_loop_job
from outlast.tensorize import tensorize

if TYPE_CHECKING:
    from pathlib import Path

STEPS, HALF = 12, 6


def made() -> tuple[nn.Module, torch.optim.Optimizer, torch.utils.data.DataLoader[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 1))
    dense = sum(each.numel() for each in model.parameters())
    tensorize(model, form="low_rank", rank=4, match="2", force=True)
    assert sum(each.numel() for each in model.parameters()) < dense
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = torch.randn(STEPS * 4, 16, generator=torch.Generator().manual_seed(1))
    return model, optimizer, torch.utils.data.DataLoader(rows, batch_size=4)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def trained_at_once() -> torch.Tensor:
    model, optimizer, loader = made()
    for batch in loader:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.slow
@pytest.mark.supports("pytorch", "tensorize")
def test_a_run_with_structured_layers_goes_on_where_it_was(tmp_path: Path) -> None:
    settings = [f"run.directory={tmp_path}", "energy.measure=false", "recover.mode=off"]
    for until in (HALF, STEPS):
        model, optimizer, loader = made()
        job = load_loop_job(None, settings)
        with outlast.Run(job, model=model, optimizer=optimizer, loader=loader, steps=until) as run:
            assert run.step == (0 if until == HALF else HALF)
            for batch in run:
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert torch.equal(weights(model), trained_at_once())


@pytest.mark.supports("accelerate", "tensorize")
def test_an_accelerator_saves_and_loads_structured_layers(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from outlast.integrations.accelerate import add_checkpoints

    def prepared() -> tuple[Any, ...]:
        accelerator = accelerate.Accelerator(cpu=True)
        model, optimizer, loader = accelerator.prepare(*made())
        add_checkpoints(accelerator, tmp_path / "store")
        return accelerator, model, optimizer, loader

    accelerator, model, optimizer, loader = prepared()
    for number, batch in enumerate(loader, 1):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if number == HALF:
            accelerator.save_state(str(tmp_path / "state"))
            break
    accelerator.end_training()
    accelerator, model, optimizer, loader = prepared()
    accelerator.load_state(str(tmp_path / "state"))
    for batch in accelerator.skip_first_batches(loader, HALF):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    assert torch.equal(weights(accelerator.unwrap_model(model)), trained_at_once())
