"""Which rank does what: degrees, coordinates, and the device mesh that must agree with them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.errors import OutlastError
from outlast.job import ParallelSection
from outlast.train.layout import Layout, make_mesh, resolve_layout

degrees = st.integers(1, 4)
any_layout = st.builds(Layout, degrees, degrees, degrees, degrees)


@given(any_layout)
@settings(deadline=None)
def test_every_rank_has_coordinates_of_its_own(layout):
    coordinates = {
        (layout.pipeline_rank(rank), layout.data_rank(rank), layout.tensor_rank(rank))
        for rank in range(layout.world_size)
    }
    assert coordinates == {
        (stage, data, tensor)
        for stage in range(layout.pipeline)
        for data in range(layout.data_ranks)
        for tensor in range(layout.tensor)
    }


@given(any_layout)
@settings(deadline=None)
def test_each_share_of_the_batch_counts_its_loss_once(layout):
    counting = [rank for rank in range(layout.world_size) if layout.counts_loss(rank)]
    assert [layout.data_rank(rank) for rank in counting] == list(range(layout.data_ranks))
    assert all(layout.pipeline_rank(rank) == layout.pipeline - 1 for rank in counting)


@given(any_layout)
@settings(deadline=None)
def test_degrees_multiply_to_the_number_of_processes(layout):
    parallel = ParallelSection(**layout.to_dict())
    assert resolve_layout(parallel, layout.world_size) == layout
    for other in (layout.world_size - 1, layout.world_size + 1):
        with pytest.raises(OutlastError, match=f"needs {layout.world_size} processes"):
            resolve_layout(parallel, other)


@given(any_layout)
@settings(deadline=None)
def test_replicate_zero_takes_what_is_left_over(layout):
    parallel = ParallelSection(**(layout.to_dict() | {"replicate": 0}))
    assert resolve_layout(parallel, layout.world_size) == layout


def test_a_wrong_world_size_names_every_degree_and_the_remedy():
    parallel = ParallelSection(shard=2, tensor=3)
    with pytest.raises(OutlastError) as error:
        resolve_layout(parallel, 4)
    assert str(error.value) == (
        "parallel.pipeline = 1 x parallel.replicate = 1 x parallel.shard = 2 x "
        "parallel.tensor = 3 needs 6 processes, but 4 were started; "
        "start 6 (--nproc 6) or change the degrees"
    )
    with pytest.raises(OutlastError, match="but 1 was started"):
        resolve_layout(parallel, 1)


def _coordinates(layouts):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), []
    for layout in layouts:
        mesh = make_mesh(layout, "cpu")
        own = (layout.pipeline_rank(rank), layout.data_rank(rank), layout.tensor_rank(rank))
        place = {name: mesh.get_local_rank(name) for name in mesh.mesh_dim_names}
        data = place["replicate"] * layout.shard + place["shard"]
        found.append((own, (place["pipeline"], data, place["tensor"])))
    dist.destroy_process_group()
    return found


@pytest.mark.distributed
def test_coordinates_are_those_of_the_device_mesh(ranks):
    layouts = [
        Layout(replicate=4),
        Layout(replicate=2, shard=2),
        Layout(shard=2, tensor=2),
        Layout(pipeline=2, replicate=2),
        Layout(pipeline=2, tensor=2),
    ]
    for found in ranks(4)(_coordinates, layouts):
        for ours, of_mesh in found:
            assert ours == of_mesh
