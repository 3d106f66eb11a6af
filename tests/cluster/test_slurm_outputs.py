"""What squeue, sinfo, scontrol and sacct print.

``squeue.txt``, ``sinfo.txt``, ``partition.txt``, ``config.txt`` and the files of 22.05 were
recorded from a real Slurm 22.05.8, those of sacct with slurmdbd and MariaDB (columns that nothing
reads were taken out, and in the JSON names, steps and resources). ``sacct.txt`` and that of 23.11
are written after its manual.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.cluster import slurm
from outlast.cluster.chain_files import ChainPlan
from outlast.cluster.planning import check_request
from outlast.cluster.slurm import (
    QueuedJob,
    SiteLimits,
    array_size_now,
    chosen_partitions,
    has_ended,
    history_from_text,
    hosts_in,
    is_live,
    is_waiting,
    limits_of,
    partitions_from_text,
    qualities_from_text,
    queue_from_text,
    state_of,
)
from outlast.errors import ClusterError

FOLDER = Path(__file__).parent / "slurm_outputs"


def output(name: str) -> str:
    return (FOLDER / name).read_text()


def by_number(jobs: list[QueuedJob]) -> dict[str, QueuedJob]:
    return {each.identity: each for each in jobs}


def test_the_queue_as_text() -> None:
    jobs = by_number(queue_from_text(output("squeue.txt")))
    assert {name: each.state for name, each in jobs.items()} == {
        "1": "RUNNING",
        "2": "PENDING",
        "3": "PENDING",
        "4_[0-3%1]": "PENDING",
        "5": "FAILED",
        "6": "CANCELLED",
    }
    running = jobs["1"]
    assert (running.nodes, running.limit_seconds) == (4, 1800.0)
    assert running.ends is not None
    assert running.starts is not None
    assert running.ends - running.starts == 1800.0
    assert running.comment == "outlast:abc:1"
    assert jobs["3"].limit_seconds == 86400.0
    assert jobs["3"].starts is None, "N/A"
    assert jobs["2"].comment == "", "(null)"
    assert jobs["4_[0-3%1]"].number == "4"
    assert jobs["2"].priority is not None
    assert jobs["2"].priority > (jobs["3"].priority or 0.0)


def test_what_is_no_queue_is_empty() -> None:
    assert queue_from_text("") == []
    assert queue_from_text("slurm_load_jobs error\n") == []


def test_partitions_of_sinfo_and_scontrol() -> None:
    found = partitions_from_text(output("sinfo.txt"))
    assert [(each.name, each.limit_seconds, each.nodes) for each in found] == [
        ("batch", 7200.0, 8),
        ("high", math.inf, 8),
        ("short", 600.0, 2),
    ]
    batch = found[0]
    assert batch.is_default
    assert batch.preempts == "REQUEUE"
    assert batch.idle_nodes == 4
    more = partitions_from_text(output("sinfo.txt"), output("partition.txt"))
    assert [each.most_nodes for each in more] == [None, None, None]
    assert [each.is_default for each in more] == [True, False, False]


def test_groups_of_one_partition_are_added_up() -> None:
    line = "\x1f".join(["batch", "up", "1:00:00", "1/2/0/3", "OFF", "batch*"])
    other = "\x1f".join(["batch", "up", "1:00:00", "0/1K/1/2K", "OFF", "batch*"])
    (found,) = partitions_from_text(f"{line}\n{other}\n")
    assert (found.nodes, found.idle_nodes) == (3 + 2048, 2 + 1024)


def test_history_as_text() -> None:
    first, again, array, failed = history_from_text(output("sacct.txt"))
    assert (first.identity, first.state) == ("7", "CANCELLED")
    assert (again.identity, again.state) == ("7", "NODE_FAIL"), "a requeued job has two records"
    assert (array.identity, array.elapsed_seconds) == ("8_3", 86402.0)
    assert failed.state == "FAILED"


def test_recorded_accounting_as_text() -> None:
    """A job of each end, a requeued one twice, and some that never started or still run."""
    found = history_from_text(output("sacct-22.05.txt"))
    ends = [(each.identity, each.state) for each in found]
    assert ends == [
        ("1", "COMPLETED"),
        ("2", "FAILED"),
        ("3", "TIMEOUT"),
        ("4", "FAILED"),
        ("6", "CANCELLED"),
        ("7", "CANCELLED"),
        ("5_0", "COMPLETED"),
        ("5_1", "COMPLETED"),
        ("5_2", "COMPLETED"),
        ("11", "REQUEUED"),
        ("11", "COMPLETED"),
        ("12", "NODE_FAIL"),
        ("13", "CANCELLED"),
        ("14", "RUNNING"),
        ("15_3", "RUNNING"),
        ("15_4", "RUNNING"),
    ]
    jobs = {each.identity: each for each in found}
    assert jobs["3"].elapsed_seconds == 73.0, "killed 13 s late"
    assert jobs["6"].elapsed_seconds == 0.0


def test_what_is_no_history_is_empty() -> None:
    assert history_from_text("") == []
    assert history_from_text("Slurm accounting storage is disabled\n") == []


@pytest.mark.parametrize(
    ("words", "state"),
    [
        (["CANCELLED by 1000"], "CANCELLED"),
        (["CANCELLED", "COMPLETING"], "CANCELLED"),
        (["COMPLETING"], "COMPLETING"),
        (["RUNNING"], "RUNNING"),
        (["PENDING", "REQUEUED"], "PENDING"),
        ([], ""),
    ],
)
def test_a_state_is_one_word(words: list[str], state: str) -> None:
    assert state_of(words) == state


def test_every_state_is_waiting_live_or_over() -> None:
    for state in ("PENDING", "RUNNING", "COMPLETING", "TIMEOUT", "CANCELLED", "NODE_FAIL"):
        assert is_waiting(state) + is_live(state) + has_ended(state) == 1


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("gpu[08-10],login", ["gpu08", "gpu09", "gpu10", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("", []),
    ],
)
def test_node_lists_need_no_scontrol(text: str, hosts: list[str]) -> None:
    assert hosts_in(text) == hosts


@given(st.integers(0, 99), st.integers(0, 30))
def test_a_range_of_hosts_keeps_its_zeros(first: int, more: int) -> None:
    found = hosts_in(f"n[{first:03d}-{first + more:03d}]")
    assert found == [f"n{index:03d}" for index in range(first, first + more + 1)]


def test_limits_are_the_smallest_of_partitions_and_qos(monkeypatch: pytest.MonkeyPatch) -> None:
    found = partitions_from_text(output("sinfo.txt"), output("partition.txt"))
    default = chosen_partitions(found, "")
    assert [each.name for each in default] == ["batch"]
    both = limits_of(chosen_partitions(found, "high,short"), None)
    assert (both.limit_seconds, both.nodes) == (600.0, 2)
    quality = qualities_from_text("normal|01:00:00|10|cpu=4,node=1\n")["normal"]
    assert quality == SiteLimits(3600.0, nodes=1, submitted_jobs=10)
    limited = limits_of(default, quality)
    assert (limited.limit_seconds, limited.nodes, limited.submitted_jobs) == (3600.0, 1, 10)
    monkeypatch.setattr(slurm, "ask", lambda *_: output("config.txt"))
    assert array_size_now() == 1001
    with pytest.raises(ClusterError, match=r'"gone" names gone, which is not among .* batch, high'):
        chosen_partitions(found, "gone")


def test_what_slurm_would_refuse_is_refused_with_the_figure() -> None:
    found = partitions_from_text(output("sinfo.txt"), output("partition.txt"))
    limits = limits_of(chosen_partitions(found, "short"), SiteLimits(submitted_jobs=3))
    fine = ChainPlan("c", "n", "array", (2,), 1, 600.0, "/", "python", links=3)
    check_request(fine, limits)
    for change, words in (
        ({"limit_seconds": 660.0}, "slurm.wall_time = 00:11:00 is more than the 00:10:00"),
        ({"nodes": (1, 3)}, "slurm.nodes = 3 is more than the 2 nodes"),
        ({"links": 4}, "4 jobs at once are more than the 3 .* lower slurm.links"),
    ):
        with pytest.raises(ClusterError, match=words):
            check_request(replace(fine, **change), limits)
    with pytest.raises(ClusterError, match=r"1 that the QoS .* another slurm.qos, .*links = 1"):
        check_request(replace(fine, kind="dependent"), SiteLimits(submitted_jobs=1))
    with pytest.raises(ClusterError, match=r"slurm\.links = 3 is more than the 2 places"):
        check_request(fine, SiteLimits(array_size=2))
