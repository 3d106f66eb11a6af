import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from outlast.errors import TensorizeError
from outlast.tensorize import LatentLinear, latent_contexts
from outlast.tensorize.low_rank import link_by_name, link_latents


class Block(nn.Module):
    def __init__(self, width: int = 8, rank: int = 3, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=torch.float64)
        self.up_proj = LatentLinear(width, 12, rank, dtype=torch.float64, **options)
        self.down_proj = LatentLinear(12, width, 2, dtype=torch.float64, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(torch.tanh(self.up_proj(self.norm(x))))


class Model(nn.Module):
    def __init__(self, depth: int = 4, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(**options) for _ in range(depth))
        self.checkpointing: dict[str, Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.checkpointing is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, **self.checkpointing)
        return x


def by_hand(model: Model, x: Tensor) -> Tensor:
    """What the model computes, by the paper's equation."""
    before: dict[str, Tensor | None] = {"up_proj": None, "down_proj": None}

    def crossed(name: str, layer: LatentLinear, x: Tensor) -> Tensor:
        h = x @ layer.down.weight.t()
        last, before[name] = before[name], h
        gate = 1.0 if layer.gate is None else layer.gate
        h = h if last is None else h + gate * last
        return h @ layer.up.weight.t() + layer.up.bias

    for block in model.layers:
        middle = crossed("up_proj", block.up_proj, block.norm(x))
        x = x + crossed("down_proj", block.down_proj, torch.tanh(middle))
    return x


def gradients(model: Model, y: Tensor) -> list[Tensor]:
    parameters = [each for each in model.parameters() if each.requires_grad]
    return list(torch.autograd.grad(y.square().sum(), parameters))


def same(one: list[Tensor], other: list[Tensor]) -> None:
    for found, expected in zip(one, other, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.fixture
def model() -> Iterator[Model]:
    torch.manual_seed(0)
    made = Model()
    link_by_name(made, "vector")
    with torch.no_grad():
        for each in made.layers:
            if each.up_proj.gate is not None:
                each.up_proj.gate.copy_(torch.randn(3))
    yield made
    torch._dynamo.reset()


def inputs(count: int = 1) -> list[Tensor]:
    return [torch.randn(2, 5, 8, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("gate", ["identity", "scalar", "vector"])
def test_the_equation_and_its_gradients(gate: Any) -> None:
    torch.manual_seed(0)
    model = Model()
    link_by_name(model, gate)
    (x,) = inputs()
    y = model(x)
    torch.testing.assert_close(y, by_hand(model, x))
    same(gradients(model, y), gradients(model, by_hand(model, x)))


def test_lines_are_made_of_names_that_differ_in_numbers() -> None:
    model = Model(3)
    assert link_by_name(model, "scalar") == {
        "layers.*.up_proj": [f"layers.{place}.up_proj" for place in range(3)],
        "layers.*.down_proj": [f"layers.{place}.down_proj" for place in range(3)],
    }
    gates = [name for name in model.state_dict() if "gate" in name]
    assert gates == [f"layers.{k}.{kind}_proj.gate" for k in (1, 2) for kind in ("up", "down")]
    assert "unlinked or first" in repr(model.layers[0].up_proj)
    assert "gate=(1,)" in repr(model.layers[1].up_proj)


def test_layers_of_another_rank_are_in_another_line() -> None:
    model = Model(3)
    model.layers[1].up_proj = LatentLinear(8, 12, 5, dtype=torch.float64)
    lines = link_by_name(model)
    assert lines["layers.*.up_proj (rank 3)"] == ["layers.0.up_proj", "layers.2.up_proj"]
    assert lines["layers.*.up_proj (rank 5)"] == ["layers.1.up_proj"]
    model(inputs()[0]).sum().backward()


def test_every_forward_pass_starts_anew(model: Model) -> None:
    first, second = inputs(2)
    alone = model(second)
    model(first)
    torch.testing.assert_close(model(second), alone)
    assert all(
        layer._left.latent is None
        for layer in model.modules()
        if isinstance(layer, LatentLinear) and layer._left is not None
    )
    # After one that broke off, nothing of it is found by a layer that runs too early.
    model.layers[1](model.layers[0](first))
    between = model.layers[0](second)
    with pytest.raises(TensorizeError, match="found nothing"):
        model.layers[2](between)
    torch.testing.assert_close(model(second), alone)


def test_micro_batches_whose_backward_passes_come_later(model: Model) -> None:
    batches = inputs(3)
    results = [model(x) for x in batches]
    for x, y in zip(batches, results, strict=True):
        same(gradients(model, y), gradients(model, by_hand(model, x)))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_checkpointed_blocks_find_what_they_were_given(
    model: Model, order: tuple[int, ...]
) -> None:
    model.checkpointing = {"use_reentrant": False, "context_fn": latent_contexts(model)}
    batches = [each.requires_grad_() for each in inputs(3)]
    results = [model(x) for x in batches]
    for place in order:
        torch.testing.assert_close(results[place], by_hand(model, batches[place]))
        expected = gradients(model, by_hand(model, batches[place]))
        same(gradients(model, results[place]), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_that_forgets_latents_is_refused(model: Model, reentrant: bool) -> None:
    model.checkpointing = {"use_reentrant": reentrant}
    y = model(inputs()[0].requires_grad_())
    with pytest.raises(TensorizeError, match="context_fn=latent_contexts"):
        y.sum().backward()


def test_a_latent_without_gradients_is_refused(model: Model) -> None:
    (x,) = inputs()
    with torch.no_grad():
        x = model.layers[0](x)
    with pytest.raises(TensorizeError, match="came without gradients"):
        model.layers[1](x)
    # Frozen layers have none, and need none.
    for each in model.layers[0].parameters():
        each.requires_grad_(False)
    y = model(inputs()[0])
    assert len(gradients(model, y)) == len(list(model.parameters())) - 8


def test_a_layer_out_of_order_is_refused(model: Model) -> None:
    (x,) = inputs()
    with pytest.raises(TensorizeError, match="found nothing from the layer before"):
        model.layers[2](x)
    model.layers[0](x)
    with pytest.raises(TensorizeError, match="cannot be added"):
        model.layers[1](x[:1])


def test_the_stages_of_a_pipeline_are_linked_by_themselves(model: Model) -> None:
    stages = [nn.ModuleList(model.layers[:2]), nn.ModuleList(model.layers[2:])]
    for stage in stages:
        link_by_name(stage)
    first, second = inputs(2)
    between = [stages_of(stages[0], first), stages_of(stages[0], second)]
    results = [stages_of(stages[1], each) for each in between]
    torch.testing.assert_close(results[0], stages_of(stages[1], stages_of(stages[0], first)))
    torch.testing.assert_close(results[1], stages_of(stages[1], stages_of(stages[0], second)))


def stages_of(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def test_a_compiled_model_is_one_graph(model: Model) -> None:
    (x,) = inputs()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        y = compiled(x)
        torch.testing.assert_close(y, by_hand(model, x))
        same(gradients(model, y), gradients(model, by_hand(model, x)))
    assert all(
        layer._left.latent is None
        for layer in model.modules()
        if isinstance(layer, LatentLinear) and layer._left is not None
    )


@pytest.mark.parametrize("checkpointed", [False, True])
def test_blocks_that_are_compiled_one_by_one(model: Model, checkpointed: bool) -> None:
    (x,) = inputs()
    x.requires_grad_()
    expected = gradients(model, by_hand(model, x))
    if checkpointed:
        model.checkpointing = {"use_reentrant": False, "context_fn": latent_contexts(model)}
    for block in model.layers:
        block.compile(fullgraph=True, backend="aot_eager")
    y = model(x)
    torch.testing.assert_close(y, by_hand(model, x))
    same(gradients(model, y), expected)


def test_copies_and_pickles_have_lines_of_their_own(model: Model) -> None:
    (x,) = inputs()
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            torch.testing.assert_close(other(x), expected)
        # One does not disturb the other in the middle of a pass.
        halfway = model.layers[0](x)
        other(x)
        for layer in model.layers[1:]:
            halfway = layer(halfway)
        torch.testing.assert_close(halfway, expected)


def test_a_layer_alone_is_a_low_rank_layer_and_one_in_a_line_is_no_matrix(model: Model) -> None:
    layer = LatentLinear(6, 5, 2)
    x = torch.randn(3, 6)
    torch.testing.assert_close(layer(x), x @ layer.to_dense().t() + layer.bias)
    with pytest.raises(TensorizeError, match="is no matrix"):
        model.layers[1].up_proj.to_dense()
    with pytest.raises(TensorizeError, match="is no matrix"):
        LatentLinear(6, 5, 2, "silu").to_dense()
    link_latents([model.layers[1].up_proj])
    assert model.layers[1].up_proj.gate is None
    model.layers[1].up_proj.to_dense()


def test_gates_of_layers_on_the_meta_device_start_at_one() -> None:
    layers = [LatentLinear(6, 6, 2, device="meta") for _ in range(2)]
    link_latents(layers, "vector")
    assert layers[1].gate is not None
    assert layers[1].gate.is_meta
    for layer in layers:
        layer.to_empty(device="cpu")
        layer.reset_parameters()
    torch.testing.assert_close(layers[1].gate.detach(), torch.ones(2))


def test_what_cannot_be_linked_is_refused() -> None:
    layer = LatentLinear(6, 6, 2)
    with pytest.raises(TensorizeError, match="of ranks"):
        link_latents([layer, LatentLinear(6, 6, 3)])
    with pytest.raises(TensorizeError, match="different ones"):
        link_latents([layer, layer])
    with pytest.raises(TensorizeError, match="gate = 'big'"):
        link_latents([layer], "big")  # type: ignore[arg-type]
