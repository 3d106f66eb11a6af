"""Block codes, whose messages are shorter than a gradient: coefficients, decoders, certificates.

A gradient of p numbers is padded with zeros and cut into m = `parts` blocks of ceil(p / m)
numbers. Worker w sends one vector as long as a block,

    y_w = sum over its chunks c and the blocks b of C_w[c, b] block_b(g_c),

and a decoder makes every block of g = g_1 + ... + g_k from the survivors' messages:
block_b(g) = sum_w A[b, w] y_w. A scalar code (`outlast.coding.code.GradientCode`) is the case of
one block.
"""

from __future__ import annotations

import functools
import math
from abc import ABC
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from scipy.sparse import csr_array

from outlast.coding.certificate import Certificate, Decoded, exact_up_to_rounding, roundoff
from outlast.coding.code import (
    PATTERNS,
    Conditioning,
    Survivors,
    condition_number,
    straggler_patterns,
    survivor_numbers,
)
from outlast.errors import CodingError

if TYPE_CHECKING:
    import numpy.typing as npt

    from outlast.coding.assignment import Assignment


_SAME = 1e-9
_DENSE_ENTRIES = 2_000_000


@dataclass(frozen=True, eq=False)
class DecodedBlocks(Decoded):
    """The outcome of decoding for one set of survivors; unpacks into ``weights, error``.

    Attributes:
        weights: (parts, workers) numbers A that messages are multiplied by; 0 for workers that are
            gone.
        coefficients: (parts, chunks, parts): block b of the decoded gradient contains block b' of
            g_c this often, at [b, c, b']; 1 is right where b = b', else 0.
        certificate: What follows for the gradient; see `certify_blocks`.
    """

    @property
    def mean_error(self) -> float:
        """Expected ``|decoded - g|^2`` over uncorrelated chunk gradients of norm 1.

        Their blocks are uncorrelated, too, and of equal size: |coefficients - identity|_F^2 /
        parts. `Certificate.error` bounds the worst case instead.
        """
        if self.certificate.exact:
            return 0.0
        missing = _missing(self.coefficients)
        return float(np.sum(np.abs(missing) ** 2)) / len(self.weights)


def certify_blocks(
    coefficients: npt.NDArray[Any],
    weights: npt.NDArray[Any],
    message_norms: npt.NDArray[np.float64],
    dtype: str = "float32",
) -> Certificate:
    """The certificate of a block decoding; `outlast.coding.certificate.certify` for blocks.

    Let E_c be the parts x parts matrix coefficients[:, c, :] - I, so that the decoded gradient is
    off by sum_c (E_c x I) g_c, and G the matrix with columns g_c, ``|.|`` its largest singular
    value. Then ``|decoded - g| <= sqrt(error) |G|`` with the smaller of two errors:

    - ``parts sum_c |E_c|_F^2``, since the chunks' blocks side by side have at most sqrt(parts)
      times the largest singular value of G;
    - ``(sum_i s_i |P_i|)^2`` where E = sum_i s_i P_i v_i^T is the singular value decomposition of E
      as a (parts^2, chunks) matrix, P_i its left vectors as matrices: the error is
      sum_i s_i (P_i x I) G v_i and v_i has norm 1. It is the number of lost chunks where whole
      chunks are lost.

    ``centred`` bounds ``|scale decoded - g|`` by G with its mean removed, as for scalar codes; it
    is infinite where no factor makes the mean's coefficients sum to the identity. ``rounding`` is
    the largest error of rounding all messages to `dtype` as a share of ``|g|`` where the blocks of
    all chunks are orthogonal and of equal norm: unit roundoff x
    sqrt(sum_b (sum_w |A[b, w]| |C_w|_F)^2 / (parts chunks)). ``amplification`` is the largest sum
    of absolute weights of a block.

    Args:
        coefficients: (parts, chunks, parts), as in `DecodedBlocks`.
        weights: (parts, workers).
        message_norms: (workers,) 2-norms of the coefficients of each message.
        dtype: Type of the messages.

    Raises:
        CodingError: For a type that messages cannot have.
    """
    parts, chunks = coefficients.shape[:2]
    error = _worst_error(_missing(coefficients))
    totals = coefficients.sum(axis=1)
    total = float(np.trace(totals).real) / parts
    scale = chunks / total if total > 0 else math.inf
    centred = math.inf
    if total > 0 and np.abs(scale * totals - chunks * np.eye(parts)).max() <= _SAME * chunks:
        centred = _worst_error(_missing(scale * coefficients))
    magnitude = np.abs(weights)
    amplification = float(magnitude.sum(axis=1).max(initial=0.0))
    rounded = float(np.linalg.norm(magnitude @ message_norms)) / math.sqrt(parts * chunks)
    exact = exact_up_to_rounding(error, chunks, amplification)
    return Certificate(
        error, centred, scale, exact, amplification, roundoff(dtype) * rounded, dtype
    )


def _missing(coefficients: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """(parts, chunks, parts) coefficients minus what they should be."""
    return np.asarray(coefficients - np.eye(len(coefficients))[:, None, :])


def _worst_error(missing: npt.NDArray[Any]) -> float:
    """The smaller of the two errors of `certify_blocks`."""
    parts, chunks = missing.shape[:2]
    frobenius = float(np.sum(np.abs(missing) ** 2))
    if parts == 1:
        return frobenius
    tall = missing.transpose(0, 2, 1).reshape(parts**2, chunks)
    left, values, _ = np.linalg.svd(tall, full_matrices=False)
    norms = np.linalg.norm(left.T.reshape(-1, parts, parts), ord=2, axis=(1, 2))
    return float(min(parts * frobenius, np.square(values @ norms)))


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


def block_conditioning(
    code: BlockCode, stragglers: int | None = None, *, patterns: int = PATTERNS, seed: int = 0
) -> Conditioning:
    """Examine a block code with `stragglers` workers gone (as many as it tolerates if None).

    As `outlast.coding.code.conditioning`, with `message_matrix` for the encoding matrix.
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
        condition = max(condition, condition_number(rows[alive]))
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
