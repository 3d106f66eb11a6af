"""Two trainers of one process on one store: the second loads what the first still writes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from outlast.checkpoint import CheckpointStore
from outlast.integrations.fabric import StoreCheckpointIO
from outlast.job import CheckpointSection


def test_a_file_is_loaded_by_another_once_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    publish = CheckpointStore._finish

    def slow(self: Any, *arguments: Any, **options: Any) -> str:
        release.wait(30)
        return publish(self, *arguments, **options)

    monkeypatch.setattr(CheckpointStore, "_finish", slow)
    first, second = (
        StoreCheckpointIO(tmp_path / "store", CheckpointSection(writer="thread")) for _ in range(2)
    )
    path = tmp_path / "step-1.ckpt"
    first.save_checkpoint({"weight": torch.full((3,), 2.0), "global_step": 1}, path)
    threading.Timer(0.3, release.set).start()
    assert second.load_checkpoint(path)["weight"].tolist() == [2.0] * 3
    first.files.close()
