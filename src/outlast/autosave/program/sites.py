"""The statements on the way to a step, and the files in which they are marked."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from outlast.autosave.program.source import SourceFile

RUNTIME = "__outlast__"
Kind = Literal["step", "loop", "call", "branch"]


@dataclass(frozen=True)
class Site:
    """A statement on the way to a step.

    Attributes:
        number: Its number in the program.
        body: Name of the body that it is in, as `body_name` gives it.
        line: First line in the file.
        last_line: Last line.
        kind: A `step` loop, a `loop` around one, a `call` or a `branch` (if, with, try).
        around: Numbers of the sites of the same body that it is in, outermost first.
        names: Local names that are live there, those of the iterators around included.
    """

    number: int
    body: str
    line: int
    last_line: int
    kind: Kind
    around: tuple[int, ...]
    names: frozenset[str]


@dataclass
class Rewritten:
    """A file in its new form.

    Attributes:
        source: What it was made from.
        tree: The new syntax tree, with the lines of the old one.
        sites: Its sites.
        bodies: Names of the bodies that were rewritten.
    """

    source: SourceFile
    tree: ast.Module
    sites: list[Site] = field(default_factory=list)
    bodies: set[str] = field(default_factory=set)


def iterator_name(number: int) -> str:
    """Name of the local variable that holds the iterator of loop `number`."""
    return f"__outlast_{number}__"


def body_name(file: str, qualified_name: str, line: int) -> str:
    """Name of a body: unique in a program, and the same for its text and its code object."""
    return f"{file}:{line}:{qualified_name}"
