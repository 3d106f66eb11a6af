"""A corpus: which files make up the text, and how it is divided for validation.

A corpus is a list of named documents; their bytes are read only while they are tokenised. Which
side of the train/validation split a file falls on depends on a hash of its name, so a new file
does not move the others, and two machines agree whatever the order of their directories.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from outlast.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PIECE_BYTES = 1 << 20
_OUTSIDE_STDLIB = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Document:
    """A named piece of text: the bytes [start, stop) of a file.

    Attributes:
        name: Path relative to the corpus root, with forward slashes.
        path: The file.
        start: First byte.
        stop: One past the last byte.
    """

    name: str
    path: Path
    start: int
    stop: int

    def pieces(self, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
        """Reads the document in order, in pieces that end at a line or a character.

        A piece ends after its last newline; without one, before the last UTF-8 character that
        may be incomplete. Only the last piece of a document may be shorter by much.

        Args:
            piece_bytes: Most bytes in one piece, at least 4.

        Yields:
            Non-empty bytes; joined they are the document.

        Raises:
            DataError: The file cannot be read.
        """
        remaining = self.stop - self.start
        held = b""
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                while remaining > 0:
                    block = file.read(min(piece_bytes - len(held), remaining))
                    if not block:
                        break
                    remaining -= len(block)
                    held += block
                    cut = _clean_cut(held) if remaining else len(held)
                    yield held[:cut]
                    held = held[cut:]
        except OSError as error:
            raise DataError(f"{self.path} cannot be read ({error.strerror})") from error
        if held:
            yield held


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order.

    Attributes:
        documents: The non-empty documents, ordered by name.
    """

    documents: tuple[Document, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of text in all documents."""
        return sum(document.stop - document.start for document in self.documents)

    def listing_hash(self) -> str:
        """Hash (xxh3-128, hexadecimal) of the documents' names and sizes, not their contents."""
        digest = xxhash.xxh3_128()
        for document in self.documents:
            digest.update(os.fsencode(document.name))
            digest.update(f"\0{document.start}:{document.stop}\n".encode())
        return digest.hexdigest()


def stdlib_files() -> list[Path]:
    """Finds the source files of the running Python's standard library.

    Returns:
        Every `*.py` outside site-packages, ordered by relative path.

    Raises:
        DataError: This Python comes without its sources.
    """
    root = stdlib_root()
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _OUTSIDE_STDLIB]
        found.extend(Path(folder, name) for name in names if name.endswith(".py"))
    if not found:
        raise DataError(
            f'data.source = "stdlib" finds no .py file in {root}: this Python comes without the '
            'sources of its library; use data.source = "text" with your own files'
        )
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def stdlib_root() -> Path:
    """Folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def text_files(patterns: Sequence[str], base: Path) -> list[Path]:
    """Finds the files that patterns name.

    Args:
        patterns: File names or globs (`*`, `?`, `[...]`, `**` for any depth), relative to `base`
            or absolute; `~` is the home folder.
        base: Folder that relative patterns start from.

    Returns:
        The files, each once, ordered by path.

    Raises:
        DataError: A pattern names no file, or there is no pattern.
    """
    if not patterns:
        raise DataError("no file is named: give at least one file name or glob")
    found: set[Path] = set()
    for pattern in patterns:
        whole = base / Path(pattern).expanduser()
        matches = [Path(match) for match in glob.glob(str(whole), recursive=True)]  # noqa: PTH207
        files = [match for match in matches if match.is_file()]
        if not files and whole.is_dir():
            raise DataError(
                f"{pattern!r} is a folder ({whole}); write '{pattern}/**' for its files"
            )
        if not files:
            kind = "glob matches" if glob.has_magic(pattern) else "file is found for"
            raise DataError(f"no {kind} {pattern!r} in {base}")
        found.update(Path(os.path.normpath(file)) for file in files)
    return sorted(found)


def common_folder(files: Sequence[Path]) -> Path:
    """The deepest folder that holds all `files`.

    Names relative to it are the same wherever the corpus lies and wherever the program was started.
    """
    return Path(os.path.commonpath([path.absolute().parent for path in files]))


def whole_files(files: Sequence[Path], root: Path) -> Corpus:
    """Makes each file one document, ordered by name; empty files are left out.

    Args:
        files: The files.
        root: Folder that the documents' names are relative to.

    Raises:
        DataError: A file cannot be read, or no file holds a byte.
    """
    try:
        documents = [
            Document(Path(os.path.relpath(path, root)).as_posix(), path, 0, path.stat().st_size)
            for path in files
        ]
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read ({error.strerror})") from error
    kept = sorted((item for item in documents if item.stop), key=lambda item: item.name)
    if not kept:
        raise DataError(f"the corpus is empty: {len(files)} files in {root}, no text in any")
    return Corpus(tuple(kept))


def split_by_name(
    files: Sequence[Path], root: Path, validation_fraction: float
) -> tuple[Corpus, Corpus | None]:
    """Divides files into training and validation by a hash of each file's relative name.

    A file is for validation when its hash, as a number in [0, 1), is below the fraction. So the
    share of files, not of bytes, is near the fraction. Both sides get at least one file: where
    the rule alone leaves one side empty, the file with the lowest hash goes to validation, or
    the one with the highest to training. A single file is cut in two: its last bytes, from the
    start of a line, are for validation.

    Args:
        files: The files, in any order.
        root: Folder that the names are relative to.
        validation_fraction: In [0, 1); 0 keeps everything for training.

    Returns:
        The corpus for training and the one for validation (None for a fraction of 0).

    Raises:
        DataError: The fraction is out of range, a file cannot be read, the files hold no text,
            or the one file is too short to be cut.
    """
    if not 0.0 <= validation_fraction < 1.0:
        raise DataError(
            f"data.validation_fraction = {validation_fraction} must be at least 0 and below 1"
        )
    corpus = whole_files(files, root)
    if validation_fraction == 0.0:
        return corpus, None
    if len(corpus.documents) == 1:
        return _cut_tail(corpus.documents[0], validation_fraction)
    by_hash = sorted(corpus.documents, key=lambda document: _unit_hash(document.name))
    below = sum(_unit_hash(document.name) < validation_fraction for document in by_hash)
    chosen = {document.name for document in by_hash[: min(max(below, 1), len(by_hash) - 1)]}
    return (
        Corpus(tuple(item for item in corpus.documents if item.name not in chosen)),
        Corpus(tuple(item for item in corpus.documents if item.name in chosen)),
    )


def _unit_hash(name: str) -> float:
    return (xxhash.xxh3_64_intdigest(os.fsencode(name)) >> 11) / 2.0**53


def _cut_tail(document: Document, fraction: float) -> tuple[Corpus, Corpus]:
    size = document.stop - document.start
    wanted = document.start + round(size * (1.0 - fraction))
    window_start = max(document.start, wanted - PIECE_BYTES)
    try:
        with document.path.open("rb") as file:
            file.seek(window_start)
            window = file.read(wanted - window_start)
    except OSError as error:
        raise DataError(f"{document.path} cannot be read ({error.strerror})") from error
    cut = window_start + _clean_cut(window)
    if not document.start < cut < document.stop:
        raise DataError(
            f"{document.path} ({size} bytes) is too short to keep data.validation_fraction = "
            f"{fraction} of it for validation; give data.validation a file or set the fraction to 0"
        )
    return (
        Corpus((Document(document.name, document.path, document.start, cut),)),
        Corpus((Document(document.name, document.path, cut, document.stop),)),
    )


def _clean_cut(text: bytes) -> int:
    """Length of the longest prefix to cut off: up to a newline, else to a UTF-8 boundary."""
    newline = text.rfind(b"\n")
    if newline >= 0:
        return newline + 1
    cut = len(text)
    # A UTF-8 character has at most four bytes, and bytes after its first are 10xxxxxx.
    while cut > max(1, len(text) - 3) and text[cut - 1] & 0xC0 == 0x80:
        cut -= 1
    starts_character = cut > 1 and text[cut - 1] & 0xC0 == 0xC0
    return cut - 1 if starts_character else len(text)
