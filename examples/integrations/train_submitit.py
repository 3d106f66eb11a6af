"""A training script as a submitit job that is requeued until it is done.

Run it: python examples/integrations/train_submitit.py "python train.py --lr 3e-4"
"""

import os
import shlex
import signal
import sys

import submitit

from outlast.errors import EXIT_CRASHED, EXIT_TO_BE_CONTINUED


class Training:
    """A command that ends with Outlast's exit codes, as submitit runs it.

    Shortly before the time limit, or when Slurm preempts the job, submitit calls `checkpoint`: the
    command is told to save, and the job is requeued if it is to be continued.
    """

    def __init__(self, command: str) -> None:
        self.command = command
        self.process = 0

    def __call__(self) -> int:
        words = shlex.split(self.command)
        # A session of its own: signals come from `checkpoint` alone. No Popen, whose wait() must
        # not be called again by a signal's handler.
        self.process = os.posix_spawnp(words[0], words, os.environ, setsid=True)
        return self.wait()

    def checkpoint(self) -> submitit.helpers.DelayedSubmission | None:
        os.kill(self.process, signal.SIGUSR1)
        if self.wait() == EXIT_TO_BE_CONTINUED:
            return submitit.helpers.DelayedSubmission(Training(self.command))
        return None  # done, or not to be started again

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


def train(executor: submitit.Executor, command: str, crashes: int = 3) -> int:
    """Submit `command` until it is done or wants a person; its last exit code."""
    while True:
        code = executor.submit(Training(command)).result()
        print(f"the job has ended with {code}", flush=True)
        if code == EXIT_TO_BE_CONTINUED:  # by its own clock
            continue
        crashed = code == EXIT_CRASHED or code < 0
        if not crashed or crashes == 0:
            return code
        crashes -= 1


def main() -> None:
    executor = submitit.AutoExecutor("submitit", cluster=os.environ.get("CLUSTER"))
    executor.update_parameters(timeout_min=120, slurm_signal_delay_s=180)
    sys.exit(train(executor, sys.argv[1]))


if __name__ == "__main__":
    main()
