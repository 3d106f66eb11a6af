"""Codecs and the JSON of values give back exactly what they were given."""

import json
import math
from typing import Any

import blosc2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint import codec
from outlast.checkpoint.codec import Coder, Compression
from outlast.errors import CheckpointError
from outlast.state import values

ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16])


@st.composite
def content(draw: st.DrawFn, copies: int = 1) -> tuple[Any, ...]:
    """An item size and arrays of that many bytes each, random, sparse or constant."""
    itemsize = draw(ITEMSIZES)
    count = draw(st.integers(0, 300))
    arrays = []
    for _ in range(copies):
        random = np.random.default_rng(draw(st.integers(0, 2**32)))
        raw = random.integers(0, 256, (count, itemsize), np.uint8)
        kind = draw(st.sampled_from(["random", "sparse", "constant", "smooth"]))
        if kind == "sparse":
            raw[random.random(count) < 0.9] = 0
        elif kind == "constant" and count:
            raw[:] = raw[0]
        elif kind == "smooth":
            raw[:, 1:] = 7
        arrays.append(raw.reshape(-1))
    return itemsize, *arrays


COMPRESSIONS = [Compression(name) for name in ("auto", "zstd", "lz4", "lz4hc", "zlib", "none")]
TYPES = {1: "float8_e5m2", 2: "bfloat16", 4: "float32", 8: "float64", 16: "complex128"}


@given(content(), st.sampled_from(COMPRESSIONS), st.booleans())
def test_coded_tiles_decode(case: tuple[Any, ...], compression: Compression, planned: bool) -> None:
    itemsize, raw = case
    coder = Coder(compression)
    plan = coder.plan(raw, TYPES[itemsize]) if planned and raw.size else None
    name, stored = coder.encode(raw, itemsize, plan)
    assert len(stored) <= raw.size
    assert np.array_equal(Coder().decode(name, [stored], itemsize, raw.size)[0], raw)
    # What is read from a file lies at any address.
    shifted = memoryview(b"x" + stored)[1:]
    assert np.array_equal(Coder().decode(name, [shifted], itemsize, raw.size)[0], raw)


@given(content(copies=2))
def test_a_plan_made_from_other_content_is_no_error(case: tuple[Any, ...]) -> None:
    itemsize, raw, other = case
    coder = Coder()
    plan = coder.plan(other, TYPES[itemsize]) if other.size else None
    name, stored = coder.encode(raw, itemsize, plan)
    assert np.array_equal(Coder().decode(name, [stored], itemsize, raw.size)[0], raw)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
def test_differences_add_up(itemsize: int) -> None:
    """Of random numbers and of the largest: -3 to 3 are stored as 5, 3, 1, 0, 2, 4 and 6."""
    width = min(itemsize, 8)
    most = 2 ** (8 * width) - 1
    edges = [0, 1, most // 2, most // 2 + 1, most - 1, most]
    random = np.random.default_rng(0).integers(0, most, (2, 60), f"u{width}", endpoint=True)
    raw = np.concatenate([np.repeat(np.array(edges, f"u{width}"), 6), random[0]])
    base = np.concatenate([np.tile(np.array(edges, f"u{width}"), 6), random[1]])
    coded = []
    for one, other in zip(raw.tolist(), base.tolist(), strict=True):
        change = (one - other) % (most + 1)
        coded.append(2 * change if change <= most // 2 else 2 * (most + 1 - change) - 1)
    for delta, difference in (("diff", np.array(coded, f"u{width}")), ("xor", raw ^ base)):
        found = codec.add(delta, *(each.view(np.uint8) for each in (difference, base)), itemsize)
        assert np.array_equal(found, raw.view(np.uint8))


@given(content(), st.sampled_from(COMPRESSIONS), st.integers(0, 5000))
def test_a_length_that_was_not_saved_is_refused(
    case: tuple[Any, ...], compression: Compression, size: int
) -> None:
    itemsize, raw = case
    coder = Coder(compression)
    plan = coder.plan(raw, TYPES[itemsize]) if raw.size else None
    name, stored = coder.encode(raw, itemsize, plan)
    # A constant is stored without its length.
    if name != codec.FILL and size != raw.size:
        with pytest.raises(CheckpointError):
            coder.decode(name, [stored], itemsize, size)[0]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"codec": "brotli"}, 'compression = "brotli" is unknown'),
        ({"level": 0}, "level = 0"),
        ({"level": 10}, "level = 10"),
    ],
)
def test_an_unknown_compression_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        Compression(**settings)


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(CheckpointError, match="'future' is unknown"):
        Coder().decode("future", b"abcd", 4, 4)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.complex_numbers(),
    st.floats(width=32).map(np.float32),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
)
KEYS = st.one_of(
    st.text(max_size=3),
    st.sampled_from(["!tensor", "!dict", "kind", "key", "a.b", "a", "0", "1"]),
    st.integers(-2, 2),
    st.none(),
    st.tuples(st.integers(0, 1), st.text(max_size=1)),
    st.integers(-2, 2).map(np.int32),
)
VALUES = st.recursive(
    SCALARS | st.lists(st.integers(-9, 9), max_size=4).map(lambda each: np.array(each, np.int16)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.frozensets(st.integers(), max_size=4),
        st.sets(st.text(), max_size=4),
    ),
    max_leaves=12,
)


def written_and_read(value: Any) -> Any:
    """Encode, dump, load and decode, with a store for tensors that refuses to overwrite."""
    tensors: dict[str, Any] = {}

    def put(path: str, each: Any) -> str | None:
        if not isinstance(each, np.ndarray):
            return None
        assert path not in tensors, f"two arrays have the name {path}"
        tensors[path] = each
        return "numpy"

    text = json.dumps(values.encode(value, "data", put), allow_nan=False)
    return values.decode(json.loads(text), lambda name, _: tensors[name])


def same(one: Any, other: Any) -> bool:
    """Equal in type and value, where NaN equals NaN and -0.0 is not 0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (np.generic, np.ndarray)):
        return bool(one.dtype == other.dtype and one.tobytes() == other.tobytes())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one), list(other)) and same(list(one.values()), list(other.values()))
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return repr(one) == repr(other) or one == other


@given(VALUES)
def test_values_come_back_through_json(value: Any) -> None:
    assert same(written_and_read(value), value)


@pytest.mark.parametrize(
    "value",
    [
        {1: np.array([1]), "1": np.array([2])},
        {"a": {"b": np.array([1])}, "a.b": np.array([2])},
        {np.int64(1): "one", np.int64(2): "two"},
        {"key": np.array([1]), np.int64(2): "two"},
        {(np.int64(1), 0): "one", (np.int64(2), 0): "two"},
    ],
    ids=["number and text", "dots", "array keys", "a key named key", "tuples of array keys"],
)
def test_arrays_below_different_keys_have_different_names(value: Any) -> None:
    assert same(written_and_read(value), value)


@pytest.mark.parametrize("value", [object(), {"a": {1: object()}}, [{"b": (object(),)}]])
def test_an_object_is_refused_by_its_path(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"`data.*` is of type object"):
        written_and_read(value)


def _decoded_again(name: str, stored: bytes, raw: Any) -> bool:
    return bool((Coder().decode(name, [stored], 8, raw.size) == raw).all())


@pytest.mark.slow
def test_a_process_that_was_forked_decodes_what_its_parent_decoded(ranks: Any) -> None:
    raw = np.random.default_rng(0).integers(0, 50_000, 1_000_000).view(np.uint8)
    name, stored = Coder().encode(raw, 8, None)
    assert name == "blosc2"
    # Leaves blosc2's threads in this process, as any user of it may.
    numbers = blosc2.asarray(np.arange(10_000_000))
    assert numbers[:][-1] == 9_999_999
    assert ranks(2)(_decoded_again, name, stored, raw) == [True, True]
