"""Jobs written as TOML come back as they were."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from job_strategies import ATOMS, TABLES, jobs

from outlast.job import Job, ModelSection, fingerprint, job_from_text, load_job, to_toml
from outlast.job.section import toml_value

SLOW_DRAWS = [HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.mark.slow
@given(jobs(), st.booleans())
@settings(deadline=None, max_examples=60, suppress_health_check=SLOW_DRAWS)
def test_job_survives_being_written_and_read(job: Job, comments: bool) -> None:
    again = job_from_text(to_toml(job, comments=comments))
    assert again == job
    assert fingerprint(again) == fingerprint(job)


@given(st.lists(ATOMS) | TABLES)
@settings(deadline=None, max_examples=60)
def test_value_survives_being_written_and_read(value: object) -> None:
    again = tomllib.loads(f"value = {toml_value(value)}")["value"]
    assert repr(again) == repr(value)


def test_unset_keys_are_shown_as_comments_and_stay_unset() -> None:
    text = to_toml(load_job())
    assert "# wandb_project =" in text.splitlines()
    assert job_from_text(text).log.wandb_project is None


def test_comments_say_what_every_setting_means() -> None:
    text = to_toml(load_job())
    assert "# optimizer steps in the whole run\nsteps = 450\n" in text
    assert "# optimizer steps" not in to_toml(load_job(), comments=False)


def test_module_with_arguments_survives() -> None:
    model = ModelSection(module="mine.models:tiny", arguments={"widths": [1, 2], "a": {"b": True}})
    job = load_job().model_copy(update={"model": model})
    assert job_from_text(to_toml(job)) == job
