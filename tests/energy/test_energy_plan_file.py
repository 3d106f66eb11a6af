"""Plan files: nothing is lost, nothing is half written, nothing foreign is believed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from outlast.energy import example
from outlast.energy.plan import ClockPlan, fingerprint
from outlast.energy.planner import EnergyPlanner
from outlast.energy.schedule import one_f_one_b
from outlast.errors import EnergyError

SCHEDULE = one_f_one_b(2, 2)
PLAN = EnergyPlanner(example.profile("a100")).plan(SCHEDULE, "+3%", switches="per_stage")


def test_a_plan_comes_back_as_it_was(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "deep" / "plan.json")
    assert ClockPlan.load(tmp_path / "deep" / "plan.json", SCHEDULE) == PLAN
    assert [each.name for each in (tmp_path / "deep").iterdir()] == ["plan.json"]


def test_any_change_of_the_schedule_changes_its_fingerprint() -> None:
    others = [
        one_f_one_b(2, 3),
        replace(SCHEDULE, devices=3),
        replace(SCHEDULE, edges=SCHEDULE.edges[1:]),
        replace(
            SCHEDULE,
            operations=(replace(SCHEDULE.operations[0], phase="tail"), *SCHEDULE.operations[1:]),
        ),
    ]
    assert len({fingerprint(each) for each in [SCHEDULE, *others]}) == 5
    assert fingerprint(one_f_one_b(2, 2)) == fingerprint(SCHEDULE)


def test_a_plan_for_another_schedule_is_refused(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    with pytest.raises(EnergyError, match="plan for another schedule"):
        ClockPlan.load(tmp_path / "plan.json", one_f_one_b(2, 3))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 99}, "has version 99"),
        ({"format": "other"}, 'has no "format"'),
        ({"clocks_mhz": "1410"}, "must be a list of whole MHz"),
        ({"clocks_mhz": [1410.5] * 8}, "must be a list of whole MHz"),
        ({"clocks_mhz": []}, "must be a list of whole MHz"),
        ({"joules": "__import__('os').getcwd()"}, "must be a finite number"),
        ({"joules": True}, "must be a finite number"),
        ({"bound_joules": 0}, "must be above 0"),
        ({"switches": -1}, "must be a whole number"),
        ({"budget": "often"}, "must be none or per_stage"),
        ({"kind": "guessed"}, "must be measured or"),
        ({"device": 3}, "must be a text"),
        ({"seconds": 1e9}, "does not meet its own deadline"),
        ({"joules": PLAN.bound_joules * 0.999}, "is below bound_joules"),
        ({"margin": 1.0}, "margin = 1 must be below 1"),
        ({"joules": 10**400}, "must be a finite number"),
        ({"devices": 10**400}, "must be a whole number"),
        ({"clocks_mhz": [10**400] * 8}, "must be a list of whole MHz"),
        ({"extra": 1}, 'unknown field "extra"'),
    ],
)
def test_files_from_elsewhere_are_checked_field_by_field(tmp_path, change, words: str) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(EnergyError) as caught:
        ClockPlan.load(path)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no JSON file"),
        ("[1410, 1200]", "is no outlast clock plan"),
        ("[" * 100_000, "no JSON file"),
        ('{"joules": NaN}', "NaN is not a number"),
        ("\x00\xff", "no JSON file"),
    ],
)
def test_what_is_no_plan_is_told_so(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(EnergyError, match=words):
        ClockPlan.load(path)


def test_a_damaged_or_missing_file_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    content = json.loads(path.read_text())
    del content["clocks_mhz"]
    path.write_text(json.dumps(content))
    with pytest.raises(EnergyError, match='has no "clocks_mhz"'):
        ClockPlan.load(path)
    with pytest.raises(EnergyError, match="cannot be read"):
        ClockPlan.load(tmp_path / "none.json")


def test_a_failed_write_leaves_the_old_plan(tmp_path: Path) -> None:
    folder = tmp_path / "plan.json"
    folder.mkdir()
    with pytest.raises(EnergyError, match="cannot be written"):
        PLAN.save(folder)
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]
    with pytest.raises(EnergyError, match="a value that is no number"):
        replace(PLAN, joules=float("nan")).save(tmp_path / "nan.json")
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]
