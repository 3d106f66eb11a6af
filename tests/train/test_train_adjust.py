"""Runs that continue with other settings: longer, with another batch size or learning rate."""

from itertools import pairwise
from pathlib import Path

import pytest
from tiny import assert_equal_bits, losses, tiny_job, train, weights

from outlast.data import samples_until
from outlast.errors import EXIT_DONE, EXIT_TO_BE_CONTINUED, RunError
from outlast.job import Job, adjustable, differences, fingerprint
from outlast.records import SettingsChanged, StepsDone, read_run
from outlast.train.run import check_directory, run_directory

CONSTANT = "schedule.name=constant"
LENGTH = 16


def changes(job: Job) -> list[dict[str, list[object]]]:
    """The recorded changes of settings, start by start: values before and after by name."""
    found = read_run(run_directory(job).path).of(SettingsChanged)
    return [
        {change["name"]: [change["before"], change["after"]] for change in event.changes}
        for _, event in found
    ]


@pytest.mark.smoke
def test_a_finished_run_extended_is_the_longer_run(tmp_path: Path) -> None:
    """With a schedule that does not depend on the length, to the last bit."""
    whole = tiny_job(tmp_path, "whole", "train.steps=8", CONSTANT)
    assert train(whole, 1) == EXIT_DONE
    for steps in (5, 8):
        part = tiny_job(tmp_path, "parts", f"train.steps={steps}", CONSTANT)
        assert train(part, 1) == EXIT_DONE
    assert losses(part) == losses(whole)
    assert_equal_bits(weights(part), weights(whole))
    assert changes(part) == [{"train.steps": [5, 8]}]


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)])
def test_another_batch_size_reads_every_sample_once(tmp_path: Path, sizes: tuple[int, int]) -> None:
    """Batches of 12, then of 8, then of 12: the tokens are those of the steps that were done."""
    plan = [(3, 12), (6, 8), (8, 12)]
    for (steps, batch), size in zip(plan, (*sizes, 1), strict=True):
        stop = f"train.stop_after_steps={0 if steps == 8 else 3}"
        settings = ["train.steps=8", f"train.batch_size={batch}", CONSTANT, stop]
        job = tiny_job(tmp_path, "run", *settings)
        assert train(job, size) == (EXIT_DONE if steps == 8 else EXIT_TO_BE_CONTINUED)
    run = read_run(run_directory(job).path)
    tokens = [0, *(event.tokens for _, event in run.of(StepsDone))]
    taken = [(after - before) // LENGTH for before, after in pairwise(tokens)]
    assert taken == [12] * 3 + [8] * 3 + [12] * 2
    assert [set(change) for change in changes(job)] == [{"train.batch_size"}] * 2
    assert list(run.batch_sizes.values()) == [(0, 12), (3, 8), (6, 12)]


def test_a_changed_run_stopped_and_resumed_is_the_one_that_was_not(tmp_path: Path) -> None:
    """The batch size of an earlier start counts in later ones, too."""
    other = ["train.batch_size=8", "optimizer.learning_rate=0.001", "optimizer.weight_decay=0.3"]
    for name, stops in (("whole", [3, 0]), ("parts", [3, 2, 0])):
        for number, stop in enumerate(stops):
            changed = other if number else []
            after = f"train.stop_after_steps={stop}"
            job = tiny_job(tmp_path, name, "train.steps=9", after, *changed)
            assert train(job, 1) == (EXIT_TO_BE_CONTINUED if stop else EXIT_DONE)
    whole = tiny_job(tmp_path, "whole", "train.steps=9", *other)
    assert losses(job) == losses(whole)
    assert_equal_bits(weights(job), weights(whole))
    assert len(changes(job)) == 1


@pytest.mark.parametrize(
    "change",
    ["optimizer.learning_rate=0.03", "optimizer.weight_decay=5.0", "schedule.name=cosine"],
)
def test_a_changed_constant_takes_effect(tmp_path: Path, change: str) -> None:
    """The checkpoint's own constants do not bring the old ones back."""
    for name, late in (("same", []), ("other", [change])):
        first = tiny_job(tmp_path, name, "train.stop_after_steps=3")
        assert train(first, 1) == EXIT_TO_BE_CONTINUED
        last = tiny_job(tmp_path, name, *late)
        assert train(last, 1) == EXIT_DONE
    same, other = losses(tiny_job(tmp_path, "same")), losses(tiny_job(tmp_path, "other"))
    assert same[:3] == other[:3]
    # The first step after the change still begins from equal weights.
    assert same[3] == other[3]
    assert same[4:] != other[4:]


def test_fewer_steps_than_are_done_are_refused(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "run")
    assert train(job, 1) == EXIT_DONE
    shorter = tiny_job(tmp_path, "run", "train.steps=4")
    with pytest.raises(RunError, match="is less than the 6 steps"):
        check_directory(shorter, run_directory(shorter))


def test_live_groups_keep_their_batch_size(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "run", "train.stop_after_steps=2")
    assert train(job, 1) == EXIT_TO_BE_CONTINUED
    live = tiny_job(tmp_path, "run", "train.batch_size=6", "recover.mode=live", "recover.groups=2")
    with pytest.raises(RunError, match=r"6, 12 samples.*cannot change"):
        check_directory(live, run_directory(live))


def test_what_may_change_is_not_refused_and_still_part_of_the_fingerprint(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "run")
    other = tiny_job(tmp_path, "run", "train.steps=9", "train.batch_size=6", CONSTANT)
    assert differences(job, other) == []
    assert fingerprint(job) != fingerprint(other)
    assert fingerprint(job, adjusted=False) == fingerprint(other, adjusted=False)
    assert differences(job, tiny_job(tmp_path, "run", "run.seed=1")) == ["run.seed: 0 -> 1"]
    assert {"train.steps", "train.batch_size", "schedule.final_fraction"} <= set(adjustable(Job))


@pytest.mark.parametrize(
    ("step", "starts", "samples"),
    [
        (10, [(0, 4)], 40),
        (10, [(0, 4), (6, 8)], 24 + 32),
        (6, [(0, 4), (6, 8)], 24),
        # A start from further back takes the place of the one that was ahead.
        (10, [(0, 4), (6, 8), (3, 2)], 12 + 14),
        (10, [(0, 4), (6, 8), (6, 2), (8, 4)], 24 + 4 + 8),
        # An older version than the last start's was restored.
        (4, [(0, 4), (6, 8)], 16),
        (0, [(0, 4)], 0),
        (5, [], 0),
    ],
)
def test_samples_of_steps_whose_batch_size_has_changed(
    step: int, starts: list[tuple[int, int]], samples: int
) -> None:
    assert samples_until(step, starts) == samples
