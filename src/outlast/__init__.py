"""Outlast makes a PyTorch training run finish.

Every part is a package of its own and is imported by its name, for example
``from outlast.checkpoint import CheckpointStore``. Importing ``outlast`` itself loads nothing
heavy: neither torch nor transformers. `outlast.Run` does all of it beside a training loop.
"""

from __future__ import annotations

from outlast.version import __version__

# The command line imports this first, and Ctrl-C meanwhile is Python's: `typing` can wait.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from outlast.integrations.run import Run

__all__ = ["Run", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Run":
        from outlast.integrations.run import Run

        return Run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
