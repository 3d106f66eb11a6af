"""torchtitan's own parser takes the example's recipes, and their models are built."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchtitan", reason="pip install 'outlast[torchtitan]'")

from torchtitan.config.manager import ConfigManager

from outlast.integrations.torchtitan import OutlastCheckpointManager, TwoFactorLinear, job_of

FOLDER = Path(__file__).parents[2] / "examples" / "integrations"


@pytest.mark.parametrize(("recipe", "factored"), [("dense", 0), ("tensorized", 18)])
def test_the_recipes_are_recipes(
    recipe: str, factored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "train_torchtitan", raising=False)
    importlib.invalidate_caches()
    arguments = ["--module", "train_torchtitan", "--config", recipe, "--checkpoint.interval", "3"]
    config = ConfigManager().parse_args(arguments)
    assert isinstance(config.checkpoint, OutlastCheckpointManager.Config)
    assert config.checkpoint.interval == 3
    assert job_of(config).guard.policy == "linear"
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    model.verify_module_protocol()
    found = [each for each in model.modules() if isinstance(each, TwoFactorLinear)]
    assert len(found) == factored
