"""Data for later links, copied beside the training of one: when, by what, and how it ends."""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_programs import put_command, slurm_commands

from outlast.cluster import link
from outlast.cluster.chain_files import (
    ChainFiles,
    ChainPlan,
    chain_files,
    entries,
    of_kind,
    write_plan,
)
from outlast.cluster.link import LinkJob, Prefetching, prefetch_words, wants_prefetch
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


def wait_for_end(copying: Prefetching, files: ChainFiles) -> None:
    deadline = time.monotonic() + 60.0
    while not noted(files):
        assert time.monotonic() < deadline
        copying.look(under_way=True)
        time.sleep(0.05)


@pytest.fixture
def without_srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm_commands(tmp_path, monkeypatch)


@pytest.mark.usefixtures("without_srun")
def test_what_a_node_lacks_is_copied_once_training_is_under_way(
    files: ChainFiles, tmp_path: Path
) -> None:
    copying = Prefetching(LinkJob(files, PLAN, 1, "7"))
    copying.look(under_way=False)
    assert copying._process is None
    wait_for_end(copying, files)
    assert noted(files) == [0]
    assert [each.read_bytes() for each in (tmp_path / "node").rglob("a.bin")] == [b"ab" * 1000]
    copying.look(under_way=True)
    copying.end()
    assert noted(files) == [0]


@pytest.mark.usefixtures("without_srun")
def test_a_link_that_ends_waits_for_no_copy(files: ChainFiles, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(50 << 20))
    put_job(files, tmp_path, "staging.wait=false", "staging.prefetch_megabytes_per_s=0.1")
    copying = Prefetching(LinkJob(files, PLAN, 1, "7"))
    copying.look(under_way=True)
    process = copying._process
    assert process is not None
    copying.end()
    assert process.returncode == -signal.SIGTERM
    assert noted(files) == [-signal.SIGTERM]


def deaf_program(files: ChainFiles, tmp_path: Path) -> ChainPlan:
    """A prefetch that does not end when it is asked to."""
    program = tmp_path / "python"
    program.write_text(
        f"#!{sys.executable}\nimport signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(tmp_path / 'deaf')!r}, 'w').close()\n"
        "time.sleep(600)\n"
    )
    program.chmod(0o755)
    return replace(PLAN, python=str(program))


@pytest.mark.usefixtures("without_srun")
def test_copying_ends_before_the_last_save_and_none_begins_after_it(
    files: ChainFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_PREFETCH_END_SECONDS", 0.2)
    late = Prefetching(LinkJob(files, PLAN, 1, "7"))
    late.look(under_way=True, ending=True)
    assert late._process is None
    copying = Prefetching(LinkJob(files, deaf_program(files, tmp_path), 1, "7"))
    copying.look(under_way=True)
    deadline = time.monotonic() + 60.0
    while not (tmp_path / "deaf").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    while not noted(files):
        assert time.monotonic() < deadline
        copying.look(under_way=True, ending=True)
        time.sleep(0.05)
    assert noted(files) == [-signal.SIGKILL]


@pytest.mark.usefixtures("without_srun")
def test_a_copy_that_does_not_end_with_its_link_is_killed(
    files: ChainFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_PREFETCH_END_SECONDS", 0.2)
    copying = Prefetching(LinkJob(files, deaf_program(files, tmp_path), 1, "7"))
    copying.look(under_way=True)
    deadline = time.monotonic() + 60.0
    while not (tmp_path / "deaf").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    copying.end()
    assert noted(files) == [-signal.SIGKILL]


@pytest.mark.usefixtures("without_srun")
def test_a_prefetch_that_fails_is_noted_and_ends_nothing(files: ChainFiles, tmp_path: Path) -> None:
    (tmp_path / "a.bin").unlink()
    wait_for_end(Prefetching(LinkJob(files, PLAN, 1, "7")), files)
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
    copying = Prefetching(LinkJob(files, plan, 1, "7"))
    copying.look(under_way=True)
    assert copying._process is None


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
