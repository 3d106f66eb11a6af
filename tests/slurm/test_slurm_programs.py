"""Chains of small programs on a real Slurm: every end of a link, every kind of chain."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from chains import ending, noted, outlast, program_plan, wait
from local_slurm import LocalSlurm

from outlast.cluster.chain import begin, resume, status_of, stop
from outlast.cluster.chain_files import ChainFiles
from outlast.cluster.slurm import state_now
from outlast.errors import EXIT_DONE, EXIT_GIVE_UP, EXIT_TO_BE_CONTINUED

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("empty_queue")]

# Counts its starts; saves a step each time, and is done after three.
COUNTING = """\
import sys
from pathlib import Path
from outlast.cluster import report_progress
file = Path("count")
count = int(file.read_text()) + 1 if file.exists() else 1
file.write_text(str(count))
report_progress(count, steps=3, save_seconds=0.01)
sys.exit(0 if count == 3 else 3)
"""
# Saves as soon as it should stop, which it looks for ten times a second.
WATCHING = """\
import sys, time
from pathlib import Path
from outlast.cluster import report_progress, should_stop
step = int(Path("step").read_text()) if Path("step").exists() else 0
while step < 400:
    step += 1
    time.sleep(0.1)
    if should_stop():
        Path("step").write_text(str(step))
        report_progress(step)
        sys.exit(3)
"""
# Obeys nothing: runs until it is killed.
DEAF = """\
import signal, time
for each in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(each, signal.SIG_IGN)
time.sleep(100)
"""


def program(folder: Path, text: str) -> str:
    (folder / "program.py").write_text(text)
    return f"{sys.executable} program.py"


def exit_code(slurm: LocalSlurm, job: str) -> int:
    shown = slurm.run("scontrol", "-o", "show", "job", job)
    return int(shown.split("ExitCode=")[1].split(":")[0])


def states(files: ChainFiles) -> list[str | None]:
    return [state_now(str(each["job"])) for each in noted(files, "submitted")]


def running(files: ChainFiles) -> str:
    return str(wait(lambda: noted(files, "started"), files)[-1]["job"])


@pytest.mark.parametrize("kind", ["dependent", "presubmitted"])
def test_links_follow_until_all_is_done(tmp_path: Path, slurm: LocalSlurm, kind: str) -> None:
    links = 5 if kind == "presubmitted" else 0
    files, plan = program_plan(
        tmp_path, program(tmp_path, COUNTING), kind=kind, links=links, nodes=(2, 1, 3)
    )
    begin(files, plan, "")
    assert wait(lambda: ending(files), files)["outcome"] == "done"
    found = status_of(files)
    assert [(each.nodes, each.last_step) for each in found.links] == [(2, 1), (1, 2), (3, 3)]
    assert [each.verdict for each in found.links] == ["continue", "continue", "done"]
    assert all(gap <= 3.5 for gap in found.gaps_seconds), found.gaps_seconds
    jobs = [each.job for each in found.links]
    wait(lambda: not status_of(files).jobs, files)
    codes = [exit_code(slurm, job) for job in jobs]
    assert codes == [EXIT_TO_BE_CONTINUED, EXIT_TO_BE_CONTINUED, EXIT_DONE]


def test_places_of_an_array_follow_one_another(tmp_path: Path, slurm: LocalSlurm) -> None:
    files, plan = program_plan(tmp_path, program(tmp_path, COUNTING), kind="array", links=6)
    jobs = begin(files, plan, "")
    assert len(jobs) == 1
    assert wait(lambda: ending(files), files)["outcome"] == "done"
    found = status_of(files)
    assert [(each.number, each.last_step) for each in found.links] == [(1, 1), (2, 2), (3, 3)]
    wait(lambda: not slurm.run("squeue", "-h", "-j", jobs[0]).strip(), files, 20.0)
    assert (tmp_path / "count").read_text() == "3"


def test_a_crash_loop_is_given_up_with_a_code_of_its_own(tmp_path: Path, slurm: LocalSlurm) -> None:
    files, plan = program_plan(tmp_path, "exit 1", attempts_without_progress=3)
    begin(files, plan, "")
    end = wait(lambda: ending(files), files)
    assert end["outcome"] == "gave_up"
    assert "3 links in a row have saved no step" in end["reason"]
    jobs = [str(each["job"]) for each in noted(files, "started")]
    assert len(jobs) == 3
    wait(lambda: not status_of(files).jobs, files)
    assert exit_code(slurm, jobs[-1]) == EXIT_GIVE_UP
    # Once mended, it continues, with attempts of its own.
    (tmp_path / "count").write_text("2")
    resume(files, program_plan(tmp_path, program(tmp_path, COUNTING))[1])
    assert wait(lambda: ending(files), files)["outcome"] == "done"


def test_a_cancelled_link_cancels_the_chain(tmp_path: Path, slurm: LocalSlurm) -> None:
    files, plan = program_plan(tmp_path, program(tmp_path, WATCHING))
    begin(files, plan, "")
    job = running(files)
    wait(lambda: len(noted(files, "submitted")) == 2, files)
    time.sleep(1.0)
    slurm.run("scancel", job)
    assert wait(lambda: ending(files), files, 40.0)["outcome"] == "cancelled"
    wait(lambda: not status_of(files).jobs, files, 30.0)
    assert len(noted(files, "started")) == 1
    # The next link was cancelled, or has found out why the first one ended.
    cancelled, after = states(files)
    assert (cancelled, after) in (("CANCELLED", "CANCELLED"), ("CANCELLED", "FAILED"))


def test_a_cancelled_link_that_cannot_say_a_word_cancels_the_chain(
    tmp_path: Path, slurm: LocalSlurm
) -> None:
    """All its processes are killed with the job; the next link finds out why by itself."""
    files, plan = program_plan(tmp_path, program(tmp_path, DEAF))
    begin(files, plan, "")
    job = running(files)
    wait(lambda: len(noted(files, "submitted")) == 2, files)
    slurm.run("scancel", job)
    assert wait(lambda: ending(files), files, 60.0)["outcome"] == "cancelled"
    # Where its program was killed a moment before the link itself, that may have said so.
    if not noted(files, "ended"):
        assert [each["state"] for each in noted(files, "lost")] == ["CANCELLED"]


def test_cancelling_the_waiting_link_cancels_the_chain(tmp_path: Path, slurm: LocalSlurm) -> None:
    files, plan = program_plan(tmp_path, program(tmp_path, WATCHING), link_seconds=4.0)
    begin(files, plan, "")
    running(files)
    _, waiting = wait(
        lambda: found if len(found := noted(files, "submitted")) == 2 else None, files
    )
    slurm.run("scancel", waiting["job"])
    end = wait(lambda: ending(files), files, 40.0)
    assert end["outcome"] == "cancelled"
    assert int((tmp_path / "step").read_text()) > 0, "what the running link had done is saved"


def test_a_preempted_link_is_gone_on_from(tmp_path: Path, slurm: LocalSlurm) -> None:
    files, plan = program_plan(tmp_path, program(tmp_path, WATCHING), nodes=(8,), preemptible=True)
    begin(files, plan, "")
    running(files)
    time.sleep(1.0)
    urgent = ["sbatch", "--parsable", "-p", "high", "-N8", "-t1", "--output=/dev/null"]
    job = slurm.run(*urgent, "--wrap", "sleep 3").strip()
    wait(lambda: len(noted(files, "started")) == 2, files, 60.0)
    assert ending(files) is None
    assert state_now(job) == "COMPLETED"
    told = [*noted(files, "signalled"), *noted(files, "judged"), *noted(files, "lost")]
    assert "PREEMPTED" in [each["state"] for each in told]
    stop(files, after_checkpoint=False)


def test_the_controller_may_restart_and_be_down_when_a_link_starts(
    tmp_path: Path, slurm: LocalSlurm
) -> None:
    files, plan = program_plan(
        tmp_path, f"[ -e count ] || sleep 6; {program(tmp_path, COUNTING)}", limit_seconds=300.0
    )
    begin(files, plan, "")
    running(files)
    slurm.stop_controller()
    time.sleep(2.0)
    slurm.start_controller()
    assert wait(lambda: ending(files), files, 90.0)["outcome"] == "done"
    assert status_of(files).step == 3


def test_stop_after_checkpoint_saves_and_resume_goes_on(tmp_path: Path, slurm: LocalSlurm) -> None:
    files, plan = program_plan(tmp_path, program(tmp_path, WATCHING))
    begin(files, plan, "")
    running(files)
    time.sleep(1.5)
    assert "saves at its next step" in outlast("cluster", "stop", files.run, "--after-checkpoint")
    assert wait(lambda: ending(files), files, 30.0)["outcome"] == "stopped"
    saved = int((tmp_path / "step").read_text())
    assert saved > 0
    wait(lambda: not status_of(files).jobs, files, 30.0)
    assert "continues" in outlast("cluster", "resume", files.run)
    wait(lambda: len(noted(files, "started")) == 2, files)
    assert noted(files, "started")[-1]["step"] == saved
    assert "in the queue" in outlast("cluster", "resume", files.run, code=2)
    stop(files, after_checkpoint=False)
    wait(lambda: not status_of(files).jobs, files, 40.0)
    assert ending(files)["outcome"] == "cancelled"  # type: ignore[index]


def test_two_links_never_write_one_run(tmp_path: Path, slurm: LocalSlurm) -> None:
    files, plan = program_plan(tmp_path, program(tmp_path, WATCHING))
    first = begin(files, plan, "")
    running(files)
    script = files.path / "link-1.sbatch"
    second = slurm.run("sbatch", "--parsable", str(script)).strip()
    # It waits for the holder to end, since that may be about to; a minute is enough to see it.
    time.sleep(4.0)
    assert state_now(second) == "RUNNING"
    assert [each["job"] for each in noted(files, "started")] == first
    slurm.run("scancel", second)
    stop(files, after_checkpoint=False)


def test_a_filler_trains_while_the_link_waits_and_hands_over(
    tmp_path: Path, slurm: LocalSlurm, occupant: str
) -> None:
    """The link starts while the filler trains, and waits until that has saved."""
    files, plan = program_plan(
        tmp_path,
        program(tmp_path, WATCHING),
        nodes=(4,),
        filler_nodes=(4, 2, 1),
        filler_seconds=120.0,
        restart_seconds=1.0,
        save_seconds=1.0,
        link_seconds=6.0,
    )
    main, filler = begin(files, plan, "")
    wait(lambda: noted(files, "started"), files, 30.0)
    assert state_now(main) == "PENDING"
    first = noted(files, "started")[0]
    assert (first["job"], first["role"], first["nodes"]) == (filler, "filler", 2)
    time.sleep(2.0)
    slurm.run("scancel", occupant)
    wait(lambda: len(noted(files, "started")) == 2, files, 60.0)
    second = noted(files, "started")[1]
    assert (second["job"], second["nodes"]) == (main, 4)
    ended = noted(files, "ended")[0]
    assert (ended["job"], ended["verdict"]) == (filler, "continue")
    assert second["step"] == ended["step"] > 0, "nothing that the filler did is lost"
    # It goes right behind the note.
    wait(lambda: not files.handover.exists(), files, 60.0)
    # The chain continues as without a filler.
    wait(lambda: len(noted(files, "started")) == 3, files, 60.0)
    assert [each["number"] for each in noted(files, "started")] == [1, 1, 2]
    stop(files, after_checkpoint=False)


def test_a_cancelled_filler_cancels_no_chain(
    tmp_path: Path, slurm: LocalSlurm, occupant: str
) -> None:
    files, plan = program_plan(
        tmp_path, program(tmp_path, WATCHING), nodes=(4,), filler_nodes=(2,), filler_seconds=120.0
    )
    main, filler = begin(files, plan, "")
    wait(lambda: noted(files, "started"), files, 30.0)
    slurm.run("scancel", filler)
    wait(lambda: state_now(filler) == "CANCELLED", files, 30.0)
    assert ending(files) is None
    assert state_now(main) == "PENDING"
    slurm.run("scancel", occupant)
    wait(lambda: len(noted(files, "started")) == 2, files, 60.0)
    assert ending(files) is None
    stop(files, after_checkpoint=False)


def test_cancelling_the_link_that_a_filler_trains_for_cancels_the_chain(
    tmp_path: Path, slurm: LocalSlurm, occupant: str
) -> None:
    files, plan = program_plan(
        tmp_path,
        program(tmp_path, WATCHING),
        nodes=(4,),
        filler_nodes=(2,),
        filler_seconds=120.0,
        link_seconds=6.0,
    )
    main, filler = begin(files, plan, "")
    wait(lambda: noted(files, "started"), files, 30.0)
    slurm.run("scancel", main)
    end = wait(lambda: ending(files), files, 40.0)
    assert (end["outcome"], end["reason"]) == (
        "cancelled",
        f"job {main}, the waiting link, was cancelled",
    )
    assert int((tmp_path / "step").read_text()) > 0, "what the filler had done is saved"
    wait(lambda: state_now(filler) == "FAILED", files, 20.0)
    assert len(noted(files, "started")) == 1


def test_a_refusal_is_sbatchs_own_words(tmp_path: Path, slurm: LocalSlurm) -> None:
    from outlast.cluster.slurm import SlurmRefusedError

    files, plan = program_plan(tmp_path, "exit 0", partition="nowhere")
    with pytest.raises(SlurmRefusedError, match="invalid partition specified: nowhere"):
        begin(files, plan, "")
    assert not noted(files, "submitted")
    assert "Invalid partition name" in noted(files, "refused")[0]["words"]


def test_status_says_why_a_job_waits_in_slurms_words_and_plain_ones(
    tmp_path: Path, slurm: LocalSlurm
) -> None:
    files, plan = program_plan(tmp_path, "exit 0", directives=("--hold",))
    (job,) = begin(files, plan, "")
    found = status_of(files)
    assert found.outcome == "waiting"
    assert "you hold it" in found.reason
    assert f"`scontrol release {job}` lets it start" in found.waits[job]
    slurm.run("scontrol", "update", "NodeName=n[1-8]", "State=DRAIN", "Reason=test")
    try:
        slurm.run("scontrol", "release", job)
        wait(lambda: "down, drained or reserved" in status_of(files).reason, files, 30.0)
        assert "`sinfo -R` says why" in status_of(files).waits[job]
    finally:
        slurm.run("scontrol", "update", "NodeName=n[1-8]", "State=RESUME")
    assert wait(lambda: ending(files), files)["outcome"] == "done"
