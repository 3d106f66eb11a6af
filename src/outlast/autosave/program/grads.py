"""Whether a program reads gradients where no step is done, as when it reports after an epoch.

What becomes of gradients in a loop is learnt from its first iterations. What is done with them
after it is not, and the end of a loop is a place where a program may be saved, too.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from typing import TYPE_CHECKING

from outlast.autosave.program.source import Function

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from outlast.autosave.program.source import SourceFile
    from outlast.autosave.program.training import Training

_USES = ("backward", "zero_grad", "step")

_READERS = ("clip_grad", "grad_norm", "total_norm", "unscale_")
"""Parts of the names of library functions that read gradients."""


def reads_gradients_between_steps(files: Iterable[SourceFile], training: Training) -> bool:
    """Whether gradients are read outside of the step loops, or in a function used there.

    Functions are known by their names alone, and count as used where they are mentioned. A program
    that uses gradients under a condition counts, too: its first steps tell nothing of later ones.
    """
    files = list(files)
    if any(_by_condition(node, training) for source in files for node in ast.walk(source.tree)):
        return True
    functions: defaultdict[str, list[ast.AST]] = defaultdict(list)
    waiting: list[ast.AST] = []
    for source in files:
        waiting.append(source.tree)
        for node in ast.walk(source.tree):
            if isinstance(node, Function):
                functions[node.name].append(node)
    seen: set[str] = set()
    while waiting:
        for node in _between_steps(waiting.pop(), training):
            if _reads(node):
                return True
            name = _mentioned(node)
            if name not in seen:
                seen.add(name)
                waiting.extend(functions.get(name, ()))
    return False


def _by_condition(node: ast.AST, training: Training) -> bool:
    """Whether `node` is a condition within a step, on which what becomes of gradients depends."""
    if not isinstance(node, ast.If | ast.IfExp | ast.While | ast.Match):
        return False
    inner = list(ast.walk(node))
    if any(name in training.step_loops for name in inner):
        return False
    return any(_reads(name) or _uses(name) for name in inner)


def _uses(node: ast.AST) -> bool:
    """Whether `node` may do something with gradients; a variable called `step` is a number."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in _USES
    return isinstance(node, ast.Attribute) and node.attr in _USES


def _between_steps(body: ast.AST, training: Training) -> Iterator[ast.AST]:
    waiting = list(ast.iter_child_nodes(body))
    while waiting:
        node = waiting.pop()
        if node in training.step_loops or isinstance(node, Function):
            continue
        yield node
        waiting.extend(ast.iter_child_nodes(node))


def _mentioned(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def _reads(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and node.attr == "grad":
        # `torch.autograd.grad` is a function that leaves no gradients.
        inner = node.value
        of_module = isinstance(inner, ast.Attribute) and inner.attr == "autograd"
        return isinstance(node.ctx, ast.Load) and not of_module
    name = _mentioned(node)
    return any(part in name for part in _READERS)
