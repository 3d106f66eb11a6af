"""`outlast submit --script`: what links run, and what is refused before anything is submitted."""

import shlex
import sys

import pytest
from running import SCRIPT

from outlast.cli.submit import job_of_script, named_after
from outlast.errors import AutosaveError, ClusterError
from outlast.job import load_job

PLACES = ("slurm.wall_time=8h", "run.name=a")


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_links_run_the_script_with_its_arguments_as_they_are(script):
    job = job_of_script(load_job(None, [*PLACES, "slurm.nodes=[2]"]), "train.py --note 'a b'")
    assert shlex.split(job.slurm.command) == [
        "srun",
        "--kill-on-bad-exit=1",
        "--export=ALL,OUTLAST_LINK_RECORD=1",
        sys.executable,
        "-m",
        "outlast",
        "run",
        f"--directory={script.parent}/runs/a/script",
        str(script),
        "--note",
        "a b",
    ]
    alone = job_of_script(load_job(None, list(PLACES)), "train.py")
    assert shlex.split(alone.slurm.command)[0] == sys.executable


def test_run_is_named_after_the_script_unless_it_has_a_name():
    assert named_after("my/train.py --lr 1", []) == ["run.name=train"]
    assert named_after("my/train.py", ["run.name=b"]) == ["run.name=b"]


def test_name_of_the_job_file_stays(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text('[run]\nname = "mine"\n')
    assert named_after("my/train.py", [], file) == []
    file.write_text("[run]\nseed = 1\n")
    assert named_after("my/train.py", [], file) == ["run.name=train"]


def test_how_often_to_save_is_passed_on(script):
    job = load_job(None, list(PLACES))
    words = shlex.split(job_of_script(job, "train.py", every="10m", keep=3).slurm.command)
    assert words[-3:] == ["--every=10m", "--keep=3", str(script)]
    with pytest.raises(AutosaveError, match="--every often is neither"):
        job_of_script(job, "train.py", every="often")


@pytest.mark.parametrize(
    ("text", "settings", "sentence"),
    [
        ("missing.py", [], "does not begin with the path of a Python file"),
        ("", [], "does not begin with the path of a Python file"),
        ("train.py", ["slurm.command=./mine"], "--script both say what is to be run"),
        ("train.py", ["slurm.nodes=[4, 2]"], "gives links other numbers of nodes"),
        (
            "train.py",
            ["slurm.wall_time=auto"],
            "give a time with --script, e.g. slurm.wall_time=8h",
        ),
    ],
)
def test_what_cannot_be_a_chain_is_refused(script, text, settings, sentence):
    with pytest.raises(ClusterError, match=sentence):
        job_of_script(load_job(None, [*PLACES, *settings]), text)


def test_script_without_a_training_loop_is_refused(script):
    script.write_text("print('hello')\n")
    with pytest.raises(AutosaveError, match="no training loop was found"):
        job_of_script(load_job(None, list(PLACES)), "train.py")
