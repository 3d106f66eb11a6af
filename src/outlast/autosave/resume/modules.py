"""The modules of a program: its files, and others of its folder that it finds while it runs."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from typing import TYPE_CHECKING, Any

from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from pathlib import Path

_LIBRARY = sysconfig.get_path("stdlib")
"""Where Python's own modules lie."""

_INSTALLED = ("site-packages", "dist-packages")
_ITSELF = "outlast"
_COMPILED = ("__compiled_fn_", "__resume_at_", "__builtins_dict__", "__import_")
"""Names that torch.compile gives to what it puts into a program's modules begin so."""


class ProgramModules:
    """Looks at the modules of a program.

    Args:
        files: The files whose text was read, the script first.
    """

    def __init__(self, files: list[Path]) -> None:
        self._files = frozenset(map(str, files))
        self._folder = f"{files[0].parent}{os.sep}"
        self._search = frozenset(map(os.path.realpath, sys.path))
        self._editable = [name for name in _editable() if name.startswith(self._folder)]
        self._known: dict[str, bool] = {}

    def globals(self) -> dict[str, dict[str, Any]]:
        """Name of each module of the program to its global names and their values."""
        found = {}
        for name, module in list(sys.modules.items()):
            if self.is_own(name, module):
                own = vars(module)
                found[name] = {name: own[name] for name in own_names(own)}
        return found

    def is_own(self, name: str, module: Any) -> bool:
        """Whether a module is the program's."""
        file = getattr(module, "__file__", None)
        if not isinstance(file, str):
            return False
        if file not in self._known:
            # Of thousands of modules, the file system is asked only of those not installed.
            self._known[file] = file in self._files or (
                not file.startswith(_LIBRARY)
                and not any(item in file for item in _INSTALLED)
                and name.partition(".")[0] != _ITSELF
                and file.endswith(".py")
                and self._is_found(os.path.realpath(file))
            )
        return self._known[file]

    def _is_found(self, file: str) -> bool:
        """Whether a file belongs to the program: it lies beside it, or where it has searched."""
        if file in self._files:
            return True
        if any(file == item or file.startswith(f"{item}{os.sep}") for item in self._editable):
            return False
        if file.startswith(self._folder):
            return True
        added = frozenset(map(os.path.realpath, sys.path)) - self._search
        return any(file.startswith(f"{item}{os.sep}") for item in added)


def _editable() -> list[str]:
    """Folders and files where installed packages lie that are being worked on."""
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    found = [part for part in sys.path if part and part not in own]
    for name, module in list(sys.modules.items()):
        # What setuptools installs to find them.
        if name.startswith("__editable__"):
            found += map(str, getattr(module, "MAPPING", {}).values())
    return [os.path.realpath(name) for name in found]


def own_names(values: dict[str, Any]) -> list[str]:
    """The global names of a module that are the program's."""
    return [
        name
        for name in values
        if not (name.startswith("__") and name.endswith("__")) or name[:10] == "__outlast_"
        if name != "__outlast__"
        if not name.startswith(_COMPILED)
    ]


def globals_of(module: str) -> dict[str, Any]:
    """The global names of a module, which is imported if set-up has not done so.

    Raises:
        AutosaveError: When it cannot be found by its name.
    """
    try:
        return vars(importlib.import_module(module))
    except ImportError as error:
        raise AutosaveError(
            f"the module `{module}` was there when the program was saved, and cannot be imported "
            f"now ({error}); import it before the training loop, so that set-up does it"
        ) from None
