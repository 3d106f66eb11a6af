"""Names that get their values from the environment: ports, numbers of jobs, scratch folders.

In another start of the program they may have other values, and those count. Which names they are is
read from the text: what an expression is assigned to that reads the environment, or such a name.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from outlast.autosave.program.source import SourceFile

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


def _reads(expression: ast.AST | None, names: set[str]) -> bool:
    return expression is not None and any(
        (isinstance(node, ast.Name) and node.id in names)
        or (isinstance(node, ast.Attribute) and node.attr in names)
        for node in ast.walk(expression)
    )


def _given(node: ast.AST, names: set[str], functions: dict[str, ast.FunctionDef]) -> Iterator[str]:
    """Names to which a node gives a value that comes from others."""
    match node:
        case ast.Assign(targets=targets, value=value) if _reads(value, names):
            yield from (name for target in targets for name in _targets(target))
        case (
            ast.AnnAssign(target=target, value=value)
            | ast.AugAssign(target=target, value=value)
            | ast.NamedExpr(target=target, value=value)
            | ast.For(target=target, iter=value)
        ) if _reads(value, names):
            yield from _targets(target)
        case ast.withitem(context_expr=value, optional_vars=ast.expr() as target) if _reads(
            value, names
        ):
            yield from _targets(target)
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                if isinstance(key, ast.Constant) and _reads(value, names):
                    yield str(key.value)
        case ast.FunctionDef(name=name, args=arguments):
            if any(
                isinstance(item, ast.Return) and _reads(item.value, names)
                for item in ast.walk(node)
            ):
                yield name
            places = [*arguments.posonlyargs, *arguments.args]
            defaults = [*zip(places[::-1], arguments.defaults[::-1], strict=False)]
            for place, default in [
                *defaults,
                *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
            ]:
                if _reads(default, names):
                    yield place.arg
        case ast.Call():
            yield from _passed(node, names, functions)


def _passed(
    call: ast.Call, names: set[str], functions: dict[str, ast.FunctionDef]
) -> Iterator[str]:
    given = [
        keyword.arg for keyword in call.keywords if keyword.arg and _reads(keyword.value, names)
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
        if isinstance(key, ast.Constant) and _reads(call.args[-1], names):
            yield str(key.value)
    function = functions.get(name or "")
    if function is not None:
        places = [*function.args.posonlyargs, *function.args.args]
        if places and places[0].arg in ("self", "cls"):
            places = places[1:]
        for place, argument in zip(places, call.args, strict=False):
            if _reads(argument, names):
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
