"""Values that a statement has computed when it calls a function that leads to training.

On the way back the statement is executed again. What it read from names it reads again; what it
computed by calls is kept in hidden variables and not computed twice, since a call may do things:
``train(model, next(batches))`` must not take another batch. Items, as in ``train(todo[0])``, are
kept, too, and so are attributes beside the call, as in ``self.total + self.train()``: what trains
may change them. So is what ``self.total += self.train()`` adds to, which Python reads first.
"""

from __future__ import annotations

import ast
from typing import NamedTuple

from outlast.autosave.program.sites import RUNTIME, kept_name
from outlast.autosave.program.templates import made_expression

_DOES_THINGS = (
    ast.Call, ast.Await, ast.NamedExpr, ast.Yield, ast.YieldFrom,
    ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Subscript,
)  # fmt: skip
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Kept(NamedTuple):
    """A statement that keeps values.

    Attributes:
        statement: What stands for it.
        names: Of the hidden variables that hold them.
    """

    statement: ast.stmt
    names: list[str]


def keep(
    statement: ast.stmt, target: ast.expr, number: int, runtime: str, *, inside: bool
) -> Kept | None:
    """Keep what `statement` computes beside `target`.

    With `inside`, also what `target` itself is computed from, and what the statement adds to.

    None when `target` is in a comprehension, which cannot be entered again.
    """
    way = _way(statement, target)
    if any(isinstance(each, _COMPREHENSIONS) for each in way):
        return None
    keeper = _Keeper(statement, number, runtime)
    keeper.along(way, inside)
    # A place that the call itself is a part of can be read only when the call is back.
    if inside and isinstance(statement, ast.AugAssign) and statement.value in way:
        statement = keeper.added(statement)
    return Kept(statement, keeper.names)


def _way(node: ast.AST, target: ast.AST) -> list[ast.AST]:
    """The nodes from `node` down to `target`."""
    if node is target:
        return [node]
    for each in ast.iter_child_nodes(node):
        if found := _way(each, target):
            return [node, *found]
    return []


class _Keeper:
    def __init__(self, statement: ast.stmt, number: int, runtime: str) -> None:
        self.names: list[str] = []
        self._statement = statement
        self._number = number
        self._runtime = runtime

    def along(self, way: list[ast.AST], inside: bool) -> None:
        for node, following in zip(way, [*way[1:], None], strict=True):
            for field, value in ast.iter_fields(node):
                if field == "annotation" or (following is None and not inside):
                    continue
                beside = following is not None and field != "func"
                if isinstance(value, list):
                    for place, each in enumerate(value):
                        if each is not following:
                            value[place] = self._instead(each, beside)
                elif value is not following:
                    setattr(node, field, self._instead(value, beside))

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
        """What keeps the value at a place; the place is then that of the kept objects."""
        before: ast.expr
        if isinstance(place, ast.Attribute):
            owner, place.value = self._kept_and_again(place.value)
            before = ast.Attribute(owner, place.attr, ast.Load())
        elif isinstance(place, ast.Subscript):
            owner, place.value = self._kept_and_again(place.value)
            index, place.slice = self._kept_and_again(self._as_value(place.slice))
            before = ast.Subscript(owner, index, ast.Load())
        else:
            before = ast.Name(place.id, ast.Load())
        return self._kept(ast.copy_location(before, place))

    def _as_value(self, index: ast.expr) -> ast.expr:
        """An index with calls of `slice` for its slices: Python has those in brackets only."""
        if isinstance(index, ast.Tuple):
            index.elts = [self._as_value(each) for each in index.elts]
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

    def _instead(self, node: object, beside: bool) -> object:
        """What stands for a node that is not on the way; `beside`: nor a part of the target."""
        if isinstance(node, ast.Starred | ast.keyword | ast.FormattedValue):
            node.value = self._expression(node.value, beside)
            return node
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and not beside:
            node.value = self._expression(node.value, beside)
            return node
        return self._expression(node, beside) if isinstance(node, ast.expr) else node

    def _expression(self, node: ast.expr, beside: bool) -> ast.expr:
        if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
            return node
        if not _does_things(node) and not (beside and _has_attributes(node)):
            return node
        return self._kept(node)

    def _kept_and_again(self, node: ast.expr) -> tuple[ast.expr, ast.expr]:
        """What keeps the value of a node, and what reads it once more."""
        kept = self._kept(node)
        return kept, ast.copy_location(ast.Name(self.names[-1], ast.Load()), node)

    def _kept(self, node: ast.expr) -> ast.expr:
        name = kept_name(self._number, len(self.names))
        self.names.append(name)
        made = made_expression(
            f"({name} := VALUE) if {self._runtime}.live else {name}", self._statement, VALUE=node
        )
        return ast.copy_location(made, node)


def _has_attributes(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Attribute) for each in ast.walk(node))


def _does_things(node: ast.AST) -> bool:
    if isinstance(node, ast.Lambda):
        return False
    return isinstance(node, _DOES_THINGS) or any(map(_does_things, ast.iter_child_nodes(node)))
