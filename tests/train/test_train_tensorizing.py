"""From [tensorize] to rules of the optimizer, sizes, warnings, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outlast.job import OptimizerSection, TensorizeSection, load_job
from outlast.records import Tensorized
from outlast.tensorize import BottleneckLinear, BTTLinear, LowRankLinear, TTLinear
from outlast.tensorize.optimizers import ProductDecay, UnfoldedMuon
from outlast.tensorize.parameters import structured_layers
from outlast.train.model import flops_per_token, products_per_token, size_of
from outlast.train.optimizer import build_optimizers
from outlast.train.tensorizing import (
    SpikeWatch,
    add_update_rules,
    build_whole_model,
    export_note,
    factor_rules,
    slow_layers,
    starts_from_dense,
)


class Mixed(nn.Module):
    """An embedding, one layer of every kind that optimizers treat by itself, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.plain = nn.Linear(8, 8)
        self.two = LowRankLinear(8, 8, 2)
        self.blocks = BTTLinear(8, 8, 1)
        self.train_ = TTLinear(8, 8, 2, cores=2)
        self.head = nn.Linear(8, 11, bias=False)


def places(model: nn.Module, form: TensorizeSection, **settings: object) -> dict[str, tuple]:
    """Parameter name -> (optimizer class, weight decay, peak rate); each parameter once."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    optimizers = build_optimizers(model, OptimizerSection(**settings), factor_rules(model, form))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                kind = type(optimizer).__name__
                found[names.pop(id(parameter))] = kind, group["weight_decay"], group["initial_lr"]
    assert not names, "every parameter is in exactly one group"
    return found


def test_muon_gets_factors_and_unfolded_cores_but_no_vectors() -> None:
    found = places(Mixed(), TensorizeSection(form="tt"), name="muon", weight_decay=0.1)
    kinds = {name: kind for name, (kind, _, _) in found.items()}
    assert {name for name, kind in kinds.items() if kind == "Muon"} == {
        "plain.weight", "two.down.weight", "two.up.weight",
    }  # fmt: skip
    cores = {name for name in kinds if ".cores." in name}
    assert len(cores) == 2 + 4
    assert {name for name, kind in kinds.items() if kind == "UnfoldedMuon"} == cores
    assert {kinds["embed.weight"], kinds["head.weight"], kinds["blocks.bias"]} == {"AdamW"}


def test_products_that_are_decayed_have_factors_that_are_not() -> None:
    form = TensorizeSection(form="tt", product_weight_decay=True)
    for name in ("adamw", "muon"):
        found = places(Mixed(), form, name=name, weight_decay=0.3)
        decays = {name: decay for name, (_, decay, _) in found.items()}
        assert decays["plain.weight"] == decays["embed.weight"] == 0.3
        factors = [name for name in decays if ".cores." in name or name.startswith("two.")]
        assert all(decays[name] == 0.0 for name in factors)


def test_mup_gives_every_core_a_rate_of_its_own() -> None:
    model = Mixed()
    found = places(model, TensorizeSection(form="tt", mup=True), learning_rate=0.01)
    assert found["plain.weight"][2] == 0.01
    # Fan in 8 of 8 features, and 2; half of it each, since there are two factors.
    assert found["two.down.weight"][2] == pytest.approx(0.01 * 8 / 8 / 2)
    assert found["two.up.weight"][2] == pytest.approx(0.01 * 8 / 2 / 2)


def test_rules_are_added_once_and_act() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(LowRankLinear(8, 8, 2), nn.Linear(8, 8))
    form = TensorizeSection(form="low_rank", product_weight_decay=True, spectral_limit=1e-3)
    settings = OptimizerSection(learning_rate=0.1, weight_decay=0.0)
    optimizers = build_optimizers(model, settings, factor_rules(model, form))
    add_update_rules(model, optimizers, form, settings)
    before = model[0].to_dense().detach()
    model(torch.randn(5, 8)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    change = torch.linalg.matrix_norm(model[0].to_dense() - before, 2)
    assert 0 < float(change.detach()) <= 1.001e-3


def test_a_model_without_structured_layers_gets_no_rules() -> None:
    model = nn.Linear(4, 4)
    form = TensorizeSection(form="cola", spectral_limit=0.1, product_weight_decay=True)
    optimizers = build_optimizers(model, OptimizerSection(), factor_rules(model, form))
    add_update_rules(model, optimizers, form, OptimizerSection())
    assert not any(isinstance(each, UnfoldedMuon | ProductDecay) for each in optimizers)


@pytest.mark.parametrize(
    ("layer", "products"),
    [
        (LowRankLinear(12, 20, 3), 3 * 32),
        (BottleneckLinear(12, 20, 12), 12 * 32),
        # A chain that would take more is rebuilt: a low-rank layer, but not with a nonlinearity.
        (LowRankLinear(12, 20, 12), 12 * 20),
        (BTTLinear(16, 16, 1), 4 * 4 * 4 + 4 * 4 * 4),
        # Merged to (in, bond) and (bond, out), whatever the cores hold.
        (TTLinear(64, 64, 2, cores=2), 2 * 128),
    ],
)
def test_what_is_multiplied_is_counted(layer: nn.Module, products: int) -> None:
    [factored] = structured_layers(layer)
    assert products_per_token(factored) == products
    assert flops_per_token(layer, 16) == 6 * products


def test_the_whole_model_depends_on_the_seed_alone() -> None:
    settings = [
        "model.settings.hidden_size=32", "model.settings.intermediate_size=64",
        "model.settings.num_hidden_layers=1", "tensorize.form=btt", "tensorize.rank=1",
    ]  # fmt: skip
    job = load_job(None, settings)
    torch.manual_seed(5)
    first, event = build_whole_model(job)
    torch.manual_seed(6)
    second, _ = build_whole_model(job)
    other, _ = build_whole_model(load_job(None, [*settings, "run.seed=1"]))
    state = first.state_dict()
    assert all(torch.equal(state[name], each) for name, each in second.state_dict().items())
    core = "model.layers.0.mlp.up_proj.cores.0"
    assert not torch.equal(state[core], other.state_dict()[core])
    assert event is not None
    assert event.parameters == size_of(first, 16).parameters < event.dense_parameters
    assert not any("lm_head" in each["name"] for each in event.modules)


def test_a_dense_job_builds_a_dense_model() -> None:
    model, event = build_whole_model(load_job(None, ["model.settings.num_hidden_layers=1"]))
    assert event is None
    assert not list(structured_layers(model))


def test_spikes_are_told_by_the_step_at_which_they_began() -> None:
    watch = SpikeWatch()
    generator = torch.Generator().manual_seed(0)
    losses = (2.0 + 0.01 * torch.randn(400, generator=generator)).tolist()
    calm = [watch.observe(101 + number, loss) for number, loss in enumerate(losses)]
    assert calm == [None] * 400
    warnings = [watch.observe(501 + number, 3.0) for number in range(10)]
    found = [each.message for each in warnings if each is not None]
    assert len(found) == 1
    assert found[0].startswith("the loss has jumped at step 501, to 3 from 2")
    warning = watch.observe(511, float("nan"))
    assert warning is not None
    assert "the loss of step 511 is nan" in warning.message


def event_of(*speeds: float | None) -> Tensorized:
    modules = [{"name": f"m{n}", "predicted_speed": speed} for n, speed in enumerate(speeds)]
    return Tensorized("btt", "2", modules, {}, 1, 2, 1.0, 2.0)


def test_slow_layers_are_named() -> None:
    assert slow_layers(event_of(None, 1.0, 2.0, 0.96)) is None
    warning = slow_layers(event_of(2.0, 0.8, 0.5))
    assert warning is not None
    assert "2 of 3 btt layers" in warning.message
    assert "m2 by 2.00x" in warning.message


def test_factors_start_from_dense_weights_where_there_are_any() -> None:
    assert not starts_from_dense(load_job(None, ["tensorize.form=btt"]))
    assert not starts_from_dense(load_job(None, []))


def test_only_what_is_no_matrix_needs_a_note() -> None:
    assert export_note(TensorizeSection(form="off")) is None
    assert export_note(TensorizeSection(form="btt")) is None
    assert "no matrices" in str(export_note(TensorizeSection(form="cola")))
