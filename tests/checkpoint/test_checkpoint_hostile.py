"""Hundreds of stores that no save has written: each is refused in a sentence, or passed over.

Everything that reads a store goes over each of them, in a process with little memory.
"""

import contextlib
import ctypes
import os
import resource
import shutil
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile_stores
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_states import open_store
from forked import run_ranks
from hostile_stores import (
    ATTACKS,
    FOLDER,
    FOREIGN,
    KINDS,
    Attack,
    in_place_of,
    make_state,
    save_two,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from outlast.checkpoint import Restored, list_versions, storage_of, version
from outlast.checkpoint.convert import export_checkpoint, import_checkpoint
from outlast.checkpoint.dcp import OutlastReader
from outlast.checkpoint.inspection import describe, find_version, summarize, usage, verify
from outlast.cli.ckpt import ckpt
from outlast.errors import CheckpointError, OutlastError

# A third of it on a quiet machine.
CPU_SECONDS = 3.0
MEMORY_BYTES = 200 << 20
LONGEST_ERROR = 5000
Work = Callable[[Path], None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two versions."""
    return save_two(tmp_path_factory.mktemp("saved") / "store")


def restored_rightly(restored: Restored | None, state: dict[str, Any]) -> None:
    assert restored is not None, "nothing was restored, although version 1 is intact"
    # A log after version 2 has no gradients.
    expected = make_state(step=min(restored.step, 2))["model"].weight
    assert torch.equal(state["model"].weight, expected), f"wrong bits of step {restored.step}"


def restore(place: Path) -> None:
    """The newest version, or the one before with a warning."""
    state = make_state(7)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            restored = open_store(place).restore(state)
        except CheckpointError as error:
            # What is whole and of another model is no damage, and never passed over.
            if "does not fit this model" not in str(error):
                raise AssertionError("version 1 was not taken") from error
            restored = open_store(place).restore(state, step=1)
    restored_rightly(restored, state)
    assert restored is not None
    told = [each for each in said if "passed over what is newer" in str(each.message)]
    assert len(told) == (1 if restored.skipped else 0)


def restore_the_second(place: Path) -> None:
    state = make_state(7)
    restored_rightly(open_store(place).restore(state, step=2, warn=False), state)


def inspect(place: Path) -> None:
    storage = storage_of(place)
    for found in list_versions(storage):
        assert found.step == 1 or verify(storage, found).state in (
            "ok",
            "damaged",
            "incomplete",
        )
        summarize(storage, found)
    usage(storage)
    describe(storage, find_version(storage))


def describe_the_second(place: Path) -> None:
    storage = storage_of(place)
    describe(storage, find_version(storage, 2))


def commands(*arguments: str) -> Work:
    def run(place: Path) -> None:
        words = [word.replace("STORE", str(place)) for word in arguments]
        found = CliRunner().invoke(ckpt, words)
        error = found.exception
        if error is not None and not isinstance(error, SystemExit):
            raise error
        assert "\x1b" not in found.output

    return run


def exported(kind: str) -> Work:
    def export(place: Path) -> None:
        export_checkpoint(place, place.parent / "out", kind=kind, step=2)

    return export


def load_by_dcp(place: Path) -> None:
    state = {"model.weight": torch.zeros(70, 40)}
    try:
        dcp.load(state, storage_reader=OutlastReader(place))
    except BaseException as error:  # DCP's own is no Exception
        # DCP wraps what its readers raise; a misfit is its planner's own word.
        known = ("CheckpointError", "ManifestError", "UnreadableError", "metadata read failed")
        if not any(word in str(error) for word in (*known, "size mismatch", "Missing key")):
            raise


def save_after(place: Path) -> None:
    """A run goes on there, and what it saves is restored."""
    state = make_state(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with open_store(place, keep=2) as store:
            with contextlib.suppress(CheckpointError):
                store.restore(state)
            store.save(50, make_state(3))
    found = make_state(9)
    assert open_store(place).restore(found, step=50) is not None
    assert torch.equal(found["model"].weight, make_state(3)["model"].weight)


QUICK: list[Work] = [restore, restore_the_second, inspect, describe_the_second]
ALL: list[Work] = [
    *QUICK,
    commands("ls", "STORE"),
    commands("ls", "STORE/replay", "--json"),
    commands("show", "STORE", "--step", "2", "--tensors", "--values"),
    commands("diff", "STORE", "1", "2"),
    commands("verify", "STORE", "--all"),
    commands("du", "STORE"),
    commands("prune", "STORE", "--keep", "1", "--dry-run"),
    exported("safetensors"),
    exported("torch"),
    exported("dcp"),
    load_by_dcp,
    save_after,
]


class Limits:
    """Of this process: an address space, and for each piece of work time and resident memory."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        # Of several threads, each would have an arena of its own.
        ctypes.CDLL(None).mallopt(-8, 2)
        held = self._pages(0)
        resource.setrlimit(resource.RLIMIT_AS, (held + (1 << 30), held + (1 << 30)))

    @staticmethod
    def _pages(column: int) -> int:
        numbers = Path("/proc/self/statm").read_text().split()
        return int(numbers[column]) * resource.getpagesize()

    def problem(self, work: Callable[[], object]) -> str:
        """What is wrong with how `work` ends; empty when it ends well or is refused."""
        Path("/proc/self/clear_refs").write_text("5")
        held, begun, problem = self._pages(1), time.process_time(), ""
        try:
            work()
        except OutlastError as error:
            text = str(error)
            if len(text) > LONGEST_ERROR:
                problem = f"an error of {len(text)} characters: {text[:200]}"
        except BaseException:
            problem = traceback.format_exc()
        seconds = time.process_time() - begun
        [peak] = [
            int(line.split()[1]) << 10
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("VmHWM")
        ]
        if seconds > CPU_SECONDS or peak - held > MEMORY_BYTES:
            problem += f"{seconds:.1f} s of CPU and {(peak - held) >> 20} MB"
        return problem


def problems_with(
    attacks: list[tuple[str, Attack]],
    source: Path,
    target: Path,
    works: list[Callable[[Path], None]],
) -> list[str]:
    """In a process of its own: what is wrong with how stores are read."""
    for work in works:
        # Imports, and the first call of a library, are no part of the time.
        shutil.rmtree(target.parent, ignore_errors=True)
        shutil.copytree(source, target)
        with contextlib.suppress(OutlastError):
            work(target)
    limits = Limits()
    found = []
    for name, attack in attacks:
        shutil.rmtree(target.parent, ignore_errors=True)
        shutil.copytree(source, target)
        attack(target)
        for number, work in enumerate(works):
            problem = limits.problem(lambda work=work: work(target))  # type: ignore[misc]
            shutil.rmtree(target.parent / "out", ignore_errors=True)
            (target.parent / "out").unlink(missing_ok=True)
            if problem:
                found.append(f"{name}, {getattr(work, '__name__', number)}: {problem}")
    return found


def test_the_corpus_is_large(saved: Path) -> None:
    assert len(ATTACKS) >= 400
    assert len(list(hostile_stores.fields(saved))) >= 1500
    assert len(FOREIGN) >= 100


SLOW = pytest.mark.slow
GROUPS = ("STRUCTURES", "VALUES", "TEXTS", "CODES", "FILES", "NAMES", "LOGS")


@pytest.mark.parametrize("share", [0, pytest.param(2, marks=SLOW)])
@pytest.mark.parametrize("group", GROUPS)
def test_a_hostile_store_is_refused_in_a_sentence_or_passed_over(
    saved: Path, tmp_path: Path, group: str, share: int
) -> None:
    attacks = [*getattr(hostile_stores, group).items()][share::4]
    target = tmp_path / "work" / "store"
    [problems] = run_ranks(1, problems_with, attacks, saved, target, QUICK)
    assert not problems, "\n".join(problems)


# Every other combination of a field and a value.
@pytest.mark.parametrize("share", [0, *(pytest.param(n, marks=SLOW) for n in range(2, 29, 2))])
def test_any_field_may_hold_anything(saved: Path, tmp_path: Path, share: int) -> None:
    attacks = list(hostile_stores.fields(saved))[share::29]
    [problems] = run_ranks(1, problems_with, attacks, saved, tmp_path / "work" / "store", QUICK)
    assert not problems, "\n".join(problems)


@pytest.fixture(scope="module")
def saved_by_groups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, sealed as by very many ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(version, "INDEXED_ABOVE", 0)
        return save_two(tmp_path_factory.mktemp("grouped") / "store")


@pytest.mark.parametrize("share", [0, *(pytest.param(n, marks=SLOW) for n in range(3, 20, 3))])
def test_any_field_of_an_index_may_hold_anything(
    saved_by_groups: Path, tmp_path: Path, share: int
) -> None:
    kinds = hostile_stores.INDEX, hostile_stores.GROUP, hostile_stores.SEAL
    attacks = list(hostile_stores.fields(saved_by_groups, kinds))
    assert len(attacks) > 800
    target = tmp_path / "work" / "store"
    [problems] = run_ranks(1, problems_with, attacks[share::20], saved_by_groups, target, QUICK)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("kind", [hostile_stores.INDEX, hostile_stores.GROUP])
def test_files_of_an_index_that_are_none_are_refused(
    saved_by_groups: Path, tmp_path: Path, kind: str
) -> None:
    attacks: list[tuple[str, Attack]] = [
        (what, lambda place, what=what: in_place_of(place / FOLDER / kind, what))  # type: ignore[misc]
        for what in (*KINDS, "100 MB")
    ]
    target = tmp_path / "work" / "store"
    [problems] = run_ranks(1, problems_with, attacks, saved_by_groups, target, QUICK)
    assert not problems, "\n".join(problems)


# The stores of the test above, all in few ways, are the other half.
@pytest.mark.slow
@pytest.mark.parametrize("share", range(1, 8, 2))
@pytest.mark.parametrize("group", GROUPS)
def test_every_way_to_read_a_hostile_store_ends_in_a_sentence(
    saved: Path, tmp_path: Path, group: str, share: int
) -> None:
    attacks = [*getattr(hostile_stores, group).items()][share::8]
    target = tmp_path / "work" / "store"
    [problems] = run_ranks(1, problems_with, attacks, saved, target, ALL)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("kind", ["safetensors", "index", "torch", "dcp", "megatron", "deepspeed"])
def test_another_programs_malformed_checkpoint_is_refused_in_a_sentence(
    tmp_path: Path, kind: str
) -> None:
    def look() -> list[str]:
        os.chdir(tmp_path)
        for make in (hostile_stores.GOOD_DCP, hostile_stores.GOOD_TORCH):
            import_checkpoint(make(made("in")), tmp_path / "first")
        limits, found = Limits(), []
        for name in (name for name in FOREIGN if name.startswith(f"{kind}:")):
            source = FOREIGN[name](made("in"))
            store = made("store")
            problem = limits.problem(lambda: import_checkpoint(source, store))  # noqa: B023
            if problem:
                found.append(f"{name}: {problem}")
            if (tmp_path / "evil").exists():
                found.append(f"{name}: it was executed")
            here = storage_of(store)
            states = {verify(here, saved).state for saved in list_versions(here)}
            if states - {"ok"}:
                found.append(f"{name}: what was imported is not whole")
        return found

    def made(name: str) -> Path:
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        (tmp_path / name).mkdir()
        return tmp_path / name

    [problems] = run_ranks(1, look)
    assert not problems, "\n".join(problems)


def fuzz(source: Path, target: Path, examples: int, seed: int) -> int:
    """Several attacks on one store at once; returns how many stores."""
    attacks = [*ATTACKS.items(), *hostile_stores.fields(source)]
    attacks = [pair for pair in attacks if not pair[0].startswith("5,000 parts")]
    problems_with([], source, target, QUICK)
    limits, count = Limits(), 0

    @settings(
        max_examples=examples,
        derandomize=not seed,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.lists(st.sampled_from(attacks), min_size=2, max_size=4),
        st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 255)), max_size=3),
    )
    def check(chosen: list[tuple[str, Attack]], flips: list[tuple[int, int]]) -> None:
        nonlocal count
        count += 1
        shutil.rmtree(target.parent, ignore_errors=True)
        shutil.copytree(source, target)
        for _, attack in chosen:
            # One may have taken away what the next one changes.
            with contextlib.suppress(Exception):
                attack(target)
        with contextlib.suppress(OSError, LookupError, ValueError):
            path = sorted((target / FOLDER).iterdir())[seed % 4]
            content = bytearray(hostile_stores.bytes_of(path))
            for place, byte in flips if content else ():
                content[place % len(content)] = byte
            path.write_bytes(content)
        for work in QUICK:
            problem = limits.problem(lambda work=work: work(target))  # type: ignore[misc]
            assert not problem, ([name for name, _ in chosen], problem)

    check()
    return count


@pytest.mark.slow
def test_no_mixture_of_attacks_does_more_than_one(saved: Path, tmp_path: Path) -> None:
    [count] = run_ranks(1, fuzz, saved, tmp_path / "work" / "store", 150, 0)
    assert count >= 150
