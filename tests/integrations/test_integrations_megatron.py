"""Megatron-core's own files, read and written: its checkpoints, its tokens, its arguments."""

import pytest

pytest.importorskip("megatron.core", reason="megatron-core (the extra integrations) is missing")

import numpy as np
import torch
import torch.distributed as dist
from forked import run_ranks
from megatron.core import dist_checkpointing
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async

from outlast.checkpoint import CheckpointStore
from outlast.checkpoint.convert import export_checkpoint, import_checkpoint
from outlast.data import TokenFile, read_index, write_index
from outlast.errors import CheckpointError

ROWS, COLUMNS = 7, 4
"""Seven rows do not divide by two ranks."""


def whole():
    torch.manual_seed(0)
    return {
        "decoder.weight": torch.randn(6, 5),
        "decoder.bias": torch.randn(5).bfloat16(),
        "embedding.weight": torch.randn(ROWS, COLUMNS),
        "optimizer.exp_avg": torch.randn(4, 3),
    }


def _uneven(name, tensor, rank, ranks):
    """A row-wise shard, of which the first rank has one more."""
    cut = [0, ROWS] if ranks == 1 else [0, 4, ROWS]
    start, end = cut[rank], cut[rank + 1]
    return ShardedTensor(
        key=name,
        data=tensor[start:end].clone(),
        dtype=tensor.dtype,
        local_shape=(end - start, COLUMNS),
        global_shape=(ROWS, COLUMNS),
        global_offset=(start, 0),
        axis_fragmentations=None,
        replica_id=0,
    )


def sharded(tensors):
    """Megatron's description of what this rank has of `tensors`."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = tensors["decoder.weight"].chunk(ranks)[rank].clone()
    columns = tensors["optimizer.exp_avg"]
    return {
        "weight": ShardedTensor.from_rank_offsets("decoder.weight", rows, (0, rank, ranks)),
        "bias": ShardedTensor.from_rank_offsets(
            "decoder.bias", tensors["decoder.bias"].clone(), replica_id=rank
        ),
        "embedding": _uneven("embedding.weight", tensors["embedding.weight"], rank, ranks),
        "moment": ShardedTensor.from_rank_offsets(
            "optimizer.exp_avg", columns.clone(), replica_id=rank
        ),
        "rng": ShardedObject("rng", {"rank": 0}, (1,), (0,), replica_id=rank),
        "iteration": 120,
        "args": {"hidden_size": 5},
    }


def _begin():
    dist.init_process_group("gloo")
    # Megatron-core waits for a device and puts a flag on it; here the CPU is the only one.
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"


def _save(folder):
    _begin()
    dist_checkpointing.save(sharded(whole()), folder)
    # Its process would outlive this rank, which ends without a word.
    filesystem_async._results_queue._manager.shutdown()
    dist.barrier()


def _load(folder):
    _begin()
    empty = {name: torch.zeros_like(each) for name, each in whole().items()}
    found = dist_checkpointing.load(sharded(empty), folder)
    return {
        name: found[name].tolist() if torch.is_tensor(found[name]) else found[name]
        for name in ("weight", "bias", "embedding", "moment", "rng", "iteration", "args")
    }


@pytest.fixture(scope="module", params=[1, 2])
def saved(request, tmp_path_factory):
    """A folder that Megatron-core has saved on one or two ranks."""
    run = tmp_path_factory.mktemp("megatron")
    folder = run / "iter_0000120"
    folder.mkdir()
    run_ranks(request.param, _save, str(folder))
    (run / "latest_checkpointed_iteration.txt").write_text("120")
    return run


@pytest.mark.distributed
def test_a_checkpoint_of_megatron_goes_into_a_store_exactly(saved, tmp_path):
    done = import_checkpoint(saved, tmp_path / "store")
    assert done.step == 120
    assert done.notes == ["common.pt was imported as it is, as the bytes megatron.common"]
    export_checkpoint(tmp_path / "store", tmp_path / "flat", kind="dcp")
    found = {name: torch.empty_like(each) for name, each in whole().items()}
    torch.distributed.checkpoint.load(found, checkpoint_id=tmp_path / "flat", no_dist=True)
    for name, each in whole().items():
        assert torch.equal(found[name], each), name


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2])
def test_megatron_loads_what_a_store_gives_back_on_any_number_of_ranks(saved, ranks, tmp_path):
    import_checkpoint(saved / "iter_0000120", tmp_path / "store")
    export_checkpoint(tmp_path / "store", tmp_path / "out", kind="megatron")
    found = run_ranks(ranks, _load, str(tmp_path / "out"))
    assert found == run_ranks(ranks, _load, str(saved / "iter_0000120"))
    assert found[0]["iteration"] == 120
    assert found[0]["args"] == {"hidden_size": 5}
    assert found[0]["rng"] == {"rank": 0}
    rows = [row for each in found for row in each["embedding"]]
    assert rows == whole()["embedding.weight"].tolist()


@pytest.mark.distributed
def test_what_a_model_of_torch_saved_is_loaded_by_megatron(tmp_path):
    model = torch.nn.Linear(3, 7)
    with CheckpointStore(tmp_path / "store") as store:
        store.save(9, {"model": model})
    done = export_checkpoint(tmp_path / "store", tmp_path / "out", kind="megatron", prefix="model.")
    assert done.notes == ["common.pt is empty, as the version was not imported from Megatron"]
    (found,) = run_ranks(1, _load_weight, str(tmp_path / "out"))
    assert found == model.weight.tolist()


def _load_weight(folder):
    _begin()
    shard = ShardedTensor.from_rank_offsets("weight", torch.zeros(7, 3))
    return dist_checkpointing.load({"w": shard}, folder)["w"].tolist()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ('{"sharded_backend": "zarr"}', "sharded_backend = 'zarr', and 'torch_dist' is supported"),
        ('{"sharded_backend": "torch_dist", "sharded_backend_version": 2}', "version = 2, and 1"),
        ("[]", "is not what Megatron-core writes"),
        (None, "is not complete: it has no metadata.json"),
    ],
)
@pytest.mark.distributed
def test_other_formats_are_refused(saved, change, sentence, tmp_path):
    place = saved / "iter_0000120" / "metadata.json"
    before = place.read_bytes()
    try:
        place.unlink()
        if change is not None:
            place.write_text(change)
        with pytest.raises(CheckpointError, match=sentence):
            import_checkpoint(saved, tmp_path / "store", kind="megatron")
    finally:
        place.write_bytes(before)


DOCUMENTS = [[5, 6, 7], [8], [70, 71, 72, 73]]


@pytest.mark.parametrize("dtype", [np.int32, np.uint16])
def test_tokens_that_megatron_wrote_are_read(dtype, tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "t.bin"), dtype=dtype)
    for document in DOCUMENTS:
        # Each document in two sequences, where it is long enough.
        parts = [document] if len(document) < 2 else [document[:1], document[1:]]
        builder.add_document(torch.tensor(document), [len(each) for each in parts])
    builder.finalize(str(tmp_path / "t.idx"))
    file = TokenFile.open(tmp_path / "t.bin")
    assert file.tokens.tolist() == [token for document in DOCUMENTS for token in document]
    index = read_index(file.path)
    assert index.lengths.tolist() == [1, 2, 1, 1, 3]
    assert index.documents.tolist() == [0, 2, 3, 5]


@pytest.mark.parametrize(("dtype", "read_as"), [("<u2", "uint16"), ("<u4", "int32")])
def test_tokens_that_were_prepared_here_are_read_by_megatron(dtype, read_as, tmp_path):
    tokens = [token for document in DOCUMENTS for token in (*document, 0)]
    np.array(tokens, dtype).tofile(tmp_path / "t.bin")
    write_index(TokenFile.open(tmp_path / "t.bin", np.dtype(dtype).name), end_of_document=0)
    found = IndexedDataset(str(tmp_path / "t"), mmap=True)
    assert len(found) == len(DOCUMENTS)
    assert found[0].dtype == read_as
    assert [each.tolist() for each in found[:]] == [[*each, 0] for each in DOCUMENTS]
    assert found.document_indices.tolist() == [0, 1, 2, 3]
