"""The byte-plane codec: exact for any bits, small for numbers that training makes."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from outlast.checkpoint.codec import Coder, Compression
from outlast.checkpoint.planes import PlaneCoder, PlanePlan
from outlast.errors import CheckpointError

WORDS = {2: np.uint16, 4: np.uint32}
any_bits = st.sampled_from([2, 4]).flatmap(
    lambda itemsize: arrays.arrays(WORDS[itemsize], st.integers(1, 300))
)


def as_bytes(words: np.ndarray) -> np.ndarray:
    return words.view(np.uint8)


@given(any_bits)
def test_any_bits_come_back(words: np.ndarray) -> None:
    coder = PlaneCoder(words.itemsize)
    raw = as_bytes(words)
    stored = coder.encode(raw, coder.plan(raw))
    assert np.array_equal(coder.decode([stored], raw.size)[0], raw)


@given(any_bits, st.lists(st.booleans(), min_size=4, max_size=4))
def test_a_plan_of_another_tensor_costs_bytes_and_never_bits(
    words: np.ndarray, planes: list[bool]
) -> None:
    coder = PlaneCoder(words.itemsize)
    stored = coder.encode(as_bytes(words), PlanePlan(planes[: words.itemsize]))
    assert np.array_equal(coder.decode([stored], words.nbytes)[0], as_bytes(words))


@pytest.mark.parametrize("kind", ["any", "normal", "sparse"])
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_compiled_code_writes_and_reads_the_bytes_that_numpy_does(
    kind: str, data: st.DataObject
) -> None:
    itemsize = data.draw(st.sampled_from([2, 4]))
    count = data.draw(st.integers(1, 5000))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    words = random.integers(0, 2 ** (8 * itemsize), count, dtype=WORDS[itemsize])
    if kind == "normal":
        words = random.normal(0, 1, count).astype(f"f{itemsize}").view(WORDS[itemsize])
    if kind == "sparse":
        words[random.random(count) < 0.99] = 0
    compiled, plain = PlaneCoder(itemsize), PlaneCoder(itemsize)
    if compiled._compiled is None:
        pytest.skip("no C compiler, or no zstd to call")
    plain._compiled = None
    plan = PlanePlan(data.draw(st.lists(st.booleans(), min_size=itemsize, max_size=itemsize)))
    stored = compiled.encode(as_bytes(words), plan)
    assert stored == plain.encode(as_bytes(words), plan)
    for coder in (compiled, plain):
        assert np.array_equal(coder.decode([stored, stored], words.nbytes)[1], as_bytes(words))


@given(st.binary(max_size=200), st.sampled_from([2, 4]), st.integers(1, 40))
@settings(max_examples=300)
def test_compiled_code_refuses_what_numpy_refuses(
    garbage: bytes, itemsize: int, count: int
) -> None:
    head = bytes([itemsize, 0, 0, 0, 0, 0])
    for stored in (garbage, head + garbage):
        answers = []
        for native in (True, False):
            coder = PlaneCoder(itemsize)
            if not native:
                coder._compiled = None
            try:
                answers.append(coder.decode([stored], count * itemsize).tobytes())
            except Exception as error:
                answers.append(type(error))
        assert answers[0] == answers[1]


@given(any_bits, st.booleans(), st.booleans())
def test_differences_of_earlier_releases_are_read(
    words: np.ndarray, nibbles: bool, compiled: bool
) -> None:
    """Not turned; of their upper halves those below 15 as nibbles, the others in full beside."""
    itemsize = words.itemsize
    words = np.concatenate([words, words & WORDS[itemsize](2**20 - 1 if itemsize == 4 else 15)])
    halves = words.view("<u2").reshape(len(words), -1).T
    parts = [part for half in halves for part in (half.tobytes(), b"")]
    exceptions = 0
    if nibbles:
        others, small = halves[-1][halves[-1] >= 15], np.minimum(halves[-1], 15)
        full = np.concatenate([others & 255, others >> 8]).astype(np.uint8).tobytes()
        parts[-2:] = [(small[::2] | small[1::2] << 4).astype(np.uint8).tobytes(), full]
        exceptions = len(others)
    head = struct.pack(f"<BBI{itemsize}I", itemsize, 2 * nibbles, exceptions, *map(len, parts))
    coder = PlaneCoder(itemsize)
    if not compiled:
        coder._compiled = None
    found = coder.decode([head + b"".join(parts)] * 2, words.nbytes)
    assert np.array_equal(found, [as_bytes(words)] * 2)


@pytest.mark.parametrize("codec", ["auto", "zstd", "lz4", "lz4hc", "zlib", "none"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool", "float8_e5m2"])
def test_every_codec_gives_back_what_it_got(codec: str, dtype: str) -> None:
    itemsize = {"float32": 4, "bfloat16": 2, "int64": 8, "bool": 1, "float8_e5m2": 1}[dtype]
    raw = np.random.default_rng(0).integers(0, 4, 6000 * itemsize, np.uint8)
    coder = Coder(Compression(codec))
    plan = coder.plan(raw, dtype)
    name, stored = coder.encode(raw, itemsize, plan)
    assert np.array_equal(Coder().decode(name, [stored], itemsize, raw.size)[0], raw)
    assert (len(stored) < raw.size) == (codec != "none")


def normal(dtype: type, count: int = 32768) -> np.ndarray:
    return np.random.default_rng(1).normal(0, 0.02, count).astype(dtype)


def test_weights_shrink_by_what_their_exponents_hold() -> None:
    raw = as_bytes(normal(np.float32))
    coder = Coder()
    name, stored = coder.encode(raw, 4, coder.plan(raw, "float32"))
    assert name == "planes"
    # The entropy of a normal's exponent is about 2.6 bits: 24 + 2.6 of 32 bits remain.
    assert 1.18 < raw.size / len(stored) < 1.22


@pytest.mark.parametrize("size", [2, 4, 400])
def test_one_value_over_and_over_is_stored_once(size: int) -> None:
    raw = np.tile(np.array([1, 2], np.uint8), size)
    name, stored = Coder().encode(raw, 2, None)
    assert (name, len(stored)) == ("fill", 2)
    assert np.array_equal(Coder().decode(name, [stored], 2, raw.size)[0], raw)


def test_rows_of_zeros_cost_nearly_nothing() -> None:
    words = normal(np.float32)
    words[: words.size // 2] = 0.0
    coder = Coder()
    plan = coder.plan(as_bytes(words[words.size // 2 :]), "float32")
    _, stored = coder.encode(as_bytes(words), 4, plan)
    assert len(stored) < 0.55 * words.nbytes


@pytest.mark.parametrize("codec", ["planes", "blosc2", "fill", "raw"])
def test_a_wrong_size_is_refused_before_anything_is_written(codec: str) -> None:
    raw = as_bytes(normal(np.float32, 4096))
    coder = Coder(Compression("zstd" if codec == "blosc2" else "auto"))
    if codec == "fill":
        raw = np.zeros(64, np.uint8)
    plan = coder.plan(raw, "float32")
    name, stored = coder.encode(raw, 4, plan)
    if codec == "raw":
        name, stored = "raw", raw.tobytes()
    assert name == codec
    with pytest.raises(CheckpointError):
        coder.decode(name, [stored], 4, raw.size - 2)[0]


def test_an_unknown_codec_is_named() -> None:
    with pytest.raises(CheckpointError, match="'future' is unknown"):
        Coder().decode("future", b"", 4, 0)
    with pytest.raises(CheckpointError, match='compression = "brotli" is unknown'):
        Compression("brotli")
    with pytest.raises(CheckpointError, match="level = 0 must be between"):
        Compression("zstd", 0)
