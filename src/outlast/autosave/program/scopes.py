"""Which nodes and names belong to a body, as Python's scopes have it."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outlast.autosave.program.source import Body

DEFINITIONS = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Import,
    ast.ImportFrom,
)


def nodes_here(node: ast.AST) -> list[ast.AST]:
    """Nodes that are executed in the same frame."""
    found, waiting = [], list(ast.iter_child_nodes(node))
    while waiting:
        each = waiting.pop()
        found.append(each)
        if not isinstance(each, (*DEFINITIONS, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(each))
    return found


def names_of(node: ast.stmt) -> list[str]:
    """Names that a definition or import binds."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(each.asname or each.name).split(".")[0] for each in node.names]
    return [node.name] if hasattr(node, "name") else []


def local_names(body: Body) -> frozenset[str]:
    """Names bound in a body."""
    bound, outer = set(), set()
    if not isinstance(body, ast.Module):
        bound |= {each.arg for each in _arguments(body.args)}
    nodes = nodes_here(body)
    # Variables of a comprehension are those of a frame of its own.
    others = {
        name
        for each in nodes
        if isinstance(each, ast.comprehension)
        for name in ast.walk(each.target)
    }
    for node in nodes:
        match node:
            case ast.Name(ctx=ast.Store()) if node not in others:
                bound.add(node.id)

            case ast.Global() | ast.Nonlocal():
                outer |= set(node.names)
            case ast.ExceptHandler(name=str(name)):
                # Python deletes it at the end of the handler.
                bound.discard(name)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                bound.add(name)
    return frozenset(bound - outer)


def _arguments(arguments: ast.arguments) -> list[ast.arg]:
    others = [each for each in (arguments.vararg, arguments.kwarg) if each]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *others]


def code_names(tree: ast.Module, body: Body) -> tuple[str, int]:
    """Qualified name and first line, as the code object of `body` will have them."""
    if isinstance(body, ast.Module):
        return "<module>", 1

    def search(node: ast.AST, prefix: str) -> str | None:
        for child in ast.iter_child_nodes(node):
            if child is body:
                return prefix + body.name
            inner = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = f"{prefix}{child.name}.<locals>."
            elif isinstance(child, ast.ClassDef):
                inner = f"{prefix}{child.name}."
            if (found := search(child, inner)) is not None:
                return found
        return None

    first = body.decorator_list[0].lineno if body.decorator_list else body.lineno
    name = search(tree, "")
    assert name is not None
    return name, first


def is_text(statement: ast.stmt) -> bool:
    """Whether a statement is a text or another constant, as a docstring is."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
