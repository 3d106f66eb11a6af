"""Every setting of a job as help text, section by section."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from outlast.job import Job, Section


def print_settings() -> None:
    """Print all sections with their keys, defaults and descriptions."""
    console = Console()
    console.print("Settings, in the job file or as [bold]section.key=value[/bold]:\n")
    for name, field in Job.model_fields.items():
        section = field.default
        assert isinstance(section, Section)
        console.print(_section_table(name, section))


def _section_table(name: str, section: Section) -> Table:
    headline = (type(section).__doc__ or "").strip().splitlines()[0]
    table = Table(
        title=f"\\[{name}] {escape(headline)}",
        title_justify="left",
        title_style="bold",
        show_header=False,
        box=None,
        padding=(0, 2, 0, 2),
    )
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(style="green", max_width=16, overflow="fold")
    table.add_column()
    for key, field in type(section).model_fields.items():
        table.add_row(key, escape(_shown(field.default)), escape(field.description or ""))
    table.add_row("", "", "")
    return table


def _shown(default: Any) -> str:
    if default is None or default in ({}, []):
        return "-"
    return str(default).lower() if isinstance(default, bool) else str(default)
