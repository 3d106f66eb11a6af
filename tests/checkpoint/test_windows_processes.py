"""Late tensors among ranks, and in processes that end or die with an open window."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_meshes import fsdp
from checkpoint_states import bits, make_state, open_store, restore_step, steps_in, train
from torch import nn

from outlast.errors import CheckpointError

pytestmark = pytest.mark.distributed

Group = Callable[[int], Callable[..., list[Any]]]


def everything(name: str) -> bool:
    return True


def train_in_windows(directory: Path, coordinated: bool) -> list[dict[str, Any]]:
    """Every save's window is open during the passes of the next step, on ranks that differ."""
    dist.init_process_group("gloo")
    state = fsdp(seed=0)
    rank = dist.get_rank()
    seen, handles = [], []
    with open_store(directory, keep=9, coordinated=coordinated) as store:
        for step in range(1, 5):
            tokens = torch.randint(11, (4, 3), generator=torch.Generator().manual_seed(step))
            logits = state["model"](tokens)
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
            for handle in handles:
                handle.copied()
            for optimizer in state["optimizer"]:
                optimizer.step()
                optimizer.zero_grad()
            seen.append(bits(state))
            # What is late is each rank's own affair; the running counts are written by passes.
            handles.append(
                store.save_async(
                    step,
                    state,
                    late=lambda name: "seen" not in name and (rank == 0 or "exp" in name),
                )
            )
        assert [handle.wait().error for handle in handles] == [None] * 4
        dist.barrier()
    return seen


@pytest.mark.parametrize("coordinated", [True, False])
def test_ranks_copy_during_collectives_each_what_it_will(
    ranks: Group, tmp_path: Path, coordinated: bool
) -> None:
    seen = ranks(2)(train_in_windows, tmp_path, coordinated)[0]
    assert steps_in(tmp_path) == [1, 2, 3, 4]
    for step, expected in enumerate(seen, 1):
        state = make_state(7)
        del state["data"]
        assert restore_step(tmp_path, state, step=step) == step
        assert bits(state) == expected


def write_on_one_rank(directory: Path) -> list[str | None]:
    dist.init_process_group("gloo")
    state = fsdp(seed=0)
    with open_store(directory) as store:
        failing = store.save_async(1, state, late=everything)
        if dist.get_rank() == 1:
            with torch.no_grad():
                state["model"].embedding.weight.add_(1)
        failing.copied()
        errors = [failing.result().error]
        train(state, 1, 1)
        errors.append(store.save_async(1, state, late=everything).result().error)
        with pytest.raises(CheckpointError, match="late names the tensor `x`"):
            store.save_async(2, state, late=["x"] if dist.get_rank() else [])
        errors.append(store.save_async(2, state).result().error)
        dist.barrier()
    return errors


def test_a_write_on_one_rank_fails_the_save_of_all(ranks: Group, tmp_path: Path) -> None:
    for failed, *later in ranks(2)(write_on_one_rank, tmp_path):
        assert "`model.embedding.weight` was written before" in (failed or "")
        assert later == [None, None]
    assert steps_in(tmp_path) == [1, 2]


def replace_in_windows(directory: Path) -> list[tuple[str | None, str]]:
    dist.init_process_group("gloo")
    state = fsdp(seed=0)
    with open_store(directory, when_busy="replace") as store:
        older = store.save_async(1, state, late=everything)
        if dist.get_rank() == 0:
            older.copied()
        newer = store.save_async(2, state, late=everything)
        results = [each.result() for each in (older, newer)]
        dist.barrier()
    return [(result.error, result.skipped) for result in results]


def test_ranks_replace_a_save_that_one_of_them_has_not_copied(ranks: Group, tmp_path: Path) -> None:
    first, second = ranks(2)(replace_in_windows, tmp_path)
    assert first == second
    assert first == [(None, "a newer save replaced it"), (None, "")]
    assert steps_in(tmp_path) == [2]


PROGRAM = """
    import atexit, os, signal, sys
    import torch
    from torch import nn
    from outlast.checkpoint import CheckpointStore

    model = nn.Linear(300, 300)
    store = CheckpointStore(sys.argv[1], writer=sys.argv[2])
    with torch.no_grad():
        model.weight.fill_(1)
    store.save(1, {"model": model})
    with torch.no_grad():
        model.weight.fill_(2)
    end = sys.argv[3]
    if end == "closed at exit":
        atexit.register(store.close)
    handle = store.save_async(2, {"model": model}, late=["model.weight"])
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "fails":
        raise ValueError("in the forward pass")
"""


def run_program(directory: Path, writer: str, end: str) -> int:
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(directory), writer, end]
    done = subprocess.run(
        command,
        timeout=100,
        capture_output=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return done.returncode


@pytest.mark.parametrize(
    ("writer", "end", "code", "steps"),
    [
        ("process", "forgets", 0, [1]),
        ("thread", "fails", 1, [1]),
        ("process", "killed", -signal.SIGKILL, [1]),
        ("thread", "closed at exit", 0, [1, 2]),
        ("process", "closed at exit", 0, [1, 2]),
    ],
)
def test_a_program_that_ends_with_an_open_window(
    tmp_path: Path, writer: str, end: str, code: int, steps: list[int]
) -> None:
    assert run_program(tmp_path, writer, end) == code
    assert steps_in(tmp_path) == steps
    model = nn.Linear(300, 300)
    assert restore_step(tmp_path, {"model": model}) == steps[-1]
    assert torch.equal(model.weight, torch.full((300, 300), float(steps[-1])))
