"""Tokenizers: round trips, identities and broken files."""

import json
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.data import ByteTokenizer, load_tokenizer
from outlast.errors import DataError, MissingExtraError

TEXT = "Outlast keeps a run alive. Das läuft weiter: 数据.\n"


@pytest.fixture(scope="module")
def json_tokenizer(tmp_path_factory):
    """A byte-level BPE with two merges, a length limit and an end-of-text token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate([*alphabet, "ru", "run"])}
    engine = Tokenizer(models.BPE(vocab=vocabulary, merges=[("r", "u"), ("ru", "n")]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens(["<|endoftext|>", "<stop>"])
    engine.enable_truncation(max_length=4)
    folder = tmp_path_factory.mktemp("json")
    engine.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a run that lasts", "a long run", "it runs on"] * 5),
        model_prefix=str(folder / "small"),
        vocab_size=30,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return folder / "small.model"


@given(st.binary(max_size=300))
def test_bytes_are_their_own_tokens(content):
    ids = ByteTokenizer().encode(content)
    assert ids.tolist() == list(content)
    assert ByteTokenizer().decode(ids) == content.decode("utf-8", errors="replace")


def test_byte_tokenizer_has_256_symbols_and_ends_documents_with_zero():
    tokenizer = load_tokenizer("byte")
    assert (tokenizer.name, tokenizer.vocabulary_size, tokenizer.end_of_text) == ("byte", 256, 0)


@pytest.mark.parametrize("ids", [[256], [-1], [300, 5]])
def test_ids_that_are_no_bytes_are_refused(ids):
    with pytest.raises(DataError, match="not a byte"):
        ByteTokenizer().decode(ids)


def test_json_tokenizer_round_trip_of_more_than_its_length_limit(json_tokenizer):
    tokenizer = load_tokenizer(str(json_tokenizer))
    ids = tokenizer.encode(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) < len(TEXT.encode())
    assert tokenizer.vocabulary_size == 260
    assert tokenizer.end_of_text == 258


def test_json_tokenizer_replaces_undecodable_bytes(json_tokenizer):
    tokenizer = load_tokenizer("tokenizer.json", base=json_tokenizer)
    assert tokenizer.decode(tokenizer.encode(b"a\xffb")) == "a\ufffdb"


@pytest.mark.parametrize("token", ["<stop>", {"content": "<stop>"}])
def test_the_end_of_text_named_by_the_configuration_wins(json_tokenizer, tmp_path, token):
    (tmp_path / "tokenizer.json").write_bytes((json_tokenizer / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    assert load_tokenizer(str(tmp_path)).end_of_text == 259


def test_a_changed_file_is_another_tokenizer_and_a_moved_one_is_not(json_tokenizer, tmp_path):
    content = (json_tokenizer / "tokenizer.json").read_text()
    (tmp_path / "same.json").write_text(content)
    (tmp_path / "other.json").write_text(content + " ")
    name = load_tokenizer(str(json_tokenizer)).name
    assert load_tokenizer("same.json", tmp_path).name == name
    assert load_tokenizer("other.json", tmp_path).name != name


def test_sentencepiece_round_trip(sentencepiece_model):
    tokenizer = load_tokenizer(str(sentencepiece_model))
    ids = tokenizer.encode(b"a long run")
    assert tokenizer.decode(ids) == "a long run"
    assert int(np.max(ids)) < tokenizer.vocabulary_size
    assert tokenizer.end_of_text == 2


def test_missing_sentencepiece_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "x.model").write_bytes(b"anything")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'outlast\[sentencepiece\]'"):
        load_tokenizer(str(tmp_path / "x.model"))


@pytest.mark.parametrize("content", [b"", b"not a model at all"])
def test_a_broken_sentencepiece_model_is_refused(tmp_path, content):
    pytest.importorskip("sentencepiece")
    (tmp_path / "x.model").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.model is not a readable sentencepiece model"):
        load_tokenizer("x.model", tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\xff\xfe"])
def test_a_broken_tokenizer_json_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=r"is not a readable tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_unusable_names_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "words.txt").write_text("x")
    with pytest.raises(DataError, match="neither 'byte' nor a file or folder"):
        load_tokenizer("gpt2", tmp_path)
    with pytest.raises(DataError, match=r"holds neither tokenizer\.json"):
        load_tokenizer("empty", tmp_path)
    with pytest.raises(DataError, match=r"ends in '\.txt'"):
        load_tokenizer("words.txt", tmp_path)
