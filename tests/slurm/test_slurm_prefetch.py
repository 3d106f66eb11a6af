"""Data of the next link, copied beside the training of this one, on a real Slurm."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from chains import ending, files_of, job_file, noted, outlast, wait
from local_slurm import LocalSlurm

from outlast.data import load_tokenizer, text_files, whole_files, write_tokens
from outlast.records import DataStaged, read_run

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("empty_queue"),
]


def test_a_link_copies_beside_training_what_the_next_one_reads(
    tmp_path: Path, slurm: LocalSlurm
) -> None:
    job_file(tmp_path, "corpus")
    tokens = tmp_path / "shared" / "train.bin"
    tokens.parent.mkdir()
    files = text_files(["corpus/*.txt"], tmp_path)
    write_tokens(tokens, whole_files(files, tmp_path), load_tokenizer("byte"))
    job = job_file(
        tmp_path,
        "staged",
        "data.source=tokens",
        f'data.train=["{tokens}"]',
        "data.validation_fraction=0.1",
        f'staging.directory="{tmp_path}/node"',
        "staging.keep_free_gigabytes=0.0",
        "staging.wait=false",
        "train.steps=1000000",
        "checkpoint.every_steps=0",
        "slurm.nodes=[2]",
        "slurm.wall_time=10min",
    )
    outlast("submit", job)
    chain = files_of(tmp_path, "staged")
    assert wait(lambda: noted(chain, "prefetched"), chain)[0]["code"] == 0
    # The first link ends before its limit, and the next one continues.
    slurm.signal_ranks(noted(chain, "started")[0]["hosts"][0], signal.SIGUSR1)
    run = tmp_path / "runs" / "staged"
    wait(lambda: len(read_run(run).of(DataStaged)) > 1, chain)
    outlast("cluster", "stop", run)
    wait(lambda: ending(chain), chain)
    first, second = [event for _, event in read_run(run).of(DataStaged)]
    assert [each["path"] for each in first.copies] == [str(tokens)] * len(first.copies)
    assert "staging.wait = false" in first.problems[0]
    assert all(Path(each["path"]).is_relative_to(tmp_path / "node") for each in second.copies)
    assert not second.problems
    assert second.copied_bytes == 0
