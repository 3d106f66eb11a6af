"""Gradient coding in the report: the steps as a picture, who was slow, and what is not exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from report_runs import figures_of, run_with
from test_report import page_of, visible

from outlast.records import GradientsCoded

if TYPE_CHECKING:
    from report_runs import RunMaker


def coded(step: int, stragglers: list[list[int]], **changes: Any) -> GradientsCoded:
    """Steps that took 2 s each, and would have taken 5 s with a straggler."""
    count = len(stragglers)
    known: dict[str, Any] = {
        "scheme": "coverage",
        "replicas": 4,
        "claims": [3 * len(each) for each in stragglers],
        "duplicates": [0] * count,
        "lost": [0] * count,
        "errors": [0.0] * count,
        "coded_seconds": [2.0] * count,
        "waiting_seconds": [5.0 if each else 1.5 for each in stragglers],
    }
    return GradientsCoded(step, stragglers=stragglers, **{**known, **changes})


def coding_section(*runs: RunMaker) -> str:
    words = visible(page_of(*runs, output=runs[0].path / "report.html"))
    return words[words.rindex("Measured. Waiting is") :].partition("Warnings")[0]


def traces_of(run: RunMaker) -> dict[str, dict[str, Any]]:
    figure = figures_of(page_of(run))[f"coding-{run.path.name}"]
    return {trace["name"]: trace for trace in figure["data"]}


def test_the_picture_holds_both_times_and_marks_stragglers(new_run: Any) -> None:
    traces = traces_of(run_with(new_run(), coded(4, [[], [2], [0, 3], []])))
    assert traces["taken"]["x"] == [1, 2, 3, 4]
    assert traces["taken"]["y"] == [2, 2, 2, 2]
    # Nobody to wait for in the first and last step: their lower bound says nothing.
    assert traces["waiting for all, at least"]["y"] == [2, 5, 5, 2]
    assert traces["straggler"]["x"] == [2, 3]
    assert traces["straggler"]["text"] == ["replica 2", "replicas 0, 3"]


def test_the_picture_is_said_in_words(new_run: Any) -> None:
    section = coding_section(run_with(new_run(), coded(4, [[], [2], [0, 3], []])))
    assert (
        "4 steps, 2 with a straggler; the gradients took 8.0 s in all, and with waiting for all "
        "replicas at least 14.0 s." in section
    )
    assert (
        "coverage over 4 replicas: 9 chunks taken over, 0 computed twice; saved at least 6.0 s."
    ) in section
    assert "Every gradient was exact." in section


def test_short_steps_are_shown_in_milliseconds(new_run: Any) -> None:
    short = coded(2, [[], [1]], coded_seconds=[0.02, 0.03], waiting_seconds=[0.01, 0.25])
    run = run_with(new_run(), short)
    assert traces_of(run)["taken"]["y"] == [20, 30]
    title = figures_of(page_of(run))["coding-lark"]["layout"]["yaxis"]["title"]["text"]
    assert title == "time of the gradient in milliseconds"


def test_a_run_without_stragglers_has_no_marks(new_run: Any) -> None:
    assert "straggler" not in traces_of(run_with(new_run(), coded(3, [[], [], []])))


def test_every_replica_has_its_row(new_run: Any) -> None:
    section = coding_section(run_with(new_run(), coded(8, [[2], [2], [2], [], [1], [], [], []])))
    assert "0 0 0.0 unknown 1 1 12.5 0 2 3 37.5 67 3 0 0.0 unknown" in section


def test_the_key_figures_name_stragglers_and_time_saved(new_run: Any) -> None:
    words = visible(page_of(run_with(new_run(), coded(4, [[], [2], [0, 3], []]))))
    figure = "Steps with a straggler 2 of 4 steps coverage; all exact; saved at least 6.0 s"
    assert figure in words


def test_inexact_steps_are_listed_with_their_errors(new_run: Any) -> None:
    event = coded(4, [[], [2], [0, 3], []], lost=[0, 2, 1, 0], errors=[0, 2.4, 1.0909, 0])
    run = run_with(new_run(), event)
    section = coding_section(run)
    assert "2 2 2.400 2 3 1 1.091 0, 3" in section
    assert "2 gradients not exact: certified error at worst 2.400, on average" in section
    assert "2 steps were made with an inexact gradient" in section
    assert "coverage; 2 inexact; saved" in visible(page_of(run))


def test_of_many_inexact_steps_the_first_are_listed(new_run: Any) -> None:
    late = coded(250, [[1]] * 250, lost=[1] * 250, errors=[1.25] * 250)
    section = coding_section(run_with(new_run(), late))
    assert section.count("1.250 1") == 100
    assert "(the first 100 of 250)" in section


def test_advice_is_given(new_run: Any) -> None:
    section = coding_section(run_with(new_run(), coded(50, [[3]] * 40 + [[]] * 10)))
    assert "Replica 3 was slow in 80 % of the steps: give it less work or replace it" in section


@pytest.mark.slow
@pytest.mark.parametrize("steps", [20_000])
def test_long_runs_are_thinned_without_losing_a_peak(steps: int, new_run: Any) -> None:
    stragglers: list[list[int]] = [[] for _ in range(steps)]
    stragglers[12_345] = [1]
    waiting = [1.5] * steps
    waiting[12_345] = 77.0
    traces = traces_of(run_with(new_run(), coded(steps, stragglers, waiting_seconds=waiting)))
    line = traces["waiting for all, at least"]
    assert len(line["x"]) < 10_000
    assert line["y"][line["x"].index(12_346)] == 77


def test_a_run_without_coding_says_so_in_a_line(new_run: Any) -> None:
    run = run_with(new_run())
    words = visible(page_of(run))
    assert "Gradient coding: The run used no gradient coding." in words
    assert "Steps with a straggler" not in words
    assert "coding-lark" not in figures_of(page_of(run))


def test_several_runs_have_a_picture_each(new_run: Any) -> None:
    first = run_with(new_run("lark"), coded(4, [[], [2], [], []]))
    second = run_with(new_run("wren"), coded(4, [[0], [0], [0], []], scheme="cyclic_mds"))
    third = run_with(new_run("crow"))
    section = coding_section(first, second, third)
    lark, rest = section.split("lark", 1)[1].split("wren", 1)
    wren, crow = rest.split("crow", 1)
    assert "1 with a straggler" in lark
    assert "cyclic_mds over 4 replicas" in wren
    assert "The run used no gradient coding." in crow
    page = page_of(first, second, third, output=first.path / "report.html")
    assert {"coding-lark", "coding-wren"} <= figures_of(page).keys()
