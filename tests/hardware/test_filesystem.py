"""Probing a file system really writes, and leaves nothing behind."""

import time
from pathlib import Path

import pytest

from outlast.cli.doctor import storage_checks
from outlast.errors import HardwareError
from outlast.hardware import filesystem, probe
from outlast.hardware.filesystem import mount_of

MOUNTS = """\
/dev/vda / ext4 rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
server:/x /scratch lustre rw 0 0
/dev/sdb /scratch/my\\040disk xfs rw 0 0
overlay /scratch overlay rw 0 0
"""


def test_probe_measures_and_cleans_up(tmp_path):
    facts = probe(tmp_path)
    assert facts.path == str(tmp_path.resolve())
    assert 0 < facts.free_bytes <= facts.total_bytes
    assert 0 < facts.fsync_seconds < 10
    assert facts.rename_is_atomic
    assert facts.directory_fsync is True
    assert facts.type != "unknown"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/home/me", ("/", "ext4")),
        ("/dev/shm/x", ("/dev/shm", "tmpfs")),
        ("/scratch/run", ("/scratch", "overlay")),
        ("/scratch/my disk/run", ("/scratch/my disk", "xfs")),
        ("/scratchy", ("/", "ext4")),
    ],
)
def test_the_deepest_and_latest_mount_holds_a_path(path, mount):
    assert mount_of(Path(path), MOUNTS) == mount


def test_no_mount_table():
    assert mount_of(Path("/home"), "") == ("/", "unknown")


def test_a_missing_directory_is_refused(tmp_path):
    with pytest.raises(HardwareError, match="is not a directory"):
        probe(tmp_path / "none")


def test_a_read_only_directory_is_refused_and_essential(tmp_path, monkeypatch):
    def refuse(*_arguments, **_keywords):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(filesystem.tempfile, "TemporaryDirectory", refuse)
    with pytest.raises(HardwareError, match="Read-only file system"):
        probe(tmp_path)
    (check,) = storage_checks(tmp_path)
    assert check.broken


def test_a_rename_that_is_not_atomic_is_noticed(tmp_path, monkeypatch):
    def copy_slowly(source, target):
        target.write_bytes(b"")
        time.sleep(0.003)
        target.write_bytes(source.read_bytes())

    monkeypatch.setattr(Path, "replace", copy_slowly)
    assert not probe(tmp_path).rename_is_atomic
    states = {check.name: check for check in storage_checks(tmp_path)}
    assert states["rename"].broken
