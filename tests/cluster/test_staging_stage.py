"""Copies on a node: made once, taken over, checked, evicted, and refused where there is no room."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from staging_server import serving

from outlast.cluster import copying as sources
from outlast.cluster import staging as stages
from outlast.cluster.copying import JOURNAL, PART
from outlast.cluster.staging import ReadAhead, Stage, folders_of, source_of
from outlast.errors import ClusterError

MIB = 1 << 20
SMALL = ReadAhead(MIB, 2)


def sources_in(stage: Stage) -> list[str]:
    """Names of what has a copy there, whole or not."""
    return sorted(Path(source_of(folder)).name for folder in folders_of(stage._root()))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path / "stage", keep_free_bytes=0, ahead=SMALL, timeout_seconds=30.0)
    yield made
    made.release()


def make(path: Path, megabytes: float, seed: int = 0) -> bytes:
    content = bytes((seed + 7 * i) % 251 for i in range(4096)) * int(megabytes * 256)
    path.write_bytes(content)
    return content


def fetching_process(stage: Stage, source: str) -> subprocess.Popen[bytes]:
    """A program that fetches and then waits, holding its copy."""
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from outlast.cluster.staging import ReadAhead, Stage\n"
        "stage = Stage(Path(sys.argv[1]), keep_free_bytes=0, ahead=ReadAhead(1 << 20, 2))\n"
        "print(stage.fetch(sys.argv[2]).copied_bytes, flush=True)\n"
        "time.sleep(60)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, str(stage.directory), source], stdout=subprocess.PIPE
    )


def _fetch(stage: Stage, source: str, go: Any, answers: Any) -> None:
    go.wait(20.0)
    copy = stage.fetch(source)
    answers.put((copy.copied_bytes, copy.path.read_bytes() == Path(source).read_bytes()))


@pytest.mark.slow
def test_processes_that_ask_at_once_make_one_copy(stage: Stage, tmp_path: Path) -> None:
    source = tmp_path / "train.bin"
    content = make(source, 8)
    context = multiprocessing.get_context("fork")
    go, answers = context.Event(), context.Queue()
    processes = [
        context.Process(target=_fetch, args=(stage, str(source), go, answers)) for _ in range(6)
    ]
    for each in processes:
        each.start()
    go.set()
    told = [answers.get(timeout=30.0) for _ in processes]
    for each in processes:
        each.join(10.0)
    assert sorted(copied for copied, _ in told) == [0] * 5 + [len(content)]
    assert all(equal for _, equal in told)


def test_the_same_file_is_not_copied_again(stage: Stage, tmp_path: Path) -> None:
    source = tmp_path / "train.bin"
    content = make(source, 2.5)
    (tmp_path / "train.json").write_text("{}")
    first = stage.fetch(str(source), beside=["train.json", "none.json"])
    again = stage.fetch(str(source), beside=["train.json", "none.json"])
    assert (first.copied_bytes, again.copied_bytes) == (len(content) + 2, 0)
    assert first.path == again.path
    assert first.path.read_bytes() == content
    assert first.path.with_name("train.json").read_text() == "{}"
    assert not [path for path in first.path.parent.iterdir() if path.suffix in (PART, JOURNAL)]


def test_a_source_that_changed_gets_a_copy_of_its_own(stage: Stage, tmp_path: Path) -> None:
    source = tmp_path / "train.bin"
    before = make(source, 1)
    old = stage.fetch(str(source))
    after = make(source, 1, seed=1)
    new = stage.fetch(str(source))
    assert old.path.read_bytes() == before
    assert new.path.read_bytes() == after


def test_equal_content_of_a_known_digest_is_copied_once(stage: Stage, tmp_path: Path) -> None:
    paths = [tmp_path / run / "train.bin" for run in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        content = make(path, 1)
        path.with_suffix(".json").write_text("{}")
        time.sleep(0.01)
    digest = xxhash.xxh3_128_hexdigest(content)
    copies = [stage.fetch(str(path), beside=["train.json"], digest=digest) for path in paths]
    assert [copy.copied_bytes for copy in copies] == [len(content) + 2, 0]


def test_a_folder_is_copied_with_all_that_is_in_it(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "set" / "deep").mkdir(parents=True)
    make(tmp_path / "set" / "one", 1)
    make(tmp_path / "set" / "deep" / "two", 1, seed=2)
    (tmp_path / "set" / "empty").touch()
    copy = stage.fetch(str(tmp_path / "set"))
    names = sorted(path.relative_to(copy.path).as_posix() for path in copy.path.rglob("*"))
    assert names == ["deep", "deep/two", "empty", "one"]
    assert (copy.path / "deep" / "two").read_bytes() == (tmp_path / "set/deep/two").read_bytes()


@pytest.mark.slow
def test_another_process_goes_on_where_a_killed_one_was(stage: Stage) -> None:
    content = os.urandom(12 * MIB)
    with serving({"/train.bin": content}) as server:
        server.pause_seconds = 0.15
        process = fetching_process(stage, server.url("/train.bin"))
        # The kill may come between the last block and its digest.
        wait_until(lambda: part_bytes(stage) >= 5 * MIB)
        process.send_signal(signal.SIGKILL)
        process.wait()
        server.given_bytes = 0
        copy = stage.fetch(server.url("/train.bin"))
        assert copy.path.read_bytes() == content
        assert copy.resumed_bytes >= 4 * MIB
        assert copy.copied_bytes == len(content) - copy.resumed_bytes
        # What its readers had asked for ahead when it died may come again.
        assert server.given_bytes <= copy.copied_bytes + 4 * MIB


@pytest.mark.slow
def test_who_waits_takes_over_from_a_process_that_is_killed(stage: Stage) -> None:
    content = os.urandom(10 * MIB)
    with serving({"/train.bin": content}) as server:
        server.pause_seconds = 0.15
        process = fetching_process(stage, server.url("/train.bin"))
        wait_until(lambda: part_bytes(stage) >= 2 * MIB)
        heard: list[int] = []

        def progress(done_bytes: int, all_bytes: int) -> None:
            heard.append(done_bytes)
            if len(heard) == 3:
                process.kill()

        copy = stage.fetch(server.url("/train.bin"), progress=progress)
        process.wait()
    assert copy.path.read_bytes() == content
    assert copy.resumed_bytes > 0
    assert heard[-1] == len(content)


@pytest.mark.slow
def test_who_waits_too_long_says_how_far_it_was(stage: Stage, tmp_path: Path) -> None:
    content = bytes(8 * MIB)
    with serving({"/train.bin": content}) as server:
        server.pause_seconds = 0.4
        process = fetching_process(stage, server.url("/train.bin"))
        try:
            wait_until(lambda: part_bytes(stage) >= MIB)
            hasty = Stage(stage.directory, keep_free_bytes=0, timeout_seconds=0.2)
            with pytest.raises(ClusterError) as caught:
                hasty.fetch(server.url("/train.bin"))
        finally:
            process.kill()
            process.wait()
    said = str(caught.value)
    assert "waited 0.2 s (staging.timeout_seconds) for another process of this node" in said
    assert "of 8388608 bytes are there" in said


def test_blocks_of_a_part_that_are_not_as_they_were_are_copied_again(
    stage: Stage, tmp_path: Path
) -> None:
    source = tmp_path / "train.bin"
    content = make(source, 6)
    copy = stage.fetch(str(source))
    # As it is after a kill: no manifest, a part and its journal.
    (copy.path.parents[1] / "manifest.json").unlink()
    digests = [xxhash.xxh3_128_intdigest(content[: (i + 1) * MIB]) % 2**64 for i in range(6)]
    journal = b"".join(number.to_bytes(8, "little") for number in [MIB, *digests])
    copy.path.with_name("train.bin" + JOURNAL).write_bytes(journal)
    part = copy.path.rename(copy.path.with_name("train.bin" + PART))
    damaged = bytearray(content)
    damaged[3 * MIB + 5] ^= 1
    part.write_bytes(damaged)
    again = stage.fetch(str(source))
    assert (again.resumed_bytes, again.copied_bytes) == (3 * MIB, 3 * MIB)
    assert again.path.read_bytes() == content


@pytest.mark.parametrize("keep_time", [False, True])
def test_a_damaged_copy_is_found_and_made_anew(
    stage: Stage, tmp_path: Path, keep_time: bool
) -> None:
    source = tmp_path / "train.bin"
    content = make(source, 2)
    copy = stage.fetch(str(source))
    facts = copy.path.stat()
    with copy.path.open("r+b") as file:
        file.seek(MIB)
        file.write(b"\xff")
    if keep_time:
        os.utime(copy.path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    again = stage.fetch(str(source))
    assert again.damaged
    assert again.path.read_bytes() == content


def test_a_copy_is_read_again_when_hours_are_over(stage: Stage, tmp_path: Path) -> None:
    source = tmp_path / "train.bin"
    make(source, 1)
    copy = stage.fetch(str(source))
    checked = copy.path.parents[1] / "checked.json"
    content = json.loads(checked.read_text())
    checked.write_text(json.dumps({**content, "time": time.time() - 7 * 3600}))
    assert stage.fetch(str(source)).copied_bytes == 0
    assert json.loads(checked.read_text())["time"] > time.time() - 60


def test_a_source_without_its_digest_is_refused(stage: Stage, tmp_path: Path) -> None:
    source = tmp_path / "train.bin"
    make(source, 1)
    with pytest.raises(ClusterError, match="is damaged: it has the xxh3-128"):
        stage.fetch(str(source), digest="0" * 32)
    assert sources_in(stage) == []


def test_the_least_recently_used_copy_goes_first(stage: Stage, tmp_path: Path) -> None:
    limited = Stage(stage.directory, limit_bytes=5 * MIB, keep_free_bytes=0, ahead=SMALL)
    for number, name in enumerate("abc"):
        make(tmp_path / name, 1.5, seed=number)
    for name in "aba":
        limited.fetch(str(tmp_path / name))
        limited.release()
        time.sleep(0.02)
    copy = limited.fetch(str(tmp_path / "c"))
    assert copy.evicted == ()
    make(tmp_path / "d", 1.5, seed=9)
    limited.release()
    assert limited.fetch(str(tmp_path / "d")).evicted == (str(tmp_path / "b"),)
    assert sources_in(limited) == ["a", "c", "d"]


def test_what_a_live_process_uses_is_never_evicted(stage: Stage, tmp_path: Path) -> None:
    limited = Stage(stage.directory, limit_bytes=3 * MIB, keep_free_bytes=0, ahead=SMALL)
    for number, name in enumerate("ab"):
        make(tmp_path / name, 2, seed=number)
    process = fetching_process(limited, str(tmp_path / "a"))
    assert process.stdout is not None
    assert process.stdout.readline() == b"2097152\n"
    with pytest.raises(ClusterError) as caught:
        limited.fetch(str(tmp_path / "b"))
    said = str(caught.value)
    assert f"{tmp_path / 'b'} needs 2.1 MB in {limited.directory}, but" in said
    assert "all copies may take 3.15 MB (staging.limit_gigabytes)" in said
    assert "2.1 MB are copies that live processes use" in said
    assert sources_in(limited) == ["a"]
    process.kill()
    process.wait()
    assert limited.fetch(str(tmp_path / "b")).evicted == (str(tmp_path / "a"),)


def test_nothing_is_evicted_where_it_would_not_be_enough(stage: Stage, tmp_path: Path) -> None:
    limited = Stage(stage.directory, limit_bytes=3 * MIB, keep_free_bytes=0, ahead=SMALL)
    make(tmp_path / "a", 1)
    make(tmp_path / "b", 4)
    limited.fetch(str(tmp_path / "a"))
    limited.release()
    with pytest.raises(ClusterError, match=r"staging\.limit_gigabytes"):
        limited.fetch(str(tmp_path / "b"))
    assert sources_in(limited) == ["a"]


def test_what_is_to_stay_free_stays_free(stage: Stage, tmp_path: Path) -> None:
    greedy = Stage(stage.directory, keep_free_bytes=1 << 60)
    make(tmp_path / "a", 1)
    with pytest.raises(ClusterError, match="GB are to stay free"):
        greedy.fetch(str(tmp_path / "a"))


@contextlib.contextmanager
def small_disk(path: Path, megabytes: int) -> Iterator[Path]:
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path)]
    if os.getuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_disk_that_fills_up_meanwhile_is_told_and_left_clean(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 6) as disk, serving({"/a": bytes(5 * MIB)}) as server:
        server.pause_seconds = 0.1
        stage = Stage(disk, keep_free_bytes=0, ahead=SMALL)
        filled = False

        def progress(done_bytes: int, all_bytes: int) -> None:
            nonlocal filled
            if done_bytes >= 2 * MIB and not filled:
                filled = True
                (disk / "others").write_bytes(bytes(3 * MIB))

        with pytest.raises(ClusterError, match="No space left on device"):
            stage.fetch(server.url("/a"), progress=progress)
        stage.release()
        assert sources_in(stage) == []


def test_a_disk_that_is_too_small_is_refused_before_anything_is_copied(tmp_path: Path) -> None:
    make(tmp_path / "a", 8)
    with small_disk(tmp_path / "disk", 6) as disk:
        stage = Stage(disk, keep_free_bytes=0, ahead=SMALL)
        with pytest.raises(ClusterError, match=r"needs 8\.39 MB in .*, but 6\.\d+ MB are free"):
            stage.fetch(str(tmp_path / "a"))
        assert sources_in(stage) == []


def test_a_file_system_that_others_see_is_no_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"server:/home {tmp_path} nfs4 rw 0 0\n")
    monkeypatch.setattr(stages, "_MOUNTS", mounts)
    make(tmp_path / "a", 1)
    with pytest.raises(ClusterError, match="lies on nfs4, which other nodes see"):
        Stage(tmp_path / "stage").fetch(str(tmp_path / "a"))


def test_a_missing_source_is_named(stage: Stage, tmp_path: Path) -> None:
    for missing in (str(tmp_path / "none.bin"), "memory://none.bin"):
        with pytest.raises(ClusterError, match=r"none\.bin does not exist"):
            stage.fetch(missing)


def test_objects_in_memory_are_staged(stage: Stage) -> None:
    import fsspec

    filesystem = fsspec.filesystem("memory")
    content = os.urandom(3 * MIB + 17)
    filesystem.pipe("/bucket/train.bin", content)
    filesystem.pipe("/bucket/train.json", b"{}")
    copy = stage.fetch("memory://bucket/train.bin", beside=["train.json"])
    assert copy.path.read_bytes() == content
    assert copy.path.with_name("train.json").read_bytes() == b"{}"
    folder = stage.fetch("memory://bucket")
    assert sorted(path.name for path in folder.path.iterdir()) == ["train.bin", "train.json"]


def test_a_server_that_fails_now_and_then_is_asked_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_FIRST_PAUSE_SECONDS", 0.01)
    content = os.urandom(3 * MIB)
    with serving({"/a": content}) as server:
        server.failures = 3
        assert stage.fetch(server.url("/a")).path.read_bytes() == content
        server.content["/a"] = content[::-1]
        server.failures = 100
        with pytest.raises(ClusterError, match="cannot be read"):
            stage.fetch(server.url("/a"))


def test_a_server_without_ranges_gives_no_wrong_copy(stage: Stage) -> None:
    with serving({"/a": os.urandom(3 * MIB)}) as server:
        server.ranges = False
        with pytest.raises(ClusterError, match="its server must know ranges"):
            stage.fetch(server.url("/a"))


def test_a_source_that_changes_meanwhile_is_refused(stage: Stage, tmp_path: Path) -> None:
    source = tmp_path / "train.bin"
    make(source, 2)

    def progress(done_bytes: int, all_bytes: int) -> None:
        os.utime(source, (1.0, 1.0))

    with pytest.raises(ClusterError, match="changed while it was being staged"):
        stage.fetch(str(source), progress=progress)
    assert stage.fetch(str(source)).copied_bytes == 2 * MIB


def part_bytes(stage: Stage) -> int:
    return sum(path.stat().st_size for path in stage.directory.rglob(f"*{PART}"))


def wait_until(happened: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
