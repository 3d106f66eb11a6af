import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from outlast.errors import TensorizeError
from outlast.tensorize import LowRankEmbedding, TTEmbedding, TTMEmbedding
from outlast.tensorize.embedding import StructuredEmbedding, TiedHead

FORMS: dict[str, Callable[..., StructuredEmbedding]] = {
    "low_rank": lambda **o: LowRankEmbedding(53, 12, 4, **o),
    "tt": lambda **o: TTEmbedding(53, 12, 3, 2, **o),
    "ttm": lambda **o: TTMEmbedding(53, 12, 3, 4, **o),
}
all_forms = pytest.mark.parametrize("name", FORMS)

GRADCHECKED: dict[str, Callable[..., StructuredEmbedding]] = {
    "low rank 1": lambda **o: LowRankEmbedding(7, 4, 1, **o),
    "low rank": lambda **o: LowRankEmbedding(7, 4, 3, **o),
    "tt of 1 + 1 cores": lambda **o: TTEmbedding(7, 4, 2, 1, **o),
    "tt of 2 + 1 cores": lambda **o: TTEmbedding(7, 4, 2, row_modes=(2, 4), column_modes=(4,), **o),
    "tt of 3 + 2 cores": lambda **o: TTEmbedding(
        12, 5, (2, 3, 2, 2), row_modes=(2, 2, 3), column_modes=(2, 3), **o
    ),
    "tt rank 1": lambda **o: TTEmbedding(8, 4, 1, 2, **o),
    "ttm of 1 core": lambda **o: TTMEmbedding(7, 4, 2, 1, **o),
    "ttm of 2 cores": lambda **o: TTMEmbedding(7, 4, 2, row_modes=(2, 4), column_modes=(2, 2), **o),
    "ttm of 3 cores": lambda **o: TTMEmbedding(
        12, 5, (2, 3), row_modes=(2, 2, 3), column_modes=(2, 1, 3), **o
    ),
    "ttm of 5 cores": lambda **o: TTMEmbedding(
        8, 4, 2, row_modes=(2, 1, 2, 2, 1), column_modes=(1, 2, 1, 1, 2), **o
    ),
    "ttm rank 1": lambda **o: TTMEmbedding(8, 4, 1, 3, **o),
}


def as_function(layer: nn.Module) -> tuple[Callable[..., Tensor], list[nn.Parameter]]:
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def function(index: Tensor, *values: Tensor) -> Tensor:
        given = dict(zip(names, values, strict=True))
        result: Tensor = torch.func.functional_call(layer, given, (index,))
        return result

    return function, list(parameters)


@pytest.mark.parametrize("count", [0, 1, 5, 70])
@pytest.mark.parametrize("name", GRADCHECKED)
def test_rows_and_their_gradients(name: str, count: int) -> None:
    torch.manual_seed(0)
    layer = GRADCHECKED[name](dtype=torch.float64, padding_idx=2)
    index = torch.randint(layer.num_embeddings, (count,))
    function, parameters = as_function(layer)
    torch.testing.assert_close(layer(index), layer.to_dense()[index], atol=1e-12, rtol=1e-10)
    assert torch.autograd.gradcheck(
        lambda *each: function(index, *each), parameters, fast_mode=True
    )
    if count:  # torch's own embedding has no second derivative of no rows
        assert torch.autograd.gradgradcheck(
            lambda *each: function(index, *each), parameters, fast_mode=True
        )


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 400), st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.data())
def test_any_vocabulary_and_width(
    rows: int, columns: int, rank: int, cores: int, data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from([TTEmbedding, TTMEmbedding]))
    layer = kind(rows, columns, rank, cores, dtype=torch.float64)
    index = torch.arange(rows)
    assert layer.to_dense().shape == (rows, columns)
    torch.testing.assert_close(layer(index), layer.to_dense())
    settings = layer.settings()
    assert type(layer)(**settings).state_dict().keys() == layer.state_dict().keys()


@all_forms
def test_indices_of_any_shape_and_kind(name: str) -> None:
    layer = FORMS[name](dtype=torch.float64)
    table = layer.to_dense()
    for shape in [(), (3,), (0,), (2, 0, 3), (4, 5), (2, 3, 40)]:
        index = torch.randint(53, shape)
        torch.testing.assert_close(layer(index), table[index])
        torch.testing.assert_close(layer(index.int()), table[index])
    strided = torch.randint(53, (6, 40)).t()[::2]
    torch.testing.assert_close(layer(strided), table[strided])


@all_forms
@pytest.mark.parametrize("count", [5, 500])
def test_it_trains_like_a_table_with_a_row_of_padding(name: str, count: int) -> None:
    torch.manual_seed(0)
    layer = FORMS[name](dtype=torch.float64, padding_idx=-1)
    assert layer.padding_idx == 52
    index = torch.randint(53, (count,))
    index[0] = 52
    y = layer(index)
    assert y[0].abs().max() == 0
    dense = nn.Embedding.from_pretrained(layer.to_dense().detach(), False, layer.padding_idx)
    torch.testing.assert_close(dense(index), y)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, list(layer.parameters()), dy)
    (table_gradient,) = torch.autograd.grad(dense(index), dense.weight, dy)
    assert table_gradient[52].abs().max() == 0
    expected = torch.autograd.grad(layer.to_dense(), list(layer.parameters()), table_gradient)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    # With the index of the padding alone nothing is learned.
    for each in torch.autograd.grad(layer(index[:1]).sum(), list(layer.parameters())):
        assert each.abs().max() == 0


@all_forms
def test_scores_of_a_tied_output_layer(name: str) -> None:
    layer = FORMS[name](dtype=torch.float64, padding_idx=0)
    x = torch.randn(2, 3, 12, dtype=torch.float64)
    torch.testing.assert_close(layer.logits(x), x @ layer.to_dense().t())
    (layer.logits(x).square().mean() + layer(torch.tensor([1, 2])).sum()).backward()
    assert all(each.grad is not None for each in layer.parameters())


@all_forms
@pytest.mark.parametrize("index", [-1, 53, 54, 10_000])
@pytest.mark.parametrize("count", [1, 100])
def test_what_is_no_row_is_refused(name: str, index: int, count: int) -> None:
    with pytest.raises(IndexError, match=rf"{index}.* 53 embeddings"):
        FORMS[name]()(torch.tensor([index] * count))


STATE = {
    "low_rank": {"table.weight": (53, 4), "up.weight": (12, 4)},
    "tt": {"cores.0": (6, 3), "cores.1": (3, 9, 3), "cores.2": (3, 3, 3), "cores.3": (3, 4)},
}


@pytest.mark.parametrize("name", STATE)
def test_names_and_shapes_in_checkpoints(name: str) -> None:
    layer = FORMS[name]()
    assert {key: tuple(value.shape) for key, value in layer.state_dict().items()} == STATE[name]


def test_a_matrix_train_of_a_large_vocabulary() -> None:
    layer = TTMEmbedding(32_000, 768, 16, device="meta")
    modes = layer.settings()
    pairs = list(zip(modes["row_modes"], modes["column_modes"], strict=True))
    ranks = (1, *(layer.rank if isinstance(layer.rank, tuple) else (layer.rank,) * 3), 1)
    expected = sum(ranks[k] * a * b * ranks[k + 1] for k, (a, b) in enumerate(pairs))
    assert [tuple(core.shape)[:2] for core in layer.cores[1:]] == [
        (ranks[k], pairs[k][1]) for k in range(1, 4)
    ]
    assert sum(map(Tensor.numel, layer.parameters())) == expected < 0.005 * 32_000 * 768
    assert layer(torch.zeros(3, 2, dtype=torch.int64, device="meta")).shape == (3, 2, 768)
    assert "32000, 768, rank=16" in repr(layer)


@all_forms
def test_copies_pickles_states_and_settings(name: str) -> None:
    layer = FORMS[name](padding_idx=1)
    other = type(layer)(**layer.settings())
    other.load_state_dict(layer.state_dict())
    index = torch.arange(53)
    for each in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(each(index), layer(index))


@all_forms
def test_layers_on_the_meta_device_get_storage_and_numbers_later(name: str) -> None:
    torch.manual_seed(0)
    layer = FORMS[name](device="meta", padding_idx=4)
    layer.to_empty(device="cpu")
    layer.reset_parameters(0.02)
    assert layer(torch.tensor([4])).abs().max() == 0
    rest = layer.to_dense()[torch.arange(53) != 4]
    assert float(rest.square().mean().sqrt().detach()) == pytest.approx(0.02, rel=0.15)


@pytest.mark.parametrize("kind", [TTEmbedding, TTMEmbedding])
def test_tables_start_like_the_dense_one_with_cores_of_one_size(kind: type[Any]) -> None:
    torch.manual_seed(0)
    layer = kind(3000, 64, 8, 3)
    assert float(layer.to_dense().detach().std()) == pytest.approx(1.0, rel=0.02)
    sizes = [float(core.detach().square().mean().sqrt()) for core in layer.cores]
    assert max(sizes) == pytest.approx(min(sizes), rel=1e-3)


@all_forms
def test_the_dtype_under_autocast_is_the_tables(name: str) -> None:
    layer = FORMS[name]()
    index = torch.arange(20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(index)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, layer(index), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("name", ["tt", "ttm"])
def test_gradients_within_autocast_are_those_outside(name: str) -> None:
    torch.manual_seed(0)
    layer = FORMS[name]()
    index = torch.randint(53, (200,))

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(index).square().sum()

    outside = torch.autograd.grad(loss(), list(layer.parameters()))
    value = loss()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.autograd.grad(value, list(layer.parameters()))
    for one, other in zip(inside, outside, strict=True):
        assert torch.equal(one, other)


@all_forms
def test_the_table_under_autocast_and_of_mixed_factors_is_exact(name: str) -> None:
    layer = FORMS[name](padding_idx=3)
    exact = layer.to_dense()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer.to_dense(), exact)
    first = layer.factors()[0]
    first.data = first.data.bfloat16()
    expected = copy.deepcopy(layer).float().to_dense()
    assert torch.equal(layer.to_dense(), expected)
    weight = layer.weight
    assert (weight.dtype, weight.shape) == (torch.float32, (53, 12))
    assert torch.equal(weight[3:5], expected[3:5])


@all_forms
def test_embeddings_of_fake_tensors(name: str) -> None:
    with FakeTensorMode():
        layer = FORMS[name](padding_idx=1)
        layer.reset_parameters()
        y = layer(torch.zeros(3, 70, dtype=torch.int64))
        y.sum().backward()
    assert y.shape == (3, 70, 12)


@all_forms
def test_forward_mode(name: str) -> None:
    layer = FORMS[name](dtype=torch.float64)
    function, parameters = as_function(layer)
    index = torch.randint(53, (100,))
    values = tuple(each.detach() for each in parameters)
    directions = tuple(map(torch.randn_like, values))
    with torch.autograd.forward_ad.dual_level():
        duals = map(torch.autograd.forward_ad.make_dual, values, directions)
        found = torch.autograd.forward_ad.unpack_dual(function(index, *duals)).tangent
    expected = torch.func.jvp(lambda *given: function(index, *given), values, directions)[1]
    torch.testing.assert_close(found, expected)


@all_forms
@pytest.mark.parametrize("bias", [False, True])
def test_a_tied_head(name: str, bias: bool) -> None:
    layer = FORMS[name](dtype=torch.float64)
    model = nn.ModuleDict({"embed": layer, "head": TiedHead(layer, bias=bias, dtype=torch.float64)})
    x = torch.randn(5, 12, dtype=torch.float64)
    torch.testing.assert_close(model["head"](x), x @ layer.to_dense().t())
    assert [each for each in model.state_dict() if each.startswith("head")] == (
        ["head.bias"] if bias else []
    )
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert other["head"].embedding is other["embed"]
    assert other["embed"] is not layer
    model["head"](x).sum().backward()
    assert all(each.grad is not None for each in model.parameters())
    assert torch.equal(model["head"].weight + 0, layer.to_dense())


@pytest.mark.parametrize("name", ["tt", "ttm"])
def test_nothing_but_indices_and_cores_is_kept(name: str) -> None:
    layer = FORMS[name]()
    index = torch.randint(53, (4000,))
    kept = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(index)
    parameters = sum(map(Tensor.numel, layer.parameters()))
    assert kept <= parameters + 4000 + 53


@pytest.mark.parametrize(
    "build",
    [
        lambda: LowRankEmbedding(4, 4, 0),
        lambda: TTEmbedding(4, 4, 2, padding_idx=4),
        lambda: TTEmbedding(9, 4, 2, row_modes=(2, 4), column_modes=(2, 2)),
        lambda: TTMEmbedding(8, 4, 2, row_modes=(2, 4), column_modes=(4,)),
    ],
)
def test_settings_that_make_no_layer_are_refused(build: Callable[[], Any]) -> None:
    with pytest.raises(TensorizeError):
        build()
