"""What a reader finds in the page of one run or of several."""

from __future__ import annotations

import pathlib
import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
from report_runs import eventful, figures_of, tear_last_line

from outlast import records
from outlast.errors import RunError
from outlast.report import write_report

if TYPE_CHECKING:
    from pathlib import Path


def page_of(*runs: Any, output: Path | None = None) -> str:
    return write_report([run.path for run in runs], output).read_text(encoding="utf-8")


def visible(page: str) -> str:
    """The page's text as a reader sees it, white space collapsed."""

    parts: list[str] = []

    class Text(HTMLParser):
        hidden = 0

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            self.hidden += tag in ("script", "style")

        def handle_endtag(self, tag: str) -> None:
            self.hidden -= tag in ("script", "style")

        def handle_data(self, data: str) -> None:
            if not self.hidden:
                parts.append(data)

    # All that is visible stands before the data and the megabytes of plotly.
    Text().feed(page.partition('<script type="application/json"')[0])
    return re.sub(r"\s+", " ", " ".join(parts))


def trace(figure: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in figure["data"] if each["name"] == name)


def test_key_figures_of_a_run_with_two_attempts(new_run: Any) -> None:
    words = visible(page_of(eventful(new_run())))
    assert "lark completed" in words
    assert "Validation loss 1.432 nats/token at step 600 measured" in words
    assert "Bits per byte 2.066 measured" in words
    assert "Steps 600 of 600 measured" in words
    assert "Tokens 1,228,800 measured" in words
    assert "Parameters 459,264 measured" in words
    assert "Processes 4 → 2" in words
    assert "5 saved training waited 155 ms for them; the last holds 5.51 MB; 1 failed measured" in (
        words
    )
    assert "Attempts 2 before the last: 1 died measured" in words
    assert "MFU" not in words


def test_a_figure_that_is_not_known_says_why_and_is_not_zero(new_run: Any) -> None:
    run = new_run()
    run.start()
    run.ready()
    run.steps(0, 50)
    run.end(50, "to_be_continued", "SIGTERM")
    words = visible(page_of(run))
    assert "Validation loss unavailable: no evaluation is recorded" in words
    assert "Bits per byte unavailable: no evaluation is recorded" in words
    assert "to be continued: SIGTERM" in words
    assert "Sample of the model: no sample is recorded" in words


def test_mfu_is_shown_where_the_peak_is_known(new_run: Any) -> None:
    run = new_run()
    run.start(world_size=1, machine={"peak_flop_per_s": 1e12}, flops_per_token=1e8)
    run.ready()
    run.write(records.StepsDone(10, 10, 3.0, 1.0, 0.1, 20480, [0.5] * 10, {"compute": 5.0}))
    run.close()
    # 2048 tokens x 1e8 FLOP in 0.5 s are 41 % of 1e12 FLOP/s.
    assert "(MFU) 41.0 %" in visible(page_of(run))


def test_time_by_purpose_sums_to_the_wall_time(new_run: Any) -> None:
    run = eventful(new_run())
    page = page_of(run)
    figure = figures_of(page)["time-split"]
    seconds, shares = (sum(x[0] for x in view["x"]) for view in figure["views"])
    attempts = records.read_run(run.path).attempts
    wall_seconds = sum(each.end_time - each.start_time for each in attempts)
    assert seconds == pytest.approx(wall_seconds, rel=1e-4)
    assert shares == pytest.approx(100, rel=1e-4)
    words = visible(page)
    assert f"sum {wall_seconds:,.2f} 100.00" in words
    assert f"wall time of all attempts {wall_seconds:,.2f} 100.00" in words
    names = {each["name"] for each in figure["data"]}
    assert {"compute", "communication wait", "restart", "lost work"} <= names


def test_time_that_no_event_accounts_for_is_shown_as_not_recorded(new_run: Any) -> None:
    run = new_run()
    run.start()
    run.ready()
    run.steps(0, 50)
    run.clock.now += 40
    run.write(records.Warned("slow"))
    run.close()
    figure = figures_of(page_of(run))["time-split"]
    at = [each["name"] for each in figure["data"]].index("not recorded")
    assert figure["views"][0]["x"][at][0] == pytest.approx(40, abs=0.01)


def test_the_page_of_a_named_file_loads_nothing(new_run: Any, tmp_path: Path) -> None:
    page = page_of(eventful(new_run()), output=tmp_path / "mailed.html")
    found = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend((tag, name, value) for name, value in attrs if name in ("src", "href"))

    Links().feed(page)
    assert all(tag == "a" and str(value).startswith("#") for tag, _, value in found)
    assert "default-src 'none'" in page
    assert "@import" not in page.partition("</style>")[0]


def test_reports_beside_each_other_share_plotly(new_run: Any, tmp_path: Path) -> None:
    for name in ("lark", "heron"):
        page = page_of(eventful(new_run(name)))
        assert len(page) < 300_000
        [library] = re.findall(r'<script src="([^"]+)"', page)
        assert (tmp_path / name / library).resolve().stat().st_size > 1_000_000
    assert len(list((tmp_path / ".report").iterdir())) == 1
    assert "script-src 'unsafe-inline' 'self' file:" in page


def test_where_plotly_finds_no_room_the_page_holds_it(new_run: Any, tmp_path: Path) -> None:
    (tmp_path / ".report").write_text("a file of somebody else")
    page = page_of(eventful(new_run()))
    assert "<script src" not in page
    assert len(page) > 1_000_000


def test_at_most_six_figures_stand_first(new_run: Any) -> None:
    page = page_of(eventful(new_run()))
    first, _, others = page.partition("<details><summary>All figures")
    assert first.count('<div class="card">') == 6
    labels = re.findall(r'<div class="card"><dt>([^<]+)', first)
    assert labels[:5] == ["Validation loss", "Steps", "Throughput", "Wall time", "Attempts"]
    assert "unavailable" not in first.partition('class="cards first"')[2]
    assert others.count('<div class="card">') > 10


def test_parts_with_nothing_to_show_are_left_out_and_named(new_run: Any) -> None:
    page = page_of(eventful(new_run()))
    for name in ("guard", "coding", "tensorized", "metrics"):
        assert f'id="{name}"' not in page
        assert f'href="#{name}"' not in page
    _, _, listed = visible(page).partition("Not in this report")
    for title in ("Guard:", "Gradient coding:", "Tensorized layers:"):
        assert title in listed
    # A link for each part that is there.
    for name in re.findall(r'<a href="#([^"]+)"', page):
        assert f'id="{name}"' in page


def test_failures_and_resumes_are_marks_on_the_curve(new_run: Any) -> None:
    loss = figures_of(page_of(eventful(new_run())))["loss"]
    ended, resumed = trace(loss, "ended early"), trace(loss, "resumed")
    names = [each["name"] for each in loss["data"]]
    steps = loss["views"][0]["x"]
    assert len(ended["text"]) == len(resumed["text"]) == 1
    assert resumed["text"][0].startswith("attempt 2 resumed at step ")
    assert abs(steps[names.index("resumed")][0] - int(resumed["text"][0].split()[5])) <= 10
    curve = trace(loss, "training, smoothed")["y"]
    assert resumed["y"][0] in curve


def test_changed_settings_are_marked_on_the_timeline(new_run: Any) -> None:
    timeline = figures_of(page_of(eventful(new_run())))["timeline-lark"]
    [words] = trace(timeline, "settings")["text"]
    assert "optimizer.weight_decay 0.1 -&gt; 0.2" in words


def test_metrics_of_the_loop_have_pictures_of_their_own(new_run: Any) -> None:
    run = new_run()
    run.start()
    run.ready()
    for step in (1, 2, 3):
        metrics = {"accuracy": step / 10}
        run.write(records.StepsDone(step, 1, 2.0, 1.0, 0.1, 0, [0.1], {"compute": 0.1}, metrics))
    run.close()
    page = page_of(run)
    assert trace(figures_of(page)["metric-0"], "lark")["y"] == [0.1, 0.2, 0.3]
    assert 'id="metrics"' in page


def test_foreign_text_cannot_become_markup(new_run: Any) -> None:
    run = eventful(new_run("evil", ("sample.prompt=</script><b>",)))
    page = page_of(run)
    assert "return '</script>'" not in page
    assert "return &#x27;&lt;/script&gt;&#x27; &amp; path" in page
    assert "the disk is &lt;almost&gt; full" in page
    assert "&lt;/script&gt;&lt;b&gt;" in page
    # Exactly the page's own scripts: theme, data, plotly, behaviour.
    assert page.count("</script>") == 4
    warning = trace(figures_of(page)["timeline-evil"], "warning")
    assert warning["text"] == ["the disk is &lt;almost&gt; full"]


def test_control_characters_and_lone_surrogates_are_shown_not_written(new_run: Any) -> None:
    run = new_run()
    run.start()
    run.ready()
    run.write(records.Sampled(0, "a", "a\x00b\ud800\r\nc"))
    run.close()
    assert "<mark>a</mark>␀b?\nc" in page_of(run)


def test_a_nan_loss_is_marked_and_leaves_a_gap(new_run: Any) -> None:
    figures = figures_of(page_of(eventful(new_run())))
    mark = trace(figures["loss"], "loss not finite")
    assert mark["text"] == ["nan at step 405"]
    assert None in trace(figures["loss"], "training")["y"]
    failures = trace(figures["timeline-lark"], "failure")
    assert "training loss is nan at step 405" in failures["text"]


def test_steps_that_were_done_again_are_drawn_once(new_run: Any) -> None:
    figures = figures_of(page_of(eventful(new_run())))
    steps = figures["loss"]["views"][0]["x"][0]
    assert steps == sorted(set(steps))
    assert steps[0] == 5
    assert steps[-1] == 600


def test_the_axes_of_the_loss(new_run: Any) -> None:
    figures = figures_of(page_of(eventful(new_run())))
    step, tokens, seconds, flops = (view["x"][0][-1] for view in figures["loss"]["views"])
    assert (step, tokens) == (600, 1_228_800)
    assert flops == pytest.approx(1_228_800 * 2.9e6, rel=1e-5)
    # Running time leaves out the 95 seconds between the attempts.
    assert 110 < seconds < 120


def test_events_appear_on_the_timeline(new_run: Any) -> None:
    figure = figures_of(page_of(eventful(new_run())))["timeline-lark"]
    assert "world size 4, 29.0 s, died" in trace(figure, "world size 4")["text"][0]
    assert trace(figure, "world size 2")["text"][0].endswith("completed")
    assert "gap of 1 min 35 s before attempt 2" in trace(figure, "gap")["text"]
    assert len(trace(figure, "checkpoint")["x"]) == 5
    restored = trace(figure, "restore")["text"][0].replace("<br>", " ")
    assert restored == "restored step 200 in 800 ms; passed over step 210: torn manifest"
    failures = trace(figure, "failure")["text"]
    assert "checkpoint of step 210 failed: No space left on device" in failures
    assert "attempt 1 died: no end is recorded" in failures


def test_the_attempts_table(new_run: Any) -> None:
    words = visible(page_of(eventful(new_run())))
    assert "1 2025-10-09 08:53:20 29.0 s 4 replicate 4 torchrun 0 230 died" in words
    assert "2 replicate 2 torchrun 200 600 completed" in words


def test_machine_versions_and_job_are_shown(new_run: Any) -> None:
    page = page_of(eventful(new_run()))
    words = visible(page)
    assert "gpus unavailable: NVML does not start" in words
    assert "memory total 275 GB" in words
    assert "torch 2.13.0" in words
    assert 'name = "lark"' in words


def test_a_run_that_was_never_started(new_run: Any) -> None:
    words = visible(page_of(new_run()))
    assert "not started" in words
    assert "Wall time unavailable: the run was not started" in words
    assert "Loss: No training loss is recorded." in words


def test_a_run_that_died_before_its_first_step(new_run: Any) -> None:
    run = new_run()
    run.start()
    run.close()
    words = visible(page_of(run))
    assert "no end recorded: killed, or still running" in words
    assert "never ready" in words
    assert "Throughput unavailable: no step is recorded" in words


def test_a_run_killed_in_the_middle_of_a_line(new_run: Any) -> None:
    run = new_run()
    run.start()
    run.ready()
    run.steps(0, 50)
    run.close()
    tear_last_line(run.path)
    words = visible(page_of(run))
    assert "Steps 45 of 600 measured" in words
    assert "no end recorded" in words


def test_repeated_warnings_are_counted(new_run: Any) -> None:
    run = new_run()
    run.start()
    for _ in range(3):
        run.write(records.Warned("the data come slowly"))
    run.close()
    assert visible(page_of(run)).count("the data come slowly") == 1
    assert "3 times" in page_of(run)


def test_several_runs_share_each_picture(new_run: Any, tmp_path: Path) -> None:
    lark = eventful(new_run("lark"))
    heron = new_run("heron", ("train.batch_size=32", "parallel.shard=2"))
    heron.start(world_size=2)
    heron.ready()
    heron.steps(0, 300)
    heron.end(300, "completed")
    page = page_of(lark, heron, output=tmp_path / "both.html")
    figures = figures_of(page)
    curves = [each for each in figures["loss"]["data"] if "smoothed" in each["name"]]
    assert [each["name"] for each in curves] == [
        "lark: training, smoothed",
        "heron: training, smoothed",
    ]
    assert len({each["line"]["color"] for each in curves}) == 2
    assert figures["time-split"]["data"][0]["y"] == ["lark", "heron"]
    assert {"timeline-lark", "timeline-heron"} <= set(figures)
    words = visible(page)
    assert "2 runs side by side" in words
    assert "train.batch_size 16 32 yes" in words
    assert "parallel.shard 1 2 no" in words
    assert "run.name" not in words.partition("Settings in which the jobs differ")[2][:200]


def test_a_job_of_another_version_does_not_stop_the_comparison(new_run: Any) -> None:
    one, other = new_run("one"), new_run("other")
    (other.path / "job.toml").write_text("[future]\nkey = 1\n")
    output = one.path / "both.html"
    assert "differences unavailable: the job of other" in visible(
        page_of(one, other, output=output)
    )


def test_where_the_report_is_written(
    new_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = new_run("one"), new_run("other")
    monkeypatch.chdir(tmp_path)
    assert write_report([one.path]) == one.path / "report.html"
    assert write_report(["one", one.path]) == pathlib.Path("one/report.html")
    assert write_report([one.path, other.path]).resolve() == tmp_path / "report.html"
    monkeypatch.chdir(one.path)
    assert "<h1>one</h1>" in write_report(["."]).read_text(encoding="utf-8")


def test_what_is_no_run_is_refused_in_one_sentence(tmp_path: Path, new_run: Any) -> None:
    with pytest.raises(RunError, match="is not a run directory"):
        write_report([tmp_path])
    with pytest.raises(RunError, match="no run directory is given"):
        write_report([])
    with pytest.raises(RunError, match="cannot be written"):
        write_report([new_run().path], tmp_path / "missing" / "report.html")


def test_every_figure_is_valid_for_plotly(new_run: Any) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    for figure in figures_of(page_of(eventful(new_run()))).values():
        graph_objects.Figure({"data": figure["data"], "layout": figure["layout"]})


def test_the_report_of_a_long_run_stays_small(new_run: Any) -> None:
    run = new_run()
    run.start()
    run.ready()
    for step in range(1, 6_001):
        run.clock.now += 0.1
        tokens = step * 2048
        run.write(records.StepsDone(step, 1, 2.0, 1.0, 0.1, tokens, [0.1], {"compute": 0.1}))
    run.close()
    page = page_of(run)
    assert len(trace(figures_of(page)["loss"], "training")["y"]) < 5000
    assert len(page) < 10e6


def test_the_command_prints_the_path(new_run: Any) -> None:
    typer_testing = pytest.importorskip("typer.testing")
    import typer

    from outlast.cli.runs import report

    app = typer.Typer()
    app.command()(report)
    run = new_run()
    result = typer_testing.CliRunner().invoke(app, [str(run.path)])
    assert result.exit_code == 0
    assert result.output.replace("\n", "") == str(run.path / "report.html")
