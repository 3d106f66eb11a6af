"""Boxes written by any partition over ranks are read by any other, bit for bit."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.checkpoint import Compression, Reduction, Version, load, storage_of
from outlast.checkpoint.compiled import CompiledTiles
from outlast.checkpoint.encoder import AbandonedError, Encoder, PartJob, StagedPiece, Written
from outlast.checkpoint.manifest import Catalogue, TensorFacts, grid, tiles
from outlast.checkpoint.reader import VersionReader, Wanted
from outlast.errors import CheckpointError
from outlast.state.box import Box, whole

TYPES = {"uint8": 1, "bfloat16": 2, "float32": 4, "int64": 8, "complex128": 16}


@dataclass
class Case:
    """A global array, its facts, and which rank writes which box."""

    facts: TensorFacts
    array: Any
    boxes: list[list[Box]]

    @property
    def catalogue(self) -> Catalogue:
        return Catalogue({"x": self.facts})


def random_array(shape: tuple[int, ...], itemsize: int, seed: int) -> Any:
    raw = np.random.default_rng(seed).integers(0, 4, (*shape, itemsize), np.uint8)
    return raw.view(f"V{itemsize}").reshape(shape)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = draw(st.lists(st.integers(1, 12), max_size=3).map(tuple))
    dtype = draw(st.sampled_from(sorted(TYPES)))
    tile_bytes = draw(st.sampled_from([1, 40, 200, 128 << 10]))
    facts = TensorFacts(dtype, shape, grid(shape, TYPES[dtype], tile_bytes))
    cuts = tuple(draw(st.integers(1, max(extent, 1))) for extent in shape)
    world_size = draw(st.integers(1, 4))
    boxes: list[list[Box]] = [[] for _ in range(world_size)]
    for box in tiles(whole(shape), cuts):
        # Some boxes are written by more than one rank.
        for rank in draw(st.sets(st.integers(0, world_size - 1), min_size=1, max_size=2)):
            boxes[rank].append(box)
    array = random_array(shape, TYPES[dtype], draw(st.integers(0, 2**32)))
    return Case(facts, array, boxes)


def write(encoders: list[Encoder], arenas: list[bytearray], case: Case, step: int) -> list[Written]:
    """Every rank writes its boxes of ``case.array`` as the version of `step`."""
    results = []
    for rank, boxes in enumerate(case.boxes):
        pieces, start = [], 0
        memory = np.frombuffer(arenas[rank], np.uint8)
        for box in boxes:
            content = np.ascontiguousarray(case.array[box.within(whole(case.facts.shape))])
            raw = np.frombuffer(content.tobytes(), np.uint8)
            memory[start : start + raw.size] = raw
            pieces.append(StagedPiece("x", box, start))
            start += -(-raw.size // 64) * 64
        job = PartJob(Version(1, step), rank, len(case.boxes), case.catalogue, pieces)
        results.append(encoders[rank].write(job, lambda: None))
    return results


def encoders_for(
    directory: Path, case: Case, reduction: Reduction
) -> tuple[list[Encoder], list[bytearray]]:
    size = sum(-(-box.elements * case.facts.itemsize // 64) * 64 for box in case.boxes[0])
    size = max(size, 64 * case.array.size * case.facts.itemsize + 64)
    arenas = [bytearray(size) for _ in case.boxes]
    storage = storage_of(directory)
    return [Encoder(storage, reduction, memoryview(arena)) for arena in arenas], arenas


def read_box(reader: VersionReader, box: Box, itemsize: int) -> Any:
    out = np.zeros(box.shape, f"V{itemsize}")
    reader.read([Wanted("x", box, out)])
    return out


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(case=cases(), data=st.data(), compression=st.sampled_from(["auto", "zstd", "lz4", "none"]))
def test_any_box_is_the_slice_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, case: Case, data: st.DataObject, compression: str
) -> None:
    directory = tmp_path_factory.mktemp("store")
    encoders, arenas = encoders_for(directory, case, Reduction(Compression(compression)))
    write(encoders, arenas, case, 1)
    contents = load(storage_of(directory), Version(1, 1))
    everything = whole(case.facts.shape)
    with VersionReader(storage_of(directory), contents) as reader:
        for _ in range(3):
            first = [data.draw(st.integers(0, extent)) for extent in case.facts.shape]
            extent = [
                data.draw(st.integers(0, last - begin))
                for begin, last in zip(first, case.facts.shape, strict=True)
            ]
            box = Box(tuple(first), tuple(extent))
            found = read_box(reader, box, case.facts.itemsize)
            assert found.tobytes() == case.array[box.within(everything)].tobytes()
        counted = np.zeros(case.facts.shape, int)
        for part in reader.contents.parts:
            for tile, _ in part.tiles("x", case.facts):
                counted[tile.within(everything)] += 1
        assert counted.min() >= 1
        assert reader.check() >= 1


@st.composite
def strided(draw: st.DrawFn, shape: tuple[int, ...], itemsize: int) -> Any:
    """Zeros of a shape, in memory with gaps and turned dimensions."""
    order = draw(st.permutations(range(len(shape))))
    gaps = [draw(st.integers(1, 2)) for _ in shape]
    whole_shape = [shape[number] * gap for number, gap in zip(order, gaps, strict=True)]
    memory = np.zeros(whole_shape, f"V{itemsize}")[tuple(slice(None, None, gap) for gap in gaps)]
    return memory.transpose(np.argsort(order)) if shape else np.zeros((), f"V{itemsize}")


@settings(max_examples=80, deadline=None)
@given(data=st.data(), compression=st.sampled_from(["auto", "zstd", "none"]))
def test_compiled_code_and_numpy_write_the_same_files_and_read_the_same_boxes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, compression: str
) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), max_size=5).map(tuple))
    dtype = data.draw(st.sampled_from(sorted(TYPES)))
    facts = TensorFacts(
        dtype, shape, grid(shape, TYPES[dtype], data.draw(st.sampled_from([40, 9000])))
    )
    case = Case(facts, random_array(shape, TYPES[dtype], 0), [[whole(shape)]])
    if data.draw(st.booleans()):
        case.array[...] = case.array.reshape(-1)[0]
    stored = {}
    with pytest.MonkeyPatch.context() as patch:
        for compiled in (True, False):
            if not compiled:
                patch.setattr(CompiledTiles, "new", lambda: None)
            directory = tmp_path_factory.mktemp("store")
            reduction = Reduction(Compression(compression))
            write(*encoders_for(directory, case, reduction), case, 1)
            files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
            stored[compiled] = {path.name: path.read_bytes() for path in files}
    assert stored[True] == stored[False]
    first = [data.draw(st.integers(0, extent - 1)) for extent in shape]
    extents = [
        data.draw(st.integers(1, extent - start))
        for start, extent in zip(first, shape, strict=True)
    ]
    box = Box(tuple(first), tuple(extents))
    storage = storage_of(directory)
    for compiled in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not compiled:
                patch.setattr(CompiledTiles, "new", lambda: None)
            out = data.draw(strided(box.shape, facts.itemsize))
            with VersionReader(storage, load(storage, Version(1, 1))) as reader:
                reader.read([Wanted("x", box, out)])
        assert out.tobytes() == case.array[box.within(whole(shape))].tobytes()
    # A changed byte is noticed, unless the content is right all the same.
    [pack] = [name for name in stored[True] if name.endswith(".pack")]
    changed = bytearray(stored[True][pack])
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    next(directory.rglob(pack)).write_bytes(changed)
    out, problem = np.zeros(shape, f"V{facts.itemsize}"), ""
    with VersionReader(storage, load(storage, Version(1, 1))) as reader:
        try:
            reader.read([Wanted("x", whole(shape), out)])
        except CheckpointError as error:
            problem = str(error)
    assert "is damaged at byte" in problem or out.tobytes() == case.array.tobytes()


@settings(max_examples=30, deadline=None)
@given(case=cases(), seeds=st.lists(st.integers(0, 9), max_size=5))
def test_every_version_that_refers_to_older_ones_is_read(
    tmp_path_factory: pytest.TempPathFactory, case: Case, seeds: list[int]
) -> None:
    directory = tmp_path_factory.mktemp("store")
    encoders, arenas = encoders_for(directory, case, Reduction())
    versions = []
    for step, seed in enumerate([0, *seeds]):
        changed = random_array(case.facts.shape, case.facts.itemsize, seed)
        where = np.random.default_rng(seed).random(case.facts.shape) < 0.3
        case.array = np.where(where, changed, case.array).view(case.array.dtype)
        versions.append(case.array.copy())
        write(encoders, arenas, case, step)
    for step, expected in enumerate(versions):
        contents = load(storage_of(directory), Version(1, step))
        with VersionReader(storage_of(directory), contents) as reader:
            found = read_box(reader, whole(case.facts.shape), case.facts.itemsize)
        assert found.tobytes() == expected.tobytes()


def test_an_array_of_other_strides_is_filled_in_place(tmp_path: Path) -> None:
    facts = TensorFacts.of("float32", (6, 8))
    array = random_array((6, 8), 4, 1)
    case = Case(facts, array, [[whole((6, 8))]])
    encoders, arenas = encoders_for(tmp_path, case, Reduction())
    write(encoders, arenas, case, 1)
    out = np.zeros((8, 12), "u4")
    with VersionReader(storage_of(tmp_path), load(storage_of(tmp_path), Version(1, 1))) as reader:
        reader.read([Wanted("x", Box((1, 2), (4, 5)), out.T[2:10:2, :5])])
    assert np.array_equal(out.T[2:10:2, :5], array.view("u4")[1:5, 2:7])
    assert np.count_nonzero(out) == np.count_nonzero(out.T[2:10:2, :5])


def test_a_version_with_a_part_missing_is_incomplete(tmp_path: Path) -> None:
    facts = TensorFacts.of("float32", (6,))
    case = Case(facts, random_array((6,), 4, 1), [[Box((0,), (3,))], [Box((3,), (3,))]])
    encoders, arenas = encoders_for(tmp_path, case, Reduction())
    write(encoders, arenas, case, 1)
    load(storage_of(tmp_path), Version(1, 1))
    (tmp_path / "step-00000001-a1" / "rank-00000-of-00002.json").unlink()
    with pytest.raises(CheckpointError, match=r"incomplete: `x` is not whole.*00000-of-00002"):
        load(storage_of(tmp_path), Version(1, 1))


def test_a_part_missing_is_no_loss_if_others_hold_the_same(tmp_path: Path) -> None:
    facts = TensorFacts.of("float32", (6,))
    case = Case(facts, random_array((6,), 4, 1), [[whole((6,))], [whole((6,))]])
    encoders, arenas = encoders_for(tmp_path, case, Reduction())
    write(encoders, arenas, case, 1)
    for file in (tmp_path / "step-00000001-a1").glob("rank-00001-*"):
        file.unlink()
    contents = load(storage_of(tmp_path), Version(1, 1))
    assert "rank-00001-of-00002.json is missing" in contents.problems[0]
    with VersionReader(storage_of(tmp_path), contents) as reader:
        assert read_box(reader, whole((6,)), 4).tobytes() == case.array.tobytes()


def test_compiled_code_and_numpy_choose_alike_where_some_content_was_saved_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = TensorFacts.of("float32", (1024, 1024))
    random = np.random.default_rng(0)
    first = random.standard_normal(facts.shape).astype("<f4")
    # What pays is another thing for a tile than for those beside and behind it.
    first[:, facts.steps[1] :] = first[:, facts.steps[1] :].astype("<f2")
    second = first.copy()
    second[300:, 512:] = random.standard_normal((724, 512))
    second[600:, 512:] = second[600:, 512:].astype("<f2")
    stored = []
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr(CompiledTiles, "new", lambda: None)
        directory = tmp_path / str(compiled)
        case = Case(facts, first.view("V4").reshape(facts.shape), [[whole(facts.shape)]])
        encoders, arenas = encoders_for(directory, case, Reduction())
        write(encoders, arenas, case, 1)
        case.array = second.view("V4").reshape(facts.shape)
        write(encoders, arenas, case, 2)
        stored.append([path.read_bytes() for path in sorted(directory.rglob("*.pack"))])
    assert stored[0] == stored[1]


def test_giving_up_publishes_nothing_and_leaves_no_file(tmp_path: Path) -> None:
    facts = TensorFacts("float32", (8,), (2,))
    case = Case(facts, random_array((8,), 4, 1), [[whole((8,))]])
    encoders, arenas = encoders_for(tmp_path, case, Reduction())
    pieces = [StagedPiece("x", whole((8,)), 0)]
    job = PartJob(Version(1, 5), 0, 1, case.catalogue, pieces)
    # Between calls, and before the manifest appears.
    for calls_before in range(2):
        left = calls_before

        def check() -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise AbandonedError

        with pytest.raises(AbandonedError):
            encoders[0].write(job, check)
        assert [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp")] == []
        assert not list(tmp_path.rglob("rank-*.json"))
    write(encoders, arenas, case, 5)
    load(storage_of(tmp_path), Version(1, 5))


def test_equal_tiles_are_stored_once(tmp_path: Path) -> None:
    tile = random_array((256,), 4, 1)
    facts = TensorFacts("float32", (2560,), (256,))
    case = Case(facts, np.tile(tile, 10), [[whole((2560,))]])
    encoders, arenas = encoders_for(tmp_path, case, Reduction(Compression("none")))
    [written] = write(encoders, arenas, case, 1)
    [part] = load(storage_of(tmp_path), Version(1, 1)).parts
    assert [piece.chunks for piece in part.pieces["x"]] == [[0] * 10]
    assert written.raw_bytes == 10_240
    pack = tmp_path / "step-00000001-a1" / "rank-00000-of-00001.pack"
    assert pack.stat().st_size == 1024
