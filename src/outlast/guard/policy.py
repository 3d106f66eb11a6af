"""What a guard checks: levels, and exceptions by module name."""

from __future__ import annotations

import difflib
import fnmatch
from dataclasses import dataclass, field
from typing import Literal

from outlast.errors import GuardError

Level = Literal["off", "light", "linear", "full"]
LEVELS: tuple[Level, ...] = ("off", "light", "linear", "full")
"""Each covers what the one before covers, and more.

light: optimizer state and parameters at rest, a slice per step; norms of gradients and updates.
linear: every linear layer and embedding, forward and backward; gradient reductions.
full: attention, normalisation and loss as well, and the whole optimizer every step.
"""


@dataclass(frozen=True)
class Policy:
    """What to check, and what to do with findings.

    Attributes:
        level: Of all modules.
        modules: Name patterns (as in a shell: ``*.mlp.*``) and the level of the modules that match;
            the last that matches counts. A module's level is never above `level`'s reach for what
            is not a module (optimizer, collectives).
        correct: Compute flagged numbers again and put the right ones in place. Without it
            findings are counted only, as ``detected``, and stop nothing.
        persistent: What is done when numbers stay wrong: ``raise`` WrongNumbersError on every rank,
            or ``drop`` the gradient of the ranks concerned and rescale the others'.
        seed: Of the check vectors.
        light_budget: Share of a step's time that level ``light`` may take.
    """

    level: Level = "linear"
    modules: dict[str, Level] = field(default_factory=dict)
    correct: bool = True
    persistent: Literal["raise", "drop"] = "raise"
    seed: int = 0
    light_budget: float = 0.0005

    def __post_init__(self) -> None:
        for name, level in (("policy", self.level), *self.modules.items()):
            if level not in LEVELS:
                near = difflib.get_close_matches(str(level), LEVELS, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise GuardError(f"{name} = {level!r} is not one of {', '.join(LEVELS)}{hint}")
        if self.persistent not in ("raise", "drop"):
            raise GuardError(f"persistent = {self.persistent!r} is not raise or drop")
        if not 0.0 < self.light_budget <= 1.0:
            raise GuardError(f"light_budget = {self.light_budget} is not above 0 and at most 1")

    def level_of(self, module: str) -> Level:
        """The level of the module of this name."""
        found = self.level
        for pattern, level in self.modules.items():
            if fnmatch.fnmatchcase(module, pattern):
                found = level
        return found

    def reaches(self, level: Level, module: str | None = None) -> bool:
        """Whether checks of `level` are made (in the module of this name)."""
        own = self.level if module is None else self.level_of(module)
        return LEVELS.index(own) >= LEVELS.index(level)


def policy_of(given: Policy | Level) -> Policy:
    """A policy from itself or from the name of a level."""
    return given if isinstance(given, Policy) else Policy(level=given)
