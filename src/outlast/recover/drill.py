"""Killing and stopping the processes of a real run, seeded, and what came of each time.

A *trial* is one kill or stop. At a phase, the drawn rank's page is armed and the process sends
itself the signal when it comes there (`outlast.recover.phase_page`); at a rate, a drawn process is
killed from outside at drawn times. A trial is survived when a step beyond it is committed before
the deadline. Results are read from the run's own event log.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outlast.errors import RecoverError
from outlast.records import StepsDone, TrainingStarted, read_run
from outlast.recover.phase_page import PHASES, arm, disarm, pages_folder, read_pages

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from outlast.records import Record, RunDirectory
    from outlast.recover.phase_page import PhaseReading

_LOOK_SECONDS = 0.02
_MOST_STEPS_BETWEEN = 4
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Trial:
    """One kill or stop.

    Attributes:
        rank: To whom.
        phase: In which phase; empty where `seconds` says when.
        steps: Not before so many steps after the trial before it.
        seconds: So long after the run began to train, by the wall clock.
    """

    rank: int
    phase: str = ""
    steps: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class TrialOutcome:
    """Result of a trial.

    Attributes:
        rank: Who was struck.
        phase: In which phase it was.
        step: Steps that it had done.
        struck: When, seconds of the monotonic clock; 0 where the trial did not take place.
        survived: Whether a step beyond it was committed in time.
        seconds: From the strike to that step.
        lost_steps: Committed steps that were done again.
        note: Why it did not take place, or was not survived.
    """

    rank: int
    phase: str
    step: int
    struck: float = 0.0
    survived: bool = False
    seconds: float = 0.0
    lost_steps: int = 0
    note: str = ""

    @property
    def took_place(self) -> bool:
        """True if the process was struck."""
        return self.struck > 0.0


def per_second(rate: str) -> float:
    """Kills per second from a text such as ``6/min``, ``0.1/s`` or ``30/h``.

    Raises:
        RecoverError: When it is no such text.
    """
    found = re.fullmatch(r"\s*([0-9.eE+-]+)\s*/\s*(s|min|h)\s*", rate)
    try:
        value = float(found[1]) / _UNITS[found[2]] if found else 0.0
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise RecoverError(
            f"--kill {rate}: give kills per time above 0, such as 6/min, 0.1/s, 30/h"
        )
    return value


def trials_at(phases: Sequence[str], ranks: int, each: int, seed: int) -> list[Trial]:
    """`each` trials at every one of `phases`, in drawn order, of drawn ranks, a few steps apart.

    Raises:
        RecoverError: For a phase that there is not.
    """
    if wrong := [phase for phase in phases if phase not in PHASES or phase == "idle"]:
        known = ", ".join(phase for phase in PHASES if phase != "idle")
        raise RecoverError(f"--at {wrong[0]}: give one of {known}, or all")
    draw = random.Random(seed)
    order = [phase for phase in phases for _ in range(each)]
    draw.shuffle(order)
    return [
        Trial(draw.randrange(ranks), phase, steps=draw.randint(1, _MOST_STEPS_BETWEEN))
        for phase in order
    ]


def trials_by_rate(rate_per_second: float, ranks: int, count: int, seed: int) -> list[Trial]:
    """`count` trials at times of a Poisson process, each of a drawn rank."""
    draw = random.Random(seed)
    seconds, found = 0.0, []
    for _ in range(count):
        seconds += draw.expovariate(rate_per_second)
        found.append(Trial(draw.randrange(ranks), seconds=seconds))
    return found


class DrilledRun:
    """A run in processes of its own, which trials are made on.

    Args:
        command: Starts the run, and continues with it when called again; it should record every
            step (``log.every_steps=1``).
        directory: Of the run, which is not there before the first start.
        memory: As in ``recover.memory``.
        log: File for what the run prints.
        ranks: Number of processes.
        deadline_seconds: For each wait.
        stop_seconds: Stop processes for so long, in the place of killing them; 0: kill.
        live: Whether survivors continue in their processes.
    """

    def __init__(
        self,
        command: Sequence[str],
        directory: RunDirectory,
        *,
        memory: str,
        log: Path,
        ranks: int,
        deadline_seconds: float,
        stop_seconds: float = 0.0,
        live: bool = False,
    ) -> None:
        self.starts = 0
        self._command = list(command)
        self._directory = directory
        self._memory = memory
        self._log = log
        self._ranks = ranks
        self._deadline_seconds = deadline_seconds
        self._stop_seconds = stop_seconds
        self._live = live
        self._same_attempt = live or stop_seconds > 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the run, or start it again."""
        self.starts += 1
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def finish(self, *, without_progress_seconds: float) -> int | None:
        """Wait for the end of the run; its exit code, or None where it hung and was killed."""
        assert self._process is not None
        steps, changed = -1, time.monotonic()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(timeout=1.0)
            done = self._last_step()
            if done != steps:
                steps, changed = done, time.monotonic()
            elif time.monotonic() - changed > without_progress_seconds:
                self.end()
                return None

    def end(self) -> None:
        """Kill whatever is left of the run."""
        if self._process is None:
            return
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @property
    def is_running(self) -> bool:
        """True while the run's launcher lives."""
        return self._process is not None and self._process.poll() is None

    def trial(self, trial: Trial, began: float) -> TrialOutcome:
        """Make one trial, and wait for what comes of it.

        Args:
            trial: What to do.
            began: When the run began to train, seconds of the monotonic clock; for trials by time.
        """
        number = signal.SIGSTOP if self._stop_seconds else signal.SIGKILL
        before = self._last_step()
        if trial.phase:
            struck = self._strike_in_phase(trial, number)
        else:
            struck = self._strike_at(trial, number, began)
        if isinstance(struck, str):
            return TrialOutcome(trial.rank, trial.phase, before, note=struck)
        if self._stop_seconds:
            time.sleep(self._stop_seconds)
            with contextlib.suppress(OSError):
                if struck.state == "stopped":
                    os.kill(struck.pid, signal.SIGCONT)
        return self._judged(struck)

    def _strike_in_phase(self, trial: Trial, number: int) -> PhaseReading | str:
        """Arm the page and wait until it has fired; why not, in words, where it has not."""
        found = self._page(trial.rank)
        if found is None:
            return "the run has ended before"
        pages, first = (
            pages_folder(self._memory, self._directory),
            max(found.step, self._last_step()),
        )
        # Only who comes up anew takes over a state, and has done no step then.
        anew = trial.phase == "heal"
        step = 0 if anew else first + trial.steps
        # Of live groups one saves, and which one may change.
        armed = range(self._ranks) if self._live and trial.phase == "save" else [trial.rank]
        for rank in armed:
            with contextlib.suppress(RecoverError):
                arm(pages, rank, trial.phase, step=step, number=number)
        if anew:
            with contextlib.suppress(OSError):
                os.kill(found.pid, signal.SIGKILL)
        deadline = time.monotonic() + self._deadline_seconds
        while time.monotonic() < deadline:
            now = [self._page(rank, wait=False) for rank in armed]
            if fired := [reading for reading in now if reading is not None and reading.fired]:
                for rank in armed:
                    disarm(pages, rank)
                # Whoever takes the rank next takes the page as well.
                return replace(fired[0], phase=trial.phase)
            if not self.is_running:
                return f"the run has ended without another phase {trial.phase}"
            time.sleep(_LOOK_SECONDS)
        return f"phase {trial.phase} did not come in {self._deadline_seconds:g} s"

    def _strike_at(self, trial: Trial, number: int, began: float) -> PhaseReading | str:
        while (left := began + trial.seconds - time.monotonic()) > 0.0:
            if not self.is_running:
                return "the run has ended before"
            time.sleep(min(left, 1.0))
        found = self._page(trial.rank, wait=False)
        if found is None or found.state == "dead":
            return "no process was there at that moment"
        struck = time.monotonic()
        with contextlib.suppress(OSError):
            os.kill(found.pid, number)
        return replace(self._page(trial.rank, wait=False) or found, fired=struck)

    def _judged(self, struck: PhaseReading) -> TrialOutcome:
        """Wait for the next step that is committed after the strike."""
        outcome = TrialOutcome(struck.rank, struck.phase, struck.step, struck.fired)
        records = read_run(self._directory.path).records
        before = [record.attempt for record in records if record.monotonic <= struck.fired]
        attempt = max(before, default=1)
        deadline = time.monotonic() + self._deadline_seconds
        while time.monotonic() < deadline:
            ended = not self.is_running
            for record, event in self._steps():
                same = self._same_attempt and record.attempt == attempt and event.step > struck.step
                if record.monotonic > struck.fired and (record.attempt > attempt or same):
                    return replace(
                        outcome,
                        survived=True,
                        seconds=record.monotonic - struck.fired,
                        lost_steps=self._lost_steps(attempt, record.attempt),
                    )
            if ended:
                # Well if all steps were done before, and the rest was done again.
                assert self._process is not None
                code = self._process.returncode
                return replace(
                    outcome,
                    survived=code == 0,
                    seconds=time.monotonic() - struck.fired,
                    note=f"the run ended with exit code {code}",
                )
            time.sleep(_LOOK_SECONDS)
        return replace(outcome, note=f"no step was committed in {self._deadline_seconds:g} s")

    def _lost_steps(self, before: int, after: int) -> int:
        if before == after:
            return 0
        run = read_run(self._directory.path)
        done = [event.step for record, event in run.of(StepsDone) if record.attempt <= before]
        first = [event.step for record, event in run.of(TrainingStarted) if record.attempt == after]
        return max(max(done, default=0) - min(first, default=0), 0)

    def _steps(self) -> list[tuple[Record, StepsDone]]:
        if not self._directory.exists():
            return []
        return read_run(self._directory.path).of(StepsDone)

    def _last_step(self) -> int:
        steps = self._steps()
        return steps[-1][1].step if steps else 0

    def began(self) -> float | None:
        """Return the time of the run's first step; None where it ends, or does not come so far."""
        deadline = time.monotonic() + self._deadline_seconds
        while time.monotonic() < deadline and self.is_running:
            if steps := self._steps():
                return steps[0][0].monotonic
            time.sleep(_LOOK_SECONDS)
        return None

    def _page(self, rank: int, *, wait: bool = True) -> PhaseReading | None:
        """The page of `rank`'s living process; None where the run ends before there is one."""
        deadline = time.monotonic() + (self._deadline_seconds if wait else 0.0)
        while True:
            for beacon in read_pages(pages_folder(self._memory, self._directory)):
                if beacon.rank == rank and (not wait or beacon.state != "dead"):
                    return beacon
            if time.monotonic() >= deadline or not self.is_running:
                return None
            time.sleep(_LOOK_SECONDS)
