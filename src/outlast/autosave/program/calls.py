"""Call graph of a program: the functions that a call may reach, as far as the text tells.

Names are followed to functions, classes and imports of the program's own files. Of a method call
the receiver's class is looked for among all that is ever assigned, annotated or passed on under
the receiver's name; when nothing is known of it, every method of that name may be meant, except
where torch's own classes have a method that is called in the same way (``model.train()``).

What becomes of gradients in a loop is learnt from its first iterations. What is done with them
after it is not, and the end of a loop is a place where a program may be saved, too.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from typing import TYPE_CHECKING

from outlast.autosave.program.scopes import nodes_here
from outlast.autosave.program.source import Function

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from outlast.autosave.program.source import SourceFile
    from outlast.autosave.program.training import Training


_OF_TORCH = frozenset({"train", "eval", "step", "update", "backward", "close", "reset", "to"})
"""Methods of torch's and other libraries' objects that programs use for their own classes, too."""


_CALLED = ("__call__", "forward")


Target = Function | ast.ClassDef


def called_name(call: ast.Call) -> str:
    """Last part of the name of the function that is called; empty for another expression."""
    return last_name(call.func)


def last_name(node: ast.AST) -> str:
    """`c` of ``c`` and ``a.b.c``; empty for another expression."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


class Calls:
    """Leads from calls to functions.

    Args:
        files: The program.
    """

    def __init__(self, files: Iterable[SourceFile]) -> None:
        self._functions: dict[str, list[Function]] = defaultdict(list)
        self._methods: dict[str, list[Function]] = defaultdict(list)
        self._classes: dict[str, list[ast.ClassDef]] = defaultdict(list)
        self._aliases: dict[str, set[str]] = defaultdict(set)
        self._values: dict[str, set[Target]] = defaultdict(set)
        self._items: dict[str, set[Function]] = defaultdict(set)
        self._applied: dict[ast.Call, set[Function]] = defaultdict(set)
        self._around: dict[ast.AST, ast.ClassDef] = {}
        trees = [file.tree for file in files]
        for tree in trees:
            self._define(tree, None)
        # Twice, for names that are given to others before they are known themselves.
        for tree in trees * 2:
            self._assign(tree)
        self._known: dict[ast.Call, frozenset[Function]] = {}

    def of(self, call: ast.Call) -> frozenset[Function]:
        """Functions of the program that `call` may run, those among its arguments included."""
        if call not in self._known:
            found = {*self._called(call), *self._applied[call]}
            # A `partial` makes a function of its arguments, and calls none of them.
            if called_name(call) != "partial":
                for argument in [*call.args, *(word.value for word in call.keywords)]:
                    found |= self.named(argument)
            self._known[call] = frozenset(found)
        return self._known[call]

    def named(self, node: ast.expr) -> set[Function]:
        """Functions that an expression without a call names."""
        if isinstance(node, ast.Name):
            found = {
                function for name in self._names(node.id) for function in self._functions[name]
            }
            return found | {value for value in self._values[node.id] if isinstance(value, Function)}
        if isinstance(node, ast.Attribute) and node.attr not in _OF_TORCH:
            return set(self._of_receiver(node, None))
        return set()

    def _define(self, node: ast.AST, around: ast.ClassDef | None) -> None:
        for item in ast.iter_child_nodes(node):
            if isinstance(item, ast.ClassDef):
                self._classes[item.name].append(item)
                self._define(item, item)
            elif isinstance(item, Function):
                if isinstance(node, ast.ClassDef):
                    self._methods[item.name].append(item)
                else:
                    self._functions[item.name].append(item)
                self._define(item, around)
            else:
                if isinstance(item, ast.ImportFrom):
                    for alias in item.names:
                        self._aliases[alias.asname or alias.name].add(alias.name)
                if isinstance(item, ast.Attribute) and around is not None:
                    self._around[item] = around
                self._define(item, around)

    def _assign(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            match node:
                case ast.Assign():
                    for target in node.targets:
                        self._give(target, node.value)
                case ast.AnnAssign() | ast.NamedExpr() if node.value is not None:
                    self._give(node.target, node.value)
                case ast.withitem(optional_vars=ast.expr() as target):
                    self._give(target, node.context_expr)
                case ast.For():
                    # Let the calls of a loop's variables lead to the functions among the loop's
                    # items.
                    source = node.iter
                    if isinstance(source, ast.Call) and called_name(source) in ("items", "values"):
                        source = (
                            source.func.value if isinstance(source.func, ast.Attribute) else source
                        )
                    found = self._functions_in(source) | self._items[last_name(source)]
                    targets = (
                        node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
                    )
                    if found:
                        self._apply(node, frozenset(map(last_name, targets)) - {""}, found)
                case ast.FunctionDef() if node.decorator_list:
                    self._decorate(node)
                case ast.Call():
                    self._pass_on(node)
                case ast.arg(annotation=ast.expr() as annotation):
                    text = ast.unparse(annotation).strip("'\"").split(".")[-1]
                    self._values[node.arg] |= set(self._class_named(text))

    def _pass_on(self, call: ast.Call) -> None:
        """Give the parameters of the program's functions what a call passes them."""
        words = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        for function in set(self._called(call)):
            names = [item.arg for item in (*function.args.posonlyargs, *function.args.args)]
            if names and function in self._methods[function.name]:
                del names[0]
            for name, value in (*zip(names, call.args, strict=False), *words.items()):
                if isinstance(value, ast.Name | ast.Attribute):
                    self._values[name] |= self._value(value)

    def _decorate(self, function: Function) -> None:
        """Let the calls within a function's decorators lead to that function."""
        for decorator in function.decorator_list:
            made: Iterable[Function] = self.named(decorator)
            if isinstance(decorator, ast.Call):
                called = list(self._called(decorator))
                made = [inner for outer in called for inner in _returned_inner(outer)]
            for item in made:
                names = [argument.arg for argument in (*item.args.posonlyargs, *item.args.args)]
                self._apply(item, frozenset(names[:1]), {function})
            for owner in self._class_named(last_name(decorator)):
                for item in self._method(owner, "__init__"):
                    names = [argument.arg for argument in item.args.args][1:2]
                    attributes = frozenset(
                        last_name(target)
                        for node in nodes_here(item)
                        if isinstance(node, ast.Assign) and last_name(node.value) in names
                        for target in node.targets
                        if isinstance(target, ast.Attribute)
                    )
                    self._apply(owner, attributes, {function})

    def _apply(self, place: ast.AST, names: frozenset[str], functions: set[Function]) -> None:
        """Let calls of `names` within `place` lead to `functions`."""
        for call in ast.walk(place):
            if isinstance(call, ast.Call) and last_name(call.func) in names:
                self._applied[call] |= functions

    def _functions_in(self, node: ast.expr) -> set[Function]:
        """The functions of the program that a list or dictionary as it is written holds."""
        if not isinstance(node, ast.List | ast.Tuple | ast.Dict):
            return set()
        parts = node.values if isinstance(node, ast.Dict) else node.elts
        return {
            target
            for part in parts
            for target in (*self._value(part), *self._functions_in(part))
            if isinstance(target, Function)
        }

    def _give(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=False):
                self._give(one, other)
        elif name := last_name(target):
            self._values[name] |= self._value(value)
            self._items[name] |= self._functions_in(value)

    def _value(self, node: ast.expr) -> set[Target]:
        """Classes whose objects, and functions that, an expression may give."""
        if not isinstance(node, ast.Call):
            return {*self.named(node), *(self._values[last_name(node)] if last_name(node) else ())}
        found: set[Target] = {
            klass for name in self._names(called_name(node)) for klass in self._class_named(name)
        }
        if found:
            return found
        for argument in (node, *node.args):
            if isinstance(argument, ast.Call):
                for function in self._called(argument):
                    found |= {
                        target
                        for inner in nodes_here(function)
                        if isinstance(inner, ast.Return) and isinstance(inner.value, ast.Call)
                        for target in self._class_named(called_name(inner.value))
                    }
        # Of `partial(f, ...)`, `torch.compile(f)`, `DDP(Net())`.
        for argument in node.args:
            if isinstance(argument, ast.Call):
                found |= set(self._class_named(called_name(argument)))
            elif last_name(argument):
                found |= {*self.named(argument), *self._values[last_name(argument)]}
        return found

    def _names(self, name: str) -> set[str]:
        return {name, *self._aliases.get(name, ())}

    def _class_named(self, name: str) -> list[ast.ClassDef]:
        return [klass for other in self._names(name) for klass in self._classes.get(other, ())]

    def _called(self, call: ast.Call) -> Iterator[Function]:
        if isinstance(call.func, ast.Name):
            name = call.func.id
            yield from self.named(call.func)
            for def_ in self._class_named(name):
                yield from self._method(def_, "__init__")
            for value in self._values[name]:
                if isinstance(value, ast.ClassDef):
                    for special in _CALLED:
                        yield from self._method(value, special)
        elif isinstance(call.func, ast.Attribute):
            yield from self._of_receiver(call.func, call)
        elif isinstance(call.func, ast.Subscript):
            yield from self._items[last_name(call.func.value)]

    def _of_receiver(self, node: ast.Attribute, call: ast.Call | None) -> Iterator[Function]:
        """Methods and functions that ``receiver.name`` may be."""
        receiver, name = node.value, node.attr
        here = self._around.get(node)
        if here is not None and isinstance(receiver, ast.Name) and receiver.id in ("self", "cls"):
            found = [function for kin in self._family(here) for function in self._method(kin, name)]
            yield from found
            yield from (value for value in self._values[name] if isinstance(value, Function))
            if found:
                return
        elif isinstance(receiver, ast.Call):
            classes = self._class_named(called_name(receiver))
            if here is not None and called_name(receiver) == "super":
                classes = [
                    def_ for base in here.bases for def_ in self._class_named(last_name(base))
                ]
            if classes:
                for klass in classes:
                    yield from self._method(klass, name)
                return
        known = [
            value for value in self._values[last_name(receiver)] if isinstance(value, ast.ClassDef)
        ]
        if known or self._class_named(last_name(receiver)):
            for def_ in [*known, *self._class_named(last_name(receiver))]:
                yield from self._method(def_, name)
            return
        yield from (function for function in self._functions[name])
        for method in self._methods[name]:
            if name not in _OF_TORCH or (call is not None and call.args and _required(method)):
                yield method

    def _family(self, node: ast.ClassDef) -> list[ast.ClassDef]:
        """A class and those that are derived from it."""
        known = (other for others in self._classes.values() for other in others)
        return [
            node,
            *(
                other
                for other in known
                if any(last_name(base) == node.name for base in other.bases)
            ),
        ]

    def _method(
        self, node: ast.ClassDef, name: str, seen: frozenset[str] = frozenset()
    ) -> list[Function]:
        own = [
            statement
            for statement in node.body
            if isinstance(statement, Function) and statement.name == name
        ]
        if own or node.name in seen:
            return own
        return [
            function
            for base in node.bases
            for other in self._class_named(last_name(base))
            for function in self._method(other, name, seen | {node.name})
        ]


def _returned_inner(function: Function) -> list[Function]:
    """The functions defined in a function that it returns."""
    names = {
        node.value.id
        for node in nodes_here(function)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Name)
    }
    return [
        statement
        for statement in function.body
        if isinstance(statement, Function) and statement.name in names
    ]


def _required(method: Function) -> int:
    """Arguments that a method cannot do without, as torch's own of the same names can."""
    arguments = method.args
    return len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults) - 1


BACKWARD, STEP = "backward", "step"


_BACKWARD = frozenset({"backward", "manual_backward"})


_SCHEDULES = ("sched", "warmup", "anneal", "decay", "profil", "prof")
"""Parts of the names of what has a `step`, too, but no parameters."""


class Contents:
    """Occurrences of backward passes and optimizer steps.

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
            before = sum(map(len, self._functions.values()))
            for function in functions:
                self._functions[function] |= self.of(function)
            grown = sum(map(len, self._functions.values())) > before

    def of(self, node: ast.AST, without: frozenset[ast.AST] = frozenset()) -> set[str]:
        """Return the occurrences in `node`, apart from nodes or called functions in `without`."""
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


_USES = ("backward", "zero_grad", "step")


_READERS = ("clip_grad", "grad_norm", "total_norm", "unscale_")
"""Parts of the names of library functions that read gradients."""


def reads_gradients_between_steps(files: Iterable[SourceFile], training: Training) -> bool:
    """Return True if gradients are read outside of the step loops, or in a function used there.

    Functions are known by their names alone, and count as used where they are mentioned. A program
    that uses gradients under a condition counts, too: its first steps tell nothing of later ones.
    """
    conditions = ast.If | ast.IfExp | ast.While | ast.Match
    functions: defaultdict[str, list[ast.AST]] = defaultdict(list)
    waiting: list[ast.AST] = []
    for source in files:
        waiting.append(source.tree)
        for node in ast.walk(source.tree):
            if isinstance(node, Function):
                functions[node.name].append(node)
            if isinstance(node, conditions):
                # A condition within a step on which the fate of gradients depends.
                inner = list(ast.walk(node))
                if training.step_loops.isdisjoint(inner) and any(
                    _reads(part) or _uses(part) for part in inner
                ):
                    return True
    seen: set[str] = set()
    while waiting:
        for node in _between_steps(waiting.pop(), training):
            if _reads(node):
                return True
            name = last_name(node)
            if name not in seen:
                seen.add(name)
                waiting.extend(functions.get(name, ()))
    return False


def _uses(node: ast.AST) -> bool:
    """Return True if `node` may use gradients; a variable called `step` is a number."""
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


def _reads(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and node.attr == "grad":
        # `torch.autograd.grad` is a function that leaves no gradients.
        inner = node.value
        of_module = isinstance(inner, ast.Attribute) and inner.attr == "autograd"
        return isinstance(node.ctx, ast.Load) and not of_module
    name = last_name(node)
    return any(part in name for part in _READERS)
