"""Serving a state to peers, of which one may take nothing and never go away."""

import socket
from urllib.parse import urlparse

import pytest
import torch
from live_runs import require_torchft


@pytest.mark.slow
def test_a_peer_that_takes_nothing_does_not_hold_up_who_serves_it() -> None:
    require_torchft()
    from outlast.recover.live import Transfer

    # More than the network's buffers hold.
    model = torch.nn.Linear(4096, 4096)
    transfer = Transfer({"model": model}, "127.0.0.1", timeout_seconds=1.0)
    transfer.serve(3, [1])
    first = urlparse(transfer.address)
    with socket.create_connection((first.hostname, first.port), timeout=10.0) as stopped:
        stopped.sendall(b"GET /checkpoint/3/full HTTP/1.0\r\n\r\n")
        assert stopped.recv(1)
        transfer.close()
        # The next peer is served, by the same server or by another.
        transfer.serve(4, [1])
        found = transfer._server.recv_checkpoint(0, transfer.address, 4, transfer._limit)
    assert torch.equal(found["tensors"]["model.weight"], model.weight)
    transfer.shutdown()
