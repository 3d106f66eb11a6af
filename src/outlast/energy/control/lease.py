"""A file that says which process holds which clocks, so that any other one can give them back."""

from __future__ import annotations

import json
import os
import re
import socket
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from outlast.errors import EnergyError

_VERSION = 1
# Twice the resolution of /proc; two processes with one pid are at least a round of pids apart.
_SAME_START_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A device under a lease.

    Attributes:
        uuid: Of the device.
        controller: How to make its controller again.
        clock_mhz: The clock that is locked; None where none is.
        power_watts: The power limit that is set; None where none is.
        previous_power_watts: The power limit before; None where it is left alone. A clock locked
            before cannot be known: drivers do not tell.
    """

    uuid: str
    controller: dict[str, str]
    clock_mhz: int | None
    power_watts: float | None
    previous_power_watts: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Who holds devices, and until when.

    Attributes:
        host: Where the process runs.
        boot: That boot of the host.
        pid: The process.
        started_seconds: When it started after that boot, so that a reused pid is told from it.
        expires_unix_seconds: After this it holds nothing any more.
        devices: What it holds.
    """

    host: str
    boot: str
    pid: int
    started_seconds: float
    expires_unix_seconds: float
    devices: tuple[Held, ...]

    @classmethod
    def of_this_process(cls, devices: tuple[Held, ...], lasts_seconds: float) -> Lease:
        """A lease that this process takes now.

        Raises:
            EnergyError: When it would last no time.
        """
        if not 0.0 < lasts_seconds < float("inf"):
            raise EnergyError(f"lasts_seconds = {lasts_seconds} must be above 0 and finite")
        return cls(
            host=socket.gethostname(),
            boot=_boot(),
            pid=os.getpid(),
            started_seconds=_started_seconds(psutil.Process()),
            expires_unix_seconds=time.time() + lasts_seconds,
            devices=devices,
        )

    @property
    def expired(self) -> bool:
        """Whether its time is over."""
        return time.time() >= self.expires_unix_seconds

    @property
    def alive(self) -> bool:
        """Whether its process lives. On another host that cannot be known: it counts as alive."""
        if self.host != socket.gethostname():
            return True
        if self.boot != _boot():
            return False
        try:
            process = psutil.Process(self.pid)
            same = abs(_started_seconds(process) - self.started_seconds) < _SAME_START_SECONDS
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def publish(self, path: Path) -> None:
        """Write the lease, durably and in one piece, unless there is one already.

        Raises:
            EnergyError: When there is one, with what to do; or when it cannot be written.
        """
        text = json.dumps({"version": _VERSION, **asdict(self)}, indent=1)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                # Unlike a rename, a link fails where a lease stands: two cannot both succeed.
                os.link(name, path)
            finally:
                Path(name).unlink()
            _sync_directory(path.parent)
        except FileExistsError:
            raise EnergyError(_taken(path)) from None
        except OSError as error:
            raise EnergyError(f"the lease {path} cannot be written: {error.strerror}") from None

    def withdraw(self, path: Path) -> None:
        """Remove the lease, if it is still this one."""
        if read_lease(path) == self:
            path.unlink(missing_ok=True)
            _sync_directory(path.parent)


def lease_path(uuid: str) -> Path:
    """Where the lease of a device is kept by default: one per device and user of this machine.

    It does not outlive a reboot, and neither do locked clocks.
    """
    return lease_directory() / f"{re.sub(r'[^A-Za-z0-9-]', '_', uuid)}.json"


def lease_directory() -> Path:
    """Where leases are kept by default."""
    return Path(tempfile.gettempdir()) / f"outlast-clocks-{os.getuid()}"


def read_lease(path: Path) -> Lease | None:
    """The lease in a file; None where there is no file.

    Raises:
        EnergyError: When the file cannot be read or is no lease.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EnergyError(f"the lease {path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise EnergyError(_no_lease(path)) from None
    try:
        return _parsed(content)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise EnergyError(_no_lease(path)) from None


def _parsed(content: Any) -> Lease:
    if content["version"] != _VERSION:
        raise ValueError
    devices = tuple(
        Held(
            uuid=str(each["uuid"]),
            controller={str(key): str(value) for key, value in each["controller"].items()},
            clock_mhz=_optional(int, each["clock_mhz"]),
            power_watts=_optional(float, each["power_watts"]),
            previous_power_watts=_optional(float, each["previous_power_watts"]),
        )
        for each in content["devices"]
    )
    return Lease(
        host=str(content["host"]),
        boot=str(content["boot"]),
        pid=int(content["pid"]),
        started_seconds=float(content["started_seconds"]),
        expires_unix_seconds=float(content["expires_unix_seconds"]),
        devices=devices,
    )


def _optional(kind: Any, value: Any) -> Any:
    return None if value is None else kind(value)


def _no_lease(path: Path) -> str:
    return (
        f"{path} is no lease of clocks (version {_VERSION}): if it should be one, reset the clocks "
        "with nvidia-smi --reset-gpu-clocks and remove the file"
    )


def _taken(path: Path) -> str:
    lease = read_lease(path)
    if lease is not None and lease.alive and not lease.expired:
        return (
            f"process {lease.pid} on {lease.host} holds the clocks already (lease {path}): end it "
            "first"
        )
    return (
        f"the lease {path} of a process that has ended or of a time that is over is still there: "
        f"run outlast energy restore {path} first"
    )


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _started_seconds(process: psutil.Process) -> float:
    # psutil adds the boot time, which moves when the clock is set; the difference does not.
    return round(process.create_time() - psutil.boot_time(), 2)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
