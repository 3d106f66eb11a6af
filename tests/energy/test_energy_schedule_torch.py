"""Schedules that torch's own pipelining runs, as graphs to plan."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from outlast.energy.schedule import from_torch, gpipe, interleaved, one_f_one_b, zero_bubble
from outlast.errors import EnergyError


def stage(index: int, stages: int, devices: int) -> SimpleNamespace:
    """What a torch schedule reads of a stage to make its order; no process group is needed."""
    return SimpleNamespace(
        stage_index=index,
        num_stages=stages,
        group_size=devices,
        group_rank=0,
        is_first=index == 0,
        is_last=index == stages - 1,
        submod=None,
        has_backward=True,
    )


def torch_pipeline(name: str, devices: int, microbatches: int, virtual: int = 1):
    made = [stage(chunk * devices, virtual * devices, devices) for chunk in range(virtual)]
    single = name in {"Schedule1F1B", "ScheduleGPipe"}
    kind = getattr(torch_schedules, name)
    return kind(made[0] if single else made, microbatches, loss_fn=lambda out, target: out)


@pytest.mark.parametrize(("devices", "microbatches"), [(1, 3), (2, 2), (4, 8), (3, 7)])
def test_torch_and_we_mean_the_same_by_1f1b_and_gpipe(devices: int, microbatches: int):
    ours = one_f_one_b(devices, microbatches)
    assert from_torch(torch_pipeline("Schedule1F1B", devices, microbatches)) == ours
    ours = gpipe(devices, microbatches)
    assert from_torch(torch_pipeline("ScheduleGPipe", devices, microbatches)) == ours


@pytest.mark.parametrize(("devices", "microbatches", "virtual"), [(2, 4, 2), (4, 8, 2), (2, 6, 3)])
def test_torch_and_we_mean_the_same_by_interleaved(devices: int, microbatches: int, virtual: int):
    torch_made = torch_pipeline("ScheduleInterleaved1F1B", devices, microbatches, virtual)
    theirs, ours = from_torch(torch_made), interleaved(devices, microbatches, virtual)
    assert theirs.operations == ours.operations
    assert sorted(theirs.edges) == sorted(ours.edges)
    # With communication in the order, the graph is the same: transfers are our own to add.
    assert from_torch(torch_made.pipeline_order_with_comms) == theirs


@pytest.mark.parametrize(("devices", "microbatches"), [(2, 4), (4, 8)])
def test_torchs_zero_bubble_takes_as_long_as_ours(devices: int, microbatches: int):
    pipeline = torch_pipeline("ScheduleInterleavedZeroBubble", devices, microbatches)
    theirs, ours = from_torch(pipeline), zero_bubble(devices, microbatches)
    lasts = {"forward": 1.0, "backward_input": 1.1, "backward_weight": 0.9}
    took = [s.makespan([lasts[o.phase] for o in s.operations]) for s in (theirs, ours)]
    assert took[0] == pytest.approx(took[1])


@pytest.mark.parametrize(
    "name", ["ScheduleZBVZeroBubble", "ScheduleDualPipeV", "ScheduleLoopedBFS"]
)
def test_other_torch_schedules_become_whole_steps(name: str):
    schedule = from_torch(torch_pipeline(name, 2, 6, virtual=2))
    assert schedule.devices == 2
    assert {each.stage for each in schedule.operations} == {0, 1, 2, 3}
    forwards = [each for each in schedule.operations if each.phase == "forward"]
    assert len(forwards) == 4 * 6
    assert schedule.makespan([1.0] * len(schedule.operations)) >= len(schedule.operations) / 2


def test_ones_own_order_is_a_mapping_from_ranks_to_actions():
    action = torch_schedules._Action.from_str
    order = {0: [action("0F0"), None, action("0B0")], 1: [None, action("1F0"), action("1B0")]}
    assert from_torch(order) == one_f_one_b(2, 1)


@pytest.mark.parametrize(
    ("pipeline", "words"),
    [
        (object(), "object has no pipeline_order"),
        ({}, "ranks"),
        ({1: []}, "it must have 0, 1, 2"),
        ({0: ["0F0"]}, "'0F0' in the pipeline order is no action"),
        ({0: [torch_schedules._Action.from_str("0F0")]}, "1 x forward"),
        (
            {
                0: [
                    SimpleNamespace(
                        computation_type=SimpleNamespace(value="DANCE"),
                        stage_index=0,
                        microbatch_index=0,
                    )
                ]
            },
            "unknown kind DANCE",
        ),
    ],
)
def test_what_is_no_training_order_is_refused(pipeline: object, words: str):
    with pytest.raises(EnergyError, match=words):
        from_torch(pipeline)
