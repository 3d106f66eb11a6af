"""The plan of a layer for a number of tokens, looked up in microseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.tensorize.planner import cache
from outlast.tensorize.planner.cache import PLANS, PRICES, TIMED
from outlast.tensorize.planner.fused import with_kernel
from outlast.tensorize.planner.price import Prices
from outlast.tensorize.planner.search import best_plan
from outlast.tensorize.planner.table import Table, default_table
from outlast.tensorize.planner.walk import middle_seconds, sparse_seconds

if TYPE_CHECKING:
    import torch

    from outlast.tensorize.network import Network
    from outlast.tensorize.plan import Plan

FORMS_WITHOUT_PLANS = ("cola", "lax", "sltrain")
"""Forms that compute something else than the product of their factors."""

PRICED_DEVICES = ("cpu", "cuda")
"""Types of devices of which there are tables."""


def plan_for(
    network: Network, tokens: int, dtype: torch.dtype, device: torch.device, learns: bool
) -> Plan:
    """The plan for a number of tokens; nothing is timed here.

    It is the fastest that was timed on this machine, if any was (`tune`); else the cheapest by this
    machine's prices, if they were measured (`calibrate`), or by built-in ones.

    Args:
        network: How the cores make the weight.
        tokens: Rows of x; rounded up to a power of two.
        dtype: Of x.
        device: Of x.
        learns: Whether there is a way back.
    """
    bucket = bucket_of(tokens)
    key = (network, bucket, dtype, device.type, learns)
    plan = PLANS.get(key)
    if plan is None:
        plan = _timed(dtype, device).get(cache.timed_key(network, bucket, learns))
        if plan is None:
            prices = prices_of(dtype, device)
            plan = best_plan(network, 1 << bucket, prices, learns)
            plan = with_kernel(
                plan, network, 1 << bucket, prices, dtype=dtype, device=device, learns=learns
            )
        PLANS[key] = plan
    return plan


def bucket_of(tokens: int) -> int:
    """The power of two that a number of tokens is rounded up to."""
    return (tokens - 1).bit_length() if tokens > 1 else 0


def keep(
    network: Network, tokens: int, dtype: torch.dtype, device: torch.device, plans: dict[bool, Plan]
) -> None:
    """Take timed plans from now on, in this process and in later ones.

    Args:
        network: Whose.
        tokens: Rows of x.
        dtype: Of x.
        device: Of x.
        plans: By whether there is a way back.
    """
    bucket = bucket_of(tokens)
    found = {cache.timed_key(network, bucket, learns): plan for learns, plan in plans.items()}
    _timed(dtype, device).update(found)
    for learns, plan in plans.items():
        PLANS[network, bucket, dtype, device.type, learns] = plan
    # A later process would have to tune kernels first.
    lasting = {key: plan for key, plan in found.items() if not plan.fused}
    cache.store_timed(*_setting(dtype, device), lasting)


def _timed(dtype: torch.dtype, device: torch.device) -> dict[str, Plan]:
    key = device.type, str(dtype).removeprefix("torch.")
    known = TIMED.get(key)
    if known is None:
        known = TIMED[key] = cache.load_timed(*_setting(dtype, device))
    return known


def predicted_speedup(
    network: Network, tokens: int, dtype: torch.dtype, device: torch.device, learns: bool = True
) -> float:
    """Seconds of the dense layer over those of the plan, predicted or timed."""
    plan = plan_for(network, tokens, dtype, device, learns)
    return plan.dense_seconds / plan.seconds


def extra_seconds(
    form: str,
    network: Network,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    activated: bool = False,
    entries: int = 0,
) -> float:
    """Predicted seconds that a layer takes beyond the plan of its factors, with a way back.

    Zero for forms that are computed along their plan: all but `FORMS_WITHOUT_PLANS`.

    Args:
        form: See `outlast.tensorize.catalogue.FORMS`.
        network: Of the layer's factors.
        tokens: Rows of x; rounded up to a power of two.
        dtype: Of x.
        device: Of x.
        activated: Whether there is a nonlinearity in the middle.
        entries: Of the sparse part.
    """
    if form not in FORMS_WITHOUT_PLANS:
        return 0.0
    prices, rows = prices_of(dtype, device), 1 << bucket_of(tokens)
    if form == "sltrain":
        own = plan_for(network, tokens, dtype, device, True).seconds
        return sparse_seconds(network, rows, entries, prices) - own
    crossing = form == "lax"
    return middle_seconds(network, rows, prices, activated=activated, crossing=crossing)


def basis_of(dtype: torch.dtype, device: torch.device, *, timed: bool) -> str:
    """How the speeds of layers on a device are known."""
    if device.type not in PRICED_DEVICES:
        return f"unknown on {device.type} devices, which nothing was measured on"
    if timed:
        return "timed on this machine"
    table = prices_of(dtype, device).table
    if table.measured:
        return "predicted from what this machine was measured to take"
    return (
        f"predicted by the package's own table of costs ({table.machine}), for this machine is not "
        "calibrated: calibrate = True measures it"
    )


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
    if device.type not in PRICED_DEVICES:
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
    return cache.load(*_setting(dtype, device))


def _setting(dtype: torch.dtype, device: torch.device) -> tuple[str, str, int, str]:
    """What a table or a timed plan is for: machine, dtype, threads and version of torch."""
    import torch

    threads = torch.get_num_threads() if device.type == "cpu" else 0
    return machine_of(device), str(dtype).removeprefix("torch."), threads, torch.__version__
