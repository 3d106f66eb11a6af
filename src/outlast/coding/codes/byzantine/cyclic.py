"""DRACO's linear code: one message per worker, and wrong messages located from a random projection.

Chen, Wang, Charles and Papailiopoulos, "DRACO: Byzantine-resilient Distributed Training via
Redundant Gradients" (ICML 2018). The encoding matrix' columns are polynomials of degree below
n - 2 q at the n-th roots of unity, so honest messages are a codeword of a Reed-Solomon code of
distance 2 q + 1 in every coordinate of the gradient, and q wrong ones can be found. They are wrong
in the same places in every coordinate: one random combination of coordinates shows where.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from outlast.coding.codes.byzantine.vote import ByzantineOutcome, check_adversaries
from outlast.coding.codes.roots import Mask, ReedSolomon
from outlast.errors import CodingError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

_OUTRAGEOUS = 1e8
"""Messages so many times the median norm would drown the others' digits; they count as missing."""


class DracoCyclic:
    """A complex code of load 2 q + 1 that locates any q wrong or missing messages.

    Guarantee: with at most q workers wrong or missing the gradient is right up to rounding and the
    tolerance, and those are suspected whose messages are off by more than it. With more, `vote`
    raises unless they imitate another codeword, for which q + 1 must collude.

    Args:
        workers: n; any number, unlike for `Draco`.
        adversaries: q, below n / 2.
        mask: ``consecutive`` as in the paper, or ``spread``, which is far better conditioned.

    Attributes:
        code: The code; worker w sends sum_c code.matrix[w, c] g_c, complex.

    Raises:
        CodingError: For too many adversaries, or where rounding would be too large.
    """

    name = "DRACO, cyclic code"
    source = "Chen, Wang, Charles and Papailiopoulos (ICML 2018)"

    def __init__(self, workers: int, adversaries: int, *, mask: Mask = "spread") -> None:
        check_adversaries(workers, adversaries)
        self.workers, self.adversaries = workers, adversaries
        self.code = ReedSolomon(workers, 2 * adversaries, mask=mask, dtype="float64")
        self.assignment = self.code.assignment

    def __repr__(self) -> str:
        return f"DracoCyclic(workers={self.workers}, adversaries={self.adversaries})"

    def encode(self, worker: int, gradients: npt.NDArray[np.float64]) -> npt.NDArray[Any]:
        """(gradient,) complex message of a worker.

        Args:
            worker: The worker.
            gradients: (2 q + 1, gradient) of its chunks, in the order of
                ``assignment.chunks_of(worker)``.
        """
        chunks = self.assignment.chunks_of(worker)
        row = self.code.matrix[[worker]].toarray()[0, chunks]
        return np.asarray(row @ gradients)

    def vote(
        self,
        messages: Mapping[int, npt.NDArray[np.complex128]],
        tolerance: float = 1e-6,
        *,
        seed: int | None = None,
    ) -> ByzantineOutcome:
        """Locate wrong messages and decode the rest.

        Args:
            messages: (gradient,) of each worker whose message is there.
            tolerance: Largest deviation of a projected message, as a share of the largest, that is
                taken for rounding.
            seed: Of the projection. Adversaries must not know it, so None takes a fresh one.

        Raises:
            CodingError: When no q workers explain what the messages contradict, or for messages of
                workers that do not exist.
        """
        strange = sorted(message for message in messages if not 0 <= message < self.workers)
        if strange:
            raise CodingError(f"workers {strange} are not in 0 to {self.workers - 1}")
        lengths = Counter(len(message) for message in messages.values())
        length = lengths.most_common(1)[0][0] if lengths else 0
        received = np.zeros((self.workers, length), dtype=complex)
        for worker, message in messages.items():
            if len(message) == length:
                received[worker] = message
        received[~np.isfinite(received).all(axis=1)] = 0.0
        sizes = np.abs(received).max(axis=1, initial=0.0)
        received[sizes > _OUTRAGEOUS * np.median(sizes)] = 0.0

        generator = np.random.default_rng(seed)
        directions = generator.standard_normal(received.shape[1])
        projected = np.asarray(received @ directions, dtype=np.complex128)
        doubtful = self._locate(projected)
        clean = np.ones(self.workers, dtype=bool)
        clean[doubtful] = False
        allowed = tolerance * float(np.abs(projected[clean]).max(initial=0.0))
        if self._misfit(projected, clean) > allowed:
            raise CodingError(
                f"the messages contradict each other in more than adversaries = "
                f"{self.adversaries} places; a larger number of adversaries would need a load of "
                f"at least {2 * self.adversaries + 3} chunks"
            )
        suspects = set(range(self.workers)) - set(messages)
        for worker in doubtful:
            clean[worker] = True
            if self._misfit(projected, clean) > allowed:
                suspects.add(int(worker))
                clean[worker] = False
        gradient = (self.code.optimal_weights(clean) @ received).real
        return ByzantineOutcome(gradient, frozenset(suspects), frozenset(), frozenset())

    def _locate(self, projected: npt.NDArray[np.complex128]) -> npt.NDArray[np.int64]:
        """(q,) workers among which are all wrong ones, if these are at most q.

        Coefficients n - 2 q to n - 1 of the discrete Fourier transform are 0 for codewords; errors
        E_w make S_j = sum_w E_w z_w^j / n with z_w = exp(-2 pi i w / n). A vector that the Hankel
        matrix of S maps to 0 is a polynomial with roots at all z_w of errors (Prony).
        """
        most = self.adversaries
        if not most:
            return np.empty(0, dtype=np.int64)
        syndromes = np.fft.fft(projected)[self.workers - 2 * most :]
        hankel = syndromes[np.arange(most)[:, None] + np.arange(most + 1)]
        # Rows of the last factor are conjugated; the last belongs to the smallest singular value.
        locator = np.linalg.svd(hankel)[2][-1].conj()
        points = np.exp(-2j * np.pi * np.arange(self.workers) / self.workers)
        values = np.abs(np.polynomial.polynomial.polyval(points, locator))
        return np.argsort(values, kind="stable")[:most]

    def _misfit(self, projected: npt.NDArray[np.complex128], used: npt.NDArray[np.bool_]) -> float:
        """How far the projected messages of some workers are from the nearest codeword."""
        degrees = np.arange(self.workers - 2 * self.adversaries)
        angles = 2j * np.pi * np.flatnonzero(used) / self.workers
        basis, _ = np.linalg.qr(np.exp(angles[:, None] * degrees))
        values = projected[used]
        return float(np.abs(values - basis @ (basis.conj().T @ values)).max(initial=0.0))
