"""Puts sites and guards into one body."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from outlast.autosave.program.endings import tell_endings, told
from outlast.autosave.program.kept import Kept, keep
from outlast.autosave.program.live import bound_names, liveness, read_names
from outlast.autosave.program.restoration import Restorations
from outlast.autosave.program.scopes import (
    DEFINITIONS,
    code_names,
    defined_names,
    is_text,
    local_names,
    nodes_here,
)
from outlast.autosave.program.sites import (
    Kind,
    Rewritten,
    Site,
    body_name,
    context_name,
    item_name,
    iterator_name,
)
from outlast.autosave.program.templates import if_, made_expression, made_statements
from outlast.autosave.program.ways import SIMPLE, Way
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.autosave.program.rebound import Rebound
    from outlast.autosave.program.source import Body


class Writer:
    """Rewrites one body.

    Args:
        rewritten: The file.
        body: The body, in the new tree.
        way: What it is to be entered again for.
        number: Of its first site.
        rebound: Tells which names of the body others may give another value.

    Attributes:
        number: Of the next site.
        name: Of the body.
    """

    def __init__(
        self, rewritten: Rewritten, body: Body, way: Way, number: int, rebound: Rebound
    ) -> None:
        self.number = number
        self.name = body_name(str(rewritten.source.path), *code_names(rewritten.tree, body))
        self._rewritten = rewritten
        self._body = body
        self._way = way
        self._runtime = way.runtime
        self._rebound = rebound
        self._iterators: set[int] = set()
        self._contexts: dict[int, list[str]] = {}
        self._sites: list[Site] = []
        self._restorations = Restorations(way.runtime)

    def leads(self) -> bool:
        """Whether the way leads through this body."""
        return any(self._is_site(statement) for statement in self._body.body)

    def write(self) -> None:
        """Put sites and guards into the body.

        Raises:
            AutosaveError: Where it cannot be entered again.
        """
        self._live = liveness(self._body)
        self._others = self._rebound.others(self._body)
        self._locals = local_names(self._body)
        self._defined = {} if isinstance(self._body, ast.Module) else defined_names(self._body)
        first = self._body.body[0]
        self._body.body = self._block(self._body.body, ())
        if self._way.trains and not isinstance(self._body, ast.Module):
            begun = made_statements(f"{self._runtime}.enter()", first)
            self._body.body[is_text(first) : is_text(first)] = begun
        known = frozenset[str]().union(*(site.names for site in self._sites))
        self._restorations.fill(known, self._defined)
        self._rewritten.sites += self._sites

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
        statement, hidden = self._keep(node, number) if keeps else Kept(node, [])
        delegates = any(isinstance(item, ast.YieldFrom) for item in self._way.leading(node))
        if isinstance(node, ast.For) or (kind == "yield" and delegates):
            self._iterators.add(number)
        self._sites.append(self._made_site(node, number, kind, around, hidden))
        if isinstance(node, ast.If):
            return self._if(node, number, around)
        entered = self._entered(statement, number, kind, (*around, number), hidden)
        test = made_expression(f"{self._runtime}.goes({number})", node)
        return if_(test, [*self._restored(node), *entered])

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
        self,
        node: ast.stmt,
        number: int,
        kind: Kind,
        inside: tuple[int, ...],
        hidden: list[str],
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
                return [self._passed(node), *self._returned(node), *self._cleared(hidden, node)]
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
        if kind == "step":
            tell_endings(node)
        begin = made_statements(
            f"if {self._runtime}.live:\n {name} = {self._runtime}.iterate({number}, ITER)",
            node,
            ITER=node.iter,
        )
        take, clear = made_statements(f"TARGET = {item}\n{item} = None", node)
        assert isinstance(take, ast.Assign)
        take.targets = [node.target]
        node.body = [self._guarded([take, clear]), *self._block(node.body, inside)]
        (named,) = made_statements(f"{item} = {name}", node)
        assert isinstance(named, ast.Assign)
        node.target = named.targets[0]
        node.iter = (
            named.value
            if self._way.trains
            else made_expression(
                f"{name} if {self._runtime}.live else {self._runtime}.passed({name})", node
            )
        )
        return [*begin, node, *self._ended(kind, [name], node)]

    def _while(
        self, node: ast.While, number: int, kind: Kind, inside: tuple[int, ...]
    ) -> list[ast.stmt]:
        self._refuse_leading(node.test)
        self._refuse_sites(node.orelse)
        count: list[ast.stmt] = []
        if kind == "step":
            tell_endings(node)
            count = made_statements(f"if {self._runtime}.live:\n {self._runtime}.step += 1", node)
        node.body = [*count, *self._block(node.body, inside)]
        asked = (
            f"{self._runtime}.head({number})" if self._way.trains else f"not {self._runtime}.live"
        )
        node.test = made_expression(f"{asked} or TEST", node, TEST=node.test)
        return [node, *self._ended(kind, [], node)]

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
        for statements in (
            *(handler.body for handler in node.handlers),
            node.orelse,
            node.finalbody,
        ):
            self._refuse_sites(statements)
        node.body = self._block(node.body, inside)
        if self._way.trains and node.finalbody:
            node.finalbody = [self._guarded(node.finalbody)]
        if self._way.trains and node.handlers and isinstance(node, ast.Try):
            (passing,) = made_statements(f"try: pass\nexcept {self._runtime}.passed: raise", node)
            assert isinstance(passing, ast.Try)
            node.handlers[:0] = passing.handlers
        return [node]

    def _passed(self, node: ast.stmt) -> ast.stmt:
        """A statement with a call, which is left where the call is passed over on the way back."""
        (made,) = made_statements(
            f"try: pass\nexcept {self._runtime}.passed:\n if not {self._runtime}.leads(): raise",
            node,
        )
        assert isinstance(made, ast.Try)
        made.body = [node]
        return made

    def _if(self, node: ast.If, number: int, around: tuple[int, ...]) -> ast.stmt:
        self._refuse_leading(node.test)
        node.body = [*self._restored(node), *self._block(node.body, (*around, number))]
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

    def _keep(self, node: ast.stmt, number: int) -> Kept:
        leading = self._way.leading(node)
        if len(leading) > 1:
            raise self._error(
                node, f"two of {self._way.what} stand in one statement; put each on its own line"
            )
        kept = keep(node, leading[0], number, self._way, self._others)
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

    def _ended(self, kind: Kind, hidden: Sequence[str], near: ast.stmt) -> list[ast.stmt]:
        """Behind a loop: tell that it has ended, if its iterations are the steps."""
        if kind != "step":
            return self._cleared(hidden, near)
        return [self._guarded(told(near)), *self._cleared(hidden, near)]

    def _restored(self, near: ast.stmt) -> list[ast.stmt]:
        """The statement that gives local names their values."""
        # Those of a module are global.
        return [] if isinstance(self._body, ast.Module) else [self._restorations.entered(near)]

    def _returned(self, node: ast.stmt) -> list[ast.stmt]:
        """As `_restored`, for a frame that set-up had brought into a call: when it is back."""
        if isinstance(self._body, ast.Module) or isinstance(node, ast.Return | ast.Raise):
            return []
        return [self._restorations.returned(node, self._sites[-1].names)]

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
