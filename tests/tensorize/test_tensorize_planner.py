"""The planner: prices, choices, caches and explanations."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.tensorize import measure, planner
from outlast.tensorize.contraction import LayerPlan
from outlast.tensorize.low_rank import low_rank_network
from outlast.tensorize.network import (
    Network,
    Route,
    block_network,
    dense_route,
    train_matrix_network,
    train_network,
)
from outlast.tensorize.operator import chain
from outlast.tensorize.planner import Setting, explain, plan_for
from outlast.tensorize.prices import (
    AXIS,
    LAYOUTS,
    OperationPrices,
    PriceTable,
    default_table,
    interpolate,
    is_view,
    move,
    roofline,
)
from outlast.tensorize.route_search import Search, Walker, best_plan, candidates, groupings

CPU = torch.device("cpu")
NETWORKS = {
    "low rank": low_rank_network(1024, 1024, 64),
    "blocks": block_network(1024, 1024, 2, in_modes=(32, 32), out_modes=(32, 32)),
    "train": train_network(768, 768, 30, in_modes=(8, 8, 12), out_modes=(8, 8, 12)),
    "matrix train": train_matrix_network(768, 768, 8, in_modes=(24, 32), out_modes=(24, 32)),
    "padded": train_network(37, 50, 3, in_modes=(5, 8), out_modes=(6, 9)),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees the machine's tables, or leaves any."""
    monkeypatch.setenv("OUTLAST_CACHE", str(tmp_path))
    planner.forget()
    yield tmp_path
    planner.forget()


@pytest.fixture
def prices() -> OperationPrices:
    return OperationPrices(default_table("cpu", "float32"))


def test_the_middle_of_a_cut_chain_is_every_way_to_cut_it() -> None:
    assert sorted(groupings(3, 3)) == [(1, 1, 1), (1, 2), (2, 1), (3,)]
    assert len(list(groupings(8, 8))) == 2**7
    assert all(len(groups) <= 2 for groups in groupings(8, 2))


@pytest.mark.parametrize("name", NETWORKS)
def test_candidates_are_different_and_hold_the_dense_route(name: str) -> None:
    network = NETWORKS[name]
    found = candidates(network, 4096)
    assert len(found) == len(set(found))
    assert dense_route(network) in found
    assert {route.layout for route in found} == {"tokens", "features"}
    assert all(route.chunk == 0 for route in candidates(network, 4096, chunked=False))
    assert all(route.chunk == 0 for route in candidates(network, 64))


@given(
    sizes=st.lists(st.sampled_from((1, 2, 3)), min_size=1, max_size=5),
    order=st.randoms(use_true_random=False),
    cut=st.tuples(st.integers(0, 5), st.integers(0, 5)),
)
def test_views_are_what_torch_says(sizes: list[int], order: object, cut: tuple[int, int]) -> None:
    letters = "abcde"[: len(sizes)]
    size = dict(zip(letters, sizes, strict=True))
    wanted = list(letters)
    order.shuffle(wanted)  # type: ignore[attr-defined]
    low, high = sorted(min(place, len(sizes)) for place in cut)
    groups = tuple(map("".join, (wanted[:low], wanted[low:high], wanted[high:])))
    shape = [math.prod(size[letter] for letter in group) for group in groups]
    permuted = torch.arange(math.prod(sizes)).reshape(sizes)
    permuted = permuted.permute([letters.index(letter) for letter in wanted])
    try:
        permuted.view(shape)
        possible = True
    except RuntimeError:
        possible = False
    assert is_view(letters, groups, size, product=False) == possible


def test_a_move_tells_runs_from_stretches() -> None:
    sizes = {"a": 4, "b": 5, "c": 6, "d": 1}
    assert (move("abc", "bac", sizes).run, move("abc", "bac", sizes).elements) == (6, 120)
    turned = move("abc", "cab", sizes)
    assert (turned.run, turned.inner, turned.stride) == (1, 20, 6)
    assert move("abcd", "dabc", sizes).run == 120


def test_interpolation_gives_points_back_and_grows_beyond() -> None:
    points = [float(at) for at in range(len(AXIS))]
    for at, size in enumerate(AXIS):
        assert interpolate(points, (AXIS,), (size,)) == pytest.approx(2.0**at)
    assert interpolate(points, (AXIS,), (2 * AXIS[-1],)) == pytest.approx(2.0 * 2.0 ** points[-1])
    between = interpolate(points, (AXIS,), (8,))
    assert 2.0 < between < 4.0


def test_more_work_costs_more(prices: OperationPrices) -> None:
    for layout in LAYOUTS:
        small = prices.product(1, 256, 256, 256, layout)
        assert small < prices.product(1, 1024, 256, 256, layout)
        assert small < prices.product(1, 256, 256, 1024, layout)
    assert prices.copy(1 << 20, 1) > prices.copy(1 << 20, 64)
    assert prices.transpose(4096, 1024) > prices.transpose(1024, 1024)


@pytest.mark.parametrize(("name", "tokens"), list(product(NETWORKS, (1, 16, 4096))))
def test_the_plan_is_the_cheapest_of_all_uniform_ones(
    name: str, tokens: int, prices: OperationPrices
) -> None:
    network = NETWORKS[name]
    search = Search(Walker(network, prices), tokens)
    plan = best_plan(network, tokens, prices, True)
    cheapest = search.uniform()[0][0]
    assert plan.seconds <= cheapest
    assert plan.seconds == pytest.approx(search.price(plan))
    alone = best_plan(network, tokens, prices, False)
    assert alone.seconds < plan.seconds


@pytest.mark.parametrize("name", NETWORKS)
def test_chunks_cost_the_sum_of_their_parts(name: str, prices: OperationPrices) -> None:
    walker = Walker(NETWORKS[name], prices)
    groups = (1,) * len(NETWORKS[name].cores)
    assert walker.chunks(Route(groups, chunk=64), 150) == [64, 64, 22]
    assert walker.chunks(Route(groups, chunk=256), 150) == [150]
    assert walker.chunks(Route(groups), 150) == [150]
    one = walker.forward(Route(groups, chunk=64), 64 * 10)
    two = walker.forward(Route(groups, chunk=64), 64 * 20)
    # A tensor that leaves the cache costs more than in proportion.
    assert one < two < 4 * one


def test_shared_work_is_paid_once(prices: OperationPrices) -> None:
    network = NETWORKS["low rank"]
    walker, route = Walker(network, prices), Route((1, 1))
    everything = walker.backward(route, 4096, frozenset((0, 1)), want_x=True)
    apart = walker.backward(route, 4096, frozenset(), want_x=True)
    apart += walker.backward(route, 4096, frozenset((0, 1)), want_x=False)
    kept = walker.backward(route, 4096, frozenset((0, 1)), want_x=True, kept=True)
    assert kept < everything < apart


@pytest.mark.parametrize("name", ["low rank", "train"])
def test_many_tokens_take_two_products(name: str) -> None:
    plan = plan_for(NETWORKS[name], 4096, torch.float32, CPU, True)
    assert len(plan.forward.groups) == 2
    assert plan.dense_seconds > 1.5 * plan.seconds


def test_blocks_go_in_chunks() -> None:
    plan = plan_for(NETWORKS["blocks"], 4096, torch.float32, CPU, True)
    assert plan.forward.chunk > 0
    assert plan.dense_seconds > 1.5 * plan.seconds


def test_few_tokens_are_left_to_autograd() -> None:
    network = low_rank_network(64, 64, 8)
    assert plan_for(network, 1, torch.float32, CPU, True).plain


def test_a_wide_chain_rebuilds_the_dense_weight() -> None:
    network = train_matrix_network(256, 256, 64, in_modes=(16, 16), out_modes=(16, 16))
    plan = plan_for(network, 4096, torch.float32, CPU, True)
    assert plan.forward == dense_route(network)


def test_a_plain_plan_leaves_little_memory(prices: OperationPrices) -> None:
    search = Search(Walker(NETWORKS["blocks"], prices), 4096)
    assert all(not plan.plain for _, plan in search.uniform())


def test_the_second_look_finds_the_same_plan() -> None:
    network = NETWORKS["train"]
    first = plan_for(network, 3000, torch.float32, CPU, True)
    assert plan_for(network, 4096, torch.float32, CPU, True) is first
    assert plan_for(network, 4097, torch.float32, CPU, True) is not first
    assert plan_for(network, 0, torch.float32, CPU, True).seconds > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_have_a_table(dtype: torch.dtype) -> None:
    assert plan_for(NETWORKS["low rank"], 512, dtype, CPU, True).seconds > 0


def test_other_devices_have_a_table() -> None:
    plan = plan_for(NETWORKS["blocks"], 512, torch.bfloat16, torch.device("cuda"), True)
    assert plan.forward.chunk == 0


@settings(deadline=None, max_examples=5)
@given(name=st.sampled_from(sorted(NETWORKS)), tokens=st.sampled_from((1, 2, 65)))
def test_planned_layers_compute_what_the_dense_weight_does(name: str, tokens: int) -> None:
    network = NETWORKS[name]
    generator = torch.Generator().manual_seed(tokens)
    cores = [
        torch.randn(network.shape(core), generator=generator, dtype=torch.float64)
        for core in range(len(network.cores))
    ]
    for core in cores:
        core.requires_grad_()
    x = torch.randn(tokens, network.in_features, generator=generator, dtype=torch.float64)
    dense = chain(
        torch.eye(network.in_features, dtype=torch.float64), cores, network,
        plan=LayerPlan.uniform(dense_route(network), len(cores)),
    )  # fmt: skip
    y = chain(x, cores, network)
    torch.testing.assert_close(y, x @ dense, rtol=1e-9, atol=1e-7)
    dy = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    ours = torch.autograd.grad(y, cores, dy)
    theirs = torch.autograd.grad(x @ dense, cores, dy)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-6)


def _measured() -> PriceTable:
    content = default_table("cpu", "float32").to_json()
    content.update(
        machine=planner.machine_of(CPU), measured=True, torch=torch.__version__,
        threads=torch.get_num_threads(),
    )  # fmt: skip
    return PriceTable.from_json(content)


def test_a_stored_table_is_found_again(own_cache: Path) -> None:
    table = _measured()
    path = planner.store(table)
    assert path is not None
    assert path.parent == own_cache / "tensorize"
    assert [each.suffix for each in path.parent.iterdir()] == [".json"]
    assert planner.prices_of(torch.float32, CPU).table == table
    assert measure.calibrate(torch.float32, CPU) == table


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"version": 1}', "null"])
def test_a_damaged_table_is_none(damage: str) -> None:
    table = _measured()
    path = planner.store(table)
    assert path is not None
    path.write_text(damage)
    assert planner.load(Setting(table.machine, table.dtype, table.threads, table.torch)) is None
    assert not planner.prices_of(torch.float32, CPU).table.measured


def test_a_table_of_something_else_is_none() -> None:
    table = _measured()
    path = planner.store(table)
    assert path is not None
    other = Setting("another machine", table.dtype, table.threads, table.torch)
    path.rename(other.file)
    assert planner.load(other) is None


def test_tables_with_missing_points_are_refused() -> None:
    content = default_table("cpu", "float32").to_json()
    content["copy"] = content["copy"][1:]
    with pytest.raises(ValueError, match="other points"):
        PriceTable.from_json(content)


def test_a_new_table_changes_plans() -> None:
    network = NETWORKS["blocks"]
    before = plan_for(network, 4096, torch.float32, CPU, True)
    flat = roofline(
        machine="test", dtype="float32", item_bytes=4, flops_per_s=1e15, bytes_per_s=1e8,
        start_seconds=1e-6, overhead_seconds=1e-6,
    )  # fmt: skip
    planner.use(flat, "cpu")
    after = plan_for(network, 4096, torch.float32, CPU, True)
    # Where moving is dear and multiplying free, one product is best.
    assert before.forward != after.forward
    assert after.forward == dense_route(network)


def test_nothing_is_written_or_measured_by_planning(own_cache: Path) -> None:
    plan_for(NETWORKS["low rank"], 64, torch.float32, CPU, True)
    assert list(own_cache.iterdir()) == []


@pytest.mark.parametrize(("name", "tokens"), list(product(NETWORKS, (1, 4096))))
def test_explanations_name_the_plan_and_what_else_there_is(name: str, tokens: int) -> None:
    network: Network = NETWORKS[name]
    text = explain(network, tokens, torch.float32, CPU)
    plan = plan_for(network, tokens, torch.float32, CPU, True)
    assert str(plan.forward) in text
    assert "built in, not measured here" in text
    assert "dense layer:" in text
    assert "rebuild dense" in text
    assert all(len(line) < 200 for line in text.splitlines())
