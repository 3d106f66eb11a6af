"""Scopes and names: the names of a body, the live ones, and those given a value elsewhere.

Names that get their values from the environment may have others in another start of the program,
and those count. They are found in the text: names assigned from an expression that reads the
environment, or such a name.

A name is live at a point when some path from there reads it before it is bound anew. What is dead
need not be saved: the last batch, its loss and the graph of its backward pass. The analysis runs
backwards over the statements; where control flow is hard to tell (handlers, match), it keeps more.

Nobody but a frame itself gives its local names their values, unless a function within it declares
them ``nonlocal``. A global name gets another one where a function declares it ``global``, and from
other files as an attribute of the module.
"""

from __future__ import annotations

import ast
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from outlast.autosave.program.source import Body, SourceFile


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
"""What has names of its own."""


def nodes_outside_scopes(statements: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of `statements`; of a scope within, only the node that it begins with."""
    waiting = list(statements)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, SCOPES):
            waiting.extend(ast.iter_child_nodes(node))


def nodes_here(node: ast.AST) -> list[ast.AST]:
    """Nodes below `node` that are executed in the same frame."""
    return list(nodes_outside_scopes(ast.iter_child_nodes(node)))


def walk_here(node: ast.AST) -> Iterator[ast.AST]:
    """As `ast.walk`, without what is executed as a frame of its own; class bodies included."""
    frames = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    waiting = deque([node])
    while waiting:
        node = waiting.popleft()
        yield node
        children = ast.iter_child_nodes(node)
        waiting.extend(child for child in children if not isinstance(child, frames))


def local_names(body: Body) -> frozenset[str]:
    """Names bound in a body."""
    return frozenset(_bindings(body))


def defined_names(body: Body) -> dict[str, ast.stmt]:
    """Names that a definition or import binds, and nothing else in the body does."""
    bindings = _bindings(body)
    found = [node for node in nodes_here(body) if isinstance(node, DEFINITIONS)]
    found.sort(key=lambda node: (node.lineno, node.col_offset))
    return {name: node for node in found for name in names_of(node) if bindings[name] == 1}


def names_of(node: ast.stmt) -> list[str]:
    """Names that a definition or import binds."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(name.asname or name.name).split(".")[0] for name in node.names]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    return []


def _bindings(body: Body) -> Counter[str]:
    """Names bound in a body, and at how many places."""
    bound = Counter(name for name, _ in _bound(body))
    nodes = nodes_here(body)
    outer = {
        name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names
    }
    # Python deletes the name of a handled error at the end of its handler.
    handled = {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    for name in outer | {name for name in handled if not bound[name]} | {"*"}:
        bound.pop(name, None)
    return bound


def _bound(body: Body) -> Iterator[tuple[str, ast.arg | ast.expr | ast.pattern | ast.stmt]]:
    """Each name that a body binds or deletes, and where."""
    if not isinstance(body, ast.Module):
        given = body.args
        packed = [item for item in (given.vararg, given.kwarg) if item]
        arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, *packed]
        yield from ((argument.arg, argument) for argument in arguments)
    nodes = nodes_here(body)
    # Variables of a comprehension are those of a frame of its own.
    others = {
        name
        for node in nodes
        if isinstance(node, ast.comprehension)
        for name in ast.walk(node.target)
    }
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) if node not in others:
                yield name, node
            case (
                ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
                | ast.MatchMapping(rest=str(name))
            ):
                yield name, node
            case ast.stmt():
                yield from ((name, node) for name in names_of(node))


def code_names(tree: ast.Module, body: Body) -> tuple[str, int]:
    """Qualified name and first line, as the code object of `body` will have them."""
    if isinstance(body, ast.Module):
        return "<module>", 1

    def search(node: ast.AST, prefix: str) -> str | None:
        for child in ast.iter_child_nodes(node):
            if child is body:
                return prefix + body.name
            inner = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = f"{prefix}{child.name}.<locals>."
            elif isinstance(child, ast.ClassDef):
                inner = f"{prefix}{child.name}."
            if (found := search(child, inner)) is not None:
                return found
        return None

    first = body.decorator_list[0].lineno if body.decorator_list else body.lineno
    name = search(tree, "")
    assert name is not None
    return name, first


def is_text(statement: ast.stmt) -> bool:
    """Return True if a statement is a text or another constant, as a docstring is."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def binding_line(body: Body, name: str, before: int) -> int | None:
    """The line that gives a local name the value it has at another line.

    Args:
        body: Where the name is local, or a module whose global it is.
        name: The name.
        before: The line where the value is seen: the last binding above it counts, else, as in a
            loop, the last of all.

    Returns:
        Its number in the file; None where `body` does not bind the name.
    """
    lines = list(bindings_of(body, name))
    above = [line for line in lines if line <= before]
    return max(above or lines, default=None)


def attribute_line(tree: ast.Module, name: str) -> int | None:
    """The first line of a file that sets an attribute of this name on any object."""
    lines = (
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store)
    )
    return min(lines, default=None)


def bindings_of(body: Body, name: str) -> Iterator[int]:
    """The lines in which a body binds a name, once for each binding."""
    for bound, node in _bound(body):
        if bound == name and not isinstance(getattr(node, "ctx", None), ast.Del):
            yield node.lineno


Names = frozenset[str]


_NOTHING: Names = frozenset()


@dataclass
class Liveness:
    """Live names at each statement of a body.

    Attributes:
        at: Statement to the names live before it.
        head: Loop to the names live before its next iteration.
        after: Statement to the names live behind it.
        always: Names that are read at times that cannot be told: by functions defined here.
    """

    at: dict[ast.stmt, Names] = field(default_factory=dict)
    head: dict[ast.stmt, Names] = field(default_factory=dict)
    after: dict[ast.stmt, Names] = field(default_factory=dict)
    always: Names = _NOTHING


class _Jumps(NamedTuple):
    """Names live where `break`, `continue`, `return` and an exception lead."""

    on_break: Names = _NOTHING
    on_continue: Names = _NOTHING
    on_return: Names = _NOTHING
    on_error: Names = _NOTHING


def liveness(body: Body) -> Liveness:
    """Analyse one body; names of enclosing scopes are listed like its own."""
    found = Liveness()
    inner: set[str] = set()
    for node in nodes_outside_scopes(body.body):
        if isinstance(node, SCOPES):
            inner |= {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
    if any(_reads_all(node, body) for node in ast.walk(body)):
        inner |= {node.id for node in ast.walk(body) if isinstance(node, ast.Name)}
    found.always = frozenset(inner)
    _block(body.body, _NOTHING, _Jumps(), found)
    return found


def _reads_all(node: ast.AST, body: Body) -> bool:
    """Return True if names are read that the text does not show."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    anywhere = node.func.id in ("eval", "exec") or (
        isinstance(body, ast.Module) and node.func.id == "globals"
    )
    return anywhere or (node.func.id in ("locals", "vars", "dir") and not node.args)


def _block(statements: list[ast.stmt], after: Names, jumps: _Jumps, found: Liveness) -> Names:
    for statement in reversed(statements):
        found.after[statement] = found.after.get(statement, _NOTHING) | after
        after = _statement(statement, after, jumps, found) | jumps.on_error
        found.at[statement] = found.at.get(statement, _NOTHING) | after
    return after


def _statement(  # noqa: PLR0912 (one case for each kind of statement)
    node: ast.stmt, after: Names, jumps: _Jumps, found: Liveness
) -> Names:
    match node:
        case ast.For() | ast.AsyncFor() | ast.While():
            return _loop(node, after, jumps, found)
        case ast.If():
            inside = _block(node.body, after, jumps, found)
            inside |= _block(node.orelse, after, jumps, found)
            return read_names(node.test) | (inside - _surely_bound(node.test))
        case ast.With() | ast.AsyncWith():
            targets = [item.optional_vars for item in node.items if item.optional_vars]
            # What was entered is used at the end, where it is left.
            held = bound_names(targets)
            leaving = _Jumps(*(jump | held for jump in jumps))
            # It may hide an error, and the program continues behind it.
            leaving = leaving._replace(on_error=leaving.on_error | after)
            inside = _block(node.body, after | held, leaving, found)
            inside = (inside - bound_names(targets)) | read_names(*targets)
            return inside | read_names(*(item.context_expr for item in node.items))
        case ast.Try() | ast.TryStar():
            return _try(node, after, jumps, found)
        case ast.Match():
            branches = [_block(case.body, after, jumps, found) for case in node.cases]
            return read_names(node).union(after, *branches)
        case ast.Return():
            return read_names(node) | jumps.on_return
        case ast.Raise():
            return read_names(node)
        case ast.Break():
            return jumps.on_break
        case ast.Continue():
            return jumps.on_continue
        case ast.Assign():
            return (after - bound_names(node.targets)) | read_names(node.value, *node.targets)
        case ast.AnnAssign() if node.value is not None:
            return (after - bound_names([node.target])) | read_names(node.value, node.target)
        case ast.AugAssign():
            # The target is read, too, although its context says "store".
            own = {node.target.id} if isinstance(node.target, ast.Name) else set()
            return after | own | read_names(node.target, node.value)
        case _ if isinstance(node, DEFINITIONS):
            return (after - {*names_of(node)}) | read_names(node)
        case ast.Delete():
            return after | {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
    return after | read_names(node)


def _loop(
    node: ast.For | ast.AsyncFor | ast.While, after: Names, jumps: _Jumps, found: Liveness
) -> Names:
    ended = _block(node.orelse, after, jumps, found)
    head = ended
    while True:
        inside = _Jumps(after, head, jumps.on_return, jumps.on_error)
        body = _block(node.body, head, inside, found)
        if isinstance(node, ast.While):
            again = read_names(node.test) | ((ended | body) - _surely_bound(node.test))
        else:
            again = ended | (body - bound_names([node.target])) | read_names(node.target)
        if again <= head:
            break
        head |= again
    found.head[node] = found.head.get(node, _NOTHING) | head
    return head if isinstance(node, ast.While) else head | read_names(node.iter)


def _try(node: ast.Try | ast.TryStar, after: Names, jumps: _Jumps, found: Liveness) -> Names:
    last = _block(node.finalbody, after, jumps, found) if node.finalbody else after
    final = last if node.finalbody else _NOTHING
    through = _Jumps(*(jump | final for jump in jumps))
    handlers = _NOTHING.union(
        *(
            read_names(handler.type) | _block(handler.body, last, through, found)
            for handler in node.handlers
        )
    )
    inside = through._replace(on_error=through.on_error | handlers)
    otherwise = _block(node.orelse, last, through, found)
    return _block(node.body, otherwise, inside, found) | handlers


def read_names(*nodes: ast.AST | None) -> Names:
    """Names read in expressions; all that a nested scope mentions counts."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, SCOPES):
            found |= {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
        elif node is not None:
            _reads(node, _NOTHING, found)
    return frozenset(found)


def _reads(node: ast.AST, hidden: Names, found: set[str]) -> None:
    """Add the names that `node` reads; a comprehension's own variables are `hidden` in it."""
    if isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Load) and node.id not in hidden:
            found.add(node.id)
        return
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        _reads(node.generators[0].iter, hidden, found)
        hidden |= bound_names(generator.target for generator in node.generators)
    for item in ast.iter_child_nodes(node):
        _reads(item, hidden, found)


def _surely_bound(test: ast.expr) -> Names:
    """Names that ``:=`` binds in a condition, whatever its outcome."""
    found: set[str] = set()
    waiting: list[ast.AST] = [test]
    while waiting:
        match waiting.pop():
            case ast.NamedExpr(target=target, value=value):
                found.add(target.id)
                waiting.append(value)
            case ast.BoolOp(values=[value, *_]) | ast.UnaryOp(operand=value):
                waiting.append(value)
            case ast.Compare(left=left, comparators=[right, *_]):
                waiting += [left, right]
            case ast.Call(func=func, args=args, keywords=keywords):
                waiting += [func, *args, *(keyword.value for keyword in keywords)]
    return frozenset(found)


def bound_names(targets: Iterable[ast.expr]) -> Names:
    """Names that an assignment binds."""
    return frozenset(
        node.id
        for target in targets
        for node in ast.walk(target)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )


_Declaration = ast.Global | ast.Nonlocal


class Others(NamedTuple):
    """Names of a body that others may give a value.

    Attributes:
        rebound: Those that may get another one while a statement of the body calls something.
        imported: Those that an import of the file gives theirs.
    """

    rebound: frozenset[str]
    imported: frozenset[str]


def others_of(tree: ast.Module, elsewhere: frozenset[str], body: Body) -> Others:
    """The names of a body that others may give a value.

    Args:
        tree: Of its file.
        elsewhere: Names that any file of the program sets in modules, from `set_in_modules`.
        body: The body.
    """
    outside = _declared(tree, (ast.Global, ast.Nonlocal)) | elsewhere
    if isinstance(body, ast.Module):
        return Others(outside, _imported(tree))
    own = local_names(body)
    rebound = (outside - own) | _declared(body, (ast.Nonlocal,))
    # A local name is what the body makes it, whatever another one imports under that name.
    return Others(rebound, _imported(tree) - (own - _imported(body)))


def set_in_modules(files: Iterable[SourceFile]) -> frozenset[str]:
    """Names of the attributes that a program sets in what it imports."""
    found: set[str] = set()
    for source in files:
        imported = _imported(source.tree)
        found |= {
            node.attr
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and root_name(node) in imported
        }
    return frozenset(found)


def root_name(node: ast.expr) -> str:
    """`a` of ``a.b.c`` and of ``a``; empty for another expression."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _imported(node: ast.AST) -> frozenset[str]:
    return frozenset(
        name
        for item in ast.walk(node)
        if isinstance(item, ast.Import | ast.ImportFrom)
        for name in names_of(item)
    )


def _declared(node: ast.AST, kinds: tuple[type[_Declaration], ...]) -> frozenset[str]:
    return frozenset(
        name for item in ast.walk(node) if isinstance(item, kinds) for name in item.names
    )


_SOURCES = frozenset({"environ", "environb", "getenv", "gettempdir", "gethostname", "getpid"})


def environment_names(files: Iterable[SourceFile]) -> frozenset[str]:
    """Names of variables, attributes, keys and arguments whose values come from the environment."""
    nodes = [node for file in files for node in ast.walk(file.tree)]
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    functions |= {
        node.name: method
        for node in nodes
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
    }
    found = set(_SOURCES)
    grown = True
    while grown:
        before = len(found)
        for node in nodes:
            found |= set(_given(node, found, functions))
        grown = len(found) > before
    return frozenset(found - _SOURCES)


def _is_read(expression: ast.AST | None, names: set[str]) -> bool:
    return expression is not None and any(
        (isinstance(node, ast.Name) and node.id in names)
        or (isinstance(node, ast.Attribute) and node.attr in names)
        for node in ast.walk(expression)
    )


def _given(node: ast.AST, names: set[str], functions: dict[str, ast.FunctionDef]) -> Iterator[str]:
    """Names to which a node gives a value that comes from others."""
    match node:
        case ast.Assign(targets=targets, value=value) if _is_read(value, names):
            yield from (name for target in targets for name in _targets(target))
        case (
            ast.AnnAssign(target=target, value=value)
            | ast.AugAssign(target=target, value=value)
            | ast.NamedExpr(target=target, value=value)
            | ast.For(target=target, iter=value)
        ) if _is_read(value, names):
            yield from _targets(target)
        case ast.withitem(context_expr=value, optional_vars=ast.expr() as target) if _is_read(
            value, names
        ):
            yield from _targets(target)
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                if isinstance(key, ast.Constant) and _is_read(value, names):
                    yield str(key.value)
        case ast.FunctionDef(name=name, args=arguments):
            if any(
                isinstance(item, ast.Return) and _is_read(item.value, names)
                for item in ast.walk(node)
            ):
                yield name
            places = [*arguments.posonlyargs, *arguments.args]
            defaults = [*zip(places[::-1], arguments.defaults[::-1], strict=False)]
            for place, default in [
                *defaults,
                *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
            ]:
                if _is_read(default, names):
                    yield place.arg
        case ast.Call():
            yield from _passed(node, names, functions)


def _passed(
    call: ast.Call, names: set[str], functions: dict[str, ast.FunctionDef]
) -> Iterator[str]:
    given = [
        keyword.arg for keyword in call.keywords if keyword.arg and _is_read(keyword.value, names)
    ]
    yield from given
    name = call.func.attr if isinstance(call.func, ast.Attribute) else None
    if isinstance(call.func, ast.Name):
        name = call.func.id
    if name == "add_argument" and "default" in given:
        for argument in call.args:
            if isinstance(argument, ast.Constant):
                yield str(argument.value).lstrip("-").replace("-", "_")
    if name in ("setattr", "setdefault", "add") and len(call.args) > 1:
        key = call.args[-2]
        if isinstance(key, ast.Constant) and _is_read(call.args[-1], names):
            yield str(key.value)
    function = functions.get(name or "")
    if function is not None:
        places = [*function.args.posonlyargs, *function.args.args]
        if places and places[0].arg in ("self", "cls"):
            places = places[1:]
        for place, argument in zip(places, call.args, strict=False):
            if _is_read(argument, names):
                yield place.arg


def _targets(target: ast.AST) -> Iterator[str]:
    """Names that an assignment gives values to; of a subscript, the key."""
    match target:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            yield name
        case ast.Subscript(slice=ast.Constant(value=key)):
            yield str(key)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            yield from (name for part in parts for name in _targets(part))
        case ast.Starred(value=part):
            yield from _targets(part)
