"""Replay of a step function, which shows whether its state plan is right.

A first process makes the program, finds its state, saves it by the plan and continues. A second one
makes the program anew, takes over what was saved and continues. What the plan calls derivable is
left as set-up made it, and what it calls dead is filled with nonsense, so that a wrong class shows.
"""

from __future__ import annotations

import io
import multiprocessing
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from outlast.autosave.heap.capture import Captured, capture, restore
from outlast.autosave.heap.names import Names
from outlast.autosave.resume.process import random_states, set_random_states
from outlast.autosave.script_replay import Difference, first_differences
from outlast.autosave.state_plan import (
    StatePlan,
    find_state,
    named_roots,
    program_modules,
    reached,
    readable_names,
)
from outlast.autosave.step_trace import digests, storage_key
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

_NONSENSE = 0x5A

Program = tuple["Callable[[], Any]", Any]
"""A step and the roots of its state, as `find_state` takes them."""


@dataclass(frozen=True)
class Replay:
    """Result of replaying a step function.

    Attributes:
        plan: That was checked.
        tensors: Tensors compared after each step.
        differences: What the second process had differently.
    """

    plan: StatePlan
    tensors: int
    differences: tuple[Difference, ...]

    @property
    def identical(self) -> bool:
        """Return True if all tensors were the same, bit for bit."""
        return not self.differences


def replay(
    set_up: Callable[[], Program],
    steps: int = 3,
    *,
    start: Literal["spawn", "fork"] = "spawn",
    timeout_seconds: float = 600.0,
) -> Replay:
    """Check the plan of a step function in two processes.

    Args:
        set_up: Makes the step and its roots, the same in every process; with "spawn" a function
            that can be imported.
        steps: Steps to compare.
        start: How the processes are started; "fork" is faster where no thread runs yet.
        timeout_seconds: How long each may take.

    Raises:
        AutosaveError: When one of them fails.
    """
    first = _in_process(start, timeout_seconds, _original, set_up, steps)
    plan, saved, expected = first
    found = _in_process(start, timeout_seconds, _resumed, set_up, steps, saved)
    return Replay(
        plan=plan, tensors=len(expected[1]), differences=tuple(first_differences(expected, found))
    )


def _original(set_up: Callable[[], Program], steps: int) -> Any:
    step, roots = set_up()
    names = _names(step, roots)
    plan = find_state(step, roots)
    captured = capture(names, (random_states(), named_roots(step, roots)), {})
    kinds = {
        storage_key(item): plan.find(path).kind
        for path, item in reached(step, roots).items()
        if isinstance(item, torch.Tensor)
        and any(path in (tensor.name, *tensor.aliases) for tensor in plan.tensors)
    }
    kept = {}
    for name, tensor in captured.tensors.items():
        kind = kinds.get(storage_key(tensor), "must-save")
        if kind == "derivable" and name.removeprefix("=") in names.objects:
            continue
        kept[name] = tensor.clone()
        if kind == "dead":
            kept[name].view(torch.uint8).fill_(_NONSENSE)
    saved = io.BytesIO()
    torch.save((captured.program, kept, set(captured.tensors) - set(kept)), saved)
    return plan, saved.getvalue(), _digests_of_steps(step, roots, steps)


def _resumed(set_up: Callable[[], Program], steps: int, saved: bytes) -> Any:
    step, roots = set_up()
    names = _names(step, roots)
    program, tensors, derived = torch.load(io.BytesIO(saved), weights_only=False)
    for name in derived:
        # Not saved: it stays as set-up has made it here.
        tensors[name] = _row(names.objects[name.removeprefix("=")]).clone()
    states, _ = restore(Captured(program, tensors), names, {})
    set_random_states(states)
    return _digests_of_steps(step, roots, steps)


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """The storage of a tensor, as one row."""
    storage = tensor.untyped_storage()
    row = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return row.set_(storage, 0, (storage.nbytes() // tensor.element_size(),))  # type: ignore[call-overload,no-any-return]


def _names(step: Callable[[], Any], roots: Any) -> Names:
    named = named_roots(step, roots)
    return Names(named, program_modules(named))


def _digests_of_steps(step: Callable[[], Any], roots: Any, steps: int) -> dict[int, dict[str, str]]:
    found = {}
    for number in range(1, steps + 1):
        step()
        objects = reached(step, roots)
        called = readable_names(objects)
        found[number] = {
            called.get(id(objects[path]), path): digest for path, digest in digests(objects).items()
        }
    return found


def _in_process(start: str, timeout_seconds: float, work: Callable[..., Any], *args: Any) -> Any:
    """Do `work` in a process of its own; gives what it returns."""
    context = multiprocessing.get_context(start)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(theirs, work, args))  # type: ignore[attr-defined]
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout_seconds):
            raise AutosaveError(f"the replay did not end within {timeout_seconds:g} s")
        well, result = ours.recv()
    except EOFError:
        raise AutosaveError("the process of a replay died without a word") from None
    finally:
        process.kill()
        process.join()
    if not well:
        raise AutosaveError(f"the step function failed in its replay: {result}")
    return result


def _tell(pipe: Connection, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        pipe.send((True, work(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc().strip().splitlines()[-1]))
