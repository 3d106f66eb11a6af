"""How fast the copies of a run may be: what the job asks for, and what the trainer makes of it."""

from __future__ import annotations

import os
import pickle
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from tiny import tiny_job

from outlast.cluster.transfers import gentle_pace, transfers_for
from outlast.errors import EXIT_DONE, OutlastError
from outlast.records import CheckpointCopied, Warned, read_run
from outlast.train.ranks import ranks_from
from outlast.train.run import Start, run_directory, work


def tiers(folder, *overrides):
    return (
        f'checkpoint.fast="{folder / "fast"}"',
        f'checkpoint.mirror="{folder / "mirror"}"',
        "checkpoint.drain_every=1",
        "checkpoint.mirror_every=1",
        *overrides,
    )


def train(job, transfers=None):
    assert work(Start(job, transfers=transfers), ranks_from(os.environ)) == EXIT_DONE
    return [event for _, event in read_run(run_directory(job).path).of(CheckpointCopied)]


def test_without_back_off_copies_have_their_caps_alone(tmp_path):
    assert transfers_for(tiny_job(tmp_path, "plain", *tiers(tmp_path))) is None


def test_copies_that_make_way_start_below_their_limits(tmp_path):
    job = tiny_job(
        tmp_path,
        "gentle",
        *tiers(tmp_path, "checkpoint.back_off=true"),
        "checkpoint.drain_megabytes_per_s=80",
        "checkpoint.mirror_megabytes_per_s=0.5",
    )
    copies = pickle.loads(pickle.dumps(transfers_for(job)))
    with copies.tier("run")(2) as first, copies.tier("mirror")(2) as mirror:
        assert first.bytes_per_s == 40e6
        assert mirror.bytes_per_s == 0.25e6


def test_what_one_copy_has_learnt_the_next_one_knows(tmp_path):
    job = tiny_job(
        tmp_path,
        "gentle",
        f'checkpoint.mirror="{tmp_path / "mirror"}"',
        "checkpoint.mirror_megabytes_per_s=8",
        "checkpoint.back_off=true",
    )
    copies = transfers_for(job)
    assert copies.tier("run") is None
    pacing = copies.tier("mirror")
    with pacing(2) as first, pacing(4) as second:
        assert first is second


@pytest.mark.parametrize("most", [1e3, 1e6, 1e9])
def test_a_gentle_pace_never_stops(most):
    pace = gentle_pace(most)
    assert 0 < pace.bytes_per_s <= most


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["checkpoint.back_off=true"], "has no copies to slow down"),
        (["checkpoint.mirror=/tmp/x", "checkpoint.back_off=true"], "mirror_megabytes_per_s"),
        (["checkpoint.fast=/dev/shm/x", "checkpoint.back_off=true"], "drain_megabytes_per_s"),
    ],
)
def test_back_off_without_copies_or_limits_is_refused(tmp_path, overrides, said):
    with pytest.raises(OutlastError, match=said):
        tiny_job(tmp_path, "wrong", *overrides)


@dataclass
class Noting:
    """A pacing that lets everything pass, and notes what."""

    taken: dict = field(default_factory=dict)
    block_bytes: int = 1 << 20

    def tier(self, name):
        @contextmanager
        def pacing(step):
            pace = Noting(self.taken)
            pace.take = lambda size: self.taken.update(
                {(name, step): self.taken.get((name, step), 0) + size}
            )
            yield pace

        return pacing


def test_every_copy_is_paced_and_written_down(tmp_path):
    job = tiny_job(tmp_path, "noted", *tiers(tmp_path))
    noting = Noting()
    copied = train(job, noting)
    # A copy is left out where a newer one comes first; the last one is always made.
    assert {event.step for event in copied} <= {2, 4, 6}
    assert max(event.step for event in copied) == 6
    assert {each[0] for each in noting.taken} == {"run", "mirror"}
    for event in copied:
        name = "mirror" if "mirror" in event.place else "run"
        assert noting.taken[name, event.step] == event.bytes > 0


def test_the_limits_of_tiers_are_kept(tmp_path):
    job = tiny_job(
        tmp_path,
        "slow",
        *tiers(tmp_path),
        "checkpoint.drain_megabytes_per_s=1.6",
        "checkpoint.mirror_megabytes_per_s=0.8",
    )
    for event in train(job):
        rate = 0.8e6 if "mirror" in event.place else 1.6e6
        assert event.seconds >= 0.9 * event.bytes / rate


def test_gentle_copies_arrive(tmp_path):
    job = tiny_job(
        tmp_path,
        "gentle",
        *tiers(tmp_path, "checkpoint.back_off=true"),
        "checkpoint.drain_megabytes_per_s=50",
        "checkpoint.mirror_megabytes_per_s=50",
    )
    places = {event.place for event in train(job, transfers_for(job)) if event.step == 6}
    assert len(places) == 2


def test_a_copy_that_fails_is_a_warning(tmp_path):
    (tmp_path / "mirror").write_text("no folder")
    job = tiny_job(tmp_path, "failing", f'checkpoint.mirror="{tmp_path / "mirror"}"')
    assert not train(job)
    said = [event.message for _, event in read_run(run_directory(job).path).of(Warned)]
    assert any("mirror" in each for each in said)
