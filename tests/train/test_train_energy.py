"""Energy of a run: read from meters, recorded, summed over restarts and ranks, never counted twice.

The meters are files of joules, which processes of these tests increase while the run reads them.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest
from forked import RanksFailedError, run_ranks
from tiny import tiny_job, train

from outlast.cli.train import print_summary
from outlast.distributed.ranks import ranks_from
from outlast.records import EnergyMeasured, StepsDone, Warned, energy_totals, read_run
from outlast.report import write_report
from outlast.report.energy import energy_sentence
from outlast.runtime.energy import RunMeter
from outlast.train.run import Start, run_directory, work

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.job import Job
    from outlast.records import EnergyTotals, Run


class Counter:
    """A file of joules since some beginning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.joules = 1000.0
        self.add(0.0)

    def add(self, joules: float) -> None:
        self.joules += joules
        new = self.path.with_suffix(".new")
        new.write_text(f"{self.joules}\n")
        new.replace(self.path)

    @property
    def setting(self) -> str:
        return f'energy.sources=["file:{self.path}"]'


@pytest.fixture
def counter(tmp_path: Path) -> Counter:
    return Counter(tmp_path / "joules")


def _work(job: Job, counter: Counter) -> int:
    """Train, with a thread on rank 0 that makes the meter run."""
    ranks = ranks_from(os.environ)
    over = threading.Event()

    def run() -> None:
        while not over.wait(0.002):
            counter.add(0.25)

    thread = threading.Thread(target=run)
    if ranks.local_rank == 0:
        thread.start()
    try:
        return work(Start(job), ranks)
    finally:
        over.set()
        if ranks.local_rank == 0:
            thread.join()


def metered(job: Job, counter: Counter, size: int = 1) -> Run:
    codes = run_ranks(size, _work, job, counter)
    assert set(codes) <= {0, 3, 75}, codes
    return read_run(run_directory(job).path)


def summary_of(job: Job) -> str:
    """What is printed when the run ends, white space collapsed."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        directory = run_directory(job)
        print_summary(job, directory, directory.path / "report.html")
    return " ".join(text.getvalue().split())


def totals_of(run: Run) -> EnergyTotals:
    totals = energy_totals(run)
    assert totals is not None
    return totals


def test_a_run_measures_what_its_meter_says(tmp_path: Path, counter: Counter) -> None:
    job = tiny_job(tmp_path, "m", counter.setting, "energy.every_steps=2")
    run = metered(job, counter)
    totals = totals_of(run)
    grown = float(counter.path.read_text()) - counter.joules
    assert totals.joules is not None
    # Start and end of the process are outside.
    assert 0 < totals.joules <= grown
    assert totals.kind == "measured"
    assert totals.tokens == 6 * 12 * 16
    assert sum(totals.purposes.values()) == pytest.approx(totals.joules)
    assert {"compute", "startup", "checkpoint"} <= totals.purposes.keys()
    assert [each.event.step for each in totals.windows] == [0, 2, 4, 6, 6]
    assert "J/token" in energy_sentence(run)


def test_the_sentence_and_the_report_show_it(tmp_path: Path, counter: Counter) -> None:
    job = tiny_job(tmp_path, "m", counter.setting)
    metered(job, counter)
    report = write_report([run_directory(job).path])
    said = summary_of(job)
    assert "measured on 1 node" in said
    assert "J/token" in said
    assert "Energy by purpose" in report.read_text()


@pytest.mark.slow
def test_two_ranks_read_the_meter_of_their_host_once(tmp_path: Path, counter: Counter) -> None:
    job = tiny_job(tmp_path, "two", counter.setting, "energy.every_steps=3")
    totals = totals_of(metered(job, counter, 2))
    assert len(totals.devices) == 1
    assert all(len(each.event.devices) == 1 for each in totals.windows)
    assert totals.joules is not None
    assert totals.joules <= float(counter.path.read_text()) - counter.joules


@pytest.mark.slow
def test_steps_that_are_done_again_count_as_redone(tmp_path: Path, counter: Counter) -> None:
    settings = [counter.setting, "energy.every_steps=1", "checkpoint.every_steps=100"]
    job = tiny_job(tmp_path, "again", *settings, "train.stop_after_steps=4")
    metered(job, counter)
    # The newest checkpoint is lost, as after a kill: the run continues from the beginning.
    for each in run_directory(job).checkpoints.iterdir():
        if each.is_dir():
            each.rename(tmp_path / each.name)
        else:
            each.unlink()
    job = tiny_job(tmp_path, "again", *settings)
    totals = totals_of(metered(job, counter))
    redone = [each for each in totals.windows if each.share_redone]
    assert [each.event.step for each in redone] == [1, 2, 3, 4]
    assert totals.purposes["redone"] == pytest.approx(
        sum(each.event.joules or 0.0 for each in redone)
    )
    assert "restart" in totals.purposes
    assert totals.tokens == 6 * 12 * 16
    assert "redone" in energy_sentence(read_run(run_directory(job).path))


def test_without_a_meter_the_reason_is_recorded_once_and_nothing_more_is_read(
    tmp_path: Path,
) -> None:
    job = tiny_job(tmp_path, "none", "energy.every_steps=1", 'energy.sources=["gpu"]')
    assert train(job, 1) == 0
    run = read_run(run_directory(job).path)
    events = [event for _, event in run.of(EnergyMeasured)]
    assert [event.joules for event in events] == [None]
    assert energy_sentence(run).startswith("unavailable: gpu: ")
    assert totals_of(run).to_dict()["joules"] is None


def test_a_meter_that_is_not_there_is_unavailable_with_its_path(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "gone", f'energy.sources=["file:{tmp_path}/nothing"]')
    assert train(job, 1) == 0
    said = energy_sentence(read_run(run_directory(job).path))
    assert said.startswith("unavailable: ")
    assert f"{tmp_path}/nothing cannot be read: No such file or directory" in said


def test_nothing_is_measured_when_the_job_says_so(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "off", "energy.measure=false")
    assert train(job, 1) == 0
    run = read_run(run_directory(job).path)
    assert run.of(StepsDone)
    assert not run.of(EnergyMeasured)
    assert "not measured: energy.measure = false" in summary_of(job)
    assert "not measured: energy.measure = false" in write_report([run.path]).read_text()


def rapl_tree(root: Path) -> Path:
    """A package and its memory, as /sys/class/powercap has them."""
    for zone, name in (("intel-rapl:0", "package-0"), ("intel-rapl:0:0", "dram")):
        folder = root / zone
        folder.mkdir(parents=True)
        (folder / "name").write_text(f"{name}\n")
        (folder / "max_energy_range_uj").write_text("262143328850\n")
        (folder / "energy_uj").write_text("1000000\n")
    return root


def _work_on_rapl(job: Job, root: Path) -> int:
    """Train, with a thread on rank 0 that makes the counters run at a fixed ratio."""
    ranks = ranks_from(os.environ)
    over = threading.Event()

    def run() -> None:
        microjoules = 1_000_000
        while not over.wait(0.002):
            microjoules += 40_000
            for zone, factor in (("intel-rapl:0", 1), ("intel-rapl:0:0", 2)):
                file = os.open(root / zone / "energy_uj", os.O_WRONLY)
                os.pwrite(file, f"{factor * microjoules}\n".encode(), 0)
                os.close(file)

    thread = threading.Thread(target=run)
    if ranks.local_rank == 0:
        thread.start()
    try:
        return work(Start(job), ranks)
    finally:
        over.set()
        if ranks.local_rank == 0:
            thread.join()


@pytest.mark.slow
def test_cpu_and_memory_are_read_from_rapl_once_for_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outlast.energy.sources.POWERCAP", rapl_tree(tmp_path / "powercap"))
    job = tiny_job(tmp_path, "rapl", "energy.every_steps=3")
    assert set(run_ranks(2, _work_on_rapl, job, tmp_path / "powercap")) == {0}
    run = read_run(run_directory(job).path)
    totals = totals_of(run)
    parts = {each.part: each for each in totals.devices}
    assert parts.keys() == {"cpu", "memory"}
    assert all(each.counted and each.joules is not None for each in parts.values())
    assert {row["rank"] for each in totals.windows for row in each.event.devices} == {0}
    assert "on 1 CPU and 1 memory" in energy_sentence(run)
    # The GPU that this machine lacks is named all the same.
    assert "gpu" in totals.unavailable


def test_a_counter_that_stands_covers_only_windows_before_its_next_figure(
    tmp_path: Path,
) -> None:
    counter = Counter(tmp_path / "joules")
    job = tiny_job(tmp_path, "stands", counter.setting, "energy.every_steps=1")
    codes = run_ranks(1, _work_with_rare_updates, job, counter)
    assert codes == [0]
    run = read_run(run_directory(job).path)
    totals = totals_of(run)
    assert len(totals.read) < len(totals.windows)
    assert totals.joules == 50.0
    # What was used after the last figure is in none: these windows count no tokens.
    assert [each.event.step for each in totals.read] == [4]
    assert totals.tokens == 4 * 12 * 16
    assert totals.incomplete
    assert "the sum is too low" in energy_sentence(run)


def _work_with_rare_updates(job: Job, counter: Counter) -> int:
    """Train with a counter that moves once, in step 4 of 6."""
    steps_done = RunMeter.steps_done

    def moved(meter: RunMeter, step: int, steps: int, seconds: dict[str, float]) -> Any:
        if step == 4:
            counter.add(50.0)
        return steps_done(meter, step, steps, seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunMeter, "steps_done", moved)
        return work(Start(job), ranks_from(os.environ))


def test_a_port_that_is_taken_is_a_recorded_warning(tmp_path: Path, counter: Counter) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = f"energy.prometheus_port={taken.getsockname()[1]}"
        run = metered(tiny_job(tmp_path, "port", counter.setting, port), counter)
    warned = [event.message for _, event in run.of(Warned)]
    assert any("serves no metrics of energy" in each for each in warned)
    assert run.attempts[-1].outcome == "completed"


def test_a_tariff_that_is_not_there_is_refused_at_the_start(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "t", f'energy.tariff="{tmp_path}/gone.toml"')
    with pytest.raises(RanksFailedError, match=r"tariff file .*gone\.toml cannot be read"):
        train(job, 2)


def test_a_region_that_is_not_known_is_refused_at_the_start(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "r", "energy.region=Germny")
    with pytest.raises(RanksFailedError, match="did you mean DE"):
        train(job, 1)
