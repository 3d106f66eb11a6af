"""What every code with short messages has: blocks of a gradient, coefficients, decoders.

A gradient of p numbers is padded with zeros and cut into m = `parts` blocks of ceil(p / m)
numbers. Worker w sends one vector as long as a block,

    y_w = sum over its chunks c and the blocks b of C_w[c, b] block_b(g_c),

and a decoder makes every block of g = g_1 + ... + g_k from the survivors' messages:
block_b(g) = sum_w A[b, w] y_w. A scalar code (`outlast.coding.code.GradientCode`) is the case of
one block; `as_blocks` makes it one, so that a protocol takes either.
"""

from __future__ import annotations

import functools
from abc import ABC
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from scipy.sparse import csr_array

from outlast.coding.certificate import roundoff
from outlast.coding.code import GradientCode, Survivors, survivor_numbers
from outlast.coding.codes.block_certificate import DecodedBlocks, certify_blocks
from outlast.coding.conditioning import PATTERNS, Conditioning, straggler_patterns
from outlast.errors import CodingError

if TYPE_CHECKING:
    import numpy.typing as npt

    from outlast.coding.assignment import Assignment

_DENSE_ENTRIES = 2_000_000


class BlockCode(ABC):
    """A linear gradient code whose messages are `parts` times shorter than a gradient.

    Subclasses set the attributes in their constructor. Workers, chunks and blocks are counted from
    0. Torch users multiply with `coefficients` and `decode`'s weights themselves.

    Attributes:
        name: The code's name as the literature has it.
        source: Where the construction comes from.
        assignment: Who computes what.
        entries: (computed chunks of all workers, parts) coefficients C, in the order of
            `Assignment.incidence`: worker after worker, chunks ascending.
        parts: Blocks of a gradient, m.
        tolerance: Any so many stragglers leave the gradient exact.
        dtype: Type of the messages.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    assignment: Assignment
    entries: npt.NDArray[Any]
    parts: int
    tolerance: int
    dtype: str = "float32"

    @property
    def workers(self) -> int:
        """Number of workers, n."""
        return self.assignment.workers

    @property
    def chunks(self) -> int:
        """Number of chunks, k."""
        return self.assignment.chunks

    @property
    def load(self) -> float:
        """Largest share of a batch that a worker computes, times the number of workers."""
        return float(self.assignment.loads.max()) * self.workers / self.chunks

    @property
    def message_share(self) -> float:
        """Length of a message as a share of a gradient's; complex numbers count twice."""
        return (2.0 if np.iscomplexobj(self.entries) else 1.0) / self.parts

    def coefficients(self, worker: int) -> npt.NDArray[Any]:
        """(chunks of this worker, parts) coefficients of its message, chunks ascending."""
        start, stop = self.assignment.incidence.indptr[worker : worker + 2]
        return self.entries[start:stop]

    @functools.cached_property
    def message_matrix(self) -> csr_array:
        """(workers, chunks x parts), CSR: the coefficient of block b of chunk c in c parts + b."""
        incidence = self.assignment.incidence
        columns = incidence.indices[:, None] * self.parts + np.arange(self.parts)
        shape = (self.workers, self.chunks * self.parts)
        pointers = incidence.indptr * self.parts
        return csr_array((self.entries.ravel(), columns.ravel(), pointers), shape=shape)

    @functools.cached_property
    def message_norms(self) -> npt.NDArray[np.float64]:
        """(workers,) 2-norms of the coefficients of each message."""
        squares = np.asarray(abs(self.message_matrix).power(2).sum(axis=1), np.float64)
        norms: npt.NDArray[np.float64] = np.sqrt(squares).ravel()
        return norms

    def encode(self, worker: int, gradients: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A worker's message, summed in double precision and rounded once.

        Args:
            worker: Which worker.
            gradients: (its chunks, p) gradients, chunks ascending.

        Returns:
            (ceil(p / parts),) in the gradients' dtype, or its complex counterpart for a complex
            code.

        Raises:
            CodingError: For another number of gradients than the worker has chunks.
        """
        coefficients = self.coefficients(worker)
        if gradients.ndim != 2 or len(gradients) != len(coefficients):
            raise CodingError(
                f"worker {worker} computes {len(coefficients)} chunks, but the gradients have "
                f"shape {gradients.shape}"
            )
        blocks = self.cut(gradients)
        message = np.tensordot(coefficients, blocks, axes=([0, 1], [0, 1]))
        if np.iscomplexobj(message):
            return message.astype(np.result_type(gradients.dtype, np.complex64))
        return message.astype(gradients.dtype)

    def cut(self, gradients: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """(..., p) gradients as (..., parts, ceil(p / parts)) blocks, padded with zeros."""
        size = gradients.shape[-1]
        length = -(-size // self.parts)
        if length * self.parts != size:
            end = [(0, 0)] * (gradients.ndim - 1) + [(0, length * self.parts - size)]
            gradients = np.pad(gradients, end)
        return gradients.reshape(*gradients.shape[:-1], self.parts, length)

    def decode(self, survivors: Survivors) -> DecodedBlocks:
        """Decoding weights and what they are worth.

        Args:
            survivors: Workers whose messages are there: their numbers, or a (workers,) mask.

        Raises:
            CodingError: For workers that do not exist.
        """
        weights = self.decoding_weights(self.mask(survivors))
        flat = np.asarray((self.message_matrix.T @ weights.T).T)
        coefficients = flat.reshape(self.parts, self.chunks, self.parts)
        certificate = certify_blocks(coefficients, weights, self.message_norms, self.dtype)
        return DecodedBlocks(weights, coefficients, certificate)

    def error(self, survivors: Survivors) -> float:
        """See `certify_blocks`."""
        return self.decode(survivors).error

    def recover(
        self, survivors: Survivors, messages: npt.NDArray[Any], size: int | None = None
    ) -> npt.NDArray[Any]:
        """The decoded sum of the chunks' gradients, summed in double precision.

        Args:
            survivors: As in `decode`.
            messages: (survivors, ceil(p / parts)), in the order in which the survivors are given;
                ascending for a mask.
            size: p, where the padding is to be cut off.

        Returns:
            (p,) in the messages' real dtype.

        Raises:
            CodingError: For another number of messages than survivors, or a worker named twice.
        """
        numbers = survivor_numbers(survivors, self.workers)
        if len(np.unique(numbers)) != len(numbers):
            raise CodingError(f"survivors {numbers.tolist()} name a worker twice")
        if messages.ndim != 2 or len(messages) != len(numbers):
            raise CodingError(
                f"{len(numbers)} workers survive, but the messages have shape {messages.shape}"
            )
        weights = self.decode(numbers).weights[:, numbers]
        decoded = np.real(weights @ messages).ravel()[:size]
        return np.asarray(decoded, dtype=messages.real.dtype)

    def mask(self, survivors: Survivors) -> npt.NDArray[np.bool_]:
        """(workers,) whether each worker is among the survivors."""
        alive = np.zeros(self.workers, dtype=bool)
        alive[survivor_numbers(survivors, self.workers)] = True
        return alive

    def decoding_weights(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
        """(parts, workers) weights of least |coefficients - identity|_F, of least norm among these.

        By least squares; codes with structure know better.
        """
        weights = np.zeros((self.parts, self.workers), dtype=self.entries.dtype)
        if not alive.any():
            return weights
        system = self.message_matrix[alive].T
        target = np.tile(np.eye(self.parts), (self.chunks, 1))
        if system.shape[0] * system.shape[1] <= _DENSE_ENTRIES:
            weights[:, alive] = np.linalg.lstsq(system.toarray(), target, rcond=None)[0].T
        else:
            # Imported here, since few codes are that large and it doubles the time to import.
            from scipy.sparse.linalg import lsqr

            for part in range(self.parts):
                found = lsqr(system, target[:, part], atol=1e-12, btol=1e-12)[0]
                weights[part, alive] = found
        return weights

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(workers={self.workers}, chunks={self.chunks}, "
            f"parts={self.parts}, load={self.load:g}, tolerance={self.tolerance})"
        )


class ScalarBlocks(BlockCode):
    """A scalar gradient code seen as a block code with one block.

    Args:
        code: The scalar code; its optimal decoder and its certificates are used.
    """

    def __init__(self, code: GradientCode) -> None:
        self.code = code
        self.name, self.source = code.name, code.source  # type: ignore[misc]
        self.assignment = code.assignment
        self.entries = code.matrix.data[:, None]
        self.parts = 1
        self.tolerance = code.tolerance
        self.dtype = code.dtype

    def decode(self, survivors: Survivors) -> DecodedBlocks:
        """As `GradientCode.decode`, with the weights as one row."""
        decoded = self.code.decode(survivors)
        coefficients = decoded.coefficients[None, :, None]
        return DecodedBlocks(decoded.weights[None], coefficients, decoded.certificate)


def as_blocks(code: GradientCode | BlockCode) -> BlockCode:
    """The code as a block code: itself, or a scalar code as the case of one block."""
    return code if isinstance(code, BlockCode) else ScalarBlocks(code)


def block_conditioning(
    code: BlockCode, stragglers: int | None = None, *, patterns: int = PATTERNS, seed: int = 0
) -> Conditioning:
    """Examine a block code with `stragglers` workers gone (as many as it tolerates if None).

    As `outlast.coding.conditioning.conditioning`, with `message_matrix` for the encoding matrix.
    """
    gone = code.tolerance if stragglers is None else stragglers
    sets, every = straggler_patterns(code.workers, gone, patterns, seed)
    # Condition numbers survive the reduction to a triangle, which has no more than `workers` rows.
    rows = np.transpose(np.linalg.qr(code.message_matrix.toarray().T, mode="r"))
    condition = amplification = largest = rounding = 0.0
    for members in sets:
        alive = np.ones(code.workers, dtype=bool)
        alive[members] = False
        decoded = code.decode(alive)
        values = np.linalg.svd(rows[alive], compute_uv=False)
        kept = values[values > values[0] * 1e-13] if len(values) else np.ones(1)
        condition = max(condition, float(kept[0] / kept[-1]))
        amplification = max(amplification, decoded.certificate.amplification)
        largest = max(largest, float(np.abs(decoded.weights).max(initial=0.0)))
        rounding = max(rounding, decoded.certificate.rounding)
    return Conditioning(condition, amplification, largest, rounding, len(sets), every)


def refuse_ill_conditioned_blocks(code: BlockCode, tolerance: float, *, advice: str) -> None:
    """Return only if rounding messages to `code.dtype` costs at most `tolerance`.

    Raises:
        CodingError: When it could cost more, with the figure and `advice`.
    """
    found = block_conditioning(code)
    if not found.rounding <= tolerance:
        raise CodingError(
            f"{code.name} for {code.workers} workers, {code.tolerance} stragglers and {code.parts} "
            f"parts has message matrices of condition {found.condition:.3g}; in {code.dtype} (unit "
            f"roundoff {roundoff(code.dtype):.2g}) rounding could be {found.rounding:.2g} of the "
            f"gradient, above tolerance = {tolerance:g}; {advice}"
        )
