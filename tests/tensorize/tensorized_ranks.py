"""Tiny models of structured layers, and what forked ranks do with them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import transformers.models.llama.modeling_llama  # noqa: F401  (loaded once, before ranks fork)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from outlast.tensorize.low_rank import BottleneckLinear, LowRankLinear
from outlast.tensorize.sharded import whole
from outlast.tensorize.tensor_parallel import parallelize_bottleneck

WIDTH, RANK, VOCABULARY = 64, 16, 96


def dense_llama(**settings: Any) -> LlamaForCausalLM:
    """Two blocks, four heads; norms and biases are random, so that forgetting one shows."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **{
            "hidden_size": WIDTH,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 32,
            "attn_implementation": "eager",
            "tie_word_embeddings": False,
            "use_cache": False,
            **settings,
        }
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(5)
    return model


def low_rank_llama(form: str = "low_rank", **settings: Any) -> LlamaForCausalLM:
    """The same, with low-rank layers of equal weights on every rank."""
    model = dense_llama(**settings)
    for name, layer in list(model.model.layers.named_modules()):
        if isinstance(layer, nn.Linear):
            kind = LowRankLinear if form == "low_rank" else BottleneckLinear
            biased = layer.bias is not None
            new = kind(layer.in_features, layer.out_features, RANK, bias=biased)
            model.model.layers.set_submodule(name, new)
    return model


def tokens(seed: int = 1, batch: int = 3, length: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (batch, length), generator=generator)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean next-token loss of replicated logits."""
    logits = model(input_ids=ids).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Global gradients by name."""
    return {
        name: whole(each.grad) for name, each in model.named_parameters() if each.grad is not None
    }


def worst_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest deviation of any tensor, relative to its largest entry."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - each).abs().max() / each.abs().max().clamp_min(1e-12))
        for name, each in expected.items()
    )


def joined() -> None:
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def parity(form: str, settings: dict[str, Any]) -> tuple[float, float, float, bool]:
    """Bottleneck tensor parallelism against this process alone: logits, loss, gradients, tied."""
    joined()
    alone, split = low_rank_llama(form, **settings), low_rank_llama(form, **settings)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_bottleneck(split, mesh)
    ids = tokens()
    expected, found = alone(input_ids=ids).logits, split(input_ids=ids).logits
    off = float((expected - found).abs().max() / expected.abs().max())
    losses = [loss_of(each, ids) for each in (alone, split)]
    for loss in losses:
        loss.backward()
    tied = split.lm_head.weight is split.model.embed_tokens.weight
    difference = worst_difference(gradients(split), gradients(alone))
    return off, abs(float(losses[0] - losses[1])), difference, tied
