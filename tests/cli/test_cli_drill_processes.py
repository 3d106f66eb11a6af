"""``outlast drill --at/--kill/--stop``: real runs whose processes are struck."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import tiny_job

from outlast.cli.drill import DrillOptions, drill_processes, goodput, print_processes, trials_of
from outlast.errors import EXIT_DONE, RecoverError
from outlast.job import Job, to_toml
from outlast.records import RecordWriter, RunDirectory, StepsDone, TrainingStarted
from outlast.recover.cost import REFORM_SECONDS
from outlast.recover.drill import TrialOutcome
from outlast.recover.phase_page import pages_folder, read_pages


def drill(folder: Path, *arguments: str, settings: tuple[str, ...] = ()) -> tuple[int, str, dict]:
    job = tiny_job(folder, "drilled", "train.steps=120", "checkpoint.every_steps=10", *settings)
    (folder / "job.toml").write_text(to_toml(job))
    output = folder / "result.json"
    command = [sys.executable, "-m", "outlast", "drill", str(folder / "job.toml")]
    done = subprocess.run(
        [*command, *arguments, "--output", str(output)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    result = json.loads(output.read_text()) if output.exists() else {}
    return done.returncode, done.stdout + done.stderr, result


@pytest.mark.distributed
def test_deaths_in_the_middle_of_a_step_a_save_and_a_restart(tmp_path: Path) -> None:
    code, output, result = drill(tmp_path, "--at", "reduce", "--at", "save", "--at", "heal")
    assert code == EXIT_DONE, output
    assert sorted(each["phase"] for each in result["trials"]) == ["heal", "reduce", "save"]
    assert (result["struck"], result["survived"]) == (3, 3), output
    assert result["bits_equal"]
    assert result["lost_samples"] == 12 * result["lost_steps"]
    assert all(each["seconds"] > 0.0 for each in result["trials"])
    assert 0.0 < result["goodput"]["measured"] <= 1.0
    assert 0.0 < result["goodput"]["predicted"] <= 1.0
    assert "3 of 3 survived" in output
    assert "the final weights equal the undisturbed run's bit for bit" in output


@pytest.mark.distributed
def test_a_stopped_process_goes_on_and_a_phase_that_never_comes_is_told(tmp_path: Path) -> None:
    arguments = ("--stop", "0.5", "--at", "backward", "--at", "parity")
    code, output, result = drill(tmp_path, *arguments, settings=("recover.mode=off",))
    assert code == EXIT_DONE, output
    assert (result["struck"], result["survived"], result["lost_steps"]) == (1, 1, 0), output
    assert result["starts"] == 1
    assert result["bits_equal"]
    assert result["median_seconds"] >= 0.5
    assert "the run has ended without another phase parity" in output
    assert "1 did not take place" in output


@pytest.mark.distributed
def test_live_groups_are_struck_by_their_number_and_whoever_saves_in_a_save(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torchft", reason="torchft (the extra ft) is not installed")
    # A loaded machine lets heartbeats wait.
    live = ("recover.mode=live", "recover.groups=2", "recover.heartbeat_seconds=2")
    code, output, result = drill(tmp_path, "--at", "backward", "--at", "save", settings=live)
    assert code == EXIT_DONE, output
    assert (result["mode"], result["processes"], result["starts"]) == ("live", 2, 1)
    assert sorted(each["phase"] for each in result["trials"]) == ["backward", "save"]
    assert (result["struck"], result["survived"]) == (2, 2), output
    assert result["lost_steps"] == 0
    assert result["comparison"] == "within rounding"
    assert "compared within rounding" in output


@pytest.mark.distributed
def test_live_groups_in_a_fixed_order_end_with_the_bits_of_the_undisturbed_run(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torchft", reason="torchft (the extra ft) is not installed")
    live = ("recover.mode=live", "recover.groups=2", "recover.heartbeat_seconds=2")
    settings = (*live, "recover.fixed_order=true", "train.micro_batch_size=2", "train.steps=80")
    phases = ("--at", "backward", "--at", "optimizer")
    code, output, result = drill(tmp_path, *phases, settings=settings)
    assert code == EXIT_DONE, output
    assert (result["struck"], result["survived"], result["starts"]) == (2, 2, 1), output
    assert result["comparison"] == "bit for bit"
    assert result["bits_equal"], output
    assert "the final weights equal the undisturbed run's bit for bit" in output
    assert "compared bit for bit" in output


@pytest.mark.distributed
def test_a_drill_that_is_ended_leaves_no_process_behind(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "ended", "train.steps=100000")
    (tmp_path / "job.toml").write_text(to_toml(job))
    process = subprocess.Popen(
        [sys.executable, "-m", "outlast", "drill", str(tmp_path / "job.toml"), "--at", "data"]
    )
    directory = RunDirectory(Path(job.run.directory) / "ended-drill-clean")
    deadline = time.monotonic() + 240.0
    while not (directory.path / "events.jsonl").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    pages = read_pages(pages_folder(job.recover.memory, directory))
    process.terminate()
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert len(pages) == 2
    assert {each.state for each in pages} == {"dead"}


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (DrillOptions("often", (), 0.0, None, 0), "--kill often: give kills per time above 0"),
        (DrillOptions("1/s", ("data",), 0.0, None, 0), "--kill and --at say both when to strike"),
        (DrillOptions("", ("lunch",), 0.0, None, 0), "--at lunch: give one of heal"),
        (DrillOptions("", ("data",), 0.0, 0, 0), "--trials 0: give at least 1"),
        (DrillOptions("", (), -1.0, None, 0), "--stop -1: give seconds above 0"),
    ],
)
def test_what_cannot_be_drilled_is_refused(asked: DrillOptions, sentence: str) -> None:
    assert asked.wanted
    with pytest.raises(RecoverError, match=sentence):
        drill_processes(None, [], asked)


@pytest.mark.parametrize("tiers", [("memory", "peer", "shared"), ("shared",)])
def test_all_phases_have_that_of_keeping_in_memory_where_it_is_a_tier(
    tmp_path: Path, tiers: tuple[str, ...]
) -> None:
    job = tiny_job(tmp_path, "drilled", f"checkpoint.tiers={[*tiers]}")
    trials = trials_of(job, DrillOptions("", ("all",), 0.0, None, 0), 2)
    assert ("memory" in {trial.phase for trial in trials}) == ("memory" in tiers)


class Clock:
    now = 1000.0

    def time(self) -> float:
        return self.now

    monotonic = time


def recorded(
    job: Job, name: str, clock: Clock, steps: list[tuple[int, float]], parts: dict[str, float]
) -> None:
    """A run with these steps, each recorded so many seconds after the one before."""
    directory = RunDirectory(Path(job.run.directory) / f"{job.run.name}-{name}")
    directory.create(to_toml(job))
    records = RecordWriter(directory.path, 0, directory.next_attempt())
    records.write(TrainingStarted(0, 1.0, parts))
    for step, seconds in steps:
        clock.now += seconds
        records.write(StepsDone(step, 1, 1.0, 1.0, 1.0, 0, [seconds], {"compute": seconds}))
    records.close()


def test_goodput_is_measured_until_the_last_kill_and_predicted_from_the_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("outlast.records.log.time", clock)
    job = tiny_job(tmp_path, "goodput", "train.steps=101", "launch.nproc=2")
    parts = {"start and imports": 9.0, "process group": 0.5, "model": 1.0}
    recorded(job, "drill-clean", clock, [(step, 0.5) for step in range(1, 102)], parts)
    before = [(step, 0.5) for step in range(1, 42)]
    break_ = [(42, 5.5)]
    begun = clock.now
    after = [(step, 0.5) for step in range(43, 102)]
    recorded(job, "drill-struck", clock, [*before, *break_, *after], parts)
    struck = TrialOutcome(1, "data", 41, begun + 20.5, survived=True, seconds=5.5)
    directories = [
        RunDirectory(Path(job.run.directory) / f"goodput-{name}")
        for name in ("drill-clean", "drill-struck")
    ]
    whole = goodput(job, DrillOptions("", ("data",), 0.0, None, 0), *directories, [struck])
    # 100 steps after the first one take 50 s, with the break 55.
    assert whole["measured"] == pytest.approx(50.0 / 55.0)
    way_back = 0.05 + REFORM_SECONDS + 0.5 + 1.0
    assert whole["predicted"] == pytest.approx(50.0 / (50.0 + way_back + 0.25))
    at_rate = goodput(job, DrillOptions("2/min", (), 0.0, None, 0), *directories, [struck])
    # Until the step after the kill: 41 steps in 25.5 s.
    assert at_rate["measured"] == pytest.approx(20.5 / 25.5)
    assert at_rate["predicted"] == pytest.approx(1.0 / (1.0 + way_back / 30.0), abs=0.02)
    stopped = goodput(job, DrillOptions("", ("data",), 5.0, None, 0), *directories, [struck])
    assert stopped["predicted"] == pytest.approx(50.0 / 55.0)


def test_what_live_groups_lose_is_the_silence_of_the_dead_one_and_half_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("outlast.records.log.time", clock)
    settings = ("recover.mode=live", "recover.groups=2", "recover.heartbeat_seconds=2")
    job = tiny_job(tmp_path, "goodput", "train.steps=101", *settings)
    for name in ("drill-clean", "drill-struck"):
        recorded(job, name, clock, [(step, 0.5) for step in range(1, 102)], {})
    struck = [TrialOutcome(0, phase, 5, 1.0, survived=True) for phase in ("heal", "data")]
    directories = [
        RunDirectory(Path(job.run.directory) / f"goodput-{name}")
        for name in ("drill-clean", "drill-struck")
    ]
    found = goodput(job, DrillOptions("", ("data",), 0.0, None, 0), *directories, struck)
    assert found["predicted"] == pytest.approx(50.0 / (50.0 + 2 * (0.8 * 2.0 + 0.25)))


def test_what_was_not_survived_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    trial = {"phase": "data", "struck": 1.0, "survived": False, "lost_steps": 0, "seconds": 0.0}
    print_processes(
        {
            "mode": "off",
            "processes": 2,
            "trials": [trial],
            "struck": 1,
            "survived": 0,
            "lost_steps": 0,
            "lost_samples": 0,
            "goodput": {"measured": 0.5, "predicted": 0.75},
            "comparison": "bit for bit",
            "bits_equal": False,
            "largest_difference": 0.25,
        }
    )
    told = capsys.readouterr().out
    assert "0 of 1 survived" in told
    assert "goodput: 50.0 % measured, 75.0 % predicted" in told
    assert "differ from the undisturbed run's by 0.25 at most" in told
