"""What a step loop tells when it ends: a save that still copies need not wait for its next step."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from outlast.autosave.program.scopes import DEFINITIONS
from outlast.autosave.program.sites import RUNTIME
from outlast.autosave.program.templates import made_statements

if TYPE_CHECKING:
    from outlast.autosave.program.source import Loop


def told(near: ast.stmt) -> list[ast.stmt]:
    """The statement that tells of the end of a loop, on the line of `near`."""
    return made_statements(f"{RUNTIME}.left()", near)


def tell_endings(loop: Loop) -> None:
    """Have a step loop tell that it ends where it has an `else`, or returns from its function.

    What comes behind the loop is reached in all other cases, but for errors.
    """
    if loop.orelse:
        loop.orelse[:0] = told(loop)
    teller = _Teller()
    loop.body = [item for statement in loop.body for item in teller.told(statement)]


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
