"""Healthy numbers of any kind raise no alarm: adversarial magnitudes, and long runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from outlast.guard import guard
from outlast.guard.install import install
from outlast.guard.layers import NormChecks
from outlast.guard.linear import LinearChecks
from outlast.guard.policy import Policy
from outlast.guard.product import check_multiplied
from outlast.guard.scrubber import Scrubber
from outlast.guard.watch import RandomSigns, Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.guard.residual import ResidualTest

TYPES = [torch.float32, torch.bfloat16, torch.float16]
SEEDS = st.integers(0, 2**31)


def rows_of(kind: str, rows: int, columns: int, dtype: torch.dtype, seed: int) -> Tensor:
    """A matrix (rows, columns) as training may bring it about, if rarely."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((rows, columns), generator=generator)
    other = torch.randn((rows, columns), generator=generator)
    half = dtype == torch.float16
    makers: dict[str, Callable[[], Tensor]] = {
        "normal": lambda: x,
        "zeros": lambda: 0.0 * x,
        "one hot": lambda: functional.one_hot(x.argmax(dim=1), columns).float(),
        "constant rows": lambda: x[:, :1].expand(rows, columns),
        "equal rows": lambda: x[:1].expand(rows, columns),
        "all equal": lambda: torch.full((rows, columns), 0.1),
        "far from zero": lambda: 100.0 + x,
        "almost constant": lambda: 3.0 + 1e-4 * x,
        "cancelling": lambda: torch.where(torch.arange(rows)[:, None] % 2 > 0, -x[:1], x[:1]),
        "heavy tails": lambda: x * (2.0 * other).exp(),
        "one large": lambda: torch.where(torch.arange(columns) == 0, 1e3, x),
        # Tokens that are like their neighbours.
        "blocks": lambda: x[torch.arange(rows) // 32 * 32] + 0.05 * other,
        "drift": lambda: x.cumsum(0) / 8.0,
        "by column": lambda: x * (2.0 * other[:1]).exp(),
        "sparse": lambda: x * (other > 2.0),
        "tiny": lambda: 1e-6 * x,
        "denormal": lambda: (1e-7 if half else 1e-39) * x,
        "large": lambda: (30.0 if half else 1e8) * x,
        "1e19": lambda: (1e3 if half else 1e19) * x,
    }
    return makers[kind]().contiguous().to(dtype)


KINDS = [
    *("normal", "zeros", "one hot", "constant rows", "equal rows", "all equal", "far from zero"),
    *("almost constant", "cancelling", "heavy tails", "one large", "by column", "sparse", "tiny"),
    *("denormal", "large", "1e19", "blocks", "drift"),
]
SHAPES = [(4, 8, 8), (64, 64, 16), (300, 24, 40), (5, 3000, 12), (3, 65_536, 4)]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(TYPES),
    st.sampled_from(SHAPES),
    st.sampled_from(KINDS),
    st.sampled_from(KINDS),
    st.sampled_from(KINDS),
    SEEDS,
)
def test_linear_layers(
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    of_x: str,
    of_weight: str,
    of_dy: str,
    seed: int,
) -> None:
    rows, inputs, outputs = shape
    watch = Watch(Policy(seed=seed), None)
    layer = nn.Linear(inputs, outputs, bias=bool(seed % 2)).to(dtype)
    weight = rows_of(of_weight, outputs, inputs, dtype, seed) / inputs**0.5
    layer.weight.data.copy_(weight)
    x = rows_of(of_x, rows, inputs, dtype, seed + 1).requires_grad_()
    y = LinearChecks(watch, layer, "layer").forward(x)
    y.backward(rows_of(of_dy, rows, outputs, dtype, seed + 2))
    found = {each.outcome for each in watch.ledger.findings}
    # Where squares overflow the sums of a check, fp64 has judged instead.
    extreme = "1e19" in {of_x, of_weight, of_dy}
    assert found <= ({"rounding", "not_finite"} if extreme else {"not_finite"})
    assert watch.uncorrected == 0


ADVERSE = [
    *(("all equal", "equal rows"), ("equal rows", "equal rows"), ("cancelling", "cancelling")),
    *(("equal rows", "one large"), ("blocks", "almost constant"), ("blocks", "equal rows")),
    *(("drift", "all equal"), ("drift", "far from zero"), ("far from zero", "constant rows")),
]
"""Kinds of dY and X whose product is further from the check's fp32 sums than independent roundings
would be, once in 20 to 2,000 rows."""


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(TYPES),
    st.sampled_from([(64, 16, 64), (512, 64, 16), (4096, 24, 40)]),
    st.sampled_from([*ADVERSE, *((kind, kind) for kind in KINDS if kind != "1e19")]),
    SEEDS,
)
def test_products_over_tokens_that_are_like_each_other(
    dtype: torch.dtype, shape: tuple[int, int, int], kinds: tuple[str, str], seed: int
) -> None:
    tokens, rows, columns = shape
    left = rows_of(kinds[0], tokens, rows, dtype, seed).t()
    right = rows_of(kinds[1], tokens, columns, dtype, seed + 1)
    product = left @ right
    assume(bool(torch.isfinite(product).all()))
    signs = RandomSigns(seed)
    for _ in range(4):
        signs.renew()
        v = signs.take("output", columns, product.device)
        judged = check_multiplied(left[None], right[None], product[None], None, 1.0, v)
        assert judged.exceeded == 0, judged.worst


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([8, 16, 32]),
    # Terms that come again, but not at once, may end as rounding.
    st.sampled_from([kind for kind in KINDS if kind not in {"1e19", "denormal", "equal rows"}]),
    st.sampled_from(["all equal", "blocks", "sparse", "far from zero"]),
    SEEDS,
)
def test_convolutions_over_positions_that_are_like_each_other(
    size: int, of_x: str, of_dy: str, seed: int
) -> None:
    torch.manual_seed(seed)
    for layer in (nn.Conv2d(4, 8, 3, padding=1), nn.ConvTranspose2d(4, 6, 2, stride=2)):
        handle = guard(layer, torch.optim.SGD(layer.parameters(), lr=0.0), "linear")
        try:
            x = rows_of(of_x, 16 * size, size, torch.float32, seed).view(4, 4, size, size)
            y = layer(x.requires_grad_())
            dy = rows_of(of_dy, y[..., 0].numel(), y.shape[3], torch.float32, seed + 1)
            y.backward(dy.view(y.shape))
            assert handle.ledger.findings == []
            # A bias's gradient that is no plain sum within its bound is computed twice.
            again = handle.ledger.site("operations", "bias.gradient").checks
            rows = sum(4 * each.shape[1] for each in (x, y)) + layer.weight.shape[0]
            assert handle.ledger.checks - again == rows
        finally:
            handle.remove()


@pytest.mark.parametrize("kinds", [("normal", "normal"), *ADVERSE])
def test_a_second_look_passes_no_error_beyond_what_it_states(kinds: tuple[str, str]) -> None:
    for seed in range(20):
        left = rows_of(kinds[0], 512, 16, torch.float32, seed).t()
        right = rows_of(kinds[1], 512, 64, torch.float32, seed + 100)
        product = left @ right
        v = RandomSigns(seed).take("output", 64, product.device)

        def judged(
            product: Tensor = product, left: Tensor = left, right: Tensor = right, v: Tensor = v
        ) -> ResidualTest:
            return check_multiplied(left[None], right[None], product[None], None, 1.0, v)

        clean = judged()
        assert clean.exceeded == 0
        norm = float(product[3].double().norm())
        for times in (1.1, 4.0, 16.0, 64.0):
            error = times * 2.0 * float(clean.widest) * norm
            kept = float(product[3, 7])
            product[3, 7] += error
            found = judged()
            missed = not bool(found.flags[3])
            # What has passed, the certificate says.
            assert not missed or error <= 2.0 * float(found.widest) * norm
            assert not missed or kinds != ("normal", "normal")
            assert not missed or error < 1e-3 * norm
            product[3, 7] = kept


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(TYPES),
    st.sampled_from([(4, 8), (64, 64), (512, 24), (6, 3000)]),
    st.sampled_from(KINDS),
    st.sampled_from(KINDS),
    st.sampled_from([1e-5, 1e-12, 1e-30]),
    SEEDS,
)
def test_norms(
    dtype: torch.dtype, shape: tuple[int, int], of_x: str, of_dy: str, eps: float, seed: int
) -> None:
    for kind in (nn.LayerNorm, nn.RMSNorm):
        watch = Watch(Policy(seed=seed), None)
        watch.repeats = True
        module = kind(shape[1], eps=eps).to(dtype)
        x = rows_of(of_x, *shape, dtype, seed).requires_grad_()
        y = NormChecks(watch, module, "norm").forward(x)
        y.backward(rows_of(of_dy, *shape, dtype, seed + 1))
        assert watch.ledger.findings == []
        assert watch.ledger.site("norm", "norm.dx").checks


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(TYPES),
    st.sampled_from(["normal", "far from zero", "constant rows", "large", "denormal", "zeros"]),
    st.sampled_from(["causal", "plain", "masked", "dropped"]),
    st.sampled_from([(3, 7), (40, 40), (300, 600)]),
    SEEDS,
)
def test_attention(
    dtype: torch.dtype, kind: str, setting: str, shape: tuple[int, int], seed: int
) -> None:
    torch.manual_seed(seed)
    watch, model = Watch(Policy("full", seed=seed), None), nn.Module()
    installed = install(watch, model)
    queries, keys = shape
    query, key, value = (
        rows_of(kind, 2 * length, 16, dtype, seed + number).view(1, 2, length, 16).requires_grad_()
        for number, length in enumerate((queries, keys, keys))
    )
    options: dict[str, Any] = {"causal": {"is_causal": True}, "dropped": {"dropout_p": 0.3}}.get(
        setting, {}
    )
    if setting == "masked":
        # Some queries see nothing at all.
        seen = torch.rand(queries, keys) > 0.5
        seen[::3] = False
        options = {"attn_mask": torch.where(seen, 0.0, -torch.inf).to(dtype)}
    try:
        o = functional.scaled_dot_product_attention(query, key, value, **options)
        o.float().square().sum().backward()
    finally:
        installed.undo.close()
    gradients = [each.grad for each in (query, key, value) if each.grad is not None]
    finite = all(bool(torch.isfinite(each).all()) for each in gradients)
    found = {each.outcome for each in watch.ledger.findings}
    assert found <= (set() if finite else {"not_finite"})
    assert model.training
    by = ("product",) if setting == "dropped" else ("attention.forward", "attention.dv")
    assert all(watch.ledger.site("operations", check).checks for check in by)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(TYPES),
    st.sampled_from(KINDS),
    st.sampled_from([2, 10, 3000]),
    st.sampled_from(["mean", "sum", "none"]),
    st.sampled_from(
        ["plain", "smoothed", "ignored", "weighted", "probabilities", "3-D", "softmax"]
    ),
    SEEDS,
)
def test_losses_and_softmax(
    dtype: torch.dtype, kind: str, classes: int, reduction: str, setting: str, seed: int
) -> None:
    watch = Watch(Policy("full", seed=seed), None)
    installed = install(watch, nn.Module())
    logits = rows_of(kind, 12, classes, dtype, seed).requires_grad_()
    target = torch.arange(12) % classes
    options: dict[str, Any] = {"reduction": reduction}
    given_logits = logits
    if setting == "smoothed":
        options["label_smoothing"] = 0.1
    elif setting == "ignored":
        target[::2] = -100
    elif setting == "weighted":
        options["weight"] = torch.linspace(0.0, 1.0, classes).to(dtype)
    elif setting == "probabilities":
        target = torch.softmax(rows_of("normal", 12, classes, dtype, seed + 1), dim=1)
    elif setting == "3-D":
        given_logits, target = logits.view(3, 4, classes).transpose(1, 2), target.view(3, 4)
    try:
        if setting == "softmax":
            functional.softmax(logits, dim=-1).float().square().sum().backward()
        else:
            functional.cross_entropy(given_logits, target, **options).sum().backward()
    finally:
        installed.undo.close()
    assert watch.ledger.findings == []
    assert watch.ledger.checks >= 2


GRADIENTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "zero": lambda draw, step: 0.0 * draw,
    "normal": lambda draw, step: draw,
    "squares vanish": lambda draw, step: 1e-20 * draw,
    "denormal": lambda draw, step: 1e-39 * draw,
    "huge": lambda draw, step: 1e15 * draw,
    "spikes": lambda draw, step: (1e6 if step % 5 == 0 else 1e-6) * draw,
    "sparse": lambda draw, step: draw * (draw > 1.5),
    "constant": lambda draw, step: torch.full_like(draw, 0.37),
    "alternating": lambda draw, step: torch.full_like(draw, 0.37 * (-1) ** step),
    "growing": lambda draw, step: 10.0 ** (step % 12) * draw,
    "shrinking": lambda draw, step: 10.0 ** -(step % 30) * draw,
    "once": lambda draw, step: (1e4 if step == 0 else 0.0) * draw,
}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(TYPES),
    st.tuples(st.sampled_from(sorted(GRADIENTS)), st.sampled_from(sorted(GRADIENTS))),
    st.fixed_dictionaries(
        {
            "lr": st.sampled_from([0.0, 1e-8, 1e-3, 1.0]),
            "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.99), (0.95, 0.9), (0.9, 0.5)]),
            "eps": st.sampled_from([0.0, 1e-30, 1e-8, 1e-7, 1e-3, 1e8]),
            "weight_decay": st.sampled_from([0.0, 0.1]),
            "amsgrad": st.booleans(),
            "maximize": st.booleans(),
        }
    ),
    st.sampled_from([{}, {"foreach": True}, {"fused": True}, {"foreach": False}]),
    SEEDS,
)
def test_moments_and_updates_of_adam(
    dtype: torch.dtype,
    kinds: tuple[str, str],
    options: dict[str, Any],
    implementation: dict[str, bool],
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    parameter = nn.Parameter(torch.randn((20, 8), generator=generator).to(dtype))
    kind = torch.optim.AdamW if seed % 2 else torch.optim.Adam
    optimizer = kind([parameter], **options, **implementation)
    watch = Watch(Policy("light", seed=seed), None)
    scrubber = Scrubber(watch, [("weight", parameter)], [optimizer], whole=True)
    for step in range(20):
        draw = torch.randn((20, 8), generator=generator)
        parameter.grad = GRADIENTS[kinds[step % 7 == 6]](draw, step).to(dtype)
        scrubber.before_step()
        optimizer.step()
        scrubber.after_step()
        watch.advance()
    scrubber.before_step()
    watch.settle()
    assert {each.outcome for each in watch.ledger.findings} <= {"not_finite"}


def test_an_eps_that_vanishes_in_fp16_is_no_fault() -> None:
    # 0 / 0 where the gradient and its square have vanished: the data's own, once reported.
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.ones(64, dtype=torch.float16))
    optimizer = torch.optim.AdamW([parameter], lr=1e-2)
    watch = Watch(Policy("light"), None)
    scrubber = Scrubber(watch, [("weight", parameter)], [optimizer], whole=True)
    for _ in range(2):
        parameter.grad = torch.zeros_like(parameter)
        scrubber.before_step()
        optimizer.step()
        scrubber.after_step()
        watch.advance()
    assert bool(parameter.isnan().all())
    assert {each.outcome for each in watch.ledger.findings} <= {"not_finite"}


PRECISIONS = ["bf16", "fp16", "fp32", "autocast"]
SETTINGS = [("sgd", 16, 10), ("adamw", 64, 10), ("sgd", 64, 2), ("adamw", 16, 100)]
"""Optimizers, samples of a batch, and classes."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "optimizer", "batch", "classes"),
    [
        *(("bf16", *setting) for setting in SETTINGS),
        *((precision, *setting) for precision in PRECISIONS[1:] for setting in SETTINGS[1:3]),
    ],
)
def test_a_classifier_that_learns_all_it_can(
    precision: str, optimizer: str, batch: int, classes: int
) -> None:
    """Its loss becomes 0, and sums of exponentials little more than 1, which rounds to 1."""
    torch.manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, classes)).to(dtype)
    # An eps that fp16 has, and steps that do not overflow it.
    made: torch.optim.Optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.1 if precision == "fp16" else 0.3)
        if optimizer == "sgd"
        else torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    )
    x, teacher = torch.randn(256, 20), torch.randn(20, classes)
    y = (x @ teacher).argmax(dim=1)
    handle = guard(model, made, "full")
    for _ in range(600):
        chosen = torch.randint(0, 256, (batch,))
        for _ in handle.attempts():
            made.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
                loss = functional.cross_entropy(model(x[chosen].to(dtype)), y[chosen])
            loss.backward()
        made.step()
    handle.remove()
    assert handle.ledger.findings == []
    assert handle.ledger.site("loss", "loss.dlogits").checks == 600
