"""Checkpoints on an object store: faults that are staged, and what requests at once are worth.

    python benchmarks/checkpoint_objects.py [--quick] [--json FILE]

The server is moto's, in this process. For the second part, each of its answers takes 30 ms and what
80 MB/s let through, as a connection to S3 does.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

# Processes are forked here, and must not find a pool of threads that they do not have.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from harness import Bar, arguments, at_least, at_most, publish

sys.path[:0] = [str(Path(__file__).parent.parent / "tests" / each) for each in ("", "checkpoint")]

from s3_faults import Faults, fail_requests, faulty_place, kill_ranks, race  # noqa: E402
from s3_server import s3_server  # noqa: E402

from outlast.checkpoint import CheckpointStore, Compression, Reduction  # noqa: E402

ROUNDS = 25
STORAGE = "outlast.checkpoint.storage"


def killed_writers(place: str, faults: Faults, rounds: int) -> None:
    fail_requests(place, faults, rounds, writer="process")


def fault_bars(scale: int) -> list[Bar]:
    """Random faults in rounds, each on a server of its own; what is wrong ends its round."""
    stages: dict[str, tuple[Callable[[str, Faults, int], None], int]] = {
        "ranks that are killed": (kill_ranks, 3 * scale),
        "two writers of one step": (race, 2 * scale),
        "writers that are killed": (killed_writers, 2 * scale),
        "requests that fail": (fail_requests, 20 * scale),
    }
    bars, wrong = [], []
    for name, (stage, count) in stages.items():
        staged = 0
        for seed in range(0, count, ROUNDS):
            with faulty_place(seed) as (place, faults):
                try:
                    stage(place, faults, min(ROUNDS, count - seed))
                except Exception as error:
                    wrong.append(f"{name}, seed {seed}: {type(error).__name__}: {error}")
                staged += faults.staged.total()
        bars.append(at_least(f"S3: {name}", staged, "staged", count, f"{count} saves"))
    note = (
        "; ".join(wrong)[:300] or "each restore gave the bits of a save, the newest that ended well"
    )
    return [
        *bars,
        at_most("- wrong states, lost versions and other errors", len(wrong), "", 0, note),
    ]


def speed_bars(megabytes: int) -> list[Bar]:
    """Seconds of a save and a restore, against one request at a time."""
    state = {"model": torch.nn.Linear(250 * megabytes, 1000, bias=False)}
    seconds: dict[str, list[float]] = {}
    with s3_server(f"speed{uuid.uuid4().hex}", fault=lambda *_: "far", threaded=True) as url:
        for way, at_once in (("one at a time", 1), ("several at once", 0)):
            settings = {f"{STORAGE}._PARTS_AT_ONCE": 1, f"{STORAGE}.FsspecStorage.reads_at_once": 1}
            with ExitStack() as stack:
                for each in settings.items() if at_once else ():
                    stack.enter_context(mock.patch(*each))
                place, plain = f"{url}/{at_once}", Reduction(Compression("none"))
                store = stack.enter_context(
                    CheckpointStore(place, writer="thread", reduction=plain)
                )
                begun = time.perf_counter()
                store.save(1, state)
                saved = time.perf_counter()
                store.restore(state)
                seconds[way] = [saved - begun, time.perf_counter() - saved]
    before, now = seconds.values()
    return [
        Bar(f"S3: {what} of {megabytes} MB", round(b / n, 2), "x faster", "reported", True, note)
        for what, b, n in zip(("save", "restore"), before, now, strict=True)
        for note in [f"{b:.2f} s one request at a time, {n:.2f} s now"]
    ]


def main() -> None:
    options = arguments(__doc__ or "")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    bars = fault_bars(1 if options.quick else 20)
    publish("checkpoint_objects", bars + speed_bars(64 if options.quick else 256), options.json)


if __name__ == "__main__":
    main()
