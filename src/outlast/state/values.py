"""Python values as JSON and back, exactly and without pickle.

JSON has no tuples, sets, bytes, complex numbers, infinities or keys that are no strings; these and
the other types of `encode` become objects with one key that starts with ``!``. What is reached in
two ways is one object again. A type that is not listed there is refused: a class would have to be
imported, and run, to make it. Named tuples and enumerations are found by the names of their
classes among the modules that the program has imported itself. Tensors and arrays stay outside:
they are replaced by ``{"!tensor": NAME}`` and handed over beside the JSON.
"""

from __future__ import annotations

import base64
import datetime
import enum
import math
import pathlib
import re
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

Json = Any
MAX_DEPTH = 100
"""Containers within containers: what is deeper cannot be walked through everywhere."""

MAX_REPEATS = 200_000
"""References to tuples of containers that were met before: their number may double with depth."""

_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_SEQUENCES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),
}
_PATHS = (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
_TIMES = (datetime.datetime, datetime.date, datetime.time)
# Attributes of the module torch that are no classes, and that JSON can name.
_TORCH = ("dtype", "layout", "memory_format", "device")
_FACTORIES = (None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)
_FACTORY_NAMES = {None if factory is None else factory.__name__: factory for factory in _FACTORIES}
_MUTABLE = (list, dict, set, bytearray, deque, OrderedDict, defaultdict, Counter)
_PLAIN_INTEGERS = 2**63
_TORCH_CODES = "?bBhHiIlLqQefdFD"
"""Codes of NumPy's element types that torch has, too."""

_CODE = re.compile(r"[<>|][biufcmMSUV]\d{1,9}(\[\w{1,9}\])?", re.ASCII)
_REMEDY = "give numbers, texts, bytes, lists, dictionaries and tensors"


def encode(value: Any, path: str, put_tensor: Callable[[str, Any], str | None]) -> Json:
    """`value` as JSON.

    Args:
        value: Nested dictionaries, lists, tuples, sets and deques (OrderedDict, Counter and
            defaultdict of a built-in type too) of numbers (Decimal and Fraction too), texts,
            bytes, bytearrays, None, ranges, slices, dates, times, fixed offsets from UTC, paths,
            torch's types, sizes and devices, tensors and arrays; and named tuples and enumerations
            whose classes a module has under their names. Subclasses of these are other types.
        path: Name of the value, for the names of its tensors and for errors.
        put_tensor: Called with a name and an object of another type; takes it if it is a tensor and
            returns the kind of it, or returns None. Every name is given once.

    Raises:
        CheckpointError: Naming the path and type of a value that cannot be written.
    """
    return _Encoding(value, path, put_tensor).encode(value, path)


class _Encoding:
    """One tree on its way: which of its objects occur more than once, and what has a name."""

    def __init__(self, value: Any, path: str, put_tensor: Callable[[str, Any], str | None]) -> None:
        self._put_tensor = put_tensor
        self._used: set[str] = set()
        self._tensors: dict[int, tuple[Any, Json]] = {}
        self._numbers: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        self._nested: set[int] = set()
        self._repeats = 0
        self._count(value, path, [])

    def _count(self, value: Any, path: str, above: list[int]) -> None:
        """See how often each container occurs, and that none is within itself."""
        if type(value) in _MUTABLE:
            if id(value) in above:
                raise CheckpointError(f"`{path}` contains itself, which a checkpoint cannot hold")
            self._counts[id(value)] = self._counts.get(id(value), 0) + 1
            if self._counts[id(value)] > 1:
                return
        if len(above) > MAX_DEPTH:
            raise CheckpointError(
                f"`{path}` is nested deeper than {MAX_DEPTH}, which a checkpoint cannot hold"
            )
        children: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, dict) and type(value) in _MUTABLE:
            children = [*value.items(), ("__dict__", getattr(value, "__dict__", None))]
        elif type(value) in (list, tuple, set, frozenset, deque) or _is_named_tuple(value):
            children = [*enumerate(value)]
        if type(value) not in _MUTABLE and any(isinstance(v, _CONTAINERS) for _, v in children):
            # What cannot change is written in full wherever it is referred to.
            self._repeats += id(value) in self._nested
            self._nested.add(id(value))
            if self._repeats > MAX_REPEATS:
                raise CheckpointError(
                    f"`{path}` refers to tuples of tuples that {MAX_REPEATS} places refer to, too, "
                    "and a checkpoint would hold each one in full; put them in lists"
                )
        if children:
            above = [*above, id(value)]
            for key, child in children:
                if isinstance(key, tuple):
                    self._count(key, f"{path}.key", above)
                self._count(child, f"{path}.{key}", above)

    def encode(self, value: Any, path: str) -> Json:
        """`value`, or a reference to where it was met before."""
        if self._counts.get(id(value), 0) < 2 or type(value) not in _MUTABLE:
            return self._encode(value, path)
        if id(value) in self._numbers:
            return {"!same": self._numbers[id(value)]}
        number = self._numbers[id(value)] = len(self._numbers)
        return {"!shared": [number, self._encode(value, path)]}

    def _encode(self, value: Any, path: str) -> Json:  # noqa: PLR0912
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if abs(value) < _PLAIN_INTEGERS else {"!int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"!float": _float_text(value)}
        if kind in (list, tuple, set, frozenset):
            items = sorted(value, key=repr) if kind in (set, frozenset) else value
            encoded = [self.encode(v, f"{path}.{n}") for n, v in enumerate(items)]
            return encoded if kind is list else {f"!{kind.__name__}": encoded}
        if isinstance(value, dict) and kind in _MUTABLE:
            return self._mapping(value, path)
        if kind in (bytes, bytearray):
            return {f"!{kind.__name__}": base64.b64encode(value).decode()}
        if kind is complex:
            return {"!complex": [_float_text(value.real), _float_text(value.imag)]}
        if kind is deque:
            items = [self.encode(v, f"{path}.{n}") for n, v in enumerate(value)]
            return {"!deque": [value.maxlen, items]}
        if kind is slice or (
            kind is range and max(map(abs, (value.start, value.stop))) < _PLAIN_INTEGERS
        ):
            bounds = [value.start, value.stop, value.step]
            return {f"!{kind.__name__}": [self._encode(bound, path) for bound in bounds]}
        if kind in _PATHS:
            return {f"!{kind.__name__}": str(value)}
        if kind in _TIMES and _in_plain_time(value):
            return {f"!{kind.__name__}": value.isoformat()}
        if kind is datetime.timedelta or (kind is datetime.timezone and _is_nameless(value)):
            span = value if kind is datetime.timedelta else value.utcoffset(None)
            return {f"!{kind.__name__}": [span.days, span.seconds, span.microseconds]}
        if kind is Decimal:
            return {"!Decimal": str(value)}
        if kind is Fraction:
            return {"!Fraction": [hex(value.numerator), hex(value.denominator)]}
        if (isinstance(value, enum.Enum) or _is_named_tuple(value)) and _class_of(
            _name(kind)
        ) is kind:
            if isinstance(value, enum.Flag):
                return {"!flag": [_name(kind), self._encode(value.value, path)]}
            if isinstance(value, enum.Enum):
                return {"!enum": [_name(kind), value.name]}
            items = [
                self.encode(v, f"{path}.{n}") for n, v in zip(kind._fields, value, strict=True)
            ]
            return {"!namedtuple": [_name(kind), [*kind._fields], items]}
        if kind.__module__ == "torch":
            if kind.__name__ == "Size":
                return {"!torch.Size": list(value)}
            if kind.__name__ in _TORCH:
                return {f"!torch.{kind.__name__}": str(value).removeprefix("torch.")}
        if isinstance(value, np.generic):
            return {**self._put(path, value), "scalar": True}
        return self._put(path, value)

    def _mapping(self, value: dict[Any, Any], path: str) -> Json:
        kind = type(value)
        plain = kind is dict and all(type(key) is str and not key.startswith("!") for key in value)
        if plain:
            return {key: self.encode(item, f"{path}.{key}") for key, item in value.items()}
        pairs: Json = [
            [self.encode(key, f"{path}.key"), self.encode(item, f"{path}.{key}")]
            for key, item in value.items()
        ]
        if isinstance(value, defaultdict):
            factory: Any = value.default_factory
            if not any(factory is item for item in _FACTORIES):
                raise CheckpointError(
                    f"`{path}` is a defaultdict of {factory!r}, which a checkpoint cannot hold "
                    "without pickle; give a dict in state_dict()"
                )
            return {"!defaultdict": [None if factory is None else factory.__name__, pairs]}
        found = {f"!{kind.__name__}": pairs}
        if attributes := getattr(value, "__dict__", None):
            # As the `_metadata` of what a module's state_dict() gives.
            found["attributes"] = self.encode(attributes, f"{path}.__dict__")
        return found

    def _put(self, path: str, value: Any) -> Json:
        if id(value) in self._tensors:
            return self._tensors[id(value)][1]
        array = np.asarray(value) if isinstance(value, np.generic) else value
        descr = _descr(array) if type(array) is np.ndarray else None
        if descr is not None:
            shape = array.shape
            array = np.array(array, order="C").reshape(-1).view(np.uint8)
        name, number = path, 1
        # {1: ..., "1": ...} and {"a": {"b": ...}, "a.b": ...} lead to equal paths.
        while name in self._used:
            number += 1
            name = f"{path}~{number}"
        kind = self._put_tensor(name, array)
        if kind is None:
            what, remedy = type(value).__name__, f"{_REMEDY} in state_dict()"
            if isinstance(array, np.ndarray):
                what += f" of {array.dtype}"
            if isinstance(value, enum.Enum) or _is_named_tuple(value):
                remedy = "define its class at the top level of a module"
            raise CheckpointError(
                f"`{path}` is of type {what}, which a checkpoint cannot hold without pickle; "
                f"{remedy}"
            )
        self._used.add(name)
        found: Json = {"!tensor": name, "kind": kind}
        if kind == "torch" and (value.requires_grad and value.is_leaf):
            found["requires_grad"] = True
        if type(value).__name__ == "Parameter":
            found["parameter"] = True
        if descr is not None:
            found = {"!array": [descr, [*shape], found]}
        # The object is kept, so that no other one gets its identity.
        self._tensors[id(value)] = value, found
        return found


def _in_plain_time(value: Any) -> bool:
    """Return whether ISO's text says all of a date or time: no summer time, no names of zones."""
    zone = getattr(value, "tzinfo", None)
    return not getattr(value, "fold", 0) and (zone is None or _is_nameless(zone))


def _is_nameless(zone: Any) -> bool:
    """Return whether a time zone is nothing but its offset from UTC."""
    nameless = type(zone) is datetime.timezone
    return nameless and repr(zone) == repr(datetime.timezone(zone.utcoffset(None)))


def _is_named_tuple(value: Any) -> bool:
    fields = getattr(type(value), "_fields", None)
    return (
        isinstance(value, tuple)
        and isinstance(fields, tuple)
        and len(fields) == len(value)
        and not getattr(value, "__dict__", None)
    )


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class_of(name: str) -> Any:
    """Return what the program has under the name of a class; None without it.

    Nothing is imported and no code runs, whatever name a file gives.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split(".") if found is not None else ():
        kind = type if isinstance(found, type) else object
        try:
            found = kind.__getattribute__(found, "__dict__").get(part)
        except AttributeError:
            return None
    return found


def _descr(array: NDArray[Any]) -> Json:
    """NumPy's description of an element type that torch has not; None where it has, or none can."""
    dtype = array.dtype
    native = dtype.isnative and dtype.char in _TORCH_CODES
    if native or dtype.hasobject or dtype.itemsize == 0 or dtype.metadata:
        return None
    descr = np.lib.format.dtype_to_descr(dtype)
    # As JSON has it: lists instead of tuples.
    made = np.lib.format.descr_to_dtype(descr)
    same = made == dtype and made.isalignedstruct == dtype.isalignedstruct
    return descr if same else None


def _float_text(value: float) -> str:
    """A text from which `_float` makes the same bits, of a NaN too."""
    bits = struct.pack(">d", value)
    return repr(value) if struct.pack(">d", float(repr(value))) == bits else f"0x{bits.hex()}"


def _float(text: str) -> float:
    if not text.startswith("0x"):
        return float(text)
    found: float = struct.unpack(">d", bytes.fromhex(text[2:]))[0]
    return found


def decode(value: Json, get_tensor: Callable[[str, str], Any]) -> Any:
    """The value that `encode` was given.

    Args:
        value: JSON.
        get_tensor: Called with the name and kind of a tensor.

    Raises:
        CheckpointError: When it is none of `encode`.
    """
    if problem := problem_of(value):
        raise CheckpointError(f"a value cannot be read: it {problem}")
    try:
        return _Decoding(get_tensor).decode(value)
    except (ValueError, TypeError, ArithmeticError, LookupError, RuntimeError) as error:
        raise CheckpointError(f"a value cannot be read: {type(error).__name__}: {error}") from None


class _Decoding:
    """One tree on its way back."""

    def __init__(self, get_tensor: Callable[[str, str], Any]) -> None:
        self._get_tensor = get_tensor
        self._shared: dict[int, Any] = {}

    def decode(self, value: Json) -> Any:  # noqa: PLR0912
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        tag = next(iter(value), "")
        if not tag.startswith("!"):
            return {key: self.decode(item) for key, item in value.items()}
        content = value[tag]
        kind = tag[1:]
        if kind == "tensor":
            return self._tensor(value)
        if kind == "shared":
            self._shared[content[0]] = self.decode(content[1])
            return self._shared[content[0]]
        if kind == "same":
            return self._shared[content]
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](self.decode(name) for name in content)
        if kind in _MAPPINGS:
            found = _MAPPINGS[kind](self._pairs(content))
            if "attributes" in value:
                found.__dict__.update(self.decode(value["attributes"]))
            return found
        if kind == "defaultdict":
            return defaultdict(_FACTORY_NAMES[content[0]], self._pairs(content[1]))
        if kind == "deque":
            return deque(self.decode(content[1]), content[0])
        if kind == "array":
            array = self.decode(content[2]).view(_dtype(content[0])).reshape(content[1])
            return array[()] if value.get("scalar") else array
        if kind in ("enum", "flag", "namedtuple"):
            return self._of_class(kind, *content)
        if kind in ("range", "slice"):
            bounds = self.decode(content)
            return range(*bounds) if kind == "range" else slice(*bounds)
        return _decode_leaf(kind, content)

    def _of_class(self, kind: str, name: str, *content: Json) -> Any:
        """A member of an enumeration or a named tuple, of the program's own class."""
        found = _class_of(name)
        base = {"enum": enum.Enum, "flag": enum.Flag, "namedtuple": tuple}[kind]
        fits = isinstance(found, type) and issubclass(found, base)
        if fits and kind == "flag":
            return found(self.decode(content[0]))
        if fits and kind == "enum" and content[0] in found.__members__:
            return found.__members__[content[0]]
        if fits and kind == "namedtuple" and found._fields == (*content[0],):
            return tuple.__new__(found, self.decode(content[1]))
        what = (
            f"with the fields {', '.join(content[0])}"
            if kind == "namedtuple"
            else f"with {content[0]}"
        )
        raise CheckpointError(
            f"a value is of the class {name} {what}, which the program has not; import or define "
            "it as it was before the restore"
        )

    def _pairs(self, pairs: Json) -> list[tuple[Any, Any]]:
        return [(self.decode(key), self.decode(item)) for key, item in pairs]

    def _tensor(self, value: Json) -> Any:
        tensor = self._get_tensor(value["!tensor"], value["kind"])
        if value.get("parameter"):
            from torch import nn

            return nn.Parameter(tensor, requires_grad=bool(value.get("requires_grad")))
        if value.get("requires_grad"):
            return tensor.requires_grad_()
        return tensor[()] if value.get("scalar") else tensor


def _dtype(descr: Json) -> np.dtype[Any]:
    """The element type of a description, in which JSON has made lists of tuples."""

    def row(field: Json) -> Json:
        name, kind, *shape = field
        if isinstance(kind, str) and not _CODE.fullmatch(kind):
            raise ValueError(f"{kind[:20]} is no element type")
        name = tuple(name) if isinstance(name, list) else name
        kind = [*map(row, kind)] if isinstance(kind, list) else kind
        return (name, kind, *map(tuple, shape))

    descr = [*map(row, descr)] if isinstance(descr, list) else row(["", descr])[1]
    found = np.lib.format.descr_to_dtype(descr)
    if found.hasobject or not found.itemsize:
        raise ValueError(f"an array cannot be of {found}")
    return found


def _decode_leaf(kind: str, content: Json) -> Any:  # noqa: PLR0912
    if kind in ("bytes", "bytearray"):
        found = base64.b64decode(content)
        return found if kind == "bytes" else bytearray(found)
    if kind == "float":
        return _float(content)
    if kind == "int":
        return int(content, 16)
    if kind == "complex":
        return complex(_float(content[0]), _float(content[1]))
    if kind in ("timedelta", "timezone"):
        span = datetime.timedelta(*content)
        return span if kind == "timedelta" else datetime.timezone(span)
    if kind == "Decimal":
        return Decimal(content)
    if kind == "Fraction":
        return Fraction(int(content[0], 16), int(content[1], 16))
    for path in _PATHS:
        if kind == path.__name__:
            return path(content)
    for time in _TIMES:
        if kind == time.__name__:
            return time.fromisoformat(content)
    import torch

    name = kind.removeprefix("torch.")
    if name == "Size":
        return torch.Size(content)
    try:
        made = torch.device(content) if name == "device" else getattr(torch, content, None)
    except RuntimeError:
        made = None
    if not isinstance(made, getattr(torch, name)):
        raise CheckpointError(f"this torch has no {name} {content}; use the one that saved it")
    return made


def _is_text(content: Json) -> bool:
    return type(content) is str


def _is_rows(content: Json) -> bool:
    return type(content) is list


def _is_hashable(content: Json) -> bool:
    if not isinstance(content, dict):
        return not isinstance(content, list)
    tag = next(iter(content), "")
    if tag == "!namedtuple":
        return type(content[tag]) is list and all(map(_is_hashable, content[tag][-1:][0]))
    if tag in ("!tuple", "!frozenset"):
        return type(content[tag]) is list and all(map(_is_hashable, content[tag]))
    mutable = {"!shared", "!same", "!slice", "!array", *(f"!{item.__name__}" for item in _MUTABLE)}
    return tag.startswith("!") and tag not in mutable


def _is_items(content: Json) -> bool:
    return type(content) is list and all(map(_is_hashable, content))


def _is_pairs(content: Json) -> bool:
    return type(content) is list and all(
        type(row) is list and len(row) == 2 and _is_hashable(row[0]) for row in content
    )


def _is_word(content: Json) -> bool:
    return type(content) is str and content.isidentifier()


def _is_number(content: Json) -> bool:
    return type(content) is int


def _is_numbers(content: Json) -> bool:
    return type(content) is list and all(type(item) is int for item in content)


def _works(make: Callable[[Any], Any]) -> Callable[[Json], bool]:
    """Return whether `make` takes a content: for leaves, which are small."""

    def check(content: Json) -> bool:
        try:
            make(content)
        except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, struct.error):
            return False
        return True

    return check


_CONTENTS: dict[str, Callable[[Json], bool]] = {
    "tensor": _is_text,
    "shared": lambda content: _is_rows(content) and len(content) == 2 and _is_number(content[0]),
    "same": _is_number,
    "tuple": _is_rows,
    **dict.fromkeys(("set", "frozenset"), _is_items),
    **dict.fromkeys(_MAPPINGS, _is_pairs),
    "defaultdict": lambda content: (
        _is_rows(content)
        and len(content) == 2
        and (content[0] is None or _is_text(content[0]))
        and content[0] in _FACTORY_NAMES
        and _is_pairs(content[1])
    ),
    "deque": lambda content: (
        _is_rows(content)
        and len(content) == 2
        and (content[0] is None or (_is_number(content[0]) and content[0] >= 0))
        and _is_rows(content[1])
    ),
    "array": lambda content: (
        _is_rows(content)
        and len(content) == 3
        and _works(_dtype)(content[0])
        and _is_numbers(content[1])
        and all(0 <= extent < 2**62 for extent in content[1])
        and type(content[2]) is dict
        and next(iter(content[2]), "") == "!tensor"
    ),
    "enum": lambda content: _is_rows(content) and len(content) == 2 and all(map(_is_text, content)),
    "flag": lambda content: _is_rows(content) and len(content) == 2 and _is_text(content[0]),
    "namedtuple": lambda content: (
        _is_rows(content)
        and len(content) == 3
        and _is_text(content[0])
        and all(map(_is_rows, content[1:]))
        and all(map(_is_text, content[1]))
        and len(content[1]) == len(content[2])
    ),
    "range": lambda content: _is_numbers(content) and len(content) == 3 and content[2] != 0,
    "slice": lambda content: _is_rows(content) and len(content) == 3,
    "torch.Size": lambda content: _is_numbers(content) and all(abs(e) < 2**62 for e in content),
    "torch.device": lambda content: _is_text(content) and len(content) < 40,
    **dict.fromkeys(("torch.dtype", "torch.layout", "torch.memory_format"), _is_word),
    **{
        kind: _works(lambda content, kind=kind: _decode_leaf(kind, content))  # type: ignore[misc]
        for kind in (
            *("bytes", "bytearray", "float", "int", "complex", "timedelta", "timezone"),
            *("Decimal", "Fraction"),
            *(time.__name__ for time in _TIMES),
        )
    },
    **{path.__name__: _is_text for path in _PATHS},
}


def problem_of(value: Json) -> str:  # noqa: PLR0912
    """Why `decode` cannot take a JSON value; empty when it can.

    However deep and large the value is, this takes little memory and no recursion.
    """
    shared: set[int] = set()
    levels: list[list[Any]] = [[value]]
    while levels:
        if not levels[-1]:
            levels.pop()
            continue
        found = levels[-1].pop()
        # An entry of a dictionary may take three: what is shared, the pairs and one of these.
        if len(levels) > 3 * MAX_DEPTH + 3:
            return f"is nested deeper than {MAX_DEPTH}"
        if isinstance(found, tuple):
            shared.update(found)
            continue
        if isinstance(found, list):
            levels.append(found[::-1])
            continue
        if not isinstance(found, dict):
            continue
        tag = next(iter(found), "")
        if not tag.startswith("!"):
            levels.append(list(found.values())[::-1])
            continue
        kind = tag[1:]
        if kind not in _CONTENTS:
            return f"has {tag[:60]}, which this Outlast does not know; update"
        content = found[tag]
        try:
            fits = _CONTENTS[kind](content)
        except RecursionError:
            fits = False
        if not fits:
            return f"has a {tag} with a content that it cannot have"
        if kind == "tensor" and type(found.get("kind")) is not str:
            return "has a tensor without a kind"
        if kind == "same" and content not in shared:
            return "refers to an object that does not come before"
        if kind == "shared":
            # No JSON is a tuple: the object counts once all within it has been seen.
            levels.append([(content[0],), content[1]])
        elif isinstance(content, list):
            levels.append([found.get("attributes"), *content[::-1]])
    return ""


def tensors_of(value: Json) -> Iterable[str]:
    """Names of the tensors within a JSON value."""
    left = [value]
    while left:
        found = left.pop()
        if isinstance(found, dict):
            name = found.get("!tensor")
            if name is not None:
                yield name
            else:
                left.extend(found.values())
        elif isinstance(found, list):
            left.extend(found)
