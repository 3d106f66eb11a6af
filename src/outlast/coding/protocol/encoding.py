"""Coded gradients: what a worker makes of its chunks, and the hub of the messages.

A coded gradient is sum_c sum_b C[c, b] (block b of chunk c's gradient): C has one column for codes
whose messages are as long as a gradient, and m columns where they are an m-th of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from outlast.coding.protocol.flat import FlatGradients
from outlast.errors import CodingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from outlast.coding.protocol.messages import Layout


def encode_(
    message: Sequence[Tensor], buffers: Sequence[Tensor], coefficients: npt.NDArray[Any]
) -> None:
    """Add a chunk to a coded message.

    Args:
        message: Tensors in the shape of `Layout.views`; changed in place.
        buffers: The chunk's gradient, flat.
        coefficients: (parts,) what each block is multiplied by.
    """
    for view, buffer in zip(message, buffers, strict=True):
        for block, coefficient in zip(torch.split(buffer, len(view)), coefficients, strict=False):
            if coefficient != 0:
                view[: len(block)].add_(block, alpha=coefficient.item())


def recombine_(
    buffers: Sequence[Tensor], message: Iterable[Tensor], weights: npt.NDArray[Any]
) -> None:
    """Add a message's share to a decoded gradient.

    Args:
        buffers: The gradient, flat; changed in place.
        message: A worker's coded message, see `Layout.views`.
        weights: (parts,) the message's decoding weight in each block.
    """
    for buffer, view in zip(buffers, message, strict=True):
        here = view.to(buffer.device)
        for block, weight in zip(torch.split(buffer, len(view)), weights, strict=False):
            if weight == 0:
                continue
            piece = here[: len(block)]
            if piece.is_complex():
                block.add_((piece * complex(weight)).real)
            else:
                block.add_(piece, alpha=weight.item())


def clear(gradients: FlatGradients) -> None:
    """Leave the parameters without gradients of their own."""
    for parameter in gradients.parameters:
        parameter.grad = None


def take(gradients: FlatGradients) -> None:
    """Move the parameters' own gradients into flat tensors; they have none afterwards."""
    gradients.zero_()
    gradients.add_()
    clear(gradients)


class Encoder:
    """One worker's message, which grows while its chunks are computed.

    Args:
        gradients: Scratch for one chunk's gradient.
        layout: Of the message.
        chunks: The worker's chunks.
        coefficients: (its chunks, parts).

    Attributes:
        added: Chunks that are in the message.
    """

    def __init__(
        self,
        gradients: FlatGradients,
        layout: Layout,
        chunks: Sequence[int],
        coefficients: npt.NDArray[Any],
    ) -> None:
        self.chunks = tuple(chunks)
        self.added: set[int] = set()
        self._gradients = gradients
        self._coefficients = dict(zip(self.chunks, coefficients, strict=True))
        self._message = layout.zeros(gradients.buffers)

    @property
    def finished(self) -> bool:
        """Whether every chunk of the worker is in the message."""
        return len(self.added) == len(self.chunks)

    def begin(self) -> None:
        """Forget what was added."""
        self.added.clear()
        for item in self._message:
            item.zero_()

    def add(self, chunk: int) -> None:
        """Add the parameters' gradients, which are those of `chunk`, and clear them.

        Raises:
            CodingError: For a chunk of another worker, or one that was added before.
        """
        check_chunk(chunk, self.chunks, self.added)
        take(self._gradients)
        encode_(self._message, self._gradients.buffers, self._coefficients[chunk])
        self.added.add(chunk)

    def write(self, views: Sequence[Tensor]) -> None:
        """Copy the message into a letter; takes its `Layout.views`."""
        for view, item in zip(views, self._message, strict=True):
            view.copy_(item)


class Shelf:
    """The gradients of a worker's finished chunks, until it is known what to encode.

    Args:
        gradients: Made for the same parameters; the shelf has memory of its own for each chunk.
        layout: Of the message.
        chunks: The worker's chunks, in the order in which it computes them.

    Attributes:
        added: Chunks that are finished.
    """

    def __init__(self, gradients: FlatGradients, layout: Layout, chunks: Sequence[int]) -> None:
        self.chunks = tuple(chunks)
        self.added: set[int] = set()
        self._places = {chunk: FlatGradients(gradients.parameters) for chunk in self.chunks}
        self._message = layout.zeros(gradients.buffers)

    def begin(self) -> None:
        """Forget what was added."""
        self.added.clear()

    def add(self, chunk: int) -> None:
        """Keep the parameters' gradients, which are those of `chunk`, and clear them.

        Raises:
            CodingError: For a chunk of another worker, or one that was added before.
        """
        check_chunk(chunk, self.chunks, self.added)
        take(self._places[chunk])
        self.added.add(chunk)

    def write(
        self, views: Sequence[Tensor], chunks: Iterable[int], coefficients: npt.NDArray[Any]
    ) -> None:
        """Encode finished chunks into a letter.

        Args:
            views: Of the letter, see `Layout.views`.
            chunks: Which chunks.
            coefficients: (chunks, parts).
        """
        for item in self._message:
            item.zero_()
        for chunk, row in zip(chunks, coefficients, strict=True):
            if row.any():
                encode_(self._message, self._places[int(chunk)].buffers, row)
        for view, item in zip(views, self._message, strict=True):
            view.copy_(item)


def check_chunk(chunk: int, own: Sequence[int], added: set[int]) -> None:
    """Refuse a chunk that a worker cannot add.

    Raises:
        CodingError: For a chunk of another worker, or one that was added before.
    """
    if chunk not in own:
        raise CodingError(f"chunk {chunk} is not among this worker's, {list(own)}")
    if chunk in added:
        raise CodingError(f"chunk {chunk} was added to this step's message before")
