"""Bottleneck tensor parallelism: the numbers of one rank, and few bytes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counted_collectives import CountedCollectives
from tensorized_ranks import (
    RANK,
    WIDTH,
    gradients,
    joined,
    loss_of,
    low_rank_llama,
    parity,
    tokens,
    worst_difference,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from outlast.checkpoint import CheckpointStore
from outlast.errors import TensorizeError
from outlast.tensorize.sharded import whole
from outlast.tensorize.tensor_parallel import LLAMA, LLAMA_BLOCK, parallelize_bottleneck

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("size", "form", "settings"),
    [
        (2, "low_rank", {}),
        (2, "cola", {"attention_bias": True, "mlp_bias": True}),
        (2, "cola", {"tie_word_embeddings": True}),
        (2, "low_rank", {"vocab_size": 97}),
        (4, "cola", {"num_key_value_heads": 4}),
    ],
    ids=["plain", "biases", "tied", "odd-vocabulary", "four-ranks"],
)
def test_parity_with_one_rank(ranks: Any, size: int, form: str, settings: dict[str, Any]) -> None:
    for logits, loss, gradient, tied in ranks(size)(parity, form, settings):
        assert logits < 1e-5
        assert loss < 1e-5
        assert gradient < 1e-5
        assert tied == settings.get("tie_word_embeddings", False)


def _counted() -> tuple[int, int, int, list[str]]:
    joined()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = low_rank_llama("cola")
    # Blocks alone: what is around them stays whole.
    parallelize_bottleneck(model.model.layers, mesh, LLAMA_BLOCK)
    assert not isinstance(model.lm_head.weight, DTensor)
    block = model.model.layers[0]
    count = 21
    x = torch.randn(3, 7, WIDTH // mesh.size(), requires_grad=True)
    places = model.model.rotary_emb(x, torch.arange(7)[None])
    with CountedCollectives() as forward:
        y = block(x, position_embeddings=places)
    with CountedCollectives() as backward:
        y.sum().backward()
    calls = [*forward.traffic.calls, *backward.traffic.calls]
    return (
        count,
        forward.traffic.payload_bytes,
        backward.traffic.payload_bytes,
        [call.name for call in calls],
    )


def test_a_block_sends_seven_ranks_each_way(ranks: Any) -> None:
    for count, forward, backward, names in ranks(2)(_counted):
        assert names == ["all_reduce"] * 8
        # Each of two norms adds its sum of squares to what its group sends.
        assert forward == 4 * count * (7 * RANK + 2)
        assert backward == 4 * count * 7 * RANK
        # What Megatron's two all-reduces of the residual stream send, forward and backward.
        assert forward + backward <= 0.9 * 4 * count * 4 * WIDTH


def _train_sharded_and_split() -> tuple[list[float], list[float], float]:
    joined()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    alone, both = low_rank_llama("cola"), low_rank_llama("cola")
    parallelize_bottleneck(both, mesh["tensor"])
    for block in both.model.layers:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(both, mesh=mesh["shard"])
    batches = [torch.cat([tokens(2 * step), tokens(2 * step + 1)]) for step in range(3)]
    place = mesh.get_local_rank("shard")
    found, expected = [], []
    optimizers = [torch.optim.SGD(each.parameters(), 0.02, 0.9) for each in (alone, both)]
    for ids in batches:
        for model, optimizer, seen, part in (
            (alone, optimizers[0], expected, ids),
            (both, optimizers[1], found, ids.chunk(2)[place]),
        ):
            loss = loss_of(model, part)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            if model is both:
                dist.all_reduce(total, group=mesh.get_group("shard"))
                total /= 2
            seen.append(float(total))
    weights = [dict(each.named_parameters()) for each in (alone, both)]
    off = worst_difference(
        {name: whole(each.detach()) for name, each in weights[1].items()},
        {name: each.detach() for name, each in weights[0].items()},
    )
    return expected, found, off


def test_fsdp_around_it_trains_like_one_rank(ranks: Any) -> None:
    for expected, found, off in ranks(4)(_train_sharded_and_split):
        assert found == pytest.approx(expected, rel=1e-4)
        assert expected[0] > expected[-1]
        assert off < 1e-4


def _save(place: str) -> tuple[float, set[str]]:
    joined()
    model = low_rank_llama()
    parallelize_bottleneck(model, init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, tokens()).backward()
    optimizer.step()
    with CheckpointStore(place, writer="thread") as store:
        store.save(1, {"model": model, "optimizer": optimizer})
    with torch.no_grad():
        return float(loss_of(model, tokens())), set(model.state_dict())


def test_a_checkpoint_of_split_ranks_restores_on_one(ranks: Any, tmp_path: Path) -> None:
    (loss, names), _ = ranks(2)(_save, str(tmp_path))
    model = low_rank_llama(rms_norm_eps=1e-6)
    assert names == set(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    with CheckpointStore(tmp_path, writer="thread") as store:
        assert store.restore({"model": model, "optimizer": optimizer}) is not None
    with torch.no_grad():
        assert float(loss_of(model, tokens())) == pytest.approx(loss, abs=1e-5)


def _shapes() -> None:
    joined()
    model = low_rank_llama()
    before = {name: each.shape for name, each in model.named_parameters()}
    parallelize_bottleneck(model, init_device_mesh("cpu", (2,)))
    after = dict(model.named_parameters())
    assert {name: each.shape for name, each in after.items()} == before
    assert all(isinstance(each, DTensor) for each in after.values())
    assert all(2 * each.to_local().numel() == each.numel() for each in after.values())
    # The rank is never split.
    query = model.model.layers[0].self_attn.q_proj
    assert query.down.weight.placements == (Shard(1),)
    assert query.up.weight.placements == (Shard(0),)
    assert torch.equal(
        whole(query.to_dense().detach()),
        low_rank_llama().model.layers[0].self_attn.q_proj.to_dense(),
    )


def test_every_parameter_is_split_and_keeps_its_global_shape(ranks: Any) -> None:
    ranks(2)(_shapes)


class _QueryNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class _Shifted(nn.Module):
    """As Gemma's: 1 + weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, True) + self.eps) * (1 + self.weight)


def _refused() -> dict[str, str]:
    joined()
    mesh = init_device_mesh("cpu", (2,))
    said = {}

    def attempt(name: str, model: nn.Module, plan: Any = LLAMA) -> None:
        before = [type(each) for each in model.modules()]
        with pytest.raises(TensorizeError) as caught:
            parallelize_bottleneck(model, mesh, plan)
        said[name] = str(caught.value)
        assert [type(each) for each in model.modules()] == before

    attempt("heads", low_rank_llama(num_key_value_heads=1))
    model = low_rank_llama()
    model.model.layers[1].self_attn.q_norm = _QueryNorm()
    attempt("unnamed", model)
    model = low_rank_llama()
    model.model.layers[1].mlp.up_proj = nn.Linear(WIDTH, 96)
    attempt("dense", model)
    model = low_rank_llama()
    model.model.layers[0].input_layernorm = _Shifted()
    attempt("norm", model)
    model = low_rank_llama()
    model.model.layers[0].self_attn.o_proj.down.register_forward_hook(lambda *_: None)
    attempt("hook", model)
    attempt("no block", nn.Sequential(nn.Linear(2, 2)))
    attempt("ends", low_rank_llama(), LLAMA_BLOCK)
    return said


def test_refuses_what_it_cannot_split_before_it_changes_anything(ranks: Any) -> None:
    said, _ = ranks(2)(_refused)
    assert (
        "a mesh of 2 ranks (parallel.tensor = 2 of a job) does not divide 1 heads of "
        "model.layers.0.self_attn.k_proj" in said["heads"]
    )
    assert "model.layers.1.self_attn.q_norm.weight" in said["unnamed"]
    assert "model.layers.1.mlp.up_proj is a Linear" in said["dense"]
    assert "model.layers.0.input_layernorm is a _Shifted" in said["norm"]
    assert "model.layers.0.self_attn.o_proj.down" in said["hook"]
    assert "has no block" in said["no block"]
    # A plan of blocks alone does not know what to do with the embedding.
    assert "model.embed_tokens.weight" in said["ends"]


def _recomputed() -> tuple[float, int]:
    joined()
    alone, split = low_rank_llama(), low_rank_llama()
    parallelize_bottleneck(split, init_device_mesh("cpu", (2,)))
    split.gradient_checkpointing_enable({"use_reentrant": False})
    loss_of(alone.train(), tokens()).backward()
    loss = loss_of(split.train(), tokens())
    with CountedCollectives() as backward:
        loss.backward()
    return worst_difference(gradients(split), gradients(alone)), len(backward.traffic.calls)


def test_activations_can_be_computed_again(ranks: Any) -> None:
    for difference, calls in ranks(2)(_recomputed):
        assert difference < 1e-5
        # Two blocks, four forward again (the last not, as nothing needs its result) and four back.
        assert calls > 2 * (3 + 4)


def _generated() -> tuple[list[int], list[int]]:
    joined()
    alone, split = low_rank_llama("cola"), low_rank_llama("cola")
    parallelize_bottleneck(split, init_device_mesh("cpu", (2,)))
    settings = {"max_new_tokens": 6, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    found = [each.generate(tokens(batch=1), **settings) for each in (alone, split)]
    return found[0].flatten().tolist(), found[1].flatten().tolist()


def test_split_ranks_generate_with_a_cache(ranks: Any) -> None:
    for alone, split in ranks(2)(_generated):
        assert len(split) == 7 + 6
        assert split == alone


def _compiled() -> float:
    joined()
    alone, split = low_rank_llama("cola"), low_rank_llama("cola")
    parallelize_bottleneck(split, init_device_mesh("cpu", (2,)))
    split.model.layers[0].compile(backend="eager", fullgraph=True)
    for model in (alone, split):
        loss_of(model, tokens()).backward()
    return worst_difference(gradients(split), gradients(alone))


def test_split_blocks_compile_without_a_break(ranks: Any) -> None:
    assert max(ranks(2)(_compiled)) < 1e-5
