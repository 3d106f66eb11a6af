"""Measured state of a script: what its saves consist of, in bytes; needs no torch."""

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
            if not value >= 0.0:
                raise AutosaveError(f"{name} bytes = {value} is below 0")

    @property
    def later_save(self) -> float:
        """Bytes of each save after the first, which has the constant ones, too."""
        return self.early + self.late


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
