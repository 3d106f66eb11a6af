"""Stores that no save has written: several hundred, each a change of one good store on disk.

Their hashes are right wherever that can be, so that it is their content that has to be refused.
"""

import json
import os
import pickle
import re
import socket
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import blake3
import blosc2
import numpy as np
import torch
import xxhash
from backports import zstd
from checkpoint_states import Holder, open_store
from torch import nn

from outlast.checkpoint.manifest import unsealed
from outlast.checkpoint.version import SEAL

FIRST, FOLDER = "step-00000001-a1", "step-00000002-a1"
PART, PACK = "rank-00000-of-00001.json", "rank-00000-of-00001.pack"
CATALOGUE = "catalogue"
GROUP, INDEX = "group-00000-of-00001.json", "index-of-00001.json"
"""Files of a store that was saved by groups of ranks; others have none."""

Attack = Callable[[Path], None]
"""Changes a good store of two versions, of which the second is `FOLDER`."""


def make_state(seed: int = 0, step: int | None = None) -> dict[str, Any]:
    """A small model, its optimizer and values; with a step, of that step of `save_two`."""
    torch.manual_seed(seed)
    model = nn.Linear(40, 70)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(2, 40)).sum().backward()
    optimizer.step()
    if step is not None:
        with torch.no_grad():
            model.weight[step] += 1e-3
    data = {"order": (1, {2, 3}), "seen": torch.arange(9), "when": b"now", 3: [float("nan")]}
    return {"model": model, "optimizer": optimizer, "data": Holder(data)}


def save_two(place: Path) -> Path:
    """Make a store with two versions."""
    with open_store(place) as store:
        for step in (1, 2):
            store.save(step, make_state(step=step), metrics={"loss": 1.0 / step})
    return place


def path_of(place: Path, kind: str) -> Path:
    """The file of the second version that is, or begins with, `kind`."""
    [path] = [path for path in (place / FOLDER).iterdir() if path.name.startswith(kind)]
    return path


def bytes_of(path: Path) -> bytes:
    """What is in a file, unless another attack has made it something else."""
    if not path.is_file() or path.stat().st_size > 1 << 27:
        raise ValueError(path)
    return path.read_bytes()


def content_of(place: Path, kind: str) -> dict[str, Any]:
    path = path_of(place, kind)
    return unsealed(bytes_of(path), path.name)


def sealed_bytes(body: bytes) -> bytes:
    """`body`, an object without its last brace, with its hash."""
    return body + f',"blake3":"{blake3.blake3(body).hexdigest()}"}}\n'.encode()


def write_bytes(place: Path, kind: str, body: bytes) -> None:
    """Write a file anew, with its hash, and what refers to it by its hash."""
    path = path_of(place, kind)
    root = blake3.blake3(body).hexdigest()
    path.unlink()
    if kind.startswith(CATALOGUE):
        path = path.with_name(f"catalogue-{root[:16]}.json")
    path.write_bytes(sealed_bytes(body))
    if kind.startswith(CATALOGUE):
        write(place, PART, content_of(place, PART) | {"catalogue": root})
    indexed = (place / FOLDER / INDEX).exists() or kind == INDEX
    if kind == PART and indexed:
        write(place, GROUP, content_of(place, GROUP) | {"roots": [root]})
    elif kind == PART:
        write(place, SEAL, content_of(place, SEAL) | {"parts": {PART: root}})
    if kind == GROUP:
        parts = content_of(place, SEAL)["parts"] | {GROUP: root}
        write(place, SEAL, content_of(place, SEAL) | {"parts": parts})
        write(place, INDEX, content_of(place, INDEX) | {"groups": [root]})
    if kind == INDEX:
        parts = content_of(place, SEAL)["parts"] | {INDEX: root}
        write(place, SEAL, content_of(place, SEAL) | {"parts": parts})


def write(place: Path, kind: str, content: Any) -> None:
    body = {"format": 2, **content} if isinstance(content, dict) else content
    write_bytes(place, kind, json.dumps(body, separators=(",", ":"))[:-1].encode())


def changed(kind: str, change: Callable[[dict[str, Any]], object]) -> Attack:
    def attack(place: Path) -> None:
        content = content_of(place, kind)
        change(content)
        write(place, kind, content)

    return attack


def deep(depth: int, leaf: Any = 1) -> Any:
    found: Any = leaf
    for _ in range(depth):
        found = [found]
    return found


ABSURD: dict[str, Any] = {
    "null": None,
    "true": True,
    "-1": -1,
    "0": 0,
    "10^18": 10**18,
    "2^63": 2**63,
    "10^400": 10**400,
    "0.5": 0.5,
    "1e308": 1e308,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "empty text": "",
    "huge text": "x" * (1 << 20),
    "NUL": "\0",
    "surrogate": "\ud800",
    "path": "../../../etc/passwd",
    "absolute": "/dev/zero",
    "empty list": [],
    "empty table": {},
    "list": [[0, "x"]],
    "nested": deep(400),
    "tag": {"!evil": 1},
    "tensor": {"!tensor": "absent", "kind": "torch"},
}


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to the fields of a file; of lists of equals, and of tensors, to the first."""
    if path:
        yield path
    if isinstance(value, dict):
        keys: list[Any] = [*value]
        if path in (("pieces",), ("tensors",), ("values",), ("bounds",)):
            keys = [key for key in keys if key in ("model.weight", "data")]
    else:
        rows = isinstance(value, list) and (path == ("chunks",) or len(value) > 9)
        keys = [0] if rows else [*range(len(value))] if isinstance(value, list) else []
    for key in keys:
        yield from places_in(value[key], (*path, key))


def replaced(kind: str, path: tuple[Any, ...], value: Any) -> Attack:
    def change(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    return changed(kind, change)


def fields(
    place: Path, kinds: tuple[str, ...] = (PART, CATALOGUE, SEAL)
) -> Iterator[tuple[str, Attack]]:
    """Every field of every file with values of every kind in its place."""
    for kind in kinds:
        for path in places_in(content_of(place, kind)):
            where = f"{kind} {'.'.join(map(str, path))}"
            for name, value in ABSURD.items():
                if path[0] == "pieces" and len(path) == 5 and value == 0:
                    # Another tile of the same size: no reader can know better than the manifest.
                    continue
                yield f"{where} = {name}", replaced(kind, path, value)


# Structure ------------------------------------------------------------------------------------


def chunk(column: int, value: Any, row: int = 0) -> Attack:
    return replaced(PART, ("chunks", row, column), value)


def _with_delta(part: dict[str, Any]) -> int:
    """Make a chunk the difference to an earlier one of its size, as old releases did."""
    chunks = part["chunks"]
    base, delta = [n for n, row in enumerate(chunks) if row[4] == max(r[4] for r in chunks)][:2]
    part["codecs"].append("xor+planes")
    chunks[delta][3], chunks[delta][7] = len(part["codecs"]) - 1, base
    return delta


def _cyclic(part: dict[str, Any]) -> None:
    delta = _with_delta(part)
    part["chunks"][part["chunks"][delta][7]][7] = delta


def _chained(length: int) -> Callable[[dict[str, Any]], None]:
    def change(part: dict[str, Any]) -> None:
        delta = part["chunks"][_with_delta(part)]
        for _ in range(length):
            part["chunks"].append([*delta[:7], len(part["chunks"]) - 1, 0.0])
        numbers = part["pieces"]["model.weight"][0][2]
        part["pieces"]["model.weight"][0][2] = [len(part["chunks"]) - 1] * len(numbers)

    return change


def _overlapping(part: dict[str, Any]) -> None:
    numbers = part["pieces"]["model.weight"][0][2][:1]
    part["pieces"]["model.weight"] = [
        [[n % 30, n % 17], [1 + n % 7, 1 + n % 11], numbers] for n in range(4000)
    ]


def _pieces(count: int) -> Callable[[dict[str, Any]], None]:
    def change(part: dict[str, Any]) -> None:
        part["pieces"]["model.weight"] *= count

    return change


def _swapped(part: dict[str, Any]) -> None:
    pieces = part["pieces"]
    pieces["model.weight"], pieces["model.bias"] = pieces["model.bias"], pieces["model.weight"]


def _foreign_pack(part: dict[str, Any]) -> None:
    part["packs"] = [f"{FIRST}/{PACK}" for _ in part["packs"][:1]] + part["packs"][1:]


def _facts(name: str, dtype: Any, shape: Any, steps: Any) -> Attack:
    return changed(CATALOGUE, lambda found: found["tensors"].update({name: [dtype, shape, steps]}))


STRUCTURES: dict[str, Attack] = {
    "a chunk that is its own base": chunk(7, 0),
    "bases in a circle": changed(PART, _cyclic),
    "a chain of 500": changed(PART, _chained(500)),
    "a chain of 30,000": changed(PART, _chained(30_000)),
    "4,000 overlapping boxes": changed(PART, _overlapping),
    "20,000 equal boxes": changed(PART, _pieces(20_000)),
    "tensors with each other's pieces": changed(PART, _swapped),
    "another version's pack": changed(PART, _foreign_pack),
    "no pieces": changed(PART, lambda part: part.update(pieces={})),
    "a shape of 10^18 cells": _facts("model.weight", "float32", [10**9, 10**9], [64, 64]),
    "a shape of 2^200 cells": _facts("model.weight", "float32", [2**50] * 4, [64] * 4),
    "a shape of no cells": _facts("model.weight", "float32", [2**60, 0], [1, 1]),
    "65 dimensions": _facts("model.weight", "float32", [1] * 65, [1] * 65),
    "64 dimensions": _facts("model.weight", "float32", [1] * 64, [1] * 64),
    "one more tensor": _facts("model.more", "float32", [3], [3]),
    "one more value": changed(CATALOGUE, lambda found: found["values"].append("more")),
    "zero steps": _facts("model.weight", "float32", [70, 40], [0, 0]),
    "tiles of 40 GB": _facts("model.weight", "float32", [10**5, 10**5], [10**5, 10**5]),
    "an unknown type": _facts("model.weight", "float9999999999999", [70, 40], [70, 40]),
    "a type of another size": _facts("model.weight", "float64", [70, 40], [70, 40]),
    "a type that is a function": _facts("model.weight", "load", [70, 40], [70, 40]),
    "an unknown codec": changed(PART, lambda part: part["codecs"].__setitem__(0, "evil")),
    "all codecs swapped": changed(PART, lambda part: part["codecs"].reverse()),
    "100,000 codecs": changed(
        PART, lambda part: part["codecs"].extend(f"x{n}" for n in range(100_000))
    ),
    "100,000 unknown fields": changed(
        PART, lambda part: part.update({str(n): n for n in range(100_000)})
    ),
    "the seal's parts are of 10^7 ranks": replaced(
        SEAL, ("parts",), {"rank-00000-of-9999999.json": "0" * 64}
    ),
    "the seal names a rank that is not": replaced(
        SEAL, ("parts",), {PART: "0" * 64, "rank-00001-of-00002.json": "0" * 64}
    ),
    "the seal names no parts": replaced(SEAL, ("parts",), {}),
    "the seal names 100,000 packs": replaced(
        SEAL, ("packs",), [f"{FOLDER}/rank-{n:07d}-of-{10**6:07d}.pack" for n in range(100_000)]
    ),
    "the seal requires what is not": replaced(SEAL, ("requires",), [10**15]),
    "the seal says replay": replaced(SEAL, ("kind",), "replay"),
    "the part says replay": replaced(PART, ("kind",), "replay"),
    "the part requires itself": replaced(PART, ("requires",), [2]),
    "metrics of 10^400": replaced(SEAL, ("metrics",), {"loss": 10**400}),
    "notes of 10^400": replaced(PART, ("notes", "metrics"), {"loss": 10**400}),
    "metrics that are nested": replaced(PART, ("notes",), {"metrics": {"loss": deep(300)}}),
    "a note that is nested": replaced(PART, ("notes",), {"mesh": deep(300)}),
    "bounds that are nested": replaced(
        PART, ("bounds",), {"model.weight": {"relative": deep(300)}}
    ),
    "a wrong root in the seal": replaced(SEAL, ("parts",), {PART: "0" * 64}),
}


# Values ---------------------------------------------------------------------------------------

_TAGS: dict[str, Any] = {
    "an unknown tag": {"!evil": 1},
    "a tensor of no name": {"!tensor": None, "kind": "torch"},
    "a tensor of no kind": {"!tensor": "data.seen"},
    "a tensor of an odd kind": {"!tensor": "data.seen", "kind": "cuda"},
    "a NumPy scalar of many": {"!tensor": "data.seen", "kind": "numpy", "scalar": True},
    "a parameter of integers": {"!tensor": "data.seen", "kind": "torch", "parameter": True},
    "integers that learn": {
        "!tensor": "data.seen",
        "kind": "torch",
        "parameter": True,
        "requires_grad": True,
    },
    "itself": {"!shared": [0, {"!same": 0}]},
    "what comes later": [{"!same": 0}, {"!shared": [0, []]}],
    "a billion laughs": [
        {"!shared": [0, ["x"] * 9]},
        *({"!shared": [n + 1, [{"!same": n}] * 9]} for n in range(60)),
    ],
    "a range without steps": {"!range": [0, 1, 0]},
    "a range of 10^30": {"!range": [0, 10**30, 1]},
    "a set of lists": {"!set": [[1]]},
    "a dictionary of no pairs": {"!dict": [[1, 2, 3]]},
    "a deque of 2^63": {"!deque": [2**63, []]},
    "a deque of -1": {"!deque": [-1, [1]]},
    "bytes that are none": {"!bytes": "?"},
    "bytes of one sign": {"!bytes": "A"},
    "a float of text": {"!float": "evil"},
    "a float of many bits": {"!float": "0x" + "0" * 99},
    "an integer of 10^5 digits": {"!int": "0x" + "f" * 100_000},
    "a complex of one": {"!complex": ["1.0"]},
    "a time of no time": {"!datetime": "tomorrow"},
    "a timedelta of 10^18": {"!timedelta": [10**18, 0, 0]},
    "a dtype that is a function": {"!torch.dtype": "load"},
    "a device of none": {"!torch.device": "evil:99"},
    "a size of 10^30": {"!torch.Size": [10**30]},
    "a negative size": {"!torch.Size": [-1]},
    "a factory that is none": {"!defaultdict": ["eval", []]},
    "attributes that are none": {"!OrderedDict": [], "attributes": 5},
    "attributes of dunders": {"!OrderedDict": [], "attributes": {"__class__": 1}},
    "a path of NUL": {"!PosixPath": "\0"},
    "400 lists": deep(400),
    "300 tuples": deep(99, {"!tuple": [{"!tuple": []}]}),
    "a slice of tensors": {"!slice": [{"!tensor": "data.seen", "kind": "torch"}] * 3},
    "a counter of texts": {"!Counter": [["x", "y"]]},
    "no object": 5,
}

VALUES: dict[str, Attack] = {
    f"{name} as a {what}": replaced(PART, ("values", key), value)
    for key, what in (("data", "value"), ("optimizer.groups.weight", "setting"))
    for name, value in _TAGS.items()
} | {
    "a setting that is a text": replaced(PART, ("values", "optimizer.groups.weight", "lr"), "x"),
    "a learning rate that is a tensor": replaced(
        PART,
        ("values", "optimizer.groups.weight", "lr"),
        {"!tensor": "data.seen", "kind": "torch"},
    ),
    "settings of params": replaced(PART, ("values", "optimizer.groups.weight", "params"), []),
    "a value of a hostile name": changed(PART, lambda part: part["values"].update({"../x": 1})),
    "a value of a huge name": changed(PART, lambda part: part["values"].update({"x" * 10**6: 1})),
    "a value of control signs": changed(
        PART, lambda part: part["values"].update({"\x1b[2J[red]": 1})
    ),
    "5,000 values": changed(
        PART, lambda part: part["values"].update({f"data.{n}": n for n in range(5000)})
    ),
    "imported from nowhere": changed(
        PART, lambda part: part["values"].update(imported_structure=5)
    ),
    "imported tensors that are not": changed(
        PART,
        lambda part: part["values"].update(
            imported_structure={"prefix": "x", "root": {"!tensor": ".y", "kind": "torch"}}
        ),
    ),
    "imported without a prefix": changed(
        PART, lambda part: part["values"].update(imported_structure={"root": [1]})
    ),
}


# Text -----------------------------------------------------------------------------------------


def _text(kind: str, make: Callable[[bytes], bytes]) -> Attack:
    def attack(place: Path) -> None:
        content = bytes_of(path_of(place, kind))
        write_bytes(place, kind, make(content[: content.rindex(b',"blake3"')]))

    return attack


_TEXTS: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda _: b"{",
    "no format": lambda body: body.replace(b'"format":2,', b"", 1),
    "format 3": lambda body: body.replace(b'"format":2,', b'"format":3,', 1),
    "a format of 10^5 digits": lambda body: body.replace(b":2,", b":" + b"9" * 100_000 + b",", 1),
    "a nested format": lambda body: body.replace(b":2,", b":" + b"[" * 10**6 + b",", 1),
    "a list": lambda _: b'[{"format":2}',
    "100,000 open lists": lambda body: body + b',"x":' + b"[" * 100_000,
    "100,000 lists": lambda body: body + b',"x":' + b"[" * 100_000 + b"]" * 100_000,
    "100,000 tables": lambda body: body + b',"x":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "a field twice": lambda body: body.replace(b'"format":2', b'"format":2,"kind":"evil"', 1),
    "the format twice": lambda body: body + b',"format":3',
    "bytes that are no UTF-8": lambda body: body + b',"x":"\xff\xfe"',
    "a mark of byte order": lambda body: b"\xef\xbb\xbf" + body,
    "UTF-16": lambda body: body.decode().encode("utf-16"),
    "NUL": lambda body: body + b"\0",
    "a number of 10^6 digits": lambda body: body + b',"x":' + b"1" * 10**6,
    "a number of a huge exponent": lambda body: body + b',"x":1e999999999',
    "NaN": lambda body: body + b',"x":NaN',
    "minus infinity": lambda body: body + b',"x":-Infinity',
    "20 MB of spaces": lambda body: body + b" " * (20 << 20),
    "a comma too many": lambda body: body + b",",
}
TEXTS: dict[str, Attack] = {
    f"{kind} is {name}": _text(kind, make)
    for kind in (PART, CATALOGUE, SEAL)
    for name, make in _TEXTS.items()
}


# Chunks ---------------------------------------------------------------------------------------


def stored(codec: str, make: Callable[[int], bytes], tensor: str = "model.weight") -> Attack:
    """The first tile of a tensor is what `make` gives for its size, with a right hash."""

    def attack(place: Path) -> None:
        content = content_of(place, PART)
        row = content["chunks"][content["pieces"][tensor][0][2][0]]
        pack = place / content["packs"][row[0]]
        code = make(row[4])
        row[1:4] = [pack.stat().st_size, len(code), len(content["codecs"])]
        row[5] = xxhash.xxh3_128_hexdigest(code)
        row[7] = -1
        row[4] = max(row[4], len(code)) if len(code) <= row[4] else row[4]
        content["codecs"].append(codec)
        with pack.open("ab") as file:
            file.write(code)
        if content["codecs"].count(codec) > 1:
            content["codecs"].pop()
            row[3] = content["codecs"].index(codec)
        write(place, PART, content)

    return attack


def plane_code(itemsize: int, flags: int, exceptions: int, parts: list[bytes]) -> bytes:
    lengths = b"".join(len(part).to_bytes(4, "little") for part in parts)
    return struct.pack("<BBI", itemsize, flags, exceptions) + lengths + b"".join(parts)


BOMB = b"\x28\xb5\x2f\xfd\xe0" + (10 << 40).to_bytes(8, "little") + b"\x01\x00\x00"
"""A zstd frame that names 10 TiB, then one empty block."""


def _growing(size: int) -> bytes:
    """A frame without a size that grows to 1 GiB."""
    options = {zstd.CompressionParameter.content_size_flag: 0}
    return zstd.compress(bytes(64 << 20), options=options) * 16


def _lying(size: int, named: int) -> bytes:
    """A frame that grows to 64 MiB and names another size."""
    frame = zstd.compress(bytes(64 << 20))
    # Magic number, descriptor, window, and 4 bytes of size.
    head = 10
    assert frame[4] >> 5 == 0b100
    # A frame of one segment with 4 bytes of size.
    return b"\x28\xb5\x2f\xfd\xa0" + named.to_bytes(4, "little") + frame[head:]


def _planes(make: Callable[[int], bytes]) -> dict[str, Callable[[int], bytes]]:
    return {
        "all planes": lambda size: plane_code(4, 1, 0, [make(size // 4)] * 4),
        "nibbles": lambda size: plane_code(
            4, 3, 5, [bytes(size // 2), b"", make(size // 8), make(10)]
        ),
    }


def _blosc(size: int, **changes: int) -> bytes:
    code = bytearray(blosc2.compress2(np.arange(size, dtype=np.uint8), typesize=1))
    for place, number in changes.items():
        first = int(place.removeprefix("at"))
        width = 4 if number > 255 or first in (4, 8, 12) else 1
        code[first : first + width] = number.to_bytes(width, "little")
    return bytes(code)


def _noise(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


_CODES: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "nothing as raw": ("raw", lambda size: b""),
    "too few bytes as raw": ("raw", lambda size: bytes(size - 1)),
    "other bytes as raw": ("raw", bytes),
    "no element to fill with": ("fill", lambda size: b""),
    "three bytes to fill with": ("fill", lambda size: b"abc"),
    "noise as planes": ("planes", lambda size: _noise(size // 2)),
    "nothing as planes": ("planes", lambda size: b""),
    "255 planes": ("planes", lambda size: b"\xff" * 600),
    "planes of 2^32 bytes": (
        "planes",
        lambda size: struct.pack("<BBI4I", 4, 0, 0, *[2**32 - 1] * 4) + bytes(100),
    ),
    "2^32 exceptions": ("planes", lambda size: plane_code(4, 2, 2**32 - 1, [b"", b"", b"x", b"y"])),
    "planes of another width": ("planes", lambda size: plane_code(2, 0, 0, [bytes(size // 4)] * 2)),
    "words too short": ("planes", lambda size: plane_code(4, 0, 0, [b"x", b"", b"y", b""])),
    **{
        f"{name} of {what}": ("planes", make)
        for what, frame in (
            ("10 TiB", lambda size: BOMB),
            ("1 GiB without a size", _growing),
            ("64 MiB under a small name", lambda size: _lying(size, size)),
            ("64 MiB under a large name", lambda size: _lying(size, 2**32 - 1)),
            ("noise", lambda size: _noise(max(size - 3, 1))),
        )
        for name, make in _planes(frame).items()
    },
    "noise as blosc2": ("blosc2", lambda size: _noise(size // 2)),
    "nothing as blosc2": ("blosc2", lambda size: b""),
    "a frame as blosc2": ("blosc2", lambda size: BOMB),
    "blosc2 of 2 GiB": ("blosc2", lambda size: _blosc(size, at4=2**31 - 1)),
    "blosc2 of -1 bytes": ("blosc2", lambda size: _blosc(size, at4=2**32 - 1)),
    "blosc2 of no block": ("blosc2", lambda size: _blosc(size, at8=0)),
    "blosc2 of huge blocks": ("blosc2", lambda size: _blosc(size, at8=2**31 - 1)),
    "blosc2 of a short code": ("blosc2", lambda size: _blosc(size, at12=1)),
    "blosc2 of a long code": ("blosc2", lambda size: _blosc(size, at12=2**31 - 1)),
    "blosc2 of another version": ("blosc2", lambda size: _blosc(size, at0=255)),
    "blosc2 of all flags": ("blosc2", lambda size: _blosc(size, at2=255)),
    "blosc2 of 0 wide elements": ("blosc2", lambda size: _blosc(size, at3=0)),
    "blosc2 of unknown filters": (
        "blosc2",
        lambda size: _blosc(size, at16=200, at17=200, at18=200, at19=201, at20=255, at21=160),
    ),
    "blosc2 of an unknown codec": ("blosc2", lambda size: _blosc(size, at22=255)),
    "blosc2 with a dictionary": ("blosc2", lambda size: _blosc(size, at31=255)),
    "a difference without a base": ("xor+planes", lambda size: bytes(9)),
}
CODES: dict[str, Attack] = {
    f"{name} in {tensor}": stored(codec, make, tensor)
    for tensor in ("model.weight", "data.seen")
    for name, (codec, make) in _CODES.items()
}


def _pack(change: Callable[[bytes], bytes]) -> Attack:
    def attack(place: Path) -> None:
        path = place / FOLDER / PACK
        path.write_bytes(change(bytes_of(path)))

    return attack


CODES |= {
    "an empty pack": _pack(lambda _: b""),
    "a pack cut by half": _pack(lambda content: content[: len(content) // 2]),
    "a pack cut by a byte": _pack(lambda content: content[:-1]),
    "a pack of zeros": _pack(lambda content: bytes(len(content))),
    "a flipped bit": _pack(lambda content: bytes([content[0] ^ 1]) + content[1:]),
    "all chunks at one place": changed(
        PART, lambda part: [row.__setitem__(1, 0) for row in part["chunks"]]
    ),
    "a chunk behind the end": chunk(1, 10**6),
    "a chunk at 2^62": chunk(1, 2**62),
    "a chunk of 4 MiB": replaced(PART, ("chunks", 0, 2), 4 << 20),
}


# Files ----------------------------------------------------------------------------------------


def in_place_of(path: Path, what: str) -> None:
    """Put something in place of a file or folder that no save makes there."""
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name("moved"))
    else:
        path.unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "device":
        path.symlink_to("/dev/zero")
    elif what == "loop":
        path.symlink_to(path.name)
    elif what == "dangling link":
        path.symlink_to("nowhere")
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            here = os.open(path.parent, os.O_RDONLY)
            bound.bind(f"/proc/self/fd/{here}/{path.name}")
            os.close(here)
    elif what == "file":
        path.write_bytes(b"x")
    elif what == "empty file":
        path.touch()
    elif what == "terabytes":
        with path.open("wb") as file:
            file.truncate(1 << 42)
    elif what == "100 MB":
        with path.open("wb") as file:
            file.truncate(100 << 20)


KINDS = ("pipe", "folder", "device", "loop", "dangling link", "socket", "empty file", "terabytes")
_PLACES: dict[str, Callable[[Path], Path]] = {
    "the part": lambda place: path_of(place, PART),
    "the catalogue": lambda place: path_of(place, CATALOGUE),
    "the seal": lambda place: path_of(place, SEAL),
    "the pack": lambda place: path_of(place, PACK),
    "the owner": lambda place: place / "owner",
    "the version": lambda place: place / FOLDER,
    "the logs": lambda place: place / "replay",
    "another rank's part": lambda place: place / FOLDER / "rank-00001-of-00002.json",
    "a newer seal": lambda place: _made(place / "step-00000003-a1") / SEAL,
    "a newer version": lambda place: place / "step-00000003-a1",
}


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _file(where: Callable[[Path], Path], what: str) -> Attack:
    return lambda place: in_place_of(where(place), what)


FILES: dict[str, Attack] = {
    f"{name} is a {what}": _file(where, what)
    for name, where in _PLACES.items()
    for what in (*KINDS, *(["file"] if name in ("the version", "the logs") else []))
}
FILES |= {
    f"{name} has 100 MB of zeros": _file(_PLACES[name], "100 MB")
    for name in ("the part", "the seal", "the catalogue")
}


def _folder(name: str) -> Attack:
    return lambda place: _copy(place / FOLDER, place / name)


def _copy(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for path in source.iterdir():
        (target / path.name).write_bytes(bytes_of(path))


def _renamed(old: str, new: str) -> Attack:
    def attack(place: Path) -> None:
        (place / FOLDER / old).rename(place / FOLDER / new)

    return attack


def _added(name: str, content: bytes = b"{}") -> Attack:
    def attack(place: Path) -> None:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)

    return attack


def _many(folder: str, name: str, count: int) -> Attack:
    def attack(place: Path) -> None:
        (place / folder).mkdir(exist_ok=True)
        for number in range(count):
            (place / folder / name.format(number)).touch()

    return attack


_ODD_FOLDERS = (
    *("step-99999999999999999999-a1", "step-00000003-a99999999999999999999", "step-00000002-a0"),
    *(
        "step-00000002-a2",
        "step-3-a1",
        "step-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0663-a1",
        "step-00000003-a1\n",
        "step-00000003-a\u0661",
    ),
    *("step--0000003-a1", "step-00000003-a-1", "step-00000003-a1.tmp", "\x1b[2J", "\udcff"),
    f"step-{'9' * 200}-a1",
    f"step-00000003-a{'9' * 200}",
    "step-9223372036854775808-a1",
    "step-00000003-a1[red]",
)
NAMES: dict[str, Attack] = {
    **{f"a folder {name[:40]!r}": _folder(name) for name in _ODD_FOLDERS},
    **{
        f"a part {name}": _added(f"{FOLDER}/{name}")
        for name in (
            *("rank-00000-of-9999999.json", "rank-9999999-of-9999999.json"),
            *("rank-00000-of-00000.json", "rank-00005-of-00002.json", "rank-00001-of-00001.json"),
            *(
                "rank-\u0660\u0660\u0660\u0660\u0660-of-00009.json",
                "rank-00000-of-00002.json",
                "rank-0-of-1.json",
            ),
            *("catalogue-x.json", "catalogue-0000000000000000.json", "x.json", "\udcff.json"),
        )
    },
    "a part of 10^7 ranks alone": _added("step-00000003-a1/rank-00000-of-9999999.json"),
    "a part of 10^6 ranks alone": _added("step-00000003-a1/rank-00000-of-1000000.json"),
    "a sealed version of 10^7 ranks": lambda place: (
        _copy(place / FOLDER, place / "step-00000003-a1"),
        _added("step-00000003-a1/rank-00000-of-9999999.json")(place),
    )[0],
    "the part under another rank": _renamed(PART, "rank-00001-of-00002.json"),
    "the part under another world": _renamed(PART, "rank-00000-of-00002.json"),
    "the pack under another name": _renamed(PACK, "rank-00000-of-00001.1.pack"),
    "5,000 files": _many(FOLDER, "x-{}.json", 5000),
    "5,000 parts": _many(FOLDER, "rank-{:05d}-of-05000.json", 5000),
    "1,000 temporary files": _many(FOLDER, "x{}.json.tmp", 1000),
    "a log of another run": lambda place: _copy(
        place / FOLDER, place / "replay" / "step-00000003-a1"
    ),
    "a log of nothing": _added("replay/step-00000003-a1/rank-00000-of-00001.json"),
    "a log of 10^7 ranks": _added("replay/step-00000003-a1/rank-00000-of-9999999.json"),
    "a log of a huge step": _added(f"replay/step-{'9' * 30}-a1/{PART}"),
    "an owner of no JSON": _added("owner", b"\xff" * 1000),
    "an owner that is a list": _added("owner", b"[]"),
    "an owner of odd fields": _added(
        "owner", b'{"pid":"x","host":[],"started":{},"boot":1e999,"held":5}'
    ),
    "an owner of pid -1": _added("owner", b'{"pid":-1,"host":"x"}'),
    "an owner of pid 2^70": _added("owner", b'{"pid":1180591620717411303424,"host":"x"}'),
    "an owner of nesting": _added("owner", b"[" * 100_000),
    "an owner of 10 MB": _added("owner", b" " * (10 << 20)),
    "a claim of a huge session": _added("session-999999999999999999.json"),
    "a claim of nesting": _added("session-9.json", b"[" * 100_000),
}


def _log(change: Callable[[dict[str, Any]], object]) -> Attack:
    """A replay log after the second version, sealed, made of its files."""

    def attack(place: Path) -> None:
        target = place / "replay" / "step-00000003-a1"
        _copy(place / FOLDER, target)
        part = unsealed(bytes_of(target / PART), PART)
        part |= {"step": 3, "kind": "replay", "requires": [2]}
        part["packs"] = [re.sub(r"step-\d+", "step-00000003", pack) for pack in part["packs"]]
        change(part)
        body = json.dumps({"format": 2, **part}, separators=(",", ":"))[:-1].encode()
        (target / PART).write_bytes(sealed_bytes(body))
        seal = unsealed(bytes_of(target / SEAL), SEAL) | {
            "parts": {PART: blake3.blake3(body).hexdigest()},
            **{key: part[key] for key in ("packs", "requires", "kind")},
        }
        body = json.dumps({"format": 2, **seal}, separators=(",", ":"))[:-1].encode()
        (target / SEAL).write_bytes(sealed_bytes(body))

    return attack


def _logged(values: dict[str, Any]) -> Attack:
    return _log(lambda part: part.update(values=values | {"data": part["values"]["data"]}))


_SETTINGS = {"optimizer": "optimizer", "parameters": ["weight"], "before": {}, "after": {}}
LOGS: dict[str, Attack] = {
    "a log of a state": _log(lambda part: None),
    "a log that says state": _log(lambda part: part.update(kind="state")),
    "a log that requires itself": _log(lambda part: part.update(requires=[3])),
    "a log that requires 10^18": _log(lambda part: part.update(requires=[10**18])),
    "a log without values": _log(lambda part: part.update(values={})),
    "a log without pieces": _log(lambda part: part.update(pieces={})),
    **{
        f"a log with {name}": _logged(found)
        for name, found in {
            "settings of 5": {"settings.optimizer.weight": 5},
            "settings of nothing": {"settings.optimizer.weight": {}},
            "settings without when": {
                "settings.optimizer.weight": {"optimizer": "optimizer", "parameters": ["weight"]}
            },
            "settings of lists": {
                "settings.optimizer.weight": {**_SETTINGS, "parameters": 5, "before": []}
            },
            "settings of nested names": {
                "settings.optimizer.weight": {**_SETTINGS, "parameters": [[1]], "optimizer": []}
            },
            "odd settings": {"settings.optimizer.weight": {**_SETTINGS, "before": {"lr": "x"}}},
            "unknown settings": {"settings.optimizer.weight": {**_SETTINGS, "before": {"evil": 1}}},
            "a digest of 5": {"digest.0": 5},
            "a digest of texts": {"digest.0": {"weight": ["x", None]}},
            "a digest of one": {"digest.0": {"weight": [1]}},
            "a digest of 10^400": {"digest.0": {"weight": [10**400, -1]}},
            "a digest of NaN": {"digest.0": {"weight": {"!float": "nan"}}},
            "an object of tags": {"object.data": {"!evil": 1}},
        }.items()
    },
}

ATTACKS: dict[str, Attack] = {
    **STRUCTURES,
    **VALUES,
    **TEXTS,
    **CODES,
    **FILES,
    **NAMES,
    **LOGS,
}
"""All but those of `fields`, which depend on a store."""


# Other programs' checkpoints -------------------------------------------------------------------

Foreign = Callable[[Path], Path]
"""Makes what `ckpt import` is to read, in a folder; returns its path."""


def _safetensors(header: Any, data: bytes = bytes(16), size: int | None = None) -> Foreign:
    def make(folder: Path) -> Path:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path = folder / "model.safetensors"
        path.write_bytes((len(text) if size is None else size).to_bytes(8, "little") + text + data)
        return path

    return make


def _entry(dtype: Any = "F32", shape: Any = (2, 2), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def _torch(change: Callable[[Path], object]) -> Foreign:
    def make(folder: Path) -> Path:
        import torch

        path = folder / "model.pt"
        torch.save({"w": torch.ones(2, 2), "step": 5}, path)
        change(path)
        return path

    return make


def _zip_member(path: Path, suffix: str, content: bytes) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, known in members.items():
            archive.writestr(name, content if name.endswith(suffix) else known)


class _Evil:
    """Would make a file when it is unpickled."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._made = call, arguments

    def __reduce__(self) -> Any:
        return self._made


def _pickled(value: Any, name: str = "model.pt") -> Foreign:
    def make(folder: Path) -> Path:
        content = value if isinstance(value, bytes) else pickle.dumps(value)
        (folder / name).write_bytes(content)
        return folder / name if name == "model.pt" else folder

    return make


def _dcp(change: Callable[[Any], object]) -> Foreign:
    def make(folder: Path) -> Path:
        import torch
        from torch.distributed import checkpoint

        source = folder / "dcp-7"
        checkpoint.save({"w": torch.ones(6, 2), "step": 5}, checkpoint_id=source, no_dist=True)
        metadata = pickle.loads((source / ".metadata").read_bytes())
        changed = change(metadata)
        (source / ".metadata").write_bytes(pickle.dumps(metadata if changed is None else changed))
        return source

    return make


def _set(thing: Any, **fields: Any) -> None:
    for name, value in fields.items():
        object.__setattr__(thing, name, value)


def _each_info(**fields: Any) -> Callable[[Any], None]:
    return lambda found: [_set(info, **fields) for info in found.storage_data.values()][:0] or None


def _of_w(**fields: Any) -> Callable[[Any], None]:
    return lambda found: _set(found.state_dict_metadata["w"], **fields)


def _chunk_of_w(**fields: Any) -> Callable[[Any], None]:
    return lambda found: _set(found.state_dict_metadata["w"].chunks[0], **fields)


def _files(**contents: bytes) -> Foreign:
    def make(folder: Path) -> Path:
        for name, content in contents.items():
            (folder / name.replace("__", ".")).write_bytes(content)
        return folder

    return make


def _special(what: str, name: str) -> Foreign:
    def make(folder: Path) -> Path:
        in_place_of(folder / name, what)
        return folder if name.startswith(".") or "json" in name else folder / name

    return make


_NESTED = b"[" * 100_000
FOREIGN: dict[str, Foreign] = {
    "safetensors: nothing": _safetensors(b"", b""),
    "safetensors: no data": _safetensors({"w": _entry()}, b""),
    "safetensors: a header of 2^63": _safetensors({"w": _entry()}, size=2**63),
    "safetensors: a header of 2^64": _safetensors({"w": _entry()}, size=2**64 - 1),
    "safetensors: a header of 10 MB": _safetensors(b'{"x":"' + b" " * (10 << 20) + b'"}'),
    "safetensors: a header cut": _safetensors(b'{"w":{"dtype":"F32"'),
    "safetensors: a list": _safetensors([]),
    "safetensors: nested": _safetensors(b'{"w":' + _NESTED),
    "safetensors: no UTF-8": _safetensors(b'{"\xff":1}'),
    "safetensors: a type of none": _safetensors({"w": _entry("EVIL")}),
    "safetensors: a type of 5": _safetensors({"w": _entry(5)}),
    "safetensors: 4 bits": _safetensors({"w": _entry("F4", (8, 4))}),
    "safetensors: a negative shape": _safetensors({"w": _entry(shape=(-2, -2))}),
    "safetensors: a shape of 2^62": _safetensors({"w": _entry(shape=(2**31, 2**31))}),
    "safetensors: a shape of 2^64": _safetensors({"w": _entry(shape=(2**32, 2**32))}),
    "safetensors: a shape of nothing": _safetensors(
        {"w": _entry(shape=(2**63, 0), offsets=(0, 0))}, b""
    ),
    "safetensors: 100 dimensions": _safetensors({"w": _entry(shape=(1,) * 98 + (2, 2))}),
    "safetensors: offsets behind the end": _safetensors({"w": _entry(offsets=(2**40, 2**40 + 16))}),
    "safetensors: offsets the other way": _safetensors({"w": _entry(offsets=(16, 0))}),
    "safetensors: overlapping": _safetensors({"w": _entry(), "v": _entry(offsets=(8, 24))}),
    "safetensors: a gap": _safetensors({"w": _entry(offsets=(8, 24))}, bytes(24)),
    "safetensors: too much data": _safetensors({"w": _entry()}, bytes(99)),
    "safetensors: a name of control signs": _safetensors({"\x1b[2J\0": _entry()}),
    "safetensors: an empty name": _safetensors({"": _entry()}),
    "safetensors: a huge name": _safetensors({"x" * 10**6: _entry()}),
    "safetensors: twice": _safetensors(
        b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},'
        b'"w":{"dtype":"I32","shape":[4],"data_offsets":[0,16]}}'
    ),
    "safetensors: 5,000 tensors": _safetensors(
        {f"w{n}": _entry(shape=(0,), offsets=(0, 0)) for n in range(5000)}, b""
    ),
    "index: nested": _files(model__safetensors__index__json=_NESTED),
    "index: no map": _files(model__safetensors__index__json=b'{"weight_map":[1]}'),
    "index: a map of numbers": _files(model__safetensors__index__json=b'{"weight_map":{"w":5}}'),
    "index: a map of lists": _files(model__safetensors__index__json=b'{"weight_map":{"w":[]}}'),
    "index: files outside": _files(
        model__safetensors__index__json=b'{"weight_map":{"w":"../../etc/passwd"}}'
    ),
    "index: files of NUL": _files(
        model__safetensors__index__json=b'{"weight_map":{"w":"\\u0000"}}'
    ),
    "index: no file": _files(model__safetensors__index__json=b'{"weight_map":{"w":""}}'),
    "torch: nothing": _pickled(b""),
    "torch: noise": _pickled(_noise(1000)),
    "torch: a call": _pickled({"w": _Evil(os.system, "touch evil")}),
    "torch: a call in a zip": _torch(
        lambda path: _zip_member(path, "data.pkl", pickle.dumps({"w": _Evil(os.system, "x")}, 2))
    ),
    "torch: a list": _pickled(pickle.dumps([1, 2], 2)),
    "torch: nested": _pickled(b"\x80\x02" + b"](" * 100_000 + b"."),
    "torch: a string of 2^31": _pickled(b"\x80\x02X\xff\xff\xff\x7f."),
    "torch: a long of 2^31": _pickled(b"\x80\x02\x8b\xff\xff\xff\x7f."),
    "torch: memo of 2^31": _pickled(b"\x80\x02]r\xff\xff\xff\x7f."),
    "torch: no pickle in it": _torch(lambda path: _zip_member(path, "data.pkl", b"")),
    "torch: a pickle cut": _torch(lambda path: _zip_member(path, "data.pkl", b"\x80\x02}q")),
    "torch: a storage cut": _torch(lambda path: _zip_member(path, "data/0", b"x")),
    "torch: a zip cut": _torch(lambda path: path.write_bytes(path.read_bytes()[:-30])),
    "torch: half a zip": _torch(lambda path: path.write_bytes(path.read_bytes()[:300])),
    "torch: an empty zip": _torch(lambda path: path.write_bytes(b"PK\5\6" + bytes(18))),
    "torch: another byte order": _torch(lambda path: _zip_member(path, "byteorder", b"evil")),
    "torch: no tensors": _torch(
        lambda path: _zip_member(path, "data.pkl", pickle.dumps({"x": 1, 2: [3]}, 2))
    ),
    "torch: a huge tensor": _torch(
        lambda path: _zip_member(
            path,
            "data.pkl",
            _replaced_in(path, b"K\x02K\x02", b"\x8a\x05\0\0\0\0\x10\x8a\x05\0\0\0\0\x10"),
        )
    ),
    "torch: a negative offset": _torch(
        lambda path: _zip_member(
            path, "data.pkl", _replaced_in(path, b"QK\0", b"QJ\xff\xff\xff\xff")
        )
    ),
    "torch: a pipe": _special("pipe", "model.pt"),
    "torch: a device": _special("device", "model.pt"),
    "torch: a loop": _special("loop", "model.pt"),
    "torch: terabytes": _special("terabytes", "model.pt"),
    "safetensors: a pipe": _special("pipe", "model.safetensors"),
    "safetensors: terabytes": _special("terabytes", "model.safetensors"),
    "safetensors: a folder": _special("folder", "model.safetensors"),
    "dcp: a pipe": _special("pipe", ".metadata"),
    "dcp: a folder": _special("folder", ".metadata"),
    "dcp: nothing": _files(__metadata=b""),
    "dcp: noise": _files(__metadata=_noise(500)),
    "dcp: a call": _pickled(_Evil(os.system, "touch evil"), ".metadata"),
    "dcp: getattr": _files(__metadata=b"cbuiltins\ngetattr\n(cos\nsystem\nS'__call__'\ntR."),
    "dcp: another object": _pickled({"a": 1}, ".metadata"),
    "dcp: nested": _files(__metadata=b"\x80\x02" + b"](" * 100_000 + b"."),
    "dcp: a string of 2^31": _files(__metadata=b"\x80\x02X\xff\xff\xff\x7f."),
    "dcp: memo of 2^31": _files(__metadata=b"\x80\x02]r\xff\xff\xff\x7f."),
    "dcp: no storage": _dcp(lambda found: _set(found, storage_data={})),
    "dcp: no entries": _dcp(lambda found: _set(found, state_dict_metadata={})),
    "dcp: entries of None": _dcp(lambda found: _set(found, state_dict_metadata=None)),
    "dcp: entries of 5": _dcp(lambda found: _set(found, state_dict_metadata={"w": 5})),
    "dcp: names of numbers": _dcp(
        lambda found: found.state_dict_metadata.update({5: found.state_dict_metadata["w"]})
    ),
    "dcp: planner data of sets": _dcp(lambda found: _set(found, planner_data={"w": {1}})),
    "dcp: nested planner data": _dcp(lambda found: _set(found, planner_data=deep(200))),
    "dcp: storage of 5": _dcp(lambda found: _set(found, storage_data={1: 5})),
    "dcp: files outside": _dcp(_each_info(relative_path="../x.distcp")),
    "dcp: files of 5": _dcp(_each_info(relative_path=5)),
    "dcp: files missing": _dcp(_each_info(relative_path="x.distcp")),
    "dcp: files that are folders": _dcp(_each_info(relative_path=".")),
    "dcp: an offset of 2^60": _dcp(_each_info(offset=2**60)),
    "dcp: an offset of -1": _dcp(_each_info(offset=-1)),
    "dcp: a length of 2^60": _dcp(_each_info(length=2**60)),
    "dcp: a length of text": _dcp(_each_info(length="x")),
    "dcp: descriptors of none": _dcp(_each_info(transform_descriptors=["evil"])),
    "dcp: a size of 10^18": _dcp(_of_w(size=(10**9, 10**9))),
    "dcp: a size of text": _dcp(_of_w(size="xy")),
    "dcp: a size of -1": _dcp(_of_w(size=(-1, 2))),
    "dcp: a size of 2^70": _dcp(_of_w(size=(2**70, 2))),
    "dcp: no chunks": _dcp(_of_w(chunks=[])),
    "dcp: chunks of 5": _dcp(_of_w(chunks=5)),
    "dcp: properties of none": _dcp(_of_w(properties=None)),
    "dcp: another size of chunks": _dcp(_chunk_of_w(sizes=(10**9, 10**9))),
    "dcp: smaller chunks": _dcp(_chunk_of_w(sizes=(1, 1))),
    "dcp: chunks elsewhere": _dcp(_chunk_of_w(offsets=(-5, 0))),
    "dcp: chunks of more dimensions": _dcp(_chunk_of_w(offsets=(0, 0, 0), sizes=(6, 2, 1))),
    "dcp: chunks of texts": _dcp(_chunk_of_w(offsets=("a", "b"))),
    "megatron: nested": _files(metadata__json=_NESTED),
    "megatron: a list": _files(metadata__json=b"[]"),
    "megatron: another format": _files(metadata__json=b'{"sharded_backend":5}'),
    "megatron: a tracker of noise": _files(latest_checkpointed_iteration__txt=_noise(50)),
    "megatron: a tracker outside": _files(latest_checkpointed_iteration__txt=b"../../../../etc"),
    "deepspeed: a path outside": _files(latest=b"../../../../etc"),
    "deepspeed: latest of noise": _files(latest=_noise(50)),
    "deepspeed: latest of NUL": _files(latest=b"\0"),
    "deepspeed: nothing": _files(mp_rank_00_model_states__pt=b""),
    "deepspeed: a list": _files(mp_rank_00_model_states__pt=pickle.dumps([1], 2)),
    "deepspeed: odd fields": _files(
        mp_rank_00_model_states__pt=pickle.dumps({"module": {"w": 5}, "global_steps": -5}, 2)
    ),
    "deepspeed: odd shapes": _files(
        mp_rank_00_model_states__pt=pickle.dumps({"module": {}, "param_shapes": 5}, 2),
        zero_pp_rank_0_mp_rank_00_optim_states__pt=pickle.dumps({"optimizer_state_dict": 5}, 2),
    ),
    "deepspeed: odd optimizers": _files(
        mp_rank_00_model_states__pt=pickle.dumps({"module": {}, "param_shapes": [{"w": [2]}]}, 2),
        zero_pp_rank_0_mp_rank_00_optim_states__pt=pickle.dumps(
            {"optimizer_state_dict": {"zero_stage": "x", "partition_count": [], "fp32": 5}}, 2
        ),
    ),
}


GOOD_DCP, GOOD_TORCH = _dcp(lambda _: None), _torch(lambda _: None)


def _replaced_in(path: Path, old: bytes, new: bytes) -> bytes:
    with zipfile.ZipFile(path) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("data.pkl")]
        content = archive.read(name)
    assert old in content
    return content.replace(old, new)
