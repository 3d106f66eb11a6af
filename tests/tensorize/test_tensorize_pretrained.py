"""Tensorized models of transformers that transformers itself saves, and states of another kind."""

import copy
import io
import json

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from outlast.errors import TensorizeError
from outlast.tensorize import LowRankLinear, load_factored, tensorize
from outlast.tensorize.export import save_with_dense_weights

IDS = torch.arange(2 * 9).view(2, 9) * 5 % 64
TEXT = {"input_ids": IDS}
BLOCKS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def llama(**settings):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **BLOCKS, **HEADS, **settings)).eval()


def trained(model, form="low_rank", match="*", rank=4):
    """The model with layers whose factors are neither new nor those of any dense weight."""
    tensorize(model, form, rank, match, force=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def outputs(model, inputs=TEXT):
    return model.eval()(**inputs)[0]


def encoder_decoder():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **sizes))


def mixture(kind):
    settings = {"vocab_size": 64, **BLOCKS, **HEADS}
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(num_local_experts=4, **settings))
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(head_dim=8, **experts, **settings))


def classifier():
    heads = {"num_attention_heads": 4, "num_labels": 10}
    return BertForSequenceClassification(BertConfig(vocab_size=64, **BLOCKS, **heads))


def vision():
    sizes = {"image_size": 32, "patch_size": 8, "num_attention_heads": 4, "num_labels": 10}
    return ViTForImageClassification(ViTConfig(**BLOCKS, **sizes))


GPT2 = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)
PIXELS = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)}
PAIRS = {"input_ids": IDS, "decoder_input_ids": IDS}
MODELS = {
    "llama": (llama, TEXT),
    "llama, tied": (lambda: llama(tie_word_embeddings=True), TEXT),
    "gpt2": (lambda: AutoModelForCausalLM.from_config(GPT2), TEXT),
    "bert": (classifier, TEXT),
    "vit": (vision, PIXELS),
    "t5": (encoder_decoder, PAIRS),
    "mixtral": (lambda: mixture("mixtral"), TEXT),
    "qwen": (lambda: mixture("qwen"), TEXT),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_saves_loads_as_the_same_function(name, tmp_path):
    make, inputs = MODELS[name]
    model = trained(make())
    model.save_pretrained(tmp_path)
    dense = type(model).from_pretrained(tmp_path)
    assert not any(isinstance(module, LowRankLinear) for module in dense.modules())
    torch.testing.assert_close(outputs(dense, inputs), outputs(model, inputs))
    same = load_factored(tmp_path)
    assert torch.equal(outputs(same, inputs), outputs(model, inputs))


@pytest.mark.parametrize("form", ["tt", "ttm", "btt", "monarch", "tucker", "cp", "sltrain"])
def test_every_form_that_is_a_matrix(form, tmp_path):
    model = trained(llama(), form)
    model.save_pretrained(tmp_path)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(outputs(dense), outputs(model))
    assert torch.equal(outputs(load_factored(tmp_path)), outputs(model))


@pytest.mark.parametrize("form", ["cola", "lax"])
def test_what_is_no_matrix_never_loads_as_random_weights(form, tmp_path):
    model = trained(llama(), form)
    with pytest.warns(UserWarning, match="load_factored"):
        model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="mismatched"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(outputs(load_factored(tmp_path)), outputs(model))


@pytest.mark.parametrize("form", ["low_rank", "tt", "ttm"])
def test_a_head_that_is_tied_to_factors(form, tmp_path):
    model = trained(llama(tie_word_embeddings=True), form, ["*", "*embed_tokens", "lm_head"])
    model.save_pretrained(tmp_path)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert dense.lm_head.weight is dense.model.embed_tokens.weight
    torch.testing.assert_close(outputs(dense), outputs(model))
    assert torch.equal(outputs(load_factored(tmp_path)), outputs(model))


def test_layers_that_share_factors(tmp_path):
    model = llama()
    first, second = (layer.mlp for layer in model.model.layers)
    second.up_proj.weight = first.up_proj.weight
    second.down_proj = first.down_proj
    trained(model)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(
        outputs(AutoModelForCausalLM.from_pretrained(tmp_path)), outputs(model)
    )
    same = load_factored(tmp_path)
    assert torch.equal(outputs(same), outputs(model))


def test_copies_parts_and_unpickled_models(tmp_path):
    model = trained(llama())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers[0].mlp.up_proj.up.weight.mul_(2.0)
    twin.save_pretrained(tmp_path / "twin")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "twin")
    torch.testing.assert_close(outputs(loaded), outputs(twin))
    assert not torch.allclose(outputs(twin), outputs(model))
    model.model.save_pretrained(tmp_path / "part")
    part = type(model.model).from_pretrained(tmp_path / "part")
    torch.testing.assert_close(outputs(part), outputs(model.model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    torch.load(file, weights_only=False).save_pretrained(tmp_path / "pickled")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "pickled")
    torch.testing.assert_close(outputs(loaded), outputs(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, tmp_path):
    model = trained(llama().to(dtype))
    model.save_pretrained(tmp_path)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path)
    layer = model.model.layers[1].mlp.down_proj
    assert dense.model.layers[1].mlp.down_proj.weight.dtype is dtype
    # Of products in float32, rounded once.
    exact = copy.deepcopy(layer).float().to_dense().to(dtype)
    assert torch.equal(dense.model.layers[1].mlp.down_proj.weight, exact)
    same = load_factored(tmp_path).state_dict()
    assert all(torch.equal(same[key], value) for key, value in model.state_dict().items())


def test_several_files_and_a_state_that_is_given(tmp_path):
    model = trained(llama())
    changed = {key: value.clone() for key, value in model.state_dict().items()}
    changed["model.layers.0.mlp.up_proj.down.weight"].mul_(3.0)
    model.save_pretrained(tmp_path, state_dict=changed, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    model.load_state_dict(changed)
    torch.testing.assert_close(
        outputs(AutoModelForCausalLM.from_pretrained(tmp_path)), outputs(model)
    )
    assert torch.equal(outputs(load_factored(tmp_path)), outputs(model))
    del changed["model.layers.0.mlp.up_proj.down.weight"]
    with pytest.raises(TensorizeError, match=r"state_dict lacks model\.layers\.0\.mlp\.up_proj"):
        model.save_pretrained(tmp_path, state_dict=changed)


def test_a_dense_model_is_saved_as_ever(tmp_path):
    model = llama()
    LowRankLinear(8, 8, 2)
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "outlast_tensorize.json").exists()
    assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(tmp_path)), outputs(model))


def test_a_save_that_would_hold_factors_alone_is_refused(tmp_path):
    with pytest.raises(TensorizeError, match="distributed_checkpoint = True"):
        trained(llama()).save_pretrained(tmp_path, distributed_checkpoint=True)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "pretrained_model."])
def test_a_state_of_factors_by_other_names_is_refused(prefix, tmp_path):
    model = trained(llama())
    state = {f"{prefix}{key}": value for key, value in model.state_dict().items()}
    with pytest.raises(TensorizeError, match=rf"neither model\.layers\.0.*but {prefix}model"):
        model.save_pretrained(tmp_path, state_dict=state)
    assert not list(tmp_path.glob("*.safetensors"))


def test_factors_in_a_wrapper_that_hides_its_name_are_refused(tmp_path):
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping

    model = trained(llama())
    layers = type(model.model.layers[0])
    wrapping.apply_activation_checkpointing(model, check_fn=lambda item: isinstance(item, layers))
    with pytest.raises(TensorizeError, match="before it is wrapped"):
        model.save_pretrained(tmp_path)


def test_a_state_with_more_or_with_dense_weights_is_saved(tmp_path):
    model = trained(llama())
    value_head = {"v_head.weight": torch.zeros(1, 32)}
    model.save_pretrained(tmp_path, state_dict={**model.state_dict(), **value_head})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(outputs(loaded), outputs(model))
    model.save_pretrained(tmp_path, state_dict=loaded.state_dict())
    assert not (tmp_path / "outlast_tensorize.json").exists()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(outputs(again), outputs(loaded))
    # As the Trainer does under DeepSpeed, which saves by itself.
    model.save_pretrained(tmp_path / "none", state_dict={})


def test_a_state_that_holds_shared_factors_once(tmp_path):
    model = llama()
    first, second = (layer.mlp for layer in model.model.layers)
    second.up_proj.weight = first.up_proj.weight
    trained(model)
    state = model.state_dict()
    for key in [key for key in state if key.startswith("model.layers.1.mlp.up_proj.")]:
        del state[key]
    model.save_pretrained(tmp_path, state_dict=state)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(outputs(loaded), outputs(model))


def test_another_model_in_the_place_of_factors(tmp_path, monkeypatch):
    model, file = trained(llama()), tmp_path / "outlast_tensorize.json"
    for other in (llama(), export_dense_of(model)):
        model.save_pretrained(tmp_path)
        other.save_pretrained(tmp_path, is_main_process=False)
        assert file.exists()
        other.save_pretrained(tmp_path, variant="fp16")
        assert file.exists()
        other.save_pretrained(tmp_path)
        assert not file.exists()
        with pytest.raises(TensorizeError, match="entry"):
            load_factored(tmp_path)
    trained(llama(), "tt").save_pretrained(tmp_path)
    before = file.read_text()

    def fails(*_, **__):
        raise OSError("no space")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", fails)
    with pytest.raises(OSError, match="no space"):
        model.save_pretrained(tmp_path)
    assert file.read_text() == before


def export_dense_of(model):
    """The model after its layers were merged to dense ones."""
    model = copy.deepcopy(model)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, LowRankLinear):
            model.set_submodule(name, layer.dense_linear())
    return model


def test_models_without_factors_are_saved_by_transformers_alone(tmp_path):
    model, calls = llama(), []
    LowRankLinear(8, 8, 2)
    # A module that is part of itself has names without end.
    model.model.layers[0].owner = model.model
    save = type(model).save_pretrained.__wrapped__

    def plain(*positional, **named):
        calls.append((positional, named))
        return "saved"

    arguments = (model, tmp_path), {"of_a_later_version": True}
    assert save is not plain
    assert save_with_dense_weights(plain, *arguments[0], **arguments[1]) == "saved"
    assert calls == [arguments]


@pytest.mark.parametrize("strict", [True, False])
def test_dense_weights_do_not_pass_for_factors(strict):
    dense = llama().state_dict()
    model = trained(llama())
    with pytest.raises(RuntimeError, match=r"up_proj\.weight is dense.*before tensorize"):
        model.load_state_dict(dense, strict=strict)
    linear = LowRankLinear(8, 8, 2)
    with pytest.raises(RuntimeError, match="is dense"):
        linear.load_state_dict(nn.Linear(8, 8).state_dict(), strict=strict)
    with pytest.raises(RuntimeError, match="Missing key"):
        llama().load_state_dict(model.state_dict())


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, place):
        ids = torch.arange(8) * (place + 1) % 64
        return {"input_ids": ids, "labels": ids}


def trainer(folder, form, **settings):
    model = llama()
    tensorize(model, form, 4, force=True, generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        str(folder), max_steps=4, save_steps=2, per_device_train_batch_size=2, seed=3,
        learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1,
        **settings,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=Samples(), eval_dataset=Samples())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*load_factored")
@pytest.mark.parametrize("form", ["low_rank", "tt", "cola"])
def test_the_trainer_resumes_in_the_same_factors(form, tmp_path):
    whole = trainer(tmp_path / "whole", form)
    whole.train()
    resumed = trainer(tmp_path / "resumed", form)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    expected = whole.model.state_dict()
    for key, value in resumed.model.state_dict().items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.slow
def test_the_trainer_saves_what_loads_and_reloads_its_best(tmp_path):
    settings = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
    run = trainer(tmp_path, "low_rank", **settings)
    run.train()
    loaded = AutoModelForCausalLM.from_pretrained(run.state.best_model_checkpoint)
    torch.testing.assert_close(outputs(loaded), outputs(run.model))
    run.save_model(str(tmp_path / "last"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "last")
    torch.testing.assert_close(outputs(loaded), outputs(run.model))


def test_the_description_is_plain(tmp_path):
    trained(llama(), match="*.mlp.*").save_pretrained(tmp_path)
    described = json.loads((tmp_path / "outlast_tensorize.json").read_text())
    layers = described["outlast_tensorize"]["layers"]
    assert len(layers) == 6
    assert "outlast_tensorize" not in json.loads((tmp_path / "config.json").read_text())


class Adapter(nn.Module):
    """What LoRA puts in the place of a linear layer."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.delta = nn.Parameter(torch.randn_like(base.weight))

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        return self.base_layer(x) + x @ self.delta.t()


def test_factors_under_adapters_are_not_saved_without_them(tmp_path):
    model = trained(llama(), match="*.mlp.*")
    layer = model.model.layers[0].mlp.up_proj
    plain = outputs(model)
    layer.down = Adapter(layer.down)
    assert not torch.allclose(outputs(model), plain)
    for action in (lambda: model.save_pretrained(tmp_path), layer.to_dense):
        with pytest.raises(TensorizeError, match=r"down has become a Adapter.*merge"):
            action()
    model = trained(llama(), "sltrain")
    model.model.layers[0].mlp.up_proj.up = Adapter(model.model.layers[0].mlp.up_proj.up)
    with pytest.raises(TensorizeError, match="up has become a Adapter"):
        outputs(model)


def test_tensors_of_another_kind_are_no_weights():
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].weight = nn.Parameter(TwoTensor(torch.randn(64, 64), torch.randn(64, 64)))
    with pytest.raises(TensorizeError, match=r"0 has a weight of TwoTensor.*exclude it"):
        tensorize(model, rank=4, force=True)
    assert [row.name for row in tensorize(model, rank=4, force=True, exclude="0")] == ["1"]
