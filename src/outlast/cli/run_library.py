"""Which library trains a program that has no training loop of its own, by the text of its files."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from outlast.cli.run_handover import LIBRARIES, Library
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from outlast.autosave.program.source import SourceFile

_OTHER_NAME = "pytorch_lightning"
_PACKAGES = {*LIBRARIES, _OTHER_NAME}
_MAKES_ITS_TRAINER = "LightningCLI"
_ASKS = frozenset({"isinstance", "issubclass"})


def library_of(files: Sequence[SourceFile]) -> Library | None:
    """The library that trains a program without a loop of its own.

    It is the one whose trainer the program makes or derives from, and whose training it calls;
    that a library is imported says nothing.

    Raises:
        AutosaveError: For two of them, and for one under another name, which is not followed.
    """
    used = {package for source in files for package in _Uses(source.tree).packages}
    called = {
        node.func.attr
        for source in files
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    if _OTHER_NAME in used and LIBRARIES["lightning"].method in called:
        raise AutosaveError(
            f"{files[0].name()} imports {_OTHER_NAME}, which is not followed; import "
            "lightning.pytorch, the same library, in its place"
        )
    found = dict.fromkeys(
        library
        for package, library in LIBRARIES.items()
        if package in used and library.method in called
    )
    if len(found) > 1:
        raise AutosaveError(
            f"{files[0].name()} has {' and '.join(name.name for name in found)}, and one library "
            "at a time is followed; give each training a script of its own"
        )
    return next(iter(found), None)


class _Uses(ast.NodeVisitor):
    """The packages whose trainers a file makes, derives from, or keeps to make later."""

    def __init__(self, tree: ast.Module) -> None:
        self.packages: set[str] = set()
        self._names: dict[str, str] = {}
        for node in ast.walk(tree):
            self._names.update(_bound(node))
        self.visit(tree)

    def visit_Name(self, node: ast.Name) -> None:
        self._note(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._note(node)
        # What a trainer's class is asked for makes none.
        if self._trainer(node.value) is None:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if not (isinstance(node.func, ast.Name) and node.func.id in _ASKS):
            self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        """Its annotation makes nothing."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for statement in (*node.decorator_list, node.args, *node.body):
            self.visit(statement)

    def _note(self, node: ast.expr) -> None:
        package = self._trainer(node)
        if package is not None:
            self.packages.add(package)

    def _trainer(self, node: ast.expr) -> str | None:
        """The package of the trainer that an expression names."""
        full = self._full(node) or ""
        package, last = full.partition(".")[0], full.rpartition(".")[2]
        is_trainer = last.endswith("Trainer") or last == _MAKES_ITS_TRAINER
        return package if package in _PACKAGES and is_trainer else None

    def _full(self, node: ast.expr) -> str | None:
        """What a dotted name means outside of its file."""
        if isinstance(node, ast.Attribute):
            value = self._full(node.value)
            return value and f"{value}.{node.attr}"
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            return self._names.get(node.id, f"{self._names.get('*', '')}.{node.id}")
        return None


def _bound(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Names that an import of an outer package binds, and what they mean; ``*`` for all others."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            first = alias.name.partition(".")[0]
            yield (alias.asname, alias.name) if alias.asname else (first, first)
    elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
        for alias in node.names:
            if alias.name == "*":
                if node.module.partition(".")[0] in _PACKAGES:
                    yield "*", node.module
            else:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
