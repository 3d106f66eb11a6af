"""The guard in the report: certificate, coverage and findings, of one run and of several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from report_runs import run_with
from test_report import page_of, visible

from outlast import records
from outlast.records import CorruptionDetected, CoverageWarned, Guarded, guard_totals, read_run

if TYPE_CHECKING:
    from report_runs import RunMaker


def operation(checks: int, spread: float, worst: float, point: float | None) -> dict[str, Any]:
    return {"checks": checks, "spread": spread, "worst": worst, "detection_point": point}


def guarded(step: int, scale: int = 1, seconds: float | None = 0.25, **changes: Any) -> Guarded:
    operations = {
        "linear.forward": operation(1_234_567 * scale, 0.875, 4.25, 0.0089),
        "rest": operation(20 * scale, 0.0, 0.0, None),
    }
    known = {
        "policy": "linear",
        "checks": 1_234_587 * scale,
        "seconds": seconds,
        "operations": operations,
        "modules": 39,
        "uncovered": {"LlamaRMSNorm": 9, "Conv<1d>": 1},
    }
    return Guarded(step, **{**known, **changes})


def wrong(step: int, outcome: str, **changes: Any) -> CorruptionDetected:
    known = {
        "module": "model.layers.3.mlp.up_proj",
        "operation": "linear.forward",
        "device": "cuda:5",
        "found_on": 5,
        "rows": 2,
        "magnitude": 1234.5,
    }
    return CorruptionDetected(step=step, outcome=outcome, **{**known, **changes})


def guard_section(*runs: RunMaker) -> str:
    words = visible(page_of(*runs, output=runs[0].path / "report.html"))
    return words[words.rindex("Measured on rank 0; findings") :].partition("Gradient norm")[0]


def test_the_certificate_of_every_check_is_shown(new_run: Any) -> None:
    section = guard_section(run_with(new_run(), guarded(50)))
    assert "linear.forward 1,234,567 0.88 4.25 0.0089" in section
    assert "rest 20 0.00 0.00 exact" in section
    assert "10 of 39 modules with parameters have no check at this level: " in section
    assert "LlamaRMSNorm (9), Conv<1d> (1)." in section
    assert "Nothing wrong was found." in section


def test_the_key_figures_name_checks_policy_and_price(new_run: Any) -> None:
    run = run_with(new_run(), guarded(50), wrong(7, "corrected"), wrong(9, "repeated"))
    words = visible(page_of(run))
    compute_seconds = records.read_run(run.path).seconds()["compute"]
    share = f"{100 * 0.25 / compute_seconds:.2f} % of the compute time"
    assert f"Silent data corruption 2 found in 1,234,587 checks; policy linear; {share}" in words


def test_a_time_that_cannot_be_known_is_not_shown(new_run: Any) -> None:
    words = visible(page_of(run_with(new_run(), guarded(50, seconds=None))))
    assert "Silent data corruption 0 found in 1,234,587 checks; policy linear " in words


@pytest.mark.parametrize(
    ("outcome", "grade"),
    [
        ("corrected", "good"),
        ("check", "good"),
        ("repeated", "good"),
        ("rounding", "caution"),
        ("not_finite", "caution"),
        ("detected", "bad"),
        ("persistent", "bad"),
    ],
)
def test_a_finding_is_shown_with_its_place_and_end(new_run: Any, outcome: str, grade: str) -> None:
    run = run_with(new_run(), guarded(50), wrong(1233, outcome))
    section = guard_section(run)
    shown = outcome.replace("_", " ")
    place = "model.layers.3.mlp.up_proj linear.forward 5 (cuda:5)"
    assert f"{place} 2 1.23e+03 {shown}" in section
    assert "1,234 2025-10-09" in section
    assert f'<span class="outcome {grade}">{shown}</span>' in page_of(run)
    assert "Nothing wrong was found" not in section


def test_names_in_findings_are_text(new_run: Any) -> None:
    run = run_with(new_run(), guarded(50), wrong(1, "corrected", module="<b>x</b>"))
    assert "<b>x</b>" not in page_of(run)
    assert "<b>x</b>" in guard_section(run)


def test_a_difference_of_an_exact_check_is_infinite_and_readable(new_run: Any) -> None:
    run = run_with(new_run(), guarded(50), wrong(1, "detected", magnitude=float("inf")))
    assert "2 inf detected" in guard_section(run)


def test_of_many_findings_the_first_are_shown(new_run: Any) -> None:
    many = [wrong(step, "corrected") for step in range(1500)]
    section = guard_section(run_with(new_run(), guarded(50), *many))
    assert "(the first 100 of 1,500)" in section
    assert section.count("corrected") == 100


def test_full_coverage_is_said(new_run: Any) -> None:
    section = guard_section(run_with(new_run(), guarded(50, uncovered={})))
    assert "Every module with parameters has a check." in section


def test_a_run_without_a_guard_says_so(new_run: Any) -> None:
    run = run_with(new_run())
    words = visible(page_of(run))
    assert "Guard: The run was not guarded." in words
    assert "Silent data corruption" not in words
    assert guard_totals(read_run(run.path)) is None


def test_several_runs_are_side_by_side(new_run: Any) -> None:
    first = run_with(new_run("lark"), guarded(50), wrong(3, "corrected"))
    second = run_with(new_run("wren"), guarded(50, scale=2, policy="full", uncovered={}))
    third = run_with(new_run("crow"))
    section = guard_section(first, second, third)
    parts = section.split("lark", 1)[1]
    lark, rest = parts.split("wren", 1)
    wren, crow = rest.split("crow", 1)
    assert "1,234,567" in lark
    assert "corrected" in lark
    assert "2,469,134" in wren
    assert "Every module with parameters has a check." in wren
    assert "Nothing wrong was found." in wren
    assert "The run was not guarded." in crow


def test_attempts_are_added_up(new_run: Any) -> None:
    run = new_run()
    run.start()
    run.ready()
    # Of an attempt, the last record holds all.
    run.write(guarded(10))
    run.write(guarded(20, scale=2, seconds=0.5))
    run.write(wrong(15, "repeated"))
    run.close()
    run.start()
    run.ready(20)
    low = {
        "linear.forward": operation(2 * 1_234_567, 0.5, 5.25, 0.0091),
        "norm.dx": operation(3, 0.1, 0.2, 0.01),
    }
    run.write(guarded(30, policy="full", operations=low, uncovered={"Conv1d": 1}))
    run.end(30, "completed")
    totals = guard_totals(read_run(run.path))
    assert totals is not None
    assert (totals.policy, totals.modules, totals.uncovered) == ("full", 39, {"Conv1d": 1})
    assert totals.seconds == 0.75
    forward = totals.operations["linear.forward"]
    assert forward.checks == 4 * 1_234_567
    assert forward.spread == pytest.approx(((0.875**2 + 0.5**2) / 2) ** 0.5)
    assert (forward.worst, forward.detection_point) == (5.25, 0.0091)
    assert totals.operations["rest"].checks == 40
    assert totals.operations["norm.dx"].checks == 3
    assert totals.checks == 4 * 1_234_567 + 40 + 3
    assert totals.outcomes() == {"repeated": 1}


def test_one_attempt_without_times_leaves_no_sum(new_run: Any) -> None:
    run = new_run()
    for seconds in (0.5, None):
        run.start()
        run.write(guarded(10, seconds=seconds))
        run.close()
    totals = guard_totals(read_run(run.path))
    assert totals is not None
    assert totals.seconds is None


def test_what_no_check_has_watched_is_named_apart_from_what_is_checked_at_rest(
    new_run: Any,
) -> None:
    known = {"parameters": 1000, "at_rest": 900, "trained": 800, "unwatched": 200}
    gaps = {"layers.*.experts": "2 of them, grouped_mm", "bmm in layers.*.attention": "2x"}
    section = guard_section(run_with(new_run(), guarded(50, **known, flops=0.375, gaps=gaps)))
    assert "Checks watched 75 % of the last step's gradient and 62.5 % of its products' FLOPs." in (
        section
    )
    assert "at rest go through 90 % of the parameters; they do not see what a module" in section
    assert "layers.*.experts 2 of them, grouped_mm" in section
    assert "bmm in layers.*.attention 2x" in section
    unknown = guard_section(
        run_with(new_run("other"), guarded(50, uncovered={}, **known, gaps=gaps))
    )
    assert "Checks watched 75 % of the last step's gradient. Apart from that" in unknown
    assert "Every module with parameters has a check" not in unknown


def test_shares_of_all_operations_and_lost_checks_are_shown(new_run: Any) -> None:
    shares = "97.3 % of the step's FLOPs checked (94.0 % of its bytes); not checked: gelu (2.7 %)"
    lost = CoverageWarned(6, 0, "not checked any more in step 6: mul in norm (2 % of the FLOPs)")
    event = guarded(50, trained=8, parameters=8, coverage=shares)
    section = guard_section(run_with(new_run(), event, lost))
    assert f"Of all operations: {shares}." in section
    assert f"6 {lost.message}" in section


def test_a_record_without_these_shares_says_nothing_of_them(new_run: Any) -> None:
    assert "Checks watched" not in guard_section(run_with(new_run(), guarded(50)))
