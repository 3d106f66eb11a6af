from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from plan_runs import NODE, SHORT, TINY

from outlast.errors import PlanError
from outlast.hardware import Unavailable
from outlast.plan.configuration import Configuration, Mechanisms, layout_words, settings_words
from outlast.plan.objectives import Objectives
from outlast.plan.pareto import SHOWN, Front, kept, page, search
from outlast.plan.space import Axes, Block, space


def front(clocks: int = 5, **changed: object) -> Front:
    """Layouts of the whole node at some clocks, with a trade-off of all figures."""
    settings = Mechanisms(
        clock_mhz=tuple(np.linspace(1000.0, 2000.0, clocks)), guard=("off", "linear")
    )
    there = space(
        TINY,
        SHORT,
        NODE,
        Axes(devices=(8,), tensor=(1, 2), pipeline=(1,), context=(1,), sharding=("none",)),
        settings,
    )

    def evaluate(block: Block) -> Objectives:
        many = block.layouts.taken(block.layout)
        clock = block.by_setting(lambda each: each.clock_mhz) / 2000.0
        guarded = block.by_setting(lambda each: each.guard != "off")
        hours = 500.0 / clock * (1 + 0.1 * guarded) * (1 + 0.01 * many.tensor)
        usual = Objectives(
            hours=hours,
            kwh=hours * (1 + 4 * clock**2.5),
            lost_hours=hours * (0.1 - 0.06 * guarded),
            loss_difference=0.01 * many.recompute,
            money=hours * (1 + 4 * clock**2.5) * 0.2,
            memory_bytes=np.full(len(block), 40e9),
            capacity_bytes=many.memory_bytes,
            fits=np.ones(len(block), dtype=bool),
            cliff=np.zeros(len(block), dtype=bool),
            half_widths={"hours": np.array([0.1]), "lost_hours": np.array([0.3])},
        )
        return replace(usual, **changed)

    return search(there, evaluate)


def content(text: str) -> dict:
    found = re.search(r'<script type="application/json" id="content">(.*?)</script>', text, re.S)
    assert found is not None
    return json.loads(found.group(1))


def test_the_page_loads_nothing_from_anywhere() -> None:
    text = page(front())
    assert "default-src 'none'" in text
    # Plotly's own code names addresses; the page itself refers to none.
    own = text.replace(max(re.findall(r"<script>.*?</script>", text, re.S), key=len), "")
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", own)
    assert "://" not in own
    assert "$" not in re.sub(r"\$\{", "", own)


def test_the_page_holds_every_point_with_its_interval() -> None:
    found = front()
    data = content(page(found))
    names = [each["name"] for each in data["figures"]]
    assert names[:3] == ["hours", "kwh", "lost_hours"]
    assert len(data["points"]) == len(found)
    low, middle, high = data["points"][0]["figures"][0]
    assert middle == pytest.approx(found.objectives.hours.min(), rel=1e-5)
    assert low == pytest.approx(middle * np.exp(-0.1), rel=1e-4)
    assert high == pytest.approx(middle * np.exp(0.1), rel=1e-4)
    assert (
        data["points"][0]["configuration"]["data"] * data["points"][0]["configuration"]["tensor"]
        == 8
    )


def test_the_page_says_whose_layouts_it_shows() -> None:
    found = front()
    assert "; no framework named;" in page(found)
    named = replace(found, space=replace(found.space, framework="torchtitan"))
    assert "; layouts of torchtitan;" in page(named)


def test_knee_and_limits_are_those_of_the_queries() -> None:
    found = front().ordered()
    data = content(page(found, within=["700 h"], minimise="kwh"))
    assert data["knee"] == found.knee
    assert data["limits"] == {"hours": 700.0}
    chosen = found.best("kwh", kept(found.objectives, {"hours": 700.0}))
    inside = [p for p, each in enumerate(data["points"]) if each["figures"][0][1] <= 700.0]
    assert min(inside, key=lambda p: data["points"][p]["figures"][1][1]) == chosen


def test_the_table_needs_no_script() -> None:
    found = front()
    text = page(found)
    body = text[text.index("<tbody>") : text.index("</tbody>")]
    assert body.count("<tr ") == len(found)
    assert "DP 8 DDP" in body
    assert "guard linear" in body
    assert "data-sort" in text


def test_many_points_are_thinned_and_the_page_says_so() -> None:
    found = front(clocks=900)
    assert len(found) > SHOWN
    text = page(found)
    shown = len(content(text)["points"])
    assert 10 < shown <= SHOWN
    assert f"Shown are {shown:,}: each point that is left out is at most" in text
    assert f"{len(found):,} on the exact front" in text


def test_what_is_unknown_is_said() -> None:
    text = page(front(kwh=Unavailable("no power is given <here>")), within=["3 MWh"])
    assert "No energy: no power is given &lt;here&gt;." in text
    assert "energy is not known" in text
    assert "kwh" not in [each["name"] for each in content(text)["figures"]]


def test_a_budget_that_nothing_keeps_is_said() -> None:
    assert "nothing keeps to time to finish of at most 3.000 h: the least is" in page(
        front(), within=["3 h"]
    )


def test_foreign_text_stays_text() -> None:
    text = page(front(), title="</script><script>alert(1)</script> $x")
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_bad_calls_are_refused() -> None:
    found = front()
    with pytest.raises(PlanError, match="empty front"):
        page(found.taken(np.zeros(len(found), dtype=bool)))
    with pytest.raises(PlanError, match="minimise = 'watts'"):
        page(found, minimise="watts")


def test_words_of_a_candidate() -> None:
    run = Configuration(
        data=64,
        tensor=8,
        pipeline=16,
        stages_per_rank=4,
        schedule="interleaved",
        sharding="parameters",
        sharding_ranks=8,
        sequence=4096,
        micro_batch=1,
        batch=1024,
        recompute="full",
    )
    assert layout_words(run) == (
        "8,192 GPU · TP 8 · PP 16x4 · DP 64 FSDP in groups of 8 · micro-batch 1 · recompute full"
        " · bf16"
    )
    mechanisms = Mechanisms(
        checkpoint_seconds=(600.0,), tiers=(("memory", "shared"),), tensorize=(("btt", 0.25),)
    )
    assert settings_words(mechanisms.settings()[0]) == (
        "checkpoint every 10 min to memory + shared · btt at 25 % rank"
    )


def test_extrapolated_points_say_so_and_a_page_of_them_says_it_first() -> None:
    everywhere = page(front(flags=lambda row: ("no run of <any> was calibrated",)))
    note = everywhere.index("All points are extrapolated: no run of &lt;any&gt; was calibrated.")
    assert note < everywhere.index("<tbody>")
    data = content(everywhere)
    assert all(p["extrapolated"] == ["no run of <any> was calibrated"] for p in data["points"])
    rows = everywhere[everywhere.index("<tbody>") : everywhere.index("</tbody>")]
    assert rows.count("extrapolated: no run of &lt;any&gt; was calibrated") == len(data["points"])

    found = front(flags=lambda row: (f"row {row} is odd",) if row % 2 else ())
    some = sum(bool(found.objectives.extrapolated(point)) for point in range(len(found)))
    text = page(found)
    assert 0 < some < len(found)
    assert f"{some} of {len(found)} points are extrapolated; each of them says why." in text
    assert "are extrapolated" not in page(front(flags=lambda row: ()))
