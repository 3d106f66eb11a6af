"""Damage of any kind is found before it is used, and the version before is taken."""

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import open_store, steps_in
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from outlast.checkpoint import Reduction, Restored, Version, load, storage_of, version
from outlast.checkpoint.reader import VersionReader
from outlast.checkpoint.storage import LocalStorage
from outlast.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("either_seal")

PART = "rank-00000-of-00001.json"
PACK = "rank-00000-of-00001.pack"


def make_model(value: float) -> nn.Module:
    model = nn.Linear(4, 3)
    model.register_buffer("frozen", torch.full((40,), 0.5) + torch.arange(40))
    for number, parameter in enumerate(model.parameters()):
        with torch.no_grad():
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) * value + number)
    return model


def save(directory: Path, *steps: int) -> None:
    with open_store(directory, keep=10) as store:
        for step in steps:
            store.save(step, {"model": make_model(float(step))})


def restore(directory: Path) -> Restored:
    """Restore the newest version that can be used and check its bits."""
    model = make_model(-1.0)
    model.frozen.zero_()
    restored = open_store(directory).restore({"model": model})
    assert restored is not None
    expected = make_model(float(restored.step))
    for found, right in zip(
        model.state_dict().values(), expected.state_dict().values(), strict=True
    ):
        assert torch.equal(found, right)
    return restored


def folder(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}-a1"


def catalogue(version: Path) -> Path:
    [path] = version.glob("catalogue-*.json")
    return path


def flip(path: Path) -> Path:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


def truncate(path: Path) -> Path:
    os.truncate(path, path.stat().st_size - 1)
    return path


def delete(path: Path) -> Path:
    path.unlink()
    return path


def replace(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def to_folder(path: Path) -> Path:
    path.unlink()
    path.mkdir()
    return path


def copy_from_the_one_before(path: Path) -> Path:
    before = path.parent.parent / "step-00000001-a1" / path.name
    shutil.copy(before, path)
    return path


DAMAGE: dict[str, Callable[[Path], Path]] = {
    "one bit of the chunks": lambda version: flip(version / PACK),
    "one bit of the part": lambda version: flip(version / PART),
    "one bit of the catalogue": lambda version: flip(catalogue(version)),
    "chunks cut": lambda version: truncate(version / PACK),
    "part cut": lambda version: truncate(version / PART),
    "catalogue cut": lambda version: truncate(catalogue(version)),
    "chunks empty": lambda version: replace(version / PACK, b""),
    "part empty": lambda version: replace(version / PART, b""),
    "part of zeros": lambda version: replace(version / PART, bytes(1000)),
    "part no JSON": lambda version: replace(version / PART, b"\x80\x04garbage" * 99),
    "part a list": lambda version: replace(version / PART, b"[]"),
    "chunks deleted": lambda version: delete(version / PACK),
    "catalogue deleted": lambda version: delete(catalogue(version)),
    "part a folder": lambda version: to_folder(version / PART),
    "catalogue a folder": lambda version: to_folder(catalogue(version)),
    "chunks a folder": lambda version: to_folder(version / PACK),
    "chunks of the version before": lambda version: copy_from_the_one_before(version / PACK),
    "part of the version before": lambda version: copy_from_the_one_before(version / PART),
}


def test_damaged_versions_that_are_passed_over_are_warned_of_at_once(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    flip(folder(tmp_path, 3) / PACK)
    flip(folder(tmp_path, 2) / PART)
    with pytest.warns(
        UserWarning, match="restored step 1 from .* passed over what is newer"
    ) as told:
        restore(tmp_path)
    [text] = [str(each.message) for each in told]
    for words in (f"step-00000003-a1/{PACK} is damaged", f"step-00000002-a1/{PART} is damaged"):
        assert words in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restored = open_store(tmp_path).restore({"model": make_model(0.0)}, warn=False)
    assert restored is not None
    assert len(restored.skipped) == 2


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.filterwarnings("ignore:restored step 1")
def test_damaged_versions_that_were_passed_over_are_none_of_those_that_are_kept(
    tmp_path: Path, kind: str, keep: int
) -> None:
    save(tmp_path, 1, 2, 3)
    for step in (3, 2):
        DAMAGE[kind](folder(tmp_path, step))
    with open_store(tmp_path, keep=keep) as store:
        restored = store.restore({"model": make_model(0.0)})
        assert restored is not None
        # What is right is not always told from what is wrong: version 2 may have been mended.
        first = restored.step
        for step in (4, 5, 6):
            store.save(step, {"model": make_model(float(step))})
            found = open_store(tmp_path)
            intact = [s for s in (first, 4, 5, 6) if s <= step][-keep:]
            for each in intact:
                assert found.restore({"model": make_model(0.0)}, step=each) is not None
            # The damaged ones stay for as long as what is intact and newer is less than is kept.
            assert (tmp_path / "step-00000003-a1").exists() == (step - 3 < keep)
    assert steps_in(tmp_path) == [4, 5, 6][-keep:]


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_newest_version_falls_back(tmp_path: Path, kind: str) -> None:
    save(tmp_path, 1, 2)
    damaged = DAMAGE[kind](folder(tmp_path, 2))
    restored = restore(tmp_path)
    assert restored.step == 1
    [skipped] = restored.skipped
    assert str(damaged.parent) in skipped
    if kind != "part a folder":
        assert damaged.name in skipped
    assert "\n" not in skipped


def test_a_part_that_is_gone_falls_back(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    delete(folder(tmp_path, 2) / PART)
    restored = restore(tmp_path)
    assert restored.step == 1
    missing = ("has no manifest", f"{PART} cannot be read: No such file")
    assert any(f"{word}" in restored.skipped[0] for word in missing)


@pytest.mark.parametrize("kind", ["one bit", "cut", "deleted", "a folder"])
def test_a_damaged_seal_is_no_loss(tmp_path: Path, kind: str) -> None:
    save(tmp_path, 1, 2)
    seal = folder(tmp_path, 2) / "version.json"
    {"one bit": flip, "cut": truncate, "deleted": delete, "a folder": to_folder}[kind](seal)
    assert restore(tmp_path).step == 2
    newest = open_store(tmp_path).newest()
    assert newest is not None
    assert newest.step == 2


def test_a_later_format_is_named(tmp_path: Path) -> None:
    from outlast.checkpoint.manifest import sealed, unsealed

    save(tmp_path, 1, 2)
    part = folder(tmp_path, 2) / PART
    part.write_bytes(sealed({"format": 99, **unsealed(part.read_bytes(), "")}))
    restored = restore(tmp_path)
    assert restored.step == 1
    assert "format 99" in restored.skipped[0]


def test_saving_goes_on_after_damage(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    flip(folder(tmp_path, 2) / PACK)
    assert restore(tmp_path).step == 1
    save(tmp_path, 2)
    restored = restore(tmp_path)
    assert (restored.step, restored.skipped) == (2, [])


def test_one_store_can_restore_and_save_the_damaged_step_again(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for step in (1, 2):
            store.save(step, {"model": make_model(float(step))})
        flip(folder(tmp_path, 2) / PACK)
        restored = store.restore({"model": make_model(0.0)})
        assert restored is not None
        assert restored.step == 1
        assert store.save_async(2, {"model": make_model(2.0)}).result().error is None
    assert restore(tmp_path).step == 2


def test_two_damaged_versions_are_both_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    delete(folder(tmp_path, 2) / PACK)
    truncate(folder(tmp_path, 3) / PACK)
    restored = restore(tmp_path)
    assert restored.step == 1
    newer, older = restored.skipped
    assert "step-00000003" in newer
    assert "step-00000002" in older


def test_when_all_are_damaged_the_error_names_them_and_keeps_them(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    files = [flip(folder(tmp_path, step) / PART) for step in (1, 2)]
    model = make_model(-1.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        open_store(tmp_path).restore({"model": model})
    sentence = str(caught.value)
    assert all(str(file) in sentence for file in files)
    assert "restore the files from a copy" in sentence
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert steps_in(tmp_path) == [1, 2]


def test_a_listing_that_lags_hides_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from test_checkpoint_encoder import Case, encoders_for, random_array, write

    from outlast.checkpoint.manifest import TensorFacts
    from outlast.state.box import Box

    facts = TensorFacts.of("float32", (6,))
    case = Case(facts, random_array((6,), 4, 1), [[Box((0,), (3,))], [Box((3,), (3,))]])
    write(*encoders_for(tmp_path, case, Reduction()), case, 1)
    files = LocalStorage.files
    hidden = "rank-00000-of-00002.json"

    def lagging(storage: LocalStorage, name: str) -> dict[str, int]:
        return {key: size for key, size in files(storage, name).items() if key != hidden}

    monkeypatch.setattr(LocalStorage, "files", lagging)
    contents = load(storage_of(tmp_path), Version(1, 1))
    assert contents.problems == []
    assert [part.rank for part in contents.parts] == [0, 1]


@pytest.mark.parametrize("what", ["folders", "files"])
def test_a_version_not_listed_yet_is_found_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    save(tmp_path, 1, 2)
    listing: Any = getattr(LocalStorage, what)

    def lagging(storage: LocalStorage, *name: str) -> Any:
        found = listing(storage, *name)
        if what == "folders":
            return [each for each in found if "00002" not in each]
        return {} if "00002" in name[0] else found

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, what, lagging)
        # With an index, all files are asked for by their names.
        found = what == "files" and version.INDEXED_ABOVE == 0
        assert restore(tmp_path).step == (2 if found else 1)
    assert restore(tmp_path).step == 2


def test_the_order_of_versions_does_not_depend_on_the_clock(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    save(tmp_path, 2, 3)
    now = 1_700_000_000
    for path in tmp_path.rglob("*"):
        age = 10**7 if "step-00000003-a2" in str(path) else -(10**7)
        os.utime(path, (now - age, now - age))
    assert restore(tmp_path).step == 3
    with open_store(tmp_path, keep=2) as store:
        store.save(4, {"model": make_model(4.0)})
    assert steps_in(tmp_path) == [3, 4]


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of three versions, by their names."""
    directory = tmp_path_factory.mktemp("intact")
    save(directory, 1, 2, 3)
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_no_flipped_bit_is_ever_restored(
    tmp_path_factory: pytest.TempPathFactory, intact: dict[str, bytes], data: st.DataObject
) -> None:
    damaged = data.draw(st.sampled_from(sorted(intact)))
    position = data.draw(st.integers(0, len(intact[damaged]) - 1))
    bit = data.draw(st.integers(0, 7))
    directory = tmp_path_factory.mktemp("flipped")
    for name, content in intact.items():
        changed = bytearray(content)
        if name == damaged:
            changed[position] ^= 1 << bit
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(changed)
    if damaged.endswith(".pack"):
        storage = storage_of(directory)
        version = Version(1, int(damaged[5:13]))
        reader = VersionReader(storage, load(storage, version))
        with reader, pytest.raises(CheckpointError, match=f"{damaged}.*damaged"):
            reader.check()
    if "00001-a1" in damaged and damaged.endswith(".pack"):
        # The later versions refer to chunks of the first one: to this one, or to others.
        try:
            assert restore(directory).step == 3
        except CheckpointError as error:
            assert damaged in str(error)  # noqa: PT017
        return
    restored = restore(directory)
    if "00003-a1" in damaged and not damaged.endswith("version.json"):
        assert restored.step == 2
        assert damaged in restored.skipped[0]
    else:
        assert restored.step == 3


def test_of_versions_after_a_step_none_is_no_error_and_a_damaged_one_is(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    state = {"model": make_model(0.0)}
    assert open_store(tmp_path).restore(state, after=3) is None
    assert open_store(tmp_path).unfinished == ""
    restored = open_store(tmp_path).restore(state, after=2)
    assert restored is not None
    assert restored.step == 3
    flip(folder(tmp_path, 3) / PACK)
    with pytest.raises(CheckpointError, match="step-00000003"):
        open_store(tmp_path).restore(state, after=2)
