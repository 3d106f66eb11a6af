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
        each.name: each.annotation
        for each in given
        if isinstance(each.annotation, type) and is_dataclass(each.annotation)
    }
    shared = {name: _parameters(kind) for name, kind in groups.items()}
    own = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for each in given
        if each.name not in groups
    ]

    @functools.wraps(command)
    def called(**values: Any) -> None:
        made = {
            name: kind(**{each.name: values.pop(each.name) for each in shared[name]})
            for name, kind in groups.items()
        }
        command(**made, **values)

    every = [*(each for options in shared.values() for each in options), *own]
    called.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in every}
    return called


def _parameters(kind: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if each.default is MISSING else each.default,
            annotation=hints[each.name],
        )
        for each in fields(kind)
    ]
