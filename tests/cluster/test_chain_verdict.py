"""What the end of a link means for its chain."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outlast.cli.main import main
from outlast.cluster.chain_files import (
    ChainFiles,
    ChainPlan,
    chain_files,
    entries,
    finished,
    note,
    script_has_stopped,
    since_resumed,
    unfinished,
    write_progress,
)
from outlast.cluster.slurm import ENDED
from outlast.cluster.verdict import Verdict, fruitless_links, verdict_of, verdict_of_lost
from outlast.errors import (
    EXIT_BAD_INPUT,
    EXIT_CRASHED,
    EXIT_DATA_CORRUPTION,
    EXIT_DONE,
    EXIT_GIVE_UP,
    EXIT_TO_BE_CONTINUED,
    RECORD_TELLS,
    LeaseLostError,
)


def of(code: int, **given: Any) -> Verdict:
    settings = {"progressed": True, "saved": True, "fruitless": 0, "attempts": 3}
    return verdict_of(code, **{**settings, **given})


def test_the_codes_of_done_continue_and_give_up_differ() -> None:
    done, more = of(EXIT_DONE), of(EXIT_TO_BE_CONTINUED)
    given_up = of(1, progressed=False, fruitless=2)
    assert [each.outcome for each in (done, more, given_up)] == ["done", "continue", "gave_up"]
    assert [each.code for each in (done, more, given_up)] == [0, 3, EXIT_GIVE_UP]
    assert len({EXIT_DONE, EXIT_BAD_INPUT, EXIT_TO_BE_CONTINUED, EXIT_DATA_CORRUPTION, 1, 5}) == 6


@pytest.mark.parametrize("code", [1, EXIT_DATA_CORRUPTION, -9, 137, EXIT_TO_BE_CONTINUED])
def test_attempts_without_progress_are_counted(code: int) -> None:
    assert of(code, progressed=False, fruitless=1).outcome == "continue"
    last = of(code, progressed=False, fruitless=2)
    assert last.outcome == "gave_up"
    assert "slurm.attempts_without_progress = 3" in last.reason
    assert of(code, progressed=True, fruitless=2).outcome == "continue"


def test_a_wrong_input_is_not_tried_again_unless_something_was_saved() -> None:
    assert of(EXIT_BAD_INPUT, progressed=False, saved=False).outcome == "gave_up"
    # As when a lock or a file of an earlier link is in the way: an attempt like others.
    assert of(EXIT_BAD_INPUT, progressed=False).outcome == "continue"
    assert of(EXIT_BAD_INPUT, progressed=False, fruitless=2).outcome == "gave_up"
    # As when the disk is full in the last save, after others that went well.
    assert of(EXIT_BAD_INPUT, progressed=True).outcome == "continue"


def test_a_lost_lease_is_no_wrong_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The link of a trainer that another job has pushed out must not give its chain up."""

    def lost(**given: Any) -> None:
        raise LeaseLostError("job 8 on host b has taken over this run")

    monkeypatch.setattr("outlast.cli.app.app", lost)
    with pytest.raises(SystemExit) as ended:
        main()
    assert "outlast: job 8 on host b has taken over" in capsys.readouterr().err
    assert ended.value.code == EXIT_CRASHED
    assert of(EXIT_CRASHED, progressed=False, saved=False).outcome == "continue"


@pytest.mark.parametrize(("tells", "code"), [("1", EXIT_DONE), ("", EXIT_TO_BE_CONTINUED)])
def test_ranks_that_stop_end_with_0_where_the_record_tells(
    monkeypatch: pytest.MonkeyPatch, tells: str, code: int
) -> None:
    """After any other code srun ends the ranks that still save."""
    seen = []

    def stopped(**given: Any) -> None:
        seen.append(os.environ.get(RECORD_TELLS))
        sys.exit(EXIT_TO_BE_CONTINUED)

    monkeypatch.setattr("outlast.cli.app.app", stopped)
    monkeypatch.setenv(RECORD_TELLS, tells)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    assert seen == [None], "what a script starts has an exit code of its own"


def test_a_script_has_stopped_when_all_its_ranks_say_so(tmp_path: Path) -> None:
    files = chain_files(tmp_path / "run")
    assert not script_has_stopped(files)
    for words, stopped in (
        (("stopped", "stopped"), True),
        (("stopped", "finished"), True),
        (("finished", "finished"), False),
        (("stopped", "running"), False),
        (("failed", "stopped"), False),
    ):
        put_outcomes(files, *words)
        assert script_has_stopped(files) is stopped


def put_outcomes(files: ChainFiles, *words: str) -> None:
    folder = files.run / "script"
    folder.mkdir(parents=True, exist_ok=True)
    for rank, word in enumerate(words):
        name = f"outcome.rank{rank}.json" if rank else "outcome.json"
        (folder / name).write_text(json.dumps({"word": word, "step": 1, "when": ""}))


def test_a_save_that_failed_is_told_whatever_follows_from_it() -> None:
    failure = "the checkpoint of step 80 failed: No space left on device"
    for progressed, fruitless in ((True, 0), (False, 0), (False, 2)):
        verdict = of(2, progressed=progressed, fruitless=fruitless, failure=failure)
        assert f"ended with code 2: {failure}" in verdict.reason
    assert failure not in of(EXIT_DONE, failure=failure).reason, "a later save went well"


def test_what_slurm_did_is_no_attempt() -> None:
    for state in ("PREEMPTED", "NODE_FAIL"):
        verdict = of(143, progressed=False, fruitless=2, state=state, signal="SIGTERM")
        assert verdict.outcome == "continue"


@pytest.mark.parametrize("state", [*sorted(ENDED - {"COMPLETED"}), "PENDING", "REQUEUED"])
@pytest.mark.parametrize("unfinished", ["", "the run's record ends at step 320 of 4000"])
def test_an_exit_code_of_0_is_no_end_where_slurm_or_the_record_denies_it(
    state: str, unfinished: str
) -> None:
    for progressed in (True, False):
        verdict = of(EXIT_DONE, state=state, unfinished=unfinished, progressed=progressed)
        assert verdict.outcome == ("cancelled" if state == "CANCELLED" else "continue")
        assert state in verdict.reason or verdict.outcome == "cancelled"
        assert unfinished in verdict.reason or verdict.outcome == "cancelled"


@pytest.mark.parametrize("state", [None, "RUNNING", "COMPLETING", "COMPLETED"])
def test_a_record_that_ends_too_early_is_no_end_whatever_slurm_says(state: str | None) -> None:
    assert of(EXIT_DONE, state=state).outcome == "done"
    for fruitless, outcome in ((0, "continue"), (2, "gave_up")):
        verdict = of(
            EXIT_DONE, state=state, unfinished="why", progressed=False, fruitless=fruitless
        )
        assert verdict.outcome == outcome
        assert "ended with code 0, but why" in verdict.reason


def put(files: ChainFiles, *events: dict[str, Any]) -> None:
    files.run.mkdir(parents=True, exist_ok=True)
    common = {"v": 1, "time": 1.0, "monotonic": 1.0, "rank": 0}
    with (files.run / "events.jsonl").open("a") as file:
        for event in events:
            kind = {"v": 1, "kind": event["kind"]}
            file.write(json.dumps({**kind, **common, **event}) + "\n")


def begins(attempt: int, steps: int = 4000) -> dict[str, Any]:
    return {"kind": "attempt_started", "attempt": attempt, "total_steps": steps}


def saved(attempt: int, step: int) -> dict[str, Any]:
    return {"kind": "checkpoint_saved", "attempt": attempt, "step": step, "seconds": 1.0}


def ends(attempt: int, outcome: str) -> dict[str, Any]:
    return {"kind": "attempt_ended", "attempt": attempt, "outcome": outcome, "step": 4000}


TRAIN = ChainPlan("abc", "n", "dependent", (1,), 1, 3600.0, "/", "python", steps=4000)
OWN = replace(TRAIN, command="srun python train.py", steps=450)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ((begins(1), saved(1, 320)), "ends at step 320 of 4000 (without an end)"),
        ((begins(1), saved(1, 320), ends(1, "to_be_continued")), "(to_be_continued)"),
        ((begins(1), saved(1, 320), ends(1, "failed")), "(failed)"),
        # An earlier attempt that lived on says nothing of this one.
        ((begins(1), saved(1, 320), begins(2), ends(1, "completed")), "(without an end)"),
        ((begins(1), saved(1, 3999), ends(1, "completed")), "newest checkpoint is of step 3999"),
        # The job has been given more steps since.
        ((begins(1, 300), saved(1, 300), ends(1, "completed")), "is of step 300"),
        ((begins(1), saved(1, 4000), ends(1, "completed")), ""),
    ],
)
def test_a_run_is_complete_by_its_own_record(
    tmp_path: Path, events: tuple[dict[str, Any], ...], words: str
) -> None:
    files = chain_files(tmp_path / "run")
    put(files, *events)
    found = unfinished(files, TRAIN)
    assert found is not None
    assert words in found if words else not found


@pytest.mark.parametrize("outcome", ["completed", "left"])
def test_a_loop_of_ones_own_may_end_before_its_last_step(tmp_path: Path, outcome: str) -> None:
    files = chain_files(tmp_path / "run")
    put(files, begins(1), saved(1, 100))
    assert unfinished(files, OWN)
    put(files, ends(1, outcome))
    assert unfinished(files, OWN) == ""


def test_a_script_is_complete_when_all_its_ranks_say_so(tmp_path: Path) -> None:
    files = chain_files(tmp_path / "run")
    folder = files.run / "script"
    folder.mkdir(parents=True)
    for file, word in (("outcome.json", "finished"), ("outcome.rank1.json", "running")):
        (folder / file).write_text(json.dumps({"word": word, "step": 1, "when": ""}))
    assert "running" in str(unfinished(files, OWN))
    (folder / "outcome.rank1.json").write_text('{"word": "finished"}')
    assert unfinished(files, OWN) == ""


def test_a_program_is_complete_when_it_has_reported_all_steps(tmp_path: Path) -> None:
    files = chain_files(tmp_path / "run")
    files.path.mkdir(parents=True)
    assert unfinished(files, OWN) is None, "it keeps no record"
    write_progress(files, 3)
    assert unfinished(files, OWN) is None
    write_progress(files, 3, 10)
    assert "step 3 of 10" in str(unfinished(files, OWN))
    write_progress(files, 10)
    assert unfinished(files, OWN) == ""
    write_progress(files, outcome="running")
    assert "running" in str(unfinished(files, OWN))
    write_progress(files, outcome="completed")
    assert unfinished(files, OWN) == ""


def test_a_cancelled_job_stays_cancelled_even_if_it_could_save() -> None:
    verdict = of(EXIT_TO_BE_CONTINUED, state="CANCELLED", signal="SIGTERM")
    assert (verdict.outcome, verdict.code) == ("cancelled", EXIT_GIVE_UP)


def test_a_stop_that_was_asked_for_ends_the_chain_without_an_error_of_its_own() -> None:
    verdict = of(EXIT_TO_BE_CONTINUED, stop_asked=True)
    assert (verdict.outcome, verdict.code) == ("stopped", EXIT_TO_BE_CONTINUED)
    assert of(EXIT_DONE, stop_asked=True).outcome == "done"


@pytest.mark.parametrize(
    ("state", "signalled", "preemptible", "outcome"),
    [
        ("CANCELLED", None, False, "cancelled"),
        ("TIMEOUT", None, False, "continue"),
        ("NODE_FAIL", None, False, "continue"),
        ("PREEMPTED", {"signal": "SIGTERM", "left": 999.0, "state": None}, True, "continue"),
        (None, None, False, "continue"),
        # Nobody knows any more what became of it, but it was told to end with time left.
        (None, {"signal": "SIGTERM", "left": 999.0, "state": None}, False, "cancelled"),
        (None, {"signal": "SIGTERM", "left": 999.0, "state": None}, True, "continue"),
        (None, {"signal": "SIGTERM", "left": 5.0, "state": None}, False, "continue"),
        (None, {"signal": "SIGTERM", "left": 999.0, "state": "CANCELLED"}, True, "cancelled"),
        (None, {"signal": "SIGUSR1", "left": 999.0, "state": None}, False, "continue"),
    ],
)
def test_a_link_without_a_last_word(
    state: str | None, signalled: dict[str, Any] | None, preemptible: bool, outcome: str
) -> None:
    assert verdict_of_lost(state, signalled, preemptible=preemptible).outcome == outcome


def start(job: int, step: int) -> dict[str, Any]:
    return {"kind": "started", "time": float(job), "job": str(job), "step": step}


def test_links_without_progress_are_those_at_the_end() -> None:
    journal = [start(1, 0), start(2, 10), start(3, 10), start(4, 10)]
    assert fruitless_links(journal, 10) == 3
    assert fruitless_links(journal, 20) == 0
    assert fruitless_links([start(1, 0), start(2, 10)], 10) == 1
    assert fruitless_links([], 0) == 0


def test_links_that_others_ended_and_those_before_a_resume_do_not_count() -> None:
    lost = {"kind": "lost", "time": 2.5, "job": "2", "state": "NODE_FAIL"}
    assert fruitless_links([start(1, 0), start(2, 0), lost], 0) == 1
    resumed = {"kind": "resumed", "time": 2.5}
    assert fruitless_links([start(1, 0), start(2, 0), resumed, start(3, 0)], 0) == 1


def test_the_journal_survives_torn_lines(tmp_path: Path) -> None:
    files = ChainFiles(tmp_path)
    assert entries(files) == []
    note(files, "created", chain="abc")
    with files.journal.open("ab") as file:
        file.write(b'{"kind": "started", "ti')
    note(files, "ended", job="1", left=float("inf"))
    found = entries(files)
    assert [each["kind"] for each in found] == ["created", "ended"]
    assert found[1]["left"] is None


def test_a_chain_that_was_resumed_has_not_ended(tmp_path: Path) -> None:
    files = ChainFiles(tmp_path)
    note(files, "started", job="1", step=0)
    note(files, "finished", outcome="gave_up", reason="why")
    assert finished(entries(files))["reason"] == "why"  # type: ignore[index]
    note(files, "resumed")
    assert finished(entries(files)) is None
    assert [each["kind"] for each in since_resumed(entries(files))] == ["resumed"]
