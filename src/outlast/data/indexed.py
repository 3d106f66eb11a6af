r"""Megatron's index of a token file: `X.idx` beside `X.bin`.

`X.bin` is what a token file is here too, ids one after the other. `X.idx`, little endian, says
their type and where they are divided (megatron/core/datasets/indexed_dataset.py)::

    "MMIDIDX\0\0"   version uint64 = 1   type uint8   sequences uint64   bounds uint64
    lengths int32[sequences]   pointers int64[sequences]   documents int64[bounds]

Pointers are bytes in `X.bin`; document d consists of the sequences documents[d] to before
documents[d + 1]. More may follow, such as the modes of multimodal data.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from outlast.data.durable import publishing
from outlast.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.data.tokens import TokenFile

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_FIXED = struct.Struct("<9sQBQQ")
_TYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}
_LONGEST = 2**31 - 1
_SCAN = 1 << 24


@dataclass(frozen=True)
class TokenIndex:
    """What an index says of its token file.

    Attributes:
        dtype: Of the tokens, little endian.
        tokens: How many there are.
        lengths: (sequences,) int32, tokens of each sequence.
        documents: (documents + 1,) int64, first sequence of each document, and their number.
    """

    dtype: np.dtype[Any]
    tokens: int
    lengths: npt.NDArray[np.int32]
    documents: npt.NDArray[np.int64]


def index_path(path: Path) -> Path:
    """Where the index of a token file is."""
    return path.with_suffix(".idx")


def read_index(path: Path) -> TokenIndex | None:
    """Read Megatron's index of the token file `path`; None when it has none.

    Raises:
        DataError: The index is of another format, damaged, or does not fit the file.
    """
    place = index_path(path)
    if not place.is_file():
        return None
    try:
        with place.open("rb") as file:
            fixed = file.read(_FIXED.size)
        size = place.stat().st_size
    except OSError as error:
        raise DataError(f"{place} cannot be read ({error})") from error
    if len(fixed) < _FIXED.size or not fixed.startswith(_MAGIC):
        raise DataError(
            f"{place} is not an index of Megatron's ({_MAGIC[:7].decode()}); if it does not belong "
            f"to {path.name}, move it elsewhere"
        )
    _, version, code, sequences, bounds = _FIXED.unpack(fixed)
    if version != _VERSION:
        raise DataError(f"{place} has version {version}; version {_VERSION} is supported")
    kind = np.dtype(f"<{_TYPES[code]}") if code in _TYPES else None
    if kind is None or kind.kind not in "iu":
        raise DataError(f"{place} says that {path.name} holds {kind or f'type {code}'}, no tokens")
    if size < _FIXED.size + 12 * sequences + 8 * bounds:
        raise DataError(f"{place} is cut short: {size} bytes for {sequences} sequences")
    lengths = _array(place, "<i4", sequences, _FIXED.size)
    pointers = _array(place, "<i8", sequences, _FIXED.size + 4 * sequences)
    documents = _array(place, "<i8", bounds, _FIXED.size + 12 * sequences)
    end = _end_of(place, lengths, pointers, kind.itemsize)
    if path.is_file() and path.stat().st_size != end:
        raise DataError(
            f"{path} has {path.stat().st_size} bytes, but {place.name} says {end}: one of them is "
            "cut short, or belongs to another file"
        )
    return TokenIndex(kind, end // kind.itemsize, lengths, documents)


def write_index(file: TokenFile, end_of_document: int | None = None) -> Path:
    """Write the index by which Megatron reads a token file, whose documents become sequences.

    Args:
        file: Of 1 to 8 bytes per token; its file must end in ``.bin``.
        end_of_document: The token after each document. Default: what the file's header says;
            without one, all of it is one document.

    Returns:
        The index's path.

    Raises:
        DataError: The file cannot have an index, a document is too long, or the disk is full.
    """
    path = file.path
    if path.suffix != ".bin" or path.stat().st_size != file.tokens.nbytes:
        raise DataError(f"{path} cannot have an index: only a whole .bin file can")
    if end_of_document is None and file.header is not None:
        end_of_document = file.header.end_of_text
    lengths = _document_lengths(file.tokens, end_of_document)
    if lengths.max() > _LONGEST:
        raise DataError(
            f"a document of {path} has {lengths.max()} tokens, and an index can say {_LONGEST} at "
            "most; name the token after each document in end_of_document"
        )
    itemsize = file.tokens.dtype.itemsize
    pointers = np.zeros(len(lengths), "<i8")
    np.cumsum(lengths[:-1] * itemsize, out=pointers[1:])
    fixed = (_MAGIC, _VERSION, _code_of(file), len(lengths), len(lengths) + 1)
    with publishing(index_path(path)) as output:
        output.write(_FIXED.pack(*fixed))
        output.write(lengths.astype("<i4").tobytes())
        output.write(pointers.tobytes())
        output.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
    return index_path(path)


def _code_of(file: TokenFile) -> int:
    """Megatron's number of the tokens' type."""
    name = file.tokens.dtype.newbyteorder("=").str[1:]
    if name == "u4":
        # It has no such type; below 2^31, the bytes are those of int32.
        largest = file.header.maximum_token if file.header else int(file.tokens.max())
        if largest > _LONGEST:
            raise DataError(f"{file.path} holds the token {largest}, above Megatron's {_LONGEST}")
        name = "i4"
    codes = {type_: code for code, type_ in _TYPES.items()}
    if name not in codes:
        raise DataError(f"{file.path} holds {file.tokens.dtype.name}, which Megatron does not read")
    return codes[name]


def _document_lengths(tokens: npt.NDArray[Any], ending: int | None) -> npt.NDArray[np.int64]:
    starts = range(0, len(tokens) if ending is not None else 0, _SCAN)
    ends = [np.flatnonzero(tokens[start : start + _SCAN] == ending) + start + 1 for start in starts]
    found = np.concatenate([*ends, [len(tokens)]]).astype(np.int64)
    lengths = np.diff(found, prepend=0)
    return lengths[lengths > 0]


def _array(place: Path, dtype: str, count: int, offset: int) -> npt.NDArray[Any]:
    if count == 0:
        return np.zeros(0, dtype)
    return np.memmap(place, dtype=dtype, mode="r", shape=(count,), offset=offset)


def _end_of(
    place: Path, lengths: npt.NDArray[Any], pointers: npt.NDArray[Any], itemsize: int
) -> int:
    """The byte behind the last sequence.

    Raises:
        DataError: The sequences do not follow each other without gaps.
    """
    end = 0
    for start in range(0, len(lengths), _SCAN):
        sizes = lengths[start : start + _SCAN].astype(np.int64) * itemsize
        expected = end + np.cumsum(sizes) - sizes
        if sizes.min() < 0 or not np.array_equal(expected, pointers[start : start + _SCAN]):
            raise DataError(
                f"{place} names sequences that do not follow each other; only an index of a file "
                "whose sequences stand in their order can be used"
            )
        end = int(expected[-1] + sizes[-1])
    return end
