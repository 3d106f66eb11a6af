"""Reading a job file: what is wrong is said in plain words, all of it at once."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from outlast.errors import JobError
from outlast.job import (
    Job,
    default_job_text,
    job_from_text,
    load_job,
    load_loop_job,
    loop_job_from_text,
    settings_from_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODEL = '[model.settings]\nmodel_type = "llama"\n'


def problems_of(text: str) -> list[str]:
    with pytest.raises(JobError) as caught:
        job_from_text(MODEL + text)
    return caught.value.problems


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[train]\nstpes = 5", "train.stpes is not a known key; did you mean train.steps?"),
        ("[trian]\nsteps = 5", "trian is not a known section; did you mean train?"),
        ("[train]\nseed = 5", "train.seed is not a known key; did you mean run.seed?"),
        (
            "[log]\nmodle = 1",
            (
                "log.modle is not a known key; known here are every_steps, tensorboard, "
                "wandb_project, mlflow_experiment, mlflow_uri, trackio_project"
            ),
        ),
    ],
)
def test_unknown_key_is_answered_with_the_nearest_known(text: str, sentence: str) -> None:
    assert problems_of(text) == [sentence]


def test_a_list_of_one_text_needs_no_brackets_on_the_command_line() -> None:
    job = load_job(None, ["data.source=tokens", "data.train=x.bin", 'data.validation=["y.bin"]'])
    assert (job.data.train, job.data.validation) == (["x.bin"], ["y.bin"])
    assert load_loop_job(None, ["energy.sources=gpu"]).energy.sources == ["gpu"]


def test_key_above_every_section_is_answered_with_its_section() -> None:
    with pytest.raises(JobError) as caught:
        job_from_text("steps = 5\n" + MODEL)
    assert caught.value.problems == ["steps is not a known section; did you mean train.steps?"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[train]\nprecision = "fp8"', 'train.precision = "fp8"; it should be "fp32" or "bf16"'),
        ('[train]\nsteps = "5"', 'train.steps = "5"; it should be a whole number'),
        ("[train]\nsteps = true", "train.steps = true; it should be a whole number"),
        ("[train]\nsteps = 1.5", "train.steps = 1.5; it should be a whole number"),
        ("[train]\nsteps = 1e3", "train.steps = 1000.0; it should be a whole number, written 1000"),
        ("[train]\nsteps = 0", "train.steps = 0; it should be at least 1"),
        ("[train]\ncompile = 1", "train.compile = 1; it should be true or false, without quotes"),
        (
            '[train]\ncompile = "no"',
            'train.compile = "no"; it should be true or false, without quotes',
        ),
        ("[optimizer]\nlearning_rate = 0", "optimizer.learning_rate = 0; it should be above 0"),
        ("[optimizer]\nbeta1 = 1.0", "optimizer.beta1 = 1.0; it should be below 1"),
        (
            "[optimizer]\nlearning_rate = inf",
            "optimizer.learning_rate = inf; it should be a finite number",
        ),
        (
            "[optimizer]\nweight_decay = nan",
            "optimizer.weight_decay = nan; it should be a finite number",
        ),
        ('[optimizer]\nbeta2 = "x"', 'optimizer.beta2 = "x"; it should be a number'),
        (
            "[schedule]\nfinal_fraction = 1.5",
            "schedule.final_fraction = 1.5; it should be at most 1",
        ),
        (
            '[data]\ntrain = "a.txt"',
            'data.train = "a.txt"; it should be a list of texts such as ["a.txt", "b.txt"]',
        ),
        ('[data]\ntrain = ["a", 1]', "data.train.1 = 1; it should be text in quotes"),
        (
            '[run]\nname = "a b"',
            (
                'run.name = "a b"; it should be letters, digits, dots, dashes and underscores, '
                "with a letter or a digit first"
            ),
        ),
        ("[run]\nname = 2024", "run.name = 2024; it should be text in quotes"),
    ],
)
def test_wrong_value_is_named_with_what_would_be_right(text: str, sentence: str) -> None:
    assert problems_of(text) == [sentence.replace(";", " is not possible:", 1)]


def test_module_must_name_a_function() -> None:
    with pytest.raises(JobError, match=r'"mine" is not possible: it should be package\.module:fun'):
        job_from_text('[model]\nmodule = "mine"')


@pytest.mark.parametrize("text", ["log = 3", 'log = "x"', "[[log]]\nevery_steps = 1"])
def test_value_in_place_of_a_section_is_refused(text: str) -> None:
    with pytest.raises(JobError) as caught:
        job_from_text(text + "\n" + MODEL)
    (problem,) = caught.value.problems
    assert problem.endswith("must be a section: write [log] and its keys below it")


@pytest.mark.parametrize("value", ["2024-01-31", "nan", "12:30:00"])
def test_model_settings_hold_only_what_can_be_written_again(value: str) -> None:
    with pytest.raises(JobError) as caught:
        job_from_text(MODEL + f"rope = {{ scaling = [1, {value}] }}")
    (problem,) = caught.value.problems
    assert problem.startswith("model.settings.rope.scaling.1 = ")
    assert problem.endswith("it should be text, a number, true, false, a list or a table of these")


def test_all_problems_are_listed_at_once() -> None:
    text = (
        '[train]\nstpes = 5\nprecision = "fp8"\n[trian]\n[run]\nseed = -1\n'
        '[data]\nsource = "text"\n'  # needs data.train: an impossible combination
    )
    with pytest.raises(JobError) as caught:
        job_from_text(MODEL + text, source="mine.toml")
    assert sorted(problem.split(" ")[0] for problem in caught.value.problems) == [
        "data.source",
        "run.seed",
        "train.precision",
        "train.stpes",
        "trian",
    ]
    lines = str(caught.value).splitlines()
    assert lines[0] == "mine.toml has 5 problems:"
    assert lines[1:] == [f"  - {problem}" for problem in caught.value.problems]


def test_misspelt_section_is_not_also_reported_as_missing() -> None:
    with pytest.raises(JobError) as caught:
        job_from_text('[modle]\nconfig = "config.json"')
    assert caught.value.problems == ["modle is not a known section; did you mean model?"]


@pytest.mark.parametrize("read", [load_job, load_loop_job])
def test_a_setting_of_an_earlier_release_is_answered_with_what_to_do(
    tmp_path: Path, read: Callable[[Path], Any]
) -> None:
    file = tmp_path / "job.toml"
    file.write_text(("" if read is load_loop_job else MODEL) + "[checkpoint]\ndelta_chain = 8\n")
    with pytest.raises(JobError, match=r"checkpoint\.delta_chain is no setting any more") as caught:
        read(file)
    (problem,) = caught.value.problems
    assert 'checkpoint.replay = "bf16" keeps every step' in problem
    # What was written out as the default says what holds now.
    file.write_text(file.read_text().replace("8", "0"))
    read(file)


@pytest.mark.parametrize("chain", [0, 8])
def test_what_an_earlier_release_has_recorded_of_a_run_is_read(chain: int) -> None:
    text = f"[checkpoint]\ndelta_chain = {chain}\nkeep = 5\n"
    for job in (
        job_from_text(text + MODEL),
        loop_job_from_text(text),
        settings_from_text(text),
        settings_from_text(text + MODEL),
    ):
        assert job.checkpoint.keep == 5


def test_long_value_is_shown_shortened() -> None:
    (problem,) = problems_of(f'[train]\nprecision = "{"x" * 1000}"')
    assert len(problem) < 200


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"absent\.toml: the file does not exist"):
        load_job(tmp_path / "absent.toml")


def test_folder_in_place_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="the file cannot be read: it is a folder"):
        load_job(tmp_path)


@pytest.mark.parametrize(
    "text", ["[train", "steps = ", "a = 1\na = 2", "a = " + "9" * 5000, "a = " + "[" * 20_000]
)
def test_invalid_toml(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(JobError, match="not valid TOML: "):
        load_job(path)


def test_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b'[sample]\nprompt = "caf\xe9"\n')
    with pytest.raises(JobError, match=r"not UTF-8 text \(byte 22\); save it as UTF-8"):
        load_job(path)


def test_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(
        b"\xef\xbb\xbf" + (MODEL + "[train]\nsteps = 7\n").replace("\n", "\r\n").encode()
    )
    assert load_job(path).train.steps == 7


def test_embedded_default_is_valid_and_what_load_job_gives() -> None:
    job = load_job()
    assert job == job_from_text(default_job_text())
    assert job.run.name == "quickstart"
    assert job.data.source == "stdlib"


def test_every_setting_has_a_description() -> None:
    for name, section in Job.model_fields.items():
        for key, field in section.annotation.model_fields.items():
            assert field.description, f"{name}.{key}"


def test_loading_a_job_needs_no_heavy_package_and_little_time() -> None:
    code = (
        "import sys, time\n"
        "from outlast.job import load_job\n"
        "load_job()\n"
        "print(*{'torch', 'transformers', 'numpy'} & sys.modules.keys())\n"
        "print(time.process_time())\n"
    )
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    heavy, seconds = output.split("\n")[:2]
    assert heavy == ""
    assert float(seconds) < 1.0
