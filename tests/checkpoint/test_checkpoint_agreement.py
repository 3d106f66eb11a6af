"""Group' words about a save, told by several threads at once."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from outlast.distributed.group import StoreAgreement

pytestmark = pytest.mark.distributed

Group = Callable[[int], Callable[..., list[Any]]]
THREADS, KEYS = 8, 40


def tell_from_threads() -> int:
    """Keys of several tiers at once; returns how many this rank still remembers."""
    dist.init_process_group("gloo")
    signals = StoreAgreement("agreement-test", timeout_seconds=60.0)
    say = signals.hear if dist.get_rank() else signals.tell
    problems: list[BaseException] = []

    def speak(tier: int) -> None:
        try:
            for each in range(KEYS):
                key = f"{tier}/{each}"
                say(key, "")
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=speak, args=(tier,)) for tier in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    dist.barrier()
    say("last", "")
    # Rank 0 hosts the store: it goes when the other has heard.
    signals.close()
    return len(signals._told)


def test_threads_of_several_tiers_tell_at_once(ranks: Group) -> None:
    remembered, _ = ranks(2)(tell_from_threads)
    assert remembered == 1
