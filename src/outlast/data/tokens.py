r"""The flat token file: `X.bin`, an array of token ids, and `X.json`, its header.

The format is specified in docs/data.md. A header is published after its tokens and only when
both are complete, so a file with a header is whole. Bare `.bin` files (as nanoGPT writes them),
those with an index of Megatron's beside them (`X.idx`), and one-dimensional `.npy` arrays are read
too.

Megatron's index of a token file: `X.idx` beside `X.bin`.

`X.bin` is what a token file is here too, ids one after the other. `X.idx`, little endian, says
their type and where they are divided (megatron/core/datasets/indexed_dataset.py)::

    "MMIDIDX\0\0"   version uint64 = 1   type uint8   sequences uint64   bounds uint64
    lengths int32[sequences]   pointers int64[sequences]   documents int64[bounds]

Pointers are bytes in `X.bin`; document d consists of the sequences documents[d] to before
documents[d + 1]. More may follow, such as the modes of multimodal data.
"""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, get_type_hints

import numpy as np
import numpy.typing as npt
import xxhash

from outlast.data.durable import publish_json, publishing, read_json
from outlast.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outlast.data.prepare import Corpus
    from outlast.data.tokenizer import Tokenizer


FORMAT = "outlast-tokens"

VERSION = 1


@dataclass(frozen=True)
class TokenHeader:
    """Facts about a token file.

    Attributes:
        dtype: `uint16` or `uint32`; stored little endian.
        tokens: Number of tokens, end-of-text tokens included.
        bytes: Bytes of source text, end-of-text tokens not counted; None if unknown.
        documents: Number of documents.
        tokenizer: Name of the tokenizer.
        vocabulary_size: The tokenizer's.
        end_of_text: Token after each document, or None.
        maximum_token: Largest id in the file.
        file_hash: xxh3-128 of the token file, hexadecimal.
        source_hash: xxh3-128 of the documents' names and contents, hexadecimal.
        listing_hash: xxh3-128 of the documents' names and sizes, hexadecimal.
    """

    dtype: str
    tokens: int
    bytes: int | None
    documents: int
    tokenizer: str
    vocabulary_size: int
    end_of_text: int | None
    maximum_token: int
    file_hash: str
    source_hash: str
    listing_hash: str


def header_path(path: Path) -> Path:
    """Return the path of a token file's header."""
    return path.with_suffix(".json")


def read_header(path: Path) -> TokenHeader | None:
    """Read the header of the token file `path`; None when it has none.

    A `.json` beside the file that does not call itself a header is somebody else's.

    Raises:
        DataError: The header is unreadable, incomplete or of a later version.
    """
    if not header_path(path).is_file():
        return None
    content = read_json(header_path(path))
    if content.get("format") != FORMAT:
        return None
    if content.get("version") != VERSION:
        raise DataError(
            f"{header_path(path)} has format version {content.get('version')!r}; this Outlast "
            f"reads version {VERSION}"
        )
    types = get_type_hints(TokenHeader)
    for field in fields(TokenHeader):
        value = content.get(field.name)
        if field.name not in content or not isinstance(value, types[field.name]):
            raise DataError(
                f"{header_path(path)} is damaged: {field.name} = {value!r}; "
                "delete the token file and its .json to have them made again"
            )
    header = TokenHeader(**{field.name: content[field.name] for field in fields(TokenHeader)})
    if header.dtype not in ("uint16", "uint32"):
        raise DataError(f"{header_path(path)}: dtype {header.dtype!r} must be uint16 or uint32")
    return header


_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1

_FIXED = struct.Struct("<9sQBQQ")

_TYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}

_LONGEST = 2**31 - 1

_SCAN = 1 << 24


@dataclass(frozen=True)
class TokenIndex:
    """Contents of a token file's index.

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
    """Return the path of a token file's index."""
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
    starts = range(0, len(file.tokens) if end_of_document is not None else 0, _SCAN)
    ends = [
        np.flatnonzero(file.tokens[start : start + _SCAN] == end_of_document) + start + 1
        for start in starts
    ]
    found = np.concatenate([*ends, [len(file.tokens)]]).astype(np.int64)
    differences = np.diff(found, prepend=0)
    lengths = differences[differences > 0]
    if lengths.max() > _LONGEST:
        raise DataError(
            f"a document of {path} has {lengths.max()} tokens, and an index can say {_LONGEST} at "
            "most; name the token after each document in end_of_document"
        )
    itemsize = file.tokens.dtype.itemsize
    pointers = np.zeros(len(lengths), "<i8")
    np.cumsum(lengths[:-1] * itemsize, out=pointers[1:])
    # Megatron's number of the tokens' type.
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
    fixed = (_MAGIC, _VERSION, codes[name], len(lengths), len(lengths) + 1)
    with publishing(index_path(path)) as output:
        output.write(_FIXED.pack(*fixed))
        output.write(lengths.astype("<i4").tobytes())
        output.write(pointers.tobytes())
        output.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
    return index_path(path)


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


SCAN_TOKENS = 1 << 24

Tokens = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class TokenFile:
    """Tokens on disk, read through the page cache as they are used.

    Attributes:
        path: The file.
        tokens: (tokens,) integers, mapped read-only.
        bytes: Bytes of source text, or None when nobody counted them.
        header: The header, or None for a file without one.
    """

    path: Path
    tokens: Tokens
    bytes: int | None = None
    header: TokenHeader | None = None

    @classmethod
    def open(cls, path: Path | str, dtype: str | None = None) -> TokenFile:
        """Open a `.bin` file, with or without header or index, or a one-dimensional `.npy` array.

        Compares the size with the header but does not read the tokens; `verify` does.

        Args:
            path: The file.
            dtype: Element type of a `.bin` file without header and index (uint16 if None). Where
                the file itself says its type, this must agree or be None.

        Raises:
            DataError: The file is missing, empty, damaged, or of another type or shape.
        """
        path = Path(path)
        if not path.is_file():
            raise DataError(f"the token file {path} does not exist")
        if path.suffix not in (".bin", ".npy"):
            raise DataError(f"the token file {path} must end in .bin or .npy")
        asked = None
        if dtype is not None:
            with contextlib.suppress(TypeError):
                asked = np.dtype(dtype).newbyteorder("=")
            if asked is None or asked.kind not in "iu":
                raise DataError(
                    f"data.token_dtype = {dtype!r} is not an integer type such as 'uint16'"
                )
        header = None if path.suffix == ".npy" else read_header(path)
        index = None if header or path.suffix == ".npy" else read_index(path)
        known = index.dtype if index else asked
        try:
            tokens = _map_array(path) if path.suffix == ".npy" else _map_bare(path, known, header)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"the token file {path} cannot be opened ({error})") from error
        if asked is not None and tokens.dtype.newbyteorder("=") != asked:
            raise DataError(
                f"data.token_dtype = {dtype!r} but {path} says that it holds {tokens.dtype.name}; "
                "leave data.token_dtype out for this file"
            )
        return cls(path, tokens, header.bytes if header else None, header)

    def verify(self) -> None:
        """Read the whole file and compare it with the header's hash, if there is a header.

        Raises:
            DataError: The content is not what was written.
        """
        if self.header is None:
            return
        digest = xxhash.xxh3_128()
        for chunk in _chunks(self.tokens):
            digest.update(np.ascontiguousarray(chunk).data)
        if digest.hexdigest() != self.header.file_hash:
            raise DataError(
                f"{self.path} is damaged: its content does not have the hash in its header; "
                "delete it and its .json to have it made again, or restore a copy"
            )

    def split_tail(self, fraction: float) -> tuple[TokenFile, TokenFile]:
        """Divide the tokens into the first part and the last `fraction` of them.

        The parts know neither their source bytes nor a header.

        Raises:
            DataError: A part would be empty.
        """
        cut = len(self.tokens) - int(len(self.tokens) * fraction)
        if not 0 < cut < len(self.tokens):
            raise DataError(
                f"{self.path} ({len(self.tokens)} tokens) is too short to keep "
                f"data.validation_fraction = {fraction} of it; name a file in data.validation "
                "or set the fraction to 0"
            )
        return TokenFile(self.path, self.tokens[:cut]), TokenFile(self.path, self.tokens[cut:])


def check_vocabulary(file: TokenFile, vocabulary_size: int) -> None:
    """Check that every token is an id that the model has.

    Takes the maximum from the header; without one, reads the file once in chunks.

    Raises:
        DataError: A token is not in [0, vocabulary_size).
    """
    if file.header is not None:
        smallest, largest = 0, file.header.maximum_token
    else:
        ranges = [(int(chunk.min()), int(chunk.max())) for chunk in _chunks(file.tokens)]
        smallest = min(low for low, _ in ranges)
        largest = max(high for _, high in ranges)
    if largest >= vocabulary_size:
        raise DataError(
            f"tokenizer/vocabulary mismatch: the largest token id {largest} in {file.path} is not "
            f"below the model's vocabulary_size = {vocabulary_size}"
        )
    if smallest < 0:
        raise DataError(f"{file.path} holds the negative token id {smallest}")


def write_tokens(
    path: Path,
    corpus: Corpus,
    tokenizer: Tokenizer,
    progress: Callable[[int, int], None] | None = None,
) -> TokenHeader:
    """Tokenise a corpus into `path` and its header, piece by piece.

    Memory stays at about one piece (1 MiB of text) whatever the corpus. Nothing is published
    when it fails.

    Args:
        path: The `.bin` file to write; the header goes to the same name with `.json`.
        corpus: The documents.
        tokenizer: Its `end_of_text` is written after each document, if it has one.
        progress: Called with (bytes done, bytes in all) after each document.

    Returns:
        The header.

    Raises:
        DataError: The name does not end in .bin, a document cannot be read, or the disk is full.
    """
    if path.suffix != ".bin":
        raise DataError(f"the token file {path} must end in .bin")
    dtype = np.dtype("<u2" if tokenizer.vocabulary_size <= 1 << 16 else "<u4")
    ending = np.array([] if tokenizer.end_of_text is None else [tokenizer.end_of_text], dtype)
    source_hash = xxhash.xxh3_128()
    text_bytes = 0
    with publishing(path) as file:
        sink = _TokenSink(file, dtype)
        for document in corpus.documents:
            source_hash.update(os.fsencode(f"\0{document.name}\0"))
            for piece in document.pieces():
                source_hash.update(piece)
                text_bytes += len(piece)
                sink.append(tokenizer.encode(piece))
            sink.append(ending)
            if progress is not None:
                progress(text_bytes, corpus.total_bytes)
        if sink.tokens == 0:
            raise DataError(f"{path} would hold no token: the tokenizer makes none of this corpus")
    header = TokenHeader(
        dtype=dtype.newbyteorder("=").name,
        tokens=sink.tokens,
        bytes=text_bytes,
        documents=len(corpus.documents),
        tokenizer=tokenizer.name,
        vocabulary_size=tokenizer.vocabulary_size,
        end_of_text=tokenizer.end_of_text,
        maximum_token=sink.maximum,
        file_hash=sink.digest.hexdigest(),
        source_hash=source_hash.hexdigest(),
        listing_hash=corpus.listing_hash(),
    )
    content = {"format": FORMAT, "version": VERSION, **asdict(header)}
    publish_json(header_path(path), content)
    return header


class _TokenSink:
    """Writes ids to a file and keeps their count, their maximum and their hash."""

    def __init__(self, file: BinaryIO, dtype: np.dtype[Any]) -> None:
        self.file = file
        self.dtype = dtype
        self.digest = xxhash.xxh3_128()
        self.tokens = 0
        self.maximum = 0

    def append(self, ids: npt.NDArray[np.unsignedinteger[Any]]) -> None:
        if ids.size == 0:
            return
        stored = ids.astype(self.dtype).data.cast("B")
        self.file.write(stored)
        self.digest.update(stored)
        self.tokens += ids.size
        self.maximum = max(self.maximum, int(ids.max()))


def _map_bare(path: Path, asked: np.dtype[Any] | None, header: TokenHeader | None) -> Tokens:
    kind = (np.dtype(header.dtype) if header else asked or np.dtype(np.uint16)).newbyteorder("<")
    size = path.stat().st_size
    if header is not None and size != header.tokens * kind.itemsize:
        raise DataError(
            f"{path} is damaged: {size} bytes, but its header says {header.tokens} tokens of "
            f"{kind.itemsize} bytes; delete both to have them made again, or restore a copy"
        )
    if size == 0:
        raise DataError(f"the token file {path} is empty")
    if size % kind.itemsize:
        raise DataError(
            f"{path} has {size} bytes, not a multiple of {kind.itemsize}: it is cut short or "
            f"data.token_dtype = {kind.newbyteorder('=').name!r} is not its type"
        )
    return np.memmap(path, dtype=kind, mode="r")


def _map_array(path: Path) -> Tokens:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        shape, kind = getattr(array, "shape", None), getattr(array, "dtype", None)
        raise DataError(
            f"{path} holds an array of shape {shape} and type {kind}; tokens must be "
            "one-dimensional integers"
        )
    if array.size == 0:
        raise DataError(f"the token file {path} is empty")
    return array


def _chunks(tokens: Tokens) -> Iterator[Tokens]:
    for start in range(0, len(tokens), SCAN_TOKENS):
        yield tokens[start : start + SCAN_TOKENS]
