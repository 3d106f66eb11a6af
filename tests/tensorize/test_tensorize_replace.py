import copy
import math
import operator
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from outlast.errors import TensorizeError
from outlast.tensorize import StructuredLinear, tensorize
from outlast.tensorize.embedding import TiedHead
from outlast.tensorize.policy import Choice
from outlast.tensorize.shapes import FORMS

CONVERTED = ("low_rank", "tt", "ttm", "btt", "monarch", "tucker", "cp", "sltrain")


class Block(nn.Module):
    """Two linear layers around a nonlinearity."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self, width: int = 64, inner: int = 96, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(blocks))
        self.lm_head = nn.Linear(width, 50, bias=False)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        x = self.embed(index)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def _model(seed: int = 0, **sizes: int) -> Model:
    torch.manual_seed(seed)
    return Model(**sizes)


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def _rank(form: str) -> int | float:
    return 4 if form == "monarch" else 2 if form in ("btt", "ttm", "tucker", "cp") else 0.25


@pytest.mark.parametrize("form", FORMS)
def test_every_form_takes_the_place_of_linear_layers(form: str) -> None:
    model = _model()
    report = tensorize(model, form, _rank(form), force=True)
    assert [row.name for row in report] == [
        "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"
    ]  # fmt: skip
    assert type(model.embed) is nn.Embedding
    assert type(model.lm_head) is nn.Linear
    assert all(isinstance(model.get_submodule(row.name), StructuredLinear) for row in report)
    assert {row.form for row in report} == {form}
    loss = model(torch.randint(50, (3, 5))).square().mean()
    loss.backward()
    learned = [parameter for parameter in model.blocks.parameters() if parameter.numel()]
    assert all(parameter.grad is not None for parameter in learned)
    assert report.parameters == sum(parameter.numel() for parameter in model.parameters())
    again = copy.deepcopy(model)
    again.load_state_dict(model.state_dict())


@pytest.mark.parametrize("form", ["low_rank", "tt", "ttm", "btt", "monarch", "sltrain"])
def test_products_start_like_the_weights_they_replace(form: str) -> None:
    model = _model(width=128, inner=192)
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(3.0)
        model.blocks[1].down.weight.zero_()
    before = {name: layer.weight.detach().square().mean().sqrt() for name, layer in _linears(model)}
    biases = {name: layer.bias for name, layer in _linears(model)}
    report = tensorize(model, form, 8 if form == "tt" else _rank(form), force=True)
    for row in report:
        layer = model.get_submodule(row.name)
        after = layer.to_dense().square().mean().sqrt()
        assert float(after.detach()) == pytest.approx(float(before[row.name]), rel=0.05)
        assert row.std == pytest.approx(float(before[row.name]), rel=1e-5)
        if biases[row.name] is None:
            assert layer.bias is None
        else:
            assert torch.equal(layer.bias, biases[row.name])


def _linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(name, layer) for name, layer in model.named_modules() if type(layer) is nn.Linear]


def test_a_nonlinearity_starts_with_outputs_of_the_same_size() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512, bias=False))
    x = torch.randn(256, 512)
    dense = model(x).std()
    tensorize(model, "cola", 0.5, force=True)
    assert float((model(x).std() / dense).detach()) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("form", CONVERTED)
def test_conversion_comes_as_near_as_the_table_says(form: str) -> None:
    model = _model()
    dense = {name: layer.weight.detach().clone() for name, layer in _linears(model)}
    report = tensorize(model, form, _rank(form), init="from_dense", force=True)
    for row in report:
        weight = dense[row.name]
        lost = (model.get_submodule(row.name).to_dense().detach() - weight).norm() / weight.norm()
        assert row.error == pytest.approx(float(lost), rel=1e-3)
        assert 0.1 < row.error < 1.0


@pytest.mark.parametrize("form", ["low_rank", "btt", "tt", "ttm"])
def test_conversion_at_full_rank_changes_nothing(form: str) -> None:
    model = _model()
    index = torch.randint(50, (2, 7))
    before = model(index)
    rank = {"low_rank": 64, "btt": 8, "tt": 10_000, "ttm": 10_000}[form]
    tensorize(model, form, rank, init="from_dense", force=True)
    assert torch.allclose(model(index), before, atol=1e-4)


@pytest.mark.parametrize("form", ["cola", "lax"])
def test_what_cannot_be_converted_is_refused_with_the_remedy(form: str) -> None:
    model = _model()
    before = _state(model)
    with pytest.raises(TensorizeError, match="init = 'from_dense' does not go with") as refused:
        tensorize(model, form, 0.25, init="from_dense")
    assert "distil" in str(refused.value) or form != "cola"
    assert _state(model).keys() == before.keys()


def test_a_rank_that_is_too_large_to_convert_is_refused_by_name() -> None:
    model = _model()
    with pytest.raises(TensorizeError, match=r"blocks\.0\.up: rank = 65"):
        tensorize(model, "low_rank", 65, init="from_dense", force=True)
    assert type(model.blocks[0].up) is nn.Linear


def test_device_dtype_mode_and_freezing_are_kept() -> None:
    model = _model().to(torch.float64).eval()
    model.blocks[0].up.requires_grad_(False)
    model.blocks[1].up.weight.requires_grad_(False)
    tensorize(model, "tt", 4, force=True)
    first, second = model.blocks[0].up, model.blocks[1].up
    assert all(parameter.dtype == torch.float64 for parameter in model.parameters())
    assert not first.training
    assert not any(parameter.requires_grad for parameter in first.parameters())
    assert not any(core.requires_grad for core in second.cores)
    assert second.bias.requires_grad
    assert all(parameter.requires_grad for parameter in model.blocks[0].down.parameters())


def test_models_without_memory_stay_so_and_are_drawn_later() -> None:
    with torch.device("meta"):
        model = Model()
    report = tensorize(model, "low_rank", 0.25, force=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert report.replaced[0].std == pytest.approx(1 / math.sqrt(3 * 64))
    model.to_empty(device="cpu")
    report.redraw(torch.Generator().manual_seed(3))
    weight = model.blocks[0].up.to_dense().detach()
    assert float(weight.std()) == pytest.approx(1 / math.sqrt(3 * 64), rel=0.05)
    assert torch.count_nonzero(model.blocks[0].up.bias) == 0
    with torch.device("meta"), pytest.raises(TensorizeError, match="meta device"):
        tensorize(Model(), "low_rank", 0.25, init="from_dense", force=True)


def test_the_config_says_how_large_weights_without_memory_are() -> None:
    with torch.device("meta"):
        model = Model()
    model.config = type("Config", (), {"initializer_range": 0.02})()
    assert tensorize(model, force=True).replaced[0].std == 0.02


@pytest.mark.parametrize("form", ["low_rank", "tt", "sltrain", "cola"])
def test_the_same_seed_gives_the_same_model(form: str) -> None:
    states = []
    for seed in (5, 5, 6):
        model = _model()
        tensorize(
            model, form, _rank(form), force=True, generator=torch.Generator().manual_seed(seed)
        )
        states.append(_state(model))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert any(not torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_other_layers_do_not_change_a_layers_numbers() -> None:
    whole, part = _model(), _model()
    tensorize(whole, force=True, generator=torch.Generator().manual_seed(5))
    tensorize(part, match="blocks.1.up", force=True, generator=torch.Generator().manual_seed(5))
    assert torch.equal(whole.blocks[1].up.up.weight, part.blocks[1].up.up.weight)
    assert not torch.equal(whole.blocks[0].up.up.weight, whole.blocks[1].up.up.weight)


def test_one_module_in_two_places_is_replaced_once() -> None:
    model = _model()
    model.blocks[1].up = model.blocks[0].up
    report = tensorize(model, force=True)
    assert model.blocks[1].up is model.blocks[0].up
    assert isinstance(model.blocks[0].up, StructuredLinear)
    assert len(report) == 3


@pytest.mark.parametrize(
    ("form", "init"),
    [
        *((form, "scratch") for form in ("low_rank", "cola", "tt", "sltrain")),
        *((form, "from_dense") for form in ("low_rank", "tt", "sltrain")),
    ],
)
def test_layers_that_share_a_weight_share_factors(form: str, init: str) -> None:
    model = _model()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    report = tensorize(model, form, 0.25, match="*.up", init=init, force=True)  # type: ignore[arg-type]
    first, second = model.blocks[0].up, model.blocks[1].up
    assert first is not second
    shared = {id(core) for core in first.parameters()} & {id(core) for core in second.parameters()}
    assert len(shared) == sum(1 for _ in first.parameters()) - 1
    assert first.bias is not second.bias
    assert torch.equal(first.to_dense(), second.to_dense()) if form != "cola" else True
    assert [row.parameters > 0 for row in report] == [True, False]
    assert report.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_half_of_a_tie_is_refused() -> None:
    model = _model()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    with pytest.raises(TensorizeError, match=r"blocks\.0\.up and blocks\.1\.up share a weight"):
        tensorize(model, match="blocks.0.*", force=True)
    model = _model()
    model.lm_head.weight = model.embed.weight
    with pytest.raises(TensorizeError, match="tie_word_embeddings = False"):
        tensorize(model, match=["*", "lm_head"], force=True)
    assert type(model.lm_head) is nn.Linear


@pytest.mark.parametrize("form", ["low_rank", "tt", "ttm"])
@pytest.mark.parametrize("init", ["scratch", "from_dense"])
def test_a_tied_head_takes_the_factors_of_the_embedding(form: str, init: Any) -> None:
    model = _model()
    model.lm_head = nn.Linear(64, 50)
    model.lm_head.weight = model.embed.weight
    bias = model.lm_head.bias.detach().clone()
    report = tensorize(model, form, 4, ["embed", "lm_head"], init=init, force=True)
    head = model.lm_head
    assert isinstance(head, TiedHead)
    assert head.embedding is model.embed
    assert torch.equal(head.bias, bias)
    assert [row.name for row in report] == ["embed", "lm_head"]
    assert report.replaced[1].parameters == 0
    assert report.replaced[1].flops_per_token > 0
    assert "shared" in str(report)
    x = torch.randn(3, 64)
    torch.testing.assert_close(head(x), x @ model.embed.to_dense().t() + bias)
    model(torch.tensor([[1, 2]])).sum().backward()
    assert all(each.grad is not None for each in model.parameters())
    other = copy.deepcopy(model)
    other.load_state_dict(model.state_dict())
    assert other.lm_head.embedding is other.embed


def _tied_model(rows: int, width: int) -> Any:
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(rows, width),
            "up": nn.Linear(768, 768),
            "down": nn.Linear(768, 768),
            "lm_head": nn.Linear(width, rows, bias=False),
        }
    )
    model.lm_head.weight = model.embed.weight
    return model


def test_a_tied_head_that_would_be_slower_stays_dense_with_its_embedding() -> None:
    model: Any = _tied_model(512, 64)
    names = ["*", "embed", "lm_head"]
    policy = [("embed", "ttm", 4), ("lm_head", "ttm", 4), ("*", "low_rank", 0.1)]
    report = tensorize(model, match=names, policy=policy)
    assert [row.name for row in report] == ["up", "down"]
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight is model.embed.weight
    kept = {row.name: row.why for row in report.kept}
    assert "ttm at rank" in kept["lm_head"]
    assert "x the speed of dense (64 x 512, 4096 tokens)" in kept["lm_head"]
    assert "shares its weight with lm_head, which stays dense" in kept["embed"]
    model = _tied_model(512, 64)
    with pytest.warns(UserWarning, match="slower"):
        tensorize(model, "ttm", 4, ["embed", "lm_head"], force=True)
    assert isinstance(model.lm_head, TiedHead)
    model = _tied_model(2000, 768)
    report = tensorize(model, "low_rank", 0.1, ["embed", "lm_head"])
    assert [row.name for row in report] == ["embed", "lm_head"]
    assert (report.replaced[1].speed or 0.0) > 1.0


def test_the_speed_of_a_tied_head_is_unknown_where_nothing_is_priced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from outlast.tensorize import replace

    monkeypatch.setattr(
        replace._Settings, "computed", lambda *_: (torch.float32, torch.device("mps"))
    )
    model: Any = _tied_model(200, 64)
    with pytest.warns(UserWarning, match="the speed of lm_head .* is unknown"):
        report = tensorize(model, "low_rank", 4, ["embed", "lm_head"])
    assert [row.speed for row in report] == [None, None]


def test_a_tied_head_of_a_form_without_embeddings_is_refused() -> None:
    model = _model()
    model.lm_head.weight = model.embed.weight
    with pytest.raises(TensorizeError, match=r"embed: form = 'btt' has no embedding"):
        tensorize(model, "btt", 1, ["embed", "lm_head"], force=True)


def test_a_dense_weight_that_is_not_finite_is_named() -> None:
    model = _model()
    with torch.no_grad():
        model.blocks[1].up.weight[0, 0] = math.nan
    with pytest.raises(TensorizeError, match=r"blocks\.1\.up .* not finite.*exclude it"):
        tensorize(model, force=True)
    assert type(model.blocks[0].up) is nn.Linear


@pytest.mark.parametrize("gate", ["identity", "scalar", "vector"])
def test_layers_with_latent_crossing_have_the_gate_that_is_asked_for(gate: Any) -> None:
    model = _model(blocks=3)
    tensorize(model, "lax", 4, "*.up", gate=gate, activation="tanh", force=True)
    last = model.blocks[2].up
    shape = None if last.gate is None else tuple(last.gate.shape)
    assert shape == {"identity": None, "scalar": (1,), "vector": (4,)}[gate]
    assert last.activation == "tanh"
    assert model.blocks[0].up.gate is None


def test_learned_gates_stay_when_other_layers_are_replaced_later() -> None:
    model = _model(blocks=3)
    tensorize(model, "lax", 4, "*.up", gate="vector", force=True)
    gate = model.blocks[2].up.gate
    with torch.no_grad():
        gate.fill_(0.5)
    tensorize(model, "lax", 4, "*.down", force=True)
    assert model.blocks[2].up.gate is gate
    assert model.blocks[2].down._taken is not None
    assert model.blocks[2].down.gate is None


def test_a_line_that_grows_keeps_its_gates() -> None:
    model = _model(blocks=3)
    tensorize(model, "lax", 4, ["blocks.0.up", "blocks.1.up"], gate="scalar", force=True)
    gate = model.blocks[1].up.gate
    with torch.no_grad():
        gate.fill_(0.5)
    tensorize(model, "lax", 4, "blocks.2.up", gate="scalar", force=True)
    assert model.blocks[1].up.gate is gate
    assert model.blocks[2].up._taken is model.blocks[1].up._left
    assert model.blocks[2].up.gate.tolist() == [1.0]


def test_gates_that_do_not_go_together_are_refused() -> None:
    policy = [("*.up", Choice("lax", 4)), ("*.down", Choice("lax", 4, gate="scalar"))]
    with pytest.raises(TensorizeError, match="gates identity, scalar"):
        tensorize(_model(), policy=policy, force=True)
    with pytest.raises(TensorizeError, match="gate = 'door' is not one of"):
        tensorize(_model(), "lax", 4, gate="door", force=True)  # type: ignore[arg-type]


def test_sparse_layers_have_the_density_that_is_asked_for() -> None:
    model = _model()
    tensorize(model, "sltrain", 4, "blocks.0.up", density=0.1, force=True)
    assert model.blocks[0].up.values.numel() == round(0.1 * 64 * 96)
    with pytest.raises(TensorizeError, match="density = 2"):
        tensorize(model, "sltrain", 4, "blocks.1.up", density=2.0, force=True)


def _on_ranks(form_of_rank_1: str) -> str:
    dist.init_process_group("gloo")
    form = form_of_rank_1 if dist.get_rank() == 1 else "low_rank"
    model = _model()
    try:
        tensorize(model, form, 4, force=True)
    except TensorizeError as error:
        assert type(model.blocks[0].up) is nn.Linear
        return str(error)
    return ""


@pytest.mark.distributed
def test_ranks_that_would_differ_are_refused_on_all(ranks: Any) -> None:
    assert ranks(2)(_on_ranks, "low_rank") == ["", ""]
    said = ranks(2)(_on_ranks, "tt")
    assert said[0] == said[1]
    assert "blocks.0.up would become low_rank at rank 4 on rank 0 and tt at rank 4" in said[0]


def _stages() -> str:
    dist.init_process_group("gloo")
    stage = dist.get_rank()
    model = nn.ModuleDict({f"block {stage}": nn.Linear(16, 16)})
    tensorize(model, "low_rank", 4 + stage, force=True)
    return type(model[f"block {stage}"]).__name__


@pytest.mark.distributed
def test_ranks_with_other_layers_need_not_agree(ranks: Any) -> None:
    assert ranks(2)(_stages) == ["LowRankLinear"] * 2


@pytest.mark.parametrize("form", ["low_rank", "cola", "tt", "lax"])
def test_t5_which_reads_the_dtype_of_a_layers_weight(form: str) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    tensorize(model, form, 4, "*.DenseReluDense.*", force=True)
    index = torch.randint(50, (2, 5))
    model(input_ids=index, labels=index).loss.backward()
    assert model.encoder.block[0].layer[1].DenseReluDense.wo.factors()[0].grad is not None


def test_what_gains_nothing_stays_dense_and_is_listed() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 12))
    report = tensorize(model, "low_rank", 64)
    assert isinstance(model[0], StructuredLinear)
    assert type(model[1]) is nn.Linear
    assert list(report.refused) == ["1"]
    assert "has 17152 parameters, dense 3072" in report.refused["1"]
    assert "kept dense: 1: low_rank at rank 64" in str(report)


def test_a_model_that_gains_nothing_is_refused_unless_forced() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(TensorizeError, match=r"5120 parameters, dense 4096.*force = True"):
        tensorize(model, "low_rank", 40)
    assert type(model[0]) is nn.Linear
    tensorize(model, "low_rank", 40, force=True)
    assert isinstance(model[0], StructuredLinear)


def test_what_is_predicted_to_be_slower_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from outlast.tensorize import replace
    from outlast.tensorize.contraction import LayerPlan
    from outlast.tensorize.network import Route

    slow = LayerPlan(
        Route((1, 1)), Route((1, 1)), (Route((1, 1)),) * 2, seconds=2.0, dense_seconds=1.0
    )
    monkeypatch.setattr(replace, "plan_for", lambda *_: slow)
    with pytest.raises(TensorizeError, match=r"0\.50x the speed of dense \(64 x 64, 77 tokens\)"):
        tensorize(nn.Sequential(nn.Linear(64, 64)), tokens=77)
    report = tensorize(nn.Sequential(nn.Linear(64, 64)), tokens=77, force=True)
    assert report.replaced[0].speed == 0.5


@pytest.mark.parametrize("form", ["low_rank", "lax"])
def test_one_refusal_changes_nothing(form: str) -> None:
    model = _model()
    model.blocks[1].down.register_forward_hook(lambda *_: None)
    layers = list(model.modules())
    with pytest.raises(TensorizeError, match=r"blocks\.1\.down has hooks"):
        tensorize(model, form, force=True)
    assert list(model.modules()) == layers


def test_latents_cross_between_layers_of_one_name() -> None:
    model = _model(blocks=3)
    tensorize(model, "lax", 0.25, force=True)
    x = torch.randn(4, 64)
    for block in model.blocks:
        x = block(x)
    first = model.blocks[0].up.down.weight
    (gradient,) = torch.autograd.grad(x.sum(), first, retain_graph=True)
    assert gradient.abs().sum() > 0
    with pytest.raises(TensorizeError, match="no matrix"):
        model.blocks[1].up.to_dense()


def test_what_is_structured_already_is_left_alone() -> None:
    model = _model()
    tensorize(model, "low_rank", 0.25, match="*.up", force=True)
    first = model.blocks[0].up
    report = tensorize(model, "btt", 2, match="*", force=True)
    assert model.blocks[0].up is first
    assert [row.name for row in report] == ["blocks.0.down", "blocks.1.down"]


@pytest.mark.parametrize("form", ["low_rank", "tt", "ttm"])
@pytest.mark.parametrize("init", ["scratch", "from_dense"])
def test_an_embedding_is_replaced_where_it_is_named(form: str, init: str) -> None:
    model = _model()
    model.embed = nn.Embedding(60, 64, padding_idx=0)
    before = model.embed.weight.detach().clone()
    report = tensorize(model, form, 4, match="embed", init=init, force=True)  # type: ignore[arg-type]
    assert type(model.embed) is not nn.Embedding
    assert model.embed(torch.tensor([0, 3])).shape == (2, 64)
    assert torch.count_nonzero(model.embed(torch.tensor([0]))) == 0
    assert report.replaced[0].dense_parameters == 60 * 64
    table = model.embed.to_dense().detach()
    if init == "from_dense":
        lost = (table - before).norm() / before.norm()
        assert report.replaced[0].error == pytest.approx(float(lost), rel=0.02)
    else:
        assert float(table.square().mean().sqrt()) == pytest.approx(1.0, rel=0.1)
    with pytest.raises(TensorizeError, match="no embedding"):
        tensorize(_model(), "btt", 2, match="embed", force=True)


def test_the_convolution_of_gpt2_is_a_linear_layer() -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(96, 64))
    x = torch.randn(5, 64)
    before = model(x)
    tensorize(model, "low_rank", 64, init="from_dense", force=True)
    assert isinstance(model[0], StructuredLinear)
    assert torch.allclose(model(x), before, atol=1e-5)


def test_subclasses_are_left_alone() -> None:
    class Special(nn.Linear):
        """A linear layer with code of its own."""

    model = nn.Sequential(Special(32, 32), nn.Linear(32, 32))
    assert [row.name for row in tensorize(model, force=True)] == ["1"]


def test_encoder_layers_of_torch_still_infer() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    tensorize(model, "low_rank", 0.25, force=True)
    x = torch.randn(2, 5, 32)
    model.eval()
    with torch.no_grad():
        assert model(x).shape == x.shape


def test_policies_choose_layer_by_layer() -> None:
    model = _model()
    rules = [("blocks.0.*", None), ("*.up", "btt", 2), ("*", Choice("low_rank", 8))]
    report = tensorize(model, policy=rules, force=True)
    assert {row.name: (row.form, row.rank) for row in report} == {
        "blocks.1.up": ("btt", 2), "blocks.1.down": ("low_rank", 8)
    }  # fmt: skip
    model = _model()
    report = tensorize(
        model,
        policy=lambda name, module: Choice("cola", 8) if module.out_features == 96 else None,
        force=True,
    )
    assert [row.name for row in report] == ["blocks.0.up", "blocks.1.up"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"form": "lowrank"}, "did you mean 'low_rank'"),
        ({"init": "dense"}, "init = 'dense'"),
        ({"match": "layers.*"}, r"'layers\.\*' fits no linear layer"),
        ({"match": []}, "match = "),
        ({"exclude": "nothing"}, "'nothing' fits no"),
        ({"exclude": "*"}, "leaves no layer"),
        ({"tokens": 0}, "tokens = 0"),
        ({"rank": 0}, r"blocks\.0\.up: rank = 0"),
        ({"form": "cola", "activation": "sin"}, "activation = 'sin'"),
        ({"policy": [("*", 3)]}, "policy has the rule"),
        ({"policy": lambda *_: "tt"}, "must give a Choice or None"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], says: str) -> None:
    model = _model()
    layers = list(model.modules())
    with pytest.raises(TensorizeError, match=says):
        tensorize(model, **settings)  # type: ignore[arg-type]
    assert list(model.modules()) == layers


def test_a_tensorized_model_learns() -> None:
    model = _model()
    tensorize(model, "cola", 0.25, force=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    index = torch.randint(50, (4, 8))
    losses = []
    for _ in range(20):
        loss = nn.functional.cross_entropy(model(index).flatten(0, 1), index.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.distributed
def test_the_example_runs() -> None:
    example = Path(__file__).parents[2] / "examples" / "tensorize_layers.py"
    done = subprocess.run(
        [sys.executable, str(example)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "model.layers.*.mlp.up_proj x2" in done.stdout
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if "loss" in line]
    assert len(losses) == 10
    assert losses[-1] < losses[0]


@pytest.fixture
def wide() -> nn.Module:
    """Two layers that gain and a classifier of 10 classes that nothing calls one."""
    torch.manual_seed(0)
    layers = (nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return nn.Sequential(*layers)


def _accounted(model: nn.Module, **settings: Any) -> tuple[Any, dict[str, str]]:
    """The result, and what stays dense by name; every parameter must be in it once."""
    numbers = sum(parameter.numel() for parameter in model.parameters())
    report = tensorize(model, **settings)
    whole = sum(row.dense_parameters for row in report) + sum(row.parameters for row in report.kept)
    assert whole == numbers
    plain = report.to_dict()
    shares = [row["share"] for row in (*plain["replaced"], *plain["kept"])]
    assert math.isclose(sum(shares), 1.0)
    text = str(report)
    assert all(row.why in text for row in report.kept)
    return report, {row.name: row.why for row in report.kept}


@pytest.mark.parametrize(
    ("form", "rank"),
    [("low_rank", 0.1), ("low_rank", 64), ("monarch", 16), ("btt", "parameters=0.1")],
)
@pytest.mark.parametrize("force", [False, True])
def test_a_small_head_without_a_name_neither_fails_nor_is_replaced(
    form: str, rank: Any, force: bool, wide: nn.Module
) -> None:
    report, kept = _accounted(wide, form=form, rank=rank, force=force)
    assert [row.name for row in report] == ["0", "2"]
    assert type(wide[4]) is nn.Linear
    assert "4" in kept
    assert "4" in report.refused


def test_a_head_is_replaced_where_it_is_named(wide: nn.Module) -> None:
    again = copy.deepcopy(wide)
    report = tensorize(wide, rank=0.1, match=["0", "4"])
    assert [row.name for row in report] == ["0", "4"]
    report = tensorize(again, policy=lambda *_: Choice("low_rank", 4))
    assert [row.name for row in report] == ["0", "2", "4"]


@pytest.mark.parametrize("name", ["classifier", "score", "fc", "head", "lm_head", "value_head"])
def test_heads_of_usual_names_stay(name: str) -> None:
    model = nn.Module()
    model.body = nn.Linear(512, 512)
    model.add_module(name, nn.Linear(512, 512))
    report, kept = _accounted(model, rank=0.1)
    assert [row.name for row in report] == ["body"]
    assert "is a head" in kept[name]
    assert [row.name for row in tensorize(model, rank=0.1, match=f"*{name}")] == [name]


def test_a_layer_of_many_blocks_is_no_head() -> None:
    model = nn.ModuleList(nn.ModuleDict({"fc": nn.Linear(512, 512)}) for _ in range(2))
    assert [row.name for row in tensorize(model, rank=0.1)] == ["0.fc", "1.fc"]


def test_what_gives_the_labels_is_a_head() -> None:
    class Config:
        num_labels = 300

    model = nn.Module()
    model.config = Config()  # type: ignore[assignment]
    # As wide as the labels by chance.
    model.blocks = nn.ModuleList([nn.Linear(300, 300), nn.ModuleDict({"a": nn.Linear(300, 300)})])
    model.labels = nn.Linear(512, 300)
    model.mask = nn.Linear(300, 512)
    report, kept = _accounted(model, rank=0.1)
    assert "is a head" in kept["labels"]
    assert "blocks.1.a" in [row.name for row in report]


class Mixed(nn.Module):
    """Weights of every kind that is no layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4)
        self.recurrent = nn.LSTM(64, 64)
        self.image = nn.Conv2d(3, 8, 3)
        self.experts = nn.Parameter(torch.randn(4, 64, 96))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
        self.late = nn.LazyLinear(8)
        self.up = nn.Linear(64, 512)
        self.down = nn.Linear(512, 64)
        self.norm = nn.LayerNorm(64)


def test_every_parameter_has_a_row() -> None:
    model = Mixed()
    with pytest.warns(UserWarning, match="% of the parameters match and stay dense: experts"):
        report = tensorize(model, rank=0.25)
    kept = {row.name: row.why for row in report.kept}
    assert [row.name for row in report] == ["up", "down"]
    expected = {
        "attention.in_proj_weight": "2-D parameter of MultiheadAttention",
        "attention.out_proj.weight": "subclass of nn.Linear",
        "recurrent.weight_hh_l0": "2-D parameter of LSTM",
        "image.weight": "4-D parameter of Conv2d",
        "experts": "3-D parameter of Mixed",
        "normed.parametrizations.weight.original1": "is parametrized",
        "late.weight": "no shape yet",
    }
    for name, why in expected.items():
        assert why in kept[name]
    whole = sum(row.dense_parameters for row in report) + sum(row.parameters for row in report.kept)
    assert whole == report.dense_parameters


@pytest.mark.parametrize("kind", ["mixtral", "qwen"])
def test_experts_of_other_peoples_models(kind: str) -> None:
    from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    if kind == "mixtral":
        config = MixtralConfig(num_local_experts=4, **sizes, **heads)
    else:
        config = Qwen3MoeConfig(num_experts=4, moe_intermediate_size=24, **sizes, **heads)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.warns(UserWarning, match="3-D parameter of"):
        _, kept = _accounted(model, force=True)
    experts = [name for name in kept if ".experts." in name]
    assert len(experts) == 4
    with pytest.raises(TensorizeError, match=r"fits .*experts.* 3-D parameter of"):
        tensorize(model, match="*.experts.*", force=True)


@pytest.mark.parametrize("tokens", [1, 4096])
def test_low_rank_plus_sparse_says_that_it_is_slower(tokens: int) -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    with pytest.warns(UserWarning, match=r"2 of 2 replaced layers are slower .*\(sltrain\) at 0\."):
        report = tensorize(model, "sltrain", tokens=tokens)
    speed = report.replaced[0].speed
    assert speed is not None
    assert speed < (0.3 if tokens == 1 else 1.0)
    assert f"{speed:.2f}x" in str(report)
    assert "not calibrated" in str(report)


@pytest.mark.parametrize("form", ["cola", "lax"])
def test_what_is_between_factors_counts(form: str) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))

    plain = tensorize(model(), "low_rank", tokens=4096).replaced[0].speed
    own = tensorize(model(), form, tokens=4096).replaced[0].speed
    assert plain is not None
    assert own is not None
    assert 1.0 < own < plain
    with pytest.raises(TensorizeError, match="the speed of dense"):
        tensorize(model(), form, tokens=1)
    with pytest.warns(UserWarning, match=f"slower than dense ones, the worst 0 .{form}."):
        tensorize(model(), form, tokens=1, force=True)


@pytest.mark.parametrize("form", ["cola", "lax", "sltrain"])
def test_forms_without_plans_are_timed_where_it_is_asked_for(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outlast.tensorize import measure

    seen = []

    def fastest(actions: Any, *_: Any) -> list[float]:
        for action in actions:
            action()
        seen.append(len(actions))
        return [3.0, 1.0]

    monkeypatch.setattr(measure, "fastest", fastest)
    monkeypatch.setattr(measure, "_SPEEDS", {})
    monkeypatch.setattr("outlast.tensorize.replace.calibrate_machine", lambda *_: None)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    report = tensorize(model, form, 4, tokens=8, calibrate=True)
    assert [row.speed for row in report] == [3.0, 3.0]
    assert seen == [2]
    assert "timed on this machine" in str(report)


def test_frozen_layers_do_not_become_random_ones_that_stay_so() -> None:
    def model() -> nn.Module:
        layers = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
        layers[0].requires_grad_(False)
        return layers

    report, kept = _accounted(model(), rank=0.1)
    assert [row.name for row in report] == ["2"]
    assert "is frozen" in kept["0"]
    assert len(tensorize(model(), rank=0.1, init="from_dense")) == 2
    with pytest.warns(UserWarning, match="are frozen"):
        assert len(tensorize(model(), rank=0.1, force=True)) == 2


@torch.library.custom_op("outlast_test::scale", mutates_args={"weight"})
def scale(weight: torch.Tensor) -> None:
    weight.mul_(2.0)


OTHER = torch.ones(64, 64)
CHANGES: dict[str, Callable[[Any], Any]] = {
    "init": lambda layer: nn.init.zeros_(layer.weight),
    "init by keyword": lambda layer: nn.init.uniform_(layer.weight),
    "data.mul_": lambda layer: layer.weight.data.mul_(0.5),
    "detach.fill_": lambda layer: layer.weight.detach().fill_(0.0),
    "data.copy_": lambda layer: layer.weight.data.copy_(OTHER),
    "item": lambda layer: layer.weight.__setitem__(0, 1.0),
    "items of data": lambda layer: layer.weight.data.__setitem__((slice(None), slice(5)), 0.0),
    "data": lambda layer: setattr(layer.weight, "data", OTHER),
    "gradient": lambda layer: setattr(layer.weight, "grad", OTHER),
    "foreach": lambda layer: torch._foreach_mul_([layer.weight], 2.0),
    "second of foreach": lambda layer: torch._foreach_mul_([OTHER.clone(), layer.weight], 2.0),
    "out": lambda layer: torch.add(OTHER, 1.0, out=layer.weight),
    "one of two out": lambda layer: torch.max(
        OTHER, 0, out=(layer.weight, OTHER[0].long())
    ),
    "augmented": lambda layer: operator.iadd(layer.weight, 1.0),
    "row": lambda layer: layer.weight[3].zero_(),
    "rows": lambda layer: next(iter(layer.weight)).zero_(),
    "chunk": lambda layer: layer.weight.chunk(2)[1].zero_(),
    "transposed": lambda layer: layer.weight.t().mul_(2.0),
    "flat": lambda layer: layer.weight.view(-1).data.__setitem__(0, 1.0),
    "same type": lambda layer: layer.weight.float().mul_(2.0),
    "in place by a flag": lambda layer: nn.functional.relu(layer.weight, inplace=True),
    "operator": lambda layer: torch.ops.aten.mul_.Tensor(layer.weight, OTHER),
    "custom operator": lambda layer: scale(layer.weight),
    "hook": lambda layer: layer.weight.register_hook(lambda gradient: gradient),
    "kept gradient": lambda layer: layer.weight.retain_grad(),
    "parameter": lambda layer: nn.Parameter(layer.weight.data),
}  # fmt: skip


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CHANGES)
def test_the_weight_of_factors_is_read_only(name: str, mode: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    tensorize(model, rank=4, force=True)
    layer = model[0]
    assert isinstance(layer, StructuredLinear)
    with mode(), pytest.raises(TensorizeError, match="read-only"):
        CHANGES[name](layer)


def test_what_is_computed_with_the_weight_of_factors() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    tensorize(model, rank=4, force=True)
    layer, x = model[0], torch.randn(3, 64)
    assert isinstance(layer, StructuredLinear)
    linear = nn.functional.linear(x, layer.weight, layer.bias)
    assert type(linear) is torch.Tensor
    torch.testing.assert_close(linear, layer(x))
    torch.testing.assert_close(x @ layer.weight[:5].t(), layer(x)[:, :5] - layer.bias[:5])
    assert not layer.weight.data.sum().requires_grad
    x.new_empty(64, 64).copy_(layer.weight.data)
    mine = layer.weight.detach().clone()
    mine[0] = 1.0
    assert type(mine) is torch.Tensor


def test_freezing_the_weight_of_factors_freezes_them() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    tensorize(model, rank=4, force=True)
    layer = model[0]
    assert isinstance(layer, StructuredLinear)
    assert layer.weight.requires_grad
    layer.weight.requires_grad_(False)
    assert not any(factor.requires_grad for factor in layer.factors())
    assert not layer.weight.requires_grad
    assert layer.bias is not None
    assert layer.bias.requires_grad
    layer.weight.requires_grad = True
    assert all(factor.requires_grad for factor in layer.factors())


def test_speeds_on_devices_without_prices_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    from outlast.tensorize import replace

    monkeypatch.setattr(
        replace._Settings, "computed", lambda *_: (torch.float32, torch.device("mps"))
    )
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    with pytest.warns(UserWarning, match=r"the speed of 0 \(low_rank\) and others is unknown"):
        report = tensorize(model, rank=0.1)
    assert [row.speed for row in report] == [None, None]
    assert "unknown on mps devices" in str(report)
