"""Folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from outlast.errors import TensorizeError

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
)
"""What tokenizers of Hugging Face consist of."""


def check_target(target: Path, *, overwrite: bool) -> None:
    """Refuse to write where something is that should stay.

    Raises:
        TensorizeError: `target` is a file, or a folder that is not empty and may not be replaced,
            or holds no model.
    """
    if not target.exists() and not target.is_symlink():
        return
    if not target.is_dir() or target.is_symlink():
        raise TensorizeError(f"{target} is no folder: give another name to write the model to")
    held = {path.name for path in target.iterdir()}
    if not held:
        return
    if not overwrite:
        raise TensorizeError(
            f"{target} exists: give another folder to write the model to, or --force "
            "(overwrite = True) to replace it"
        )
    if "config.json" not in held:
        raise TensorizeError(
            f"{target} holds no config.json, so it is no model to replace: give another folder"
        )


@contextlib.contextmanager
def new_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder to fill, which gets its name at the end of the block, when its files are durable.

    Args:
        target: Its name; must be new or an empty folder unless `overwrite`.
        overwrite: Replace a model that is there, once the new one is whole.

    Raises:
        TensorizeError: See `check_target`; or the files cannot be written.
    """
    target = target.absolute()
    check_target(target, overwrite=overwrite)
    partial, earlier = (
        target.with_name(f".{target.name}.{os.getpid()}.{kind}") for kind in ("partial", "old")
    )
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for file in partial.rglob("*"):
            _make_durable(file)
        _make_durable(partial)
        # Somebody may have put a folder there meanwhile.
        check_target(target, overwrite=overwrite)
        if target.exists():
            target.rename(earlier)
        partial.rename(target)
        _make_durable(target.parent)
        shutil.rmtree(earlier, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        if earlier.exists() and not target.exists():
            earlier.rename(target)
        raise TensorizeError(f"the model cannot be written to {target}: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def copy_tokenizer(source: Path, folder: Path) -> list[str]:
    """Copy a tokenizer's files; returns their names."""
    found = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, folder / name)
    return found


def _make_durable(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
