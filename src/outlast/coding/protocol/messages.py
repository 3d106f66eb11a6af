"""Messages: a header of 64 bytes and a coded gradient, in buffers that are reused."""

from __future__ import annotations

import enum
import math
import struct
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from outlast.coding.protocol.flat import local
from outlast.errors import CodingError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from outlast.coding.protocol.flat import FlatGradients

HEADER_BYTES = 64
_FIELDS = struct.Struct("<8q")
_MAGIC = 0x4F55544C41535431
_ALIGNMENT = 64


class Kind(enum.IntEnum):
    """What a message is."""

    PARAMETERS = 1
    CODED = 2
    FINISHED = 3
    PLAN = 4
    STOP = 5
    MIX = 6
    UP = 7


@dataclass(frozen=True)
class Header:
    """What stands before the numbers of a message.

    Attributes:
        kind: What the message is.
        step: The training step that it belongs to; late ones are recognised by it.
        worker: Number of the worker that sends it, or that it is for.
        chunk: The chunk that it is about, or the round of gossip, or 0.
        plan: Which of a step's plans it answers.
        payload_bytes: Length of what follows.
        value: A number whose meaning depends on the kind.
    """

    kind: Kind
    step: int
    worker: int = 0
    chunk: int = 0
    plan: int = 0
    payload_bytes: int = 0
    value: int = 0

    def pack(self) -> bytes:
        """The header as it is sent."""
        return _FIELDS.pack(
            _MAGIC,
            int(self.kind),
            self.step,
            self.worker,
            self.chunk,
            self.plan,
            self.payload_bytes,
            self.value,
        )

    @classmethod
    def unpack(cls, content: bytes) -> Header:
        """The header that these bytes are.

        Raises:
            CodingError: When they are something else.
        """
        magic, kind, *rest = _FIELDS.unpack(content)
        if magic != _MAGIC or kind not in tuple(Kind):
            raise CodingError("a message came that is none of outlast.coding's")
        return cls(Kind(kind), *rest)


@dataclass(eq=False)
class Letter:
    """A message in a buffer that several sends or readers may hold.

    Attributes:
        header: Its header.
        buffer: (capacity,) uint8 on the CPU: header, then payload.
        holders: Sends and readers that still need the buffer; `Buffers` counts.
    """

    header: Header
    buffer: Tensor
    holders: int = field(default=1)

    @property
    def payload(self) -> Tensor:
        """(payload_bytes,) uint8 view of what follows the header."""
        return self.buffer[HEADER_BYTES : HEADER_BYTES + self.header.payload_bytes]

    @property
    def sent(self) -> Tensor:
        """(64 + payload_bytes,) uint8 view of what goes over the wire."""
        return self.buffer[: HEADER_BYTES + self.header.payload_bytes]

    @property
    def key(self) -> tuple[int, int]:
        """A letter that waits is replaced by a newer one of the same key, see `Newest`.

        In gossip a rank may be one step ahead of a neighbour that has yet to get the last one.
        """
        chunk = self.header.chunk
        mixing = self.header.kind == Kind.MIX
        return int(self.header.kind), 2 * chunk + self.header.step % 2 if mixing else chunk


class Newest:
    """Letters that wait for a reader or for the wire; a newer one takes an older one's place.

    So a rank that is slow, or stopped, holds as many letters as there are keys, however many steps
    the others have gone on.
    """

    def __init__(self) -> None:
        self._letters: dict[tuple[int, int, int], Letter] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._letters)

    def __iter__(self) -> Iterator[Letter]:
        """In the order in which they came."""
        return iter(self._letters.values())

    def put(self, letter: Letter) -> Letter | None:
        """Add a letter, at the end: what was to be read before it still is.

        Returns:
            The letter that is not needed any more; the given one if it was overtaken.
        """
        place = (letter.header.worker, *letter.key)
        other = self._letters.get(place)
        if other is not None and _age(letter) < _age(other):
            return letter
        self._letters.pop(place, None)
        self._letters[place] = letter
        return other

    def pop(self) -> Letter:
        """Take the first one out; there must be one."""
        return self._letters.pop(next(iter(self._letters)))

    def remove(self, letter: Letter) -> None:
        """Take this one out."""
        del self._letters[letter.header.worker, *letter.key]


def _age(letter: Letter) -> tuple[int, int]:
    return letter.header.step, letter.header.plan


class Buffers:
    """Buffers for letters: one is written again only when nobody holds it any more.

    A send that is in flight reads its buffer; writing the next step's numbers there would mix two
    steps under one header.

    Args:
        capacity: Largest payload, bytes.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.made = 0
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self) -> Tensor:
        """A buffer that nobody uses."""
        with self._lock:
            if self._free:
                return self._free.pop()
            self.made += 1
        return torch.empty(HEADER_BYTES + self.capacity, dtype=torch.uint8)

    def letter(self, header: Header) -> Letter:
        """A letter to fill, held once."""
        if header.payload_bytes > self.capacity:
            raise CodingError(
                f"a message of {header.payload_bytes} bytes is longer than the {self.capacity} "
                "bytes that the buffers were made for"
            )
        short = header.payload_bytes == 0
        buffer = torch.empty(HEADER_BYTES, dtype=torch.uint8) if short else self.take()
        letter = Letter(header, buffer)
        letter.buffer[:HEADER_BYTES] = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
        return letter

    def hold(self, letter: Letter, times: int = 1) -> None:
        """Keep the letter's buffer from being used again."""
        with self._lock:
            letter.holders += times

    def release(self, letter: Letter) -> None:
        """Give one hold back."""
        with self._lock:
            letter.holders -= 1
            if letter.holders == 0 and letter.buffer.numel() == HEADER_BYTES + self.capacity:
                self._free.append(letter.buffer)


class Layout:
    """Where the flat tensors of a gradient, or an m-th of each, lie in a payload.

    Args:
        buffers: The gradient's flat tensors, see `FlatGradients.buffers`.
        parts: m: into how many blocks each is cut; the last is shorter where m does not divide.
        is_complex: Whether the code's coefficients are complex; the message then is twice as long.
    """

    def __init__(
        self, buffers: Sequence[Tensor], parts: int = 1, *, is_complex: bool = False
    ) -> None:
        self.parts = parts
        self._pieces: list[tuple[int, int, torch.dtype]] = []
        offset = 0
        for buffer in buffers:
            dtype = _complex_type(buffer.dtype) if is_complex else buffer.dtype
            length = math.ceil(buffer.numel() / parts)
            self._pieces.append((offset, length, dtype))
            offset += _aligned(length * dtype.itemsize)
        self.payload_bytes = offset

    def views(self, payload: Tensor) -> list[Tensor]:
        """The payload's numbers, one tensor (ceil(elements / parts),) for each flat tensor."""
        return [
            payload[offset : offset + length * dtype.itemsize].view(dtype)
            for offset, length, dtype in self._pieces
        ]

    def zeros(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Zeros in the shape of `views`, on the gradient's own devices."""
        return [
            torch.zeros(length, dtype=dtype, device=buffer.device)
            for buffer, (_, length, dtype) in zip(buffers, self._pieces, strict=True)
        ]


def _complex_type(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype == torch.float64 else torch.complex64


def _aligned(size: int) -> int:
    return math.ceil(size / _ALIGNMENT) * _ALIGNMENT


def write_parameters(gradients: FlatGradients, layout: Layout, letter: Letter) -> None:
    """Copy the parameters that `gradients` belong to into a letter."""
    with torch.no_grad():
        for place, parameter in places(gradients, layout, letter):
            place.copy_(parameter.reshape(-1))


def read_parameters(gradients: FlatGradients, layout: Layout, letter: Letter) -> None:
    """Copy a letter's numbers into the parameters that `gradients` belong to."""
    with torch.no_grad():
        for place, parameter in places(gradients, layout, letter):
            parameter.copy_(place.view_as(parameter))


def places(
    gradients: FlatGradients, layout: Layout, letter: Letter
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter with its place in a letter, which is its gradient's in the flat tensors."""
    numbers = layout.views(letter.payload)
    starts = [buffer.untyped_storage().data_ptr() for buffer in gradients.buffers]
    for view, parameter in zip(gradients.views, gradients.parameters, strict=True):
        whole = numbers[starts.index(view.untyped_storage().data_ptr())]
        first = view.storage_offset()
        yield whole[first : first + view.numel()], local(parameter)
