"""``outlast ckpt``: look into checkpoints, check them, compare them, take them apart.

Works on any machine that can read the store, without torch and without the training's code.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from outlast.cli.ckpt_convert import export, import_
from outlast.errors import EXIT_CRASHED, CheckpointError

ckpt = typer.Typer(
    name="ckpt",
    help="Look into checkpoints: list, verify, compare, measure, extract and prune them.",
    no_args_is_help=True,
)

Store = Annotated[
    str,
    typer.Argument(
        metavar="STORE",
        help="Checkpoint store or run directory (e.g. runs/quickstart), or an fsspec URL.",
    ),
]
Step = Annotated[
    int | None, typer.Option(min=0, help="Which version; default: the newest complete one.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


class Mode(StrEnum):
    """Which figures are good."""

    min = "min"
    max = "max"


@ckpt.command("ls")
def list_(store: Store, json: AsJson = False) -> None:
    """List the versions of a store: state, sizes, metrics.

    "stored" is what was written with a version, "refers to" the chunks that it uses in files of
    older versions; "ratio" is raw by stored. A last line says how far replay logs lead on from the
    newest complete version.
    """
    from outlast.checkpoint.format.version import Version
    from outlast.checkpoint.inspection.listing import (
        list_saved,
        open_store,
        summarize,
        summarize_logs,
    )
    from outlast.cli.ckpt_tables import print_versions
    from outlast.cli.figures import print_json

    storage = open_store(store)
    versions = [summarize(storage, version) for version in list_saved(storage)]
    complete = [
        Version(version.session, version.step)
        for version in versions
        if version.state == "complete"
    ]
    logs = summarize_logs(storage, max(complete, default=None))
    if json:
        print_json({"store": storage.location, "versions": versions, "logs": logs})
    else:
        print_versions(storage.location, versions, logs)


@ckpt.command()
def show(
    store: Store,
    step: Step = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    values: Annotated[bool, typer.Option("--values", help="Print the values, as JSON.")] = False,
    json: AsJson = False,
) -> None:
    """Show what one version consists of and how it is stored.

    "full" and "delta" count chunks that are stored in full and as differences to the version
    before, "depth" is the longest row of differences.
    """
    from outlast.checkpoint.inspection.listing import describe, find_version, open_store
    from outlast.cli.ckpt_tables import print_description
    from outlast.cli.figures import print_json

    storage = open_store(store)
    found = describe(storage, find_version(storage, step))
    if json:
        print_json(found)
    else:
        print_description(found, tensors=tensors, values=values)


@ckpt.command()
def verify(
    store: Store,
    step: Step = None,
    every: Annotated[bool, typer.Option("--all", help="Verify every version.")] = False,
    json: AsJson = False,
) -> None:
    """Decode everything that is stored and compare it with its checksums.

    Exit code 0: all is as written; 1: something is damaged, or incomplete: a save that did not
    finish, or that a live run is at.
    """
    from outlast.checkpoint.inspection.listing import (
        find_version,
        list_begun,
        newest_complete,
        open_store,
    )
    from outlast.checkpoint.inspection.usage import Known
    from outlast.checkpoint.inspection.usage import verify as verify_version
    from outlast.cli.ckpt_tables import print_verdict
    from outlast.cli.figures import bytes_progress, print_json

    if every and step is not None:
        raise CheckpointError(f"--step {step} and --all exclude each other; give one of them")
    storage = open_store(store)
    begun = list_begun(storage)
    if every:
        versions = begun
    elif step is None:
        # A newer one that is not complete is what a restore passes over.
        newest = newest_complete(storage)
        versions = [version for version in begun if newest is None or version >= newest]
    else:
        candidates = [version for version in begun if version.step == step]
        versions = candidates or [find_version(storage, step).version]
    known: set[Known] = set()
    verdicts = []
    for version in versions:
        with bytes_progress(f"verify step {version.step}") as progress:
            verdicts.append(verify_version(storage, version, known, progress))
        if not json:
            print_verdict(verdicts[-1])
    damaged = sum(verdict.state != "ok" for verdict in verdicts)
    if json:
        print_json({"store": storage.location, "damaged": damaged, "versions": verdicts})
    if damaged:
        raise typer.Exit(EXIT_CRASHED)


@ckpt.command()
def diff(
    store: Store,
    before: Annotated[int, typer.Argument(metavar="A", min=0, help="Step of one version.")],
    after: Annotated[int, typer.Argument(metavar="B", min=0, help="Step of the other.")],
    everything: Annotated[bool, typer.Option("--all", help="List unchanged tensors too.")] = False,
    json: AsJson = False,
) -> None:
    """Show what changed from step A to step B and how much, the largest change first.

    "elements" is the share of elements whose bits differ; |a-b|/|b| is the relative change in the
    2-norm.
    """
    from outlast.checkpoint.inspection.difference import compare
    from outlast.checkpoint.inspection.listing import find_version, open_store
    from outlast.cli.ckpt_tables import print_difference
    from outlast.cli.figures import bytes_progress, print_json

    storage = open_store(store)
    versions = find_version(storage, before), find_version(storage, after)
    with bytes_progress(f"compare steps {before} and {after}") as progress:
        found = compare(storage, *versions, progress)
    if json:
        print_json(found)
    else:
        print_difference(found, everything=everything)


@ckpt.command()
def du(store: Store, json: AsJson = False) -> None:
    """Show what takes the space, and what deleting a version would free.

    "own" are files with chunks that no other version needs, "shared" those that others need too.
    Replay logs are counted apart.
    """
    from outlast.checkpoint.inspection.listing import open_store
    from outlast.checkpoint.inspection.usage import usage
    from outlast.cli.ckpt_space import print_usage
    from outlast.cli.figures import print_json

    storage = open_store(store)
    found = usage(storage)
    if json:
        print_json(found)
    else:
        print_usage(storage.location, found)


@ckpt.command("restore-to")
def restore_to(
    store: Store,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory to make; an empty one may exist.")
    ],
    step: Step = None,
    only: Annotated[
        str, typer.Option(metavar="PATTERN", help="Names of the tensors to write, e.g. 'model.*'.")
    ] = "*",
    json: AsJson = False,
) -> None:
    """Write a version as .safetensors files of at most 5 GB, an index and values.json.

    Every byte is verified on the way; the directory appears when it is complete, or not at all.
    """
    from outlast.checkpoint.inspection.extract import extract
    from outlast.checkpoint.inspection.listing import find_version, open_store
    from outlast.cli.ckpt_tables import print_extracted
    from outlast.cli.figures import bytes_progress, print_json

    storage = open_store(store)
    contents = find_version(storage, step)
    with bytes_progress(f"restore step {contents.version.step}") as progress:
        found = extract(storage, contents, directory, only=only, progress=progress)
    if json:
        print_json(found)
    else:
        print_extracted(found)


@ckpt.command()
def prune(
    store: Store,
    *,
    keep: Annotated[
        int | None, typer.Option(help="Keep so many of the newest versions; default: 3.")
    ] = None,
    every: Annotated[int, typer.Option(help="Keep all steps that are multiples of this.")] = 0,
    best: Annotated[int, typer.Option(help="Keep so many with the best metric.")] = 0,
    metric: Annotated[str, typer.Option(help="Name of that metric, as it was saved.")] = "",
    mode: Annotated[Mode, typer.Option(help="Whether a small or a large one is good.")] = Mode.min,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be deleted.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Delete versions except those that are asked to stay, and remains of killed saves.

    Chunks that a remaining version needs are kept, and replay logs, which a run deletes itself when
    it saves. Refused while a live process owns the store.
    """
    from outlast.checkpoint.format.retention import Retention
    from outlast.checkpoint.inspection.listing import open_store
    from outlast.checkpoint.inspection.usage import prune_store
    from outlast.cli.ckpt_space import print_pruned
    from outlast.cli.figures import print_json

    if keep is None and not every and not best:
        raise CheckpointError(
            "say what stays, e.g. --keep 3; --dry-run shows what would be deleted"
        )
    policy = Retention(3 if keep is None else keep, every, best, metric, mode.value)
    storage = open_store(store)
    found = prune_store(storage, policy, dry_run=dry_run)
    if json:
        print_json(found)
    else:
        print_pruned(storage.location, found)


ckpt.command("export")(export)
ckpt.command("import")(import_)
