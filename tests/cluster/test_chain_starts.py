"""Past predictions of a chain's starts, and what they do to the next ones."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from slurm_programs import in_queue, partition, put_queue, slurm_commands

from outlast.cluster.chain_files import ChainFiles, ChainPlan, chain_files, write_plan
from outlast.cluster.choosing import (
    FEWEST,
    choose_first,
    correction_of,
    past_starts,
    starts_nearby,
    starts_words,
)

HOUR = 3600.0


def chosen(job: str, at: float, waits: list[float], after: str = "") -> dict[str, object]:
    shape = {"nodes": 4, "wall_seconds": HOUR, "number": 1}
    return {"time": at, "kind": "chosen", "job": job, "waits": waits, "after": after, **shape}


def started(job: str, began: float) -> dict[str, object]:
    return {"time": began + 1.0, "kind": "started", "job": job, "began": began}


def ended(job: str, at: float) -> dict[str, object]:
    return {"time": at, "kind": "ended", "job": job}


def late(files: ChainFiles, times: int, factor: float) -> None:
    """A journal of starts that were predicted in one to two hours, and came so many times later."""
    lines: list[dict[str, object]] = []
    for each in range(times):
        at, wait = 1e9 + 1e5 * each, HOUR * (1.0 + 0.2 * each)
        lines.append(chosen(str(each), at, [wait, wait, wait, wait]))
        lines.append(started(str(each), at + factor * wait))
    files.path.mkdir(parents=True, exist_ok=True)
    files.journal.write_text("".join(json.dumps(each) + "\n" for each in lines))


def test_a_start_is_compared_with_what_was_predicted_before_any_correction() -> None:
    journal = [
        chosen("1", 1000.0, [60.0, 120.0, 240.0, 300.0]),
        started("1", 1500.0),
        chosen("2", 1510.0, [0.0, 30.0, 90.0, 95.0], after="1"),
        ended("1", 3000.0),
        started("2", 3040.0),
    ]
    first, second = past_starts(journal)
    assert (first.waited_seconds, first.forecast.p50_seconds) == (500.0, 120.0)
    assert second.waited_seconds == 40.0, "from the end of the link before"


@pytest.mark.parametrize(
    "journal",
    [
        pytest.param([chosen("1", 0.0, [1.0, 2.0, 3.0, 4.0])], id="waits still"),
        pytest.param([started("1", 5.0)], id="nothing was predicted"),
        pytest.param(
            [chosen("2", 0.0, [1.0, 2.0, 3.0, 4.0], after="1"), started("2", 9.0)],
            id="nobody knows when the link before ended",
        ),
    ],
)
def test_what_cannot_be_compared_is_left_out(journal: list[dict[str, object]]) -> None:
    assert past_starts(journal) == []


def test_runs_beside_one_another_learn_from_one_another(tmp_path: Path) -> None:
    for name, times in (("a", 2), ("b", 3)):
        late(chain_files(tmp_path / name), times, 2.0)
    damaged = chain_files(tmp_path / "c")
    damaged.path.mkdir(parents=True)
    damaged.journal.write_text('{"kind": "chosen", "time": 1, "job": "1", "waits": [1]}\n')
    new = chain_files(tmp_path / "new")
    assert len(starts_nearby(new)) == 5
    assert correction_of(starts_nearby(new)[1:]) is None, "too few"
    found = correction_of(starts_nearby(new))
    assert found is not None
    # 3600 + 300 s became 7200 + 300 s, 5040 + 300 s 10080 + 300 s; the middle of those.
    assert np.exp(found.p50) == pytest.approx(1.93, abs=0.02)


def test_starts_that_were_certain_teach_nothing(tmp_path: Path) -> None:
    files = chain_files(tmp_path / "a")
    files.path.mkdir(parents=True)
    lines = [chosen("1", 0.0, [0.0] * 4), started("1", 3.0)]
    files.journal.write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert starts_nearby(files) == []


def test_what_was_learnt_is_said(tmp_path: Path) -> None:
    files = chain_files(tmp_path / "a")
    assert starts_words([]).startswith("no predicted start of this folder's runs has been seen")
    late(files, 2, 2.0)
    words = starts_words(starts_nearby(files))
    assert words.startswith("2 predicted start(s)")
    assert f"from {FEWEST} on, predictions are corrected" in words
    late(files, 8, 2.0)
    words = starts_words(starts_nearby(files))
    assert "0 came by the P90 that was predicted; predictions are corrected by that" in words


def test_starts_that_came_late_move_the_choice_to_nodes_that_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight nodes are predicted to be free soon, two are now."""
    slurm_commands(tmp_path, monkeypatch)
    put_queue(tmp_path, [in_queue(1, "RUNNING", 8, 4.0)], partition(10, 2))
    files = chain_files(tmp_path / "runs" / "a")
    plan = ChainPlan("abc", "a", "dependent", (2,), 1, 1e6, "/", "python", chooses=True)
    plan = replace(plan, sizes=(2, 8))
    write_plan(files, plan)
    before = choose_first(files, plan, 1, seconds=4 * HOUR)
    assert before.plan.nodes == (8,)
    assert before.forecast is not None
    late(chain_files(tmp_path / "runs" / "b"), 10, 6.0)
    after = choose_first(files, plan, 1, seconds=4 * HOUR)
    assert after.plan.nodes == (2,)
    late(chain_files(tmp_path / "runs" / "b"), 10, 1.2)
    still = choose_first(files, plan, 1, seconds=4 * HOUR)
    assert still.plan.nodes == (8,)
    assert still.forecast is not None
    assert still.forecast.p50_seconds > before.forecast.p50_seconds
    assert still.forecast.wait_seconds == pytest.approx(before.forecast.wait_seconds)
