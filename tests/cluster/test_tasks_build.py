"""Graphs of runs, their files, their pictures and the command."""

from __future__ import annotations

import dataclasses
import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
import typer
from typer.testing import CliRunner

from outlast.cli.cluster import tasks as command
from outlast.cluster.tasks.gantt import Bar, duration, gantt_svg, merged, node_rows, page, uses
from outlast.cluster.tasks.graph import (
    DISKS,
    SHARED,
    Edge,
    Evaluation,
    Graph,
    Machine,
    RunFigures,
    Task,
    TierFigures,
    graph_from_toml,
    run_graph,
)
from outlast.cluster.tasks.planner import plan, run_greedily
from outlast.errors import ClusterError

FIGURES = RunFigures(
    steps=25,
    step_seconds=2.0,
    nodes=4,
    save_bytes=8e9,
    save_every_steps=10,
    save_seconds=1.0,
    tiers=(
        TierFigures("pfs", (DISKS, SHARED), keep=1),
        TierFigures("archive", (SHARED,), every=2, cap_bytes_per_s=0.5e9),
    ),
    evaluation=Evaluation(1, 5.0, 1, 8e9),
    stage_in_bytes=20e9,
    stage_out_bytes=8e9,
    queue_seconds=15.0,
    bytes_per_s={SHARED: 1e9, DISKS: 8e9},
)
TOML = """
[run]
steps = 25
step_seconds = 2
nodes = 4
save_bytes = 8e9
save_every_steps = 10
[bytes_per_s]
"shared file system" = 1e9
"node-local disks" = 8e9
[[tier]]
name = "pfs"
via = ["node-local disks", "shared file system"]
keep = 1
[evaluation]
every = 1
seconds = 5.0
nodes = 1
read_bytes = 8e9
"""


def test_a_run_becomes_its_tasks():
    graph = run_graph(FIGURES)
    tasks = {each.name: each for each in graph.tasks}
    assert [tasks[f"train {n}"].seconds for n in (1, 2, 3)] == [20.0, 20.0, 10.0]
    assert "drain 2 to archive" in tasks
    assert "drain 1 to archive" not in tasks
    assert tasks["prune 1 from pfs"].kind == "prune"
    assert "prune 3 from pfs" not in tasks
    edges = {(each.source, each.target) for each in graph.edges}
    assert ("train 1", "save 1") in edges
    assert ("save 1", "train 2") in edges
    assert ("drain 2 to pfs", "drain 2 to archive") in edges
    assert ("drain 1 to pfs", "drain 2 to pfs") in edges
    assert ("drain 1 to pfs", "evaluate 1") in edges
    assert graph.machine.nodes == {"nodes": 4, "evaluators": 1}


def test_its_plan_is_as_worked_by_hand():
    schedule = plan(run_graph(FIGURES))
    # Data are there after 20 s, five after the nodes; each save takes 1 s and its bytes 1 s more.
    assert schedule.row("train 1").start_seconds == pytest.approx(20.0)
    assert schedule.row("save 1").start_seconds == pytest.approx(40.0)
    assert schedule.row("train 2").start_seconds == pytest.approx(42.0)
    assert schedule.row("drain 1 to pfs").end_seconds == pytest.approx(50.0)
    assert schedule.row("evaluate 1").start_seconds == pytest.approx(58.0)
    assert schedule.row("train 3").start_seconds == pytest.approx(64.0)


def test_an_evaluation_without_nodes_of_its_own_stops_training():
    evaluation = Evaluation(1, 5.0)
    schedule = plan(run_graph(dataclasses.replace(FIGURES, evaluation=evaluation)))
    assert schedule.row("train 2").start_seconds == pytest.approx(47.0)


def test_a_run_without_saves_is_one_segment():
    graph = run_graph(RunFigures(steps=10, step_seconds=3.0, nodes=2))
    assert [each.name for each in graph.tasks] == ["train 1"]
    assert plan(graph).makespan_seconds == 30.0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"steps": 0}, "steps = 0"),
        ({"step_seconds": 0.0}, "step_seconds = 0"),
        ({"save_every_steps": 0}, "save_every_steps = 0"),
        ({"steps": 10**6, "save_every_steps": 1}, "1000000 segments"),
        ({"tiers": (TierFigures("pfs", (SHARED,), every=0),)}, 'tier "pfs"'),
        ({"evaluation": Evaluation(0, 1.0)}, "every = 0"),
        ({"bytes_per_s": {SHARED: 1e9}}, "node-local disks"),
    ],
)
def test_figures_without_a_meaning_are_refused(changed, said):
    with pytest.raises(ClusterError, match=said):
        run_graph(dataclasses.replace(FIGURES, **changed))


def test_a_file_gives_the_same_graph():
    figures = dataclasses.replace(
        FIGURES,
        save_seconds=0.0,
        tiers=FIGURES.tiers[:1],
        stage_in_bytes=0.0,
        stage_out_bytes=0.0,
        queue_seconds=0.0,
    )
    assert graph_from_toml(TOML, "run.toml") == run_graph(figures)


def test_a_file_may_give_any_graph():
    graph = graph_from_toml(
        """
        [nodes]
        nodes = 2
        [bytes_per_s]
        pfs = 1e9
        [[task]]
        name = "a"
        kind = "train"
        seconds = 5
        nodes = 2
        [[task]]
        name = "b"
        kind = "evaluate"
        [[edge]]
        source = "a"
        target = "b"
        size_bytes = 3e9
        via = ["pfs"]
        """,
        "graph.toml",
    )
    tasks = [Task("a", "train", seconds=5.0, nodes=2), Task("b", "evaluate")]
    edges = [Edge("a", "b", 3e9, ("pfs",))]
    assert graph == Graph(tasks, edges, Machine({"nodes": 2}, {"pfs": 1e9}))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[run", "is no TOML file"),
        ("[nodes]\nnodes = 1", r"neither a \[run\] nor a \[\[task\]\]"),
        ("[run]\nstep = 5", "did you mean steps"),
        ("[run]\nsteps = 5\nnodes = 1", "has no step_seconds"),
        ("[run]\nsteps = 5.5\nstep_seconds = 1.0\nnodes = 1", "steps = 5.5: give a whole number"),
        ("[run]\nsteps = 5\nstep_seconds = true\nnodes = 1", "step_seconds = True: give a number"),
        ("[run]\ntiers = 3", "tiers of"),
        ("[runs]\nsteps = 5", "unknown key, runs"),
        ("tier = 3\n[run]\nsteps = 5", "list of tables"),
        ("[bytes_per_s]\npfs = 'fast'\n[[task]]\nname = 'a'\nkind = 'train'", "pfs = 'fast'"),
        ("[nodes]\nnodes = 1.5\n[[task]]\nname = 'a'\nkind = 'train'", "nodes = 1.5"),
        ("[[task]]\nname = 'a'\nkind = 'train'\nvia = 'pfs'", "list of words"),
        ("[[task]]\nname = 'a'\nkind = 'train'\nelsewhere = []", "leave it out"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text, said):
    with pytest.raises(ClusterError, match=said) as caught:
        graph_from_toml(text, "x.toml")
    assert "x.toml" in str(caught.value)


def test_the_picture_shows_every_task_in_its_lane_and_place():
    schedule = plan(run_graph(FIGURES))
    svg = gantt_svg(schedule, "a run")
    root = ElementTree.fromstring(svg)
    titles = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}title")]
    for row in schedule.rows:
        assert any(title.startswith(f"{row.name}: ") for title in titles), row.name
    words = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    for label in ("nodes 1-4", "evaluator 1", "drain to pfs", "drain to archive", SHARED, DISKS):
        assert label in words
    width = float(root.attrib["viewBox"].split()[2])
    for each in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(each.attrib["x"]) >= 0
        assert float(each.attrib["x"]) + float(each.attrib["width"]) <= width


def test_use_of_bandwidth_adds_up():
    schedule = plan(run_graph(FIGURES))
    shared, disks = uses(schedule)
    moved = sum(
        each.size_bytes for each in schedule.graph.activities if each.size_bytes and 0 in each.via
    )
    assert shared.busy == pytest.approx(moved / 1e9 / schedule.makespan_seconds)
    assert disks.label == DISKS
    for use in (shared, disks):
        for at in range(len(use.times)):
            assert sum(rates[at] for rates in use.layers.values()) <= use.bytes_per_s * (1 + 1e-9)


@pytest.mark.slow
def test_averaging_many_steps_keeps_the_bytes():
    tasks = [Task(f"d {n}", "drain", size_bytes=1.0, via=("pfs",)) for n in range(1500)]
    edges = [Edge(f"d {n}", f"d {n + 1}") for n in range(0, 1499, 2)]
    tasks = [dataclasses.replace(each, earliest_seconds=3.0 * n) for n, each in enumerate(tasks)]
    [use] = uses(run_greedily(Graph(tasks, edges, Machine({}, {"pfs": 1.0}))))
    assert len(use.times) == 1000
    end = run_greedily(Graph(tasks, edges, Machine({}, {"pfs": 1.0}))).makespan_seconds
    assert sum(use.layers["drain"]) * end / 1000 == pytest.approx(1500.0, rel=1e-6)


def test_nodes_that_do_the_same_share_a_lane():
    tasks = [
        Task("all", "train", seconds=2.0, nodes=5),
        Task("one", "evaluate", seconds=1.0, nodes=1),
    ]
    schedule = plan(Graph(tasks, [Edge("all", "one")], Machine({"nodes": 5}, {})))
    assert [each.label for each in node_rows(schedule)] == ["node 1", "nodes 2-5"]


def test_bars_too_short_to_be_seen_become_one():
    bars = [Bar(n, n + 0.5, "save", f"save {n}") for n in range(5)] + [Bar(5, 9, "train", "t")]
    found = merged(bars, 1.0)
    assert [(each.words, each.count) for each in found] == [("5 x save", 5), ("t", 1)]
    assert merged(bars, 0.1) == bars


def test_the_page_loads_nothing_and_escapes_names():
    graph = Graph(
        [Task("<b>&", "train", seconds=5.0, nodes=1)], [], Machine({"nodes": 1}, {"pfs": 1.0})
    )
    text = page(plan(graph), title="<script>x</script>", unmanaged=run_greedily(graph))
    assert "<b>&" not in text
    assert "&lt;script&gt;" in text
    # The only address is the name of SVG's namespace.
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text
    assert "prefers-color-scheme:dark" in text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 s"),
        (4.123, "4.12 s"),
        (200.0, "3 min 20 s"),
        (3599.7, "60 min 00 s"),
        (3720.0, "62 min 00 s"),
        (7322.0, "2 h 02 min"),
        (200_000.0, "2 d 07 h"),
    ],
)
def test_seconds_in_words(seconds, words):
    assert duration(seconds) == words


def run(*arguments):
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_prints_a_plan_and_writes_the_picture(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(TOML)
    result = run(str(file), "--output", str(tmp_path / "pictures" / "run.html"))
    assert result.exit_code == 0, result.output
    assert "train 3" in result.output
    assert "no plan is shorter" in result.output
    assert "<svg" in (tmp_path / "pictures" / "run.html").read_text()


def test_the_command_prints_json(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(TOML)
    found = json.loads(run(str(file), "--json").output)
    assert found["kind"] == "predicted"
    assert found["seconds"] >= found["bound_seconds"]
    assert {each["name"] for each in found["rows"]} >= {"train 1", "save 3"}


def test_the_command_refuses_a_file_that_is_not_there(tmp_path):
    result = run(str(tmp_path / "none.toml"))
    assert isinstance(result.exception, ClusterError)
    assert "none.toml" in str(result.exception)
