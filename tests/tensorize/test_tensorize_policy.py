import pytest
import torch
from torch import nn

from outlast.errors import TensorizeError
from outlast.tensorize import LowRankEmbedding, LowRankLinear
from outlast.tensorize.policy import Choice, Policy, replaceable, select
from outlast.tensorize.shapes import FORMS, form_named


class Tied(nn.Module):
    """A model that says nothing of its head, which shares the embedding's weight."""

    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.scores = nn.Linear(8, 20, bias=False)
        if tie:
            self.scores.weight = self.tokens.weight


def _names(model: nn.Module, *arguments: object, **settings: object) -> list[str]:
    found = select(model, Choice(), *arguments, **settings)  # type: ignore[arg-type]
    return [target.name for target, _ in found.chosen]


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=64, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def test_everything_in_the_blocks_of_a_llama_and_nothing_else() -> None:
    names = _names(_llama())
    assert len(names) == 14
    assert all(name.startswith("model.layers.") for name in names)


def test_ends_are_replaced_where_they_are_named() -> None:
    model = _llama()
    assert _names(model, "lm_head") == ["lm_head"]
    assert "lm_head" in _names(model, ["*", "*lm_head"])
    assert "model.embed_tokens" not in _names(model, ["*", "lm_head"])
    assert _names(model, "*.embed_tokens") == ["model.embed_tokens"]
    assert "lm_head" in _names(model, policy=[("lm_head", "low_rank", 4), ("*", "tt", 4)])
    assert "lm_head" not in _names(model, policy=lambda *_: Choice())


def test_a_layer_that_shares_the_embeddings_weight_is_a_head() -> None:
    assert _names(Tied()) == ["body.0", "body.2"]
    assert _names(Tied(tie=False)) == ["body.0", "body.2", "scores"]


def test_patterns_and_exceptions() -> None:
    model = _llama()
    assert len(_names(model, "*.mlp.*")) == 6
    assert len(_names(model, ["*.q_proj", "*.k_proj"])) == 4
    assert len(_names(model, "*.mlp.*", exclude="*.down_proj")) == 4
    assert len(_names(model, "model.layers.1.*", exclude=["*.mlp.*", "*.o_proj"])) == 3
    assert len(_names(model, exclude=[])) == 14


def test_rules_are_tried_in_order() -> None:
    policy: Policy = [
        ("*.layers.0.*", None),
        ("*.q_proj", "btt", 2),
        ("*_proj", Choice("cola", 0.5, activation="gelu")),
    ]
    found = select(_llama(), Choice(), "*.self_attn.*", policy=policy)
    assert {target.name: choice.form for target, choice in found.chosen} == {
        "model.layers.1.self_attn.q_proj": "btt",
        "model.layers.1.self_attn.k_proj": "cola",
        "model.layers.1.self_attn.v_proj": "cola",
        "model.layers.1.self_attn.o_proj": "cola",
    }


def test_a_function_sees_names_and_layers() -> None:
    seen = {}

    def policy(name: str, module: nn.Module) -> Choice | None:
        seen[name] = module
        return Choice("tt", 4) if name == "body.2" else None

    model = Tied()
    assert _names(model, policy=policy) == ["body.2"]
    assert seen == {"body.0": model.body[0], "body.2": model.body[2]}


def test_unused_rules_are_no_error_but_unused_patterns_are() -> None:
    assert _names(Tied(), policy=[("decoder.*", "tt", 4), ("*", "tt", 4)]) == ["body.0", "body.2"]
    with pytest.raises(TensorizeError, match=r"its layers are tokens, body\.0, body\.2, scores"):
        _names(Tied(), "decoder.*")


def test_one_module_has_all_its_names() -> None:
    model = Tied()
    model.body[2] = model.body[0]
    [linear] = [target for target in replaceable(model) if target.name.startswith("body")]
    assert linear.names == ("body.0", "body.2")
    assert _names(model, "body.2") == ["body.0"]


def test_a_network_that_is_none_of_ours_hides_nothing() -> None:
    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    assert _names(Actor()) == ["network.0", "network.2"]
    assert _names(nn.Sequential(LowRankLinear(8, 8, 2), nn.Linear(8, 8))) == ["1"]
    assert _names(nn.Sequential(LowRankEmbedding(8, 8, 2), nn.Linear(8, 8))) == ["1"]


def test_targets_say_their_shape() -> None:
    targets = {target.name: target for target in replaceable(Tied(tie=False))}
    assert targets["tokens"].features == (20, 8)
    assert targets["scores"].features == (8, 20)
    assert targets["scores"].bias is None
    assert targets["body.0"].weight.shape == (8, 8)


def test_forms_are_known_by_name() -> None:
    assert form_named("btt") is FORMS["btt"]
    with pytest.raises(TensorizeError, match="did you mean 'monarch'"):
        form_named("monarc")
    with pytest.raises(TensorizeError, match="'dense' is not one of"):
        Choice("dense")


@pytest.mark.parametrize("form", ["low_rank", "tt", "ttm", "btt", "tucker"])
def test_the_largest_rank_holds_any_matrix(form: str) -> None:
    modes = FORMS[form].modes or 1
    rank = FORMS[form].largest_rank(12, 18, modes)
    layer = FORMS[form].build(12, 18, rank, {"dtype": torch.float64})
    gradients = torch.autograd.functional.jacobian(
        lambda *cores: torch.func.functional_call(
            layer,
            dict(zip(dict(layer.named_parameters()), cores, strict=True)),
            torch.eye(12).double(),
        ).flatten(),
        tuple(parameter.detach() for parameter in layer.parameters()),
    )
    joined = torch.cat([one.flatten(1) for one in gradients], dim=1)
    assert int(torch.linalg.matrix_rank(joined)) == 12 * 18
