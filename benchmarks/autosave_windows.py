"""What a save blocks: copy windows against staging at once and against `dcp.async_save`."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from harness import Bar, at_most, median
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from outlast.checkpoint import CheckpointStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.checkpoint import SaveHandle

TOKENS = 256
QUIET_STEPS = 4


class Training:
    """A stack of linear layers with AdamW: 12 bytes of state for each parameter."""

    def __init__(self, width: int, layers: int) -> None:
        torch.manual_seed(0)
        blocks = [each for _ in range(layers) for each in (nn.Linear(width, width), nn.GELU())]
        self.model = nn.Sequential(*blocks)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.inputs = torch.randn(TOKENS, width)
        self.late = frozenset(
            [f"model.{name}" for name, _ in self.model.named_parameters()]
            + [
                f"optimizer.state.{name}.{moment}"
                for name, _ in self.model.named_parameters()
                for moment in ("exp_avg", "exp_avg_sq")
            ]
        )

    def step(self, before_update: Callable[[], object] = lambda: None) -> float:
        """One step; seconds."""
        begun = time.perf_counter()
        self.model(self.inputs).square().mean().backward()
        before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begun


def bars(quick: bool) -> list[Bar]:
    """The rows of this part."""
    training = Training(*((512, 4) if quick else (2048, 12)))
    repeats = 2 if quick else 7
    found: dict[str, list[tuple[float, float]]] = {"windows": [], "at once": [], "dcp": []}
    quiet: list[float] = []
    with tempfile.TemporaryDirectory() as place:
        for _ in range(2):
            training.step()
        with (
            CheckpointStore(Path(place) / "windows") as windows,
            CheckpointStore(Path(place) / "once") as once,
        ):
            for repeat in range(1 + repeats):
                one = {
                    "windows": _saved(training, windows, repeat, training.late),
                    "at once": _saved(training, once, repeat, ()),
                    "dcp": _by_dcp(training, Path(place) / "dcp" / str(repeat)),
                }
                # The first saves make their memory.
                if repeat:
                    for way, each in one.items():
                        found[way].append(each)
                quiet += [training.step() for _ in range(QUIET_STEPS)]
    blocked = {way: median([each[0] for each in rows]) for way, rows in found.items()}
    longer = {
        way: median([each[1] for each in rows]) / median(quiet) for way, rows in found.items()
    }
    size = sum(each.numel() for each in training.model.parameters()) / 1e6
    words = ", ".join(f"{way} {1e3 * each:.0f} ms" for way, each in blocked.items())
    steps = ", ".join(f"{way} {each:.2f}" for way, each in longer.items())
    return [
        at_most(
            f"blocked by a save with copy windows over staging at once, {size:.0f}M parameters",
            blocked["windows"] / blocked["at once"],
            "",
            0.5,
            words,
        ),
        at_most(
            "blocked by a save with copy windows over dcp.async_save",
            blocked["windows"] / blocked["dcp"],
            "",
            1.0,
            words,
        ),
        Bar(
            "a step with a save with copy windows, blocked time included, over a quiet one",
            round(longer["windows"], 4),
            "",
            "reported",
            True,
            steps,
        ),
    ]


def _saved(training: Training, store: CheckpointStore, step: int, late: Any) -> tuple[float, float]:
    """Blocked seconds of a save, and those of the call and the step after it."""
    begun = time.perf_counter()
    handle: SaveHandle = store.save_async(step, training.state, late=late)
    called = time.perf_counter() - begun
    seconds = called + training.step(handle.copied)
    result = handle.wait()
    return result.blocked_seconds, seconds


def _by_dcp(training: Training, place: Path) -> tuple[float, float]:
    begun = time.perf_counter()
    model, optimizer = get_state_dict(training.model, training.optimizer)
    writer = dcp.FileSystemWriter(place, sync_files=True)
    future = dcp.async_save({"model": model, "optimizer": optimizer}, storage_writer=writer)
    blocked = time.perf_counter() - begun
    seconds = blocked + training.step()
    future.result()
    return blocked, seconds
