"""Staging: bytes read from the shared file system, throughput against cp, waiting, direct writes.

Every comparison is interleaved: one round runs each side once, and medians over the rounds are
compared. All sides sync what they write, and read what the kernel does not hold in memory.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from harness import Bar, arguments, at_least, at_most, median, publish

from outlast.cluster import copying
from outlast.cluster.copying import BlockWriter, LocalReader, blocks_of, drop_from_memory
from outlast.cluster.staging import ReadAhead, Stage
from outlast.data import SampleOrder, SampleWindow, TokenFile

MIB = 1 << 20
RANKS = 4
LINKS = 3
AHEAD = ReadAhead()
FOREVER = 1e12
SEQUENCE_LENGTH = 2048


def bars(quick: bool) -> list[Bar]:
    """All figures of staging.

    Args:
        quick: Smaller files and fewer rounds.
    """
    megabytes, rounds = (96, 3) if quick else (1024, 7)
    with tempfile.TemporaryDirectory(prefix="outlast-staging-", dir=_disk()) as folder:
        place = Path(folder)
        return [
            *_remote_bytes(place, 16 if quick else 64),
            *_mounted_bytes(place, 32 if quick else 128),
            *_throughput(place, megabytes, rounds),
            *_waiting(place, 32 if quick else 256, rounds),
            *_beside_training(place, megabytes, rounds),
            *_reading(place, megabytes, rounds),
            *_direct(place, megabytes, rounds),
        ]


def _disk() -> str:
    """A folder on a disk; the usual one for temporary files is often in memory."""
    return os.environ.get("OUTLAST_BENCH_DIR", "/var/tmp")


def _stage(directory: Path, **settings: Any) -> Stage:
    return Stage(directory, keep_free_bytes=0, **settings)


def _make(path: Path, megabytes: int) -> Path:
    block = np.random.default_rng(0).bytes(MIB)
    with path.open("wb") as file:
        for number in range(megabytes):
            file.write(number.to_bytes(8, "little") + block[8:])
        file.flush()
        os.fsync(file.fileno())
    return path


# Bytes from the shared file system.


class _Counting(BaseHTTPRequestHandler):
    content = b""
    given_bytes = 0
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._head(200, len(self.content))

    def do_GET(self) -> None:
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        part = self.content[int(first) : int(last) + 1 if last else None]
        self._head(206, len(part), f"bytes {first}-{int(first) + len(part) - 1}")
        self.wfile.write(part)
        _Counting.given_bytes += len(part)

    def _head(self, status: int, length: int, span: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", '"1"')
        if span:
            self.send_header("Content-Range", f"{span}/{len(self.content)}")
        self.end_headers()

    def log_message(self, format: str, *words: object) -> None:
        """Say nothing."""


def _together(
    work: Callable[..., Any], *arguments: Any, count: int = RANKS, method: str = "fork"
) -> list[Any]:
    """Results of `work(rank, ...)` in new processes that begin at once."""
    context: Any = multiprocessing.get_context(method)
    begin, answers = context.Barrier(count), context.Queue()
    processes = [
        context.Process(target=_begin, args=(work, rank, arguments, begin, answers))
        for rank in range(count)
    ]
    for each in processes:
        each.start()
    told = [answers.get(timeout=600) for _ in processes]
    for each in processes:
        each.join()
    return told


def _begin(work: Callable[..., Any], rank: int, given: Any, begin: Any, answers: Any) -> None:
    begin.wait(120)
    answers.put(work(rank, *given))


def _fetch(rank: int, source: str, directory: Path, private: bool) -> int:
    return _stage(directory / str(rank if private else "node")).fetch(source).copied_bytes


def _remote_bytes(place: Path, megabytes: int) -> list[Bar]:
    _Counting.content = np.random.default_rng(1).bytes(megabytes * MIB)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Counting)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/train.bin"
    shares = {}
    for private in (True, False):
        _Counting.given_bytes = 0
        # This process has a thread that serves, and a client's threads do not outlive a fork.
        _together(_fetch, url, place / f"remote-{private}", private, method="spawn")
        shares[private] = _Counting.given_bytes / len(_Counting.content)
    server.shutdown()
    return [
        at_most(
            f"sizes of a remote file read from its server by {RANKS} processes of a node",
            shares[False],
            "x",
            1.05,
            f"a copy for every process: {shares[True]:.2f} x",
        )
    ]


@contextmanager
def _mounted(image: Path, megabytes: int, point: Path) -> Iterator[Path]:
    """A file system of its own, whose device counts what is read from it."""
    with image.open("wb") as file:
        file.truncate(megabytes * MIB)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    point.mkdir()
    subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)


def _forget(point: Path) -> None:
    """Mount anew, so that nothing of the file system is in memory."""
    found = subprocess.run(
        ["findmnt", "-no", "SOURCE", str(point)], check=True, capture_output=True, text=True
    )
    subprocess.run(["umount", str(point)], check=True)
    subprocess.run(["mount", found.stdout.strip(), str(point)], check=True)


def _bytes_read(point: Path) -> int:
    device = point.stat().st_dev
    text = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text()
    return int(text.split()[2]) * 512


def _epoch(rank: int, source: str, directory: Path | None) -> int:
    """Gather this rank's share of every sample in the order of a training epoch."""
    path = source if directory is None else str(_stage(directory).fetch(source).path)
    windows = SampleWindow(TokenFile.open(path), SEQUENCE_LENGTH)
    order = SampleOrder(windows.samples, seed=0)
    for start in range(0, windows.samples - 15, 16):
        if start // 16 % RANKS == rank:
            windows.gather(order.consecutive(start, start + 16))
    return 0


def _mounted_bytes(place: Path, megabytes: int) -> list[Bar]:
    name = f"sizes of a file read from a mounted file system by {LINKS} links of {RANKS} processes"
    point = place / "shared"
    try:
        with _mounted(place / "image", megabytes + 128, point):
            source = str(_make(point / "train.bin", megabytes))
            loop = subprocess.run(
                ["losetup", "-nO", "NAME", "-j", str(place / "image")],
                check=True,
                capture_output=True,
                text=True,
            ).stdout.strip()
            shares = {}
            for directory in (None, place / "node"):
                before = _bytes_read(point)
                for _ in range(LINKS):
                    # Held open, a loop device is not taken down with its mount.
                    descriptor = os.open(loop, os.O_RDONLY)
                    try:
                        _forget(point)
                    finally:
                        os.close(descriptor)
                    _together(_epoch, source, directory)
                shares[directory is None] = (_bytes_read(point) - before) / (megabytes * MIB)
    except (OSError, subprocess.CalledProcessError) as error:
        return [Bar(name, None, "x", "<= 1.1", False, f"no file system can be mounted: {error}")]
    peer = f"mapped where it is: {shares[True]:.2f} x"
    return [at_most(name, shares[False], "x", 1.1, peer)]


# Throughput.


def _interleaved(
    sides: dict[str, Callable[[], None]], rounds: int, ready: Callable[[], None]
) -> dict[str, tuple[float, float]]:
    """Median seconds and CPU seconds (of this process and its children) of every side."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            ready()
            cpu, begun = _cpu_seconds(), time.perf_counter()
            side()
            taken[name].append((time.perf_counter() - begun, _cpu_seconds() - cpu))
    return {
        name: (median([one for one, _ in each]), median([two for _, two in each]))
        for name, each in taken.items()
    }


def _cpu_seconds() -> float:
    used = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _throughput(place: Path, megabytes: int, rounds: int) -> list[Bar]:
    source, target = _make(place / "source.bin", megabytes), place / "target.bin"
    directory = place / "throughput"

    def ready() -> None:
        target.unlink(missing_ok=True)
        shutil.rmtree(directory, ignore_errors=True)
        drop_from_memory(source)
        os.sync()

    def copy() -> None:
        subprocess.run(["cp", str(source), str(target)], check=True)
        subprocess.run(["sync", str(target)], check=True)

    def copy_and_compare() -> None:
        copy()
        drop_from_memory(target)
        drop_from_memory(source)
        subprocess.run(["cmp", str(source), str(target)], check=True)

    def staged(**settings: Any) -> Callable[[], None]:
        def fetch() -> None:
            stage = _stage(directory, **settings)
            stage.fetch(str(source))
            stage.release()

        return fetch

    def staged_not_direct() -> None:
        with mock.patch.object(copying, "BlockWriter", partial(BlockWriter, direct=False)):
            staged(read_back=False)()

    sides = {
        "cp": copy,
        "cp, cmp": copy_and_compare,
        "staged": staged(read_back=False),
        "staged, read back": staged(),
        "staged, not direct": staged_not_direct,
    }
    found = _interleaved(sides, rounds, ready)
    rate = {name: megabytes * MIB / 1e6 / seconds for name, (seconds, _) in found.items()}
    for path in (source, target):
        path.unlink(missing_ok=True)
    return [
        at_least(
            "throughput of staging with its digest over that of cp and sync",
            rate["staged"] / rate["cp"],
            "x",
            0.9,
            f"cp {rate['cp']:.0f} MB/s, staged {rate['staged']:.0f} MB/s",
        ),
        at_least(
            "throughput of staging read back from the disk over that of cp, sync and cmp",
            rate["staged, read back"] / rate["cp, cmp"],
            "x",
            0.9,
            f"cp, cmp {rate['cp, cmp']:.0f}; staged {rate['staged, read back']:.0f} MB/s",
        ),
        at_most(
            "CPU time of staging with its digest over that of cp and sync",
            found["staged"][1] / found["cp"][1],
            "x",
            1.2,
            f"cp {found['cp'][1]:.2f} s, staged {found['staged'][1]:.2f} s",
        ),
        at_most(
            "time of staging with direct writes over that with ordinary ones",
            found["staged"][0] / found["staged, not direct"][0],
            "x",
            1.0,
            f"ordinary {rate['staged, not direct']:.0f} MB/s",
        ),
    ]


def _timed_fetch(rank: int, source: str, directory: Path) -> tuple[int, float, float]:
    cpu = time.process_time()
    copied = _stage(directory).fetch(source).copied_bytes
    # The monotonic clock is one for all processes of a machine.
    return copied, time.monotonic(), time.process_time() - cpu


def _waiting(place: Path, megabytes: int, rounds: int) -> list[Bar]:
    source = _make(place / "waited.bin", megabytes)
    behind, again = [], []
    for number in range(rounds):
        directory = place / f"waiting-{number}"
        told = _together(_timed_fetch, str(source), directory, count=2 * RANKS)
        done = next(at for copied, at, _ in told if copied)
        behind.append(max(at for _, at, _ in told) - done)
        stage = _stage(directory)
        begun = time.perf_counter()
        stage.fetch(str(source))
        again.append(time.perf_counter() - begun)
        stage.release()
        shutil.rmtree(directory)
    return [
        at_most(
            f"last of {2 * RANKS} waiting processes behind the one that copied",
            median(behind),
            "s",
            0.1,
            "polls every 20 ms",
        ),
        at_most("finding a copy that is there", median(again), "s", 0.02, "of any size"),
    ]


def _steps_beside(job: Path, *options: str) -> float:
    """Median seconds of a step of matrix products on all cores while a process stages."""
    node = job.parent / "node"
    process = subprocess.Popen(
        [sys.executable, "-m", "outlast.cluster.staging", *options, str(job)],
        stdout=subprocess.DEVNULL,
    )
    while not list(node.rglob("*.part")) and process.poll() is None:
        time.sleep(0.005)
    found = [_step_seconds()]
    while process.poll() is None:
        found.append(_step_seconds())
    if process.returncode:
        raise SystemExit(f"staging ended with {process.returncode}")
    shutil.rmtree(node)
    return median(found)


def _step_seconds() -> float:
    matrix = np.ones((512, 512), dtype=np.float32)
    begun = time.perf_counter()
    for _ in range(4):
        matrix @ matrix
    return time.perf_counter() - begun


def _beside_training(place: Path, megabytes: int, rounds: int) -> list[Bar]:
    source = _make(place / "beside.bin", megabytes)
    job = place / "job.toml"
    job.write_text(
        f'data.source = "tokens"\ndata.train = ["{source}"]\n'
        f'staging.directory = "{place / "node"}"\nstaging.keep_free_gigabytes = 0.0\n'
        '[model.settings]\nmodel_type = "llama"\n'
    )
    alone, beside, at_once = [], [], []
    for _ in range(rounds):
        alone.append(median([_step_seconds() for _ in range(50)]))
        for found, options in ((beside, ["--beside-training"]), (at_once, [])):
            drop_from_memory(source)
            found.append(_steps_beside(job, *options))
    source.unlink()
    return [
        at_most(
            "step on all cores beside a prefetch, over alone",
            median(beside) / median(alone),
            "x",
            1.1,
            f"{median(at_once) / median(alone):.2f} x beside staging that does not make way",
        ),
    ]


# Reading and writing on the node.


def _reading(place: Path, megabytes: int, rounds: int) -> list[Bar]:
    path = _make(place / "read.bin", megabytes)

    def in_order() -> None:
        reader = LocalReader(path)
        for _ in blocks_of(reader, 0, megabytes * MIB, AHEAD, FOREVER):
            pass
        reader.close()

    def program() -> None:
        command = ["dd", f"if={path}", "of=/dev/null", "bs=8M", "status=none"]
        subprocess.run(command, check=True)

    def shuffled() -> None:
        windows = SampleWindow(TokenFile.open(path), SEQUENCE_LENGTH)
        order = SampleOrder(windows.samples, seed=0)
        for start in range(0, windows.samples - 15, 16):
            windows.gather(order.consecutive(start, start + 16))

    def ahead_then_shuffled() -> None:
        in_order()
        shuffled()

    sides = {
        "in order": in_order,
        "dd": program,
        "shuffled": shuffled,
        "ahead": ahead_then_shuffled,
    }
    found = _interleaved(sides, rounds, lambda: drop_from_memory(path))
    seconds = {name: each[0] for name, each in found.items()}
    path.unlink()
    rate = megabytes * MIB / 1e6
    gain = seconds["ahead"] / seconds["shuffled"]
    return [
        at_least(
            "throughput of blocks read ahead over that of dd bs=8M",
            seconds["dd"] / seconds["in order"],
            "x",
            0.9,
            f"dd {rate / seconds['dd']:.0f} MB/s",
        ),
        Bar(
            "first epoch in the order of training, file read in order before / mapped as it is",
            round(gain, 3),
            "x",
            "<= 0.9 to be worth a change of outlast.data",
            gain <= 0.9,
            f"as it is {rate / seconds['shuffled']:.0f} MB/s",
        ),
    ]


def _direct(place: Path, megabytes: int, rounds: int) -> list[Bar]:
    path = place / "written.bin"
    memory = memoryview(mmap.mmap(-1, AHEAD.block_bytes))
    memory[:] = np.random.default_rng(2).bytes(AHEAD.block_bytes)

    def written(direct: bool) -> Callable[[], None]:
        def write() -> None:
            writer = BlockWriter(path, 0, direct=direct)
            for _ in range(megabytes * MIB // AHEAD.block_bytes):
                writer.write(memory)
            writer.sync()
            writer.close()

        return write

    def ready() -> None:
        path.unlink(missing_ok=True)
        os.sync()

    found = _interleaved({"ordinary": written(False), "direct": written(True)}, rounds, ready)
    path.unlink()
    rate = megabytes * MIB / 1e6 / found["ordinary"][0]
    return [
        at_most(
            "time of writing past the kernel's memory (O_DIRECT) over write and fsync",
            found["direct"][0] / found["ordinary"][0],
            "x",
            0.9,
            f"write and fsync {rate:.0f} MB/s",
        ),
        at_most(
            "CPU time of writing past the kernel's memory over write and fsync",
            found["direct"][1] / found["ordinary"][1],
            "x",
            0.5,
            f"write and fsync {found['ordinary'][1]:.2f} s",
        ),
    ]


if __name__ == "__main__":
    options = arguments(sys.modules[__name__].__doc__ or "")
    publish("staging", bars(options.quick), options.json)
