"""What two records of the same steps do not have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True)
class Difference:
    """Something that is not the same after a number of steps.

    Attributes:
        step: The first step after which it differs.
        name: Of the tensor, or where the value is.
        expected: Digest or value in the original; empty when it is not there.
        found: In the other.
    """

    step: int
    name: str
    expected: str
    found: str

    def sentence(self) -> str:
        """For people."""
        if not self.expected:
            return f"step {self.step}: {self.name} is there, but should not be"
        if not self.found:
            return f"step {self.step}: {self.name} is missing"
        return f"step {self.step}: {self.name} is {self.found}, should be {self.expected}"


def first_differences(
    expected: Mapping[int, Mapping[str, str]], found: Mapping[int, Mapping[str, str]]
) -> Iterator[Difference]:
    """Each name that differs once, at the first step where it does."""
    told: set[str] = set()
    for step, names in expected.items():
        for difference in differences(step, names, found.get(step, {})):
            if difference.name not in told:
                told.add(difference.name)
                yield difference


def differences(
    step: int, expected: Mapping[str, str], found: Mapping[str, str]
) -> Iterator[Difference]:
    """The names whose digests or values are not the same."""
    for name in dict.fromkeys([*expected, *found]):
        if expected.get(name, "") != found.get(name, ""):
            yield Difference(step, name, expected.get(name, ""), found.get(name, ""))
