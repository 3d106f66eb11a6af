"""Rows that share a class of links and are all too slow: the link is, not the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from outlast.plan.calibration.rows import Row
from outlast.plan.cases import Array

_FEW = 4
_FACTOR = 1.5
_SIGMAS = 4.0


def link_classes(row: Row) -> frozenset[str]:
    """What of a run goes over the network: ranks are placed tensor first, then context.

    Returns:
        Of "tensor", "context", "pipeline", "data"; empty where all is inside the fast domain.
    """
    run, domain = row.run, row.cluster.fast_domain
    found = set()
    if run.tensor > domain:
        found.add("tensor")
    if run.context > 1 and run.tensor * run.context > domain:
        found.add("context")
    if run.devices > domain:
        found |= {name for name in ("pipeline", "data") if getattr(run, name) > 1}
    return frozenset(found)


def slow_links(rows: Sequence[Row], away: Array) -> Iterator[tuple[int, str]]:
    """Rows of a class of links that is slow on their cluster.

    Within one cluster, the rows that use the class are compared with those that do not: a
    difference of medians of more than 1.5 times and 4 robust standard errors is a slow link.

    Args:
        rows: (n,).
        away: (n,) log of measured over predicted seconds; NaN to leave a row out.

    Yields:
        Index and sentence of each such row.
    """
    clusters = np.array([f"{row.source}/{row.cluster.name}/{row.chip}" for row in rows])
    classes = [link_classes(row) for row in rows]
    for cluster in np.unique(clusters):
        here = (clusters == cluster) & np.isfinite(away)
        using = {
            name: np.array([name in klass for klass in classes]) & here
            for name in ("tensor", "context", "pipeline", "data")
        }
        scores = {name: _score(away[uses], away[here & ~uses]) for name, uses in using.items()}
        name = max(scores, key=lambda score: scores[score])
        if scores[name] <= _SIGMAS:
            continue
        uses = using[name]
        usual = float(np.median(away[here & ~uses]))
        shift = float(np.median(away[uses])) - usual
        for index in np.flatnonzero(uses & (away > usual + shift / 2)).tolist():
            text = (
                f"row {rows[index].name}: {name} ranks over the network of "
                f"{rows[index].cluster.name} take {math.exp(shift):.1f} times as long as its other "
                "rows suggest; measure the link or correct fabric_bytes_per_s"
            )
            yield index, text


def _score(some: Array, others: Array) -> float:
    """Difference of medians in robust standard errors; 0 where it is small or rows are few."""
    if min(some.size, others.size) < _FEW:
        return 0.0
    shift = float(np.median(some) - np.median(others))
    if shift < math.log(_FACTOR):
        return 0.0
    both = np.concatenate([some - np.median(some), others - np.median(others)])
    spread = 1.4826 * float(np.median(np.abs(both)))
    # The standard error of a median is 1.2533 times that of a mean.
    error = 1.2533 * max(spread, 0.01) * math.sqrt(1 / some.size + 1 / others.size)
    return shift / error
