"""Which files make up a corpus and how it is divided."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.data import split_by_name, stdlib_files, stdlib_root, text_files, whole_files
from outlast.data.prepare import Document
from outlast.errors import DataError


def make_files(root: Path, contents: dict[str, bytes]) -> list[Path]:
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return [root / name for name in contents]


def names(corpus):
    return [document.name for document in corpus.documents]


def test_stdlib_is_found_without_installed_packages():
    files = stdlib_files()
    relative = [path.relative_to(stdlib_root()).as_posix() for path in files]
    assert {"json/__init__.py", "argparse.py"} <= set(relative)
    assert not any("site-packages" in name or "__pycache__" in name for name in relative)
    assert relative == sorted(relative)


def test_stdlib_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="without the sources"):
        stdlib_files()


def test_patterns_name_each_file_once(tmp_path):
    make_files(tmp_path, {"a.txt": b"a", "deep/er/b.txt": b"b", "deep/c.md": b"c"})
    found = text_files(["**/*.txt", "a.txt", str(tmp_path / "deep/c.md")], tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in found] == [
        "a.txt",
        "deep/c.md",
        "deep/er/b.txt",
    ]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("missing.txt", "no file is found for 'missing.txt'"),
        ("*.xyz", r"no glob matches '\*.xyz'"),
        ("folder", r"'folder' is a folder .* write 'folder/\*\*'"),
    ],
)
def test_a_pattern_without_files_is_named(tmp_path, pattern, message):
    make_files(tmp_path, {"a.txt": b"a", "folder/b.txt": b"b"})
    with pytest.raises(DataError, match=message):
        text_files(["a.txt", pattern], tmp_path)


def test_no_pattern_is_refused(tmp_path):
    with pytest.raises(DataError, match="at least one"):
        text_files([], tmp_path)


def test_empty_files_are_left_out_and_an_empty_corpus_is_refused(tmp_path):
    files = make_files(tmp_path, {"a.txt": b"text", "b.txt": b""})
    assert names(whole_files(files, tmp_path)) == ["a.txt"]
    with pytest.raises(DataError, match="corpus is empty"):
        whole_files(files[1:], tmp_path)
    with pytest.raises(DataError, match="corpus is empty"):
        whole_files([], tmp_path)


def test_a_file_that_vanished_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone.txt cannot be read"):
        whole_files([tmp_path / "gone.txt"], tmp_path)
    with pytest.raises(DataError, match=r"gone.txt cannot be read"):
        list(Document("gone.txt", tmp_path / "gone.txt", 0, 5).pieces())


def test_split_depends_on_names_alone(tmp_path):
    contents = {f"folder/{number}.txt": b"x" for number in range(200)}
    here = make_files(tmp_path / "here", contents)
    there = make_files(tmp_path / "there", contents)
    random.Random(0).shuffle(there)
    train, validation = split_by_name(here, tmp_path / "here", 0.2)
    moved_train, moved_validation = split_by_name(there, tmp_path / "there", 0.2)
    assert names(train) == names(moved_train)
    assert names(validation) == names(moved_validation)
    assert set(names(train)).isdisjoint(names(validation))
    assert len(names(train)) + len(names(validation)) == 200
    assert 20 <= len(names(validation)) <= 60


def test_a_new_file_moves_no_other(tmp_path):
    files = make_files(tmp_path, {f"{number}.txt": b"x" for number in range(60)})
    _, before = split_by_name(files[:50], tmp_path, 0.3)
    _, after = split_by_name(files, tmp_path, 0.3)
    assert set(names(before)) <= set(names(after))


@pytest.mark.parametrize("fraction", [1e-9, 0.999999999])
def test_both_sides_of_a_split_get_a_file(tmp_path, fraction):
    files = make_files(tmp_path, {f"{number}.txt": b"x" for number in range(3)})
    train, validation = split_by_name(files, tmp_path, fraction)
    assert min(len(names(train)), len(names(validation))) == 1
    assert len(names(train)) + len(names(validation)) == 3


def test_fraction_zero_keeps_everything_for_training(tmp_path):
    train, validation = split_by_name(make_files(tmp_path, {"a": b"x", "b": b"y"}), tmp_path, 0.0)
    assert names(train) == ["a", "b"]
    assert validation is None


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_a_fraction_out_of_range_is_refused(tmp_path, fraction):
    with pytest.raises(DataError, match=r"data.validation_fraction = "):
        split_by_name(make_files(tmp_path, {"a": b"x"}), tmp_path, fraction)


def test_one_file_is_cut_at_a_line(tmp_path):
    text = b"".join(b"line %d\n" % number for number in range(1000))
    train, validation = split_by_name(make_files(tmp_path, {"one.txt": text}), tmp_path, 0.1)
    head = b"".join(train.documents[0].pieces())
    tail = b"".join(validation.documents[0].pieces())
    assert head + tail == text
    assert head.endswith(b"\n")
    assert 0.09 * len(text) < len(tail) < 0.12 * len(text)


def test_one_file_too_short_to_cut_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"one.txt \(2 bytes\) is too short"):
        split_by_name(make_files(tmp_path, {"one.txt": b"x\n"}), tmp_path, 0.1)


@given(text=st.text(alphabet="a\né€😀", max_size=200), piece_bytes=st.integers(4, 40))
def test_pieces_join_to_the_document_and_never_split_a_character(
    tmp_path_factory, text, piece_bytes
):
    path = tmp_path_factory.getbasetemp() / "pieces.txt"
    path.write_bytes(text.encode())
    pieces = list(Document("pieces", path, 0, path.stat().st_size).pieces(piece_bytes))
    assert "".join(piece.decode() for piece in pieces) == text
    assert all(0 < len(piece) <= piece_bytes for piece in pieces)


@given(content=st.binary(max_size=100), piece_bytes=st.integers(4, 12), data=st.data())
def test_pieces_of_any_bytes_join_to_their_range(tmp_path_factory, content, piece_bytes, data):
    path = tmp_path_factory.getbasetemp() / "pieces.bin"
    path.write_bytes(content)
    start = data.draw(st.integers(0, len(content)))
    stop = data.draw(st.integers(start, len(content)))
    pieces = Document("pieces", path, start, stop).pieces(piece_bytes)
    assert b"".join(pieces) == content[start:stop]


def test_listing_hash_sees_names_and_sizes(tmp_path):
    files = make_files(tmp_path, {"a": b"one", "b": b"two"})
    before = whole_files(files, tmp_path).listing_hash()
    assert whole_files(files[::-1], tmp_path).listing_hash() == before
    files[0].write_bytes(b"longer")
    assert whole_files(files, tmp_path).listing_hash() != before
    assert whole_files(files[1:], tmp_path).listing_hash() != before
