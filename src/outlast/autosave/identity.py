"""What must be the same in every start of a run: the program's text, its arguments, its ranks."""

from __future__ import annotations

import difflib
import hashlib
import json
import platform
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from outlast.autosave.program.sites import Rewritten

FORMAT = 2
_LINES_SHOWN = 40


@dataclass(frozen=True)
class Identity:
    """A program as it was started.

    Attributes:
        arguments: Of the script.
        world_size: Processes.
        files: Path of each file of the program, relative to the script's folder where it lies
            below it, and its text.
        sites: Each statement on the way to a step: its body, kind, and the sites around it.
        python: Version, e.g. ``3.11``.
        torch: Version.
    """

    arguments: tuple[str, ...]
    world_size: int
    files: dict[str, str]
    sites: tuple[str, ...]
    python: str
    torch: str

    def to_json(self) -> str:
        """As text, for `from_json`."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)


def identity_of(
    files: Iterable[Rewritten], arguments: Sequence[str], world_size: int, torch_version: str
) -> Identity:
    """The identity of a program that is about to run."""
    program = list(files)
    folder = program[0].source.path.parent
    sites = [site for rewritten in program for site in rewritten.sites]
    bodies = {
        name: told for rewritten in program for name, told in _bodies(rewritten, folder).items()
    }
    return Identity(
        tuple(arguments),
        world_size,
        {_short(rewritten.source.path, folder): rewritten.source.text for rewritten in program},
        tuple(
            f"{site.number} {site.kind} in {bodies[site.body]} within {site.around}"
            for site in sorted(sites, key=lambda site: site.number)
        ),
        platform.python_version(),
        torch_version,
    )


def from_json(text: str, place: Path) -> Identity:
    """Read what `Identity.to_json` gave.

    Args:
        text: Its text.
        place: The file that it was in, for the error.

    Raises:
        AutosaveError: When it is something else.
    """
    try:
        found: dict[str, Any] = json.loads(text)
        known = found.pop("format")
        if known != FORMAT:
            raise AutosaveError(
                f"{place} has the format {known}, and this version of Outlast reads {FORMAT}; "
                "go on with the version that wrote it, or start anew with --fresh"
            )
        found["arguments"] = tuple(found["arguments"])
        found["sites"] = tuple(found["sites"])
        return Identity(**found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AutosaveError(
            f"{place} is damaged ({error!r}); restore it from a copy, or start anew with --fresh"
        ) from None


def refuse_changes(
    before: Identity, now: Identity, place: Path, *, accept_changes: bool = False
) -> None:
    """Refuse to go on with a run as another program.

    Args:
        before: As it was started.
        now: As it is to go on.
        place: The run's folder, for the error.
        accept_changes: Go on with changed texts and arguments all the same, where the statements
            on the way to a step are the same.

    Raises:
        AutosaveError: With the difference.
    """
    if before.world_size != now.world_size:
        raise AutosaveError(
            f"the run in {place} was saved by {_processes(before.world_size)} and cannot go on "
            f"with {_processes(now.world_size)}: what each of them holds is saved as it is; start "
            f"{before.world_size}, or start anew with --fresh"
        )
    changed = [*_changed_arguments(before, now), *_changed_files(before, now)]
    if changed and not accept_changes:
        listed = "\n".join(changed)
        raise AutosaveError(
            f"the run in {place} was saved by another program; set the change back, go on all the "
            f"same with --accept-changes, or start anew with --fresh. The difference:\n{listed}"
        )
    if before.sites != now.sites:
        raise AutosaveError(
            f"the run in {place} cannot go on even with --accept-changes: {_moved(before, now)}; a "
            "change must leave the statements that lead to the training step, and the names of "
            "their functions, as they were; set it back, or start anew with --fresh"
        )


def version_warnings(before: Identity, now: Identity) -> list[str]:
    """One sentence for each version that is another one than when the run was saved."""
    return [
        f"the run was saved under {name} {then} and goes on under {today}; its numbers may differ "
        "from here on"
        for name, then, today in (
            ("Python", before.python, now.python),
            ("torch", before.torch, now.torch),
        )
        if then != today
    ]


def arguments_hash(arguments: Sequence[str]) -> str:
    """Eight characters that tell runs of a script with other arguments apart."""
    return hashlib.sha256(json.dumps(list(arguments)).encode()).hexdigest()[:8]


def _changed_arguments(before: Identity, now: Identity) -> list[str]:
    if before.arguments == now.arguments:
        return []
    return [
        f"- arguments: {' '.join(before.arguments) or '(none)'}",
        f"+ arguments: {' '.join(now.arguments) or '(none)'}",
    ]


def _changed_files(before: Identity, now: Identity) -> list[str]:
    lines: list[str] = []
    for name in sorted({*before.files, *now.files}):
        lines += difflib.unified_diff(
            before.files.get(name, "").splitlines(),
            now.files.get(name, "").splitlines(),
            f"{name} (saved)",
            f"{name} (now)",
            n=1,
            lineterm="",
        )
    if len(lines) > _LINES_SHOWN:
        more = len(lines) - _LINES_SHOWN
        lines = [*lines[:_LINES_SHOWN], f"... and {more} more lines"]
    return lines


def _moved(before: Identity, now: Identity) -> str:
    pairs = zip(before.sites, now.sites, strict=False)
    first = next(((old, new) for old, new in pairs if old != new), None)
    if first is None:
        return (
            f"{len(before.sites)} statements led to the training step and {len(now.sites)} do now"
        )
    return f"statement {first[0]} is {first[1]} now"


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _short(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def _bodies(file: Rewritten, folder: Path) -> dict[str, str]:
    """Body names of a file, and what they are called wherever they stand."""
    place = f"{file.source.path}:"
    parts = [body.removeprefix(place).partition(":") for body in {site.body for site in file.sites}]
    told: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for line, _, name in sorted(parts, key=lambda part: int(part[0])):
        seen[name] += 1
        # A function may be defined more than once, in branches of an `if`.
        again = f" ({seen[name]})" if seen[name] > 1 else ""
        told[f"{place}{line}:{name}"] = f"{_short(file.source.path, folder)}:{name}{again}"
    return told
