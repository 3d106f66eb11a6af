"""``outlast cluster simulate``: what it prints of a log, and what it never prints."""

import json

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from outlast.cli.cluster import simulate
from outlast.cluster.workload import lublin
from outlast.errors import ClusterError

USERS = ("anna", "bert", "90210")


def run(*arguments):
    """Exit code and output of the command alone."""
    app = typer.Typer()
    app.command()(simulate)
    return CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def log():
    return lublin(300, 16, load=0.8, seed=5)


@pytest.fixture(scope="module")
def swf(log, tmp_path_factory):
    path = tmp_path_factory.mktemp("logs") / "log.swf"
    lines = ["; MaxNodes: 16", "; MaxProcs: 16"]
    for number in range(len(log)):
        fields = np.full(18, -1.0)
        fields[0], fields[1], fields[2] = number + 1, log.submit_seconds[number], 0
        fields[3] = min(log.run_seconds[number], log.limit_seconds[number])
        fields[4] = fields[7] = log.nodes[number]
        fields[8], fields[10], fields[11] = log.limit_seconds[number], 1, 90210
        lines.append(" ".join(f"{each:.0f}" for each in fields))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def sacct(log, tmp_path_factory):
    path = tmp_path_factory.mktemp("logs") / "sacct.txt"
    lines = ["JobID|User|Submit|Start|End|ElapsedRaw|TimelimitRaw|NNodes|State|Partition"]
    first = np.datetime64("2026-03-01T00:00:00")
    for number in range(len(log)):
        submit = first + np.timedelta64(int(log.submit_seconds[number]), "s")
        ran = int(min(log.run_seconds[number], log.limit_seconds[number]))
        end = submit + np.timedelta64(ran, "s")
        lines.append(
            f"{number}|{USERS[number % 2]}|{submit}|{submit}|{end}|{ran}|"
            f"{int(log.limit_seconds[number] // 60)}|{log.nodes[number]}|COMPLETED|batch"
        )
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_table_of_every_policy_and_a_plain_sentence(swf):
    result = run("--swf", swf, "--runs", 2, "--hours", 12, "--load", 0.7, "--load", 0.9)
    assert result.exit_code == 0
    for words in ("one long job", "links of 8 h", "anchor and filler", "planned", "automatic"):
        assert result.output.count(words) >= 2
    assert "simulated" in result.output
    assert "300 jobs on 16 nodes" in result.output
    assert "Best: " in result.output or "Just submit one long job" in result.output


@pytest.mark.parametrize("kind", ["swf", "sacct"])
def test_json_compares_with_one_long_job_and_names_nobody(kind, request):
    path = request.getfixturevalue(kind)
    size = () if kind == "swf" else ("--machine-nodes", 16)
    arguments = (f"--{kind}", path, *size, "--runs", 2, "--hours", 12, "--policy", "filler")
    result = run(*arguments, "--json")
    found = json.loads(result.output)
    assert [row["policy"] for row in found["rows"]] == ["one long job", "anchor and filler"]
    assert found["rows"][0]["ratio"] == found["rows"][0]["worst"] == 1.0
    assert found["rows"][0]["waste"] == pytest.approx(360 / (12 * 3600 + 360), rel=1e-6)
    assert found["kind"] == "simulated"
    assert found["jobs"] == 300
    for user in USERS:
        assert user not in result.output
        assert user not in run(*arguments).output
    assert run(*arguments, "--json").output == result.output


def test_a_time_limit_cuts_the_long_job_into_links(swf):
    result = run(
        *("--swf", swf, "--runs", 1, "--hours", 20, "--max-time", "8:00:00"),
        *("--policy", "long", "--json"),
    )
    assert json.loads(result.output)["rows"][0]["links"] == 3.0


def test_without_a_log_a_workload_is_generated():
    found = json.loads(run("--generated", 32, "--runs", 1, "--policy", "long", "--json").output)
    assert found["machine_nodes"] == 32
    assert found["run"]["sizes"] == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "one of --swf FILE"),
        (("--swf", "a", "--sacct", "b"), "one of --swf FILE"),
        (("--generated", "8", "--partition", "gpu"), "belongs to --sacct"),
        (("--generated", "8", "--policy", "best"), '--policy = "best" is none of long'),
        (("--generated", "8", "--nodes", "9"), "has 8 nodes; give fewer"),
        (("--generated", "8", "--max-time", "5"), "360 s; give more"),
        (("--generated", "8", "--backfill", "deep"), "neither easy nor conservative"),
        (("--swf", "absent.swf"), "cannot be read"),
    ],
)
def test_what_is_wrong_is_said(arguments, words):
    with pytest.raises(ClusterError, match=words):
        run(*arguments)
