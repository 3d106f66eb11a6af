"""From [model] to a module: what works, and one sentence for everything that does not."""

import json
import random
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from outlast.errors import OutlastError
from outlast.job import load_job
from outlast.train.model import (
    build_model,
    facts_of,
    flops_per_token,
    load_config,
    logits_of,
    parameter_count,
)

TINY = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def job_of(**model):
    """A job with this [model] section in place of the default's."""
    job = load_job()
    section = {name: field.default for name, field in type(job.model).model_fields.items()}
    return job.model_copy(update={"model": job.model.model_copy(update=section | model)})


def refusal(**model):
    with pytest.raises(OutlastError) as error:
        build_model(job_of(**model))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def saved(tmp_path):
    """A Hugging Face directory with weights."""
    folder = tmp_path / "saved"
    build_model(job_of(settings=TINY)).save_pretrained(folder)
    return folder


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write a module of the user's in the current folder; it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    names = []

    def write(name, source):
        names.append(name)
        (tmp_path / f"{name}.py").write_text(source)

    yield write
    for name in names:
        sys.modules.pop(name, None)


def same_weights(first, second):
    first, second = first.state_dict(), second.state_dict()
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name]) for name, value in first.items()
    )


def test_settings_config_file_and_directory_give_the_same_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    in_place = build_model(job_of(settings=TINY))
    assert same_weights(in_place, build_model(job_of(config=str(tmp_path / "config.json"))))
    assert same_weights(in_place, build_model(job_of(directory=str(tmp_path))))
    assert in_place.training
    assert in_place.config.use_cache is False
    assert {each.dtype for each in in_place.parameters()} == {torch.float32}
    logits = logits_of(in_place(torch.zeros(3, 5, dtype=torch.long)))
    assert logits.shape == (3, 5, 64)


def test_weights_depend_on_the_seed_alone():
    job = job_of(settings=TINY)
    first = build_model(job)
    torch.rand(7), random.random()
    assert same_weights(first, build_model(job))
    other = job.model_copy(update={"run": job.run.model_copy(update={"seed": 1})})
    assert not same_weights(first, build_model(other))


def test_a_directory_with_weights_gives_them_unless_scratch_is_asked(saved):
    path = saved / "model.safetensors"
    save_file({name: value + 1 for name, value in load_file(path).items()}, path, {"format": "pt"})
    fresh = build_model(job_of(settings=TINY))
    for initialize in ("auto", "pretrained"):
        loaded = build_model(job_of(directory=str(saved), initialize=initialize))
        for name, value in loaded.state_dict().items():
            assert torch.equal(value, fresh.state_dict()[name] + 1), name
    scratch = build_model(job_of(directory=str(saved), initialize="scratch"))
    assert same_weights(scratch, fresh)


def test_bf16_weights_are_trained_in_fp32(tmp_path):
    build_model(job_of(settings=TINY)).to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = build_model(job_of(directory=str(tmp_path)))
    assert {each.dtype for each in loaded.parameters()} == {torch.float32}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_implementation_is_the_one_asked_for(attention):
    model = build_model(job_of(settings=TINY, attention=attention))
    assert model.config._attn_implementation == attention


def test_missing_files(tmp_path):
    assert "does not exist" in refusal(config=str(tmp_path / "no.json"))
    assert f'model.directory = "{tmp_path}/no" does not exist' in refusal(
        directory=str(tmp_path / "no")
    )
    assert f'model.directory = "{tmp_path}" holds no Hugging Face config' in refusal(
        directory=str(tmp_path)
    )


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"model_type": "nope"}', '{"model_type": "llama", "a": "']
)
def test_broken_config_files(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    assert "holds no Hugging Face config" in refusal(config=str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "lama"}, 'model.settings.model_type = "lama"'),
        ({"model_type": "lama"}, "did you mean llama?"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": 18}, "not a multiple of the number of attention heads"),
        ({"num_attention_heads": 0}, "division"),
        ({"hiden_size": 16}, "model.settings.hiden_size is not known; did you mean hidden_size?"),
        ({"n_layer": 2}, "model.settings.n_layer is not known"),
        ({"hidden_act": "nope"}, "nope"),
        ({"model_type": "t5"}, "t5"),
    ],
)
def test_wrong_settings(changes, said):
    assert said in refusal(settings=TINY | changes)


def test_settings_of_older_configs_are_still_understood():
    assert load_config(job_of(settings=TINY | {"rope_theta": 5e5}).model) is not None


def test_pretrained_without_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    sentence = refusal(directory=str(tmp_path), initialize="pretrained")
    assert "holds no *.safetensors file" in sentence
    assert str(tmp_path) in sentence


def test_weights_of_another_format_are_not_passed_over(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "pytorch_model.bin").write_bytes(b"weights")
    assert "only *.safetensors can be read" in refusal(directory=str(tmp_path))


def test_damaged_weights(saved):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "the model cannot be built" in refusal(directory=str(saved))


def test_incomplete_weights_are_not_filled_with_random_numbers(saved):
    path = saved / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, {"format": "pt"})
    sentence = refusal(directory=str(saved))
    assert "no weights for 1 tensors" in sentence
    assert "model.layers.1.mlp.up_proj.weight" in sentence


def test_weights_of_another_shape(saved):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    assert "the model cannot be built" in refusal(directory=str(saved))


def test_a_function_of_the_users(package):
    package(
        "my_model_works",
        "from torch import nn\n"
        "def make(width):\n"
        "    return nn.Sequential(nn.Embedding(64, width), nn.Linear(width, 64)).eval()\n",
    )
    settings = {"module": "my_model_works:make", "arguments": {"width": 8}}
    first, second = (build_model(job_of(**settings)) for _ in range(2))
    assert same_weights(first, second)
    assert first.training
    assert first[0].weight.shape == (64, 8)
    assert facts_of(load_config(job_of(**settings).model)).vocabulary_size is None


def test_a_function_that_cannot_be_had(package):
    package("my_model_broken", "import no_such_package_at_all\n")
    package("my_model_empty", "value = 5\n")
    assert "cannot be imported: No module named 'no_such_module_here'" in refusal(
        module="no_such_module_here:make"
    )
    assert "no_such_package_at_all" in refusal(module="my_model_broken:make")
    assert "no attribute 'make'" in refusal(module="my_model_empty:make")
    assert "not a callable" in refusal(module="my_model_empty:value")


def test_a_function_with_other_arguments_or_another_result(package):
    package(
        "my_model_wrong",
        "def make(width):\n    return width\n\ndef fail():\n    return 'a' + 1\n",
    )
    assert refusal(module="my_model_wrong:make", arguments={"width": 5}) == (
        'model.module = "my_model_wrong:make" returned a int, not an nn.Module'
    )
    sentence = refusal(module="my_model_wrong:make", arguments={"heigth": 5})
    assert "cannot be called with model.arguments = {'heigth': 5}" in sentence
    # A mistake inside the function is the author's: it keeps its traceback.
    with pytest.raises(TypeError):
        build_model(job_of(module="my_model_wrong:fail"))


def test_facts_of_llama():
    facts = facts_of(load_config(job_of(settings=TINY).model))
    assert (facts.vocabulary_size, facts.positions, facts.layers) == (64, 32, 2)
    assert (facts.heads, facts.key_value_heads) == (4, 2)
    assert not facts.tied
    assert facts.dropout == ()


def test_facts_of_gpt2():
    settings = {"model_type": "gpt2", "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 24}
    facts = facts_of(load_config(job_of(settings=settings).model))
    assert (facts.positions, facts.layers, facts.heads, facts.key_value_heads) == (24, 3, 2, 2)
    assert facts.tied
    # Not summary_first_dropout, which belongs to a head that a language model has not.
    assert facts.dropout == ("attn_pdrop", "embd_pdrop", "resid_pdrop")
    off = dict.fromkeys(facts.dropout, 0.0)
    assert facts_of(load_config(job_of(settings=settings | off).model)).dropout == ()


def test_flops_per_token_counted_by_hand():
    job = job_of(settings=TINY)
    # q and o: 16 x 16; k and v: 16 x 8; three matrices of the MLP: 16 x 24; the head: 16 x 64.
    matrices = 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24) + 16 * 64
    attention = 12 * 2 * 16 * 10
    model, config = build_model(job), load_config(job.model)
    assert flops_per_token(model, 10, config) == 6 * matrices + attention
    tied = job_of(settings=TINY | {"tie_word_embeddings": True})
    assert flops_per_token(build_model(tied), 10, config) == 6 * matrices + attention
    norms = (2 * 2 + 1) * 16
    assert parameter_count(model) == matrices + norms + 16 * 64
    assert parameter_count(build_model(tied)) == matrices + norms


def test_logits_of_a_tensor_and_of_a_result_object():
    tensor = torch.zeros(1, 2, 3)
    assert logits_of(tensor) is tensor
    assert logits_of(nn.Identity()(type("Output", (), {"logits": tensor})())) is tensor


def test_model_without_first_weights_is_the_same_but_for_them() -> None:
    tied = {**TINY, "tie_word_embeddings": True}
    job = job_of(settings=tied)
    drawn, bare = build_model(job), build_model(job, drawn=False)
    assert [(name, each.shape) for name, each in drawn.state_dict().items()] == [
        (name, each.shape) for name, each in bare.state_dict().items()
    ]
    assert bare.lm_head.weight is bare.model.embed_tokens.weight
    bare.load_state_dict(drawn.state_dict())
    tokens = torch.arange(8)[None]
    # Also what is in no state_dict is there, such as the frequencies of rotary embeddings.
    assert torch.equal(logits_of(drawn(tokens)), logits_of(bare(tokens)))
    assert bare.training
