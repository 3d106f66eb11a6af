"""Tiles partition boxes on one grid, and coverage is decided as by counting elements."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.checkpoint.manifest import grid, tiles, tiles_within
from outlast.state import box as state_box
from outlast.state.box import Box, covers, whole

SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    firsts = [draw(st.integers(0, extent)) for extent in shape]
    extents = [
        draw(st.integers(0, extent - first)) for first, extent in zip(firsts, shape, strict=True)
    ]
    return Box(tuple(firsts), tuple(extents))


@st.composite
def shapes_with_boxes(draw: st.DrawFn, most: int = 4) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(SHAPES)
    return shape, draw(st.lists(boxes_in(shape), max_size=most))


@given(shapes_with_boxes(1), st.data())
def test_tiles_partition_a_box_on_the_grid(
    case: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = case
    steps = tuple(data.draw(st.integers(1, 10)) for _ in shape)
    for box in [whole(shape), *boxes]:
        counts = np.zeros(shape, int)
        found = list(tiles(box, steps))
        for tile in found:
            assert tile.elements > 0
            counts[tile.within(whole(shape))] += 1
            for first, extent, step in zip(tile.offset, tile.shape, steps, strict=True):
                assert first // step == (first + extent - 1) // step, "a tile crosses a line"
        expected = np.zeros(shape, int)
        expected[box.within(whole(shape))] = 1
        assert np.array_equal(counts, expected)
        assert [tile.offset for tile in found] == sorted(tile.offset for tile in found)


@given(shapes_with_boxes())
def test_coverage_is_that_of_the_elements(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    held = np.zeros(shape, bool)
    for box in boxes:
        held[box.within(whole(shape))] = True
    assert covers(shape, boxes) == bool(held.all())


@given(shapes_with_boxes(), st.integers(0, 3))
def test_a_partition_covers_and_misses_if_one_is_left_out(
    case: tuple[tuple[int, ...], list[Box]], left_out: int
) -> None:
    shape, _ = case
    parts = list(tiles(whole(shape), tuple(max(extent // 2, 1) for extent in shape)))
    assert covers(shape, parts)
    if left_out < len(parts):
        assert not covers(shape, parts[:left_out] + parts[left_out + 1 :])


@st.composite
def sharded(draw: st.DrawFn, shape: tuple[int, ...], dimensions: list[int]) -> list[Box]:
    """Uneven shards along one dimension after the other, as meshes make them."""
    found = [whole(shape)]
    for dimension in dimensions:
        shards = []
        for box in found:
            extent = box.shape[dimension]
            cuts = draw(st.sets(st.integers(1, max(extent - 1, 1)), max_size=3))
            for first, last in itertools.pairwise([0, *sorted(cuts - {extent}), extent]):
                offset, size = list(box.offset), list(box.shape)
                offset[dimension] += first
                size[dimension] = last - first
                shards.append(Box(tuple(offset), tuple(size)))
        found = shards
    return found


@given(st.data())
def test_shards_cover_as_their_elements_do(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple))
    boxes = data.draw(sharded(shape, data.draw(st.permutations(range(len(shape))))))
    # Some lost, some held by several ranks, some by ranks with another layout.
    kept = data.draw(st.lists(st.sampled_from(boxes), min_size=len(boxes), unique=True))
    lost = data.draw(st.integers(0, 2))
    boxes = kept[lost:] + data.draw(st.lists(st.sampled_from(boxes), max_size=2))
    boxes += data.draw(st.lists(boxes_in(shape), max_size=2))
    held = np.zeros(shape, bool)
    for box in boxes:
        held[box.within(whole(shape))] = True
    assert covers(shape, boxes) == bool(held.all())


def test_a_thousand_shards_are_not_compared_with_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object) -> bool:
        raise AssertionError("every pair of boxes is compared")

    monkeypatch.setattr(state_box, "_fills_cells", refuse)
    for shape, steps in [
        ((5000, 64), (5, 64)),
        ((64, 5001), (64, 5)),
        ((320, 96, 7), (10, 3, 7)),
        ((1000,), (1,)),
    ]:
        boxes = list(tiles(whole(shape), steps))
        assert len(boxes) >= 1000
        assert covers(shape, boxes[::-1])
        assert covers(shape, boxes * 2), "replicas change nothing"
        assert not covers(shape, boxes[:500] + boxes[501:])


@given(shapes_with_boxes(2), st.data())
def test_tiles_within_are_those_that_overlap(
    case: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = case
    steps = tuple(data.draw(st.integers(1, 10)) for _ in shape)
    for box, other in itertools.product([whole(shape), *boxes], repeat=2):
        expected = [
            (number, tile)
            for number, tile in enumerate(tiles(box, steps))
            if tile.overlap(other) is not None
        ]
        part = box.overlap(other)
        assert expected == ([] if part is None else list(tiles_within(box, steps, part)))


@given(shapes_with_boxes(2))
def test_overlap_is_the_common_elements(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    for one, other in itertools.product(boxes, boxes):
        held = [np.zeros(shape, bool), np.zeros(shape, bool)]
        held[0][one.within(whole(shape))] = True
        held[1][other.within(whole(shape))] = True
        both = held[0] & held[1]
        common = one.overlap(other)
        if common is None:
            assert not both.any()
        else:
            assert common.elements == both.sum()
            assert both[common.within(whole(shape))].all()


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, 5000), max_size=4).map(tuple),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from([1, 64, 4096, 128 << 10]),
)
def test_tiles_of_a_grid_are_small_enough(
    shape: tuple[int, ...], itemsize: int, tile_bytes: int
) -> None:
    steps = grid(shape, itemsize, tile_bytes)
    assert len(steps) == len(shape)
    assert all(1 <= step <= max(extent, 1) for step, extent in zip(steps, shape, strict=True))
    assert math.prod(steps) * itemsize <= tile_bytes or set(steps) <= {1}


def test_halves_and_quarters_of_a_dimension_lie_on_the_grid() -> None:
    for shape in [(512, 512), (1024, 4096), (4096, 1024), (65_536, 768)]:
        for extent, step in zip(shape, grid(shape, 4), strict=True):
            if step < extent // 2:
                assert (extent // 4) % step == 0, (shape, step)
