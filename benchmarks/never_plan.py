"""The planner where it knows nothing: unseen clusters, known names, utilisation, ranges.

Staged on the shipped constants and on a calibration of one made-up cluster; counted is every
answer that claims more than was measured, or that is no answer at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from harness import Bar, at_most

from outlast.errors import OutlastError
from outlast.hardware import devices
from outlast.plan import Configuration, Training, cluster_of, predict, published, search
from outlast.plan.api import published_constants
from outlast.plan.cluster_file import shipped_clusters
from outlast.plan.constraints import FRAMEWORKS
from outlast.plan.estimate import Interval
from outlast.plan.huggingface import MODELS
from outlast.plan.memory_fit import Known
from outlast.plan.prediction import Estimate
from outlast.plan.rows import Row
from outlast.plan.step_model import step_model

CALIBRATED_AS = {
    name: kind.calibrated_as
    for key, kind in FRAMEWORKS.items()
    for name in (key, *kind.also)
    if kind.calibrated_as
}
"""Names that published runs have, by the names of frameworks."""
Check: TypeAlias = tuple[bool, str]
"""Whether it holds, and what is wrong where it does not."""
FLAG = "not calibrated on this cluster"
BEST = {("h100x64", "bf16"): 0.462, ("h100x64", "fp8"): 0.436, ("a100x64", "bf16"): 0.642}
"""Largest shares of the peak in the published table, as MosaicML and NVIDIA state them."""
RUN = Configuration(data=64, sequence=8192, micro_batch=1, batch=256, sharding="parameters")
TRAINING = Training(
    model=published("llama-3-8b"), run=RUN, tokens=1e11, framework="nemo", unique_tokens=1e12
)


def confident() -> Bar:
    """Case 11."""
    checks = [*_unseen(), *_calibrated(), *_names(), *_recommended(), *_ranges()]
    wrong = [what for holds, what in checks if not holds]
    name = "planner: claims of what was never measured"
    what = f"unseen clusters, {len(CALIBRATED_AS)} names, recommendations, ranges"
    return at_most(name, len(wrong), f"of {len(checks)} checks", 0, wrong[0] if wrong else what)


def _flagged(found: Estimate) -> bool:
    """Every figure of the time says that nothing of the cluster was measured."""
    figures = (found.step_seconds.figure, found.tokens_per_s, found.finish_seconds)
    return all(any(FLAG in phrase for phrase in each.extrapolated) for each in figures)


def _half(interval: Interval) -> float:
    return float(np.log(interval.high / interval.middle))


def _unseen() -> Iterator[Check]:
    """Known frameworks on known chips, on a cluster of which nobody measured anything."""
    for framework in FRAMEWORKS:
        sharding = "optimizer" if framework == "nanotron" else "parameters"
        found = predict(
            replace(TRAINING, framework=framework, run=replace(RUN, sharding=sharding)), "h100x64"
        )
        yield (_flagged(found), f"{framework} on h100x64 is said to be calibrated")
        wide = _half(found.step_seconds.figure)
        yield (wide > 0.16, f"{framework} on h100x64 is known to {wide:.2f}")


def _calibrated() -> Iterator[Check]:
    """Runs of one cluster make that cluster calibrated, and no other."""
    here, there = (replace(cluster_of("h100x64"), name=name) for name in ("mine", "yours"))
    plain = predict(TRAINING, here)
    rows = []
    for micro_batch in (1, 2):
        for recompute in ("none", "full"):
            run = replace(RUN, micro_batch=micro_batch, recompute=recompute)
            seconds = predict(replace(TRAINING, run=run), here).step_seconds.figure.middle
            rows.append(
                Row(
                    name=f"{micro_batch} {recompute}",
                    model=TRAINING.model,
                    run=run,
                    cluster=here,
                    source=f"runs/{micro_batch}-{recompute}",
                    framework="Megatron-Bridge",
                    step_seconds=1.3 * seconds,
                )
            )
    known = Known(step_model(rows, prior=published_constants()))
    found, other = (predict(TRAINING, each, calibration=known) for each in (here, there))
    yield (not _flagged(found), "the measured cluster is not calibrated")
    yield (_flagged(other), "runs of one cluster calibrate another")
    middle = found.step_seconds.figure.middle / plain.step_seconds.figure.middle
    yield (abs(middle - 1.3) < 0.1, f"measured 1.3 times, predicted {middle:.2f}")
    narrow, wide = _half(found.step_seconds.figure), _half(other.step_seconds.figure)
    yield (narrow < wide, "the unseen cluster is known as well as the measured one")


def _names() -> Iterator[Check]:
    """Every name is predicted or refused in a sentence."""
    small = replace(RUN, data=8, batch=64, sequence=2048)
    frameworks = {*CALIBRATED_AS, *CALIBRATED_AS.values(), *FRAMEWORKS}
    for name in sorted(frameworks):
        one = replace(small, sharding="none")
        yield from _answered(name, lambda name=name, one=one: _predicted("h100x8", one, name))
        yield (name in _known(name), f"{name} is refused")
    for cluster in (*shipped_clusters(), *(f"{each.key}x8" for each in devices()), "here"):
        for precision in ("fp32", "fp16", "bf16", "fp8"):
            run = replace(small, precision=precision)
            yield from _answered(cluster, lambda c=cluster, run=run: _predicted(c, run, "any"))
    for model in MODELS:
        training = replace(TRAINING, model=published(model), run=small, framework="any")
        yield from _answered(model, lambda each=training: predict(each, "h100x8"))


def _known(name: str) -> str:
    try:
        return f"{name} {replace(TRAINING, framework=name).framework}"
    except OutlastError:
        return ""


def _predicted(cluster: str, run: Configuration, framework: str) -> Estimate:
    found = cluster_of(cluster)
    run = replace(run, data=found.devices, batch=8 * found.devices)
    return predict(replace(TRAINING, run=run, framework=framework), found)


def _answered(what: str, ask: Callable[[], object]) -> Iterator[Check]:
    try:
        ask()
    except OutlastError as refusal:
        yield (bool(str(refusal)), f"{what}: an empty refusal")
    except Exception as error:
        yield (False, f"{what}: {type(error).__name__}: {error}")
    else:
        yield (True, what)


def _recommended() -> Iterator[Check]:
    """Nothing that a search recommends uses more of a chip than anybody published."""
    for (cluster, precision), best in BEST.items():
        for framework in ("any", "nemo", "torchtitan"):
            run = replace(RUN, precision=precision)
            training = replace(TRAINING, run=run, framework=framework)
            front = search(training, cluster)
            first = front.candidate(int(np.argmin(front.objectives.hours)))
            found = predict(replace(training, run=first.configuration), cluster)
            share = found.utilisation.middle
            what = f"{framework} on {cluster} in {precision} is recommended with MFU {share:.3f}"
            yield (share <= best, what)


def _ranges() -> Iterator[Check]:
    """What lies beyond the measured runs is said, with the value and what was measured."""
    far = {
        "sequence": replace(RUN, sequence=131072, batch=64),
        "devices": replace(RUN, data=16384, batch=16384),
    }
    for name, run in far.items():
        cluster = f"h100x{run.devices}"
        found = predict(replace(TRAINING, run=run), cluster).step_seconds.figure.extrapolated
        value = getattr(run, name)
        said = any("outside measured range" in each and str(value) in each for each in found)
        yield (said, f"{name} = {value} is not said to be beyond what was measured")
    mixture = replace(TRAINING, model=published("qwen3-30b-a3b"), framework="nanotron")
    run = replace(RUN, sharding="optimizer")
    found = predict(replace(mixture, run=run), "h100x64").step_seconds.figure.extrapolated
    yield (any("mixtures" in each for each in found), "mixtures of nanotron are known")


CASES: dict[int, Callable[[], Bar]] = {11: confident}
