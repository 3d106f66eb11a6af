from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest
from plan_runs import TINY
from plan_spaces import CLOCKS, SMALL, candidates_of, cluster, judged

from outlast.errors import PlanError
from outlast.hardware import Unavailable
from outlast.plan import pareto
from outlast.plan.batch import Cases, cases
from outlast.plan.cluster import Prices
from outlast.plan.configuration import Configuration, Mechanisms, Settings
from outlast.plan.constraints import problems
from outlast.plan.objectives import Objectives, joined
from outlast.plan.pareto import search
from outlast.plan.space import Axes, Block, divisors, space
from outlast.plan.transformer import Transformer

LLAMA = Transformer(
    name="llama-405b",
    layers=126,
    hidden=16384,
    heads=128,
    kv_heads=8,
    head_width=128,
    intermediate=53248,
    gated=True,
    vocabulary=128256,
)
MIXTURE = replace(
    TINY, name="mixture", experts=4, experts_per_token=2, expert_intermediate=32, dense_layers=1
)


BASE = Configuration(sequence=8192, micro_batch=1, batch=2560)


def test_rows_are_what_cases_gives_for_their_configurations() -> None:
    found = space(LLAMA, BASE, cluster(1280), Axes(devices=(5120, 10240)), CLOCKS)
    rows = np.random.default_rng(0).integers(0, len(found), 200)
    wanted = cases([(LLAMA, found.candidate(row).configuration, found.cluster) for row in rows])
    got = found.whole.layouts.taken(found.whole.layout[rows])
    for each in fields(Cases):
        a, b = getattr(wanted, each.name), getattr(got, each.name)
        assert (np.broadcast_to(a, 200) == np.broadcast_to(b, 200)).all(), each.name


def test_no_candidate_is_illegal_or_twice_there() -> None:
    found = space(MIXTURE, SMALL, cluster(2), Axes(devices=(4, 8, 16)))
    runs = [found.candidate(row).configuration for row in range(len(found))]
    assert len(set(runs)) == len(runs)
    for run in runs[:: max(1, len(runs) // 150)]:
        assert problems(MIXTURE, run, found.cluster) == []
    assert {run.devices for run in runs} == {4, 8, 16}
    assert {run.expert for run in runs} == {1, 2, 4}


def test_every_legal_division_is_there() -> None:
    there = cluster(1)
    axes = Axes(devices=(8,), precision=("bf16",), sharding=("none",), recompute=("none",))
    found = space(TINY, SMALL, there, replace(axes, balance=("layers",), micro_batch=(1, 2)))
    got = {found.candidate(row).configuration for row in range(len(found))}
    wanted = set()
    for tensor, context, pipeline, chunks, micro in product(
        (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4), (1, 2, 4), (1, 2)
    ):
        if 8 % (tensor * context * pipeline):
            continue
        schedules = ["interleaved"] if chunks > 1 else ["1f1b", "zero_bubble"]
        for schedule in schedules if pipeline > 1 else ["1f1b"]:
            run = replace(
                SMALL,
                data=8 // (tensor * context * pipeline),
                tensor=tensor,
                context=context,
                pipeline=pipeline,
                stages_per_rank=chunks,
                schedule=schedule,
                micro_batch=micro,
            )
            if not problems(TINY, run, there, "megatron"):
                wanted.add(run)
    assert wanted <= got


def test_hybrid_sharding_divides_the_replicas() -> None:
    found = space(TINY, SMALL, cluster(2), Axes(devices=(16,)))
    groups = found.table["sharding_ranks"]
    hybrid = groups > 0
    assert set(groups[hybrid]) == {8}
    assert (found.table["data"][hybrid] == 16).all()


def test_coding_needs_as_many_replicas_as_copies() -> None:
    found = space(TINY, SMALL, cluster(1), Axes(devices=(4,)), Mechanisms(coding_copies=(1, 3)))
    copies = np.array([each.coding_copies for each in found.whole.settings])[found.whole.setting]
    data = found.table["data"][found.whole.layout]
    assert (data[copies == 3] >= 3).all()
    assert (data[copies == 1] == 1).any()


def test_blocks_hold_all_candidates_once_and_never_split_a_layout() -> None:
    found = space(TINY, SMALL, cluster(1), Axes(devices=(1, 2, 4, 8)), CLOCKS)
    blocks = list(found.blocks(100))
    assert len(blocks) > 3
    assert sum(map(len, blocks)) == len(found)
    assert (
        np.concatenate([block.setting for block in blocks]).tolist() == found.whole.setting.tolist()
    )
    data = np.concatenate([block.spread(block.layouts.data) for block in blocks])
    assert data.tolist() == found.table["data"][found.whole.layout].tolist()
    assert all(len(block.layouts.data) == block.layout.max() + 1 for block in blocks)


@pytest.mark.parametrize(
    ("axes", "base", "words"),
    [
        (Axes(devices=(16,)), SMALL, "devices = 16 is more than the 8"),
        (Axes(precision=("fp32",)), SMALL, "precision = 'fp32'"),
        (Axes(tensor=(0,)), SMALL, "tensor = 0: give at least 1"),
        (Axes(micro_batch=(1, 1)), SMALL, "each of them once"),
        (Axes(sharding=("zero3",)), SMALL, "sharding = 'zero3' is none of none, optimizer"),
        (Axes(devices=(7,)), SMALL, "no legal configuration of tiny with batch = 16"),
    ],
)
def test_axes_that_cannot_be_are_refused(axes: Axes, base: Configuration, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        space(TINY, base, cluster(1), axes)


def test_a_space_beyond_all_memory_is_refused() -> None:
    many = Mechanisms(clock_mhz=tuple(np.arange(1000.0)))
    with pytest.raises(PlanError, match="fewer choices of mechanisms"):
        space(LLAMA, BASE, cluster(1280), None, many)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tiers": ("shared", "local")}, "in this order"),
        ({"tiers": ()}, "tiers = none"),
        ({"tensorize_form": "tt"}, "tensorize_rank = 0"),
        ({"clock_mhz": float("nan")}, "clock_mhz = nan"),
        ({"coding_copies": 0}, "coding_copies = 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Settings(**given)
    with pytest.raises(PlanError, match="guard has no choice"):
        Mechanisms(guard=()).settings()


def test_divisors() -> None:
    assert divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)
    assert divisors(1) == (1,)


def test_what_does_not_fit_never_enters_the_front() -> None:
    found = space(TINY, SMALL, cluster(1), Axes(devices=(1, 2, 4, 8)), CLOCKS)

    def tempting(block: Block) -> Objectives:
        usual = judged()(block)
        bad = ~usual.allowed
        return replace(usual, hours=np.where(bad, np.where(usual.fits, 0.0, np.nan), usual.hours))

    front = search(found, tempting)
    assert front.searched == len(found)
    assert 0 < front.allowed < front.searched
    assert front.objectives.allowed.all()
    assert (front.objectives.hours > 0).all()
    assert (front.objectives.memory_bytes <= 0.9 * 80e9).all()


def test_block_size_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = space(TINY, SMALL, cluster(1), Axes(devices=(1, 2, 4, 8)), CLOCKS)
    large = search(found, judged())
    monkeypatch.setattr(pareto, "BLOCK", 64)
    small = search(found, judged())
    assert small.rows.tolist() == large.rows.tolist()
    assert small.to_json() == large.to_json()


def test_units_change_nothing() -> None:
    found = space(TINY, SMALL, cluster(1), Axes(devices=(2, 4, 8)), CLOCKS)

    def in_other_units(block: Block) -> Objectives:
        usual = judged()(block)
        return replace(usual, hours=usual.hours * 3600.0, kwh=usual.kwh * 3.6e6)

    one, other = search(found, judged()), search(found, in_other_units)
    assert one.rows.tolist() == other.rows.tolist()
    assert one.knee == other.knee


def test_a_budget_is_kept_before_the_front_is_drawn() -> None:
    found = space(TINY, SMALL, cluster(1), Axes(devices=(2, 4, 8)), CLOCKS)
    free = search(found, judged())
    bound = math.ceil(float(np.quantile(free.objectives.headroom_bytes, 0.9)) * 1.01 / 1e6) * 1e6
    limited = search(found, judged(), f"{bound / 1e6:.0f} MB")
    assert (limited.objectives.headroom_bytes >= bound).all()
    assert limited.within < limited.allowed
    # Such points lie behind the free front, which does not know of memory.
    assert not set(limited.rows) <= set(free.rows)


def test_unknown_axes_are_left_out_by_name() -> None:
    found = space(TINY, SMALL, cluster(1), Axes(devices=(8,)))

    def without_energy(block: Block) -> Objectives:
        return replace(judged()(block), kwh=Unavailable("no power is given", "give [power]"))

    front = search(found, without_energy)
    assert "kwh" not in front.axes
    assert front.left_out["kwh"].reason == "no power is given"
    assert json.loads(front.to_json())["left_out"]["kwh"] == "no power is given"


def test_json_and_csv_hold_every_point() -> None:
    there = cluster(1, prices=Prices(currency="EUR"))
    front = search(space(TINY, SMALL, there, Axes(devices=(4, 8)), CLOCKS), judged()).ordered()
    content = json.loads(front.to_json())
    assert content["kind"] == "predicted"
    assert len(content["points"]) == len(front)
    first = content["points"][0]
    assert first["figures"]["hours"]["low"] < first["figures"]["hours"]["middle"]
    assert first["figures"]["money"] == {"unavailable": "the evaluation gave none"}
    rebuilt = Configuration(**first["configuration"])
    assert rebuilt == front.candidate(0).configuration
    lines = list(csv.DictReader(io.StringIO(front.to_csv())))
    assert len(lines) == len(front)
    assert float(lines[0]["hours"]) == front.objectives.hours[0]
    assert lines[0]["money"] == ""
    hours = [float(line["hours"]) for line in lines]
    assert hours == sorted(hours)


def test_thinned_keeps_the_knee_and_the_extremes() -> None:
    front = search(space(TINY, SMALL, cluster(1), Axes(devices=(2, 4, 8)), CLOCKS), judged())
    few = front.thinned(0.5)
    assert len(few) < len(front)
    assert front.candidate(front.knee) in candidates_of(few)
    assert few.objectives.hours.min() == front.objectives.hours.min()


def test_a_choice_without_meaning_for_a_layout_does_not_remove_it() -> None:
    axes = Axes(devices=(8,), sharding=("parameters",), sequence_parallel=(False,))
    found = space(TINY, SMALL, cluster(1), axes)
    assert (found.table["tensor"] == 1).any()
    assert (found.table["data"] == 1).any()


def test_a_cluster_that_knows_one_precision_only_needs_no_other() -> None:
    slow = cluster(1, peak_flop_per_s={"fp32": 1e12}, matmul_flop_per_s={"fp32": 1e12})
    found = space(TINY, SMALL, slow, Axes(devices=(8,), precision=("fp32",)))
    assert found.candidate(0).configuration.precision == "fp32"
    assert (found.whole.layouts.peak_flop_per_s == 1e12).all()


def beyond_the_clock(block: Block) -> Objectives:
    """Like `judged`, where clocks above 1500 MHz are beyond what was calibrated."""
    clocks = block.by_setting(lambda each: each.clock_mhz)

    def flags(row: int) -> tuple[str, ...]:
        return (f"clock = {clocks[row]:g} is above 1500",) if clocks[row] > 1500 else ()

    return replace(judged()(block), flags=flags)


@pytest.mark.parametrize("size", [64, 100_000])
def test_every_point_says_whether_it_is_extrapolated(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pareto, "BLOCK", size)
    there = space(TINY, SMALL, cluster(1), Axes(devices=(4, 8)), CLOCKS)
    front = search(there, beyond_the_clock).ordered("kwh").thinned(0.01)
    points = json.loads(front.to_json())["points"]
    lines = list(csv.DictReader(io.StringIO(front.to_csv())))
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
    silent = search(there, judged())
    assert json.loads(silent.to_json())["points"][0]["extrapolated"] is None
    assert next(csv.DictReader(io.StringIO(silent.to_csv())))["extrapolated"] == ""
    both = joined([silent.objectives, search(there, beyond_the_clock).objectives])
    assert both.extrapolated(0) is None
    assert both.extrapolated(len(both) - 1) is not None
