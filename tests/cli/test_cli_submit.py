"""``outlast submit`` and ``outlast cluster`` without a cluster: dry runs, refusals, status.

What they do on a real Slurm is in tests/slurm.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from in_process import Outlast, in_process
from rich.text import Text
from typer.main import get_command

from outlast.cli.cluster import cluster
from outlast.cluster.chain_files import (
    ChainFiles,
    ChainPlan,
    chain_files,
    entries,
    note,
    read_plan,
    write_plan,
)
from outlast.cluster.fence import Fence
from outlast.job import LoopJob, load_job, to_toml
from outlast.job.sections import RunSection


@pytest.fixture
def outlast(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Outlast:
    """Run the program in this process and folder, where no Slurm is installed."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    return in_process(monkeypatch, capsys)


def shown(job: str, state: str) -> str:
    """A line of squeue's answer."""
    return "\x1f".join([job, state, "1", *["x"] * 6, ""])


def put(folder: Path, name: str, body: str) -> None:
    file = folder / "bin" / name
    file.write_text(f"#!/bin/bash\nPATH=/usr/bin:/bin\n{body}\n")
    file.chmod(0o755)


def test_a_dry_run_prints_the_exact_script_and_leaves_nothing(
    outlast: Outlast, tmp_path: Path
) -> None:
    settings = ["run.name=a", "slurm.wall_time=8h", "slurm.nodes=[4, 2]", "slurm.account=team"]
    code, out, err = outlast("submit", *settings, "--dry-run")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "#!/bin/bash"
    for line in (
        "#SBATCH --job-name=a",
        "#SBATCH --nodes=4",
        "#SBATCH --time=08:00:00",
        "#SBATCH --account=team",
        "#SBATCH --no-requeue",
        "#SBATCH --open-mode=append",
        f"cd {tmp_path} || exit 1",
    ):
        assert line in lines
    assert lines[-1].endswith(f"-m outlast.cluster.chain {tmp_path}/runs/a/chain 1")
    assert not (tmp_path / "runs").exists()


def test_a_plan_of_another_run_is_refused_before_anything_is_submitted(
    outlast: Outlast, tmp_path: Path
) -> None:
    (tmp_path / "plan.toml").write_text("[run]\nsteps = 450\nstep_seconds = 1.0\nnodes = 1\n")
    settings = ["checkpoint.transfer_plan=plan.toml", "checkpoint.mirror=/safe"]
    code, _, err = outlast("submit", "slurm.wall_time=8h", *settings, "--dry-run")
    assert code == 2
    assert 'plans no copies to a tier named "mirror"' in err


def test_without_sbatch_the_sentence_says_where_it_would_be(outlast: Outlast) -> None:
    code, _, err = outlast("submit", "slurm.wall_time=8h")
    assert code == 2
    assert err.startswith(
        "outlast: `sbatch` is not installed here: run this where Slurm's commands"
    )


def test_sbatchs_own_words_are_the_error(outlast: Outlast, tmp_path: Path) -> None:
    put(
        tmp_path,
        "sbatch",
        'echo "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy" '
        ">&2; exit 1",
    )
    code, _, err = outlast("submit", "slurm.wall_time=8h")
    assert code == 2
    words = "Batch job submission failed: Job violates accounting/QOS policy"
    assert err == f"outlast: `sbatch` was refused: {words}\n"


def test_a_submission_writes_the_chain_down(outlast: Outlast, tmp_path: Path) -> None:
    put(tmp_path, "sbatch", f'echo "$@" >> {tmp_path}/asked; echo 41\\;cluster')
    settings = ["run.name=a", "slurm.wall_time=8h", 'slurm.chain="presubmitted"', "slurm.links=3"]
    code, out, _ = outlast("submit", *settings)
    assert code == 0
    assert "submitted 41, 41, 41" in out
    files = chain_files(tmp_path / "runs" / "a")
    plan = read_plan(files)
    assert (plan.kind, plan.links, plan.limit_seconds) == ("presubmitted", 3, 28800.0)
    # The job of all links is complete, whatever becomes of the file that was submitted.
    assert load_job(files.job).run.name == "a"
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line.split()[:2] for line in asked] == [
        ["--parsable", f"{files.path}/link-1.sbatch"],
        ["--parsable", "--dependency=afterany:41"],
        ["--parsable", "--dependency=afterany:41"],
    ]
    assert [each["kind"] for each in entries(files)] == ["created", *["submitted"] * 3]
    # While it is in the queue, no second one is submitted.
    line = "\x1f".join(["41", "PENDING", "1", "1:00", "1", "2", "3", "1", "None", ""])
    put(tmp_path, "squeue", f"printf '%s\\n' '{line}'")
    code, _, err = outlast("submit", *settings)
    assert code == 2
    assert "is in the queue: 41 (pending)" in err


def test_a_link_that_is_over_before_it_trains_is_refused(outlast: Outlast) -> None:
    code, _, err = outlast("submit", "slurm.wall_time=1min", "--dry-run")
    assert code == 2
    assert "slurm.wall_time = 00:01:00 leaves no time to train" in err
    assert "90 s in all" in err


def test_the_directory_of_another_job_is_refused(outlast: Outlast, tmp_path: Path) -> None:
    (tmp_path / "runs/a").mkdir(parents=True)
    job = load_job(None, ["run.name=a", "run.seed=7000"])
    (tmp_path / "runs/a/job.toml").write_text(to_toml(job))
    code, _, err = outlast("submit", "run.name=a", "slurm.wall_time=8h")
    assert code == 2
    assert "run.seed: 7000 -> 0" in err


def submitted(outlast: Outlast, tmp_path: Path, *settings: str) -> ChainFiles:
    """A chain that was submitted and has no job in the queue any more."""
    put(tmp_path, "sbatch", f'echo "$@" >> {tmp_path}/asked; echo 41')
    put(tmp_path, "squeue", "true")
    code, _, err = outlast("submit", "run.name=a", "slurm.wall_time=8h", *settings)
    assert code == 0, err
    return chain_files(tmp_path / "runs" / "a")


def trained(files: ChainFiles, *numbers: int) -> None:
    """Links that have run."""
    for number in numbers:
        note(files, "started", job=str(number), number=number, began=1e9, step=0)


def test_resuming_elsewhere_goes_on_with_the_same_run(
    outlast: Outlast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = submitted(outlast, tmp_path, 'slurm.python="/opt/python"')
    python = read_plan(files).python
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    # A link may start at once: its job is there before it is submitted.
    put(tmp_path, "sbatch", f"cp {files.job} {tmp_path}/seen.toml; echo 42")
    code, out, _ = outlast("cluster", "resume", files.run, "slurm.wall_time=4h")
    assert code == 0, out
    plan = read_plan(files)
    assert (plan.limit_seconds, plan.directory, plan.python) == (4 * 3600.0, str(tmp_path), python)
    assert f"cd {tmp_path} || exit 1\n" in files.script(1).read_text()
    assert load_job(tmp_path / "seen.toml").slurm.wall_time == "4h"
    code, _, err = outlast("cluster", "resume", files.run, "run.name=b")
    assert code == 2
    assert f"are now those of {tmp_path}/runs/b, not of {files.run}" in err


def test_resuming_and_adopting_refuse_settings_of_another_run(
    outlast: Outlast, tmp_path: Path
) -> None:
    files = submitted(outlast, tmp_path)
    (files.run / "job.toml").write_text(files.job.read_text())
    (tmp_path / "job.toml").write_text(files.job.read_text())
    before = files.job.read_text()
    for command in (["resume", files.run], ["adopt", "7", "job.toml"]):
        code, _, err = outlast("cluster", *command, "run.seed=7000")
        assert code == 2
        assert "run.seed: 0 -> 7000" in err
    assert files.job.read_text() == before


@pytest.mark.parametrize("kind", ["array", "presubmitted"])
def test_links_are_counted_from_the_submission(outlast: Outlast, tmp_path: Path, kind: str) -> None:
    settings = [f"slurm.chain={kind}", "slurm.links=3"]
    files = submitted(outlast, tmp_path, *settings)
    trained(files, 1, 2, 3)
    note(files, "finished", outcome="stopped", reason="slurm.links: all 3 links are used up")
    (tmp_path / "asked").unlink()
    code, script, _ = outlast("submit", "run.name=a", "slurm.wall_time=8h", *settings, "--dry-run")
    assert code == 0
    submitted(outlast, tmp_path, *settings)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == (3 if kind == "presubmitted" else 1)
    text = files.script(4).read_text()
    assert ("#SBATCH --array=0-2%1\n" in text) == (kind == "array")
    # But for the name of the chain, which is drawn, this is what the dry run has shown.
    chain = read_plan(files).chain
    assert text.replace(chain, "") == script.replace(script.split("--comment=outlast:")[1][:8], "")
    assert read_plan(files).links == 6
    for last in (9, 12):
        trained(files, *range(last - 5, last - 2))
        assert outlast("cluster", "resume", "runs/a")[0] == 0
        assert read_plan(files).links == last, "as many again, not twice as many"


def test_a_second_submission_begins_with_the_first_nodes(outlast: Outlast, tmp_path: Path) -> None:
    files = submitted(outlast, tmp_path, "slurm.nodes=[4, 2, 3]")
    trained(files, 1, 2, 3)
    note(files, "finished", outcome="cancelled", reason="job 3 was cancelled")
    submitted(outlast, tmp_path, "slurm.nodes=[4, 2, 3]")
    assert "#SBATCH --nodes=4\n" in files.script(4).read_text()
    assert [read_plan(files).nodes_of(number) for number in (4, 5, 6, 9)] == [4, 2, 3, 3]


def test_links_before_one_that_is_refused_are_cancelled(outlast: Outlast, tmp_path: Path) -> None:
    put(
        tmp_path,
        "sbatch",
        f"echo . >> {tmp_path}/tries; number=$(wc -l < {tmp_path}/tries)\n"
        "[ $number -lt 3 ] && echo 4$number && exit 0\n"
        'echo "sbatch: error: Job violates accounting/QOS policy" >&2; exit 1',
    )
    put(tmp_path, "scancel", f'echo "$@" > {tmp_path}/cancelled')
    settings = ["run.name=a", "slurm.wall_time=8h", "slurm.chain=presubmitted", "slurm.links=5"]
    code, _, err = outlast("submit", *settings)
    assert code == 2
    assert "accounting/QOS policy; that was link 3, so those before it (41, 42) were cancel" in err
    assert (tmp_path / "cancelled").read_text() == "41 42\n"
    put(tmp_path, "scancel", "echo scancel: error: Access/permission denied >&2; exit 1")
    (tmp_path / "tries").unlink()
    put(tmp_path, "squeue", "true")
    _, _, err = outlast("submit", *settings)
    assert "could not be cancelled" in err
    assert "`scancel 41 42`" in err


def test_a_refused_request_leaves_the_earlier_run_in_its_place(
    outlast: Outlast, tmp_path: Path
) -> None:
    files = submitted(outlast, tmp_path, 'slurm.command="srun mine"')
    settings = ["run.name=a", "--fresh"]
    code, _, err = outlast("submit", *settings, "slurm.wall_time=1min")
    assert (code, files.plan.exists()) == (2, True), err
    # A program that is not ours writes no job of the run; the chain says that there was one.
    trained(files, 1)
    code, out, err = outlast("submit", *settings, "slurm.wall_time=8h", "--dry-run")
    assert (code, out.splitlines()[-1].endswith("/chain 1")) == (0, True), err
    code, _, err = outlast("submit", *settings, "slurm.wall_time=8h")
    assert code == 0, err
    assert (tmp_path / "runs/a.old1/chain/chain.json").exists()
    assert [each["kind"] for each in entries(files)] == ["created", "submitted"]


def test_variables_of_the_user_do_not_beat_the_script(
    outlast: Outlast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "sbatch", f"env > {tmp_path}/seen; echo 41")
    put(tmp_path, "squeue", "true")
    names = ["TIMELIMIT", "ARRAY_INX", "CONSTRAINT", "REQUEUE", "ACCOUNT", "QOS"]
    for name in names:
        monkeypatch.setenv(f"SBATCH_{name}", "mine")
    settings = ["slurm.qos=long", 'slurm.directives=["--constraint=a100"]']
    code, _, err = outlast("submit", "run.name=a", "slurm.wall_time=8h", *settings)
    assert code == 0, err
    seen = (tmp_path / "seen").read_text()
    assert [name for name in names if f"SBATCH_{name}=" in seen] == ["ACCOUNT"], "not in the script"


def test_no_help_loses_words_in_brackets() -> None:
    """Help is printed as rich's markup, which takes [word] for a style and leaves it out."""
    found = {
        f"{name} {each.name}": each.help or ""
        for name, command in get_command(cluster).commands.items()  # type: ignore[attr-defined]
        for each in [command, *command.params]
        if hasattr(each, "help")
    }
    assert "tasks file" in found
    assert [name for name, text in found.items() if Text.from_markup(text).spans] == []


def chain(tmp_path: Path) -> ChainFiles:
    files = chain_files(tmp_path / "runs" / "a")
    write_plan(
        files, ChainPlan("abcd1234", "a", "dependent", (2,), 4, 3600.0, "/", "python", steps=500)
    )
    note(files, "created", chain="abcd1234")
    note(files, "submitted", job="7", number=1)
    note(files, "started", job="7", number=1, began=1e9, step=0, nodes=2, processes=8, hosts=["n1"])
    note(
        files,
        "ended",
        job="7",
        number=1,
        code=3,
        verdict="continue",
        reason="saved, to be continued",
        step=120,
        seconds=3590.0,
    )
    return files


def test_status_tells_links_and_what_to_do(outlast: Outlast, tmp_path: Path) -> None:
    chain(tmp_path)
    code, out, _ = outlast("cluster", "status", "runs/a")
    assert code == 0
    assert "chain abcd1234 of run a: unknown: `squeue` is not installed here" in out
    assert "0 to 120" in out
    assert "2 x 4" in out
    code, out, _ = outlast("cluster", "status", "runs/a", "--json")
    found = json.loads(out)
    assert found["links"][0]["last_step"] == 120
    assert found["outcome"] == "unknown"


def test_status_of_a_job_file_finds_its_run(outlast: Outlast, tmp_path: Path) -> None:
    chain(tmp_path)
    (tmp_path / "job.toml").write_text(to_toml(load_job(None, ["run.name=a"])))
    code, out, _ = outlast("cluster", "status", "job.toml")
    assert code == 0
    assert "abcd1234" in out


def test_a_run_without_a_chain_is_refused(outlast: Outlast) -> None:
    for command in ("status", "stop", "resume"):
        code, _, err = outlast("cluster", command, "runs/none")
        assert code == 2
        assert "has no chain: `outlast submit job.toml` makes one" in err


def test_a_chain_that_is_done_is_not_resumed(outlast: Outlast, tmp_path: Path) -> None:
    note(chain(tmp_path), "finished", outcome="done", reason="all steps are done")
    code, _, err = outlast("cluster", "resume", "runs/a")
    assert code == 2
    assert "is done; there is nothing to resume" in err


def test_a_job_that_nobody_knows_is_not_adopted(outlast: Outlast, tmp_path: Path) -> None:
    put(tmp_path, "squeue", "true")
    (tmp_path / "job.toml").write_text(to_toml(load_job(None, ["slurm.wall_time=8h"])))
    code, _, err = outlast("cluster", "adopt", "99", "job.toml")
    assert code == 2
    assert "job 99 is not known to Slurm" in err


def test_a_running_job_becomes_the_first_link(outlast: Outlast, tmp_path: Path) -> None:
    line = "\x1f".join(["99", "RUNNING", "4", "1:00:00", "1", "2", "3", "1", "None", ""])
    put(tmp_path, "squeue", f"printf '%s\\n' '{line}'")
    put(tmp_path, "sbatch", f'echo "$@" > {tmp_path}/asked; echo 100')
    (tmp_path / "job.toml").write_text(to_toml(load_job(None, ["slurm.wall_time=8h"])))
    code, out, _ = outlast("cluster", "adopt", "99", "job.toml")
    assert code == 0
    assert "submitted 100 to follow job 99" in out
    assert "--dependency=afterany:99" in (tmp_path / "asked").read_text()


def test_plan_and_explain_say_what_and_why(outlast: Outlast) -> None:
    code, out, _ = outlast("cluster", "plan", "slurm.wall_time=8h")
    assert code == 0
    assert "links of 08:00:00 on 1 node(s)" in out
    assert "assumed until measured" in out
    assert "#SBATCH --time=08:00:00" in out
    code, out, _ = outlast("cluster", "explain", "slurm.wall_time=8h")
    assert code == 0
    assert "afterany" in out
    assert "a job that is cancelled stays cancelled" in out


def idle_cluster(tmp_path: Path) -> None:
    """Eight nodes that nobody uses."""
    line = "\x1f".join(["batch", "up", "1-00:00:00", "0/8/0/8", "OFF", "batch*"])
    put(tmp_path, "sinfo", f"printf '%s\\n' '{line}'")
    put(tmp_path, "squeue", "true")


AUTO = ['slurm.wall_time="auto"', "slurm.nodes=[2]", "run.name=a"]


def test_a_chosen_link_is_shown_before_it_is_submitted(outlast: Outlast, tmp_path: Path) -> None:
    idle_cluster(tmp_path)
    code, out, err = outlast("submit", *AUTO, "--hours", 10, "--dry-run")
    assert (code, err) == (0, "")
    assert "#SBATCH --time=11:04:00\n" in out, "a tenth more than it takes, and a lead"
    assert (
        "# Chosen: just submit one long job, 2 nodes for 11.1 h: predicted to start at once" in out
    )
    put(tmp_path, "sbatch", "echo 41")
    code, out, err = outlast("submit", *AUTO, "slurm.sizes=[2, 4]", "--hours", 10)
    assert (code, err) == (0, "")
    assert "chosen: 4 nodes for " in out
    assert ", predicted to start at once, end the job in 5.38 h, one long job on 2 nodes" in out
    code, out, _ = outlast("cluster", "explain", *AUTO)
    assert code == 0
    assert "chosen last: link 1, job 41: 4 nodes for " in out
    assert "no predicted start of this folder's runs has been seen yet" in out
    code, out, _ = outlast("cluster", "resume", "runs/a")
    assert code == 0
    assert "end the job in 5.38 h" in out, "it remembers the hours while no step is measured"


def test_what_is_left_is_asked_for_only_where_it_is_used(outlast: Outlast) -> None:
    code, _, err = outlast("submit", "slurm.wall_time=8h", "--hours", 10, "--dry-run")
    assert code == 2
    assert (
        '--hours = 10 is only used where the time limit is chosen: set slurm.wall_time = "auto"'
        in err
    )
    code, _, err = outlast("submit", *AUTO, "--dry-run")
    assert code == 2
    assert "this machine cannot ask Slurm (sinfo, squeue): submit on a login node" in err


def test_sizes_that_the_partition_has_not_are_refused(outlast: Outlast, tmp_path: Path) -> None:
    idle_cluster(tmp_path)
    code, _, err = outlast("submit", *AUTO, "slurm.sizes=[16, 32]", "--dry-run")
    assert code == 2
    assert "slurm.sizes = [16, 32]: one job may have 8 nodes there; add smaller numbers" in err


def test_without_a_time_limit_and_without_slurm_all_is_said(outlast: Outlast) -> None:
    code, out, _ = outlast("submit", "--dry-run")
    assert code == 0
    assert "--time" not in out
    code, out, _ = outlast("cluster", "plan")
    assert code == 0
    lead = float(out.partition("its last save begins ")[2].split()[0])
    assert 30.0 < lead < 600.0
    assert outlast("cluster", "explain")[0] == 0


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("10:00:00", "10:00:00"),
        ("2:30:00", "02:30:00"),
        ("1-00:00:00", "1-00:00:00"),
        ("90", "01:30:00"),
        ("8h", "08:00:00"),
        ("30m", "00:30:00"),
        ("10:00", "00:10:00"),
        ('"10:00:00"', "10:00:00"),
        ("99999999h", "4166666-15:00:00"),
    ],
)
def test_a_time_limit_is_taken_as_it_is_typed(outlast: Outlast, typed: str, told: str) -> None:
    code, out, err = outlast("submit", "--dry-run", f"slurm.wall_time={typed}")
    assert code == 0, err
    assert f"#SBATCH --time={told}\n" in out
    warned = int(out.partition("B:USR1@")[2].split()[0])
    assert 10 <= warned <= 65535, "what sbatch takes"


@pytest.mark.parametrize("typed", ["0", "00:00:00", "0.0h", "-5", "unlimited", "2026-01-01"])
def test_what_is_no_time_limit_is_refused_in_a_sentence(outlast: Outlast, typed: str) -> None:
    code, out, err = outlast("submit", "--dry-run", f"slurm.wall_time={typed}")
    assert (code, out) == (2, "")
    assert "slurm.wall_time" in err
    assert "8h" in err


def test_a_time_of_day_in_a_file_is_asked_for_in_quotes(outlast: Outlast, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("[slurm]\nwall_time = 10:00:00\n")
    code, _, err = outlast("submit", "--dry-run", "job.toml")
    assert code == 2
    assert 'should be text in quotes, such as "10:00:00"' in err


def begun_by_run(folder: Path) -> Path:
    """The directory of a run as `outlast.Run` begins it."""
    run = folder / "runs" / "own"
    run.mkdir(parents=True)
    (run / "job.toml").write_text(to_toml(LoopJob(run=RunSection(name="own"))))
    return run


def test_a_run_of_ones_own_loop_is_submitted_by_its_command(
    outlast: Outlast, tmp_path: Path
) -> None:
    run = begun_by_run(tmp_path)
    for arguments in (["run.name=own"], [run / "job.toml"]):
        code, out, err = outlast("submit", "--dry-run", *arguments)
        assert (code, out) == (2, "")
        assert "was begun by outlast.Run" in err
        assert 'slurm.command="srun python train.py"' in err
        own = "slurm.command=srun python train.py"
        code, out, err = outlast("submit", "--dry-run", *arguments, own)
        assert code == 0, err
        assert "#SBATCH --job-name=own\n" in out


def test_a_run_of_ones_own_loop_is_adopted_by_its_directory(
    outlast: Outlast, tmp_path: Path
) -> None:
    run = begun_by_run(tmp_path)
    put(tmp_path, "squeue", f"echo '{shown('7', 'RUNNING')}'")
    put(tmp_path, "sbatch", "echo 8")
    code, _, err = outlast("cluster", "adopt", "7", run)
    assert code == 2
    assert "slurm.command" in err
    # Wherever it is called from, and whatever the job says of its place.
    code, out, err = outlast("cluster", "adopt", "7", "runs/own", "slurm.command=python t.py")
    assert code == 0, err
    assert "submitted 8 to follow job 7" in out
    assert read_plan(chain_files(run)).command == "python t.py"


def test_a_script_with_a_run_of_its_own_is_submitted_as_it_is(
    outlast: Outlast, tmp_path: Path
) -> None:
    put(tmp_path, "sbatch", "echo 8")
    for number, text in enumerate(
        ("import outlast\nwith outlast.Run() as run: pass\n", "from outlast import Run\n")
    ):
        script = tmp_path / f"own{number}.py"
        script.write_text(text)
        code, _, err = outlast("submit", "--script", f"{script} --lr 3")
        assert code == 0, err
        plan = read_plan(chain_files(tmp_path / "runs" / f"own{number}"))
        assert plan.command == f"{sys.executable} {script} --lr 3"
        code, _, err = outlast("submit", "--script", script, "--every", "5", "run.name=b")
        assert code == 2
        assert "leave out --every and --keep" in err
        code, _, err = outlast("submit", "--script", script, "slurm.nodes=[2]", "run.name=b")
        assert code == 2
        assert "slurm.command=" in err


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("JobHeldUser", "you hold it (JobHeldUser); `scontrol release 7` lets it start"),
        ("JobHeldAdmin", "an administrator holds it"),
        ("(ReqNodeNotAvail, UnavailableNodes:n1)", "down, drained or reserved"),
        (
            (
                "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority "
                "partitions"
            ),
            "`sinfo -R` says why",
        ),
        (
            "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority",
            "`sinfo -R` says why",
        ),
        ("Dependency", "the end of the job before it"),
        ("DependencyNeverSatisfied", "did not end as it asked"),
        ("QOSMaxJobsPerUserLimit", "as many jobs as your account or QOS allows"),
        ("QOSGrpNodeLimit", "a limit of its quality of service"),
        ("AssocGrpGRESMinutes", "a limit of its account"),
        ("AssocMaxWallDurationPerJobLimit", "more time than your account or QOS allows"),
        ("PartitionTimeLimit", "resume RUN slurm.wall_time="),
        ("Resources", "when enough nodes are free"),
        ("Priority", "higher priority"),
        ("None", "has not looked at it yet"),
        ("Brandnew", "Slurm says: Brandnew; `scontrol show job 7`"),
    ],
)
def test_status_says_why_a_job_waits(
    outlast: Outlast, tmp_path: Path, reason: str, words: str
) -> None:
    files = chain_files(tmp_path / "runs" / "a")
    write_plan(files, ChainPlan("abc", "a", "dependent", (1,), 1, 3600.0, "/", "python"))
    note(files, "created")
    note(files, "submitted", job="7", number=1)
    line = "\x1f".join(["7", "PENDING", "1", *["x"] * 5, reason, ""])
    put(tmp_path, "squeue", f"echo '{line}'")
    code, out, _ = outlast("cluster", "status", "runs/a")
    assert code == 0
    shown_job = next(row for row in out.splitlines() if row.startswith("job 7: pending: "))
    assert words in shown_job
    assert words in out.splitlines()[0], "the first line says why it waits"
    code, out, _ = outlast("cluster", "status", "runs/a", "--json")
    assert words in json.loads(out)["waits"]["7"]


def test_a_link_whose_node_was_lost_does_not_run_for_its_fence(
    outlast: Outlast, tmp_path: Path
) -> None:
    """Nobody was left to give the fence back."""
    files = chain_files(tmp_path / "runs" / "a")
    write_plan(files, ChainPlan("abc", "a", "dependent", (1,), 1, 3600.0, "/", "python"))
    note(files, "submitted", job="7", number=1)
    note(files, "started", job="7", number=1, began=1.0, step=0)
    Fence(files.fence, "7", lambda job: None).acquire()
    put(tmp_path, "squeue", f"echo '{shown('7', 'NODE_FAIL')}'")
    code, out, _ = outlast("cluster", "status", "runs/a")
    assert code == 0
    assert out.splitlines()[0].startswith("chain abc of run a: stalled")
