"""Random numbers continue where they were, whatever draws them."""

# ruff: noqa: NPY002 (programs use NumPy's global generator)

import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from outlast.autosave.resume.process import random_states, set_random_states, source_of
from outlast.errors import AutosaveError

DRAWS: dict[str, Callable[[], Any]] = {
    "python": random.random,
    "python gauss": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "numpy gauss": np.random.randn,
    "torch": lambda: torch.rand(3).tolist(),
    "torch gauss": lambda: torch.randn(1).item(),
    "dropout": lambda: nn.functional.dropout(torch.ones(64), 0.5).tolist(),
    "permutation": lambda: torch.randperm(40).tolist(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_repeated(name: str) -> None:
    draw = DRAWS[name]
    # An odd number: sources of normal numbers keep the second of each pair.
    draw()
    states = pickle.loads(pickle.dumps(random_states()))
    drawn = [draw() for _ in range(5)]
    assert [draw() for _ in range(5)] != drawn
    set_random_states(states)
    assert [draw() for _ in range(5)] == drawn


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "python": (random.Random, lambda own: own.random()),
    "numpy": (np.random.default_rng, lambda own: own.standard_normal()),
    "numpy philox": (
        lambda: np.random.Generator(np.random.Philox(1)),
        lambda own: own.standard_normal(),
    ),
    "numpy of old": (np.random.RandomState, lambda own: own.randn()),
    "torch": (torch.Generator, lambda own: torch.randn(3, generator=own).tolist()),
}


@pytest.mark.parametrize("name", HELD)
def test_sources_that_objects_hold_are_repeated(name: str) -> None:
    make, draw = HELD[name]
    own, other = make(), make()
    draw(own)
    source, heir = source_of(own), source_of(other)
    assert source is not None
    assert heir is not None
    state = source.read()
    drawn = [draw(own) for _ in range(5)]
    assert source.read() != state
    heir.write(state)
    assert [draw(other) for _ in range(5)] == drawn
    assert source_of(object()) is None


def test_another_bit_generator_of_numpys_is_kept() -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        states = random_states()
        drawn = np.random.rand(5).tolist()
        set_random_states(states)
        assert np.random.rand(5).tolist() == drawn
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without the device")
def test_missing_device_is_named() -> None:
    states = {**random_states(), "cuda": [bytes(16)]}
    with pytest.raises(AutosaveError, match="cuda devices in use, and there is none here"):
        set_random_states(states)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_numbers_of_a_gpu_are_repeated() -> None:
    torch.rand(3, device="cuda")
    states = pickle.loads(pickle.dumps(random_states()))
    dropout = torch.compile(lambda: nn.functional.dropout(torch.ones(64, device="cuda"), 0.5))
    drawn = [torch.rand(3, device="cuda").tolist(), dropout().tolist()]
    assert [torch.rand(3, device="cuda").tolist(), dropout().tolist()] != drawn
    set_random_states(states)
    assert [torch.rand(3, device="cuda").tolist(), dropout().tolist()] == drawn


@pytest.mark.distributed
def test_dropout_that_is_compiled_is_repeated() -> None:
    torch.compiler.reset()
    dropout = torch.compile(lambda numbers: nn.functional.dropout(numbers, 0.5) * 2)
    ones = torch.ones(64)
    dropout(ones)
    states = random_states()
    drawn = [dropout(ones).tolist() for _ in range(3)]
    assert drawn[0] != drawn[1]
    set_random_states(states)
    assert [dropout(ones).tolist() for _ in range(3)] == drawn
