"""Slots: what was published is read back, and nothing else ever is."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import RecoverError
from outlast.recover.slot import Catalogue, Slot, SlotEntry, SlotReader, check_capacity, read_slot
from outlast.state.box import Box

ENTRIES = (
    SlotEntry("a.weight", "float32", (4, 2), Box((2, 0), (2, 2)), 0, 16),
    SlotEntry("b", "bfloat16", (), Box((), ()), 64, 2),
    SlotEntry("empty", "float32", (0,), Box((0,), (0,)), 128, 0),
)
CATALOGUE = Catalogue("job", "digest", "lineage", ENTRIES)


def published(path: Path, step: int = 7) -> Path:
    slot = Slot(path, CATALOGUE, values_bytes=10)
    slot.begin()
    slot.memory[:16] = bytes(range(16))
    slot.memory[64:66] = b"xy"
    slot.publish(step, b'{"lr": [0.5]}')
    slot.close()
    return path


def test_what_was_published_is_read_back(tmp_path: Path) -> None:
    kept = read_slot(published(tmp_path / "slot"), "job")
    assert kept is not None
    assert (kept.step, kept.catalogue, kept.values) == (7, CATALOGUE, {"lr": [0.5]})
    reader = SlotReader(kept.path)
    assert [bytes(reader.bytes_of(each)) for each in ENTRIES] == [bytes(range(16)), b"xy", b""]
    reader.close()


def test_a_slot_being_written_holds_no_state(tmp_path: Path) -> None:
    slot = Slot(tmp_path / "slot", CATALOGUE, values_bytes=10)
    assert read_slot(slot.path, "job") is None
    slot.publish(1, b"{}")
    assert read_slot(slot.path, "job") is not None
    slot.begin()
    assert read_slot(slot.path, "job") is None
    slot.close()


def test_another_runs_slot_is_not_read(tmp_path: Path) -> None:
    assert read_slot(published(tmp_path / "slot"), "other") is None


@given(position=st.integers(0, 127), flip=st.integers(1, 255))
def test_a_torn_header_or_mark_is_never_a_state(
    tmp_path_factory: pytest.TempPathFactory, position: int, flip: int
) -> None:
    path = published(tmp_path_factory.mktemp("slots") / "slot")
    content = bytearray(path.read_bytes())
    content[position] ^= flip
    path.write_bytes(content)
    kept = read_slot(path, "job")
    # Between header and mark nothing is written.
    assert kept is None or (kept.step, kept.values) == (7, {"lr": [0.5]})
    if position < 40 or 64 <= position < 88:
        assert kept is None


def test_a_file_cut_short_is_no_state(tmp_path: Path) -> None:
    content = published(tmp_path / "slot").read_bytes()
    for length in (0, 10, 63, 64, 100, 140):
        (tmp_path / "cut").write_bytes(content[:length])
        assert read_slot(tmp_path / "cut", "job") is None


def test_values_that_outgrow_the_slot_are_refused(tmp_path: Path) -> None:
    slot = Slot(tmp_path / "slot", CATALOGUE, values_bytes=10)
    with pytest.raises(RecoverError, match="values of the state have grown to 9999 bytes"):
        slot.publish(1, b"x" * 9999)
    assert read_slot(slot.path, "job") is None
    slot.close()


def test_a_full_tmpfs_is_said_in_a_sentence_and_nothing_stays(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("only the superuser can mount a small tmpfs")
    try:
        large = Catalogue(
            "job",
            "digest",
            "lineage",
            (SlotEntry("w", "uint8", (10**6,), Box((0,), (10**6,)), 0, 10**6),),
        )
        with pytest.raises(RecoverError, match=r"1\.0 MB of memory cannot be had .* it is full"):
            Slot(tmp_path / "slot", large, values_bytes=10)
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(RecoverError, match="has room for"):
            check_capacity(tmp_path, 10**6, tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@given(position=st.integers(0, 65), bit=st.integers(0, 7))
def test_a_flipped_bit_of_the_data_is_found(
    tmp_path_factory: pytest.TempPathFactory, position: int, bit: int
) -> None:
    path = published(tmp_path_factory.mktemp("slots") / "slot")
    kept = read_slot(path, "job")
    assert kept is not None
    assert kept.damage() == ""
    content = bytearray(path.read_bytes())
    content[content.index(bytes(range(16))) + position] ^= 1 << bit
    path.write_bytes(content)
    assert kept.damage() == f"{path} of step 7 is damaged (its checksum differs)"
    path.unlink()
    assert str(path) in kept.damage()
