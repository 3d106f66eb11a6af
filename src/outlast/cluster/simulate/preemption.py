"""Which running jobs make room for one of a higher tier."""

from __future__ import annotations

from outlast.cluster.simulate.book import Book


def victims(book: Book, job: int) -> list[int]:
    """Jobs of lower tiers whose nodes, with the free ones, are enough for `job`.

    Lowest tier first, then lowest priority, then the youngest, as Slurm's preempt/partition_prio
    with ``preempt_youngest_first``; empty where even all of them are not enough.
    """
    missing = book.need[job] - book.free
    tier = book.tier[job]
    lower = [
        running
        for _, running in book.running
        if book.tier[running] < tier and book.state[running] == "running"
    ]
    lower.sort(key=lambda item: (book.tier[item], book.priority[item], -book.start[item], item))
    chosen = []
    for running in lower:
        if missing <= 0:
            break
        missing -= book.need[running]
        chosen.append(running)
    return chosen if missing <= 0 else []
