"""Where a program trains: its step loops, and the loops and calls that lead to them.

A loop trains when its body, or a function of the program that it calls, has a backward pass and an
optimizer's step (or a backward pass alone, where the program never calls ``.step()``). The
outermost loop that does both itself, and not in a loop within or a function that has such a loop,
is the *step loop*: its iterations are the steps, and what lies inside, as micro-batches or the
inner loop of a critic, is a part of a step. Every choice is a correct place to save; the choice
says how fine the steps are.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outlast.autosave.program.calls import Calls, called_name
from outlast.autosave.program.contents import BACKWARD, STEP, Contents
from outlast.autosave.program.marks import chosen_loops, marked_loops
from outlast.autosave.program.scopes import walk_here
from outlast.autosave.program.source import Function, Loop
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from outlast.autosave.program.source import Body, SourceFile

_ELSEWHERE = frozenset({"Process", "Thread", "spawn", "start_processes"})
"""What runs a function in another process or thread."""


class NoTrainingLoopError(AutosaveError):
    """Nothing in the program looks like a training loop."""


@dataclass(frozen=True)
class Training:
    """What leads to training in a program.

    Attributes:
        step_loops: The loops whose iterations are steps.
        loops: These and the loops around them.
        carriers: Functions with such a loop, or that call one that has.
        reasons: Of each step loop, why it is one.
        calls: Leads from calls to functions.
    """

    step_loops: frozenset[Loop]
    loops: frozenset[Loop]
    carriers: frozenset[Function]
    reasons: dict[Loop, str] = field(default_factory=dict)
    calls: Calls = field(default_factory=lambda: Calls([]))

    def leads(self, call: ast.Call) -> bool:
        """Whether a call leads to training."""
        return not self.carriers.isdisjoint(self.calls.of(call))


def find_training(files: Sequence[SourceFile], chosen: str | None = None) -> Training:
    """The loops of the program that train.

    Args:
        files: The program, the script first.
        chosen: ``FILE:LINE`` of the loop whose iterations are the steps; None finds it.

    Raises:
        NoTrainingLoopError: When there is none.
        AutosaveError: When no loop stands at the chosen line, when two loops
            are steps of each other, or when training runs in other processes or threads.
    """
    return _Search(files).found(chosen)


class _Search:
    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self._bodies = [body for source in files for body in source.bodies()]
        self._functions = [body for body in self._bodies if not isinstance(body, ast.Module)]
        self._calls = Calls(files)
        self._contents = Contents(self._functions, self._calls)
        self._where = {
            node: source for source in files for node in ast.walk(source.tree)
            if isinstance(node, Loop | ast.Call)
        }  # fmt: skip

    def found(self, chosen: str | None) -> Training:
        if chosen is not None:
            steps = dict.fromkeys(chosen_loops(self._files, chosen), "it was chosen")
        else:
            steps = dict.fromkeys(
                marked_loops(self._files), "its iterable is in outlast.autosave.loop(...)"
            )
        if not steps:
            steps = self._step_loops()
        self._refuse_nested(steps)
        carriers = self._carriers(steps)
        self._refuse_elsewhere(carriers)
        inside = {inner for loop in steps for inner in ast.walk(loop) if inner is not loop}
        around = {
            loop
            for loop in self._loops()
            if loop in steps or (self._leads_to(loop, frozenset(steps), carriers))
        }
        return Training(frozenset(steps), frozenset(around - inside), carriers, steps, self._calls)

    def _step_loops(self) -> dict[Loop, str]:
        script = self._files[0].name()
        everything = set[str]().union(*(self._contents.of(file.tree) for file in self._files))
        if BACKWARD not in everything:
            raise NoTrainingLoopError(
                f"no training loop was found in {script}: nothing in it or in the modules beside "
                "it calls .backward(); put the iterable of the loop that trains into "
                "outlast.autosave.loop(...), which marks it"
            )
        wanted = frozenset({BACKWARD, STEP}) & everything
        training = frozenset(loop for loop in self._loops() if wanted <= self._contents.of(loop))
        carriers = self._carriers(training)
        steps = {
            loop
            for body in self._bodies
            for loop in self._outermost(body, training, carriers, wanted)
        }
        if not steps:
            raise NoTrainingLoopError(
                f"no training loop was found in {script}: it calls .backward(), but in no `for` or "
                "`while` loop that also calls .step(); put the iterable of the loop that trains "
                "into outlast.autosave.loop(...), which marks it"
            )
        steps -= self._parts_of_steps(steps)
        what = "a backward pass and a step" if len(wanted) > 1 else "a backward pass"
        return dict.fromkeys(sorted(steps, key=self._order), f"each iteration does {what}")

    def _order(self, loop: Loop) -> tuple[str, int]:
        return (str(self._where[loop].path), loop.lineno)

    def _loops(self) -> list[Loop]:
        return [node for body in self._bodies for node in walk_here(body) if isinstance(node, Loop)]

    def _leads_to(
        self, node: ast.AST, loops: frozenset[Loop], carriers: frozenset[Function]
    ) -> bool:
        return any(
            item in loops
            or (isinstance(item, ast.Call) and not carriers.isdisjoint(self._calls.of(item)))
            for item in walk_here(node)
        )

    def _carriers(self, loops: Iterable[Loop]) -> frozenset[Function]:
        """Functions in which one of `loops` is, or that call one in which it is."""
        chosen = frozenset(loops)
        carriers: frozenset[Function] = frozenset()
        while True:
            more = {
                function
                for function in self._functions
                if function not in carriers and self._leads_to(function, chosen, carriers)
            }
            if not more:
                return carriers
            carriers |= more

    def _outermost(
        self,
        node: ast.AST,
        training: frozenset[Loop],
        carriers: frozenset[Function],
        wanted: frozenset[str],
    ) -> Iterator[Loop]:
        """The step loops of a body: the outermost that do a whole step themselves."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function | ast.Lambda):
                continue
            if isinstance(child, Loop) and child in training:
                elsewhere = frozenset(
                    node
                    for node in ast.walk(child)
                    if node is not child
                    and (
                        node in training
                        or (
                            isinstance(node, ast.Call)
                            and not carriers.isdisjoint(self._calls.of(node))
                        )
                    )
                )
                if wanted <= self._contents.of(child, elsewhere):
                    yield child
                    continue
            yield from self._outermost(child, training, carriers, wanted)

    def _parts_of_steps(self, steps: set[Loop]) -> set[Loop]:
        """Step loops in functions that are called in the steps of others only.

        Raises:
            AutosaveError: When such a function is called elsewhere, too.
        """
        inner = {node for loop in steps for node in ast.walk(loop) if node is not loop}
        within: dict[Function, ast.Call] = {}
        outside: dict[Function, ast.AST] = {}
        waiting: list[tuple[Body, bool]] = [
            (body, False) for body in self._bodies if not self._is_called(body)
        ]
        while waiting:
            body, in_step = waiting.pop()
            for call in walk_here(body):
                if not isinstance(call, ast.Call):
                    continue
                for pair in self._calls.of(call):
                    now = in_step or call in inner
                    known: dict[Function, ast.AST] = within if now else outside  # type: ignore[assignment]
                    if pair not in known:
                        known[pair] = call
                        waiting.append((pair, now))
        parts: set[Loop] = set()
        for function, call in within.items():
            loops = {node for node in walk_here(function) if node in steps}
            if loops and function in outside:
                other = next(iter(loops))
                raise AutosaveError(
                    f"two training loops conflict: the loop at {self._place(other)} is a part of "
                    f"a step where {self._place(call)} calls it, and has steps of its own where "
                    f"{self._place(outside[function])} does; say which loop's iterations are the "
                    "steps with --loop FILE:LINE"
                )
            parts |= loops
        return parts

    def _is_called(self, body: Body) -> bool:
        if isinstance(body, ast.Module):
            return False
        if not hasattr(self, "_reached"):
            self._reached = {
                call
                for other in self._bodies
                for node in walk_here(other)
                if isinstance(node, ast.Call)
                for call in self._calls.of(node)
            }
        return body in self._reached

    def _refuse_nested(self, steps: Iterable[Loop]) -> None:
        chosen = set(steps)
        for loop in chosen:
            for inner in ast.walk(loop):
                if inner is not loop and inner in chosen:
                    raise AutosaveError(
                        f"two training loops conflict: the loop at {self._place(inner)} lies in a "
                        f"step of the loop at {self._place(loop)}, and both are marked; mark one "
                        "of them"
                    )

    def _refuse_elsewhere(self, carriers: frozenset[Function]) -> None:
        for body in self._bodies:
            for call in walk_here(body):
                if (
                    isinstance(call, ast.Call)
                    and called_name(call) in _ELSEWHERE
                    and not carriers.isdisjoint(self._calls.of(call))
                ):
                    raise AutosaveError(
                        f"{self._place(call)}: the training loop runs in a process or thread that "
                        "the script starts, and only the script's own is followed; call the "
                        "function directly, and start several processes with torchrun"
                    )

    def _place(self, node: ast.AST) -> str:
        line = getattr(node, "lineno", 1)
        return f"{self._where[node].name()}, line {line}" if node in self._where else f"line {line}"
