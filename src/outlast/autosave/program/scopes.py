"""Which nodes and names belong to a body, as Python's scopes have it."""

from __future__ import annotations

import ast
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from outlast.autosave.program.source import Body

DEFINITIONS = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Import,
    ast.ImportFrom,
)

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
"""What has names of its own."""


def nodes_outside_scopes(statements: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of `statements`; of a scope within, only the node that it begins with."""
    waiting = list(statements)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, SCOPES):
            waiting.extend(ast.iter_child_nodes(node))


def nodes_here(node: ast.AST) -> list[ast.AST]:
    """Nodes below `node` that are executed in the same frame."""
    found, waiting = [], list(ast.iter_child_nodes(node))
    while waiting:
        each = waiting.pop()
        found.append(each)
        if not isinstance(each, (*DEFINITIONS, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(each))
    return found


def walk_here(node: ast.AST) -> Iterator[ast.AST]:
    """As `ast.walk`, without what is executed as a frame of its own; class bodies included."""
    waiting = [node]
    while waiting:
        each = waiting.pop(0)
        yield each
        waiting.extend(
            child
            for child in ast.iter_child_nodes(each)
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        )


def local_names(body: Body) -> frozenset[str]:
    """Names bound in a body."""
    return frozenset(_bindings(body))


def defined_names(body: Body) -> dict[str, ast.stmt]:
    """Names that a definition or import binds, and nothing else in the body does."""
    bindings = _bindings(body)
    return {
        name: node for node in _in_order(body) for name in names_of(node) if bindings[name] == 1
    }


def names_of(node: ast.stmt) -> list[str]:
    """Names that a definition or import binds."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(name.asname or name.name).split(".")[0] for name in node.names]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    return []


def _in_order(body: Body) -> list[ast.stmt]:
    found = [node for node in nodes_here(body) if isinstance(node, DEFINITIONS)]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


def _bindings(body: Body) -> Counter[str]:
    """Names bound in a body, and at how many places."""
    bound: Counter[str] = Counter()
    outer: set[str] = set()
    if not isinstance(body, ast.Module):
        bound.update(argument.arg for argument in _arguments(body.args))
    nodes = nodes_here(body)
    # Variables of a comprehension are those of a frame of its own.
    others = {
        name
        for node in nodes
        if isinstance(node, ast.comprehension)
        for name in ast.walk(node.target)
    }
    for node in nodes:
        match node:
            case ast.Name(ctx=ast.Store() | ast.Del()) if node not in others:
                bound[node.id] += 1
            case ast.Global() | ast.Nonlocal():
                outer |= set(node.names)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                bound[name] += 1
            case ast.MatchMapping(rest=str(name)):
                bound[name] += 1
            case ast.stmt():
                bound.update(names_of(node))
    # Python deletes the name of a handled error at the end of its handler.
    handled = {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    for name in outer | {name for name in handled if not bound[name]}:
        bound.pop(name, None)
    bound.pop("*", None)
    return bound


def _arguments(arguments: ast.arguments) -> list[ast.arg]:
    others = [item for item in (arguments.vararg, arguments.kwarg) if item]
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
