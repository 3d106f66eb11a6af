"""Data for later links, copied beside the training of one: when, by what, and how it ends."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from slurm_programs import put_command, slurm_commands

from outlast.cluster.chain.journal import entries, of_kind
from outlast.cluster.chain.plan import ChainFiles, ChainPlan, chain_files, write_plan
from outlast.cluster.chain.prefetching import Prefetching, prefetch_words, wants_prefetch
from outlast.job import load_job, to_toml

PLAN = ChainPlan("abc", "n", "dependent", (1,), 1, 3600.0, "/", sys.executable)


@pytest.fixture
def files(tmp_path: Path) -> ChainFiles:
    """A chain whose job reads tokens in place until a node has a copy."""
    source = tmp_path / "a.bin"
    source.write_bytes(b"ab" * 1000)
    found = chain_files(tmp_path / "run")
    write_plan(found, PLAN)
    put_job(found, tmp_path, "staging.wait=false")
    return found


def put_job(files: ChainFiles, folder: Path, *settings: str) -> None:
    place = [f'staging.directory="{folder}/node"', "staging.keep_free_gigabytes=0.0"]
    data = ["data.source=tokens", f'data.train=["{folder}/a.bin"]']
    files.job.write_text(to_toml(load_job(None, [*data, *place, *settings])))


def noted(files: ChainFiles) -> list[int]:
    return [each["code"] for each in of_kind(entries(files), "prefetched")]


def wait_for_end(prefetching: Prefetching, files: ChainFiles) -> None:
    deadline = time.monotonic() + 60.0
    while not noted(files):
        assert time.monotonic() < deadline
        prefetching.look(under_way=True)
        time.sleep(0.05)


@pytest.fixture
def without_srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm_commands(tmp_path, monkeypatch)


@pytest.mark.usefixtures("without_srun")
def test_what_a_node_lacks_is_copied_once_training_is_under_way(
    files: ChainFiles, tmp_path: Path
) -> None:
    prefetching = Prefetching(files, PLAN, 1, "7")
    prefetching.look(under_way=False)
    assert prefetching._process is None
    wait_for_end(prefetching, files)
    assert noted(files) == [0]
    assert [each.read_bytes() for each in (tmp_path / "node").rglob("a.bin")] == [b"ab" * 1000]
    prefetching.look(under_way=True)
    prefetching.end()
    assert noted(files) == [0]


@pytest.mark.usefixtures("without_srun")
def test_a_link_that_ends_waits_for_no_copy(files: ChainFiles, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(50 << 20))
    put_job(files, tmp_path, "staging.wait=false", "staging.prefetch_megabytes_per_s=0.1")
    prefetching = Prefetching(files, PLAN, 1, "7")
    prefetching.look(under_way=True)
    process = prefetching._process
    assert process is not None
    prefetching.end()
    assert process.returncode == -9
    assert noted(files) == [-9]


@pytest.mark.usefixtures("without_srun")
def test_a_prefetch_that_fails_is_noted_and_ends_nothing(files: ChainFiles, tmp_path: Path) -> None:
    (tmp_path / "a.bin").unlink()
    prefetching = Prefetching(files, PLAN, 1, "7")
    wait_for_end(prefetching, files)
    assert noted(files) == [2]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (["staging.wait=false"], True),
        ([], False),
        (["staging.wait=false", "staging.prefetch=false"], False),
    ],
)
def test_a_link_that_waits_for_its_copies_has_nothing_to_prefetch(
    files: ChainFiles, tmp_path: Path, settings: list[str], wanted: bool
) -> None:
    put_job(files, tmp_path, *settings)
    assert wants_prefetch(files.job) is wanted


def test_a_job_that_cannot_be_read_has_nothing_to_prefetch(tmp_path: Path) -> None:
    assert not wants_prefetch(tmp_path / "none.toml")


def test_a_program_of_ones_own_has_data_of_its_own(files: ChainFiles) -> None:
    plan = ChainPlan("abc", "n", "dependent", (1,), 1, 3600.0, "/", "python", command="train")
    prefetching = Prefetching(files, plan, 1, "7")
    prefetching.look(under_way=True)
    assert prefetching._process is None


def test_every_node_prefetches_beside_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_commands(tmp_path, monkeypatch)
    job = tmp_path / "job.toml"
    own = ("python", "-m", "outlast.cluster.staging", "--beside-training", str(job))
    assert tuple(prefetch_words("python", job, 1)) == own
    spread = ("--nodes=3", "--ntasks=3", "--ntasks-per-node=1")
    assert tuple(prefetch_words("python", job, 3)) == ("srun", "--overlap", *spread, *own)
    put_command(tmp_path, "srun", "true")
    assert prefetch_words("python", job, 1)[0] == "srun"
