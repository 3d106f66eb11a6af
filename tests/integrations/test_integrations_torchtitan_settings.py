"""What torchtitan's settings of checkpoints mean for a store, and which make no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_ranks

pytest.importorskip("torchtitan", reason="pip install 'outlast[torchtitan]'")

from titan_runs import Titan, settings
from torchtitan.components.checkpointer import CheckpointManager

from outlast.checkpoint import list_versions, load, storage_of
from outlast.errors import CheckpointError, IntegrationError
from outlast.integrations.torchtitan import OutlastCheckpointManager
from outlast.integrations.torchtitan_checkpoints import joined

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def weights_of(titan: Titan) -> dict[str, torch.Tensor]:
    return {name: each.full_tensor() for name, each in titan.model.named_parameters()}


def last_save_and_first_load(folder: Path) -> dict[str, Any]:
    """What the settings of a run's last save and of the next one's first load do."""
    found: dict[str, Any] = {}
    config = settings(interval=100, last_save_model_only=True, export_dtype="bfloat16")
    first = Titan(config, folder / "a", steps=2)
    first.train()
    weights = weights_of(first)
    contents = folder / "a" / "checkpoint" / "model"
    [version] = list_versions(storage_of(contents))
    catalogue = load(storage_of(contents), version).catalogue
    found["stored"] = {each.dtype for each in catalogue.tensors.values()}
    found["names"] = {name.partition(".")[0] for name in catalogue.tensors}
    rounded = {name: each.bfloat16().float() for name, each in weights.items()}
    for path in (contents, contents / version.folder):
        next_one = Titan(settings(initial_load_path=str(path)), folder / "b")
        assert next_one.manager.load()
        found[f"loaded {path.name}"] = same(weights_of(next_one), rounded)
        found["step"] = next_one.step
        next_one.manager.close()
    try:
        Titan(config, folder / "a", steps=2).manager.load()
    except IntegrationError as error:
        found["refused"] = str(error)
    seed = Titan(settings(create_seed_checkpoint=True), folder / "s")
    seed.manager.save(0, last_step=True)
    seed.manager.close()
    grown = Titan(settings(load_step=0), folder / "s")
    torch.manual_seed(1)
    with torch.no_grad():
        grown.model.init_weights(buffer_device=torch.device("cpu"))
    assert grown.manager.load(step=0)
    found["seed"] = same(weights_of(grown), weights_of(seed)), grown.step
    grown.manager.close()
    config = settings(interval=100, last_save_model_only=True, last_save_in_hf=True)
    exported = Titan(config, folder / "h", steps=2)
    exported.train()
    path = folder / "h" / "checkpoint" / "step-2"
    found["safetensors"] = [each.name for each in path.glob("*.safetensors")]
    config = settings(initial_load_path=str(path), initial_load_in_hf=True)
    imported = Titan(config, folder / "i")
    assert imported.manager.load()
    found["imported"] = same(weights_of(imported), weights_of(exported))
    imported.manager.close()
    # A folder of torchtitan's own manager is taken, too.
    own = CheckpointManager.Config(enable=True, interval=1, last_save_model_only=False)
    theirs = Titan(own, folder / "c", steps=2)
    theirs.train()
    path = str(folder / "c" / "checkpoint" / "step-2")
    for whole in (False, True):
        config = settings(initial_load_path=path, initial_load_model_only=not whole)
        ours = Titan(config, folder / "d", steps=2)
        assert ours.manager.load()
        found[f"theirs {whole}"] = same(weights_of(ours), weights_of(theirs)), ours.step
        ours.manager.close()
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.distributed
def test_a_last_save_holds_the_model_and_begins_another_run(tmp_path: Path) -> None:
    [found] = run_ranks(1, last_save_and_first_load, tmp_path)
    assert found["stored"] == {"bfloat16"}
    assert found["names"] == {"model"}
    assert found["loaded model"]
    assert found["loaded step-00000002-a1"]
    assert found["step"] == 0
    assert "the model of step 2 alone, whose training was complete" in found["refused"]
    assert found["seed"] == (True, 0)
    assert found["safetensors"]
    assert found["imported"]
    assert found["theirs False"] == (True, 0)
    assert found["theirs True"] == (True, 2)


def refusals(folder: Path) -> list[str]:
    """What settings that make no sense are answered with."""
    answers = []
    for given in (
        {"exclude_from_loading": ["optimiser"]},
        {"initial_load_path": str(folder / "nothing")},
        {"load_step": 7},
    ):
        titan = Titan(settings(**given), folder)
        try:
            titan.manager.load(step=titan.load_step)
        except (IntegrationError, CheckpointError) as error:
            answers.append(str(error))
        titan.manager.close()
    disabled = Titan(OutlastCheckpointManager.Config(), folder)
    assert not disabled.manager.load()
    assert not disabled.manager.save(1, last_step=True)
    disabled.manager.close()
    return answers


@pytest.mark.distributed
def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    [(unknown, nowhere, missing)] = run_ranks(1, refusals, tmp_path)
    assert 'names "optimiser"; there are train_state, model, optimizer' in unknown
    assert "is no folder" in nowhere
    assert "step = 7 is not in" in missing


def test_parts_of_a_pipeline_are_one_model() -> None:
    from torch import nn

    def part(*layers: str, **others: nn.Module) -> nn.Module:
        module = nn.Module()
        module.layers = nn.ModuleDict({name: nn.Linear(2, 2) for name in layers})
        for name, each in others.items():
            module.add_module(name, each)
        return module

    parts = [part("0", "1", embedding=nn.Embedding(3, 2)), part("2", head=nn.Linear(2, 3))]
    whole = dict(joined(parts).named_parameters())
    assert {name.rpartition(".")[0] for name in whole} == {
        "layers.0", "layers.1", "layers.2", "embedding", "head",
    }  # fmt: skip
    assert whole["layers.2.weight"] is parts[1].layers["2"].weight
    assert joined(parts[:1]) is parts[0]
    parts[0].scale = nn.Parameter(torch.ones(1))
    with pytest.raises(IntegrationError, match="`scale` of Module lies outside of any layer"):
        joined(parts)
