"""Whole content of versions, without torch: written as safetensors files, or compared.

`extract` writes a version as files that any program can read:

DIR/
  tensors-00001-of-00002.safetensors ...   the tensors
  tensors.safetensors.index.json           which file holds which tensor, as Hugging Face has it
  values.json                              everything else

Tensors are decoded straight into the mapped files, so that the memory needed does not grow with
them. The layout of a file is that of https://github.com/huggingface/safetensors#format.

`compare` compares two versions, tensor by tensor and value by value. Content whose hash is in both
is equal and is not compared. The norm of a tensor needs all of its elements, so of a tensor that
changed in part, the equal tiles are read once.
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import json
import math
import os
import shutil
import uuid
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from outlast.checkpoint.inspection import group_of, optimizer_keys, values_of
from outlast.checkpoint.manifest import Catalogue, Piece, tiles
from outlast.checkpoint.reader import VersionReader, Wanted
from outlast.checkpoint.storage import TEMPORARY, sentence_of
from outlast.errors import CheckpointError
from outlast.records import sync_directory
from outlast.state.box import Box, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from outlast.checkpoint.inspection import Progress
    from outlast.checkpoint.manifest import Part, TensorFacts
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


_INTEGERS = {"bool": "u1"} | {
    f"{sign}int{8 * size}": f"<{kind}{size}"
    for sign, kind in (("", "i"), ("u", "u"))
    for size in (1, 2, 4, 8)
}

_FLOATS = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}
_COMPLEX = {"complex32": "<f2", "complex64": "<f4", "complex128": "<f8"}


# Bits of the exponent and of the mantissa, bias of the exponent, codes of NaN; Micikevicius et al.,
# FP8 formats for deep learning, arXiv:2209.05433, table 1; Noune et al., 8-bit numerical formats
# for deep neural networks, arXiv:2206.02915 (fnuz: no infinity, no negative zero).
_FLOATS8 = {
    "float8_e4m3fn": (4, 3, 7, (0x7F, 0xFF)),
    "float8_e4m3fnuz": (4, 3, 8, (0x80,)),
    "float8_e5m2fnuz": (5, 2, 16, (0x80,)),
}


def numbers_of(raw: NDArray[np.uint8], dtype: str) -> NDArray[Any] | None:
    """The elements in `raw`, little-endian bytes of a torch type.

    Returns:
        (elements,) integers, float64 or complex128; None for a type of unknown layout.
    """
    if dtype in _INTEGERS:
        return raw.view(_INTEGERS[dtype])
    if dtype in _FLOATS:
        return _widened(raw.view(_FLOATS[dtype]))
    if dtype == "bfloat16":
        return _widened((raw.view("<u2").astype("<u4") << np.uint32(16)).view("<f4"))
    if dtype == "float8_e5m2":
        return _widened((raw.astype("<u2") << np.uint16(8)).view("<f2"))
    if dtype in _FLOATS8:
        return _float8_table(dtype)[raw]
    if dtype in _COMPLEX:
        return _widened(raw.view(_COMPLEX[dtype])).view(np.complex128)
    return None


def _widened(numbers: NDArray[Any]) -> NDArray[np.float64]:
    # Signalling NaNs become quiet ones, which some machines report.
    with np.errstate(invalid="ignore"):
        return numbers.astype(np.float64)


@cache
def _float8_table(dtype: str) -> NDArray[np.float64]:
    """The value of each of the 256 codes."""
    exponent_bits, mantissa_bits, bias, not_a_number = _FLOATS8[dtype]
    codes = np.arange(256)
    fields = codes >> mantissa_bits & ((1 << exponent_bits) - 1)
    fractions = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    magnitudes = np.where(
        fields > 0, np.ldexp(1 + fractions, fields - bias), np.ldexp(fractions, 1 - bias)
    )
    values: NDArray[np.float64] = np.where(codes < 128, magnitudes, -magnitudes)
    values[list(not_a_number)] = math.nan
    return values


@dataclass
class Distance:
    """Distance of two tensors of one type, added up over their parts.

    Attributes:
        dtype: Torch's name of the type.
        itemsize: Bytes of an element.
        changed: Elements whose bits differ.
        not_finite: Those of them that are infinite or NaN in one of the tensors.
        largest: Largest ``|a - b|`` of the others; an int for integers, exact.
        comparable: Whether the type's elements are numbers here, not just bytes.
    """

    dtype: str
    itemsize: int
    changed: int = 0
    not_finite: int = 0
    largest: float = 0
    comparable: bool = True
    _squares: float = 0.0
    _later_squares: float = 0.0

    @property
    def relative(self) -> float | None:
        """``||a - b|| / ||b||`` over finite elements; None when it is not defined."""
        if not self.comparable or not self._later_squares:
            return None
        found = math.sqrt(self._squares) / math.sqrt(self._later_squares)
        return found if math.isfinite(found) else None

    def add(self, before: NDArray[np.uint8] | None, after: NDArray[np.uint8]) -> None:
        """Compare two parts.

        Args:
            before: (bytes,) of the earlier tensor; None: equal to `after`.
            after: (bytes,) of the later one.
        """
        b = numbers_of(after, self.dtype)
        if b is not None:
            counted = b[np.isfinite(b)] if b.dtype.kind in "fc" else b
            self._later_squares += _squares(counted)
        if before is None:
            return
        word = math.gcd(self.itemsize, 8)
        words = before.view(f"<u{word}") != after.view(f"<u{word}")
        differ = words.reshape(-1, self.itemsize // word).any(axis=1)
        self.changed += int(np.count_nonzero(differ))
        a = numbers_of(before, self.dtype)
        if a is None or b is None:
            self.comparable = False
            return
        a, b = a[differ], b[differ]
        if a.dtype.kind in "iu":
            # The difference of two 64-bit integers needs 65 bits, its magnitude does not.
            x, y = a.astype(np.uint64), b.astype(np.uint64)
            gaps: NDArray[Any] = np.where(a >= b, x - y, y - x)
            self.largest = max(self.largest, int(gaps.max(initial=0)))
        else:
            finite = np.isfinite(a) & np.isfinite(b)
            self.not_finite += int(np.count_nonzero(~finite))
            with np.errstate(over="ignore"):
                gaps = np.abs(a[finite] - b[finite])
            self.largest = max(self.largest, float(gaps.max(initial=0.0)))
        self._squares += _squares(gaps)


def _squares(numbers: NDArray[Any]) -> float:
    magnitudes = np.abs(numbers.astype(np.complex128 if numbers.dtype.kind == "c" else np.float64))
    with np.errstate(over="ignore"):
        return float(np.square(magnitudes, out=magnitudes).sum())


# Cells of at most 128 KiB that are read at a time: enough for all threads of the reader.
_CELLS = 256


@dataclass(frozen=True)
class TensorChange:
    """One tensor in two versions.

    Attributes:
        name: Its name.
        change: ``added``, ``removed``, ``retyped`` (also when the shape differs), ``reshaped``,
            ``changed`` or ``same``.
        dtype: Name of the later element type, of the earlier one when it was removed.
        shape: The later shape, the earlier one when it was removed.
        was_dtype: Name of the earlier element type, if it is another one.
        was_shape: The earlier shape, if it is another one.
        changed_elements: Elements whose bits differ, for a tensor that changed.
        fraction: `changed_elements` by all elements.
        relative_change: ``||a - b|| / ||b||`` (2-norm, b the later) over the elements that are
            finite in both; None for a type that is compared as bytes, and when b is zero.
        max_difference: Largest ``|a - b|`` of these elements, exact for integers; None for a type
            that is compared as bytes.
        not_finite: Changed elements that are infinite or NaN in one of the versions.
    """

    name: str
    change: Literal["added", "removed", "retyped", "reshaped", "changed", "same"]
    dtype: str
    shape: tuple[int, ...]
    was_dtype: str | None = None
    was_shape: tuple[int, ...] | None = None
    changed_elements: int = 0
    fraction: float = 0.0
    relative_change: float | None = None
    max_difference: float | None = None
    not_finite: int = 0


@dataclass(frozen=True)
class ValueChange:
    """One entry of the values in two versions.

    Attributes:
        name: Path of the entry.
        group: The same without the parameter's name, for settings that many parameters share.
        change: ``added``, ``removed`` or ``changed``.
        before: The earlier JSON value, None when it was added.
        after: The later JSON value, None when it was removed.
    """

    name: str
    group: str
    change: Literal["added", "removed", "changed"]
    before: Any
    after: Any


@dataclass(frozen=True)
class Difference:
    """Two versions side by side.

    Attributes:
        before: Folder of the earlier version.
        after: Folder of the later version.
        tensors: All tensors, the largest change first.
        values: Entries of the values that changed.
        content_bytes: Bytes of the tensors that both versions have alike in type and shape.
        equal_bytes: Bytes of these that are equal by their hashes and were not compared.
        read_bytes: Bytes read from the storage.
    """

    before: str
    after: str
    tensors: tuple[TensorChange, ...]
    values: tuple[ValueChange, ...]
    content_bytes: int
    equal_bytes: int
    read_bytes: int


def compare(
    storage: Storage, before: Contents, after: Contents, progress: Progress | None = None
) -> Difference:
    """Compare two complete versions of a store; holds a few tiles in memory at a time.

    Args:
        storage: The store of both.
        before: The earlier version, or any.
        after: The later version.
        progress: Told how many bytes of tensors are dealt with.

    Raises:
        CheckpointError: When something that must be read is damaged.
    """
    old, new = before.catalogue.tensors, after.catalogue.tensors
    alike = [
        name
        for name in sorted(old.keys() & new.keys())
        if (old[name].dtype, old[name].shape) == (new[name].dtype, new[name].shape)
    ]
    content_bytes = sum(old[name].bytes for name in alike)
    comparison = _Comparison(storage, before, after)
    done_bytes = 0
    coming = comparison.cells(alike)
    while cells := list(itertools.islice(coming, _CELLS)):
        comparison.add(cells)
        done_bytes += sum(
            cell.box.elements * new[cell.name].itemsize for cell in cells if cell.before
        )
        if progress is not None:
            progress(done_bytes + comparison.equal_bytes, content_bytes)
    changes = []
    for name in sorted({*old, *new}):
        was, now = old.get(name), new.get(name)
        facts = now or was
        assert facts is not None
        change = TensorChange(name, "same", facts.dtype, facts.shape)
        distance = comparison.distances.get(name)
        if now is None or was is None:
            change = replace(change, change="removed" if now is None else "added")
        elif was.dtype != now.dtype:
            shape = None if was.shape == now.shape else was.shape
            change = replace(change, change="retyped", was_dtype=was.dtype, was_shape=shape)
        elif was.shape != now.shape:
            change = replace(change, change="reshaped", was_shape=was.shape)
        elif distance is not None and distance.changed:
            change = replace(
                change,
                change="changed",
                changed_elements=distance.changed,
                fraction=distance.changed / math.prod(facts.shape),
                relative_change=distance.relative,
                max_difference=distance.largest if distance.comparable else None,
                not_finite=distance.not_finite,
            )
        changes.append(change)
    return Difference(
        before.version.folder,
        after.version.folder,
        tuple(sorted(changes, key=_size_of_change)),
        tuple(_value_changes(before, after)),
        content_bytes,
        comparison.equal_bytes,
        comparison.read_bytes,
    )


def _size_of_change(change: TensorChange) -> tuple[int, float, float, str]:
    order = ["removed", "added", "retyped", "reshaped", "changed", "same"].index(change.change)
    relative = change.relative_change
    if relative is None and change.change == "changed":
        relative = math.inf
    return order, -(relative or 0.0), -change.fraction, change.name


class _Tile(NamedTuple):
    """A saved tile and where its content is."""

    box: Box
    part: Part
    chunk: int


class _Cell(NamedTuple):
    """A cell of a tensor's grid to read, with the tiles that hold it; no `before`: it is equal."""

    name: str
    box: Box
    before: list[_Tile]
    after: list[_Tile]


class _Comparison:
    """Tensors of the same type and shape in both versions.

    Group may have cut a tensor differently, but at the lines of one grid, so what is compared are
    the cells of this grid.
    """

    def __init__(self, storage: Storage, before: Contents, after: Contents) -> None:
        self.distances: dict[str, Distance] = {}
        self.equal_bytes = 0
        self.read_bytes = 0
        self._storage = storage
        self._before = before
        self._after = after

    def cells(self, names: list[str]) -> Iterator[_Cell]:
        """Yield the cells that must be read; count those that need not be."""
        for name in names:
            facts = self._after.catalogue.tensors[name]
            before = _by_cell(self._before, name, facts.steps)
            after = _by_cell(self._after, name, facts.steps)
            equal, different = [], []
            for box in tiles(whole(facts.shape), facts.steps):
                old, new = before[box.offset], after[box.offset]
                if _hashes(old) == _hashes(new):
                    equal.append(_Cell(name, box, [], new))
                else:
                    different.append(_Cell(name, box, old, new))
            self.equal_bytes += sum(cell.box.elements for cell in equal) * facts.itemsize
            if different:
                self.distances[name] = Distance(facts.dtype, facts.itemsize)
                yield from different
                if self.distances[name].comparable:
                    yield from equal

    def add(self, cells: list[_Cell]) -> None:
        """Read and compare some cells."""
        compared = [(cell, cell.before) for cell in cells if cell.before]
        before = iter(self._read(self._before, compared))
        after = self._read(self._after, [(cell, cell.after) for cell in cells])
        for cell, content in zip(cells, after, strict=True):
            self.distances[cell.name].add(next(before) if cell.before else None, content)

    def _read(
        self, contents: Contents, cells: list[tuple[_Cell, list[_Tile]]]
    ) -> list[NDArray[np.uint8]]:
        """The bytes of each cell.

        The reader is shown each cell as a tensor of its own, e.g. ``model.weight[128, 0]``: it then
        need not look through all cells for each tile.
        """
        pieces: dict[int, dict[str, list[Piece]]] = {}
        tensors, wanted = {}, []
        for cell, found in cells:
            name = f"{cell.name}{list(cell.box.offset)}"
            facts = tensors[name] = contents.catalogue.tensors[cell.name]
            for tile in found:
                of_part = pieces.setdefault(tile.part.rank, {})
                of_part.setdefault(name, []).append(Piece(tile.box, [tile.chunk]))
            kind = "u" if facts.itemsize <= 8 else "V"
            out = np.empty(cell.box.shape, f"{kind}{facts.itemsize}")
            wanted.append(Wanted(name, cell.box, out))
        read = (part for part in contents.parts if part.rank in pieces)
        parts = [replace(part, pieces=pieces[part.rank]) for part in read]
        shown = replace(contents, catalogue=Catalogue(tensors), parts=parts)
        with VersionReader(self._storage, shown) as reader:
            reader.read(wanted)
            self.read_bytes += reader.counters.read_bytes
        return [want.out.reshape(-1).view(np.uint8) for want in wanted]


def _by_cell(
    contents: Contents, name: str, steps: tuple[int, ...]
) -> dict[tuple[int, ...], list[_Tile]]:
    """The saved tiles of a tensor by the offset of the cell that they lie in, each box once."""
    facts = contents.catalogue.tensors[name]
    found: dict[tuple[int, ...], list[_Tile]] = {}
    seen: set[Box] = set()
    for part in contents.parts:
        for box, chunk in part.tiles(name, facts):
            if box in seen:
                continue
            seen.add(box)
            # One cell, unless the two versions have different grids.
            spans = (
                range(first // step * step, first + extent, step)
                for first, extent, step in zip(box.offset, box.shape, steps, strict=True)
            )
            for offset in itertools.product(*spans):
                found.setdefault(offset, []).append(_Tile(box, part, chunk))
    return found


def _hashes(found: list[_Tile]) -> set[tuple[Box, str]]:
    return {(tile.box, tile.part.chunks[tile.chunk].content_hash) for tile in found}


_ABSENT = object()


def _value_changes(before: Contents, after: Contents) -> Iterator[ValueChange]:
    old, new = values_of(before), values_of(after)
    optimizers = optimizer_keys(before) | optimizer_keys(after)
    for name in sorted({*old, *new}):
        group = group_of(name, optimizers)
        shared = group if group.endswith((".groups.*", ".other.*")) else name
        for path, was, now in _leaves(old.get(name, _ABSENT), new.get(name, _ABSENT)):
            names = name + path, shared + path
            if was is _ABSENT:
                yield ValueChange(*names, "added", None, now)
            elif now is _ABSENT:
                yield ValueChange(*names, "removed", was, None)
            else:
                yield ValueChange(*names, "changed", was, now)


def _leaves(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Path, old and new of every entry that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from _leaves(old.get(key, _ABSENT), new.get(key, _ABSENT), f"{path}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (was, now) in enumerate(zip(old, new, strict=True)):
            yield from _leaves(was, now, f"{path}.{number}")
    # 1, 1.0 and True are equal, and are not the same JSON.
    elif type(old) is not type(new) or old != new:
        yield path, old, new
