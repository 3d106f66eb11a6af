"""Members of a parity group for tests: their states, and files that stand for their memory."""

import os
import shutil
import signal
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from outlast.recover.parity import ParityGroup, Recovered

STRIPE_BYTES = 1024
TYPES = (torch.float32, torch.bfloat16, torch.int8)


def state(member: int, step: int) -> torch.Tensor:
    """A member's state: all of it changes up to step 2, some in step 3; it grows, then shrinks."""
    changes = np.random.default_rng((member, min(step, 2)))
    data = changes.integers(0, 256, 4 * (2000 + 777 * member), np.uint8)
    if step >= 3:
        data[5000 + 100 * member :][:300] ^= step
    if step == 4:
        data = np.concatenate([data, data[: 3000 * (member % 2)]])
    if step == 5:
        data = data[: data.size // 2 // 4 * 4]
    return torch.from_numpy(data).view(TYPES[member % len(TYPES)])


def memory(folder: Path, member: int) -> Path:
    """What is gone when a member's memory is gone."""
    return folder / f"member{member}"


def lose(folder: Path, members: Collection[int]) -> None:
    """Let members lose all their memory."""
    for member in members:
        shutil.rmtree(memory(folder, member), ignore_errors=True)


def join(
    folder: Path,
    losses: int,
    group: dist.ProcessGroup | None = None,
    timeout_seconds: float = 60.0,
) -> ParityGroup:
    """This process's parity group, of all ranks unless told otherwise."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return ParityGroup(
        group or dist.group.WORLD,
        losses=losses,
        directory=memory(folder, dist.get_rank()),
        stripe_bytes=STRIPE_BYTES,
        timeout_seconds=timeout_seconds,
    )


def keep(folder: Path, step: int) -> torch.Tensor:
    """Put this member's state of a step into its memory, and take the one before the last out."""
    member = dist.get_rank()
    torch.save(state(member, step), memory(folder, member) / f"{step}.slot")
    (memory(folder, member) / f"{step - 2}.slot").unlink(missing_ok=True)
    return state(member, step)


def slots(folder: Path) -> dict[int, torch.Tensor]:
    """The states in this member's memory."""
    files = memory(folder, dist.get_rank()).glob("*.slot")
    return {int(file.stem): torch.load(file) for file in files}


def train(folder: Path, losses: int, steps: int) -> int:
    """Update the parity after each of some steps; returns the last one's."""
    group = join(folder, losses)
    old = None
    for step in range(1, steps + 1):
        new = keep(folder, step)
        group.update(old, new, step)
        old = new
    epoch = group.epoch
    group.close()
    assert epoch is not None
    return epoch


def recover(folder: Path, losses: int, step: int | None = None) -> Recovered:
    """Make a step's state whole, the newest unless told; a rebuilt one goes into the memory."""
    group = join(folder, losses)
    found = group.recover(
        slots(folder), lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8), step
    )
    group.close()
    member = dist.get_rank()
    torch.save(torch.from_numpy(found.data.copy()), memory(folder, member) / f"{found.epoch}.slot")
    return found


def is_state(found: Recovered, member: int) -> bool:
    """Whether a member has its state of the step bit for bit."""
    expected = state(member, found.epoch).view(torch.uint8).numpy()
    return np.array_equal(found.data, expected)


def die_at(owner: Any, name: str, call: int = 0, *, after: bool = False) -> None:
    """Let this process be killed in the so-manieth call of a method from now on."""
    method: Callable[..., Any] = getattr(owner, name)
    calls = iter(range(call + 1))

    def dying(*args: Any, **kwargs: Any) -> Any:
        due = next(calls, call) == call
        result = method(*args, **kwargs) if after or not due else None
        if due:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, dying)
