"""The tiers of a run: the nearest intact one with the newest step is restored, and says so."""

import os
import shutil
import signal
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from runs import DEADLINE_SECONDS, end_started, finish, start_process
from tiny import assert_equal_bits, tiny_job, weights

from outlast.errors import EXIT_BAD_INPUT, EXIT_DONE
from outlast.job import Job
from outlast.records import CheckpointRestored, StateRecovered, Warned, read_run
from outlast.recover.slot import SlotState, read_slot
from outlast.train.run import run_directory

pytestmark = pytest.mark.distributed

ALL = 'checkpoint.tiers=["memory", "peer", "disk", "shared"]'
STEPS, SAVED, STOPPED = 26, 20, 22


def four_tiers(folder: Path, name: str, processes: int, *settings: str) -> Job:
    """A sharded job whose processes count as nodes, with all tiers below `folder`."""
    return tiny_job(
        folder,
        name,
        ALL,
        f'checkpoint.fast="{folder}/disk"',
        "checkpoint.drain_every=1",
        "checkpoint.every_steps=4",
        f"train.steps={STEPS}",
        f"launch.nproc={processes}",
        f"parallel.shard={processes}",
        f'recover.memory="{folder}/memory"',
        'recover.domain="process"',
        *settings,
    )


@dataclass(frozen=True)
class Staged:
    """A run that was killed with all its processes, all four tiers being there.

    Attributes:
        job: Of the run.
        whole: Of a run that was left alone.
        folder: Of all tiers, and of their copies in `kept`.
    """

    job: Job
    whole: Job
    folder: Path

    def put_back(self) -> None:
        """All tiers as they were when the processes had died."""
        for name in ("runs", "memory", "disk"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
            shutil.copytree(self.folder / "kept" / name, self.folder / name)

    def start_again(self) -> str:
        """Start the run again, see that it ends as the one left alone; what it printed."""
        code, output = finish(start_process(self.job, self.folder))
        assert code == EXIT_DONE, output
        assert_equal_bits(weights(self.job), weights(self.whole))
        return output

    def recovered(self) -> StateRecovered:
        """The restore from memory or peers, which is the only one."""
        run = read_run(run_directory(self.job).path)
        assert not run.of(CheckpointRestored)
        [(_, event)] = run.of(StateRecovered)
        return event

    def restored(self) -> CheckpointRestored:
        """The restore from a checkpoint, which is the only one."""
        run = read_run(run_directory(self.job).path)
        assert not run.of(StateRecovered)
        [(_, event)] = run.of(CheckpointRestored)
        return event

    def warnings(self) -> list[str]:
        """Of the run."""
        return [event.message for _, event in read_run(run_directory(self.job).path).of(Warned)]

    def slots(self, pattern: str) -> list[SlotState]:
        """The complete states in memory, of the files that `pattern` names."""
        paths = [*(self.folder / "memory").rglob(pattern)]
        return [kept for path in paths if (kept := read_slot(path, identity_of(path)))]


def identity_of(path: Path) -> str:
    """The identity in a slot, whatever it is."""
    text = path.read_bytes()[128:]
    return text.split(b'"identity": "', 1)[1].split(b'"', 1)[0].decode()


def flip(path: Path, at: int) -> None:
    """Flip a bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))


def flip_slot(kept: SlotState) -> None:
    """Flip a bit in the middle of the first tensor of a slot."""
    entry = max(kept.catalogue.entries, key=lambda entry: entry.size)
    # The last number of the header: where the data begin.
    (data,) = struct.unpack_from("<Q", kept.path.read_bytes(), 28)
    flip(kept.path, data + entry.start + entry.size // 2)


def saved_in(folder: Path, step: int) -> bool:
    """Return whether a complete version of `step` lies somewhere below `folder`."""
    return any(f"{step}" in seal.parent.name for seal in folder.rglob("version.json"))


def stage(folder: Path, processes: int, *settings: str) -> Staged:
    """Kill a run with all its processes in step `STOPPED`, when all tiers are there."""
    whole = four_tiers(folder, "whole", processes, *settings)
    code, output = finish(start_process(whole, folder))
    assert code == EXIT_DONE, output
    job = four_tiers(folder, "killed", processes, *settings)
    fault = f"stop:step={STOPPED}:rank=0:seconds=60"
    process = start_process(job, folder, "--process-fault", fault)
    path, deadline = run_directory(job).path, time.monotonic() + DEADLINE_SECONDS
    places = (folder / "disk", path / "checkpoints")
    while not ((path / "faults").exists() and all(saved_in(place, SAVED) for place in places)):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.said()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    end_started()
    for name in ("runs", "memory", "disk"):
        shutil.copytree(folder / name, folder / "kept" / name)
    return Staged(job, whole, folder)


@pytest.fixture(scope="module")
def staged_once(tmp_path_factory: pytest.TempPathFactory) -> Staged:
    return stage(tmp_path_factory.mktemp("tiers"), 3)


@pytest.fixture
def staged(staged_once: Staged) -> Staged:
    staged_once.put_back()
    return staged_once


def test_all_processes_were_killed_and_memory_serves(staged: Staged) -> None:
    output = staged.start_again()
    event = staged.recovered()
    assert (event.source, event.passed_over) == ("memory", [])
    assert event.step in (STOPPED - 1, STOPPED)
    assert f"step {event.step}: state taken from memory" in output


def test_one_process_is_killed_and_memory_serves(staged: Staged, tmp_path: Path) -> None:
    job = four_tiers(tmp_path, "struck", staged.job.launch.nproc)
    fault = f"kill:step={STOPPED}:rank=1"
    code, output = finish(start_process(job, tmp_path, "--process-fault", fault))
    assert code == EXIT_DONE, output
    [(_, event)] = read_run(run_directory(job).path).of(StateRecovered)
    assert (event.source, event.passed_over) == ("memory", [])
    assert_equal_bits(weights(job), weights(staged.whole))


def lose_memory_of(staged: Staged, rank: int) -> None:
    """Delete all that the process `rank` has kept, state and parity."""
    (generation,) = (staged.folder / "memory").rglob("generation-*")
    lost = [*generation.glob(f"rank-{rank}.*"), *generation.glob(f"*.{rank}.*")]
    assert len(lost) > 2
    for path in lost:
        path.unlink()


def test_a_lost_memory_is_made_good_by_peers(staged: Staged) -> None:
    lose_memory_of(staged, 1)
    staged.start_again()
    event = staged.recovered()
    assert event.source == "parity"
    assert event.step in (STOPPED - 1, STOPPED)
    assert event.passed_over == ["memory: holds no complete state of this run"]


def test_without_any_memory_the_disk_serves(staged: Staged) -> None:
    shutil.rmtree(staged.folder / "memory")
    output = staged.start_again()
    event = staged.restored()
    assert (event.source, event.step, event.skipped) == ("disk", SAVED, [])
    assert event.place.startswith(str(staged.folder / "disk"))
    assert [phrase.partition(":")[0] for phrase in event.lacking] == ["memory", "peer"]
    assert "from disk (memory: holds no complete state of this run" in output


def test_without_memory_and_disk_the_shared_tier_serves(staged: Staged) -> None:
    shutil.rmtree(staged.folder / "memory")
    shutil.rmtree(staged.folder / "disk")
    staged.start_again()
    event = staged.restored()
    assert (event.source, event.step) == ("shared", SAVED)
    assert event.lacking[-1] == f"disk: has no version of step {SAVED}"


def test_a_flipped_bit_in_memory_is_made_good_by_peers_with_a_warning(staged: Staged) -> None:
    # Of the newest step the parity may have been under way.
    slots = staged.slots("rank-1.*")
    for slot in slots:
        flip_slot(slot)
    output = staged.start_again()
    event = staged.recovered()
    assert event.source == "parity"
    [slot] = [slot for slot in slots if slot.step == event.step]
    sentence = f"memory: {slot.path} of step {slot.step} is damaged"
    [warning] = [text for text in staged.warnings() if text.startswith(sentence)]
    assert warning in output
    assert any(text.startswith(sentence) for text in event.passed_over)


def test_memory_damaged_beyond_parity_gives_way_to_the_disk(staged: Staged) -> None:
    for path in (staged.folder / "memory").rglob("parity-*"):
        path.unlink()
    for slot in staged.slots("rank-*.*"):
        flip_slot(slot)
    staged.start_again()
    event = staged.restored()
    assert (event.source, event.step) == ("disk", SAVED)
    assert len([text for text in staged.warnings() if "damaged" in text]) > 1


def test_a_flipped_bit_on_the_disk_gives_way_to_the_shared_tier(staged: Staged) -> None:
    shutil.rmtree(staged.folder / "memory")
    packs = [path for path in (staged.folder / "disk").rglob("*") if path.is_file()]
    pack = max(packs, key=lambda path: path.stat().st_size)
    flip(pack, pack.stat().st_size // 2)
    staged.start_again()
    event = staged.restored()
    assert event.source == "shared"
    assert event.step == SAVED
    assert any(str(staged.folder / "disk") in sentence for sentence in event.skipped)
    assert any(str(staged.folder / "disk") in text for text in staged.warnings())


def test_the_newest_step_is_taken_and_a_damaged_one_hides_none(tmp_path: Path) -> None:
    staged = stage(tmp_path, 2, "recover.every_steps=8")
    staged.start_again()
    event = staged.restored()
    assert (event.source, event.step) == ("disk", SAVED)
    assert event.lacking == ["memory: its newest state is of step 16"]
    staged.put_back()
    for seal in tmp_path.rglob("version.json"):
        if "kept" not in seal.parts and "whole" not in str(seal) and f"{SAVED}" in seal.parent.name:
            for pack in seal.parent.glob("*.pack"):
                flip(pack, pack.stat().st_size // 2)
    staged.start_again()
    recovered = staged.recovered()
    assert (recovered.source, recovered.step) == ("memory", 16)
    assert any(str(tmp_path / "disk") in sentence for sentence in recovered.passed_over)
    assert any(str(tmp_path / "disk") in text for text in staged.warnings())


def test_the_last_checkpoint_reaches_all_tiers_though_the_run_was_killed_before(
    tmp_path: Path,
) -> None:
    job = four_tiers(tmp_path, "late", 2)
    assert finish(start_process(job, tmp_path))[0] == EXIT_DONE
    path, expected = run_directory(job).path, weights(job)
    checkpoints, events = path / "checkpoints", path / "events.jsonl"

    def start_as_if_killed_at_the_end() -> None:
        lines = events.read_text().splitlines(keepends=True)
        assert "attempt_ended" in lines.pop()
        events.write_text("".join(lines))
        code, output = finish(start_process(job, tmp_path))
        assert code == EXIT_DONE, output
        assert_equal_bits(weights(job), expected)

    # Killed after its last save, and before this was copied.
    (last,) = checkpoints.glob(f"step-{STEPS:08d}-*")
    shutil.rmtree(last)
    start_as_if_killed_at_the_end()
    # Once it is everywhere, there is nothing to save.
    saved = sorted(checkpoints.iterdir())
    start_as_if_killed_at_the_end()
    assert sorted(checkpoints.iterdir()) == saved


@pytest.mark.parametrize("processes", [1, 2])
def test_a_disk_that_cannot_be_written_to_is_refused_at_the_start(
    tmp_path: Path, processes: int
) -> None:
    (tmp_path / "disk").write_text("a file, no directory")
    job = four_tiers(tmp_path, "refused", processes)
    code, output = finish(start_process(job, tmp_path))
    assert code == EXIT_BAD_INPUT, output
    [said] = [line for line in output.splitlines() if "checkpoint.fast" in line]
    assert f"checkpoint.fast = {tmp_path}/disk, the tier disk, cannot be written to" in said
    assert "Traceback" not in output


def test_memory_that_cannot_be_written_to_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "memory").write_text("a file, no directory")
    job = four_tiers(tmp_path, "warned", 2)
    code, output = finish(start_process(job, tmp_path))
    assert code == EXIT_DONE, output
    warnings = [event.message for _, event in read_run(run_directory(job).path).of(Warned)]
    [said] = [text for text in warnings if "recover.memory" in text]
    assert str(tmp_path / "memory") in said


def test_tiers_that_nobody_could_use_are_named(tmp_path: Path) -> None:
    alone = tiny_job(tmp_path, "alone", 'checkpoint.tiers=["memory", "shared"]')
    assert finish(start_process(alone, tmp_path))[0] == EXIT_DONE
    node = tiny_job(
        tmp_path,
        "node",
        'checkpoint.tiers=["memory", "peer", "shared"]',
        "launch.nproc=2",
        f'recover.memory="{tmp_path}/memory"',
    )
    assert finish(start_process(node, tmp_path))[0] == EXIT_DONE
    for job, sentence in (
        (alone, 'checkpoint.tiers has "memory", but nobody would start this process again'),
        (node, 'checkpoint.tiers has "peer", but all processes are on one node'),
    ):
        warnings = [event.message for _, event in read_run(run_directory(job).path).of(Warned)]
        assert [text for text in warnings if text.startswith(sentence)], warnings
