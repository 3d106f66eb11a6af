"""Small training states for the checkpoint tests, and their bits."""

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from outlast.checkpoint import CheckpointStore, SaveResult, list_versions, storage_of
from outlast.checkpoint.encoder import Encoder, PartJob, Written

VOCABULARY, WIDTH = 11, 6
DELTA_CHAIN = Path(__file__).parent / "data" / "delta-chain"
"""Four versions of which the last three are differences to the one before."""


class Net(nn.Module):
    """Tied embedding and head, odd sizes, and buffers of every kind that models have."""

    def __init__(self, seed: int = 0, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("cosines", torch.randn(5, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.tensor(seed, dtype=torch.int64))
        self.register_buffer("mask", torch.rand(3, 2) > 0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += tokens.numel()
        hidden = self.embedding(tokens)
        for layer in self.hidden:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden)


class Sampler:
    """A data object whose state grows other keys as it goes, and has integer keys."""

    def __init__(self) -> None:
        self.state: dict[Any, Any] = {}

    def advance(self, step: int) -> None:
        self.state["position"] = step
        self.state.setdefault("epochs", {})[step] = [step, "half"]
        self.state["generator"] = torch.full((3,), step, dtype=torch.uint8)

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if "hidden" in name and p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    return [
        torch.optim.Muon(matrices, lr=0.02),
        torch.optim.AdamW(others, lr=0.01, weight_decay=0.1),
    ]


def make_state(seed: int = 0) -> dict[str, Any]:
    model = Net(seed)
    return {"model": model, "optimizer": make_optimizers(model), "data": Sampler()}


def train(state: dict[str, Any], first: int, last: int) -> None:
    """Steps `first` to `last`, each with its own batch, whatever came before."""
    for step in range(first, last + 1):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCABULARY, (4, 3), generator=generator)
        logits = state["model"](tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        for optimizer in state["optimizer"]:
            optimizer.step()
            optimizer.zero_grad()
        if "data" in state:
            state["data"].advance(step)


def bits(state: dict[str, Any]) -> dict[str, Any]:
    """Every tensor and value of `state`, tensors as type, shape and digest of their bytes."""
    found: dict[str, Any] = {}
    model = state["model"]
    # Wrappers add prefixes; order of parameters is the same with and without them.
    for number, tensor in enumerate([*model.parameters(), *model.buffers()]):
        found[f"model.{number}"] = digest(tensor)
    for which, optimizer in enumerate(state.get("optimizer", [])):
        content = optimizer.state_dict()
        for parameter, values in content["state"].items():
            for name, value in values.items():
                found[f"optimizer.{which}.{parameter}.{name}"] = digest(value)
        for number, group in enumerate(content["param_groups"]):
            found[f"optimizer.{which}.group.{number}"] = repr(group)
    if "data" in state:
        found["data"] = repr(state["data"].state)
    return found


def digest(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not isinstance(value, torch.Tensor):
        return value
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return str(value.dtype), tuple(value.shape), hashlib.sha256(bytes(content.tolist())).hexdigest()


def open_store(directory: Path, **settings: Any) -> CheckpointStore:
    """A store whose writer is a thread, which starts at once."""
    return CheckpointStore(directory, writer="thread", **settings)


def save_once(directory: Path, step: int, state: dict[str, Any], **settings: Any) -> SaveResult:
    """One save in a session of its own."""
    with open_store(directory, **settings) as store:
        return store.save(step, state)


def restore_step(directory: Path, state: dict[str, Any], **settings: Any) -> int:
    """Restore into `state`; returns the step, 0 when there is no version."""
    restored = open_store(directory).restore(state, **settings)
    return 0 if restored is None else restored.step


def steps_in(directory: Path) -> list[int]:
    """Steps of the versions in `directory` that have manifests, from old to new."""
    storage = storage_of(directory)
    return [
        version.step
        for version in list_versions(storage)
        if any(name.endswith(".json") for name in storage.files(version.folder))
    ]


def total_bytes(directory: Path) -> int:
    """Bytes of all files below `directory`."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


class WritingHeld:
    """Keeps the writer thread from beginning until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.begun = threading.Event()
        write = Encoder.write

        def held(encoder: Encoder, job: PartJob, check: Callable[[], None]) -> Written:
            self.begun.set()
            assert self.gate.wait(30)
            return write(encoder, job, check)

        monkeypatch.setattr(Encoder, "write", held)


class Holder:
    """An object whose state is what it is given."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
