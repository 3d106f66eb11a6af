"""Reference pages from the code: ``python docs/reference_pages.py`` writes them.

`docs/reference/commands.md` lists the commands with their options, `settings.md` the settings of a
job, and `api.md` names the packages whose docstrings Sphinx puts there.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

import typer

from outlast.cli.app import app
from outlast.job import Job, LoopJob, adjustable, identity, job_from_text
from outlast.job.section import toml_value

REFERENCE = Path(__file__).parent / "reference"

PACKAGES = [
    "checkpoint",
    "autosave",
    "guard",
    "coding",
    "tensorize",
    "energy",
    "plan",
    "cluster",
    "data",
    "job",
    "records",
    "hardware",
    "report",
]
"""The packages that have an API of their own, in the order of the page."""

_MADE = "<!-- Made by docs/reference_pages.py from the code; change that. -->\n\n"


def commands_page() -> str:
    """Every command, with its arguments and options."""
    lines = [
        "# Commands",
        "",
        "All commands of `outlast`, with their options. `outlast COMMAND --help` prints the same.",
        "",
        "Exit codes: 0 success; 1 failure, or the answer is no; 2 wrong input (one sentence on",
        "standard error says what would be right); 3 stopped and saved, the same command continues",
        "it; 4 wrong values that stay wrong; 6 a process hung; 130 interrupted.",
        "",
        "With `--json` a command prints one JSON document to standard output, and nothing else:",
        "words, notes and progress go to standard error. Figures are in the unit that their name",
        "says (`seconds`, `bytes`, `joules`), what is not known says why (`unavailable`), and `-o`",
        "(`--output`) is where a command writes to.",
        "",
        "```bash",
        "outlast --version",
        "```",
        "",
    ]
    _add_command(lines, "outlast", typer.main.get_command(app))
    return _MADE + "\n".join(lines).rstrip() + "\n"


def _add_command(lines: list[str], path: str, command: Any) -> None:
    inner = getattr(command, "commands", None)
    if path != "outlast":
        lines += [f"{'##' if path.count(' ') == 1 else '###'} `{path}`", ""]
    if command.help and path != "outlast":
        paragraphs = inspect.cleandoc(command.help).split("\f")[0].split("\n\n")
        for paragraph in paragraphs:
            text = " ".join(paragraph.split())
            lines += [re.sub("^--json: ", "`--json`: ", text), ""]
    rows = [_option_row(option) for option in command.params if not _hidden(option)]
    if rows and path != "outlast":
        lines += ["| argument or option | meaning |", "|---|---|", *rows, ""]
    for name, each in (inner or {}).items():
        if not each.hidden:
            _add_command(lines, f"{path} {name}", each)


def _hidden(option: Any) -> bool:
    return getattr(option, "hidden", False) or "--help" in option.opts


def _option_row(option: Any) -> str:
    if option.param_type_name == "argument":
        name = f"`{(option.metavar or option.name).strip('[]{}')}`"
    else:
        name = ", ".join(f"`{each}`" for each in [*option.opts, *option.secondary_opts])
        if not option.is_flag:
            words = option.metavar or _annotation_words(option.type_descriptor.annotation)
            name += f" {_cell(words)}"
    text = " ".join((option.help or "").split())
    if option.required:
        text += " Required."
    elif not getattr(option, "is_flag", False) and option.default not in (None, "", (), []):
        text += f" Default: `{option.default}`."
    return f"| {name} | {_cell(text)} |"


def settings_page() -> str:
    """Every setting of a job."""
    lines = [
        "# Settings",
        "",
        "Every setting of [a job](../job.md), by section. `outlast init` writes the same as a",
        "commented file, and every one can be given on the command line as `section.key=value`:",
        "",
        "```bash",
        "outlast init settings.toml",
        "```",
        "",
        "*May it change* says what happens when a run is started again with another value. *Yes*:",
        "it continues. *Recorded*: it continues, and the change is recorded, since it decides what",
        "comes out ([more](../job.md#settings-that-may-change-during-a-run)). *No*: it is refused,",
        "since it would be another run.",
        "",
    ]
    job = job_from_text('[model]\nconfig = "config.json"\n')
    fixed, recorded = identity(job), adjustable(Job)
    in_loops = {
        f"{section}.{key}"
        for section, field in LoopJob.model_fields.items()
        for key in type(field.default).model_fields
    }
    for name, section in Job.model_fields.items():
        kind = type(section.default) if section.default is not None else section.annotation
        said = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0]
        lines += [f"## `[{name}]`", "", " ".join(said.split()), ""]
        if any(key.startswith(f"{name}.") for key in in_loops):
            lines += ["Also of [`outlast.Run`](../integrations/pytorch.md).", ""]
        lines += ["| setting | type | default | may it change | meaning |", "|---|---|---|---|---|"]
        for key, field in kind.model_fields.items():
            full = f"{name}.{key}"
            change = "recorded" if full in recorded else "no" if full in fixed else "yes"
            default = getattr(section.default, key) if section.default is not None else None
            shown = "" if default is None else f"`{_cell(toml_value(default))}`"
            lines.append(
                f"| `{full}` | {_cell(_type_words(field))} | {shown} | {change} | "
                f"{_cell(' '.join((field.description or '').split()))} |"
            )
        lines.append("")
    return _MADE + "\n".join(lines).rstrip() + "\n"


_WORDS = {
    Path: "path",
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    dict: "table",
}


def _type_words(field: Any) -> str:
    """The type of a setting in words, with its limits."""
    limits = []
    for limit in field.metadata:
        for name, sign in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below")):
            if (bound := getattr(limit, name, None)) is not None:
                limits.append(f"{sign} {bound:g}")
    return ", ".join([_annotation_words(field.annotation), *limits])


def _annotation_words(annotation: Any) -> str:
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _annotation_words(inside[0])
    if origin is typing.Literal:
        return " or ".join(f"`{toml_value(value)}`" for value in inside)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_annotation_words(each) for each in inside if each is not type(None))
    if origin in (list, tuple):
        return f"list of {_annotation_words(inside[0])}"
    return _WORDS.get(origin or annotation, getattr(annotation, "__name__", str(annotation)))


def _cell(text: str) -> str:
    """A text as it may stand in a table, not taken for Markdown."""
    return text.replace("|", "\\|").replace("<", "\\<").replace("*", "\\*")


def api_page() -> str:
    """The packages, for Sphinx to fill in."""
    lines = [
        "# Python API",
        "",
        "What can be imported, from the docstrings. Names that most people need can be had from",
        "`outlast` itself:",
        "",
        "```python",
        "import outlast",
        "",
        "print(*dir(outlast))",
        "```",
        "",
        "Importing `outlast` loads neither torch nor transformers. Names and packages are loaded",
        "when they are used.",
        "",
        "## `outlast.Run`",
        "",
        *_directive("autoclass", "outlast.Run", ":members:"),
    ]
    sections = ", ".join(
        sorted({type(each.default).__name__ for each in Job.model_fields.values()})
    )
    # The sections of a job are on a page of their own.
    left_out = {"job": sections, "energy": "Unavailable"}
    for name in PACKAGES:
        options = [":members:"]
        if name in left_out:
            options.append(f":exclude-members: {left_out[name]}")
        lines += [f"## `outlast.{name}`", ""]
        lines += _directive("automodule", f"outlast.{name}", *options)
    return _MADE + "\n".join(lines).rstrip() + "\n"


def _directive(kind: str, name: str, *options: str) -> list[str]:
    inside = [f".. {kind}:: {name}", *(f"   {option}" for option in options)]
    return ["```{eval-rst}", *inside, "```", ""]


PAGES = {"commands": commands_page, "settings": settings_page, "api": api_page}


def main() -> None:
    """Write all pages."""
    REFERENCE.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (REFERENCE / f"{name}.md").write_text(page())


if __name__ == "__main__":
    sys.exit(main())
