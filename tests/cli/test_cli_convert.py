"""``outlast convert`` as a user types it."""

import json
import re
import shutil
import sys

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast

from outlast.cli import runs as command
from outlast.cli.main import main
from outlast.tensorize import BottleneckLinear, LowRankLinear, MonarchLinear, TTLinear
from outlast.tensorize.export import load_factored

WORDS = ["the", "model", "reads", "a", "text", "and", "its", "layers", "keep", "what", "they"]
TEXT = " ".join(WORDS[(7 * n + n * n // 3) % len(WORDS)] for n in range(900)) + "\n"
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tiny dense model that reads bytes, whose few steps of training give it structure."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=256, num_attention_heads=4, max_position_embeddings=64, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.tensor(list(TEXT.encode()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(40):
        batch = ids[64 * step : 64 * step + 256].view(4, 64)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("dense") / "llama"
    model.generation_config.max_new_tokens = 5
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


@pytest.fixture
def convert(monkeypatch, capsys):
    """Run the program in this process: `convert(*arguments)` gives code, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["outlast", "convert", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert "Traceback" not in said.out + said.err
        return ended.value.code or 0, said.out, said.err

    return run


def perplexities(out):
    found = re.search(r"perplexity per \w+, measured on (\d+) held-out \w+: (\S+) -> (\S+)", out)
    return int(found[1]), float(found[2]), float(found[3])


def layer_of(folder, name=UP):
    return load_factored(folder).get_submodule(name)


def test_factors_of_every_layer(convert, llama, tmp_path):
    code, out, err = convert(llama, tmp_path / "out", "--rank", "0.5", "--gainless")
    assert code == 0, err
    assert "14 layers" in out
    assert "mlp.up_proj" in out
    assert "errors are the shares of the weights' norms" in out
    assert re.search(r"model: \S+ k -> \S+ k parameters \(\d+\.\d%\)", out)
    assert f'load_factored("{tmp_path / "out"}")' in out
    dense = AutoModelForCausalLM.from_pretrained(llama).get_submodule(UP).weight
    layer = layer_of(tmp_path / "out")
    assert isinstance(layer, LowRankLinear)
    assert layer.rank == 16
    u, s, v = torch.linalg.svd(dense.double(), full_matrices=False)
    best = (u[:, :16] * s[:16] @ v[:16]).float()
    assert torch.allclose(layer.to_dense(), best, atol=1e-5)


@pytest.mark.parametrize("form", ["low_rank", "monarch"])
def test_text_makes_conversion_better_and_is_reported(form, convert, llama, text, tmp_path):
    common = [llama, tmp_path / "weighted", "--form", form, "--gainless", "--rank"]
    common += ["4" if form == "monarch" else "8", "--calibrate", text, "--window", "64"]
    code, out, err = convert(*common)
    assert code == 0, err
    assert "outputs on held-out text" in out
    held, before, after = perplexities(out)
    assert held >= 64
    assert held % 64 == 0
    assert 1 < before < after
    plain = [llama, tmp_path / "plain", *common[2:-4]]
    assert convert(*plain)[0] == 0
    ids = torch.tensor(list(TEXT.encode()))[-held:].view(-1, 64)

    kind = LowRankLinear if form == "low_rank" else MonarchLinear
    assert isinstance(layer_of(tmp_path / "weighted"), kind)
    weighted, unweighted = (errors(llama, tmp_path / name, ids) for name in ("weighted", "plain"))
    assert len(weighted) == 14
    # By what layers read elsewhere in the text, so not to the last digit.
    assert all(mine < 1.05 * theirs for mine, theirs in zip(weighted, unweighted, strict=True))
    assert sum(weighted) < 0.9 * sum(unweighted)


@torch.no_grad()
def errors(dense, folder, ids):
    """Relative output errors of all converted layers, on the inputs of the dense model."""
    model, converted = AutoModelForCausalLM.from_pretrained(dense), load_factored(folder)
    found = []

    def compare(name):
        def hook(module, inputs, output):
            other = converted.get_submodule(name)(inputs[0])
            found.append(float((output - other).norm() / output.norm()))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_hook(compare(name))
    model(input_ids=ids)
    return found


def test_perplexity_is_that_of_the_held_out_end(convert, llama, text, tmp_path):
    arguments = [llama, tmp_path / "out", "--rank", "32", "--gainless", "--calibrate", text]
    _, out, _ = convert(*arguments, "--window", "32", "--match", "*.mlp.*")
    held, before, after = perplexities(out)
    ids = torch.tensor(list(TEXT.encode()))
    count = len(ids) // 32
    assert held == count // 5 * 32
    ids = ids[: count * 32].view(-1, 32)[-(count // 5) :]
    with torch.no_grad():
        loss = AutoModelForCausalLM.from_pretrained(llama)(input_ids=ids, labels=ids).loss
    assert before == pytest.approx(float(loss.exp()), rel=1e-3)
    # At full rank nothing is lost.
    assert after == pytest.approx(before, rel=1e-3)


def test_error_budget(convert, llama, tmp_path):
    arguments = ["--error", "0.5", "--gainless", "--match", "*.up_proj"]
    code, out, err = convert(llama, tmp_path / "out", *arguments)
    assert code == 0, err
    dense = AutoModelForCausalLM.from_pretrained(llama).get_submodule(UP).weight
    layer = layer_of(tmp_path / "out")
    discarded = torch.linalg.svdvals(dense.double()).square()
    share = discarded[layer.rank :].sum() / discarded.sum()
    assert share.sqrt() <= 0.5
    # Ranks are rounded up to multiples of 4 in float32.
    assert (discarded[layer.rank - 4 :].sum() / discarded.sum()).sqrt() > 0.5
    assert isinstance(load_factored(tmp_path / "out").get_submodule("lm_head"), torch.nn.Linear)
    assert "2 layers" in out


def test_distillation_of_the_nonlinear_form(convert, llama, text, tmp_path):
    common = ["--form", "cola", "--rank", "12", "--gainless", "--calibrate", text]
    common += ["--window", "64", "--tokens", "1024", "--match", "*.mlp.*"]
    _, raw, _ = convert(llama, tmp_path / "raw", *common)
    code, out, err = convert(llama, tmp_path / "out", *common, "--distill-steps", "60")
    assert code == 0, err
    assert perplexities(out)[2] < perplexities(raw)[2]
    layer = layer_of(tmp_path / "out")
    assert isinstance(layer, BottleneckLinear)
    assert layer.activation == "silu"


@pytest.mark.parametrize("kind", ["factored", "merged", "dense"])
def test_ways_to_write_and_dtypes(kind, convert, llama, tmp_path):
    arguments = ["--form", "tt", "--rank", "6", "--gainless", "--as", kind, "--dtype", "bfloat16"]
    code, out, err = convert(llama, tmp_path / "out", *arguments)
    assert code == 0, err
    if kind == "dense":
        assert "AutoModelForCausalLM.from_pretrained" in out
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert type(model.get_submodule(UP)) is torch.nn.Linear
    else:
        model = load_factored(tmp_path / "out")
        form = TTLinear if kind == "factored" else LowRankLinear
        assert type(model.get_submodule(UP)) is form
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    written = model.generate(torch.tensor([[84, 104, 101]]), do_sample=False, pad_token_id=0)
    assert written.shape == (1, 8)


def test_transposed_layers_and_a_tokenizer(convert, tmp_path):
    torch.manual_seed(0)
    vocabulary = {word: place for place, word in enumerate(["[UNK]", *sorted(set(WORDS))])}
    engine = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    source = tmp_path / "gpt2"
    PreTrainedTokenizerFast(tokenizer_object=engine).save_pretrained(source)
    sizes = {"vocab_size": len(vocabulary), "n_embd": 32, "n_positions": 64}
    dense = AutoModelForCausalLM.from_config(GPT2Config(n_layer=2, n_head=4, **sizes))
    dense.eval().save_pretrained(source)
    (tmp_path / "text.txt").write_text(TEXT)
    common = ["--gainless", "--calibrate", tmp_path / "text.txt", "--window", "32", "--rank", "32"]
    for kind in ("dense", "factored"):
        # Those that are left out must come out as they went in.
        arguments = [*common, "--as", kind, "--match", "*.c_proj"]
        code, out, err = convert(source, tmp_path / kind, *arguments)
        assert code == 0, err
        assert "held-out tokens" in out
        load = load_factored if kind == "factored" else AutoModelForCausalLM.from_pretrained
        model = load(tmp_path / kind).eval()
        ids = torch.arange(10)[None]
        with torch.no_grad():
            assert torch.allclose(model(ids).logits, dense(ids).logits, atol=1e-4)
        assert (tmp_path / kind / "tokenizer.json").exists()


def test_a_model_is_replaced_only_by_force(convert, llama, tmp_path):
    arguments = (llama, tmp_path / "out", "--rank", "4", "--gainless")
    assert convert(*arguments)[0] == 0
    code, _, err = convert(*arguments)
    assert code == 2
    assert "exists: give another folder" in err
    assert layer_of(tmp_path / "out").rank == 4
    assert convert(*arguments, "--force", "--rank", "5")[0] == 0
    assert layer_of(tmp_path / "out").rank == 5
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


REFUSED = [
    (["--form", "nope"], "form = 'nope' is not one of"),
    (["--form", "lax"], "which no dense model is turned into"),
    (["--form", "cola"], "give a text"),
    (["--distill-steps", "5"], "needs a text to learn from"),
    (["--rank", "4", "--error", "0.1"], "give one of them"),
    (["--rank", "much"], "rank = 'much'"),
    (["--as", "zip"], "--as zip is not one of factored, merged, dense"),
    (["--dtype", "int8"], "--dtype int8 is not one of"),
    (["--match", "*.nothing"], "fits no linear layer"),
    (["--calibrate", "missing.txt"], "missing.txt cannot be read"),
    (["--rank", "31"], "none of 14 layers gains"),
    (["--device", "cuda:99"], "--device cuda:99 cannot be used"),
]


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED)
def test_refusals(arguments, sentence, convert, llama, tmp_path):
    code, out, err = convert(llama, tmp_path / "out", *arguments)
    assert code == 2
    assert out == ""
    assert sentence in err
    assert len(err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_folders_that_are_no_models(convert, llama, tmp_path, text):
    def refused(source, sentence, *arguments):
        code, _, err = convert(source, tmp_path / "out", "--gainless", *arguments)
        assert code == 2
        assert sentence in err
        assert not (tmp_path / "out").exists()

    refused(tmp_path, "holds no config.json")
    refused("gpt2", "holds no config.json")
    assert convert(llama, tmp_path / "small", "--gainless")[0] == 0
    refused(tmp_path / "small", "holds factors already")
    broken = tmp_path / "broken"
    shutil.copytree(llama, broken)
    (broken / "model.safetensors").write_bytes(b"no")
    refused(broken, "cannot be loaded")
    config = json.loads((llama / "config.json").read_text())
    shutil.copytree(llama, broken, dirs_exist_ok=True)
    (broken / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    refused(broken, "lacks 9 weights")
    (tmp_path / "short.txt").write_text("too short")
    refused(llama, "the least", "--calibrate", tmp_path / "short.txt")
    refused(llama, "window = 100 must be", "--calibrate", text, "--window", "100")
    code, _, err = convert(llama, llama, "--force")
    assert code == 2
    assert "IN and OUT are both" in err
    assert AutoModelForCausalLM.from_pretrained(llama) is not None


def test_long_work_says_where_it_is(convert, llama, text, tmp_path, monkeypatch):
    monkeypatch.setattr("outlast.cli.runs.LINE_SECONDS", 0.0)
    common = ["--calibrate", text, "--window", "64", "--gainless", "--distill-steps", "2"]
    _, out, err = convert(llama, tmp_path / "out", *common)
    for what in ("loading the model", "reading the text", "fitting layers", "distilling: 2 of 2"):
        assert what in err
        assert what not in out
    assert command._rank("tt", "2,3,2", None) == (2, 3, 2)
