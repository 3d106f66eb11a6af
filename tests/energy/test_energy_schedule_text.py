"""Schedules as JSON: what is written is read again, and nothing malformed gets in."""

from __future__ import annotations

import json

import pytest

from outlast.energy.schedule import (
    Schedule,
    interleaved,
    schedule_from_text,
    sharded,
    with_tail,
    with_transfers,
    zero_bubble,
)
from outlast.errors import EnergyError


def schedule_text(schedule: Schedule) -> str:
    return changed(
        devices=schedule.devices,
        operations=[[o.device, o.stage, o.phase, o.microbatch] for o in schedule.operations],
        edges=[list(edge) for edge in schedule.edges],
    )


@pytest.mark.parametrize(
    "schedule",
    [with_tail(with_transfers(zero_bubble(3, 4))), interleaved(2, 4, 2), sharded(3, 2)],
)
def test_a_schedule_survives_its_file(schedule):
    assert schedule_from_text(schedule_text(schedule)) == schedule


def changed(**fields: object) -> str:
    content = {
        "format": "outlast schedule",
        "version": 1,
        "devices": 1,
        "operations": [[0, 0, "forward", 0], [0, 0, "backward", 0]],
        "edges": [[0, 1]],
    }
    return json.dumps(content | fields)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("__import__('os')", "mine.json is no JSON"),
        ("[]", "mine.json is no schedule"),
        (changed(format="another"), "is no schedule"),
        (changed(version=2), "version 2, this reads 1"),
        (changed(evil=1), "unknown field evil"),
        (changed(devices=0), "devices = 0"),
        (changed(devices=float("nan")), "devices = nan is no whole number"),
        (changed(operations=[]), "no operations"),
        (changed(operations="many"), "operations = 'many' is no list"),
        (changed(operations=[[0, 0, "forward"]]), r"operation 0 = \[0, 0, 'forward'\] is not"),
        (changed(operations=[[1, 0, "forward", 0]]), "operation 0: device = 1"),
        (changed(operations=[[0, True, "forward", 0]]), "stage = True"),
        (changed(operations=[[0, 0, 7, 0]]), "phase = 7"),
        (changed(operations=[[0, 0, "forward", float("nan")]]), "microbatch = nan"),
        (changed(operations=[[0, 0, "forward", 0]] * 2), "operation 1 repeats operation 0"),
        (changed(edges=[[0, 2]]), "edge 0 = 2 is no whole number from 0 to 1"),
        (changed(edges=[[0, -1]]), "edge 0 = -1"),
        (changed(edges=[[0, 1], [0, 1]]), r"edge 1 repeats \[0, 1\]"),
        (changed(edges=[0]), "edge 0 = 0 is not"),
        (changed(edges=[[0, 1], [1, 0]]), "circle"),
        (changed(edges=[[1, 1]]), "circle"),
        (changed(edges=[]), "mine.json: device 0 would run operations 0 .* and 1 .* at once"),
    ],
)
def test_malformed_schedules_are_refused_with_the_place(text: str, words: str):
    with pytest.raises(EnergyError, match=words):
        schedule_from_text(text, "mine.json")
