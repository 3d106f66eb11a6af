"""Training from copies on the node: the same run, one copy, and what is written down."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from forked import RanksFailedError, run_ranks
from staging_server import serving
from tiny import corpus, losses, tiny_job, train

from outlast.cluster.staging import prefetch, stager_for
from outlast.data import load_tokenizer, text_files, whole_files, write_tokens
from outlast.distributed.ranks import ranks_from
from outlast.job import Job
from outlast.records import DataStaged, Warned, read_run
from outlast.report import write_report
from outlast.train.run import Start, run_directory, work

pytestmark = pytest.mark.distributed


def _work(job: Job) -> int:
    return work(Start(job, stager=stager_for(job.staging)), ranks_from(os.environ))


def train_staged(job: Job, size: int) -> DataStaged:
    assert set(run_ranks(size, _work, job)) == {0}
    (staged,) = [event for _, event in read_run(run_directory(job).path).of(DataStaged)]
    return staged


def tokens_in(folder: Path) -> Path:
    """A token file with its header."""
    corpus(folder / "corpus")
    files = text_files(["corpus/*.txt"], folder)
    path = folder / "shared" / "train.bin"
    path.parent.mkdir()
    write_tokens(path, whole_files(files, folder), load_tokenizer("byte"))
    return path


def staged_job(folder: Path, name: str, *overrides: str) -> Job:
    place = f'staging.directory="{folder}/node"'
    return tiny_job(folder, name, place, "staging.keep_free_gigabytes=0.0", *overrides)


def test_text_is_staged_after_it_was_tokenised(tmp_path: Path) -> None:
    plain, staged = tiny_job(tmp_path, "plain"), staged_job(tmp_path, "staged")
    assert train(plain, 2) == 0
    event = train_staged(staged, 2)
    assert losses(staged) == losses(plain)
    assert [Path(each["source"]).name for each in event.copies] == ["train.bin", "validation.bin"]
    for each in event.copies:
        assert each["processes"] == 2
        assert each["copied_bytes"] == each["bytes"] > 0
        assert Path(each["path"]).is_relative_to(tmp_path / "node")
    assert run_directory(staged).path.is_dir()
    assert write_report([run_directory(staged).path]).is_file()


def test_tokens_are_read_once_and_found_again(tmp_path: Path) -> None:
    path = tokens_in(tmp_path)
    tokens = ("data.source=tokens", f'data.train=["{path}"]', "data.token_dtype='uint16'")
    plain = tiny_job(tmp_path, "plain", *tokens)
    assert train(plain, 3) == 0
    prefetched = prefetch(staged_job(tmp_path, "first", *tokens))
    assert [each.copied_bytes for each in prefetched] == [path.stat().st_size + header_bytes(path)]
    event = train_staged(staged_job(tmp_path, "first", *tokens), 3)
    assert event.copied_bytes == 0
    assert [each["path"] for each in event.copies] == [str(each.path) for each in prefetched]
    assert "were on 1 node already" in event.words()
    assert losses(staged_job(tmp_path, "first", *tokens)) == losses(plain)


def test_tokens_behind_a_url_are_trained_on(tmp_path: Path) -> None:
    path = tokens_in(tmp_path)
    local = tiny_job(tmp_path, "local", "data.source=tokens", f'data.train=["{path}"]')
    assert train(local, 1) == 0
    content = {f"/{each.name}": each.read_bytes() for each in path.parent.iterdir()}
    with serving(content) as server:
        url = server.url("/train.bin")
        job = staged_job(tmp_path, "remote", "data.source=tokens", f'data.train=["{url}"]')
        event = train_staged(job, 2)
    assert event.copied_bytes == path.stat().st_size + header_bytes(path)
    assert losses(job) == pytest.approx(losses(local), rel=1e-4)


def test_without_room_tokens_are_read_in_place_with_a_warning(tmp_path: Path) -> None:
    path = tokens_in(tmp_path)
    tokens = ("data.source=tokens", f'data.train=["{path}"]')
    job = staged_job(tmp_path, "full", *tokens, "staging.limit_gigabytes=1e-6")
    event = train_staged(job, 2)
    assert event.copied_bytes == 0
    assert [each["path"] for each in event.copies] == [str(path)]
    said = [event.message for _, event in read_run(run_directory(job).path).of(Warned)]
    assert any("(staging.limit_gigabytes)" in each and "read in place" in each for each in said)


def test_without_room_a_required_copy_ends_the_run_with_one_sentence(tmp_path: Path) -> None:
    path = tokens_in(tmp_path)
    tokens = ("data.source=tokens", f'data.train=["{path}"]')
    settings = ("staging.limit_gigabytes=1e-6", "staging.required=true")
    with pytest.raises(RanksFailedError, match=r"OutlastError: .*\(staging\.limit_gigabytes\)"):
        run_ranks(2, _work, staged_job(tmp_path, "full", *tokens, *settings))


def header_bytes(path: Path) -> int:
    return path.with_suffix(".json").stat().st_size
