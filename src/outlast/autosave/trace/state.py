"""The state of a training step: each tensor's class, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from outlast.autosave.cost import StateBytes

if TYPE_CHECKING:
    from outlast.autosave.trace.dispatch import Window

Kind = Literal["must-save", "save-once", "derivable", "dead"]
"""`must-save` changes and is read again. `save-once` is read and never changes. `derivable` is
made again by the program's set-up, and never changes. `dead` is written before it is read."""

KINDS: tuple[Kind, ...] = ("must-save", "save-once", "derivable", "dead")
"""From the most careful one on."""


@dataclass(frozen=True)
class TensorState:
    """A storage that the roots lead to.

    Attributes:
        name: What its user calls it, e.g. `model.layer.weight`.
        aliases: Other names of the same storage, and the paths of `heap.Names` that lead there.
        kind: Its class.
        why: What says so: of the trace, the content and the graph.
        dtype: Of its numbers, e.g. `float32`.
        shape: Of the tensor at `name`.
        bytes: Of the whole storage.
        codec: What it is, for who writes it: `weights`, `moments`, `integers`, ...
        first_write: Number of the operation of a step that writes it first; None without one.
        last_write: Of the one that writes it last.
        window: Until when the content at the step's beginning can be copied: `always`, `late`
            for up to the optimizer's step, or `early` for not after the step has begun.
        in_state_dict: Whether a module's or optimizer's `state_dict()` has it.
    """

    name: str
    aliases: tuple[str, ...]
    kind: Kind
    why: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    codec: str
    first_write: int | None
    last_write: int | None
    window: Window
    in_state_dict: bool


@dataclass(frozen=True)
class StatePlan:
    """What must be saved between two steps.

    Attributes:
        tensors: All storages with a name, in the order in which they were found.
        lints: One sentence for each thing that an ordinary checkpoint would lose, or that could
            not be looked at.
        operations: Operations of a step.
        optimizer_begins: Of these, how many come before the first optimizer's step.
        naive_bytes: Of the `state_dict()` of all modules and optimizers.
        random: Whether a step draws random numbers.
    """

    tensors: tuple[TensorState, ...]
    lints: tuple[str, ...]
    operations: int
    optimizer_begins: int | None
    naive_bytes: int
    random: bool

    @property
    def late(self) -> tuple[str, ...]:
        """Names of tensors that may be copied until the optimizer's step begins."""
        return tuple(tensor.name for tensor in self.tensors if tensor.window == "late")

    @property
    def early(self) -> tuple[str, ...]:
        """Names of tensors that a step writes before the optimizer's step."""
        return tuple(tensor.name for tensor in self.tensors if tensor.window == "early")

    @property
    def cost(self) -> StateBytes:
        """What a save consists of."""
        late = sum(state.bytes for state in self.of("must-save") if state.window == "late")
        return StateBytes(
            early=self.bytes("must-save") - late,
            late=late,
            constant=self.bytes("save-once"),
            dead=self.bytes("dead"),
            naive=self.naive_bytes,
        )

    def of(self, kind: Kind) -> tuple[TensorState, ...]:
        """The tensors of a class."""
        return tuple(tensor for tensor in self.tensors if tensor.kind == kind)

    def bytes(self, *kinds: Kind) -> int:
        """Bytes of some classes; of all without one."""
        return sum(tensor.bytes for tensor in self.tensors if not kinds or tensor.kind in kinds)

    def find(self, name: str) -> TensorState:
        """The storage that a name or path leads to.

        Raises:
            KeyError: When none does.
        """
        for tensor in self.tensors:
            if name in (tensor.name, *tensor.aliases):
                return tensor
        raise KeyError(name)

    def table(self) -> str:
        """All tensors, the bytes of each class and the lints, as text."""
        width = max([len(tensor.name) for tensor in self.tensors], default=0)
        lines = [
            f"{tensor.name:{width}}  {tensor.kind:9}  {tensor.bytes:>12}  {tensor.dtype:9}"
            f"  {tensor.window:6}  {'; '.join(tensor.why)}"
            for tensor in self.tensors
        ]
        lines += [
            f"{kind}: {len(self.of(kind))} tensors, {self.bytes(kind)} bytes" for kind in KINDS
        ]
        lines.append(
            f"to save {self.bytes('must-save', 'save-once')} bytes; "
            f"state_dict() has {self.naive_bytes} bytes"
        )
        return "\n".join([*lines, *self.lints])


def codec_of(dtype: torch.dtype, *, optimizer: bool, kind: Kind) -> str:
    """A hint to who encodes a tensor: what its numbers are like."""
    if kind == "save-once":
        return "constant"
    if dtype == torch.bool:
        return "bits"
    if not dtype.is_floating_point and not dtype.is_complex:
        return "integers"
    if dtype.itemsize == 1:
        return "float8"
    if dtype in (torch.bfloat16, torch.float16):
        return "half"
    return "moments" if optimizer else "weights"
