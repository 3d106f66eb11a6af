"""A network that parts two groups, both alive: at most one side continues (network namespaces)."""

import contextlib
import ctypes
import multiprocessing
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from live_runs import Life, Plan, arena, assert_like_reference, group, require_torchft

pytestmark = pytest.mark.distributed
HERE, THERE = "10.201.77.1", "10.201.77.2"
CLONE_NEWNET = 0x40000000
SPACE, NEAR, FAR = "outlast-part", "outlast-near", "outlast-far"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture
def wire() -> Iterator[None]:
    """A namespace with a wire to it, or a skip where that is not permitted."""
    require_torchft()
    with contextlib.ExitStack() as stack:
        try:
            _ip("netns", "add", SPACE)
            stack.callback(_ip, "netns", "del", SPACE)
            _ip("link", "add", NEAR, "type", "veth", "peer", "name", FAR)
            _ip("link", "set", FAR, "netns", SPACE)
            _ip("addr", "add", f"{HERE}/24", "dev", NEAR)
            _ip("link", "set", NEAR, "up")
            for rest in (
                ("addr", "add", f"{THERE}/24", "dev", FAR),
                ("link", "set", FAR, "up"),
                ("link", "set", "lo", "up"),
            ):
                _ip("netns", "exec", SPACE, "ip", *rest)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield


def _elsewhere(number: int, address: str, out: Path, plan: Plan) -> None:
    with Path(f"/run/netns/{SPACE}").open() as space:
        # os.setns is there from Python 3.12 on.
        assert ctypes.CDLL(None).setns(space.fileno(), CLONE_NEWNET) == 0
    group(number, address, out, plan)


@pytest.mark.usefixtures("wire")
def test_only_the_side_of_the_lighthouse_goes_on(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    plan = Plan(steps=100_000, awaits=2, stop=stop)
    with arena(tmp_path) as groups:
        address = f"{HERE}:{groups.lighthouse.address.rpartition(':')[2]}"
        out = tmp_path / "far.jsonl"
        far = Life(
            multiprocessing.get_context("fork").Process(
                target=_elsewhere, args=(1, address, out, replace(plan, host=THERE, interface=FAR))
            ),
            out,
        )
        far.process.start()
        groups.lives.append(far)
        near = groups.start(0, replace(plan, host=HERE, interface=NEAR))
        near.wait_for(lambda life: len(life.steps()) >= 3)
        _ip("link", "set", NEAR, "down")
        near.wait_for(lambda life: [0, 1] in [each["share"] for each in life.steps()[-3:]])
        parted, steps = len(far.steps()), len(near.steps())
        near.wait_for(lambda life: len(life.steps()) >= steps + 20)
        assert len(far.steps()) == parted
        _ip("link", "set", NEAR, "up")
        far.wait_for(lambda life: "state_recovered" in life.of("event"))
        far.wait_for(lambda life: len(life.steps()) >= parted + 3)
        stop.touch()
        assert near.end() == far.end() == 0
    assert near.of("digest") == far.of("digest") != []
    assert_like_reference(near, len(near.steps()))
