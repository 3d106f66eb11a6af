"""The folder of a run of a script: what it is a run of, how it stands, its versions.

.outlast/train.py-1f3a9c07/
  program.json     the program as it was started: texts, arguments, processes, versions
  notes.json       what the last start has found that is not saved
  outcome.json     how the last start ended, or that it runs; outcome.rankN.json of further ranks
  pace.json        what the best interval was worked out from
  digests/         of the first steps after each save, to compare after a restore
  log-sizes/       how large each log was when a rank first appended to it
  log-ends/        what was cut off logs that were put back so
  lock             owner while it runs
  checkpoints/     the versions
  stores.json      where a library keeps them that trains the script
  begun.json       under srun, what rank 0 tells the others when they begin; begun.rankN.json
                   which word of it they have heard
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from outlast.autosave.identity import (
    Identity,
    arguments_hash,
    from_json,
    refuse_changes,
    version_warnings,
)
from outlast.autosave.resume.first_sizes import begin_logs
from outlast.errors import AutosaveError
from outlast.records import OwnerLock, RunDirectory, replace_file

if TYPE_CHECKING:
    from collections.abc import Sequence

Word = Literal["running", "stopped", "failed", "finished"]


@dataclass(frozen=True)
class Outcome:
    """How the last start of a run ended.

    Attributes:
        word: ``running`` also where it was killed.
        step: Steps done.
        when: Date and time, as text.
    """

    word: Word
    step: int
    when: str


@dataclass(frozen=True)
class RunFolder:
    """Paths and states of one run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """The store."""
        return self.path / "checkpoints"

    @property
    def pace(self) -> Path:
        """What the best interval was worked out from."""
        return self.path / "pace.json"

    @property
    def digests(self) -> Path:
        """Of the first steps after each save."""
        return self.path / "digests"

    @property
    def library_stores(self) -> Path:
        """Where the library that trains the script keeps its versions."""
        return self.path / "stores.json"

    @property
    def program(self) -> Path:
        """The program as it was started."""
        return self.path / "program.json"

    def begin(self, now: Identity, root: Path, *, accept_changes: bool) -> list[str]:
        """Check that the run is one of this program, and make its folder.

        The logs of a run that was killed before its first save are put back.

        Args:
            now: The program.
            root: Its folder.
            accept_changes: Whether to resume with a changed program or environment.

        Returns:
            Warnings, one sentence each.

        Raises:
            AutosaveError: When it is a run of another program.
            RunError: When it is running.
        """
        warnings, changed = [], False
        finished = self.outcome()
        saved = self.has_versions()
        alive_until = self._alive_until(now.world_size)
        if self.program.exists() and (
            saved
            or self.library_stores.exists()
            or (finished is not None and finished.word == "finished")
        ):
            before = from_json(self._read(self.program), self.program)
            refuse_changes(before, now, self.path, accept_changes=accept_changes)
            warnings = version_warnings(before, now)
            changed = before != now
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # What is written here must be of the program that runs.
            lock = self.lock()
            lock.acquire()
            try:
                if changed or accept_changes:
                    # Another program, torch or environment may well give other numbers.
                    shutil.rmtree(self.digests, ignore_errors=True)
                if not saved:
                    warnings += begin_logs(self.path, root, alive_until=alive_until)
                replace_file(self.program, now.to_json().encode())
            finally:
                lock.release()
        except OSError as error:
            raise AutosaveError(
                f"the folder {self.path} cannot be written ({error.strerror}); give another one "
                "with --directory"
            ) from None
        return warnings

    def has_versions(self) -> bool:
        """Whether anything was saved here."""
        from outlast.checkpoint import list_versions, storage_of

        # Processes without a process group have a store each.
        stores = [self.checkpoints, *self.checkpoints.glob("rank*")]
        return any(list_versions(storage_of(store)) for store in stores if store.is_dir())

    def lock(self) -> OwnerLock:
        """The lock that keeps a second process out of a run."""
        return OwnerLock(
            self.path / "lock",
            subject=f"the run in {self.path}",
            remedy="wait for it to end, or give this one another folder with --directory",
        )

    def outcome(self, rank: int = 0) -> Outcome | None:
        """How the last start of a rank ended; None before the first."""
        try:
            return Outcome(**json.loads(self._outcome(rank).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def words(self, world_size: int) -> list[Word | None]:
        """How the last start of each rank ended."""
        found = (self.outcome(rank) for rank in range(world_size))
        return [None if outcome is None else outcome.word for outcome in found]

    def record(self, word: Word, step: int, rank: int = 0) -> None:
        """Write down how the run stands on a rank."""
        when = time.strftime("%Y-%m-%d %H:%M")
        text = json.dumps({"word": word, "step": step, "when": when})
        self.path.mkdir(parents=True, exist_ok=True)
        replace_file(self._outcome(rank), text.encode())

    def keep_notes(self, sentences: list[str]) -> None:
        """Write down what the last start has found that is not saved."""
        self.path.mkdir(parents=True, exist_ok=True)
        replace_file(self.path / "notes.json", json.dumps(sentences, indent=1).encode())

    def notes(self) -> list[str]:
        """What the last start has found that is not saved."""
        try:
            return [str(load) for load in json.loads((self.path / "notes.json").read_text("utf-8"))]
        except (OSError, ValueError):
            return []

    def move_aside(self) -> Path | None:
        """Rename the folder of an earlier run; nothing is deleted.

        Raises:
            RunError: When it is running.
        """
        if not self.path.exists():
            return None
        lock = self.lock()
        lock.acquire()
        lock.release()
        return RunDirectory(self.path).move_aside()

    def _alive_until(self, world_size: int) -> float | None:
        """By when a run that was killed must have ended; None for one that was not."""
        if "running" not in self.words(world_size):
            return None
        signs = [self.path / "lock", *(self._outcome(rank) for rank in range(world_size))]
        last = max(sign.stat().st_mtime for sign in signs if sign.exists())
        return last + 2.0 * OwnerLock.heartbeat_seconds

    def _outcome(self, rank: int) -> Path:
        return self.path / (f"outcome.rank{rank}.json" if rank else "outcome.json")

    def _read(self, file: Path) -> str:
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise AutosaveError(
                f"{file} cannot be read ({error}); restore it from a copy, or start anew with "
                "--fresh"
            ) from None


def folder_of(script: Path, arguments: Sequence[str], directory: Path | None) -> RunFolder:
    """The folder of a run: `directory`, or one beside the script that its arguments name."""
    if directory is not None:
        return RunFolder(directory.absolute())
    name = f"{script.name}-{arguments_hash(arguments)}"
    return RunFolder(script.parent / ".outlast" / name)
