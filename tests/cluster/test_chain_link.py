"""The life of a link beside others: fences, fillers, the link that follows."""

import json
import resource
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_programs import FORGOTTEN, put_command, shown, slurm_commands

from outlast.cluster import fence, link
from outlast.cluster.chain import resume
from outlast.cluster.chain_files import (
    ChainFiles,
    ChainPlan,
    chain_files,
    entries,
    finished,
    note,
    of_kind,
    write_plan,
    write_progress,
)
from outlast.cluster.fence import Fence
from outlast.cluster.link import Link
from outlast.cluster.verdict import Verdict
from outlast.errors import EXIT_DONE, EXIT_TO_BE_CONTINUED, ClusterError

PLAN = ChainPlan("abc", "n", "dependent", (1,), 1, 3600.0, "/", "python", command="exit 0")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChainFiles:
    """A chain with link 1 submitted as job 7; every submission gets the number 9."""
    monkeypatch.setattr(fence, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(link, "_LOSS_SECONDS", 0.05)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    slurm_commands(tmp_path, monkeypatch)
    # The job that the tests are.
    put_command(
        tmp_path, "squeue", f"[[ $* == *--jobs=7* ]] && echo '{shown('7', 'RUNNING')}' || exit 0"
    )
    put_command(tmp_path, "sbatch", f'sleep 0.2\necho "$@" >> {tmp_path}/submitted\necho 9')
    found = chain_files(tmp_path / "run")
    write_plan(found, PLAN)
    note(found, "created")
    note(found, "submitted", job="7", number=1)
    return found


def held_by(files: ChainFiles, job: str) -> Fence:
    """A fence of this process, which is alive."""
    found = Fence(files.fence, job, lambda other: None)
    found.acquire()
    return found


def test_a_link_that_still_submits_does_not_submit_twice(files: ChainFiles) -> None:
    running = Link(files, PLAN, 1, "7")
    thread = threading.Thread(target=running._next_job.submit)
    thread.start()
    time.sleep(0.05)
    assert running._next_job.submit() == ("9", "")
    thread.join()
    assert len((files.run.parent / "submitted").read_text().splitlines()) == 1


def test_a_link_that_must_end_waits_for_no_answer(
    files: ChainFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, asked = threading.Event(), threading.Event()

    def silent(*given: object, **about: object) -> str:
        asked.set()
        answer.wait(60.0)
        return "9"

    monkeypatch.setattr(link, "submit_link", silent)
    running = Link(files, PLAN, 1, "7")._next_job
    try:
        running.begin()
        assert asked.wait(60.0)
        running.left_seconds = lambda: 3.0
        running.join()
        assert running.submit() == ("", "Slurm has not answered sbatch, and this link must end")
        assert running._patience().total_seconds == 0.0
    finally:
        answer.set()
    running.left_seconds = lambda: 600.0
    running.join()
    assert running.submit() == ("9", "")


def test_a_link_that_finds_another_alive_comes_again_after_it(
    files: ChainFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "WAIT_SECONDS", 0.0)
    held_by(files, "6")
    assert Link(files, PLAN, 1, "7").run() == EXIT_TO_BE_CONTINUED
    again = of_kind(entries(files), "submitted")[-1]
    assert (again["job"], again["number"], again["after"]) == ("9", 1, "6")
    assert "--dependency=afterany:6" in (files.run.parent / "submitted").read_text()
    # Now that one continues with the chain, and so does not this one, nor a copy by hand.
    for job in ("7", "8"):
        assert Link(files, PLAN, 1, job).run() == EXIT_TO_BE_CONTINUED
    assert len((files.run.parent / "submitted").read_text().splitlines()) == 1


def test_a_chain_that_cannot_go_on_behind_a_fence_says_so(
    files: ChainFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "WAIT_SECONDS", 0.0)
    put_command(tmp_path, "sbatch", "echo 'sbatch: error: Access denied' >&2; exit 1")
    held_by(files, "6")
    assert Link(files, PLAN, 1, "7").run() == EXIT_TO_BE_CONTINUED
    ending = finished(entries(files))
    assert ending is not None
    assert ending["outcome"] == "stopped"
    assert "Access denied" in ending["reason"]


def test_a_filler_that_starts_while_a_link_waits_at_the_fence_is_asked_to_end(
    files: ChainFiles,
) -> None:
    waiting = Link(files, PLAN, 1, "7")
    filler = held_by(files, "8").holder
    assert waiting._patience(filler) == link.WAIT_SECONDS
    note(files, "submitted", job="8", number=1, role="filler")
    assert waiting._patience(filler) == link.HANDOVER_SECONDS
    assert files.handover.read_text() == "7"


def test_a_link_that_waits_for_a_filler_hears_that_all_is_done(files: ChainFiles) -> None:
    held = held_by(files, "8")

    def finish() -> None:
        time.sleep(0.2)
        note(files, "finished", outcome="done", reason="all steps are done")
        held.release()

    thread = threading.Thread(target=finish)
    thread.start()
    assert Link(files, PLAN, 1, "7").run() == EXIT_DONE
    thread.join()
    assert not of_kind(entries(files), "started")


def test_the_end_of_a_chain_is_told_before_the_fence_is_free(
    files: ChainFiles, tmp_path: Path
) -> None:
    note(files, "submitted", job="8", number=1, role="filler")
    put_command(tmp_path, "scancel", f"cp {files.fence} {files.journal} {tmp_path}")
    plan = PLAN.shaped(1, 600.0, filler=True)
    assert Link(files, plan, 1, "8").run() == EXIT_DONE
    assert '"job": "8"' in (tmp_path / files.fence.name).read_text()
    assert '"finished"' in (tmp_path / files.journal.name).read_text()
    assert not files.fence.exists()


@pytest.mark.parametrize(
    ("state", "outcome"), [("CANCELLED", "cancelled"), ("PENDING", "continue")]
)
def test_a_filler_whose_link_was_cancelled_ends_the_chain(
    files: ChainFiles, tmp_path: Path, state: str, outcome: str
) -> None:
    note(files, "submitted", job="8", number=1, role="filler")
    put_command(tmp_path, "squeue", f"echo '{shown('7', state)}'")
    ending = Link(files, PLAN.shaped(1, 600.0, filler=True), 1, "8", _told_to_stop=True)
    verdict = ending._conclude(Verdict("continue", "saved"))
    assert verdict.outcome == outcome
    assert (finished(entries(files)) is not None) == (outcome == "cancelled")


def test_a_full_disk_ends_no_link(files: ChainFiles) -> None:
    """Its journal can be read, and takes no more lines."""
    with files.journal.open("ab") as file:
        file.write(b" " * 1_000_000 + b"\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (files.journal.stat().st_size, hard))
    try:
        assert Link(files, PLAN, 1, "7").run() == EXIT_DONE
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [each["kind"] for each in entries(files)] == ["created", "submitted"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("squeue", "outcome"),
    [
        (f"echo '{shown('7', 'RUNNING')}'", "done"),
        (f"echo '{shown('7', 'NODE_FAIL')}'", ""),
        (f"echo '{shown('7', 'TIMEOUT')}'", ""),
        (f"echo '{FORGOTTEN}' >&2; exit 1", ""),
        ("echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1", ""),
    ],
)
def test_a_program_without_a_record_is_done_where_slurm_says_that_all_is_well(
    files: ChainFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, squeue: str, outcome: str
) -> None:
    monkeypatch.setattr(link, "_ANSWER_SECONDS", 0.5)
    put_command(tmp_path, "squeue", squeue)
    code = Link(files, PLAN, 1, "7").run()
    ending = finished(entries(files))
    assert (code, ending["outcome"] if ending else "") == (3 if not outcome else 0, outcome)


def test_a_node_of_which_srun_knows_before_slurm_says_so_is_lost(
    files: ChainFiles, tmp_path: Path
) -> None:
    put_command(
        tmp_path,
        "squeue",
        f"if [ -e {tmp_path}/asked ]; then echo '{shown('7', 'NODE_FAIL')}'; "
        f"else touch {tmp_path}/asked; echo '{shown('7', 'RUNNING')}'; fi",
    )
    # The clock asks for what is left first.
    plan = replace(PLAN, command=f"PATH=/usr/bin:/bin; rm -f {tmp_path}/asked")
    assert Link(files, plan, 1, "7").run() == EXIT_TO_BE_CONTINUED
    [ended] = of_kind(entries(files), "ended")
    assert "Slurm ended the job (NODE_FAIL)" in ended["reason"]


LOOP = """
from pathlib import Path
steps, took = 8, 0.5
state = Path("state")
first = int(state.read_text()) if state.exists() else 0
train = lambda step: None
agreed = lambda stop: first == 0 and step == 3
save = lambda done: state.write_text(str(done))
"""


def documented_loop() -> str:
    """What docs/cluster.md says that a training loop does."""
    text = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    section = text.split("### In any training loop")[1]
    return section.split("```python\n")[1].split("```")[0]


def test_the_documented_loop_ends_its_chain(files: ChainFiles, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(LOOP + documented_loop())
    plan = replace(PLAN, command=f"cd {tmp_path}; PATH=/usr/bin:/bin {sys.executable} program.py")
    assert Link(files, plan, 1, "7").run() == EXIT_TO_BE_CONTINUED
    assert (tmp_path / "state").read_text() == "4"
    assert finished(entries(files)) is None
    assert Link(files, plan, 2, "7").run() == EXIT_DONE
    assert finished(entries(files))["outcome"] == "done"  # type: ignore[index]


def test_the_documented_loop_ends_its_chain_also_where_it_stops_early(
    files: ChainFiles, tmp_path: Path
) -> None:
    loop = documented_loop()
    for text, other in (
        ("    train(step)\n", "    train(step)\n    if step == 5:\n        break\n"),
        ("save(steps)", "save(step + 1)"),
        ("report_progress(steps,", "report_progress(step + 1,"),
    ):
        assert text in loop
        loop = loop.replace(text, other)
    program = tmp_path / "program.py"
    program.write_text(LOOP + loop)
    plan = replace(PLAN, command=f"cd {tmp_path}; PATH=/usr/bin:/bin {sys.executable} program.py")
    assert Link(files, plan, 1, "7").run() == EXIT_TO_BE_CONTINUED
    assert Link(files, plan, 2, "7").run() == EXIT_DONE
    assert (tmp_path / "state").read_text() == "6"


def test_a_program_that_reports_no_end_is_told_how(files: ChainFiles) -> None:
    write_progress(files, 500, 4000, outcome="completed")
    # That an earlier link has said so proves nothing of one that ends like this.
    assert Link(files, PLAN, 1, "7").run() == EXIT_TO_BE_CONTINUED
    [ended] = of_kind(entries(files), "ended")
    assert 'step 500 of 4000, and no report_outcome("completed")' in ended["reason"]


def test_a_script_whose_ranks_have_stopped_goes_on(files: ChainFiles, tmp_path: Path) -> None:
    """Its ranks end with 0, one after the other; srun ends the rest of one that dies."""
    script = files.run / "script"
    script.mkdir()
    program = "from outlast.cluster import report_progress; report_progress(4)"
    plan = replace(
        PLAN,
        command=f'echo \'{{"word": "stopped"}}\' > {script}/outcome.json; '
        f"PATH=/usr/bin:/bin {sys.executable} -c '{program}'",
    )
    assert Link(files, plan, 1, "7").run() == EXIT_TO_BE_CONTINUED
    [ended] = of_kind(entries(files), "ended")
    assert (ended["code"], ended["reason"]) == (EXIT_TO_BE_CONTINUED, "saved, to be continued")


def test_a_squeue_that_fails_for_a_moment_is_asked_again(files: ChainFiles, tmp_path: Path) -> None:
    put_command(
        tmp_path,
        "squeue",
        f"if [ -e {tmp_path}/asked ]; then echo '{shown('7', 'RUNNING')}'; "
        f"else touch {tmp_path}/asked; echo 'error: Socket timed out' >&2; exit 1; fi",
    )
    assert Link(files, PLAN, 1, "7").run() == EXIT_DONE


def test_a_link_whose_fence_was_taken_meanwhile_decides_nothing(
    files: ChainFiles, tmp_path: Path
) -> None:
    """Slurm has lost its node: the successor runs, and must not be cancelled by it."""
    put_command(tmp_path, "scancel", f"touch {tmp_path}/cancelled")
    other = '{"job": "9", "host": "h", "boot": "b", "process": 1, "started": 1.0, "token": "t"}'
    plan = replace(PLAN, command=f"echo '{other}' > {files.fence}")
    assert Link(files, plan, 1, "7").run() == EXIT_TO_BE_CONTINUED
    assert finished(entries(files)) is None
    assert not (tmp_path / "cancelled").exists()
    assert files.fence.exists()


def test_a_chain_that_was_taken_for_done_can_be_resumed(files: ChainFiles, tmp_path: Path) -> None:
    put_command(tmp_path, "squeue", "exit 0")
    note(files, "finished", outcome="done", reason="all steps are done")
    with pytest.raises(ClusterError, match="is done; there is nothing to resume"):
        resume(files)
    started = {"v": 1, "kind": "attempt_started", "attempt": 1, "total_steps": 4000}
    (files.run / "events.jsonl").write_text(json.dumps(started) + "\n")
    assert resume(files) == ["9"]
