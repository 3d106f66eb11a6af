"""Nodes and time limits of links chosen from a queue that squeue and sinfo have printed."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from slurm_programs import in_queue, partition, put_command, put_queue, slurm_commands

from outlast.cluster import choosing
from outlast.cluster.chain import status_of
from outlast.cluster.chain_files import (
    ChainFiles,
    ChainPlan,
    chain_files,
    entries,
    note,
    of_kind,
    read_plan,
    write_plan,
    write_progress,
)
from outlast.cluster.choosing import choose_first, choose_next, submit_chosen
from outlast.cluster.link import Link, run_link
from outlast.errors import EXIT_DONE, ClusterError

HOUR = 3600.0
PLAN = ChainPlan(
    "abc",
    "a",
    "dependent",
    (4,),
    1,
    24 * HOUR,
    "/",
    sys.executable,
    command="exit 0",
    restart_seconds=60.0,
    save_seconds=30.0,
    chooses=True,
    sizes=(2, 4, 8),
)
# Six of ten nodes are busy for 30 h.
BUSY = [in_queue(1, "RUNNING", 6, 30.0)]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChainFiles:
    """A chain of a run; every submission gets the number 9."""
    slurm_commands(tmp_path, monkeypatch)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.chdir(tmp_path)
    put_command(tmp_path, "sbatch", f'echo "$@" >> {tmp_path}/submitted\necho 9')
    found = chain_files(tmp_path / "runs" / "a")
    write_plan(found, PLAN)
    note(found, "created")
    return found


def trained(files: ChainFiles, hours: float) -> None:
    """A link of four nodes has done a step a second, and so many hours of that are left."""
    note(files, "started", job="5", number=1, began=1e9, step=0, nodes=4, processes=4)
    note(files, "ended", job="5", number=1, code=3, step=100, seconds=100.0, verdict="continue")
    write_progress(files, 100, round(hours * HOUR) + 100, None)


def chosen(files: ChainFiles) -> dict[str, Any]:
    """What the journal says of the link that was submitted last."""
    return of_kind(entries(files), "chosen")[-1]


def test_on_an_idle_cluster_a_rigid_job_is_told_to_be_just_one_long_job(
    files: ChainFiles, tmp_path: Path
) -> None:
    put_queue(tmp_path, [], partition(10, 10))
    plan = replace(PLAN, sizes=())
    found = choose_first(files, plan, 1, seconds=10 * HOUR)
    assert found.plan.reason.startswith("just submit one long job, 4 nodes for 11")
    # A tenth more than the work and the start need.
    assert found.plan.limit_seconds == pytest.approx(11.1 * HOUR, rel=0.01)
    assert found.plan.nodes == (4,)
    short = choose_first(files, replace(plan, link_seconds=2 * HOUR), 1, seconds=10 * HOUR)
    assert short.plan.limit_seconds == 2 * HOUR, "a link that ends by itself needs no more"
    submit_chosen(files, found, 1)
    entry = chosen(files)
    assert (entry["job"], entry["nodes"], entry["waits"]) == ("9", 4, [0.0] * 4)
    script = files.script(1).read_text()
    assert "# Chosen: just submit one long job" in script
    assert "#SBATCH --nodes=4\n" in script
    assert script.splitlines()[-1].endswith(f" {files.path} 1 link 4 {found.plan.limit_seconds:g}")


def test_nodes_that_are_free_beat_more_nodes_much_later(files: ChainFiles, tmp_path: Path) -> None:
    put_queue(tmp_path, BUSY, partition(10, 4))
    found = choose_first(files, replace(PLAN, nodes=(8,)), 1, seconds=5 * HOUR)
    assert found.plan.nodes == (4,)
    assert "4 nodes for" in found.plan.reason
    assert "one long job on 8 nodes" in found.plan.reason
    assert found.forecast is not None
    assert found.forecast.certain
    more = choose_first(files, replace(PLAN, nodes=(8,)), 1, seconds=200 * HOUR)
    assert more.plan.nodes == (8,), "for so much work the wait pays"


def test_the_next_link_is_chosen_for_what_the_running_one_leaves(
    files: ChainFiles, tmp_path: Path
) -> None:
    trained(files, hours=40.0)
    running = in_queue(7, "RUNNING", 4, 10.0)
    put_queue(tmp_path, [in_queue(1, "RUNNING", 6, 400.0), running], partition(10, 0, "1-00:00:00"))
    link = PLAN.shaped(4, 10 * HOUR)
    found = choose_next(files, link, 2, "7")
    # Four nodes are free when the link ends, and the other six long after it; 30 h are left then.
    assert found.plan.nodes == (4,)
    assert found.forecast is not None
    assert found.forecast.certain
    assert "as soon as the job before it ends" in found.plan.reason
    assert found.plan.limit_seconds == 24 * HOUR
    submit_chosen(files, found, 2, after="7")
    assert "--dependency=afterany:7" in (tmp_path / "submitted").read_text()
    assert chosen(files)["after"] == "7"


def test_a_link_that_will_do_all_that_is_left_has_a_follower_as_it_is(
    files: ChainFiles, tmp_path: Path
) -> None:
    trained(files, hours=5.0)
    put_queue(tmp_path, [in_queue(7, "RUNNING", 4, 10.0)], partition(10, 6))
    found = choose_next(files, PLAN.shaped(4, 10 * HOUR), 2, "7")
    assert (found.plan.nodes, found.plan.limit_seconds) == ((4,), 10 * HOUR)
    shape = "4 node(s) for 10:00:00"
    assert (
        found.plan.reason == f"{shape}, as the link before: that is expected to do all that is left"
    )


def test_what_was_said_to_be_left_counts_until_a_step_is_measured(
    files: ChainFiles, tmp_path: Path
) -> None:
    put_queue(tmp_path, [in_queue(7, "RUNNING", 4, 2.0)], partition(10, 6, "1-00:00:00"))
    link = PLAN.shaped(4, 2 * HOUR)
    unknown = choose_next(files, link, 2, "7")
    assert (
        "no step is measured yet, so this is for as much work as the longest" in unknown.plan.reason
    )
    write_plan(files, replace(PLAN, work_seconds=5 * HOUR, sizes=(4,)))
    said = choose_next(files, link, 2, "7")
    # The running link does almost two of the five hours.
    assert said.plan.limit_seconds == pytest.approx(1.1 * 3.1 * HOUR, rel=0.05)
    write_plan(files, replace(PLAN, work_seconds=HOUR, sizes=(4,)))
    assert "expected to do all that is left" in choose_next(files, link, 2, "7").plan.reason
    trained(files, hours=40.0)
    assert choose_next(files, link, 2, "7").plan.limit_seconds == 24 * HOUR


@pytest.mark.parametrize("command", ["sinfo", "squeue"])
def test_a_later_link_goes_on_as_before_where_slurm_says_nothing(
    files: ChainFiles, tmp_path: Path, command: str
) -> None:
    put_queue(tmp_path, BUSY, partition(10, 4))
    put_command(tmp_path, command, f"echo '{command}: error: Access denied' >&2; exit 1")
    running = Link(files, PLAN.shaped(2, 3 * HOUR), 1, "7")
    job, problem = running._next_job.submit()
    assert (job, problem) == ("9", "")
    entry = chosen(files)
    assert (entry["nodes"], entry["wall_seconds"], entry.get("waits")) == (2, 3 * HOUR, None)
    shape = "2 node(s) for 03:00:00"
    assert entry["reason"].startswith(f"{shape}, as the link before: nothing can be chosen now")
    script = files.script(2).read_text()
    assert script.splitlines()[-1].endswith(f" {files.path} 2 link 2 {3 * HOUR:g}")
    assert "#SBATCH --time=03:00:00\n" in script


def test_a_later_link_goes_on_as_before_whatever_goes_wrong(
    files: ChainFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_queue(tmp_path, BUSY, partition(10, 4))

    def damaged(*given: object, **about: object) -> None:
        raise ZeroDivisionError("a queue that nobody has thought of")

    monkeypatch.setattr(choosing, "choose_now", damaged)
    assert Link(files, PLAN.shaped(2, 3 * HOUR), 1, "7")._next_job.submit() == ("9", "")
    entry = chosen(files)
    assert (entry["nodes"], entry["wall_seconds"]) == (2, 3 * HOUR)
    assert "ZeroDivisionError: a queue that nobody has thought of" in entry["reason"]


def test_what_was_said_for_the_first_nodes_takes_longer_on_fewer(
    files: ChainFiles, tmp_path: Path
) -> None:
    """Links of other nodes without a choice of sizes, before any step is measured."""
    put_queue(tmp_path, [in_queue(7, "RUNNING", 4, 2.0)], partition(10, 6, "1-00:00:00"))
    write_plan(files, replace(PLAN, nodes=(4, 1), sizes=(), work_seconds=5 * HOUR))
    found = choose_next(files, PLAN.shaped(4, 2 * HOUR), 2, "7")
    assert found.plan.nodes == (1,)
    # The running link does almost two of the five hours.
    left = 3.1 * 4**0.9 * HOUR
    assert found.plan.limit_seconds == pytest.approx(1.1 * left, rel=0.05)


def test_the_first_link_is_refused_where_slurm_says_nothing(
    files: ChainFiles, tmp_path: Path
) -> None:
    put_queue(tmp_path, [], partition(10, 10))
    put_command(tmp_path, "squeue", "echo 'squeue: error: Access denied' >&2; exit 1")
    with pytest.raises(ClusterError, match=r'"auto" finds nothing .*Access denied; or give a time'):
        choose_first(files, PLAN, 1)


@pytest.mark.slow
def test_a_link_with_a_shape_of_its_own_is_that_shape(
    files: ChainFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan in the file stays that of the chain, from which the next one is chosen."""
    # However slow the machine is at choosing.
    monkeypatch.setattr("outlast.cluster.link._JOIN_SECONDS", 600.0)
    put_queue(tmp_path, [in_queue(7, "RUNNING", 2, 1.0)], partition(10, 8))
    assert run_link(files, 1, (2, HOUR)) == EXIT_DONE
    started = of_kind(entries(files), "started")
    assert [(each["nodes"], each["processes"]) for each in started] == [(2, 2)]
    assert read_plan(files) == PLAN
    assert chosen(files)["number"] == 2


def test_no_filler_is_promised_to_a_link_that_waits_for_another(
    files: ChainFiles, tmp_path: Path
) -> None:
    trained(files, hours=40.0)
    write_plan(files, replace(PLAN, filler_nodes=(2,), sizes=(8,)))
    line = in_queue(7, "RUNNING", 4, 2.0)
    put_queue(tmp_path, [*BUSY, line], partition(10, 0))
    found = choose_next(files, PLAN.shaped(4, 2 * HOUR), 2, "7")
    assert found.forecast is not None
    assert found.forecast.p10_seconds > HOUR
    assert "after the end of the job before it" in found.plan.reason
    assert "filler" not in found.plan.reason


def test_status_says_what_was_chosen_and_what_was_predicted(
    files: ChainFiles, tmp_path: Path
) -> None:
    write_plan(files, PLAN)
    put_queue(tmp_path, BUSY, partition(10, 4))
    submit_chosen(files, choose_first(files, replace(PLAN, sizes=(8,)), 1, seconds=HOUR), 1)
    found = status_of(files)
    assert found.chosen.startswith("link 1, job 9: ")
    assert "8 nodes for" in found.chosen
    note(files, "started", job="9", number=1, began=time.time() + 60.0, step=0, nodes=8)
    (link,) = status_of(files).links
    assert link.predicted_wait_seconds is not None
    low, high = link.predicted_wait_seconds
    assert 0.0 < low < high <= 30 * HOUR
    # A filler, or a link that was given as it is, has not been chosen.
    note(files, "submitted", job="10", number=1, role="filler")
    assert status_of(files).chosen
    note(files, "submitted", job="11", number=2)
    assert status_of(files).chosen == ""


def test_a_long_queue_is_simulated_with_easy_backfill(files: ChainFiles, tmp_path: Path) -> None:
    """All reservations of a thousand jobs would take minutes."""
    lines = [in_queue(10 + each, "PENDING", 1 + each % 3, 1.0) for each in range(1000)]
    put_queue(tmp_path, [*BUSY, *lines], partition(10, 4))
    found = choose_first(files, replace(PLAN, sizes=(4,)), 1, seconds=HOUR)
    assert found.forecast is not None
    assert found.forecast.p10_seconds > 24 * HOUR
    assert len(found.forecast.wait_seconds) == 8


def test_recent_accounting_says_when_jobs_really_end(files: ChainFiles, tmp_path: Path) -> None:
    """Users who ask for ten times what they use; without accounting they are taken to use half."""
    put_queue(tmp_path, BUSY, partition(10, 4))
    plan = replace(PLAN, nodes=(8,), sizes=(8,))
    assumed = choose_first(files, plan, 1, seconds=HOUR).forecast
    heads = "JobID|Submit|Start|End|ElapsedRaw|TimelimitRaw|NNodes|State"
    rows = [f"{each}|{each}|{each}|{each + 360}|360|60|1|COMPLETED" for each in range(1, 61)]
    (tmp_path / "accounting").write_text("\n".join([heads, *rows]) + "\n")
    put_command(tmp_path, "sacct", f'echo "$@" >> {tmp_path}/asked; cat {tmp_path}/accounting')
    learnt = choose_first(files, plan, 1, seconds=HOUR).forecast
    assert assumed is not None
    assert learnt is not None
    assert learnt.p50_seconds == pytest.approx(0.1 * 30 * HOUR, rel=0.1)
    assert assumed.p50_seconds > 3.0 * learnt.p50_seconds
    assert "--partition=batch --format=JobID,Submit,Start,End" in (tmp_path / "asked").read_text()
    put_command(tmp_path, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    without = choose_first(files, plan, 1, seconds=HOUR).forecast
    assert without is not None
    assert without.p50_seconds == pytest.approx(assumed.p50_seconds)
