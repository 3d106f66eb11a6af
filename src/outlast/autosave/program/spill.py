"""Small pieces of syntax trees from text, on the lines of a program.

On the way back the statement is executed again, but nothing that it had computed by then: a call
may do things, as ``train(model, next(batches))`` must not take another batch, and what trains may
change what was read, as in ``self.total + self.train()``, ``print(*seen, train())`` and
``f"{seen} {train()}"``. So such values are kept in hidden variables. What ``self.total +=
self.train()`` adds to, which Python reads first, is spilled, too. Read again are names that nothing
but the statement's own frame gives a value, and what the function that trains is given: it has its
own names. What has decided that the call is made, as in ``seen or train()``, does so again.
"""

from __future__ import annotations

import ast
import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from outlast.autosave.program.scopes import root_name
from outlast.autosave.program.source import RUNTIME, spilled_name

if TYPE_CHECKING:
    from outlast.autosave.program.scopes import Others
    from outlast.autosave.program.training import Way


def made_statements(text: str, near: ast.stmt, **parts: ast.expr) -> list[ast.stmt]:
    """Statements from a template, on the line of `near`; names in capitals stand for `parts`."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.expr | ast.excepthandler):
            node.lineno, node.col_offset = near.lineno, near.col_offset
            node.end_lineno, node.end_col_offset = near.lineno, near.col_offset
    _Filled(parts).visit(tree)
    return tree.body


def made_expression(text: str, near: ast.stmt, **parts: ast.expr) -> ast.expr:
    """As `made_statements`, of one expression."""
    (statement,) = made_statements(text, near, **parts)
    assert isinstance(statement, ast.Expr)
    return statement.value


def if_(test: ast.expr, body: list[ast.stmt]) -> ast.If:
    """An `if` on the line of its test."""
    return ast.copy_location(ast.If(test, body, []), test)


class _Filled(ast.NodeTransformer):
    def __init__(self, parts: dict[str, ast.expr]) -> None:
        self._parts = parts

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._parts.get(node.id, node)


_DOES_THINGS = (
    ast.Call, ast.Await, ast.NamedExpr, ast.Yield, ast.YieldFrom,
    ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Subscript,
)  # fmt: skip


_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Spilled(NamedTuple):
    """A statement that keeps values.

    Attributes:
        statement: What stands for it.
        names: Of the hidden variables that hold them.
    """

    statement: ast.stmt
    names: list[str]


def spill(
    statement: ast.stmt, target: ast.expr, number: int, way: Way, others: Others
) -> Spilled | None:
    """Keep what `statement` computes beside `target`, and what it adds to.

    Args:
        statement: The statement.
        target: The call, or the `yield`, that is come back to.
        number: Of the statement's site.
        way: What it is come back to for; of a call, what it is computed from is spilled, too.
        others: Names of the body that others may give a value.

    Returns:
        None when `target` is in a comprehension, which cannot be entered again.
    """
    nodes = _nodes_to(statement, target)
    if any(isinstance(node, _COMPREHENSIONS) for node in nodes):
        return None
    spiller = _Spiller(statement, number, way.runtime, others)
    spiller.along(nodes, inside=way.trains)
    # A place that the call itself is a part of can be read only when the call is back.
    if isinstance(statement, ast.AugAssign) and statement.value in nodes:
        statement = spiller.added(statement)
    return Spilled(statement, spiller.names)


def _nodes_to(node: ast.AST, target: ast.AST) -> list[ast.AST]:
    """The nodes from `node` down to `target`."""
    if node is target:
        return [node]
    for item in ast.iter_child_nodes(node):
        if found := _nodes_to(item, target):
            return [node, *found]
    return []


class _Spiller:
    def __init__(self, statement: ast.stmt, number: int, runtime: str, others: Others) -> None:
        self.names: list[str] = []
        self._statement = statement
        self._number = number
        self._runtime = runtime
        own = (node for node in ast.walk(statement) if isinstance(node, ast.NamedExpr))
        self._rebound = others.rebound.union(job.target.id for job in own)
        self._imported = others.imported

    def along(self, nodes: list[ast.AST], *, inside: bool) -> None:
        for node, following in zip(nodes, [*nodes[1:], None], strict=True):
            if isinstance(node, ast.Dict) and following is not None:
                _unpack(node, following)
            if self._decided(node, following):
                continue
            for field, value in ast.iter_fields(node):
                # The format of a value is asked for when the value is there.
                if field in ("annotation", "format_spec") or (following is None and not inside):
                    continue
                beside = following is not None
                if isinstance(value, list):
                    for place, item in enumerate(value):
                        if item is not following:
                            value[place] = self._instead(item, beside)
                elif value is following:
                    continue
                elif field == "func" and isinstance(value, ast.Attribute):
                    # A function of a module, such as `sys.stdout.write`, or a method.
                    if root_name(value) not in self._imported:
                        value.value = self._instead(value.value, beside)
                else:
                    setattr(node, field, self._instead(value, beside))

    def _decided(self, node: ast.AST, following: ast.AST | None) -> bool:
        """Have what has decided that the way leads on do so again, whatever it is by now."""
        match node:
            case ast.BoolOp(op=op, values=values) if following in values[1:]:
                place = values.index(following)
                leads = isinstance(op, ast.And)
                values[:place] = [self._leading(name, leads) for name in values[:place]]
            case ast.IfExp(test=test, body=body) if following is not test and following is not None:
                node.test = self._leading(test, following is body)
            case _:
                return False
        return True

    def _leading(self, node: ast.expr, leads: bool) -> ast.expr:
        made = made_expression(
            f"VALUE if {self._runtime}.live else {leads}", self._statement, VALUE=node
        )
        return ast.copy_location(made, node)

    def added(self, statement: ast.AugAssign) -> ast.stmt:
        """``place += value`` as an assignment, with what was at the place read first, and kept."""
        place, before = statement.target, self._before(statement.target)
        kind = type(statement.op).__name__
        value = made_expression(
            f"{RUNTIME}.augmented({kind!r}, BEFORE, VALUE)",
            statement,
            BEFORE=before,
            VALUE=statement.value,
        )
        return ast.copy_location(ast.Assign([place], value), statement)

    def _before(self, place: ast.Name | ast.Attribute | ast.Subscript) -> ast.expr:
        """Spill the value at a place; the place is then that of the spilled objects."""
        before: ast.expr
        if isinstance(place, ast.Attribute):
            owner, place.value = self._spill_and_reread(place.value)
            before = ast.Attribute(owner, place.attr, ast.Load())
        elif isinstance(place, ast.Subscript):
            owner, place.value = self._spill_and_reread(place.value)
            index, place.slice = self._spill_and_reread(self._as_value(place.slice))
            before = ast.Subscript(owner, index, ast.Load())
        else:
            before = ast.Name(place.id, ast.Load())
        return self._spill(ast.copy_location(before, place))

    def _as_value(self, index: ast.expr) -> ast.expr:
        """An index with calls of `slice` for its slices: Python has those in brackets only."""
        if isinstance(index, ast.Tuple):
            index.elts = [self._as_value(elt) for elt in index.elts]
        if not isinstance(index, ast.Slice):
            return index
        made = made_expression(
            f"{RUNTIME}.slice(LOWER, UPPER, STEP)",
            self._statement,
            LOWER=index.lower or ast.Constant(None),
            UPPER=index.upper or ast.Constant(None),
            STEP=index.step or ast.Constant(None),
        )
        return ast.copy_location(made, index)

    def _instead(self, node: Any, beside: bool) -> Any:
        """Replace a node that is not on the way; `beside`: nor a part of the target."""
        if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
            return node
        if isinstance(node, ast.Starred | ast.keyword | ast.FormattedValue):
            return self._part(node, beside)
        if isinstance(node, ast.Attribute) and not beside:
            node.value = self._expression(node.value, beside)
            return node
        return self._expression(node, beside) if isinstance(node, ast.expr) else node

    def _expression(self, node: ast.expr, beside: bool) -> ast.expr:
        again = self._stays(node) if beside else not _does_things(node)
        return node if again else self._spill(self._as_value(node))

    def _stays(self, node: ast.AST | None) -> bool:
        """Return True if an expression gives the same once more when the call is back."""
        match node:
            case ast.Name(id=name):
                return name not in self._rebound
            case ast.Tuple() | ast.List() | ast.Slice():
                return all(map(self._stays, ast.iter_child_nodes(node)))
            case ast.Dict():
                return None not in node.keys and all(map(self._stays, (*node.keys, *node.values)))
            case ast.Lambda():
                return all(map(self._stays, (*node.args.defaults, *node.args.kw_defaults)))
            case None:
                return True
        named = any(isinstance(item, ast.Name) for item in ast.walk(node))
        return not named and not _does_things(node)

    def _part(self, node: ast.Starred | ast.keyword | ast.FormattedValue, beside: bool) -> ast.AST:
        """As `_instead`, of what is no value of its own: what it gives is made one, and kept."""
        if beside:
            match node:
                case ast.Starred():
                    node.value = ast.List([ast.Starred(node.value, ast.Load())], ast.Load())
                case ast.FormattedValue():
                    node.value = ast.JoinedStr([copy.copy(node)])
                    node.conversion, node.format_spec = -1, None
                case ast.keyword(arg=None):
                    node.value = ast.Dict([None], [node.value])
        elif isinstance(node, ast.Starred):
            # What is unpacked may be an iterator, which has nothing left.
            spilled = self._spill(ast.copy_location(ast.List([node], ast.Load()), node))
            return ast.copy_location(ast.Starred(spilled, ast.Load()), node)
        node.value = self._expression(node.value, beside)
        return node

    def _spill_and_reread(self, node: ast.expr) -> tuple[ast.expr, ast.expr]:
        """Return the expressions that spill the value of a node and read it once more."""
        spilled = self._spill(node)
        return spilled, ast.copy_location(ast.Name(self.names[-1], ast.Load()), node)

    def _spill(self, node: ast.expr) -> ast.expr:
        name = spilled_name(self._number, len(self.names))
        self.names.append(name)
        made = made_expression(
            f"({name} := VALUE) if {self._runtime}.live else {name}", self._statement, VALUE=node
        )
        return ast.copy_location(made, node)


def _unpack(node: ast.Dict, following: ast.AST) -> None:
    """Make values of their own of what ``**`` gives to a ``{}``, but for `following`."""
    for place, (key, value) in enumerate(zip(node.keys, node.values, strict=True)):
        if key is None and value is not following:
            node.values[place] = ast.copy_location(ast.Dict([None], [value]), value)


def _does_things(node: ast.AST) -> bool:
    if isinstance(node, ast.Lambda):
        return False
    return isinstance(node, _DOES_THINGS) or any(map(_does_things, ast.iter_child_nodes(node)))
