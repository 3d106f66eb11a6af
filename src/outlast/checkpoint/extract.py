"""A version as safetensors files that any program can read. Needs no torch.

DIR/
  tensors-00001-of-00002.safetensors ...   the tensors
  tensors.safetensors.index.json           which file holds which tensor, as Hugging Face has it
  values.json                              everything else

Tensors are decoded straight into the mapped files, so that the memory needed does not grow with
them. The layout of a file is that of https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import math
import os
import shutil
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outlast.checkpoint.inspection import values_of
from outlast.checkpoint.reader import VersionReader, Wanted
from outlast.checkpoint.storage import TEMPORARY, sentence_of
from outlast.errors import CheckpointError
from outlast.records import sync_directory
from outlast.state.box import whole

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from outlast.checkpoint.inspection import Progress
    from outlast.checkpoint.manifest import TensorFacts
    from outlast.checkpoint.storage import Storage
    from outlast.checkpoint.version import Contents

FILE_BYTES = 5_000_000_000
"""Largest content of a file; a tensor that is larger has a file of its own."""

_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}


@dataclass(frozen=True)
class Extracted:
    """Figures of the files that were written.

    Attributes:
        folder: Folder of the version in its store.
        directory: Where to.
        files: Names of the safetensors files.
        tensors: Number of tensors.
        bytes: Bytes of the tensors.
        values: Number of values.
    """

    folder: str
    directory: str
    files: tuple[str, ...]
    tensors: int
    bytes: int
    values: int


def extract(
    storage: Storage,
    contents: Contents,
    directory: Path,
    *,
    only: str = "*",
    file_bytes: int = FILE_BYTES,
    progress: Progress | None = None,
) -> Extracted:
    """Write a version's tensors as safetensors and its values as JSON.

    The directory appears when all is written and durable, or not at all.

    Args:
        storage: The store.
        contents: Manifests of the version.
        directory: Where to; must not exist, or be empty.
        only: Pattern of the names of the tensors to write, as in `fnmatch`.
        file_bytes: Largest content of a file.
        progress: Told how many bytes are decoded.

    Raises:
        CheckpointError: When the directory is in use or cannot be written, a type is unknown to
            safetensors, nothing fits `only`, or the version is damaged.
    """
    chosen = {
        name: facts
        for name, facts in sorted(contents.catalogue.tensors.items())
        if fnmatch.fnmatchcase(name, only)
    }
    _check(chosen, only, directory, contents)
    files = _shares(chosen, file_bytes)
    values = values_of(contents)
    target = directory.resolve()
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}{TEMPORARY}")
    try:
        temporary.mkdir(parents=True)
        with VersionReader(storage, contents) as reader, contextlib.ExitStack() as stack:
            wanted = [
                frame
                for name, names in files.items()
                for frame in stack.enter_context(
                    _mapped(temporary / name, {n: chosen[n] for n in names}, contents)
                )
            ]
            _read(reader, wanted, progress)
        _write(
            temporary / "tensors.safetensors.index.json",
            {
                "metadata": {"total_size": sum(map(_bytes, chosen.values()))},
                "weight_map": {name: file for file, names in files.items() for name in names},
            },
        )
        _write(temporary / "values.json", values)
        sync_directory(temporary)
        temporary.replace(target)
        sync_directory(target.parent)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be written: {sentence_of(error)}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Extracted(
        contents.version.folder,
        str(directory),
        tuple(files),
        len(chosen),
        sum(map(_bytes, chosen.values())),
        len(values),
    )


def _check(chosen: dict[str, TensorFacts], only: str, directory: Path, contents: Contents) -> None:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(
            f"{directory} exists and is not an empty directory; give one that does not exist"
        )
    if not chosen and contents.catalogue.tensors:
        example = min(contents.catalogue.tensors)
        raise CheckpointError(
            f'only = "{only}" fits no tensor of {contents.version.folder}; one of its names is '
            f"{example}"
        )
    for name, facts in chosen.items():
        if facts.dtype not in _NAMES:
            raise CheckpointError(
                f"`{name}` is of type {facts.dtype}, which safetensors cannot hold; leave it out "
                "by a pattern of the names to write, e.g. --only 'model.*'"
            )


def _bytes(facts: TensorFacts) -> int:
    return math.prod(facts.shape) * facts.itemsize


def _shares(chosen: dict[str, TensorFacts], file_bytes: int) -> dict[str, list[str]]:
    """File name to the tensors that go there, in the order of their names."""
    shares: list[list[str]] = [[]]
    used = 0
    for name, facts in chosen.items():
        if used and used + _bytes(facts) > file_bytes:
            shares.append([])
            used = 0
        shares[-1].append(name)
        used += _bytes(facts)
    return {
        f"tensors-{number:05d}-of-{len(shares):05d}.safetensors": names
        for number, names in enumerate(shares, 1)
    }


@contextlib.contextmanager
def _mapped(
    path: Path, tensors: dict[str, TensorFacts], contents: Contents
) -> Iterator[list[Wanted]]:
    """A safetensors file with room for `tensors`; it is durable when the block ends well."""
    # Large elements first, so that every tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    entries: dict[str, object] = {
        "__metadata__": {"format": "pt", "outlast_version": contents.version.folder}
    }
    end = 0
    for name, facts in ordered:
        begin, end = end, end + _bytes(facts)
        entries[name] = {
            "dtype": _NAMES[facts.dtype],
            "shape": facts.shape,
            "data_offsets": [begin, end],
        }
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("xb+") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.flush()
        # A full disk must be an error here: in mapped memory it would be a signal.
        os.posix_fallocate(file.fileno(), 0, file.tell() + end)
        memory = np.memmap(file, np.uint8, "r+")
        content = memory[8 + len(header) :]
        wanted = []
        begin = 0
        for name, facts in ordered:
            raw = content[begin : begin + _bytes(facts)]
            out = raw.view(f"u{facts.itemsize}").reshape(facts.shape)
            wanted.append(Wanted(name, whole(facts.shape), out))
            begin += raw.size
        yield wanted
        memory.flush()
        os.fsync(file.fileno())


def _read(reader: VersionReader, wanted: list[Wanted], progress: Progress | None) -> None:
    total_bytes = sum(item.out.nbytes for item in wanted)
    done_bytes = 0

    def done(size: int) -> None:
        nonlocal done_bytes
        done_bytes += size
        if progress is not None:
            progress(min(done_bytes, total_bytes), total_bytes)

    reader.read(wanted, done)


def _write(path: Path, content: object) -> None:
    with path.open("x") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
