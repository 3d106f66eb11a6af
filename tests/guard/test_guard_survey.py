"""What the guard says that it covers: what a check has watched in the step, the rest by name."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from outlast.guard import Guard, Policy, guard
from outlast.guard.inject import inject, parse_faults
from outlast.guard.survey import _NOT_USED, _Graph
from outlast.guard.watch import Watch

IDS = (torch.arange(32).view(2, 16) * 7) % 64
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
}


def text_loss(model: nn.Module) -> Tensor:
    loss: Tensor = model(input_ids=IDS, labels=IDS).loss
    return loss


def squares(*shapes: tuple[int, ...]) -> Callable[[nn.Module], Tensor]:
    """The loss of a module for constant data of these shapes."""

    def loss(model: nn.Module) -> Tensor:
        made = model(
            *(torch.linspace(-1, 1, torch.Size(each).numel()).view(each) for each in shapes)
        )
        output: Tensor = made[0] if isinstance(made, tuple) else made
        return output.square().mean()

    return loss


def causal(kind: str, **settings: Any) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(**{**TEXT, **settings})
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.norm(self.first(x)).relu())


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight) ** 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        inner = 2 * (x @ weight) * dy
        return inner @ weight.T, x.T @ inner


@torch.library.custom_op("outlast_tests::scaled_product", mutates_args=())
def scaled_product(x: Tensor, weight: Tensor) -> Tensor:
    return 3.0 * (x @ weight)


scaled_product.register_fake(lambda x, weight: x.new_empty(len(x), weight.shape[1]))
scaled_product.register_autograd(
    lambda ctx, dy: (3.0 * dy @ ctx.saved_tensors[1].T, 3.0 * ctx.saved_tensors[0].T @ dy),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Own(nn.Module):
    """A guarded layer, and a weight that `use` multiplies by."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.layer, self.own = nn.Linear(8, 8), nn.Parameter(torch.randn(*shape) / 8)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.layer(x), self.own)


class Tied(nn.Module):
    """An embedding that is the output's weight as well, used by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(64, 8), nn.Linear(8, 8)
        self.unused = nn.Linear(8, 64)

    def forward(self, ids: Tensor) -> Tensor:
        return functional.linear(self.layer(self.embedding(ids)), self.embedding.weight)


class LowRankAdapter(nn.Module):
    """LoRA as it is merged: the product of two matrices is added to a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.ones(2, 8)), nn.Parameter(torch.ones(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.base.weight + self.up @ self.down, self.base.bias)


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=16,
            patch_size=8,
        )
    )


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=64,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def bert() -> nn.Module:
    known = {name: TEXT[name] for name in TEXT if name not in ("num_key_value_heads", "head_dim")}
    return transformers.BertForMaskedLM(transformers.BertConfig(**known))


MIXTRAL = {"num_local_experts": 4, "attn_implementation": "eager"}
QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
MAMBA = {"num_hidden_layers": 1, "state_size": 4}

# What trains without a check at level full, by the last part of its name, and some operations.
MODELS: dict[
    str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor], set[str], set[str]]
] = {
    "llama": (lambda: causal("Llama"), text_loss, set(), set()),
    "llama eager": (
        lambda: causal("Llama", attn_implementation="eager"),
        text_loss,
        set(),
        set(),
    ),
    "gpt2": (
        lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, **GPT2)),
        text_loss,
        set(),
        set(),
    ),
    "mixtral": (
        lambda: causal("Mixtral", **MIXTRAL),
        text_loss,
        set(),
        set(),
    ),
    "qwen3 moe": (
        lambda: causal("Qwen3Moe", **QWEN),
        text_loss,
        set(),
        set(),
    ),
    "mamba": (
        lambda: causal("Mamba", **MAMBA),
        text_loss,
        {
            "mixer.A_log",
            "mixer.D",
        },
        set(),
    ),
    "bert": (bert, text_loss, set(), set()),
    "t5": (t5, text_loss, {"layer_norm.weight", "final_layer_norm.weight"}, set()),
    "vit": (
        vit,
        lambda model: model(torch.ones(2, 3, 16, 16), labels=torch.tensor([0, 1])).loss,
        {"embeddings.cls_token"},
        set(),
    ),
    "transformer": (
        lambda: nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True),
        squares((2, 5, 16), (2, 5, 16)),
        set(),
        set(),
    ),
    "lstm": (
        lambda: nn.LSTM(8, 8),
        squares((5, 2, 8)),
        set(),
        set(),
    ),
    "gru": (
        lambda: nn.GRU(8, 8),
        squares((5, 2, 8)),
        set(),
        set(),
    ),
    "convolutions": (
        lambda: nn.Sequential(Residual(), nn.Flatten(), nn.Linear(64, 3)),
        squares((2, 4, 4, 4)),
        set(),
        set(),
    ),
    "bilinear": (lambda: nn.Bilinear(4, 4, 4), squares((3, 4), (3, 4)), {"weight"}, set()),
    "function": (
        lambda: Own(Squared.apply, 8, 8),
        squares((4, 8)),
        {"own"},
        {"custom operation Squared in the model itself"},
    ),
    "custom operation": (
        lambda: Own(lambda x, w: scaled_product(x, w), 8, 8),
        squares((4, 8)),
        {"own"},
        {"custom operation outlast_tests_scaled_product_default in the model itself"},
    ),
    "experts by slices": (
        lambda: Own(
            lambda x, w: functional.linear(x[:2], w[0]) + functional.linear(x[2:], w[1]), 2, 8, 8
        ),
        squares((4, 8)),
        set(),
        set(),
    ),
    "einsum": (
        lambda: Own(lambda x, w: torch.einsum("td,edf->etf", x, w), 2, 8, 8),
        squares((4, 8)),
        set(),
        set(),
    ),
    "tied by hand": (
        Tied,
        lambda model: functional.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten()),
        set(),
        set(),
    ),
    "loss of three dimensions": (
        lambda: nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 64)),
        lambda model: functional.cross_entropy(model(IDS).transpose(1, 2), IDS),
        set(),
        set(),
    ),
    "merged adapter": (LowRankAdapter, squares((4, 8)), set(), set()),
    "parametrized": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        squares((4, 8)),
        {"weight.original0", "weight.original1"},
        set(),
    ),
}


OF_OPERATIONS = {"product", "convolution.dw", "recurrent", "norm.repeated"}
"""Checks that are counted by operation, wherever it was called."""


def quietly(*args: Any, **options: Any) -> Guard:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return guard(*args, **options)


def train(
    model: nn.Module,
    loss_of: Callable[[nn.Module], Tensor],
    level: str | None = "full",
    steps: int = 2,
    before: Callable[[int], None] = lambda step: None,
) -> tuple[Guard | None, list[str], list[float]]:
    """Train some steps; the guard, its warnings and all losses."""
    torch.manual_seed(1)
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    handle = None if level is None else quietly(model, optimizer, level)
    losses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            before(step)
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    texts = [str(each.message) for each in caught]
    return handle, [each for each in texts if "not guarded" in each], losses


@pytest.mark.parametrize("name", MODELS)
def test_every_gradient_is_watched_by_a_check_or_named(name: str) -> None:
    make, loss_of, parameters, operations = MODELS[name]
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    handle, told, losses = train(model, loss_of)
    assert handle is not None
    assert train(twin, loss_of, None)[2] == losses
    assert not handle.ledger.findings
    uncovered = handle.uncovered()
    names = {each for each, own in model.named_parameters() if own.grad is not None}
    expected = {each for each in names if any(f".{each}".endswith(f".{end}") for end in parameters)}
    assert set(uncovered.parameters) == expected
    assert {
        end for end in parameters if any(f".{each}".endswith(f".{end}") for each in names)
    } == parameters
    assert operations <= set(uncovered.operations)
    assert bool(uncovered.operations) == bool(operations or uncovered.flops)
    # What is listed as covered has had a check in the step.
    sites = handle.ledger.sites.values()
    kinds = ("linear", "norm", "embedding")
    checked = {each.module for each in sites if each.checks and each.operation.startswith(kinds)}
    for each in handle.coverage():
        by_operations = set(each.operations) & OF_OPERATIONS
        assert bool(each.operations) == bool(each.module in checked or by_operations), each
    assert len(told) == bool(
        uncovered.parameters or uncovered.operations or "shared" in str(uncovered)
    )
    if told:
        assert told[0].startswith("not guarded in step 1: ")


@pytest.mark.parametrize("name", ["llama", "bert", "transformer", "loss of three dimensions"])
def test_a_check_that_is_not_made_any_more_is_named(name: str) -> None:
    make, loss_of, _, _ = MODELS[name]
    torch.manual_seed(0)
    model = make()
    layers = {
        each: module
        for each, module in model.named_modules()
        if type(module) in (nn.Linear, nn.LayerNorm, nn.Embedding) and "out_proj" not in each
    }
    assert layers

    def remove(step: int) -> None:
        if step == 2:
            for module in layers.values():
                del module.forward

    handle, told, _ = train(model, loss_of, steps=4, before=remove)
    assert handle is not None
    uncovered = handle.uncovered()
    # Products of linear layers, and norms, are checked as operations then.
    other = {each for each, module in layers.items() if type(module) is nn.Embedding}
    lost = {each for each, own in model.named_parameters() if each.rpartition(".")[0] in other}
    assert lost <= set(uncovered.parameters)
    assert not {each.module for each in handle.coverage() if each.operations} & other
    assert sum("in step 3: " in each for each in told) == bool(other)
    assert len(told) <= 3
    assert (uncovered.unwatched > 0) == bool(other)
    assert uncovered.flops == 0.0


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(64, 8), nn.LayerNorm(8)
        self.left, self.right, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 64)
        self.uncalled = nn.Linear(8, 8)
        self.branches = 2

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embedding(ids))
        x = self.left(x) + (self.right(x) if self.branches == 2 else 0.0)
        return self.head(x)


def class_loss(model: nn.Module) -> Tensor:
    return functional.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten())


class Experts(nn.Module):
    """A mixture of experts, some of which get no tokens in some steps."""

    def __init__(self, empty: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
        self.head, self.empty, self.step = nn.Linear(8, 8), empty, 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        x = x + 0.1 * self.step
        expert_of = (torch.arange(len(x)) * self.step**2) % 8
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(expert_of == number)[:, 0]
            if self.empty or len(rows):
                made = made.index_add(0, rows, expert(x[rows]))
        return self.head(made)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("empty", [True, False])
def test_experts_without_tokens_are_no_reason_to_warn(
    empty: bool, to_none: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Experts(empty)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    looks = []
    read = _Graph.read
    monkeypatch.setattr(_Graph, "read", lambda *args: looks.append(0) or read(*args))
    unused = set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = guard(model, optimizer, "full")
        for _ in range(20):
            optimizer.zero_grad(set_to_none=to_none)
            squares((6, 8))(model).backward()
            optimizer.step()
            assert not handle.uncovered().parameters
            idle = {item.module: item.why_not for item in handle.coverage() if item.why_not}
            assert set(idle.values()) <= {_NOT_USED}
            unused |= set(idle)
    assert empty or len(unused) > 2
    assert len(looks) == len((1, 2, 3, 5, 9, 17))


def test_an_expert_whose_checks_are_gone_is_named_when_it_has_tokens() -> None:
    model = Experts(empty=False)

    def remove(step: int) -> None:
        if step == 5:
            for expert in model.experts:
                del expert.forward

    handle, told, _ = train(model, squares((6, 8)), steps=8, before=remove)
    assert handle is not None
    assert told
    assert told[0].startswith("not guarded in step 6: ")


@pytest.mark.parametrize("place", ["read", "__init__", "_check"])
def test_an_error_of_the_survey_is_said_and_ends_no_training(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AttributeError("'Node' has no attribute '_input_metadata'")

    monkeypatch.setattr(_Graph, place, fail)
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters())
    handle = quietly(model, optimizer, "full")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        class_loss(model).backward()
        optimizer.step()
    (said,) = {str(item.message) for item in caught}
    assert said.startswith("coverage is not known: AttributeError: ")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            class_loss(model).backward()
            optimizer.step()
    assert not covered(handle)
    assert all("is not known" in item.why_not for item in handle.coverage())
    uncovered = handle.uncovered()
    assert uncovered.unwatched == uncovered.elements > 0
    assert "is not known" in str(uncovered)
    assert handle.ledger.checks


def test_passes_of_other_models_are_none_of_this_ones() -> None:
    model, other = Branches(), nn.Linear(8, 8)

    def loss_of(model: nn.Module) -> Tensor:
        squares((4, 8))(other).backward()
        return class_loss(model)

    handle, told, _ = train(model, loss_of)
    assert handle is not None
    assert not handle.uncovered().operations
    assert not told


def covered(handle: Guard) -> set[str]:
    return {each.module for each in handle.coverage() if each.operations}


def test_checks_of_the_optimizer_do_not_count_for_a_module() -> None:
    handle, told, _ = train(Branches(), class_loss)
    assert handle is not None
    assert any("uncalled" in site.module for site in handle.ledger.sites.values() if site.checks)
    assert covered(handle) == {"embedding", "norm", "left", "right", "head"}
    assert not told
    (idle,) = (item for item in handle.coverage() if not item.operations)
    assert (idle.module, idle.why_not) == ("uncalled", _NOT_USED)
    elements, at_rest = handle.at_rest()
    assert at_rest == elements == sum(each.numel() for each in Branches().parameters())


def test_operations_that_are_listed_were_made() -> None:
    model = Branches()
    model.left.weight.requires_grad_(False)
    handle, _, _ = train(model, class_loss)
    assert handle is not None
    found = {each.module: each.operations for each in handle.coverage()}
    assert found["left"] == ("linear.forward", "linear.dx", "weight")
    assert {"linear.forward", "linear.dx", "linear.dw", "linear.saved"} <= set(found["right"])
    assert found["embedding"] == ("embedding.forward", "embedding.dw")
    # The gradient of a bias alone has no check.
    assert set(handle.uncovered().parameters) == {"left.bias"}


def test_a_branch_that_is_not_taken_any_more_is_listed_as_unused() -> None:
    model = Branches()

    def choose(step: int) -> None:
        model.branches = 2 if step != 3 else 1

    handle, told, _ = train(model, class_loss, steps=4, before=choose)
    assert handle is not None
    assert covered(handle) == {"embedding", "norm", "left", "head"}
    idle = {item.module: item.why_not for item in handle.coverage() if item.why_not}
    assert idle == dict.fromkeys(("right", "uncalled"), _NOT_USED)
    assert handle.uncovered().modules == idle
    assert not told


def test_a_norm_that_is_compiled_later_is_named_with_its_parameters() -> None:
    model = Branches()

    def change(step: int) -> None:
        if step == 3:
            own = nn.LayerNorm.forward.__get__(model.norm)
            model.norm.forward = torch.compile(own, backend="aot_eager")

    handle, told, _ = train(model, class_loss, steps=5, before=change)
    assert handle is not None
    assert "norm" not in covered(handle)
    assert set(handle.uncovered().parameters) == {"norm.weight", "norm.bias"}
    assert "2 of 9 parameters" in told[0]
    assert "in step 4: " in told[0]


def test_attention_may_change_its_kind() -> None:
    model = causal("Llama")

    def change(step: int) -> None:
        if step == 3:
            model.config._attn_implementation = "eager"

    handle, told, _ = train(model, text_loss, steps=5, before=change)
    assert handle is not None
    # What takes its place is checked by its products and softmax.
    assert not told
    assert handle.uncovered().flops == 0.0


@pytest.mark.parametrize("level", ["linear", "full"])
@pytest.mark.parametrize("kind", ["embedding", "norm", "left"])
def test_a_layer_in_evaluation_mode_that_trains_is_guarded(kind: str, level: str) -> None:
    """Clean runs have no finding and the same bits, and a fault is corrected."""
    torch.manual_seed(0)
    plain = Branches()
    plain.get_submodule(kind).eval()
    twin, struck = copy.deepcopy(plain), copy.deepcopy(plain)
    losses = train(plain, class_loss, None, steps=4)[2]
    handle, _, found = train(twin, class_loss, level, steps=4)
    assert handle is not None
    assert found == losses
    assert not handle.ledger.findings
    if (kind, level) == ("norm", "linear"):
        assert "norm" not in covered(handle)
        return
    assert kind in covered(handle)
    site = {"embedding": "embedding.output", "norm": "norm.output", "left": "linear.dw"}[kind]
    optimizer = torch.optim.AdamW(struck.parameters(), lr=1e-3)
    handle = quietly(struck, optimizer, level)
    inject(handle, parse_faults([f"{site}:module={kind}:bit=30:step=1"]))
    for _ in range(4):
        optimizer.zero_grad()
        class_loss(struck).backward()
        optimizer.step()
    assert [each.outcome for each in handle.ledger.findings] == ["corrected"]
    pairs = zip(struck.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_evaluation_without_gradients_is_not_checked() -> None:
    model = Branches()
    handle = quietly(model, policy="full")
    model.eval()
    with torch.no_grad():
        model(IDS)
    assert handle.ledger.checks == 0


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
def test_checkpointing_and_precisions_hide_nothing(precision: str, reentrant: bool) -> None:
    torch.manual_seed(0)
    model = causal("Mixtral", **MIXTRAL)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model.train()
    if precision == "bf16":
        model.bfloat16()

    def loss_of(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            return text_loss(model)

    twin = copy.deepcopy(model)
    handle, told, losses = train(model, loss_of)
    assert handle is not None
    assert losses == train(twin, loss_of, None)[2]
    uncovered = handle.uncovered()
    assert not uncovered.parameters
    assert not handle.ledger.findings
    assert uncovered.flops == 0.0
    assert not uncovered
    assert not told


def test_a_compiled_model_covers_what_ran_in_it() -> None:
    torch.manual_seed(0)
    model = Tied()
    handle, told, _ = train(torch.compile(model, backend="aot_eager"), class_loss)
    assert handle is not None
    assert covered(handle) == {"_orig_mod.layer"}
    uncovered = handle.uncovered()
    assert set(uncovered.parameters) == {"_orig_mod.embedding.weight"}
    assert uncovered.flops is None
    assert any(each.startswith("a compiled graph") for each in uncovered.operations)
    assert len(told) == 1


def test_accumulated_gradients_are_one_step() -> None:
    model = Branches()

    def loss_of(model: nn.Module) -> Tensor:
        class_loss(model).backward()
        return class_loss(model)

    handle, told, _ = train(model, loss_of, steps=3)
    assert handle is not None
    assert not handle.uncovered().parameters
    assert not told


def test_optimizers_that_step_in_turn_are_judged_by_their_own_passes() -> None:
    models = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle = guard(models, optimizers, "full")
        for _ in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
        assert covered(handle) == {"0", "1"}
        assert not handle.uncovered()
    assert not caught


def test_a_parameter_of_another_model_is_named() -> None:
    model, other = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    handle = guard(model, optimizer)
    other(model(torch.ones(2, 8))).sum().backward()
    with pytest.warns(UserWarning, match="parameter 2 of SGD .not in the guarded model"):
        optimizer.step()
    assert len(handle.uncovered().parameters) == 2


@pytest.mark.slow
def test_without_an_optimizer_the_first_backward_pass_is_judged() -> None:
    """Also where nobody keeps the handle."""
    model = Own(Squared.apply, 8, 8)
    handle = quietly(model, policy="full")
    with pytest.warns(UserWarning, match="1 of 3 parameters .* own .custom operation Squared"):
        squares((4, 8))(model).backward()
    assert covered(handle) == {"layer"}
    del handle
    model = Own(Squared.apply, 8, 8)
    quietly(model)
    gc.collect()
    with pytest.warns(UserWarning, match="1 of 3 parameters"):
        squares((4, 8))(model).backward()


def test_a_guard_that_was_removed_says_nothing() -> None:
    model = Tied()
    quietly(model).remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        class_loss(model).backward()


def test_a_policy_is_the_reason_where_it_leaves_something_out() -> None:
    policy = Policy("full", modules={"left": "light", "norm": "linear", "embedding": "light"})
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = quietly(model, optimizer, policy)
    class_loss(model).backward()
    with pytest.warns(UserWarning, match=r"embedding.weight \(embedding: policy light\)"):
        optimizer.step()
    # Levels of modules are of their own checks: products and norms are checked wherever they are
    # computed.
    assert set(handle.uncovered().parameters) == {"embedding.weight"}
    made = {item.module: item.operations for item in handle.coverage()}
    assert made["left"] == ("bias.gradient", "product")
    assert made["norm"] == ("norm.repeated",)


def parallel(sharded: bool) -> tuple[set[str], set[str], int]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: Any = Tied()
    if sharded:
        fully_shard(model.layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model, find_unused_parameters=True)
    handle, told, _ = train(model, class_loss, steps=3)
    assert handle is not None
    return covered(handle), set(handle.uncovered().parameters), len(told)


@pytest.mark.distributed
@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_of_ddp_and_fsdp_name_the_same(sharded: bool, ranks: Any) -> None:
    for found in ranks(2)(parallel, sharded):
        assert found == ({"embedding", "layer"}, set(), 0)


class Biased(nn.Module):
    """Attention with a learned bias of its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.bias = nn.Linear(8, 24), nn.Parameter(torch.zeros(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        return functional.scaled_dot_product_attention(query, key, value, self.bias)


class LearnedQueries(nn.Module):
    """Queries that are learned, of keys and values that may be frozen."""

    def __init__(self, trained: set[str], dropout: float = 0.0) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(2, 5, 8))
        self.keys, self.values = nn.Linear(8, 8), nn.Linear(8, 8)
        for name in {"keys", "values"} - trained:
            self.get_submodule(name).requires_grad_(False)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        given = self.queries, self.keys(x), self.values(x)
        return functional.scaled_dot_product_attention(*given, dropout_p=self.dropout)


@pytest.fixture
def identities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention, norms and losses are checked by identities, as on other devices than the CPU."""
    monkeypatch.setattr(Watch, "repeats_on", lambda self, device: False)


@pytest.mark.usefixtures("identities")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("trained", [(), ("values",), ("keys",), ("keys", "values")])
def test_a_query_is_watched_only_with_its_keys(trained: tuple[str, ...], dropout: float) -> None:
    handle, _, _ = train(LearnedQueries({*trained}, dropout), squares((2, 4, 8)))
    assert handle is not None
    unwatched = set() if "keys" in trained else {"queries"}
    assert set(handle.uncovered().parameters) == unwatched
    if unwatched:
        assert "frozen" in handle.uncovered().parameters["queries"]
    assert handle.certificate()["attention.output"].detection_point is None


@pytest.mark.usefixtures("identities")
def test_a_query_whose_check_is_not_made_any_more_is_named() -> None:
    """In steps whose graph is not looked at, too."""
    model = LearnedQueries({"keys", "values"})

    def freeze(step: int) -> None:
        if step == 2:
            model.keys.requires_grad_(False)
            model.keys.zero_grad()

    handle, told, _ = train(model, squares((2, 4, 8)), steps=3, before=freeze)
    assert handle is not None
    assert set(handle.uncovered().parameters) == {"queries"}
    assert len(told) == 1


def test_all_products_of_attention_are_checked_where_it_is_not_fused() -> None:
    for model, shape, left in (
        (LearnedQueries(set()), (2, 4, 8), {"queries": "mul"}),
        (Biased(), (2, 5, 8), {}),
    ):
        handle, _, _ = train(model, squares(shape))
        assert handle is not None
        assert handle.uncovered().flops == 0.0
        # The kernel multiplies the queries by its scale, which is not a product of matrices.
        reasons = {name: f"{op}: no check for this kind of module" for name, op in left.items()}
        assert handle.uncovered().parameters == reasons


@pytest.mark.usefixtures("identities")
def test_a_learned_mask_of_attention_is_named() -> None:
    handle, _, _ = train(Biased(), squares((2, 5, 8)))
    assert handle is not None
    assert handle.uncovered().parameters == {
        "bias": "attention mask: no check for this kind of module"
    }
    assert handle.uncovered().flops == 0.0


def test_level_light_has_no_product_covered_and_does_not_warn() -> None:
    handle, told, _ = train(Branches(), class_loss, "light", steps=3)
    assert handle is not None
    assert not told
    uncovered = handle.uncovered()
    assert not covered(handle)
    assert uncovered.unwatched == uncovered.elements > 0
    assert set(uncovered.parameters.values()) == {"policy light"}
    assert handle.at_rest()[0] == handle.at_rest()[1]


def test_shapes_that_are_no_numbers_leave_the_share_of_flops_open() -> None:
    model = Own(lambda x, weight: x @ weight, 8, 8)
    rows = [torch.ones(3, 8), torch.ones(5, 8)]

    def loss_of(model: nn.Module) -> Tensor:
        given = [model.layer(each) for each in rows]
        nested = torch.nested.as_nested_tensor(given, layout=torch.jagged)
        return torch.cat(functional.linear(nested, model.own).unbind()).square().mean()

    handle, _, _ = train(model, loss_of)
    assert handle is not None
    # What its values are multiplied by is a plain product.
    uncovered = handle.uncovered()
    assert uncovered.flops == 0.0
    assert not uncovered.parameters


def test_modules_that_were_wrapped_or_replaced_are_followed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = quietly(model, optimizer)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    squares((2, 8))(model).backward()
    optimizer.step()
    assert covered(handle) == {"0", "2"}
    assert not handle.uncovered()
    optimizer.zero_grad()
    model[0] = nn.Linear(8, 8)
    optimizer.add_param_group({"params": [*model[0].parameters()]})
    squares((2, 8))(model).backward()
    optimizer.step()
    # The new layer has no checks of its own, but its products do.
    assert not handle.uncovered().parameters
