"""A loop of DeepSpeed's under `Run`: killed, stopped, guarded, measured, on fewer ranks."""

import functools
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="deepspeed (the extra integrations) is not installed")

import deepspeed_training as training
import torch
import torch.distributed as dist
from deepspeed_training import built  # noqa: F401  (a fixture)
from energy_counter import Counter
from forked import run_ranks, torchrun

from outlast.errors import DataCorruptionError, IntegrationError, OutlastError
from outlast.guard.inject import inject, parse_faults
from outlast.integrations.deepspeed import Run
from outlast.records import (
    AttemptStarted,
    CheckpointRestored,
    CheckpointSaved,
    CorruptionDetected,
    EnergyMeasured,
    Guarded,
    StateRecovered,
    StopRequested,
    Warned,
    read_run,
)
from outlast.report import write_report

pytestmark = pytest.mark.distributed

STEPS = 2 * training.STEPS


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Directory of a run that nobody stops."""
    place = tmp_path_factory.mktemp("whole")
    assert run_ranks(2, training.run, str(place), 1) == [0, 0]
    return place


def events(place, kind):
    return [event for _, event in read_run(place / "r").of(kind)]


@pytest.mark.supports("deepspeed", "checkpoint", "resume", "records", "chain")
def test_killed_and_stopped_it_ends_as_if_it_had_not_been(whole, tmp_path):
    run_ranks(2, training.run, str(tmp_path), 1, (), 0, 7, may_die=(0, 1))
    assert run_ranks(2, training.run, str(tmp_path), 1, (), 15) == [3, 3]
    assert run_ranks(2, training.run, str(tmp_path), 1) == [0, 0]
    assert training.losses(tmp_path) == training.losses(whole)
    run = read_run(tmp_path / "r")
    assert [each.outcome for each in run.attempts] == ["died", "to_be_continued", "completed"]
    started = events(tmp_path, AttemptStarted)[0]
    assert (started.samples_per_step, started.total_steps) == (training.BATCH, STEPS)
    assert started.versions["deepspeed"].startswith("0.19.")
    assert started.data == {"framework": "deepspeed"}
    assert events(tmp_path, StopRequested)[0].reason == "a signal to another rank"
    assert events(tmp_path, CheckpointSaved)[-1].step == STEPS
    write_report([tmp_path / "r"], tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size > 10_000


SCRIPT = f"""
import functools
import sys

sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
import deepspeed_training as training

place, step, *settings = sys.argv[1:]
sys.exit(training.run(place, 1, settings, during=functools.partial(training.kill, int(step))))
"""


@pytest.mark.supports("deepspeed", "recover", "resume")
def test_a_rank_that_is_killed_under_torchrun_costs_one_step_at_most_and_no_bit(whole, tmp_path):
    script, place = tmp_path / "train.py", tmp_path / "killed"
    script.write_text(SCRIPT)
    place.mkdir()
    done = torchrun(
        tmp_path / "output",
        "--nproc-per-node=2",
        "--max-restarts=2",
        script,
        str(place),
        "11",
        f"recover.memory={place}/memory",
    )
    assert done.code == 0, done.said
    assert training.losses(place) == training.losses(whole)
    for rank in range(2):
        weights, expected = (
            torch.load(each / f"weights{rank}.pt", weights_only=True) for each in (place, whole)
        )
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
    (recovered,) = events(place, StateRecovered)
    assert recovered.source == "memory"
    # Ten steps were done; a group that is ended may not come to keep the last of them.
    assert recovered.step in (9, 10)
    assert events(place, CheckpointRestored) == []
    assert not list((place / "memory").rglob("rank-*"))


@pytest.mark.supports("deepspeed", "recover", "malleable")
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_what_is_in_memory_is_gone_on_with_by_other_ranks(before, after, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    memory = (f"recover.memory={tmp_path}/memory", "log.every_steps=1")
    kill = functools.partial(training.kill, 8)
    run_ranks(before, _lost, str(tmp_path), memory, kill, may_die=(before - 1,))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run_ranks(after, training.run, str(tmp_path), 2, memory) == [0] * after
    (recovered,) = events(tmp_path, StateRecovered)
    assert recovered.step in (6, 7)
    assert events(tmp_path, CheckpointRestored) == []
    done = [line.split() for line in (tmp_path / "losses").read_text().splitlines()]
    assert int(done[-1][0]) == STEPS


def _lost(place, settings, kill):
    """A run that ends with its last rank."""
    with pytest.raises((RuntimeError, OutlastError)):
        training.run(place, 2, settings, during=kill)


@pytest.mark.supports("deepspeed", "malleable")
@pytest.mark.parametrize(("before", "after", "stage"), [(2, 1, 2), (1, 2, 1), (2, 1, 0)])
def test_it_goes_on_with_another_number_of_ranks(before, after, stage, tmp_path):
    run_ranks(before, training.run, str(tmp_path), stage, (), 0, 7, may_die=(0, 1))
    assert run_ranks(after, training.run, str(tmp_path), stage) == [0] * after
    assert events(tmp_path, CheckpointRestored)[0].step == 4
    # What was saved before by other ranks is not saved any more.
    assert run_ranks(after, training.run, str(tmp_path), stage) == [0] * after
    assert events(tmp_path, CheckpointRestored)[1].step == STEPS
    done = [int(line.split()[0]) for line in (tmp_path / "losses").read_text().splitlines()]
    assert done[-1] == STEPS


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_damaged_version_leads_to_one_of_another_number_of_ranks(before, after, tmp_path):
    place = str(tmp_path)
    keep = ("checkpoint.keep=9",)
    run_ranks(before, training.run, place, 2, keep, 0, 7, may_die=(0, 1))
    run_ranks(after, training.run, place, 2, keep, 0, 11, may_die=(0, 1))
    newest = sorted((tmp_path / "r" / "checkpoints").glob("*/version.json"))[-1].parent
    for pack in newest.glob("*.pack"):
        content = bytearray(pack.read_bytes())
        content[len(content) // 4 : len(content) // 2] = bytes(
            len(content) // 2 - len(content) // 4
        )
        pack.write_bytes(content)
    run_ranks(after, training.run, place, 2, keep)
    # The first was of a fresh start, the others of the ranks that the version has.
    assert [each.step for each in events(tmp_path, CheckpointRestored)] == [4, 4]
    again, once = (
        [line.split()[1] for line in (tmp_path / "losses").read_text().splitlines()][start:][:3]
        for start in (7, 14)
    )
    assert again == once


def test_deepspeeds_own_loader_is_gone_on_with(tmp_path):
    run = functools.partial(training.run, own_loader=True)
    (tmp_path / "whole").mkdir()
    assert run_ranks(2, run, str(tmp_path / "whole"), 1) == [0, 0]
    run_ranks(2, run, str(tmp_path), 1, (), 0, 15, may_die=(0, 1))
    assert run_ranks(2, run, str(tmp_path), 1) == [0, 0]
    assert training.losses(tmp_path) == training.losses(tmp_path / "whole")
    assert max(training.losses(tmp_path)) == STEPS


def test_nothing_is_saved_in_the_middle_of_an_accumulation(tmp_path):
    every = ("checkpoint.every_steps=3",)
    assert run_ranks(2, training.run, str(tmp_path), 1, every, 0, 0, None, 2) == [0, 0]
    saved = [each.step for each in events(tmp_path, CheckpointSaved)]
    assert saved[-1] == STEPS
    assert len(saved) > 4
    assert all(step % 2 == 0 for step in saved)


def _spoil(fault, run, engine):
    if run.step == 0:
        inject(run.guard, parse_faults([fault]), rank=dist.get_rank())


GUARD = ("guard.policy=linear",)


@pytest.mark.supports("deepspeed", "guard")
def test_wrong_numbers_are_put_right_and_told(whole, tmp_path):
    during = functools.partial(_spoil, "linear.output:module=0:bit=27:step=4")
    assert run_ranks(2, training.run, str(tmp_path), 1, GUARD, 0, 0, during) == [0, 0]
    assert training.losses(tmp_path) == training.losses(whole)
    (found,) = events(tmp_path, CorruptionDetected)
    assert (found.step, found.module, found.outcome) == (4, "0", "corrected")
    assert events(tmp_path, Guarded)[-1].checks > 6 * STEPS


def _refused(place):
    during = functools.partial(_spoil, "linear.output:module=0:bit=27:permanent:step=4:rank=1")
    with pytest.raises(DataCorruptionError) as error:
        training.run(place, 1, GUARD, during=during)
    return str(error.value)


@pytest.mark.supports("deepspeed", "guard")
def test_numbers_that_stay_wrong_end_the_run_on_all_ranks_before_the_update(whole, tmp_path):
    for sentence in run_ranks(2, _refused, str(tmp_path)):
        assert sentence.startswith("step 5: the numbers of rank 1 are wrong and stay so")
    found = training.losses(tmp_path)
    expected = training.losses(whole)
    assert {step: found[step] for step in range(1, 5)} == {
        step: expected[step] for step in range(1, 5)
    }
    assert read_run(tmp_path / "r").attempts[0].outcome == "failed"


class Meter:
    """Counts on as the run goes."""

    def __init__(self, path):
        self.counter = Counter(path)

    def __call__(self, run, engine):
        if dist.get_rank() == 0:
            self.counter.add(2.0)


@pytest.mark.supports("deepspeed", "energy")
def test_energy_is_measured_and_the_default_guard_says_what_it_leaves_out(tmp_path):
    meter = Meter(tmp_path / "joules")
    settings = (
        f"energy.sources=['file:{tmp_path / 'joules'}']",
        "energy.every_steps=1",
        "log.every_steps=1",
        "guard.policy=light",
    )
    assert run_ranks(1, training.run, str(tmp_path), 2, settings, 0, 0, meter) == [0]
    joules = [
        device["joules"]
        for event in events(tmp_path, EnergyMeasured)
        for device in event.devices
        if "joules" in device
    ]
    assert sum(joules) == pytest.approx(2.0 * STEPS, rel=0.2)
    told = [each.message for each in events(tmp_path, Warned)]
    assert any("nothing is checked" in each for each in told)


def _refuse_stage_three(place):
    training.begin()
    engine = training.engine_of(3)
    with pytest.raises(IntegrationError) as error:
        Run(engine=engine, loader=[])
    spread = training.engine_of(1)
    # As DeepSpeed's layer of experts says it.
    spread.module[0].ep_size = 2
    with pytest.raises(IntegrationError, match="spreads experts over 2 ranks"):
        Run(engine=spread, loader=[])
    return str(error.value)


def test_other_engines_are_refused(tmp_path):
    (sentence,) = run_ranks(1, _refuse_stage_three, str(tmp_path))
    assert sentence.startswith("zero_optimization.stage = 3 partitions the weights")
    with pytest.raises(IntegrationError, match="give the first thing that"):
        Run(engine=object(), loader=[])
