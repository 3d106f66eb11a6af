"""``outlast ckpt``: look into checkpoints, check them, compare them, take them apart.

Works on any machine that can read the store, without torch and without the training's code.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli.console import (
    Column,
    bytes_progress,
    count_text,
    output,
    print_facts,
    print_json,
    print_table,
    ratio_text,
    size_text,
)
from outlast.cli.options import AsJson
from outlast.errors import EXIT_CRASHED, CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from outlast.checkpoint.content import TensorChange, ValueChange
    from outlast.checkpoint.convert import Converted
    from outlast.checkpoint.inspection import (
        Coding,
        Description,
        Verification,
    )


Store = Annotated[
    str,
    typer.Argument(
        metavar="STORE",
        help="Checkpoint store or run directory (e.g. runs/quickstart), or an fsspec URL.",
    ),
]


ExportedStep = Annotated[
    int | None, typer.Option("--step", help="Which step; default: the newest whole one.", min=0)
]


def export(
    store: Store,
    target: Annotated[
        str, typer.Argument(help="File or folder to make, or an fsspec URL; must not exist.")
    ],
    *,
    kind: Annotated[
        str,
        typer.Option("--to", help="torch (a file), or safetensors, dcp or megatron (a folder)."),
    ] = "safetensors",
    step: ExportedStep = None,
    prefix: Annotated[
        str, typer.Option(help="Only names that begin with it, without it, e.g. model.")
    ] = "",
    json: AsJson = False,
) -> None:
    """Write a version of a store in another program's format.

    Example: outlast ckpt export runs/a model/ --prefix model.

    --json: {"step", "tensors", "bytes", "notes"}.
    """
    from outlast.checkpoint.convert import export_checkpoint
    from outlast.checkpoint.inspection import open_store

    place = open_store(store).location
    with bytes_progress(f"export to {target}") as progress:
        done = export_checkpoint(
            place, target, kind=kind, step=step, prefix=prefix, progress=progress
        )
    _tell(done, f"wrote step {done.step} of {store} to {target}", json=json)


def import_(
    source: Annotated[Path, typer.Argument(help="File or folder of the other program.")],
    store: Annotated[str, typer.Argument(help="Store: a directory or fsspec URL.")],
    *,
    kind: Annotated[
        str, typer.Option("--from", help="dcp, torch, safetensors, deepspeed, megatron, or auto.")
    ] = "auto",
    step: Annotated[
        int | None,
        typer.Option("--step", help="Steps done; default: what the source says, else 0.", min=0),
    ] = None,
    prefix: Annotated[
        str, typer.Option(help="Put before every name, e.g. model. for {'model': model}.")
    ] = "",
    json: AsJson = False,
) -> None:
    """Copy another program's checkpoint into a store, as its newest version.

    Reads folders of torch.distributed.checkpoint, files of torch.save, Hugging Face safetensors,
    DeepSpeed's ZeRO 0 to 2 and Megatron-core's torch_dist. Nothing that a checkpoint contains is
    executed.

    Example: outlast ckpt import pretrained/ ckpt/ --prefix model.

    --json: {"step", "tensors", "bytes", "notes"}.
    """
    from outlast.checkpoint.convert import import_checkpoint

    with bytes_progress(f"import {source}") as progress:
        done = import_checkpoint(
            source, store, step=step, kind=kind, prefix=prefix, progress=progress
        )
    _tell(done, f"imported {source} into {store} as step {done.step}", json=json)


def _tell(done: Converted, what: str, *, json: bool) -> None:
    if json:
        print_json(done)
        return
    typer.echo(f"{what}: {done.tensors} tensors, {done.bytes / 1e6:.1f} MB")
    for note in done.notes:
        typer.echo(note)


ckpt = typer.Typer(
    name="ckpt",
    help="Look into checkpoints: list, verify, compare, measure, extract and prune them.",
    no_args_is_help=True,
)


Step = Annotated[
    int | None, typer.Option(min=0, help="Which version; default: the newest complete one.")
]


class Mode(StrEnum):
    """Better values of a metric: the smallest or the largest."""

    min = "min"
    max = "max"


@ckpt.command("ls")
def list_(store: Store, json: AsJson = False) -> None:
    """List the versions of a store: state, sizes, metrics.

    "stored" is what was written with a version, "refers to" the chunks that it uses in files of
    older versions; "ratio" is raw by stored. A last line says how far replay logs lead on from the
    newest complete version.
    """
    from rich.markup import escape

    from outlast.checkpoint.inspection import (
        list_saved,
        open_store,
        summarize,
        summarize_logs,
    )
    from outlast.checkpoint.version import Version

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
        return
    console = output()
    columns = [
        Column("step"),
        Column("session", optional=6),
        Column("kind", number=False, optional=5),
        Column("state", number=False),
        Column("ranks", optional=7),
        Column("tensors", optional=8),
        Column("raw", optional=3),
        Column("stored"),
        Column("refers to", optional=2),
        Column("ratio", optional=4),
        Column("metrics", number=False, optional=1, least=20),
    ]
    rows = [
        [
            str(version.step),
            str(version.session),
            version.kind or "-",
            version.state if not version.problem or version.state != "complete" else "complete (!)",
            _number(version.ranks),
            _number(version.tensors),
            size_text(version.raw_bytes),
            size_text(version.stored_bytes),
            size_text(version.referred_bytes),
            ratio_text(version.ratio),
            " ".join(f"{name}={_figure(value)}" for name, value in version.metrics.items()),
        ]
        for version in versions
    ]
    print_table(
        console, columns, rows, f"{storage.location}: {count_text(len(versions), 'version')}"
    )
    for version in versions:
        if version.problem:
            style = _STYLES[version.state] if version.state != "complete" else "red"
            name = f"step {version.step}, session {version.session}"
            console.print(f"[{style}]{name}:[/] {escape(version.problem)}", soft_wrap=True)
    if logs is not None:
        words = f"{count_text(logs.logs, 'replay log')} of {size_text(logs.stored_bytes)}"
        if logs.base is None:
            words += ", and no complete version that they could lead on from"
        else:
            use = f"none leads on from step {logs.base}"
            if logs.step is not None:
                verb = "leads" if logs.leading_on == 1 else "lead"
                use = f"{logs.leading_on:,} {verb} on from step {logs.base} to step {logs.step}"
            words = "; ".join(filter(None, [f"{words}: {use}", logs.problem]))
        console.print(words, markup=False, soft_wrap=True)


@ckpt.command()
def show(
    store: Store,
    step: Step = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    values: Annotated[bool, typer.Option("--values", help="Print the values, as JSON.")] = False,
    json: AsJson = False,
) -> None:
    """Show what one version consists of and how it is stored.

    "full" and "delta" count chunks that are stored in full and, as earlier releases did, as
    differences to the version before; "depth" is the longest row of differences.
    """
    from outlast.checkpoint.inspection import describe, find_version, open_store

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
    from outlast.checkpoint.inspection import (
        Known,
        find_version,
        list_begun,
        newest_complete,
        open_store,
    )
    from outlast.checkpoint.inspection import verify as verify_version

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
    from rich.markup import escape

    from outlast.checkpoint.content import compare
    from outlast.checkpoint.inspection import find_version, open_store

    storage = open_store(store)
    versions = find_version(storage, before), find_version(storage, after)
    with bytes_progress(f"compare steps {before} and {after}") as progress:
        found = compare(storage, *versions, progress)
    if json:
        print_json(found)
        return
    console = output()
    same = sum(tensor.change == "same" for tensor in found.tensors)
    shown = [tensor for tensor in found.tensors if everything or tensor.change != "same"]
    title = f"{found.before} to {found.after}"
    columns = [
        Column("tensor", number=False, least=40),
        Column("change", number=False, optional=1),
        Column("type", number=False, optional=3, least=13),
        Column("shape", number=False, optional=2, least=10),
        Column("elements"),
        Column("|a-b|/|b|"),
        Column("max |a-b|"),
    ]
    if shown:
        print_table(console, columns, [_change(tensor) for tensor in shown], title)
    else:
        console.print(f"[bold]{escape(title)}[/bold]: no tensor differs")
    odd = sum(tensor.not_finite for tensor in found.tensors)
    if odd:
        console.print(
            f"{count_text(odd, 'changed element')} not finite (infinite or NaN) in one of the "
            "versions: counted as changed, left out of |a-b|"
        )
    _print_values(console, found.values)
    console.print(
        f"{count_text(same, 'tensor')} unchanged; {size_text(found.equal_bytes)} of "
        f"{size_text(found.content_bytes)} equal by their hashes, "
        f"{size_text(found.read_bytes)} read from the store"
    )


@ckpt.command()
def du(store: Store, json: AsJson = False) -> None:
    """Show what takes the space, and what deleting a version would free.

    "own" are files with chunks that no other version needs, "shared" those that others need too.
    Replay logs are counted apart.
    """
    from outlast.checkpoint.inspection import open_store, usage

    storage = open_store(store)
    found = usage(storage)
    if json:
        print_json(found)
        return
    console = output()
    columns = [
        Column("step"),
        Column("session", optional=2),
        Column("state", number=False, optional=1),
        Column("raw", optional=3),
        Column("own"),
        Column("shared"),
        Column("manifests"),
        Column("freed if deleted"),
    ]
    rows = [
        [
            str(version.step),
            str(version.session),
            "complete" if version.complete else "incomplete",
            size_text(version.raw_bytes),
            size_text(version.own_bytes),
            size_text(version.shared_bytes),
            size_text(version.manifest_bytes),
            size_text(version.freed_bytes),
        ]
        for version in found.versions
    ]
    print_table(console, columns, rows, storage.location)
    console.print()
    sums = [
        ("own chunks", found.own_bytes),
        ("shared chunks", found.shared_bytes),
        ("manifests", found.manifest_bytes),
        ("temporary files", found.temporary_bytes),
        ("files nobody needs", found.orphan_bytes),
        ("replay logs", found.log_bytes),
        ("total", found.total_bytes),
    ]
    print_table(
        console,
        [Column("what", number=False), Column("size")],
        [[name, size_text(size)] for name, size in sums],
    )
    complete = [version for version in found.versions if version.raw_bytes is not None]
    if complete:
        average = found.raw_bytes // len(complete)
        console.print(
            f"{count_text(len(complete), 'version')} of {size_text(average)} in "
            f"{size_text(found.total_bytes - found.log_bytes)}: {ratio_text(found.ratio)} smaller"
        )


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
    from outlast.checkpoint.content import extract
    from outlast.checkpoint.inspection import find_version, open_store

    storage = open_store(store)
    contents = find_version(storage, step)
    with bytes_progress(f"restore step {contents.version.step}") as progress:
        found = extract(storage, contents, directory, only=only, progress=progress)
    if json:
        print_json(found)
        return
    output().print(
        f"wrote {found.folder} to {found.directory}: {count_text(found.tensors, 'tensor')} "
        f"({size_text(found.bytes)}) in {count_text(len(found.files), 'file')}, "
        f"{count_text(found.values, 'value')} in values.json",
        markup=False,
        soft_wrap=True,
    )


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
    from outlast.checkpoint.inspection import open_store, prune_store
    from outlast.checkpoint.retention import Retention

    if keep is None and not every and not best:
        raise CheckpointError(
            "say what stays, e.g. --keep 3; --dry-run shows what would be deleted"
        )
    policy = Retention(3 if keep is None else keep, every, best, metric, mode.value)
    storage = open_store(store)
    found = prune_store(storage, policy, dry_run=dry_run)
    if json:
        print_json(found)
        return
    console = output()
    for folder in found.deleted:
        console.print(
            f"{'would delete' if found.dry_run else 'deleted'} {folder}",
            markup=False,
            soft_wrap=True,
        )
    verb = "would be" if found.dry_run else "were"
    console.print(
        f"{storage.location}: {count_text(len(found.deleted), 'version')} {verb} deleted, "
        f"{size_text(found.freed_bytes)} {verb} freed; {count_text(len(found.kept), 'version')} "
        f"{'would stay' if found.dry_run else 'stay'}",
        markup=False,
        soft_wrap=True,
    )


ckpt.command("export")(export)


ckpt.command("import")(import_)


_STYLES = {"ok": "green", "complete": "green", "incomplete": "yellow", "damaged": "red"}


_VALUE_CHARACTERS = 60


def print_description(found: Description, *, tensors: bool, values: bool) -> None:
    """One version: facts, its tensors by kind or one by one, its values."""
    console = output()
    print_facts(console, found.folder, list(_facts(found)))
    console.print()
    if tensors:
        columns = [
            Column("tensor", number=False, least=40),
            Column("type", number=False, optional=7),
            Column("shape", number=False, optional=3),
            Column("pieces", optional=8),
            *_CODING,
        ]
        rows = [
            [
                tensor.name,
                tensor.dtype,
                _shape(tensor.shape),
                f"{tensor.pieces:,}",
                *_coding(
                    tensor.raw_bytes,
                    tensor.ratio,
                    tensor.coding,
                    [tensor.bound] if tensor.bound is not None else [],
                ),
            ]
            for tensor in found.tensors
        ]
        print_table(console, columns, rows, count_text(len(found.tensors), "tensor"))
    else:
        columns = [
            Column("group", number=False, least=33),
            Column("tensors", optional=8),
            Column("type", number=False, optional=7, least=8),
            *_CODING,
        ]
        rows = [
            [
                group.name,
                f"{group.tensors:,}",
                " ".join(group.dtypes),
                *_coding(group.raw_bytes, group.ratio, group.coding, group.bounds),
            ]
            for group in found.groups
        ]
        print_table(console, columns, rows, f"{count_text(len(found.tensors), 'tensor')} by group")
    if values:
        console.print()
        console.print("[bold]values[/bold]")
        # Rich takes seconds for many.
        print(json.dumps(found.values, indent=2), flush=True)
    elif found.values:
        console.print(f"{count_text(len(found.values), 'value')}: --values shows them")


def _facts(found: Description) -> Any:
    yield (
        "step",
        f"{found.step}, saved in session {found.session} by {count_text(found.ranks, 'rank')}",
    )
    yield "kind", found.kind
    if found.requires:
        yield "starts from", ", ".join(f"step {step}" for step in found.requires)
    yield "root hash", found.root or "none: it has no seal"
    for name, value in found.metrics.items():
        yield name, _figure(value)
    for name, note in found.notes.items():
        yield name, note if isinstance(note, str) else json.dumps(note)
    referred = (
        f", refers to {size_text(found.referred_bytes)} of older versions"
        if found.referred_bytes
        else ""
    )
    size = f"{size_text(found.raw_bytes)} of tensors, {size_text(found.own_bytes)} stored with it"
    yield "size", f"{size} ({ratio_text(found.ratio)} smaller){referred}"
    if found.problem:
        yield "damaged", found.problem


_CODING = (
    Column("raw"),
    Column("stored"),
    Column("ratio"),
    Column("full", optional=4),
    Column("delta", optional=3),
    Column("depth", optional=5),
    Column("max error", optional=1),
    Column("bound", optional=2),
    Column("codecs", number=False, optional=6, least=14),
)


def _coding(
    raw_bytes: int, ratio: float | None, coding: Coding, bounds: Sequence[dict[str, Any]]
) -> list[str]:
    kinds = ["relative" if bound.get("relative") is not None else "absolute" for bound in bounds]
    within = [f"{bound[kind]:.0e} {kind[:3]}" for bound, kind in zip(bounds, kinds, strict=True)]
    return [
        size_text(raw_bytes),
        size_text(coding.stored_bytes),
        ratio_text(ratio),
        f"{coding.full:,}",
        f"{coding.deltas:,}",
        str(coding.depth),
        "exact" if coding.max_error is None else f"{coding.max_error:.1e}",
        ", ".join(within) or "none",
        " ".join(coding.codecs),
    ]


def _shape(shape: Sequence[int] | None) -> str:
    return "x".join(map(str, shape)) if shape else "scalar"


def print_verdict(verdict: Verification) -> None:
    """One line for a version that is right, several sentences for one that is not."""
    from rich.markup import escape

    console = output()
    words = "OK" if verdict.state == "ok" else verdict.state.upper()
    checked = f"{count_text(verdict.chunks, 'chunk')}, {size_text(verdict.content_bytes)} decoded"
    if verdict.known_chunks:
        checked += f", {verdict.known_chunks:,} more checked with older versions"
    root = f", root {verdict.root[:16]}" if verdict.root else ", no seal"
    console.print(
        f"step {verdict.step}, session {verdict.session}: "
        f"[{_STYLES[verdict.state]}]{words}[/]"
        + (f" ({checked}{root})" if verdict.state == "ok" else ""),
        soft_wrap=True,
    )
    for problem in verdict.problems:
        console.print(f"  {escape(problem)}", soft_wrap=True)
    if verdict.state == "damaged" and verdict.restorable:
        console.print(f"  it can be restored: all its content is right ({checked})")


def _change(tensor: TensorChange) -> list[str]:
    dtype, shape = tensor.dtype, _shape(tensor.shape)
    if tensor.was_dtype is not None:
        dtype = f"{tensor.was_dtype} -> {dtype}"
    if tensor.was_shape is not None:
        shape = f"{_shape(tensor.was_shape)} -> {shape}"
    share = "-"
    if tensor.change == "changed":
        share = f"{tensor.fraction:.1%}"
        # Neither a little nor almost all is rounded to none or all.
        if 0 < tensor.fraction < 0.0005:
            share = "<0.1%"
        elif 0.9995 <= tensor.fraction < 1:
            share = ">99.9%"
    return [
        tensor.name,
        tensor.change,
        dtype,
        shape,
        share,
        "-" if tensor.relative_change is None else f"{tensor.relative_change:.2e}",
        "-" if tensor.max_difference is None else _figure(tensor.max_difference),
    ]


def _print_values(console: Console, values: Sequence[ValueChange]) -> None:
    """Entries that changed; settings that many parameters share are one row."""
    if not values:
        return
    counts: dict[tuple[str, str, str], int] = {}
    for value in values:
        before = "-" if value.change == "added" else _short(value.before)
        after = "-" if value.change == "removed" else _short(value.after)
        key = value.group, before, after
        counts[key] = counts.get(key, 0) + 1
    columns = [
        Column("value", number=False, least=24),
        Column("before", number=False, least=16),
        Column("after", number=False, least=16),
        Column("entries", optional=1),
    ]
    rows = [[*key, f"{count:,}"] for key, count in counts.items()]
    console.print()
    print_table(console, columns, rows, "values that changed")
    console.print()


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _VALUE_CHARACTERS else f"{text[: _VALUE_CHARACTERS - 4]} ..."


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _figure(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
