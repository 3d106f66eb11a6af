"""The statements that give the local names of a frame their values on the way back."""

from __future__ import annotations

import ast
import copy
from typing import TYPE_CHECKING

from outlast.autosave.program.live import bound_names
from outlast.autosave.program.scopes import nodes_here
from outlast.autosave.program.templates import made_statements

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Restorations:
    """Those of one body; they are filled when all its sites, and so all their names, are known.

    Args:
        runtime: The expression that the body asks.
    """

    def __init__(self, runtime: str) -> None:
        self._runtime = runtime
        self._waiting: list[tuple[ast.If, frozenset[str] | None]] = []

    def entered(self, near: ast.stmt) -> ast.stmt:
        """The statement at the beginning of a site, on the line of `near`."""
        return self._made(f"if {self._runtime}.restoring: pass", near, None)

    def returned(self, node: ast.stmt, live: frozenset[str]) -> ast.stmt:
        """The one behind `node`, for a frame that set-up had brought into a call: it is back.

        Args:
            node: The statement with the call.
            live: Names at its site; what the statement itself binds stays.
        """
        targets = [
            item
            for item in nodes_here(node)
            if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)
        ]
        text = f"if {self._runtime}.late and {self._runtime}.returns(): pass"
        return self._made(text, node, live - bound_names(targets))

    def fill(self, names: frozenset[str], defined: Mapping[str, ast.stmt]) -> None:
        """Fill all statements.

        Args:
            names: The local names at all sites of the body.
            defined: Names of functions, classes and modules of the body, and their definitions in
                the order of the program.
        """
        for statement, chosen in self._waiting:
            _fill(statement, sorted(names if chosen is None else chosen), defined, self._runtime)

    def _made(self, text: str, near: ast.stmt, names: frozenset[str] | None) -> ast.stmt:
        (statement,) = made_statements(text, near)
        assert isinstance(statement, ast.If)
        self._waiting.append((statement, names))
        return statement


def _fill(
    statement: ast.If, names: Sequence[str], defined: Mapping[str, ast.stmt], runtime: str
) -> None:
    text = f"[{', '.join(names)}] = {runtime}.values({list(names)!r})\n"
    text += "".join(
        f"if {name} is {runtime}.unset:\n del {name}\n" for name in names if name not in defined
    )
    statement.body = made_statements(text, statement)
    # What is defined may need what was defined before it.
    for name, definition in defined.items():
        if name in names:
            (choice,) = made_statements(
                f"if {name} is {runtime}.anew: pass\n"
                f"elif {name} is {runtime}.unset:\n del {name}\n",
                statement,
            )
            assert isinstance(choice, ast.If)
            choice.body = [copy.deepcopy(definition)]
            statement.body.append(choice)
