"""Locked clocks and power limits of NVIDIA GPUs, through NVML or zeusd."""

from __future__ import annotations

import http.client
import json
import os
import socket
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import psutil

from outlast.energy.control.apply import check_clock, try_all
from outlast.energy.control.lease import check_directory, lease_directory, read_lease
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path

    from outlast.energy.control.apply import Controller
    from outlast.energy.control.lease import Lease


NO_PRIVILEGE = (
    "run as root or with CAP_SYS_ADMIN, or use a zeusd daemon with the gpu-control group, or let "
    "Slurm set clocks with --gpu-freq or a prolog"
)
"""The three ways to set clocks, for error messages."""


def load_nvml() -> Any:
    """The NVML binding, initialised.

    Raises:
        EnergyError: When this machine has no NVIDIA driver.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise EnergyError(
            f"clocks cannot be set here: NVML says {error}; run on a machine with an NVIDIA driver"
        ) from None
    return pynvml


class Gpu:
    """Reads one GPU through NVML.

    Args:
        uuid: NVML's, e.g. "GPU-8f6e...": indices of CUDA and of NVML need not agree.
        nvml: The binding, initialised.

    Raises:
        EnergyError: When there is no such GPU, or the UUID is that of a MIG slice.
    """

    def __init__(self, uuid: str, nvml: Any) -> None:
        if uuid.startswith("MIG-"):
            raise EnergyError(
                f"device = {uuid} is a MIG slice, and clocks belong to the whole GPU, which others "
                "share: ask the site for a whole GPU"
            )
        self.uuid = uuid
        self.nvml = nvml
        with self.explained(f"find GPU {uuid}"):
            self.handle = nvml.nvmlDeviceGetHandleByUUID(uuid)

    @contextmanager
    def explained(self, aim: str) -> Iterator[None]:
        """Turn NVML's errors into sentences with a remedy.

        Args:
            aim: What is tried, e.g. "lock the clock of GPU-8f6e...".

        Raises:
            EnergyError: In place of an NVMLError.
        """
        try:
            yield
        except self.nvml.NVMLError as error:
            if getattr(error, "value", None) == self.nvml.NVML_ERROR_NO_PERMISSION:
                raise EnergyError(f"no privilege to {aim}: {NO_PRIVILEGE}") from None
            raise EnergyError(f"cannot {aim}: NVML says {error}") from None

    def index(self) -> int:
        """NVML's index, which zeusd counts by."""
        with self.explained(f"read the index of {self.uuid}"):
            return int(self.nvml.nvmlDeviceGetIndex(self.handle))

    @cached_property
    def clocks_mhz(self) -> tuple[int, ...] | Unavailable:
        """SM clocks that it supports at its highest memory clock, ascending."""
        try:
            memory_mhz = max(self.nvml.nvmlDeviceGetSupportedMemoryClocks(self.handle))
            clocks = self.nvml.nvmlDeviceGetSupportedGraphicsClocks(self.handle, memory_mhz)
        except (self.nvml.NVMLError, ValueError) as error:
            return Unavailable(f"NVML does not list the clocks of {self.uuid}: {error}")
        return tuple(sorted(clocks))

    def power_limit_watts(self) -> float | Unavailable:
        """The power limit in force."""
        try:
            return float(self.nvml.nvmlDeviceGetPowerManagementLimit(self.handle)) / 1000.0
        except self.nvml.NVMLError as error:
            return Unavailable(f"NVML does not tell the power limit of {self.uuid}: {error}")

    def check_power(self, watts: float) -> None:
        """Refuse a power limit outside what the device takes.

        Raises:
            EnergyError: With the limits.
        """
        with self.explained(f"read the range of power limits of {self.uuid}"):
            bounds = self.nvml.nvmlDeviceGetPowerManagementLimitConstraints(self.handle)
        low, high = (bound / 1000.0 for bound in bounds)
        if not low <= watts <= high:
            raise EnergyError(
                f"power limit = {watts:g} W is outside {low:g} to {high:g} W, which "
                f"{self.uuid} takes"
            )

    def refuse_shared(self, allowed_pids: Collection[int] = ()) -> None:
        """Refuse a GPU whose clocks others depend on.

        Args:
            allowed_pids: Processes that may use it too, besides this one and its children. In a
                container NVML gives the pids of the host: name one's own there.

        Raises:
            EnergyError: When it is divided by MIG, or processes of others compute on it.
        """
        if self._divided():
            raise EnergyError(
                f"{self.uuid} is divided by MIG, and a clock would hold for all its slices: "
                "disable MIG or take another GPU"
            )
        with self.explained(f"list the processes on {self.uuid}"):
            found = self.nvml.nvmlDeviceGetComputeRunningProcesses(self.handle)
        foreign = sorted({int(name.pid) for name in found} - _own_pids() - set(allowed_pids))
        if foreign:
            raise EnergyError(
                f"{self.uuid} is shared with process {', '.join(map(str, foreign))}: clocks hold "
                "for the whole GPU, so take one of your own, or name these in allowed_pids if they "
                "are yours"
            )

    def _divided(self) -> bool:
        try:
            current, _pending = self.nvml.nvmlDeviceGetMigMode(self.handle)
        except self.nvml.NVMLError as error:
            if getattr(error, "value", None) == self.nvml.NVML_ERROR_NOT_SUPPORTED:
                return False
            raise EnergyError(
                f"cannot tell whether {self.uuid} is divided by MIG: NVML says {error}; clocks are "
                "set only on undivided GPUs"
            ) from None
        return bool(current)


def _own_pids() -> set[int]:
    children = psutil.Process().children(recursive=True)
    return {os.getpid(), *(child.pid for child in children)}


class NvmlController:
    """Sets one GPU with ``nvmlDeviceSetGpuLockedClocks`` and ``...SetPowerManagementLimit``.

    The first setting checks that the GPU is not shared. NVML cannot tell whether clocks were locked
    before: `restore` gives them to the driver.

    Args:
        uuid: NVML's, e.g. "GPU-8f6e...".
        nvml: The binding, initialised; that of this machine by default.
        allowed_pids: Processes that may use the GPU besides this one and its children.

    Raises:
        EnergyError: Without NVML, for an unknown GPU, or a MIG slice.
    """

    def __init__(self, uuid: str, nvml: Any = None, *, allowed_pids: Collection[int] = ()) -> None:
        self._gpu = Gpu(uuid, nvml or load_nvml())
        self._allowed_pids = allowed_pids
        self._checked = False

    @property
    def uuid(self) -> str:
        """Of the GPU."""
        return self._gpu.uuid

    def clocks_mhz(self) -> tuple[int, ...] | Unavailable:
        """SM clocks that it supports, ascending."""
        return self._gpu.clocks_mhz

    def power_limit_watts(self) -> float | Unavailable:
        """The power limit in force."""
        return self._gpu.power_limit_watts()

    def lock_clock(self, clock_mhz: int) -> None:
        """Lock the SM clock.

        Raises:
            EnergyError: For an unsupported clock, a shared GPU or a missing privilege.
        """
        check_clock(clock_mhz, self.clocks_mhz(), self.uuid)
        self._check_shared()
        with self._gpu.explained(f"lock the clock of {self.uuid} to {clock_mhz} MHz"):
            self._gpu.nvml.nvmlDeviceSetGpuLockedClocks(self._gpu.handle, clock_mhz, clock_mhz)

    def limit_power(self, watts: float) -> None:
        """Set the power limit.

        Raises:
            EnergyError: For a limit out of range, a shared GPU or a missing privilege.
        """
        self._gpu.check_power(watts)
        self._check_shared()
        self._set_power(watts)

    def restore(self, power_watts: float | None = None, *, clock: bool = True) -> None:
        """Give the clock back to the driver, and put the power limit back where one is given.

        Raises:
            EnergyError: With all that NVML refuses; what it does not refuse is done.
        """
        steps = [self._reset_clock] if clock else []
        if power_watts is not None:
            steps.append(partial(self._set_power, power_watts))
        try_all(*steps)

    def description(self) -> Mapping[str, str]:
        """Text from which another process makes this controller again."""
        return {"kind": "nvml", "uuid": self.uuid}

    def _reset_clock(self) -> None:
        with self._gpu.explained(f"reset the clock of {self.uuid}"):
            self._gpu.nvml.nvmlDeviceResetGpuLockedClocks(self._gpu.handle)

    def _set_power(self, watts: float) -> None:
        with self._gpu.explained(f"limit the power of {self.uuid} to {watts:g} W"):
            self._gpu.nvml.nvmlDeviceSetPowerManagementLimit(
                self._gpu.handle, round(watts * 1000.0)
            )

    def _check_shared(self) -> None:
        # Once: NVML's list of processes takes longer than a clock change.
        if not self._checked:
            self._gpu.refuse_shared(self._allowed_pids)
            self._checked = True


DEFAULT_SOCKET = "/run/zeusd/zeusd.sock"


_DEADLINE_SECONDS = 10.0


_SENTENCE_CHARACTERS = 300


class Zeusd:
    """A zeusd that listens on a Unix socket.

    Args:
        socket_path: By default ``$ZEUSD_SOCK_PATH``, else the path of zeusd's own service file.
        token: Where the daemon asks for one; by default ``$ZEUSD_TOKEN``.
    """

    def __init__(self, socket_path: str | Path | None = None, *, token: str | None = None) -> None:
        default = os.environ.get("ZEUSD_SOCK_PATH", DEFAULT_SOCKET)
        self.socket_path = os.fspath(socket_path or default)
        self._token = token or os.environ.get("ZEUSD_TOKEN", "")

    def check(self) -> None:
        """Make sure that the daemon is new enough and may set clocks.

        Raises:
            EnergyError: When it cannot be reached, is too old, or has its control group disabled.
        """
        status, body = self._exchange("GET", "/discover")
        if status == http.client.NOT_FOUND:
            raise EnergyError(
                f"zeusd at {self.socket_path} has no /discover, as versions before 0.4.0: update it"
            )
        try:
            groups = json.loads(body)["enabled_api_groups"] if status == http.client.OK else []
        except (ValueError, KeyError, TypeError):
            groups = []
        if "gpu-control" not in groups:
            raise EnergyError(
                f"zeusd at {self.socket_path} may not set clocks (HTTP {status}): have it started "
                "with gpu-control among the groups of --enable"
            )

    def post(self, path: str, **parameters: int | str) -> None:
        """Set something and wait until it is set.

        Raises:
            EnergyError: With the daemon's own words, when it refuses or cannot be reached.
        """
        query = urlencode({**parameters, "block": "true"})
        status, body = self._exchange("POST", f"{path}?{query}")
        if status == http.client.OK:
            return
        remedy = {
            http.client.UNAUTHORIZED: "; set ZEUSD_TOKEN to a token with the gpu-control scope",
            http.client.FORBIDDEN: "; run zeusd as root and use a token with the gpu-control scope",
            http.client.NOT_FOUND: "; start zeusd 0.4.0 or later with gpu-control enabled",
        }.get(status, "")
        raise EnergyError(
            f"zeusd at {self.socket_path} refused {path} (HTTP {status}): {_sentence(body)}{remedy}"
        )

    def _exchange(self, method: str, target: str) -> tuple[int, str]:
        connection = _UnixConnection(self.socket_path)
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        try:
            connection.request(method, target, headers=headers)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            words = str(error) or type(error).__name__
            raise EnergyError(
                f"zeusd does not answer at {self.socket_path} ({words}): start it, or set "
                "ZEUSD_SOCK_PATH to its socket"
            ) from None
        finally:
            connection.close()


class ZeusdController:
    """Sets one GPU by way of a zeusd on the same machine. Needs no privilege of its own.

    NVML is only read: zeusd counts GPUs by NVML's index, and does not know who shares them.

    Args:
        uuid: NVML's, e.g. "GPU-8f6e...".
        zeusd: The daemon; the one of the environment by default.
        nvml: The binding, initialised; that of this machine by default.
        allowed_pids: Processes that may use the GPU besides this one and its children.

    Raises:
        EnergyError: Without NVML, for an unknown GPU, or a MIG slice.
    """

    def __init__(
        self,
        uuid: str,
        zeusd: Zeusd | None = None,
        *,
        nvml: Any = None,
        allowed_pids: Collection[int] = (),
    ) -> None:
        self._gpu = Gpu(uuid, nvml or load_nvml())
        self._index = self._gpu.index()
        self._zeusd = zeusd or Zeusd()
        self._allowed_pids = allowed_pids
        self._checked = False

    @property
    def uuid(self) -> str:
        """Of the GPU."""
        return self._gpu.uuid

    def clocks_mhz(self) -> tuple[int, ...] | Unavailable:
        """SM clocks that it supports, ascending."""
        return self._gpu.clocks_mhz

    def power_limit_watts(self) -> float | Unavailable:
        """The power limit in force."""
        return self._gpu.power_limit_watts()

    def lock_clock(self, clock_mhz: int) -> None:
        """Have the SM clock locked.

        Raises:
            EnergyError: For an unsupported clock, a shared GPU, or what the daemon refuses.
        """
        check_clock(clock_mhz, self.clocks_mhz(), self.uuid)
        self._check()
        self._zeusd.post(
            "/gpu/set_gpu_locked_clocks",
            gpu_ids=self._index,
            min_clock_mhz=clock_mhz,
            max_clock_mhz=clock_mhz,
        )

    def limit_power(self, watts: float) -> None:
        """Have the power limit set.

        Raises:
            EnergyError: For a limit out of range, a shared GPU, or what the daemon refuses.
        """
        self._gpu.check_power(watts)
        self._check()
        self._set_power(watts)

    def restore(self, power_watts: float | None = None, *, clock: bool = True) -> None:
        """Have the clock given back to the driver, and the power limit put back where given.

        Raises:
            EnergyError: With all that the daemon refuses; what it does not refuse is done.
        """
        steps = [self._reset_clock] if clock else []
        if power_watts is not None:
            steps.append(partial(self._set_power, power_watts))
        try_all(*steps)

    def description(self) -> Mapping[str, str]:
        """Text from which another process makes this controller again; no token is written down."""
        return {"kind": "zeusd", "uuid": self.uuid, "socket": self._zeusd.socket_path}

    def _reset_clock(self) -> None:
        self._zeusd.post("/gpu/reset_gpu_locked_clocks", gpu_ids=self._index)

    def _set_power(self, watts: float) -> None:
        milliwatts = round(watts * 1000.0)
        self._zeusd.post("/gpu/set_power_limit", gpu_ids=self._index, power_limit_mw=milliwatts)

    def _check(self) -> None:
        if not self._checked:
            self._gpu.refuse_shared(self._allowed_pids)
            self._zeusd.check()
            self._checked = True


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket: the standard library has only the two halves of it."""

    def __init__(self, socket_path: str) -> None:
        super().__init__("localhost", timeout=_DEADLINE_SECONDS)
        self._socket_path = socket_path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_DEADLINE_SECONDS)
        self.sock.connect(self._socket_path)


def _sentence(body: str) -> str:
    """Answer of the daemon: about one GPU, about the request, or in plain text."""
    try:
        answer = json.loads(body)
        errors = answer.get("errors") or {"": answer["error"]}
        words = "; ".join(map(str, errors.values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        words = body
    return " ".join(words.split())[:_SENTENCE_CHARACTERS] or "no reason given"


def opened(description: Mapping[str, str]) -> Controller:
    """The controller that a lease describes.

    Raises:
        EnergyError: When its kind is unknown or it cannot be reached.
    """
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
