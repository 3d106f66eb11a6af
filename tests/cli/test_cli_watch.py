"""`outlast watch`: what it says of runs that train, were killed, stopped, resumed and completed."""

import json
import sys
from pathlib import Path

import pytest
from runs import start, start_process, wait_for_step
from tiny import tiny_job, train

from outlast.cli.main import main
from outlast.cli.watch import RunState
from outlast.errors import EXIT_BAD_INPUT, EXIT_DONE
from outlast.job import Job
from outlast.records import RunFollower, StepsDone, event_file, read_run
from outlast.train.run import run_directory


@pytest.fixture
def watched(monkeypatch, capsys):
    """`watched(job, *options)`: exit code, and what is said on both streams."""

    def run(job: Job, *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["outlast", "watch", str(path_of(job)), *options])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


def path_of(job: Job) -> Path:
    return run_directory(job).path


def test_a_stopped_and_a_complete_run(tmp_path, watched):
    job = tiny_job(tmp_path, "run", "train.stop_after_steps=4")
    train(job, 1)
    code, out, _ = watched(job, "--json")
    facts = json.loads(out)
    assert code == EXIT_DONE
    assert facts["status"] == "stopped, to be continued"
    assert (facts["step"], facts["steps"], facts["attempt"]) == (4, 6, 1)
    assert facts["checkpoint_step"] == 4
    assert facts["loss"] == read_run(path_of(job)).losses()[-1][1]
    train(tiny_job(tmp_path, "run"), 1)
    # Without a terminal, too, there is nothing to wait for.
    code, out, _ = watched(job)
    assert code == EXIT_DONE
    assert f"{path_of(job).name}: complete" in out.replace("\n", "")
    assert "6 of 6 (100%)" in out
    assert "restored the checkpoint of step 4" in out
    assert "complete at step 6" in out


@pytest.mark.distributed
def test_a_run_is_followed_through_a_kill_to_its_end(tmp_path):
    job = tiny_job(tmp_path, "run", "train.steps=400", "checkpoint.every_steps=100")
    first = start_process(job, tmp_path)
    wait_for_step(job, 120, first)
    state = RunState(RunFollower(path_of(job)))
    state.update()
    assert state.status() == "training"
    watcher = start(tmp_path, "watch", str(path_of(job)), "--every", "0.1")
    first.end()
    state.update()
    killed = state.facts()
    assert killed["status"] == "died: no live process holds the run"
    assert killed["step"] >= 120
    assert killed["checkpoint_step"] == 100
    assert watcher.poll() is None, "it waits for the next start"
    second = start_process(job, tmp_path)
    assert second.wait(120) == EXIT_DONE
    assert watcher.wait(30) == EXIT_DONE
    said = watcher.said()
    assert "restored the checkpoint of step" in said
    assert "complete at step 400" in said
    lines = state.update()
    assert state.is_complete
    assert any("ready at step" in line for line in lines)
    assert state.facts()["attempt"] == 2


def test_no_run_directory_is_one_sentence(tmp_path, watched):
    job = tiny_job(tmp_path, "never")
    code, out, err = watched(job)
    assert code == EXIT_BAD_INPUT
    assert out == ""
    assert err.count("\n") == 1
    assert "is not a run directory" in err


def test_lines_are_read_once_and_whole_and_a_run_begun_anew_from_its_start(tmp_path):
    job = tiny_job(tmp_path, "run")
    train(job, 1)
    log = event_file(path_of(job), 0)
    content = log.read_bytes()
    half = len(content) // 2
    log.write_bytes(content[:half])
    follower = RunFollower(path_of(job))
    found = follower.new_records()
    assert follower.new_records() == []
    with log.open("ab") as file:
        file.write(content[half:])
    found += follower.new_records()
    assert found == read_run(path_of(job)).records
    path_of(job).rename(path_of(job).with_name("run.old1"))
    train(job, 1)
    steps = [r.event.step for r in follower.new_records() if isinstance(r.event, StepsDone)]
    assert steps == [1, 2, 3, 4, 5, 6]
