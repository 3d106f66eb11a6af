"""What ``outlast ckpt du`` and ``outlast ckpt prune`` print for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.cli.figures import Column, count_text, output, print_table, ratio_text, size_text

if TYPE_CHECKING:
    from outlast.checkpoint.inspection.usage import Pruned, Usage


def print_usage(location: str, found: Usage) -> None:
    """What takes the space, by version and in all."""
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
    print_table(console, columns, rows, location)
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
            f"{size_text(found.total_bytes - found.log_bytes)}: {ratio_text(found.ratio)} smaller",
        )


def print_pruned(location: str, found: Pruned) -> None:
    """What was deleted, or would be, and what stays."""
    console = output()
    for folder in found.deleted:
        console.print(f"{'would delete' if found.dry_run else 'deleted'} {folder}")
    verb = "would be" if found.dry_run else "were"
    console.print(
        f"{location}: {count_text(len(found.deleted), 'version')} {verb} deleted, "
        f"{size_text(found.freed_bytes)} {verb} freed; {count_text(len(found.kept), 'version')} "
        f"{'would stay' if found.dry_run else 'stay'}",
        markup=False,
        soft_wrap=True,
    )
