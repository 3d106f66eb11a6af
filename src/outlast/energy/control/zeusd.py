"""Locked clocks and power limits through zeusd, the privileged daemon of the Zeus project.

Speaks the HTTP interface of zeusd 0.4.0 and 0.5.0 over its Unix socket: settings are query
parameters of a POST without a body, e.g.
``POST /gpu/set_gpu_locked_clocks?gpu_ids=0&min_clock_mhz=1200&max_clock_mhz=1200&block=true``.
zeusd 0.1 and 0.2 took JSON at ``/gpu/0/set_gpu_locked_clocks`` and are refused.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from outlast.energy.control.controller import check_clock, try_all
from outlast.energy.control.gpu import Gpu, load_nvml
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from outlast.hardware.figure import Unavailable

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
        """How another process can make this controller again; no token is written down."""
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
    """What the daemon said: of one GPU, of the request, or in plain text."""
    try:
        answer = json.loads(body)
        errors = answer.get("errors") or {"": answer["error"]}
        words = "; ".join(map(str, errors.values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        words = body
    return " ".join(words.split())[:_SENTENCE_CHARACTERS] or "no reason given"
