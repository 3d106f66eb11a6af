"""Running a rewritten script as plain Python would run it.

Objects are named when set-up is done, and what has a name need not be written down as a whole.
FSDP2 makes hooks, buffers and settings of its modules in their first forward pass: made before it,
they are there in every start of the program, and have names.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import types
import weakref
from importlib.machinery import SourceFileLoader
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from outlast.autosave.program.source import RUNTIME, rewritten_imports
from outlast.autosave.resume.files import Logs, reopened_logs
from outlast.autosave.resume.iterators import resumable_bars
from outlast.autosave.resume.loaders import resumable_loaders
from outlast.autosave.resume.process import visible_caches
from outlast.autosave.resume.session import Session
from outlast.errors import EXIT_CRASHED, AutosaveError, OutlastError

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import FrameType

    from outlast.autosave.heap.capture import Captured
    from outlast.autosave.heap.tensors import GradientUse
    from outlast.autosave.program.source import Rewritten, SourceFile
    from outlast.autosave.resume.files import FirstSizes


class ShardedModules:
    """The modules that FSDP2 has sharded, when set-up is done."""

    def __init__(self) -> None:
        # By their types, since asking an object for its class may run code of its own.
        found = (
            [object_ for object_ in gc.get_objects() if issubclass(type(object_), FSDPModule)]
            if dist.is_available() and dist.is_initialized()
            else []
        )
        self._modules = [weakref.ref(name) for name in found]
        inner = {id(part) for name in found for part in name.modules() if part is not name}
        for module in found:
            if id(module) not in inner:
                # As its first forward pass does, and with the same outcome.
                module._get_fsdp_state()._lazy_init()

    def reshard(self) -> None:
        """Give up parameters that a forward pass without a backward pass has left gathered."""
        for name in self._modules:
            module = name()
            if module is not None:
                module.reshard()


_INTERRUPTED = 130
"""What a shell sees of a process that Ctrl-C has ended."""


class SavedState(NamedTuple):
    """State that a keeper restores.

    Attributes:
        captured: What was in memory.
        logs: Path of each log to its size in bytes.
    """

    captured: Captured
    logs: dict[str, int]


class ScriptKeeper(Protocol):
    """Decides when to save a script, does it, and brings it back."""

    def due(self, step: int) -> bool:
        """Return True if the state is to be saved after `step` steps."""

    def save(self, step: int, state: SavedState) -> None:
        """Save; returns when the tensors may change again."""

    def digest(self, step: int, text: str) -> str | None:
        """Keep the digest of a step soon after a save, or give the one that is there."""

    def saved(self) -> SavedState | None:
        """Return the state to resume from, when set-up is done; None starts from the beginning."""

    def left(self, step: int) -> None:
        """A training loop has come to its end after `step` steps."""

    def note(self, sentence: str) -> None:
        """Tell people of something that is not saved."""

    def failed(self, error: OutlastError) -> None:
        """Remember why the program must not go on; its script may catch the error itself."""


class _KeeperWithLogs:
    """Saves the places of the program's logs with its memory."""

    def __init__(self, keeper: ScriptKeeper, logs: Logs) -> None:
        self.due = keeper.due
        self.digest = keeper.digest
        self.left = keeper.left
        self.note = keeper.note
        self._keeper = keeper
        self._logs = logs

    def save(self, step: int, captured: Captured) -> None:
        """Save; returns when the tensors may change again."""
        self._keeper.save(step, SavedState(captured, self._logs.sizes()))


class _LateSession(Session):
    """A session that asks for what was saved when it is needed.

    By then the script has made its process group, so that all ranks choose the same version.
    """

    def __init__(
        self,
        files: list[Rewritten],
        keeper: ScriptKeeper,
        logs: Logs,
        gradients: GradientUse | None,
    ) -> None:
        super().__init__(files, _KeeperWithLogs(keeper, logs), gradients=gradients)
        self._resuming = keeper
        self._sharded: ShardedModules | None = None
        self._logs = logs

    def _begin(self, frame: FrameType) -> None:
        self._sharded = ShardedModules()
        with self._noted("the program's state could not be brought back"):
            saved = self._resuming.saved()
            self._saved = None if saved is None else saved.captured
            super()._begin(frame)
            self._logs.cut_back(None if saved is None else saved.logs)

    def _capture(self, number: int, frame: FrameType) -> Captured:
        if self._sharded is not None:
            self._sharded.reshard()
        with self._noted("the program's state could not be captured"):
            return super()._capture(number, frame)

    def _compare(self, step: int) -> None:
        with self._noted("a step of the program could not be compared"):
            super()._compare(step)

    def _lost(self) -> AutosaveError:
        error = super()._lost()
        self._resuming.failed(error)
        return error

    @contextlib.contextmanager
    def _noted(self, what: str) -> Iterator[None]:
        """Tell the keeper of an error, since the script may catch it."""
        try:
            yield
        except OutlastError as error:
            self._resuming.failed(error)
            raise
        except Exception as error:
            self._resuming.failed(AutosaveError(f"{what} ({type(error).__name__}: {error})"))
            raise


def execute(
    script: Path,
    files: list[Rewritten],
    arguments: Sequence[str],
    keeper: ScriptKeeper,
    *,
    resuming: bool,
    first_sizes: FirstSizes | None = None,
    gradients: GradientUse | None = None,
) -> int:
    """Run a program to its end.

    The script finds what it finds under ``python script.py``: its own `__main__`, its arguments,
    its folder first on the path. Its traceback begins with its own first line. When it ends,
    `__main__` stays in place, for functions that it has registered to be called at the exit.

    Args:
        script: The script as the command line names it.
        files: The program, the script first.
        arguments: Of the script.
        keeper: Saves its state, and brings it back.
        resuming: Whether there may be a state to go back to, so that set-up must empty no log.
        first_sizes: What the logs were before the run; None knows of none.
        gradients: Tells which gradients need not be saved; None learns it from the first steps.

    Returns:
        The exit code that the script would have had; 0 when it has come to its end.

    Raises:
        OutlastError: Raised on the way, or when the way back to where it was saved is not found.
    """
    root = files[0].source.path.parent
    logs_reopened = reopened_logs(resuming, root, first_sizes)
    with logs_reopened as logs, resumable_loaders(), resumable_bars():
        session = _LateSession(files, keeper, logs, gradients)
        own = frozenset(str(file.source.path) for file in files)
        imports = rewritten_imports(files[1:], session)
        with imports, visible_caches(own), contextlib.closing(session):
            return _execute(script, files[0].source, files[0].tree, arguments, session)


def execute_plainly(script: Path, source: SourceFile, arguments: Sequence[str]) -> int:
    """As `execute`, for a script as it is, which somebody else saves and resumes."""
    return _execute(script, source, source.tree, arguments, None)


def _execute(
    script: Path,
    source: SourceFile,
    tree: ast.Module,
    arguments: Sequence[str],
    session: Session | None,
) -> int:
    real = source.path
    # The script's __main__, as Python makes it.
    module = types.ModuleType("__main__")
    module.__file__ = str(script.absolute())
    module.__loader__ = SourceFileLoader("__main__", str(script.absolute()))
    module.__dict__["__cached__"] = None
    module.__dict__["__builtins__"] = sys.modules["builtins"]
    if session is not None:
        module.__dict__[RUNTIME] = session
    sys.modules["__main__"] = module
    sys.argv = [str(script), *arguments]
    if not sys.flags.safe_path:
        # Python has put the folder there of the program that runs the script.
        sys.path[0] = str(real.parent)
    code = compile(tree, str(real), "exec", dont_inherit=True)
    try:
        exec(code, module.__dict__)
    except SystemExit as ended:
        code_given: Any = ended.code
        if code_given is None:
            status = 0
        elif isinstance(code_given, int):
            status = code_given & 0xFF
        else:
            # A text is printed, as Python does.
            print(code_given, file=sys.stderr, flush=True)
            status = 1
        if status == 0 and session is not None:
            session.finish()
        return status
    except OutlastError:
        raise
    except BaseException as error:
        # Hand the script's error to `sys.excepthook`, without the frames that led to the script.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        error.__traceback__ = trace
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
        sys.excepthook(type(error), error, trace)
        return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_CRASHED
    if session is not None:
        session.finish()
    return 0
