"""Probes of a machine: which settings there are, which are run, and what they teach."""

import json
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from plan_probe_machine import MACHINE, Simulated

from outlast.errors import PlanError
from outlast.job import job_from_text, load_job, to_toml
from outlast.plan.api import run_of
from outlast.plan.batch import cases
from outlast.plan.probes import (
    Probing,
    _ended,
    family,
    numbers_of,
    probe_job,
    run_probe,
)
from outlast.plan.step_fit import Belonging, fit
from outlast.plan.step_model import belonging
from outlast.plan.step_time import step_seconds

SETTINGS = family(load_job(None), 2, most=80)


def test_plan_probe_family_is_what_the_trainer_takes(tmp_path):
    assert len({each.name for each in SETTINGS}) == len(SETTINGS) == 80
    for each in SETTINGS[:30]:
        job = job_from_text(to_toml(probe_job(each, tmp_path, 12), comments=False))
        assert run_of(job, each.run.devices) == (replace(each.model, name=each.name), each.run)
        assert job.train.steps == 12
        assert job.evaluate.every_steps == job.checkpoint.every_steps == job.sample.tokens == 0
        assert not job.energy.measure
        assert not job.export.huggingface
        assert job.launch.nproc == each.run.devices
    assert {each.run.devices for each in SETTINGS} == {1, 2}
    assert {each.run.precision for each in SETTINGS} == {"fp32", "bf16"}
    assert {each.run.recompute for each in SETTINGS} == {"none", "full"}


def test_plan_probe_family_of_one_core_and_of_a_config_file(tmp_path):
    config = {**load_job(None).model.settings, "hidden_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    job = load_job(None)
    model = job.model.model_copy(update={"settings": {}, "config": str(tmp_path / "config.json")})
    found = family(job.model_copy(update={"model": model}), 1, most=60)
    assert {each.run.devices for each in found} == {1}
    assert {each.model.hidden for each in found} <= {128, 256, 384, 512, 768}
    widths = {each.model.head_width for each in found}
    assert widths == {64}


def test_plan_probe_family_refuses_what_has_no_config():
    job = load_job(None)
    model = job.model.model_copy(update={"settings": {}, "module": "my.models:small"})
    with pytest.raises(PlanError, match=r"my\.models:small|no config that can be varied"):
        family(job.model_copy(update={"model": model}), 1)


def test_plan_probe_steps_are_more_the_shorter_they_are():
    machine = Simulated()
    few, many = (Probing(MACHINE, SETTINGS, machine.nowhere, 1.0, print) for _ in range(2))
    many.probes = [None] * 3
    assert [few._steps(seconds) for seconds in (10.0, 0.6, 1e-3)] == [10, 12, 15]
    assert [many._steps(seconds) for seconds in (10.0, 0.3, 1e-3)] == [10, 24, 60]


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    machine = Simulated()
    probing = Probing(
        MACHINE, SETTINGS, tmp_path_factory.mktemp("probes"), 280.0, lambda _: None, machine.run
    )
    return probing.run(), machine


@pytest.mark.slow
def test_plan_probes_teach_a_machine_that_differs_from_the_priors(probed):
    probes, machine = probed
    assert 5 <= len(probes) <= 12
    assert machine.spent_seconds <= 280.0
    assert len({probe.setting.name for probe in probes}) == len(probes)
    rows = [probe.row for probe in probes]
    numbers = cases([(row.model, row.run, row.cluster) for row in rows])
    found = fit(
        numbers, np.array([row.step_seconds for row in rows]), [belonging(row) for row in rows]
    )
    known = {probe.setting.name for probe in probes}
    unseen = [each for each in SETTINGS if each.name not in known]
    asked = numbers_of(unseen, MACHINE)
    predicted = step_seconds(asked, found.constants([belonging(rows[0])] * len(unseen)))
    truth = np.array([machine.step_seconds(each) for each in unseen])
    errors = np.abs(predicted / truth - 1.0)
    assert np.median(errors) < 0.05
    blank = fit(numbers.taken(np.arange(1)), truth[:1], [Belonging("other", "other", "other")])
    before = step_seconds(asked, blank.constants([belonging(rows[0])] * len(unseen)))
    assert np.median(errors) < 0.3 * np.median(np.abs(before / truth - 1.0))


def test_plan_probes_are_fewer_where_settings_fail():
    machine = Simulated(failing=True)
    said = []
    probing = Probing(MACHINE, SETTINGS, machine.nowhere, 200.0, said.append, machine.run)
    with pytest.raises(PlanError, match=r"0 probes finished .* does not run here"):
        probing.run()
    assert len(probing.failures) == len(said) == 3


def test_plan_probes_say_when_the_time_is_too_short():
    machine = Simulated()
    probing = Probing(MACHINE, SETTINGS, machine.nowhere, 5.0, lambda _: None, machine.run)
    with pytest.raises(PlanError, match=r"5 are needed: give more seconds"):
        probing.run()
    assert machine.spent_seconds == 0.0


def test_plan_probe_is_ended_after_its_time():
    begun = time.monotonic()
    with pytest.raises(PlanError, match="probe slow was ended after"):
        _ended([sys.executable, "-c", "import time; time.sleep(60)"], 0.3, "slow")
    assert time.monotonic() - begun < 20.0


@pytest.mark.distributed
def test_plan_probe_runs_the_trainer_once(tmp_path):
    work = [each.run.tokens * each.model.parameters for each in SETTINGS if each.run.devices == 1]
    alone = [each for each in SETTINGS if each.run.devices == 1]
    setting = alone[int(np.argmin(work))]
    first = run_probe(setting, MACHINE, tmp_path, 10, 120.0)
    assert first.seconds > 1.0
    assert first.row.step_seconds > 0.0
    assert first.row.reserved_bytes > 1e8
    assert first.row.source == MACHINE.name
    assert first.row.time_flags == ()
    again = run_probe(setting, MACHINE, tmp_path, 10, 120.0)
    assert again.seconds == 0.0
    assert again.row == first.row
