"""What DeepSpeed writes becomes plain values and the same again, for any number of ranks."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("deepspeed", reason="deepspeed (the extra integrations) is not installed")

from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from outlast.errors import CheckpointError
from outlast.integrations.deepspeed import adapt_ranks, plain, rebuilt, repartitioned


def test_deepspeeds_own_objects_come_back_as_they_were():
    scaler = DynamicLossScaler(
        init_scale=8.0,
        scale_window=10,
        min_scale=1.0,
        delayed_shift=2,
        consecutive_hysteresis=False,
        dtype=torch.float16,
    )
    scaler.cur_scale, scaler.cur_iter = 4.0, 3
    found = rebuilt(
        plain(
            {
                "scaler": scaler,
                "stage": ZeroStageEnum.gradients,
                "places": [{"weight": fragment_address(numel=3, start=5)}],
                "shape": torch.Size([2, 3]),
                "kinds": [torch.bfloat16],
                "names": {"embedding"},
                "device": torch.device("cpu"),
            }
        )
    )
    assert vars(found["scaler"]) == vars(scaler)
    assert type(found["scaler"]) is DynamicLossScaler
    assert found["stage"] is ZeroStageEnum.gradients
    assert found["places"] == [{"weight": fragment_address(numel=3, start=5)}]
    assert found["shape"].numel() == 6
    assert (found["kinds"], found["names"]) == ([torch.bfloat16], {"embedding"})
    assert found["device"] == torch.device("cpu")


def test_nothing_else_is_made_from_a_file():
    for name in ("os.system", "deepspeed.DeepSpeedEngine", "builtins.eval"):
        text = json.dumps({"outlast.class": name, "value": "true"})
        with pytest.raises(CheckpointError, match="which is not made from a file"):
            rebuilt(json.loads(text))


def partitions(elements, ranks):
    """States of all ranks, whose numbers are their places in the flat tensors."""
    found = []
    for rank in range(ranks):
        weights, moments, paddings = [], {}, []
        for number, size in enumerate(elements):
            length = -(-size // (2 * ranks)) * 2
            flat = torch.zeros(length * ranks)
            flat[:size] = torch.arange(1.0, size + 1)
            padding = length * ranks - size if rank == ranks - 1 else 0
            part = flat[rank * length : (rank + 1) * length]
            # As DeepSpeed does, also where a rank has nothing but padding.
            weights.append(part[: length - padding])
            moments[number] = {"exp_avg": 2 * part, "step": torch.tensor(7.0)}
            paddings.append(padding)
        found.append(
            {
                "zero_stage": 2,
                "single_partition_of_fp32_groups": weights,
                "base_optimizer_state": {"state": moments, "param_groups": ["kept"]},
                "group_paddings": paddings,
                "partition_count": [ranks] * len(elements),
            }
        )
    return found


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 6), st.integers(1, 6))
def test_partitions_are_those_that_the_ranks_would_have_made(elements, before, after):
    saved = partitions(elements, before)
    expected = partitions(elements, after)
    for rank in range(after):
        found = repartitioned(saved, elements, rank, after)
        for number in range(len(elements)):
            weights = found["single_partition_of_fp32_groups"][number]
            full = expected[rank]["single_partition_of_fp32_groups"][number]
            # DeepSpeed pads what is shorter with zeros.
            assert torch.equal(weights, full[full > 0])
            moments = found["base_optimizer_state"]["state"][number]
            assert torch.equal(
                moments["exp_avg"],
                expected[rank]["base_optimizer_state"]["state"][number]["exp_avg"],
            )
            assert moments["step"] == 7.0
        assert found["group_paddings"] == expected[rank]["group_paddings"]
        assert found["partition_count"] == [after] * len(elements)
        assert found["base_optimizer_state"]["param_groups"] == ["kept"]


def test_layouts_that_depend_on_the_ranks_are_refused():
    (state,) = partitions([4], 1)
    elastic = {**state, "base_optimizer_state": [{}]}
    for other in (elastic, {**state, "zero_stage": 3}):
        with pytest.raises(CheckpointError, match="only where ZeRO 1 or 2 saved it"):
            repartitioned([other], [4], 0, 2)
    states = {
        "dp_world_size": 1,
        "mp_world_size": 1,
        "param_shapes": [{"weight": torch.Size([4])}],
        "ds_config": {"zero_optimization": {"round_robin_gradients": True}},
    }
    adapt_ranks(states, 1)
    with pytest.raises(CheckpointError, match="load it on as many, not on 2"):
        adapt_ranks(states, 2)
    for more in ({"num_experts": [4]}, {"mp_world_size": 2}):
        with pytest.raises(CheckpointError, match=r"load (it on as many|one of data)"):
            adapt_ranks({**states, "ds_config": {}, **more}, 2)
    adapt_ranks({**states, "ds_config": {}}, 2)
