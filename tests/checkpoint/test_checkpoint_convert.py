"""Checkpoints of other programs, into a store and out of it: exact, safe, all or nothing."""

import io
import json
import os
import pickle
import sys
import types
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_states import Net, bits, make_state, train
from safetensors.torch import load_file, save_file

from outlast.checkpoint import CheckpointStore, convert, list_versions, storage_of
from outlast.checkpoint.convert import export_checkpoint, import_checkpoint
from outlast.checkpoint.dcp import OutlastReader, OutlastWriter
from outlast.checkpoint.storage import FsspecStorage
from outlast.errors import CheckpointError


def make_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "layer.weight": torch.randn(700, 30),
        "layer.bias": torch.randn(7).bfloat16(),
        "scale": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "seen": torch.tensor([1, -2, 3]),
        "mask": torch.rand(4, 3) > 0.5,
        "eight": torch.randn(5, 3).to(torch.float8_e4m3fn),
    }


def make_nested(seed: int = 0) -> dict[str, Any]:
    model = make_tensors(seed)
    moments = {0: {"exp_avg": torch.randn(3), "step": 5}}
    groups = [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0]}]
    return {"model": model, "optimizer": {"state": moments, "groups": groups}, "epoch": 3}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    return bool(one == other)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture(params=["one batch", "many batches"])
def _batches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large checkpoints go in batches; small limits make small ones go so too."""
    if request.param == "many batches":
        monkeypatch.setattr(convert, "_BATCH_BYTES", 20_000)
        monkeypatch.setattr(convert, "_ONE_FILE_BYTES", 20_000)


@pytest.mark.usefixtures("_batches")
def test_a_torch_file_comes_back_nested(tmp_path: Path, store: Path) -> None:
    state = make_nested()
    torch.save(state, tmp_path / "a.pt")
    done = import_checkpoint(tmp_path / "a.pt", store, step=12)
    assert done.step == 12
    export_checkpoint(store, tmp_path / "b.pt", kind="torch")
    assert same(torch.load(tmp_path / "b.pt", weights_only=True), state)
    export_checkpoint(store, tmp_path / "model.pt", kind="torch", prefix="model.")
    assert same(torch.load(tmp_path / "model.pt", weights_only=True), state["model"])


@pytest.mark.usefixtures("_batches")
def test_safetensors_come_back_in_shards_with_an_index(tmp_path: Path, store: Path) -> None:
    tensors = make_tensors()
    save_file(tensors, tmp_path / "a.safetensors", {"format": "pt"})
    import_checkpoint(tmp_path / "a.safetensors", store, prefix="model.")
    export_checkpoint(store, tmp_path / "one", kind="safetensors", prefix="model.")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    assert same(load_file(tmp_path / "one" / "model.safetensors"), tensors)
    folder = tmp_path / "many"
    export_checkpoint(store, folder, kind="safetensors", prefix="model.", shard_bytes=50)
    index = json.loads((folder / "model.safetensors.index.json").read_bytes())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in tensors.values())
    found = {}
    for path in folder.glob("*.safetensors"):
        found.update(load_file(path))
    assert same(found, tensors)
    import_checkpoint(folder, tmp_path / "again")
    export_checkpoint(tmp_path / "again", tmp_path / "third", kind="safetensors")
    assert same(load_file(tmp_path / "third" / "model.safetensors"), tensors)


@pytest.mark.usefixtures("_batches")
def test_stock_dcp_goes_in_and_out_unchanged(tmp_path: Path, store: Path) -> None:
    state = {"model": make_tensors(1), "groups": [{"lr": 0.1}], "epoch": 3}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "step-40"))
    assert import_checkpoint(tmp_path / "step-40", store).step == 40
    for read in (False, True):
        found = {"model": make_tensors(2), "groups": [{"lr": 0.0}], "epoch": 0}
        reader: Any = OutlastReader(store)
        if read:
            export_checkpoint(store, tmp_path / "out", kind="dcp")
            reader = dcp.FileSystemReader(tmp_path / "out")
        dcp.load(found, storage_reader=reader)
        assert same(found, state)
    stock = dcp.FileSystemReader(tmp_path / "step-40").read_metadata()
    ours = dcp.FileSystemReader(tmp_path / "out").read_metadata()
    assert ours.planner_data == stock.planner_data
    assert ours.state_dict_metadata == stock.state_dict_metadata
    export_checkpoint(store, tmp_path / "nested.pt", kind="torch")
    assert same(torch.load(tmp_path / "nested.pt", weights_only=True), state)


def test_a_version_saved_through_dcp_is_exported_nested(tmp_path: Path, store: Path) -> None:
    state = {"model": make_tensors(1), "list": [torch.ones(2), torch.zeros(1)], "epoch": 3}
    dcp.save(state, storage_writer=OutlastWriter(store, step=1))
    export_checkpoint(store, tmp_path / "a.pt", kind="torch")
    assert same(torch.load(tmp_path / "a.pt", weights_only=True), state)
    done = export_checkpoint(store, tmp_path / "a", kind="safetensors")
    assert done.notes == ["1 values that are no tensors were left out"]


def test_versions_of_a_checkpoint_store_are_exported(tmp_path: Path, store: Path) -> None:
    state = make_state(1)
    train(state, 1, 2)
    with CheckpointStore(store, writer="thread") as opened:
        opened.save(2, state)
        train(state, 3, 3)
        opened.save(3, state)
    expected = dict(state["model"].state_dict())
    export_checkpoint(store, tmp_path / "a", kind="safetensors", prefix="model.")
    assert same(load_file(tmp_path / "a" / "model.safetensors"), expected)
    export_checkpoint(store, tmp_path / "b", kind="dcp", prefix="model.")
    other = Net(2)
    loaded = other.state_dict()
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path / "b"))
    assert same(dict(loaded), expected)
    export_checkpoint(store, tmp_path / "c.pt", kind="torch")
    found = torch.load(tmp_path / "c.pt", weights_only=False)
    assert found["data"]["position"] == 3
    assert torch.equal(found["data"]["generator"], state["data"].state["generator"])
    assert "data.generator" not in found
    export_checkpoint(store, tmp_path / "d.pt", kind="torch", step=2, prefix="model.")
    older = torch.load(tmp_path / "d.pt")
    assert older["seen"] < found["model.seen"]


@pytest.mark.parametrize("kind", convert.EXPORT_KINDS)
def test_an_export_to_an_object_store_is_that_to_a_folder(
    tmp_path: Path, store: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    told: list[tuple[int, int]] = []
    save_file({f"weight{n}": torch.randn(50, 20) for n in range(9)}, tmp_path / "a.safetensors")
    monkeypatch.setattr(convert, "_BATCH_BYTES", 10_000)
    import_checkpoint(tmp_path / "a.safetensors", store, progress=lambda *at: told.append(at))
    assert told[0][0] < told[-1][0] == told[-1][1] == 36_000
    place, local = f"memory://{uuid.uuid4().hex}", tmp_path / "out" / "model"
    for target in (f"{place}/model", local):
        told.clear()
        export_checkpoint(
            store, target, kind=kind, shard_bytes=9000, progress=lambda *at: told.append(at)
        )
        assert told[-1] == (36_000, 36_000)
    files = sorted(each for each in [local, *local.rglob("*")] if each.is_file())
    names = [str(each.relative_to(tmp_path / "out")) for each in files]
    sent = storage_of(place)
    inside = fsspec.filesystem("memory").find(place)
    assert sorted(each.split("/", 2)[2] for each in inside) == names
    # The other formats have their own path within.
    assert kind != "safetensors" or all(
        sent.read(name) == each.read_bytes() for name, each in zip(names, files, strict=True)
    )
    if kind == "torch":
        found, expected = torch.load(io.BytesIO(sent.read("model"))), torch.load(local)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(CheckpointError, match="exists already"):
        export_checkpoint(store, f"{place}/model", kind=kind)
    with pytest.raises(CheckpointError, match="must name a folder"):
        export_checkpoint(store, place, kind=kind)


def test_an_export_that_an_object_store_refuses_leaves_nothing(
    store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_file({f"weight{n}": torch.randn(50, 20) for n in range(9)}, tmp_path / "a.safetensors")
    import_checkpoint(tmp_path / "a.safetensors", store)
    place, create = f"memory://{uuid.uuid4().hex}", FsspecStorage.create

    def refuse(self: FsspecStorage, name: str, **settings: Any) -> Any:
        if "00002" in name:
            raise PermissionError(13, "Permission denied")
        return create(self, name, **settings)

    monkeypatch.setattr(FsspecStorage, "create", refuse)
    with pytest.raises(CheckpointError, match="model cannot be written: Permission denied"):
        export_checkpoint(store, f"{place}/model", kind="safetensors", shard_bytes=9000)
    assert storage_of(place).files("model") == {}


@pytest.mark.parametrize("kind", ["torch", "safetensors", "dcp"])
def test_an_imported_model_restores_with_a_checkpoint_store(
    tmp_path: Path, store: Path, kind: str
) -> None:
    model = Net(1)
    content = dict(model.state_dict())
    if kind == "torch":
        torch.save(content, tmp_path / "model.bin")
    elif kind == "dcp":
        dcp.save(content, storage_writer=dcp.FileSystemWriter(tmp_path / "model.bin"))
    else:
        content["head.weight"] = content["head.weight"].clone()
        (tmp_path / "model.bin").mkdir()
        save_file(content, tmp_path / "model.bin" / "model.safetensors")
    import_checkpoint(tmp_path / "model.bin", store, step=5, prefix="model.")
    other = Net(2)
    with CheckpointStore(store, writer="thread") as opened:
        restored = opened.restore({"model": other})
        assert restored is not None
        assert restored.step == 5
        opened.save(6, {"model": other})
    assert bits({"model": other}) == bits({"model": model})
    assert [version.step for version in list_versions(storage_of(store))] == [5, 6]


def test_tied_tensors_are_stored_once(tmp_path: Path, store: Path) -> None:
    weight = torch.randn(300, 100)
    torch.save({"a": weight, "b": weight}, tmp_path / "a.pt")
    import_checkpoint(tmp_path / "a.pt", store)
    size = sum(path.stat().st_size for path in store.rglob("*.pack"))
    assert size < 1.1 * weight.nbytes


@contextmanager
def deepspeed_class(name: str) -> Iterator[type]:
    """A class that pickles as one of DeepSpeed's, whose own modules are put aside meanwhile."""
    module, _, own = name.rpartition(".")
    parts = module.split(".")
    stand_ins = {
        path: types.ModuleType(path)
        for path in (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    }
    made = type(own, (), {"__module__": module})
    setattr(stand_ins[module], own, made)
    with mock.patch.dict(sys.modules, stand_ins):
        yield made


def save_like_deepspeed(folder: Path, stage: int, ranks: int) -> dict[str, torch.Tensor]:
    """The files of ZeRO 1 and 2, as DeepSpeed's engine and zero_to_fp32.py describe them."""
    torch.manual_seed(0)
    master = OrderedDict(
        (name, torch.randn(shape))
        for name, shape in {"a.weight": (5, 3), "a.bias": (5,), "b.weight": (7, 2)}.items()
    )
    groups = [["a.weight", "b.weight"], ["a.bias"]]
    tag = folder / "global_step17"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step17")
    module = OrderedDict((name, each.bfloat16()) for name, each in master.items())
    module["running"] = torch.tensor([1.0, 2.0])
    module["tied"] = module["b.weight"]
    states = {
        "module": module,
        "buffer_names": ["running"],
        "param_shapes": [
            OrderedDict((name, master[name].shape) for name in group) for group in groups
        ],
        "shared_params": {"tied": "b.weight"},
        "global_steps": 17,
        "ds_version": "0.16.0",
        "dp_world_size": ranks,
    }
    torch.save(states, tag / "mp_rank_00_model_states.pt")
    flats = []
    for group in groups:
        flat = torch.cat([master[name].reshape(-1) for name in group])
        align = 2 * ranks
        padding = torch.zeros(-flat.numel() % align)
        flats.append(torch.cat([flat, padding]).chunk(ranks))
    with deepspeed_class("deepspeed.runtime.fp16.loss_scaler.LossScaler") as loss_scaler:
        scaler = loss_scaler()
        scaler.cur_scale = 1.0
        for rank in range(ranks):
            content = {
                "loss_scaler": scaler,
                "zero_stage": stage,
                "partition_count": [ranks] * len(groups),
                "single_partition_of_fp32_groups": [flat[rank].clone() for flat in flats],
            }
            torch.save(
                {"optimizer_state_dict": content},
                tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            )
    return master


@pytest.mark.parametrize("ranks", [1, 3, 11])
def test_deepspeed_weights_and_master_weights(tmp_path: Path, store: Path, ranks: int) -> None:
    master = save_like_deepspeed(tmp_path / "ds", stage=2, ranks=ranks)
    done = import_checkpoint(tmp_path / "ds", store, prefix="model.")
    assert done.step == 17
    assert "float32 weights" in done.notes[0]
    export_checkpoint(store, tmp_path / "fp32", kind="safetensors", prefix="master.")
    found = load_file(tmp_path / "fp32" / "model.safetensors")
    assert torch.equal(found.pop("tied"), master["b.weight"])
    assert same(found, dict(master))
    export_checkpoint(store, tmp_path / "half", kind="safetensors", prefix="model.")
    found = load_file(tmp_path / "half" / "model.safetensors")
    assert torch.equal(found["a.weight"], master["a.weight"].bfloat16())
    assert torch.equal(found["running"], torch.tensor([1.0, 2.0]))


def test_deepspeed_without_partitions_or_with_missing_ones(tmp_path: Path, store: Path) -> None:
    save_like_deepspeed(tmp_path / "ds", stage=1, ranks=2)
    tag = tmp_path / "ds" / "global_step17"
    (tag / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"has 1 .*, but 2 ranks saved it"):
        import_checkpoint(tmp_path / "ds", store)
    (tag / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    assert "only the module's weights" in import_checkpoint(tag, store).notes[0]
    (tag / "mp_rank_00_model_states.pt").rename(tag / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="ZeRO stage 3, which is not supported"):
        import_checkpoint(tag, store)


class NoLayout:
    """Asks for a function where a torch.layout is meant."""

    def __reduce__(self) -> Any:
        return torch.serialization._get_layout, ("torch.load",)


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path, store: Path) -> None:
    trap = Trap(tmp_path / "sprung")
    torch.save({"a": torch.ones(1), "b": trap}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"weights_only=True\) refuses"):
        import_checkpoint(tmp_path / "a.pt", store)
    dcp.save({"a": torch.ones(1)}, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"))
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(trap))
    with pytest.raises(CheckpointError, match=r"not what DCP writes \(posix.mkdir\)"):
        import_checkpoint(tmp_path / "dcp", store)
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(NoLayout()))
    with pytest.raises(CheckpointError, match=r"not what DCP writes \(the layout torch.load\)"):
        import_checkpoint(tmp_path / "dcp", store)
    # An object in a stock DCP folder is copied unread, and refused when it would be needed.
    dcp.save(
        {"a": torch.ones(1), "b": trap}, storage_writer=dcp.FileSystemWriter(tmp_path / "other")
    )
    import_checkpoint(tmp_path / "other", store)
    done = export_checkpoint(store, tmp_path / "b.pt", kind="torch")
    assert "1 Python objects that" in done.notes[0]
    assert torch.load(tmp_path / "b.pt", weights_only=True) == {"a": torch.ones(1)}
    assert not (tmp_path / "sprung").exists()


def test_wrong_inputs_are_named(tmp_path: Path, store: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        import_checkpoint(tmp_path / "none", store)
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint of a known kind"):
        import_checkpoint(tmp_path / "folder", store)
    (tmp_path / "text.pt").write_text("no checkpoint")
    with pytest.raises(CheckpointError, match=r"text\.pt"):
        import_checkpoint(tmp_path / "text.pt", store)
    (tmp_path / "text.safetensors").write_text("no checkpoint")
    with pytest.raises(CheckpointError, match="no safetensors file"):
        import_checkpoint(tmp_path / "text.safetensors", store)
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="holds a list; a dictionary of tensors is needed"):
        import_checkpoint(tmp_path / "list.pt", store)
    with pytest.raises(CheckpointError, match='kind = "tf" is unknown'):
        import_checkpoint(tmp_path / "list.pt", store, kind="tf")
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        export_checkpoint(store, tmp_path / "a", kind="torch")
    torch.save({"a": torch.ones(1), "z": torch.ones(1, dtype=torch.complex64)}, tmp_path / "a.pt")
    import_checkpoint(tmp_path / "a.pt", store)
    with pytest.raises(CheckpointError, match="exists already"):
        export_checkpoint(store, tmp_path / "a.pt", kind="torch")
    with pytest.raises(CheckpointError, match='no tensor whose name begins with "b"'):
        export_checkpoint(store, tmp_path / "b", kind="torch", prefix="b")
    with pytest.raises(CheckpointError, match="`z` is complex64, which safetensors cannot hold"):
        export_checkpoint(store, tmp_path / "b", kind="safetensors")
    with pytest.raises(CheckpointError, match="step = 3 is not in"):
        export_checkpoint(store, tmp_path / "b", kind="torch", step=3)


@pytest.mark.parametrize("kind", ["torch", "safetensors", "dcp"])
def test_damage_in_the_store_leaves_no_export(tmp_path: Path, store: Path, kind: str) -> None:
    torch.save(make_tensors(), tmp_path / "a.pt")
    import_checkpoint(tmp_path / "a.pt", store)
    [pack] = store.rglob("*.pack")
    content = bytearray(pack.read_bytes())
    content[len(content) // 2] ^= 1
    pack.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged at byte"):
        export_checkpoint(store, tmp_path / "out", kind=kind)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "store"]


def test_an_import_that_fails_leaves_the_store_as_it_was(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    import_checkpoint(tmp_path / "a.pt", store, step=1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "seal", full)
    with pytest.raises(CheckpointError, match="No space left on device; free some space"):
        import_checkpoint(tmp_path / "a.pt", store, step=2)
    assert [version.step for version in list_versions(storage_of(store))] == [1]
    monkeypatch.undo()
    import_checkpoint(tmp_path / "a.pt", store, step=2)


def test_a_file_that_says_that_something_contains_itself_is_refused(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless += [endless, endless]
    torch.save({"weight": torch.ones(2), "more": endless}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="contains itself"):
        import_checkpoint(tmp_path / "a.pt", tmp_path / "store")
    doubled: Any = []
    for _ in range(60):
        doubled = [doubled, doubled]
    torch.save({"weight": torch.ones(2), "more": doubled}, tmp_path / "b.pt")
    import_checkpoint(tmp_path / "b.pt", tmp_path / "store")


def test_files_of_safetensors_that_are_not_all_there_are_not_imported_in_part(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, folder / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="has 1 of 2 files"):
        import_checkpoint(folder, tmp_path / "store")
    weight_map = dict.fromkeys(("a", "b"), "model-00001-of-00002.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="names `b`, which is in none of its files"):
        import_checkpoint(folder, tmp_path / "store")


def test_a_pipe_in_a_folder_is_not_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="is a pipe or device"):
        import_checkpoint(folder, tmp_path / "store")
