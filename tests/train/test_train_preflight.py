"""What is refused before a process starts: a sentence each, all of them at once."""

import pytest
from tiny import tiny_job

from outlast.errors import JobError
from outlast.train.layout import Layout
from outlast.train.preflight import preflight

GPT2 = (
    'model.settings={model_type="gpt2", vocab_size=256, n_embd=32, n_layer=2, n_head=2, '
    "n_positions=32, tie_word_embeddings=false}"
)
PIPELINE = ("parallel.pipeline=2", "parallel.pipeline_microbatches=4")
FUNCTION = ("model.settings={}", "model.module=collections:OrderedDict")


def problems(folder, world_size, *overrides):
    with pytest.raises(JobError) as error:
        preflight(tiny_job(folder, "wrong", *overrides), world_size)
    assert all("\n" not in problem for problem in error.value.problems)
    return error.value.problems


def test_a_good_job_gives_its_layout_and_facts(tmp_path):
    plan = preflight(tiny_job(tmp_path, "good", "parallel.shard=2"), 4)
    assert plan.layout == Layout(replicate=2, shard=2)
    assert plan.facts.vocabulary_size == 256


@pytest.mark.parametrize(
    ("world_size", "overrides", "sentence"),
    [
        (
            1,
            ["model.settings.vocab_size=100"],
            'data.tokenizer = "byte" has 256 token ids, but the model\'s vocabulary_size is 100',
        ),
        (
            1,
            ["data.sequence_length=33"],
            "data.sequence_length = 33 exceeds the model's max_position_embeddings = 32",
        ),
        (
            1,
            ["model.settings.num_key_value_heads=3"],
            "num_key_value_heads = 3 does not divide its num_attention_heads = 4",
        ),
        (
            4,
            ["parallel.tensor=4", "model.settings.num_key_value_heads=2"],
            "parallel.tensor = 4 does not divide num_key_value_heads = 2",
        ),
        (
            2,
            ["parallel.tensor=2", "model.settings.attention_dropout=0.1"],
            "parallel.tensor = 2 cannot be combined with the model's attention_dropout > 0",
        ),
        (
            4,
            ["parallel.tensor=2"],
            "parallel.tensor = 2 cannot be combined with 2 replicas",
        ),
        (
            1,
            ["train.compile=true", "model.settings.attention_dropout=0.1"],
            "train.compile = true cannot be combined with the model's attention_dropout > 0",
        ),
        (
            2,
            [*PIPELINE, "model.settings.num_hidden_layers=1"],
            "the pipeline has 2 stages (parallel.pipeline = 2), but the model has only 1 layers",
        ),
        (
            2,
            [*PIPELINE, "model.settings.tie_word_embeddings=true"],
            "parallel.pipeline = 2 needs separate input and output embeddings",
        ),
        (
            2,
            [*PIPELINE, "train.batch_size=10"],
            "train.batch_size = 10 is not divisible by the 1 data-parallel processes x 4 pipeline",
        ),
        (
            4,
            ["parallel.pipeline=2", "parallel.pipeline_microbatches=4", "parallel.replicate=2"],
            "train.batch_size = 12 is not divisible by the 2 data-parallel processes x 4 pipeline",
        ),
        (
            2,
            [
                "parallel.pipeline=2",
                "parallel.pipeline_schedule=interleaved",
                "parallel.pipeline_microbatches=3",
            ],
            "parallel.pipeline_microbatches = 3 is not divisible by parallel.pipeline = 2",
        ),
        (2, [*PIPELINE, *FUNCTION], "needs a Hugging Face model, and model.module gives none"),
        (13, [], "train.batch_size = 12 gives no sample to some of the 13 data-parallel processes"),
        (1, ['data.train=["no/such/*.txt"]'], "no glob matches 'no/such/*.txt'"),
        (1, ['data.validation=["no/such.txt"]'], "no file is found for 'no/such.txt'"),
        (1, ["data.tokenizer=no/such.json"], "data.tokenizer = 'no/such.json' is neither"),
        (3, ["parallel.shard=2"], "needs 2 processes, but 3 were started"),
        (1, ["model.settings.model_type=nope"], 'model_type = "nope"'),
    ],
)
def test_a_problem_is_one_sentence(tmp_path, world_size, overrides, sentence):
    [problem] = problems(tmp_path, world_size, *overrides)
    assert sentence in problem


def test_all_problems_are_listed_at_once(tmp_path):
    found = problems(
        tmp_path,
        4,
        "parallel.tensor=3",
        "data.sequence_length=64",
        "data.tokenizer=no/such.json",
        'data.train=["no/such.txt"]',
        "model.settings.num_key_value_heads=2",
        "model.settings.attention_dropout=0.5",
        "train.compile=true",
    )
    text = "\n".join(found)
    for part in (
        "needs 3 processes, but 4 were started",
        "max_position_embeddings = 32",
        "no/such.json",
        "no/such.txt",
        "parallel.tensor = 3 does not divide num_attention_heads = 4",
        "parallel.tensor = 3 does not divide num_key_value_heads = 2",
        "train.compile = true cannot be combined",
        "parallel.tensor = 3 cannot be combined with the model's attention_dropout",
    ):
        assert part in text
    assert len(found) == 8


def test_gpt2s_dropouts_are_named(tmp_path):
    [problem] = problems(tmp_path, 1, GPT2, "train.compile=true")
    assert "the model's attn_pdrop > 0" in problem
    off = "attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0"
    none = GPT2.replace("n_positions", f"{off}, n_positions")
    assert preflight(tiny_job(tmp_path, "good", none, "train.compile=true"), 1).facts.dropout == ()


def test_token_files_need_no_fitting_tokenizer(tmp_path):
    tokens = tmp_path / "tokens.npy"
    tokens.write_bytes(b"")
    overrides = ["data.source=tokens", f'data.train=["{tokens}"]', "model.settings.vocab_size=100"]
    assert preflight(tiny_job(tmp_path, "tokens", *overrides), 1).facts.vocabulary_size == 100
