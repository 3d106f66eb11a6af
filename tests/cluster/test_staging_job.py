"""The section [staging]: directories, stagers, prefetching and the site's own copies."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outlast.cluster import staging as staging_job
from outlast.cluster.copying import GentlePace
from outlast.cluster.staging import (
    directives,
    directory_of,
    job_directives,
    main,
    prefetch,
    prefetch_command,
    stager_for,
    token_files_of,
)
from outlast.errors import ClusterError, OutlastError
from outlast.job import Job, StagingSection, load_job, to_toml


def job_of(*settings: str) -> Job:
    return load_job(None, ["data.source=tokens", *settings])


def section(**settings: object) -> StagingSection:
    return StagingSection.model_validate(settings)


def test_variables_of_the_node_stand_in_the_directory() -> None:
    environment = {"SLURM_TMPDIR": "/local/job7", "USER": "me"}
    given = section(directory="$SLURM_TMPDIR/data/${USER}")
    assert directory_of(given, environment) == Path("/local/job7/data/me")
    with pytest.raises(ClusterError, match="needs the environment variable SLURM_TMPDIR"):
        directory_of(given, {"USER": "me"})


def test_without_a_directory_nothing_is_staged(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"ab")
    assert stager_for(StagingSection()) is None
    assert prefetch(job_of(f'data.train=["{tmp_path}/a.bin"]')) == []


def test_a_stager_travels_to_other_processes(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"ab")
    stager = stager_for(section(directory=str(tmp_path / "node"), keep_free_gigabytes=0.0))
    again = pickle.loads(pickle.dumps(stager))
    copy = again(str(tmp_path / "a.bin"))
    assert copy.path.read_bytes() == b"ab"
    assert copy.facts()["path"] == str(copy.path)


def test_a_copy_keeps_the_cap_of_the_job(tmp_path: Path) -> None:
    content = bytes(range(256)) * 4000
    (tmp_path / "a.bin").write_bytes(content)
    place = {"directory": str(tmp_path / "node"), "keep_free_gigabytes": 0.0}
    copy = stager_for(section(**place, megabytes_per_s=2.0))(  # type: ignore[misc]
        str(tmp_path / "a.bin")
    )
    assert copy.path.read_bytes() == content
    # What a bucket holds at most may pass at once.
    assert copy.seconds >= len(content) / 2e6 - 0.2


@pytest.mark.slow
def test_a_cap_with_which_a_copy_cannot_end_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(1 << 20))
    place = {"directory": str(tmp_path / "node"), "keep_free_gigabytes": 0.0, "required": True}
    # The copy would take 100 s; a slow machine is ready to begin long before the deadline.
    slow = section(**place, megabytes_per_s=0.01, timeout_seconds=3.0)
    with pytest.raises(ClusterError, match=r"bandwidth.*\(staging\.timeout_seconds\)"):
        stager_for(slow)(str(tmp_path / "a.bin"))  # type: ignore[misc]


def test_what_cannot_be_copied_is_read_in_place_unless_required(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"ab")
    nowhere = section(directory="/proc/none")
    copy = stager_for(nowhere)(str(tmp_path / "a.bin"))  # type: ignore[misc]
    assert copy.path == tmp_path / "a.bin"
    assert "staging.directory = /proc/none cannot be used" in copy.problem
    assert "is read in place (staging.required = false)" in copy.problem
    required = nowhere.model_copy(update={"required": True})
    with pytest.raises(ClusterError, match="cannot be used"):
        stager_for(required)(str(tmp_path / "a.bin"))  # type: ignore[misc]
    with pytest.raises(ClusterError, match=r"url\.bin does not exist"):
        stager_for(nowhere)("memory://url.bin")  # type: ignore[misc]


def test_without_waiting_tokens_are_read_in_place_until_there_is_a_copy(tmp_path: Path) -> None:
    source = tmp_path / "a.bin"
    source.write_bytes(b"ab" * 1000)
    place = [f'staging.directory="{tmp_path}/node"', "staging.keep_free_gigabytes=0.0"]
    job = job_of(*place, f'data.train=["{source}"]', "staging.wait=false")
    stager = stager_for(job.staging)
    assert stager is not None
    first = stager(str(source))
    assert first.path == source
    assert first.copied_bytes == 0
    assert "this node has no copy yet" in first.problem
    assert "staging.wait = false" in first.problem
    (copied,) = prefetch(job, beside_training=True)
    assert copied.copied_bytes == 2000
    second = stager(str(source), beside=("a.json",))
    assert second.path == copied.path
    assert not second.problem


def test_without_waiting_a_damaged_copy_is_left_to_the_prefetch(tmp_path: Path) -> None:
    source = tmp_path / "a.bin"
    source.write_bytes(b"ab" * 1000)
    place = [f'staging.directory="{tmp_path}/node"', "staging.keep_free_gigabytes=0.0"]
    job = job_of(*place, f'data.train=["{source}"]', "staging.wait=false")
    (copied,) = prefetch(job)
    copied.path.write_bytes(b"xx" * 1000)
    stager = stager_for(job.staging)
    assert stager is not None
    assert stager(str(source)).path == source
    assert prefetch(job)[0].damaged
    assert stager(str(source)).path == copied.path


@pytest.mark.slow
def test_nobody_waits_for_a_copy_under_way_without_waiting(tmp_path: Path) -> None:
    source = tmp_path / "a.bin"
    source.write_bytes(bytes(3 << 20))
    place = [f'staging.directory="{tmp_path}/node"', "staging.keep_free_gigabytes=0.0"]
    slow = ["staging.wait=false", "staging.prefetch_megabytes_per_s=0.5"]
    job = job_of(*place, *slow, f'data.train=["{source}"]')
    (tmp_path / "job.toml").write_text(to_toml(job))
    words = prefetch_command(sys.executable, tmp_path / "job.toml", 1, beside_training=True)
    process = subprocess.Popen(words[words.index(sys.executable) :])
    try:
        deadline = time.monotonic() + 60.0
        while not list((tmp_path / "node").glob("*/*/*/*.part")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        stager = stager_for(job.staging)
        assert stager is not None
        assert stager(str(source)).path == source
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_waiting_cannot_be_both_left_out_and_required() -> None:
    settings = ("staging.directory=/dev/shm/x", "staging.wait=false", "staging.required=true")
    with pytest.raises(OutlastError, match=r"staging\.required = true forbids"):
        job_of(*settings, "data.train=['/a.bin']")


def test_the_copies_of_a_prefetch_have_one_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    class Noting(GentlePace):
        @classmethod
        def below(cls, most_bytes_per_s: float) -> GentlePace:
            made.append(most_bytes_per_s)
            return super().below(most_bytes_per_s)

    monkeypatch.setattr(staging_job, "GentlePace", Noting)
    for name in ("a", "b"):
        (tmp_path / f"{name}.bin").write_bytes(b"ab" * 1000)
    place = (f'staging.directory="{tmp_path}/node"', "staging.keep_free_gigabytes=0.0")
    job = job_of(*place, f'data.train=["{tmp_path}/*.bin"]', "staging.prefetch_megabytes_per_s=50")
    copies = prefetch(job, beside_training=True)
    assert [each.copied_bytes for each in copies] == [2000, 2000]
    assert made == [50e6]


def test_the_program_that_a_chain_starts_on_each_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(3_000_000))
    file = tmp_path / "job.toml"
    file.write_text(
        to_toml(job_of(f'data.train=["{tmp_path}/a.bin"]', "staging.keep_free_gigabytes=0.0"))
    )
    assert main([str(file)]) == 0
    assert "staging.directory is empty" in capsys.readouterr().out
    place = f'staging.directory="{tmp_path}/node"'
    assert main([str(file), place]) == 0
    assert f"{tmp_path}/a.bin: 3.0 MB to {tmp_path}/node" in capsys.readouterr().out
    assert main([str(file), place]) == 0
    assert "already" in capsys.readouterr().out
    (tmp_path / "a.bin").unlink()
    assert main([str(file), place]) == 2
    assert "a.bin does not exist" in capsys.readouterr().err
    command = prefetch_command("python", file, 4)
    assert command[:2] == ("srun", "--overlap")
    assert command[-3:] == ("-m", "outlast.cluster.staging", str(file))


def test_tokens_of_a_text_job_are_those_in_its_run(tmp_path: Path) -> None:
    job = load_job(None, [f'run.directory="{tmp_path}"', "run.name=r"])
    assert token_files_of(job) == []
    (tmp_path / "r" / "data").mkdir(parents=True)
    (tmp_path / "r" / "data" / "train.bin").touch()
    assert token_files_of(job) == [str(tmp_path / "r" / "data" / "train.bin")]


def test_a_copy_that_the_site_has_made_is_used(tmp_path: Path) -> None:
    for folder in ("shared", "bb"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.bin").write_bytes(b"ab")
    (tmp_path / "shared" / "a.json").write_text("{}")
    source = str(tmp_path / "shared" / "a.bin")
    settings = {"directory": str(tmp_path / "bb"), "keep_free_gigabytes": 0.0}
    stager = stager_for(section(**settings, burst_buffer="datawarp"))
    assert stager is not None
    # Without its header it is not the whole of what was to be copied.
    assert stager(source, ("a.json",)).copied_bytes == 4
    (tmp_path / "bb" / "a.json").write_text("{}")
    copy = stager(source, ("a.json",))
    assert (copy.path, copy.copied_bytes) == (tmp_path / "bb" / "a.bin", 0)
    (tmp_path / "bb" / "a.bin").write_bytes(b"cut short")
    assert stager(source, ("a.json",)).path != tmp_path / "bb" / "a.bin"


FILES = [("/pfs/a.bin", 30_000_000_000), ("/pfs/a.json", 500)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("off", []),
        (
            "datawarp",
            [
                "#DW jobdw type=scratch access_mode=striped capacity=34GB",
                "#DW stage_in type=file source=/pfs/a.bin destination=$DW_JOB_STRIPED/a.bin",
                "#DW stage_in type=file source=/pfs/a.json destination=$DW_JOB_STRIPED/a.json",
            ],
        ),
        (
            "rabbit",
            [
                "#DW jobdw type=xfs capacity=34GB name=outlast",
                "#DW copy_in source=/pfs/a.bin destination=$DW_JOB_outlast/a.bin",
                "#DW copy_in source=/pfs/a.json destination=$DW_JOB_outlast/a.json",
            ],
        ),
    ],
)
def test_directives_of_known_burst_buffers(kind: str, expected: list[str]) -> None:
    assert directives(section(directory="/bb", burst_buffer=kind), FILES) == expected


def test_the_sites_own_directives_are_filled_in() -> None:
    lines = ["#BB create capacity={gigabytes}G", "#DB copy {source} to ${DB}/{name}", "#BB_LUA x"]
    given = section(burst_buffer="lines", burst_buffer_lines=lines, burst_buffer_gigabytes=7.2)
    assert directives(given, FILES) == [
        "#BB create capacity=8G",
        "#DB copy /pfs/a.bin to ${DB}/a.bin",
        "#DB copy /pfs/a.json to ${DB}/a.json",
        "#BB_LUA x",
    ]


@pytest.mark.parametrize("path", ["/pfs/a b.bin", "/pfs/a\nrm.bin", "/pfs/$(x).bin"])
def test_a_path_that_breaks_a_directive_is_refused(path: str) -> None:
    with pytest.raises(ClusterError, match="cannot stand in a burst-buffer directive"):
        directives(section(burst_buffer="datawarp"), [(path, 1)])


def test_two_files_of_one_name_are_refused() -> None:
    with pytest.raises(ClusterError, match=r"two files are called a\.bin"):
        directives(section(burst_buffer="rabbit"), [("/x/a.bin", 1), ("/y/a.bin", 1)])


def test_a_job_lists_its_tokens_with_their_headers(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"ab")
    (tmp_path / "a.json").write_text("{}")
    settings = ('staging.directory="$DW_JOB_STRIPED"', "staging.burst_buffer=datawarp")
    lines = job_directives(job_of(*settings, f'data.train=["{tmp_path}/a.bin"]'))
    assert [line.split("source=")[-1].split()[0] for line in lines[1:]] == [
        str(tmp_path / "a.bin"),
        str(tmp_path / "a.json"),
    ]
    with pytest.raises(ClusterError, match="which a burst buffer cannot copy"):
        job_directives(job_of(*settings, 'data.train=["s3://b/a.bin"]'))
    with pytest.raises(ClusterError, match=r"none\.bin does not exist"):
        job_directives(job_of(*settings, f'data.train=["{tmp_path}/none.bin"]'))
