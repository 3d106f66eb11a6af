"""The trainer on a CUDA device: it learns, and a resumed run ends in equal bits."""

from pathlib import Path

import pytest
import torch
from tiny import losses, tiny_job

from outlast.distributed.ranks import ALONE
from outlast.errors import EXIT_DONE, EXIT_TO_BE_CONTINUED
from outlast.records import AttemptStarted, read_run
from outlast.train.export import load_trained
from outlast.train.run import Start, run_directory, work

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_resumed_on_a_gpu_ends_in_equal_bits(
    tmp_path: Path, precision: str, optimizer: str
) -> None:
    settings = (f"train.precision={precision}", f"optimizer.name={optimizer}")
    whole = tiny_job(tmp_path, "whole", *settings)
    assert work(Start(whole), ALONE) == EXIT_DONE
    stopped = tiny_job(tmp_path, "parts", *settings, "train.stop_after_steps=3")
    assert work(Start(stopped), ALONE) == EXIT_TO_BE_CONTINUED
    resumed = tiny_job(tmp_path, "parts", *settings)
    assert work(Start(resumed), ALONE) == EXIT_DONE
    assert losses(resumed) == losses(whole)
    assert losses(whole)[-1] < losses(whole)[0]
    first, _ = load_trained(whole, run_directory(whole))
    second, _ = load_trained(resumed, run_directory(resumed))
    for (name, tensor), other in zip(
        first.state_dict().items(), second.state_dict().values(), strict=True
    ):
        assert torch.equal(tensor, other), name


def test_the_gpu_run_says_what_it_ran_on(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "facts")
    assert work(Start(job), ALONE) == EXIT_DONE
    [(_, started)] = read_run(run_directory(job).path).of(AttemptStarted)
    assert started.machine["gpus"]
