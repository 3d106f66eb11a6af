"""Giving clocks back that another process left locked."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from outlast.energy.control.lease import check_directory, lease_directory, read_lease
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from outlast.energy.control.controller import Controller
    from outlast.energy.control.lease import Lease


def opened(description: Mapping[str, str]) -> Controller:
    """The controller that a lease describes.

    Raises:
        EnergyError: When its kind is unknown or it cannot be reached.
    """
    from outlast.energy.control.nvml import NvmlController
    from outlast.energy.control.zeusd import Zeusd, ZeusdController

    kind = description.get("kind")
    if kind == "nvml":
        return NvmlController(description["uuid"])
    if kind == "zeusd":
        return ZeusdController(description["uuid"], Zeusd(description["socket"]))
    raise EnergyError(f'a lease names the controller "{kind}"; known are nvml and zeusd')


def restore(
    path: Path, *, force: bool = False, open_controller: Callable[..., Controller] = opened
) -> Lease:
    """Give back what a lease holds, then remove it: what ``outlast energy restore`` does.

    Doing it twice does no harm. Where a device cannot be given back the lease stays.

    Args:
        path: The lease file.
        force: Also when its process lives.
        open_controller: Makes a controller from its description.

    Returns:
        The lease that was removed.

    Raises:
        EnergyError: When there is no lease, it is another user's, its process lives and its time
            is not over, or a device cannot be given back.
    """
    lease = read_lease(path)
    if lease is None:
        raise EnergyError(f"there is no lease {path}: nothing is to be restored")
    if lease.alive and not lease.expired and not force:
        raise EnergyError(
            f"process {lease.pid} on {lease.host} holds the lease {path} and is alive: end it, or "
            "restore with --force"
        )
    failures = []
    for held in lease.devices:
        limited = held.power_watts is not None
        try:
            open_controller(held.controller).restore(
                held.previous_power_watts if limited else None, clock=held.clock_mhz is not None
            )
        except EnergyError as error:
            failures.append(str(error))
    if failures:
        raise EnergyError(
            f"the lease {path} stays, for clocks or power limits are still set: "
            f"{'; '.join(failures)}"
        )
    lease.withdraw(path)
    return lease


def leases(directory: Path | None = None) -> tuple[Path, ...]:
    """This user's lease files in a directory, by name; in the default place when none is given.

    Raises:
        EnergyError: When others could have put leases into the default place.
    """
    place = directory or lease_directory()
    if directory is None and os.path.lexists(place):
        check_directory(place)
    files = sorted(place.glob("*.json"))
    # A file of another user is no lease of this one; one that has just gone neither.
    return tuple(path for path in files if path.exists() and path.stat().st_uid == os.getuid())
