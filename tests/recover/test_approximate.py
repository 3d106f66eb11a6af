"""A lost stage becomes the weighted mean of its neighbours, or is refused with a sentence."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from outlast.errors import RecoverError
from outlast.recover.approximate import fill_lost_layers


def _state(layers: int = 6) -> dict[str, torch.Tensor]:
    state = {"model.embed.weight": torch.zeros(2)}
    for layer in range(layers):
        state[f"model.layers.{layer}.weight"] = torch.full((2, 3), float(layer))
        state[f"model.layers.{layer}.steps"] = torch.tensor(7)
    return state


def test_the_neighbour_with_the_larger_gradient_counts_more() -> None:
    filled = fill_lost_layers(_state(), range(2, 4), (3.0, 1.0))
    assert filled.keys() == {f"model.layers.{n}.{of}" for n in (2, 3) for of in ("weight", "steps")}
    # Layer 2 is between 0 and 4, layer 3 between 1 and 5.
    assert torch.equal(filled["model.layers.2.weight"], torch.full((2, 3), 1.0))
    assert torch.equal(filled["model.layers.3.weight"], torch.full((2, 3), 2.0))
    assert filled["model.layers.2.steps"] == 7


@given(st.floats(0, 1e6), st.floats(1e-6, 1e6), st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_mean_lies_between_its_neighbours(a: float, b: float, dtype: torch.dtype) -> None:
    state = {name: each.to(dtype) for name, each in _state(3).items()}
    filled = fill_lost_layers(state, range(1, 2), (a, b))["model.layers.1.weight"]
    assert filled.dtype == dtype
    assert bool(((filled >= 0) & (filled <= 2)).all())


def test_a_real_model_goes_on_with_a_filled_stage() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=3, **sizes))
    state = model.state_dict()
    lost = {name for name in state if name.startswith("model.layers.1.")}
    filled = fill_lost_layers(
        {name: each for name, each in state.items() if name not in lost}, range(1, 2), (1.0, 1.0)
    )
    assert filled.keys() == lost
    model.load_state_dict({**state, **filled})
    tokens = torch.randint(0, 50, (2, 8))
    assert torch.isfinite(model(tokens, labels=tokens).loss)


@pytest.mark.parametrize("lost", [range(2), range(4, 6), range(1, 3)])
def test_stages_without_two_neighbours_are_refused(lost: range) -> None:
    with pytest.raises(RecoverError, match="cannot be filled from their neighbours"):
        fill_lost_layers(_state(), lost, (1.0, 1.0))


@pytest.mark.parametrize("norms", [(0.0, 0.0), (float("nan"), 1.0), (float("inf"), 1.0)])
def test_gradients_that_say_nothing_are_refused(norms: tuple[float, float]) -> None:
    with pytest.raises(RecoverError, match="give no weights for a mean"):
        fill_lost_layers(_state(), range(2, 4), norms)


def test_unlike_neighbours_are_refused() -> None:
    state = _state()
    state["model.layers.4.weight"] = torch.zeros(3, 2)
    with pytest.raises(RecoverError, match=r"weight is \(2, 3\)"):
        fill_lost_layers(state, range(2, 4), (1.0, 1.0))
    state = _state()
    state["model.layers.5.steps"] = torch.tensor(8)
    with pytest.raises(RecoverError, match="steps is of whole numbers that differ"):
        fill_lost_layers(state, range(2, 4), (1.0, 1.0))
