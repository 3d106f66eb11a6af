"""A program's text, rewritten so that it can be entered again in the middle of its training.

Only bodies that lead to training are touched. A *site* is a statement through which the way to a
step leads: a loop, a call of a function that leads there, and the `if`, `with` and `try` around
them. While the program goes back to where it was saved (`live` is false), sites on the way are
entered, everything else is passed over, and the local names get their values at the first site of
each frame. In a normal run the added text asks one attribute per group of statements and calls
one function per iteration::

    model = build()                     model = build()
    for batch in loader:                if __outlast__.goes(0):
        train(batch)                        if __outlast__.live:
                                                __outlast_0__ = __outlast__.iterate(0, loader)
                                            for __outlast_item_0__ in __outlast_0__:
                                                if __outlast__.live:
                                                    batch = __outlast_item_0__
                                                if __outlast__.live:
                                                    train(batch)
"""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.autosave.program.live import liveness
from outlast.autosave.program.scopes import (
    DEFINITIONS,
    code_names,
    is_text,
    local_names,
    names_of,
    nodes_here,
)
from outlast.autosave.program.sites import (
    RUNTIME,
    Kind,
    Rewritten,
    Site,
    body_name,
    iterator_name,
)
from outlast.autosave.program.templates import guarded, if_, made_expression, made_statements
from outlast.autosave.program.training import Training
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from outlast.autosave.program.source import Body, SourceFile

_SIMPLE = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return)


def rewrite(files: list[SourceFile], training: Training) -> list[Rewritten]:
    """All files of a program; those without a way to training stay as they are.

    Raises:
        AutosaveError: Where a step cannot be entered again, with the line and the remedy.
    """
    number = 0
    done = []
    for source in files:
        rewritten = Rewritten(source, copy.deepcopy(source.tree))
        originals = dict(zip(ast.walk(rewritten.tree), ast.walk(source.tree), strict=True))
        matching = _Matching(training, originals)
        bodies = [
            each
            for each in ast.walk(rewritten.tree)
            if isinstance(each, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        # Inner functions first: their definitions are copied when the outer one is rewritten.
        for body in reversed(bodies):
            writer = _Writer(rewritten, body, matching, number)
            if writer.leads():
                writer.write()
                number = writer.number
        rewritten.sites.sort(key=lambda site: site.number)
        ast.fix_missing_locations(rewritten.tree)
        done.append(rewritten)
    return done


@dataclass(frozen=True)
class _Matching:
    """What is known of the program's own nodes, asked of their copies."""

    training: Training
    originals: dict[ast.AST, ast.AST]

    def kind(self, node: ast.AST) -> Kind | None:
        """Of a loop or a simple statement; None where no way leads through it."""
        original = self.originals.get(node)
        if original in self.training.step_loops:
            return "step"
        if original in self.training.loops:
            return "loop"
        if isinstance(node, _SIMPLE) and self.training.calls(node):
            return "call"
        return None


class _Writer:
    """Rewrites one body."""

    def __init__(self, rewritten: Rewritten, body: Body, matching: _Matching, number: int) -> None:
        self.number = number
        self._file = str(rewritten.source.path)
        self._rewritten = rewritten
        self._body = body
        self._matching = matching
        self._name = ""
        self._iterators: set[int] = set()
        self._defined: list[ast.stmt] = []
        self._restorations: list[tuple[ast.If, list[ast.stmt]]] = []

    def leads(self) -> bool:
        """Whether a way to training leads through this body."""
        return any(self._is_site(each) for each in self._body.body)

    def write(self) -> None:
        """Put sites and guards into the body."""
        self._refuse_what_has_no_way_back()
        live = liveness(self._body)
        self._live = {node: names | live.always for node, names in live.at.items()}
        self._name = body_name(self._file, *code_names(self._rewritten.tree, self._body))
        self._locals = local_names(self._body)
        self._rewritten.bodies.add(self._name)
        self._body.body = self._block(self._body.body, ())
        self._fill_restorations()

    def _refuse_what_has_no_way_back(self) -> None:
        if isinstance(self._body, ast.Module):
            return
        own = list(nodes_here(self._body))
        if isinstance(self._body, ast.AsyncFunctionDef) or any(
            isinstance(each, ast.Yield | ast.YieldFrom) for each in own
        ):
            raise self._error(
                self._body,
                f"the generator or coroutine `{self._body.name}` trains, and cannot be entered "
                "again in the middle; move its training loop into a plain function",
            )

    def _is_site(self, node: ast.stmt) -> bool:
        if isinstance(node, (*DEFINITIONS, ast.Lambda)):
            return False
        if self._matching.kind(node) is not None:
            return True
        return any(
            isinstance(each, ast.stmt) and self._matching.kind(each) is not None
            for each in nodes_here(node)
        )

    def _block(self, statements: list[ast.stmt], around: tuple[int, ...]) -> list[ast.stmt]:
        done: list[ast.stmt] = []
        plain: list[ast.stmt] = []

        def flush() -> None:
            if plain:
                done.append(guarded(plain.copy()))
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
                self._refuse_calls(statement)
                if isinstance(statement, DEFINITIONS):
                    self._defined.append(statement)
                plain.append(statement)
        flush()
        return done

    def _site(self, node: ast.stmt, around: tuple[int, ...]) -> ast.stmt:
        number = self.number
        self.number += 1
        kind: Kind = self._matching.kind(node) or "branch"
        inside = (*around, number)
        live = self._live[node]
        if isinstance(node, ast.For):
            self._iterators.add(number)
        names = (live & self._locals) | {
            iterator_name(each) for each in inside if each in self._iterators
        }
        site = Site(
            number,
            self._name,
            node.lineno,
            node.end_lineno or node.lineno,
            kind,
            around,
            frozenset(names),
        )
        self._rewritten.sites.append(site)
        entered: list[ast.stmt]
        match node:
            case ast.For():
                entered = self._for(node, number, inside)
            case ast.While():
                self._refuse_calls(node.test)
                self._refuse_sites(node.orelse)
                node.body = self._block(node.body, inside)
                node.test = made_expression(
                    f"{RUNTIME}.head({number}) or TEST", node, TEST=node.test
                )
                entered = [node]
            case ast.If():
                return self._if(node, number, around)
            case ast.With():
                for each in node.items:
                    self._refuse_calls(each.context_expr)
                node.body = self._block(node.body, inside)
                entered = [node]
            case ast.Try() | ast.TryStar():
                others = (each.body for each in node.handlers)
                for statements in (*others, node.orelse, node.finalbody):
                    self._refuse_sites(statements)
                node.body = self._block(node.body, inside)
                entered = [node]
            case _ if isinstance(node, _SIMPLE):
                entered = [node]
                if len(self._matching.training.calls(node)) > 1:
                    raise self._error(
                        node,
                        "two calls that lead to training stand in one statement; put each on a "
                        "line of its own",
                    )
            case _:
                raise self._error(
                    node,
                    f"a training loop within `{type(node).__name__.lower()}` cannot be entered "
                    "again; move it into a function",
                )
        test = made_expression(f"{RUNTIME}.goes({number})", node)
        return if_(test, [*self._restored(node), *entered])

    def _for(self, node: ast.For, number: int, inside: tuple[int, ...]) -> list[ast.stmt]:
        name, item = iterator_name(number), f"__outlast_item_{number}__"
        begin = made_statements(
            f"if {RUNTIME}.live:\n {name} = {RUNTIME}.iterate({number}, ITER)",
            node,
            ITER=node.iter,
        )
        self._refuse_calls(node.iter)
        self._refuse_sites(node.orelse)
        (take,) = made_statements(f"TARGET = {item}", node)
        assert isinstance(take, ast.Assign)
        take.targets = [node.target]
        node.body = [guarded([take]), *self._block(node.body, inside)]
        (assigned,) = made_statements(f"{item} = {name}", node)
        assert isinstance(assigned, ast.Assign)
        (node.target,), node.iter = assigned.targets, assigned.value
        return [*begin, node]

    def _if(self, node: ast.If, number: int, around: tuple[int, ...]) -> ast.stmt:
        self._refuse_calls(node.test)
        node.body = [*self._restored(node), *self._block(node.body, (*around, number))]
        if any(self._is_site(each) for each in node.orelse):
            # Of an `else` or `elif` the sites within say themselves whether the way leads there.
            node.orelse = self._block(node.orelse, around)
        elif node.orelse:
            node.orelse = [guarded(node.orelse)]
        node.test = made_expression(
            f"TEST if {RUNTIME}.live else {RUNTIME}.goes({number})", node, TEST=node.test
        )
        return node

    def _restored(self, near: ast.stmt) -> list[ast.stmt]:
        """The statement that gives local names their values; filled when all sites are known."""
        if isinstance(self._body, ast.Module):
            return []
        (statement,) = made_statements(f"if {RUNTIME}.restoring: pass", near)
        assert isinstance(statement, ast.If)
        self._restorations.append((statement, self._defined.copy()))
        return [statement]

    def _fill_restorations(self) -> None:
        sites = [each for each in self._rewritten.sites if each.body == self._name]
        known = frozenset[str]().union(*(each.names for each in sites))
        for statement, defined in self._restorations:
            # What is defined in this body is defined again, after the names that it may need.
            names = sorted(known - {name for each in defined for name in names_of(each)})
            text = "".join(f"if {each} is {RUNTIME}.unset:\n del {each}\n" for each in names)
            targets = ", ".join(names)
            text = f"[{targets}] = {RUNTIME}.values({names!r})\n{text}"
            again = (copy.deepcopy(each) for each in defined)
            statement.body = [*made_statements(text, statement), *again]

    def _refuse_sites(self, statements: list[ast.stmt]) -> None:
        for each in statements:
            if self._is_site(each):
                raise self._error(
                    each,
                    "training in an `else` of a loop or in an `except`, `else` or `finally` cannot "
                    "be entered again; move it out of there",
                )

    def _refuse_calls(self, node: ast.AST) -> None:
        if isinstance(node, DEFINITIONS):
            return
        for call in self._matching.training.calls(node):
            raise self._error(
                call,
                f"`{ast.unparse(call.func)}(...)` trains, and is called where the program cannot "
                "be entered again; call it in a statement of its own",
            )

    def _error(self, node: ast.AST, sentence: str) -> AutosaveError:
        return AutosaveError(f"{self._file}, line {getattr(node, 'lineno', 1)}: {sentence}")
