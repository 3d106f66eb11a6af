"""What a running program holds, seen from within a step's boundary."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from outlast.autosave.heap.names import Names
from outlast.autosave.program.sites import RUNTIME
from outlast.autosave.resume.frames import MODULE, Frames, name_of

if TYPE_CHECKING:
    from types import FrameType, ModuleType

    from outlast.autosave.program.sites import Rewritten

_ATOMS = (type(None), bool, int, float, complex, str, bytes)


class ProgramView:
    """The variables of a rewritten program: of its modules, and of the frames that lead here.

    Args:
        files: The program.
    """

    def __init__(self, files: list[Rewritten]) -> None:
        self._frames = Frames(files)
        self._files = {str(file.source.path) for file in files}
        self._live: dict[str, frozenset[str]] = {}
        self._dead: dict[str, frozenset[str]] = {}
        for site in self._frames.sites.values():
            self._live[site.body] = self._live.get(site.body, frozenset()) | site.names
            self._dead[site.body] = self._dead.get(site.body, site.dead) & site.dead

    def variables(self) -> dict[str, Any]:
        """Name to value: `name` of frames, outer ones first, and `module.name` of other modules.

        Without those that are read after no site of their body.
        """
        found: dict[str, Any] = {}
        dead: dict[str, frozenset[str]] = {}
        for frame in self._frames.of(sys._getframe(1)):
            if frame.f_code.co_name == MODULE:
                dead[frame.f_globals["__name__"]] = self._dead.get(
                    name_of(frame.f_code), frozenset()
                )
            for name, item in self._local(frame).items():
                found[_unused(name, found)] = item
        for module_name, module in self._modules():
            for name, variable in vars(module).items():
                if not name.startswith("__") and name not in dead.get(module_name, ()):
                    short = name if module_name == "__main__" else f"{module_name}.{name}"
                    found[_unused(short, found)] = variable
        return found

    def objects(self) -> dict[str, Any]:
        """Path to object, of all that the variables lead to."""
        return dict(Names(self.variables(), [name for name, _ in self._modules()]).objects)

    def plain_values(self, objects: dict[str, Any]) -> dict[str, str]:
        """Name to value, of variables, attributes and items that are numbers and texts."""
        found = {
            name: repr(variable) for name, variable in self.variables().items() if _plain(variable)
        }
        for path, object_ in objects.items():
            if isinstance(object_, dict):
                inner = {f"[{key!r}]": value for key, value in object_.items()}
            elif isinstance(object_, list):
                inner = {f"[{place}]": value for place, value in enumerate(object_)}
            elif hasattr(object_, "__dict__") and not isinstance(object_, type):
                inner = {f".{name}": value for name, value in vars(object_).items()}
            else:
                continue
            found.update({path + end: repr(value) for end, value in inner.items() if _plain(value)})
        return found

    def _modules(self) -> list[tuple[str, ModuleType]]:
        return [
            (name, module)
            for name, module in list(sys.modules.items())
            if getattr(module, "__file__", None) in self._files
        ]

    def _local(self, frame: FrameType) -> dict[str, Any]:
        if frame.f_code.co_name == MODULE:
            return {}
        live = self._live.get(name_of(frame.f_code), frozenset())
        return {
            name: f_name
            for name, f_name in frame.f_locals.items()
            if name in live and not name.startswith(RUNTIME.rstrip("_"))
        }


def _unused(name: str, found: dict[str, Any]) -> str:
    while name in found:
        name += "'"
    return name


def _plain(value: Any) -> bool:
    return isinstance(value, _ATOMS)
