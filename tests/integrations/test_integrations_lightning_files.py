"""What `ModelCheckpoint` asks for, and what is then in the store."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning.pytorch")

from forked import run_ranks
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_runs import Tiny, assert_same, finish, loaders, losses, start

from outlast.checkpoint import list_versions, load, storage_of
from outlast.checkpoint.retention import complete_versions
from outlast.errors import CheckpointError, IntegrationError
from outlast.integrations.fabric import StoreCheckpointIO
from outlast.integrations.files import read_content, read_pointer
from outlast.integrations.lightning import with_outlast

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]

BEST: dict[str, Any] = {
    "save_top_k": 2,
    "monitor": "val_loss",
    "mode": "min",
    "save_last": True,
    "filename": "{epoch}-{val_loss:.4f}",
}


def versions(folder: Path) -> list[str]:
    store = storage_of(folder / "runs" / "it" / "checkpoints")
    # What others need of a version that is gone may still be in its folder.
    return [version.folder for version in complete_versions(store)]


def _validated(folder: Path, path: str) -> float:
    """The validation loss of a file's weights."""
    torch.manual_seed(7)
    model = Tiny(folder, {})
    arguments = with_outlast(settings=[f'run.directory="{folder}/runs"', "run.name=it"])
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    [found] = trainer.validate(model, loaders({})[1], ckpt_path=path, verbose=False)
    return float(found["val_loss"])


@pytest.mark.supports("lightning", "checkpoint", "resume")
def test_the_best_and_the_last_stay_and_the_store_holds_no_more(tmp_path: Path) -> None:
    how: dict[str, Any] = {"saving": BEST, "validate": True, "epochs": 5}
    other = tmp_path / "undisturbed"
    finish(other, **how)
    folder = tmp_path / "killed"
    assert start(folder, plan="31 SIGKILL", **how) == [None]
    finish(folder, **how)
    assert losses(folder) == losses(other)
    assert_same(folder, other)
    for each in (folder, other):
        files = sorted((each / "own").iterdir())
        assert len(files) == 3
        assert files[-1].name == "last.ckpt"
        # Two with the lowest losses of five: each says in its name which loss it has.
        for file in files[:2]:
            named = float(file.stem.rpartition("=")[2])
            [found] = run_ranks(1, _validated, each, str(file))
            assert found == pytest.approx(named, abs=1e-4)
        led_to = {entry.version for file in files for entry in read_pointer(file).entries}
        assert {*versions(each)} == led_to
    names = [sorted(file.name for file in (each / "own").iterdir()) for each in (folder, other)]
    assert names[0] == names[1]


class _Named(Tiny):
    """With an argument that `load_from_checkpoint` takes from the file."""

    def __init__(self, folder: str, how: dict[str, Any], width: int) -> None:
        super().__init__(Path(folder), how)
        self.save_hyperparameters()
        self.width = width


def _loaded(folder: Path) -> tuple[int, bool]:
    model = _Named(str(folder), {}, 3)
    arguments = with_outlast(settings=[f'run.directory="{folder}/runs"', "run.name=it"])
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    trainer.fit(model, loaders({})[0])
    path, plain = folder / "last.ckpt", folder / "plain.ckpt"
    trainer.save_checkpoint(path)
    torch.save(trainer.strategy.load_checkpoint(path), plain)
    loaded = _Named.load_from_checkpoint(plain, weights_only=False)
    other = StoreCheckpointIO(folder / "runs" / "it" / "checkpoints").load_checkpoint(path)
    state = model.state_dict()
    same = all(torch.equal(state[name], each) for name, each in loaded.state_dict().items())
    return loaded.width, same and other["global_step"] == 2


def test_a_model_is_loaded_by_way_of_a_plain_file(tmp_path: Path) -> None:
    assert run_ranks(1, _loaded, tmp_path) == [(3, True)]


def test_two_names_of_one_save_are_written_once(tmp_path: Path) -> None:
    finish(tmp_path, saving={"save_last": True, "every_n_train_steps": 4}, epochs=1)
    [newest, last] = sorted((tmp_path / "own").iterdir())
    one, other = (read_pointer(each).entries[0] for each in (newest, last))
    assert one.version == other.version == "step-00000012-a1"
    # What differs is in the file: the state of ModelCheckpoint knows the name of the last one.
    assert one.values is None
    assert "last.ckpt" in str(other.values)


@pytest.mark.supports("lightning", "checkpoint")
def test_a_damaged_last_version_is_passed_over(tmp_path: Path) -> None:
    settings = ["checkpoint.every_steps=6", "checkpoint.asynchronous=false"]
    other = tmp_path / "undisturbed"
    finish(other, *settings)
    folder = tmp_path / "damaged"
    assert start(folder, *settings, plan="20 SIGKILL") == [None]
    last = folder / "runs" / "it" / "lightning" / "last.ckpt"
    pointer = read_pointer(last)
    assert [entry.version for entry in pointer.entries] == ["step-00000018-a1", "step-00000012-a1"]
    [pack] = (pointer.store / "step-00000018-a1").glob("*.pack")
    content = bytearray(pack.read_bytes())
    content[len(content) // 2] ^= 0xFF
    pack.write_bytes(content)
    storage = storage_of(pointer.store)
    with pytest.raises(CheckpointError):
        read_content(storage, load(storage, list_versions(storage)[-1]))
    finish(folder, *settings)
    assert_same(folder, other)
    # Batches 12 to 17 were done again.
    lines = (folder / "losses0.jsonl").read_text().splitlines()
    assert len(lines) == 36 + 20 - 12


def _sharded(folder: Path) -> str:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1),
        default_root_dir=folder,
        logger=False,
        **with_outlast(settings=[f'run.directory="{folder}/runs"']),
    )
    with pytest.raises(IntegrationError) as refused:
        trainer.fit(Tiny(folder, {}), loaders({})[0])
    return str(refused.value)


def test_a_strategy_with_files_of_its_own_is_refused(tmp_path: Path) -> None:
    [sentence] = run_ranks(1, _sharded, tmp_path)
    assert "strategy = ModelParallelStrategy writes its checkpoints by itself" in sentence


def _imported(folder: Path, version: str) -> list[str]:
    """What the adapters say where the Lightning of another version is found first."""
    information = folder / f"lightning-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Name: lightning\nVersion: {version}\n")
    sys.path.insert(0, str(folder))
    sentences = []
    for name in ("fabric", "lightning"):
        with pytest.raises(IntegrationError) as refused:
            importlib.reload(importlib.import_module(f"outlast.integrations.{name}"))
        sentences.append(str(refused.value))
    return sentences


@pytest.mark.parametrize("version", ["2.5.6", "2.7.0", "3.0"])
def test_another_version_is_refused_with_those_that_work(tmp_path: Path, version: str) -> None:
    [sentences] = run_ranks(1, _imported, tmp_path, version)
    wanted = (
        f"lightning {version} is installed; this adapter works with lightning from 2.6 to "
        'below 2.7: pip install "lightning>=2.6,<2.7"'
    )
    assert sentences == [wanted, wanted]
