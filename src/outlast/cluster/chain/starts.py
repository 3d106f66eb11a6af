"""How good the chain's own predictions of starts were, and how the next ones are moved by that.

What was predicted when a link was submitted stands in the journal as it came out of the simulated
queue, uncorrected; the link's own beginning says what came true. The errors of all chains in one
folder of runs are one sample: they meet the same queue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.cluster.chain.journal import entries, of_kind
from outlast.cluster.chain.plan import chain_files
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.cluster.chain.journal import Entry
    from outlast.cluster.chain.plan import ChainFiles
    from outlast.cluster.policies.predict import Correction, StartForecast

FEWEST = 5
"""Past predictions from which on the next ones are corrected: one or two starts are an accident."""
NEWEST = 60
"""Older ones than so many are of another queue."""


@dataclass(frozen=True)
class PastStart:
    """A prediction and what came of it.

    Attributes:
        time: When it was made, seconds since the epoch.
        nodes: That the link asked for.
        wall_seconds: That it asked for.
        predicted_seconds: Wait at P10, P50 and P90, and the longest of all samples.
        waited_seconds: From when it could start to when it did.
    """

    time: float
    nodes: int
    wall_seconds: float
    predicted_seconds: tuple[float, float, float, float]
    waited_seconds: float

    @property
    def certain(self) -> bool:
        """Whether it was predicted to start at once whatever happens, which says nothing."""
        return not self.predicted_seconds[3] > 0.0


def predicted_fields(forecast: StartForecast) -> dict[str, object]:
    """A prediction as fields of the journal's entry ``chosen``."""
    import numpy as np

    from outlast.cluster.policies.predict import LEVELS

    waits = forecast.wait_seconds
    quantiles = [float(item) for item in np.quantile(waits, LEVELS)]
    told = (forecast.p10_seconds, forecast.p50_seconds, forecast.p90_seconds)
    return {
        "waits": [round(quantile, 1) for quantile in (*quantiles, float(waits.max()))],
        "told": [round(number, 1) for number in told],
    }


def past_starts(journal: Sequence[Entry]) -> list[PastStart]:
    """Predictions of one chain whose links have begun, oldest first."""
    began = {str(entry["job"]): float(entry["began"]) for entry in of_kind(journal, "started")}
    ended = {str(entry["job"]): float(entry["time"]) for entry in of_kind(journal, "ended")}
    found = []
    for entry in of_kind(journal, "chosen"):
        job, after, waits = str(entry["job"]), str(entry.get("after", "")), entry.get("waits")
        # Of a link that ended without a word nobody knows since when the next one could start.
        if job not in began or not waits or (after and after not in ended):
            continue
        ready = max(float(entry["time"]), ended.get(after, 0.0))
        p10, p50, p90, longest = (float(wait) for wait in waits)
        found.append(
            PastStart(
                time=float(entry["time"]),
                nodes=int(entry["nodes"]),
                wall_seconds=float(entry["wall_seconds"]),
                predicted_seconds=(p10, p50, p90, longest),
                waited_seconds=max(began[job] - ready, 0.0),
            )
        )
    return found


def starts_nearby(files: ChainFiles) -> list[PastStart]:
    """Predictions of this chain and of those whose runs lie beside this one, the newest `NEWEST`.

    Those that were certain to start at once are left out; so are journals that cannot be read.
    """
    try:
        journals = sorted(files.run.parent.glob(f"*/{files.path.name}/{files.journal.name}"))
    except OSError:
        journals = [files.journal]
    found: list[PastStart] = []
    for journal in journals:
        try:
            found += past_starts(entries(chain_files(journal.parent.parent)))
        except (ClusterError, KeyError, TypeError, ValueError):
            continue
    uncertain = [start for start in found if not start.certain]
    return sorted(uncertain, key=lambda start: start.time)[-NEWEST:]


def correction_of(past: Sequence[PastStart]) -> Correction | None:
    """What past errors move the next predictions by; None from fewer than `FEWEST`."""
    import numpy as np

    from outlast.cluster.policies.predict import Correction, StartForecast

    if len(past) < FEWEST:
        return None
    forecasts = [
        StartForecast(
            nodes=start.nodes,
            wall_seconds=start.wall_seconds,
            wait_seconds=np.array(start.predicted_seconds),
            p10_seconds=start.predicted_seconds[0],
            p50_seconds=start.predicted_seconds[1],
            p90_seconds=start.predicted_seconds[2],
        )
        for start in past
    ]
    return Correction.learnt(forecasts, [start.waited_seconds for start in past])


def starts_words(past: Sequence[PastStart]) -> str:
    """How predicted starts have fared, in a sentence."""
    if not past:
        return (
            f"no predicted start of this folder's runs has been seen yet; from {FEWEST} on, "
            "predictions are corrected by past errors"
        )
    count = len(past)
    early = sum(start.waited_seconds <= start.predicted_seconds[2] for start in past)
    seen = (
        f"{count} predicted start(s) of this folder's runs were seen: {early} came by the P90 that "
        "was predicted"
    )
    found = correction_of(past)
    if found is None:
        return f"{seen}; from {FEWEST} on, predictions are corrected by past errors"
    middle, late = math.exp(found.p50), math.exp(found.p90)
    return (
        f"{seen}; predictions are corrected by that (waits and 5 min times {middle:.2g} at P50, "
        f"{late:.2g} at P90)"
    )
