"""Slurm's commands when they fail, with the words that a real Slurm 22.05 gave."""

import os
from pathlib import Path

import pytest

from outlast.cluster.chain_files import ChainFiles, ChainPlan, note, write_plan
from outlast.cluster.slurm import (
    Patience,
    SlurmMissingError,
    SlurmRefusedError,
    SlurmUnreachableError,
    array_size_now,
    ask,
    environment_for,
    history_of,
    partitions_now,
    passes,
    quality_now,
    said,
    state_now,
)
from outlast.cluster.submission import submit_link

DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
QUICK = Patience(answer_seconds=5.0, total_seconds=3.0, first_pause_seconds=0.01)
FOLDER = Path(__file__).parent / "slurm_outputs"


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole path of programs but for the shell's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/nowhere")
    return folder


def put(folder: Path, name: str, body: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/bash\nPATH=/usr/bin:/bin\n{body}\n")
    file.chmod(0o755)


def test_a_failure_that_passes_is_tried_again(commands: Path) -> None:
    put(
        commands,
        "squeue",
        f"[ -e {commands}/once ] && echo answer && exit 0\ntouch {commands}/once\n"
        f'echo "{DOWN}" >&2\nexit 1',
    )
    assert ask(["squeue"], QUICK) == "answer\n"


def test_a_controller_that_stays_down_is_named(commands: Path) -> None:
    put(commands, "squeue", f'echo "{DOWN}" >&2\nexit 1')
    with pytest.raises(SlurmUnreachableError, match=r"Unable to contact slurm controller"):
        ask(["squeue"], Patience(total_seconds=0.1, first_pause_seconds=0.01))


def test_no_answer_has_a_deadline(commands: Path) -> None:
    put(commands, "squeue", "sleep 20")
    with pytest.raises(SlurmUnreachableError, match=r"no answer in 0\.2 s"):
        ask(["squeue"], Patience(answer_seconds=0.2, total_seconds=0.0))


def test_a_refusal_is_not_tried_again_and_is_one_sentence(commands: Path) -> None:
    put(
        commands,
        "sbatch",
        f'echo . >> {commands}/tries\necho "sbatch: error: invalid partition specified: nope" >&2\n'
        'echo "sbatch: error: Batch job submission failed: Invalid partition name specified" >&2\n'
        "exit 1",
    )
    with pytest.raises(SlurmRefusedError) as caught:
        ask(["sbatch"], QUICK)
    assert str(caught.value) == (
        "`sbatch` was refused: invalid partition specified: nope; Batch job submission failed: "
        "Invalid partition name specified"
    )
    assert (commands / "tries").read_text() == ".\n"


def test_work_that_was_done_although_the_answer_was_lost_is_not_done_twice(commands: Path) -> None:
    put(commands, "sbatch", f'echo . >> {commands}/tries\necho "{DOWN}" >&2\nexit 1')
    assert ask(["sbatch"], QUICK, before_retry=lambda: "17") == "17"
    assert (commands / "tries").read_text() == ".\n"


def test_an_answer_that_was_lost_on_the_last_try_is_looked_up_too(commands: Path) -> None:
    put(commands, "sbatch", f'echo . >> {commands}/tries\necho "{DOWN}" >&2\nexit 1')
    once = Patience(total_seconds=0.0)
    assert ask(["sbatch"], once, before_retry=lambda: "17") == "17"
    with pytest.raises(SlurmUnreachableError):
        ask(["sbatch"], once, before_retry=lambda: None)


def test_a_filler_does_not_take_itself_for_its_follower(commands: Path, tmp_path: Path) -> None:
    files = ChainFiles(tmp_path / "chain")
    plan = ChainPlan("abc", "a", "filler", (2,), 1, 3600.0, "/", "python")
    write_plan(files, plan)
    note(files, "submitted", job="7", number=2, role="filler")
    put(commands, "sbatch", f'echo "{DOWN}" >&2\nexit 1')
    fields = ["7", "RUNNING", "1", "5:00", "1", "2", "3", "1", "None"]
    line = "\x1f".join([*fields, "outlast:abc:filler-2"])
    put(commands, "squeue", f"printf '%s\\n' '{line}'")
    once = Patience(total_seconds=0.0)
    with pytest.raises(SlurmUnreachableError):
        submit_link(files, plan, 2, lead_seconds=30.0, patience=once)
    put(commands, "squeue", f"printf '%s\\n' '{line}' '8{line[1:]}'")
    assert submit_link(files, plan, 2, lead_seconds=30.0, patience=once) == "8"


def test_a_missing_command_says_where_it_would_be(commands: Path) -> None:
    with pytest.raises(SlurmMissingError, match="`sbatch` is not installed here"):
        ask(["sbatch"], QUICK)


@pytest.mark.parametrize(
    ("words", "passing"),
    [
        (DOWN, True),
        ("Socket timed out on send/recv operation", True),
        ("Slurm temporarily unable to accept job, sleeping and retrying", True),
        ("Invalid job id specified", False),
        ("Slurm accounting storage is disabled", False),
        ("You are not running a supported accounting_storage plugin", False),
        ("Access/permission denied", False),
        ("Batch job submission failed: Job violates accounting/QOS policy", False),
    ],
)
def test_which_failures_pass(words: str, passing: bool) -> None:
    assert passes(words) == passing


def test_slurms_words_lose_the_names_of_programs() -> None:
    errors = "sbatch: error: Batch job submission failed: Requested node configuration\n\nsbatch: x"
    assert said(errors) == "Batch job submission failed: Requested node configuration; x"


def test_no_accounting_and_no_scontrol_are_no_error(commands: Path) -> None:
    put(commands, "sacct", 'echo "Slurm accounting storage is disabled" >&2; exit 1')
    put(commands, "squeue", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    put(commands, "sinfo", f"cat {FOLDER}/sinfo.txt")
    assert history_of(["7"]) == []
    assert state_now("7") is None
    assert quality_now("normal") is None
    assert array_size_now() is None
    assert [each.name for each in partitions_now()] == ["batch", "high", "short"]


def test_a_job_that_squeue_has_forgotten_is_found_in_accounting(commands: Path) -> None:
    put(commands, "squeue", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    put(commands, "sacct", f"cat {FOLDER}/sacct.txt | head -n 1")
    assert state_now("7") == "CANCELLED"


def test_a_job_that_is_taken_down_is_what_it_will_end_as(commands: Path) -> None:
    fields = ["7", "COMPLETING", "1", "5:00", "1", "2", "3", "1", "None", "(null)"]
    line = "\x1f".join(fields)
    put(commands, "squeue", f"printf '%s\\n' '{line}'")
    put(commands, "sacct", "true")
    assert state_now("7") == "COMPLETING", "accounting is late, and there is no scontrol"
    put(commands, "scontrol", "echo JobId=7 JobState=CANCELLED Reason=None")
    assert state_now("7") == "CANCELLED"


def test_a_job_hands_its_own_settings_to_no_other() -> None:
    environment = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "4",
        "SLURM_CONF": "/etc/slurm.conf",
        "SBATCH_ACCOUNT": "team",
        "SQUEUE_FORMAT": "%i",
        "OUTLAST_LINK_JOB": "7",
        "HOME": "/home/me",
    }
    sbatch = environment_for("sbatch", environment)
    assert sbatch.keys() == {"SLURM_CONF", "SBATCH_ACCOUNT", "HOME", "LC_ALL"}
    squeue = environment_for("squeue", environment)
    assert squeue["SLURM_TIME_FORMAT"] == "%s"
    assert "SQUEUE_FORMAT" not in squeue
    assert os.environ is not sbatch
