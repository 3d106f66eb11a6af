"""A file that says which process holds which clocks, so that any other one can give them back.

Leases are per user: two users who may both set one GPU, as with zeusd, do not exclude each other.
Controllers refuse a GPU on which others compute when they set it first, and only then.
"""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from outlast.energy.controllers import opened
from outlast.errors import EnergyError
from outlast.paths import check_regular
from outlast.records import sync_directory
from outlast.records.process import boot_identity, process_lives, started_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.energy.controllers import NvmlController

_VERSION = 1
_SETTINGS = {"clock_mhz": int, "power_watts": float, "previous_power_watts": float}
_HOLDER = {"host": str, "boot": str, "pid": int}
_HOLDER |= {"started_seconds": float, "expires_unix_seconds": float}
_CONTROLLER_FIELDS = {"nvml": {"uuid"}, "zeusd": {"uuid", "socket"}}
DIRECTORY_VARIABLE = "OUTLAST_LEASES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A device under a lease.

    Attributes:
        uuid: Of the device.
        controller: How to make its controller again.
        clock_mhz: The first clock that was locked; None where none was: it is then not reset.
        power_watts: The first power limit that was set; None where none was: then none is put back.
        previous_power_watts: The power limit before; None where it cannot be read. A clock locked
            before cannot be known: drivers do not tell.
    """

    uuid: str
    controller: dict[str, str]
    clock_mhz: int | None
    power_watts: float | None
    previous_power_watts: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Holder of devices, and the time until which it holds them.

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
            boot=boot_identity(),
            pid=os.getpid(),
            started_seconds=started_seconds(psutil.Process()),
            expires_unix_seconds=time.time() + lasts_seconds,
            devices=devices,
        )

    @property
    def expired(self) -> bool:
        """True if its time is over."""
        return time.time() >= self.expires_unix_seconds

    @property
    def alive(self) -> bool:
        """True if its process lives. On another host that cannot be known: it counts as alive."""
        if self.host != socket.gethostname():
            return True
        return self.boot == boot_identity() and process_lives(self.pid, self.started_seconds)

    def same_holder(self, other: Lease) -> bool:
        """True if both are one lease, whatever has been set under it meanwhile."""
        return replace(self, devices=()) == replace(other, devices=())

    def publish(self, path: Path) -> None:
        """Write the lease, durably and in one piece, unless there is one already.

        Raises:
            EnergyError: When there is one, with what to do; when it cannot be written, or others
                could write into the default directory.
        """
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.parent == lease_directory():
                check_directory(path.parent)
            # Unlike a rename, a link fails where a lease stands: two cannot both succeed.
            self._write(path, os.link)
        except FileExistsError:
            lease = read_lease(path)
            if lease is not None and lease.alive and not lease.expired:
                raise EnergyError(
                    f"process {lease.pid} on {lease.host} holds the clocks already (lease {path}): "
                    "end it first"
                ) from None
            raise EnergyError(
                f"the lease {path} of a process that has ended or of a time that is over is still "
                f"there: run outlast energy restore {path} first"
            ) from None
        except OSError as error:
            raise EnergyError(
                f"the lease {path} cannot be written: {error.strerror}; name another place, or "
                f"another directory for all in {DIRECTORY_VARIABLE}"
            ) from None

    def rewrite(self, path: Path) -> None:
        """Have the lease say what is set now.

        Raises:
            EnergyError: When it is not this process's any more, or cannot be written.
        """
        found = read_lease(path)
        if found is None or not found.same_holder(self):
            raise EnergyError(f"the lease {path} was taken from this process: nothing is set now")
        try:
            self._write(path, os.replace)
        except OSError as error:
            raise EnergyError(f"the lease {path} cannot be written: {error.strerror}") from None

    def withdraw(self, path: Path) -> None:
        """Remove the lease, if it is still this one."""
        found = read_lease(path)
        if found is not None and found.same_holder(self):
            path.unlink(missing_ok=True)
            sync_directory(path.parent)

    def _write(self, path: Path, put: Callable[[str, Path], None]) -> None:
        text = json.dumps({"version": _VERSION, **asdict(self)}, indent=1)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            put(name, path)
        finally:
            Path(name).unlink(missing_ok=True)
        sync_directory(path.parent)


def lease_path(uuid: str) -> Path:
    """Default path of a device's lease: one per device and user of this machine.

    It may outlive a reboot, which locked clocks do not: to restore then does no harm.
    """
    return lease_directory() / f"{re.sub(r'[^A-Za-z0-9-]', '_', uuid)}.json"


def lease_directory() -> Path:
    """Default folder of leases: one place for all jobs and logins of a user on a machine.

    It is ``$OUTLAST_LEASES``, else a directory in /var/tmp. Not in /tmp or /dev/shm, of which
    Slurm gives every job its own at many sites, nor in /run/user, which goes with the last login.
    Containers and sites with a /var/tmp per job need the variable, naming a place that all share.
    """
    named = os.environ.get(DIRECTORY_VARIABLE)
    return Path(named) if named else Path("/var/tmp") / f"outlast-clocks-{os.getuid()}"


def check_directory(directory: Path) -> None:
    """Refuse a directory into which others could put leases, which are trusted.

    Raises:
        EnergyError: When it is a link or a file, belongs to somebody else, or is open to others.
    """
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise EnergyError(
            f"the place of leases {directory} is not a directory of user {os.getuid()}: have it "
            f"removed, or name another in {DIRECTORY_VARIABLE}"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise EnergyError(
            f"the place of leases {directory} is open to other users (mode "
            f"{stat.S_IMODE(found.st_mode):o}): look what is in it, then chmod 700 {directory}"
        )


def read_lease(path: Path) -> Lease | None:
    """The lease in a file; None where there is no file.

    Raises:
        EnergyError: When the file cannot be read, belongs to another user, or is no lease.
    """
    try:
        check_regular(path)
        with path.open("rb") as file:
            owner = os.fstat(file.fileno()).st_uid
            content = json.loads(file.read())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EnergyError(f"the lease {path} cannot be read: {error.strerror}") from None
    except ValueError:
        content = None
    if owner != os.getuid():
        # It names a socket that would be sent this user's token.
        raise EnergyError(f"the lease {path} belongs to user {owner}: let that user restore it")
    try:
        return _parsed(content)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise EnergyError(
            f"{path} is no lease of clocks (version {_VERSION}): if it should be one, reset the "
            "clocks with nvidia-smi --reset-gpu-clocks and remove the file"
        ) from None


def _parsed(content: Any) -> Lease:
    if content["version"] != _VERSION:
        raise ValueError
    devices = []
    for device in content["devices"]:
        controller = {str(key): str(value) for key, value in device["controller"].items()}
        if not _CONTROLLER_FIELDS.get(controller["kind"], set()) <= controller.keys():
            raise ValueError
        settings: dict[str, Any] = {
            name: None if device[name] is None else kind(device[name])
            for name, kind in _SETTINGS.items()
        }
        devices.append(Held(uuid=str(device["uuid"]), controller=controller, **settings))
    holder: dict[str, Any] = {name: kind(content[name]) for name, kind in _HOLDER.items()}
    return Lease(**holder, devices=tuple(devices))


def restore(
    path: Path, *, force: bool = False, open_controller: Callable[..., NvmlController] = opened
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
