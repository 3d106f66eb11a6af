"""Every kind of data, tokenizer, precision and optimizer trains from start to end, alone."""

import os

import numpy as np
import pytest
from forked import RanksFailedError, run_ranks
from test_train_export import write_tokenizer
from tiny import corpus, evaluations, losses, tiny_job

from outlast.distributed.ranks import ALONE
from outlast.errors import EXIT_DONE
from outlast.records import AttemptStarted, Evaluated, Sampled, Warned, read_run
from outlast.train.run import Start, run_directory, work

# Each run has a process of its own, since torch's threads and a later fork do not go together.
pytestmark = pytest.mark.distributed


def _work(job, environment):
    os.environ.update(environment)
    return work(Start(job), ALONE)


def finish(job, **environment):
    """Run `job` alone to its end; gives its records."""
    assert run_ranks(1, _work, job, environment) == [EXIT_DONE]
    run = read_run(run_directory(job).path)
    assert run.attempts[-1].outcome == "completed"
    assert len(run.losses()) == job.train.steps
    assert losses(job)[-1] < losses(job)[0], "it learns"
    return run


def token_job(folder, name, *overrides):
    return tiny_job(folder, name, "data.source=tokens", "sample.tokens=4", *overrides)


@pytest.fixture
def byte_tokens(tmp_path):
    """The tiny corpus as one array of bytes."""
    corpus(tmp_path / "corpus")
    text = b"".join(file.read_bytes() for file in sorted((tmp_path / "corpus").iterdir()))
    return np.frombuffer(text, np.uint8).astype(np.uint16)


def test_tokens_in_npy_and_bare_bin_files_are_the_same_data(tmp_path, byte_tokens):
    np.save(tmp_path / "tokens.npy", byte_tokens.astype(np.int32))
    byte_tokens.tofile(tmp_path / "tokens.bin")
    byte_tokens.astype(np.uint32).tofile(tmp_path / "wide.bin")
    runs = {
        "npy": [f'data.train=["{tmp_path}/tokens.npy"]'],
        "bin": [f'data.train=["{tmp_path}/tokens.bin"]'],
        "wide": [f'data.train=["{tmp_path}/wide.bin"]', "data.token_dtype=uint32"],
    }
    jobs = {name: token_job(tmp_path, name, *overrides) for name, overrides in runs.items()}
    for job in jobs.values():
        [(_, evaluated)] = finish(job).of(Evaluated)
        assert evaluated.bits_per_byte is None, "nobody counted the bytes of the source text"
    assert losses(jobs["npy"]) == losses(jobs["bin"]) == losses(jobs["wide"])
    assert evaluations(jobs["npy"]) == evaluations(jobs["wide"])


def test_tokens_outside_the_vocabulary_are_refused(tmp_path, byte_tokens):
    byte_tokens[-3] = 256
    np.save(tmp_path / "tokens.npy", byte_tokens)
    job = token_job(tmp_path, "wrong", f'data.train=["{tmp_path}/tokens.npy"]')
    with pytest.raises(RanksFailedError, match=r"largest token id 256 .* vocabulary_size = 256"):
        finish(job)


def test_tokens_that_the_tokenizer_did_not_make_train_without_a_sample(tmp_path, byte_tokens):
    np.save(tmp_path / "tokens.npy", byte_tokens + 200)
    job = token_job(
        tmp_path,
        "foreign",
        f'data.train=["{tmp_path}/tokens.npy"]',
        "model.settings.vocab_size=512",
    )
    run = finish(job)
    assert "was not made by data.tokenizer" in run.of(Warned)[0][1].message
    assert run.of(Sampled) == []


def test_tokenizer_json(tmp_path):
    corpus(tmp_path / "corpus")
    job = tiny_job(
        tmp_path,
        "json",
        f'data.tokenizer="{write_tokenizer(tmp_path)}"',
        "model.settings.vocab_size=300",
        "sample.tokens=5",
    )
    run = finish(job)
    [(_, started)] = run.of(AttemptStarted)
    assert started.data["tokenizer"].startswith("tokenizer.json:")
    [(_, evaluated)] = run.of(Evaluated)
    assert 0 < evaluated.bits_per_byte < evaluated.loss / np.log(2), "a token is several bytes"
    assert run.of(Sampled)


def test_sentencepiece_model(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    corpus(tmp_path / "corpus")
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus" / "file0.txt"),
        model_prefix=str(tmp_path / "small"),
        vocab_size=60,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
    )
    job = tiny_job(
        tmp_path,
        "sentencepiece",
        f'data.tokenizer="{tmp_path}/small.model"',
        "sample.tokens=5",
        "export.huggingface=true",
    )
    run = finish(job)
    [(_, started)] = run.of(AttemptStarted)
    assert started.data["tokenizer"].startswith("sentencepiece:")
    assert (run_directory(job).model / "tokenizer.model").exists()


def test_a_module_function(tmp_path):
    job = tiny_job(
        tmp_path,
        "function",
        "model.settings={}",
        "model.module=test_train_export:make_bigrams",
        "sample.tokens=5",
    )
    run = finish(job)
    [(_, started)] = run.of(AttemptStarted)
    assert started.parameters == 256 * 16 + 16 * 256 + 256
    assert started.flops_per_token == 6 * 16 * 256


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_bf16_follows_fp32_roughly_but_not_exactly(tmp_path, optimizer):
    single, half = (
        tiny_job(tmp_path, name, f"optimizer.name={optimizer}", f"train.precision={name}")
        for name in ("fp32", "bf16")
    )
    finish(single)
    finish(half)
    assert losses(half) != losses(single)
    assert losses(half) == pytest.approx(losses(single), abs=0.05)


def test_compiled_blocks_give_the_loss_of_eager_ones(tmp_path):
    short = ("train.steps=3", "data.validation_fraction=0.0")
    eager = tiny_job(tmp_path, "eager", *short)
    compiled = tiny_job(tmp_path, "compiled", "train.compile=true", *short)
    finish(eager)
    # No worker processes of the compiler: they would outlive the run.
    finish(compiled, TORCHINDUCTOR_COMPILE_THREADS="1")
    assert losses(compiled) == pytest.approx(losses(eager), abs=2e-5)


def test_without_validation_there_is_no_validation_loss(tmp_path):
    run = finish(tiny_job(tmp_path, "alone", "data.validation_fraction=0.0"))
    assert run.of(Evaluated) == []


def test_gradient_clipping_off_and_schedules(tmp_path):
    clipped = tiny_job(tmp_path, "clipped", "train.gradient_clip=0.01")
    free = tiny_job(tmp_path, "free", "train.gradient_clip=0.0")
    constant = tiny_job(tmp_path, "constant", "train.gradient_clip=0.0", "schedule.name=constant")
    for job in (clipped, free, constant):
        finish(job)
    assert losses(clipped)[0] == losses(free)[0]
    assert losses(clipped)[-1] != losses(free)[-1]
    assert evaluations(constant) != evaluations(free)
