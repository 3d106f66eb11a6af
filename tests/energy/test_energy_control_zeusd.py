"""The client of zeusd, against a real HTTP server on a Unix socket that answers as zeusd does."""

import http.server
import json
import os
import socketserver
import threading
from urllib.parse import parse_qs, urlsplit

import pytest
from energy_fakes import FakeNvml

from outlast.energy.control import Setting, applied
from outlast.energy.controllers import Zeusd, ZeusdController
from outlast.errors import EnergyError

FIELDS = {
    "/gpu/set_gpu_locked_clocks": {"gpu_ids", "min_clock_mhz", "max_clock_mhz", "block"},
    "/gpu/reset_gpu_locked_clocks": {"gpu_ids", "block"},
    "/gpu/set_power_limit": {"gpu_ids", "power_limit_mw", "block"},
}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if urlsplit(self.path).path != "/discover" or self.server.old:
            return self.answer(404, "")
        return self.answer(200, json.dumps({"enabled_api_groups": self.server.groups}))

    def do_POST(self):
        parts = urlsplit(self.path)
        query = {name: found[0] for name, found in parse_qs(parts.query).items()}
        if self.server.token and self.headers["Authorization"] != f"Bearer {self.server.token}":
            return self.answer(401, json.dumps({"error": "Authentication required."}))
        # zeusd answers unknown and missing fields with 400.
        if set(query) != FIELDS.get(parts.path) or self.headers["Content-Length"] not in {
            None,
            "0",
        }:
            return self.answer(400, json.dumps({"error": "unknown field"}))
        if self.server.refusal and self.server.refused in parts.path:
            return self.answer(*self.server.refusal)
        self.server.seen.append((parts.path, query))
        return self.answer(200, "")

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        # The client may be gone as soon as it has what the header promised.
        if body:
            self.wfile.write(body.encode())

    def address_string(self):
        return "unix"

    def log_message(self, *_):
        pass


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True

    def __init__(self, path):
        super().__init__(str(path), Handler)
        self.groups = ["gpu-control", "gpu-read", "cpu-read"]
        self.old, self.token, self.refusal, self.seen = False, "", None, []
        self.refused = ""


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.delenv("ZEUSD_TOKEN", raising=False)
    with Server(tmp_path / "zeusd.sock") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def controller(server, **settings):
    zeusd = Zeusd(server.server_address, **settings)
    return ZeusdController("GPU-1", zeusd, nvml=FakeNvml(pids=[os.getpid()]))


def test_clocks_and_limits_reach_the_daemon_and_are_given_back(server, tmp_path):
    with applied(Setting(1200, 450.5), controller(server), tmp_path / "lease.json"):
        pass
    gpu = {"gpu_ids": "3", "block": "true"}
    clocks = {"min_clock_mhz": "1200", "max_clock_mhz": "1200"}
    assert server.seen == [
        ("/gpu/set_gpu_locked_clocks", gpu | clocks),
        ("/gpu/set_power_limit", gpu | {"power_limit_mw": "450500"}),
        ("/gpu/reset_gpu_locked_clocks", gpu),
        ("/gpu/set_power_limit", gpu | {"power_limit_mw": "700000"}),
    ]


def test_the_limit_is_put_back_although_the_daemon_refuses_to_reset_the_clock(server):
    server.refusal, server.refused = (500, json.dumps({"error": "stuck"})), "reset_gpu"
    limit = ("/gpu/set_power_limit", {"gpu_ids": "3", "block": "true", "power_limit_mw": "700000"})
    with pytest.raises(EnergyError, match=r"reset_gpu_locked_clocks.*stuck"):
        controller(server).restore(700.0)
    assert server.seen == [limit]
    controller(server).restore(700.0, clock=False)
    assert server.seen == [limit, limit]


def test_the_token_comes_from_the_environment_and_is_not_written_into_a_lease(server, monkeypatch):
    server.token = "secret"
    with pytest.raises(EnergyError, match=r"HTTP 401.*Authentication required.*ZEUSD_TOKEN"):
        controller(server).lock_clock(1200)
    monkeypatch.setenv("ZEUSD_TOKEN", "secret")
    allowed = controller(server)
    allowed.lock_clock(1200)
    assert allowed.description() == {
        "kind": "zeusd",
        "uuid": "GPU-1",
        "socket": server.server_address,
    }


def test_what_the_daemon_refuses_is_told_in_its_words(server):
    server.refusal = (403, json.dumps({"errors": {"3": "NVML error: no permission"}}))
    with pytest.raises(
        EnergyError, match=r"HTTP 403.: NVML error: no permission; run zeusd as root"
    ):
        controller(server).lock_clock(1200)
    server.refusal = (500, "")
    with pytest.raises(EnergyError, match=r"HTTP 500.: no reason given"):
        controller(server).lock_clock(1200)


def test_an_old_daemon_or_one_without_control_is_refused_before_anything_is_set(server):
    server.groups = ["gpu-read"]
    with pytest.raises(EnergyError, match=r"may not set clocks.*gpu-control"):
        controller(server).lock_clock(1200)
    server.old = True
    with pytest.raises(EnergyError, match=r"before 0\.4\.0: update"):
        controller(server).lock_clock(1200)
    assert server.seen == []


def test_a_shared_gpu_is_refused_although_the_daemon_would_take_it(server):
    shared = ZeusdController("GPU-1", Zeusd(server.server_address), nvml=FakeNvml(pids=[1]))
    with pytest.raises(EnergyError, match="shared with process 1"):
        shared.lock_clock(1200)
    assert server.seen == []


def test_no_daemon_is_said_with_the_path(tmp_path):
    missing = ZeusdController("GPU-1", Zeusd(tmp_path / "none.sock"), nvml=FakeNvml())
    with pytest.raises(EnergyError, match=r"does not answer at .*none\.sock.*ZEUSD_SOCK_PATH"):
        missing.lock_clock(1200)
