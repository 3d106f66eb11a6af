"""Errors that a user can act on.

Every error that Outlast raises on purpose derives from `OutlastError`. Its text is one clear
sentence (or a list of them) that names the setting, its value and the remedy. The command line
prints that sentence without a traceback and exits with `EXIT_BAD_INPUT`.
"""

EXIT_DONE = 0
EXIT_CRASHED = 1
EXIT_BAD_INPUT = 2
EXIT_TO_BE_CONTINUED = 3
EXIT_DATA_CORRUPTION = 4
EXIT_GIVE_UP = 5
EXIT_HUNG = 6
EXIT_INTERRUPTED = 130

RECORD_TELLS = "OUTLAST_LINK_RECORD"
"""Environment variable set where ranks that stop to be continued end with 0, since srun ends the
others after any other code: the link of a chain takes it from the run's record."""


class OutlastError(Exception):
    """Base of every error that a user can act on."""


class MissingExtraError(OutlastError, ImportError):
    """A feature needs packages that `pip install outlast` leaves to one of its extras."""


class JobError(OutlastError):
    """A job file or an override is wrong; lists every problem found.

    Attributes:
        problems: One sentence per problem.
    """

    def __init__(self, problems: list[str], source: str = "the job") -> None:
        self.problems = problems
        self.source = source
        if len(problems) == 1:
            super().__init__(f"{source}: {problems[0]}")
            return
        head = f"{source} has {len(problems)} problems:"
        super().__init__("\n".join([head, *(f"  - {problem}" for problem in problems)]))

    def __reduce__(self) -> tuple[object, ...]:
        return (JobError, (self.problems, self.source))


class DataError(OutlastError):
    """The corpus, the tokenizer or a token file cannot be used as asked."""


class CheckpointError(OutlastError):
    """A checkpoint cannot be written or restored."""


class RunError(OutlastError):
    """A run directory cannot be used: it belongs to another job or to a live process."""


class LeaseLostError(OutlastError):
    """Another process has taken over the run or the store that this process writes: it must end."""


class HardwareError(OutlastError):
    """A hardware fact is missing or a device cannot be read."""


class AutosaveError(OutlastError):
    """A program cannot be resumed as it is, or not where it was asked to."""


class RecoverError(OutlastError):
    """A run cannot continue from what is still in memory, or a group may not rejoin it."""


class GuardError(OutlastError):
    """A model cannot be guarded as asked."""


class DataCorruptionError(OutlastError):
    """A computation gave wrong values that could not be corrected.

    Attributes:
        in_versions: Whether all that was saved may hold them, so that a restart would be no cure.
    """

    def __init__(self, message: str = "", *, in_versions: bool = False) -> None:
        super().__init__(message)
        self.in_versions = in_versions


class TensorizeError(OutlastError):
    """A layer cannot take the structured form, rank or plan that was asked for."""


class CodingError(OutlastError):
    """A gradient code or its protocol cannot be used as asked."""


class LostChunksError(CodingError):
    """Every holder of a chunk is gone, or too many workers are, and the caller wants no rescaling.

    Attributes:
        chunks: The chunks whose gradients are lost.
    """

    def __init__(self, message: str, chunks: tuple[int, ...]) -> None:
        self.chunks = chunks
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return (LostChunksError, (str(self), self.chunks))


class LeftBehindError(CodingError):
    """The others have continued without this process: it was silent for too long."""


class EnergyError(OutlastError):
    """A meter, profile, schedule, deadline or clock plan cannot be used as asked."""


class PlanError(OutlastError):
    """A run cannot be predicted, searched, calibrated or written out as asked."""


class NothingAllowedError(PlanError):
    """No configuration fits or keeps to a budget: an answer of a search, and no wrong input."""


class ClusterError(OutlastError):
    """A chain of jobs, a queue, a schedule or a transfer cannot be made as asked."""


class IntegrationError(OutlastError):
    """Another framework, or its version, or what is asked of it, does not go with Outlast."""
