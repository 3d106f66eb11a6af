"""Groups of options as dataclasses, which commands of the command line take as arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints


def asks(command: Callable[..., None]) -> Callable[..., None]:
    """A command that takes dataclasses of options, with their fields as its own options.

    So that commands with many options need not each repeat them all, nor list them in one place.
    """
    given = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, type[Any]] = {
        name.name: name.annotation
        for name in given
        if isinstance(name.annotation, type) and is_dataclass(name.annotation)
    }
    shared = {name: _parameters(kind) for name, kind in groups.items()}
    own = [
        name.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name in given
        if name.name not in groups
    ]

    @functools.wraps(command)
    def called(**values: Any) -> None:
        made = {
            name: kind(**{item.name: values.pop(item.name) for item in shared[name]})
            for name, kind in groups.items()
        }
        command(**made, **values)

    every = [*(option for options in shared.values() for option in options), *own]
    called.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    called.__annotations__ = {said.name: said.annotation for said in every}
    return called


def _parameters(kind: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(kind)
    ]
