"""Tables of facts: models, families, frameworks, priors, formulas and published figures."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def facts(name: str) -> dict[str, Any]:
    """Content of a table, by its file's name; lists are lists."""
    return tomllib.loads((files(__name__) / f"{name}.toml").read_text(encoding="utf-8"))
