"""The best utilisation (MFU) that anybody published of a chip: no prediction says more.

Formulas with fitted constants may promise what no run has shown. Where they do, a step is held to
the time that the best published run of that chip would take, as a term of its own, and the figures
carry a phrase that says so. Runs of the cluster at hand that reached more count instead.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np

from outlast.plan.calibration.groups import interval_group
from outlast.plan.terms.part import Part

if TYPE_CHECKING:
    from outlast.plan.cases import Array, Cases
    from outlast.plan.context import Context

HELD = "held to the best published MFU"
"""Name of the term."""
TABLE = "best_utilisation.toml"
_ALIKE: Mapping[str, tuple[str, ...]] = {
    "bf16": ("bf16", "fp16"),
    "fp16": ("bf16", "fp16"),
    "fp8": ("fp8",),
    "fp32": ("fp32",),
}
"""Precisions with one peak."""


@dataclass(frozen=True, slots=True)
class Best:
    """The most that a published run reached.

    Attributes:
        chip: Kind of the devices.
        precision: Of the products.
        share: Model FLOPs per second over the peak, attention in full, no recomputation.
        dense: Of a dense model; else of a mixture of experts, since no dense run is known.
        run: What was run.
        source: Where it stands.
    """

    chip: str
    precision: str
    share: float
    dense: bool
    run: str
    source: str


@cache
def published_best() -> tuple[Best, ...]:
    """The table of best published utilisations."""
    text = (files("outlast.plan") / TABLE).read_text(encoding="utf-8")
    return tuple(Best(**entry) for entry in tomllib.loads(text)["best"])


def best_of(chip: str, precision: str) -> tuple[float, str]:
    """The best published share of the peak of a chip, and in words whose it is.

    Runs in a precision of the same peak count first, and dense ones before mixtures of experts; of
    a chip that has none, all of its runs do; of one of which nobody published any, those of all
    chips. Words say which of these it is.
    """
    known = published_best()
    alike = _ALIKE.get(precision, (precision,))
    own = [best for best in known if best.chip == chip]
    same = [best for best in own or known if best.precision in alike]
    dense = [best for best in same if best.dense]
    best = max(dense or same or own or known, key=lambda best: best.share)
    remarks = []
    if not own:
        remarks.append(f"of any chip, since none is published of {chip}")
    if not same:
        remarks.append(f"known only in {best.precision}")
    elif not dense:
        remarks.append("known only of mixtures of experts")
    whose = ", ".join([f"{best.chip} in {best.precision}", *remarks])
    return best.share, f"{whose}: {100 * best.share:.1f} %, {best.run}"


def held(context: Context, layouts: Cases, parts: Sequence[Part]) -> tuple[Part, ...]:
    """The terms of a step, with what holds it to the best published utilisation.

    Args:
        context: Model, cluster and calibration.
        layouts: (cases,).
        parts: Of the plain step.
    """
    share = _limits(context, layouts)
    if share is None:
        return tuple(parts)
    total: Array = np.zeros(1)
    for part in parts:
        total = total + part.values
    flops = context.model.flops_per_token(1) + 12.0 * (
        context.model.layers * context.model.query_width * (layouts.sequence - 1.0)
    )
    least = flops * layouts.batch * layouts.sequence
    least = least / (layouts.devices * layouts.peak_flop_per_s * share)
    missing = np.maximum(least - total, 0.0)
    if not missing.any():
        return tuple(parts)
    text = "max(model FLOPs / (devices * peak * best published MFU) - all other terms, 0)"
    return (*parts, Part(HELD, missing, text, {"best published MFU": share}, (), TABLE))


def why_held(context: Context, layouts: Cases) -> tuple[str, ...]:
    """A phrase where the first case is held."""
    parts = context.step.parts(layouts, context.whose)
    found = [part for part in held(context, layouts, parts) if part.name == HELD]
    if not found or not np.ravel(found[0].values)[0] > 0.0:
        return ()
    precision = "bf16" if np.ravel(layouts.half)[0] > 0.0 else "fp32"
    if np.ravel(layouts.quantized)[0] > 0.0:
        precision = "fp8"
    return (f"{HELD} ({best_of(context.cluster.device, precision)[1]})",)


def _limits(context: Context, layouts: Cases) -> Array | None:
    """(cases,) or (1,) largest believable shares of the peak; None where runs are measured here.

    The peak of processors is a rate that was measured of products, which others come close to.
    """
    whose = context.whose
    mixture = context.model.experts > 1
    calibrated = context.step.calibrated(whose, mixture=mixture)
    if calibrated and context.cluster.processor:
        return None
    reached: Mapping[str, float] = {}
    if calibrated:
        group = interval_group(whose.framework, whose.chip, whose.cluster, mixture=mixture)
        place = context.step.places.get(group)
        reached = {} if place is None else place.utilisation
    shares = {
        name: max(best_of(whose.chip, name)[0], *(reached.get(item, 0.0) for item in _ALIKE[name]))
        for name in ("fp8", "bf16", "fp32")
    }
    half = np.where(layouts.half > 0.0, shares["bf16"], shares["fp32"])
    limits: Array = np.where(layouts.quantized > 0.0, shares["fp8"], half)
    return limits
