"""Which parameter is updated how."""

import pytest
import torch
from torch import nn

from outlast.job import OptimizerSection
from outlast.train.optimizer import build_optimizers, set_learning_rate


class Small(nn.Module):
    """Embedding, a hidden matrix, a norm, a head; `head` accessor as Hugging Face's, or none."""

    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.hidden = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.kernel = nn.Parameter(torch.zeros(2, 3, 4))
        self.head = nn.Linear(4, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight


class WithAccessor(Small):
    """Its head is not its last linear layer."""

    def __init__(self, tied=False):
        super().__init__(tied)
        self.extra = nn.Linear(4, 4, bias=False)

    def get_output_embeddings(self):
        return self.head


def places(model, **settings):
    """Parameter name -> (optimizer class, weight decay, peak rate); each parameter once."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for optimizer in build_optimizers(model, OptimizerSection(**settings)):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.pop(id(parameter))
                kind = type(optimizer).__name__
                found[name] = (kind, group["weight_decay"], group["initial_lr"])
    assert not names, "every parameter is in exactly one group"
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_adamw_decays_matrices_only(tied):
    found = places(Small(tied), name="adamw", learning_rate=0.01, weight_decay=0.3)
    matrices = {"embed.weight", "hidden.weight", "kernel"} | (set() if tied else {"head.weight"})
    assert {name for name, place in found.items() if place == ("AdamW", 0.3, 0.01)} == matrices
    vectors = {"hidden.bias", "norm.weight", "norm.bias"}
    assert {name for name, place in found.items() if place == ("AdamW", 0.0, 0.01)} == vectors
    assert len(found) == len(matrices | vectors)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("kind", "hidden"),
    [(Small, {"hidden.weight"}), (WithAccessor, {"hidden.weight", "extra.weight"})],
)
def test_muon_gets_hidden_matrices_only(kind, hidden, tied):
    found = places(
        kind(tied), name="muon", learning_rate=0.01, muon_learning_rate=0.02, weight_decay=0.3
    )
    assert {name for name, place in found.items() if place == ("Muon", 0.3, 0.02)} == hidden
    assert {place[0] for name, place in found.items() if name not in hidden} == {"AdamW"}
    assert found["embed.weight"] == ("AdamW", 0.3, 0.01)
    assert found["norm.weight"] == ("AdamW", 0.0, 0.01)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_muon_on_hugging_face_models_takes_the_blocks_matrices(kind):
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {
        "llama": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
        "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    }[kind]
    config = AutoConfig.for_model(kind, vocab_size=32, num_attention_heads=2, **settings)
    model = AutoModelForCausalLM.from_config(config)
    muon = {name for name, place in places(model, name="muon").items() if place[0] == "Muon"}
    expected = {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and (".layers." in name or ".h." in name)
    }
    assert muon == expected
    assert len(muon) >= 8


def test_constants_reach_the_optimizers():
    settings = OptimizerSection(
        name="muon", beta1=0.8, beta2=0.9, epsilon=1e-6, momentum=0.7, weight_decay=0.0
    )
    muon, adamw = build_optimizers(Small(), settings)
    assert muon.param_groups[0]["momentum"] == 0.7
    assert adamw.param_groups[0]["betas"] == (0.8, 0.9)
    assert adamw.param_groups[0]["eps"] == 1e-6


def test_learning_rate_is_the_share_of_each_groups_own_peak():
    settings = OptimizerSection(name="muon", learning_rate=0.01, muon_learning_rate=0.04)
    optimizers = build_optimizers(Small(), settings)
    for factor in (0.5, 0.25, 1.0):
        assert set_learning_rate(optimizers, factor) == pytest.approx(0.04 * factor)
        muon, adamw = optimizers
        assert muon.param_groups[0]["lr"] == pytest.approx(0.04 * factor)
        assert [group["lr"] for group in adamw.param_groups] == pytest.approx([0.01 * factor] * 2)


def test_muon_without_hidden_matrices_is_adamw():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    assert {place[0] for place in places(model, name="muon").values()} == {"AdamW"}
