"""Slurm commands: each with a deadline, repeated where a failure passes, else one sentence.

A controller that restarts, a socket that times out or a full queue of requests is nothing that a
user did wrong: such a command is given again until `Patience` is over. What Slurm refuses is not
asked again; its own words are the error.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

# As slurm_errno.c and the client commands word it, in lower case. "Slurm temporarily unable to
# accept job" is sbatch's own retry, which ends in one of the others.
_PASSING = (
    "unable to contact slurm controller",
    "connection refused",
    "connection timed out",
    "connection reset",
    "socket timed out",
    "zero bytes were transmitted",
    "unexpected message received",
    "transport endpoint",
    "resource temporarily unavailable",
    "temporarily unable to accept",
    "try again",
    "slurmctld is in standby",
    "protocol authentication error",
    "slurmdbd",
    "load error",
)
_NOT_PASSING = ("invalid", "disabled", "not supported", "denied")
# The settings of a job that submits the next one must not become those of that one.
_OF_THE_JOB = ("SLURM_", "OUTLAST_CHAIN", "OUTLAST_LINK", "PMI_", "PMIX_")
_OF_THE_SITE = ("SLURM_CONF", "SLURM_TIME_FORMAT", "SLURM_CLUSTERS")
# What a user may have set to see queues in another way than a program reads them.
_OF_THE_VIEW = ("SQUEUE_", "SINFO_", "SACCT_", "SCONTROL_")


class SlurmMissingError(ClusterError):
    """The command is not installed here, as in a container."""


class SlurmUnreachableError(ClusterError):
    """The controller did not answer within the patience."""


class SlurmRefusedError(ClusterError):
    """Slurm said no.

    Attributes:
        words: What it said.
    """

    def __init__(self, message: str, words: str) -> None:
        self.words = words
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return (SlurmRefusedError, (str(self), self.words))


@dataclass(frozen=True)
class Patience:
    """Deadline and retries of a command.

    Attributes:
        answer_seconds: Longest wait for one answer.
        total_seconds: From the first try to the last one's beginning; 0: one try.
        first_pause_seconds: Between the first two tries; doubled each time, up to 15 s.
    """

    answer_seconds: float = 30.0
    total_seconds: float = 60.0
    first_pause_seconds: float = 0.5


IMPATIENT = Patience(answer_seconds=10.0, total_seconds=0.0)
_LONGEST_PAUSE_SECONDS = 15.0


def installed(command: str) -> bool:
    """True if the command is on this machine's path."""
    return shutil.which(command) is not None


def ask(
    command: Sequence[str],
    patience: Patience | None = None,
    *,
    input_text: str | None = None,
    before_retry: Callable[[], str | None] | None = None,
    without: Collection[str] = (),
) -> str:
    """Run the command and return its output.

    Args:
        command: Name and arguments, no shell.
        patience: Deadlines; the default is a minute in all.
        input_text: Given to its standard input.
        before_retry: Called after a failure that may pass, the last one too; a text is taken as
            the answer, for commands that may have done their work although they failed.
        without: Names of environment variables that it shall not see.

    Raises:
        SlurmMissingError: The command is not installed.
        SlurmUnreachableError: Only passing failures until the patience was over.
        SlurmRefusedError: Any other failure.
    """
    patience = patience or Patience()
    begun, pause = time.monotonic(), patience.first_pause_seconds
    while True:
        try:
            return _once(command, patience.answer_seconds, input_text, without)
        except SlurmUnreachableError:
            over = time.monotonic() + pause - begun > patience.total_seconds
            if over:
                if before_retry is not None and (answer := before_retry()) is not None:
                    return answer
                raise
        time.sleep(pause)
        pause = min(2.0 * pause, _LONGEST_PAUSE_SECONDS)
        if before_retry is not None and (answer := before_retry()) is not None:
            return answer


def _once(
    command: Sequence[str],
    deadline_seconds: float,
    input_text: str | None,
    without: Collection[str],
) -> str:
    name = command[0]
    environment = {key: value for key, value in os.environ.items() if key not in without}
    try:
        done = subprocess.run(
            command,
            input=input_text,
            stdin=subprocess.DEVNULL if input_text is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline_seconds,
            check=False,
            env=environment_for(name, environment),
        )
    except FileNotFoundError:
        raise SlurmMissingError(
            f"`{name}` is not installed here: run this where Slurm's commands are, e.g. on a login "
            "node, or make them visible inside the container"
        ) from None
    except OSError as error:
        raise SlurmMissingError(f"`{name}` cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise SlurmUnreachableError(
            f"`{name}` gave no answer in {deadline_seconds:g} s; Slurm's controller may be busy or "
            "down"
        ) from None
    if done.returncode == 0:
        return done.stdout
    words = said(done.stderr or done.stdout) or f"exit code {done.returncode}"
    if passes(words):
        raise SlurmUnreachableError(f"`{name}` could not reach Slurm's controller: {words}")
    raise SlurmRefusedError(f"`{name}` was refused: {words}", words)


def passes(words: str) -> bool:
    """True if a failure with these words may be over in a moment."""
    plain = words.lower()
    return any(item in plain for item in _PASSING) and not any(
        item in plain for item in _NOT_PASSING
    )


def said(errors: str) -> str:
    """Slurm's own words in one line, without the names of programs and the word "error"."""
    lines = []
    for line in errors.splitlines():
        text = line.strip()
        while True:
            head, colon, rest = text.partition(": ")
            # "sbatch: error: Batch job submission failed: Invalid partition name specified"
            if not colon or " " in head or not head.replace("_", "").replace(".", "").isalnum():
                break
            text = rest.strip()
        if text and text not in lines:
            lines.append(text)
    return "; ".join(lines)


def environment_for(command: str, environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without what would change the meaning of the command or its output.

    Times are asked for as seconds since the epoch, and messages in English.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith(_OF_THE_VIEW)
        and (command != "sbatch" or name in _OF_THE_SITE or not name.startswith(_OF_THE_JOB))
    }
    kept |= {"LC_ALL": "C"}
    if command != "sbatch":
        kept["SLURM_TIME_FORMAT"] = "%s"
    else:
        kept.pop("SLURM_TIME_FORMAT", None)
    return kept
