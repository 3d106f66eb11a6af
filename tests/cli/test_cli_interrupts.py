"""Ctrl-C at any moment of a command: one line, and an exit code that says so."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from outlast.errors import EXIT_INTERRUPTED, EXIT_TO_BE_CONTINUED

pytestmark = pytest.mark.distributed

SCRIPT = """
import time
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1000):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
"""


def interrupted(folder: Path, arguments: list[str], seconds: float, *, group: bool) -> tuple:
    """Run a command and send SIGINT so long after Python has handed over to it.

    Returns:
        Its exit code, and what it wrote to stderr.
    """
    process = subprocess.Popen(
        # Python tells each module that is imported: what comes before `main` is its own time.
        [sys.executable, "-X", "importtime", "-m", "outlast", *arguments],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Processes in the background of a shell ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stderr is not None
    said: list[str] = []
    begun = threading.Event()

    def read() -> None:
        for line in process.stderr:
            if "outlast.cli.main" in line:
                begun.set()
            if not line.startswith("import time:"):
                said.append(line)

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    time.sleep(0.005 + seconds)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT) if group else process.send_signal(signal.SIGINT)
    code = process.wait(60)
    reader.join()
    return code, "".join(said)


@pytest.mark.parametrize(
    "command",
    [
        ["train", "train.steps=100000", "run.directory=runs"],
        ["train", "train.steps=100000", "run.directory=runs", "--nproc", "2"],
        ["run", "script.py"],
        ["plan", "llama-3-8b", "--cluster", "h100x64", "--tokens", "300B"],
    ],
    ids=["train", "train-2", "run", "plan"],
)
def test_an_interrupt_in_the_first_seconds_is_one_line(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    moments = random.Random(len(command))
    for number in range(4):
        seconds = moments.uniform(0.0, 1.0 if number < 3 else 4.0)
        code, said = interrupted(tmp_path, command, seconds, group=bool(number % 2))
        where = f"after {seconds:.3f} s: {said}"
        assert "Traceback" not in said, where
        # A command that is over, or that saves where it is, does not end by the signal.
        assert code in (EXIT_INTERRUPTED, EXIT_TO_BE_CONTINUED, 0), where
        if code == EXIT_INTERRUPTED:
            assert said.splitlines()[-1] == "outlast: interrupted", where
            assert said.count("interrupted") == 1, where
