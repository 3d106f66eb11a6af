"""Models of who straggles when: the histories that a sequential scheme promises to survive.

A history is a (rounds, workers) boolean array, true where a worker straggled. Every model is a
statement about each window of consecutive rounds, holds for a history cut short, and still holds
when a straggler is taken away. Krishnan, Ebrahimi and Khisti (ICLR 2023), section 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt


def cut(history: npt.NDArray[np.bool_], length: int) -> Iterator[npt.NDArray[np.bool_]]:
    """All windows of `length` consecutive rounds; the whole history, where it is shorter."""
    for first in range(max(len(history) - length, 0) + 1):
        yield history[first : first + length]


def windows(history: npt.NDArray[np.bool_], length: int) -> npt.NDArray[np.bool_]:
    """(windows, workers, rounds) view of what `cut` gives."""
    rounds = min(length, len(history))
    return np.lib.stride_tricks.sliding_window_view(history, rounds, axis=0)


def per_round(history: npt.NDArray[np.bool_], stragglers: int) -> bool:
    """Whether at most so many workers straggle in each round."""
    return bool(np.all(history.sum(axis=1) <= stragglers))


def bursty(history: npt.NDArray[np.bool_], *, burst: int, window: int, stragglers: int) -> bool:
    """Whether stragglers are few and their bursts short: the (B, W, lambda)-bursty model.

    In each window of W rounds at most lambda distinct workers straggle, and the first and last
    round in which a worker does are less than B apart.
    """
    for apart in range(burst, min(window, len(history))):
        if np.any(history[apart:] & history[:-apart]):
            return False
    return not len(history) or bool(
        np.all(windows(history, window).any(axis=2).sum(axis=1) <= stragglers)
    )


def arbitrary(history: npt.NDArray[np.bool_], *, most: int, window: int, stragglers: int) -> bool:
    """Whether stragglers are few and straggle seldom: the (N, W', lambda')-arbitrary model.

    In each window of W' rounds at most lambda' distinct workers straggle, each in at most N rounds.
    """
    if not len(history):
        return True
    counts = windows(history, window).sum(axis=2)
    return bool(np.all(counts <= most) and np.all((counts > 0).sum(axis=1) <= stragglers))
