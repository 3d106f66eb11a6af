"""Where a body gives a name or an attribute its value, to be named in a sentence."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from outlast.autosave.program.scopes import nodes_outside_scopes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outlast.autosave.program.source import Body


def binding_line(body: Body, name: str, before: int) -> int | None:
    """The line that gives a local name the value it has at another line.

    Args:
        body: Where the name is local, or a module whose global it is.
        name: The name.
        before: The line where the value is seen: the last binding above it counts, else, as in a
            loop, the last of all.

    Returns:
        Its number in the file; None where `body` does not bind the name.
    """
    lines = list(bindings_of(body, name))
    above = [line for line in lines if line <= before]
    return max(above or lines, default=None)


def attribute_line(tree: ast.Module, name: str) -> int | None:
    """The first line of a file that sets an attribute of this name on any object."""
    lines = (
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store)
    )
    return min(lines, default=None)


def bindings_of(body: Body, name: str) -> Iterator[int]:
    """The lines in which a body binds a name, once for each binding."""
    if not isinstance(body, ast.Module):
        arguments = body.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        others = [item for item in (arguments.vararg, arguments.kwarg) if item]
        yield from (other.lineno for other in (*named, *others) if other.arg == name)
    for node in nodes_outside_scopes(body.body):
        match node:
            case ast.Name(id=found, ctx=ast.Store()) if found == name:
                yield node.lineno
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if node.name == name:
                yield node.lineno
            case ast.Import() | ast.ImportFrom():
                bound = ((name.asname or name.name).split(".")[0] for name in node.names)
                yield from (node.lineno for item in bound if item == name)
            case ast.MatchAs(name=found) | ast.MatchStar(name=found) if found == name:
                yield node.lineno
