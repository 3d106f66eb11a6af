"""The statements that give the local names of a frame their values on the way back."""

from __future__ import annotations

import ast
import copy
from typing import TYPE_CHECKING

from outlast.autosave.program.templates import made_statements

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def fill_restoration(
    statement: ast.If, names: Sequence[str], defined: Mapping[str, ast.stmt], runtime: str
) -> None:
    """Fill the body of `statement` with what restores `names`.

    Args:
        statement: Asks whether they are to be restored.
        names: The local names.
        defined: Names of functions, classes and modules of the body, and their definitions in the
            order of the program.
        runtime: The expression that gives the values.
    """
    text = f"[{', '.join(names)}] = {runtime}.values({list(names)!r})\n"
    text += "".join(
        f"if {each} is {runtime}.unset:\n del {each}\n" for each in names if each not in defined
    )
    statement.body = made_statements(text, statement)
    # What is defined may need what was defined before it.
    for name, definition in defined.items():
        if name in names:
            (choice,) = made_statements(
                f"if {name} is {runtime}.anew: pass\n"
                f"elif {name} is {runtime}.unset:\n del {name}\n",
                statement,
            )
            assert isinstance(choice, ast.If)
            choice.body = [copy.deepcopy(definition)]
            statement.body.append(choice)
