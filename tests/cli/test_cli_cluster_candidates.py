"""What ``outlast cluster plan`` predicts on a queue that squeue and sinfo have printed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outlast.cli.cluster import candidates_now, sizes_of
from outlast.cluster.planning import Costs, plan_chain, site_now
from outlast.cluster.policies.automatic import Choice
from outlast.cluster.simulate import Simulation
from outlast.cluster.workload import Workload, lublin, read_sacct
from outlast.job import load_job

HOUR = 3600.0
COSTS = Costs(restart_seconds=60.0, save_seconds=30.0, lead_seconds=40.0, measured=False)


def queue_line(number: int, state: str, nodes: int, hours: int, priority: int) -> str:
    limit = f"{hours}:00:00"
    fields = [number, state, nodes, limit, "N/A", "N/A", "N/A", priority, "", ""]
    return "\x1f".join(map(str, fields))


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of eight nodes are free; six nodes are wanted in ten hours, all eight ten hours later."""
    squeue = [
        queue_line(1, "RUNNING", 6, 10, 0),
        queue_line(2, "PENDING", 6, 10, 20),
        queue_line(3, "PENDING", 8, 10, 10),
    ]
    sinfo = ["\x1f".join(["batch", "up", "infinite", "6/2/0/8", "OFF", "batch*"])]
    for name, lines in (("sinfo", sinfo), ("squeue", squeue)):
        command = tmp_path / name
        words = " ".join(f"'{line}'" for line in lines)
        command.write_text(f"#!/bin/sh\nprintf '%s\\n' {words}\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def chosen(hours: float, *settings: str, log: Workload | None = None) -> Choice:
    job = load_job(None, list(settings))
    site = site_now(job)
    plan = plan_chain(job, site)
    return candidates_now(job, plan, site, COSTS, hours * HOUR, log=log)


def test_sizes_are_those_asked_for_or_near_the_jobs_own() -> None:
    assert sizes_of(load_job(None, ["slurm.nodes=[4, 3]"])) == (2, 3, 4, 6, 8)
    assert sizes_of(load_job(None, ["slurm.nodes=[4]", "slurm.sizes=[8, 4, 8]"])) == (4, 8)


@pytest.mark.usefixtures("queue")
def test_no_more_nodes_are_compared_than_there_are() -> None:
    found = chosen(6.0, "slurm.nodes=[2, 8]")
    assert {each.nodes for each in found.ranking} == {1, 2, 4, 8}


@pytest.mark.usefixtures("queue")
def test_every_waiting_job_keeps_its_place_as_slurm_backfills() -> None:
    found = chosen(30.0, "slurm.nodes=[2]", "slurm.sizes=[2]")
    starts = {each.wall_seconds / HOUR: each.start.p10_seconds for each in found.ranking}
    # EASY would let it start now on the two nodes that the first waiting job leaves.
    assert starts[max(starts)] > 0.0
    assert starts[8.0] == 0.0


@pytest.mark.usefixtures("queue")
def test_a_log_of_users_who_ask_for_too_much_predicts_an_earlier_start(tmp_path: Path) -> None:
    rows = [
        f"{number}|2026-01-01T{number % 24:02d}:00:00|600|600|1|COMPLETED" for number in range(99)
    ]
    heads = "JobID|Submit|ElapsedRaw|TimelimitRaw|NNodes|State"
    (tmp_path / "log").write_text("\n".join([heads, *rows]))
    settings = ["slurm.nodes=[8]", "slurm.sizes=[8]"]
    learnt = read_sacct(tmp_path / "log")
    soon, late = chosen(30.0, *settings, log=learnt), chosen(30.0, *settings)
    assert soon.best.start.p50_seconds < 0.5 * late.best.start.p50_seconds


@pytest.mark.usefixtures("queue")
def test_starts_in_a_log_correct_what_is_predicted_by_past_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What arrives later depends on the time of day.
    monkeypatch.setattr("outlast.cluster.policies.forecast.time.time", lambda: 1.8e9)
    jobs = lublin(60, 8, load=0.95, seed=3)
    simulated = Simulation(8, workload=jobs, backfill="conservative")
    simulated.run()
    settings = ["slurm.nodes=[8]", "slurm.sizes=[8]"]
    # Everybody who waited did so for three hours more than such a queue lets expect.
    waited = simulated.starts() > jobs.submit_seconds + 60.0
    late = simulated.starts() + np.where(waited, 3.0 * HOUR, 0.0)
    plain, told = (
        chosen(30.0, *settings, log=replace(jobs, start_seconds=starts)).best.start
        for starts in (None, late)
    )
    assert np.array_equal(told.wait_seconds, plain.wait_seconds)
    assert plain.p90_seconds == pytest.approx(float(np.quantile(plain.wait_seconds, 0.9)))
    assert told.p90_seconds > 1.2 * plain.p90_seconds
