"""What differs in a step's time where the devices are a machine's own processors."""

from dataclasses import replace

import numpy as np
import pytest
from plan_probe_machine import MACHINE
from plan_runs import TINY

from outlast.plan.batch import cases
from outlast.plan.cluster import divided
from outlast.plan.configuration import Configuration
from outlast.plan.constants import constants
from outlast.plan.step_time import step_parts

TWO_CORES = replace(MACHINE, host_cores=2)


def seconds(term, cluster=TWO_CORES, **changes):
    """Of one term of a step of a small model."""
    run = Configuration(**{"sequence": 128, "micro_batch": 4, "batch": 4, **changes})
    numbers = cases([(TINY, run, cluster)])
    [part] = [each for each in step_parts(numbers, constants()) if each.name == term]
    [value] = np.broadcast_to(part.values, (1,))
    return float(value)


def test_attention_in_bf16_pays_for_its_blocks_and_is_faster_once_they_are_large():
    assert seconds("attention", precision="bf16") > 2.0 * seconds("attention", precision="fp32")
    far = {"sequence": 16384, "micro_batch": 1, "batch": 1}
    assert seconds("attention", precision="bf16", **far) < seconds(
        "attention", precision="fp32", **far
    )


def test_blocks_of_scores_are_divided_among_the_cores():
    many = replace(MACHINE, host_cores=8)
    alone = seconds("attention", precision="bf16")
    assert alone > seconds("attention", many, precision="bf16")
    # Two ranks have half of the cores each.
    shared = seconds("attention", divided(TWO_CORES, 2), data=2, batch=8, precision="bf16")
    assert shared == pytest.approx(2.0 * alone)


def test_weights_are_cast_once_more_where_blocks_are_computed_again():
    once = seconds("gradient accumulation", precision="bf16")
    again = seconds("gradient accumulation", precision="bf16", recompute="full")
    assert again > once
    assert seconds("gradient accumulation", precision="fp32") == pytest.approx(
        seconds("gradient accumulation", precision="fp32", recompute="full")
    )
