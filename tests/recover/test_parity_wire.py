"""Members tell each other a little or much, and none waits for ever."""

import pytest
import torch.distributed as dist
from forked import run_ranks

from outlast.errors import RecoverError
from outlast.recover.parity import Transport

pytestmark = pytest.mark.distributed

LENGTHS = ([0, 0, 0], [0, 1, 5], [1016, 3, 1016], [1017, 0, 5], [100_000, 1017, 1])


def _content(rank: int, length: int) -> bytes:
    return bytes((rank + place) % 251 for place in range(length))


def _gather() -> list[list[bytes]]:
    dist.init_process_group("gloo")
    wire = Transport(dist.group.WORLD, 64, 60.0)
    rank = dist.get_rank()
    return [wire.gather(_content(rank, lengths[rank])) for lengths in LENGTHS]


def test_everybody_hears_what_everybody_says() -> None:
    expected = [
        [_content(rank, length) for rank, length in enumerate(lengths)] for lengths in LENGTHS
    ]
    assert run_ranks(3, _gather) == [expected] * 3


def _alone() -> str:
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    wire = Transport(dist.group.WORLD, 64, 1.0)
    said = ""
    if dist.get_rank() == 0:
        with pytest.raises(RecoverError) as caught:
            wire.gather(b"hello")
        said = str(caught.value)
        store.set("given up", "")
    store.wait(["given up"])
    return said


def test_a_member_that_says_nothing_is_waited_for_so_long_only() -> None:
    said = run_ranks(2, _alone)[0]
    assert said.startswith("the exchange of parity with the others failed, or took longer than 1 s")
