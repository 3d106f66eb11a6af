"""Bits that flip in memory while a run trains: it ends in the clean run's bits, and says how."""

from __future__ import annotations

import contextlib
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from forked import run_ranks
from runs import command_here
from tiny import assert_equal_bits, losses, tiny_job, train, weights

from outlast.errors import EXIT_DATA_CORRUPTION, EXIT_DONE
from outlast.guard.scrubber import CheckBudget
from outlast.job import to_toml
from outlast.records import CorruptionDetected, StateRecovered, read_run
from outlast.train.engine import ReplicaEngine
from outlast.train.loop import Trainer
from outlast.train.run import run_directory

if TYPE_CHECKING:
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
            ``kept``: after that has begun; ``passed``: after the passes of the next step.
        what: ``weight``, ``buffer``, or a key of the optimizer's state.
        rank: Of the process.
        bits: One of these is drawn; none: the largest number of a matrix becomes larger still, by
            the highest bit of its exponent that is 0, but for the sign of the exponent.
        seed: Of the tensor, the number and the bit.
        lasting: Every time that the run comes to this step and moment, not once.
    """

    step: int
    moment: str
    what: str
    rank: int = 0
    bits: tuple[int, ...] = tuple(range(32))
    seed: int = 0
    lasting: bool = False

    def strike(self, trainer: Trainer) -> None:
        """Flip it in the trainer's memory, without any trace in torch's counters."""
        draw, optimizer = random.Random(self.seed), trainer.optimizers[0]
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        matrices = [each for each in parameters if each.dim() > 1]
        parameter = draw.choice(parameters if self.bits else matrices)
        if self.what == "weight":
            held = parameter
        elif self.what == "buffer":
            held = dict(trainer.model.named_buffers())["model.rotary_emb.inv_freq"]
        else:
            held = optimizer.state[parameter][self.what]
        local = held.to_local() if hasattr(held, "to_local") else held
        numbers = local.detach().data.view(-1)
        words = numbers.view(torch.int32)
        if self.bits:
            place, bit = draw.randrange(len(words)), draw.choice(self.bits)
        else:
            place = int(numbers.abs().argmax())
            bit = next(bit for bit in range(29, 22, -1) if not int(words[place]) >> bit & 1)
        words[place : place + 1].bitwise_xor_((1 << bit) if bit < 31 else -(1 << 31))


def _outlast(arguments: list[str], flips: list[Flip], blocks: int = 0) -> tuple[int, str]:
    """`outlast` with these flips, each once, in all processes that it forks; code and stderr.

    With `blocks`, level light checks so many blocks of parameters per step.
    """
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    folder = os.environ["STRUCK"]

    def strike(trainer: Trainer, step: int, moment: str) -> None:
        for number, flip in enumerate(flips):
            rank = int(os.environ.get("RANK", "0"))
            if (flip.step, flip.moment, flip.rank) != (step, moment, rank):
                continue
            if flip.lasting:
                Path(f"{folder}/struck-{number}").touch()
                flip.strike(trainer)
            else:
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
    if blocks:
        # Every step, and as fast as any machine.
        CheckBudget.plan = lambda self, sizes, first: (0, min(first + blocks, len(sizes)))  # type: ignore[method-assign]
    return command_here(arguments)


def run_with(
    job: Job, folder: Path, flips: list[Flip], size: int = 1, blocks: int = 0
) -> tuple[int, str]:
    """Train the job by `outlast train` on `size` processes; exit code and standard error."""
    file = folder / f"{job.run.name}.toml"
    file.write_text(to_toml(job))
    struck = folder / f"{job.run.name}.struck"
    struck.mkdir()
    os.environ["STRUCK"] = str(struck)
    arguments = ["train", str(file), *([f"--nproc={size}"] if size > 1 else [])]
    [(code, error)] = run_ranks(1, _outlast, arguments, flips, blocks)
    assert len(list(struck.iterdir())) == len(flips), f"a flip did not take place; {code}: {error}"
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


@pytest.mark.parametrize(
    ("what", "moment", "back_to"),
    [
        ("weight", "stepped", 4),
        ("exp_avg", "kept", 5),
        ("exp_avg_sq", "passed", 5),
        ("step", "kept", 5),
        ("weight", "passed", 5),
    ],
)
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
    for number in range(3 if size == 1 else 1):
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
        # The run may start again before anything is in memory: keeping, which begins after a step,
        # ends during the next one.
        early = any(flip.step == 1 for flip in flips)
        outcomes = {each.outcome for each in found(job)}
        assert not outcomes & {"persistent", *(() if early else ("detected",))}
        assert_equal_bits(weights(job), weights(clean(size, *settings)))
        assert losses(job) == losses(clean(size, *settings))


LIGHT = ("train.steps=60", "checkpoint.every_steps=3", "checkpoint.keep=40", "guard.policy=light")
LIGHT = (*LIGHT, "data.validation_fraction=0.0")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["weight", "exp_avg"])
def test_light_goes_back_to_a_checkpoint_from_before_its_slice_was_right(
    what: str, clean: Any, tmp_path: Path
) -> None:
    job = tiny_job(tmp_path, "light", *LIGHT)
    code, error = run_with(job, tmp_path, [Flip(26, "stepped", what, bits=())], blocks=8)
    assert code == EXIT_DONE, error
    [event] = returns(job)
    assert event.source == "shared"
    assert event.step <= 26
    assert_equal_bits(weights(job), weights(clean(1, *LIGHT)))
    assert losses(job) == losses(clean(1, *LIGHT))


@pytest.mark.slow
def test_replicas_tell_light_of_any_bit(clean: Any, tmp_path: Path) -> None:
    for seed in range(2):
        job = tiny_job(tmp_path, f"light{seed}", *LIGHT)
        flip = Flip(26, "stepped", "weight", rank=1, seed=seed)
        code, error = run_with(job, tmp_path, [flip], 2, blocks=8)
        assert code == EXIT_DONE, error
        [event] = returns(job)
        assert event.step <= 26
        assert {each.operation for each in found(job)} & {"replicas", "rest"}
        assert_equal_bits(weights(job), weights(clean(2, *LIGHT)))


@pytest.mark.slow
def test_without_an_earlier_checkpoint_the_run_begins_again(clean: Any, tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "begins", *LIGHT, "checkpoint.every_steps=50")
    code, error = run_with(job, tmp_path, [Flip(26, "stepped", "weight", bits=())], blocks=8)
    assert code == EXIT_DONE, error
    assert "starting again from it (1 of 3)" in error
    assert returns(job) == []
    assert_equal_bits(weights(job), weights(clean(1, *LIGHT)))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_a_run_stops_where_all_checkpoints_may_hold_the_fault(size: int, tmp_path: Path) -> None:
    settings = ("checkpoint.every_steps=1", "checkpoint.keep=1", "recover.mode=off")
    job = tiny_job(tmp_path, "stops", *LIGHT, *settings)
    flip = Flip(26, "stepped", "weight", rank=size - 1, bits=(), seed=3)
    code, error = run_with(job, tmp_path, [flip], size, blocks=8)
    assert code == EXIT_DATA_CORRUPTION, error
    assert "all checkpoints, the newest of step " in error
    assert "start anew with --fresh" in error
    assert "starting again" not in error
    assert "Traceback" not in error


@pytest.mark.parametrize("moment", ["kept", "passed"])
def test_a_bit_of_a_buffer_is_put_right(moment: str, clean: Any, tmp_path: Path) -> None:
    for number, bit in enumerate((30, 12)):
        job = tiny_job(tmp_path, f"struck{number}", *SHORT, "guard.policy=full")
        code, error = run_with(job, tmp_path, [Flip(3, moment, "buffer", bits=(bit,))])
        assert code == EXIT_DONE, error
        [event] = found(job)
        assert (event.operation, event.outcome, event.step) == ("buffer.rest", "corrected", 3)
        assert event.module == "model.rotary_emb.inv_freq"
        assert_equal_bits(weights(job), weights(clean(1, *SHORT)))


GPT2 = (
    (
        'model.settings={model_type="gpt2", vocab_size=256, n_embd=32, n_layer=2, n_head=2, '
        "n_positions=32, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1}"
    ),
    "model.attention=eager",
)
LAYOUTS = {
    "Muon": (1, ("optimizer.name=muon",)),
    "bf16": (1, ("train.precision=bf16",)),
    "accumulation, dropout": (1, (*GPT2, "train.micro_batch_size=3")),
    "replay logs": (1, ("checkpoint.replay=exact",)),
    "pipeline": (2, ("parallel.pipeline=2", "parallel.pipeline_microbatches=4")),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_kind_of_run_goes_back(layout: str, clean: Any, tmp_path: Path) -> None:
    size, settings = LAYOUTS[layout]
    job = tiny_job(tmp_path, "struck", *SHORT, *settings, "guard.policy=full")
    flips = [
        Flip(2, "stepped", "weight", rank=size - 1, seed=1),
        Flip(4, "kept", "weight", seed=2),
        Flip(8, "kept", "weight", rank=size - 1, seed=3),
    ]
    code, error = run_with(job, tmp_path, flips, size)
    assert code == EXIT_DONE, error
    assert len(returns(job)) == 3
    assert_equal_bits(weights(job), weights(clean(size, *SHORT, *settings)))
    assert losses(job) == losses(clean(size, *SHORT, *settings))


def test_memory_that_is_wrong_again_and_again_stops_the_run(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "stuck", *SHORT, "guard.policy=full", "launch.restarts=2")
    code, error = run_with(job, tmp_path, [Flip(5, "passed", "weight", lasting=True)])
    assert code == EXIT_DATA_CORRUPTION, error
    assert len(returns(job)) == 6
    assert error.count("starting again from it") == 2
    assert "the numbers of rank 0 are wrong and stay so (rest of optimizer" in error
