"""Which local names of a body may be read again: the classical analysis of live variables.

A name is live at a point when some path from there reads it before it is bound anew. What is dead
need not be saved: the last batch, its loss and the graph of its backward pass. The analysis runs
backwards over the statements; where control flow is hard to tell (handlers, match), it keeps more.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from outlast.autosave.program.scopes import SCOPES, nodes_outside_scopes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outlast.autosave.program.source import Body

Names = frozenset[str]
_NOTHING: Names = frozenset()


@dataclass
class Liveness:
    """Live names at each statement of a body.

    Attributes:
        at: Statement to the names live before it.
        head: Loop to the names live before its next iteration.
        after: Statement to the names live behind it.
        always: Names that are read at times that cannot be told: by functions defined here.
    """

    at: dict[ast.stmt, Names] = field(default_factory=dict)
    head: dict[ast.stmt, Names] = field(default_factory=dict)
    after: dict[ast.stmt, Names] = field(default_factory=dict)
    always: Names = _NOTHING


class _Jumps(NamedTuple):
    """Names live where `break`, `continue`, `return` and an exception lead."""

    on_break: Names = _NOTHING
    on_continue: Names = _NOTHING
    on_return: Names = _NOTHING
    on_error: Names = _NOTHING


def liveness(body: Body) -> Liveness:
    """Analyse one body; names of enclosing scopes are listed like its own."""
    found = Liveness()
    inner: set[str] = set()
    for node in nodes_outside_scopes(body.body):
        if isinstance(node, SCOPES):
            inner |= {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
    if any(_reads_all(node, body) for node in ast.walk(body)):
        inner |= {node.id for node in ast.walk(body) if isinstance(node, ast.Name)}
    found.always = frozenset(inner)
    _block(body.body, _NOTHING, _Jumps(), found)
    return found


def _reads_all(node: ast.AST, body: Body) -> bool:
    """Whether names are read that the text does not show."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    anywhere = node.func.id in ("eval", "exec") or (
        isinstance(body, ast.Module) and node.func.id == "globals"
    )
    return anywhere or (node.func.id in ("locals", "vars", "dir") and not node.args)


def _block(statements: list[ast.stmt], after: Names, jumps: _Jumps, found: Liveness) -> Names:
    for statement in reversed(statements):
        found.after[statement] = found.after.get(statement, _NOTHING) | after
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
            inside = _block(node.body, after, jumps, found)
            inside |= _block(node.orelse, after, jumps, found)
            return read_names(node.test) | (inside - _surely_bound(node.test))
        case ast.With() | ast.AsyncWith():
            targets = [item.optional_vars for item in node.items if item.optional_vars]
            # What was entered is used at the end, where it is left.
            held = bound_names(targets)
            leaving = _Jumps(*(jump | held for jump in jumps))
            # It may hide an error, and the program goes on behind it.
            leaving = leaving._replace(on_error=leaving.on_error | after)
            inside = _block(node.body, after | held, leaving, found)
            inside = (inside - bound_names(targets)) | read_names(*targets)
            return inside | read_names(*(item.context_expr for item in node.items))
        case ast.Try() | ast.TryStar():
            return _try(node, after, jumps, found)
        case ast.Match():
            branches = [_block(case.body, after, jumps, found) for case in node.cases]
            return read_names(node).union(after, *branches)
        case ast.Return():
            return read_names(node) | jumps.on_return
        case ast.Raise():
            return read_names(node)
        case ast.Break():
            return jumps.on_break
        case ast.Continue():
            return jumps.on_continue
        case ast.Assign():
            return (after - bound_names(node.targets)) | read_names(node.value, *node.targets)
        case ast.AnnAssign() if node.value is not None:
            return (after - bound_names([node.target])) | read_names(node.value, node.target)
        case ast.AugAssign():
            # The target is read, too, although its context says "store".
            own = {node.target.id} if isinstance(node.target, ast.Name) else set()
            return after | own | read_names(node.target, node.value)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return (after - {node.name}) | read_names(node)
        case ast.Import() | ast.ImportFrom():
            names = {(name.asname or name.name).split(".")[0] for name in node.names}
            return after - names
        case ast.Delete():
            return after | {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
    return after | read_names(node)


def _loop(
    node: ast.For | ast.AsyncFor | ast.While, after: Names, jumps: _Jumps, found: Liveness
) -> Names:
    ended = _block(node.orelse, after, jumps, found)
    head = ended
    while True:
        inside = _Jumps(after, head, jumps.on_return, jumps.on_error)
        body = _block(node.body, head, inside, found)
        if isinstance(node, ast.While):
            again = read_names(node.test) | ((ended | body) - _surely_bound(node.test))
        else:
            again = ended | (body - bound_names([node.target])) | read_names(node.target)
        if again <= head:
            break
        head |= again
    found.head[node] = found.head.get(node, _NOTHING) | head
    return head if isinstance(node, ast.While) else head | read_names(node.iter)


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
        *(
            read_names(handler.type) | _block(handler.body, last, through, found)
            for handler in node.handlers
        )
    )
    inside = _Jumps(
        through.on_break, through.on_continue, through.on_return, through.on_error | handlers
    )
    otherwise = _block(node.orelse, last, through, found)
    return _block(node.body, otherwise, inside, found) | handlers


def read_names(*nodes: ast.AST | None) -> Names:
    """Names read in expressions; all that a nested scope mentions counts."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, SCOPES):
            found |= {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
        elif node is not None:
            _reads(node, _NOTHING, found)
    return frozenset(found)


def _reads(node: ast.AST, hidden: Names, found: set[str]) -> None:
    """Add the names that `node` reads; a comprehension's own variables are `hidden` in it."""
    if isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Load) and node.id not in hidden:
            found.add(node.id)
        return
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        _reads(node.generators[0].iter, hidden, found)
        hidden |= bound_names(generator.target for generator in node.generators)
    for item in ast.iter_child_nodes(node):
        _reads(item, hidden, found)


def _surely_bound(test: ast.expr) -> Names:
    """Names that ``:=`` binds in a condition, whatever its outcome."""
    found: set[str] = set()
    waiting: list[ast.AST] = [test]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.NamedExpr):
            found.add(node.target.id)
            waiting.append(node.value)
        elif isinstance(node, ast.BoolOp):
            waiting.append(node.values[0])
        elif isinstance(node, ast.Compare):
            waiting += [node.left, node.comparators[0]]
        elif isinstance(node, ast.UnaryOp):
            waiting.append(node.operand)
        elif isinstance(node, ast.Call):
            waiting += [node.func, *node.args, *(keyword.value for keyword in node.keywords)]
    return frozenset(found)


def bound_names(targets: Iterable[ast.expr]) -> Names:
    """Names that an assignment binds."""
    return frozenset(
        node.id
        for target in targets
        for node in ast.walk(target)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
