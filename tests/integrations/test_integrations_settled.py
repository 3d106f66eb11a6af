"""Tensors of an object that are copied in the background, and those that are not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outlast.recover.restart import Keeper
from outlast.runtime.memory import only_settled, places_of, settled

if TYPE_CHECKING:
    from pathlib import Path


def stepped() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model behind a step of its optimizer."""
    model = nn.BatchNorm1d(3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def test_parameters_and_states_are_told_from_all_other_tensors() -> None:
    model, optimizer = stepped()
    content = {"model": dict(model.state_dict()), "all": [optimizer.state_dict()], "rate": 0.5}
    found = settled(content, places_of([model], [optimizer]))
    kept: dict[str, Any] = only_settled(found)
    assert {name for name, each in kept["model"].items() if each is not None} == {"weight", "bias"}
    assert kept["model"]["weight"].data_ptr() == model.weight.data_ptr()
    moments = kept["all"][0]["state"][0]
    assert torch.equal(moments["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    assert kept["rate"] is None
    # What is left out is unchanged in the whole.
    assert found["model"]["running_mean"] is content["model"]["running_mean"]
    assert (found["rate"], found["all"][0]["param_groups"][0]["lr"]) == (0.5, 1e-3)


class Whole:
    """A model as the content of one object."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.content: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return settled(dict(self.model.state_dict()), places_of([self.model], []))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.content = state


def test_a_parameter_that_has_moved_is_kept_from_where_it_is(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    keeper = Keeper({"it": Whole(model)}, "run", "one", memory=tmp_path)
    keeper.keep(1)
    keeper.settle()
    model.weight = nn.Parameter(torch.full((2, 3), 7.0))
    keeper.keep(2)
    keeper.close()
    again = Whole(nn.Linear(3, 2))
    found = Keeper({"it": again}, "run", "one", memory=tmp_path).restore()
    assert found is not None
    assert found.step == 2
    assert torch.equal(again.content["weight"], torch.full((2, 3), 7.0))
