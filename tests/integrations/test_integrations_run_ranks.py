"""`outlast.Run` on several processes: DDP, FSDP2, stops, other numbers of them."""

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outlast
from outlast.errors import IntegrationError
from outlast.records import AttemptEnded, StopRequested, Warned, read_run

pytestmark = pytest.mark.distributed

QUIET = ["checkpoint.writer=thread", "energy.measure=false", "log.every_steps=1"]
SAMPLES, GLOBAL_BATCH = 96, 12


def _model(how: str, dropout: float) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4))
    if how == "ddp" and dist.get_world_size() > 1:
        return plain, DistributedDataParallel(plain)
    if how == "fsdp2":
        fully_shard(plain)
    return plain, plain


def _train(
    folder: Path,
    name: str,
    how: str,
    dropout: float = 0.0,
    stop_at: int | None = None,
    steps: int | None = None,
    epochs: int = 4,
) -> dict[str, Any]:
    """Train as one of several ranks; what it has seen and made."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain, wrapped = _model(how, dropout)
    generator = torch.Generator().manual_seed(6)
    features = torch.randn(SAMPLES, 8, generator=generator)
    targets = torch.randn(SAMPLES, 4, generator=generator)
    data = TensorDataset(features, targets, torch.arange(SAMPLES))
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    loader = DataLoader(data, GLOBAL_BATCH // world_size, sampler=DistributedSampler(data))
    seen: list[tuple[int, int]] = []
    code: Any = 0
    try:
        with outlast.Run(
            model=wrapped,
            optimizer=optimizer,
            loader=loader,
            epochs=epochs,
            steps=steps,
            settings=[f'run.directory="{folder}"', f"run.name={name}", *QUIET],
        ) as run:
            for x, y, numbers in run:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(wrapped(x), y)
                loss.backward()
                optimizer.step()
                run.log(loss)
                seen += [(run.epoch, int(number)) for number in numbers]
                if run.step == stop_at and rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
    except SystemExit as ended:
        code = ended.code
    whole = {
        key: (each.full_tensor() if hasattr(each, "full_tensor") else each).detach().clone()
        for key, each in plain.state_dict().items()
    }
    # A replicated model that outlives its process group may keep the process from ending.
    del wrapped, optimizer, loss, run
    dist.destroy_process_group()
    return {"code": code, "seen": seen, "weights": {k: each.numpy() for k, each in whole.items()}}


@pytest.mark.supports("pytorch", "chain", "resume", "checkpoint", "guard")
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_a_signal_to_one_rank_stops_all_and_they_go_on(
    tmp_path: Path, ranks: Any, how: str
) -> None:
    whole = ranks(2)(_train, tmp_path, "whole", how, 0.1)
    stopped = ranks(2)(_train, tmp_path, "stopped", how, 0.1, 9)
    assert [each["code"] for each in stopped] == [3, 3]
    run = read_run(tmp_path / "stopped")
    [(_, request)] = run.of(StopRequested)
    assert request.reason == "a signal to another rank"
    assert 10 <= request.step < 32
    [(_, end)] = run.of(AttemptEnded)
    assert (end.outcome, end.step) == ("to_be_continued", request.step)
    resumed = ranks(2)(_train, tmp_path, "stopped", how, 0.1)
    for before, after, straight in zip(stopped, resumed, whole, strict=True):
        assert after["code"] == 0
        assert before["seen"] + after["seen"] == straight["seen"]
        for name, weights in straight["weights"].items():
            assert (after["weights"][name] == weights).all(), name


@pytest.mark.supports("pytorch", "malleable")
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_other_numbers_of_processes_use_each_sample_once_per_epoch(
    tmp_path: Path, ranks: Any, how: str
) -> None:
    straight = ranks(2)(_train, tmp_path, "straight", how, 0.0, None, None, 3)
    parts = []
    # Eight steps an epoch: three numbers of processes in the first one, a change between epochs.
    for size, steps in ((2, 3), (3, 6), (1, 8), (2, None)):
        parts += ranks(size)(_train, tmp_path, "parts", how, 0.0, None, steps, 3)
    seen = Counter(each for part in parts for each in part["seen"])
    assert seen == Counter((epoch, number) for epoch in range(3) for number in range(SAMPLES))
    for name, weights in straight[0]["weights"].items():
        assert abs(parts[-1]["weights"][name] - weights).max() < 1e-5, name
    run = read_run(tmp_path / "parts")
    assert [each.world_size for each in run.attempts] == [2, 3, 1, 2]
    told = [event.message for _, event in run.of(Warned) if "world size" in event.message]
    assert [each.split(":")[0] for each in told] == [
        "3 steps of this epoch were done with world size 2, the others are with 3",
        "6 steps of this epoch were done with world size 3, the others are with 1",
        "8 steps of this epoch were done with world size 1, the others are with 2",
    ]


def _uneven(folder: Path) -> str:
    """Go through loaders of which one has fewer batches; what the run ends with."""
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    settings = [f'run.directory="{folder}"', *QUIET, "guard.policy=off", "log.every_steps=1000"]
    loader = [torch.ones(1, 1)] * (7 - 2 * dist.get_rank())
    with (  # noqa: PT012
        pytest.raises(IntegrationError) as error,
        outlast.Run(model=model, optimizer=optimizer, loader=loader, settings=settings) as run,
    ):
        for batch in run:
            model(batch).sum().backward()
            optimizer.step()
    dist.destroy_process_group()
    return str(error.value)


@pytest.mark.supports("pytorch", "records")
def test_a_rank_with_fewer_batches_ends_the_run_with_a_sentence(tmp_path: Path, ranks: Any) -> None:
    for rank, sentence in enumerate(ranks(2)(_uneven, tmp_path)):
        assert sentence.startswith(f"rank {rank} did ")
        assert "where the ranks did from 5 to " in sentence
        assert "drop_last=True" in sentence
    assert read_run(tmp_path / "run").attempts[-1].outcome == "failed"
