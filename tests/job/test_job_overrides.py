"""`section.key=value` on the command line."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.errors import JobError
from outlast.job import load_job

if TYPE_CHECKING:
    from pathlib import Path


def value_of(override: str) -> Any:
    section, key = override.partition("=")[0].strip().split(".")[:2]
    return getattr(getattr(load_job(None, [override]), section.strip()), key.strip())


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.steps=500", 500),
        (" train . steps = 500 ", 500),
        ("optimizer.learning_rate=3e-4", 3e-4),
        ("train.compile=true", True),
        ("run.name=second", "second"),
        ('run.name="second"', "second"),
        ("sample.prompt=", ""),
        ("sample.prompt=a=b", "a=b"),
        ("sample.prompt='def '", "def "),
        ("sample.prompt=x = 1\ny = 2", "x = 1\ny = 2"),
        ("sample.prompt='1'\ny = 2", "'1'\ny = 2"),
        ('data.validation=["a.txt", "b/*.txt"]', ["a.txt", "b/*.txt"]),
        ("model.settings={model_type = 'gpt2', n_layer = 2}", {"model_type": "gpt2", "n_layer": 2}),
    ],
)
def test_value_is_toml_and_a_bare_word_is_text(override: str, value: Any) -> None:
    if override.startswith("data."):
        job = load_job(None, [override, "data.source=text", 'data.train=["c.txt"]'])
        assert job.data.validation == value
    else:
        assert value_of(override) == value


def test_key_inside_a_table_leaves_its_neighbours() -> None:
    before = load_job().model.settings
    after = value_of("model.settings.hidden_size=64")
    assert after == before | {"hidden_size": 64}


def test_table_is_made_where_there_is_none() -> None:
    assert value_of("model.settings.rope.factor=2.0")["rope"] == {"factor": 2.0}


def test_later_override_wins_and_beats_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[model.settings]\nmodel_type = "llama"\n[train]\nsteps = 1\n')
    assert load_job(path).train.steps == 1
    assert load_job(path, ["train.steps=2", "train.steps=3"]).train.steps == 3


@pytest.mark.parametrize(
    "override", ["train.steps", "steps=5", "=5", "train.=5", ".steps=5", "train..steps=5", ""]
)
def test_malformed_override_is_refused(override: str) -> None:
    with pytest.raises(JobError) as caught:
        load_job(None, [override])
    assert caught.value.problems == [
        f"the override `{override}` is not of the form section.key=value"
    ]


def test_override_into_a_value_is_refused() -> None:
    with pytest.raises(JobError, match=r"`train.steps.x=1` goes into `steps`, which is not a sec"):
        load_job(None, ["train.steps.x=1"])


def test_bytes_that_are_not_utf8_are_refused() -> None:
    with pytest.raises(JobError, match=r"'data.train=\[\"\\udce9\"\]' is not UTF-8 text"):
        load_job(None, ['data.train=["\udce9"]'])


def test_misspelt_override_is_answered_like_a_misspelt_file() -> None:
    with pytest.raises(JobError, match=r"train\.stpes is not a known key; did you mean train\.ste"):
        load_job(None, ["train.stpes=5"])


def test_problems_of_overrides_and_file_come_together(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[train]\nsteps = 0\n")
    with pytest.raises(JobError) as caught:
        load_job(path, ["nonsense", "run.seed=-1"])
    assert len(caught.value.problems) == 4  # the model is missing, too


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
@settings(deadline=None, max_examples=50)
def test_any_override_gives_a_job_or_a_sentence(text: str) -> None:
    for override in (text, f"sample.prompt={text}", f"model.settings.{text}"):
        with contextlib.suppress(JobError):  # any other error would be a traceback for the user
            load_job(None, [override])


def test_a_model_that_an_override_names_replaces_the_files(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[model.settings]\nmodel_type = "llama"\nhidden_size = 64\n')
    job = load_job(file, ["model.config=config.json"])
    assert (job.model.config, job.model.settings) == ("config.json", {})
    file.write_text('[model]\nmodule = "own:model"\n[model.arguments]\nwidth = 3\n')
    job = load_job(file, ["model.directory=llama"])
    assert (job.model.module, job.model.directory, job.model.arguments) == (None, "llama", {})
    job = load_job(file, ["model.module=own:model", "model.arguments.width=4"])
    assert (job.model.module, job.model.arguments) == ("own:model", {"width": 4})
    # A part of a model does not replace a whole one.
    with pytest.raises(JobError, match="exactly one"):
        load_job(file, ["model.settings.hidden_size=32"])
    with pytest.raises(JobError, match="exactly one"):
        load_job(file, ["model.config=a.json", "model.directory=b"])
