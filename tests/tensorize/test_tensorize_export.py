"""Exported models compute what the trained ones did, wherever they are loaded."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from outlast.errors import TensorizeError
from outlast.tensorize import (
    BottleneckLinear,
    BTTLinear,
    CPLinear,
    LatentLinear,
    LowRankEmbedding,
    LowRankLinear,
    MonarchLinear,
    SparseLowRankLinear,
    TTEmbedding,
    TTLinear,
    TTMEmbedding,
    TTMLinear,
    TuckerLinear,
    tensorize,
)
from outlast.tensorize.export import absorb, export_dense, export_factored, load_factored
from outlast.tensorize.low_rank import link_by_name

IDS = torch.arange(2 * 9).view(2, 9) * 5 % 64

LINEAR = {
    "low_rank": lambda i, o, **k: LowRankLinear(i, o, 5, **k),
    "tt": lambda i, o, **k: TTLinear(i, o, (3, 4, 5, 4, 3), **k),
    "ttm": lambda i, o, **k: TTMLinear(i, o, 3, **k),
    "btt": lambda i, o, **k: BTTLinear(i, o, 2, **k),
    "monarch": lambda i, o, **k: MonarchLinear(i, o, 4, **k),
    "tucker": lambda i, o, **k: TuckerLinear(i, o, 3, **k),
    "cp": lambda i, o, **k: CPLinear(i, o, 6, **k),
    "sparse": lambda i, o, **k: SparseLowRankLinear(i, o, 3, alpha=6.0, **k),
}
NONLINEAR = {
    "cola": lambda i, o, **k: BottleneckLinear(i, o, 5, **k),
    "lax": lambda i, o, **k: LatentLinear(i, o, 5, "gelu", **k),
}
EMBEDDINGS = {
    "low_rank": lambda r, c: LowRankEmbedding(r, c, 4, padding_idx=3),
    "tt": lambda r, c: TTEmbedding(r, c, 4),
    "ttm": lambda r, c: TTMEmbedding(r, c, 3, 2, padding_idx=0),
}


@pytest.fixture(autouse=True, scope="module")
def own_cache_of_code(tmp_path_factory):
    """Code of folders is copied before it is loaded; not to the user's cache here."""
    with pytest.MonkeyPatch.context() as patch:
        cache = str(tmp_path_factory.mktemp("modules"))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
        patch.syspath_prepend(cache)
        yield


def llama(**settings):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=64, **sizes, **heads, **settings)
    return AutoModelForCausalLM.from_config(config).eval()


def structured(model, make):
    """Put new layers in the place of all linear ones of the blocks, uneven sizes among them."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "lm_head":
            bias = module.bias is not None
            model.set_submodule(name, make(module.in_features, module.out_features, bias=bias))
    return model.eval()


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def same(model, other):
    mine, theirs = model.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for key, value in mine.items():
        assert value.dtype == theirs[key].dtype, key
        assert torch.equal(value, theirs[key]), key


@pytest.mark.parametrize("form", LINEAR)
def test_dense_folder_loads_with_transformers_alone(form, tmp_path):
    model = structured(llama(attention_bias=True), LINEAR[form])
    wanted = logits(model)
    assert export_dense(model, tmp_path / "out") == tmp_path / "out"
    loaded, found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, local_files_only=True
    )
    assert not any(found.values())
    assert torch.allclose(logits(loaded), wanted, atol=1e-5)
    assert isinstance(model.model.layers[0].mlp.up_proj, type(LINEAR[form](32, 48)))
    torch.testing.assert_close(logits(model), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("form", LINEAR | NONLINEAR)
def test_factored_folder_gives_the_same_model(form, tmp_path):
    make = (LINEAR | NONLINEAR)[form]
    model = structured(llama(mlp_bias=True), make)
    export_factored(model, tmp_path)
    loaded = load_factored(tmp_path)
    same(model, loaded)
    assert torch.equal(logits(loaded), logits(model))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert not any("outlast." in type(each).__module__ for each in plain.modules())
    assert torch.allclose(logits(plain), logits(model), atol=1e-5)
    text = plain.generate(IDS[:, :3], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(
        text, model.generate(IDS[:, :3], max_new_tokens=4, do_sample=False, pad_token_id=0)
    )


@pytest.mark.parametrize("form", EMBEDDINGS)
@pytest.mark.parametrize("kind", ["dense", "factored"])
def test_embeddings(form, kind, tmp_path):
    model = llama()
    model.model.embed_tokens = EMBEDDINGS[form](64, 32)
    wanted = logits(model)
    if kind == "dense":
        export_dense(model, tmp_path)
        assert torch.allclose(
            logits(AutoModelForCausalLM.from_pretrained(tmp_path)), wanted, atol=1e-5
        )
        return
    export_factored(model, tmp_path)
    assert torch.equal(logits(load_factored(tmp_path)), wanted)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert torch.allclose(logits(plain), wanted, atol=1e-5)


def test_a_folder_of_factors_is_not_taken_for_a_dense_model(tmp_path):
    export_factored(structured(llama(), LINEAR["tt"]), tmp_path)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("write", [export_dense, export_factored])
def test_tied_embeddings_stay_tied(write, tmp_path):
    model = structured(llama(tie_word_embeddings=True), LINEAR["low_rank"])
    write(model, tmp_path)
    load = load_factored if write is export_factored else AutoModelForCausalLM.from_pretrained
    loaded = load(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.config.tie_word_embeddings
    assert torch.allclose(logits(loaded), logits(model), atol=1e-5)


@pytest.mark.parametrize("write", [export_dense, export_factored])
def test_a_head_that_is_not_tied_any_more(write, tmp_path):
    model = llama(tie_word_embeddings=True)
    model.lm_head = LowRankLinear(32, 64, 4, bias=False)
    write(model, tmp_path)
    loads = [AutoModelForCausalLM.from_pretrained]
    if write is export_factored:
        loads = [load_factored, lambda d: loads_plain(d)]
    for load in loads:
        loaded = load(tmp_path)
        assert not loaded.config.tie_word_embeddings
        assert torch.allclose(logits(loaded), logits(model), atol=1e-5)


@pytest.mark.parametrize("form", ["low_rank", "tt", "ttm"])
@pytest.mark.parametrize("how", ["dense", "factored", "merged"])
def test_heads_that_are_tied_to_factors(form, how, tmp_path):
    model = llama(tie_word_embeddings=True)
    tensorize(model, form, 4, ["*.embed_tokens", "lm_head", "*.up_proj"], force=True)
    expected = logits(model)
    if how == "dense":
        export_dense(model, tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    else:
        export_factored(model, tmp_path, merged=how == "merged")
        assert "auto_map" not in json.loads((tmp_path / "config.json").read_text()) or (
            how == "merged" and form == "ttm"
        )
        loaded = load_factored(tmp_path)
    assert torch.allclose(logits(loaded), expected, atol=1e-5)
    if how == "factored":
        assert loaded.lm_head.embedding is loaded.model.embed_tokens
        same(loaded, model)
    absorb(model)
    assert torch.allclose(logits(model), expected, atol=1e-5)


def loads_plain(directory):
    return AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)


def test_shared_factors_stay_shared(tmp_path):
    model = structured(llama(), LINEAR["tt"])
    first, second = (layer.mlp for layer in model.model.layers)
    for place in range(6):
        second.up_proj.cores[place] = first.up_proj.cores[place]
    export_factored(model, tmp_path / "factored")
    loaded = load_factored(tmp_path / "factored")
    same(model, loaded)
    layers = loaded.model.layers
    assert layers[0].mlp.up_proj.cores[2] is layers[1].mlp.up_proj.cores[2]
    assert not (tmp_path / "factored" / "modeling_outlast.py").exists()
    export_dense(model, tmp_path / "dense")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert torch.allclose(logits(plain), logits(model), atol=1e-5)
    absorb(loaded)
    assert layers[0].mlp.up_proj.down.weight is layers[1].mlp.up_proj.down.weight


@pytest.mark.parametrize("gate", ["identity", "scalar", "vector"])
def test_lines_of_latents(gate, tmp_path):
    model = structured(llama(), NONLINEAR["lax"])
    link_by_name(model, gate)
    for parameter in model.parameters():
        if parameter.shape in ((), (1,), (5,)):
            nn.init.constant_(parameter, 0.5)
    export_factored(model, tmp_path / "factored")
    loaded = load_factored(tmp_path / "factored")
    same(model, loaded)
    assert torch.equal(logits(loaded), logits(model))
    with pytest.raises(TensorizeError, match=r"layers\.0\.self_attn\.q_proj \(lax\) is no matrix"):
        export_dense(model, tmp_path / "dense")
    assert not (tmp_path / "dense").exists()


@pytest.mark.parametrize("write", [export_dense, export_factored])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_shards(write, dtype, tmp_path):
    model = structured(llama(), LINEAR["tt"]).to(dtype)
    write(model, tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    if write is export_factored:
        same(model, load_factored(tmp_path))
        return
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    layer, dense = (each.model.layers[1].mlp.down_proj for each in (model, loaded))
    assert dense.weight.dtype == dtype
    exact = layer.float().to_dense()
    assert torch.equal(dense.weight, exact.to(dtype))


def test_cores_of_different_dtypes(tmp_path):
    model = structured(llama(), LINEAR["tt"])
    for layer in model.model.layers:
        layer.mlp.up_proj.cores[0].data = layer.mlp.up_proj.cores[0].data.double()
    export_factored(model, tmp_path)
    same(model, load_factored(tmp_path))


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, module in list(model.named_modules()):
        # A square weight would load also when it is not transposed.
        if name.endswith("c_proj"):
            into, out = module.weight.shape
            layer = LowRankLinear(into, out, 7)
            nn.init.normal_(layer.bias)
            model.set_submodule(name, layer)
    return model


def test_layers_that_were_transposed(tmp_path):
    model = gpt2()
    export_dense(model, tmp_path / "dense")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert torch.allclose(logits(loaded), logits(model), atol=1e-5)
    export_factored(model, tmp_path / "factored")
    assert torch.equal(logits(load_factored(tmp_path / "factored")), logits(model))
    assert torch.allclose(logits(loads_plain(tmp_path / "factored")), logits(model), atol=1e-5)


CHANGED = {
    "tt": "low_rank",
    "tucker": "low_rank",
    "cp": "low_rank",
    "ttm": "dense",
    "sparse": "dense",
    "low_rank": None,
    "btt": None,
    "monarch": None,
    "cola": None,
    "lax": None,
}


@pytest.mark.parametrize("form", CHANGED)
def test_absorbed_models_compute_the_same(form):
    model = structured(llama(attention_bias=True), (LINEAR | NONLINEAR)[form])
    wanted = logits(model)
    changed = absorb(model)
    kinds = set(changed.values())
    assert kinds == ({CHANGED[form]} if CHANGED[form] else set())
    assert torch.allclose(logits(model), wanted, atol=1e-5)
    if form == "tt":
        assert model.model.layers[0].mlp.up_proj.rank == 5
    assert absorb(model) == {}


def test_absorbing_never_adds_parameters_beyond_dense():
    model = nn.Sequential(LowRankLinear(16, 16, 12), TTLinear(16, 16, 16, 2))
    x = torch.randn(5, 16)
    wanted = model(x)
    assert absorb(model) == {"0": "dense", "1": "dense"}
    assert torch.allclose(model(x), wanted, atol=1e-5)


@pytest.mark.parametrize("form", EMBEDDINGS)
def test_absorbed_embeddings(form):
    model = nn.Sequential(EMBEDDINGS[form](64, 32))
    wanted = model(IDS)
    changed = absorb(model)
    assert changed == (
        {"0": {"tt": "low_rank", "ttm": "dense"}[form]} if form != "low_rank" else {}
    )
    assert torch.allclose(model(IDS), wanted, atol=1e-6)


def test_merged_export_writes_two_factors(tmp_path):
    model = structured(llama(), LINEAR["tt"])
    export_factored(model, tmp_path, merged=True)
    entry = json.loads((tmp_path / "config.json").read_text())["outlast_tensorize"]
    assert {layer["form"] for layer in entry["layers"].values()} == {"low_rank"}
    assert torch.allclose(logits(load_factored(tmp_path)), logits(model), atol=1e-5)
    assert isinstance(model.model.layers[0].mlp.up_proj, TTLinear)


@pytest.mark.parametrize("absorbed", [False, True])
def test_torch_export(absorbed):
    model = nn.Sequential(
        TTLinear(12, 16, 3, 2), LowRankLinear(16, 16, 3), BottleneckLinear(16, 12, 4),
        BTTLinear(12, 12, 1), TTMLinear(12, 8, 2, 2),
    ).eval()  # fmt: skip
    if absorbed:
        absorb(model)
    x = torch.randn(6, 12)
    program = torch.export.export(model, (x,))
    assert torch.allclose(program.module()(x), model(x), atol=1e-5)
    operations = {str(node.target) for node in program.graph.nodes}
    assert absorbed or "outlast.chain.default" in operations


def test_torch_export_of_an_exported_model(tmp_path):
    export_factored(structured(llama(), LINEAR["tt"]), tmp_path, merged=True)
    model = load_factored(tmp_path)
    model.config.use_cache = False
    program = torch.export.export(model, (IDS,), strict=False)
    assert torch.allclose(program.module()(IDS).logits, logits(model), atol=1e-5)


def test_tokenizer_files_and_generation_settings_come_along(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "notes.txt").write_text("mine")
    model = structured(llama(), LINEAR["low_rank"])
    model.generation_config.max_new_tokens = 7
    for write in (export_dense, export_factored):
        out = write(model, tmp_path / write.__name__, tokenizer=source)
        assert (out / "tokenizer.json").read_text() == "{}"
        assert not (out / "notes.txt").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export_dense")
    assert loaded.generation_config.max_new_tokens == 7
    assert load_factored(tmp_path / "export_factored").generation_config.max_new_tokens == 7


def test_folders_are_replaced_only_on_request(tmp_path):
    model = structured(llama(), LINEAR["low_rank"])
    out = export_dense(model, tmp_path / "out")
    with pytest.raises(TensorizeError, match="exists: give another folder"):
        export_factored(model, out)
    assert (out / "model.safetensors").exists()
    export_factored(model, out, overwrite=True)
    assert not (out / "model.safetensors").exists()
    other = tmp_path / "photos"
    other.mkdir()
    (other / "cat.png").touch()
    with pytest.raises(TensorizeError, match="no model to replace"):
        export_dense(model, other, overwrite=True)
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


def test_a_failed_export_leaves_what_was_there(tmp_path, monkeypatch):
    model = structured(llama(), LINEAR["low_rank"])
    out = export_dense(model, tmp_path / "out")
    before = (out / "model.safetensors").read_bytes()
    disk_full = OSError("No space left on device")

    def fail(*arguments, **options):
        raise disk_full

    monkeypatch.setattr(type(model), "save_pretrained", fail)
    with pytest.raises(TensorizeError, match="No space left"):
        export_factored(model, out, overwrite=True)
    assert (out / "model.safetensors").read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_what_cannot_be_exported_is_refused(tmp_path):
    with pytest.raises(TensorizeError, match="Sequential is no model of transformers"):
        export_dense(nn.Sequential(LowRankLinear(4, 4, 1)), tmp_path / "a")
    with pytest.raises(TensorizeError, match="no structured layers"):
        export_factored(llama(), tmp_path / "a")
    model = llama()
    model.model.layers[0].mlp.up_proj = BottleneckLinear(32, 48, 4, bias=False)
    with pytest.raises(TensorizeError, match=r"up_proj \(cola\) is no matrix"):
        export_dense(model, tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_damaged_folders_are_refused(tmp_path):
    with pytest.raises(TensorizeError, match="cannot be read"):
        load_factored(tmp_path)
    llama().save_pretrained(tmp_path / "dense")
    with pytest.raises(TensorizeError, match="was not written by export_factored"):
        load_factored(tmp_path / "dense")
    out = export_factored(structured(llama(), LINEAR["tt"]), tmp_path / "out")
    config = json.loads((out / "config.json").read_text())

    def damaged(change, match):
        changed = json.loads(json.dumps(config))
        change(changed["outlast_tensorize"])
        (out / "config.json").write_text(json.dumps(changed))
        with pytest.raises(TensorizeError, match=match):
            load_factored(out)

    name = "model.layers.0.mlp.up_proj"
    damaged(lambda entry: entry.update(version=99), "version = 99")
    damaged(lambda entry: entry.update(model_class="nn"), "does not have")
    damaged(lambda entry: entry["layers"][name].update(form="x"), "form = 'x'")
    damaged(lambda entry: entry["layers"][name]["settings"].update(rank=2), "not the layer")
    damaged(lambda entry: entry["layers"].pop(name), "damaged: missing")
    smaller = TTLinear(32, 48, 2, bias=False)
    settings = {key: smaller.settings()[key] for key in ("rank", "in_modes", "out_modes")}
    other = {"settings": {**smaller.settings(), **settings}, "network": str(smaller.network)}
    damaged(lambda entry: entry["layers"][name].update(other), "damaged: .*size mismatch")
    (out / "config.json").write_text(json.dumps(config))
    (out / "model.factored.safetensors").write_bytes(b"12345678")
    with pytest.raises(TensorizeError, match=r"factored\.safetensors cannot be read"):
        load_factored(out)


@pytest.mark.slow
def test_loading_needs_nothing_else_of_outlast(tmp_path):
    export_factored(structured(llama(), LINEAR["btt"]), tmp_path)
    code = (
        "import sys; from outlast.tensorize.export import load_factored; "
        f"load_factored({str(tmp_path)!r}); "
        "parts = {n.split('.')[1] for n in sys.modules if n.startswith('outlast.')}; "
        "print(sorted(parts - {'errors', 'extras', 'tensorize', 'hardware', 'version'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
