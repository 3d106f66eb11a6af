"""Fronts of several types of device, and what fronts say of points that are extrapolated."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import numpy as np
import pytest
from plan_runs import TINY
from plan_spaces import CLOCKS, SMALL, cluster, judged

from outlast.errors import PlanError
from outlast.hardware import Unavailable
from outlast.plan.cluster import Prices
from outlast.plan.pareto.objectives import Objectives
from outlast.plan.pareto.search import search, union
from outlast.plan.pareto.space import Axes, Block, space


def test_a_new_device_type_removes_exactly_what_it_dominates() -> None:
    axes = Axes(devices=(2, 4, 8))
    spaces = [space(TINY, SMALL, cluster(1, name), axes, CLOCKS) for name in ("h100", "other")]
    old = search(spaces[0], judged())
    before = old.to_json()
    removed = set()
    for watts in (250.0, 400.0, 700.0):
        new = search(spaces[1], judged(watts=watts))
        values = [
            np.column_stack([front.objectives.column(name) for name in front.axes])
            for front in (old, new)
        ]
        wanted = set()
        for origin, front in enumerate((old, new)):
            others = values[1 - origin]
            for row, own in zip(front.rows, values[origin], strict=True):
                better = (others <= own).all(axis=1) & (others < own).any(axis=1)
                if not better.any():
                    wanted.add((origin, int(row)))
        both = union([old, new])
        found = list(zip(both.origin.tolist(), both.rows.tolist(), strict=True))
        assert len(found) == len(set(found))
        assert set(found) == wanted
        removed.add(len(old) - sum(origin == 0 for origin, _ in found))
        # The type that was there before keeps its own front, whatever comes beside it.
        assert old.to_json() == before
        assert union([old]).to_json() == before
    # Equal figures remove nothing; a type that draws less removes all that it betters.
    assert removed >= {0, len(old)}


def test_union_is_the_front_of_all_candidates() -> None:
    axes = Axes(tensor=(1, 2, 4))
    parts = [replace(axes, devices=(count,)) for count in (2, 4, 8)]
    whole = search(
        space(TINY, SMALL, cluster(1), replace(axes, devices=(2, 4, 8)), CLOCKS), judged()
    )
    pieces = [search(space(TINY, SMALL, cluster(1), part, CLOCKS), judged()) for part in parts]
    assert set(union(pieces).candidates) == set(whole.candidates)


def test_unlike_fronts_are_not_mixed_up() -> None:
    there = [
        cluster(1, money, prices=Prices(currency=money, per_kwh=0.1)) for money in ("EUR", "USD")
    ]

    def priced(block: Block) -> Objectives:
        usual = judged()(block)
        return replace(usual, money=usual.column("kwh") * 0.1)

    fronts = [search(space(TINY, SMALL, each, Axes(devices=(8,))), priced) for each in there]
    both = union(fronts)
    assert isinstance(both.objectives.money, Unavailable)
    assert both.currency == ""
    limited = search(space(TINY, SMALL, there[0], Axes(devices=(8,))), priced, {"hours": 1e9})
    with pytest.raises(PlanError, match="different limits"):
        union([fronts[0], limited])


def beyond_the_clock(block: Block) -> Objectives:
    """Like `judged`, where clocks above 1500 MHz are beyond what was calibrated."""
    clocks = block.by_setting([each.clock_mhz for each in block.settings])

    def flags(row: int) -> tuple[str, ...]:
        return (f"clock = {clocks[row]:g} is above 1500",) if clocks[row] > 1500 else ()

    return replace(judged()(block), flags=flags)


@pytest.mark.parametrize("size", [64, 100_000])
def test_every_point_says_whether_it_is_extrapolated(size: int) -> None:
    parts = [space(TINY, SMALL, cluster(1, name), Axes(devices=(4, 8)), CLOCKS) for name in "ab"]
    fronts = [search(part, beyond_the_clock, block=size) for part in parts]
    both = union(fronts).ordered("kwh").thinned(0.01)
    points = json.loads(both.to_json())["points"]
    lines = list(csv.DictReader(io.StringIO(both.to_csv())))
    said = set()
    for point, line in zip(points, lines, strict=True):
        clock = point["settings"]["clock_mhz"]
        wanted = [f"clock = {clock:g} is above 1500"] if clock > 1500 else []
        assert point["extrapolated"] == wanted
        assert line["extrapolated"] == ("; ".join(wanted) or "no")
        said.add(bool(wanted))
    assert said == {True, False}


def test_a_front_without_flags_does_not_claim_to_be_calibrated() -> None:
    there = space(TINY, SMALL, cluster(1), Axes(devices=(8,)), CLOCKS)
    silent, other = search(there, judged()), search(there, beyond_the_clock)
    assert json.loads(silent.to_json())["points"][0]["extrapolated"] is None
    assert next(csv.DictReader(io.StringIO(silent.to_csv())))["extrapolated"] == ""
    both = union([silent, other])
    assert both.objectives.extrapolated(0) is None
    assert both.objectives.extrapolated(len(both) - 1) is not None
