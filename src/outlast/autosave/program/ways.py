"""What bodies are entered again for: a step of training, or a `yield`."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Protocol

from outlast.autosave.program.scopes import walk_here
from outlast.autosave.program.sites import GENERATORS, RUNTIME, Kind
from outlast.autosave.program.source import Loop

if TYPE_CHECKING:
    from outlast.autosave.program.training import Training

SIMPLE = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Raise, ast.Assert)
"""Statements that may hold the call, or the `yield`, that the way leads through."""


class Way(Protocol):
    """What a body is entered again for.

    Attributes:
        runtime: The expression that the rewritten body asks.
        trains: Whether it is a step of training; else it is a `yield`.
        what: What stands in the way's statements, in words.
    """

    runtime: str
    trains: bool
    what: str

    def kind(self, node: ast.AST) -> Kind | None:
        """Of a loop or a simple statement; None where no way leads through it."""

    def leading(self, node: ast.AST) -> list[ast.expr]:
        """The expressions in `node`, or `node` itself, through which the way leads."""


class ToTraining:
    """The way to a step loop."""

    runtime = RUNTIME
    trains = True
    what = "a call or loop that trains"

    def __init__(self, training: Training, originals: dict[ast.AST, ast.AST]) -> None:
        self._training = training
        self._originals = originals

    def kind(self, node: ast.AST) -> Kind | None:
        """Of a loop or a simple statement."""
        original = self._originals.get(node)
        if isinstance(original, Loop):
            if original in self._training.step_loops:
                return "step"
            return "loop" if original in self._training.loops else None
        return "call" if isinstance(node, SIMPLE) and self.leading(node) else None

    def leading(self, node: ast.AST) -> list[ast.expr]:
        """The calls that lead to training."""
        return [
            item
            for item in walk_here(node)
            if isinstance(item, ast.Call)
            and isinstance(original := self._originals.get(item), ast.Call)
            and self._training.leads(original)
        ]


class ToYield:
    """The way to where a generator function is suspended."""

    runtime = GENERATORS
    trains = False
    what = "a `yield`"

    def kind(self, node: ast.AST) -> Kind | None:
        """Of a loop or a simple statement."""
        if isinstance(node, Loop) and self.leading(node):
            return "loop"
        return "yield" if isinstance(node, SIMPLE) and self.leading(node) else None

    def leading(self, node: ast.AST) -> list[ast.expr]:
        """The `yield` and `yield from` expressions."""
        return [item for item in walk_here(node) if isinstance(item, ast.Yield | ast.YieldFrom)]
