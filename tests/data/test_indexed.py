"""Megatron's index of a token file: written, read, and refused where it does not fit."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.data import TokenFile, prepare, read_index, write_index
from outlast.errors import DataError


def token_file(folder, tokens, dtype="<u2"):
    path = folder / "t.bin"
    np.asarray(tokens, dtype).tofile(path)
    return path


@pytest.mark.parametrize("dtype", ["u1", "<i2", "<u2", "<i4", "<u4", "<i8"])
def test_documents_end_after_their_token(tmp_path, dtype):
    path = token_file(tmp_path, [5, 6, 0, 7, 0, 8, 9], dtype)
    place = write_index(TokenFile.open(path, np.dtype(dtype).name), end_of_document=0)
    index = read_index(path)
    assert place == tmp_path / "t.idx"
    assert index.lengths.tolist() == [3, 2, 2]
    assert index.documents.tolist() == [0, 1, 2, 3]
    assert index.tokens == 7
    # Nobody needs to say the type any more.
    assert TokenFile.open(path).tokens.tolist() == [5, 6, 0, 7, 0, 8, 9]
    with pytest.raises(DataError, match=r"leave data\.token_dtype out"):
        TokenFile.open(path, "int8")


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_all_tokens_are_in_one_document_each(tmp_path_factory, tokens):
    path = token_file(tmp_path_factory.mktemp("law"), tokens)
    write_index(TokenFile.open(path), end_of_document=0)
    index = read_index(path)
    bounds = np.cumsum(index.lengths)
    assert bounds[-1] == len(tokens)
    assert all(tokens[end - 1] == 0 for end in bounds[:-1])
    starts = [0, *bounds[:-1]]
    assert all(0 not in tokens[start : end - 1] for start, end in zip(starts, bounds, strict=True))


def test_what_was_prepared_needs_no_word_on_where_documents_end(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"first\n")
    (tmp_path / "b.txt").write_bytes(b"second one\n")
    data = prepare(
        "text", cache=tmp_path / "c", train_patterns=["*.txt"], validation_patterns=["b.txt"],
        base=tmp_path,
    )  # fmt: skip
    write_index(data.train)
    assert read_index(data.train.path).lengths.tolist() == [7]
    # The header still says more than the index.
    assert TokenFile.open(data.train.path).header is not None


def test_tokens_are_read_in_place_by_a_job(tmp_path):
    path = token_file(tmp_path, range(70_000, 70_100), "<i4")
    write_index(TokenFile.open(path, "int32"))
    data = prepare("tokens", cache=tmp_path / "c", train_patterns=["t.bin"], base=tmp_path)
    assert data.train.tokens[0] == 70_000


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda index: b"TNTIDX\x00\x00" + index[8:], "is not an index of Megatron's"),
        (lambda index: index[:9] + struct.pack("<Q", 2) + index[17:], "has version 2"),
        (lambda index: index[:17] + b"\x07" + index[18:], "holds float32, no tokens"),
        (lambda index: index[:17] + b"\x63" + index[18:], "holds type 99, no tokens"),
        (lambda index: index[:-8], "is cut short"),
        (lambda index: index[:34] + struct.pack("<i", 9) + index[38:], "do not follow each other"),
        (lambda index: b"", "is not an index of Megatron's"),
    ],
)
def test_other_indices_are_refused(tmp_path, change, sentence):
    path = token_file(tmp_path, [1, 0, 2, 0])
    place = write_index(TokenFile.open(path), end_of_document=0)
    place.write_bytes(change(place.read_bytes()))
    with pytest.raises(DataError, match=sentence):
        TokenFile.open(path)


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    path = token_file(tmp_path, [1, 0, 2, 0])
    write_index(TokenFile.open(path), end_of_document=0)
    token_file(tmp_path, [1, 0, 2])
    with pytest.raises(DataError, match=r"has 6 bytes, but t\.idx says 8"):
        TokenFile.open(path)


def test_tokens_beyond_megatron_are_refused(tmp_path):
    path = token_file(tmp_path, [2**31], "<u4")
    with pytest.raises(DataError, match="above Megatron's 2147483647"):
        write_index(TokenFile.open(path, "uint32"))
    path = token_file(tmp_path, [1], "<u8")
    with pytest.raises(DataError, match="uint64, which Megatron does not read"):
        write_index(TokenFile.open(path, "uint64"))
    _, tail = TokenFile.open(token_file(tmp_path, [1, 2, 3, 4])).split_tail(0.5)
    with pytest.raises(DataError, match=r"only a whole \.bin file can"):
        write_index(tail)
