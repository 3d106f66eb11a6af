"""What makes two starts the same run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from job_strategies import jobs

from outlast.job import Job, differences, fingerprint, identity, job_from_text, load_job


@pytest.mark.parametrize(
    "override",
    [
        "run.name=other",
        "run.directory=elsewhere",
        "train.micro_batch_size=2",
        "train.compile=true",
        "train.activation_checkpointing=true",
        "train.stop_after_steps=3",
        "parallel.shard=2",
        "parallel.tensor=2",
        "parallel.pipeline=2",
        "checkpoint.every_steps=7",
        "checkpoint.keep=9",
        "evaluate.every_steps=3",
        "sample.prompt=x",
        "export.huggingface=false",
        "log.every_steps=1",
        "log.tensorboard=true",
        "launch.nproc=4",
        "data.prepare_timeout_seconds=1.0",
    ],
)
def test_setting_of_one_start_leaves_the_run_the_same(override: str) -> None:
    one, other = load_job(), load_job(None, [override])
    assert one != other
    assert fingerprint(one) == fingerprint(other)
    assert differences(one, other) == []


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("run.seed=1", "run.seed: 0 -> 1"),
        ("run.deterministic=false", "run.deterministic: True -> False"),
        ("train.precision=bf16", "train.precision: 'fp32' -> 'bf16'"),
        ("optimizer.name=adamw", "optimizer.name: 'muon' -> 'adamw'"),
        ("optimizer.beta1=0.8", "optimizer.beta1: 0.9 -> 0.8"),
        ("data.sequence_length=64", "data.sequence_length: 128 -> 64"),
        ("data.tokenizer=t.json", "data.tokenizer: 'byte' -> 't.json'"),
    ],
)
def test_setting_that_decides_the_numbers_makes_another_run(override: str, line: str) -> None:
    one, other = load_job(), load_job(None, [override])
    assert fingerprint(one) != fingerprint(other)
    assert differences(one, other) == [line]


@pytest.mark.parametrize("override", ["train.steps=7000", "schedule.warmup_steps=5"])
def test_setting_that_may_change_during_a_run_is_recorded_and_not_refused(override: str) -> None:
    one, other = load_job(), load_job(None, [override])
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one, adjusted=False) == fingerprint(other, adjusted=False)
    assert differences(one, other) == []


def test_order_of_the_keys_does_not_matter() -> None:
    first = job_from_text('model.settings = { model_type = "llama", hidden_size = 8 }')
    second = job_from_text('model.settings = { hidden_size = 8, model_type = "llama" }')
    assert fingerprint(first) == fingerprint(second)


def test_identity_names_settings_as_the_user_writes_them() -> None:
    found = identity(load_job())
    assert found["train.steps"] == 450
    assert found["model.settings"]["hidden_size"] == 128


def test_fingerprint_is_the_same_in_every_process() -> None:
    code = "from outlast.job import fingerprint, load_job; print(fingerprint(load_job()))"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    output = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
    assert output.strip() == fingerprint(load_job())
    assert len(output.strip()) == 16


@pytest.mark.slow
@given(jobs(), jobs(), st.sampled_from(list(Job.model_fields)))
@settings(
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_fingerprints_differ_exactly_where_there_is_a_difference(
    one: Job, donor: Job, section: str
) -> None:
    other = one.model_copy(update={section: getattr(donor, section)})
    equal = fingerprint(one, adjusted=False) == fingerprint(other, adjusted=False)
    assert equal == (differences(one, other) == [])
    assert differences(one, one) == []


def test_true_is_not_one() -> None:
    one = job_from_text('model.settings = { model_type = "llama", bias = true }')
    other = job_from_text('model.settings = { model_type = "llama", bias = 1 }')
    assert fingerprint(one) != fingerprint(other)
    assert len(differences(one, other)) == 1
