"""Options of ours that stand behind a script, and so are the script's."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


def say_options_behind(
    script: Path,
    arguments: Iterable[str],
    own: Sequence[str],
    texts: Sequence[str],
    command: str,
) -> None:
    """Say which arguments of a script look like options of the command that runs it.

    Not where the script's text mentions the option, which it then has, too.

    Args:
        script: The script.
        arguments: Behind it.
        own: Options of the command.
        texts: Of the program.
        command: As it is called, e.g. ``outlast run``.
    """
    given = dict.fromkeys(argument.partition("=")[0] for argument in arguments)
    found = [name for name in given if name in own and not any(name in text for text in texts)]
    if found:
        names = ", ".join(found)
        stands = "stands" if len(found) == 1 else "stand"
        print(
            f"outlast: note: {names} {stands} behind {script} and so is for the script; options of "
            f"{command} go before it: {command} {names} ... {script}",
            file=sys.stderr,
            flush=True,
        )
