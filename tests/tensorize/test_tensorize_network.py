import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.errors import TensorizeError
from outlast.tensorize.network import Network, Route, dense_route, lower

TRAIN = Network(
    "ab",
    "cd",
    ("ap", "pbq", "qcr", "rd"),
    tuple(zip("abcdpqr", (2, 3, 4, 5, 2, 3, 4), strict=True)),
    6,
    20,
)
BLOCK = Network(
    "mi", "no", ("mnri", "nomr"), tuple(zip("minor", (4, 5, 7, 4, 2), strict=True)), 19, 27
)


def test_str_and_parse_are_inverse() -> None:
    for network in (TRAIN, BLOCK, TRAIN.backwards()):
        assert Network.parse(str(network)) == network
    assert str(BLOCK) == "mi->no; mnri,nomr; m=4 i=5 n=7 o=4 r=2; 19->27"


def test_parameters_bonds_and_shapes() -> None:
    assert TRAIN.parameters == 2 * 2 + 2 * 3 * 3 + 3 * 4 * 4 + 4 * 5
    assert TRAIN.bonds == "pqr"
    assert BLOCK.bonds == "r"
    assert BLOCK.shape(1) == (7, 4, 4, 2)
    assert TRAIN.backwards().cores == ("rd", "qcr", "pbq", "ap")


@pytest.mark.parametrize(
    ("inputs", "outputs", "cores", "features"),
    [
        ("a", "b", ("ap",), (2, 3)),  # an output index on no core
        ("a", "a", ("aa",), (2, 2)),  # one index on both sides
        ("a", "b", ("aq", "qb"), (2, 3)),  # no size of q
        ("a", "b", ("ap", "pb"), (3, 3)),  # more features than modes
    ],
)
def test_what_is_no_map_is_refused(
    inputs: str, outputs: str, cores: tuple[str, ...], features: tuple[int, int]
) -> None:
    with pytest.raises(TensorizeError):
        Network(inputs, outputs, cores, (("a", 2), ("b", 3), ("p", 4)), *features)


@pytest.mark.parametrize(
    ("sizes", "features"),
    [((("a", 2), ("b", 3), ("p", 0)), (2, 3)), ((("a", -2), ("b", 3), ("p", -4)), (-2, 3))],
)
def test_sizes_below_one_are_refused(
    sizes: tuple[tuple[str, int], ...], features: tuple[int, int]
) -> None:
    with pytest.raises(TensorizeError, match="all must be at least 1"):
        Network("a", "b", ("ap", "pb"), sizes, *features)


def test_groups_must_be_those_of_the_cores() -> None:
    with pytest.raises(TensorizeError, match="do not add up to the 4 cores"):
        lower(TRAIN, Route((2, 1)))


def test_the_dense_route_is_one_plain_product_without_padding() -> None:
    (stage,) = lower(BLOCK, dense_route(BLOCK)).stages
    assert (stage.b, stage.m, stage.k, stage.f) == (1, 27, 19, 1)
    assert stage.is_plain
    assert str(dense_route(BLOCK)) == "rebuild dense"


def test_two_groups_of_a_train_meet_at_the_middle_bond() -> None:
    first, second = lower(TRAIN, Route((2, 2))).stages
    assert (first.k, first.m, second.k, second.m) == (6, 3, 3, 20)
    assert first.is_plain
    assert second.is_plain
    assert str(Route((2, 2), layout="features", chunk=64)) == (
        "two products (cores 2+2, feature-major, 64 tokens at a time)"
    )


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from([TRAIN, BLOCK]),
    st.booleans(),
    st.sampled_from(["tokens", "features"]),
    st.data(),
)
def test_what_a_stage_gives_is_what_the_next_takes(network, backwards, layout, data) -> None:  # type: ignore[no-untyped-def]
    left = len(network.cores)
    groups = []
    while left:
        groups.append(data.draw(st.integers(1, left)))
        left -= groups[-1]
    stages = lower(network, Route(tuple(groups), backwards, layout)).stages
    for before, after in pairwise(stages):
        assert before.out_width == after.width
    places = [core for stage in stages for core in stage.cores]
    assert places == sorted(places, reverse=backwards)


def test_importing_networks_needs_no_torch() -> None:
    code = "import sys, outlast.tensorize.network; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
