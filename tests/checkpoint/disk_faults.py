"""Faults that befall a store in a directory: damaged files, full disks, killed processes."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from s3_faults import Faults, open_quietly, restored_step, state_of

from outlast.errors import OutlastError

DISK_BYTES = 1 << 20


def flip(file: Path, random: Random) -> None:
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def cut(file: Path, random: Random) -> None:
    os.truncate(file, random.randrange(file.stat().st_size))


def blank(file: Path, random: Random) -> None:
    """Make a block of zeros of it, as a file system may after a loss of power."""
    content = bytearray(file.read_bytes())
    begin = random.randrange(len(content)) // 512 * 512
    content[begin : begin + 512] = bytes(len(content[begin : begin + 512]))
    file.write_bytes(content)


def extend(file: Path, random: Random) -> None:
    with file.open("ab") as end:
        end.write(random.randbytes(random.randint(1, 600)))


def delete(file: Path, random: Random) -> None:
    file.unlink()


DAMAGE: dict[str, Callable[[Path, Random], None]] = {
    found.__name__: found for found in (flip, cut, blank, extend, delete)
}


def needed(version: Path) -> set[Path]:
    """The files of a version: in its folder, and packs of versions before."""
    files = {*version.iterdir()}
    for part in version.glob("rank-*.json"):
        files |= {version.parent / pack for pack in json.loads(part.read_bytes())["packs"]}
    return files


def damage_files(place: str, faults: Faults, rounds: int) -> None:
    """Damage one or two files of a store with three versions, again and again."""
    pristine = Path(place) / "pristine"
    tried = {step: {step} for step in (1, 2, 3)}
    with open_quietly(str(pristine), keep=3) as store:
        for step in tried:
            store.save(step, state_of(step))
    files = {
        step: {file.relative_to(pristine) for file in needed(folder)}
        for step in tried
        for folder in pristine.glob(f"step-{step:08d}-*")
    }
    everything = sorted(set.union(*files.values()))
    for _ in range(rounds):
        copy = Path(place) / "copy"
        shutil.copytree(pristine, copy)
        damaged = set()
        for file in faults.random.sample(everything, faults.random.choice([1, 1, 2])):
            kind = faults.random.choice(sorted(DAMAGE))
            before = (copy / file).read_bytes()
            DAMAGE[kind](copy / file, faults.random)
            if kind == "delete" or (copy / file).read_bytes() != before:
                damaged.add(file)
                faults.staged[kind] += 1
        intact = [step for step, needs in files.items() if not needs & damaged]
        try:
            restored_step(str(copy), tried, max(intact, default=0))
        except OutlastError:
            # Where no version is whole, a restore fails rather than to start anew.
            assert not intact, damaged
        shutil.rmtree(copy)


@contextmanager
def small_disk(place: Path) -> Iterator[None]:
    """A file system of `DISK_BYTES` in memory; needs the right to mount one."""
    place.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={DISK_BYTES}", "outlast-test"]
    subprocess.run(["mount", *options, str(place)], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill_disk(place: str, faults: Faults, rounds: int) -> None:
    """Let saves find a disk with hardly any room, then make room."""
    disk = Path(place) / "disk"
    tried: dict[int, set[int]] = {}
    newest = step = done = 0
    with small_disk(disk):
        while done < rounds:
            with open_quietly(str(disk / "run"), keep=2) as store:
                if newest:
                    store.restore(state_of(0))
                for _ in range(4):
                    usage = shutil.disk_usage(disk)
                    left = faults.random.randrange(60 << 10)
                    (disk / "filler").write_bytes(bytes(max(usage.free - left, 0)))
                    for full in (True, False):
                        step += 1
                        tried[step] = {step}
                        error = store.save_async(step, state_of(step)).result().error
                        assert full or error is None, error
                        newest = newest if error else step
                        faults.staged["full disk"] += error is not None
                        (disk / "filler").unlink(missing_ok=True)
                    done += 1
            newest = restored_step(str(disk / "run"), tried, newest)


def save_on_and_on(place: str, said: Any, pids: Any) -> None:
    """Save step after step, with a writer process; runs until it is killed."""
    os.setpgid(0, 0)
    pids[0] = os.getpid()
    with open_quietly(place, keep=2, writer="process") as store:
        restored = store.restore(state_of(0))
        step = 0 if restored is None else restored.step
        while True:
            step += 1
            handle = store.save_async(step, state_of(step))
            if handle.result().error is None:
                said.value = max(said.value, step)


def kill_programs(place: str, faults: Faults, rounds: int) -> None:
    """Kill a program that saves, or all its processes, at any moment, and start it anew."""
    fork = multiprocessing.get_context("fork")
    said, pids = fork.Value("i", 0), fork.Array("i", 1)
    for _ in range(rounds):
        program = fork.Process(target=save_on_and_on, args=(place, said, pids))
        program.start()
        time.sleep(faults.random.uniform(0.05, 0.6))
        with_children = faults.random.random() < 0.5 and pids[0] == program.pid
        (os.killpg if with_children else os.kill)(int(program.pid or 0), signal.SIGKILL)
        program.join()
        faults.staged["kill"] += 1
        newest = said.value
        tried = {step: {step} for step in range(1, newest + 3)}
        said.value = restored_step(place, tried, newest)
