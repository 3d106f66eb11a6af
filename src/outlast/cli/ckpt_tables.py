"""What ``outlast ckpt`` prints for people; for `du` and `prune`, see `ckpt_space`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from outlast.cli.figures import (
    Column,
    count_text,
    output,
    print_facts,
    print_table,
    ratio_text,
    size_text,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from outlast.checkpoint.inspection.difference import Difference, TensorChange, ValueChange
    from outlast.checkpoint.inspection.extract import Extracted
    from outlast.checkpoint.inspection.listing import (
        Coding,
        Description,
        LogsSummary,
        VersionSummary,
    )
    from outlast.checkpoint.inspection.usage import Verification

_STYLES = {"ok": "green", "complete": "green", "incomplete": "yellow", "damaged": "red"}
_VALUE_CHARACTERS = 60


def print_versions(
    location: str, versions: Sequence[VersionSummary], logs: LogsSummary | None
) -> None:
    """The list of versions, what is wrong with some of them, and how far replay logs lead on."""
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
            _metrics(version.metrics),
        ]
        for version in versions
    ]
    print_table(console, columns, rows, f"{location}: {count_text(len(versions), 'version')}")
    for version in versions:
        if version.problem:
            style = _STYLES[version.state] if version.state != "complete" else "red"
            name = f"step {version.step}, session {version.session}"
            console.print(f"[{style}]{name}:[/] {escape(version.problem)}", soft_wrap=True)
    if logs is not None:
        console.print(_logs(logs), markup=False, soft_wrap=True)


def _logs(logs: LogsSummary) -> str:
    """One line."""
    held = f"{count_text(logs.logs, 'replay log')} of {size_text(logs.stored_bytes)}"
    if logs.base is None:
        return f"{held}, and no complete version that they could lead on from"
    use = f"none leads on from step {logs.base}"
    if logs.step is not None:
        verb = "leads" if logs.leading_on == 1 else "lead"
        use = f"{logs.leading_on:,} {verb} on from step {logs.base} to step {logs.step}"
    return "; ".join(filter(None, [f"{held}: {use}", logs.problem]))


def print_description(found: Description, *, tensors: bool, values: bool) -> None:
    """One version: facts, its tensors by kind or one by one, its values."""
    console = output()
    print_facts(console, found.folder, list(_facts(found)))
    console.print()
    if tensors:
        _print_tensors(console, found)
    else:
        _print_groups(console, found)
    if values:
        console.print()
        console.print("[bold]values[/bold]")
        console.print_json(json.dumps(found.values), indent=2)
    elif found.values:
        console.print(f"{count_text(len(found.values), 'value')}: --values shows them")


def _facts(found: Description) -> Any:
    yield "step", f"{found.step}, saved in session {found.session} by {_ranks(found.ranks)}"
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


def _ranks(count: int) -> str:
    return count_text(count, "rank")


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
    return [
        size_text(raw_bytes),
        size_text(coding.stored_bytes),
        ratio_text(ratio),
        f"{coding.full:,}",
        f"{coding.deltas:,}",
        str(coding.depth),
        "exact" if coding.max_error is None else f"{coding.max_error:.1e}",
        ", ".join(_bound(bound) for bound in bounds) or "none",
        " ".join(coding.codecs),
    ]


def _bound(bound: dict[str, Any]) -> str:
    kind = "relative" if bound.get("relative") is not None else "absolute"
    return f"{bound[kind]:.0e} {kind[:3]}"


def _print_groups(console: Console, found: Description) -> None:
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


def _print_tensors(console: Console, found: Description) -> None:
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


def _shape(shape: Sequence[int] | None) -> str:
    return "x".join(map(str, shape)) if shape else "scalar"


def print_verdict(verdict: Verification) -> None:
    """One line for a version that is right, several sentences for one that is not."""
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


def print_difference(found: Difference, *, everything: bool) -> None:
    """Tensors and values that differ, the largest change first."""
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


def _change(tensor: TensorChange) -> list[str]:
    dtype, shape = tensor.dtype, _shape(tensor.shape)
    if tensor.was_dtype is not None:
        dtype = f"{tensor.was_dtype} -> {dtype}"
    if tensor.was_shape is not None:
        shape = f"{_shape(tensor.was_shape)} -> {shape}"
    changed = tensor.change == "changed"
    return [
        tensor.name,
        tensor.change,
        dtype,
        shape,
        _share(tensor.fraction) if changed else "-",
        "-" if tensor.relative_change is None else f"{tensor.relative_change:.2e}",
        "-" if tensor.max_difference is None else _figure(tensor.max_difference),
    ]


def _share(fraction: float) -> str:
    # Neither a little nor almost all is rounded to none or all.
    if 0 < fraction < 0.0005:
        return "<0.1%"
    return ">99.9%" if 0.9995 <= fraction < 1 else f"{fraction:.1%}"


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


def print_extracted(found: Extracted) -> None:
    """What was written where."""
    output().print(
        f"wrote {found.folder} to {found.directory}: {count_text(found.tensors, 'tensor')} "
        f"({size_text(found.bytes)}) in {count_text(len(found.files), 'file')}, "
        f"{count_text(found.values, 'value')} in values.json",
        markup=False,
        soft_wrap=True,
    )


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _metrics(metrics: dict[str, float]) -> str:
    return " ".join(f"{name}={_figure(value)}" for name, value in metrics.items())


def _figure(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
