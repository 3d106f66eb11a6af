"""The section [energy]: what it accepts, and what it says about the rest."""

from __future__ import annotations

import pytest

from outlast.errors import JobError
from outlast.job import fingerprint, job_from_text, load_job, to_toml


def problem_of(*overrides: str) -> str:
    with pytest.raises(JobError) as caught:
        load_job(None, list(overrides))
    return str(caught.value)


def test_energy_is_measured_by_default_and_priced_at_nothing() -> None:
    energy = load_job().energy
    assert energy.measure
    assert energy.sources == ["auto"]
    assert (energy.tariff, energy.region, energy.pue) == ("", "", 1.0)


@pytest.mark.parametrize(
    ("source", "meant"),
    [("gpuu", "gpu"), ("nodes", "node"), ("Auto", "auto"), ("fil:/tmp/joules", "file:PATH")],
)
def test_a_misspelt_source_is_named_with_the_nearest(source: str, meant: str) -> None:
    said = problem_of(f'energy.sources=["cpu", "{source}"]')
    assert f'energy.sources.1 = "{source}" is not possible' in said
    assert said.endswith(f"did you mean {meant}?")


@pytest.mark.parametrize("source", ["zzz", "file:", ""])
def test_another_source_is_answered_with_those_that_are_known(source: str) -> None:
    said = problem_of(f'energy.sources=["{source}"]')
    assert "auto, gpu, cpu, memory, node or file:PATH" in said


def test_no_source_at_all_is_refused() -> None:
    assert "energy.sources = [] is not possible: it should be a list of at least one" in (
        problem_of("energy.sources=[]")
    )


def test_a_pue_below_one_is_refused() -> None:
    assert "energy.pue = 0.9 is not possible: it should be at least 1" in (
        problem_of("energy.pue=0.9")
    )


def test_a_port_that_none_can_have_is_refused() -> None:
    assert "energy.prometheus_port = 70000 is not possible" in (
        problem_of("energy.prometheus_port=70000")
    )


@pytest.mark.parametrize("setting", ["loss_target=2.5", "prometheus_port=9400"])
def test_numbers_that_need_energy_are_refused_where_none_is_measured(setting: str) -> None:
    name, _, value = setting.partition("=")
    said = problem_of("energy.measure=false", f"energy.{setting}")
    assert f"energy.{name} = {value} needs energy" in said


@pytest.mark.parametrize("setting", ["region", "tariff"])
def test_what_needs_energy_is_refused_where_none_is_measured(setting: str) -> None:
    said = problem_of("energy.measure=false", f"energy.{setting}=SE")
    assert f'energy.{setting} = "SE" needs energy, but energy.measure = false' in said
    assert load_job(None, [f"energy.{setting}=SE"])


def test_a_misspelt_key_is_named_with_the_nearest() -> None:
    assert "did you mean energy.measure?" in problem_of("energy.mesure=true")


def test_measuring_changes_no_number_of_a_run() -> None:
    off = load_job(None, ["energy.measure=false"])
    assert fingerprint(off) == fingerprint(load_job())


def test_a_file_with_any_name_survives_the_job_file() -> None:
    job = load_job(None, ['energy.sources=["file:/a b/ä\\"\'", "gpu"]', "energy.every_steps=7"])
    assert job_from_text(to_toml(job)) == job
