"""Which of the free nodes a job gets; sets of nodes are the bits of an integer."""

from __future__ import annotations


def best_fit(free: int, count: int) -> int:
    """`count` of the free nodes: out of the tightest run that is long enough, else the longest."""
    chosen = 0
    while count:
        runs = _runs(free)
        enough = [run for run in runs if run[1] >= count]
        if enough:
            first, length = min(enough, key=lambda pair: (pair[1], pair[0]))
        else:
            first, length = max(runs, key=lambda run: (run[1], -run[0]))
        taken = ((1 << min(length, count)) - 1) << first
        chosen |= taken
        free &= ~taken
        count -= min(length, count)
    return chosen


def _runs(free: int) -> list[tuple[int, int]]:
    """First node and length of each run of consecutive free nodes."""
    found, first = [], 0
    while free:
        zeros = (free & -free).bit_length() - 1
        free >>= zeros
        ones = (~free & (free + 1)).bit_length() - 1
        found.append((first + zeros, ones))
        free >>= ones
        first += zeros + ones
    return found
