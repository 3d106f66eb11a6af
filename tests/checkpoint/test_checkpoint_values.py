"""Every value comes back with its bits and its type, or is refused by its path at the save."""

import collections
import datetime
import enum
import json
import math
import pathlib
import struct
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from checkpoint_states import Holder, open_store
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from outlast.checkpoint import Bound, Reduction
from outlast.errors import CheckpointError
from outlast.state import values


def through(value: Any) -> Any:
    """`value` as JSON text and back, its tensors beside it."""
    tensors: dict[str, Any] = {}

    def put(name: str, found: Any) -> str | None:
        if not isinstance(found, (torch.Tensor, np.ndarray)):
            return None
        assert name not in tensors
        tensors[name] = found
        return "torch" if isinstance(found, torch.Tensor) else "numpy"

    tree = json.loads(json.dumps(values.encode(value, "state", put), allow_nan=False))
    return values.decode(tree, lambda name, _: tensors[name])


def through_store(place: Path, value: Any) -> Any:
    with open_store(place) as store:
        store.save(1, {"data": Holder({"value": value})})
        found = Holder()
        store.restore({"data": found})
    return found.state["value"]


def same(a: Any, b: Any) -> bool:
    """Equal, with equal types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, Decimal):
        return repr(a) == repr(b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        order = not isinstance(a, OrderedDict) or [*map(repr, a)] == [*map(repr, b)]
        return order and len(a) == len(b) and all(map(same, a.items(), b.items()))
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (set, frozenset)):
        return all(map(same, sorted(a, key=repr), sorted(b, key=repr))) and len(a) == len(b)
    return bool(a == b)


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**1200), 10**1200).filter(lambda n: n.bit_length() > 60)
    | st.floats(width=64)
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.binary().map(bytearray)
    | st.datetimes().filter(lambda when: not when.fold)
    | st.datetimes(timezones=st.just(datetime.UTC)).filter(lambda when: not when.fold)
    | st.dates()
    | st.times().filter(lambda when: not when.fold)
    | st.timedeltas()
    | st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23)).map(
        datetime.timezone
    )
    | st.decimals()
    | st.fractions()
    | st.sampled_from([torch.float8_e4m3fn, torch.int64, torch.strided, torch.channels_last])
    | st.sampled_from([torch.device("cpu"), torch.device("cuda", 3), torch.Size([2, 0])])
    | st.sampled_from([pathlib.Path("/a/b"), pathlib.PurePosixPath("x"), range(2, 9, 3)])
)
keys = st.text() | st.booleans() | st.integers() | st.tuples(st.integers(), st.text()) | st.none()
trees = st.recursive(
    leaves,
    lambda child: (
        st.lists(child, max_size=4)
        | st.lists(child, max_size=4).map(tuple)
        | st.lists(child, max_size=4).map(lambda items: deque(items, 7))
        | st.dictionaries(keys, child, max_size=4)
        | st.dictionaries(keys, child, max_size=4).map(OrderedDict)
        | st.dictionaries(keys, child, max_size=4).map(lambda d: defaultdict(list, d))
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=4)
    ),
    max_leaves=12,
)


@given(trees)
def test_every_value_comes_back_with_its_type(value: Any) -> None:
    assert same(through(value), value)


@given(trees)
def test_what_is_written_is_what_is_known_to_be_readable(value: Any) -> None:
    tree = values.encode(value, "state", lambda *_: None)
    assert values.problem_of(json.loads(json.dumps(tree))) == ""


class Colour(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


class Words(dict):
    pass


class Row(list):
    pass


class Text(str):
    pass


class Whole(int):
    pass


class Real(float):
    pass


class Raw(bytes):
    pass


class Tagged(torch.Tensor):
    pass


Point = collections.namedtuple("Point", "x y")


class Pair(NamedTuple):
    left: Any
    right: Any


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Word(enum.StrEnum):
    A = "a"


def local_classes() -> list[Any]:
    """Values whose classes no module has under their names."""
    hidden = collections.namedtuple("hidden", "x")
    return [hidden(1), enum.Enum("Hidden", "A").A]


ZONE = datetime.timezone(datetime.timedelta(hours=-3, seconds=1))


@pytest.mark.parametrize(
    "value",
    [
        *(Colour.RED, Number.ONE, Word.A, Access.READ, Access.READ | Access.WRITE, Access(0)),
        *(Point(1, [2]), Pair({"a": Colour.RED}, Point(1.0, (2,))), {Point(1, 2): Pair(1, 2)}),
        *({Colour.RED: 1, Access.WRITE: 2}, Decimal("1.10"), Decimal("-0"), Decimal("NaN7")),
        *(Fraction(-1, 3), datetime.UTC, ZONE, datetime.datetime(2026, 1, 1, tzinfo=ZONE)),
        datetime.time(3, tzinfo=ZONE),
    ],
    ids=repr,
)
def test_values_of_the_programs_own_classes_come_back(tmp_path: Path, value: Any) -> None:
    shared = [value, value]
    assert same(through_store(tmp_path, shared), shared)


@pytest.mark.parametrize(
    "dtype",
    [
        *(">i4", ">f8", ">c8", "M8[D]", "M8[25s]", "m8[ns]", "U3", ">U2", "S2", "V3", "g", "G"),
        *([("a", "i4"), ("b", ">f8", (2, 3))], [("a", [("x", "i2"), ("y", "U2")]), ("b", "?")]),
        *("f2", "?", "u2", "u4", "u8", "c16", "i1"),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (3, 2)], ids=str)
def test_arrays_of_every_element_type_come_back(
    tmp_path: Path, dtype: Any, shape: tuple[int, ...]
) -> None:
    kind = np.dtype(dtype)
    content = np.zeros(math.prod(shape) * kind.itemsize, np.uint8)
    content[:: kind.itemsize] = 1
    array = content.view(kind).reshape(shape)
    given_ = {"array": array, "turned": array.T, "again": array}
    found = through_store(tmp_path, given_)
    for name, item in given_.items():
        assert type(found[name]) is type(item)
        assert found[name].dtype == item.dtype
        assert found[name].shape == item.shape
        assert found[name].tobytes() == item.tobytes()


@pytest.mark.parametrize(
    "scalar",
    [
        *(np.longdouble(1) / 3, np.clongdouble(1j) / 3, np.float16(0.1), np.uint64(2**64 - 1)),
        *(np.str_("a\u00e9"), np.str_(""), np.bytes_(b"a"), np.void(b"ab"), np.bool_(True)),
        *(np.datetime64("2026-01-01"), np.datetime64("NaT"), np.timedelta64(3, "ms")),
    ],
    ids=repr,
)
def test_scalars_of_every_element_type_come_back(tmp_path: Path, scalar: Any) -> None:
    found = through_store(tmp_path, scalar)
    assert type(found) is type(scalar)
    assert found.dtype == scalar.dtype
    assert found == scalar or np.isnat(found)


def test_a_class_that_has_gone_is_named_and_nothing_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "outlast_class_that_goes"
    module = types.ModuleType(name)
    (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, name, module)
    module.Row = collections.namedtuple("Row", "x y", module=name)  # type: ignore[attr-defined]
    with open_store(tmp_path / "store") as store:
        store.save(1, {"data": Holder(module.Row(1, 2))})
        module.Row = collections.namedtuple("Row", "x z", module=name)  # type: ignore[attr-defined]
        with pytest.raises(CheckpointError, match=rf"class {name}:Row with the fields x, y"):
            store.restore({"data": Holder()})
        monkeypatch.delitem(sys.modules, name)
        with pytest.raises(CheckpointError, match="import or define it"):
            store.restore({"data": Holder()})


@pytest.mark.parametrize(
    "name", ["os:system", "builtins:int", "nowhere:Thing", "json", ":", "enum:Enum.__members__"]
)
def test_a_file_names_no_other_classes(name: str) -> None:
    for tree in ({"!enum": [name, "A"]}, {"!flag": [name, 1]}, {"!namedtuple": [name, [], []]}):
        with pytest.raises(CheckpointError, match="which the program has not"):
            values.decode(tree, lambda *_: None)


@pytest.mark.parametrize(
    "content",
    [
        *(["O", [1]], ["|O8", [1]], [[["a", "|O8"]], [1]], ["<U0", [1]], ["<i4", [-1]], ["<i4", 1]),
        *(["<f16(", [1]], [["a"], [1]], ["i4,i4", [1]], [[[["a"] * 3000, "<i4"]], [1]], [1, [1]]),
    ],
    ids=lambda content: str(content)[:20],
)
def test_malformed_arrays_are_refused(content: Any) -> None:
    tree = {"!array": [*content, {"!tensor": "x", "kind": "numpy"}]}
    with pytest.raises(CheckpointError):
        values.decode(tree, lambda *_: np.zeros(4, np.uint8))


@pytest.mark.parametrize(
    "value",
    [
        *(Words(a=1), Row([1]), Text("a"), Whole(1), Real(1.0), Raw(b"a"), *local_classes()),
        *(types.MappingProxyType({}), memoryview(b"a"), types.SimpleNamespace(), pathlib),
        *(collections.UserDict(), collections.ChainMap(), object(), int, len, lambda: 1, ...),
        *(defaultdict(lambda: 0), np.dtype("i4"), np.random.default_rng(1), torch.Generator()),
        *(np.ma.masked_array([1]), np.rec.array([(1,)]), np.array([None]), Access, iter(())),
        *(torch.zeros(2).as_subclass(Tagged), nn.UninitializedParameter(), nn.Linear(1, 1)),
        np.zeros(1, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
        *(torch.zeros(2, 2).to_sparse(), torch.zeros(2, 2).to_sparse_csr()),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        torch.empty(2, device="meta"),
        datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=1), "X")),
        datetime.datetime(2026, 1, 1, fold=1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_come_back_is_refused_by_its_path(tmp_path: Path, value: Any) -> None:
    with open_store(tmp_path) as store:
        state = {"data": Holder({"value": [{"deep": value}]})}
        sentences = []
        for refuse in (store.check, lambda found: store.save_async(1, found)):
            with pytest.raises(CheckpointError, match=r"`data\.value\.0\.deep`.*; .*") as refused:
                refuse(state)
            sentences.append(str(refused.value))
        assert sentences[0] == sentences[1]
        assert "\n" not in sentences[0]
        store.save(2, {"data": Holder({"value": 1})})


def test_check_writes_nothing_and_sees_every_part(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    with open_store(
        tmp_path / "store", reduction=Reduction(lossy={"*ids": Bound(relative=0.1)})
    ) as store:
        store.check(state)
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
        optimizer.param_groups[0]["schedule"] = lambda: 1
        with pytest.raises(CheckpointError, match=r"`optimizer\.groups\.weight\.schedule`"):
            store.check(state)
        del optimizer.param_groups[0]["schedule"]
        model.register_buffer("ids", torch.zeros(2, dtype=torch.int64))
        with pytest.raises(CheckpointError, match=r'lossy = "\*ids" takes in `model\.ids`'):
            store.check(state)
        del model.ids
        model.late = nn.LazyLinear(2)
        with pytest.raises(CheckpointError, match=r"`model\.late\.weight`: .* one forward pass"):
            store.check(state)
        del model.late
        store.check(state)
        assert store.save(1, state).error is None


def test_deep_and_cyclic_values_are_refused_by_their_path(tmp_path: Path) -> None:
    cyclic: list[Any] = [1]
    cyclic.append({"again": cyclic})
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    doubling: Any = (1,)
    for _ in range(60):
        doubling = (doubling, doubling)
    refused = (
        (cyclic, "contains itself"),
        (deep, "nested deeper than 100"),
        (doubling, "put them in lists"),
    )
    with open_store(tmp_path) as store:
        for value, words in refused:
            with pytest.raises(CheckpointError, match=rf"`data\.value\.[^`]*` .*{words}"):
                store.save_async(1, {"data": Holder({"value": value})})
    layers: Any = 1
    for number in range(values.MAX_DEPTH - 1):
        layers = [{(number,): layers}, (layers,), deque([layers])][number % 3]
    assert same(through(layers), layers)


def test_what_is_shared_is_shared_again(tmp_path: Path) -> None:
    shared = [1, 2]
    words = {"a": shared}
    tensor = torch.arange(3.0)
    value = {"x": shared, "y": (shared, words), "z": deque([words]), "t": tensor, "u": [tensor]}
    found = through_store(tmp_path, value)
    assert found["x"] is found["y"][0] is found["y"][1]["a"]
    assert found["z"][0] is found["y"][1]
    assert found["t"] is found["u"][0]
    assert found["x"] == [1, 2]


def test_bytes_and_bytearrays_are_told_apart(tmp_path: Path) -> None:
    found = through_store(tmp_path, [bytearray(b"ab"), b"ab", bytearray()])
    assert [type(each) for each in found] == [bytearray, bytes, bytearray]
    assert found == [b"ab", b"ab", b""]


def test_containers_keep_what_belongs_to_them(tmp_path: Path) -> None:
    ordered = OrderedDict([("b", 1), ("a", 2)])
    ordered._metadata = OrderedDict({"": {"version": 2}})  # type: ignore[attr-defined]
    given_ = [ordered, Counter("aab"), defaultdict(int, x=1), deque([1, 2], maxlen=2), {True: 1}]
    found = through_store(tmp_path, given_)
    assert all(map(same, found, given_))
    assert found[0]._metadata == {"": {"version": 2}}
    assert found[2]["new"] == 0
    assert found[3].maxlen == 2
    assert next(iter(found[4])) is True


def test_tensors_keep_what_is_said_of_them(tmp_path: Path) -> None:
    found = through_store(
        tmp_path,
        {
            "parameter": nn.Parameter(torch.ones(2)),
            "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
            "leaf": torch.ones(2, requires_grad=True),
            "plain": torch.ones(2),
            "scalar": np.float32(0.1),
            "bool": np.bool_(True),
            "array": np.arange(3, dtype=np.uint16),
            "point": np.array(3.0),
        },
    )
    assert type(found["parameter"]) is type(found["frozen"]) is nn.Parameter
    assert [found[n].requires_grad for n in ("parameter", "frozen", "leaf", "plain")] == [
        True,
        False,
        True,
        False,
    ]
    assert type(found["plain"]) is torch.Tensor
    assert type(found["scalar"]) is np.float32
    assert type(found["bool"]) is np.bool_
    assert found["array"].dtype == np.uint16
    assert type(found["point"]) is np.ndarray


def test_a_nan_keeps_its_bits() -> None:
    for bits in (0x7FF8000000000000, 0xFFF8000000000000, 0x7FF8000000000123):
        value = struct.unpack("<d", struct.pack("<Q", bits))[0]
        assert struct.pack("<d", through(value)) == struct.pack("<Q", bits)
    assert math.copysign(1.0, through(-0.0)) == -1.0
