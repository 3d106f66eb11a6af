"""Gradient coding in the trainer: the same losses whoever computes, and no wait for the slow."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.distributed as dist
from forked import RanksFailedError, run_ranks
from runs import finish, start_process, wait_for_step
from tiny import losses, tiny_job, train
from transformers.models.llama.modeling_llama import LlamaMLP

from outlast.coding import FractionalRepetition
from outlast.coding.protocol import CodedAllReduce
from outlast.distributed.ranks import ranks_from
from outlast.errors import EXIT_DONE, EXIT_TO_BE_CONTINUED
from outlast.guard.inject import inject, parse_faults
from outlast.job.sections import CodingSection
from outlast.records import (
    AttemptStarted,
    CodingTotals,
    CorruptionDetected,
    GradientsCoded,
    Run,
    Warned,
    coding_totals,
    guard_totals,
    read_run,
)
from outlast.recover.phase_page import ignore_phase
from outlast.runtime.guarding import RunGuard
from outlast.train.engine import CodedEngine, CodingNotes, ReplicaEngine
from outlast.train.run import Start, run_directory, work

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.job import Job

pytestmark = pytest.mark.distributed

# As for the layouts in test_parallel: largest difference in training loss (nats) over six steps.
TOLERANCE = 2e-5
BF16_TOLERANCE = 5e-2

SHORT = ("checkpoint.every_steps=0", "data.validation_fraction=0.0")
COVERAGE = "coding.scheme=coverage"
SLOW_SECONDS = 0.1
"""Added to each of the four blocks of the slow rank."""

REPETITION = ("coding.scheme=fractional_repetition", "coding.copies=2")
SCHEMES = {
    "coverage": (COVERAGE,),
    "cyclic repetition": ("coding.scheme=cyclic_repetition", "coding.copies=2"),
    "graph": ("coding.scheme=graph", "coding.copies=2"),
    "server": (*REPETITION, "coding.protocol=server"),
    "gossip": ("coding.scheme=cyclic_mds", "coding.copies=2", "coding.protocol=gossip"),
}


def records(job: Job) -> Run:
    return read_run(run_directory(job).path)


def totals(job: Job) -> CodingTotals:
    found = coding_totals(records(job))
    assert found is not None
    return found


def step_seconds(job: Job) -> float:
    return sum(sum(event.step_seconds) for _, event in records(job).steps())


def slowly(job: Job, slow_ranks: tuple[int, ...], seconds: float = SLOW_SECONDS) -> int:
    """Work on `job`; on slow ranks every block takes so much longer."""
    # No worker processes of the compiler: they would outlive the run.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    ranks = ranks_from(os.environ)
    if ranks.rank in slow_ranks:
        forward = LlamaMLP.forward

        def slow(self: LlamaMLP, *arguments: Any) -> Any:
            time.sleep(seconds)
            return forward(self, *arguments)

        LlamaMLP.forward = slow
    return work(Start(job), ranks)


def train_slowly(job: Job, size: int, *slow_ranks: int, seconds: float = SLOW_SECONDS) -> int:
    codes = run_ranks(size, slowly, job, slow_ranks, seconds)
    assert len(set(codes)) == 1
    return int(codes[0])


@pytest.fixture(scope="module")
def uncoded(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of four replicas that wait for each other."""
    job = tiny_job(tmp_path_factory.mktemp("uncoded"), "uncoded", *SHORT)
    assert train(job, 4) == EXIT_DONE
    assert coding_totals(records(job)) is None
    return losses(job)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_scheme_gives_the_losses_of_the_run_without_it(
    scheme: str, uncoded: list[float], tmp_path: Path
) -> None:
    job = tiny_job(tmp_path, "coded", *SHORT, *SCHEMES[scheme])
    assert train(job, 4) == EXIT_DONE
    assert losses(job) == pytest.approx(uncoded, abs=TOLERANCE)
    found = totals(job)
    assert (found.scheme, found.replicas) == (job.coding.scheme, 4)
    assert {each.protocol for each in found.steps} == {job.coding.protocol}
    assert [each.step for each in found.steps] == [1, 2, 3, 4, 5, 6]
    assert found.inexact == ()
    assert all(each.seconds > 0 for each in found.steps)


def test_coverage_hands_chunks_between_replicas_that_are_sharded(
    uncoded: list[float], tmp_path: Path
) -> None:
    job = tiny_job(tmp_path, "sharded", *SHORT, COVERAGE, "parallel.shard=2")
    assert train_slowly(job, 4, 3) == EXIT_DONE
    assert losses(job) == pytest.approx(uncoded, abs=TOLERANCE)
    found = totals(job)
    assert found.replicas == 2
    # Ranks 2 and 3 are one replica, and as slow as the slower of them.
    assert set(found.by_replica) == {0, 1}
    assert found.by_replica[1].slow_steps >= 4
    assert found.claims >= 4


def test_a_coded_run_goes_on_with_fewer_and_with_more_replicas(
    uncoded: list[float], tmp_path: Path
) -> None:
    for size, stop, code in (
        (4, 2, EXIT_TO_BE_CONTINUED),
        (2, 2, EXIT_TO_BE_CONTINUED),
        (3, 0, EXIT_DONE),
    ):
        settings = (*SHORT, COVERAGE, f"train.stop_after_steps={stop}")
        job = tiny_job(tmp_path, "resumed", *settings)
        assert train(job, size) == code
    assert losses(job) == pytest.approx(uncoded, abs=TOLERANCE)
    assert [event.world_size for _, event in records(job).of(AttemptStarted)] == [4, 2, 3]
    found = totals(job)
    assert [each.replicas for each in found.steps] == [4, 4, 2, 2, 3, 3]
    assert found.replicas == 3


def test_a_slow_replicas_work_is_taken_over_and_the_run_is_shorter(
    uncoded: list[float], tmp_path: Path
) -> None:
    # Of one sample each, so that a replica has as many passes to do as with coverage.
    passes = (*SHORT, "train.micro_batch_size=1")
    waiting = tiny_job(tmp_path, "waiting", *passes)
    covered = tiny_job(tmp_path, "covered", *passes, COVERAGE)
    for job in (waiting, covered):
        assert train_slowly(job, 4, 2) == EXIT_DONE
        assert losses(job) == pytest.approx(uncoded, abs=TOLERANCE)
    # Three passes through four blocks in each of six steps.
    asleep = 6 * 3 * 4 * SLOW_SECONDS
    assert step_seconds(waiting) > asleep
    assert step_seconds(covered) < 0.6 * step_seconds(waiting)
    found = totals(covered)
    slowness = found.by_replica[2]
    assert slowness.slow_steps >= 5
    assert slowness.persistence is not None
    assert slowness.persistence > 0.7
    # Others may be late by chance, when both cores are busy, but none as often.
    assert all(
        each.slow_steps < slowness.slow_steps for n, each in found.by_replica.items() if n != 2
    )
    assert all(each.claims >= 2 for each in found.steps)
    assert found.inexact == ()
    # The first passes of a process take longer, of whatever scheme.
    saved = [each.waiting_seconds - each.seconds for each in found.steps[1:]]
    assert 0 < sum(saved) < step_seconds(waiting)
    assert found.saved_seconds > 0
    assert found.advice is not None
    assert found.advice.startswith("replica 2 was slow in ")


@pytest.mark.parametrize(
    "protocol", [pytest.param("all_reduce", marks=pytest.mark.smoke), "server", "gossip"]
)
def test_a_fixed_code_decodes_without_the_slow_replica(
    protocol: str, uncoded: list[float], tmp_path: Path
) -> None:
    job = tiny_job(tmp_path, "coded", *SHORT, *REPETITION, f"coding.protocol={protocol}")
    assert train_slowly(job, 4, 1) == EXIT_DONE
    assert losses(job) == pytest.approx(uncoded, abs=TOLERANCE)
    found = totals(job)
    assert found.by_replica[1].slow_steps >= 5
    # The other one of its group was then needed, and of the group beside it one a step.
    slow = {replica: each.slow_steps for replica, each in found.by_replica.items()}
    assert slow[0] + slow[1] <= 6
    assert slow[2] + slow[3] <= 6
    assert found.claims == 0
    assert found.inexact == ()
    assert found.saved_seconds > 0


def test_a_fixed_code_goes_on_with_an_error_that_is_good_enough(
    uncoded: list[float], tmp_path: Path
) -> None:
    commit = ('coding.lost="commit"', "coding.deadline_seconds=5.0", "coding.largest_error=0.5")
    settings = (*REPETITION, *commit)
    job = tiny_job(tmp_path, "coded", *SHORT, *settings)
    # One of the two groups as a whole: its two chunks of four are in no message.
    assert train_slowly(job, 4, 2, 3) == EXIT_DONE
    found = totals(job)
    assert len(found.inexact) >= 5
    # Half of the chunks twice, the others not at all.
    assert {each.error for each in found.inexact} == {4.0}
    assert {each.stragglers for each in found.inexact} == {(2, 3)}
    assert step_seconds(job) < 6 * 2 * 4 * SLOW_SECONDS
    assert losses(job) == pytest.approx(uncoded, abs=0.2)
    assert losses(job) != pytest.approx(uncoded, abs=TOLERANCE)


def test_a_code_that_stands_no_straggler_waits_and_that_is_communication(
    uncoded: list[float], tmp_path: Path
) -> None:
    settings = (*SHORT, "coding.scheme=fractional_repetition", "coding.copies=1")
    job = tiny_job(tmp_path, "coded", *settings)
    assert train_slowly(job, 4, 3) == EXIT_DONE
    assert losses(job) == pytest.approx(uncoded, abs=TOLERANCE)
    assert totals(job).slow_steps == ()
    # One pass through four slow blocks in each of six steps, for which rank 0 has waited.
    assert records(job).seconds()["communication"] > 0.8 * 6 * 4 * SLOW_SECONDS


def test_coverage_trains_in_bf16(tmp_path: Path) -> None:
    bf16 = (*SHORT, "train.precision=bf16")
    plain, covered = tiny_job(tmp_path, "plain", *bf16), tiny_job(tmp_path, "on", *bf16, COVERAGE)
    for job in (plain, covered):
        assert train(job, 2) == EXIT_DONE
    assert losses(covered) == pytest.approx(losses(plain), abs=BF16_TOLERANCE)


def test_the_same_units_are_dropped_whoever_computes(tmp_path: Path) -> None:
    dropout = (*SHORT, "model.settings.attention_dropout=0.3", "model.attention=eager")
    plain = tiny_job(tmp_path, "plain", *dropout)
    covered = tiny_job(tmp_path, "covered", *dropout, COVERAGE)
    without = tiny_job(tmp_path, "without", *SHORT)
    assert train(plain, 3) == train(without, 3) == EXIT_DONE
    assert train_slowly(covered, 3, 0) == EXIT_DONE
    assert totals(covered).claims >= 4
    assert losses(covered) == pytest.approx(losses(plain), abs=TOLERANCE)
    assert losses(covered) != pytest.approx(losses(without), abs=10 * TOLERANCE)


@pytest.mark.parametrize(
    "mode",
    [
        "train.activation_checkpointing=true",
        "checkpoint.replay=exact",
        "guard.policy=full",
        "train.compile=true",
    ],
)
def test_other_mechanisms_do_not_mind_passes_that_are_given_up(
    mode: str, uncoded: list[float], tmp_path: Path
) -> None:
    job = tiny_job(tmp_path, "mode", *SHORT, COVERAGE, mode)
    assert train_slowly(job, 3, 1) == EXIT_DONE
    assert losses(job) == pytest.approx(uncoded, abs=TOLERANCE)
    assert totals(job).by_replica[1].slow_steps >= 4
    assert records(job).of(CorruptionDetected) == []


def _reduce_without_the_second(step_loss: float) -> float:
    """The loss that this rank adds in a step whose first rank suffices."""
    dist.init_process_group("gloo")
    model = torch.nn.Linear(1, 1)

    class Passes:
        device, waits = torch.device("cpu"), SimpleNamespace(add=lambda seconds: None)
        mark = staticmethod(ignore_phase)

        def loss(self, batch: torch.Tensor, step: int) -> torch.Tensor:
            return model(batch).sum() * 0 + (2.0 if dist.get_rank() == 0 else step_loss)

    class Samples:
        microbatches = 1

        def part(self, step: int, chunk: int, number: int) -> torch.Tensor:
            time.sleep(1.5 * dist.get_rank())
            return torch.ones(1, 1)

    coded = CodedAllReduce(model, FractionalRepetition(2, 1))
    notes = CodingNotes(CodingSection(), dist.get_rank(), 2, True)
    engine = CodedEngine(cast("Any", Passes()), coded, cast("Any", Samples()), 2, notes)
    loss = float(engine.forward_backward([], 0, 1))
    # The first rank holds the store, in which the second one still reads.
    dist.barrier()
    return loss


@pytest.mark.parametrize("worthless", [float("nan"), float("inf")])
def test_the_loss_of_a_replica_that_was_done_without_is_nothing(worthless: float) -> None:
    assert run_ranks(2, _reduce_without_the_second, worthless) == [4.0, 0.0]


def test_accumulation_keeps_its_micro_batches(uncoded: list[float], tmp_path: Path) -> None:
    # Six samples a replica, at most one in a pass: six chunks, although four would do.
    job = tiny_job(tmp_path, "small", *SHORT, COVERAGE, "train.micro_batch_size=1")
    assert train_slowly(job, 2, 1) == EXIT_DONE
    assert losses(job) == pytest.approx(uncoded, abs=TOLERANCE)
    assert max(each.claims for each in totals(job).steps) > 3


def test_a_guarded_run_raises_no_alarm_when_passes_are_given_up(
    uncoded: list[float], tmp_path: Path
) -> None:
    job = tiny_job(tmp_path, "guarded", *SHORT, COVERAGE, "guard.policy=linear")
    assert train_slowly(job, 4, 2) == EXIT_DONE
    assert losses(job) == pytest.approx(uncoded, abs=TOLERANCE)
    assert records(job).of(CorruptionDetected) == []
    checked = guard_totals(records(job))
    assert checked is not None
    assert checked.operations["linear.dw"].checks > 0
    assert totals(job).by_replica[2].slow_steps >= 4


def _faulty(job: Job, fault: str) -> int:
    ranks = ranks_from(os.environ)
    plain = RunGuard.__init__

    def init(self: RunGuard, *given: Any) -> None:
        plain(self, *given)
        own = [each for each in parse_faults([fault]) if each.rank == ranks.rank]
        inject(self.guard, own, seed=1, rank=ranks.rank)

    RunGuard.__init__ = init  # type: ignore[method-assign]
    return work(Start(job), ranks)


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ("linear.output:bit=30:step=2:module=*.1.mlp.up_proj:rank=1", "corrected"),
        ("linear.saved:bit=29:step=2:module=*.0.mlp.gate_proj:rank=1", "repeated"),
    ],
)
def test_the_guard_puts_wrong_numbers_of_a_coded_step_right(
    fault: str, outcome: str, uncoded: list[float], tmp_path: Path
) -> None:
    job = tiny_job(tmp_path, "faulty", *SHORT, COVERAGE, "guard.policy=linear")
    assert set(run_ranks(4, _faulty, job, fault)) == {EXIT_DONE}
    events = [event for _, event in records(job).of(CorruptionDetected)]
    assert {(each.step, each.outcome) for each in events} == {(2, outcome)}
    assert losses(job) == pytest.approx(uncoded, abs=TOLERANCE)
    # A step that is repeated is one step.
    coded = [event for _, event in records(job).of(GradientsCoded)]
    assert [(event.step, len(event.errors)) for event in coded] == [(n, 1) for n in range(1, 7)]


def _slow_and_wrong(job: Job) -> int:
    ranks = ranks_from(os.environ)
    if ranks.rank >= 2:
        loss = ReplicaEngine.loss
        ReplicaEngine.loss = lambda *arguments: 1.5 * loss(*arguments)  # type: ignore[method-assign]
    return slowly(job, (3,))


def test_two_replicas_with_different_gradients_of_a_chunk_are_reported(tmp_path: Path) -> None:
    # A sharded replica cannot give up in the middle of a chunk that others have done meanwhile.
    settings = (*SHORT, COVERAGE, "parallel.shard=2", "coding.chunks=2")
    job = tiny_job(tmp_path, "differing", *settings)
    assert set(run_ranks(4, _slow_and_wrong, job)) == {EXIT_DONE}
    assert totals(job).duplicates > 0
    found = [event for _, event in records(job).of(CorruptionDetected)]
    assert {(each.operation, each.outcome) for each in found} == {("coding.duplicate", "detected")}
    assert {each.step for each in found} <= set(range(6))
    assert all(each.module.startswith("chunk ") for each in found)
    # Half as much again, as a share of the larger or the smaller.
    assert all(0.2 < each.magnitude < 0.7 for each in found)


def test_one_replica_trains_on_without_a_code_and_says_so(
    uncoded: list[float], tmp_path: Path
) -> None:
    job = tiny_job(tmp_path, "alone", *SHORT, COVERAGE)
    assert train(job, 1) == EXIT_DONE
    assert losses(job) == pytest.approx(uncoded, abs=TOLERANCE)
    messages = [event.message for _, event in records(job).of(Warned)]
    assert "with one replica there is nothing for [coding] to do" in messages
    assert coding_totals(records(job)) is None


def test_replicas_that_do_not_fit_a_code_are_refused_with_those_that_do(tmp_path: Path) -> None:
    settings = (*SHORT, "coding.scheme=fractional_repetition", "coding.copies=3")
    with pytest.raises(RanksFailedError, match="take stragglers = 1 or 3") as refused:
        train(tiny_job(tmp_path, "refused", *settings), 4)
    assert "CodingError" in str(refused.value)


def test_what_is_not_ready_by_the_deadline_is_left_out_with_its_error(
    uncoded: list[float], tmp_path: Path
) -> None:
    # The last chunks of two slow replicas have no other holders than these.
    settings = ('coding.lost="commit"', "coding.deadline_seconds=0.5", "coding.copies=1")
    job = tiny_job(tmp_path, "late", *SHORT, COVERAGE, *settings)
    assert train_slowly(job, 4, 1, seconds=0.4) == EXIT_DONE
    found = totals(job)
    assert len(found.inexact) >= 5
    for each in found.inexact:
        assert 1 <= each.lost <= 3
        # Scaled up, each of the 12 - lost chunks is off by lost / (12 - lost), the lost ones by 1.
        rest = 12 - each.lost
        assert each.error == pytest.approx(each.lost + rest * (each.lost / rest) ** 2)
    assert found.advice is not None
    # A sound estimate, of loss and gradient, though not the same one.
    assert losses(job) == pytest.approx(uncoded, abs=0.2)
    assert losses(job) != pytest.approx(uncoded, abs=TOLERANCE)


def test_every_steps_events_are_kept_when_several_are_recorded_together(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "seldom", *SHORT, COVERAGE, "log.every_steps=4")
    assert train(job, 2) == EXIT_DONE
    events = [event for _, event in records(job).of(GradientsCoded)]
    assert [(event.step, len(event.errors)) for event in events] == [(4, 4), (6, 2)]
    assert [each.step for each in totals(job).steps] == [1, 2, 3, 4, 5, 6]


def children_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes of the ranks, in their order."""
    found = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
    )
    return [int(number) for number in found.stdout.split()]


@pytest.mark.parametrize(
    ("coding", "victim"),
    [
        ((COVERAGE,), -1),
        ((*REPETITION, "coding.copies=3", "coding.protocol=server"), 0),
        ((*REPETITION, "coding.copies=3", "coding.protocol=gossip"), 0),
    ],
    ids=["coverage", "server itself", "gossip"],
)
def test_a_killed_replica_is_restarted_with_its_group_and_the_run_ends(
    coding: tuple[str, ...], victim: int, tmp_path: Path
) -> None:
    settings = ("train.steps=30", "checkpoint.every_steps=5", "launch.nproc=3", *coding)
    job = tiny_job(tmp_path, "killed", *settings)
    process = start_process(job, tmp_path)
    wait_for_step(job, 10, process)
    os.kill(children_of(process)[victim], signal.SIGKILL)
    code, output = finish(process)
    assert code == EXIT_DONE, output
    assert [each.outcome for each in records(job).attempts] == ["died", "completed"]
    found = totals(job)
    assert [each.step for each in found.steps] == list(range(1, 31))
    assert found.inexact == ()


@pytest.mark.parametrize("protocol", ["server", "gossip"])
def test_a_replica_that_stands_still_for_a_while_costs_the_run_no_attempt(
    protocol: str, tmp_path: Path
) -> None:
    settings = ("train.steps=20", "checkpoint.every_steps=0", "launch.nproc=4", *REPETITION)
    job = tiny_job(tmp_path, "stopped", *settings, f"coding.protocol={protocol}")
    process = start_process(job, tmp_path)
    wait_for_step(job, 5, process)
    stopped = children_of(process)[-1]
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(2.0)
    os.kill(stopped, signal.SIGCONT)
    code, output = finish(process)
    assert code == EXIT_DONE, output
    assert [each.outcome for each in records(job).attempts] == ["completed"]
    found = totals(job)
    assert [each.step for each in found.steps] == list(range(1, 21))
    assert found.inexact == ()
    assert found.description == f"fractional_repetition ({protocol})"
