"""Mechanisms in a step: what structured layers, checks and codes cost, and what they save."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_runs import H100, LLAMA_8B, configuration
from plan_spaces import candidates_of

from outlast.coding.cost import CostModel, coding_cost
from outlast.coding.delays import Delays, ShiftedExponential
from outlast.errors import PlanError
from outlast.plan.api import Training, context_of, predict, search
from outlast.plan.batch import cases
from outlast.plan.cluster import Storage
from outlast.plan.configuration import Mechanisms, Settings
from outlast.plan.mechanisms import form_of, operations_ratio
from outlast.plan.model import judge
from outlast.plan.space import Block

SITE = replace(H100, storage=Storage(shared_bytes_per_s=8e9))
RUN = configuration(data=32, batch=256, tensor=2, recompute="full")
TRAINING = Training(model=LLAMA_8B, run=RUN, tokens=1e11, framework="any")


def low_rank(rank: float) -> Settings:
    return Settings(tensorize_form="low_rank", tensorize_rank=rank)


def estimated(chosen: Settings, **changes: object):
    run = replace(RUN, **changes)  # type: ignore[arg-type]
    return predict(replace(TRAINING, run=run, settings=chosen), SITE)


def parts(estimate) -> dict[str, float]:
    return {term.name: term.value for term in estimate.step_seconds.terms}


@pytest.mark.parametrize("sharding", ["none", "optimizer", "parameters"])
@pytest.mark.parametrize("pipeline", [1, 4])
def test_memory_and_what_parameters_cost_fall_with_the_rank(sharding: str, pipeline: int):
    changes = {"sharding": sharding, "pipeline": pipeline, "data": 32 // pipeline}
    each = [
        predict(
            replace(TRAINING, run=replace(RUN, **changes), settings=chosen),  # type: ignore[arg-type]
            SITE,
        )
        for chosen in (Settings(), low_rank(0.3), low_rank(0.1))
    ]
    memory = [one.memory.figure.middle for one in each]
    assert memory[0] > memory[1] > memory[2] > 0.0
    assert [one.memory.figure.middle for one in each] == [max(one.memory_by_stage) for one in each]
    for one in each:
        held = one.capacity_bytes - one.headroom_bytes
        assert held == pytest.approx(one.memory.figure.middle, rel=1e-9)
    for name in ("optimizer", "gradient sum", "gradient accumulation"):
        spent = [parts(one)[name] for one in each]
        assert spent[0] >= spent[1] >= spent[2] >= 0.0
        if spent[0]:
            ratio = form_of(LLAMA_8B, low_rank(0.3)).parameters / LLAMA_8B.parameters
            assert spent[1] == pytest.approx(ratio * spent[0], rel=1e-9)


def test_fewer_operations_are_counted_for_power():
    flops = LLAMA_8B.flops_per_token(RUN.sequence)
    ratios = [operations_ratio(LLAMA_8B, low_rank(rank), flops) for rank in (0.4, 0.1, 0.01)]
    assert 1.0 > ratios[0] > ratios[1] > ratios[2] > 0.1
    assert operations_ratio(LLAMA_8B, Settings(), flops) == 1.0


@given(rank=st.floats(0.01, 0.5), micro_batch=st.sampled_from([1, 2, 4]))
@settings(max_examples=12, deadline=None)
def test_products_never_shrink_more_than_their_operations(rank: float, micro_batch: int):
    found = parts(estimated(low_rank(rank), micro_batch=micro_batch))
    ratio = 1.0 + found["structured layers"] / found["matrix products"]
    flops = form_of(LLAMA_8B, low_rank(rank)).flops_ratio
    assert ratio >= flops * (1.0 - 1e-9)
    assert ratio > 1.02 * flops or rank > 0.2


def test_the_narrower_the_factors_the_less_of_the_operations_is_saved_in_time():
    def slowness(rank: float) -> float:
        found = parts(estimated(low_rank(rank)))
        ratio = 1.0 + found["structured layers"] / found["matrix products"]
        return ratio / form_of(LLAMA_8B, low_rank(rank)).flops_ratio

    assert 1.0 < slowness(0.4) < slowness(0.1) < slowness(0.02)


@pytest.mark.parametrize("form", ["cola", "lax", "btt", "monarch", "sltrain", "tt", "cp"])
def test_other_forms_are_slowed_at_most_to_what_their_operations_and_widths_say(form: str):
    chosen = Settings(tensorize_form=form, tensorize_rank=0.02)
    found = parts(estimated(chosen))
    ratio = 1.0 + found.get("structured layers", 0.0) / found["matrix products"]
    assert ratio >= form_of(LLAMA_8B, chosen).flops_ratio * (1.0 - 1e-9)
    assert estimated(chosen).memory.figure.middle > 0.0


def test_layers_that_grow_are_said_to_gain_nothing():
    grown = estimated(low_rank(0.9))
    assert any("tensorize_rank = 0.9" in each for each in grown.warnings)
    assert grown.memory.figure.middle > estimated(Settings()).memory.figure.middle
    assert not any("tensorize_rank" in each for each in estimated(low_rank(0.2)).warnings)


def test_checking_everything_costs_more_than_checking_linear_layers():
    levels = [estimated(Settings(guard=level)) for level in ("off", "light", "linear", "full")]
    seconds = [each.step_seconds.figure.middle for each in levels]
    assert seconds == sorted(set(seconds))


def test_audits_take_their_share_of_the_step():
    def seconds(**settings):
        return estimated(Settings(**settings)).step_seconds.figure.middle

    off, plain = seconds(guard="off"), seconds(guard="light")
    assert seconds(guard="light", audit=0.005) - plain == pytest.approx(0.005 * off)
    assert seconds(guard="off", audit=0.005) == off


def test_what_a_code_costs_does_not_depend_on_its_neighbours():
    runs = [replace(RUN, micro_batch=size) for size in (1, 2, 4, 8)]
    chosen = (Settings(coding_copies=2),)
    delays = ShiftedExponential(scale=0.3)
    context = context_of(TRAINING, SITE, delays=delays)
    rows = np.arange(4)
    numbers = cases([(LLAMA_8B, run, SITE) for run in runs])
    together = judge(context, Block(numbers, chosen, rows, np.zeros(4, dtype=np.intp)))
    for row, run in enumerate(runs):
        one = np.zeros(1, dtype=np.intp)
        alone = judge(context, Block(cases([(LLAMA_8B, run, SITE)]), chosen, one, one))
        assert together.step.coding_ratio[row] == alone.step.coding_ratio[0]
        assert together.step.coding_overhead[row] == alone.step.coding_overhead[0]


@pytest.mark.parametrize("micro_batch", [1, 2, 8])
def test_what_a_code_gains_is_what_its_simulation_says(micro_batch: int):
    delays = ShiftedExponential(scale=0.3)
    run = replace(RUN, micro_batch=micro_batch)
    one = np.zeros(1, dtype=np.intp)
    context = context_of(TRAINING, SITE, delays=delays)
    block = Block(cases([(LLAMA_8B, run, SITE)]), (Settings(coding_copies=2),), one, one)
    found = judge(context, block).step
    plain = judge(context, replace(block, settings=(Settings(),))).step
    chunk = float(plain.seconds[0]) / run.micro_batches
    costs = CostModel(chunk_seconds=chunk, chunks_per_worker=run.micro_batches)
    exact = coding_cost(run.data, delays, costs, copies=2)
    assert found.coding_ratio[0] == pytest.approx(exact.step_ratio, rel=0.01)
    assert found.coding_overhead[0] == pytest.approx(exact.overhead, rel=1e-9)


def test_late_workers_cost_time_and_a_code_takes_most_of_it_away():
    delays = ShiftedExponential(scale=0.3)
    coded = replace(TRAINING, settings=Settings(coding_copies=2))
    punctual = predict(TRAINING, SITE)
    plain, code = (predict(each, SITE, delays=delays) for each in (TRAINING, coded))
    share = {
        name: -next(t.value for t in each.ettr.terms if t.name == "lost to stragglers")
        for name, each in (("punctual", punctual), ("plain", plain), ("code", code))
    }
    assert share["punctual"] == 0.0
    # The latest of 32 takes 1 + 0.3 (1 + 1/2 + ... + 1/32) of a punctual one (Renyi).
    latest = 1.0 + 0.3 * sum(1.0 / each for each in range(1, 33))
    assert share["plain"] == pytest.approx(1.0 - 1.0 / latest, rel=0.05)
    assert share["code"] < 0.7 * share["plain"]
    assert code.finish_seconds.middle < 0.9 * plain.finish_seconds.middle
    assert plain.finish_seconds.middle > 1.5 * punctual.finish_seconds.middle


class HalfDead:
    """Each worker is dead for a step with probability 1/2: it never begins."""

    def draw(self, shape, generator):
        starts = np.where(generator.random(shape) < 0.5, np.inf, 0.0)
        return Delays(starts, np.ones(shape), np.ones(shape))


def test_delays_that_never_end_are_refused_in_a_sentence():
    with pytest.raises(PlanError, match="a step without a code never ends"):
        predict(TRAINING, SITE, delays=HalfDead())


def test_checks_take_as_long_whatever_the_rest_of_the_step_does():
    chosen = replace(low_rank(0.05), guard="full", coding_copies=2)
    slow = replace(SITE, device="own", fast_bytes_per_s=4e9, fabric_bytes_per_s=1e9)
    fast, late = (
        parts(predict(replace(TRAINING, settings=chosen), replace(site, device="own")))
        for site in (SITE, slow)
    )
    for name in ("guard", "gradient coding"):
        assert fast[name] == pytest.approx(late[name], rel=1e-9)


@pytest.mark.slow
def test_a_search_over_mechanisms_agrees_with_predictions():
    mechanisms = Mechanisms(
        guard=("off", "full"), tensorize=(("dense", 0.0), ("low_rank", 0.25)), coding_copies=(1, 2)
    )
    front = search(TRAINING, SITE, mechanisms=mechanisms)
    forms = {each.settings.tensorize_form for each in candidates_of(front)}
    assert forms == {"dense", "low_rank"}
    for row, candidate in enumerate(candidates_of(front)[:12]):
        alone = predict(
            replace(TRAINING, run=candidate.configuration, settings=candidate.settings), SITE
        )
        assert alone.unfit == ""
        memory = float(front.objectives.memory_bytes[row])
        assert memory == pytest.approx(alone.memory.figure.middle, rel=1e-9)
        hours = float(front.objectives.hours[row])
        assert hours == pytest.approx(alone.finish_seconds.middle / 3600.0, rel=1e-9)
        nats = float(front.objectives.loss_difference[row])
        assert nats == pytest.approx(alone.loss_difference.figure.middle, rel=1e-6, abs=1e-9)
