import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from outlast.errors import TensorizeError
from outlast.tensorize.policy import (
    Budget,
    LayerShape,
    Rank,
    parsed_budget,
    resolved_rank,
    shared_ranks,
)
from outlast.tensorize.replace import tensorize
from outlast.tensorize.shapes import FORMS

BUDGETED = [form for form in FORMS if form not in ("sltrain",)]


def _shape(form: str, into: int = 256, out: int = 384, multiple: int = 1) -> LayerShape:
    return LayerShape(FORMS[form], into, out, multiple=multiple)


def test_integers_stay_and_fractions_are_of_the_narrower_side() -> None:
    assert resolved_rank(30, _shape("low_rank", multiple=8)) == 30
    assert resolved_rank(0.25, _shape("cola")) == 64
    assert resolved_rank(0.25, _shape("cola", 384, 256)) == 64
    assert resolved_rank(0.25, _shape("low_rank", 90, 90)) == 22
    assert resolved_rank((4, 8, 8), _shape("tt")) == (4, 8, 8)


def test_fractions_round_up_to_what_matrix_units_want() -> None:
    assert resolved_rank(0.25, _shape("low_rank", 300, 300, multiple=16)) == 80
    assert resolved_rank(0.02, _shape("low_rank", 300, 300, multiple=16)) == 6
    assert resolved_rank(1.0, _shape("low_rank", 300, 300, multiple=16)) == 288


@pytest.mark.parametrize("form", ["tt", "ttm", "btt", "monarch", "cp", "tucker"])
def test_fractions_of_other_forms_are_of_the_parameters(form: str) -> None:
    shape = _shape(form)
    rank = resolved_rank(0.3, shape)
    assert rank == resolved_rank("parameters=0.3", shape)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(BUDGETED),
    st.integers(40, 900),
    st.integers(40, 900),
    st.floats(0.05, 0.9),
    st.sampled_from([1, 8]),
)
def test_parameter_budgets_are_kept_and_used(
    form: str, into: int, out: int, share: float, multiple: int
) -> None:
    shape = _shape(form, into, out, multiple)
    try:
        rank = resolved_rank(f"parameters={share}", shape)
    except TensorizeError:
        ranks = range(1, shape.most + 1) if FORMS[form].blocks else [1]
        assert min(shape.used("parameters", each) for each in ranks) > share
        return
    assert isinstance(rank, int)
    with torch.device("meta"):
        layer = FORMS[form].build(into, out, rank, {"bias": False})
    count = sum(parameter.numel() for parameter in layer.parameters())
    assert count <= share * into * out
    if FORMS[form].blocks:
        assert rank == 1 or shape.used("parameters", rank - 1) > share
    elif rank < shape.most:
        step = multiple if FORMS[form].aligned and rank >= multiple else 1
        assert shape.used("parameters", rank + step) > share or step == 1 < multiple


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["low_rank", "tt", "btt"]), st.floats(0.2, 0.9))
def test_operation_budgets_are_kept(form: str, share: float) -> None:
    shape = _shape(form, 512, 512)
    rank = resolved_rank(f"flops={share}", shape)
    assert isinstance(rank, int)
    assert shape.used("flops", rank) <= share < shape.used("flops", rank + 1)


@pytest.mark.parametrize("form", ["low_rank", "tt", "ttm", "btt", "tucker"])
@pytest.mark.parametrize("error", [0.2, 0.6])
def test_error_budgets_are_kept(form: str, error: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48))
    with torch.no_grad():
        model[0].weight.copy_(_decaying(48, 64))
    dense = model[0].weight.detach().clone()
    report = tensorize(model, form, f"error={error}", init="from_dense", force=True, multiple=1)
    left = (model[0].to_dense().detach() - dense).norm() / dense.norm()
    assert float(left) <= error + 1e-5
    assert report.replaced[0].error == pytest.approx(float(left), abs=1e-5)


def _decaying(rows: int, columns: int, power: float = 1.0) -> torch.Tensor:
    u, _ = torch.linalg.qr(torch.randn(rows, rows))
    v, _ = torch.linalg.qr(torch.randn(columns, rows))
    return u @ torch.diag(torch.arange(1, rows + 1).float() ** -power) @ v.T


def test_a_smaller_error_budget_takes_a_larger_rank() -> None:
    torch.manual_seed(0)
    weight = _decaying(48, 64)
    ranks = [
        resolved_rank(f"error={error}", _shape("low_rank", 64, 48), weight)
        for error in (0.5, 0.2, 0.05)
    ]
    assert ranks == sorted(ranks)
    assert ranks[0] < ranks[-1]


@pytest.mark.parametrize(
    ("rank", "says"),
    [
        (0, "rank = 0 must be at least 1"),
        (64.0, "write an integer, rank = 64"),
        (0.0, "no fraction"),
        (math.nan, "no fraction"),
        (True, "rank = True"),
        ("half", "rank = 'half'"),
        ("params=0.3", "'parameters=0.3'"),
        ("parameters=1.5", "rank = 'parameters=1.5'"),
        ("error=0.1", "init = 'from_dense'"),
        ("parameters=0.0001", "is too little"),
    ],
)
def test_wrong_ranks_are_refused_with_a_remedy(rank: Rank, says: str) -> None:
    with pytest.raises(TensorizeError, match=says):
        resolved_rank(rank, _shape("low_rank", 128, 128))


def test_monarchs_smallest_budget_is_at_neither_end() -> None:
    shape = _shape("monarch", 256, 256)
    with pytest.raises(TensorizeError, match=r"at least 0\.125 of .* \(at blocks = 16\)"):
        resolved_rank("parameters=0.01", shape)
    assert resolved_rank("parameters=0.126", shape) == 16


def test_a_budget_of_a_sparse_layer_counts_its_density() -> None:
    few = resolved_rank("parameters=0.3", LayerShape(FORMS["sltrain"], 256, 256, density=0.01))
    many = resolved_rank("parameters=0.3", LayerShape(FORMS["sltrain"], 256, 256, density=0.2))
    assert isinstance(few, int)
    assert isinstance(many, int)
    assert few > many


def test_an_error_budget_needs_a_conversion() -> None:
    with pytest.raises(TensorizeError, match="not cp"):
        resolved_rank("error=0.1", _shape("cp", 64, 64), torch.randn(64, 64))


def test_budget_text() -> None:
    assert parsed_budget("flops=0.3") == ("flops", 0.3)
    assert Budget(parameters=0.3).per_layer() == "parameters=0.3"
    assert Budget(flops=0.5).per_layer() == "flops=0.5"
    with pytest.raises(TensorizeError, match="give one of them"):
        Budget()
    with pytest.raises(TensorizeError, match="give one of them"):
        Budget(parameters=0.3, flops=0.3)


def test_a_common_budget_goes_where_the_energy_is() -> None:
    torch.manual_seed(0)
    weights = {"steep": _decaying(64, 64, 3.0), "flat": _decaying(64, 64, 0.1)}
    ranks = shared_ranks(weights, 0.4, {"steep": 1, "flat": 1})
    assert ranks["steep"] < ranks["flat"]
    spent = sum(ranks[name] * 128 for name in weights)
    assert 0.4 * 2 * 64 * 64 - 128 < spent <= 0.4 * 2 * 64 * 64


def test_a_common_budget_beats_equal_shares() -> None:
    torch.manual_seed(1)
    weights = {str(power): _decaying(48, 64, power) for power in (0.1, 0.5, 1.0, 2.0)}

    def lost(ranks: dict[str, int]) -> float:
        total = 0.0
        for name, weight in weights.items():
            energies = torch.linalg.svdvals(weight).square()
            total += float(energies[ranks[name] :].sum() / energies.sum())
        return total

    shared = shared_ranks(weights, 0.3, dict.fromkeys(weights, 1))
    equal = dict.fromkeys(weights, int(0.3 * 48 * 64 / 112))
    assert lost(shared) < lost(equal)
    assert sum(shared.values()) * 112 <= 0.3 * 4 * 48 * 64


def test_a_common_budget_of_a_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with torch.no_grad():
        model[0].weight.copy_(_decaying(64, 64, 2.0))
    report = tensorize(model, rank=Budget(parameters=0.5), init="from_dense", force=True)
    steep, flat = report
    assert steep.rank < flat.rank
    assert steep.parameters + flat.parameters <= 0.5 * 2 * 64 * 64
    assert steep.rank % 4 == flat.rank % 4 == 0

    fresh = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    report = tensorize(fresh, rank=Budget(flops=0.5), force=True)
    assert len({row.rank for row in report}) == 1

    with pytest.raises(TensorizeError, match="too little for 2 layers"):
        shared_ranks({"a": torch.eye(64), "b": torch.eye(64)}, 0.01, {"a": 4, "b": 4})
