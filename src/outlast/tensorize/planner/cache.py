"""Plans and prices in memory, and tables in files for later runs."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.tensorize.planner.table import Table

if TYPE_CHECKING:
    import torch

    from outlast.tensorize.network import Network
    from outlast.tensorize.plan import Plan
    from outlast.tensorize.planner.price import Prices

# By network, bucket of tokens, dtype, kind of device, and whether there is a way back.
PLANS: dict[tuple[Network, int, torch.dtype, str, bool], Plan] = {}
# By kind of device and dtype.
PRICES: dict[tuple[str, str], Prices] = {}


def forget() -> None:
    """Forget all plans and tables in memory; files stay."""
    PRICES.clear()
    PLANS.clear()


def directory() -> Path:
    """Where the tables lie: in OUTLAST_CACHE, else in XDG_CACHE_HOME, else in ~/.cache."""
    own = os.environ.get("OUTLAST_CACHE")
    if own:
        return Path(own) / "tensorize"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "outlast" / "tensorize"


def file_of(machine: str, dtype: str, threads: int, torch: str) -> Path:
    """The file of one table."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{machine} {dtype} {threads}t torch {torch}").strip("-")
    return directory() / f"{name}.json"


def load(machine: str, dtype: str, threads: int, torch: str) -> Table | None:
    """The table of a file; None if there is none, or it is damaged or of something else."""
    try:
        content = json.loads(file_of(machine, dtype, threads, torch).read_text())
        table = Table.from_json(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    mine = (table.machine, table.dtype, table.threads, table.torch)
    return table if table.measured and mine == (machine, dtype, threads, torch) else None


def store(table: Table) -> Path | None:
    """Write a table; None if the directory cannot be written, for then each run measures anew."""
    path = file_of(table.machine, table.dtype, table.threads, table.torch)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    except OSError:
        return None
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(table.to_json(), file)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        return None
    return path
