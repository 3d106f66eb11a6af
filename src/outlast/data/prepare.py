"""From the `[data]` settings of a job to token files that every start of the run sees alike.

Text is tokenised once into a cache folder: `train.bin`, `validation.bin`, and `prepared.json`,
which is published last and says what the tokens were made from. As long as the settings are the
same, the cache is used as it is, even when the corpus has changed since: a resumed run must go on
with the data that it began with.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outlast.data.corpus import (
    Corpus,
    common_folder,
    split_by_name,
    stdlib_files,
    stdlib_root,
    text_files,
    whole_files,
)
from outlast.data.durable import publish_json, read_json
from outlast.data.header import header_path, read_header
from outlast.data.indexed import index_path
from outlast.data.tokenizer import Tokenizer, load_tokenizer
from outlast.data.tokens import TokenFile, write_tokens
from outlast.errors import DataError

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
    """Makes or opens the token files that a job asks for.

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
    """Waits until another process has published the cache, so that `prepare` will reuse it.

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
    """Says that names or sizes in the corpus differ from when the cache was made."""
    try:
        corpora = _corpora(recipe, base)
    except DataError as error:
        return f"the corpus cannot be found any more ({error}); the tokens in {cache} are used"
    listed = {name: corpus.listing_hash() for name, corpus in corpora.items()}
    if listed == {name: file.header.listing_hash for name, file in files.items() if file.header}:
        return None
    return (
        f"the corpus has changed since it was tokenised; the tokens in {cache} are used as they "
        "are, so that the run goes on with its data"
    )


def _open_one(
    setting: str,
    patterns: Sequence[str],
    base: Path,
    token_dtype: str | None,
    stage: Stager | None,
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
    note = (
        None
        if fits
        else (
            f"{train.path} was not made by data.tokenizer ({tokenizer.name}); training goes on, "
            "but text can neither be encoded for it nor shown"
        )
    )
    return Prepared(train, validation, tokenizer if fits else None, reused=True, note=note)
