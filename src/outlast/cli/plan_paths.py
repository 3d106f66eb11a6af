"""The files that a job names, by their whole paths: a plan of it is written to another folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_PATHS = {
    "model": ("directory",),
    "data": ("train", "validation", "tokenizer"),
    "checkpoint": ("turns", "fast", "mirror", "transfer_plan"),
    "recover": ("memory",),
    "energy": ("tariff", "sources"),
    "staging": ("directory",),
    "log": ("mlflow_uri",),
}
"""Settings of a job that name files or folders.

Left as they are: model.config, which is written anew; run.directory, since what is written is
another run; and slurm's, which are for a shell on other machines.
"""

_PREFIXED = {"sources": "file:", "mlflow_uri": "sqlite:///"}
"""Settings whose values name a file behind this alone."""


def with_whole_paths(tables: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Tables of a job whose relative paths begin where this command was started.

    Args:
        tables: By section.
    """
    found = {section: dict(values) for section, values in tables.items()}
    for section, names in _PATHS.items():
        values = found.get(section, {})
        for name in set(names) & set(values):
            values[name] = _whole(values[name], _PREFIXED.get(name, ""))
    return found


def _whole(value: Any, prefix: str) -> Any:
    if isinstance(value, list):
        return [_whole(item, prefix) for item in value]
    return prefix + whole_path(value[len(prefix) :]) if value.startswith(prefix) else value


def whole_path(text: str) -> str:
    """An absolute path, `~` being the home folder.

    URLs, the byte tokenizer, nothing, and what begins with a variable of the node stay as they are.

    Args:
        text: What a setting says.
    """
    said_otherwise = text in ("", "byte") or "://" in text or text.startswith("$")
    return text if said_otherwise else str(Path(text).expanduser().absolute())
