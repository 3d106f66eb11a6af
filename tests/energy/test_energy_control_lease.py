"""Clocks are given back whatever ends the process that set them."""

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pytest
from energy_fakes import FakeNvml, FileController, open_file

from outlast.energy import lease as leases
from outlast.energy.control import DryRun, Setting, applied
from outlast.energy.controllers import NvmlController
from outlast.energy.lease import leases as found_leases
from outlast.energy.lease import restore
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

HERE = Path(__file__).parent
HEAD = f"""
import os, signal, sys, time
# Under nohup, a program starts with a hang-up that is ignored.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.path.insert(0, {str(HERE)!r})
from energy_fakes import FileController
from outlast.energy.control import Setting, applied
device, lease = FileController(sys.argv[1], lease=sys.argv[2]), sys.argv[2]

def work():
    # One long sleep would not end for a signal that comes just before it.
    while True:
        time.sleep(0.01)
"""
HOLD = """
with applied(900, device, lease):
    print("set", flush=True)
    work()
"""


@pytest.fixture
def device(tmp_path):
    return FileController.fresh(tmp_path / "gpu")


@pytest.fixture
def lease(tmp_path):
    return tmp_path / "leases" / "gpu.json"


def start(body, device, lease):
    """Run a program until it says that it has set the clock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD + body, str(device.path), str(lease)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "set\n", process.stderr.read()
    assert device.state["clock"] == 900
    return process


def end(process, number):
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def given_back(device, lease):
    return device.state["clock"] is None and device.state["watts"] == 400.0 and not lease.exists()


def test_the_end_of_the_block_gives_back_clock_limit_and_lease(device, lease):
    device.lease = lease
    with applied(Setting(900, 300.0), device, lease) as handle:
        assert device.state["clock"] == 900
        assert device.state["watts"] == 300.0
        held = json.loads(lease.read_text())
        assert held["pid"] == os.getpid()
        assert held["devices"][0]["previous_power_watts"] == 400.0
        assert found_leases(lease.parent) == (lease,)
        assert handle.lock_clock(600)
    assert given_back(device, lease)
    assert found_leases(lease.parent) == ()
    # After the end nobody would give a clock back, so none is set.
    assert not handle.lock_clock(1200)
    assert device.state["clock"] is None
    assert list(lease.parent.iterdir()) == []


def test_an_exception_gives_back(device, lease):
    def train():
        with applied(900, device, lease):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert given_back(device, lease)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_kills_gives_back_first(device, lease, number):
    status, _, _ = end(start(HOLD, device, lease), number)
    assert status == -number
    assert given_back(device, lease)


def test_an_earlier_handler_still_runs_and_later_clocks_are_not_set(device, lease):
    body = """
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
with applied(900, device, lease) as handle:
    print("set", flush=True)
    while not stop:
        time.sleep(0.01)
    print("set after signal:", handle.lock_clock(1200))
handler = signal.getsignal(signal.SIGTERM)
print("handler is back:", handler(0, None) is None and len(stop) == 2)
"""
    status, out, err = end(start(body, device, lease), signal.SIGTERM)
    assert (status, out) == (0, "set after signal: False\nhandler is back: True\n"), err
    assert given_back(device, lease)


def test_a_process_that_ends_while_a_daemon_thread_is_in_the_block_gives_back(device, lease):
    body = """
import threading

def train():
    with applied(900, device, lease):
        print("set", flush=True)
        work()

threading.Thread(target=train, daemon=True).start()
sys.stdin.readline()
"""
    process = start(body, device, lease)
    process.communicate("go\n", timeout=30)
    assert process.returncode == 0
    assert given_back(device, lease)


def test_a_forked_child_that_is_killed_leaves_the_clocks_of_its_parent_alone(device, lease):
    body = """
with applied(900, device, lease):
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, b".")
        work()
    # A signal that comes before the interpreter has come through the fork would be lost.
    os.read(reader, 1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    print("set", flush=True)
    sys.stdin.read(1)
    print(os.WTERMSIG(status), device.state["clock"], os.path.exists(lease))
"""
    process = start(body, device, lease)
    out, err = process.communicate("x", timeout=30)
    assert out == f"{signal.SIGTERM.value} 900 True\n", err
    assert given_back(device, lease)


def test_after_kill_9_the_lease_stays_and_restore_gives_back(device, lease):
    process = start(HOLD, device, lease)
    with pytest.raises(EnergyError, match=f"process {process.pid} on .* is alive: end it"):
        restore(lease, open_controller=open_file)
    end(process, signal.SIGKILL)
    assert device.state["clock"] == 900
    with (
        pytest.raises(EnergyError, match="run outlast energy restore"),
        applied(900, device, lease),
    ):
        pytest.fail("a second lease was taken")
    held = restore(lease, open_controller=open_file)
    assert held.pid == process.pid
    assert given_back(device, lease)
    with pytest.raises(EnergyError, match="there is no lease"):
        restore(lease, open_controller=open_file)


def test_force_restores_under_a_live_process_which_then_leaves_new_clocks_alone(device, lease):
    process = start(HOLD, device, lease)
    restore(lease, force=True, open_controller=open_file)
    assert given_back(device, lease)
    with applied(1200, device, lease):
        end(process, signal.SIGTERM)
        assert device.state["clock"] == 1200
        assert lease.exists()
    assert given_back(device, lease)


def test_a_second_apply_is_refused_and_changes_nothing(device, lease):
    with applied(900, device, lease):
        with (
            pytest.raises(
                EnergyError, match=f"process {os.getpid()} on .* holds the clocks already"
            ),
            applied(600, device, lease),
        ):
            pytest.fail("a second lease was taken")
        assert device.state["clock"] == 900
    assert given_back(device, lease)


def test_one_of_many_processes_gets_the_lease(device, lease):
    body = (
        HEAD
        + """
try:
    with applied(900, device, lease):
        print("set", flush=True)
        work()
except Exception as error:
    print(error, flush=True)
"""
    )
    command = [sys.executable, "-c", body, str(device.path), str(lease)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    lines = [process.stdout.readline() for process in processes]
    for process in processes:
        end(process, signal.SIGTERM)
    assert sorted(line == "set\n" for line in lines) == [False, False, True]
    assert given_back(device, lease)


def test_the_time_of_a_lease_ends_it_although_the_block_goes_on(device, lease):
    with applied(900, device, lease, lasts_seconds=0.05) as handle:
        deadline = time.monotonic() + 20
        while not given_back(device, lease) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert handle.over
    assert device.state["log"] == ["clock 900", "restore"]


def test_an_expired_lease_is_restored_without_force(device, lease):
    held = leases.Held(
        uuid="gpu",
        controller=dict(device.description()),
        clock_mhz=900,
        power_watts=None,
        previous_power_watts=None,
    )
    leases.Lease.of_this_process((held,), 1e-6).publish(lease)
    device.lock_clock(900)
    time.sleep(0.001)
    restore(lease, open_controller=open_file)
    assert given_back(device, lease)


def test_a_reused_pid_and_another_boot_are_told_from_a_live_owner():
    mine = leases.Lease.of_this_process((), 60.0)
    assert mine.alive
    changes = [{"started_seconds": mine.started_seconds - 50}, {"boot": "another"}, {"pid": 2**22}]
    for change in changes:
        fields = {name: getattr(mine, name) for name in mine.__slots__} | change
        assert not leases.Lease(**fields).alive
    elsewhere = {name: getattr(mine, name) for name in mine.__slots__} | {"host": "elsewhere"}
    assert leases.Lease(**elsewhere).alive


def test_what_cannot_be_set_leaves_no_lease_and_gives_back_the_rest(tmp_path, device, lease):
    other = FileController.fresh(tmp_path / "gpu2")
    other.broken = "watts"
    with (
        pytest.raises(EnergyError, match="refuses watts 300"),
        applied([Setting(900), Setting(600, 300.0)], [device, other], lease),
    ):
        pytest.fail("the block ran")
    assert given_back(device, lease)
    assert other.state["log"] == ["clock 600", "restore", "restore watts 400"]


def test_a_missing_privilege_is_the_error_that_is_told(lease):
    with (
        pytest.raises(EnergyError, match="no privilege to lock"),
        applied(1200, NvmlController("GPU-1", FakeNvml(refuse=4)), lease),
    ):
        pytest.fail("the block ran")
    assert not lease.exists()


def test_a_device_that_cannot_be_given_back_keeps_its_lease(device, lease):
    device.broken = "restore"
    with pytest.raises(EnergyError, match=r"may still be set.*outlast energy restore"):  # noqa: SIM117
        with applied(900, device, lease):
            pass
    assert lease.exists()
    with pytest.raises(EnergyError, match=r"the lease .* stays"):
        restore(lease, force=True, open_controller=lambda _: device)
    assert lease.exists()
    restore(lease, force=True, open_controller=open_file)
    assert given_back(device, lease)


def test_settings_apply_in_a_thread_too_and_signals_are_said_to_be_unhandled(device, lease):
    def work():
        with applied(900, device, lease):
            pass

    thread = threading.Thread(target=work)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        thread.start()
        thread.join()
    assert [each.category for each in said] == [RuntimeWarning]
    assert "SIGTERM or SIGHUP they stay locked" in str(said[0].message)
    assert device.state["log"] == ["clock 900", "restore"]
    assert not lease.exists()


def damaged(**controller):
    device = dict.fromkeys(["uuid", "clock_mhz", "power_watts", "previous_power_watts"])
    content = {"version": 1, "devices": [device | {"controller": controller}]}
    fields = {"host": "a", "boot": "b", "pid": 1, "started_seconds": 1.0}
    return json.dumps(content | fields | {"expires_unix_seconds": 1.0})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version": 9}',
        "\x00",
        '{"version": 1}',
        damaged(),
        damaged(kind="nvml"),
        damaged(kind="zeusd", uuid="GPU-1"),
        damaged(kind="file").replace('"pid": 1', '"pid": Infinity'),
    ],
)
def test_a_file_that_is_no_lease_is_refused_and_kept(lease, text):
    lease.parent.mkdir()
    lease.write_text(text)
    with pytest.raises(EnergyError, match="is no lease of clocks"):
        restore(lease, force=True)
    assert lease.exists()


def test_a_lease_of_an_unknown_controller_is_kept(device, lease):
    with applied(900, device, lease):
        with pytest.raises(EnergyError, match='the controller "file"; known are nvml and zeusd'):
            restore(lease, force=True)
        assert lease.exists()


def test_wrong_calls_are_refused(device, lease):
    for settings, controllers, words in [
        ([Setting(900)] * 2, device, "2 settings are given for 1 devices"),
        (900, [device, DryRun("GPU-1")], "all be dry runs, or none"),
        (900, [], "at least one"),
    ]:
        with pytest.raises(EnergyError, match=words), applied(settings, controllers, lease):
            pytest.fail("the block ran")
    with (
        pytest.raises(EnergyError, match="lasts_seconds"),
        applied(900, device, lease, lasts_seconds=0.0),
    ):
        pytest.fail("the block ran")
    assert not lease.exists()


def test_a_limit_set_by_the_handle_is_put_back_and_its_clock_is_left_alone(device, lease):
    with applied(Setting(power_watts=300.0), device, lease) as handle:
        handle.limit_power(200.0)
    assert device.state["log"] == ["watts 300", "watts 200", "restore watts 400"]
    with applied(900, device, lease) as handle:
        assert json.loads(lease.read_text())["devices"][0]["power_watts"] is None
        assert handle.limit_power(250.0)
        assert json.loads(lease.read_text())["devices"][0]["power_watts"] == 250.0
    assert given_back(device, lease)
    assert device.state["log"][3:] == ["clock 900", "watts 250", "restore", "restore watts 400"]


def test_what_the_handle_set_is_given_back_after_kill_9_too(device, lease):
    body = """
with applied(Setting(900), device, lease) as handle:
    handle.limit_power(300.0)
    print("set", flush=True)
    work()
"""
    end(start(body, device, lease), signal.SIGKILL)
    assert device.state["watts"] == 300.0
    restore(lease, open_controller=open_file)
    assert given_back(device, lease)


def test_a_limit_that_could_not_be_put_back_is_not_set(device, lease):
    device.power_limit_watts = lambda: Unavailable("no meter")
    with applied(900, device, lease) as handle:
        with pytest.raises(EnergyError, match=r"before could not be read.*power_watts = 300"):
            handle.limit_power(300.0)
        assert device.state["watts"] == 400.0
    with (
        pytest.raises(EnergyError, match=r"no meter.*could not be put back"),
        applied(Setting(power_watts=300.0), device, lease),
    ):
        pytest.fail("the block ran")
    assert given_back(device, lease)


def test_a_handle_whose_lease_was_taken_sets_nothing_new(device, lease):
    with applied(900, device, lease) as handle:
        restore(lease, force=True, open_controller=open_file)
        with pytest.raises(EnergyError, match="was taken from this process"):
            handle.limit_power(300.0)
        assert device.state["watts"] == 400.0


def test_the_power_limit_is_put_back_although_the_clock_cannot_be(device, lease):
    device.broken = "restore"
    with pytest.raises(EnergyError, match=r"restore; the device refuses restore watts"):  # noqa: SIM117
        with applied(Setting(900, 300.0), device, lease):
            pass

    class Stuck(FileController):
        def restore(self, power_watts=None, *, clock=True):
            super().restore(power_watts, clock=False)
            raise EnergyError("the clock is stuck")

    with pytest.raises(EnergyError, match=r"the lease .* stays.*stuck"):
        restore(lease, force=True, open_controller=lambda _: Stuck(device.path))
    assert device.state["watts"] == 400.0
    assert device.state["clock"] == 900
    assert lease.exists()


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTLAST_LEASES", str(tmp_path / "place"))
    return tmp_path / "place"


def test_the_place_of_leases_does_not_depend_on_the_job(monkeypatch, tmp_path, place):
    assert leases.lease_path("GPU-1") == place / "GPU-1.json"
    monkeypatch.delenv("OUTLAST_LEASES")
    found = leases.lease_directory()
    for variable in ("TMPDIR", "XDG_RUNTIME_DIR", "HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert leases.lease_directory() == found
    assert str(os.getuid()) in found.name


def test_leases_are_neither_put_nor_looked_for_where_others_can_write(device, place):
    path = leases.lease_path("gpu")
    with applied(900, device, path):
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
        assert found_leases() == (path,)
    place.chmod(0o777)
    refused_place(device, path, "open to other users .mode 777.*chmod 700")
    place.rmdir()
    assert found_leases() == ()
    other = place.with_name("other")
    other.mkdir(mode=0o700)
    place.symlink_to(other)
    refused_place(device, path, "is not a directory of user")


def test_a_place_or_a_lease_of_another_user_is_refused(device, place, monkeypatch):
    path = leases.lease_path("gpu")
    with applied(900, device, path):
        uid = os.getuid()
        with monkeypatch.context() as patch:
            patch.setattr(os, "getuid", lambda: uid + 1)
            with pytest.raises(EnergyError, match=f"belongs to user {uid}"):
                restore(path, force=True, open_controller=open_file)
            with pytest.raises(EnergyError, match=f"is not a directory of user {uid + 1}"):
                found_leases()
            assert found_leases(place) == ()
        assert device.state["clock"] == 900
    assert given_back(device, path)


def refused_place(device, path, words):
    with pytest.raises(EnergyError, match=words), applied(900, device, path):
        pytest.fail("the block ran")
    with pytest.raises(EnergyError, match=words):
        found_leases()
    assert device.state["clock"] is None


def test_every_device_has_its_own_default_lease():
    one, other = leases.lease_path("GPU-1/../x"), leases.lease_path("GPU-2")
    assert one != other
    assert one.parent == other.parent == leases.lease_directory()
