"""Cross-entropy: same numbers, no false alarms, and every wrong number found."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from outlast.guard import guard
from outlast.guard.loss import LossChecks
from outlast.guard.policy import Policy
from outlast.guard.watch import Watch

ROWS, CLASSES = 60, 257


def data(dtype: torch.dtype = torch.float32, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    logits = (3.0 + scale * torch.randn(ROWS, CLASSES)).to(dtype).requires_grad_()
    target = torch.randint(0, CLASSES, (ROWS,))
    target[::7] = -100
    return logits, target


def passes(function: Any, logits: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    loss = function(logits, target, **options)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    return loss, gradient


def checked(watch: Watch) -> Any:
    def cross_entropy(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
        with LossChecks(watch).replacing():
            return functional.cross_entropy(logits, target, **options)

    return cross_entropy


def once(site: str, index: int, change: Any) -> Any:
    done: list[str] = []

    def fault_hook(at: str, module: str, numbers: Tensor) -> None:
        if at == site and not done:
            done.append(at)
            flat = numbers.view(-1)
            flat[index] = change(flat[index])

    return fault_hook


@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_numbers_are_the_same_and_clean_ones_pass(
    reduction: str, smoothing: float, dtype: torch.dtype, scale: float
) -> None:
    torch.manual_seed(0)
    watch = Watch(Policy(), None)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    for _ in range(5):
        logits, target = data(dtype, scale)
        plain = passes(functional.cross_entropy, logits, target, **options)
        again = passes(checked(watch), logits, target, **options)
        assert all(map(torch.equal, plain, again))
    assert watch.ledger.findings == []
    assert watch.ledger.site("loss", "loss.dlogits").checks == 5 * ROWS
    assert watch.ledger.site("loss", "loss.forward").checks == (
        5 * ROWS if reduction == "none" else 5
    )


@pytest.mark.parametrize(
    ("site", "index", "change"),
    [
        ("loss.output", 0, lambda x: x * 1.001),
        ("loss.output", 0, lambda x: x * torch.nan),
        ("loss.dlogits", 5 * CLASSES + 11, lambda x: x + 1e-6),
        ("loss.dlogits", 5 * CLASSES + 11, lambda x: x - 1e-6),
        # A wrong gradient of a row that is ignored.
        ("loss.dlogits", 7 * CLASSES, lambda x: x + 1e-12),
        ("loss.dlogits", 3, lambda x: x * torch.nan),
    ],
)
def test_wrong_numbers_are_put_right(site: str, index: int, change: Any) -> None:
    torch.manual_seed(0)
    watch = Watch(Policy(), None)
    logits, target = data()
    plain = passes(functional.cross_entropy, logits, target)
    watch.fault_hook = once(site, index, change)
    assert all(map(torch.equal, plain, passes(checked(watch), logits, target)))
    (finding,) = watch.ledger.findings
    assert (finding.outcome, finding.rows) == ("corrected", 1)


def drawn(kind: str, rows: int, classes: int) -> Tensor:
    """Logits as healthy models have them: at their start, in training, and quite sure."""
    equal = torch.full((rows, classes), float(torch.randn(())))
    if kind == "equal":
        return equal
    if kind == "dominant":
        equal[:, classes // 2] += 6.0
        return equal
    if kind == "two values":
        return torch.where(torch.rand(rows, classes) > 0.5, 1.3, 0.0)
    if kind == "masked":
        logits = torch.randn(rows, classes)
        logits[:, (classes + 1) // 2 :] = -torch.inf
        return logits
    return {"random": 3.0, "small": 0.01, "huge": 1e4}[kind] * torch.randn(rows, classes)


LOGITS = ["random", "small", "huge", "equal", "dominant", "two values", "masked"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_healthy_logits_raise_no_alarm(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    watch = Watch(Policy(), None)
    for classes in (2, 3, 10, 37, 1000, 50_000):
        for rows in (1, 4, 64, 500 if classes < 1000 else 7):
            for number, reduction in enumerate(("mean", "sum", "none")):
                # Sums over rows and classes may overflow in fp16, which is the data's own.
                smoothing = 0.1 if number != 1 and kind != "masked" else 0.0
                logits = drawn(kind, rows, classes).to(dtype).requires_grad_()
                target = torch.randint(0, (classes + 1) // 2, (rows,))
                target[1::5] = -100
                options = {"reduction": reduction, "label_smoothing": smoothing}
                passes(checked(watch), logits, target, **options)
    wrong = [each for each in watch.ledger.findings if each.outcome != "not_finite"]
    assert wrong == []
    assert dtype == torch.float16 or not watch.ledger.findings


@pytest.mark.slow
@pytest.mark.parametrize("batch", [4, 64])
@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_small_classifier_learns_without_an_alarm(
    dtype: torch.dtype, classes: int, batch: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, classes)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    teacher = torch.randn(20, classes)
    handle = guard(model, optimizer, "full")
    for _ in range(250):
        x = torch.randn(batch, 20)
        # What can be learnt makes the model sure, and sums of exponentials little more than 1.
        target, x = (x @ teacher).argmax(dim=1), x.to(dtype)
        for _ in handle.attempts():
            optimizer.zero_grad()
            functional.cross_entropy(model(x), target).backward()
        optimizer.step()
    assert handle.ledger.findings == []
    assert handle.ledger.site("loss", "loss.forward").checks == 250
    handle.remove()


@pytest.mark.parametrize("classes", [2, 10, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("site", ["loss.output", "loss.dlogits"])
def test_an_error_beyond_the_detection_point_is_found(
    site: str, dtype: torch.dtype, classes: int
) -> None:
    # Of the loss's value, and of a row's weight.
    share = {torch.bfloat16: 0.3, torch.float16: 0.05, torch.float32: 1e-4}[dtype]
    torch.manual_seed(0)
    for _ in range(10):
        watch = Watch(Policy(), None)
        logits = (2.0 * torch.randn(64, classes)).to(dtype).requires_grad_()
        target = torch.randint(0, classes, (64,))
        plain = passes(functional.cross_entropy, logits, target)
        size = share * (float(plain[0].detach()) if site == "loss.output" else 1.0 / 64)
        watch.fault_hook = once(site, 0, lambda x, size=size: x + size)
        assert all(map(torch.equal, plain, passes(checked(watch), logits, target)))
        assert [each.outcome for each in watch.ledger.findings] == ["corrected"]


@pytest.mark.parametrize("site", ["loss.output", "loss.dlogits"])
def test_numbers_that_stay_wrong_by_little_are_no_rounding(site: str) -> None:
    # A few thresholds: it is fp64 that says so, not a multiple of the threshold.
    watch = Watch(Policy(), None)
    logits, target = data()
    share = 3e-4 if site == "loss.output" else 3e-5 / ROWS

    def fault_hook(at: str, module: str, numbers: Tensor) -> None:
        if at == site:
            numbers.view(-1)[0] += share

    watch.fault_hook = fault_hook
    passes(checked(watch), logits, target)
    assert [each.outcome for each in watch.ledger.findings] == ["persistent"]


def test_logits_that_change_before_the_backward_pass_are_harmful() -> None:
    watch = Watch(Policy(), None)
    logits, target = data()
    loss = checked(watch)(logits, target)
    logits.data[1, 3] += 5.0
    watch.fault_hook = once("loss.dlogits", 5, lambda x: x + 1.0)
    torch.autograd.grad(loss, logits)
    assert [each.outcome for each in watch.ledger.findings] == ["detected"]


def test_a_batch_without_targets_is_no_fault() -> None:
    # The mean over no rows is NaN, which is the data's own.
    watch = Watch(Policy(), None)
    logits, target = data()
    passes(checked(watch), logits, torch.full_like(target, -100))
    assert {each.outcome for each in watch.ledger.findings} == {"not_finite"}
    assert watch.uncorrected == 0


def test_infinite_logits_are_no_fault() -> None:
    watch = Watch(Policy(), None)
    logits, target = data()
    passes(
        checked(watch), torch.where(logits > 9, torch.inf, logits).detach().requires_grad_(), target
    )
    assert {each.outcome for each in watch.ledger.findings} == {"not_finite"}


def test_masked_classes_are_checked() -> None:
    watch = Watch(Policy(), None)
    logits, _ = data()
    masked = logits.detach().clone()
    masked[:, CLASSES // 2 :] = -torch.inf
    target = torch.randint(0, CLASSES // 2, (ROWS,))
    passes(checked(watch), masked.requires_grad_(), target)
    assert watch.ledger.findings == []


def test_the_function_is_replaced_while_asked_for_in_any_order_of_leaving() -> None:
    original = functional.cross_entropy
    logits, target = data()
    first, second = Watch(Policy(), None), Watch(Policy(), None)
    one, two = LossChecks(first).replacing(), LossChecks(second).replacing()
    one.__enter__()
    two.__enter__()
    nn.CrossEntropyLoss()(logits, target)
    assert (first.ledger.checks, second.ledger.checks) == (0, 1)
    one.__exit__(None, None, None)
    functional.cross_entropy(logits, target)
    assert (first.ledger.checks, second.ledger.checks) == (0, 2)
    two.__exit__(None, None, None)
    assert functional.cross_entropy is original


def test_what_is_not_covered_is_computed_as_ever() -> None:
    watch = Watch(Policy(), None)
    logits, target = data()
    weight = torch.rand(CLASSES)
    probabilities = torch.softmax(torch.randn(ROWS, CLASSES), dim=1)
    with LossChecks(watch).replacing():
        functional.cross_entropy(logits, target, weight=weight)
        functional.cross_entropy(logits, target, weight)
        functional.cross_entropy(logits, probabilities)
        functional.cross_entropy(logits.detach(), target)
        functional.cross_entropy(logits[None].transpose(1, 2), target[None])
    assert watch.ledger.checks == 0
