"""Python values as JSON and back, exactly and without pickle.

JSON has no tuples, sets, bytes, complex numbers, infinities or keys that are no strings; these
become objects with one key that starts with ``!``. Tensors and arrays stay outside: they are
replaced by ``{"!tensor": NAME}`` and handed over beside the JSON.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

Json = Any


def encode(value: Any, path: str, put_tensor: Callable[[str, Any], str | None]) -> Json:
    """`value` as JSON.

    Args:
        value: Nested dictionaries, lists, tuples, sets, numbers, texts, bytes, None, tensors.
        path: Name of the value, for the names of its tensors and for errors.
        put_tensor: Called with a name and an object of another type; takes it if it is a tensor and
            returns the kind of it, or returns None. Every name is given once.

    Raises:
        CheckpointError: Naming the path and type of a value that cannot be written.
    """
    used: set[str] = set()

    def put(path: str, value: Any) -> Json:
        array = np.asarray(value) if isinstance(value, np.generic) else value
        name, number = path, 1
        # {1: ..., "1": ...} and {"a": {"b": ...}, "a.b": ...} lead to equal paths.
        while name in used:
            number += 1
            name = f"{path}~{number}"
        kind = put_tensor(name, array)
        if kind is None:
            raise CheckpointError(
                f"`{path}` is of type {type(value).__name__}, which a checkpoint cannot hold "
                "without pickle; give numbers, texts, bytes, lists, dictionaries and tensors in "
                "state_dict()"
            )
        used.add(name)
        return {"!tensor": name, "kind": kind}

    return _encode(value, path, put)


def _encode(value: Any, path: str, put: Callable[[str, Any], Json]) -> Json:
    if value is None or type(value) in (bool, str, int):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"!float": repr(value)}
    if isinstance(value, np.generic):
        return {**put(path, value), "scalar": True}
    if type(value) in (list, tuple, set, frozenset):
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        encoded = [_encode(v, f"{path}.{n}", put) for n, v in enumerate(items)]
        return encoded if type(value) is list else {f"!{type(value).__name__}": encoded}
    if isinstance(value, Mapping):
        plain = type(value) is dict and all(
            type(key) is str and not key.startswith("!") for key in value
        )
        if plain:
            return {key: _encode(each, f"{path}.{key}", put) for key, each in value.items()}
        pairs = [
            [_encode(key, f"{path}.key", put), _encode(each, f"{path}.{key}", put)]
            for key, each in value.items()
        ]
        return {"!dict": pairs}
    if isinstance(value, (bytes, bytearray)):
        return {"!bytes": base64.b64encode(value).decode()}
    if type(value) is complex:
        return {"!complex": [repr(value.real), repr(value.imag)]}
    return put(path, value)


def decode(value: Json, get_tensor: Callable[[str, str], Any]) -> Any:
    """The value that `encode` was given.

    Args:
        value: JSON.
        get_tensor: Called with the name and kind of a tensor.
    """
    if isinstance(value, list):
        return [decode(each, get_tensor) for each in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("!"):
        return {key: decode(each, get_tensor) for key, each in value.items()}
    content = value[tag]
    if tag == "!tensor":
        tensor = get_tensor(content, value["kind"])
        return tensor[()] if value.get("scalar") else tensor
    if tag == "!dict":
        return {decode(key, get_tensor): decode(each, get_tensor) for key, each in content}
    if tag == "!bytes":
        return base64.b64decode(content)
    if tag == "!float":
        return float(content)
    if tag == "!complex":
        return complex(float(content[0]), float(content[1]))
    sequences: dict[str, type] = {"!tuple": tuple, "!set": set, "!frozenset": frozenset}
    return sequences[tag](decode(each, get_tensor) for each in content)
