"""Which local names of a body may be read again: the classical analysis of live variables.

A name is live at a point when some path from there reads it before it is bound anew. What is dead
need not be saved: the last batch, its loss and the graph of its backward pass. The analysis runs
backwards over the statements; where control flow is hard to tell (handlers, match), it keeps more.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outlast.autosave.program.source import Body

Names = frozenset[str]
_NOTHING: Names = frozenset()
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


@dataclass
class Liveness:
    """Live names at each statement of a body.

    Attributes:
        at: Statement to the names live before it; for a loop, before the next iteration.
        always: Names that are read at times that cannot be told: by functions defined here.
    """

    at: dict[ast.stmt, Names] = field(default_factory=dict)
    always: Names = _NOTHING


@dataclass(frozen=True)
class _Jumps:
    """Names live where `break`, `continue`, `return` and an exception lead."""

    on_break: Names = _NOTHING
    on_continue: Names = _NOTHING
    on_return: Names = _NOTHING
    on_error: Names = _NOTHING


def liveness(body: Body) -> Liveness:
    """Analyse one body; names of enclosing scopes are listed like its own."""
    found = Liveness()
    inner: set[str] = set()
    for node in _nodes_here(body.body):
        if isinstance(node, _SCOPES):
            inner |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    found.always = frozenset(inner)
    _block(body.body, _NOTHING, _Jumps(), found)
    return found


def _nodes_here(statements: Iterable[ast.stmt]) -> Iterable[ast.AST]:
    waiting: list[ast.AST] = list(statements)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, _SCOPES):
            waiting.extend(ast.iter_child_nodes(node))


def _block(statements: list[ast.stmt], after: Names, jumps: _Jumps, found: Liveness) -> Names:
    for statement in reversed(statements):
        after = _statement(statement, after, jumps, found) | jumps.on_error
        found.at[statement] = found.at.get(statement, _NOTHING) | after
    return after


def _statement(  # noqa: PLR0912 (one case for each kind of statement)
    node: ast.stmt, after: Names, jumps: _Jumps, found: Liveness
) -> Names:
    match node:
        case ast.For() | ast.AsyncFor() | ast.While():
            return _loop(node, after, jumps, found)
        case ast.If():
            return (
                _read(node.test)
                | _block(node.body, after, jumps, found)
                | _block(node.orelse, after, jumps, found)
            )
        case ast.With() | ast.AsyncWith():
            inside = _block(node.body, after, jumps, found)
            targets = [each.optional_vars for each in node.items if each.optional_vars]
            inside = (inside - _bound(targets)) | _read(*targets)
            return inside | _read(*(each.context_expr for each in node.items))
        case ast.Try() | ast.TryStar():
            return _try(node, after, jumps, found)
        case ast.Match():
            branches = [_block(case.body, after, jumps, found) for case in node.cases]
            return _read(node).union(after, *branches)
        case ast.Return():
            return _read(node) | jumps.on_return
        case ast.Raise():
            return _read(node)
        case ast.Break():
            return jumps.on_break
        case ast.Continue():
            return jumps.on_continue
        case ast.Assign():
            return (after - _bound(node.targets)) | _read(node.value, *node.targets)
        case ast.AnnAssign() if node.value is not None:
            return (after - _bound([node.target])) | _read(node.value, node.target)
        case ast.AugAssign():
            # The target is read, too, although its context says "store".
            own = {node.target.id} if isinstance(node.target, ast.Name) else set()
            return after | own | _read(node.target, node.value)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return (after - {node.name}) | _read(node)
        case ast.Import() | ast.ImportFrom():
            names = {(each.asname or each.name).split(".")[0] for each in node.names}
            return after - names
        case ast.Delete():
            return after | {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return after | _read(node)


def _loop(
    node: ast.For | ast.AsyncFor | ast.While, after: Names, jumps: _Jumps, found: Liveness
) -> Names:
    ended = _block(node.orelse, after, jumps, found)
    head = ended
    while True:
        inside = _Jumps(after, head, jumps.on_return, jumps.on_error)
        body = _block(node.body, head, inside, found)
        if isinstance(node, ast.While):
            again = ended | body | _read(node.test)
        else:
            again = ended | (body - _bound([node.target])) | _read(node.target)
        if again <= head:
            break
        head |= again
    found.at[node] = found.at.get(node, _NOTHING) | head
    return head if isinstance(node, ast.While) else head | _read(node.iter)


def _try(node: ast.Try | ast.TryStar, after: Names, jumps: _Jumps, found: Liveness) -> Names:
    last = _block(node.finalbody, after, jumps, found) if node.finalbody else after
    final = last if node.finalbody else _NOTHING
    through = _Jumps(
        jumps.on_break | final,
        jumps.on_continue | final,
        jumps.on_return | final,
        jumps.on_error | final,
    )
    handlers = _NOTHING.union(
        *(_read(each.type) | _block(each.body, last, through, found) for each in node.handlers)
    )
    inside = _Jumps(
        through.on_break, through.on_continue, through.on_return, through.on_error | handlers
    )
    otherwise = _block(node.orelse, last, through, found)
    return _block(node.body, otherwise, inside, found) | handlers


def _read(*nodes: ast.AST | None) -> Names:
    """Names read in expressions; all that a nested scope mentions counts."""
    return frozenset(
        each.id
        for node in nodes
        if node is not None
        for each in ast.walk(node)
        if isinstance(each, ast.Name)
        and (isinstance(each.ctx, ast.Load) or isinstance(node, _SCOPES))
    )


def _bound(targets: Iterable[ast.expr]) -> Names:
    """Names that an assignment binds."""
    return frozenset(
        each.id
        for target in targets
        for each in ast.walk(target)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    )
