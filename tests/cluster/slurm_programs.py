"""Slurm's commands as shell scripts with fixed answers, for tests of what asks them."""

from pathlib import Path

import pytest

FORGOTTEN = "slurm_load_jobs error: Invalid job id specified"


def put_command(folder: Path, name: str, body: str) -> None:
    """A program `name` in the folder of `slurm_commands`."""
    file = folder / "bin" / name
    file.write_text(f"#!/bin/bash\nPATH=/usr/bin:/bin\n{body}\n")
    file.chmod(0o755)


def slurm_commands(folder: Path, monkeypatch: pytest.MonkeyPatch, squeue: str = "") -> None:
    """A path of bash and an squeue that prints `squeue`, or else knows no job."""
    (folder / "bin").mkdir()
    (folder / "bin" / "bash").symlink_to("/bin/bash")
    monkeypatch.setenv("PATH", f"{folder}/bin:/nowhere")
    body = f"echo '{squeue}'" if squeue else f"echo '{FORGOTTEN}' >&2; exit 1"
    put_command(folder, "squeue", body)


def shown(job: str, state: str) -> str:
    """A line of squeue's answer."""
    return "\x1f".join([job, state, "1", *["x"] * 6, ""])


def accounted(job: str, state: str) -> str:
    """A line of sacct's answer."""
    return "\x1f".join([job, state, "x"])


def in_queue(number: int, state: str, nodes: int, hours: float, *, priority: int = 0) -> str:
    """A line of squeue's answer with what a forecast needs; a running job has all of its limit."""
    limit = f"{round(60 * hours)}:00"
    fields = [number, state, nodes, limit, "N/A", "N/A", "N/A", priority, "", ""]
    return "\x1f".join(map(str, fields))


def partition(nodes: int, idle: int, limit: str = "infinite") -> str:
    """A line of sinfo's answer: the default partition."""
    return "\x1f".join(["batch", "up", limit, f"{nodes - idle}/{idle}/0/{nodes}", "OFF", "batch*"])


def put_queue(folder: Path, lines: list[str], sinfo: str) -> None:
    """What squeue and sinfo answer from now on."""
    for name, text in (("squeue", "\n".join(lines)), ("sinfo", sinfo)):
        (folder / name).write_text(text + "\n")
        put_command(folder, name, f"cat {folder}/{name}")
