"""How fast the copies of a run may be: what the job asks for, and what the trainer makes of it."""

from __future__ import annotations

import os
import pickle
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from runs import finish, start_process
from tiny import tiny_job

from outlast.cli.train import run_job
from outlast.cluster import transfers
from outlast.cluster.staging import stager_for
from outlast.cluster.transfers import transfers_for
from outlast.distributed.ranks import ranks_from
from outlast.errors import EXIT_DONE, OutlastError
from outlast.records import CheckpointCopied, Warned, read_run
from outlast.train.run import Start, run_directory, work


def tiers(folder, *overrides):
    return (
        f'checkpoint.fast="{folder / "fast"}"',
        f'checkpoint.mirror="{folder / "mirror"}"',
        "checkpoint.drain_every=1",
        "checkpoint.mirror_every=1",
        *overrides,
    )


def of(job, processes=1, nodes=1):
    return transfers_for(job, processes=processes, nodes=nodes)


def train(job, transfers=None):
    assert work(Start(job, transfers=transfers), ranks_from(os.environ)) == EXIT_DONE
    return [event for _, event in read_run(run_directory(job).path).of(CheckpointCopied)]


def test_without_back_off_copies_have_their_caps_alone(tmp_path):
    assert of(tiny_job(tmp_path, "plain", *tiers(tmp_path))) is None


def test_copies_that_make_way_start_below_their_limits(tmp_path):
    job = tiny_job(
        tmp_path,
        "gentle",
        *tiers(tmp_path, "checkpoint.back_off=true"),
        "checkpoint.drain_megabytes_per_s=80",
        "checkpoint.mirror_megabytes_per_s=0.5",
    )
    pacings = pickle.loads(pickle.dumps(of(job))).tiers()
    with pacings["run"](2) as first, pacings["mirror"](2) as mirror:
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
    pacings = of(job).tiers()
    assert "run" not in pacings
    pacing = pacings["mirror"]
    with pacing(2) as first, pacing(4) as second:
        assert first is second


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

    def tiers(self):
        return {name: self.pacing(name) for name in ("run", "mirror")}

    def pacing(self, name):
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


@pytest.mark.slow
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
    places = {event.place for event in train(job, of(job)) if event.step == 6}
    assert len(places) == 2


def test_a_copy_that_fails_is_a_warning(tmp_path):
    (tmp_path / "mirror").write_text("no folder")
    job = tiny_job(tmp_path, "failing", f'checkpoint.mirror="{tmp_path / "mirror"}"')
    assert not train(job)
    said = [event.message for _, event in read_run(run_directory(job).path).of(Warned)]
    assert any("mirror" in each for each in said)


RUN = """
[run]
steps = 6
step_seconds = 1.0
nodes = 1
save_bytes = 4e6
save_every_steps = 2
save_via = ["disk"]
stage_in_bytes = 8e6
stage_via = ["pfs"]

[bytes_per_s]
disk = 1e9
pfs = 2e6

[[tier]]
name = "run"
via = ["disk", "pfs"]

[[tier]]
name = "mirror"
via = ["pfs"]
cap_bytes_per_s = 1e6
"""


def planned(folder, name, *overrides, plan=RUN):
    (folder / "plan.toml").write_text(plan)
    given = f'checkpoint.transfer_plan="{folder / "plan.toml"}"'
    return tiny_job(folder, name, *tiers(folder, given), *overrides)


def test_copies_of_a_plan_share_its_bandwidth_in_its_order(tmp_path):
    copies = pickle.loads(pickle.dumps(of(planned(tmp_path, "shared"), processes=4, nodes=2)))
    pacings = copies.tiers()
    first, later = sorted([("run", 4), ("mirror", 2)], key=lambda each: copies.copy(*each).level)
    with pacings[later[0]](later[1]) as alone:
        most = copies.copy(*later).cap_bytes_per_s
        assert alone.bytes_per_s == most / 4
        with pacings[first[0]](first[1]) as other:
            own = copies.copy(*first).cap_bytes_per_s
            # Who comes first in the plan takes what it can, and the other what is left.
            assert other.bytes_per_s == own / 4
            assert alone.bytes_per_s == max(2e6 - own, 0.01 * most) / 4
        assert alone.bytes_per_s == most / 4


def test_a_save_that_was_not_planned_has_the_place_of_the_nearest(tmp_path):
    plan = of(planned(tmp_path, "nearest"))
    assert sorted(plan.copies["run"]) == [2, 4, 6]
    assert plan.copy("run", 5) == plan.copy("run", 4)
    assert plan.copy("run", 99) == plan.copy("run", 6)
    with pytest.raises(OutlastError, match='tier named "tape"'):
        plan.copy("tape", 2)


@pytest.mark.slow
def test_each_node_stages_its_share_of_the_plan(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(500_000))
    place = (f'staging.directory="{tmp_path / "node"}"', "staging.keep_free_gigabytes=0.0")
    job = planned(tmp_path, "staged", *place)
    copies = of(job, nodes=4)
    assert copies.stage_bytes_per_s == 0.5e6
    copy = stager_for(job.staging, copies.stage_bytes_per_s)(str(tmp_path / "a.bin"))
    assert copy.bytes == 500_000
    assert copy.seconds >= 0.8


@pytest.mark.slow
def test_a_run_follows_its_plan(tmp_path):
    job = planned(tmp_path, "followed")
    copied = train(job, of(job))
    assert max(event.step for event in copied) == 6
    for event in copied:
        cap = 1e6 if "mirror" in event.place else 2e6
        assert event.seconds >= 0.8 * event.bytes / cap


@pytest.mark.distributed
def test_the_command_follows_the_plan_on_several_processes(tmp_path):
    job = planned(tmp_path, "command", "launch.nproc=2")
    code, output = finish(start_process(job, tmp_path))
    assert code == EXIT_DONE, output
    copied = [event for _, event in read_run(run_directory(job).path).of(CheckpointCopied)]
    assert {"mirror" in event.place for event in copied if event.step == 6} == {True, False}
    for event in copied:
        # Rank 0's own part, at half of the bandwidth: never faster, however slow the machine.
        cap = 0.5e6 if "mirror" in event.place else 1e6
        assert event.seconds >= 0.8 * event.bytes / cap


@pytest.mark.parametrize(("settings", "parts"), [([], 2), (['recover.mode="live"'], 1)])
def test_processes_that_copy_together_share_the_bandwidth(tmp_path, monkeypatch, settings, parts):
    class AskedError(Exception):
        """Enough of the command has run."""

    asked = []

    def noting(job, **about):
        asked.append(about)
        raise AskedError

    monkeypatch.setattr(transfers, "transfers_for", noting)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(AskedError):
        run_job(planned(tmp_path, "shared", "launch.nproc=2", *settings), fresh=False)
    assert asked == [{"processes": parts, "nodes": 1}]


@pytest.mark.parametrize(
    ("plan", "overrides", "said"),
    [
        (None, [], "cannot be read"),
        ("[run", [], "no TOML file"),
        ("[nodes]", [], r"has no \[run\]"),
        (RUN.replace('"mirror"', '"tape"'), [], 'no copies to a tier named "mirror"'),
        (RUN.replace("save_bytes = 4e6", ""), [], 'no copies to a tier named "run"'),
        (RUN, ["train.steps=8"], r"is for 6 steps, but train.steps = 8; make them equal"),
        (RUN, ["checkpoint.drain_every=3"], r"drain_every = 3; make them equal"),
        (RUN, ["checkpoint.every_steps=5"], r"every_steps = 5; make them equal"),
        (
            RUN.replace("stage_in_bytes = 8e6", ""),
            ["staging.directory=/dev/shm/x"],
            "add stage_in_bytes",
        ),
    ],
)
def test_a_plan_of_another_run_is_refused(tmp_path, plan, overrides, said):
    job = planned(tmp_path, "other", *overrides, plan=plan or "")
    if plan is None:
        (tmp_path / "plan.toml").unlink()
    with pytest.raises(OutlastError, match=said):
        of(job)


def test_an_interval_that_follows_the_run_fits_any_plan(tmp_path):
    assert of(planned(tmp_path, "auto", "checkpoint.every_steps=auto")) is not None


def test_a_plan_and_back_off_are_not_combined(tmp_path):
    limits = ("checkpoint.drain_megabytes_per_s=9", "checkpoint.mirror_megabytes_per_s=9")
    with pytest.raises(OutlastError, match="leave one of them out"):
        planned(tmp_path, "both", "checkpoint.back_off=true", *limits)
