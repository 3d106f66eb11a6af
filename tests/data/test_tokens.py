"""The token file: what is written is what is read, and damage is told."""

import errno
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.data import (
    ByteTokenizer,
    TokenFile,
    check_vocabulary,
    whole_files,
    write_tokens,
)
from outlast.data.prepare import Document
from outlast.data.tokens import _TokenSink
from outlast.errors import DataError


class WordTokenizer:
    """Ids above 65,535 and no end-of-text token."""

    name = "words"
    vocabulary_size = 100_000
    end_of_text = None

    def encode(self, text):
        return np.array([99_000 + len(word) for word in text.split()], np.uint32)

    def decode(self, ids):
        return " ".join("x" * (number - 99_000) for number in ids)


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_bytes(b"first\n")
    (tmp_path / "text/b.txt").write_bytes(b"second one \xff\n")
    return whole_files(sorted((tmp_path / "text").iterdir()), tmp_path / "text")


def test_documents_follow_each_other_with_separators(tmp_path, corpus):
    header = write_tokens(tmp_path / "t.bin", corpus, ByteTokenizer())
    file = TokenFile.open(tmp_path / "t.bin")
    assert file.tokens.astype(np.uint8).tobytes() == b"first\n\0second one \xff\n\0"
    assert file.header == header
    assert (header.tokens, header.documents, header.maximum_token) == (21, 2, 255)
    assert header.bytes == file.bytes == 19
    assert header.dtype == "uint16"
    file.verify()


def test_the_format_is_as_specified(tmp_path, corpus):
    write_tokens(tmp_path / "t.bin", corpus, ByteTokenizer())
    raw = (tmp_path / "t.bin").read_bytes()
    header = json.loads((tmp_path / "t.json").read_text())
    assert np.frombuffer(raw, "<u2")[:5].tolist() == list(b"first")
    assert header["format"] == "outlast-tokens"
    assert header["version"] == 1
    assert header["file_hash"] == xxhash.xxh3_128_hexdigest(raw)
    source = b"\0a.txt\0first\n\0b.txt\0second one \xff\n"
    assert header["source_hash"] == xxhash.xxh3_128_hexdigest(source)


def test_large_vocabularies_take_four_bytes(tmp_path, corpus):
    write_tokens(tmp_path / "t.bin", corpus, WordTokenizer())
    file = TokenFile.open(tmp_path / "t.bin")
    assert file.tokens.dtype == np.dtype("<u4")
    assert file.tokens.tolist() == [99_005, 99_006, 99_003, 99_001]


@settings(max_examples=20)
@given(texts=st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=5))
def test_round_trip(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("round")
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_bytes(text)
    corpus = whole_files(sorted(folder.glob("*.txt")), folder)
    write_tokens(folder / "t.bin", corpus, ByteTokenizer())
    file = TokenFile.open(folder / "t.bin")
    assert file.tokens.astype(np.uint8).tobytes() == b"".join(text + b"\0" for text in texts)
    assert file.bytes == sum(map(len, texts))


def test_progress_ends_with_all_bytes(tmp_path, corpus):
    seen = []
    write_tokens(tmp_path / "t.bin", corpus, ByteTokenizer(), lambda *done: seen.append(done))
    assert seen == [(6, 19), (19, 19)]


def test_tokens_do_not_depend_on_how_a_document_is_read(tmp_path, corpus, monkeypatch):
    write_tokens(tmp_path / "whole.bin", corpus, ByteTokenizer())
    monkeypatch.setattr(Document.pieces, "__defaults__", (4,))
    write_tokens(tmp_path / "pieces.bin", corpus, ByteTokenizer())
    assert (tmp_path / "whole.json").read_text() == (tmp_path / "pieces.json").read_text()


def test_a_full_disk_publishes_nothing(tmp_path, corpus, monkeypatch):
    def full(self, ids):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_TokenSink, "append", full)
    with pytest.raises(DataError, match=r"No space left to write .*t\.bin"):
        write_tokens(tmp_path / "out/t.bin", corpus, ByteTokenizer())
    assert list((tmp_path / "out").iterdir()) == []


def test_a_failure_keeps_what_was_there(tmp_path, corpus):
    write_tokens(tmp_path / "t.bin", corpus, ByteTokenizer())
    before = (tmp_path / "t.bin").read_bytes()
    corpus.documents[1].path.unlink()
    with pytest.raises(DataError, match=r"b\.txt cannot be read"):
        write_tokens(tmp_path / "t.bin", corpus, ByteTokenizer())
    assert (tmp_path / "t.bin").read_bytes() == before
    TokenFile.open(tmp_path / "t.bin").verify()


def test_an_unwritable_place_is_named(tmp_path, corpus):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match=r"file/t\.bin cannot be written"):
        write_tokens(tmp_path / "file/t.bin", corpus, ByteTokenizer())
    with pytest.raises(DataError, match=r"must end in \.bin"):
        write_tokens(tmp_path / "t.tokens", corpus, ByteTokenizer())


def test_leftovers_of_killed_writers_are_removed(tmp_path, corpus):
    old, recent = tmp_path / ".t.bin.aa.tmp", tmp_path / ".t.bin.bb.tmp"
    for path in (old, recent):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    write_tokens(tmp_path / "t.bin", corpus, ByteTokenizer())
    assert not old.exists()
    assert recent.exists()


def test_a_tokenizer_that_makes_nothing_is_refused(tmp_path):
    (tmp_path / "blank.txt").write_text("   \n")
    corpus = whole_files([tmp_path / "blank.txt"], tmp_path)
    with pytest.raises(DataError, match="would hold no token"):
        write_tokens(tmp_path / "t.bin", corpus, WordTokenizer())
    assert not (tmp_path / "t.bin").exists()


@pytest.mark.parametrize("dtype", [None, "uint16", "uint32"])
def test_bare_files_are_read_as_the_given_type(tmp_path, dtype):
    np.arange(10, dtype=dtype or "uint16").tofile(tmp_path / "bare.bin")
    file = TokenFile.open(tmp_path / "bare.bin", dtype)
    assert file.tokens.tolist() == list(range(10))
    assert file.header is None
    assert file.bytes is None
    file.verify()


def test_arrays_are_mapped_not_loaded(tmp_path):
    np.save(tmp_path / "t.npy", np.arange(5, dtype=np.int32))
    file = TokenFile.open(str(tmp_path / "t.npy"))
    assert file.tokens.tolist() == [0, 1, 2, 3, 4]
    assert isinstance(file.tokens, np.memmap)


def test_somebody_elses_json_is_not_a_header(tmp_path):
    np.arange(4, dtype=np.uint16).tofile(tmp_path / "t.bin")
    (tmp_path / "t.json").write_text('{"author": "me"}')
    assert TokenFile.open(tmp_path / "t.bin").header is None


def bare(content):
    return lambda folder: (folder / "t.bin").write_bytes(content)


def array(value):
    return lambda folder: np.save(folder / "t.npy", value)


@pytest.mark.parametrize(
    ("make", "name", "dtype", "message"),
    [
        (lambda _: None, "t.bin", None, "does not exist"),
        (lambda folder: (folder / "t.txt").write_text("x"), "t.txt", None, "must end in"),
        (bare(b""), "t.bin", None, "is empty"),
        (bare(b"abc"), "t.bin", None, "3 bytes, not a multiple of 2"),
        (bare(b"abcd"), "t.bin", "float32", "'float32' is not an integer type"),
        (bare(b"abcd"), "t.bin", "nonsense", "'nonsense' is not an integer type"),
        (array(np.zeros((2, 2), int)), "t.npy", None, r"shape \(2, 2\)"),
        (array(np.zeros(4)), "t.npy", None, "type float64"),
        (array(np.zeros(0, int)), "t.npy", None, "is empty"),
        (array(np.zeros(4, np.int32)), "t.npy", "uint16", "says that it holds int32"),
        (lambda folder: (folder / "t.npy").write_bytes(b"junk"), "t.npy", None, "cannot be opened"),
        (lambda folder: (folder / "t.npy").write_bytes(b""), "t.npy", None, "cannot be opened"),
    ],
)
def test_unusable_files_are_refused(tmp_path, make, name, dtype, message):
    make(tmp_path)
    with pytest.raises(DataError, match=message):
        TokenFile.open(tmp_path / name, dtype)


def change_header(path: Path, **changes):
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value != "gone"}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "t.bin").write_bytes(b"ab"), "2 bytes, but its header says 21 tokens"),
        (lambda f: (f / "t.json").write_text('{"for'), r"t\.json cannot be read as JSON"),
        (lambda f: (f / "t.json").write_text("[]"), "does not hold a JSON object"),
        (lambda f: change_header(f / "t.json", tokens="21"), "damaged: tokens = '21'"),
        (lambda f: change_header(f / "t.json", bytes="gone"), "damaged: bytes = None"),
        (lambda f: change_header(f / "t.json", version=9), "format version 9; this Outlast reads"),
        (lambda f: change_header(f / "t.json", dtype="int8"), "must be uint16 or uint32"),
    ],
)
def test_damage_is_told(tmp_path, corpus, damage, message):
    write_tokens(tmp_path / "t.bin", corpus, ByteTokenizer())
    damage(tmp_path)
    with pytest.raises(DataError, match=message):
        TokenFile.open(tmp_path / "t.bin")


def test_a_flipped_bit_is_found_by_verify(tmp_path, corpus):
    write_tokens(tmp_path / "t.bin", corpus, ByteTokenizer())
    raw = bytearray((tmp_path / "t.bin").read_bytes())
    raw[7] ^= 1
    (tmp_path / "t.bin").write_bytes(raw)
    with pytest.raises(DataError, match=r"t\.bin is damaged"):
        TokenFile.open(tmp_path / "t.bin").verify()


def test_a_type_that_contradicts_the_header_is_refused(tmp_path, corpus):
    write_tokens(tmp_path / "t.bin", corpus, ByteTokenizer())
    assert TokenFile.open(tmp_path / "t.bin", "uint16").header
    with pytest.raises(DataError, match=r"data.token_dtype = 'uint32'"):
        TokenFile.open(tmp_path / "t.bin", "uint32")


def test_vocabulary_mismatch_names_both_sides(tmp_path, corpus, monkeypatch):
    write_tokens(tmp_path / "own.bin", corpus, ByteTokenizer())
    own = TokenFile.open(tmp_path / "own.bin")
    check_vocabulary(own, 256)
    with pytest.raises(DataError, match=r"largest token id 255 in .*own\.bin .* = 128"):
        check_vocabulary(own, 128)
    monkeypatch.setattr("outlast.data.tokens.SCAN_TOKENS", 3)
    np.array([1, 2, 3, 4, 300, 5], np.uint16).tofile(tmp_path / "bare.bin")
    bare_file = TokenFile.open(tmp_path / "bare.bin")
    check_vocabulary(bare_file, 301)
    with pytest.raises(DataError, match="largest token id 300"):
        check_vocabulary(bare_file, 300)
    np.save(tmp_path / "t.npy", np.array([5, -1]))
    with pytest.raises(DataError, match="negative token id -1"):
        check_vocabulary(TokenFile.open(tmp_path / "t.npy"), 256)


def test_the_tail_is_split_off(tmp_path):
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "t.bin")
    head, tail = TokenFile.open(tmp_path / "t.bin").split_tail(0.05)
    assert head.tokens.tolist() == list(range(95))
    assert tail.tokens.tolist() == list(range(95, 100))
    with pytest.raises(DataError, match=r"t\.bin \(100 tokens\) is too short"):
        TokenFile.open(tmp_path / "t.bin").split_tail(0.001)
