"""Profiles as CSV and JSON files.

A CSV file has the columns stage, phase (or instruction), clock_mhz (or frequency), seconds (or
time) and joules (or energy) and may begin with lines such as "# blocking_watts = 83.64" for
`blocking_watts`, `device`, `kind` and, once for each, `flag`. A JSON file has the first three, a
list "flags" of sentences, and a list "points" of objects with the five columns. Both are refused
as a whole when anything in them is wrong.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import defaultdict
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from outlast.energy.frontier.plan_file import publish, publish_text, read
from outlast.energy.profile import Curve, Key, Point, Profile
from outlast.energy.profile_check import check_profile
from outlast.energy.reading import KINDS
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from outlast.energy.reading import Kind

_FORMAT = "outlast energy profile"
_VERSION = 1
_ALIASES = {
    "stage": "stage",
    "phase": "phase",
    "instruction": "phase",
    "clock_mhz": "clock_mhz",
    "frequency": "clock_mhz",
    "seconds": "seconds",
    "time": "seconds",
    "joules": "joules",
    "energy": "joules",
}
_COLUMNS = ("stage", "phase", "clock_mhz", "seconds", "joules")
_FACTS = ("blocking_watts", "device", "kind")


def read_profile(
    path: Path | str, *, blocking_watts: float | None = None, device: str | None = None
) -> Profile:
    """A profile from a CSV or JSON file, checked by `check_profile`.

    Args:
        path: Ends with .csv or .json.
        blocking_watts: Power of a waiting device; wins over the file's.
        device: Name of the device; wins over the file's.

    Raises:
        EnergyError: When the file cannot be read or anything in it is wrong.
    """
    path = Path(path)
    if path.suffix.lower() == ".json":
        content = read(path, _FORMAT)
        facts = {name: content[name] for name in (*_FACTS, "flags") if name in content}
        rows = _json_rows(content, path)
    elif path.suffix.lower() == ".csv":
        facts, rows = _csv_rows(path)
    else:
        raise EnergyError(f"{path} ends with neither .csv nor .json: name a profile of that kind")
    if blocking_watts is not None:
        facts["blocking_watts"] = blocking_watts
    if "blocking_watts" not in facts:
        raise EnergyError(
            f"{path} does not say blocking_watts, the power of a device that waits for another: "
            "pass it, or begin the file with a line such as # blocking_watts = 83.64"
        )
    kind = facts.get("kind", "measured")
    if kind not in KINDS:
        raise EnergyError(f'{path}: kind = "{kind}" is not one of {", ".join(KINDS)}')
    profile = Profile(
        _curves(rows, path),
        _number(facts["blocking_watts"], "blocking_watts", str(path)),
        device=device or str(facts.get("device", "unknown device")),
        kind=cast("Kind", kind),
        flags=_flags(facts.get("flags", []), path),
    )
    check_profile(profile, str(path))
    return profile


def write_profile(profile: Profile, path: Path | str) -> None:
    """Write a profile; a reader sees all of the file or none.

    Args:
        profile: Any one that `check_profile` accepts.
        path: Ends with .csv or .json.

    Raises:
        EnergyError: When the profile is wrong or the place cannot be written.
    """
    path = Path(path)
    check_profile(profile, "the profile")
    rows = [
        dict(zip(_COLUMNS, (*key, *point), strict=True))
        for key, curve in sorted(profile.curves.items())
        for point in curve.points
    ]
    facts = {name: getattr(profile, name) for name in _FACTS}
    if path.suffix.lower() == ".json":
        flags = {"flags": list(profile.flags)} if profile.flags else {}
        publish(path, {"format": _FORMAT, "version": _VERSION, **facts, **flags, "points": rows})
    elif path.suffix.lower() == ".csv":
        text = io.StringIO()
        lines = [*facts.items(), *(("flag", flag) for flag in profile.flags)]
        text.writelines(f"# {name} = {' '.join(str(fact).split())}\n" for name, fact in lines)
        writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        publish_text(path, text.getvalue())
    else:
        raise EnergyError(f"{path} ends with neither .csv nor .json: choose one of them")


def _json_rows(content: Mapping[str, Any], path: Path) -> list[tuple[str, dict[str, Any]]]:
    allowed = {"format", "version", "points", "flags", *_FACTS}
    for name in content.keys() - allowed:
        raise EnergyError(f'{path} has an unknown field "{name}"{_hint(name, sorted(allowed))}')
    points = content.get("points")
    if not isinstance(points, list) or not all(isinstance(point, dict) for point in points):
        raise EnergyError(f'{path} has no list "points" of objects: add one for each measurement')
    found = []
    for number, point in enumerate(points, start=1):
        where = f"{path}, point {number}"
        names = _columns(list(point), where)
        found.append((where, {names[name]: value for name, value in point.items()}))
    return found


def _csv_rows(path: Path) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise EnergyError(f"{path} cannot be read ({error.strerror}): give another file") from error
    except UnicodeDecodeError as error:
        raise EnergyError(f"{path} is no UTF-8 text: save it as CSV in UTF-8") from error
    facts: dict[str, Any] = {}
    comments = 0
    while comments < len(lines) and lines[comments].startswith("#"):
        name, equals, value = lines[comments].removeprefix("#").partition("=")
        if equals and name.strip() in _FACTS:
            facts[name.strip()] = value.strip()
        elif equals and name.strip() == "flag":
            facts.setdefault("flags", []).append(value.strip())
        comments += 1
    if comments == len(lines):
        raise EnergyError(f"{path} is empty: give it the columns {', '.join(_COLUMNS)}")
    try:
        header, *rows = csv.reader(lines[comments:])
    except csv.Error as error:
        raise EnergyError(f"{path} is no CSV file ({error}): look for stray quotes") from error
    header = [name.strip() for name in header]
    names = _columns(header, str(path))
    found = []
    for number, row in enumerate(rows, start=comments + 2):
        if not row:
            continue
        where = f"{path}, line {number}"
        if len(row) != len(header):
            raise EnergyError(
                f"{where} has {len(row)} values for {len(header)} columns: complete the line"
            )
        found.append((where, {names[name]: item for name, item in zip(header, row, strict=True)}))
    return facts, found


def _columns(header: Sequence[str], where: str) -> dict[str, str]:
    """From the names in a file to ours; all five exactly once."""
    for name in header:
        if name not in _ALIASES:
            raise EnergyError(
                f'{where} has an unknown column "{name}"{_hint(name, list(_ALIASES))}'
            )
    ours = [_ALIASES[name] for name in header]
    for column in _COLUMNS:
        if ours.count(column) != 1:
            names = " or ".join(name for name, own in _ALIASES.items() if own == column)
            count = "no column" if column not in ours else "more than one column"
            raise EnergyError(f"{where} has {count} for {column}: it needs one, named {names}")
    return {name: _ALIASES[name] for name in header}


def _hint(name: str, known: list[str]) -> str:
    near = get_close_matches(name.lower(), known, n=1)
    return f": did you mean {near[0]}?" if near else f": known are {', '.join(known)}"


def _curves(rows: Iterable[tuple[str, Mapping[str, Any]]], path: Path) -> dict[Key, Curve]:
    found: dict[Key, dict[int, Point]] = defaultdict(dict)
    for where, row in rows:
        stage = _whole(row["stage"], "stage", where)
        phase = row["phase"]
        if not isinstance(phase, str) or not phase.strip():
            raise EnergyError(f'{where}: phase = "{phase}" is no name: say e.g. forward')
        clock = _whole(row["clock_mhz"], "clock_mhz", where)
        own = found[Key(stage, phase.strip())]
        if clock in own:
            raise EnergyError(
                f"{where} gives stage {stage} {phase} at {clock} MHz a second time: keep one "
                "measurement of each clock, e.g. the median"
            )
        own[clock] = Point(
            clock,
            _number(row["seconds"], "seconds", where),
            _number(row["joules"], "joules", where),
        )
    if not found:
        raise EnergyError(f"{path} has no measurements: add one line for each operation and clock")
    return {key: Curve(tuple(sorted(points.values()))) for key, points in found.items()}


def _flags(value: Any, path: Path) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise EnergyError(f"{path}: flags = {_shown(value)} is no list of sentences: correct it")
    return tuple(value)


def _number(value: Any, name: str, where: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (OverflowError, TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise EnergyError(f"{where}: {name} = {_shown(value)} is not a finite number: correct it")
    return number


def _whole(value: Any, name: str, where: str) -> int:
    number = _number(value, name, where)
    if number < 0 or number != int(number):
        unit = ", in MHz" if name == "clock_mhz" else ""
        raise EnergyError(f"{where}: {name} = {_shown(value)} must be a whole number from 0{unit}")
    return int(number)


def _shown(value: Any) -> str:
    return json.dumps(value)[:40]
