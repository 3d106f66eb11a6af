"""Structured layers in torchtitan's debug model, and recipes that Outlast changes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_ranks

pytest.importorskip("torchtitan", reason="pip install 'outlast[torchtitan]'")

from titan_runs import Titan, small_model
from torchtitan.config.manager import ConfigManager
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from outlast.errors import IntegrationError, TensorizeError
from outlast.integrations.torchtitan import (
    OutlastCheckpointManager,
    TensorizeConverter,
    TwoFactorLinear,
    use_outlast,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

STEPS = 6


def converted(**given: Any) -> Any:
    """The debug model's settings with some layers replaced."""
    return small_model([TensorizeConverter.Config(**given)]).model


def built(**given: Any) -> Any:
    """That model, initialised as torchtitan does it."""
    with torch.device("meta"):
        model = converted(**given).build()
    model.verify_module_protocol()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    return model


def train(folder: Path, backend: str, **given: Any) -> tuple[dict[int, float], int]:
    """Losses of a run of the tensorized model, and how many layers of it have factors."""
    config = OutlastCheckpointManager.Config(
        enable=True, interval=3, last_save_model_only=False, **given
    )
    layers = [TensorizeConverter.Config(form="cola", rank=32)]
    titan = Titan(config, folder, layers, steps=STEPS, backend=backend)
    factors = [each for each in titan.model.modules() if isinstance(each, TwoFactorLinear)]
    return titan.train(), len(factors)


def train_the_rest(folder: Path, backend: str) -> tuple[dict[int, float], int]:
    return train(folder, backend, load_step=3, load_only=True)


@pytest.mark.distributed
@pytest.mark.supports("torchtitan", "tensorize")
@pytest.mark.parametrize("backend", ["partial_dtensor", "full_dtensor"])
def test_a_tensorized_model_trains_sharded_and_goes_on_from_its_checkpoint(
    tmp_path: Path, backend: str
) -> None:
    (whole, factors), _ = run_ranks(2, train, tmp_path, backend)
    assert factors == 6
    assert whole[STEPS] < whole[1]
    rest = {step: loss for step, loss in whole.items() if step > 3}
    assert run_ranks(2, train_the_rest, tmp_path, backend) == [(rest, factors)] * 2


@pytest.mark.parametrize("form", ["low_rank", "cola"])
def test_products_of_factors_begin_as_large_as_the_dense_weights(form: str) -> None:
    dense = {
        name: each.param_init["weight"]
        for name, each, _, _ in small_model().model.traverse(torchtitan_linear())
    }
    for name, layer in built(form=form, rank=64).named_modules():
        if not isinstance(layer, TwoFactorLinear):
            continue
        weight = torch.empty(layer.out_features, layer.in_features)
        dense[name](weight)
        x = torch.randn(500, layer.in_features)
        expected, found = x @ weight.t(), layer(x)
        assert found.std().item() == pytest.approx(expected.std().item(), rel=0.1)


def torchtitan_linear() -> Any:
    from torchtitan.models.common.linear import Linear

    return Linear.Config


def test_only_what_fits_is_replaced_and_is_smaller() -> None:
    model = built(rank=32, match=["layers.1.feed_forward.w[13]", "lm_head"])
    names = [name for name, each in model.named_modules() if isinstance(each, TwoFactorLinear)]
    assert sorted(names) == ["layers.1.feed_forward.w1", "layers.1.feed_forward.w3", "lm_head"]
    head = model.lm_head
    assert (head.down.weight.shape, head.up.weight.shape) == ((32, 256), (2048, 32))
    # `*` means layers, not the head.
    assert not isinstance(built(match=["*.wo", "*w2"]).lm_head, TwoFactorLinear)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"form": "tt"}, "choose low_rank or cola"),
        ({"activation": "silu"}, "needs form = 'cola'"),
        ({"form": "cola", "activation": "sine"}, "'sine' is not one of"),
        ({"match": ["*.mlp.*"]}, r"'\*\.mlp\.\*' fits no linear layer"),
        ({"rank": 0}, r"layers\.0\.feed_forward\.w1: rank = 0 must be at least 1"),
        ({"rank": 250}, "rank 250 has no fewer parameters than the dense layer"),
        ({"match": ["*.attention.*"]}, "wqkv is cut into three when it is saved"),
    ],
)
def test_what_cannot_be_replaced_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TensorizeError, match=sentence):
        converted(**given)


def test_tensor_parallel_factors_are_refused() -> None:
    class Two:
        tp_enabled, tp = True, 2

    layer = TwoFactorLinear.Config(in_features=8, out_features=8, rank=2).build()
    with pytest.raises(TensorizeError, match=r"tensor_parallel_degree = 2 does not go with"):
        layer.parallelize(Two())


RECIPE = """
from outlast.integrations.torchtitan import use_outlast
from torchtitan.models.llama3.config_registry import llama3_debugmodel

def my_run():
    return use_outlast(llama3_debugmodel(), enable=True, timeout_seconds=60.0)
"""


def test_a_recipe_keeps_its_settings_and_those_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = llama3_debugmodel().checkpoint
    (tmp_path / "my_recipes.py").write_text(RECIPE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_recipes", raising=False)
    importlib.invalidate_caches()
    arguments = ["--module", "my_recipes", "--config", "my_run", "--checkpoint.keep_latest_k", "5"]
    found = ConfigManager().parse_args(arguments).checkpoint
    assert isinstance(found, OutlastCheckpointManager.Config)
    assert (found.enable, found.timeout_seconds, found.keep_latest_k) == (True, 60.0, 5)
    assert found.interval == before.interval
    assert found.last_save_model_only == before.last_save_model_only


def test_unknown_settings_of_a_recipe_are_refused() -> None:
    with pytest.raises(IntegrationError, match="stop_in_tmie = False is no setting of"):
        use_outlast(llama3_debugmodel(), stop_in_tmie=False)
