"""Workloads out of logs."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from outlast.cluster.workload import Workload, read_sacct, read_swf
from outlast.errors import ClusterError

SWF = """\
; Version: 2.2
; Computer: made up
; MaxNodes: 4
; MaxProcs: 16
  3   40   5   30   6 -1 -1   8   60 -1 1 17 1 -1 1 -1 -1 -1
  1    0  10  100   4 -1 -1   4  200 -1 1 17 1 -1 1 -1 -1 -1
  2   20  -1   -1  -1 -1 -1   4  200 -1 5 18 1 -1 1 -1 -1 -1
  4   50   0   20  -1 -1 -1   5   -1 -1 0 18 1 -1 1 -1 -1 -1
  5   60   0   20   4 -1 -1   4   50 -1 3 18 1 -1 1 -1 -1 -1
  6   70   0   20  64 -1 -1  64   50 -1 1 18 1 -1 1 -1 -1 -1
"""


@pytest.mark.parametrize("packed", [False, True])
def test_swf(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / ("log.swf.gz" if packed else "log.swf")
    path.write_bytes(gzip.compress(SWF.encode()) if packed else SWF.encode())
    jobs = read_swf(path)
    assert jobs.machine_nodes == 4
    assert jobs.submit_seconds.tolist() == [0, 40, 50]
    assert jobs.nodes.tolist() == [1, 2, 2]
    assert jobs.run_seconds.tolist() == [100, 30, 20]
    # The one without a limit gets the log's longest.
    assert jobs.limit_seconds.tolist() == [200, 60, 200]
    assert jobs.notes == (
        "1 jobs larger than the machine's 4 nodes are left out",
        "1 jobs that are pieces of others are left out",
        "1 jobs that never ran, or still do are left out",
        "1 jobs without a limit count as if they had asked for 200 s, the longest in the log",
    )


def test_swf_without_header_counts_processors_and_the_most_in_use(tmp_path: Path) -> None:
    path = tmp_path / "log.swf"
    path.write_text("".join(line + "\n" for line in SWF.splitlines() if line[0] != ";"))
    jobs = read_swf(path)
    assert jobs.nodes.tolist() == [4, 6, 5, 64]
    assert jobs.machine_nodes == 4 + 6 + 64
    assert read_swf(path, processors_per_node=4, nodes=16).machine_nodes == 16


@pytest.mark.parametrize(
    ("text", "words"),
    [("1 2 3\n", "line 1: a job"), (SWF + "x" * 9, "line 11: a job"), (SWF[:60], "no job in it")],
)
def test_a_file_that_is_no_swf_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "log.swf"
    path.write_text(text)
    with pytest.raises(ClusterError, match=words):
        read_swf(path)
    with pytest.raises(ClusterError, match="cannot be read"):
        read_swf(tmp_path / "absent.swf")


SACCT = """\
JobID|User|Submit|Start|End|ElapsedRaw|TimelimitRaw|NNodes|State|Partition
12|anna|2026-03-01T10:00:00|2026-03-01T10:00:10|2026-03-01T10:01:10|60|2|4|COMPLETED|batch
12.batch|anna|2026-03-01T10:00:10|2026-03-01T10:00:10|2026-03-01T10:01:10|60||1|COMPLETED|
13_1|bert|2026-03-01T09:59:00|2026-03-01T10:00:20|2026-03-01T10:10:20|600|10|2|TIMEOUT|batch
14|bert|2026-03-01T10:05:00|Unknown|Unknown|0|10|2|PENDING|batch
15|bert|2026-03-01T10:05:00|2026-03-01T10:05:00|Unknown|400|10|2|RUNNING|batch
16|cora|2026-03-01T10:06:00|None|2026-03-01T10:07:00|0|10|2|CANCELLED by 1001|batch
17|cora|2026-03-01T10:08:00|2026-03-01T10:08:30|2026-03-01T10:09:00|30|UNLIMITED|1|FAILED|long
"""


def test_sacct_text(tmp_path: Path) -> None:
    path = tmp_path / "jobs.txt"
    path.write_text(SACCT)
    jobs = read_sacct(path)
    assert (jobs.submit_seconds - jobs.submit_seconds[0]).tolist() == [0, 60, 540]
    assert jobs.nodes.tolist() == [2, 4, 1]
    assert jobs.run_seconds.tolist() == [600, 60, 30]
    assert jobs.limit_seconds.tolist() == [600, 120, 600]
    assert jobs.machine_nodes == 6
    assert jobs.notes[0] == "3 jobs that never ran, or still do are left out"
    assert not any(name in repr(jobs) for name in ("anna", "bert", "cora"))
    assert read_sacct(path, partition="long", nodes=9).machine_nodes == 9


def test_sacct_with_lengths_of_time_in_words(tmp_path: Path) -> None:
    path = tmp_path / "jobs.txt"
    path.write_text(
        "JobID|Submit|Elapsed|Timelimit|AllocNodes\n"
        "1|2026-03-01T10:00:00|1-00:00:00|2-00:00:00|3\n"
        "2|2026-03-01T10:00:00|00:10:00|Partition_Limit|1\n"
    )
    jobs = read_sacct(path)
    assert jobs.run_seconds.tolist() == [86400, 600]
    assert jobs.limit_seconds.tolist() == [172800, 172800]


@pytest.mark.parametrize("new", [False, True])
def test_sacct_json(tmp_path: Path, new: bool) -> None:
    def job(submitted: int, started: int, ended: int, nodes: int, minutes: int) -> object:
        limit = {"set": True, "infinite": False, "number": minutes} if new else minutes
        times = {"submission": submitted, "start": started, "end": ended, "limit": limit}
        times["elapsed"] = max(0, ended - started)
        state = {"current": ["COMPLETED"] if new else "COMPLETED"}
        return {"job_id": 1, "user": "anna", "allocation_nodes": nodes, "time": times} | {
            "state": state
        }

    path = tmp_path / "jobs.json"
    path.write_text(
        json.dumps(
            {"jobs": [job(1000, 1010, 1100, 4, 5), job(900, 950, 1000, 2, 10), job(1, 0, 0, 0, 1)]}
        )
    )
    jobs = read_sacct(path)
    assert jobs.submit_seconds.tolist() == [900, 1000]
    assert jobs.nodes.tolist() == [2, 4]
    assert jobs.run_seconds.tolist() == [50, 90]
    assert jobs.limit_seconds.tolist() == [600, 300]
    assert jobs.machine_nodes == 4
    with pytest.raises(ClusterError, match="text only"):
        read_sacct(path, partition="batch")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("JobID|Start|NNodes\n", "lacks Submit, ElapsedRaw or Elapsed"),
        ("", "lacks JobID"),
        ("JobID|Submit|ElapsedRaw|NNodes\n", "no job in it ran"),
        ('{"jobs": []}', "no job in it ran"),
    ],
)
def test_a_file_that_is_not_of_sacct_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "jobs.txt"
    path.write_text(text)
    with pytest.raises(ClusterError, match=words):
        read_sacct(path)


def test_a_workload_is_sorted_scaled_and_cut() -> None:
    jobs = Workload([30, 0, 10], [1, 2, 4], [9, 9, 9], [5, 50, 5], machine_nodes=4)
    assert jobs.submit_seconds.tolist() == [0, 10, 30]
    assert jobs.nodes.tolist() == [2, 4, 1]
    assert jobs.node_seconds == 2 * 9 + 4 * 5 + 5
    assert jobs.load == pytest.approx(43 / (30 * 4))
    twice = jobs.at_load(2 * jobs.load)
    assert twice.submit_seconds.tolist() == [0, 5, 15]
    assert twice.load == pytest.approx(2 * jobs.load)
    assert len(jobs.chosen(jobs.nodes > 1)) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nodes": np.array([5])}, "nodes must lie in 1 to machine_nodes = 4"),
        ({"limit_seconds": np.array([0.0])}, "limit_seconds must be above 0"),
        ({"run_seconds": np.array([-1.0])}, "run_seconds must not be below 0"),
        ({"run_seconds": np.array([1.0, 1.0])}, "differ in length"),
        ({"machine_nodes": 0}, "machine_nodes = 0"),
        ({"submit_seconds": np.array([np.nan])}, "submit_seconds must be finite"),
    ],
)
def test_wrong_workloads_are_refused(change: dict[str, object], words: str) -> None:
    from dataclasses import replace

    jobs = Workload([0], [1], [1], [1], machine_nodes=4)
    with pytest.raises(ClusterError, match=words):
        replace(jobs, **change)  # type: ignore[arg-type]


def test_a_workload_without_a_span_has_no_load_to_scale() -> None:
    jobs = Workload([0], [1], [1], [1], machine_nodes=4)
    assert jobs.load == 0
    with pytest.raises(ClusterError, match="no load to scale"):
        jobs.at_load(0.5)
    with pytest.raises(ClusterError, match="load = 0 must"):
        jobs.at_load(0)


def test_recorded_accounting_is_the_same_log_as_text_and_as_json() -> None:
    """Of a real Slurm 22.05.8: three jobs ran for over a second, and a requeued one at first."""
    folder = Path(__file__).parent / "slurm_outputs"
    text = read_sacct(folder / "sacct-log-22.05.txt")
    assert (text.submit_seconds - text.submit_seconds[0]).tolist() == [0, 0, 8, 8, 8, 14, 20, 210]
    assert text.run_seconds.tolist() == [3, 73, 1, 1, 1, 5, 87, 4]
    assert text.limit_seconds.tolist() == [600, 60, 120, 120, 120, 1200, 1200, 600]
    assert text.start_seconds is not None
    assert (text.start_seconds - text.submit_seconds).tolist() == [0, 0, 1, 3, 4, 1, 0, 0]
    assert text.notes[0] == "8 jobs that never ran, or still do are left out"
    few = read_sacct(folder / "sacct-22.05.json")
    assert few.run_seconds.tolist() == [3, 73, 1, 5, 87]
    assert few.limit_seconds.tolist() == [600, 60, 120, 1200, 1200]
    assert "root" not in (folder / "sacct-22.05.json").read_text()


def test_accounting_as_json_of_a_newer_version() -> None:
    jobs = read_sacct(Path(__file__).parent / "slurm_outputs" / "sacct-23.11.json")
    assert jobs.run_seconds.tolist()[0] == 61.0
    assert jobs.limit_seconds.tolist()[0] == 1800.0


@pytest.mark.parametrize("text", ["{", '{"jobs": null}', '{"jobs": [3]}'])
def test_damaged_json_is_an_empty_log(tmp_path: Path, text: str) -> None:
    (tmp_path / "jobs.json").write_text(text)
    with pytest.raises(ClusterError, match="no job in it ran"):
        read_sacct(tmp_path / "jobs.json")
