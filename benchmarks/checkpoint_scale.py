"""Checkpoints of very many ranks: what planning, sealing and opening cost one of them.

One process plays all ranks: it writes their real manifests, with six tensors each, into a real
directory, and then does what rank 0 and one rank that restores do. Figures are CPU time.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from harness import Bar, at_most

sys.path[:0] = [str(Path(__file__).parent.parent / "tests" / "checkpoint")]

import numpy as np  # noqa: E402
from many_ranks import (  # noqa: E402
    COLUMNS,
    ROWS,
    TENSORS,
    Layout,
    box_of,
    content_of,
    holdings_of,
    names_of,
    write_parts,
)

from outlast.checkpoint import list_versions, storage_of  # noqa: E402
from outlast.checkpoint.manifest import Part, collection_paused  # noqa: E402
from outlast.checkpoint.plan import make_plan  # noqa: E402
from outlast.checkpoint.reader import VersionReader, Wanted  # noqa: E402
from outlast.checkpoint.version import (  # noqa: E402
    is_published,
    leaders,
    open_version,
    seal_group,
    seal_groups,
)

T = TypeVar("T")
RANKS, QUICK_RANKS = 16_384, 1_024
SEAL_SECONDS, OPEN_SECONDS = 5.0, 2.0
LAYOUTS: dict[Layout, str] = {
    "own": "tensors of their own",
    "shared": "rows of six tensors",
}


def timed(work: Callable[[], T]) -> tuple[T, float]:
    begun = time.process_time()
    with collection_paused():
        found = work()
    return found, time.process_time() - begun


@contextmanager
def counted_parts() -> Iterator[list[str]]:
    """Names of the manifests that are parsed."""
    names: list[str] = []
    parse = Part.from_bytes

    def counting(content: bytes, name: str) -> Part:
        names.append(name)
        return parse(content, name)

    Part.from_bytes = counting  # type: ignore[method-assign]
    try:
        yield names
    finally:
        Part.from_bytes = parse  # type: ignore[method-assign]


def open_one(place: Path, layout: Layout, ranks: int) -> None:
    """What one rank does to restore: its own tensors, and the value that all ranks take."""
    storage, rank = storage_of(place), ranks * 2 // 3
    version = list_versions(storage)[-1]
    contents = open_version(storage, version)
    assert contents.values["data"] == {"position": 1}
    assert contents.on_demand is not None
    names, box = names_of(layout, rank), box_of(layout, rank)
    contents.on_demand.read(dict.fromkeys(names, box))
    out = [np.zeros((ROWS, COLUMNS), np.float32) for _ in names]
    with VersionReader(storage, contents) as reader:
        reader.read([Wanted(name, box, array) for name, array in zip(names, out, strict=True)])
    for number, array in enumerate(out):
        assert np.array_equal(array, content_of(layout, 1, rank, number))


def bars_of(layout: Layout, ranks: int, *, judged: bool) -> list[Bar]:
    place = Path(tempfile.mkdtemp(prefix="scale-"))
    try:
        holdings = holdings_of(layout, ranks)
        plan, plan_seconds = timed(lambda: make_plan(holdings, 0))
        storage = storage_of(place)
        version = write_parts(place, 1, ranks, layout, plan.catalogue)
        with counted_parts() as sealed_parts:
            _, own_seconds = timed(lambda: seal_group(storage, version, 0, ranks))
            count = len(sealed_parts)
            for rank in leaders(ranks)[1:]:
                seal_group(storage, version, rank, ranks)
            before = len(sealed_parts)
            _, seal_seconds = timed(lambda: seal_groups(storage, version, ranks))
            count += len(sealed_parts) - before
        published, list_seconds = timed(lambda: is_published(storage, version))
        assert published
        with counted_parts() as opened_parts:
            _, open_seconds = timed(lambda: open_one(place, layout, ranks))
    finally:
        shutil.rmtree(place)
    what = f"{ranks:,} ranks, {LAYOUTS[layout]}"
    total = plan_seconds + own_seconds + seal_seconds
    note = f"plan {plan_seconds:.2f}, its group {own_seconds:.2f}, seal {seal_seconds:.2f}"
    note = f"{note}; {count} of {ranks:,} manifests parsed"
    rows = [
        (
            f"{what}: plan and seal on rank 0",
            total,
            SEAL_SECONDS,
            note,
        ),
        (
            f"{what}: open and read on one rank",
            open_seconds,
            OPEN_SECONDS,
            f"{len(opened_parts)} manifests parsed for {TENSORS} tensors and a value",
        ),
    ]
    found = [
        at_most(name, seconds, "CPU-s", limit, note)
        if judged
        else Bar(name, round(seconds, 4), "CPU-s", "reported", True, note)
        for name, seconds, limit, note in rows
    ]
    note = "whether the version is complete; once for each version that a run keeps"
    return [
        *found,
        Bar(f"{what}: look at the seal", round(list_seconds, 4), "CPU-s", "reported", True, note),
    ]


def bars(quick: bool) -> list[Bar]:
    """All rows of this file."""
    ranks = QUICK_RANKS if quick else RANKS
    return [bar for layout in LAYOUTS for bar in bars_of(layout, ranks, judged=not quick)]
