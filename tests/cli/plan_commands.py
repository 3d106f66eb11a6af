"""Runs ``outlast plan`` in this process, and what its tests plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from in_process import in_process, parsed

SMALL = ("--micro-batch", "1", "--precision", "bf16")
"""Keeps a search short."""

CONFIG = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 5632,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}

CLUSTER = """
[cluster]
device = "own-cpu"
devices_per_node = 1
nodes = 1
memory_bytes = 16e9
memory_bytes_per_s = 5e10
[cluster.peak_flop_per_s]
fp32 = 1e12
[cluster.matmul_flop_per_s]
fp32 = 5e11
"""

JOB = """
[run]
name = "mine"

[model]
config = "{config}"

[data]
sequence_length = 4096

[train]
steps = 20000
batch_size = 512
precision = "bf16"
micro_batch_size = 2
activation_checkpointing = true

[parallel]
shard = 64
"""


class Plan:
    """`plan(*arguments)` gives exit code, stdout and stderr of ``outlast plan``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._outlast = in_process(monkeypatch, capfd)

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        code, out, err = self._outlast("plan", *arguments)
        assert "nan" not in out.casefold().split()
        return code, out, err

    def json(self, *arguments: object) -> Any:
        """The document that ``--json`` prints."""
        code, out, err = self(*arguments, "--json")
        assert code == 0, err
        return parsed(out)

    def refused(self, *arguments: object) -> str:
        """The sentence with which wrong input is refused."""
        code, out, err = self(*arguments)
        assert code == 2, out
        assert out == ""
        assert err.startswith("outlast: ")
        return err.removeprefix("outlast: ").strip()


def write_config(folder: Path, **changed: object) -> Path:
    """A folder with a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    table = {key: value for key, value in (CONFIG | changed).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(table))
    return folder


def write_job(folder: Path) -> Path:
    """A job file beside its config."""
    config = write_config(folder / "model") / "config.json"
    path = folder / "job.toml"
    path.write_text(JOB.format(config=config))
    return path
