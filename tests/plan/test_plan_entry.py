"""The front door: whose constants are used, what of a job is mapped, and what is refused."""

import math
from dataclasses import replace

import pytest
from plan_runs import H100, LLAMA_8B, configuration

from outlast.errors import PlanError
from outlast.job import load_job
from outlast.plan.api import Training, context_of, predict, published_constants, run_of, training_of
from outlast.plan.cluster import FailureCause, Storage
from outlast.plan.constraints import FRAMEWORKS
from outlast.plan.huggingface import transformer_of
from outlast.plan.memory_fit import COMPILED, Known, fit_device_memory
from outlast.plan.rows import Row
from outlast.plan.step_model import step_model

RUN = configuration(data=64, batch=256, sharding="parameters", recompute="full")
SITE = replace(
    H100,
    nodes=8,
    devices_per_node=1,
    fast_domain=1,
    storage=Storage(shared_bytes_per_s=1e9),
    failures=(FailureCause(name="crash", per_node_day=2.0, repair_hours=1.0),),
    spares=2,
)
LONG = ("train.steps=5000000", "train.batch_size=64", "guard.policy=off", "recover.mode=off")
TRAINING = Training(model=LLAMA_8B, run=RUN, tokens=1e11, framework="any")
CALIBRATED_AS = {
    name: kind.calibrated_as
    for key, kind in FRAMEWORKS.items()
    for name in (key, *kind.also)
    if kind.calibrated_as
}


@pytest.mark.parametrize("name", sorted(set(CALIBRATED_AS)))
def test_each_published_framework_has_constants_of_its_own(name):
    published = published_constants()
    groups = {each.group for each in published.constants.columns if each.level == "framework"}
    plain = context_of(TRAINING, H100)
    found = context_of(replace(TRAINING, framework=name), H100)
    assert found.whose.framework in groups
    own, common = (published.constants.constants([each.whose]) for each in (found, plain))
    assert any(
        float(getattr(own, name)[0]) != float(getattr(common, name)[0])
        for name in own.__dataclass_fields__
    )


def test_every_framework_of_the_published_runs_is_reached():
    columns = published_constants().constants.columns
    assert {each.group for each in columns if each.level == "framework"} == set(
        CALIBRATED_AS.values()
    )


def test_any_framework_has_the_common_constants():
    assert context_of(TRAINING, H100).whose.framework == "any"


def test_a_framework_changes_the_predicted_time():
    whole = replace(TRAINING, run=replace(RUN, tensor=2, data=32, sharding="none"))
    times = {
        predict(replace(whole, framework=name), H100).step_seconds.figure.middle
        for name in ("any", "megatron", "nemo")
    }
    assert len(times) == 3


def test_a_cluster_object_that_contradicts_itself_is_refused():
    with pytest.raises(PlanError, match="memory_bytes = 1"):
        predict(TRAINING, replace(H100, memory_bytes=1.0))


@pytest.mark.parametrize("rate", [math.nan, -1.0, math.inf])
def test_storage_that_cannot_be_is_refused_and_not_taken_for_free(rate):
    with pytest.raises(PlanError, match=r"storage\.shared_bytes_per_s = "):
        predict(TRAINING, replace(SITE, storage=Storage(shared_bytes_per_s=rate)))


@pytest.mark.parametrize("tokens", [math.inf, 0.0, -1.0])
def test_tokens_without_end_are_refused(tokens):
    with pytest.raises(PlanError, match="tokens = "):
        predict(replace(TRAINING, tokens=tokens), H100)


@pytest.mark.parametrize("field", ["gradient_bytes", "loss_bytes"])
def test_values_without_bytes_are_refused(field):
    with pytest.raises(PlanError, match=f"{field} = 0"):
        replace(RUN, **{field: 0})


def test_text_is_no_configuration():
    with pytest.raises(PlanError, match="neither a Path"):
        transformer_of("config.json")  # type: ignore[arg-type]


def test_the_interval_of_a_job_is_that_of_its_steps():
    estimate = {
        steps: predict(load_job(None, [*LONG, f"checkpoint.every_steps={steps}"]), SITE)
        for steps in (20_000, 2_000_000)
    }
    for steps, each in estimate.items():
        seconds = steps * each.step_seconds.figure.middle
        assert each.checkpoint_seconds == pytest.approx(seconds, rel=1e-6)
    assert estimate[2_000_000].ettr.figure.middle < estimate[20_000].ettr.figure.middle - 0.01


def test_a_job_that_chooses_its_interval_wastes_least_and_one_that_saves_at_the_end_most():
    auto, rare, end = (
        predict(load_job(None, [*LONG, f"checkpoint.every_steps={steps}"]), SITE)
        for steps in ('"auto"', 1_000_000, 0)
    )
    shares = [each.ettr.figure.middle for each in (auto, rare, end)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > shares[2]
    assert end.checkpoint_seconds == pytest.approx(
        end.steps * end.step_seconds.figure.middle, rel=1e-6
    )
    assert any("every_steps" in each for each in auto.warnings)


def test_a_fast_tier_is_used_where_the_cluster_has_it():
    def tiers(fast: str, storage: Storage) -> tuple[str, ...]:
        job = load_job(None, [*LONG, f"checkpoint.fast={fast}"])
        return training_of(job, 8, replace(SITE, storage=storage)).settings.tiers

    shared = Storage(shared_bytes_per_s=1e9)
    disks = replace(shared, local_bytes_per_s=2e9)
    assert tiers("/dev/shm/run", shared) == ("memory", "shared")
    assert tiers("/scratch", disks) == ("local", "shared")
    assert tiers("/scratch", shared) == ("shared",)
    job = load_job(None, [*LONG, "checkpoint.fast=/scratch"])
    assert any("checkpoint.fast" in each for each in predict(job, SITE).warnings)


def test_a_code_of_a_job_saves_restarts():
    plain, coded = (
        predict(load_job(None, [*LONG, *more]), SITE)
        for more in ((), ("coding.scheme=coverage", "coding.copies=2"))
    )
    assert coded.ettr.figure.middle > plain.ettr.figure.middle
    assert training_of(load_job(None, [*LONG, "coding.scheme=coverage"]), 8).settings == (
        replace(training_of(load_job(None, list(LONG)), 8).settings, coding_copies=3)
    )


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("coding.scheme=cyclic_repetition", "coding.scheme"),
        ("checkpoint.replay=exact", "checkpoint.replay"),
        ("checkpoint.mirror=/else", "checkpoint.mirror"),
        ("guard.policy=light;guard.modules={'*.mlp.*' = 'linear'}", "guard.modules"),
    ],
)
def test_what_a_job_says_and_the_planner_cannot_predict_is_listed(override: str, named: str):
    estimate = predict(load_job(None, [*LONG, *override.split(";")]), SITE)
    assert any(each.startswith(named) for each in estimate.warnings)


def test_structured_layers_of_a_job_by_rank_and_by_budget():
    rank = training_of(load_job(None, [*LONG, "tensorize.form=low_rank", "tensorize.rank=32"]), 8)
    assert rank.settings.tensorize_rank == 32 / rank.model.hidden
    budget = training_of(
        load_job(None, [*LONG, "tensorize.form=low_rank", 'tensorize.rank="flops=0.3"']), 8
    )
    assert budget.settings.tensorize_form == "dense"
    assert any("tensorize.rank" in each for each in budget.unmapped)


def test_what_is_unwise_is_said():
    across = replace(TRAINING, run=replace(RUN, tensor=4, data=16, batch=64))
    narrow = replace(H100, fast_domain=2)
    assert any("tensor = 4" in each for each in predict(across, narrow).warnings)


def runs_like(framework: str, slower: float, larger: float) -> list[Row]:
    """Runs whose time and memory are a multiple of what is predicted without them."""
    rows = []
    for samples in (64, 128, 256, 512):
        job = load_job(None, [*LONG, f"train.batch_size={samples}"])
        model, run = run_of(job, SITE.devices)
        plain = predict(job, SITE)
        rows.append(
            Row(
                name=f"{framework} {samples}",
                model=model,
                run=run,
                cluster=SITE,
                source="runs",
                framework=framework,
                step_seconds=slower * plain.step_seconds.figure.middle,
                reserved_bytes=larger * plain.memory.figure.middle,
            )
        )
    return rows


def known_from(rows: list[Row]) -> Known:
    fits = {name: each.fit for name, each in fit_device_memory(rows).items()}
    return Known(step_model(rows, prior=published_constants()), fits)


@pytest.fixture(scope="module")
def known_compiled() -> Known:
    return known_from([*runs_like("outlast", 3.0, 1.3), *runs_like(COMPILED, 0.5, 0.8)])


@pytest.mark.slow
def test_a_job_that_is_compiled_has_what_compiled_runs_taught(known_compiled: Known):
    plain, fast = (
        predict(load_job(None, [*LONG, f"train.compile={each}"]), SITE, calibration=known_compiled)
        for each in ("false", "true")
    )
    assert fast.step_seconds.figure.middle < 0.4 * plain.step_seconds.figure.middle
    assert fast.memory.figure.middle < 0.8 * plain.memory.figure.middle
    assert not any("no run of" in each for each in fast.step_seconds.figure.extrapolated)
    assert not any("no memory of" in each for each in fast.memory.figure.extrapolated)


@pytest.mark.slow
def test_a_source_without_a_job_has_what_others_taught(known_compiled: Known):
    model, run = run_of(load_job(None, list(LONG)), SITE.devices)
    training = Training(model=model, run=run, tokens=1e9)
    found = context_of(training, SITE, calibration=known_compiled)
    assert found.whose.framework == "outlast"
    assert found.memory is known_compiled.memory["outlast"]
    elsewhere = replace(training, framework="torchtitan", compiled=True)
    assert context_of(elsewhere, SITE, calibration=known_compiled).whose.framework == "torchtitan"


@pytest.mark.slow
def test_a_compiled_job_falls_back_to_other_runs_of_time_and_memory_apart():
    job = load_job(None, [*LONG, "train.compile=true"])
    training = training_of(job, SITE.devices)
    plain = known_from(runs_like("outlast", 3.0, 1.3))
    found = context_of(training, SITE, calibration=plain)
    assert found.whose.framework == "outlast"
    assert found.memory is plain.memory["outlast"]
    mixed = replace(plain, memory={COMPILED: plain.memory["outlast"]})
    found = context_of(training, SITE, calibration=mixed)
    assert found.whose.framework == "outlast"
    assert found.memory is mixed.memory[COMPILED]
