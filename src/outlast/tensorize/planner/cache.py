"""Plans and prices in memory, and tables and timed plans in files for later runs."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.tensorize.network import Route
from outlast.tensorize.plan import Plan
from outlast.tensorize.planner.table import Table

if TYPE_CHECKING:
    import torch

    from outlast.tensorize.network import Network
    from outlast.tensorize.planner.price import Prices

# By network, bucket of tokens, dtype, kind of device, and whether there is a way back.
PLANS: dict[tuple[Network, int, torch.dtype, str, bool], Plan] = {}
# By kind of device and dtype.
PRICES: dict[tuple[str, str], Prices] = {}
# Timed plans by kind of device and dtype, and then by `timed_key`.
TIMED: dict[tuple[str, str], dict[str, Plan]] = {}
_TIMED_VERSION = 1


def forget() -> None:
    """Forget all plans and tables in memory; files stay."""
    PRICES.clear()
    PLANS.clear()
    TIMED.clear()


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
    return path if _write(path, table.to_json()) else None


def _write(path: Path, content: dict[str, Any]) -> bool:
    """Write a file, so that no other process ever reads half of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    except OSError:
        return False
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        return False
    return True


def timed_key(network: Network, bucket: int, learns: bool) -> str:
    """What a timed plan is found by in its file."""
    return f"{network}; up to 2^{bucket} tokens; {'learns' if learns else 'forward'}"


def _timed_file(machine: str, dtype: str, threads: int, torch: str) -> Path:
    path = file_of(machine, dtype, threads, torch)
    return path.with_name(f"{path.stem}-plans.json")


def load_timed(machine: str, dtype: str, threads: int, torch: str) -> dict[str, Plan]:
    """The timed plans of a file by `timed_key`; those that can be read."""
    try:
        content = json.loads(_timed_file(machine, dtype, threads, torch).read_text())
        of = content["version"], content["machine"]
        plans = content["plans"] if of == (_TIMED_VERSION, machine) else {}
        return {key: _plan(entry) for key, entry in plans.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def store_timed(machine: str, dtype: str, threads: int, torch: str, plans: dict[str, Plan]) -> None:
    """Add timed plans to a file; those that another process writes meanwhile may be lost."""
    known = {**load_timed(machine, dtype, threads, torch), **plans}
    entries = {key: _entry(plan) for key, plan in known.items()}
    content = {"version": _TIMED_VERSION, "machine": machine, "plans": entries}
    _write(_timed_file(machine, dtype, threads, torch), content)


def _entry(plan: Plan) -> dict[str, Any]:
    routes = (plan.forward, plan.input_gradient, *plan.core_gradients)
    return {
        "routes": [[route.groups, route.backwards, route.layout, route.chunk] for route in routes],
        "plain": plan.plain,
        "seconds": plan.seconds,
        "dense_seconds": plan.dense_seconds,
        "reason": plan.reason,
    }


def _plan(entry: dict[str, Any]) -> Plan:
    routes = [Route(tuple(groups), *rest) for groups, *rest in entry["routes"]]
    forward, back, *others = routes
    return Plan(
        forward,
        back,
        tuple(others),
        bool(entry["plain"]),
        seconds=float(entry["seconds"]),
        dense_seconds=float(entry["dense_seconds"]),
        timed=True,
        reason=str(entry["reason"]),
    )
