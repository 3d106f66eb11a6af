"""Loops on Accelerate that are resumed within an epoch: samples, random numbers, gradients."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_ranks
from torch import nn
from torch.utils.data import DataLoader, Dataset

pytest.importorskip("accelerate")

import accelerate
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration

from outlast.integrations.accelerate import add_checkpoints

pytestmark = [pytest.mark.distributed, pytest.mark.supports("accelerate", "checkpoint", "resume")]

SAMPLES, BATCH, EPOCHS = 48, 4, 2

kept: list[Any] = []
"""A replicated model that outlives its process group may keep the process from ending."""


class Noisy(Dataset):
    """Samples to which reading them adds noise, as augmentation does."""

    def __init__(self, noise: float) -> None:
        self.x = torch.randn(SAMPLES, 4)
        self.noise = noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x[index]
        if self.noise:
            x = x + self.noise * torch.randn(4) + self.noise * random.random()
        return x, x.sum().reshape(1)


@dataclass
class Case:
    """A loop, and how it skips what it has done."""

    folder: Path = Path()
    seedable: bool = True
    tells_epoch: bool = True
    accumulated: int = 1
    noise: float = 0.0
    workers: int = 0
    skips: str = "accelerator"
    evaluates: bool = False
    broken_off: bool = False


def looped(case: Case, stop: int, resumes: bool) -> tuple[list[float], list[float]]:
    """Train; the losses of the batches after those that were resumed from, and the weights."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    seeds = DataLoaderConfiguration(use_seedable_sampler=case.seedable)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=case.accumulated, dataloader_config=seeds
    )
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
    batch = BATCH // accelerator.num_processes
    loader = DataLoader(Noisy(case.noise), batch, shuffle=True, num_workers=case.workers)
    judging = DataLoader(Noisy(0.0), batch, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # A process that is started again has drawn something else.
    torch.manual_seed(20 + accelerator.process_index if resumes else 2)
    random.seed(30 if resumes else 3)
    model, optimizer, loader, judging = accelerator.prepare(model, optimizer, loader, judging)
    saving = add_checkpoints(accelerator, case.folder / "store", writer="thread")
    done, losses, length = 0, [], len(loader)
    if resumes:
        accelerator.load_state(str(case.folder / "state"))
        done = stop
    for epoch in range(done // length, EPOCHS):
        if case.tells_epoch:
            loader.set_epoch(epoch)
        first, batches = done - epoch * length, loader
        if first and case.skips == "accelerator":
            batches = accelerator.skip_first_batches(loader, first)
        elif first and case.skips == "function":
            batches = accelerate.skip_first_batches(loader, first)
        for number, (features, targets) in enumerate(batches):
            if first and case.skips == "continue" and number < first:
                continue
            if case.evaluates and not done % 5:
                model.eval()
                for judged, (x, _) in enumerate(judging):
                    model(x)
                    if case.broken_off and judged == 2:
                        break
                model.train()
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(features), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            done += 1
            if done == stop and not resumes:
                accelerator.save_state(str(case.folder / "state"))
    accelerator.wait_for_everyone()
    saving.finish()
    weights = [each.detach().flatten() for each in accelerator.unwrap_model(model).parameters()]
    accelerator.end_training()
    kept.append((accelerator, model, optimizer))
    return losses, torch.cat(weights).tolist()


def both(case: Case, stop: int) -> tuple[bool, bool]:
    """Whether losses and weights of the resumed loop are those of the other, bit for bit."""
    losses, weights = looped(case, stop, False)
    resumed, again = looped(case, stop, True)
    return resumed == losses[stop:], weights == again


@pytest.mark.parametrize("stop", [5, 12, 17])
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(seedable=False),
        Case(seedable=False, workers=2),
        Case(tells_epoch=False),
        Case(seedable=False, accumulated=4),
        Case(seedable=False, noise=0.1),
        Case(seedable=False, skips="continue", noise=0.1),
        Case(skips="function"),
        Case(seedable=False, skips="function"),
        Case(seedable=False, evaluates=True),
        Case(seedable=False, evaluates=True, broken_off=True),
    ],
    ids=lambda case: "-".join(
        f"{name}={value}" for name, value in vars(case).items() if value != getattr(Case, name)
    ),
)
def test_a_loop_resumed_within_an_epoch_ends_in_the_same_bits(
    case: Case, stop: int, tmp_path: Path
) -> None:
    assert both(replace(case, folder=tmp_path), stop) == (True, True)


@pytest.mark.parametrize("seedable", [True, False])
def test_two_processes_resumed_within_an_accumulation_end_in_the_same_bits(
    seedable: bool, tmp_path: Path
) -> None:
    case = Case(tmp_path, seedable=seedable, accumulated=2, noise=0.1)
    undisturbed = run_ranks(2, looped, case, 7, False)
    resumed = run_ranks(2, looped, case, 7, True)
    for (losses, weights), (again, weights_again) in zip(undisturbed, resumed, strict=True):
        assert (again, weights_again) == (losses[7:], weights)
