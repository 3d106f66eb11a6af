"""Versions that earlier releases have stored as differences are read, checked and passed on.

``data/delta-chain`` was written by the last release that had ``Reduction(chain=3)``: four steps, of
which each of the last three is the difference to the one before, by exclusive or and by
subtraction, over blosc2, byte planes and nibbles. ``data/delta-chain.json`` has the SHA-256 of
every tensor.
"""

import collections
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import DELTA_CHAIN, Holder, digest, open_store, restore_step, steps_in
from safetensors.torch import load_file

from outlast.checkpoint import Retention, Tier, Version, load, storage_of
from outlast.checkpoint.compiled import CompiledTiles
from outlast.checkpoint.content import compare
from outlast.checkpoint.convert import export_checkpoint
from outlast.checkpoint.inspection import describe, find_version, list_saved, verify
from outlast.checkpoint.storage import LocalStorage, RateLimiter
from outlast.checkpoint.tiers import Copy, Place
from outlast.errors import CheckpointError

STEPS = {
    int(step): digests
    for step, digests in json.loads(DELTA_CHAIN.with_suffix(".json").read_text())["steps"].items()
}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(params=[True, False], ids=["compiled", "numpy"])
def place(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the store, read with and without compiled code."""
    if not request.param:
        monkeypatch.setattr(CompiledTiles, "new", lambda: None)
    return Path(shutil.copytree(DELTA_CHAIN, tmp_path / "store"))


def check(place: Path, *steps: int) -> None:
    """Every tensor of `steps` comes back bit for bit."""
    for step in steps:
        found = Holder()
        assert restore_step(place, {"state": found}, step=step) == step
        assert {name: digest(tensor)[2] for name, tensor in found.state.items()} == STEPS[step]


def test_every_kind_of_difference_is_there(place: Path) -> None:
    seen: collections.Counter[str] = collections.Counter()
    [part] = load(storage_of(place), Version(1, 4)).parts
    for chunk in part.chunks:
        name, pack = part.codecs[chunk.codec], (place / part.packs[chunk.pack]).read_bytes()
        if name == "diff+planes":
            name += {0: "", 2: " with nibbles"}[pack[chunk.offset + 1]]
        seen[name] += 1
    assert {"xor+blosc2", "diff+blosc2", "diff+planes", "diff+planes with nibbles"} <= seen.keys()
    assert max(len(part.chain(number)) for number in range(len(part.chunks))) == 4


def test_every_step_comes_back_and_is_found_intact(place: Path) -> None:
    check(place, *STEPS)
    storage = storage_of(place)
    assert [verify(storage, version).state for version in list_saved(storage)] == ["ok"] * 4
    codings = [describe(storage, find_version(storage, step)).coding for step in STEPS]
    assert [each.depth for each in codings] == [0, 1, 2, 3]
    assert [each.deltas for each in codings] == [0, 5, 5, 5]
    assert [each.full for each in codings] == [6, 1, 1, 1]
    difference = compare(storage, *(load(storage, Version(1, step)) for step in (3, 4)))
    changed = {each.name for each in difference.tensors if each.change == "changed"}
    assert changed == {f"state.{name}" for name in STEPS[4] if name != "zeros"}


@pytest.mark.parametrize("base", STEPS)
def test_a_changed_byte_is_noticed_by_every_version_that_needs_it(place: Path, base: int) -> None:
    pack = place / Version(1, base).pack_name(0, 1, 0)
    intact = pack.read_bytes()
    storage = storage_of(place)
    for number in range(0, len(intact), len(intact) // 9):
        changed = bytearray(intact)
        changed[number] ^= 4
        pack.write_bytes(changed)
        states = [verify(storage, version).state for version in list_saved(storage)]
        assert states == ["ok" if step < base else "damaged" for step in STEPS]
        for step in (step for step in STEPS if step >= base):
            with pytest.raises(CheckpointError, match="is damaged at byte") as caught:
                restore_step(place, {"state": Holder()}, step=step)
            assert str(pack) in str(caught.value)
    check(place, *(step for step in STEPS if step < base))


@pytest.mark.parametrize(("keep", "left"), [(9, [1, 2, 3, 4]), (2, [4]), (1, [])])
def test_the_next_step_is_stored_in_full_over_them(place: Path, keep: int, left: list[int]) -> None:
    state = Holder()
    assert restore_step(place, {"state": state}) == 4
    with open_store(place, keep=keep) as store:
        assert store.save(5, {"state": state}).error is None
    assert steps_in(place) == [*left, 5]
    check(place, *left)
    found = Holder()
    assert restore_step(place, {"state": found}) == 5
    assert all(torch.equal(found.state[name], state.state[name]) for name in STEPS[4])
    [part] = load(storage_of(place), list_saved(storage_of(place))[-1]).parts
    assert all(chunk.base < 0 for chunk in part.chunks)


def test_they_are_copied_exported_and_restored_from_another_place(
    place: Path, tmp_path: Path
) -> None:
    disk, first, exported = tmp_path / "disk", tmp_path / "first", tmp_path / "exported"
    pace = RateLimiter(None, threading.Event())
    source, target = (Place(LocalStorage(each), Retention(), False, 0, 1) for each in (place, disk))
    Copy(source, target, Version(1, 4), pace).run()
    shutil.copy(place / Version(1, 4).folder / "version.json", disk / Version(1, 4).folder)
    check(disk, 4)
    found = Holder()
    with open_store(first, tiers=[Tier(disk)]) as store:
        restored = store.restore({"state": found})
    assert restored is not None
    assert {name: digest(tensor)[2] for name, tensor in found.state.items()} == STEPS[4]
    export_checkpoint(place, exported, kind="safetensors", step=3, prefix="state.")
    [file] = exported.glob("*.safetensors")
    assert {name: digest(tensor)[2] for name, tensor in load_file(file).items()} == STEPS[3]
