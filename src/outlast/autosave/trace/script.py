"""The oracle for a script: is a resumed run the same as one that was not interrupted, bit for bit?

The script runs in processes of its own: once to its save and on, once from the save on, and once
with nothing but what `state_dict()` gives. Only when the first two differ it runs once more
uninterrupted, to tell what differs anyway (clocks, or a script that is not deterministic).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.autosave.program.sites import RUNTIME
from outlast.autosave.trace.differences import Difference, differences, first_differences
from outlast.autosave.trace.passes import TRACED_STEPS, Kind, Order, Result, read, write
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.autosave.trace.state import StatePlan

_ITERATOR = f"['{RUNTIME.rstrip('_')}_"
_START = "import sys; from outlast.autosave.trace.passes import main; sys.exit(main(sys.argv[1]))"


@dataclass(frozen=True)
class ScriptReplay:
    """What came of replaying a script.

    Attributes:
        plan: The classes of its tensors at the save.
        at: Steps done at the save.
        steps: Steps compared.
        tensors: Tensors compared after each step.
        values: Other values compared after each step.
        differences: What the resumed run had differently.
        unsteady: Names that differ between two uninterrupted runs, too.
        lost_tensors: Live tensors that `state_dict()` alone does not bring back.
        lost_values: Plain values that it does not bring back.
        saved_bytes: Of the save.
        process_bytes: Memory of the process at the save.
    """

    plan: StatePlan
    at: int
    steps: int
    tensors: int
    values: int
    differences: tuple[Difference, ...]
    unsteady: tuple[str, ...]
    lost_tensors: tuple[str, ...]
    lost_values: tuple[Difference, ...]
    saved_bytes: int
    process_bytes: int

    @property
    def identical(self) -> bool:
        """Whether nothing was lost, as far as the script itself is the same every time."""
        return not self.differences


def replay_script(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    at: int = 4,
    steps: int = 3,
    timeout_seconds: float = 600.0,
    loop: str | None = None,
) -> ScriptReplay:
    """Save `script` after `at` steps, go on for `steps`, and do so again from the save.

    Args:
        script: The script; what it writes to files, it writes in each pass.
        arguments: Of the script.
        at: Steps before the save, at least 3.
        steps: Steps to compare, at least 1.
        timeout_seconds: Wall time that one pass may take.
        loop: ``FILE:LINE`` of its step loop; None finds it.

    Raises:
        AutosaveError: When the script fails, is too short, or cannot be resumed at all.
    """
    if at < TRACED_STEPS or steps < 1:
        raise AutosaveError(
            f"a replay after {at} steps over {steps} steps shows nothing; use at least "
            f"{TRACED_STEPS} steps before it and 1 to compare"
        )
    with tempfile.TemporaryDirectory(prefix="outlast-replay-") as folder:
        order = Order("record", str(script), tuple(arguments), at, steps, folder, "", loop)
        passes = _Passes(order, timeout_seconds)
        original = passes.run("record")
        resumed = passes.run("resume")
        plain = passes.run("state_dict")
        found = [*_compared(original, resumed)]
        unsteady: set[str] = set()
        if found:
            again = passes.run("record")
            # A clock's value may differ. A tensor may not: in a script without a seed all do, and
            # what is lost could not be told from them.
            unsteady = {difference.name for difference in _compared(original, again)} - {
                difference.name for difference in first_differences(original.tensors, again.tensors)
            }
    return _judged(original, plain, passes, found, unsteady)


def _compared(original: Result, other: Result) -> list[Difference]:
    """What differs of the script's own.

    A resumed iterator may know more than one that was never stopped, such as the states that its
    workers began with; what it knows must not differ.
    """
    return [
        *first_differences(original.tensors, other.tensors),
        *(
            difference
            for difference in first_differences(original.values, other.values)
            if (difference.expected and difference.found) or _ITERATOR not in difference.name
        ),
    ]


def _judged(
    original: Result,
    plain: Result,
    passes: _Passes,
    found: list[Difference],
    unsteady: set[str],
) -> ScriptReplay:
    plan = original.plan
    assert plan is not None
    needed = {
        name
        for tensor in plan.tensors
        if tensor.kind in ("must-save", "save-once")
        for name in (tensor.name, *tensor.aliases)
    }
    lost = differences(passes.at, original.held, plain.held)
    return ScriptReplay(
        plan=plan,
        at=passes.at,
        steps=passes.steps,
        tensors=len(original.tensors[passes.at + 1]),
        values=len(original.values[passes.at + 1]),
        differences=tuple(difference for difference in found if difference.name not in unsteady),
        unsteady=tuple(sorted(unsteady & {difference.name for difference in found})),
        lost_tensors=tuple(name.name for name in lost if name.expected and name.name in needed),
        lost_values=tuple(
            difference
            for difference in differences(passes.at, original.plain, plain.plain)
            if difference.expected
        ),
        saved_bytes=original.saved_bytes,
        process_bytes=original.process_bytes,
    )


class _Passes:
    """Runs passes over one script."""

    def __init__(self, order: Order, timeout_seconds: float) -> None:
        self.at = order.at
        self.steps = order.steps
        self._order = order
        self._script = order.script
        self._folder = Path(order.folder)
        self._timeout_seconds = timeout_seconds
        self._count = 0

    def run(self, kind: Kind) -> Result:
        """One pass, to its end.

        Raises:
            AutosaveError: When it does not come to its end.
        """
        self._count += 1
        order = self._folder / f"order{self._count}"
        result = self._folder / f"result{self._count}"
        write(order, replace(self._order, kind=kind, result=str(result)))
        command = [sys.executable, "-c", _START, str(order)]
        output = self._folder / f"output{self._count}"
        try:
            with output.open("wb") as file:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=self._timeout_seconds,
                    check=False,
                )
        except subprocess.TimeoutExpired:
            raise AutosaveError(
                f"{self._script} did not come to step {self.at + self.steps} within "
                f"{self._timeout_seconds:g} s; allow more, or check fewer steps"
            ) from None
        return self._result(kind, done.returncode, result, output)

    def _result(self, kind: Kind, status: int, result: Path, output: Path) -> Result:
        if result.exists():
            found: Result = read(result)
            if found.error:
                raise AutosaveError(found.error)
            return found
        words = output.read_text(errors="replace").strip().splitlines()
        if status:
            raise AutosaveError(
                f"{self._script} ended with exit code {status} in the pass {kind!r} before step "
                f"{self.at + self.steps}: {words[-1] if words else 'it printed nothing'}"
            )
        raise AutosaveError(
            f"{self._script} ended before step {self.at + self.steps}; check fewer steps"
        )
