"""Folder of a script's run: its identity, its outcome, its versions.

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

import difflib
import hashlib
import json
import platform
import shutil
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from outlast.autosave.resume.files import begin_logs
from outlast.errors import AutosaveError
from outlast.records import OwnerLock, RunDirectory, replace_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outlast.autosave.program.source import Rewritten


FORMAT = 2


_LINES_SHOWN = 40


@dataclass(frozen=True)
class Identity:
    """A program as it was started.

    Attributes:
        arguments: Of the script.
        world_size: Processes.
        files: Path of each file of the program, relative to the script's folder where it lies
            below it, and its text.
        sites: Each statement on the way to a step: its body, kind, and the sites around it.
        python: Version, e.g. ``3.11``.
        torch: Version.
    """

    arguments: tuple[str, ...]
    world_size: int
    files: dict[str, str]
    sites: tuple[str, ...]
    python: str
    torch: str

    def to_json(self) -> str:
        """As text, for `from_json`."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)


def identity_of(
    files: Iterable[Rewritten], arguments: Sequence[str], world_size: int, torch_version: str
) -> Identity:
    """The identity of a program that is about to run."""
    program = list(files)
    folder = program[0].source.path.parent
    sites = [site for rewritten in program for site in rewritten.sites]
    bodies = {
        name: told for rewritten in program for name, told in _bodies(rewritten, folder).items()
    }
    return Identity(
        tuple(arguments),
        world_size,
        {_short(rewritten.source.path, folder): rewritten.source.text for rewritten in program},
        tuple(
            f"{site.number} {site.kind} in {bodies[site.body]} within {site.around}"
            for site in sorted(sites, key=lambda site: site.number)
        ),
        platform.python_version(),
        torch_version,
    )


def from_json(text: str, place: Path) -> Identity:
    """Read what `Identity.to_json` gave.

    Args:
        text: Its text.
        place: The file that it was in, for the error.

    Raises:
        AutosaveError: When it is something else.
    """
    try:
        found: dict[str, Any] = json.loads(text)
        known = found.pop("format")
        if known != FORMAT:
            raise AutosaveError(
                f"{place} has the format {known}, and this version of Outlast reads {FORMAT}; "
                "continue with the version that wrote it, or start anew with --fresh"
            )
        found["arguments"] = tuple(found["arguments"])
        found["sites"] = tuple(found["sites"])
        return Identity(**found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AutosaveError(
            f"{place} is damaged ({error!r}); restore it from a copy, or start anew with --fresh"
        ) from None


def refuse_changes(
    before: Identity, now: Identity, place: Path, *, accept_changes: bool = False
) -> None:
    """Refuse to continue with a run as another program.

    Args:
        before: As it was started.
        now: As it is to continue.
        place: The run's folder, for the error.
        accept_changes: Continue with changed texts and arguments all the same, where the statements
            on the way to a step are the same.

    Raises:
        AutosaveError: With the difference.
    """
    if before.world_size != now.world_size:
        raise AutosaveError(
            f"the run in {place} was saved by {_processes(before.world_size)} and cannot continue "
            f"with {_processes(now.world_size)}: what each of them holds is saved as it is; start "
            f"{before.world_size}, or start anew with --fresh"
        )
    changed = _changed_files(before, now)
    if before.arguments != now.arguments:
        changed = [
            f"- arguments: {' '.join(before.arguments) or '(none)'}",
            f"+ arguments: {' '.join(now.arguments) or '(none)'}",
            *changed,
        ]
    if changed and not accept_changes:
        listed = "\n".join(changed)
        raise AutosaveError(
            f"the run in {place} was saved by another program; set the change back, continue all "
            f"the same with --accept-changes, or start anew with --fresh. The difference:\n{listed}"
        )
    if before.sites != now.sites:
        pairs = zip(before.sites, now.sites, strict=False)
        moved = next(
            (f"statement {old} is {new} now" for old, new in pairs if old != new),
            f"{len(before.sites)} statements led to the training step and {len(now.sites)} do now",
        )
        raise AutosaveError(
            f"the run in {place} cannot continue even with --accept-changes: {moved}; a "
            "change must leave the statements that lead to the training step, and the names of "
            "their functions, as they were; set it back, or start anew with --fresh"
        )


def version_warnings(before: Identity, now: Identity) -> list[str]:
    """One sentence for each version that is another one than when the run was saved."""
    return [
        f"the run was saved under {name} {then} and continues under {today}; its numbers may "
        "differ from here on"
        for name, then, today in (
            ("Python", before.python, now.python),
            ("torch", before.torch, now.torch),
        )
        if then != today
    ]


def arguments_hash(arguments: Sequence[str]) -> str:
    """Eight characters that tell runs of a script with other arguments apart."""
    return hashlib.sha256(json.dumps(list(arguments)).encode()).hexdigest()[:8]


def _changed_files(before: Identity, now: Identity) -> list[str]:
    lines: list[str] = []
    for name in sorted({*before.files, *now.files}):
        lines += difflib.unified_diff(
            before.files.get(name, "").splitlines(),
            now.files.get(name, "").splitlines(),
            f"{name} (saved)",
            f"{name} (now)",
            n=1,
            lineterm="",
        )
    if len(lines) > _LINES_SHOWN:
        more = len(lines) - _LINES_SHOWN
        lines = [*lines[:_LINES_SHOWN], f"... and {more} more lines"]
    return lines


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _short(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def _bodies(file: Rewritten, folder: Path) -> dict[str, str]:
    """Body names of a file, and what they are called wherever they stand."""
    place = f"{file.source.path}:"
    parts = [body.removeprefix(place).partition(":") for body in {site.body for site in file.sites}]
    told: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for line, _, name in sorted(parts, key=lambda part: int(part[0])):
        seen[name] += 1
        # A function may be defined more than once, in branches of an `if`.
        again = f" ({seen[name]})" if seen[name] > 1 else ""
        told[f"{place}{line}:{name}"] = f"{_short(file.source.path, folder)}:{name}{again}"
    return told


Word = Literal["running", "stopped", "failed", "finished"]


@dataclass(frozen=True)
class Outcome:
    """Outcome of the last start of a run.

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
        """File of the measurements behind the best interval."""
        return self.path / "pace.json"

    @property
    def digests(self) -> Path:
        """Of the first steps after each save."""
        return self.path / "digests"

    @property
    def library_stores(self) -> Path:
        """File that says where the library that trains the script keeps its versions."""
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
            try:
                text = self.program.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise AutosaveError(
                    f"{self.program} cannot be read ({error}); restore it from a copy, or start "
                    "anew with --fresh"
                ) from None
            before = from_json(text, self.program)
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
        """Return True if anything was saved here."""
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
        """Outcome of the last start of a rank; None before the first."""
        try:
            return Outcome(**json.loads(self._outcome(rank).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def words(self, world_size: int) -> list[Word | None]:
        """Outcome of the last start of each rank, in a word."""
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
        """Findings of the last start that are not saved."""
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


def folder_of(script: Path, arguments: Sequence[str], directory: Path | None) -> RunFolder:
    """The folder of a run: `directory`, or one beside the script that its arguments name."""
    if directory is not None:
        return RunFolder(directory.absolute())
    name = f"{script.name}-{arguments_hash(arguments)}"
    return RunFolder(script.parent / ".outlast" / name)
