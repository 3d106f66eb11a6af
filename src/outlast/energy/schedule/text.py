"""Schedules as JSON, for plan files and schedules of one's own. Read field by field, not evaluated.

```json
{"format": "outlast schedule", "version": 1, "devices": 1,
 "operations": [[0, 0, "forward", 0], [0, 0, "backward", 0]], "edges": [[0, 1]]}
```

An operation is device (-1: link), stage, phase and micro-batch (-1: once per step); an edge is
(before, after), counted from 0.
"""

from __future__ import annotations

import json
import math
from typing import Any

from outlast.energy.schedule.additions import LINK
from outlast.energy.schedule.dag import Operation, Schedule
from outlast.errors import EnergyError

FORMAT = "outlast schedule"
VERSION = 1
_FIELDS = ("format", "version", "devices", "operations", "edges")


def schedule_text(schedule: Schedule) -> str:
    """A schedule as JSON text."""
    return json.dumps(schedule_content(schedule)) + "\n"


def schedule_content(schedule: Schedule) -> dict[str, Any]:
    """A schedule as a JSON object, to put into another one."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "devices": schedule.devices,
        "operations": [[o.device, o.stage, o.phase, o.microbatch] for o in schedule.operations],
        "edges": [list(edge) for edge in schedule.edges],
    }


def schedule_from_text(text: str, source: str = "the schedule") -> Schedule:
    """Read a schedule.

    Args:
        text: JSON.
        source: Where it came from, for messages.

    Raises:
        EnergyError: When it is no JSON, has a wrong field, repeats an operation or an edge, names
            an operation that is not there, has a circle, or does not say in which order a device
            runs its operations.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EnergyError(f"{source} is no JSON: {error}") from error
    return schedule_from_content(content, source)


def schedule_from_content(content: object, source: str = "the schedule") -> Schedule:
    """Read a schedule from a parsed JSON object; otherwise as `schedule_from_text`."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise EnergyError(
            f'{source} is no schedule: it must be an object with "format": "{FORMAT}"'
        )
    if unknown := sorted(set(content) - set(_FIELDS)):
        raise EnergyError(f"{source} has the unknown field {unknown[0]}; known: {_FIELDS}")
    if content.get("version") != VERSION:
        raise EnergyError(
            f"{source} has version {content.get('version')!r}, this reads {VERSION}: write it anew"
        )
    devices = _whole(content.get("devices"), f"{source}: devices", least=1)
    operations = [
        _operation(row, f"{source}: operation {index}", devices)
        for index, row in enumerate(_rows(content, "operations", source))
    ]
    if not operations:
        raise EnergyError(f"{source} has no operations; a step has at least one")
    seen: dict[Operation, int] = {}
    for index, operation in enumerate(operations):
        if seen.setdefault(operation, index) != index:
            raise EnergyError(
                f"{source}: operation {index} repeats operation {seen[operation]} "
                f"({operation.phase} of stage {operation.stage}, micro-batch "
                f"{operation.microbatch}); name each once"
            )
    edges: dict[tuple[int, int], None] = {}
    for index, row in enumerate(_rows(content, "edges", source)):
        edge = _edge(row, f"{source}: edge {index}", len(operations))
        if edge in edges:
            raise EnergyError(f"{source}: edge {index} repeats {list(edge)}; name each once")
        edges[edge] = None
    schedule = Schedule(tuple(operations), tuple(edges), devices)
    schedule.check(source)
    return schedule


def _rows(content: dict[str, Any], name: str, source: str) -> list[Any]:
    rows = content.get(name)
    if not isinstance(rows, list):
        raise EnergyError(f"{source}: {name} = {rows!r:.60} is no list")
    return rows


def _operation(row: object, name: str, devices: int) -> Operation:
    if not isinstance(row, list) or len(row) != 4:
        raise EnergyError(f"{name} = {row!r:.60} is not [device, stage, phase, microbatch]")
    phase = row[2]
    if not isinstance(phase, str) or not phase:
        raise EnergyError(f'{name}: phase = {phase!r:.60} is no name such as "forward"')
    return Operation(
        device=_whole(row[0], f"{name}: device", least=LINK, most=devices - 1),
        stage=_whole(row[1], f"{name}: stage"),
        phase=phase,
        microbatch=_whole(row[3], f"{name}: microbatch", least=-1),
    )


def _edge(row: object, name: str, operations: int) -> tuple[int, int]:
    if not isinstance(row, list) or len(row) != 2:
        raise EnergyError(f"{name} = {row!r:.60} is not [before, after]")
    before, after = (_whole(item, name, most=operations - 1) for item in row)
    return before, after


def _whole(value: object, name: str, least: int = 0, most: float = math.inf) -> int:
    # JSON's true is a Python int, and NaN a float.
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        upper = "" if most == math.inf else f" to {most:g}"
        raise EnergyError(f"{name} = {value!r:.60} is no whole number from {least}{upper}")
    return value
