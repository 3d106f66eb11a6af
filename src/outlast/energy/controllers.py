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

from outlast.errors import EnergyError
from outlast.extras import require
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

NO_PRIVILEGE = (
    "run as root or with CAP_SYS_ADMIN, or use a zeusd daemon with the gpu-control group, or let "
    "Slurm set clocks with --gpu-freq or a prolog"
)
"""The three ways to set clocks, for error messages."""


def check_clock(clock_mhz: int, known: tuple[int, ...] | Unavailable, device: str) -> None:
    """Refuse a clock that a device is known not to support.

    Raises:
        EnergyError: With the nearest supported clock.
    """
    if clock_mhz <= 0:
        raise EnergyError(
            f"clock = {clock_mhz} MHz cannot be locked on {device}: it must be above 0"
        )
    if isinstance(known, Unavailable) or clock_mhz in known:
        return
    nearest = min(known, key=lambda clock: abs(clock - clock_mhz))
    raise EnergyError(
        f"clock = {clock_mhz} MHz is not supported by {device}; the nearest is {nearest} MHz"
    )


class NvmlController:
    """Sets one GPU with ``nvmlDeviceSetGpuLockedClocks`` and ``...SetPowerManagementLimit``.

    The first setting checks that the GPU is not shared. NVML cannot tell whether clocks were locked
    before: `restore` gives them to the driver.

    Args:
        uuid: NVML's, e.g. "GPU-8f6e...": indices of CUDA and of NVML need not agree.
        nvml: The binding, initialised; that of this machine by default.
        allowed_pids: Processes that may use the GPU besides this one and its children. In a
            container NVML gives the pids of the host: name one's own there.

    Raises:
        EnergyError: Without NVML, for an unknown GPU, or a MIG slice.
    """

    def __init__(self, uuid: str, nvml: Any = None, *, allowed_pids: Collection[int] = ()) -> None:
        if nvml is None:
            require("energy", "setting the clocks of a GPU", "pynvml")
            import pynvml

            nvml = pynvml
            try:
                nvml.nvmlInit()
            except nvml.NVMLError as error:
                raise EnergyError(
                    f"clocks cannot be set here: NVML says {error}; run on a machine with an "
                    "NVIDIA driver"
                ) from None
        if uuid.startswith("MIG-"):
            raise EnergyError(
                f"device = {uuid} is a MIG slice, and clocks belong to the whole GPU, which others "
                "share: ask the site for a whole GPU"
            )
        self.uuid = uuid
        self._nvml = nvml
        self._allowed_pids = allowed_pids
        self._checked = False
        with self._explained(f"find GPU {uuid}"):
            self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)

    def clocks_mhz(self) -> tuple[int, ...] | Unavailable:
        """SM clocks that it supports, ascending."""
        return self._clocks_mhz

    @cached_property
    def _clocks_mhz(self) -> tuple[int, ...] | Unavailable:
        """At its highest memory clock."""
        try:
            memory_mhz = max(self._nvml.nvmlDeviceGetSupportedMemoryClocks(self._handle))
            clocks = self._nvml.nvmlDeviceGetSupportedGraphicsClocks(self._handle, memory_mhz)
        except (self._nvml.NVMLError, ValueError) as error:
            return Unavailable(f"NVML does not list the clocks of {self.uuid}: {error}")
        return tuple(sorted(clocks))

    def power_limit_watts(self) -> float | Unavailable:
        """The power limit in force."""
        try:
            return float(self._nvml.nvmlDeviceGetPowerManagementLimit(self._handle)) / 1000.0
        except self._nvml.NVMLError as error:
            return Unavailable(f"NVML does not tell the power limit of {self.uuid}: {error}")

    def lock_clock(self, clock_mhz: int) -> None:
        """Lock the SM clock.

        Raises:
            EnergyError: For an unsupported clock, a shared GPU or what is refused.
        """
        check_clock(clock_mhz, self.clocks_mhz(), self.uuid)
        self._check_once()
        self._set_clock(clock_mhz)

    def limit_power(self, watts: float) -> None:
        """Set the power limit.

        Raises:
            EnergyError: For a limit out of range, a shared GPU or what is refused.
        """
        with self._explained(f"read the range of power limits of {self.uuid}"):
            bounds = self._nvml.nvmlDeviceGetPowerManagementLimitConstraints(self._handle)
        low, high = (bound / 1000.0 for bound in bounds)
        if not low <= watts <= high:
            raise EnergyError(
                f"power limit = {watts:g} W is outside {low:g} to {high:g} W, which "
                f"{self.uuid} takes"
            )
        self._check_once()
        self._set_power(watts)

    def restore(self, power_watts: float | None = None, *, clock: bool = True) -> None:
        """Give the clock back to the driver, and put the power limit back where one is given.

        Raises:
            EnergyError: With all that is refused; what is not refused is done.
        """
        steps = [self._reset_clock] if clock else []
        if power_watts is not None:
            steps.append(partial(self._set_power, power_watts))
        failures = []
        for step in steps:
            try:
                step()
            except EnergyError as error:
                failures.append(str(error))
        if failures:
            raise EnergyError("; ".join(failures))

    def description(self) -> Mapping[str, str]:
        """Text from which another process makes this controller again."""
        return {"kind": "nvml", "uuid": self.uuid}

    @contextmanager
    def _explained(self, aim: str) -> Iterator[None]:
        """Turn NVML's errors into sentences with a remedy.

        Args:
            aim: What is tried, e.g. "lock the clock of GPU-8f6e...".

        Raises:
            EnergyError: In place of an NVMLError.
        """
        try:
            yield
        except self._nvml.NVMLError as error:
            if getattr(error, "value", None) == self._nvml.NVML_ERROR_NO_PERMISSION:
                raise EnergyError(f"no privilege to {aim}: {NO_PRIVILEGE}") from None
            raise EnergyError(f"cannot {aim}: NVML says {error}") from None

    def _check_once(self) -> None:
        # Once: NVML's list of processes takes longer than a clock change.
        if not self._checked:
            self._check()
            self._checked = True

    def _check(self) -> None:
        """Refuse a GPU whose clocks others depend on.

        Raises:
            EnergyError: When it is divided by MIG, or processes of others compute on it.
        """
        try:
            divided = bool(self._nvml.nvmlDeviceGetMigMode(self._handle)[0])
        except self._nvml.NVMLError as error:
            divided = False
            if getattr(error, "value", None) != self._nvml.NVML_ERROR_NOT_SUPPORTED:
                raise EnergyError(
                    f"cannot tell whether {self.uuid} is divided by MIG: NVML says {error}; clocks "
                    "are set only on undivided GPUs"
                ) from None
        if divided:
            raise EnergyError(
                f"{self.uuid} is divided by MIG, and a clock would hold for all its slices: "
                "disable MIG or take another GPU"
            )
        with self._explained(f"list the processes on {self.uuid}"):
            found = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        children = psutil.Process().children(recursive=True)
        own = {os.getpid(), *(child.pid for child in children), *self._allowed_pids}
        foreign = sorted({int(process.pid) for process in found} - own)
        if foreign:
            raise EnergyError(
                f"{self.uuid} is shared with process {', '.join(map(str, foreign))}: clocks hold "
                "for the whole GPU, so take one of your own, or name these in allowed_pids if they "
                "are yours"
            )

    def _set_clock(self, clock_mhz: int) -> None:
        with self._explained(f"lock the clock of {self.uuid} to {clock_mhz} MHz"):
            self._nvml.nvmlDeviceSetGpuLockedClocks(self._handle, clock_mhz, clock_mhz)

    def _reset_clock(self) -> None:
        with self._explained(f"reset the clock of {self.uuid}"):
            self._nvml.nvmlDeviceResetGpuLockedClocks(self._handle)

    def _set_power(self, watts: float) -> None:
        with self._explained(f"limit the power of {self.uuid} to {watts:g} W"):
            self._nvml.nvmlDeviceSetPowerManagementLimit(self._handle, round(watts * 1000.0))


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
        # About one GPU, about the request, or in plain text.
        try:
            answer = json.loads(body)
            errors = answer.get("errors") or {"": answer["error"]}
            body = "; ".join(map(str, errors.values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            pass
        words = " ".join(body.split())[:_SENTENCE_CHARACTERS] or "no reason given"
        raise EnergyError(
            f"zeusd at {self.socket_path} refused {path} (HTTP {status}): {words}{remedy}"
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


class ZeusdController(NvmlController):
    """Sets one GPU by way of a zeusd on the same machine. Needs no privilege of its own.

    NVML is only read: zeusd counts GPUs by NVML's index, and does not know who shares them.

    Args:
        uuid: As of `NvmlController`.
        zeusd: The daemon; the one of the environment by default.
        nvml: As of `NvmlController`.
        allowed_pids: As of `NvmlController`.

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
        super().__init__(uuid, nvml, allowed_pids=allowed_pids)
        with self._explained(f"read the index of {uuid}"):
            self._index = int(self._nvml.nvmlDeviceGetIndex(self._handle))
        self._zeusd = zeusd or Zeusd()

    def description(self) -> Mapping[str, str]:
        """Text from which another process makes this controller again; no token is written down."""
        return {"kind": "zeusd", "uuid": self.uuid, "socket": self._zeusd.socket_path}

    def _check(self) -> None:
        super()._check()
        self._zeusd.check()

    def _set_clock(self, clock_mhz: int) -> None:
        clocks = {"min_clock_mhz": clock_mhz, "max_clock_mhz": clock_mhz}
        self._zeusd.post("/gpu/set_gpu_locked_clocks", gpu_ids=self._index, **clocks)

    def _reset_clock(self) -> None:
        self._zeusd.post("/gpu/reset_gpu_locked_clocks", gpu_ids=self._index)

    def _set_power(self, watts: float) -> None:
        milliwatts = round(watts * 1000.0)
        self._zeusd.post("/gpu/set_power_limit", gpu_ids=self._index, power_limit_mw=milliwatts)


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket: the standard library has only the two halves of it."""

    def __init__(self, socket_path: str) -> None:
        super().__init__("localhost", timeout=_DEADLINE_SECONDS)
        self._socket_path = socket_path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_DEADLINE_SECONDS)
        self.sock.connect(self._socket_path)


def opened(description: Mapping[str, str]) -> NvmlController:
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
