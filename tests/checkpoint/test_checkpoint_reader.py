"""A reader looks at, opens and starts no more than what it is asked for needs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import Holder, open_store, save_once

from outlast.checkpoint import load, storage_of
from outlast.checkpoint import reader as reading
from outlast.checkpoint.manifest import TensorFacts
from outlast.checkpoint.reader import VersionReader, Wanted
from outlast.checkpoint.storage import LocalStorage
from outlast.checkpoint.version import Version
from outlast.errors import CheckpointError
from outlast.state.box import Box, whole


def read(reader: VersionReader, name: str, box: Box) -> torch.Tensor:
    out = torch.zeros(box.shape, dtype=torch.int64)
    reader.read([Wanted(name, box, out.numpy().view("u8"))])
    return out


def test_only_tiles_that_are_wanted_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        TensorFacts, "of", classmethod(lambda cls, dtype, shape: cls(dtype, shape, (10, 5)))
    )
    content = torch.arange(400 * 50).reshape(400, 50)
    save_once(tmp_path, 1, {"data": Holder({"x": content, "y": content + 1})})
    storage = storage_of(tmp_path)
    contents = load(storage, Version(1, 1))
    assert len(list(contents.parts[0].tiles("data.x", contents.catalogue.tensors["data.x"]))) == 400
    looks = 0
    overlap = Box.overlap

    def counted(box: Box, other: Box) -> Box | None:
        nonlocal looks
        looks += 1
        return overlap(box, other)

    monkeypatch.setattr(Box, "overlap", counted)
    with VersionReader(storage, contents) as reader:
        found = read(reader, "data.x", Box((205, 23), (7, 4)))
        assert torch.equal(found, content[205:212, 23:27])
        assert 4 <= looks <= 10, "400 tiles"
        assert reader.counters.touched_bytes == 4 * 10 * 5 * 8


def test_several_boxes_of_one_tensor_are_filled_at_once(tmp_path: Path) -> None:
    content = torch.arange(400 * 50).reshape(400, 50)
    save_once(tmp_path, 1, {"data": Holder({"x": content})})
    storage = storage_of(tmp_path)
    boxes = [
        Box((0, 0), (400, 50)),
        Box((3, 4), (50, 2)),
        Box((399, 49), (1, 1)),
        Box((5, 5), (0, 3)),
    ]
    outs = [torch.zeros(box.shape, dtype=torch.int64) for box in boxes]
    with VersionReader(storage, load(storage, Version(1, 1))) as reader:
        reader.read(
            [
                Wanted("data.x", box, out.numpy().view("u8"))
                for box, out in zip(boxes, outs, strict=True)
            ]
        )
        assert reader.counters.touched_bytes == content.nbytes, "each tile is read once"
    for box, out in zip(boxes, outs, strict=True):
        assert torch.equal(out, content[box.within(whole((400, 50)))])


@pytest.mark.parametrize("held", [1, 2])
def test_of_many_files_only_those_that_are_read_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    frozen = torch.arange(3000)
    with open_store(tmp_path) as store:
        for step in (1, 2):
            store.save(step, {"data": Holder({"frozen": frozen, "fast": torch.arange(900) * step})})
    opened: list[str] = []
    original = LocalStorage.open

    def open_and_note(storage: LocalStorage, name: str) -> Any:
        opened.append(name)
        return original(storage, name)

    monkeypatch.setattr(LocalStorage, "open", open_and_note)
    monkeypatch.setattr(reading, "_FILES_HELD", held)
    storage = storage_of(tmp_path)
    contents = load(storage, Version(1, 2))
    old, new = sorted(contents.packs)
    with VersionReader(storage, contents) as reader:
        assert opened == ([] if held == 1 else [old, new])
        for _ in range(2):
            found = read(reader, "data.fast", whole((900,)))
            assert torch.equal(found, torch.arange(900) * 2)
        assert opened == ([new] if held == 1 else [old, new])
        (tmp_path / old).unlink()
        if held == 2:
            assert torch.equal(read(reader, "data.frozen", whole((3000,))), frozen)
        else:
            with pytest.raises(CheckpointError, match="cannot be read"):
                read(reader, "data.frozen", whole((3000,)))
