"""Small pieces of syntax trees from text, on the lines of a program."""

from __future__ import annotations

import ast


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
