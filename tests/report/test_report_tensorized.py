"""Tensorized layers in the report, and a dense and a tensorized run against each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from report_runs import TOKENS_PER_STEP, figures_of, run_with
from test_report import page_of, visible

from outlast.records import RanksChanged, Tensorized
from outlast.report.overview import flops_of, load

if TYPE_CHECKING:
    from report_runs import RunMaker


def layer(name: str, rank: int, into: int, out: int) -> dict[str, Any]:
    return {
        "name": name,
        "form": "cola",
        "rank": str(rank),
        "in_features": into,
        "out_features": out,
        "parameters": rank * (into + out),
        "dense_parameters": into * out,
        "flops": 2 * rank * (into + out),
        "dense_flops": 2 * into * out,
    }


def event(**changes: Any) -> Tensorized:
    modules = [layer(f"model.layers.{block}.mlp.up_proj", 16, 64, 192) for block in range(2)]
    modules.append(layer("model.layers.0.self_attn.q_proj", 16, 64, 64))
    known: dict[str, Any] = {
        "form": "cola",
        "wanted_rank": "0.25",
        "modules": modules,
        "kept": {"model.layers.0.<odd>": "rank 16 of 8 x 8 features gains nothing"},
        "parameters": 20_000,
        "dense_parameters": 50_000,
        "flops_per_token": 1.2e5,
        "dense_flops_per_token": 2.4e5,
    }
    return Tensorized(**{**known, **changes})


def part_of(run: RunMaker) -> str:
    words = visible(page_of(run))
    return words[words.rindex("Tensorized layers") :].partition("Guard")[0]


def test_a_dense_model_has_no_table(new_run: Any) -> None:
    assert "The layers of the model are dense." in part_of(run_with(new_run()))


def test_layers_of_a_kind_share_a_row(new_run: Any) -> None:
    part = part_of(run_with(new_run(), event()))
    assert "cola, rank 0.25: 3 layers replaced." in part
    assert "20,000 of 50,000 parameters (0.40x)" in part
    assert "120,000 of 240,000 FLOPs per token (0.50x)" in part
    # Two of 4096 parameters for 12288 each; 8192 of 10240 are 80 %.
    assert "up_proj 2 cola 16 64 → 192 8,192 0.333x 80.0 16,384 0.333x 80.0" in part
    assert "q_proj 1 cola 16 64 → 64 2,048 0.500x 20.0 4,096 0.500x 20.0" in part
    assert "sum 3 10,240 0.357x 100.0" in part


def test_layers_that_stay_dense_say_why(new_run: Any) -> None:
    page = page_of(run_with(new_run(), event()))
    assert "model.layers.0.&lt;odd&gt;" in page
    assert "rank 16 of 8 x 8 features gains nothing" in visible(page)


def test_key_figures_tell_the_share_of_the_dense_model(new_run: Any) -> None:
    words = visible(page_of(run_with(new_run(), event())))
    assert "cola: 0.40x those of the dense model" in words
    assert "forward and backward; 0.50x those of the dense model" in words


def test_changes_of_ranks_are_listed_and_give_the_model_another_size(new_run: Any) -> None:
    run = new_run()
    run.start(flops_per_token=1.2e5, parameters=20_000)
    run.write(event())
    run.ready()
    run.steps(0, 20)
    change = {"name": "q_proj", "bond": "r", "before": 16, "after": 8, "error": 0.05}
    run.write(RanksChanged(20, [change, {**change, "name": "up_proj"}], 10_000, 6e4, 0.5))
    run.steps(20, 40)
    run.end(40, "completed")
    page = visible(page_of(run))
    assert "10,000 of 50,000 parameters (0.20x)" in part_of(run)
    assert "1 20 2 16.0 → 8.0 0.05 10,000 60,000 0.50" in part_of(run)
    assert "60,000 forward and backward; 0.25x those of the dense model" in page


def test_flops_follow_the_ranks_and_what_is_done_again_counts_once(new_run: Any) -> None:
    run = new_run()
    change = [{"name": "q_proj", "bond": "r", "before": 16, "after": 8, "error": None}]
    run.start(flops_per_token=4.0)
    run.ready()
    run.steps(0, 20)
    run.write(RanksChanged(20, change, 10_000, 2.0, 0.5))
    run.steps(20, 30)
    # From a checkpoint of before: nothing is restored that had changed.
    run.start(flops_per_token=4.0)
    run.ready(step=10)
    run.steps(10, 40)
    run.write(RanksChanged(40, change, 10_000, 1.0, 0.5))
    run.steps(40, 60)
    run.end(60, "completed")
    found = flops_of(load([run.path])[0], np.array([0, 20, 40, 60]) * TOKENS_PER_STEP)
    assert found is not None
    assert found.tolist() == [0.0, *(steps * TOKENS_PER_STEP for steps in (80.0, 160.0, 180.0))]


def falling(run: RunMaker, seconds: float, flops: float, offset: float = 0.0) -> RunMaker:
    """100 steps whose loss falls by 0.01 each from 3 + `offset`."""
    run.start(flops_per_token=flops)
    run.ready()
    for step in range(1, 101):
        run.done(step, 1, 3.0 + offset - 0.01 * step, seconds)
    run.end(100, "completed")
    return run


def comparison_of(*runs: RunMaker) -> str:
    words = visible(page_of(*runs, output=runs[0].path / "report.html"))
    return words[words.rindex("Loss for equal effort") :].partition("Throughput")[0]


def test_one_run_has_nothing_to_compare_with(new_run: Any) -> None:
    assert "Loss for equal effort" not in visible(page_of(run_with(new_run())))


def test_runs_are_compared_at_equal_steps_and_flops(new_run: Any) -> None:
    dense = falling(new_run("dense"), 0.2, 2e6)
    small = falling(new_run("small"), 0.1, 1e6, offset=0.1)
    found = comparison_of(dense, small)
    assert "steps 100" in found
    # At the same step 0.1 above; with the small one's FLOPs the dense one has done half the steps.
    steps = found.partition("steps 100 ")[2].split()
    assert float(steps[1]) - float(steps[0]) == pytest.approx(0.1, abs=0.005)
    assert float(steps[2]) == pytest.approx(0.1, abs=0.005)
    flops = found.partition("FLOPs ")[2].partition("FLOPs ")[2].split()
    assert float(flops[-1] if len(flops) < 4 else flops[3]) == pytest.approx(-0.4, abs=0.02)


def test_the_price_of_a_loss_is_a_ratio(new_run: Any) -> None:
    dense = falling(new_run("dense"), 0.2, 2e6)
    small = falling(new_run("small"), 0.1, 1e6)
    spent = comparison_of(dense, small).partition("What it took to")[2]
    rows = spent.partition("spent dense small")[2]
    assert "steps 100 100 1.000x" in rows
    assert "0.500x" in rows.partition("FLOPs")[2]
    seconds = rows.partition("time in steps")[2].partition("x ")[0].split()
    assert float(seconds[-1]) == pytest.approx(0.5, abs=0.05)


def test_the_loss_can_be_seen_against_flops(new_run: Any) -> None:
    dense = falling(new_run("dense"), 0.2, 2e6)
    small = falling(new_run("small"), 0.1, 1e6)
    page = page_of(dense, small, output=dense.path / "report.html")
    views = figures_of(page)["loss"]["views"]
    assert [view["title"] for view in views][-1] == "FLOPs of the model"
    ends = sorted({positions[-1] for positions in views[-1]["x"]})
    assert ends[-1] / ends[0] == pytest.approx(2.0, rel=1e-4)


def test_a_run_without_losses_is_not_compared(new_run: Any) -> None:
    empty = new_run("empty")
    empty.start()
    empty.close()
    assert "not every run has recorded a loss" in comparison_of(
        falling(new_run("dense"), 0.2, 2e6), empty
    )
