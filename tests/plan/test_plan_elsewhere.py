"""Clusters of which nothing was measured: intervals that hold there, and words that say so."""

from dataclasses import replace

import numpy as np
import pytest
from plan_runs import H100, LLAMA_8B, MIXTURE, configuration, shared
from plan_spaces import candidates_of

from outlast.errors import PlanError
from outlast.plan.api import Training, predict, published_constants, search
from outlast.plan.batch import cases
from outlast.plan.calibration import (
    Provenance,
    calibration_of,
    from_text,
    step_model_of,
    to_text,
)
from outlast.plan.cluster_file import cluster_of
from outlast.plan.constants import NAMES, PRIORS, constants
from outlast.plan.constraints import FRAMEWORKS, framework_key
from outlast.plan.huggingface import published
from outlast.plan.mechanisms import HELD
from outlast.plan.memory_fit import Known
from outlast.plan.model import BEST, best_of
from outlast.plan.rows import Row
from outlast.plan.step_fit import Belonging
from outlast.plan.step_model import (
    belonging,
    step_model,
)
from outlast.plan.step_time import step_seconds

FLAG = "not calibrated on this cluster"
SMALL = replace(LLAMA_8B, layers=16, hidden=2048, head_width=64, intermediate=8192)
RUN = configuration(data=64, batch=256, sharding="parameters")
TRAINING = Training(model=LLAMA_8B, run=RUN, tokens=1e11, framework="nemo")
CALIBRATED_AS = {
    name: kind.calibrated_as
    for key, kind in FRAMEWORKS.items()
    for name in (key, *kind.also)
    if kind.calibrated_as
}
MINE, YOURS = replace(H100, name="mine"), replace(H100, name="yours")


def row_of(cluster, run, seconds, framework="Megatron-Bridge", model=LLAMA_8B):
    return Row(
        name=f"{cluster.name} {framework} {run}",
        model=model,
        run=run,
        cluster=cluster,
        source=f"runs/{hash(run)}",
        framework=framework,
        step_seconds=seconds,
    )


def drawn_site(random, number):
    """Runs of a site whose constants are drawn from the priors; of two frameworks in turn."""
    site = replace(H100, name=f"site {number}")
    values = {}
    for name in NAMES:
        prior = PRIORS[name]
        spread = sum(each**2 for each in prior.spreads.values()) ** 0.5
        position = prior.unbounded(np.array(prior.median))
        position = position + random.normal(0.0, prior.unbounded_deviation(spread))
        values[name] = prior.bounded(position)
    rows = []
    for tensor, data in ((1, 8), (2, 4), (8, 8)):
        for micro_batch in (1, 4):
            run = configuration(
                tensor=tensor,
                data=data,
                micro_batch=micro_batch,
                batch=data * micro_batch * 4,
                sequence=2048,
            )
            seconds = step_seconds(cases([(SMALL, run, site)]), constants(values))
            noise = np.exp(random.normal(0.0, 0.03))
            framework = f"framework {number % 2}"
            rows.append(row_of(site, run, float(seconds[0] * noise), framework, SMALL))
    return rows


@pytest.mark.slow
def test_intervals_hold_on_sites_that_no_fit_has_seen():
    random = np.random.default_rng(3)
    measured = [row for number in range(8) for row in drawn_site(random, number)]
    model = shared(step_model(measured, 2))
    inside = []
    for number in range(8, 28):
        for row in drawn_site(random, number):
            one, whose = cases([(row.model, row.run, row.cluster)]), belonging(row)
            error = np.log(row.step_seconds / model.seconds(one, [whose])[0])
            inside.append(abs(error) <= model.half_widths(one, whose)[0])
            assert FLAG in model.outside(one, whose)[0]
    # Of so few sites the share strays; as if runs of a known framework told of all, it is half.
    assert np.mean(inside) > 0.75


def slow_runs(cluster):
    """Four runs that take 1.3 times as long as predicted."""
    rows = []
    for micro_batch in (1, 2):
        for recompute in ("none", "full"):
            run = replace(RUN, micro_batch=micro_batch, recompute=recompute)
            plain = predict(replace(TRAINING, run=run), cluster).step_seconds.figure.middle
            rows.append(row_of(cluster, run, 1.3 * plain))
    return rows


@pytest.fixture(scope="module")
def known():
    """The published constants, and slow runs on one cluster."""
    return Known(step_model(slow_runs(MINE), prior=published_constants()))


def half(found):
    figure = found.step_seconds.figure
    return float(np.log(figure.high / figure.middle))


def flagged(found):
    figures = (found.step_seconds.figure, found.tokens_per_s, found.finish_seconds)
    return {any(FLAG in phrase for phrase in each.extrapolated) for each in figures}


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
@pytest.mark.parametrize("cluster", ["h100x64", "a100x64"])
def test_no_user_s_cluster_is_calibrated_by_runs_of_others(framework, cluster):
    sharding = "optimizer" if framework == "nanotron" else "parameters"
    training = replace(TRAINING, framework=framework, run=replace(RUN, sharding=sharding))
    found = predict(training, cluster)
    assert not found.calibrated
    assert flagged(found) == {True}
    assert half(found) > 0.16


@pytest.mark.parametrize("site", ["nanotron", "mosaic", "nemo_dense", "vtrain_multi"])
def test_a_cluster_that_is_named_like_a_publication_is_not_calibrated(site):
    assert not predict(TRAINING, replace(H100, name=site)).calibrated


@pytest.mark.slow
def test_runs_of_a_cluster_calibrate_it_and_no_other(known):
    plain = predict(TRAINING, MINE)
    mine, yours = (predict(TRAINING, each, calibration=known) for each in (MINE, YOURS))
    assert (mine.calibrated, yours.calibrated) == (True, False)
    assert (flagged(mine), flagged(yours)) == ({False}, {True})
    assert half(mine) < half(yours)
    # Each run directory is a source of its own; all of them are runs of one cluster.
    seconds = mine.step_seconds.figure.middle / plain.step_seconds.figure.middle
    assert seconds == pytest.approx(1.3, abs=0.05)
    assert any("correction" in term.name for term in mine.step_seconds.terms)
    assert not any("correction" in term.name for term in yours.step_seconds.terms)
    origins = [
        {source.origin for term in each.step_seconds.terms for source in term.constants.values()}
        for each in (mine, yours)
    ]
    assert origins == [{"calibrated"}, {"published"}]


def test_a_framework_a_chip_and_a_kind_of_model_that_were_not_measured_here_are_not_known(known):
    for training, cluster in (
        (replace(TRAINING, framework="torchtitan"), MINE),
        (TRAINING, replace(cluster_of("64xh200-sxm"), name="mine")),
        (replace(TRAINING, model=MIXTURE), MINE),
    ):
        found = predict(training, cluster, calibration=known)
        assert not found.calibrated
        assert flagged(found) == {True}


@pytest.mark.slow
def test_no_few_runs_make_other_clusters_better_known_than_the_published_ones_do(known):
    published_width = half(predict(TRAINING, YOURS))
    assert half(predict(TRAINING, YOURS, calibration=known)) > 0.8 * published_width
    alone = step_model([row_of(MINE, replace(RUN, micro_batch=each), 9.0) for each in (1, 2, 4)])
    assert half(predict(TRAINING, YOURS, calibration=alone)) > 0.16


@pytest.mark.slow
def test_runs_of_one_cluster_do_not_narrow_the_intervals_of_others(known):
    # As if the first cluster's runs had repeated badly: a floor far above that of the second.
    rough = replace(known.step.widths, floor=4.0 * known.step.widths.floor)
    after = step_model(slow_runs(YOURS), prior=replace(known.step, widths=rough)).widths
    assert len(rough.quantiles) > 1
    for group, quantile in rough.quantiles.items():
        assert after.quantiles[group] * after.floor >= quantile * rough.floor * (1 - 1e-9)


def test_a_calibration_keeps_its_places_in_its_file_and_an_older_one_has_none(known):
    calibration = calibration_of(known.step, Provenance(date="2026-11-23", version="0"))
    again = step_model_of(from_text(to_text(calibration)))
    assert again.places == known.step.places
    older = {
        name.rpartition(" at ")[0]: 1.0 for name in calibration.widths.quantiles if " at " in name
    }
    widths = replace(calibration.widths, quantiles={**older, "*": 2.3})
    old = replace(calibration, places={}, widths=widths)
    found = predict(TRAINING, MINE, calibration=step_model_of(from_text(to_text(old))))
    assert not found.calibrated


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sequence": 131072, "batch": 64}, "sequence = 131072 is"),
        ({"data": 32768, "batch": 32768}, "devices = 32768 is"),
        ({"optimizer": "muon"}, "no run with Muon was measured"),
        ({"precision": "fp32"}, "no run in fp32 was measured"),
    ],
)
def test_what_lies_beyond_the_measured_runs_is_said(changes, words):
    run = replace(RUN, **changes)
    found = predict(replace(TRAINING, framework="any", run=run), f"h100x{run.devices}")
    said = found.step_seconds.figure.extrapolated
    assert any(each.startswith("outside measured range: ") and words in each for each in said)
    assert said == found.finish_seconds.extrapolated[: len(said)]


def test_fp8_is_not_measured_where_only_bf16_was():
    run = replace(RUN, precision="fp8")
    of_chip = predict(replace(TRAINING, framework="mosaic", run=run), "h100x64")
    assert not any("in fp8" in each for each in of_chip.step_seconds.figure.extrapolated)
    step = published_constants()
    numbers = cases([(LLAMA_8B, replace(run, sharding="optimizer"), H100)])
    said = step.outside(numbers, Belonging("h100-sxm", "mine", "nanotron"))
    assert any("no run in fp8 was measured" in each for each in said)


def test_a_calibrated_cluster_says_what_is_beyond_its_own_runs(known):
    far = predict(replace(TRAINING, run=replace(RUN, sequence=16384)), MINE, calibration=known)
    assert far.step_seconds.figure.extrapolated[0] == (
        "outside measured range: sequence = 16384 is 2 times above the calibrated 8192"
    )
    assert flagged(far) == {False}
    widths = [
        half(predict(replace(TRAINING, run=replace(RUN, sequence=each)), MINE, calibration=known))
        for each in (8192, 16384, 32768)
    ]
    assert widths == sorted(widths)
    assert widths[0] < widths[-1]


def test_the_memory_and_the_watts_of_others_are_no_measurements():
    found = predict(
        replace(TRAINING, framework="nanotron", run=replace(RUN, sharding="optimizer")), "h100x64"
    )
    assert any("other clusters" in each for each in found.memory.figure.extrapolated)
    assert any("prior" in each for each in found.run_joules.extrapolated)


@pytest.mark.parametrize("name", sorted({*CALIBRATED_AS, *CALIBRATED_AS.values()}))
def test_every_name_of_a_framework_leads_to_its_constants(name):
    training = replace(TRAINING, framework=name, run=replace(RUN, sharding="none"))
    assert training.framework in FRAMEWORKS
    assert framework_key(name.upper()) == training.framework
    small = replace(training, model=published("gpt2"))
    assert predict(small, "h100x64").step_seconds.figure.middle > 0.0
    assert search(small, "h100x8") is not None


def test_a_name_that_nobody_knows_is_refused_with_those_that_are():
    with pytest.raises(
        PlanError, match="framework = 'mosiac' is not known: did you mean 'llm-foundry'"
    ):
        replace(TRAINING, framework="mosiac")
    with pytest.raises(PlanError, match="known are any, outlast"):
        replace(TRAINING, framework="jax")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "best"),
    [("h100x64", {"bf16": 0.4616, "fp8": 0.4351}), ("a100x64", {"bf16": 0.6414, "fp16": 0.6414})],
)
@pytest.mark.parametrize("framework", ["any", "nemo", "llm-foundry"])
def test_nothing_recommended_uses_more_of_a_chip_than_anybody_published(cluster, best, framework):
    for precision, share in best.items():
        training = replace(TRAINING, framework=framework, run=replace(RUN, precision=precision))
        front = search(training, cluster)
        for candidate in candidates_of(front):
            run = candidate.configuration
            chosen = predict(replace(training, run=run), cluster)
            assert chosen.utilisation.middle <= best.get(run.precision, share) * (1 + 1e-9)


def test_a_step_that_is_held_says_so_and_stays_the_sum_of_its_terms():
    whole = replace(TRAINING, framework="torchtitan")
    found = predict(whole, "h100x64")
    assert found.utilisation.middle == pytest.approx(best_of("h100-sxm", "bf16")[0])
    assert any(each.startswith(HELD) for each in found.step_seconds.figure.extrapolated)
    assert {term.name for term in found.step_seconds.terms} >= {HELD}
    total = sum(term.value for term in found.step_seconds.terms)
    assert total == pytest.approx(found.step_seconds.figure.middle, rel=1e-9)
    # What formulas say is possible, and inside of the interval.
    formulas = found.step_seconds.figure.middle - next(
        term.value for term in found.step_seconds.terms if term.name == HELD
    )
    assert found.step_seconds.figure.low < formulas


@pytest.mark.slow
def test_runs_measured_here_count_for_more_than_those_of_others():
    """A cluster that reached more than anybody published is not held to less."""
    rows = []
    for micro_batch in (1, 2, 4):
        run = replace(RUN, micro_batch=micro_batch)
        seconds = LLAMA_8B.flops_per_token(8192) * run.tokens / (64 * 989e12 * 0.55)
        rows.append(row_of(MINE, run, seconds))
    known = Known(step_model(rows, prior=published_constants()))
    found = predict(TRAINING, MINE, calibration=known)
    assert found.utilisation.middle == pytest.approx(0.55, rel=0.05)
    assert not any(HELD in each for each in found.step_seconds.figure.extrapolated)


def test_the_table_of_best_runs_has_sources_and_a_chip_without_one_takes_the_best_of_all():
    for each in BEST:
        assert 0.0 < each.share < 0.7
        assert each.source
        assert each.run
    share, words = best_of("mi300x", "bf16")
    assert share == max(each.share for each in BEST)
    assert "none is published of mi300x" in words


def test_the_best_published_run_is_one_of_the_same_precision_or_says_that_it_is_not():
    # Of B200 only mixtures were published in bf16; a share of the peak of fp8 is another one.
    share, words = best_of("b200-sxm", "bf16")
    assert share == pytest.approx(0.2320)
    assert "b200-sxm in bf16, known only of mixtures of experts: 23.2 %" in words
    share, words = best_of("b200-sxm", "fp8")
    assert share == pytest.approx(0.3856)
    assert "only" not in words
    share, words = best_of("h100-sxm", "fp32")
    assert share == pytest.approx(0.4616)
    assert "h100-sxm in bf16, known only in bf16: 46.2 %" in words
    assert "known only in fp16" in best_of("v100-sxm3-32", "fp8")[1]
    # Sixteen bits have one peak, whichever they are.
    assert "only" not in best_of("v100-sxm3-32", "bf16")[1]
    assert best_of("mi300x", "fp8")[1].startswith("gb300 in fp8, of any chip, since none")


def test_structured_layers_do_not_count_operations_that_they_spare():
    from outlast.plan.configuration import Settings

    dense = predict(TRAINING, "h100x64")
    thin = replace(TRAINING, settings=Settings(tensorize_form="low_rank", tensorize_rank=0.1))
    found = predict(thin, "h100x64")
    assert found.step_seconds.figure.middle < dense.step_seconds.figure.middle
    assert found.utilisation.middle <= best_of("h100-sxm", "bf16")[0]


def test_the_cluster_of_a_run_is_where_it_ran_and_not_the_table_that_it_is_in():
    row = row_of(MINE, RUN, 1.0)
    assert belonging(row) == Belonging("h100-sxm", "mine", "Megatron-Bridge")
    assert cluster_of("h100x64").name == "h100x64"
