"""The statements on the way to a step, and the files in which they are marked."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from outlast.autosave.program.source import SourceFile

RUNTIME = "__outlast__"
"""What rewritten bodies call; a global name of each module of the program."""

GENERATORS = f"{RUNTIME}.generators"
"""What rewritten generator functions call."""

Kind = Literal["step", "loop", "call", "branch", "yield"]


@dataclass(frozen=True)
class Site:
    """A statement on the way to a step, or to a `yield` in a generator function.

    Attributes:
        number: Its number in the program.
        body: Name of the body that it is in, as `body_name` gives it.
        line: First line in the file.
        column: Where it begins there, in bytes of UTF-8 from 0.
        last_line: Last line.
        last_column: Where it ends there.
        kind: A `step` loop, a `loop` around one, a `call`, a `branch` (if, with, try) or a `yield`.
        around: Numbers of the sites of the same body that it is in, outermost first.
        names: Local names that are live there, those of the iterators around included.
        dead: Other local names of the body; they are not needed.
        defined: Names that are bound in one place, by a definition or an import.
    """

    number: int
    body: str
    line: int
    column: int
    last_line: int
    last_column: int
    kind: Kind
    around: tuple[int, ...]
    names: frozenset[str]
    dead: frozenset[str]
    defined: frozenset[str]

    def covers(self, line: int | None, column: int | None) -> bool:
        """Whether a place in the file is within the statement; a column of None is any."""
        if line is None or not self.line <= line <= self.last_line:
            return False
        if column is None:
            return True
        return (self.line, self.column) <= (line, column) <= (self.last_line, self.last_column)


@dataclass
class Rewritten:
    """A file in its new form.

    Attributes:
        source: What it was made from.
        tree: The new syntax tree, with the lines of the old one.
        sites: Its sites.
        bodies: Names of the bodies that were rewritten on the way to training.
        generators: Names of the generator functions that were rewritten.
        plain: Names of those that could not be, with the reason.
        reads_gradients: Whether the program reads gradients where no step is done.
    """

    source: SourceFile
    tree: ast.Module
    sites: list[Site] = field(default_factory=list)
    bodies: set[str] = field(default_factory=set)
    generators: set[str] = field(default_factory=set)
    plain: dict[str, str] = field(default_factory=dict)
    reads_gradients: bool = True


def iterator_name(number: int) -> str:
    """Name of the local variable that holds the iterator of loop `number`."""
    return f"__outlast_{number}__"


def item_name(number: int) -> str:
    """Name of the local variable that holds what the iterator of loop `number` gave."""
    return f"__outlast_item_{number}__"


def kept_name(number: int, place: int) -> str:
    """Name of the local variable that holds a value which call `number` is given."""
    return f"__outlast_kept_{number}_{place}__"


def context_name(number: int, place: int) -> str:
    """Name of the local variable that holds the context of item `place` of `with` `number`."""
    return f"__outlast_with_{number}_{place}__"


def body_name(file: str, qualified_name: str, line: int) -> str:
    """Name of a body: unique in a program, and the same for its text and its code object."""
    return f"{file}:{line}:{qualified_name}"
