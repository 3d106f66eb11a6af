"""Where a body gives a name or an attribute its value, to be named in a sentence."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outlast.autosave.program.source import Body

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


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
    lines = list(_bindings(body, name))
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


def _bindings(body: Body, name: str) -> Iterator[int]:
    if not isinstance(body, ast.Module):
        arguments = body.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        others = [each for each in (arguments.vararg, arguments.kwarg) if each]
        yield from (each.lineno for each in (*named, *others) if each.arg == name)
    waiting: list[ast.AST] = list(body.body)
    while waiting:
        node = waiting.pop()
        match node:
            case ast.Name(id=found, ctx=ast.Store()) if found == name:
                yield node.lineno
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if node.name == name:
                yield node.lineno
            case ast.Import() | ast.ImportFrom():
                bound = ((each.asname or each.name).split(".")[0] for each in node.names)
                yield from (node.lineno for each in bound if each == name)
            case ast.MatchAs(name=found) | ast.MatchStar(name=found) if found == name:
                yield node.lineno
        if not isinstance(node, _SCOPES):
            waiting.extend(ast.iter_child_nodes(node))
