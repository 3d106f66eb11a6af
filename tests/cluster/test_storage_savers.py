"""Who saves to a file system, and how far apart: files of live jobs, and the same sum for all."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.cluster import storage
from outlast.cluster.storage import Saver, SavingJob, least_period_seconds

FIGURES = {"nodes": 4, "save_seconds": 30.0, "overhead_seconds": 30.0, "mtbf_seconds": 1e4}
ALONE_SECONDS = math.sqrt(2 * 1e4 * 30.0)


def saving(**figures):
    return SavingJob.from_statement(figures)


savings = st.builds(
    saving,
    nodes=st.floats(1.0, 500.0),
    save_seconds=st.floats(1.0, 2000.0),
    overhead_seconds=st.floats(0.0, 100.0),
    mtbf_seconds=st.floats(1e4, 1e7),
    period_seconds=st.sampled_from([0.0, 0.0, 500.0, 3000.0]),
)


def saver(folder, load=0.05, **settings):
    return Saver(folder, load, **settings)


@given(st.lists(savings, min_size=1, max_size=6), st.floats(0.05, 1.0))
def test_all_that_ask_keep_to_the_load_together(found, load):
    periods = [
        each.period_seconds
        or least_period_seconds(each, found[:number] + found[number + 1 :], load)
        for number, each in enumerate(found)
    ]
    fixed = sum(each.save_seconds / each.period_seconds for each in found if each.period_seconds)
    free = [(each, p) for each, p in zip(found, periods, strict=True) if not each.period_seconds]
    if not free or not all(p for _, p in free):
        # All agree whether there is something to make way for.
        assert not any(p for _, p in free)
        return
    total = sum(each.save_seconds / p for each, p in free)
    assert total <= max(load - fixed, 0.05 * load) * (1 + 1e-6)


def test_a_job_alone_saves_as_often_as_is_best_for_it(tmp_path):
    own = saver(tmp_path, load=0.6)
    assert own.least_seconds(**FIGURES) == 0.0
    own.close()
    assert not list(tmp_path.iterdir())


def test_jobs_make_way_for_each_other_until_they_leave(tmp_path):
    first, second = saver(tmp_path), saver(tmp_path)
    alone = first.least_seconds(**FIGURES)
    # A load of 30 / 775 s, which is within the budget.
    assert alone == 0.0
    both = second.least_seconds(**FIGURES)
    assert both == pytest.approx(2 * 30.0 / 0.05, rel=1e-6)
    assert both > ALONE_SECONDS
    assert first.least_seconds(**FIGURES) == pytest.approx(both)
    second.close()
    assert first.least_seconds(**FIGURES) == 0.0
    first.close()


def test_those_who_can_choose_take_what_fixed_intervals_leave(tmp_path):
    fixed, free = saver(tmp_path), saver(tmp_path)
    assert fixed.least_seconds(**FIGURES, period_seconds=1000.0) == 0.0
    assert free.least_seconds(**FIGURES) == pytest.approx(30.0 / (0.05 - 0.03), rel=1e-6)
    # However much the others take, something is left.
    assert fixed.least_seconds(**FIGURES, period_seconds=30.0) == 0.0
    assert free.least_seconds(**FIGURES) == pytest.approx(30.0 / (0.05 * 0.05), rel=1e-6)
    fixed.close()
    free.close()


OTHER = """
import sys, time
from outlast.cluster.storage import Saver
saver = Saver(sys.argv[1], 0.05)
saver.least_seconds(nodes=4, save_seconds=30.0, overhead_seconds=30.0, mtbf_seconds=1e4)
print("told", flush=True)
time.sleep(600)
"""


def test_nobody_makes_way_for_a_killed_job(tmp_path):
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    own = saver(tmp_path)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "told\n"
        assert own.least_seconds(**FIGURES) > ALONE_SECONDS
    finally:
        other.kill()
        other.communicate()
    assert own.least_seconds(**FIGURES) == 0.0
    assert len(list(tmp_path.iterdir())) == 1
    own.close()


def test_a_job_on_another_node_lives_by_its_heartbeat(tmp_path):
    other, own = saver(tmp_path), saver(tmp_path)
    other.least_seconds(**FIGURES)
    [file] = tmp_path.iterdir()
    content = json.loads(file.read_text())
    content["owner"].update(host="elsewhere", boot="other", job="7")
    file.write_text(json.dumps(content))
    assert own.least_seconds(**FIGURES) > ALONE_SECONDS
    # Silent enough to be asked about, and long before it counts as dead.
    os.utime(file, (time.time() - 45.0,) * 2)
    assert own.least_seconds(**FIGURES) > ALONE_SECONDS
    asking = saver(tmp_path, ask_alive=lambda owner: False if owner.job == "7" else None)
    assert asking.least_seconds(**FIGURES) == pytest.approx(own.least_seconds(**FIGURES), rel=1e-6)
    assert not file.exists()
    for each in (other, own, asking):
        each.close()


def test_a_heartbeat_keeps_the_file_young(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "HEARTBEAT_SECONDS", 0.05)
    own = saver(tmp_path)
    own.least_seconds(**FIGURES)
    [file] = tmp_path.iterdir()
    old = time.time() - 1000.0
    os.utime(file, (old, old))
    deadline = time.monotonic() + 30.0
    while file.stat().st_mtime < old + 500.0:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    own.close()


@pytest.mark.parametrize("content", ["{", "[]", '{"owner": 1}', '{"nodes": "many"}'])
def test_a_damaged_file_is_ignored_and_removed_when_it_is_old(tmp_path, content):
    file = tmp_path / "saver-abc.json"
    file.write_text(content)
    own = saver(tmp_path)
    assert own.least_seconds(**FIGURES) == 0.0
    assert file.exists()
    os.utime(file, (time.time() - 1000.0,) * 2)
    assert own.least_seconds(**FIGURES) == 0.0
    assert not file.exists()
    own.close()


def test_a_folder_that_cannot_be_used_hinders_nobody(tmp_path):
    (tmp_path / "file").write_text("")
    own = saver(tmp_path / "file" / "turns")
    assert own.least_seconds(**FIGURES) == 0.0
    own.close()
