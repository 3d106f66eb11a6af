"""From the `[data]` settings of a job to token files that every start of the run sees alike.

Text is tokenised once into a cache folder: `train.bin`, `validation.bin`, and `prepared.json`,
which is published last and says what the tokens were made from. As long as the settings are the
same, the cache is used as it is, even when the corpus has changed since: a resumed run must keep
the data that it began with.

A corpus: which files make up the text, and how it is divided for validation.

A corpus is a list of named documents; their bytes are read only while they are tokenised. Which
side of the train/validation split a file falls on depends on a hash of its name, so a new file
does not move the others, and two machines agree whatever the order of their directories.
"""

from __future__ import annotations

import glob
import os
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from outlast.data.durable import publish_json, read_json
from outlast.data.tokenizer import Tokenizer, load_tokenizer
from outlast.data.tokens import TokenFile, header_path, index_path, read_header, write_tokens
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
        """Read the document in order, in pieces that end at a line or a character.

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
    """Find the source files of the running Python's standard library.

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
    """Find the files that patterns name.

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
    """Make each file one document, ordered by name; empty files are left out.

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
    """Divide files into training and validation by a hash of each file's relative name.

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


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Stager = Callable[[str, tuple[str, ...], str | None], Path]


MARKER = "prepared.json"

VERSION = 1

VERIFY_BYTES = 1 << 30

_PROBE_TOKENS = 1 << 20


@dataclass(frozen=True)
class Prepared:
    """Data that is ready to train on.

    Attributes:
        train: Tokens to train on.
        validation: Tokens to validate on, or None.
        tokenizer: The tokenizer of these tokens, or None when token files were given that
            `data.tokenizer` did not make.
        reused: Whether the tokens were there already.
        note: One sentence that a user should read, or None: the corpus has changed since it was
            tokenised, or the tokenizer is not the one of the token file.
    """

    train: TokenFile
    validation: TokenFile | None
    tokenizer: Tokenizer | None
    reused: bool
    note: str | None


def prepare(
    source: str,
    *,
    cache: Path,
    train_patterns: Sequence[str] = (),
    validation_patterns: Sequence[str] = (),
    validation_fraction: float = 0.0,
    tokenizer: str = "byte",
    token_dtype: str | None = None,
    base: Path = Path(),
    progress: Callable[[int, int], None] | None = None,
    stage: Stager | None = None,
    checked: bool = False,
) -> Prepared:
    """Make or open the token files that a job asks for.

    With validation patterns, `validation_fraction` is not used, and files that both name are
    only validated on. Files of up to 1 GiB are verified against their hash when they are reused,
    unless another process has just done so (`checked`).

    Args:
        source: `stdlib` (the source text of Python's library), `text` (files to tokenise) or
            `tokens` (one .bin or .npy file, opened in place).
        cache: Folder for tokenised text; not touched for `tokens`.
        train_patterns: Files or globs to train on; none for `stdlib`.
        validation_patterns: Files or globs to validate on; none for `stdlib`.
        validation_fraction: Share kept for validation, by `split_by_name`; for `tokens` the
            last share of the tokens.
        tokenizer: As `load_tokenizer` takes it.
        token_dtype: Element type of a bare .bin file.
        base: Folder that relative paths start from.
        progress: Called with (bytes done, bytes in all) while tokenising, once per document.
        stage: Gives the path of this node's own copy of a token file, which is opened in place of
            it. Called with the file's path or URL, the names beside it that belong to it, and the
            xxh3-128 that it must have, where that is known. URLs need it.
        checked: Whether another process has just checked the cache, so that it is only opened.

    Raises:
        DataError: A setting is wrong, a file is missing or damaged, the cache belongs to other
            settings, or the disk is full.
    """
    if source not in ("stdlib", "text", "tokens"):
        raise DataError(f'data.source = "{source}" must be "stdlib", "text" or "tokens"')
    if source == "stdlib" and (train_patterns or validation_patterns):
        raise DataError(
            'data.train and data.validation name files, but data.source = "stdlib" reads none; '
            'use data.source = "text"'
        )
    if source != "stdlib" and not train_patterns:
        raise DataError(f'data.train names no file, which data.source = "{source}" needs')
    if not 0.0 <= validation_fraction < 1.0:
        raise DataError(
            f"data.validation_fraction = {validation_fraction} must be at least 0 and below 1"
        )
    loaded = load_tokenizer(tokenizer, base)
    if source == "tokens":
        train = _open_one("data.train", train_patterns, base, token_dtype, stage)
        validation = None
        if validation_patterns:
            validation = _open_one("data.validation", validation_patterns, base, token_dtype, stage)
        elif validation_fraction > 0.0:
            train, validation = train.split_tail(validation_fraction)
        return _given_tokens(train, validation, loaded)
    recipe = {
        "source": source,
        "train": list(train_patterns),
        "validation": list(validation_patterns),
        "validation_fraction": 0.0 if validation_patterns else validation_fraction,
        "tokenizer": loaded.name,
    }
    if (cache / MARKER).is_file():
        return _reuse(cache, recipe, loaded, base, stage, checked=checked)
    corpora = _corpora(recipe, base)
    for name, corpus in corpora.items():
        write_tokens(cache / f"{name}.bin", corpus, loaded, progress)
    publish_json(
        cache / MARKER,
        {"format": "outlast-prepared", "version": VERSION, **recipe, "files": list(corpora)},
    )
    files = {name: TokenFile.open(_here(cache / f"{name}.bin", stage)) for name in corpora}
    return Prepared(files["train"], files.get("validation"), loaded, reused=False, note=None)


def wait_for(cache: Path, deadline_seconds: float, poll_seconds: float = 0.2) -> None:
    """Wait until another process has published the cache, so that `prepare` will reuse it.

    Args:
        cache: The cache folder.
        deadline_seconds: Longest wait.
        poll_seconds: Time between looks.

    Raises:
        DataError: It was not published in time.
    """
    deadline = time.monotonic() + deadline_seconds
    while not (cache / MARKER).is_file():
        if time.monotonic() >= deadline:
            raise DataError(
                f"waited {deadline_seconds:g} seconds for rank 0 to tokenise the corpus and "
                f"publish {cache / MARKER}; raise data.prepare_timeout_seconds if it is still at "
                "it, and check that all ranks see this folder"
            )
        time.sleep(min(poll_seconds, max(deadline - time.monotonic(), 0.0)))


def _corpora(recipe: dict[str, Any], base: Path) -> dict[str, Corpus]:
    """The corpora that a recipe names: `train`, and `validation` if there is one."""
    if recipe["validation"]:
        held_out = text_files(recipe["validation"], base)
        kept = [path for path in text_files(recipe["train"], base) if path not in set(held_out)]
        if not kept:
            raise DataError("every file of data.train is also in data.validation")
        return {
            "train": whole_files(kept, common_folder(kept)),
            "validation": whole_files(held_out, common_folder(held_out)),
        }
    from_stdlib = recipe["source"] == "stdlib"
    files = stdlib_files() if from_stdlib else text_files(recipe["train"], base)
    root = stdlib_root() if from_stdlib else common_folder(files)
    train, validation = split_by_name(files, root, recipe["validation_fraction"])
    return {"train": train} if validation is None else {"train": train, "validation": validation}


def _reuse(
    cache: Path,
    recipe: dict[str, Any],
    tokenizer: Tokenizer,
    base: Path,
    stage: Stager | None,
    *,
    checked: bool,
) -> Prepared:
    marker = read_json(cache / MARKER)
    if marker.get("version") != VERSION:
        raise DataError(
            f"{cache / MARKER} has version {marker.get('version')!r}; this Outlast reads version "
            f"{VERSION}"
        )
    for setting, value in recipe.items():
        if marker.get(setting) != value:
            raise DataError(
                f"the tokens in {cache} were made with data.{setting} = {marker.get(setting)!r}, "
                f"the job now has {value!r}; set it back, use another folder, or delete this one"
            )
    files = {
        name: TokenFile.open(_here(cache / f"{name}.bin", stage))
        for name in marker.get("files", ["train"])
    }
    for file in files.values():
        if file.header is None:
            raise DataError(
                f"{file.path} has lost its header {file.path.stem}.json; delete {cache} to have "
                "the corpus tokenised again"
            )
        if not checked and file.tokens.nbytes <= VERIFY_BYTES:
            file.verify()
    return Prepared(
        files["train"],
        files.get("validation"),
        tokenizer,
        reused=True,
        note=None if checked else _change_since(cache, files, recipe, base),
    )


def _change_since(
    cache: Path, files: dict[str, TokenFile], recipe: dict[str, Any], base: Path
) -> str | None:
    """Say that names or sizes in the corpus differ from when the cache was made."""
    try:
        corpora = _corpora(recipe, base)
    except DataError as error:
        return f"the corpus cannot be found any more ({error}); the tokens in {cache} are used"
    listed = {name: corpus.listing_hash() for name, corpus in corpora.items()}
    if listed == {name: file.header.listing_hash for name, file in files.items() if file.header}:
        return None
    return (
        f"the corpus has changed since it was tokenised; the tokens in {cache} are used as they "
        "are, so that the run continues with its data"
    )


def _open_one(
    setting: str, patterns: Sequence[str], base: Path, token_dtype: str | None, stage: Stager | None
) -> TokenFile:
    remote = [pattern for pattern in patterns if "://" in pattern]
    files = [] if remote else text_files(patterns, base)
    if len(files) > 1 or (remote and len(patterns) > 1):
        raise DataError(
            f'{setting} names {max(len(files), len(patterns))} files; data.source = "tokens" takes '
            "one .bin or .npy"
        )
    if not remote:
        return TokenFile.open(_here(files[0], stage), token_dtype)
    if stage is None:
        raise DataError(
            f"{setting} = {remote[0]!r} is a URL: it is read from a copy on each node, whose place "
            "staging.directory names"
        )
    header = remote[0].rpartition(".")[0] + ".json"
    beside = (header.rpartition("/")[2],) if remote[0].endswith(".bin") else ()
    file = TokenFile.open(stage(remote[0], beside, None), token_dtype)
    if file.tokens.nbytes <= VERIFY_BYTES:
        file.verify()
    return file


def _here(path: Path, stage: Stager | None) -> Path:
    """This node's own copy of a token file, or the file itself where nothing is staged."""
    if stage is None:
        return path
    if path.suffix != ".bin":
        return stage(str(path), (), None)
    header, index = read_header(path), index_path(path)
    beside = (header_path(path).name, *([index.name] if index.is_file() else ()))
    return stage(str(path), beside, None if header is None else header.file_hash)


def _given_tokens(train: TokenFile, validation: TokenFile | None, tokenizer: Tokenizer) -> Prepared:
    headers = [file.header for file in (train, validation) if file and file.header]
    if len({header.tokenizer for header in headers}) > 1:
        raise DataError(
            f"data.train was tokenised with {headers[0].tokenizer!r} and data.validation with "
            f"{headers[1].tokenizer!r}; both must come from one tokenizer"
        )
    if headers:
        fits = headers[0].tokenizer == tokenizer.name
    else:
        fits = int(np.max(train.tokens[:_PROBE_TOKENS])) < tokenizer.vocabulary_size
    if fits:
        return Prepared(train, validation, tokenizer, reused=True, note=None)
    note = (
        f"{train.path} was not made by data.tokenizer ({tokenizer.name}); training continues, "
        "but text can neither be encoded for it nor shown"
    )
    return Prepared(train, validation, None, reused=True, note=note)
