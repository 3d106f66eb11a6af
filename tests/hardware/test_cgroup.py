"""Limits of control groups, read from text and from made-up trees."""

import pytest

from outlast.hardware.detect import (
    cpu_limit_cores,
    memory_limit_bytes,
    parse_cfs_quota,
    parse_cpu_max,
    parse_membership,
    parse_memory_limit,
    usable_cores,
)


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000\n", None), ("150000 100000\n", 1.5), ("50000", 0.5), ("", None)],
)
def test_version_2_quota(text, cores):
    assert parse_cpu_max(text) == cores


@pytest.mark.parametrize(
    ("quota", "period", "cores"),
    [("-1\n", "100000\n", None), ("400000", "100000", 4.0), ("", "", None)],
)
def test_version_1_quota(quota, period, cores):
    assert parse_cfs_quota(quota, period) == cores


@pytest.mark.parametrize(
    ("text", "limit"),
    [("max\n", None), ("9223372036854771712\n", None), ("1073741824\n", 2**30), ("", None)],
)
def test_memory_limit(text, limit):
    assert parse_memory_limit(text) == limit


def test_membership_of_both_versions():
    text = "4:cpu,cpuacct:/a\n3:memory:/b\n0::/slurm/job_7\n"
    assert parse_membership(text, "cpu") == ["/a", "/slurm/job_7"]
    assert parse_membership(text, "memory") == ["/b", "/slurm/job_7"]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_tightest_ancestor_binds(tmp_path):
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("0::/slurm/job_7/step_0\n")
    write(root / "slurm/job_7/cpu.max", "800000 100000\n")
    write(root / "slurm/job_7/step_0/cpu.max", "max 100000\n")
    write(root / "slurm/job_7/memory.max", f"{8 * 2**30}\n")
    write(root / "slurm/job_7/step_0/memory.max", f"{4 * 2**30}\n")
    assert cpu_limit_cores(root, membership) == 8.0
    assert memory_limit_bytes(root, membership) == 4 * 2**30


def test_a_container_sees_only_the_root_of_its_group(tmp_path):
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("0::/system.slice/docker-abc.scope\n")
    write(root / "cpu.max", "250000 100000\n")
    assert cpu_limit_cores(root, membership) == 2.5
    assert memory_limit_bytes(root, membership) is None


def test_version_1_tree(tmp_path):
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("5:cpu,cpuacct:/docker/x\n2:memory:/docker/x\n")
    write(root / "cpu,cpuacct/docker/x/cpu.cfs_quota_us", "300000\n")
    write(root / "cpu,cpuacct/docker/x/cpu.cfs_period_us", "100000\n")
    write(root / "memory/docker/x/memory.limit_in_bytes", "536870912\n")
    assert cpu_limit_cores(root, membership) == 3.0
    assert memory_limit_bytes(root, membership) == 512 * 2**20


def test_no_control_groups_at_all(tmp_path):
    assert cpu_limit_cores(tmp_path / "none", tmp_path / "none") is None
    assert memory_limit_bytes(tmp_path / "none", tmp_path / "none") is None


def test_usable_cores_are_the_smaller():
    assert usable_cores(8, None) == 8
    assert usable_cores(8, 1.5) == 1.5
    assert usable_cores(2, 16.0) == 2
