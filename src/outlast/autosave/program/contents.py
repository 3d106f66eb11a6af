"""What happens in a part of a program, called functions included: backward passes and steps."""

from __future__ import annotations

import ast
from collections import defaultdict
from typing import TYPE_CHECKING

from outlast.autosave.program.calls import called_name, last_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outlast.autosave.program.calls import Calls
    from outlast.autosave.program.source import Function

BACKWARD, STEP = "backward", "step"
_BACKWARD = frozenset({"backward", "manual_backward"})
_SCHEDULES = ("sched", "warmup", "anneal", "decay", "profil", "prof")
"""Parts of the names of what has a `step`, too, but no parameters."""


class Contents:
    """Which of the two, a backward pass and an optimizer's step, happen where.

    Args:
        functions: All functions of the program.
        calls: Leads from calls to functions.
    """

    def __init__(self, functions: Iterable[Function], calls: Calls) -> None:
        self._calls = calls
        self._functions: dict[Function, set[str]] = defaultdict(set)
        functions = list(functions)
        grown = True
        while grown:
            grown = False
            for function in functions:
                found = self.of(function)
                grown = grown or not found <= self._functions[function]
                self._functions[function] |= found

    def of(self, node: ast.AST, without: frozenset[ast.AST] = frozenset()) -> set[str]:
        """What happens in `node`, apart from what is in nodes or called functions `without`."""
        found: set[str] = set()
        waiting = [node]
        while waiting:
            each = waiting.pop()
            if each in without:
                continue
            if isinstance(each, ast.Call):
                found |= self._call(each)
            waiting.extend(ast.iter_child_nodes(each))
        return found

    def _call(self, call: ast.Call) -> set[str]:
        name = called_name(call)
        found = {what for name in self._calls.of(call) for what in self._functions[name]}
        if name in _BACKWARD or (name == "grad" and "autograd" in ast.unparse(call.func)):
            found.add(BACKWARD)
        if name == "step" and isinstance(call.func, ast.Attribute):
            owner = last_name(call.func.value).lower()
            if not any(part in owner for part in _SCHEDULES):
                found.add(STEP)
        return found
