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
"""

from __future__ import annotations

import ast
import copy
from typing import TYPE_CHECKING

from outlast.autosave.program.grads import reads_gradients_between_steps
from outlast.autosave.program.rebound import Rebound, set_in_modules
from outlast.autosave.program.scopes import nodes_here
from outlast.autosave.program.sites import Rewritten
from outlast.autosave.program.source import Function
from outlast.autosave.program.ways import ToTraining, ToYield
from outlast.autosave.program.writer import Writer
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from outlast.autosave.program.source import Body, SourceFile
    from outlast.autosave.program.training import Training


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
        way, rebound = ToTraining(training, originals), Rebound(source.tree, elsewhere)
        bodies: list[Body] = [
            node for node in ast.walk(rewritten.tree) if isinstance(node, ast.Module | Function)
        ]
        # Inner functions first: their definitions are copied when the outer one is rewritten.
        for body in reversed(bodies):
            writer = Writer(rewritten, body, way, number, rebound)
            if writer.leads():
                _refuse_suspended(rewritten, body)
                writer.write()
                rewritten.bodies.add(writer.name)
                number = writer.number
            elif isinstance(body, ast.FunctionDef) and _yields(body):
                number = _rewrite_generator(rewritten, body, number, rebound)
        rewritten.sites.sort(key=lambda site: site.number)
        ast.fix_missing_locations(rewritten.tree)
        done.append(rewritten)
    return done


def _yields(function: Function) -> bool:
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in nodes_here(function))


def _refuse_suspended(rewritten: Rewritten, body: Body) -> None:
    if isinstance(body, ast.AsyncFunctionDef) or (
        isinstance(body, ast.FunctionDef) and _yields(body)
    ):
        raise AutosaveError(
            f"{rewritten.source.name()}, line {body.lineno}: the generator or coroutine "
            f"`{body.name}` trains, and cannot be entered again in the middle; move its training "
            "loop into a plain function"
        )


def _rewrite_generator(
    rewritten: Rewritten, body: ast.FunctionDef, number: int, rebound: Rebound
) -> int:
    """Rewrite a generator function; one that cannot be entered again stays as it is."""
    before = body.body
    body.body = copy.deepcopy(before)
    writer = Writer(rewritten, body, ToYield(), number, rebound)
    try:
        writer.write()
    except AutosaveError as error:
        body.body = before
        rewritten.plain[writer.name] = str(error)
        return number
    rewritten.generators.add(writer.name)
    return writer.number
