"""A program's text, rewritten so that it can be entered again in the middle of its training.

Only bodies that lead to training are touched, and generator functions, whose objects are entered
again in the same way. A *site* is a statement through which the way to a step leads: a loop, a
call of a function that leads there, and the `if`, `with` and `try` around them. While the program
goes back to where it was saved (`live` is false), sites on the way are entered, everything else is
passed over, and the local names get their values at the first site of each frame. In a normal run
the added text asks one attribute per group of statements and calls one function per iteration,
and one when a loop of steps has ended::

    model = build()                     model = build()
    for batch in loader:                if __outlast__.goes(0):
        train(batch)                        if __outlast__.live:
                                                __outlast_0__ = __outlast__.iterate(0, loader)
                                            for __outlast_item_0__ in __outlast_0__:
                                                if __outlast__.live:
                                                    batch = __outlast_item_0__
                                                    __outlast_item_0__ = None
                                                if __outlast__.live:
                                                    train(batch)
                                            if __outlast__.live:
                                                __outlast__.left()
                                            if __outlast__.live:
                                                __outlast_0__ = None

Small pieces of syntax trees from text, on the lines of a program.

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
from typing import TYPE_CHECKING, Any, TypeVar

from outlast.autosave.program.calls import reads_gradients_between_steps
from outlast.autosave.program.scopes import (
    DEFINITIONS,
    bound_names,
    code_names,
    defined_names,
    is_text,
    liveness,
    local_names,
    nodes_here,
    others_of,
    read_names,
    root_name,
    set_in_modules,
)
from outlast.autosave.program.source import (
    RUNTIME,
    Function,
    Kind,
    Rewritten,
    Site,
    body_name,
    context_name,
    item_name,
    iterator_name,
    spilled_name,
)
from outlast.autosave.program.training import SIMPLE, ToTraining, ToYield, Way
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.autosave.program.scopes import Others
    from outlast.autosave.program.source import Body, Loop, SourceFile
    from outlast.autosave.program.training import Training


def made_statements(text: str, near: ast.stmt, **parts: ast.expr) -> list[ast.stmt]:
    """Statements from a template, on the line of `near`; names in capitals stand for `parts`."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.expr | ast.excepthandler):
            node.lineno, node.col_offset = near.lineno, near.col_offset
            node.end_lineno, node.end_col_offset = near.lineno, near.col_offset
    _Filled(parts).visit(tree)
    return tree.body


_Made = TypeVar("_Made", bound=ast.stmt)


def made(kind: type[_Made], text: str, near: ast.stmt, **parts: ast.expr) -> _Made:
    """As `made_statements`, of one statement of a kind."""
    (statement,) = made_statements(text, near, **parts)
    assert isinstance(statement, kind)
    return statement


def made_expression(text: str, near: ast.stmt, **parts: ast.expr) -> ast.expr:
    """As `made_statements`, of one expression."""
    return made(ast.Expr, text, near, **parts).value


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


def spill(
    statement: ast.stmt, target: ast.expr, number: int, way: Way, others: Others
) -> tuple[ast.stmt, list[str]] | None:
    """Keep what `statement` computes beside `target`, and what it adds to.

    Args:
        statement: The statement.
        target: The call, or the `yield`, that is come back to.
        number: Of the statement's site.
        way: What it is come back to for; of a call, what it is computed from is spilled, too.
        others: Names of the body that others may give a value.

    Returns:
        What stands for the statement, and the names of the hidden variables that hold the values;
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
    return statement, spiller.names


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
        before: ast.expr = ast.Name(place.id, ast.Load()) if isinstance(place, ast.Name) else place
        if isinstance(place, ast.Attribute | ast.Subscript):
            owner, place.value = self._spill_and_reread(place.value)
            if isinstance(place, ast.Attribute):
                before = ast.Attribute(owner, place.attr, ast.Load())
            else:
                index, place.slice = self._spill_and_reread(self._as_value(place.slice))
                before = ast.Subscript(owner, index, ast.Load())
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


def told(near: ast.stmt) -> list[ast.stmt]:
    """The statement that tells of the end of a loop, on the line of `near`."""
    return made_statements(f"{RUNTIME}.left()", near)


class _Teller(ast.NodeTransformer):
    def told(self, statement: ast.stmt) -> list[ast.stmt]:
        found = self.visit(statement)
        return found if isinstance(found, list) else [found]

    def visit_Return(self, node: ast.Return) -> list[ast.stmt]:
        return [*told(node), node]

    def generic_visit(self, node: ast.AST) -> ast.AST:
        # Nested functions return from themselves, and no expression has a `return`.
        if isinstance(node, (*DEFINITIONS, ast.expr)):
            return node
        return super().generic_visit(node)


class Writer:
    """Rewrites one body.

    Args:
        rewritten: The file.
        body: The body, in the new tree.
        way: What it is to be entered again for.
        number: Of its first site.
        elsewhere: Names that any file of the program sets in modules.

    Attributes:
        number: Of the next site.
        name: Of the body.
    """

    def __init__(
        self, rewritten: Rewritten, body: Body, way: Way, number: int, elsewhere: frozenset[str]
    ) -> None:
        self.number = number
        self.name = body_name(str(rewritten.source.path), *code_names(rewritten.tree, body))
        self._rewritten = rewritten
        self._body = body
        self._way = way
        self._runtime = way.runtime
        self._elsewhere = elsewhere
        self._iterators: set[int] = set()
        self._contexts: dict[int, list[str]] = {}
        self._sites: list[Site] = []
        # Statements that give local names their values, and which; None for those of all sites.
        # They are filled when all sites of the body, and so all their names, are known.
        self._restorations: list[tuple[ast.If, frozenset[str] | None]] = []

    def leads(self) -> bool:
        """Return True if the way leads through this body."""
        return any(self._is_site(statement) for statement in self._body.body)

    def write(self) -> None:
        """Put sites and guards into the body.

        Raises:
            AutosaveError: Where it cannot be entered again.
        """
        self._live = liveness(self._body)
        self._others = others_of(self._rewritten.source.tree, self._elsewhere, self._body)
        self._locals = local_names(self._body)
        self._defined = {} if isinstance(self._body, ast.Module) else defined_names(self._body)
        first = self._body.body[0]
        self._body.body = self._block(self._body.body, ())
        if self._way.trains and not isinstance(self._body, ast.Module):
            begun = made_statements(f"{self._runtime}.enter()", first)
            self._body.body[is_text(first) : is_text(first)] = begun
        known = frozenset[str]().union(*(site.names for site in self._sites))
        for statement, names in self._restorations:
            self._fill(statement, sorted(known if names is None else names))
        self._rewritten.sites += self._sites

    def _fill(self, statement: ast.If, names: Sequence[str]) -> None:
        """Let a statement give local names their values."""
        runtime = self._runtime
        text = f"[{', '.join(names)}] = {runtime}.values({list(names)!r})\n"
        text += "".join(
            f"if {name} is {runtime}.unset:\n del {name}\n"
            for name in names
            if name not in self._defined
        )
        statement.body = made_statements(text, statement)
        # What is defined may need what was defined before it.
        for name, definition in self._defined.items():
            if name in names:
                choice = made(
                    ast.If,
                    f"if {name} is {runtime}.anew: pass\n"
                    f"elif {name} is {runtime}.unset:\n del {name}\n",
                    statement,
                )
                choice.body = [copy.deepcopy(definition)]
                statement.body.append(choice)

    def _restored(
        self, near: ast.stmt, test: str, names: frozenset[str] | None = None
    ) -> list[ast.stmt]:
        """The statement that gives local names their values where a test holds.

        None in a module, whose names are global.
        """
        if isinstance(self._body, ast.Module):
            return []
        statement = made(ast.If, f"if {test}: pass", near)
        self._restorations.append((statement, names))
        return [statement]

    def _is_site(self, node: ast.stmt) -> bool:
        if isinstance(node, DEFINITIONS):
            return False
        if self._way.kind(node) is not None:
            return True
        return any(
            isinstance(item, ast.stmt) and self._way.kind(item) is not None
            for item in nodes_here(node)
        )

    def _block(self, statements: list[ast.stmt], around: tuple[int, ...]) -> list[ast.stmt]:
        done: list[ast.stmt] = []
        plain: list[ast.stmt] = []

        def flush() -> None:
            if isinstance(self._body, ast.Module) and not self._sites:
                # A module begins while the program does its work.
                done.extend(plain)
            elif plain:
                done.append(self._guarded(plain.copy()))
            plain.clear()

        for place, statement in enumerate(statements):
            docstring = place == 0 and is_text(statement)
            future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
            if isinstance(statement, ast.Global | ast.Nonlocal) or docstring or future:
                done.append(statement)
            elif self._is_site(statement):
                flush()
                done.append(self._site(statement, around))
            else:
                self._refuse_leading(statement)
                plain.append(statement)
        flush()
        return done

    def _site(self, node: ast.stmt, around: tuple[int, ...]) -> ast.stmt:
        number = self.number
        self.number += 1
        kind: Kind = self._way.kind(node) or "branch"
        keeps = kind in ("call", "yield")
        statement, hidden = self._keep(node, number) if keeps else (node, [])
        delegates = any(isinstance(item, ast.YieldFrom) for item in self._way.leading(node))
        if isinstance(node, ast.For) or (kind == "yield" and delegates):
            self._iterators.add(number)
        self._sites.append(self._made_site(node, number, kind, around, hidden))
        if isinstance(node, ast.If):
            return self._if(node, number, around)
        entered = self._entered(statement, number, kind, (*around, number), hidden)
        test = made_expression(f"{self._runtime}.goes({number})", node)
        return if_(test, [*self._restored(node, f"{self._runtime}.restoring"), *entered])

    def _made_site(
        self, node: ast.stmt, number: int, kind: Kind, around: tuple[int, ...], hidden: list[str]
    ) -> Site:
        live = self._live_at(node, kind) | self._live.always
        iterators = {iterator_name(item) for item in (*around, number) if item in self._iterators}
        contexts = {name for number in around for name in self._contexts.get(number, ())}
        names = (live & self._locals) | iterators | contexts | frozenset(hidden)
        return Site(
            number,
            self.name,
            node.lineno,
            node.col_offset,
            node.end_lineno or node.lineno,
            node.end_col_offset or node.col_offset,
            kind,
            around,
            names,
            self._locals - names,
            frozenset(self._defined),
        )

    def _live_at(self, node: ast.stmt, kind: Kind) -> frozenset[str]:
        if kind in ("step", "loop"):
            return self._live.head[node]
        if kind == "yield" and isinstance(node, ast.Expr | ast.Assign):
            if node.value in self._way.leading(node):
                # What was computed before it is not needed: it has been given away.
                targets = node.targets if isinstance(node, ast.Assign) else []
                return (self._live.after[node] - bound_names(targets)) | read_names(*targets)
            return self._live.at[node] | self._live.after[node]
        return self._live.at[node]

    def _entered(
        self, node: ast.stmt, number: int, kind: Kind, inside: tuple[int, ...], hidden: list[str]
    ) -> list[ast.stmt]:
        """The statements that stand for a site, once it is entered."""
        match node:
            case ast.For():
                return self._for(node, number, kind, inside)
            case ast.While():
                return self._while(node, number, kind, inside)
            case ast.With():
                return self._with(node, inside)
            case ast.Try() | ast.TryStar():
                return self._try(node, inside)
            case _ if isinstance(node, SIMPLE) and kind == "yield":
                return self._yield(node, number, hidden)
            case _ if isinstance(node, SIMPLE):
                # What has a call is left where the call is passed over while resuming.
                passed = made(
                    ast.Try,
                    f"try: pass\nexcept {self._runtime}.passed:\n"
                    f" if not {self._runtime}.leads(): raise",
                    node,
                )
                passed.body = [node]
                returned: list[ast.stmt] = []
                if not isinstance(node, ast.Return | ast.Raise):
                    # For a frame that set-up had brought into a call; what the statement itself
                    # binds stays.
                    stored = (item for item in nodes_here(node) if isinstance(item, ast.Name))
                    test = f"{self._runtime}.late and {self._runtime}.returns()"
                    live = self._sites[-1].names - bound_names(stored)
                    returned = self._restored(node, test, live)
                return [passed, *returned, *self._cleared(hidden, node)]
        raise self._error(
            node,
            f"{self._way.what} within `{type(node).__name__.lower()}` cannot be entered again; "
            "move it into a function",
        )

    def _for(
        self, node: ast.For, number: int, kind: Kind, inside: tuple[int, ...]
    ) -> list[ast.stmt]:
        name, item = iterator_name(number), item_name(number)
        self._refuse_leading(node.iter)
        self._refuse_sites(node.orelse)
        ended = self._told_endings(node, kind)
        begin = made_statements(
            f"if {self._runtime}.live:\n {name} = {self._runtime}.iterate({number}, ITER)",
            node,
            ITER=node.iter,
        )
        take, clear = made_statements(f"TARGET = {item}\n{item} = None", node)
        assert isinstance(take, ast.Assign)
        take.targets = [node.target]
        node.body = [self._guarded([take, clear]), *self._block(node.body, inside)]
        named = made(ast.Assign, f"{item} = {name}", node)
        node.target = named.targets[0]
        node.iter = named.value
        if not self._way.trains:
            text = f"{name} if {self._runtime}.live else {self._runtime}.passed({name})"
            node.iter = made_expression(text, node)
        return [*begin, node, *ended, *self._cleared([name], node)]

    def _while(
        self, node: ast.While, number: int, kind: Kind, inside: tuple[int, ...]
    ) -> list[ast.stmt]:
        self._refuse_leading(node.test)
        self._refuse_sites(node.orelse)
        count: list[ast.stmt] = []
        if ended := self._told_endings(node, kind):
            count = made_statements(f"if {self._runtime}.live:\n {self._runtime}.step += 1", node)
        node.body = [*count, *self._block(node.body, inside)]
        asked = (
            f"{self._runtime}.head({number})" if self._way.trains else f"not {self._runtime}.live"
        )
        node.test = made_expression(f"{asked} or TEST", node, TEST=node.test)
        return [node, *ended]

    def _told_endings(self, loop: Loop, kind: Kind) -> list[ast.stmt]:
        """Have a step loop tell that it ends, also where it has an `else` or returns.

        Gives the statements behind it, which are reached in all other cases, but for errors.
        """
        if kind != "step":
            return []
        if loop.orelse:
            loop.orelse[:0] = told(loop)
        teller = _Teller()
        loop.body = [item for statement in loop.body for item in teller.told(statement)]
        return [self._guarded(told(loop))]

    def _with(self, node: ast.With, inside: tuple[int, ...]) -> list[ast.stmt]:
        number = inside[-1]
        contexts = []
        for place, item in enumerate(node.items):
            self._refuse_leading(item.context_expr)
            target = item.optional_vars
            name = target.id if isinstance(target, ast.Name) else ""
            template = f"{self._runtime}.entered({name!r}) or EXPRESSION"
            if self._way.trains:
                context = context_name(number, place)
                contexts.append(context)
                template = (
                    f"{self._runtime}.entered({name!r}, {context!r}) "
                    f"or ({context} := {self._runtime}.held(EXPRESSION))"
                )
            item.context_expr = made_expression(template, node, EXPRESSION=item.context_expr)
        self._contexts[number] = contexts
        node.body = self._block(node.body, inside)
        if not self._way.trains:
            node.body[:0] = made_statements(
                f"if {self._runtime}.paused:\n {self._runtime}.proceed()", node
            )
        return [node, *self._cleared(contexts, node)]

    def _try(self, node: ast.Try | ast.TryStar, inside: tuple[int, ...]) -> list[ast.stmt]:
        handled = [statement for handler in node.handlers for statement in handler.body]
        self._refuse_sites([*handled, *node.orelse, *node.finalbody])
        node.body = self._block(node.body, inside)
        if self._way.trains and node.finalbody:
            node.finalbody = [self._guarded(node.finalbody)]
        if self._way.trains and node.handlers and isinstance(node, ast.Try):
            text = f"try: pass\nexcept {self._runtime}.passed: raise"
            passing = made(ast.Try, text, node)
            node.handlers[:0] = passing.handlers
        return [node]

    def _if(self, node: ast.If, number: int, around: tuple[int, ...]) -> ast.stmt:
        self._refuse_leading(node.test)
        restored = self._restored(node, f"{self._runtime}.restoring")
        node.body = [*restored, *self._block(node.body, (*around, number))]
        if any(self._is_site(item) for item in node.orelse):
            # Of an `else` or `elif` the sites within say themselves whether the way leads there.
            node.orelse = self._block(node.orelse, around)
        elif node.orelse:
            node.orelse = [self._guarded(node.orelse)]
        node.test = made_expression(
            f"TEST if {self._runtime}.live else {self._runtime}.goes({number})",
            node,
            TEST=node.test,
        )
        return node

    def _yield(self, node: ast.stmt, number: int, hidden: list[str]) -> list[ast.stmt]:
        (target,) = self._way.leading(node)
        if isinstance(target, ast.YieldFrom):
            name = iterator_name(number)
            hidden = [*hidden, name]
            target.value = made_expression(
                f"{self._runtime}.delegate(({name} := {self._runtime}.iterate({number}, ITER)) "
                f"if {self._runtime}.live else {name})",
                node,
                ITER=target.value,
            )
        else:
            assert isinstance(target, ast.Yield)
            target.value = made_expression(
                f"VALUE if {self._runtime}.live else {self._runtime}.arrives()",
                node,
                VALUE=target.value or ast.Constant(None),
            )
        return [node, *self._cleared(hidden, node)]

    def _keep(self, node: ast.stmt, number: int) -> tuple[ast.stmt, list[str]]:
        leading = self._way.leading(node)
        if len(leading) > 1:
            raise self._error(
                node, f"two of {self._way.what} stand in one statement; put each on its own line"
            )
        kept = spill(node, leading[0], number, self._way, self._others)
        if kept is None:
            raise self._error(
                node,
                f"{self._way.what} in a comprehension cannot be entered again; write it as a "
                "`for` loop",
            )
        return kept

    def _guarded(self, statements: list[ast.stmt]) -> ast.stmt:
        """`statements`, done only while the program does its work."""
        return if_(made_expression(f"{self._runtime}.live", statements[0]), statements)

    def _cleared(self, hidden: Sequence[str], near: ast.stmt) -> list[ast.stmt]:
        """Let go of what hidden variables hold."""
        if not hidden or isinstance(near, ast.Return | ast.Raise):
            return []
        text = "".join(f" {name} = None\n" for name in hidden)
        return made_statements(f"if {self._runtime}.live:\n{text}", near)

    def _refuse_sites(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            if self._is_site(statement):
                raise self._error(
                    statement,
                    f"{self._way.what} in an `else` of a loop or in an `except`, `else` or "
                    "`finally` cannot be entered again; move it out of there",
                )

    def _refuse_leading(self, node: ast.AST) -> None:
        if isinstance(node, DEFINITIONS):
            return
        for item in self._way.leading(node):
            text = ast.unparse(item.func) + "(...)" if isinstance(item, ast.Call) else "yield"
            raise self._error(
                item,
                f"`{text}` stands where the program cannot be entered again; put it into a "
                "statement of its own",
            )

    def _error(self, node: ast.stmt | ast.expr, sentence: str) -> AutosaveError:
        return AutosaveError(f"{self._rewritten.source.name()}, line {node.lineno}: {sentence}")


def rewrite(files: list[SourceFile], training: Training) -> list[Rewritten]:
    """All files of a program; those without a way to training stay as they are.

    Raises:
        AutosaveError: Where a step cannot be entered again, with the line and the remedy.
    """
    number = 0
    done = []
    reads_gradients = reads_gradients_between_steps(files, training)
    elsewhere = set_in_modules(files)
    for source in files:
        rewritten = Rewritten(source, copy.deepcopy(source.tree), reads_gradients=reads_gradients)
        originals = dict(zip(ast.walk(rewritten.tree), ast.walk(source.tree), strict=True))
        way = ToTraining(training, originals)
        bodies: list[Body] = [
            node for node in ast.walk(rewritten.tree) if isinstance(node, ast.Module | Function)
        ]
        # Inner functions first: their definitions are copied when the outer one is rewritten.
        for body in reversed(bodies):
            writer = Writer(rewritten, body, way, number, elsewhere)
            yields = isinstance(body, ast.FunctionDef) and any(
                isinstance(node, ast.Yield | ast.YieldFrom) for node in nodes_here(body)
            )
            if writer.leads():
                if isinstance(body, Function) and (
                    yields or isinstance(body, ast.AsyncFunctionDef)
                ):
                    raise AutosaveError(
                        f"{rewritten.source.name()}, line {body.lineno}: the generator or "
                        f"coroutine `{body.name}` trains, and cannot be entered again in the "
                        "middle; move its training loop into a plain function"
                    )
                writer.write()
                rewritten.bodies.add(writer.name)
                number = writer.number
            elif yields:
                # A generator function that cannot be entered again stays as it is.
                before = body.body
                body.body = copy.deepcopy(before)
                writer = Writer(rewritten, body, ToYield(), number, elsewhere)
                try:
                    writer.write()
                except AutosaveError as error:
                    body.body = before
                    rewritten.plain[writer.name] = str(error)
                    continue
                rewritten.generators.add(writer.name)
                number = writer.number
        rewritten.sites.sort(key=lambda site: site.number)
        ast.fix_missing_locations(rewritten.tree)
        done.append(rewritten)
    return done
