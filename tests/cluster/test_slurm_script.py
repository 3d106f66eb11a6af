"""The exact text of a batch script."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from outlast.cluster.chain_files import ChainFiles, ChainPlan
from outlast.cluster.submission import batch_script, log_pattern
from outlast.errors import ClusterError

GOLDEN = Path(__file__).parent / "slurm_outputs" / "link.sbatch"

FILES = ChainFiles(Path("/scratch/my runs/notes/chain"))
FULL = ChainPlan(
    chain="3fa9b1c2",
    name="notes",
    kind="dependent",
    nodes=(4,),
    tasks_per_node=8,
    limit_seconds=8 * 3600.0,
    directory="/scratch/my project",
    python="/opt/venv/bin/python",
    cpus_per_task=6,
    gpus_per_node=8,
    partition="gpu,gpu-long",
    account="team",
    qos="normal",
    directives=("--constraint=a100", "mail-type=END", "#BB create_persistent name=x", "\n#DW y\n"),
    setup=("module load cuda", "export NCCL_DEBUG=WARN"),
)


def script(plan: ChainPlan, files: ChainFiles = FILES) -> str:
    return batch_script(files, plan, 2, 90.0)


def test_the_script_is_exactly_this() -> None:
    assert script(FULL) == GOLDEN.read_text()


def test_what_is_not_asked_for_is_not_there() -> None:
    text = script(ChainPlan("c", "a", "dependent", (1,), 1, None, "/d", "true"))
    for option in ("--time", "--partition", "--account", "--qos", "--gpus", "--cpus", "--array"):
        assert option not in text
    assert "#SBATCH --no-requeue\n" in text
    assert text.startswith("#!/bin/bash\n#SBATCH ")
    assert text.splitlines()[-1].startswith("exec true ")


def test_links_of_an_array_run_one_after_the_other() -> None:
    text = script(replace(FULL, kind="array", links=7))
    assert "#SBATCH --array=0-5%1\n" in text
    assert "# Links 2 to 7 of chain 3fa9b1c2, run notes;" in text


def test_directives_end_before_the_first_command() -> None:
    lines = script(FULL).splitlines()
    last = max(index for index, line in enumerate(lines) if line.startswith("#"))
    first = min(index for index, line in enumerate(lines) if line and not line.startswith("#"))
    assert last < first, "sbatch reads no directive after the first command"


def test_a_value_with_a_line_end_is_refused() -> None:
    with pytest.raises(ClusterError, match="line end"):
        script(replace(FULL, name="two\nlines"))


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="sbatch is not installed")
@pytest.mark.parametrize(
    "folder", ["/s/it's", "/s/a b", "/s/c#1", '/s/"q"', "/s/%j of %u", "/s/;$&"]
)
def test_sbatch_reads_what_was_meant(tmp_path: Path, folder: str) -> None:
    config = (
        "ClusterName=none\nSlurmctldHost=localhost\nSlurmctldPort=1\nAuthType=auth/none\n"
        "NodeName=localhost\nPartitionName=p Nodes=localhost\n"
    )
    (tmp_path / "slurm.conf").write_text(config)
    name = r'a\b "c" # d'
    text = script(replace(FULL, name=name, directives=()), ChainFiles(Path(folder)))
    (tmp_path / "link.sbatch").write_text(text)
    sbatch = subprocess.Popen(
        ["sbatch", "--verbose", str(tmp_path / "link.sbatch")],
        env={"PATH": "/usr/bin:/bin", "SLURM_CONF": str(tmp_path / "slurm.conf")},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert sbatch.stderr is not None
    options = {}
    # It prints what it has read before it looks for a controller, which is not there.
    for line in sbatch.stderr:
        if "end of defined options" in line:
            break
        key, _, value = line.removeprefix("sbatch: ").partition(":")
        options[key.strip()] = value.strip()
    sbatch.kill()
    sbatch.wait()
    sbatch.stderr.close()
    assert options["job-name"] == name
    assert options["output"] == f"{folder.replace('%', '%%')}/link-%j.log"
    assert options["time"] == "08:00:00", "options after it are read too"


def test_a_folder_in_which_slurm_names_no_log_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"/a\\b holds a backslash"):
        log_pattern(r"/a\b", "link-%j.log")


def test_without_its_folder_a_link_does_not_begin(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/bash\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    gone = replace(FULL, directory=str(tmp_path / "gone"), setup=(), python=str(program))
    done = subprocess.run(["bash", "-c", script(gone)], capture_output=True, check=False)
    assert done.returncode == 1
    assert not (tmp_path / "ran").exists()
