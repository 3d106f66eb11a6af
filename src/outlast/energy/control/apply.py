"""Clocks and power limits for the length of a ``with`` block, whatever ends it.

with applied(1200, NvmlController(uuid), lease_path(uuid)):
    train()
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from outlast.energy.control.controller import DryRun
from outlast.energy.control.guarded import guarded
from outlast.energy.control.lease import Held, Lease, read_lease
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outlast.energy.control.controller import Controller
    from outlast.energy.frontier.plan import ClockPlan
    from outlast.energy.schedule.dag import Schedule


class _Part(NamedTuple):
    """One thing that can be set: of which device, and its field in `Held`."""

    device: int
    field: Literal["clock_mhz", "power_watts"]


@dataclass(frozen=True, slots=True)
class Setting:
    """What a device shall run with.

    Attributes:
        clock_mhz: SM clock; None leaves it to the driver.
        power_watts: Power limit; None leaves it as it is.
    """

    clock_mhz: int | None = None
    power_watts: float | None = None

    def __post_init__(self) -> None:
        """Refuse a setting that sets nothing.

        Raises:
            EnergyError: When both are None.
        """
        if self.clock_mhz is None and self.power_watts is None:
            raise EnergyError("neither clock_mhz nor power_watts is given: nothing would be set")


def device_settings(plan: ClockPlan, schedule: Schedule) -> tuple[Setting, ...]:
    """The one setting of each device in a plan with one clock per device or stage.

    Raises:
        EnergyError: When a device changes its clock within the step, or has none.
    """
    clocks: list[set[int]] = [set() for _ in range(schedule.devices)]
    for operation, clock_mhz in zip(schedule.operations, plan.clocks_mhz, strict=True):
        if clock_mhz and operation.device >= 0:
            clocks[operation.device].add(clock_mhz)
    for device, found in enumerate(clocks):
        if len(found) != 1:
            raise EnergyError(
                f"device {device} has {len(found)} clocks in the plan, and one can be applied: "
                "plan with switches = none or per_stage, or play it with ClockPlayback"
            )
    return tuple(Setting(found.pop()) for found in clocks)


class Applied:
    """Settings in force. The only way to change a clock while they are.

    Attributes:
        lease_path: The lease file; None for a dry run.
    """

    def __init__(
        self, controllers: Sequence[Controller], lease: Lease, lease_path: Path | None
    ) -> None:
        self.lease_path = lease_path
        self._controllers = tuple(controllers)
        self._lease = lease
        self._lock = threading.RLock()
        self._tried: set[_Part] = set()
        self._changed: set[_Part] = set()
        self._over = False
        self._given_back = False

    @property
    def over(self) -> bool:
        """Whether the settings have been given back: from now on clocks are left alone."""
        return self._over

    def lock_clock(self, clock_mhz: int, device: int = 0) -> bool:
        """Change the clock of one of the devices.

        Returns:
            Whether it was set: not after the settings were given back, for then nobody would give
            this one back.

        Raises:
            EnergyError: When it cannot be set.
        """
        change = partial(self._controllers[device].lock_clock, clock_mhz)
        return self._change(_Part(device, "clock_mhz"), clock_mhz, change)

    def limit_power(self, watts: float, device: int = 0) -> bool:
        """Change the power limit of one of the devices; as `lock_clock`.

        Raises:
            EnergyError: When it cannot be set, or the limit before could not be read.
        """
        held = self._lease.devices[device]
        if held.previous_power_watts is None and self.lease_path is not None:
            raise EnergyError(
                f"the power limit of {held.uuid} before could not be read, so power_watts = "
                f"{watts:g} could not be taken back: change its clock only"
            )
        change = partial(self._controllers[device].limit_power, watts)
        return self._change(_Part(device, "power_watts"), watts, change)

    def _change(self, part: _Part, value: float, change: Callable[[], None]) -> bool:
        with self._lock:
            if self._over:
                return False
            self._record(part, value)
            self._tried.add(part)
            change()
            self._changed.add(part)
            if self.over:
                # A signal came in between, and what it gave back has just been set again.
                self._restore_devices()
                if self.lease_path is not None:
                    self._lease.withdraw(self.lease_path)
            return not self.over

    def _record(self, part: _Part, value: float) -> None:
        """Have the lease say that this is set, before it is set for the first time."""
        devices = list(self._lease.devices)
        held = devices[part.device]
        if getattr(held, part.field) is not None:
            return
        if part.field == "clock_mhz":
            devices[part.device] = replace(held, clock_mhz=int(value))
        else:
            devices[part.device] = replace(held, power_watts=value)
        lease = replace(self._lease, devices=tuple(devices))
        if self.lease_path is not None:
            lease.rewrite(self.lease_path)
        self._lease = lease

    def give_back(self) -> None:
        """Restore what was changed, nothing else, and remove the lease. Later calls do nothing.

        A child process that was forked from the one that holds the lease gives nothing back, and a
        lease that another process has taken over meanwhile is not touched.

        Raises:
            EnergyError: When a device could not be restored; the lease then stays.
        """
        if os.getpid() != self._lease.pid:
            return
        with self._lock:
            self._over = True
            # A signal may have interrupted an earlier call: only a finished one counts.
            if self._given_back:
                return
            if not self._taken_over():
                self._restore_devices()
                if self.lease_path is not None:
                    self._lease.withdraw(self.lease_path)
            self._given_back = True

    def _taken_over(self) -> bool:
        if self.lease_path is None:
            return False
        found = read_lease(self.lease_path)
        return found is not None and not found.same_holder(self._lease)

    def _restore_devices(self) -> None:
        failures = []
        for part in sorted(self._tried):
            controller = self._controllers[part.device]
            previous_watts = self._lease.devices[part.device].previous_power_watts
            try:
                if part.field == "clock_mhz":
                    controller.restore()
                elif previous_watts is not None:
                    controller.restore(previous_watts, clock=False)
            except EnergyError as error:
                # Who may not set may not reset either, and has nothing to give back.
                if part in self._changed:
                    failures.append(str(error))
        if failures:
            raise EnergyError(
                f"clocks or power limits may still be set: {'; '.join(failures)}; then run outlast "
                f"energy restore {self.lease_path}"
            )


@contextmanager
def applied(
    settings: int | Setting | Sequence[Setting],
    controllers: Controller | Sequence[Controller],
    lease_path: Path | str,
    *,
    lasts_seconds: float = 7 * 86400.0,
) -> Iterator[Applied]:
    """Set clocks, and give them back at the end of the block, on an exception, SIGTERM or SIGHUP.

    The lease is on disk before anything is set, so that clocks can be given back also after
    ``kill -9`` (`restore`). So they can after a signal that comes while the main thread is in a
    call that does not return to Python, where no handler runs. Handlers of signals that were there
    before are called afterwards. Python sets handlers in the main thread only: in another thread
    SIGTERM and SIGHUP leave the clocks locked until `restore`, and a RuntimeWarning says so. Where
    all controllers are dry runs there is nothing to give back: no lease, no handlers.

    Args:
        settings: A clock in MHz, a setting, or one setting per controller.
        controllers: One per device that this process sets.
        lease_path: See `lease_path` in `lease`. It must not exist.
        lasts_seconds: After this the clocks are given back although the block goes on.

    Yields:
        A handle by which the clock can be changed within the block.

    Raises:
        EnergyError: When a lease stands there already, or something cannot be set; what was set
            before is then given back.
    """
    devices = _sequence(controllers)
    wanted = _wanted(settings, len(devices))
    dry = {isinstance(device, DryRun) for device in devices}
    if len(dry) != 1:
        raise EnergyError("controllers must all be dry runs, or none, and at least one is needed")
    held = tuple(_held(*pair) for pair in zip(wanted, devices, strict=True))
    lease = Lease.of_this_process(held, lasts_seconds)
    handle = Applied(devices, lease, None if dry.pop() else Path(lease_path))
    with contextlib.ExitStack() as undo:
        if handle.lease_path is not None:
            lease.publish(handle.lease_path)
            undo.enter_context(guarded(handle, lasts_seconds))
        undo.callback(handle.give_back)
        for device, setting in enumerate(wanted):
            if setting.clock_mhz is not None:
                handle.lock_clock(setting.clock_mhz, device)
            if setting.power_watts is not None:
                handle.limit_power(setting.power_watts, device)
        yield handle


def _held(setting: Setting, device: Controller) -> Held:
    # Read always: the handle may limit the power later.
    previous = device.power_limit_watts()
    limited = setting.power_watts is not None and not isinstance(device, DryRun)
    if limited and isinstance(previous, Unavailable):
        raise EnergyError(
            f"the power limit of {device.uuid} cannot be read ({previous.reason}), so it could "
            "not be put back: set a clock only"
        )
    return Held(
        uuid=device.uuid,
        controller=dict(device.description()),
        clock_mhz=setting.clock_mhz,
        power_watts=setting.power_watts,
        previous_power_watts=None if isinstance(previous, Unavailable) else previous,
    )


def _sequence(controllers: Controller | Sequence[Controller]) -> tuple[Controller, ...]:
    return tuple(controllers) if isinstance(controllers, Sequence) else (controllers,)


def _wanted(settings: int | Setting | Sequence[Setting], devices: int) -> tuple[Setting, ...]:
    if isinstance(settings, int):
        settings = Setting(settings)
    if isinstance(settings, Setting):
        return (settings,) * devices
    if len(settings) != devices:
        raise EnergyError(
            f"{len(settings)} settings are given for {devices} devices: give one each"
        )
    return tuple(settings)
