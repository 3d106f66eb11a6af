"""Counts of a captured step against counts by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from outlast.energy.capture import capture

TOKENS, INTO, HIDDEN, OUT = 32, 8, 16, 4
WORD = 4
FIRST, SECOND = 2 * TOKENS * INTO * HIDDEN, 2 * TOKENS * HIDDEN * OUT


def _mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(INTO, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, OUT, bias=False)
    )


def test_the_flops_of_an_mlp_are_split_into_forward_and_backward() -> None:
    mlp, x = _mlp(), torch.randn(TOKENS, INTO)

    works = capture(lambda: mlp(x).sum().backward())

    assert works["forward"].flops == FIRST + SECOND
    # The input needs no gradient: the first layer has one product, the second two.
    assert works["backward"].flops == FIRST + 2 * SECOND


def test_the_bytes_of_a_forward_pass_are_those_of_its_operands() -> None:
    mlp, x = _mlp(), torch.randn(TOKENS, INTO)

    with torch.no_grad():
        work = capture(mlp, x)["forward"]

    first = TOKENS * INTO + INTO * HIDDEN + TOKENS * HIDDEN
    relu = 2 * TOKENS * HIDDEN
    second = TOKENS * HIDDEN + HIDDEN * OUT + TOKENS * OUT
    assert work.memory_bytes == WORD * (first + relu + second)
    assert work.launches == 3
    assert work.link_bytes == 0


def test_fused_pointwise_operators_read_and_write_once() -> None:
    x = torch.randn(1000)

    def step() -> torch.Tensor:
        return ((x * 2).exp() + 1).tanh()

    assert capture(step, fused=True)["forward"].memory_bytes == 2 * 1000 * WORD
    assert capture(step, fused=True)["forward"].launches == 1
    assert capture(step, fused=False)["forward"].memory_bytes == 8 * 1000 * WORD
    assert capture(step, fused=False)["forward"].launches == 4


def test_what_backward_needs_is_written_even_if_fused() -> None:
    x = torch.randn(1000, requires_grad=True)

    forward = capture(lambda: x.exp().tanh().sum().backward())["forward"]

    # Both are kept for backward: read x, write two; the sum; the 1 that starts backward.
    assert forward.memory_bytes == WORD * (3 * 1000 + 1000 + 1 + 1)
    assert forward.launches == 3


def test_a_residual_is_read_again_after_a_matrix_product() -> None:
    x, weight = torch.randn(100, 100), torch.randn(100, 100)

    def step() -> torch.Tensor:
        y = x + 1
        return y + y @ weight

    # Add: read, write; product: two read, one written; second add: two read, one written.
    assert capture(step)["forward"].memory_bytes == 8 * 100 * 100 * WORD
    assert capture(step)["forward"].launches == 3


def test_attention_counts_both_of_its_products() -> None:
    batch, heads, length, width = 2, 3, 64, 16
    q, k, v = (torch.randn(batch, heads, length, width, requires_grad=True) for _ in range(3))

    works = capture(lambda: nn.functional.scaled_dot_product_attention(q, k, v).sum().backward())

    product = 2 * batch * heads * length * length * width
    assert works["forward"].flops == 2 * product
    # Scores once more, then the gradients of scores, values, queries and keys.
    assert works["backward"].flops == 5 * product


def test_a_transformer_layer_has_six_flops_per_weight_and_token() -> None:
    width, length = 64, 8
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    x = torch.randn(2, length, width, requires_grad=True)

    works = capture(lambda: layer(x).sum().backward())

    total = sum(work.flops for work in works.values())
    weights = 12 * width * width
    attention = (2 + 5) * 2 * 2 * length * length * width
    assert total == pytest.approx(6 * weights * 2 * length + attention, rel=1e-12)


def test_the_optimizer_is_a_phase_of_its_own() -> None:
    mlp, x = _mlp(), torch.randn(TOKENS, INTO)
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1)

    def step() -> None:
        mlp(x).sum().backward()
        optimizer.step()

    works = capture(step)

    assert set(works) == {"forward", "backward", "tail"}
    assert works["tail"].flops == 0
    # Reads weight and gradient, writes the weight.
    assert works["tail"].memory_bytes == 3 * WORD * (INTO * HIDDEN + HIDDEN * OUT)


def test_operators_are_named_on_request() -> None:
    mlp, x = _mlp(), torch.randn(TOKENS, INTO)

    works = capture(lambda: mlp(x).sum().backward(), by="operator")

    assert works["forward aten.mm"].flops == FIRST + SECOND
    assert works["forward aten.mm"].launches == 2


def test_fake_tensors_need_no_memory() -> None:
    with FakeTensorMode():
        layer = nn.Linear(100_000, 100_000, bias=False)
        x = torch.empty(10, 100_000)
        work = capture(layer, x)["forward"]

    assert work.flops == 2 * 10 * 100_000**2


@pytest.fixture
def four_ranks() -> object:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield None
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
def test_collectives_send_what_rings_send() -> None:
    gradient = torch.zeros(1000)
    shard, whole = torch.zeros(250), torch.zeros(1000)

    reduced = capture(lambda: dist.all_reduce(gradient))["forward"]
    gathered = capture(lambda: dist.all_gather_into_tensor(whole, shard))["forward"]
    scattered = capture(lambda: dist.reduce_scatter_tensor(shard, whole))["forward"]

    assert reduced.link_bytes == pytest.approx(2 * 3 / 4 * 1000 * WORD)
    assert gathered.link_bytes == pytest.approx(3 / 4 * 1000 * WORD)
    assert scattered.link_bytes == pytest.approx(3 / 4 * 1000 * WORD)
