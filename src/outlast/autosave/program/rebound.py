"""Names that a statement may find with another value when the call that it makes is back.

Nobody but a frame itself gives its local names their values, unless a function within it declares
them ``nonlocal``. A global name gets another one where a function declares it ``global``, and from
other files as an attribute of the module.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, NamedTuple

from outlast.autosave.program.scopes import local_names, names_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outlast.autosave.program.source import Body, SourceFile

_Declaration = ast.Global | ast.Nonlocal


class Others(NamedTuple):
    """Names of a body that others may give a value.

    Attributes:
        rebound: Those that may get another one while a statement of the body calls something.
        imported: Those that an import of the file gives theirs.
    """

    rebound: frozenset[str]
    imported: frozenset[str]


class Rebound:
    """Looks for them in one file.

    Args:
        tree: Of the file.
        elsewhere: Names that any file of the program sets in modules, from `set_in_modules`.
    """

    def __init__(self, tree: ast.Module, elsewhere: frozenset[str]) -> None:
        self._outside = _declared(tree, (ast.Global, ast.Nonlocal)) | elsewhere
        self._imported = _imported(tree)

    def others(self, body: Body) -> Others:
        """The names of a body of the file."""
        if isinstance(body, ast.Module):
            return Others(self._outside, self._imported)
        own = local_names(body)
        rebound = (self._outside - own) | _declared(body, (ast.Nonlocal,))
        # A local name is what the body makes it, whatever another one imports under that name.
        return Others(rebound, self._imported - (own - _imported(body)))


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
