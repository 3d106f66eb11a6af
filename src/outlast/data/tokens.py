"""The flat token file: `X.bin`, an array of token ids, and `X.json`, its header.

The format is specified in docs/data.md. A header is published after its tokens and only when
both are complete, so a file with a header is whole. Bare `.bin` files (as nanoGPT writes them),
those with an index of Megatron's beside them (`X.idx`), and one-dimensional `.npy` arrays are read
too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from outlast.data.durable import publishing
from outlast.data.header import TokenHeader, publish_header, read_header
from outlast.data.indexed import read_index
from outlast.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outlast.data.corpus import Corpus
    from outlast.data.tokenizer import Tokenizer

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
        """Opens a `.bin` file, with or without header or index, or a one-dimensional `.npy` array.

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
        asked = None if dtype is None else _integer_type(dtype)
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
        """Reads the whole file and compares it with the header's hash, if there is a header.

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
        """Divides the tokens into the first part and the last `fraction` of them.

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
    """Checks that every token is an id that the model has.

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
    """Tokenises a corpus into `path` and its header, piece by piece.

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
    publish_header(path, header)
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


def _integer_type(name: str) -> np.dtype[Any]:
    try:
        kind = np.dtype(name)
    except TypeError:
        kind = np.dtype(object)
    if kind.kind not in "iu":
        raise DataError(f"data.token_dtype = {name!r} is not an integer type such as 'uint16'")
    return kind.newbyteorder("=")


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
