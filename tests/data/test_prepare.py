"""From settings to token files that every start of a run sees alike."""

import json
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from outlast.data import ByteTokenizer, prepare, wait_for, whole_files, write_tokens
from outlast.errors import DataError


@pytest.fixture
def base(tmp_path):
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"document {number}\n")
    return tmp_path


def from_text(base, **settings):
    defaults = {"train_patterns": ["*.txt"], "validation_fraction": 0.2, "cache": base / "cache"}
    return prepare("text", base=base, **(defaults | settings))


def text_of(file):
    return ByteTokenizer().decode(file.tokens)


def test_text_is_tokenised_once(base):
    first = from_text(base)
    assert not first.reused
    assert len(text_of(first.train) + text_of(first.validation)) == 20 * 13 - 10
    marker = base / "cache/prepared.json"
    before = [(path.name, path.stat().st_mtime_ns) for path in sorted(marker.parent.iterdir())]
    again = from_text(base)
    assert again.reused
    assert again.note is None
    assert text_of(again.train) == text_of(first.train)
    after = [(path.name, path.stat().st_mtime_ns) for path in sorted(marker.parent.iterdir())]
    assert after == before


def test_the_standard_library_is_a_corpus(tmp_path, monkeypatch):
    """Of a small stand-in, since the whole takes half a second."""
    library = tmp_path / "lib"
    (library / "site-packages").mkdir(parents=True)
    (library / "site-packages/other.py").write_text("not ours\n")
    for name in ("a.py", "b.py", "c.py"):
        (library / name).write_text(f"import {name}\n")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(library)})
    data = prepare("stdlib", cache=tmp_path / "cache", validation_fraction=0.05)
    assert data.train.header.documents == 2
    assert data.validation.header.documents == 1
    assert "ours" not in text_of(data.train) + text_of(data.validation)


def test_a_changed_corpus_does_not_change_a_run(base):
    before = text_of(from_text(base).train)
    (base / "3.txt").write_text("something else altogether\n")
    (base / "new.txt").write_text("new\n")
    again = from_text(base)
    assert text_of(again.train) == before
    assert "has changed since it was tokenised" in again.note


def test_a_cache_that_another_process_has_checked_is_only_opened(base):
    from_text(base)
    (base / "new.txt").write_text("new\n")
    tokens = base / "cache/train.bin"
    spoilt = bytearray(tokens.read_bytes())
    spoilt[-1] ^= 1
    tokens.write_bytes(bytes(spoilt))
    with pytest.raises(DataError, match=r"train\.bin"):
        from_text(base)
    opened = from_text(base, checked=True)
    assert opened.reused
    assert opened.note is None


def test_a_deleted_corpus_does_not_stop_a_run(base):
    before = text_of(from_text(base).train)
    for path in base.glob("*.txt"):
        path.unlink()
    again = from_text(base)
    assert text_of(again.train) == before
    assert "cannot be found any more" in again.note


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"validation_fraction": 0.3}, "made with data.validation_fraction = 0.2, the job now has"),
        ({"train_patterns": ["1*.txt"]}, r"made with data.train = \['\*.txt'\]"),
        ({"validation_patterns": ["1.txt"]}, r"made with data.validation = \[\]"),
    ],
)
def test_a_cache_of_other_settings_is_not_used(base, change, message):
    from_text(base)
    with pytest.raises(DataError, match=message):
        from_text(base, **change)


def test_a_cache_of_another_source_or_tokenizer_is_not_used(base):
    from_text(base)
    with pytest.raises(DataError, match=r"made with data.source = 'text'"):
        prepare("stdlib", cache=base / "cache", validation_fraction=0.2)
    marker = base / "cache/prepared.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"tokenizer": "other"}))
    with pytest.raises(DataError, match=r"made with data.tokenizer = 'other'"):
        from_text(base)


def test_an_unfinished_cache_is_made_again(base):
    from_text(base)
    (base / "cache/prepared.json").unlink()
    (base / "cache/train.bin").write_bytes(b"half")
    data = from_text(base)
    assert not data.reused
    data.train.verify()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda cache: (cache / "train.bin").unlink(), "train.bin does not exist"),
        (lambda cache: (cache / "train.json").unlink(), "has lost its header train.json"),
        (lambda cache: (cache / "prepared.json").write_text("{"), "cannot be read as JSON"),
        (lambda cache: (cache / "prepared.json").write_text("{}"), "has version None"),
        (
            lambda cache: (cache / "train.bin").write_bytes(
                (cache / "train.bin").read_bytes().replace(b"d", b"e", 1)
            ),
            "train.bin is damaged",
        ),
    ],
)
def test_a_damaged_cache_is_told(base, damage, message):
    from_text(base)
    damage(base / "cache")
    with pytest.raises(DataError, match=message):
        from_text(base)


def test_validation_files_are_not_trained_on(base):
    data = from_text(base, validation_patterns=["7.txt"])
    assert text_of(data.validation) == "document 7\n\0"
    assert "document 7\n" not in text_of(data.train)
    assert data.train.header.documents == 19
    with pytest.raises(DataError, match=r"every file of data.train is also in data.validation"):
        from_text(base, validation_patterns=["*.txt"], cache=base / "other")


def test_no_validation_is_possible(base):
    assert from_text(base, validation_fraction=0.0).validation is None


def test_token_files_are_opened_in_place(base):
    np.arange(100, dtype=np.uint16).tofile(base / "t.bin")
    np.save(base / "v.npy", np.arange(50, dtype=np.uint16))
    both = prepare(
        "tokens",
        cache=base / "cache",
        base=base,
        train_patterns=["t.bin"],
        validation_patterns=["v.npy"],
    )
    assert len(both.train.tokens) == 100
    assert len(both.validation.tokens) == 50
    tail = prepare(
        "tokens", cache=base / "cache", base=base, train_patterns=["t.bin"], validation_fraction=0.1
    )
    assert tail.validation.tokens.tolist() == list(range(90, 100))
    assert not (base / "cache").exists()


def test_a_tokenizer_that_did_not_make_the_tokens_is_not_used(base):
    np.array([5, 5000, 7], np.uint16).tofile(base / "large.bin")
    np.array([5, 50, 7], np.uint16).tofile(base / "small.bin")
    shared = {"cache": base / "cache", "base": base}
    large = prepare("tokens", train_patterns=["large.bin"], **shared)
    assert large.tokenizer is None
    assert "was not made by data.tokenizer (byte)" in large.note
    small = prepare("tokens", train_patterns=["small.bin"], **shared)
    assert small.tokenizer.name == "byte"
    assert small.note is None


def test_tokens_of_two_tokenizers_are_refused(base):
    corpus = whole_files([base / "1.txt"], base)
    for name in ("one", "two"):
        write_tokens(base / f"{name}.bin", corpus, ByteTokenizer(name=name))
    with pytest.raises(DataError, match=r"'one' and data.validation with 'two'"):
        prepare(
            "tokens",
            cache=base / "cache",
            base=base,
            train_patterns=["one.bin"],
            validation_patterns=["two.bin"],
        )


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        ("web", {}, 'data.source = "web" must be'),
        ("stdlib", {"train_patterns": ["x"]}, 'data.source = "stdlib" reads none'),
        ("text", {}, "data.train names no file"),
        ("tokens", {}, "data.train names no file"),
        ("stdlib", {"validation_fraction": 1.0}, "data.validation_fraction = 1.0"),
        ("text", {"train_patterns": ["*.nothing"]}, r"no glob matches '\*.nothing'"),
        ("text", {"train_patterns": ["*.txt"], "tokenizer": "no"}, "data.tokenizer = 'no'"),
        ("tokens", {"train_patterns": ["*.txt"]}, "data.train names 20 files"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_written(base, source, settings, message):
    with pytest.raises(DataError, match=message):
        prepare(source, cache=base / "cache", base=base, **settings)
    assert not (base / "cache").exists()


def test_other_ranks_wait_for_the_cache(base):
    def later():
        time.sleep(0.05)
        from_text(base)

    writer = threading.Thread(target=later)
    writer.start()
    wait_for(base / "cache", deadline_seconds=20, poll_seconds=0.01)
    assert from_text(base).reused
    writer.join()


def test_waiting_ends_at_the_deadline(tmp_path):
    with pytest.raises(DataError, match=r"waited 0.05 seconds .* publish .*prepared\.json"):
        wait_for(tmp_path / "cache", deadline_seconds=0.05, poll_seconds=0.01)


def test_a_cache_can_be_moved(base):
    before = text_of(from_text(base).train)
    shutil.move(base / "cache", base / "elsewhere")
    assert text_of(from_text(base, cache=base / "elsewhere").train) == before


def test_importing_the_package_loads_nothing_heavy():
    heavy = "{'torch', 'transformers', 'tokenizers', 'sentencepiece'}"
    code = f"import sys, outlast.data; print({heavy} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
