"""The guard in the trainer: unchanged numbers, recorded findings, and what persistent faults do."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from forked import RanksFailedError, run_ranks
from runs import command_here
from tiny import assert_equal_bits, losses, tiny_job, train, weights

from outlast.distributed.ranks import ranks_from
from outlast.errors import EXIT_DATA_CORRUPTION, EXIT_DONE, EXIT_TO_BE_CONTINUED
from outlast.guard.inject import inject, parse_faults
from outlast.job import to_toml
from outlast.records import (
    CorruptionDetected,
    CoverageWarned,
    Guarded,
    MemberLost,
    Run,
    StateRecovered,
    Warned,
    guard_totals,
    read_run,
)
from outlast.runtime.guarding import RunGuard
from outlast.train.loop import Trainer
from outlast.train.run import Start, run_directory, work

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.job import Job

pytestmark = pytest.mark.distributed

SHORT = ("train.steps=4", "checkpoint.every_steps=0", "data.validation_fraction=0.0")

LAYOUTS = {
    "alone": (1, ()),
    "bf16": (1, ("train.precision=bf16",)),
    "Muon": (1, ("optimizer.name=muon",)),
    "activation checkpointing": (1, ("train.activation_checkpointing=true",)),
    "accumulation": (1, ("train.micro_batch_size=3",)),
    "DDP of three": (3, ()),
    "FSDP2": (2, ("parallel.shard=2",)),
    "FSDP2, bf16": (2, ("parallel.shard=2", "train.precision=bf16")),
    "pipeline": (2, ("parallel.pipeline=2", "parallel.pipeline_microbatches=4")),
}


WITH_EVERY_LEVEL = ("alone", "DDP of three", "FSDP2")


def records(job: Job) -> Run:
    return read_run(run_directory(job).path)


def found(job: Job) -> list[CorruptionDetected]:
    return [event for _, event in records(job).of(CorruptionDetected)]


def _faulty(job: Job, faults: list[str]) -> int:
    """Work on `job` with faults from the trainer's first step on; in a process of its own."""
    ranks = ranks_from(os.environ)
    plain = RunGuard.__init__

    def init(self: RunGuard, *args: Any) -> None:
        plain(self, *args)
        own = [each for each in parse_faults(faults) if each.rank == ranks.rank]
        inject(self.guard, own, seed=1, rank=ranks.rank)

    RunGuard.__init__ = init  # type: ignore[method-assign]
    return work(Start(job), ranks)


def train_with(job: Job, size: int, *faults: str) -> int:
    """Like `train`, with faults."""
    codes = run_ranks(size, _faulty, job, list(faults))
    assert len(set(codes)) == 1
    return int(codes[0])


def _losing_checks(job: Job) -> int:
    """Work on `job`, whose norms lose their checks behind the fourth step."""
    plain = RunGuard.__init__

    def init(self: RunGuard, *args: Any) -> None:
        plain(self, *args)
        model, (optimizer, *_) = args[2], args[3]

        def lose(*_: object) -> None:
            if self.guard.watch.step == 4:
                for module in model.modules():
                    if type(module).__name__.endswith("Norm"):
                        module.forward = partial(type(module).forward, module)

        optimizer.register_step_post_hook(lose)

    RunGuard.__init__ = init  # type: ignore[method-assign]
    return work(Start(job), ranks_from(os.environ))


def test_shares_of_operations_and_lost_checks_are_recorded(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "losing", *SHORT, "train.steps=8", "guard.policy=full")
    assert run_ranks(1, _losing_checks, job) == [EXIT_DONE]
    warned = [event for _, event in records(job).of(CoverageWarned)]
    assert {event.found_on for event in warned} == {0}
    (fell,) = (item for item in warned if item.message.startswith("not checked any more"))
    assert fell.step == 5
    assert "norm" in fell.message
    assert any(item.message.startswith("not guarded in step 5") for item in warned)
    last = [event for _, event in records(job).of(Guarded)][-1]
    assert "of the step's FLOPs checked" in last.coverage
    assert "silu (" in last.coverage


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_level_changes_a_bit_of_the_training(layout: str, tmp_path: Path) -> None:
    size, settings = LAYOUTS[layout]
    levels = ("light", "linear", "full") if layout in WITH_EVERY_LEVEL else ("full",)
    jobs = {
        level: tiny_job(tmp_path, level, *SHORT, *settings, f"guard.policy={level}")
        for level in ("off", *levels)
    }
    for level, job in jobs.items():
        assert train(job, size) == EXIT_DONE
        assert losses(job) == losses(jobs["off"])
        assert_equal_bits(weights(job), weights(jobs["off"]))
        assert found(job) == []
        totals = guard_totals(records(job))
        if level == "off":
            assert totals is None
            continue
        assert totals is not None
        assert totals.policy == level
        products = {"linear.forward", "linear.dx", "linear.dw", "embedding.forward"}
        assert products <= totals.operations.keys() or level == "light"
        assert ("norm.forward" in totals.operations) == (level == "full")
        if level != "light" and "shard" in str(settings):
            assert {"reduce_scatter", "all_gather"} <= totals.operations.keys()
        elif level != "light" and layout.startswith("DDP"):
            assert "all_reduce" in totals.operations


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_micro_batches_of_few_rows_raise_no_alarm(precision: str, tmp_path: Path) -> None:
    settings = ("train.steps=8", f"train.precision={precision}", "train.micro_batch_size=3")
    job = tiny_job(tmp_path, "few", *SHORT, *settings, "guard.policy=full", "guard.correct=false")
    assert train(job, 1) == EXIT_DONE
    assert found(job) == []


def test_compiled_blocks_are_guarded(tmp_path: Path) -> None:
    settings = (*SHORT, "train.steps=2", "guard.policy=linear")
    eager = tiny_job(tmp_path, "eager", *settings)
    job = tiny_job(tmp_path, "compiled", *settings, "train.compile=true")
    assert train(eager, 1) == EXIT_DONE
    # No worker processes of the compiler: they would outlive the run.
    assert run_ranks(1, _compiled, job) == [EXIT_DONE]
    assert losses(job) == pytest.approx(losses(eager), abs=2e-5)
    assert found(job) == []
    made, expected = guard_totals(records(job)), guard_totals(records(eager))
    assert made is not None
    assert expected is not None
    for operation in ("linear.forward", "linear.dx", "linear.dw"):
        assert made.operations[operation].checks == expected.operations[operation].checks


def _compiled(job: Job) -> int:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    return work(Start(job), ranks_from(os.environ))


PRODUCTS = ["linear.output", "linear.operand", "linear.dx", "linear.dw"]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a number of processes to a job that met no fault."""
    folder = tmp_path_factory.mktemp("clean")
    jobs: dict[int, Job] = {}

    def make(size: int) -> Job:
        if size not in jobs:
            jobs[size] = tiny_job(folder, f"clean{size}", *SHORT, "guard.policy=off")
            assert train(jobs[size], size) == EXIT_DONE
        return jobs[size]

    return make


def test_transient_faults_are_put_right_and_recorded(clean: Any, tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "faulty", *SHORT, "guard.policy=linear")
    faults = [f"{at}:bit=30:step={step}:module=*.1.mlp.up_proj" for step, at in enumerate(PRODUCTS)]
    assert train_with(job, 1, *faults) == EXIT_DONE
    operations = ["linear.forward", "linear.forward", "linear.dx", "linear.dw"]
    assert [(each.step, each.operation) for each in found(job)] == list(enumerate(operations))
    for event in found(job):
        assert event.module == "model.layers.1.mlp.up_proj"
        assert (event.outcome, event.found_on, event.device) == ("corrected", 0, "cpu")
    assert losses(job) == losses(clean(1))
    assert_equal_bits(weights(job), weights(clean(1)))


@pytest.mark.parametrize("layout", ["replicate", "shard"])
def test_what_another_rank_finds_is_recorded_by_the_first(
    layout: str, clean: Any, tmp_path: Path
) -> None:
    settings = (*SHORT, f"parallel.{layout}=2")
    plain = clean(2)
    if layout == "shard":
        plain = tiny_job(tmp_path, "plain", *settings, "guard.policy=off")
        assert train(plain, 2) == EXIT_DONE
    job = tiny_job(tmp_path, "faulty", *settings, "guard.policy=linear")
    faults = ("linear.output:bit=30:step=1:rank=1", "linear.dx:bit=30:step=2:rank=0")
    assert train_with(job, 2, *faults) == EXIT_DONE
    assert [(each.step, each.found_on, each.outcome) for each in found(job)] == [
        (1, 1, "corrected"),
        (2, 0, "corrected"),
    ]
    assert losses(job) == losses(plain)
    assert_equal_bits(weights(job), weights(plain))


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_whose_numbers_cannot_be_computed_again_is_repeated(
    size: int, clean: Any, tmp_path: Path
) -> None:
    job = tiny_job(tmp_path, "faulty", *SHORT, "guard.policy=linear")
    fault = f"linear.saved:bit=29:step=2:module=*.0.mlp.gate_proj:rank={size - 1}"
    assert train_with(job, size, fault) == EXIT_DONE
    assert {(each.step, each.operation, each.found_on) for each in found(job)} == {
        (2, "linear.saved", size - 1)
    }
    assert {each.outcome for each in found(job)} == {"repeated"}
    assert losses(job) == losses(clean(size))
    assert_equal_bits(weights(job), weights(clean(size)))


def test_a_part_that_changes_on_its_way_to_the_sum_is_repeated(clean: Any, tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "faulty", *SHORT, "guard.policy=linear")
    assert train_with(job, 2, "bucket.during:bit=30:step=1") == EXIT_DONE
    assert {each.operation for each in found(job)} == {"all_reduce"}
    assert losses(job) == losses(clean(2))
    assert_equal_bits(weights(job), weights(clean(2)))


def test_what_was_checked_is_recorded_at_saves_and_at_the_end(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "saves", "train.steps=5", "guard.policy=linear")
    assert train(job, 1) == EXIT_DONE
    events = [event for _, event in records(job).of(Guarded)]
    assert sorted({event.step for event in events}) == [2, 4, 5]
    checks = [event.checks for event in events]
    assert checks == sorted(checks)
    assert checks[0] > 0
    last = events[-1]
    assert last.checks == sum(each["checks"] for each in last.operations.values())
    # Seven layers in each of four blocks and the head; rows of 12 samples of 16 tokens.
    assert last.operations["linear.forward"]["checks"] == 5 * 12 * 16 * (4 * 7 + 1)
    assert 0 < last.operations["linear.forward"]["detection_point"] < 1e-4
    assert last.operations["embedding.forward"]["detection_point"] is None
    assert last.seconds is not None
    assert last.seconds > 0


def test_kinds_without_a_check_are_said_once(tmp_path: Path) -> None:
    for size, level, expected in ((2, "linear", 1), (1, "full", 0), (1, "light", 0)):
        job = tiny_job(tmp_path, level, *SHORT, f"guard.policy={level}")
        assert train(job, size) == EXIT_DONE
        warned = [event.message for _, event in records(job).of(Warned)]
        about = [message for message in warned if "not guarded" in message]
        assert len(about) == expected
        totals = guard_totals(records(job))
        assert totals is not None
        if level == "linear":
            assert about[0].startswith("9 of 39 modules with parameters are not guarded: LlamaRMS")
            assert (totals.modules, totals.uncovered) == (39, {"LlamaRMSNorm": 9})


def test_the_patterns_of_the_job_count(tmp_path: Path) -> None:
    settings = ("guard.policy=light", "guard.modules={'*.0.mlp.*' = 'linear'}")
    job = tiny_job(tmp_path, "patterns", *SHORT, *settings)
    assert train(job, 1) == EXIT_DONE
    totals = guard_totals(records(job))
    assert totals is not None
    assert totals.operations["linear.forward"].checks == 4 * 12 * 16 * 3
    assert sum(totals.uncovered.values()) == 39 - 3


def test_the_summary_has_a_row_for_the_guard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from outlast.cli.train import print_summary

    job = tiny_job(tmp_path, "summary", *SHORT, "guard.policy=linear")
    assert train_with(job, 1, "linear.dx:bit=30:step=1", "linear.dw:bit=30:step=2") == EXIT_DONE
    capsys.readouterr()
    print_summary(job, run_directory(job), run_directory(job).report)
    shown = " ".join(capsys.readouterr().out.split())
    totals = guard_totals(records(job))
    assert totals is not None
    assert f"guard linear: {totals.checks:,} checks of 30 of 39 modules, 2 corrected; " in shown
    assert "of compute)" in shown
    assert "; checks watched 99." in shown
    assert "% of the gradient and " in shown
    assert ", not model.layers.*.input_layernorm.weight, " in shown
    assert "; at rest 100.0% of the weights; " in shown


def _error_of(job: Job, faults: list[str]) -> tuple[str, str]:
    try:
        _faulty(job, faults)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


PERSISTENT = "linear.saved:bit=29:permanent:step=2:module=*.0.mlp.gate_proj"


@pytest.mark.parametrize(
    "layout", [pytest.param("replicate", marks=pytest.mark.smoke), "shard", "pipeline"]
)
def test_numbers_that_stay_wrong_stop_every_rank(layout: str, tmp_path: Path) -> None:
    settings = (*SHORT, "checkpoint.every_steps=1", f"parallel.{layout}=2")
    settings = (*settings, "parallel.pipeline_microbatches=2")
    job = tiny_job(tmp_path, "persistent", *settings, "guard.policy=linear")
    bad = 0 if layout == "pipeline" else 1
    errors = run_ranks(2, _error_of, job, [f"{PERSISTENT}:rank={bad}"])
    assert [name for name, _ in errors] == ["DataCorruptionError"] * 2
    for _, message in errors:
        assert f"step 3: the numbers of rank {bad} are wrong and stay so" in message
        assert "continue from the newest checkpoint" in message
    events = [each for each in found(job) if each.outcome != "not_finite"]
    assert {(each.step, each.found_on) for each in events} == {(2, bad)}
    [(_, lost)] = read_run(run_directory(job).path).of(MemberLost)
    assert (lost.member, lost.cause) == (f"rank {bad}", "corrupt")
    # Without the defective device the same command continues, from before the wrong values.
    assert train(job, 2) == EXIT_DONE
    plain = tiny_job(tmp_path, "plain", *settings, "guard.policy=off")
    assert train(plain, 2) == EXIT_DONE
    assert_equal_bits(weights(job), weights(plain))


def _error_in_a_group(job: Job, faults: list[str]) -> tuple[str, str]:
    os.environ["OUTLAST_LAUNCH"] = "nproc"
    return _error_of(job, faults)


def test_what_memory_holds_is_not_trusted_after_wrong_numbers(tmp_path: Path) -> None:
    memory = f'recover.memory="{tmp_path}/memory"'
    job = tiny_job(tmp_path, "memory", *SHORT, "guard.policy=linear", memory)
    errors = run_ranks(2, _error_in_a_group, job, [f"{PERSISTENT}:rank=1"])
    assert [name for name, _ in errors] == ["DataCorruptionError"] * 2
    assert (tmp_path / "memory").exists()
    assert list((tmp_path / "memory").rglob("rank-*")) == []


def _outlast(arguments: list[str], faults: list[str]) -> tuple[int, str]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    plain = RunGuard.__init__

    def init(self: RunGuard, *given: Any) -> None:
        plain(self, *given)
        inject(self.guard, parse_faults(faults))

    RunGuard.__init__ = init  # type: ignore[method-assign]
    return command_here(arguments)


def test_the_program_ends_with_a_sentence_and_an_exit_code_of_its_own(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "exit", *SHORT, "guard.policy=linear")
    file = tmp_path / "job.toml"
    file.write_text(to_toml(job))
    [(code, error)] = run_ranks(1, _outlast, ["train", str(file)], [PERSISTENT])
    assert code == EXIT_DATA_CORRUPTION == 4
    assert error.startswith("outlast: step 3: the numbers of rank 0 are wrong and stay so (")
    assert "linear.saved of model.layers.0.mlp.gate_proj" in error
    assert "Traceback" not in error
    assert found(job)


def _struck_in_memory(arguments: list[str], step: int, what: str) -> tuple[int, str]:
    """`outlast`, with a bit that flips once in memory after `step` steps, where no hook looks."""
    struck: list[int] = []
    plain = Trainer.step

    def stepped(self: Trainer, number: int, parts: Any) -> Any:
        result = plain(self, number, parts)
        if number + 1 == step and not struck:
            struck.append(number)
            parameter = self.optimizers[0].param_groups[0]["params"][2]
            state = self.optimizers[0].state[parameter]
            numbers = parameter if what == "weight" else state[what]
            numbers.data.view(-1)[5:6].view(torch.int32).bitwise_xor_(1 << 20)
        return result

    Trainer.step = stepped  # type: ignore[method-assign]
    return _outlast(arguments, [])


@pytest.mark.parametrize(("what", "step"), [("exp_avg_sq", 1), ("weight", 3), ("exp_avg", 4)])
def test_a_run_restarts_by_itself_after_a_memory_fault(
    what: str, step: int, clean: Any, tmp_path: Path
) -> None:
    # Step 3 is one that is saved, and 4 the last: neither may be kept with the fault in it.
    settings = ("checkpoint.every_steps=3", "recover.mode=off")
    job = tiny_job(tmp_path, "memory", *SHORT, "guard.policy=full", *settings)
    file = tmp_path / "job.toml"
    file.write_text(to_toml(job))
    [(code, error)] = run_ranks(1, _struck_in_memory, ["train", str(file)], step, what)
    assert code == EXIT_DONE, error
    # Nothing is kept in memory: it goes back to a checkpoint, or begins again without one.
    back = [event for _, event in records(job).of(StateRecovered)]
    assert [(event.step, event.source) for event in back] == ([(3, "shared")] if step == 4 else [])
    assert ("starting again from it (1 of 3)" in error) == (step != 4)
    assert {each.operation for each in found(job)} == {"rest"}
    assert_equal_bits(weights(job), weights(clean(1)))


def test_a_fault_that_comes_back_stops_the_run(tmp_path: Path) -> None:
    settings = (*SHORT, "guard.policy=linear", "launch.restarts=1")
    job = tiny_job(tmp_path, "again", *settings)
    file = tmp_path / "job.toml"
    file.write_text(to_toml(job))
    [(code, error)] = run_ranks(1, _outlast, ["train", str(file)], [PERSISTENT])
    assert code == EXIT_DATA_CORRUPTION
    assert error.count("the numbers of rank 0 are wrong and stay so") == 2
    assert "starting again from it (1 of 1)" in error


def test_a_rank_whose_numbers_stay_wrong_may_be_left_out(clean: Any, tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "drop", *SHORT, "guard.policy=linear", "guard.persistent=drop")
    assert train_with(job, 2, f"{PERSISTENT}:rank=1") == EXIT_DONE
    assert {(each.step, each.found_on) for each in found(job)} == {(2, 1), (3, 1)}
    assert len(losses(job)) == 4
    # As before until the fault, and as close afterwards as the mean over half of a batch can be.
    assert losses(job)[:2] == losses(clean(2))[:2]
    assert losses(job)[3] != losses(clean(2))[3]
    assert losses(job) == pytest.approx(losses(clean(2)), abs=0.2)


def test_a_single_rank_cannot_be_left_out(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "drop", *SHORT, "guard.policy=linear", "guard.persistent=drop")
    with pytest.raises(RanksFailedError, match="DataCorruptionError: step 3"):
        train_with(job, 1, PERSISTENT)


def test_without_correction_faults_are_recorded_and_stay(clean: Any, tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "watching", *SHORT, "guard.policy=linear", "guard.correct=false")
    assert train_with(job, 1, "linear.dw:stuck=1.0:step=1") == EXIT_DONE
    assert [(each.step, each.outcome) for each in found(job)] == [(1, "detected")]
    assert losses(job)[:2] == losses(clean(1))[:2]
    assert losses(job)[2:] != losses(clean(1))[2:]


@pytest.mark.parametrize("size", [1, 2])
def test_a_resumed_run_ends_in_the_same_bits(size: int, tmp_path: Path) -> None:
    settings = ("guard.policy=full", "data.validation_fraction=0.0")
    whole = tiny_job(tmp_path, "whole", *settings, "guard.policy=off")
    assert train(whole, size) == EXIT_DONE
    stopped = tiny_job(tmp_path, "resumed", *settings, "train.stop_after_steps=3")
    assert train(stopped, size) == EXIT_TO_BE_CONTINUED
    resumed = tiny_job(tmp_path, "resumed", *settings)
    assert train_with(resumed, size, "linear.output:bit=30:step=4") == EXIT_DONE
    assert losses(resumed) == losses(whole)
    assert_equal_bits(weights(resumed), weights(whole))
    assert [(each.step, each.outcome) for each in found(resumed)] == [(4, "corrected")]
    attempts = {record.attempt for record, _ in records(resumed).of(Guarded)}
    assert len(attempts) == 2


def test_without_a_guard_nothing_of_it_is_recorded(
    clean: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from outlast.cli.train import print_summary

    job = clean(1)
    assert records(job).of(Guarded) == []
    assert not [e for _, e in records(job).of(Warned) if "guarded" in e.message]
    capsys.readouterr()
    print_summary(job, run_directory(job), run_directory(job).report)
    assert "guard" not in capsys.readouterr().out
