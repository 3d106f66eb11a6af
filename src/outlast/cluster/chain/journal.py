"""What has happened to a chain: one JSON object a line, appended by whoever did it.

A line is one write to a file opened with O_APPEND, so links, a login node and a node that was
believed dead may all write; a torn last line is passed over.

Kinds of entry (each has ``time``, seconds since the epoch, and ``kind``):

==============  ================================================================================
created         the chain was made; ``chain``
submitted       ``job``, ``number`` of its (first) link, ``after`` (a job or ""), ``nodes``; of a
                filler ``role`` and the number of the link that waits
chosen          the link ``job``, whose limit was chosen; ``nodes``, ``wall_seconds``, ``reason``,
                ``waits`` (predicted: P10, P50, P90 and longest, seconds), ``told`` (P10, P50 and
                P90, corrected by past errors), ``after`` as above
refused         a link could not be submitted; ``number``, ``words``
started         a link; ``job``, ``number``, ``began`` (its script), ``step``, ``nodes``, ``hosts``
fenced          a link found another one alive and went away; ``job``, ``holder``
signalled       ``job``, ``signal``, ``left`` (seconds by the limit), ``state`` (as Slurm says)
prefetched      data were copied beside the training of the link ``job``; ``code`` of the copying
ended           a link; ``job``, ``number``, ``code``, ``reason``, ``step``, ``seconds``, and
                ``state`` as Slurm said then, if it was asked
lost            the link ``job`` ended without a word; ``state`` as Slurm says, noted by the next
judged          the link ``job`` was told to end, or is adopted; ``state`` as Slurm says, noted by
                the next
finished        the chain; ``outcome``: done, gave_up, cancelled, stopped; ``reason``
resumed         the chain goes on after ``finished``
==============  ================================================================================
"""

from __future__ import annotations

import json
import math
import os
import time
from typing import TYPE_CHECKING, Any

from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.cluster.chain.plan import ChainFiles

Entry = dict[str, Any]


def note(files: ChainFiles, kind: str, **fields: Any) -> Entry:
    """Append an entry.

    Raises:
        ClusterError: The journal cannot be written.
    """
    entry: Entry = {"time": time.time(), "kind": kind, **fields}
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in entry.items()
    }
    # A torn line of somebody who died is closed by the line end at the beginning.
    line = ("\n" + json.dumps(finite) + "\n").encode()
    try:
        descriptor = os.open(files.journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ClusterError(f"{files.journal} cannot be written: {error.strerror}") from None
    return finite


def note_or_print(files: ChainFiles, kind: str, **fields: Any) -> None:
    """Append an entry; where that fails, say so: a full disk is no reason to end a training."""
    try:
        note(files, kind, **fields)
    except ClusterError as error:
        print(error, flush=True)


def entries(files: ChainFiles) -> list[Entry]:
    """All entries, oldest first; none where there is no journal.

    Raises:
        ClusterError: It is there and cannot be read.
    """
    try:
        lines = files.journal.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ClusterError(f"{files.journal} cannot be read: {error.strerror}") from None
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "kind" in entry and "time" in entry:
            found.append(entry)
    return found


def of_kind(journal: Sequence[Entry], kind: str) -> list[Entry]:
    """Entries of one kind."""
    return [entry for entry in journal if entry["kind"] == kind]


def finished(journal: Sequence[Entry]) -> Entry | None:
    """How the chain ended; None while it goes on, also after it was resumed."""
    found = None
    for entry in journal:
        if entry["kind"] == "finished":
            found = entry
        elif entry["kind"] == "resumed":
            found = None
    return found


def since_resumed(journal: Sequence[Entry]) -> list[Entry]:
    """Entries since the chain was made or resumed for the last time."""
    places = [index for index, item in enumerate(journal) if item["kind"] == "resumed"]
    return list(journal[places[-1] :]) if places else list(journal)


def is_filler(entry: Entry) -> bool:
    """Whether an entry is about a filler, which trains while a link waits."""
    return entry.get("role") == "filler"


def submitted_jobs(journal: Sequence[Entry]) -> list[str]:
    """Numbers of all jobs that were submitted for the chain, oldest first."""
    return [str(entry["job"]) for entry in journal if entry["kind"] == "submitted"]


def choice_words(journal: Sequence[Entry]) -> str:
    """What the link that was submitted last is, and why; empty where that was not chosen."""
    chosen, links = of_kind(journal, "chosen"), links_submitted(journal)
    if not chosen or not links or str(chosen[-1]["job"]) != str(links[-1]["job"]):
        return ""
    found = chosen[-1]
    return f"link {found['number']}, job {found['job']}: {found['reason']}"


def links_submitted(journal: Sequence[Entry]) -> list[Entry]:
    """Entries of the links that were submitted, without fillers, oldest first."""
    return [entry for entry in of_kind(journal, "submitted") if not is_filler(entry)]
