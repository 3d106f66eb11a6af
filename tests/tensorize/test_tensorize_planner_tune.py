"""Timed plans: choosing, keeping, and saying so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from outlast.errors import TensorizeError
from outlast.tensorize import measure, planner
from outlast.tensorize.contraction import LayerPlan
from outlast.tensorize.layer import BTTLinear, TTLinear
from outlast.tensorize.low_rank import BottleneckLinear, LowRankLinear
from outlast.tensorize.network import block_network
from outlast.tensorize.planner import explain, plan_for
from outlast.tensorize.replace import tensorize

CPU = torch.device("cpu")
NETWORK = block_network(48, 64, 2, in_modes=(6, 8), out_modes=(8, 8))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees the machine's files, or leaves any; and repeats are few."""
    monkeypatch.setenv("OUTLAST_CACHE", str(tmp_path))
    monkeypatch.setattr(measure, "_ROUNDS", 1)
    monkeypatch.setattr(measure, "_LEAST", 1e-6)
    planner.forget()
    yield tmp_path / "tensorize"
    planner.forget()


def _tuned(tokens: int = 64, *, learns: bool = True, anew: bool = False) -> LayerPlan:
    return measure.tune(NETWORK, tokens, torch.float32, CPU, learns=learns, anew=anew)


@pytest.mark.parametrize("learns", [True, False])
def test_a_timed_plan_is_taken_from_then_on_and_in_later_processes(learns: bool) -> None:
    assert not plan_for(NETWORK, 64, torch.float32, CPU, learns).timed
    plan = _tuned(learns=learns)
    assert plan.timed
    assert plan.seconds > 0
    assert plan.dense_seconds > 0
    assert plan_for(NETWORK, 50, torch.float32, CPU, learns) is plan
    planner.forget()
    again = plan_for(NETWORK, 33, torch.float32, CPU, learns)
    assert again == plan
    assert again.timed
    assert (again.seconds, again.dense_seconds) == (plan.seconds, plan.dense_seconds)
    for other in (
        plan_for(NETWORK, 65, torch.float32, CPU, learns),
        plan_for(NETWORK, 64, torch.float32, CPU, not learns),
        plan_for(NETWORK, 64, torch.float64, CPU, learns),
    ):
        assert not other.timed


def test_what_was_timed_is_not_timed_again_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    real = measure.fastest
    monkeypatch.setattr(
        measure, "fastest", lambda actions, *rest: runs.append(len(actions)) or real(actions, *rest)
    )
    plan = _tuned()
    assert _tuned() is plan
    assert len(runs) == 1
    _tuned(anew=True)
    assert len(runs) == 2
    # The dense layer, and at least the plan that the prices planner.
    assert min(runs) >= 2


def test_the_fastest_of_those_timed_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    network = block_network(256, 256, 2, in_modes=(16, 16), out_modes=(16, 16))
    predicted = plan_for(network, 512, torch.float32, CPU, True)
    # Of the dense layer 9 seconds, of the plans 3, 2, 1, ...
    monkeypatch.setattr(
        measure,
        "fastest",
        lambda actions, *_: [9.0, *(float(len(actions) - at) for at in range(1, len(actions)))],
    )
    # A pair of runs may contradict, and then the prices are believed.
    monkeypatch.setattr(measure, "_wins", lambda *_: False)
    assert measure.tune(network, 512, torch.float32, CPU) == predicted
    monkeypatch.setattr(measure, "_wins", lambda *_: True)
    plan = measure.tune(network, 512, torch.float32, CPU, anew=True)
    assert plan != predicted
    assert (plan.seconds, plan.dense_seconds) == (1.0, 9.0)
    # Where it makes no difference, that of the prices is.
    monkeypatch.setattr(measure, "fastest", lambda actions, *_: [9.0] + [1.0] * (len(actions) - 1))
    assert measure.tune(network, 512, torch.float32, CPU, anew=True) == predicted


def test_the_slow_are_dropped_and_the_first_is_not() -> None:
    calls = [0, 0, 0]

    def action(place: int, size: int) -> object:
        calls[place] += 1
        return torch.ones(size).cumsum(0)

    actions = [lambda place=place, size=size: action(place, size)
               for place, size in enumerate((1 << 20, 1 << 4, 1 << 20))]  # fmt: skip
    found = measure.fastest(actions, CPU, 1.0)
    assert found[1] < found[0]
    assert found[1] < found[2]
    assert calls[0] > calls[2]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"version": 1}', '{"version": 0}'])
def test_damaged_files_are_none(own_cache: Path, damage: str) -> None:
    _tuned()
    (path,) = own_cache.iterdir()
    path.write_text(damage)
    planner.forget()
    assert not plan_for(NETWORK, 64, torch.float32, CPU, True).timed
    assert _tuned().timed
    assert json.loads(path.read_text())["plans"]


def test_files_gather_plans(own_cache: Path) -> None:
    _tuned(64)
    _tuned(1, learns=False)
    (path,) = own_cache.iterdir()
    assert len(json.loads(path.read_text())["plans"]) == 2
    planner.forget()
    assert plan_for(NETWORK, 64, torch.float32, CPU, True).timed
    assert plan_for(NETWORK, 1, torch.float32, CPU, False).timed


def test_explanations_say_what_was_timed() -> None:
    assert "timed on this machine" not in explain(NETWORK, 64, torch.float32, CPU)
    _tuned()
    assert "timed on this machine" in explain(NETWORK, 64, torch.float32, CPU)


def test_a_model_is_tuned_shape_by_shape() -> None:
    model = nn.Sequential(
        TTLinear(32, 32, 4, 2), TTLinear(32, 32, 4, 2), nn.Linear(32, 32),
        BTTLinear(32, 64, 1), LowRankLinear(64, 32, 4), BottleneckLinear(32, 32, 4),
    )  # fmt: skip
    lines: list[str] = []
    plans = measure.tune_model(model, 16, seconds=0.1, progress=lines.append)
    assert [line.split()[0] for line in lines] == ["tt", "btt", "low_rank"]
    assert all(plan.timed for plan in plans)
    assert plan_for(model[0].network, 16, torch.float32, CPU, True) is plans[0]


def test_replacing_with_calibration_refuses_what_was_timed_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outlast.tensorize.replace.calibrate_machine", planner.prices_of)
    monkeypatch.setattr(measure, "fastest", lambda actions, *_: [1.0] + [2.0] * (len(actions) - 1))
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    with pytest.raises(TensorizeError, match=r"0\.50x the speed"):
        tensorize(model, form="btt", rank=1, tokens=512, calibrate=True)
    monkeypatch.setattr(measure, "fastest", lambda actions, *_: [2.0] + [1.0] * (len(actions) - 1))
    planner.forget()
    for path in planner.directory().iterdir():
        path.unlink()
    report = tensorize(model, form="btt", rank=1, tokens=512, calibrate=True)
    assert len(report) == 2
    assert all(row.speed == 2.0 for row in report)
