"""Checkpoints through random faults, on a disk and on an object store.

The object store is moto's server, in this process. The last part shows what several requests at
once are worth: there each answer takes 30 ms and what 80 MB/s let through, as a connection to S3
does.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

# Processes are forked here, and must not find a pool of threads that they do not have.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from harness import Bar, at_least, at_most

sys.path[:0] = [str(Path(__file__).parent.parent / "tests" / each) for each in ("", "checkpoint")]

from disk_faults import damage_files, fill_disk, kill_programs  # noqa: E402
from s3_faults import Faults, fail_requests, faulty_place, kill_ranks, race  # noqa: E402
from s3_server import s3_server  # noqa: E402

from outlast.checkpoint import CheckpointStore, Compression, Reduction  # noqa: E402

ROUNDS = 25
STORAGE = "outlast.checkpoint.storage"


def killed_writers(place: str, faults: Faults, rounds: int) -> None:
    fail_requests(place, faults, rounds, writer="process")


@contextmanager
def directory(seed: int) -> Iterator[tuple[str, Faults]]:
    """A place on the disk of this repository, and its faults."""
    with (
        tempfile.TemporaryDirectory(dir=Path(__file__).parent, prefix=".checkpoint-") as folder,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield folder, Faults(seed)


def fault_bars(scale: int) -> list[Bar]:
    """Random faults in rounds, each in a place of its own; what is wrong ends its round."""
    stages: dict[str, tuple[Any, Callable[[str, Faults, int], None], int]] = {
        "disk: files that are damaged": (directory, damage_files, 60 * scale),
        "disk: it is full": (directory, fill_disk, 20 * scale),
        "disk: programs that are killed": (directory, kill_programs, 10 * scale),
        "disk: two writers of one step": (directory, race, 5 * scale),
        "S3: ranks that are killed": (faulty_place, kill_ranks, 3 * scale),
        "S3: two writers of one step": (faulty_place, race, 2 * scale),
        "S3: writers that are killed": (faulty_place, killed_writers, 2 * scale),
        "S3: requests that fail": (faulty_place, fail_requests, 20 * scale),
    }
    bars, wrong, total = [], [], 0
    for name, (place_of, stage, count) in stages.items():
        staged = 0
        for seed in range(0, count, ROUNDS):
            with place_of(seed) as (place, faults):
                try:
                    stage(place, faults, min(ROUNDS, count - seed))
                except subprocess.CalledProcessError:
                    wrong.append(f"{name}: not staged, since a tmpfs cannot be mounted here")
                    break
                except Exception as error:
                    wrong.append(f"{name}, seed {seed}: {type(error).__name__}: {error}")
                staged += faults.staged.total()
        bars.append(Bar(name, staged, "staged", "reported", True, f"{count} rounds"))
        total += staged
    note = (
        "; ".join(wrong)[:300] or "each restore gave the bits of a save, the newest that ended well"
    )
    return [
        *bars,
        at_least("faults of all kinds", total, "staged", 150 * scale, "3,000 in a full run"),
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


def bars(quick: bool) -> list[Bar]:
    """All rows of this file."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    return fault_bars(1 if quick else 20) + speed_bars(64 if quick else 256)
