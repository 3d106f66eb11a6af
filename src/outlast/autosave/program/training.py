"""Where a program trains: its step loops, and the loops and calls that lead to them.

A loop trains when its body, or a function of the program that it calls, has a backward pass and an
optimizer's step. The outermost loop that does both itself, and not in a loop within or a function
that has such a loop, is the *step loop*: its iterations are the steps, and what lies inside, as
micro-batches or the inner loop of a critic, is a part of a step. Functions are known by their
names alone, so that a method counts whatever object it is called on.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from outlast.autosave.program.source import Body, SourceFile

Loop = ast.For | ast.While
_BACKWARD = frozenset({"backward", "manual_backward"})
_STEP = frozenset({"step"})


@dataclass(frozen=True)
class Training:
    """What leads to training in a program.

    Attributes:
        step_loops: The loops whose iterations are steps.
        loops: These and the loops around them.
        carriers: Names of the functions with such a loop, or that call one that has.
    """

    step_loops: frozenset[Loop]
    loops: frozenset[Loop]
    carriers: frozenset[str]

    def calls(self, node: ast.AST) -> list[ast.Call]:
        """Calls within `node` of functions that lead to training."""
        return [
            each
            for each in _walk_here(node)
            if isinstance(each, ast.Call) and called_name(each) in self.carriers
        ]


def find_training(files: Iterable[SourceFile]) -> Training:
    """The loops of the program that train.

    Raises:
        AutosaveError: When there is none.
    """
    bodies = [body for source in files for body in source.bodies()]
    contents = _Contents(bodies)
    everything = contents.all()
    wanted = frozenset({"backward", "step"}) & everything
    if "backward" not in wanted:
        raise AutosaveError(
            f"no training loop was found in {next(iter(files)).path}: nothing in it or in the "
            "modules beside it calls .backward(); put the loop's iterable into "
            "outlast.autosave.loop(...), which marks it"
        )
    training = [each for each in _loops(bodies) if wanted <= contents.of(each)]
    carriers = _carriers(bodies, training)
    step_loops = {
        each
        for body in bodies
        for each in _outermost_steps(body, frozenset(training), carriers, contents, wanted)
    }
    step_loops -= _within_steps(bodies, step_loops)
    if not step_loops:
        raise AutosaveError(
            f"no training loop was found in {next(iter(files)).path}: it calls .backward(), but "
            "in no `for` or `while` loop that also calls .step(); put the loop's iterable into "
            "outlast.autosave.loop(...), which marks it"
        )
    around = {
        each
        for each in training
        if each in step_loops
        or any(inner in step_loops for inner in ast.walk(each))
        or any(name in carriers for name in called_names(each))
    }
    inside = {inner for loop in step_loops for inner in ast.walk(loop) if inner is not loop}
    return Training(frozenset(step_loops), frozenset(around - inside), carriers)


def called_name(call: ast.Call) -> str:
    """Last part of the name of the function that is called; empty for another expression."""
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def called_names(node: ast.AST) -> Iterator[str]:
    """Names of the functions called in `node`, nested functions included."""
    return (called_name(each) for each in ast.walk(node) if isinstance(each, ast.Call))


class _Contents:
    """Which of the two, a backward pass and a step, happen in a node or in what it calls."""

    def __init__(self, bodies: list[Body]) -> None:
        self._functions: dict[str, set[str]] = defaultdict(set)
        named = [each for each in bodies if not isinstance(each, ast.Module)]
        self._whole = set().union(*(self.of(each) for each in bodies))
        grown = True
        while grown:
            grown = False
            for each in named:
                known = self._functions[each.name]
                found = self.of(each)
                grown = grown or not found <= known
                known |= found

    def all(self) -> set[str]:
        """What happens anywhere."""
        return self._whole

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
        found = set(self._functions.get(name, ()))
        if name in _BACKWARD or (name == "grad" and "autograd" in ast.unparse(call.func)):
            found.add("backward")
        if name in _STEP:
            found.add("step")
        return found


def _loops(bodies: list[Body]) -> list[Loop]:
    return [each for body in bodies for each in _walk_here(body) if isinstance(each, Loop)]


def _walk_here(node: ast.AST) -> Iterator[ast.AST]:
    """As `ast.walk`, without what is executed as a frame of its own."""
    waiting = [node]
    while waiting:
        each = waiting.pop(0)
        yield each
        waiting.extend(
            child
            for child in ast.iter_child_nodes(each)
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        )


def _carriers(bodies: list[Body], training: list[Loop]) -> frozenset[str]:
    chosen = frozenset(training)
    named = [each for each in bodies if not isinstance(each, ast.Module)]
    carriers = {each.name for each in named if any(node in chosen for node in _walk_here(each))}
    grown = True
    while grown:
        more = {
            each.name
            for each in named
            if each.name not in carriers
            and any(
                called_name(call) in carriers
                for call in _walk_here(each)
                if isinstance(call, ast.Call)
            )
        }
        carriers |= more
        grown = bool(more)
    return frozenset(carriers)


def _within_steps(bodies: list[Body], step_loops: set[Loop]) -> set[Loop]:
    """Those in functions that are called in the iterations of others only: parts of a step."""
    inner = {each for loop in step_loops for each in ast.walk(loop)}
    inside, outside = set(), set()
    for body in bodies:
        for each in _walk_here(body):
            if isinstance(each, ast.Call):
                (inside if each in inner else outside).add(called_name(each))
    parts = [
        body
        for body in bodies
        if not isinstance(body, ast.Module) and body.name in inside - outside
    ]
    return {each for body in parts for each in _walk_here(body) if each in step_loops}


def _outermost_steps(
    node: ast.AST,
    training: frozenset[Loop],
    carriers: frozenset[str],
    contents: _Contents,
    wanted: frozenset[str],
) -> Iterator[Loop]:
    """The step loops of a body: the outermost that do a whole step themselves."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if child in training:
            elsewhere = frozenset(
                each
                for each in ast.walk(child)
                if each is not child
                and (
                    each in training
                    or (isinstance(each, ast.Call) and called_name(each) in carriers)
                )
            )
            if wanted <= contents.of(child, elsewhere):
                assert isinstance(child, Loop)
                yield child
                continue
        yield from _outermost_steps(child, training, carriers, contents, wanted)
