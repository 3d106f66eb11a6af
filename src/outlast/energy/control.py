"""Clocks and power limits for the length of a ``with`` block, whatever ends it, and by Slurm.

with applied(1200, NvmlController(uuid), lease_path(uuid)):
    train()

Slurm's options are as in 22.05's sbatch(1), variables of its prolog as in its slurm.conf(5).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import warnings
import weakref
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from outlast.energy.controllers import NvmlController, check_clock
from outlast.energy.lease import Held, Lease, read_lease
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import FrameType

    from outlast.energy.plan import ClockPlan
    from outlast.energy.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that would be set.

    Attributes:
        words: In plain English.
        command: The equivalent command line.
    """

    words: str
    command: str

    def __str__(self) -> str:
        return f"would {self.words}: {self.command}"


class DryRun:
    """Takes settings like a controller, sets nothing, and says exactly what would be set.

    Args:
        uuid: Of the device; ``nvidia-smi --id`` takes UUIDs as well as indices.
        clocks_mhz: Clocks that the device supports, where known: others are refused as they would
            be by the device.
        power_limit_watts: The limit in force, where known.
        write: Gets every action as a line; `print` by default.

    Attributes:
        actions: What would have been set, in order.
    """

    def __init__(
        self,
        uuid: str,
        *,
        clocks_mhz: tuple[int, ...] | Unavailable | None = None,
        power_limit_watts: float | None = None,
        write: Callable[[str], object] = print,
    ) -> None:
        self.uuid = uuid
        self.actions: list[Action] = []
        unknown = Unavailable("a dry run asks no device for its clocks")
        self._clocks_mhz = unknown if clocks_mhz is None else clocks_mhz
        self._power_limit_watts = power_limit_watts
        self._write = write

    def clocks_mhz(self) -> tuple[int, ...] | Unavailable:
        """Those that it was given."""
        return self._clocks_mhz

    def power_limit_watts(self) -> float | Unavailable:
        """The one that it was given."""
        if self._power_limit_watts is None:
            return Unavailable("a dry run asks no device for its power limit")
        return self._power_limit_watts

    def lock_clock(self, clock_mhz: int) -> None:
        """Say that the clock would be locked.

        Raises:
            EnergyError: When the device is known not to support it.
        """
        check_clock(clock_mhz, self._clocks_mhz, self.uuid)
        self._say(
            f"lock the SM clock of {self.uuid} to {clock_mhz} MHz",
            f"nvidia-smi --id={self.uuid} --lock-gpu-clocks={clock_mhz},{clock_mhz}",
        )

    def limit_power(self, watts: float) -> None:
        """Say that the power would be limited."""
        self._say(
            f"limit the power of {self.uuid} to {watts:g} W",
            f"nvidia-smi --id={self.uuid} --power-limit={watts:g}",
        )

    def restore(self, power_watts: float | None = None, *, clock: bool = True) -> None:
        """Say that the clock would be given back, and the power limit put back."""
        if clock:
            self._say(
                f"give the SM clock of {self.uuid} back to the driver",
                f"nvidia-smi --id={self.uuid} --reset-gpu-clocks",
            )
        if power_watts is not None:
            self.limit_power(power_watts)

    def description(self) -> Mapping[str, str]:
        """It needs none: it writes no lease."""
        return {"kind": "dry-run", "uuid": self.uuid}

    def _say(self, words: str, command: str) -> None:
        action = Action(words, command)
        self.actions.append(action)
        self._write(str(action))


Controller: TypeAlias = NvmlController | DryRun
"""Sets the clock and the power limit of one device, and gives both back; or says so."""


# What ends a job: the scheduler's request, and the end of the terminal.
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


_NO_HANDLERS = (
    "clocks are applied outside the main thread, where Python sets no signal handlers: after "
    "SIGTERM or SIGHUP they stay locked until outlast energy restore; apply them in the main thread"
)


@contextmanager
def guarded(handle: Applied, lasts_seconds: float) -> Iterator[None]:
    """Give back also when a signal, the end of the process or the lease's time ends the block.

    Warns with a RuntimeWarning outside the main thread, where no signal can be handled.
    """
    timer = threading.Timer(min(lasts_seconds, threading.TIMEOUT_MAX), handle.give_back)
    timer.daemon = True
    timer.start()
    # It keeps the handle until it is detached, and is called when the process ends before that.
    at_exit = weakref.finalize(handle, handle.give_back)
    earlier: dict[int, Any] = {}

    def on_signal(received: int, frame: FrameType | None) -> None:
        try:
            handle.give_back()
        finally:
            # What would have happened without this handler.
            before = earlier[received]
            if callable(before):
                before(received, frame)
            elif before != signal.SIG_IGN:
                signal.signal(received, signal.SIG_DFL)
                os.kill(os.getpid(), received)

    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            earlier[number] = signal.getsignal(number)
            signal.signal(number, on_signal)
    else:
        warnings.warn(_NO_HANDLERS, RuntimeWarning, stacklevel=2)
    try:
        yield
    finally:
        timer.cancel()
        at_exit.detach()
        for received, before in earlier.items():
            # A handler that somebody put before this one calls it: leave both then.
            if signal.getsignal(received) is on_signal:
                signal.signal(received, signal.SIG_DFL if before is None else before)


_Part = tuple[int, Literal["clock_mhz", "power_watts"]]
"""One thing that can be set: the number of the device, and its field in `Held`."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Clock and power limit of a device.

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
                "plan with switches = none or per_stage"
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
        """True once the settings have been given back; clocks are left alone from then on."""
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
        return self._change((device, "clock_mhz"), clock_mhz, change)

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
        return self._change((device, "power_watts"), watts, change)

    def _change(self, part: _Part, value: float, change: Callable[[], None]) -> bool:
        with self._lock:
            if self._over:
                return False
            # The lease says that this is set before it is set for the first time.
            devices, (device, field) = list(self._lease.devices), part
            if getattr(devices[device], field) is None:
                changes: Any = {field: int(value) if field == "clock_mhz" else value}
                devices[device] = replace(devices[device], **changes)
                lease = replace(self._lease, devices=tuple(devices))
                if self.lease_path is not None:
                    lease.rewrite(self.lease_path)
                self._lease = lease
            self._tried.add(part)
            change()
            self._changed.add(part)
            if self.over:
                # A signal came in between, and what it gave back has just been set again.
                self._restore_devices()
            return not self.over

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
            found = None if self.lease_path is None else read_lease(self.lease_path)
            if found is None or found.same_holder(self._lease):
                self._restore_devices()
            self._given_back = True

    def _restore_devices(self) -> None:
        """Restore what was tried, then remove the lease."""
        failures = []
        for part in sorted(self._tried):
            device, field = part
            controller = self._controllers[device]
            previous_watts = self._lease.devices[device].previous_power_watts
            try:
                if field == "clock_mhz":
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
        if self.lease_path is not None:
            self._lease.withdraw(self.lease_path)


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
        lasts_seconds: After this the clocks are given back although the block continues.

    Yields:
        A handle by which the clock can be changed within the block.

    Raises:
        EnergyError: When a lease stands there already, or something cannot be set; what was set
            before is then given back.
    """
    devices = tuple(controllers) if isinstance(controllers, Sequence) else (controllers,)
    if isinstance(settings, int):
        settings = Setting(settings)
    wanted = (settings,) * len(devices) if isinstance(settings, Setting) else tuple(settings)
    if len(wanted) != len(devices):
        raise EnergyError(
            f"{len(wanted)} settings are given for {len(devices)} devices: give one each"
        )
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


COMMENT = "outlast-clocks="
"""Begins the job comment by which a job asks the prolog for clocks."""


def batch_lines(clocks_mhz: Sequence[int], *, gpus_per_node: int) -> str:
    """Lines for the head of a batch script.

    One clock for all devices needs a Slurm built with NVML; clocks that differ within a node need
    the prolog.

    Args:
        clocks_mhz: Of each device, in the order of ranks.
        gpus_per_node: How many devices a node has.

    Raises:
        EnergyError: When nodes would need different lists of clocks, or a clock is not above 0.
    """
    if not clocks_mhz or min(clocks_mhz) <= 0:
        raise EnergyError(f"clocks_mhz = {list(clocks_mhz)} must be one or more clocks above 0")
    if gpus_per_node < 1 or len(clocks_mhz) % min(gpus_per_node, len(clocks_mhz)):
        raise EnergyError(
            f"gpus_per_node = {gpus_per_node} does not divide the {len(clocks_mhz)} devices"
        )
    nodes = {
        tuple(clocks_mhz[first : first + gpus_per_node])
        for first in range(0, len(clocks_mhz), gpus_per_node)
    }
    if len(nodes) > 1:
        raise EnergyError(
            f"the plan gives {len(nodes)} of its nodes different clocks, which a job comment "
            "cannot say: set them from each rank with NVML or zeusd, or plan with switches = none"
        )
    node = nodes.pop()
    if len(set(node)) == 1:
        # Slurm takes the nearest clock that the GPU supports, and resets it after the job.
        return f"#SBATCH --gpu-freq={node[0]},verbose\n"
    return f"#SBATCH --comment={COMMENT}{','.join(map(str, node))}\n"


def prolog() -> str:
    """A Prolog script (run as root on every node) that locks clocks for jobs that ask for them.

    A job asks with ``--comment=outlast-clocks=1200,1410``: one clock for each of its GPUs on a
    node. Anything but digits and commas is ignored, for the comment is the user's. GPUs that are
    divided by MIG, on which others compute, or of which that cannot be told, are left alone. A file
    per job and GPU in /run/outlast-clocks, which belongs to root, says what has been locked.
    """
    return _script("slurm_prolog.sh")


def epilog() -> str:
    """The Epilog script that belongs to `prolog`: gives the clocks back, however the job ended.

    It goes by the prolog's files and never by the comment, which the user can change meanwhile.
    Where a clock cannot be given back the file stays.
    """
    return _script("slurm_epilog.sh")


def _script(name: str) -> str:
    return resources.files("outlast.energy").joinpath(name).read_text(encoding="utf-8")
