"""Attention, and a whole model with all checks that are not of linear layers."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from outlast import guard
from outlast.guard.attention import AttentionChecks, _Call
from outlast.guard.autograd_hooks import KeptOutput, Seen
from outlast.guard.layers import EmbeddingChecks, NormChecks, norm_kind
from outlast.guard.loss import LossChecks
from outlast.guard.policy import Policy
from outlast.guard.watch import Watch

SETTINGS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "full": {},
    "grouped": {"is_causal": True, "enable_gqa": True},
    "masked": {"attn_mask": "bool"},
    "biased": {"attn_mask": "float", "scale": 0.3},
    "dropout": {"is_causal": True, "dropout_p": 0.2},
}


def inputs(
    setting: str, dtype: torch.dtype = torch.float32, mean: float = 0.0, queries: int = 48
) -> tuple[list[Tensor], Tensor, dict[str, Any]]:
    options = dict(SETTINGS[setting])
    heads = 2 if options.get("enable_gqa") else 4
    if "attn_mask" in options:
        seen = torch.rand(queries, queries) > 0.3
        # One query sees nothing, and three keys are seen by none.
        seen[5], seen[:, -3:] = False, False
        options["attn_mask"] = (
            seen
            if options["attn_mask"] == "bool"
            else torch.where(seen, torch.randn(queries, queries), -torch.inf).to(dtype)
        )
    shapes = [(2, 4, queries, 16), (2, heads, queries, 16), (2, heads, queries, 16)]
    tensors = [(mean + torch.randn(shape)).to(dtype).requires_grad_() for shape in shapes]
    return tensors, 1e-4 * (mean + torch.randn(shapes[0])).to(dtype), options


def passes(tensors: list[Tensor], dy: Tensor, options: dict[str, Any]) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    o = functional.scaled_dot_product_attention(*tensors, **options)
    return o, *torch.autograd.grad(o, [each for each in tensors if each.requires_grad], dy)


def checked(
    watch: Watch, tensors: list[Tensor], dy: Tensor, options: dict[str, Any]
) -> tuple[Tensor, ...]:
    with AttentionChecks(watch).replacing():
        return passes(tensors, dy, options)


def once(site: str, change: Callable[[Tensor], object]) -> Any:
    done: list[str] = []

    def fault_hook(at: str, module: str, numbers: Tensor) -> None:
        if at == site and not done:
            done.append(at)
            change(numbers)

    return fault_hook


@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("setting", SETTINGS)
def test_numbers_are_the_same_and_clean_ones_pass(
    setting: str, dtype: torch.dtype, mean: float
) -> None:
    torch.manual_seed(0)
    watch = Watch(Policy(), None)
    for queries in (48, 200):
        tensors, dy, options = inputs(setting, dtype, mean, queries)
        plain, again = passes(tensors, dy, options), checked(watch, tensors, dy, options)
        assert all(map(torch.equal, plain, again))
        # The gradient keeps the layout that the kernel gave it.
        assert [each.stride() for each in plain] == [each.stride() for each in again]
    assert watch.ledger.findings == []
    assert watch.ledger.site("attention", "attention.dv").checks > 0
    assert watch.ledger.site("attention", "attention.dk").checks > 0


@pytest.mark.parametrize("setting", ["causal", "grouped", "masked"])
@pytest.mark.parametrize("site", ["attention.dv", "attention.dk", "attention.dq"])
@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1e-4), (torch.bfloat16, 0.25)])
def test_a_wrong_gradient_is_put_right(
    setting: str, site: str, dtype: torch.dtype, share: float
) -> None:
    torch.manual_seed(0)
    watch = Watch(Policy(), None)
    tensors, dy, options = inputs(setting, dtype)
    plain = passes(tensors, dy, options)
    gradient = dict(zip(("attention.dq", "attention.dk", "attention.dv"), plain[1:], strict=True))
    norm = float(gradient[site][1, 1, :, 3].float().norm())
    # What dQ adds to its identity is weighted by Q, here almost 1 at least.
    at = int(tensors[0][1, 1, :, 3].abs().argmax())
    watch.fault_hook = once(site, lambda numbers: numbers[1, 1, at, 3].add_(share * norm * 3))
    assert all(map(torch.equal, plain, checked(watch, tensors, dy, options)))
    assert [each.outcome for each in watch.ledger.findings] == ["corrected"]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 100.0])
def test_a_wrong_output_is_put_right_before_it_is_used(value: float) -> None:
    torch.manual_seed(0)
    watch = Watch(Policy(), None)
    tensors, dy, options = inputs("causal")
    plain = passes(tensors, dy, options)
    watch.fault_hook = once("attention.output", lambda numbers: numbers[0, 2, 7, 1].fill_(value))
    assert all(map(torch.equal, plain, checked(watch, tensors, dy, options)))
    (finding,) = watch.ledger.findings
    assert (finding.operation, finding.outcome) == ("attention.forward", "corrected")


def test_a_wrong_output_between_the_values_is_found_going_back() -> None:
    torch.manual_seed(0)
    watch = Watch(Policy(), None)
    tensors, dy, options = inputs("full")
    watch.fault_hook = once("attention.output", lambda numbers: numbers[0, 2, 7, 1].add_(0.05))
    checked(watch, tensors, dy, options)
    assert "attention.dv" in {each.operation for each in watch.ledger.findings}


def test_a_wrong_score_of_the_forward_pass_is_found_going_back() -> None:
    torch.manual_seed(0)
    watch = Watch(Policy(), None)
    tensors, dy, _ = inputs("full")
    query, key, value = tensors
    with AttentionChecks(watch).replacing():
        o = functional.scaled_dot_product_attention(query, key, value)
        # As if row 7 had been normalised by another sum.
        node = next(iter(o.grad_fn.next_functions))[0]
        node._saved_logsumexp.data[0, 2, 7] += 0.01
        torch.autograd.grad(o, tensors, dy)
    assert "attention.dv" in {each.operation for each in watch.ledger.findings}


@pytest.mark.parametrize("setting", ["causal", "dropout"])
def test_infinite_gradients_are_no_fault(setting: str) -> None:
    watch = Watch(Policy(), None)
    tensors, dy, options = inputs(setting)
    dy[0, 0, 3, 3] = torch.inf
    checked(watch, tensors, dy, options)
    assert {each.outcome for each in watch.ledger.findings} == {"not_finite"}
    assert watch.uncorrected == 0


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_inputs(frozen: int) -> None:
    watch = Watch(Policy(), None)
    tensors, dy, options = inputs("causal")
    tensors[frozen].requires_grad_(False)
    plain = passes(tensors, dy, options)
    assert all(map(torch.equal, plain, checked(watch, tensors, dy, options)))
    assert watch.ledger.findings == []
    assert watch.ledger.checks > 0


def test_other_threads_and_errors_leave_the_function_as_it_was() -> None:
    original = functional.scaled_dot_product_attention
    watch = Watch(Policy(), None)
    tensors, dy, options = inputs("causal")
    with pytest.raises(RuntimeError), AttentionChecks(watch).replacing():
        functional.scaled_dot_product_attention(tensors[0], tensors[1][..., :3], tensors[2])
    assert functional.scaled_dot_product_attention is original
    workers = [
        threading.Thread(target=checked, args=(watch, tensors, dy, options)) for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert functional.scaled_dot_product_attention is original
    assert watch.ledger.findings == []


def test_compiled_calls_are_left_alone() -> None:
    watch = Watch(Policy(), None)
    tensors, _, _ = inputs("causal")

    def attend(*given: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(*given)

    with AttentionChecks(watch).replacing():
        compiled = torch.compile(attend, backend="eager", fullgraph=True)
        assert torch.equal(compiled(*tensors), attend(*tensors))
    assert {each.operation for each in watch.ledger.sites.values()} == {"attention.forward"}


class TinyAttention(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        # Four heads of queries share two of keys and values.
        query, key, value = self.qkv(x).unflatten(-1, (8, -1)).transpose(1, 2).split((4, 2, 2), 1)
        o = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True, dropout_p=self.dropout
        )
        return self.out(o.transpose(1, 2).flatten(2))


class TinyBlock(nn.Module):
    def __init__(self, width: int, norm: Any, dropout: float) -> None:
        super().__init__()
        self.first, self.second = norm(width), norm(width)
        self.attention = TinyAttention(width, dropout)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class TinyModel(nn.Module):
    def __init__(self, norm: Any, again: bool, dropout: float, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(TinyBlock(width, norm, dropout) for _ in range(2))
        self.norm, self.head = norm(width), nn.Linear(width, 256)
        self.again = again

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(self.norm(x))


def train(model: nn.Module, watch: Watch | None, steps: int, bf16: bool) -> list[Tensor]:
    text = b"".join(path.read_bytes() for path in sorted(Path(guard.__file__).parent.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(0)
    numbers = []
    with ExitStack() as stack:
        if watch is not None:
            attention = AttentionChecks(watch)
            stack.callback(attention.follow(model))
            stack.enter_context(attention.replacing())
            stack.enter_context(LossChecks(watch).replacing())
            for name, module in model.named_modules():
                if norm_kind(module):
                    module.forward = NormChecks(watch, module, name).forward
                elif isinstance(module, nn.Embedding):
                    module.forward = EmbeddingChecks(watch, module, name).forward
        for _ in range(steps):
            for _ in range(2):
                starts = torch.randint(0, len(data) - 41, (4,), generator=generator)
                ids = torch.stack([data[start : start + 41] for start in starts])
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    logits = model(ids[:, :-1]).flatten(0, 1)
                    loss = functional.cross_entropy(logits, ids[:, 1:].flatten())
                loss.backward()
                numbers.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            if watch is not None:
                watch.advance()
    return numbers + [parameter.detach() for parameter in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "again", "dropout"),
    [(nn.LayerNorm, False, 0.0), (nn.RMSNorm, True, 0.0), (nn.LayerNorm, True, 0.1)],
)
@pytest.mark.parametrize("bf16", [False, True])
def test_training_on_real_text(norm: Any, again: bool, dropout: float, bf16: bool) -> None:
    runs = []
    for watch in (None, Watch(Policy(), None)):
        torch.manual_seed(0)
        runs.append(train(TinyModel(norm, again, dropout), watch, 12, bf16))
    assert watch is not None
    assert all(map(torch.equal, *runs))
    assert watch.ledger.findings == []
    operations = {each.operation for each in watch.ledger.sites.values() if each.checks}
    assert len(operations) == (10 if dropout else 11)
    assert watch.ledger.site("blocks.1.attention", "attention.dv").checks > 0


FAULTS: dict[str, Callable[[Tensor], object]] = {
    "addition": lambda o: o[1, 2, 7, 3].add_(0.3 * o.float().abs().max().to(o.dtype)),
    "flipped sign": lambda o: o[1, 2, 7].neg_(),
    "low bit": lambda o: o.view(torch.int16 if o.itemsize == 2 else torch.int32)[
        1, 2, 7, 3
    ].bitwise_xor_(8),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("setting", SETTINGS)
def test_an_output_that_changes_after_it_was_handed_on_is_harmful(
    setting: str, dtype: torch.dtype, fault: str
) -> None:
    torch.manual_seed(0)
    watch = Watch(Policy(), None)
    tensors, dy, options = inputs(setting, dtype)
    with AttentionChecks(watch).replacing():
        o = functional.scaled_dot_product_attention(*tensors, **options)
        FAULTS[fault](o.data)
        torch.autograd.grad(o, tensors, dy)
    assert {each.outcome for each in watch.ledger.findings} == {"detected"}
    assert watch.uncorrected


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_wrong_output_that_was_used_is_never_corrected_or_excused(setting: str) -> None:
    # Computed wrong, but between the values: with dropout there is no check of the forward pass.
    for size in (0.01, 0.05, 0.3, 1.0):
        torch.manual_seed(0)
        watch = Watch(Policy(), None)
        tensors, dy, options = inputs(setting)
        watch.fault_hook = once("attention.output", lambda o, add=size: o[0, 2, 7, 1].add_(add))
        checked(watch, tensors, dy, options)
        (finding, *more) = watch.ledger.findings
        if (finding.operation, finding.outcome) != ("attention.forward", "corrected"):
            assert {each.outcome for each in (finding, *more)} == {"detected"}


@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_input_that_changes_before_the_backward_pass_is_harmful(which: int) -> None:
    torch.manual_seed(0)
    watch = Watch(Policy(), None)
    tensors, dy, options = inputs("causal")
    with AttentionChecks(watch).replacing():
        o = functional.scaled_dot_product_attention(*tensors, **options)
        tensors[which].data[0, 1, 5].mul_(3.0)
        torch.autograd.grad(o, tensors, dy)
    assert {each.outcome for each in watch.ledger.findings} == {"detected"}


@pytest.mark.parametrize("setting", ["causal", "dropout", "heads behind tokens"])
def test_a_gradient_that_stays_wrong_is_no_rounding(setting: str) -> None:
    # 20 sigma: below four thresholds, up to which numbers were believed that came out again.
    torch.manual_seed(0)
    watch = Watch(Policy(), None)
    tensors, dy, options = inputs("causal" if setting == "heads behind tokens" else setting)
    if setting == "heads behind tokens":
        # As a projection gives them: (batch, tokens, heads, channels) in memory.
        moved = [each.detach().transpose(1, 2).contiguous().transpose(1, 2) for each in tensors]
        tensors = [each.requires_grad_() for each in moved]

    def fault_hook(site: str, module: str, numbers: Tensor) -> None:
        if site == "attention.dv":
            numbers[0, 1, 7, 3] += 3e-5 * numbers[0, 1, :, 3].norm()

    watch.fault_hook = fault_hook
    checked(watch, tensors, dy, options)
    (finding,) = watch.ledger.findings
    assert (finding.operation, finding.outcome) == ("attention.dv", "persistent")


def test_gradients_with_dropout_are_computed_again_with_the_same_numbers_dropped() -> None:
    torch.manual_seed(0)
    watch = Watch(Policy(), None)
    tensors, dy, options = inputs("dropout")
    plain = passes(tensors, dy, options)
    state = torch.get_rng_state()
    watch.fault_hook = once("attention.dv", lambda numbers: numbers[1, 1, 4, 3].add_(1.0))
    assert all(map(torch.equal, plain, checked(watch, tensors, dy, options)))
    assert [each.outcome for each in watch.ledger.findings] == ["corrected"]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extreme_but_healthy_attention_is_never_called_a_broken_device(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    watch = Watch(Policy(), None)
    shapes = [(1, 1, 16), (2, 2, 64), (7, 7, 8), (48, 50, 4), (200, 3, 8), (64, 64, 16)]
    for queries, keys, channels in shapes:
        for mean, scale in ((0.0, 1.0), (30.0, 1.0), (1.0, 1e-4), (0.0, 0.0), (0.0, 100.0)):
            for options in ({}, {"dropout_p": 0.1}):
                given = [
                    (mean + scale * torch.randn(2, 2, size, channels)).to(dtype).requires_grad_()
                    for size in (queries, keys, keys)
                ]
                with AttentionChecks(watch).replacing():
                    o = functional.scaled_dot_product_attention(*given, **options)
                    o.backward(torch.ones_like(o))
    assert {each.outcome for each in watch.ledger.findings} <= {"rounding", "not_finite"}
    assert watch.uncorrected == 0


def language_model(name: str, checkpointed: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 64, "attn_implementation": "sdpa"}
    model: nn.Module
    if name == "llama":
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                **common,
            )
        )
    elif name == "gpt2":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=32, **common)
        )
    else:
        model = transformers.BertForMaskedLM(
            transformers.BertConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=32,
                **common,
            )
        )
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def guarded_steps(model: nn.Module, bf16: bool, fault: Any) -> tuple[list[Tensor], list[str]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = guard.guard(model, optimizer, "full")
    handle.watch.fault_hook = fault
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        ids = torch.randint(0, 64, (3, 20), generator=generator)
        seen = torch.ones_like(ids)
        seen[0, 15:] = 0
        for _ in handle.attempts():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(input_ids=ids, attention_mask=seen, labels=ids).loss
            loss.backward()
        optimizer.step()
    handle.remove()
    weights = [parameter.detach() for parameter in model.parameters()]
    return weights, [each.outcome for each in handle.ledger.findings]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_step_with_a_wrong_output_is_repeated_in_real_models(
    name: str, bf16: bool, checkpointed: bool
) -> None:
    torch.manual_seed(0)
    runs = []
    state = {
        key: value.clone() for key, value in language_model(name, checkpointed).state_dict().items()
    }
    # That of the others has dropout, and so products of its own.
    site = "attention.output" if name == "llama" else "product.output"

    def strike(o: Tensor) -> None:
        o[tuple(min(3, size - 1) for size in o.shape)].add_(o.abs().max())

    for fault in (None, once(site, strike)):
        model = language_model(name, checkpointed)
        model.load_state_dict(state)
        runs.append(guarded_steps(model, bf16, fault))
    (clean, nothing), (weights, outcomes) = runs
    assert nothing == []
    assert outcomes
    assert set(outcomes) <= {"repeated", "corrected"}
    assert all(map(torch.equal, clean, weights))


def test_the_random_state_is_what_it_was_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    random, plain = torch.get_rng_state(), functional.scaled_dot_product_attention
    watch, options = Watch(Policy(), None), {"dropout_p": 0.5}
    call = _Call(watch, "attention", plain, options, 1.0, KeptOutput(), random)
    torch.rand(3)
    before = torch.get_rng_state()
    query = torch.ones(1, 1, 2, 4)

    def fail(*_: object) -> Any:
        torch.rand(1)
        raise RuntimeError("no memory")

    monkeypatch.setattr(call, "compute", fail)
    seen = Seen(query, (query, query, query, None), (), fail)
    calls: list[Callable[[Seen], object]] = [call.again]
    calls.append(lambda seen: call.beyond_rounding(seen, "v", [query]))
    for compute in calls:
        with pytest.raises(RuntimeError, match="no memory"):
            compute(seen)
        assert torch.equal(torch.get_rng_state(), before)
    # A call that draws nothing leaves the state to others.
    call.random = None
    with pytest.raises(RuntimeError, match="no memory"):
        call.beyond_rounding(seen, "v", [query])
    assert not torch.equal(torch.get_rng_state(), before)
