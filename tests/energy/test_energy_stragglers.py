"""A cached frontier answers for stragglers, and its picture shows it."""

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from outlast.energy import example
from outlast.energy.linear_program import LinearProgram
from outlast.energy.plan import Frontier, frontier_svg, save_picture
from outlast.energy.planner import EnergyPlanner
from outlast.energy.schedule import one_f_one_b
from outlast.energy.switches import GroupedProgram
from outlast.errors import EnergyError

PROFILE = example.profile("a100")
SCHEDULE = one_f_one_b(4, 3)


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return EnergyPlanner(PROFILE).frontier(SCHEDULE, points=6, longest="least energy")


@pytest.mark.parametrize("slower", [1.05, 1.1, 1.5])
def test_waiting_for_a_straggler_is_counted(frontier: Frontier, slower: float) -> None:
    late = frontier.plans[0].seconds * slower
    answer = frontier.with_straggler(late)
    assert answer.plan.seconds <= late
    points = [
        PROFILE.curve(each.key).at(clock)
        for each, clock in zip(SCHEDULE.operations, answer.plan.clocks_mhz, strict=True)
    ]
    busy = sum(point.seconds for point in points)
    waited = 4 * late - busy
    expected = sum(point.joules for point in points) + PROFILE.blocking_watts * waited
    assert answer.joules == pytest.approx(expected)
    assert 0 < answer.saving < 1
    assert answer.unused_seconds == 0


def test_beyond_the_least_energy_the_plan_stays_the_same(frontier: Frontier) -> None:
    useful = frontier.longest_useful_seconds
    assert frontier.at(3 * useful) == frontier.at(useful * 1.0001)
    short = EnergyPlanner(PROFILE).frontier(SCHEDULE, points=2, longest="+2%")
    assert short.with_straggler(3 * useful).unused_seconds > 0


def test_an_answer_needs_no_solver(frontier: Frontier, monkeypatch) -> None:
    for solver in (LinearProgram, GroupedProgram):
        monkeypatch.delattr(solver, "solve")
    monkeypatch.setitem(sys.modules, "highspy", None)
    late = frontier.plans[0].seconds * 1.1
    assert frontier.with_straggler(late).plan in frontier.plans


def test_a_margin_is_kept_whatever_the_straggler_takes() -> None:
    kept = EnergyPlanner(PROFILE).frontier(SCHEDULE, points=5, margin=0.03)
    longest = kept.plans[-1].deadline_seconds
    for late in (longest * 0.99, longest, kept.plans[0].deadline_seconds):
        assert kept.at(late).seconds <= late * 0.97 * (1 + 1e-9)
        assert kept.with_straggler(late).plan.seconds <= late * 0.97 * (1 + 1e-9)
    with pytest.raises(EnergyError, match="its margin included"):
        kept.at(kept.plans[0].seconds * 1.01)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"longest_useful_seconds": 10**400}, "longest_useful_seconds must be a number"),
        ({"longest_useful_seconds": True}, "longest_useful_seconds must be a number"),
        ("reversed", "plans go by rising deadline"),
        ({"margin": 0.1}, "margin = 0.1 differs"),
        ({"devices": 5}, "devices = 5 differs"),
        ({"schedule": "0" * 16}, "they are of two frontiers"),
        ({"budget": "none"}, "they are of two frontiers"),
    ],
)
def test_plans_that_are_no_frontier_are_refused(frontier, tmp_path, change, words: str) -> None:
    path = tmp_path / "frontier.json"
    frontier.save(path)
    content = json.loads(path.read_text())
    if change == "reversed":
        content["plans"].reverse()
    elif "longest_useful_seconds" in change:
        content.update(change)
    else:
        content["plans"][2].update(change)
    path.write_text(json.dumps(content))
    with pytest.raises(EnergyError, match=words):
        Frontier.load(path)


def test_an_infinite_time_in_a_file_is_refused(frontier: Frontier, tmp_path: Path) -> None:
    path = tmp_path / "frontier.json"
    frontier.save(path)
    useful = f'"longest_useful_seconds": {frontier.longest_useful_seconds}'
    text = path.read_text()
    assert useful in text
    path.write_text(text.replace(useful, '"longest_useful_seconds": 1e999'))
    with pytest.raises(EnergyError, match="longest_useful_seconds must be a number"):
        Frontier.load(path)


def test_who_is_slower_than_the_straggler_is_told(frontier: Frontier) -> None:
    with pytest.raises(EnergyError, match="the fastest plan of this frontier takes"):
        frontier.with_straggler(frontier.plans[0].seconds * 0.5)


def test_a_frontier_comes_back_from_its_file(frontier: Frontier, tmp_path: Path) -> None:
    frontier.save(tmp_path / "frontier.json")
    assert Frontier.load(tmp_path / "frontier.json", SCHEDULE) == frontier
    with pytest.raises(EnergyError, match="for another schedule"):
        Frontier.load(tmp_path / "frontier.json", one_f_one_b(4, 4))
    (tmp_path / "empty.json").write_text('{"format": "outlast frontier", "version": 1}')
    with pytest.raises(EnergyError, match='no list "plans"'):
        Frontier.load(tmp_path / "empty.json")


def test_the_picture_is_whole_and_names_units(frontier: Frontier, tmp_path: Path) -> None:
    picture = frontier_svg({"free": frontier, "a <b>": frontier}, title="A & B")
    root = ET.fromstring(picture)
    words = " ".join(root.itertext())
    for word in ("energy of a step in kJ", "time of a step in s", "A & B", "a <b>", "top clocks"):
        assert word in words
    assert len(root.findall(".//{*}circle")) == 2 * len(frontier.plans)
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")
    save_picture(frontier, tmp_path / "frontier.html")
    assert "<svg" in (tmp_path / "frontier.html").read_text()
    with pytest.raises(EnergyError, match=r"neither \.svg nor \.html"):
        save_picture(frontier, tmp_path / "frontier.png")
    with pytest.raises(EnergyError, match="no plan to draw"):
        frontier_svg({})


def test_one_plan_is_drawn_too(frontier: Frontier) -> None:
    ET.fromstring(frontier_svg(Frontier(frontier.plans[:1])))
