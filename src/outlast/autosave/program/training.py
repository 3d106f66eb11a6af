"""Step loops of a program, and the loops and calls that lead to them.

A loop trains when its body, or a function of the program that it calls, has a backward pass and an
optimizer's step (or a backward pass alone, where the program never calls ``.step()``). The
outermost loop that does both itself, and not in a loop within or a function that has such a loop,
is the *step loop*: its iterations are the steps, and what lies inside, as micro-batches or the
inner loop of a critic, is a part of a step. Every choice is a correct place to save; the choice
says how fine the steps are.
"""

from __future__ import annotations

import ast
import copy
import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outlast.autosave.program.calls import BACKWARD, STEP, Calls, Contents, called_name
from outlast.autosave.program.scopes import walk_here
from outlast.autosave.program.source import GENERATORS, RUNTIME, Function, Kind, Loop
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from outlast.autosave.program.source import Body, Rewritten, SourceFile


_PACKAGE = "outlast.autosave"


def marked_loops(files: Sequence[SourceFile]) -> list[Loop]:
    """The `for` loops whose iterable is within a call of `outlast.autosave.loop`."""
    found: list[Loop] = []
    for source in files:
        names = _names_of_loop(source.tree)
        found += [
            node
            for node in ast.walk(source.tree)
            if isinstance(node, ast.For)
            and any(
                isinstance(item, ast.Call) and ast.unparse(item.func) in names
                for item in ast.walk(node.iter)
            )
        ]
    return found


def chosen_loops(files: Sequence[SourceFile], chosen: str) -> list[Loop]:
    """The loop at ``FILE:LINE``.

    Raises:
        AutosaveError: When no loop begins there.
    """
    name, _, line = chosen.rpartition(":")
    loops = [
        (source, node)
        for source in files
        for node in ast.walk(source.tree)
        if isinstance(node, Loop)
    ]
    found: list[Loop] = [
        node
        for source, node in loops
        if str(node.lineno) == line
        and name
        and f"/{source.path.as_posix()}".endswith(f"/{name.removeprefix('./').lstrip('/')}")
    ]
    if not found:
        known = ", ".join(f"{source.path.name}:{node.lineno}" for source, node in loops)
        raise AutosaveError(
            f"--loop {chosen}: no `for` or `while` begins there; the program's loops are at "
            f"{known or 'no line at all'}"
        )
    return found[:1]


def _names_of_loop(tree: ast.Module) -> set[str]:
    """Spellings of `outlast.autosave.loop` in a file."""
    names = {f"{_PACKAGE}.loop"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                f"{name.asname}.loop"
                for name in node.names
                if name.name == _PACKAGE and name.asname
            }
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                written = name.asname or name.name
                if f"{node.module}.{name.name}" == _PACKAGE:
                    names.add(f"{written}.loop")
                elif (node.module, name.name) == (_PACKAGE, "loop"):
                    names.add(written)
    return names


_ELSEWHERE = frozenset({"Process", "Thread", "spawn", "start_processes"})
"""What runs a function in another process or thread."""


class NoTrainingLoopError(AutosaveError):
    """Nothing in the program looks like a training loop."""


@dataclass(frozen=True)
class Training:
    """Loops and calls that lead to training.

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
        """Return True if a call leads to training."""
        return not self.carriers.isdisjoint(self.calls.of(call))


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
        step_loops = set(steps)
        for outer in step_loops:
            for inner in ast.walk(outer):
                if inner is not outer and inner in step_loops:
                    raise AutosaveError(
                        f"two training loops conflict: the loop at {self._place(inner)} lies in a "
                        f"step of the loop at {self._place(outer)}, and both are marked; mark one "
                        "of them"
                    )
        carriers = self._carriers(steps)
        for body in self._bodies:
            for call in walk_here(body):
                if (
                    isinstance(call, ast.Call)
                    and called_name(call) in _ELSEWHERE
                    and self._carries(call, carriers)
                ):
                    raise AutosaveError(
                        f"{self._place(call)}: the training loop runs in a process or thread that "
                        "the script starts, and only the script's own is followed; call the "
                        "function directly, and start several processes with torchrun"
                    )
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
        in_order = sorted(steps, key=lambda loop: (str(self._where[loop].path), loop.lineno))
        return dict.fromkeys(in_order, f"each iteration does {what}")

    def _loops(self) -> list[Loop]:
        return [node for body in self._bodies for node in walk_here(body) if isinstance(node, Loop)]

    def _leads_to(
        self, node: ast.AST, loops: frozenset[Loop], carriers: frozenset[Function]
    ) -> bool:
        return any(item in loops or self._carries(item, carriers) for item in walk_here(node))

    def _carries(self, node: ast.AST, carriers: frozenset[Function]) -> bool:
        """Return True for a call that leads to one of the `carriers`."""
        return isinstance(node, ast.Call) and not carriers.isdisjoint(self._calls.of(node))

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
                    if node is not child and (node in training or self._carries(node, carriers))
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
        called = {
            function
            for body in self._bodies
            for call in walk_here(body)
            if isinstance(call, ast.Call)
            for function in self._calls.of(call)
        }
        waiting: list[tuple[Body, bool]] = [
            (body, False) for body in self._bodies if body not in called
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

    def _place(self, node: ast.AST) -> str:
        line = getattr(node, "lineno", 1)
        return f"{self._where[node].name()}, line {line}" if node in self._where else f"line {line}"


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


SIMPLE = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Raise, ast.Assert)
"""Statements that may hold the call, or the `yield`, that the way leads through."""


class ToTraining:
    """The way to a step loop.

    Attributes:
        runtime: The expression that the rewritten body asks.
        trains: Whether it is a step of training; else it is a `yield`.
        what: What stands in the way's statements, in words.
    """

    runtime = RUNTIME
    trains = True
    what = "a call or loop that trains"

    def __init__(self, training: Training, originals: dict[ast.AST, ast.AST]) -> None:
        self._training = training
        self._originals = originals

    def kind(self, node: ast.AST) -> Kind | None:
        """Of a loop or a simple statement; None where no way leads through it."""
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
    """The way to where a generator function is suspended; its attributes as of `ToTraining`."""

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


Way = ToTraining | ToYield
"""Reason to re-enter a body."""


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
    """Findings of `outlast run` in a program.

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
    """Explain the findings in a program, and its rewritten text.

    Both sides of a diff are printed from syntax trees, so that only real changes show; the
    statements that give local names their values while resuming are left out.
    """
    loops = [
        FoundLoop(
            source.name(),
            loop.lineno,
            ast.unparse(loop).partition("\n")[0],
            loop in training.step_loops,
            training.reasons.get(loop, "leads to a step loop"),
        )
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


def _difference(rewritten: Rewritten) -> str:
    name = rewritten.source.name()
    tree = _WithoutRestorations().visit(copy.deepcopy(rewritten.tree))
    before, after = (
        [f"{line}\n" for line in ast.unparse(item).splitlines()]
        for item in (rewritten.source.tree, tree)
    )
    return "".join(difflib.unified_diff(before, after, name, f"{name} (rewritten)"))


class _WithoutRestorations(ast.NodeTransformer):
    """Takes the long lists of local names out."""

    def visit_If(self, node: ast.If) -> ast.AST:
        parts = {item.attr for item in ast.walk(node.test) if isinstance(item, ast.Attribute)}
        names = {item.id for item in ast.walk(node.test) if isinstance(item, ast.Name)}
        if parts & {"restoring", "late"} and RUNTIME in names:
            node.body = [ast.Expr(ast.Constant(...))]
        return self.generic_visit(node)
