"""What is found in a program and what is made of it, for people to read."""

from __future__ import annotations

import ast
import copy
import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.autosave.program.sites import RUNTIME

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outlast.autosave.program.sites import Rewritten
    from outlast.autosave.program.source import Loop, SourceFile
    from outlast.autosave.program.training import Training


@dataclass(frozen=True)
class FoundLoop:
    """A loop on the way to training.

    Attributes:
        file: Its file, as people are told of it.
        line: Its line there.
        header: Its first line, as text.
        is_step: Whether its iterations are the steps.
        reason: Why it is listed.
    """

    file: str
    line: int
    header: str
    is_step: bool
    reason: str


@dataclass(frozen=True)
class Explanation:
    """What `outlast run` finds in a program.

    Attributes:
        files: Files of the program, as people are told of them.
        loops: Loops on the way to training, in the order of files and lines.
        not_resumable: Why some generator functions cannot be saved while they are under way.
        differences: Unified diff of each file that is rewritten.
    """

    files: tuple[str, ...]
    loops: tuple[FoundLoop, ...]
    not_resumable: tuple[str, ...]
    differences: tuple[str, ...]

    def head(self) -> str:
        """All but the differences, in lines."""
        lines = [f"files: {', '.join(self.files)}", "loops:"]
        for loop in self.loops:
            kind = "step loop" if loop.is_step else "loop"
            lines.append(f"  {loop.file}:{loop.line}  {kind}  `{loop.header}`  ({loop.reason})")
        if self.not_resumable:
            lines.append("generators that cannot be saved while they are under way:")
            lines += [f"  {name}" for name in self.not_resumable]
        return "\n".join(lines)


def explain(files: list[SourceFile], training: Training, rewritten: list[Rewritten]) -> Explanation:
    """What was found in a program, and what it has become.

    Both sides of a diff are printed from syntax trees, so that only real changes show; the
    statements that give local names their values on the way back are left out.
    """
    loops = [
        _found(source, loop, training)
        for source in files
        for loop in ast.walk(source.tree)
        if isinstance(loop, ast.For | ast.While) and loop in training.loops
    ]
    return Explanation(
        tuple(file.name() for file in files),
        tuple(sorted(loops, key=lambda loop: (loop.file, loop.line))),
        tuple(why for item in rewritten for why in item.plain.values()),
        tuple(_difference(item) for item in rewritten if item.sites),
    )


def _found(source: SourceFile, loop: Loop, training: Training) -> FoundLoop:
    is_step = loop in training.step_loops
    reason = training.reasons.get(loop, "") if is_step else "leads to a step loop"
    if isinstance(loop, ast.For):
        header = f"for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)}:"
    else:
        header = f"while {ast.unparse(loop.test)}:"
    return FoundLoop(source.name(), loop.lineno, header, is_step, reason)


def _difference(rewritten: Rewritten) -> str:
    name = rewritten.source.name()
    tree = _WithoutRestorations().visit(copy.deepcopy(rewritten.tree))
    before, after = (_lines(item) for item in (rewritten.source.tree, tree))
    return "".join(difflib.unified_diff(before, after, name, f"{name} (rewritten)"))


def _lines(tree: ast.Module) -> list[str]:
    return [f"{line}\n" for line in ast.unparse(tree).splitlines()]


class _WithoutRestorations(ast.NodeTransformer):
    """Takes the long lists of local names out."""

    def visit_If(self, node: ast.If) -> ast.AST:
        parts = {item.attr for item in ast.walk(node.test) if isinstance(item, ast.Attribute)}
        if parts & {"restoring", "late"} and RUNTIME in _names(ast.walk(node.test)):
            node.body = [ast.Expr(ast.Constant(...))]
        return self.generic_visit(node)


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    return {node.id for node in nodes if isinstance(node, ast.Name)}
