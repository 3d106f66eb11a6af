"""`guard()` and its handle: policies, coverage, attempts, verdicts, and unchanged numbers."""

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from outlast.errors import DataCorruptionError, GuardError
from outlast.guard import LEVELS, Finding, Guard, Policy, guard

Seam = Callable[[str, str, Tensor], None]

VOCABULARY, WIDTH, LENGTH = 32, 16, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.second_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            self.qkv(self.first_norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        )
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.mlp(self.second_norm(x))
        return result


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.embedding(ids))))
        return logits


def quietly(model: nn.Module, *args: Any, **options: Any) -> Guard:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return guard(model, *args, **options)


class Training:
    """A tiny GPT, guarded at a level or not at all, and how to train it."""

    def __init__(self, policy: Policy | str | None = None, *, bf16: bool = False) -> None:
        torch.manual_seed(0)
        self.bf16 = bf16
        self.model = GPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.handle: Guard | None = None
        if policy is not None:
            self.handle = quietly(self.model, self.optimizer, policy)

    def passes(self, step: int) -> float:
        """Both passes of a step of two micro-batches; returns the loss."""
        generator = torch.Generator().manual_seed(step)
        total = 0.0
        for _ in range(2):
            ids = torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                logits = self.model(ids).flatten(0, 1)
            loss = functional.cross_entropy(logits.float(), ids.flatten())
            loss.backward()
            total += loss.item()
        return total

    def step(self, step: int, *, attempts: bool = False) -> float:
        rounds = self.handle.attempts() if attempts and self.handle is not None else range(1)
        loss = 0.0
        for _ in rounds:
            self.optimizer.zero_grad()
            loss = self.passes(step)
        self.optimizer.step()
        return loss

    def run(self, steps: int = 4, *, attempts: bool = False) -> list[float]:
        return [self.step(step, attempts=attempts) for step in range(steps)]

    def weights(self) -> list[Tensor]:
        return [each.detach().clone() for each in self.model.parameters()]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(left, right, strict=True))


def once(at: str, module: str, call: int = 1) -> Seam:
    """A fault_hook that spoils a number at one pass through a site of a module."""
    calls = 0

    def fault_hook(site: str, name: str, numbers: Tensor) -> None:
        nonlocal calls
        if (site, name) == (at, module):
            calls += 1
            if calls == call:
                numbers.data.view(-1)[5] += 7.0

    return fault_hook


def always(at: str, module: str) -> Seam:
    def fault_hook(site: str, name: str, numbers: Tensor) -> None:
        if (site, name) == (at, module):
            numbers.data.view(-1)[5] += 7.0

    return fault_hook


def test_an_unknown_level_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(GuardError, match=r"policy = 'linera' is not one of .*mean 'linear'\?"):
        guard(nn.Linear(2, 2), policy="linera")  # type: ignore[arg-type]
    with pytest.raises(GuardError, match=r"\*\.mlp = 'ful' .* did you mean 'full'\?"):
        Policy(modules={"*.mlp": "ful"})  # type: ignore[dict-item]
    with pytest.raises(GuardError) as refused:
        Policy("everything at once")  # type: ignore[arg-type]
    assert "did you mean" not in str(refused.value)


def test_unknown_settings_of_a_policy_are_refused() -> None:
    with pytest.raises(GuardError, match="persistent = 'skip' is not raise or drop"):
        Policy(persistent="skip")  # type: ignore[arg-type]
    for budget in (0.0, -1.0, 1.5):
        with pytest.raises(GuardError, match=f"light_budget = {budget} is not above 0"):
            Policy(light_budget=budget)


def test_a_model_is_guarded_once_at_a_time() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    handle = guard(model)
    with pytest.raises(GuardError, match=r"guarded already; call remove\(\)"):
        guard(model)
    handle.remove()
    guard(model).remove()


def test_complex_parameters_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.complex64))
    with pytest.raises(GuardError, match=r"parameter 1\.weight is torch\.complex64"):
        guard(model)
    assert "forward" not in vars(model[0])


def test_a_lazy_module_is_refused_until_it_has_run() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(GuardError, match=r"parameter 0\.(weight|bias) has no shape.*run the model"):
        guard(model, optimizer)
    model(torch.randn(3, 6))
    guard(model, optimizer).remove()


def test_a_pattern_raises_the_level_of_some_modules() -> None:
    policy = Policy("light", modules={"*.mlp.*": "linear"})
    plain, training = Training(), Training(policy)
    assert plain.run() == training.run()
    handle = training.handle
    assert handle is not None
    covered = {each.module for each in handle.coverage() if each.operations}
    assert covered == {f"blocks.{block}.mlp.{layer}" for block in (0, 1) for layer in (0, 2)}
    assert {m for (m, kind), site in handle.ledger.sites.items() if kind == "linear.dx"} == covered


def test_a_pattern_lowers_the_level_of_some_modules_and_the_last_one_counts() -> None:
    policy = Policy("full", modules={"blocks.*": "light", "blocks.1.*": "linear"})
    handle = Training(policy).handle
    assert handle is not None
    covered = {each.module: each for each in handle.coverage()}
    assert covered["blocks.0.qkv"].why_not == "policy light"
    assert "linear.forward" in covered["blocks.1.qkv"].operations
    assert covered["blocks.1.first_norm"].why_not == "policy linear"
    assert "norm.forward" in covered["norm"].operations


def test_coverage_lists_every_module_with_parameters() -> None:
    holders = {
        name
        for name, module in GPT().named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }
    for level in LEVELS:
        handle = Training(level).handle
        assert handle is not None
        coverage = handle.coverage()
        assert {each.module for each in coverage} == holders
        assert all(bool(each.operations) != bool(each.why_not) for each in coverage)
    assert all(each.operations for each in coverage)


def test_kinds_without_a_check_of_their_own_are_covered_by_their_operations() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = guard(model, optimizer)
    assert [each.kind for each in handle.coverage() if not each.operations] == ["Conv1d"] * 2
    model(torch.randn(2, 4, 4)).sum().backward()
    optimizer.step()
    assert [each.operations for each in handle.coverage()[1:]] == [("convolution.dw",)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_remove_gives_everything_back(level: str) -> None:
    # Guards of models that are gone have given their functions back.
    gc.collect()
    attention, loss = functional.scaled_dot_product_attention, functional.cross_entropy
    training = Training(level)
    replaced = functional.cross_entropy is not loss
    assert replaced == (level == "full")
    handle = training.handle
    assert handle is not None
    training.step(0)
    handle.remove()
    assert functional.scaled_dot_product_attention is attention
    assert functional.cross_entropy is loss
    assert not any("forward" in vars(module) for module in training.model.modules())
    assert not hasattr(training.model, "_outlast_watch")
    before = handle.ledger.checks
    training.step(1)
    assert handle.ledger.checks == before
    plain = Training()
    plain.run(2)
    assert equal(plain.weights(), training.weights())


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("level", ["light", "linear", "full"])
def test_a_guarded_training_has_the_bits_of_an_unguarded_one(level: str, bf16: bool) -> None:
    plain, guarded = Training(bf16=bf16), Training(level, bf16=bf16)
    assert guarded.run(14, attempts=True) == plain.run(14)
    assert equal(guarded.weights(), plain.weights())
    assert guarded.handle is not None
    guarded.handle.finish()
    assert guarded.handle.ledger.findings == []
    assert guarded.handle.ledger.checks > 0


@pytest.mark.parametrize("module", ["head", "blocks.1.projection", "blocks.0.mlp.2"])
def test_attempts_repeat_what_cannot_be_computed_again(module: str) -> None:
    plain, guarded = Training(), Training("linear")
    assert guarded.handle is not None
    guarded.handle.watch.fault_hook = once("linear.saved", module, 3)
    assert guarded.run(attempts=True) == plain.run()
    assert equal(guarded.weights(), plain.weights())
    found = {finding.operation: finding for finding in guarded.handle.ledger.findings}
    finding = found.pop("linear.saved")
    assert (finding.step, finding.module, finding.outcome) == (1, module, "repeated")
    # The projection's input is the output of attention, which looks at it again, too.
    assert {*found} <= ({"attention.output"} if "projection" in module else set())
    assert all(finding.outcome == "repeated" for finding in found.values())


class Normed(nn.Module):
    """A norm with running averages, and a buffer that every pass replaces, before a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        result: Tensor = self.head(self.norm(self.body(x)) * self.seen)
        return result


def test_a_repeated_step_changes_buffers_once() -> None:
    def run(level: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = Normed()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        handle = quietly(model, optimizer, level) if level else None
        if handle is not None:
            handle.watch.fault_hook = once("linear.saved", "head", 2)
        for step in range(3):
            for _ in (0,) if handle is None else handle.attempts():
                optimizer.zero_grad()
                x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
                model(x).square().mean().backward()
            optimizer.step()
        if handle is not None:
            assert [finding.outcome for finding in handle.ledger.findings] == ["repeated"]
        return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]

    clean = run("")
    assert equal(run("linear"), clean)
    assert equal(run("full"), clean)


def graph() -> Tensor:
    return torch.eye(8) + torch.diag(torch.ones(7), 1)


@pytest.mark.filterwarnings("ignore:.*(beta state|deprecated):UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: graph().to_sparse(),
        lambda: graph().to_sparse_csr(),
        lambda: graph().to_mkldnn(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: torch.ones(4, dtype=torch.complex128).conj(),
        lambda: torch.full((2,), 0.0),
        lambda: torch.quantize_per_tensor(graph(), 0.1, 0, torch.qint8),
        lambda: torch.ones(1, device="meta"),
    ],
    ids=["coo", "csr", "mkldnn", "nested", "conjugate", "zeros", "quantized", "meta"],
)
@pytest.mark.parametrize("audit", [0.0, 0.005])
def test_buffers_of_every_layout_pass_a_repeated_step(
    make: Callable[[], Tensor], audit: float
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    model.register_buffer("graph", make())
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    handle = quietly(model, optimizer, Policy("full", audit=audit, audit_steps=True))
    handle.watch.fault_hook = once("linear.saved", "1", 2)
    for step in range(14):
        for attempt in handle.attempts():
            optimizer.zero_grad()
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
            if model.graph.layout in (torch.sparse_coo, torch.sparse_csr):
                x = model.graph @ x
            model(x).square().mean().backward()
            if step == 1 and attempt == 0 and not model.graph.is_quantized:
                with torch.no_grad():
                    model.graph.mul_(-1)
        optimizer.step()
    assert [finding.outcome for finding in handle.ledger.findings] == ["repeated"]
    report = handle.audits()
    assert (report is not None and report.replays > 0) == (audit > 0)
    if not (model.graph.is_nested or model.graph.is_meta or model.graph.is_quantized):
        assert model.graph.to_dense().tolist() == make().to_dense().tolist()
        if model.graph.is_floating_point():
            assert not torch.signbit(model.graph.to_dense()).any()


def test_attempts_yields_how_many_there_were_before() -> None:
    training = Training("linear")
    assert training.handle is not None
    assert list(training.handle.attempts()) == [0]
    training.handle.watch.fault_hook = once("linear.saved", "head")
    seen = []
    for attempt in training.handle.attempts():
        training.optimizer.zero_grad()
        training.passes(0)
        seen.append(attempt)
    assert seen == [0, 1]


def test_without_attempts_the_step_refuses_wrong_numbers_before_the_weights_change() -> None:
    training = Training("linear")
    assert training.handle is not None
    training.run(1)
    before = training.weights()
    training.handle.watch.fault_hook = once("linear.saved", "blocks.0.qkv")
    with pytest.raises(DataCorruptionError, match=r"step 2: .*linear\.saved of blocks\.0\.qkv"):
        training.step(1)
    assert equal(training.weights(), before)
    # The caller may repeat the step by himself.
    plain = Training()
    plain.run(2)
    training.handle.restart(1)
    with warnings.catch_warnings():
        # What the guard computes between two steps is no operation of theirs.
        warnings.simplefilter("error")
        training.step(1)
    assert equal(training.weights(), plain.weights())


def test_wrong_numbers_that_stay_end_the_attempts() -> None:
    training = Training("linear")
    assert training.handle is not None
    training.handle.watch.fault_hook = always("linear.saved", "head")
    before = training.weights()
    with pytest.raises(DataCorruptionError, match=r"step 1: the numbers of rank 0 .* stay so"):
        training.step(0, attempts=True)
    assert equal(training.weights(), before)


def test_a_weight_that_changes_in_the_step_stops_it() -> None:
    training = Training("linear")
    assert training.handle is not None
    training.handle.watch.fault_hook = once("weight", "blocks.0.mlp.0")
    with pytest.raises(DataCorruptionError, match=r"blocks\.0\.mlp\.0"):
        training.step(0, attempts=True)


def test_a_weight_that_changes_between_steps_stops_the_next_one() -> None:
    training = Training("full")
    assert training.handle is not None
    training.run(2)
    before = training.weights()
    training.handle.watch.fault_hook = once("weight.rest", "blocks.0.mlp.0.weight")
    with pytest.raises(DataCorruptionError, match="rest of optimizer at step 2"):
        training.step(2)
    changed = [not torch.equal(*pair) for pair in zip(before, training.weights(), strict=True)]
    assert sum(changed) == 1


def test_without_correction_findings_are_counted_and_stop_nothing() -> None:
    seen: list[Finding] = []
    training = Training()
    training.handle = quietly(
        training.model,
        training.optimizer,
        Policy("full", correct=False),
        on_finding=seen.append,
    )
    training.handle.watch.fault_hook = always("linear.output", "head")
    training.run(2, attempts=True)
    assert {(each.module, each.operation, each.outcome) for each in seen} == {
        ("head", "linear.forward", "detected")
    }
    assert seen == training.handle.ledger.findings
    assert [each.step for each in seen] == [0, 0, 1, 1]
    plain = Training()
    plain.run(2)
    assert not equal(plain.weights(), training.weights())


def test_every_finding_is_told_with_its_place() -> None:
    seen: list[Finding] = []
    training = Training()
    training.handle = quietly(training.model, training.optimizer, on_finding=seen.append)
    training.handle.watch.fault_hook = once("linear.output", "blocks.1.qkv", 3)
    training.run(3)
    (finding,) = seen
    assert (finding.step, finding.module, finding.operation) == (
        1,
        "blocks.1.qkv",
        "linear.forward",
    )
    assert (finding.device, finding.rank, finding.rows, finding.outcome) == (
        "cpu",
        0,
        1,
        "corrected",
    )
    assert finding.magnitude > 6
    assert "linear.forward of blocks.1.qkv at step 1 on rank 0 (cpu): 1 row" in str(finding)


def test_without_an_optimizer_numbers_are_checked_and_put_right() -> None:
    plain, training = Training(), Training()
    training.handle = quietly(training.model)
    training.handle.watch.fault_hook = once("linear.dx", "blocks.0.projection")
    assert training.run() == plain.run()
    assert equal(training.weights(), plain.weights())
    assert [each.outcome for each in training.handle.ledger.findings] == ["corrected"]
    # Whoever has no optimizer that asks may ask himself.
    assert training.handle.verdict().clean
    training.handle.watch.fault_hook = once("linear.saved", "head")
    training.passes(9)
    assert training.handle.verdict().bad_ranks == (0,)


def test_several_optimizers_are_one_step() -> None:
    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [each for each in model.parameters() if each.dim() > 1]
        vectors = [each for each in model.parameters() if each.dim() < 2]
        return [torch.optim.SGD(matrices, 1e-2), torch.optim.AdamW(vectors, 1e-2)]

    made = []
    for guarded in (False, True):
        training = Training()
        both = optimizers(training.model)
        handle = quietly(training.model, both, "full") if guarded else None
        for step in range(3):
            training.passes(step)
            for each in both:
                each.step()
                each.zero_grad()
            assert handle is None or handle.watch.step == step + 1
        made.append(training.weights())
    assert equal(*made)
    assert handle is not None
    handle.finish()
    assert handle.ledger.findings == []
    assert {kind for _, kind in handle.ledger.sites} >= {"optimizer.moments", "optimizer.finite"}
    handle.watch.fault_hook = once("linear.saved", "head")
    before = training.weights()
    training.passes(3)
    with pytest.raises(DataCorruptionError):
        both[0].step()
    assert equal(training.weights(), before)


def test_the_certificate_says_what_could_have_been_missed() -> None:
    training = Training("full")
    training.run(3)
    assert training.handle is not None
    certificate = training.handle.certificate()
    sites = training.handle.ledger.sites.values()
    assert certificate.keys() == {site.operation for site in sites if site.checks}
    forward = certificate["linear.forward"]
    assert forward.checks == 3 * 2 * 9 * 4 * LENGTH
    assert 0.2 < forward.spread < 1.1
    assert forward.spread < forward.worst < 5.75
    assert forward.detection_point is not None
    assert 0 < forward.detection_point < 1e-4
    # Hashes and gathered rows are compared bit for bit.
    assert certificate["rest"].detection_point is None
    assert certificate["embedding.forward"].detection_point is None


def test_level_off_checks_nothing() -> None:
    plain, training = Training(), Training("off")
    assert training.run(2) == plain.run(2)
    assert training.handle is not None
    assert training.handle.ledger.checks == 0
    assert training.handle.scrubber is None


def test_optimizers_may_step_within_the_backward_pass() -> None:
    def trained(level: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), LlamaRMSNorm(WIDTH), nn.Linear(WIDTH, 4))
        optimizers = {p: torch.optim.AdamW([p], 0.01) for p in model.parameters()}
        handle = quietly(model, [*optimizers.values()], level) if level else None

        def step(parameter: Tensor) -> None:
            optimizers[parameter].step()  # type: ignore[index]
            optimizers[parameter].zero_grad()  # type: ignore[index]

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(4):
            model(torch.randn(8, WIDTH)).square().mean().backward()
        if handle is not None:
            assert not handle.ledger.findings
            assert handle.watch.step == 4
            # The parameters' hooks, which torch never frees, hold the optimizers, and these it.
            handle.remove()
        return [parameter.detach() for parameter in model.parameters()]

    expected = trained("")

    assert equal(trained("full"), expected)


def test_a_program_may_write_to_weights_between_the_attempts_and_the_step() -> None:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    handle = quietly(model, optimizer, "full")
    for _ in range(4):
        for _ in handle.attempts():
            optimizer.zero_grad()
            model(torch.randn(8, WIDTH)).square().mean().backward()
        with torch.no_grad():
            # As masks of pruned weights do, or a bound on their size.
            model.weight[::2] = 0.0
        optimizer.step()
    handle.finish()

    assert not handle.ledger.findings
    assert handle.certificate()["optimizer.update"].checks


def test_parameters_that_join_an_optimizer_later_are_watched_at_rest() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    handle = quietly(model, optimizer, "full")

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()

    step()
    head = nn.Linear(WIDTH, 4)
    model.append(head)
    optimizer.add_param_group({"params": list(head.parameters())})
    for _ in range(3):
        step()
    assert not handle.ledger.findings
    elements, checked = handle.at_rest()
    assert elements == checked == 16 * 16 + 16 + 4 * 16 + 4

    head.weight.detach().numpy()[1, 2] *= 2
    with pytest.raises(DataCorruptionError, match="rest"):
        step()


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_checks_do_not_depend_on_the_default_type(default: torch.dtype) -> None:
    def trained(dtype: torch.dtype) -> tuple[list[float], list[Tensor], Guard]:
        # Its first numbers are drawn in the usual type.
        training = Training("full", bf16=True)
        assert training.handle is not None
        torch.set_default_dtype(dtype)
        try:
            losses = training.run(2)
        finally:
            torch.set_default_dtype(torch.float32)
        training.handle.remove()
        return losses, training.weights(), training.handle

    losses, weights, usual = trained(torch.float32)

    found, others, handle = trained(default)

    assert found == losses
    assert equal(others, weights)
    assert not handle.ledger.findings
    assert handle.certificate() == usual.certificate()
