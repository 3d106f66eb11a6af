"""What the command line offers and says, and what it must not load to say it."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from in_process import in_process

from outlast import __version__
from outlast.cli.app import app
from outlast.cli.console import print_json
from outlast.hardware.figure import Unavailable
from outlast.job import Job, load_job

COMMANDS = ("train", "watch", "submit", "init", "export", "report", "doctor", "convert")


@pytest.fixture
def outlast(monkeypatch, capsys):
    """Run the program in this process: `outlast(*arguments)` gives code, stdout and stderr."""
    return in_process(monkeypatch, capsys)


def test_help_names_every_command(outlast):
    code, out, _ = outlast("--help")
    assert code == 0
    for command in COMMANDS:
        assert f" {command} " in out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(outlast, command):
    code, out, _ = outlast(command, "--help")
    assert code == 0
    assert f"Usage: outlast {command}" in out


def test_train_help_fits_a_screen_and_names_the_longer_one(outlast):
    code, out, _ = outlast("train", "--help")
    assert code == 0
    assert len(out.splitlines()) < 60
    assert "--help-all" in out


def test_train_help_all_shows_every_setting(outlast):
    code, out, _ = outlast("train", "--help-all")
    assert code == 0
    for name, field in Job.model_fields.items():
        assert f"[{name}]" in out
        for key in type(field.default).model_fields:
            assert f" {key} " in out, f"{name}.{key}"
    assert "--nproc" in out
    assert "--fresh" in out
    assert "e.g. model_type" in " ".join(out.split())


def _commands(group, path=()):
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from _commands(command, (*path, name))


@pytest.mark.parametrize("columns", [60, pytest.param(120, marks=pytest.mark.slow)])
def test_help_wraps_to_the_terminal(outlast, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    for path in _commands(typer.main.get_command(app)):
        code, out, _ = outlast(*path, "--help")
        assert code == 0
        assert max(map(len, out.splitlines())) <= columns, path
    _, out, _ = outlast("train", "--help")
    lines = [line.strip() for line in out.splitlines()]
    first = next(line for line in lines if line.startswith("The same command starts"))
    assert len(first) > columns - 20


def test_json_says_why_a_figure_is_not_known(capsys):
    print_json({"loss": math.nan, "watts": Unavailable("no meter", "install one"), "kinds": (1,)})
    assert json.loads(capsys.readouterr().out) == {
        "loss": None,
        "watts": {"unavailable": "no meter", "remedy": "install one"},
        "kinds": [1],
    }


def test_version(outlast):
    assert outlast("--version") == (0, f"outlast {__version__}\n", "")


def test_no_command_shows_the_help(outlast):
    _, out, err = outlast()
    assert "train" in out + err


@pytest.mark.parametrize(
    "arguments", [["trian"], ["train", "--nprocs", "2"], ["train", "--nproc", "0"]]
)
def test_wrong_usage_ends_with_code_2(outlast, arguments):
    code, _, err = outlast(*arguments)
    assert code == 2
    assert "Usage: outlast" in err


def test_init_writes_a_job_that_can_be_loaded(outlast, tmp_path):
    file = tmp_path / "mine.toml"
    code, out, _ = outlast("init", file)
    assert code == 0
    assert f"outlast train {file}" in out
    job = load_job(file)
    assert job.run.name == "mine"
    assert job.model_copy(update={"run": load_job().run}) == load_job()
    text = file.read_text()
    for name, field in Job.model_fields.items():
        assert f"[{name}]" in text
        for key, each in type(field.default).model_fields.items():
            if each.default != {}:
                assert f"{key} =" in text
                assert f"\n# {each.description[:40]}" in text


@pytest.mark.parametrize("name", ["my job.toml", "_hidden.toml", ".toml", "größe.toml", "---"])
def test_init_names_the_run_so_that_the_file_can_be_loaded(outlast, tmp_path, name):
    assert outlast("init", tmp_path / name)[0] == 0
    assert load_job(tmp_path / name).run.name


def test_init_replaces_no_file_unless_forced(outlast, tmp_path):
    file = tmp_path / "job.toml"
    file.write_text("mine")
    code, _, err = outlast("init", file)
    assert (code, file.read_text()) == (2, "mine")
    assert err == f"outlast: {file} exists; give another name or --force to replace it\n"
    assert outlast("init", file, "--force")[0] == 0
    assert load_job(file).run.name == "job"


def test_init_in_a_folder_that_is_not_there_or_as_a_folder(outlast, tmp_path):
    code, _, err = outlast("init", tmp_path / "no" / "job.toml")
    assert code == 2
    assert f"the folder {tmp_path / 'no'} does not exist" in err
    code, _, err = outlast("init", tmp_path, "--force")
    assert code == 2
    assert "is a folder" in err


@pytest.mark.parametrize("command", ["export", "report"])
def test_a_folder_that_is_no_run_is_refused(outlast, tmp_path, command):
    code, _, err = outlast(command, tmp_path)
    assert code == 2
    assert f"{tmp_path} is not a run directory" in err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no/such.toml"], "the file does not exist; `outlast init` writes one"),
        (["train.stepz=3"], "train.stepz is not a known key; did you mean train.steps?"),
        (["train.steps=0"], "train.steps = 0 is not possible: it should be at least 1"),
        (["train.steps"], "train.steps is a setting without a value"),
        (
            ["data.source=text", 'data.train=["no/such.txt"]'],
            "no file is found for 'no/such.txt'",
        ),
        (["model.settings.vocab_size=10"], "vocabulary_size is 10"),
        (["data.sequence_length=1000"], "data.sequence_length = 1000 exceeds"),
        (["--nproc", "3", "parallel.shard=2"], "needs 2 processes, but 3 were started"),
        (["data.tokenizer=no.json"], "data.tokenizer = 'no.json' is neither"),
    ],
)
def test_wrong_input_is_answered_before_anything_is_written(
    outlast, tmp_path, monkeypatch, arguments, sentence
):
    monkeypatch.chdir(tmp_path)
    code, out, err = outlast("train", *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.startswith("outlast: ")
    assert list(tmp_path.iterdir()) == []


def test_all_problems_are_listed_at_once(outlast, tmp_path):
    file = tmp_path / "job.toml"
    file.write_text("[train]\nsteps = 0\nbatchsize = 3\n[optimiser]\n")
    code, _, err = outlast("train", file)
    assert code == 2
    assert f"{file} has 3 problems:" in err
    assert "train.batch_size" in err
    assert "did you mean optimizer?" in err


def loaded_by(*arguments):
    """Names of all modules that a fresh Python has loaded after `arguments`."""
    script = (
        "import runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "try:\n"
        "    if len(sys.argv) > 1:\n"
        "        runpy.run_module('outlast', run_name='__main__')\n"
        "    else:\n"
        "        import outlast\n"
        "except SystemExit:\n"
        "    pass\n"
        "print('LOADED', *sorted(sys.modules))\n"
    )
    # From elsewhere, so that it is the installed package that answers.
    run = subprocess.run(
        [sys.executable, "-c", script, "outlast", *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(os.sep),
    )
    return set(run.stdout.splitlines()[-1].split()[1:])


def test_importing_outlast_loads_nothing_heavy():
    loaded = loaded_by()
    assert "outlast" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "pydantic", "rich", "typer"}


def test_help_loads_neither_torch_nor_transformers():
    loaded = loaded_by("--help")
    assert "outlast.cli.train" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "plotly", "pydantic"}


@pytest.mark.slow
def test_the_trainers_modules_load_torch_and_no_other_large_library():
    # Every process of every run pays for it. Models of Hugging Face load transformers when made.
    script = "import sys, outlast.train.launch, outlast.train.run; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path(os.sep)
    )
    loaded = set(run.stdout.split())
    assert "torch" in loaded
    assert not loaded & {
        *("transformers", "accelerate", "scipy", "pandas", "plotly", "blosc2", "tensorboard"),
        *("torchft", "torch.distributed.pipelining"),
    }
