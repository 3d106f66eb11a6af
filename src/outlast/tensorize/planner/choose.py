"""The plan of a layer for a number of tokens, looked up in microseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.tensorize.planner import cache
from outlast.tensorize.planner.cache import PLANS, PRICES
from outlast.tensorize.planner.price import Prices
from outlast.tensorize.planner.search import best_plan
from outlast.tensorize.planner.table import Table, default_table

if TYPE_CHECKING:
    import torch

    from outlast.tensorize.network import Network
    from outlast.tensorize.plan import Plan


def plan_for(
    network: Network, tokens: int, dtype: torch.dtype, device: torch.device, learns: bool
) -> Plan:
    """The plan for a number of tokens; nothing is timed here.

    Prices come from this machine's table if there is one (`calibrate`), else from a built-in one.

    Args:
        network: How the cores make the weight.
        tokens: Rows of x; rounded up to a power of two.
        dtype: Of x.
        device: Of x.
        learns: Whether there is a way back.
    """
    bucket = (tokens - 1).bit_length() if tokens > 1 else 0
    key = (network, bucket, dtype, device.type, learns)
    plan = PLANS.get(key)
    if plan is None:
        plan = best_plan(network, 1 << bucket, prices_of(dtype, device), learns)
        PLANS[key] = plan
    return plan


def predicted_speedup(
    network: Network, tokens: int, dtype: torch.dtype, device: torch.device, learns: bool = True
) -> float:
    """Predicted seconds of the dense layer over those of the plan; above one is faster."""
    plan = plan_for(network, tokens, dtype, device, learns)
    return plan.dense_seconds / plan.seconds


def prices_of(dtype: torch.dtype, device: torch.device) -> Prices:
    """What operations cost on a device: measured if that was done, else built in."""
    name = str(dtype).removeprefix("torch.")
    known = PRICES.get((device.type, name))
    if known is None:
        table = _stored(dtype, device) or default_table(device.type, name)
        known = PRICES[device.type, name] = Prices(table)
    return known


def use(table: Table, device: str) -> None:
    """Take a table from now on; what was planned before is planned again."""
    PRICES[device, table.dtype] = Prices(table)
    PLANS.clear()


def calibrate(dtype: torch.dtype, device: torch.device, *, anew: bool = False) -> Table:
    """Measure what operations cost on this machine, unless a file says it.

    Takes about ten seconds of one core, once per machine, dtype, number of threads and version of
    torch. Call it before training; a step never does.

    Args:
        dtype: Of activations.
        device: Where layers will run.
        anew: Measure even if there is a file.

    Returns:
        The table; a built-in one for devices that are neither a CPU nor CUDA's.
    """
    if device.type not in ("cpu", "cuda"):
        return prices_of(dtype, device).table
    from outlast.tensorize.planner.measure import measure

    table = None if anew else _stored(dtype, device)
    if table is None:
        table = measure(dtype, device, machine_of(device))
        cache.store(table)
    use(table, device.type)
    return table


def machine_of(device: torch.device) -> str:
    """What a device is called: a GPU's model, or the machine of a CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device) if torch.cuda.is_available() else "no GPU"
    from outlast.hardware import this_machine

    return this_machine().summary()


def _stored(dtype: torch.dtype, device: torch.device) -> Table | None:
    import torch

    threads = torch.get_num_threads() if device.type == "cpu" else 0
    name = str(dtype).removeprefix("torch.")
    return cache.load(machine_of(device), name, threads, torch.__version__)
