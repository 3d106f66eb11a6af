"""Settings of a training loop that is not ours: the sections it has, and what it cannot follow."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from outlast.errors import JobError
from outlast.job import (
    Job,
    LoopJob,
    default_job_text,
    fingerprint,
    load_job,
    load_loop_job,
    loop_job_from_text,
    loop_template,
    settings_from_text,
    to_toml,
)

if TYPE_CHECKING:
    from pathlib import Path


def problems_of(*overrides: str) -> list[str]:
    with pytest.raises(JobError) as caught:
        load_loop_job(None, [*overrides])
    return caught.value.problems


def test_a_file_and_overrides_make_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[run]\nname = "mine"\n[checkpoint]\nevery_steps = "auto"\n')
    job = load_loop_job(file, ["checkpoint.keep=5", 'energy.region="SE"'])
    assert (job.run.name, job.checkpoint.every_steps) == ("mine", "auto")
    assert (job.checkpoint.keep, job.energy.region) == (5, "SE")
    assert load_loop_job() == LoopJob()


def test_what_is_written_down_is_read_back() -> None:
    job = load_loop_job(None, ["run.seed=3", 'guard.modules={"*.mlp.*" = "linear"}'])
    assert loop_job_from_text(to_toml(job)) == job
    assert fingerprint(job) != fingerprint(LoopJob())
    # Where it runs and how often it saves may change from one start to the next.
    assert fingerprint(load_loop_job(None, ["checkpoint.every_steps=7"])) == fingerprint(LoopJob())


def test_a_trainers_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(to_toml(load_job()))
    with pytest.raises(JobError) as caught:
        load_loop_job(file)
    [sentence] = caught.value.problems
    assert sentence.startswith("[model], [data], [tensorize], [train],")
    assert sentence.endswith("write a file for loops with `outlast init --loop loop.toml`")
    with pytest.raises(JobError, match=r"does not exist; `outlast init --loop` writes one"):
        load_loop_job(tmp_path / "none.toml")


def test_a_file_for_loops_has_all_that_they_follow_and_nothing_else() -> None:
    text = loop_template(LoopJob())
    assert loop_job_from_text(text) == LoopJob()
    assert "every_steps" in text
    assert "deterministic" not in text


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "train.steps=5",
            (
                "[train] is a section of `outlast train`; here it is the script that decides "
                "what it says: remove [train]"
            ),
        ),
        (
            "checkpoint.evry_steps=5",
            "checkpoint.evry_steps is not a known key; did you mean checkpoint.every_steps?",
        ),
        ("checkpoint.keep=0", "checkpoint.keep = 0 is not possible: it should be at least 1"),
        (
            "run.deterministic=false",
            (
                "run.deterministic = false has no effect here: the script calls "
                "torch.use_deterministic_algorithms itself; remove it"
            ),
        ),
        (
            "checkpoint.keep_best=2",
            (
                "checkpoint.keep_best = 2 has no effect here: the validation loss is the script's "
                "own; remove it"
            ),
        ),
        (
            "checkpoint.replay=exact",
            (
                'checkpoint.replay = "exact" has no effect here: the optimizer\'s steps are the '
                "script's own; remove it"
            ),
        ),
        (
            "recover.mode=live",
            (
                'recover.mode = "live" needs a loop that `outlast train` or outlast.recover.live '
                'runs; set "restart" or "off"'
            ),
        ),
    ],
)
def test_what_a_loop_cannot_follow_is_refused(override: str, sentence: str) -> None:
    assert problems_of(override) == [sentence]


def test_all_problems_are_told_at_once() -> None:
    assert len(problems_of("train.steps=5", "checkpoint.keep=0", "recover.groups=2")) == 3


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="the file does not exist"):
        load_loop_job(tmp_path / "job.toml")


def test_a_run_tells_by_its_sections_who_trains_in_it() -> None:
    loop = load_loop_job(None, ["energy.pue=1.5"])
    assert settings_from_text(to_toml(loop)) == loop
    whole = settings_from_text(default_job_text())
    assert isinstance(whole, Job)
    assert settings_from_text(to_toml(whole)) == whole


def test_the_settings_need_no_torch() -> None:
    code = (
        "import sys; from outlast.job import load_loop_job; load_loop_job(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
