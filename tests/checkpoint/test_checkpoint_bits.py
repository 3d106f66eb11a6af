"""Every type, shape and memory layout comes back with the bits it was saved with."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_states import Holder, open_store, restore_step, save_once
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from outlast.checkpoint import CheckpointStore, Compression, Reduction, manifest

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

_NAMES = [
    "float64 float32 float16 bfloat16 complex32 complex64 complex128 bool",
    "uint8 uint16 uint32 uint64 int8 int16 int32 int64 bits8 bits16",
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2",
]
DTYPES = [getattr(torch, name) for name in " ".join(_NAMES).split() if getattr(torch, name, None)]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
SMALL_TILE_BYTES = 16


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bits: NaN payloads, infinities, denormals, negative zeros."""
    content = np.random.default_rng(seed).integers(
        0, 2 if dtype == torch.bool else 256, int(np.prod(shape)) * dtype.itemsize, np.uint8
    )
    tensor = torch.empty(shape, dtype=dtype)
    memory_of(tensor).copy_(torch.from_numpy(content))
    return tensor


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bytes_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Type, shape and the bytes of each element in row-major order, whatever the layout."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.numel() == 0:
        return tensor.dtype, tuple(tensor.shape), b""
    if plain.dtype == torch.complex128:
        plain = torch.view_as_real(plain)
    integers = plain.view(_INTEGERS[plain.element_size()])
    return tensor.dtype, tuple(tensor.shape), integers.contiguous().numpy().tobytes()


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the memory below a tensor."""
    return torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.permute(tuple(range(tensor.ndim))[::-1]),
    "strided": lambda tensor: tensor[..., ::2] if tensor.ndim else tensor,
    "offset": lambda tensor: tensor[1:] if tensor.ndim else tensor,
    "inner": lambda tensor: tensor[..., 1:] if tensor.ndim else tensor,
}


def module_of(**tensors: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_type_and_layout_comes_back(tmp_path: Path, dtype: torch.dtype, layout: str) -> None:
    tensors = {
        f"x{number}": LAYOUTS[layout](random_bits(dtype, shape, number))
        for number, shape in enumerate([(), (0,), (3, 0), (7,), (5, 6), (2, 3, 4)])
    }
    expected = {name: bytes_of(tensor) for name, tensor in tensors.items()}
    save_once(tmp_path, 1, {"model": module_of(**tensors)})
    for tensor in tensors.values():
        memory_of(tensor).fill_(1)
    restore_step(tmp_path, {"model": module_of(**tensors)})
    assert {name: bytes_of(tensor) for name, tensor in tensors.items()} == expected
    fresh = {name: torch.empty(tensor.shape, dtype=dtype) for name, tensor in tensors.items()}
    restore_step(tmp_path, {"model": module_of(**fresh)})
    assert {name: bytes_of(tensor) for name, tensor in fresh.items()} == expected


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=SHAPES,
    layout=st.sampled_from(sorted(LAYOUTS)),
    changes=st.lists(st.sampled_from(["all", "some", "none"]), max_size=5),
    compression=st.sampled_from(["auto", "zstd", "lz4", "none"]),
    seed=st.integers(0, 2**31),
)
def test_versions_of_many_small_tiles_come_back(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    layout: str,
    changes: list[str],
    compression: str,
    seed: int,
) -> None:
    directory = tmp_path_factory.mktemp("store")
    memory = random_bits(dtype, shape, seed)
    tensor = LAYOUTS[layout](memory)
    reduction = Reduction(Compression(compression))
    expected = []
    small = manifest.grid
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "grid", lambda *facts: small(*facts, SMALL_TILE_BYTES))
        with open_store(directory, keep=9, reduction=reduction) as store:
            for step, change in enumerate(["all", *changes]):
                new = random_bits(dtype, shape, seed + step + 1)
                source, target = (memory_of(each) for each in (new, memory))
                count = {"all": len(target), "some": min(3, len(target)), "none": 0}[change]
                target[:count] = source[:count]
                store.save(step, {"model": module_of(x=tensor)})
                expected.append(bytes_of(tensor))
    for step, content in enumerate(expected):
        fresh = torch.empty(tensor.shape, dtype=dtype)
        restore_step(directory, {"model": module_of(x=fresh)}, step=step)
        assert bytes_of(fresh) == content


@pytest.mark.distributed
def test_the_writer_process_keeps_every_bit(tmp_path: Path) -> None:
    tensors = {str(dtype).replace(".", "_"): random_bits(dtype, (300, 7), 5).T for dtype in DTYPES}
    expected = []
    with CheckpointStore(tmp_path) as store:
        for step in range(1, 4):
            for tensor in tensors.values():
                memory_of(tensor)[:: 7 * step] ^= 1
            store.save(step, {"model": module_of(**tensors)})
            expected.append({name: bytes_of(tensor) for name, tensor in tensors.items()})
    for step in range(1, 4):
        restore_step(tmp_path, {"model": module_of(**tensors)}, step=step)
        assert {name: bytes_of(tensor) for name, tensor in tensors.items()} == expected[step - 1]


def test_tensors_of_many_tiles_come_back(tmp_path: Path) -> None:
    tensors = {
        "rows": random_bits(torch.float32, (701, 130), 1),
        "columns": random_bits(torch.bfloat16, (130, 1501), 2).T,
        "cube": random_bits(torch.complex128, (17, 19, 67), 3),
        "line": random_bits(torch.int8, (400_003,), 4),
    }
    with open_store(tmp_path) as store:
        for step in range(1, 4):
            for tensor in tensors.values():
                memory_of(tensor)[:: 1000 * step] += 1
            store.save(step, {"model": module_of(**tensors)})
    expected = {name: bytes_of(tensor) for name, tensor in tensors.items()}
    fresh = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in tensors.items()}
    restore_step(tmp_path, {"model": module_of(**fresh)})
    assert {name: bytes_of(tensor) for name, tensor in fresh.items()} == expected


def test_conjugate_and_negative_views_come_back(tmp_path: Path) -> None:
    conjugate = random_bits(torch.complex64, (3, 2), 1).nan_to_num()
    negative = random_bits(torch.complex64, (5,), 2).nan_to_num()
    saved = module_of(conjugate=conjugate.conj(), negative=negative.conj().imag)
    expected = {name: bytes_of(each) for name, each in saved.named_buffers()}
    save_once(tmp_path, 1, {"model": saved})
    conjugate.zero_()
    negative.zero_()
    restore_step(tmp_path, {"model": saved})
    assert {name: bytes_of(each) for name, each in saved.named_buffers()} == expected


def test_a_tensor_and_its_conjugate_view_both_come_back(tmp_path: Path) -> None:
    base = torch.tensor([1 + 2j, 3 - 4j])
    save_once(tmp_path, 1, {"data": Holder({"base": base, "conjugate": base.conj()})})
    found = Holder()
    restore_step(tmp_path, {"data": found})
    assert torch.equal(found.state["base"], base)
    assert torch.equal(found.state["conjugate"], base.conj().resolve_conj())


def test_an_expanded_tensor_comes_back(tmp_path: Path) -> None:
    row = torch.tensor([1.0, 2.0, 3.0])
    module = module_of(row=row.expand(4, 3))
    save_once(tmp_path, 1, {"model": module})
    fresh = module_of(row=torch.zeros(4, 3))
    restore_step(tmp_path, {"model": fresh})
    assert torch.equal(fresh.row, row.expand(4, 3))
    row.zero_()
    restore_step(tmp_path, {"model": module})
    assert torch.equal(module.row, fresh.row)


def test_one_element_of_a_strided_view_comes_back(tmp_path: Path) -> None:
    save_once(tmp_path, 1, {"model": module_of(x=torch.tensor([5.0]))})
    view = torch.arange(4.0)[::4]
    restore_step(tmp_path, {"model": module_of(x=view)})
    assert view.item() == 5.0
    save_once(tmp_path, 2, {"model": module_of(x=torch.arange(9.0)[3::7])})
    assert restore_step(tmp_path, {"model": module_of(x=view)}) == 2
    assert view.item() == 3.0


def test_aliased_views_of_other_shapes_and_types_come_back(tmp_path: Path) -> None:
    counts = torch.arange(400, dtype=torch.int64) * 1_000_003
    views = {
        "all": counts,
        "same": counts.view(20, 20),
        "bytes": counts.view(torch.uint8),
        "halves": counts.view(torch.int16),
        "tail": counts[100:],
        "every": counts[::3],
    }
    with open_store(tmp_path) as store:
        for step in range(1, 4):
            counts += 1
            store.save(step, {"data": Holder(views)})
    expected = {name: bytes_of(view) for name, view in views.items()}
    found = Holder()
    assert restore_step(tmp_path, {"data": found}) == 3
    assert {name: bytes_of(view) for name, view in found.state.items()} == expected


def test_empty_tensors_come_back_from_a_later_version(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for step in range(1, 5):
            state = {"empty": torch.empty(0, 3), "other": torch.full((9,), float(step))}
            store.save(step, {"data": Holder(state)})
    found = Holder()
    assert restore_step(tmp_path, {"data": found}) == 4
    assert found.state["empty"].shape == (0, 3)


def test_a_copy_is_made_of_what_the_state_dict_returns(tmp_path: Path) -> None:
    state = {"x": torch.arange(5), "y": np.arange(5)}
    before = copy.deepcopy(state)
    with open_store(tmp_path) as store:
        handle = store.save_async(1, {"data": Holder(state)})
        state["x"].zero_()
        state["y"][:] = 0
        handle.wait()
    found = Holder()
    restore_step(tmp_path, {"data": found})
    assert torch.equal(found.state["x"], before["x"])
    assert np.array_equal(found.state["y"], before["y"])
