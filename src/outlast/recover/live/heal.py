"""A group takes over the whole state of a peer, while the others go on with their step.

The peer serves its live tensors; it changes them at its next optimizer step, before which `close`
waits for who still reads. What was fetched is put in place only when all of it is there.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash
from torch import nn

from outlast.errors import RecoverError
from outlast.recover.live.reduce import RoundFailedError
from outlast.state.install import Saved, Targets, check_fit, find_targets, install
from outlast.state.live import State, collect, local_box
from outlast.state.tensors import dtype_name, opaque_array

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outlast.recover.live.membership import Seat
    from outlast.recover.live.rules import Member


_PATIENCE_SECONDS = 5.0


class Kind(NamedTuple):
    """Element type, without ``torch.``, and shape of a global tensor."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Fetched:
    """What a peer gave.

    Attributes:
        content: As made by `Transfer.serve`.
        bytes: Of the tensors.
    """

    content: Mapping[str, Any]
    bytes: int


class Transfer:
    """Serves this process's state to peers, and fetches theirs (torchft's HTTP transport).

    Args:
        state: What a training state consists of; see `outlast.state`.
        host: Under which peers reach this machine.
        timeout_seconds: Longest wait for a peer.

    Attributes:
        address: Where it is served.
    """

    def __init__(self, state: State, host: str, timeout_seconds: float) -> None:
        self._state = state
        self._host = host
        self._timeout_seconds = timeout_seconds
        self._limit = timedelta(seconds=timeout_seconds)
        self._patience = timedelta(seconds=min(timeout_seconds, _PATIENCE_SECONDS))
        self._listen()

    def _listen(self) -> None:
        from torchft.checkpointing import HTTPTransport

        try:
            # How long the server waits for a peer that takes nothing, and we for the server.
            self._server: Any = HTTPTransport(self._patience, num_chunks=0)
        except OSError as error:
            raise RecoverError(
                f"the server from which other groups would heal cannot listen: {error}; "
                "torchft needs IPv6 to be there"
            ) from None
        # Each request would be a line on the terminal.
        self._server._server.RequestHandlerClass.log_message = lambda *_: None
        port = self._server.address().rpartition(":")[2].partition("/")[0]
        self.address = f"http://{self._host}:{port}/checkpoint/"

    def serve(self, step: int, peers: list[int]) -> None:
        """Let `peers` read the state of `step` until `close` is called."""
        live = collect(self._state)
        buffers = _buffers(self._state)
        tensors, kinds = {}, {}
        for name, tensor in live.tensors.items():
            _, local = local_box(tensor)
            # A forward pass changes buffers, an optimizer step the rest.
            tensors[name] = local.clone() if id(tensor) in buffers else local
            kinds[name] = (dtype_name(tensor), tuple(tensor.shape))
        content = {
            "tensors": tensors,
            "kinds": kinds,
            "values": live.values,
            "random": _random_state(),
        }
        self._server.send_checkpoint(peers, step, content, self._limit)

    def close(self) -> None:
        """Wait for those who still read, and serve no more.

        Who still reads when a round has failed may be stopped. Then another server takes over: what
        that peer gets is of a step that is over, so that it has to heal again.
        """
        try:
            self._server.disallow_checkpoint()
        except TimeoutError:
            self._listen()

    def fetch(self, step: int, source: Member, seat: Seat) -> Fetched:
        """Read the state of `step` from a peer; nothing is put in place yet.

        Raises:
            RoundFailedError: When the peer is gone, or has another step by now.
        """
        done = threading.Event()
        found: list[Any] = []
        problem: list[Exception] = []

        def read() -> None:
            try:
                found.append(self._server.recv_checkpoint(0, source.serves, step, self._limit))
            except Exception as error:
                problem.append(error)
            done.set()

        # What arrives is only ever copied from.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        threading.Thread(target=read, daemon=True).start()
        why = seat.wait(done, [source], self._timeout_seconds)
        if why or problem:
            raise RoundFailedError(why or f"group {source.number} gave no state: {problem[0]}")
        tensors = found[0]["tensors"].values()
        return Fetched(found[0], sum(tensor.numel() * tensor.element_size() for tensor in tensors))

    def install(self, fetched: Fetched) -> None:
        """Put what was fetched in place.

        Raises:
            RecoverError: When it does not fit the live objects, which are then untouched.
        """
        content = fetched.content
        saved = Saved(
            {name: Kind(*kind) for name, kind in content["kinds"].items()},
            content["values"],
            content["values"],
        )
        targets = find_targets(self._state, saved)
        taken = {*targets.tensors, *targets.values}
        if misfit := check_fit(targets, saved, taken, ()):
            raise RecoverError(f"the state of another group does not fit this one's: {misfit}")
        _copy(targets, content["tensors"])
        install(self._state, targets, saved)
        _set_random_state(content["random"])

    def shutdown(self) -> None:
        """End the server."""
        self._server.allow_checkpoint(-1)
        self._server.shutdown()


def _copy(targets: Targets, tensors: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in targets.tensors.items():
            if name in tensors:
                _, local = local_box(tensor)
                local.copy_(tensors[name])


def _buffers(state: State) -> set[int]:
    modules = [item for item in state.values() if isinstance(item, nn.Module)]
    return {id(buffer) for module in modules for buffer in module.buffers()}


def _random_state() -> dict[str, torch.Tensor]:
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def _set_random_state(found: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(found["cpu"])
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda"])


def state_digest(state: State) -> str:
    """A hash of all bits of this process's part of a state: equal where the states are equal."""
    live = collect(state)
    total = xxhash.xxh3_128()
    for name in sorted(live.tensors):
        box, local = local_box(live.tensors[name])
        host = local.detach().cpu().contiguous()
        total.update(f"{name} {dtype_name(host)} {box}".encode())
        total.update(opaque_array(host, box).reshape(-1).view("u1").data)
    total.update(repr(sorted(live.values.items())).encode())
    return total.hexdigest()
