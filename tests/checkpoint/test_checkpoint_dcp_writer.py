"""The writer for DCP in the background, without collectives, and without pickle."""

import datetime
import enum
import io
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_checkpoint_dcp import make_dcp_state, same, saved_steps
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from outlast.checkpoint import Bound, Reduction, dcp_save
from outlast.checkpoint import dcp as dcp_storage
from outlast.checkpoint.convert import export_checkpoint
from outlast.checkpoint.dcp import OutlastReader, OutlastWriter
from outlast.checkpoint.dcp_format import Notes, decode_object
from outlast.checkpoint.dcp_save import SaveEngine
from outlast.checkpoint.encoder import Encoder
from outlast.checkpoint.manifest import Fields, ManifestError
from outlast.checkpoint.owner import Claim
from outlast.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (un|dis)")

Group = Callable[[int], Callable[..., list[Any]]]


class Gate:
    """Holds up the encoder until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        real = Encoder.write

        def write(encoder: Encoder, *args: Any) -> Any:
            assert self.opened.wait(60)
            return real(encoder, *args)

        monkeypatch.setattr(Encoder, "write", write)


def test_in_the_background_the_state_is_copied_and_seen_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = OutlastWriter(tmp_path, background=True)
    dcp.save(make_dcp_state(1), storage_writer=writer)
    writer.wait()
    gate = Gate(monkeypatch)
    state = make_dcp_state(2)
    dcp.save(state, storage_writer=writer)
    expected = make_dcp_state(2)
    state["model"]["embedding"].zero_()
    state["model"]["half"].zero_()
    found = make_dcp_state(0)
    dcp.load(found, storage_reader=OutlastReader(tmp_path))
    assert same(found, make_dcp_state(1))
    with pytest.raises(CheckpointException, match=r"another save to .* is under way"):
        dcp.save(state, storage_writer=OutlastWriter(tmp_path))
    gate.opened.set()
    writer.wait()
    dcp.load(found, storage_reader=OutlastReader(tmp_path))
    assert same(found, expected)
    # The next save waits by itself.
    dcp.save(make_dcp_state(3), storage_writer=writer)
    dcp.save(make_dcp_state(4), storage_writer=writer)
    writer.close()
    assert saved_steps(tmp_path)[-3:] == [2, 3, 4]


@pytest.mark.parametrize("end", [OutlastWriter.wait, OutlastWriter.close])
def test_a_save_that_fails_in_the_background_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    end: Callable[[OutlastWriter], None],
) -> None:
    writer = OutlastWriter(tmp_path, background=True)
    real = dcp_storage.seal

    def full(storage: Any, contents: Any) -> None:
        if contents.version.step == 1:
            raise OSError(28, "No space left on device")
        real(storage, contents)

    monkeypatch.setattr(dcp_storage, "seal", full)
    dcp.save({"a": torch.ones(2)}, storage_writer=writer)
    dcp.save({"a": torch.ones(2)}, storage_writer=writer)
    with pytest.raises(CheckpointError, match=r"step 1 in .* failed: No space left on device"):
        end(writer)
    assert "No space left on device" in caplog.text
    writer.wait()
    assert saved_steps(tmp_path)[-1] == 2


def save_in_background(place: Path, failing: int | None) -> str:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    value = torch.arange(4000.0).reshape(400, 10)
    writer = OutlastWriter(place, background=True)
    dcp.save({"a": distribute_tensor(value, mesh, [Shard(0)]), "epoch": 1}, storage_writer=writer)
    writer.wait()
    message = ""
    if failing == rank:
        real = Encoder.write
        Encoder.write = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left"))  # type: ignore
    state = {"a": distribute_tensor(-value, mesh, [Shard(0)]), "epoch": 2}
    dcp.save(state, storage_writer=writer)
    try:
        writer.wait()
    except CheckpointError as error:
        message = str(error)
    if failing == rank:
        Encoder.write = real  # type: ignore[method-assign]
    dist.barrier()
    found = {"a": distribute_tensor(torch.zeros_like(value), mesh, [Shard(0)]), "epoch": 0}
    dcp.load(found, storage_reader=OutlastReader(place))
    sign = 1 if failing is not None else -1
    assert found["epoch"] == (1 if failing is not None else 2)
    assert torch.equal(found["a"].full_tensor(), sign * value)
    dcp.save(state, storage_writer=writer)
    writer.close()
    dcp.load(found, storage_reader=OutlastReader(place))
    assert found["epoch"] == 2
    return message


@pytest.mark.distributed
@pytest.mark.parametrize("failing", [None, 0, 2])
def test_ranks_agree_on_a_save_in_the_background(
    ranks: Group, tmp_path: Path, failing: int | None
) -> None:
    messages = ranks(3)(save_in_background, tmp_path, failing)
    assert all(("No space left" in message) == (failing is not None) for message in messages)


def test_the_step_of_the_next_save_is_its_own_while_one_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)

    class Writer(OutlastWriter):
        def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None:
            if self.step == 200:
                gate.opened.set()
            super().set_up_storage_writer(*args, **kwargs)

    writer = Writer(tmp_path, background=True)
    for step in (100, 200):
        dcp.save({"a": torch.ones(2)}, storage_writer=writer, checkpoint_id=f"step-{step}")
    writer.wait()
    assert saved_steps(tmp_path) == [100, 200]


@pytest.mark.filterwarnings("ignore:.*offers no conditional write")
def test_a_session_that_could_not_be_claimed_is_claimed_by_the_next_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claimed = []

    def claim(*args: Any, **kwargs: Any) -> Claim:
        claimed.append(args[1])
        if len(claimed) == 1:
            raise OSError(5, "Input/output error")
        return Claim(*args, **kwargs)

    monkeypatch.setattr(dcp_save, "Claim", claim)
    writer = OutlastWriter("memory://dcp-claims")
    with pytest.raises(CheckpointException, match="Input/output error"):
        dcp.save({"a": torch.ones(2)}, storage_writer=writer)
    for _ in range(2):
        dcp.save({"a": torch.ones(2)}, storage_writer=writer)
    assert claimed == [1, 1]


def test_memory_that_was_given_back_is_refused(tmp_path: Path) -> None:
    tensor = torch.ones(100_000)
    tensor.untyped_storage().resize_(0)
    for background in (False, True):
        writer = OutlastWriter(tmp_path, background=background)
        with pytest.raises(CheckpointException, match="memory of `a` was given back"):
            dcp.save({"a": tensor}, storage_writer=writer)


def fail_to_copy(place: Path, failing: int) -> str:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    writer = OutlastWriter(place, background=True, timeout_seconds=20)
    state = {"own": {f"rank {rank}": torch.ones(2)}}
    real = SaveEngine.stage
    if failing == rank:
        SaveEngine.stage = lambda *_: (_ for _ in ()).throw(OSError(12, "No memory"))  # type: ignore
    with pytest.raises(CheckpointException, match="No memory"):
        dcp.save(state, storage_writer=writer)
    SaveEngine.stage = real  # type: ignore[method-assign]
    dcp.save(state, storage_writer=writer)
    message = ""
    try:
        writer.wait()
    except CheckpointError as error:
        message = str(error)
    return message


@pytest.mark.distributed
@pytest.mark.parametrize("failing", [0, 1])
def test_nobody_waits_for_a_rank_that_could_not_copy(
    ranks: Group, tmp_path: Path, failing: int
) -> None:
    for rank, message in enumerate(ranks(3)(fail_to_copy, tmp_path, failing)):
        assert "did not report" not in message
        assert ("failed" in message) == (rank != failing)
    newest = OutlastReader(tmp_path).newest()
    assert newest is not None
    assert newest.step == 2


@pytest.mark.slow
def test_the_end_of_the_program_waits_while_thread_pools_take_work(tmp_path: Path) -> None:
    # As the clients of object stores give them.
    program = f"""
import time, torch, torch.distributed.checkpoint as dcp
from concurrent.futures import ThreadPoolExecutor
from outlast.checkpoint.dcp import OutlastWriter
from outlast.checkpoint.encoder import Encoder

def write(*args):
    time.sleep(0.5)
    ThreadPoolExecutor(1).submit(int).result()
    return real(*args)

real, Encoder.write = Encoder.write, write
writer = OutlastWriter({str(tmp_path)!r}, background=True)
dcp.save({{"a": torch.ones(3)}}, storage_writer=writer)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert OutlastReader(tmp_path).newest() is not None


def die_in_the_background(place: Path) -> None:
    writer = OutlastWriter(place, background=True)
    dcp.save(make_dcp_state(1), storage_writer=writer)
    writer.wait()
    Encoder.write = lambda *_: time.sleep(60)  # type: ignore
    dcp.save(make_dcp_state(2), storage_writer=writer)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.distributed
def test_a_kill_during_a_save_in_the_background_leaves_the_version_before(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        die_in_the_background(tmp_path)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    found = make_dcp_state(0)
    dcp.load(found, storage_reader=OutlastReader(tmp_path))
    assert same(found, make_dcp_state(1))


class Colour(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: int
    y: torch.Tensor


class Own:
    """An object of the program, which only a pickle can hold."""

    def __init__(self, value: int) -> None:
        self.value = value


def plain_objects() -> dict[str, Any]:
    return {
        "tensor": torch.ones(2),
        "path": pathlib.PurePosixPath("a/b"),
        "colour": Colour.RED,
        "when": datetime.datetime(2024, 1, 2),
        "random": ("MT19937", np.arange(624, dtype=np.uint32), 624, 0, 0.0),
        "pair": Point(1, torch.arange(3.0)),
        "scalar": np.float32(1.5),
        "empty": (torch.empty(0, 3), np.empty(0)),
        "raw": b"\n\x00",
        "numbers": ({1: {2.5, 3.5}},),
    }


def test_plain_objects_need_no_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", None)
        dcp.save(plain_objects(), storage_writer=OutlastWriter(tmp_path))
    found = {**dict.fromkeys(plain_objects()), "tensor": torch.zeros(2)}
    dcp.load(found, storage_reader=OutlastReader(tmp_path))
    expected = plain_objects()
    assert found["path"] == expected["path"]
    assert found["colour"] is Colour.RED
    assert found["when"] == expected["when"]
    assert found["random"][2:] == expected["random"][2:]
    assert np.array_equal(found["random"][1], expected["random"][1])
    assert found["random"][1].dtype == np.uint32
    assert type(found["pair"]) is Point
    assert torch.equal(found["pair"].y, torch.arange(3.0))
    assert found["scalar"] == np.float32(1.5)
    assert found["empty"][0].shape == (0, 3)
    assert (found["raw"], found["numbers"]) == (expected["raw"], expected["numbers"])
    export_checkpoint(tmp_path, tmp_path.with_suffix(".pt"), kind="torch")


def test_what_needs_a_pickle_is_refused_by_its_path(tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "deep": {"own": Own(3)}, "file": io.BytesIO(b"x")}
    with pytest.raises(CheckpointException, match=r"`deep\.own` is of type Own.*allow_pickle=True"):
        dcp.save(state, storage_writer=OutlastWriter(tmp_path))
    dcp.save(state, storage_writer=OutlastWriter(tmp_path, allow_pickle=True))
    found = {"a": torch.zeros(2), "deep": {"own": Own(0)}, "file": io.BytesIO()}
    with pytest.raises(CheckpointException, match=r"`deep\.own` was saved as a pickle"):
        dcp.load(found, storage_reader=OutlastReader(tmp_path))
    dcp.load(found, storage_reader=OutlastReader(tmp_path, allow_pickle=True))
    assert found["deep"]["own"].value == 3
    assert found["file"].getvalue() == b"x"
    assert torch.equal(found["a"], torch.ones(2))


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning", "ignore:TypedStorage")
def test_quantised_tensors_go_as_pickles(tmp_path: Path) -> None:
    def state(scale: float) -> dict[str, Any]:
        values = torch.arange(6.0).reshape(2, 3) * scale
        return {
            "a": torch.ones(2),
            "x": {"y": torch.quantize_per_tensor(values, 0.5, 3, torch.qint8)},
        }

    with pytest.raises(CheckpointException, match=r"`x\.y` is quantised.*allow_pickle=True"):
        dcp.save(state(1), storage_writer=OutlastWriter(tmp_path / "ours"))
    dcp.save(state(1), storage_writer=OutlastWriter(tmp_path / "ours", allow_pickle=True))
    dcp.save(state(1), storage_writer=dcp.FileSystemWriter(tmp_path / "stock"))
    ours = OutlastReader(tmp_path / "ours").read_metadata()
    stock = dcp.FileSystemReader(tmp_path / "stock").read_metadata()
    assert ours.state_dict_metadata == stock.state_dict_metadata
    found = state(0)
    dcp.load(found, storage_reader=OutlastReader(tmp_path / "ours", allow_pickle=True))
    assert torch.equal(found["x"]["y"].int_repr(), state(1)["x"]["y"].int_repr())


class OwnBytes(DefaultSavePlanner):
    """Makes bytes in its own way."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        found = super().transform_object(write_item, object)
        return io.BytesIO(b"own") if isinstance(found, io.BytesIO) and object == 7 else found


def test_bytes_of_a_planner_of_its_own_are_a_pickle_unless_torch_reads_them(tmp_path: Path) -> None:
    state = {"a": torch.ones(1), "lr": 0.5}
    dcp.save(state, storage_writer=OutlastWriter(tmp_path), planner=OwnBytes())
    found = {"a": torch.zeros(1), "lr": 0.0}
    dcp.load(found, storage_reader=OutlastReader(tmp_path))
    assert found["lr"] == 0.5
    with pytest.raises(CheckpointException, match="`lr` is of type BytesIO"):
        dcp.save({"lr": 7}, storage_writer=OutlastWriter(tmp_path), planner=OwnBytes())


def test_the_tensors_of_the_state_are_not_rounded(tmp_path: Path) -> None:
    value = torch.randn(1000)
    kept = value.clone()
    reduction = Reduction(lossy={"*": Bound(relative=1e-2)})
    dcp.save({"a": value}, storage_writer=OutlastWriter(tmp_path, reduction=reduction))
    assert torch.equal(value, kept)


def test_views_of_every_kind_are_saved_as_they_read(tmp_path: Path) -> None:
    waves = torch.randn(40, dtype=torch.complex64)
    state = {
        "conjugate": waves.conj(),
        "negated": waves.conj().imag,
        "transposed": torch.randn(300, 200).t(),
        "every other": torch.randn(50)[::2],
        "expanded": torch.randn(1, 7).expand(5, 7),
        "one": torch.randn(4, 9)[:1, :1].t(),
    }
    dcp.save(state, storage_writer=OutlastWriter(tmp_path))
    found = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()}
    dcp.load(found, storage_reader=OutlastReader(tmp_path))
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def save_alone(place: Path, steps: int) -> None:
    dist.init_process_group("gloo")
    writer = OutlastWriter(place, keep=2)
    for step in range(1, steps + 1):
        dcp.save(alone_state(step), storage_writer=writer, use_collectives=False)


def alone_state(step: int) -> dict[str, Any]:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    value = torch.arange(30.0).reshape(10, 3) * step
    return {
        "own": torch.full((4,), float(rank + step)),
        "share": distribute_tensor(value, mesh, [Shard(0)]),
        # Of this, the second rank has nothing.
        "row": distribute_tensor(value[:1], mesh, [Shard(0)]),
        "epoch": (rank, step),
    }


def load_alone(place: Path, step: int) -> str:
    dist.init_process_group("gloo")
    found = alone_state(0)
    try:
        reader = OutlastReader(place)
        dcp.load(found, storage_reader=reader)
        assert reader.newest() == reader.version
    except CheckpointException as error:
        return str(error)
    expected = alone_state(step)
    assert torch.equal(found["own"], expected["own"])
    for name in ("share", "row"):
        assert torch.equal(found[name].to_local(), expected[name].to_local())
    assert found["epoch"] == expected["epoch"]
    return ""


@pytest.mark.distributed
def test_without_collectives_each_rank_loads_what_it_saved(ranks: Group, tmp_path: Path) -> None:
    ranks(2)(save_alone, tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-00000", "rank-00001"]
    assert ranks(2)(load_alone, tmp_path, 3) == ["", ""]
    # A later run goes on in the same session on all ranks.
    ranks(2)(save_alone, tmp_path, 4)
    assert ranks(2)(load_alone, tmp_path, 4) == ["", ""]
    # What not all ranks have is not taken.
    [newest] = (tmp_path / "rank-00001").glob("step-00000007-*")
    for file in newest.iterdir():
        file.unlink()
    assert ranks(2)(load_alone, tmp_path, 3) == ["", ""]
    for message in ranks(3)(load_alone, tmp_path, 3):
        assert "rank 2 has saved nothing in" in message
    with pytest.raises(CheckpointException, match="holds what was saved without collectives"):
        dcp.save({"a": torch.ones(1)}, storage_writer=OutlastWriter(tmp_path))


def load_cut_otherwise(place: Path) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {"share": distribute_tensor(torch.zeros(10, 3), mesh, [Shard(1)])}
    with pytest.raises(CheckpointError, match=r"`share` of shape .* load it cut as it was"):
        dcp.load(found, storage_reader=OutlastReader(place))


@pytest.mark.distributed
def test_without_collectives_nothing_is_loaded_in_part(ranks: Group, tmp_path: Path) -> None:
    ranks(2)(save_alone, tmp_path, 1)
    found = {"share": torch.zeros(10, 3)}
    with pytest.raises(CheckpointException, match=r"2 ranks saved in .* and 1 load"):
        dcp.load(found, storage_reader=OutlastReader(tmp_path))
    ranks(2)(load_cut_otherwise, tmp_path)
    with pytest.raises(CheckpointError, match="has rank-00001, which these 1 ranks cannot"):
        dcp.save(found, storage_writer=OutlastWriter(tmp_path), use_collectives=False)


@pytest.mark.distributed
def test_without_collectives_steps_are_counted_alike_after_a_kill(
    ranks: Group, tmp_path: Path
) -> None:
    ranks(2)(save_alone, tmp_path, 3)
    [newest] = (tmp_path / "rank-00001").glob("step-00000003-*")
    shutil.rmtree(newest)
    ranks(2)(save_alone, tmp_path, 2)
    assert [saved_steps(tmp_path / f"rank-0000{rank}")[-2:] for rank in (0, 1)] == [[4, 5]] * 2
    assert ranks(2)(load_alone, tmp_path, 2) == ["", ""]


def test_both_ways_do_not_mix(tmp_path: Path) -> None:
    writer = OutlastWriter(tmp_path)
    dcp.save({"a": torch.ones(1)}, storage_writer=writer)
    with pytest.raises(CheckpointError, match="holds what was saved with collectives"):
        dcp.save({"a": torch.ones(1)}, storage_writer=writer, use_collectives=False)


@pytest.mark.parametrize(
    "notes",
    [
        {"plain": "a"},
        {"plain": ["a", "a"]},
        {"plain": [1]},
        {"pickled": []},
        {"pickled": {"a": 1}},
        {"pickled": {"a": ["float32", [1]]}},
        {"pickled": {"a": ["qint8", [-1]]}},
        {"pickled": {"a": ["qint8", [1] * 100]}},
        {"shares": {"a": ["b", 1, 2]}},
        {"shares": {"a": ["b", [4], [1, 2]]}},
        {"shares": {"a": [1, [4], [2]]}},
        {"shares": {"a": ["b", [10**30], [2]]}},
    ],
)
def test_malformed_notes_are_refused(notes: dict[str, Any]) -> None:
    with pytest.raises(ManifestError, match="is malformed"):
        Notes().add(Fields("a part", notes))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1]\n",
        b"{}\n",
        b"[" * 100_000,
        b'{"value":{"!tensor":"x","kind":"torch"},"tensors":{}}\n',
        b'{"value":{"!tensor":"x","kind":"torch"},"tensors":{"x":["float32",[4],0]}}\n\x00',
        b'{"value":{"!tensor":"x","kind":"torch"},"tensors":{"x":["object",[4],0]}}\n\x00',
        b'{"value":{"!tensor":"x","kind":"torch"},"tensors":{"x":["float32",[99999999999],0]}}\n',
        b'{"value":{"!tensor":"x","kind":"torch"},"tensors":{"x":["float32",[0,9],-1]}}\n',
    ],
)
def test_malformed_objects_are_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError):
        decode_object("a", content)
