"""Costs of automatic checkpoints as pure functions, and a script's measured state; needs no torch.

A save stops the program while it copies what the next step may change. Without copy windows that
is everything. With them, only what is written before the optimizer's step is copied at once; the
rest is copied while the passes of the next step run, and blocks only for as long as it takes
longer than these.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path


@dataclass(frozen=True)
class StateBytes:
    """Parts of a save, in bytes.

    Attributes:
        early: Bytes that a step may write before its optimizer's step.
        late: Bytes that only the optimizer's step writes.
        constant: Bytes that no step writes; saved once, and only referred to afterwards.
        dead: Bytes that need not be saved, such as gradients that are made anew.
        naive: Bytes of the `state_dict()` of all modules and optimizers.
    """

    early: float
    late: float
    constant: float = 0.0
    dead: float = 0.0
    naive: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _require(f"{name} bytes", value, at_least=0.0)

    @property
    def first_save(self) -> float:
        """Bytes of the first save."""
        return self.early + self.late + self.constant

    @property
    def later_save(self) -> float:
        """Bytes of each save after it."""
        return self.early + self.late

    @property
    def process_image(self) -> float:
        """Bytes of these tensors in an image of the whole process."""
        return self.first_save + self.dead


@dataclass(frozen=True)
class StepTimes:
    """Durations of the parts of a step.

    Attributes:
        passes_seconds: Forward and backward, up to the optimizer's step.
        optimizer_seconds: The optimizer's step and what follows.
    """

    passes_seconds: float
    optimizer_seconds: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _require(name, value, at_least=0.0)

    @property
    def seconds(self) -> float:
        """A whole step."""
        return self.passes_seconds + self.optimizer_seconds


@dataclass(frozen=True)
class SaveBlock:
    """Seconds that one save blocks the program.

    Attributes:
        plain_seconds: Without copy windows.
        windowed_seconds: With them.
    """

    plain_seconds: float
    windowed_seconds: float

    @property
    def ratio(self) -> float:
        """With to without; 1 where neither blocks."""
        return self.windowed_seconds / self.plain_seconds if self.plain_seconds else 1.0


def save_block(
    state: StateBytes,
    step: StepTimes,
    *,
    copy_bytes_per_s: float,
    beside_share: float = 1.0,
    capture_seconds: float = 0.0,
) -> SaveBlock:
    """Seconds that a save blocks the program, without copy windows and with them.

    Without: `capture + (early + late) / rate`. With: `capture + early / rate +
    max(0, late / (share rate) - passes)`: what is late has the passes of the next step to be
    copied in, at the share of the rate that these leave.

    Args:
        state: What is saved.
        step: The step that runs meanwhile.
        copy_bytes_per_s: Rate of a copy while the program waits.
        beside_share: Share of that rate which a copy beside the passes reaches, above 0 up to 1.
        capture_seconds: Walking the program's objects and writing down what is no tensor.

    Raises:
        AutosaveError: When a rate or share is not possible.
    """
    _require("copy_bytes_per_s", copy_bytes_per_s, above=0.0)
    _require("beside_share", beside_share, above=0.0)
    _require("capture_seconds", capture_seconds, at_least=0.0)
    if beside_share > 1.0:
        raise AutosaveError(f"beside_share = {beside_share} is above 1; it is a share of a rate")
    beside = state.late / (copy_bytes_per_s * beside_share)
    return SaveBlock(
        plain_seconds=capture_seconds + (state.early + state.late) / copy_bytes_per_s,
        windowed_seconds=capture_seconds
        + state.early / copy_bytes_per_s
        + max(0.0, beside - step.passes_seconds),
    )


def overhead_fraction(
    step: StepTimes, *, boundary_seconds: float, block_seconds: float, steps_between_saves: float
) -> float:
    """Share of the time that the program loses: `(boundary + block / steps) / step`.

    Args:
        step: One step of the plain program.
        boundary_seconds: What the added code does at each boundary without a save.
        block_seconds: How long a save blocks.
        steps_between_saves: At least 1.

    Raises:
        AutosaveError: When a number is not possible.
    """
    _require("boundary_seconds", boundary_seconds, at_least=0.0)
    _require("block_seconds", block_seconds, at_least=0.0)
    _require("steps_between_saves", steps_between_saves, at_least=1.0)
    _require("a step's seconds", step.seconds, above=0.0)
    return (boundary_seconds + block_seconds / steps_between_saves) / step.seconds


def _require(
    name: str, value: float, *, at_least: float = float("-inf"), above: float = float("-inf")
) -> None:
    if not value >= at_least:
        raise AutosaveError(f"{name} = {value} is below {at_least:g}")
    if not value > above:
        raise AutosaveError(f"{name} = {value} is not above {above:g}")


FORMAT = 1


_ENDING = ".state.json"


@dataclass(frozen=True)
class MeasuredState:
    """The state of a script after some steps, by the classes of its tensors.

    Attributes:
        program: Hash of the texts that it was measured of, as `program_hash` gives it.
        at: Steps done when it was looked at.
        tensors: Class to number of tensors.
        bytes: Class to bytes of tensors.
        state: What a save consists of.
        saved_bytes: Of a first save: all that is captured, the program's own objects too.
        process_bytes: Memory of the process at the save, which an image of it would hold.
        lints: What an ordinary checkpoint would lose, in sentences.
    """

    program: str
    at: int
    tensors: Mapping[str, int]
    bytes: Mapping[str, int]
    state: StateBytes
    saved_bytes: int
    process_bytes: int
    lints: tuple[str, ...]

    def rows(self) -> list[tuple[str, int, str]]:
        """Rows that compare a save with other ways: name, bytes, and description."""
        return [
            ("a first save", self.saved_bytes, "all that outlast run captures"),
            ("each later save", int(self.state.later_save), "tensors that steps change"),
            ("state_dict()", int(self.state.naive), "of all modules and optimizers, no more"),
            ("an image of the process", self.process_bytes, "its whole memory"),
        ]

    def to_json(self) -> str:
        """As text, for `read_measured`."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)


def program_hash(texts: Iterable[str]) -> str:
    """Sixteen characters that tell the texts of a program from others."""
    return hashlib.sha256(json.dumps([*texts]).encode()).hexdigest()[:16]


def measured_file(folder: Path) -> Path:
    """The file beside the folder of a run."""
    return folder.with_name(f"{folder.name}{_ENDING}")


def read_measured(file: Path) -> MeasuredState | None:
    """Read the figures that a check has left; None where nothing can be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found.pop("format") != FORMAT:
            return None
        found["state"] = StateBytes(**found["state"])
        found["lints"] = tuple(found["lints"])
        return MeasuredState(**found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
