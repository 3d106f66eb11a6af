"""What a run leaves behind: a Hugging Face directory and the model's own words."""

import itertools
import json
import os
from pathlib import Path

import pytest
import torch
from tiny import corpus, losses, tiny_job, train
from torch import nn

from outlast.data import (
    BatchLoader,
    ByteTokenizer,
    SampleOrder,
    SampleWindow,
    TokenFile,
    load_tokenizer,
)
from outlast.errors import EXIT_DONE, CheckpointError, OutlastError
from outlast.records import Sampled, read_run
from outlast.train.engine import loss_sum
from outlast.train.export import (
    byte_level_tokenizer,
    continue_text,
    export_model,
    load_trained,
)
from outlast.train.run import run_directory

pytestmark = pytest.mark.distributed

# A vocabulary padded beyond the tokenizer's, as many published models have.
PADDED = 384


def write_tokenizer(folder: Path) -> Path:
    """A byte-level BPE of the tiny corpus with an end-of-text token; gives its file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [file.read_text() for file in sorted((folder / "corpus").glob("*.txt"))]
    engine.train_from_iterator(texts, trainer)
    file = folder / "tokenizer.json"
    engine.save(str(file))
    return file


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tiny llama with a tokenizer.json, trained and exported; gives folder and job."""
    folder = tmp_path_factory.mktemp("export")
    corpus(folder / "corpus")
    job = tiny_job(
        folder,
        "trained",
        f'data.tokenizer="{write_tokenizer(folder)}"',
        f"model.settings.vocab_size={PADDED}",
        "export.huggingface=true",
        "sample.tokens=30",
        "sample.temperature=5.0",
        "sample.prompt=def function",
    )
    assert train(job, 1) == EXIT_DONE
    return folder, job


def test_the_export_loads_and_gives_identical_logits(trained):
    from transformers import AutoModelForCausalLM

    _, job = trained
    loaded = AutoModelForCausalLM.from_pretrained(run_directory(job).model, local_files_only=True)
    own, step = load_trained(job, run_directory(job))
    assert step == job.train.steps
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, own(ids).logits)


def test_the_tokenizer_is_saved_beside_the_model(trained):
    from transformers import AutoTokenizer

    _, job = trained
    tokenizer = AutoTokenizer.from_pretrained(run_directory(job).model, local_files_only=True)
    text = "def function_3(x):\n    return x"
    expected = load_tokenizer(job.data.tokenizer).encode(text.encode()).tolist()
    assert tokenizer.encode(text, add_special_tokens=False) == expected
    assert len(expected) < len(text)
    assert tokenizer.decode(expected) == text


def test_the_byte_tokenizer_is_saved_as_one_of_hugging_face(tmp_path):
    from transformers import AutoTokenizer

    byte_level_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    for text in ("def f(x):\n\treturn  x", "grüß dich \u4f60\u597d \U0001f600", "\x00\x7f Ā", " "):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == [*text.encode()]
        assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 256


def test_others_may_read_what_is_exported(trained):
    _, job = trained
    files = [file for file in run_directory(job).model.iterdir() if file.is_file()]
    umask = os.umask(0)
    os.umask(umask)
    assert {file.stat().st_mode & 0o777 for file in files} == {0o666 & ~umask}


def test_a_tokenizer_directory_is_copied_with_its_settings(trained, tmp_path):
    folder, job = trained
    source = tmp_path / "tokenizer"
    source.mkdir()
    (source / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    data = job.data.model_copy(update={"tokenizer": str(source)})
    export_model(job.model_copy(update={"data": data}), run_directory(job), tmp_path / "model")
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    assert loaded.eos_token == "<|endoftext|>"


def test_the_run_ends_with_a_continuation_of_the_prompt(trained):
    _, job = trained
    [(_, sampled)] = read_run(run_directory(job).path).of(Sampled)
    assert sampled.step == job.train.steps
    assert sampled.prompt == "def function"
    assert sampled.text


def test_continued_training_starts_at_the_exported_models_loss(trained):
    folder, job = trained
    again = tiny_job(
        folder,
        "again",
        "model.settings={}",
        f'model.directory="{run_directory(job).model}"',
        f'data.tokenizer="{job.data.tokenizer}"',
        "train.steps=2",
    )
    assert train(again, 2) == EXIT_DONE
    model, _ = load_trained(job, run_directory(job))
    windows = SampleWindow(TokenFile.open(run_directory(again).data / "train.bin"), 16)
    loader = BatchLoader(windows, SampleOrder(windows.samples, again.run.seed), batch_size=12)
    [batch] = loader.batch(0)
    with torch.no_grad():
        logits = model(torch.from_numpy(batch.inputs)).logits
    expected = loss_sum(logits, torch.from_numpy(batch.targets)).item() / (12 * 16)
    assert losses(again)[0] == pytest.approx(expected, abs=2e-5)
    assert losses(again)[0] < losses(job)[0] - 0.1, "it did not start from scratch"


def test_an_export_is_replaced_only_where_the_run_made_it(trained, tmp_path):
    _, job = trained
    directory = run_directory(job)
    (directory.model / "note.txt").write_text("of the first export")
    assert export_model(job, directory, directory.model) == job.train.steps
    assert not (directory.model / "note.txt").exists()
    precious = tmp_path / "precious"
    precious.mkdir()
    assert export_model(job, directory, precious) == job.train.steps
    assert (precious / "model.safetensors").exists()
    (precious / "thesis.txt").write_text("years of work")
    with pytest.raises(OutlastError, match="exists; give another folder"):
        export_model(job, directory, precious)
    file = tmp_path / "file"
    file.write_text("a file")
    with pytest.raises(OutlastError, match="exists; give another folder"):
        export_model(job, directory, file)
    assert (precious / "thesis.txt").read_text() == "years of work"
    assert file.read_text() == "a file"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "precious"]


@pytest.mark.parametrize("place", [".", "sub/.."])
def test_the_current_folder_is_no_place_for_an_export(trained, tmp_path, monkeypatch, place):
    _, job = trained
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutlastError, match="exists; give another folder"):
        export_model(job, run_directory(job), Path(place))
    assert [each.name for each in tmp_path.iterdir()] == ["sub"]


def test_a_failed_export_keeps_the_earlier_one(trained, monkeypatch):
    _, job = trained
    directory = run_directory(job)
    before = {file.name: file.read_bytes() for file in directory.model.iterdir()}

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("outlast.train.export._save_tokenizer", fail)
    with pytest.raises(OutlastError, match=r"cannot be exported to .*No space left"):
        export_model(job, directory, directory.model)
    assert {file.name: file.read_bytes() for file in directory.model.iterdir()} == before
    assert [each.name for each in directory.path.iterdir() if "partial" in each.name] == []


def test_a_run_without_checkpoint_has_nothing_to_export(tmp_path):
    job = tiny_job(tmp_path, "empty")
    with pytest.raises(CheckpointError, match="holds no checkpoint to export"):
        export_model(job, run_directory(job), tmp_path / "model")


def make_bigrams(vocabulary: int = 256) -> nn.Module:
    """A model of the user's own: logits from the last token alone."""
    return nn.Sequential(nn.Embedding(vocabulary, 16), nn.Linear(16, vocabulary))


def test_a_module_function_samples_but_exports_nothing(tmp_path):
    job = tiny_job(
        tmp_path,
        "function",
        "model.settings={}",
        "model.module=test_train_export:make_bigrams",
        "model.arguments.vocabulary=260",
        "export.huggingface=true",
        "sample.tokens=12",
    )
    assert train(job, 2) == EXIT_DONE
    directory = run_directory(job)
    [(_, sampled)] = read_run(directory.path).of(Sampled)
    assert len(sampled.text) == 12
    assert not directory.model.exists()
    with pytest.raises(OutlastError, match="gives no Hugging Face model"):
        export_model(job, directory, tmp_path / "model")


class Counter(nn.Module):
    """Prefers the token after the last one, and notes how long a context it is given."""

    def __init__(self, vocabulary: int = 256) -> None:
        super().__init__()
        self.vocabulary, self.contexts = vocabulary, []

    def forward(self, ids):
        self.contexts.append(ids.shape[1])
        return 3.0 * nn.functional.one_hot((ids + 1) % self.vocabulary, self.vocabulary).float()


def test_temperature_zero_takes_the_most_likely_token():
    model = Counter()
    settings = {"tokens": 5, "temperature": 0.0, "window": 4}
    texts = {
        continue_text(model, ByteTokenizer(), "xya", **settings, seed=seed) for seed in range(3)
    }
    assert texts == {"bcdef"}
    assert max(model.contexts) == 4


def test_samples_follow_from_the_seed():
    def text(seed):
        settings = {"tokens": 40, "temperature": 1.0, "window": 8}
        return continue_text(Counter(), ByteTokenizer(), "a", **settings, seed=seed)

    torch.manual_seed(0)
    first = text(1)
    torch.rand(3)
    assert text(1) == first
    assert len({text(seed) for seed in range(4)}) == 4


def test_an_empty_prompt_and_a_padded_vocabulary():
    model = Counter(vocabulary=500)
    for temperature, seed in itertools.product((0.0, 100.0), range(3)):
        settings = {"tokens": 30, "temperature": temperature, "window": 8}
        text = continue_text(model, ByteTokenizer(), "", **settings, seed=seed)
        assert text
