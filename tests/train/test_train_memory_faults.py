"""Bits that flip in memory while a run trains: it ends in the clean run's bits, and says how."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from forked import run_ranks
from tiny import assert_equal_bits, losses, tiny_job, train, weights

from outlast.cli.main import main
from outlast.errors import EXIT_DATA_CORRUPTION, EXIT_DONE
from outlast.guard import Policy
from outlast.job import to_toml
from outlast.records import CorruptionDetected, StateRecovered, Warned, read_run
from outlast.runtime import guarding
from outlast.train.engine import ReplicaEngine
from outlast.train.loop import Trainer
from outlast.train.run import run_directory

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.job import Job

pytestmark = pytest.mark.distributed

SHORT = ("train.steps=8", "checkpoint.every_steps=3", "data.validation_fraction=0.0")
MOMENTS = ("stepped", "kept", "passed")


@dataclass(frozen=True)
class Flip:
    """One bit of one number, once.

    Attributes:
        step: Steps done.
        moment: ``stepped``: right after the optimizer's step, before anything is kept or saved;
            ``kept``: after that; ``passed``: after the passes of the next step.
        what: ``weight``, or a key of the optimizer's state.
        rank: Of the process.
        bits: One of these is drawn.
        seed: Of the tensor, the number and the bit.
    """

    step: int
    moment: str
    what: str
    rank: int = 0
    bits: tuple[int, ...] = tuple(range(32))
    seed: int = 0

    def strike(self, trainer: Trainer) -> None:
        """Flip it in the trainer's memory, without any trace in torch's counters."""
        draw = random.Random(self.seed)
        parameters = [
            each for group in trainer.optimizers[0].param_groups for each in group["params"]
        ]
        parameter = draw.choice(parameters)
        held = (
            parameter
            if self.what == "weight"
            else trainer.optimizers[0].state[parameter][self.what]
        )
        local = held.to_local() if hasattr(held, "to_local") else held
        numbers = local.detach().data.view(-1).view(torch.int32)
        bit = draw.choice(self.bits)
        numbers[draw.randrange(len(numbers))].bitwise_xor_((1 << bit) if bit < 31 else -(1 << 31))


def _outlast(arguments: list[str], flips: list[Flip], budget: float = 0.0) -> tuple[int, str]:
    """`outlast` with these flips, each once, in all processes that it forks; code and stderr."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    folder = os.environ["STRUCK"]

    def strike(trainer: Trainer, step: int, moment: str) -> None:
        for number, flip in enumerate(flips):
            rank = int(os.environ.get("RANK", "0"))
            if (flip.step, flip.moment, flip.rank) == (step, moment, rank):
                with contextlib.suppress(FileExistsError):
                    os.close(os.open(f"{folder}/struck-{number}", os.O_CREAT | os.O_EXCL))
                    flip.strike(trainer)

    current: list[Trainer] = []
    step, train_from, passes = Trainer.step, Trainer.train_from, ReplicaEngine.forward_backward

    def stepped(self: Trainer, number: int, parts: Any) -> Any:
        current[:] = [self]
        strike(self, number, "kept")
        result = step(self, number, parts)
        strike(self, number + 1, "stepped")
        return result

    def trained(self: Trainer, first: int) -> int:
        last = train_from(self, first)
        strike(self, last, "kept")
        return last

    def passed(self: ReplicaEngine, batches: Any, number: int, tokens: int) -> Any:
        loss = passes(self, batches, number, tokens)
        strike(current[0], number, "passed")
        return loss

    Trainer.step, Trainer.train_from = stepped, trained  # type: ignore[method-assign]
    ReplicaEngine.forward_backward = passed  # type: ignore[method-assign]
    if budget:
        guarding.Policy = functools.partial(Policy, light_budget=budget)  # type: ignore[misc, assignment]
    sys.argv = ["outlast", *arguments]
    code, error = 0, io.StringIO()
    with contextlib.redirect_stderr(error):
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, error.getvalue()


def run_with(
    job: Job, folder: Path, flips: list[Flip], size: int = 1, budget: float = 0.0
) -> tuple[int, str]:
    """Train the job by `outlast train` on `size` processes; exit code and standard error."""
    file = folder / f"{job.run.name}.toml"
    file.write_text(to_toml(job))
    struck = folder / f"{job.run.name}.struck"
    struck.mkdir()
    os.environ["STRUCK"] = str(struck)
    arguments = ["train", str(file), *([f"--nproc={size}"] if size > 1 else [])]
    [(code, error)] = run_ranks(1, _outlast, arguments, flips, budget)
    assert len(list(struck.iterdir())) == len(flips), "a flip did not take place"
    return code, error


def found(job: Job) -> list[CorruptionDetected]:
    return [event for _, event in read_run(run_directory(job).path).of(CorruptionDetected)]


def returns(job: Job) -> list[StateRecovered]:
    """Each time that the run went back."""
    events = read_run(run_directory(job).path).of(StateRecovered)
    return [event for _, event in events if event.cause]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from settings and a number of processes to a job that met no fault."""
    folder = tmp_path_factory.mktemp("clean")
    jobs: dict[Any, Job] = {}

    def make(size: int, *settings: str) -> Job:
        if (size, settings) not in jobs:
            job = tiny_job(folder, f"clean{len(jobs)}", *settings, "guard.policy=off")
            assert train(job, size) == EXIT_DONE
            jobs[size, settings] = job
        return jobs[size, settings]

    return make


@pytest.mark.parametrize("what", ["weight", "exp_avg", "exp_avg_sq", "step"])
@pytest.mark.parametrize(("moment", "back_to"), [("stepped", 4), ("kept", 5), ("passed", 5)])
def test_a_run_goes_back_to_what_memory_held_before_the_fault(
    what: str, moment: str, back_to: int, clean: Any, tmp_path: Path
) -> None:
    job = tiny_job(tmp_path, "struck", *SHORT, "guard.policy=full")
    code, error = run_with(job, tmp_path, [Flip(5, moment, what)])
    assert code == EXIT_DONE, error
    [event] = returns(job)
    assert event.step in (4, back_to)
    assert (event.source, event.lost_steps) == ("memory", 5 - event.step)
    assert event.cause == "a memory fault (rest of optimizer, rank 0)"
    assert {(each.operation, each.outcome) for each in found(job)} >= {("rest", "restored")}
    assert losses(job) == losses(clean(1, *SHORT))
    assert_equal_bits(weights(job), weights(clean(1, *SHORT)))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "size"), [("replicate", 1), ("replicate", 2), ("shard", 2)])
def test_random_faults_end_in_the_clean_bits(
    layout: str, size: int, clean: Any, tmp_path: Path
) -> None:
    settings = (*SHORT, f"parallel.{layout}={size}")
    draw = random.Random(f"{layout} {size}")
    kinds = ("weight", "weight", "exp_avg", "exp_avg_sq", "step")
    for number in range(4 if size == 1 else 2):
        flips = [
            Flip(
                draw.randrange(1, 9 if moment != "passed" else 8),
                moment,
                draw.choice(kinds),
                rank=draw.randrange(size),
                seed=draw.randrange(2**30),
            )
            for moment in draw.choices(MOMENTS, k=5)
        ]
        job = tiny_job(tmp_path, f"struck{number}", *settings, "guard.policy=full")
        code, error = run_with(job, tmp_path, flips, size)
        assert code == EXIT_DONE, (flips, error)
        assert {each.operation for each in found(job)} >= {"rest"}
        # Before anything is in memory the run starts again.
        early = any((flip.step, flip.moment) == (1, "stepped") for flip in flips)
        outcomes = {each.outcome for each in found(job)}
        assert outcomes <= {"restored", "corrected", "repeated", *(("detected",) if early else ())}
        assert_equal_bits(weights(job), weights(clean(size, *settings)))
        assert losses(job) == losses(clean(size, *settings))
