"""The sources of random numbers of a process, and those that objects hold.

A state is bytes: small, equal when the numbers to come are equal, and the same in every process.
"""

from __future__ import annotations

import pickle
import random
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Callable

_DEVICES = ("cuda", "xpu", "mps")
_HELD = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


class Source(NamedTuple):
    """A source of random numbers.

    Attributes:
        read: Gives its state.
        write: Sets its state.
    """

    read: Callable[[], bytes]
    write: Callable[[bytes], None]


def random_states() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's own generators, of all devices in use.

    What torch.compile draws for dropout comes from these, too.
    """
    states: dict[str, Any] = {name: source.read() for name, source in host_sources().items()}
    for device in _DEVICES:
        if _in_use(device):
            states[device] = [
                _bytes_of(tensor) for tensor in _states_of(device, getattr(torch, device))
            ]
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Set what `random_states` gave.

    Raises:
        AutosaveError: When a kind of device is not here that the states are of.
    """
    for name, source in host_sources().items():
        source.write(states[name])
    for device in _DEVICES:
        if device in states:
            _set_device(device, [_tensor_of(state) for state in states[device]])


def host_sources() -> dict[str, Source]:
    """Python's, NumPy's and torch's own generators of the host."""
    return {
        "python": Source(
            lambda: pickle.dumps(random.getstate()),
            lambda state: random.setstate(pickle.loads(state)),
        ),
        "numpy": Source(
            lambda: pickle.dumps(np.random.get_state(legacy=False)),  # noqa: NPY002 (of programs)
            lambda state: np.random.set_state(pickle.loads(state)),  # noqa: NPY002
        ),
        "torch": _of_torch(torch.default_generator),
    }


def source_of(value: Any) -> Source | None:
    """The source that an object is; None for any other object."""
    if not isinstance(value, _HELD):
        return None
    if isinstance(value, torch.Generator):
        return _of_torch(value)
    if isinstance(value, random.Random):
        return Source(
            lambda: pickle.dumps(value.getstate()),
            lambda state: value.setstate(pickle.loads(state)),
        )
    if isinstance(value, np.random.RandomState):
        return Source(
            lambda: pickle.dumps(value.get_state(legacy=False)),
            lambda state: value.set_state(pickle.loads(state)),
        )
    return Source(
        lambda: pickle.dumps(value.bit_generator.state),
        lambda state: setattr(value.bit_generator, "state", pickle.loads(state)),
    )


def _of_torch(generator: torch.Generator) -> Source:
    def write(state: bytes) -> None:
        generator.set_state(_tensor_of(state))

    return Source(lambda: _bytes_of(generator.get_state()), write)


def _bytes_of(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor_of(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _in_use(device: str) -> bool:
    """Whether random numbers may have been drawn on a kind of device."""
    module = getattr(torch, device)
    if device == "mps":
        return torch.backends.mps.is_available()
    return bool(module.is_available() and module.is_initialized())


def _states_of(device: str, module: Any) -> list[torch.Tensor]:
    if device == "mps":
        return [module.get_rng_state()]
    states: list[torch.Tensor] = module.get_rng_state_all()
    return states


def _set_device(device: str, states: list[torch.Tensor]) -> None:
    module = getattr(torch, device)
    if device == "mps":
        if not torch.backends.mps.is_available():
            raise _missing(device)
        module.set_rng_state(states[0])
        return
    if not module.is_available():
        raise _missing(device)
    # A program that uses one device may go on where there are fewer of them.
    for number, state in enumerate(states[: module.device_count()]):
        module.set_rng_state(state, number)


def _missing(device: str) -> AutosaveError:
    return AutosaveError(
        f"the program was saved with {device} devices in use, and there is none here; "
        "go on where there is one, or begin anew with another save directory"
    )
