"""Dirty rows are found, clean ones are left alone."""

import dataclasses
import math

import numpy as np
import pytest

from outlast.plan.cluster import Cluster
from outlast.plan.configuration import Configuration
from outlast.plan.rows import Row, clean, link_classes
from outlast.plan.transformer import Transformer

CLUSTER = Cluster(
    name="c",
    device="h100-sxm",
    nodes=64,
    devices_per_node=8,
    fast_domain=8,
    peak_flop_per_s={"bf16": 989e12},
    matmul_flop_per_s={"bf16": 794e12},
    memory_bytes=80 * 2**30,
    memory_bytes_per_s=3.35e12,
    fast_bytes_per_s=450e9,
    fabric_bytes_per_s=50e9,
)


def sweep(seed, noise=0.05):
    """Clean rows of 120 configurations, some measured twice, and what a model predicts of them."""
    random = np.random.default_rng(seed)
    rows, predicted, shares = [], [], []
    for number in range(150):
        again = number >= 120
        if again:
            model, run, share = (
                rows[number - 120].model,
                rows[number - 120].run,
                shares[number - 120],
            )
        else:
            layers, hidden = int(random.integers(16, 81)), 1024 * int(random.integers(2, 9))
            model = Transformer(
                layers=layers,
                hidden=hidden,
                heads=hidden // 128,
                kv_heads=hidden // 128,
                head_width=128,
                intermediate=4 * hidden,
                gated=False,
                vocabulary=50000,
            )
            data = 2 ** int(random.integers(0, 5))
            run = Configuration(
                data=data,
                tensor=2 ** int(random.integers(0, 4)),
                pipeline=2 ** int(random.integers(0, 3)),
                sequence=4096,
                micro_batch=2,
                batch=2 * data * int(random.integers(4, 33)),
            )
            share = 0.4 * math.exp(-0.5 * abs(random.normal()))
            shares.append(share)
        ideal = run.tokens * model.flops_per_token(4096) / (run.devices * 989e12)
        predicted.append(ideal / share)
        seconds = predicted[-1] * math.exp(noise * random.normal())
        rate = run.tokens / (seconds * run.devices)
        rows.append(
            Row(
                name=f"s{number}",
                model=model,
                run=run,
                cluster=CLUSTER,
                source="sweep",
                framework="f",
                step_seconds=seconds,
                stated_devices=run.devices,
                stated_micro_batches=run.micro_batches,
                stated_flop_per_s=rate * model.flops_per_token(4096),
            )
        )
    return rows, np.array(predicted)


def swapped(row):
    return dataclasses.replace(
        row,
        step_seconds=row.stated_flop_per_s / 1e12,
        stated_flop_per_s=row.step_seconds * 1e12,
    )


def impossible(row):
    factor = row.model_flops_share / 1.3
    return dataclasses.replace(row, step_seconds=row.step_seconds * factor, stated_flop_per_s=None)


def wrong_batch(row):
    return dataclasses.replace(row, run=dataclasses.replace(row.run, batch=2 * row.run.batch))


def wrong_devices(row):
    return dataclasses.replace(row, stated_devices=2 * row.run.devices)


def milliseconds(row):
    return dataclasses.replace(row, step_seconds=1000 * row.step_seconds)


def disagreeing(row):
    return dataclasses.replace(row, step_seconds=2.0 * row.step_seconds, stated_flop_per_s=None)


def columns_matter(row):
    """Whether swapping is an error that anybody could see, and makes a difference."""
    return abs(math.log(row.step_seconds / (row.stated_flop_per_s / 1e12))) > math.log(5.0)


ERRORS = {
    "swap the columns": (swapped, columns_matter),
    "exceed": (impossible, lambda row: True),
    "accumulation": (wrong_batch, lambda row: True),
    "devices are stated": (wrong_devices, lambda row: True),
    "1000 times": (milliseconds, lambda row: True),
    "same configuration": (disagreeing, lambda row: int(row.name[1:]) >= 120),
}


@pytest.mark.parametrize("seed", range(4))
def test_plan_clean_finds_planted_errors_and_little_else(seed):
    rows, predicted = sweep(seed)
    random = np.random.default_rng(100 + seed)
    planted = {}
    for words, (spoil, possible) in ERRORS.items():
        free = [i for i, row in enumerate(rows) if possible(row) and i not in planted]
        # Of two that disagree, both are doubtful: do not plant into the other one as well.
        free = [i for i in free if not {i - 120, i + 120} & planted.keys()]
        for index in random.choice(free, 4, replace=False):
            rows[index] = spoil(rows[index])
            planted[int(index)] = words
    partners = {i - 120 for i, words in planted.items() if words == "same configuration"}
    partners |= {i + d for i in planted for d in (-120, 120)}
    found = clean(rows, predicted)
    hits = [any(words in text for text in found[i].flags) for i, words in planted.items()]
    assert np.mean(hits) >= 0.95
    honest = [i for i in range(len(rows)) if i not in planted and i not in partners]
    assert np.mean([bool(found[i].flags) for i in honest]) < 0.02


@pytest.mark.parametrize("seed", range(3))
def test_plan_clean_leaves_clean_rows_alone(seed):
    rows, predicted = sweep(seed)
    assert not any(row.flags for row in clean(rows, predicted))
    assert np.mean([bool(row.flags) for row in clean(rows)]) < 0.02


def test_plan_clean_works_without_predictions():
    rows, _ = sweep(7)
    rows[3], rows[5], rows[8] = milliseconds(rows[3]), wrong_batch(rows[5]), impossible(rows[8])
    flagged = [row.name for row in clean(rows) if row.flags]
    assert {"s3", "s5", "s8"} <= set(flagged)


@pytest.mark.parametrize("seed", range(4))
def test_plan_clean_slow_link_class(seed):
    rows, predicted = sweep(seed)
    slow = [i for i, row in enumerate(rows) if "pipeline" in link_classes(row)]
    for index in slow:
        rows[index] = dataclasses.replace(
            rows[index],
            step_seconds=2.5 * rows[index].step_seconds,
            stated_flop_per_s=rows[index].stated_flop_per_s / 2.5,
        )
    found = clean(rows, predicted)
    blamed = {i for i, row in enumerate(found) if any("over the network" in f for f in row.flags)}
    assert len(blamed & set(slow)) >= 0.95 * len(slow)
    assert len(blamed - set(slow)) < 0.02 * len(rows)
    assert all("fabric_bytes_per_s" in " ".join(found[i].flags) for i in blamed)


def test_plan_clean_throughput_that_contradicts_the_time():
    rows, predicted = sweep(1)
    rate = rows[0].tokens_per_s
    rows[0] = dataclasses.replace(rows[0], stated_tokens_per_s=1.6 * rate)
    rows[1] = dataclasses.replace(rows[1], stated_tokens_per_s=rows[1].tokens_per_s)
    rows[2] = dataclasses.replace(rows[2], stated_tokens_per_s=1000 * rows[2].tokens_per_s)
    found = clean(rows, predicted)
    assert "tokens/s per device" in found[0].flags[0]
    assert not found[1].flags
    assert "1000 times too long" in found[2].flags[0]


def test_plan_clean_memory():
    rows, _ = sweep(2)
    gib = 2.0**30
    rows[0] = dataclasses.replace(rows[0], allocated_bytes=50 * gib, reserved_bytes=20 * gib)
    rows[1] = dataclasses.replace(rows[1], reserved_bytes=100 * gib)
    rows[2] = dataclasses.replace(rows[2], allocated_bytes=20 * gib, reserved_bytes=50 * gib)
    found = clean(rows)
    assert "swap the columns" in found[0].flags[0]
    assert "do not fit" in found[1].flags[0]
    assert not found[2].flags


def test_plan_clean_memory_cliff_keeps_the_time_out_and_the_memory_in():
    rows, predicted = sweep(2)
    full = 75 * 2.0**30
    slow = 4.0 * rows[40].step_seconds
    rows[40] = dataclasses.replace(
        rows[40], reserved_bytes=full, step_seconds=slow, stated_flop_per_s=None
    )
    rows[41] = dataclasses.replace(rows[41], reserved_bytes=full)
    found = clean(rows, predicted)
    assert "75.0 GiB of 80 are reserved" in found[40].time_flags[0]
    assert found[40].fits_memory
    assert not found[40].fits_time
    assert found[41].fits_time


def test_plan_clean_keeps_order_and_earlier_flags():
    rows, predicted = sweep(3)
    rows[0] = dataclasses.replace(wrong_devices(rows[0]), flags=("row s0: mine",))
    found = clean(rows, predicted)
    assert [row.name for row in found] == [row.name for row in rows]
    assert found[0].flags[0] == "row s0: mine"
    assert len(found[0].flags) == 2
    assert clean([]) == []
