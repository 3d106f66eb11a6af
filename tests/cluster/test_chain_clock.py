"""How long a link has left: Slurm's answers, its silence, changed limits and set clocks."""

import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outlast.cluster import stopping
from outlast.cluster.chain_files import ChainFiles, reported_progress
from outlast.cluster.slurm import SlurmUnreachableError
from outlast.cluster.stopping import (
    Countdown,
    LinkClock,
    StopWhen,
    countdown,
    known_left_seconds,
    read_countdown,
    report_outcome,
    report_progress,
    should_stop,
    stop_when_of,
    write_countdown,
)
from outlast.errors import ClusterError
from outlast.records.lease import LEASE_JOB
from outlast.records.process import boot_identity


class Clock:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_slurms_answer_counts_down_between_two_questions() -> None:
    clock, asked = Clock(), []

    def ask() -> float:
        asked.append(clock.now)
        return 3600.0 - (clock.now - 1000.0)

    link = LinkClock(ask, monotonic=clock)
    assert link.refresh(), "the end was not known before"
    clock.now += 10.0
    assert not link.refresh()
    assert link.left_seconds() == 3590.0
    assert len(asked) == 1, "not asked again so soon"
    clock.now += 60.0
    assert not link.refresh(), "asked, and nothing has changed"
    assert len(asked) == 2
    link.refresh(at_once=True)
    assert len(asked) == 3


def test_a_limit_that_an_administrator_lowers_is_noticed() -> None:
    clock, limit = Clock(), [7200.0]
    link = LinkClock(lambda: limit[0] - (clock.now - 1000.0), monotonic=clock)
    link.refresh()
    limit[0] = 300.0
    clock.now += 31.0
    assert link.refresh()
    assert link.left_seconds() == pytest.approx(269.0)


def test_without_an_answer_the_jobs_own_limit_counts() -> None:
    clock = Clock()

    def fails() -> float:
        raise SlurmUnreachableError("down")

    link = LinkClock(fails, known_seconds=600.0, monotonic=clock)
    assert not link.refresh()
    clock.now += 100.0
    assert link.left_seconds() == 500.0
    silent = LinkClock(lambda: None, monotonic=clock)
    assert silent.left_seconds() == math.inf


def test_a_link_may_end_before_its_limit() -> None:
    clock = Clock()
    link = LinkClock(lambda: 3600.0, longest_seconds=60.0, monotonic=clock)
    link.refresh()
    clock.now += 20.0
    assert (link.left_seconds(), link.limit_left_seconds()) == (40.0, 3580.0)


def test_an_unlimited_job_never_ends() -> None:
    link = LinkClock(lambda: math.inf, monotonic=Clock())
    assert not link.refresh()
    assert link.left_seconds() == math.inf
    state = countdown("7", link, 10.0)
    assert state.stop_at is None
    assert state.seconds_to_stop("a") == math.inf


def test_a_clock_that_is_set_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    link = LinkClock(lambda: 100.0)
    link.refresh()
    before = link.left_seconds()
    state = countdown("7", link, 10.0)
    epoch = time.time()
    monkeypatch.setattr(time, "time", lambda: epoch + 86400.0)
    assert link.left_seconds() == pytest.approx(before, abs=0.1)
    assert state.seconds_to_stop(boot_identity()) == pytest.approx(90.0, abs=0.5)
    # On another machine wall clocks are all there is, and only the first node's is believed.
    assert state.seconds_to_stop("another") == pytest.approx(90.0 - 86400.0, abs=0.5)
    assert state.seconds_to_stop("another", trusts_clocks=False) == math.inf


def test_what_is_left_without_slurm() -> None:
    now = time.time()
    assert known_left_seconds({"SLURM_JOB_END_TIME": f"{now + 50:.0f}"}, None, None) == (
        pytest.approx(50.0, abs=1.5)
    )
    environment = {"SLURM_JOB_START_TIME": f"{now - 10:.0f}"}
    assert known_left_seconds(environment, 60.0, None) == pytest.approx(50.0, abs=1.5)
    assert known_left_seconds({}, 60.0, now - 20.0) == pytest.approx(40.0, abs=1.0)
    assert known_left_seconds({}, None, now) is None
    assert known_left_seconds({}, 60.0, now + 500.0) == 60.0, "a clock that was set back"


def stopping_at(files: ChainFiles, seconds: float, job: str = "7", stop: str = "") -> None:
    now = time.monotonic()
    state = Countdown(
        job,
        boot_identity(),
        now + seconds,
        time.time() + seconds,
        now + seconds + 5.0,
        time.time() + seconds + 5.0,
        5.0,
        stop,
    )
    write_countdown(files.clock, state)
    assert read_countdown(files.clock) == state


@pytest.mark.alone
def test_a_rank_stops_when_one_more_step_would_be_too_long(tmp_path: Path) -> None:
    files = ChainFiles(tmp_path)
    stopping_at(files, 0.5)
    stop = StopWhen(str(tmp_path), "7")
    begun, reasons = time.monotonic(), [stop()]
    while not reasons[-1]:
        time.sleep(0.1)
        reasons.append(stop())
    assert reasons[-1] == "the link's end"
    # Steps of 0.1 s: at most one of them before the moment, and not after it.
    assert 0.25 <= time.monotonic() - begun <= 0.5


def test_a_rank_stops_when_it_is_told_to(tmp_path: Path) -> None:
    stopping_at(ChainFiles(tmp_path), 1000.0, stop="SIGUSR1")
    assert StopWhen(str(tmp_path), "7")() == "SIGUSR1"


def test_the_clock_of_another_link_is_not_believed(tmp_path: Path) -> None:
    stopping_at(ChainFiles(tmp_path), -10.0, job="6")
    assert StopWhen(str(tmp_path), "7")() == ""


def test_a_damaged_or_missing_clock_stops_nothing(tmp_path: Path) -> None:
    assert StopWhen(str(tmp_path), "7")() == ""
    ChainFiles(tmp_path).clock.write_text("{")
    assert StopWhen(str(tmp_path), "7")() == ""


def test_any_loop_may_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "_known", [])
    for name in (stopping.CHAIN, stopping.JOB, "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    assert stop_when_of() is None
    assert not should_stop(), "outside of Slurm"
    monkeypatch.setattr(stopping, "_known", [])
    monkeypatch.setenv(stopping.CHAIN, str(tmp_path))
    monkeypatch.setenv(stopping.JOB, "7")
    stopping_at(ChainFiles(tmp_path), -1.0)
    assert should_stop()
    report_progress(5, steps=9, save_seconds=0.5)
    report_progress(6)
    from outlast.cluster.chain_files import run_log

    log = run_log(ChainFiles(tmp_path))
    assert (log.step, log.steps, log.save_seconds) == (6, 9, [0.5])


def test_a_job_that_a_link_submits_has_its_environment_and_not_its_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping_at(ChainFiles(tmp_path), -1.0)
    known = {stopping.CHAIN: str(tmp_path), stopping.JOB: "7", LEASE_JOB: "7", "SLURM_JOB_ID": "7"}
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    report_progress(5)
    assert stop_when_of()
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert stop_when_of() is None
    report_progress(900)
    report_outcome("completed")
    assert reported_progress(ChainFiles(tmp_path))["step"] == 5
    assert not reported_progress(ChainFiles(tmp_path))["outcome"]


def test_an_outcome_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ClusterError, match=r'report_outcome\("done"\) is none of completed'):
        report_outcome("done")


def test_a_job_that_is_no_link_has_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "_known", [])
    monkeypatch.delenv(stopping.CHAIN, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "999999999")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("SLURM_JOB_END_TIME", f"{time.time() + 300:.0f}")
    assert not should_stop()
    monkeypatch.setattr(stopping, "_known", [])
    assert should_stop(lead_seconds=400.0)


def test_asking_loads_nothing_heavy() -> None:
    """A training loop of any framework may ask, and a link must be ready at once."""
    code = (
        "import sys; import outlast.cluster; outlast.cluster.should_stop();"
        "import outlast.cluster.link;"
        "print(sorted({'torch', 'numpy', 'scipy', 'pydantic', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
