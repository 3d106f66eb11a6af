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
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outlast.checkpoint.inspection import values_of
from outlast.checkpoint.reader import VersionReader, Wanted
from outlast.checkpoint.storage import TEMPORARY, sentence_of
from outlast.errors import CheckpointError
from outlast.records import sync_directory
from outlast.state.box import whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from outlast.checkpoint.inspection import Progress
    from outlast.checkpoint.manifest import TensorFacts
    from outlast.checkpoint.storage import Storage
    from outlast.checkpoint.version import Contents

FILE_BYTES = 5_000_000_000
"""Largest content of a file; a tensor that is larger has a file of its own."""

SAFETENSORS_TYPES = {
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
"""Names of element types in a safetensors file, by those of torch."""


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
    tensors = {
        name: facts
        for name, facts in sorted(contents.catalogue.tensors.items())
        if fnmatch.fnmatchcase(name, only)
    }
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(
            f"{directory} exists and is not an empty directory; give one that does not exist"
        )
    if not tensors and contents.catalogue.tensors:
        example = min(contents.catalogue.tensors)
        raise CheckpointError(
            f'only = "{only}" fits no tensor of {contents.version.folder}; one of its names is '
            f"{example}"
        )
    for name, facts in tensors.items():
        if facts.dtype not in SAFETENSORS_TYPES:
            raise CheckpointError(
                f"`{name}` is of type {facts.dtype}, which safetensors cannot hold; leave it out "
                "by a pattern of the names to write, e.g. --only 'model.*'"
            )
    shares = shares_of(tensors, file_bytes)
    files = {
        f"tensors-{number:05d}-of-{len(shares):05d}.safetensors": names
        for number, names in enumerate(shares, 1)
    }
    values, total_bytes = values_of(contents), sum(facts.bytes for facts in tensors.values())
    notes = {"format": "pt", "outlast_version": contents.version.folder}
    done_bytes = 0

    def done(size: int) -> None:
        nonlocal done_bytes
        done_bytes += size
        if progress is not None:
            progress(min(done_bytes, total_bytes), total_bytes)

    try:
        with appearing(directory.resolve()) as temporary:
            temporary.mkdir(parents=True)
            with VersionReader(storage, contents) as reader, contextlib.ExitStack() as stack:
                wanted = []
                for file, names in files.items():
                    own = {name: (name, tensors[name]) for name in names}
                    wanted += stack.enter_context(safetensors_file(temporary / file, own, notes))
                reader.read(wanted, done)
            weight_map = {name: file for file, names in files.items() for name in names}
            index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
            for file, content in (
                ("tensors.safetensors.index.json", index),
                ("values.json", values),
            ):
                with (temporary / file).open("x") as output:
                    json.dump(content, output, indent=1)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be written: {sentence_of(error)}") from None
    folder = contents.version.folder
    return Extracted(folder, str(directory), (*files,), len(tensors), total_bytes, len(values))


@contextlib.contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A name for a file or folder that becomes `target`, durably, when the block ends well."""
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}{TEMPORARY}")
    try:
        yield temporary
        inside = [path for path in temporary.rglob("*") if path.is_file()]
        for path in inside or [temporary]:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if temporary.is_dir():
            sync_directory(temporary)
        temporary.rename(target)
        sync_directory(target.parent)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def shares_of(tensors: Mapping[str, TensorFacts], file_bytes: int) -> list[list[str]]:
    """Names of the tensors of each file, in their order."""
    shares: list[list[str]] = [[]]
    used = 0
    for name, facts in tensors.items():
        if used and used + facts.bytes > file_bytes:
            shares.append([])
            used = 0
        shares[-1].append(name)
        used += facts.bytes
    return shares


@contextlib.contextmanager
def safetensors_file(
    path: Path, tensors: Mapping[str, tuple[str, TensorFacts]], notes: Mapping[str, str]
) -> Iterator[list[Wanted]]:
    """A safetensors file with room for `tensors`, which the caller fills; then it is durable.

    The library's own writer needs all tensors of a file in memory.

    Args:
        path: Of the file.
        tensors: Name in the file to stored name and facts.
        notes: Metadata of the file.

    Yields:
        Where each tensor goes.
    """
    # Large elements first, so that every tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1][1].itemsize, item[0]))
    entries: dict[str, Any] = {"__metadata__": notes}
    end = 0
    for name, (_, facts) in ordered:
        begin, end = end, end + facts.bytes
        offsets = {"data_offsets": [begin, end]}
        dtype = SAFETENSORS_TYPES[facts.dtype]
        entries[name] = {"dtype": dtype, "shape": facts.shape, **offsets}
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
        for name, (stored, facts) in ordered:
            raw = content[slice(*entries[name]["data_offsets"])]
            out = raw.view(f"u{facts.itemsize}").reshape(facts.shape)
            wanted.append(Wanted(stored, whole(facts.shape), out))
        yield wanted
        memory.flush()
        os.fsync(file.fileno())
