"""Workloads of any size out of a published model, for machines whose logs cannot be had.

Lublin and Feitelson, "The workload on parallel supercomputers: modeling the characteristics of
rigid jobs", J. Parallel Distrib. Comput. 63 (2003). Sizes: serial, a power of two or neither, with
two-stage uniform logarithms. Run times: hyper-gamma logarithms, whose mixture leans to the longer
part for larger jobs. Arrivals: gamma logarithms of the gaps at rush hours, stretched by a daily
cycle. Requested times are no part of that model; here they over-estimate as users do (Tsafrir,
Etsion and Feitelson, "Modeling user runtime estimates using scheduling simulations", JSSPP 2005):
run time over request is uniform, some jobs run into their limit, and requests are round figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from outlast.cluster.workload.jobs import Array, Integers, Workload
from outlast.errors import ClusterError

_BUCKETS = 48
_BUCKET_SECONDS = 1800.0
_DAY_STARTS = 11
"""First bucket of the fitted day: its quietest hour, half past five in the morning."""
_LONGEST_GAP = 13.0
"""Logarithm of the longest gap at rush hours that the model draws."""
_FITTED_NODES = 128
_ROUNDS = 4

_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0
ROUND_LIMITS = np.array(
    [5 * _MINUTE, 10 * _MINUTE, 15 * _MINUTE, 20 * _MINUTE, 30 * _MINUTE, 45 * _MINUTE]
    + [hours * _HOUR for hours in (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 15, 18)]
    + [days * _DAY for days in (1, 1.5, 2, 3, 4, 5, 7, 10, 14)]
)
"""Wall times that users ask for, in seconds; a request is rounded up to one of them."""


@dataclass(frozen=True, kw_only=True)
class LublinModel:
    """Constants of the model; the defaults are the published fit to all jobs of four machines.

    Attributes:
        serial: Share of jobs on one node.
        power_of_two: Share of jobs whose size is a power of two above one.
        smallest: Logarithm (base 2) of the smallest parallel job; its 0.2 below 1 give the
            smallest size its full share after rounding.
        middle_below_largest: Where the two uniform stages meet, below log2 of the machine.
        lower_stage: Share of parallel jobs in the lower stage.
        short: Shape and scale of the logarithm of short run times.
        long: Shape and scale of the logarithm of long run times.
        short_share: Slope per node (of a machine of 128) and intercept of the share of short jobs.
        longest: Logarithm of the longest run time, 45 h.
        gap: Shape and scale of the logarithm of the gap between arrivals at rush hours.
        cycle: Shape and scale of the day's arrivals, in half hours.
        all_day: Factor on the gap's shape, from rush hours to the whole day.
    """

    serial: float = 0.244
    power_of_two: float = 0.576
    smallest: float = 0.8
    middle_below_largest: float = 2.5
    lower_stage: float = 0.86
    short: tuple[float, float] = (4.2, 0.94)
    long: tuple[float, float] = (312.0, 0.03)
    short_share: tuple[float, float] = (-0.0054, 0.78)
    longest: float = 12.0
    gap: tuple[float, float] = (10.2303, 0.4871)
    cycle: tuple[float, float] = (8.1737, 3.9631)
    all_day: float = 1.0225


def lublin(
    jobs: int,
    nodes: int,
    *,
    load: float | None = None,
    seed: int = 0,
    longest_limit_seconds: float = math.inf,
    at_limit: float = 0.1,
    model: LublinModel | None = None,
) -> Workload:
    """A workload for a machine.

    Args:
        jobs: How many.
        nodes: Of the machine.
        load: Work per second and node, reached by stretching the gaps between arrivals (within a
            few per cent where the workload is but some days long); None for the model's own.
        seed: The same jobs for the same seed.
        longest_limit_seconds: The queue's MaxTime; longer jobs are cut to it.
        at_limit: Share of jobs that are ended by their limit.
        model: Other constants.

    Raises:
        ClusterError: `jobs` or `nodes` below 1, or shares outside 0 to 1.
    """
    if jobs < 1 or nodes < 1:
        raise ClusterError(f"jobs = {jobs} and nodes = {nodes} must be at least 1")
    if not 0 <= at_limit <= 1:
        raise ClusterError(f"at_limit = {at_limit:g} must lie in 0 to 1")
    if not longest_limit_seconds > 0:
        raise ClusterError(f"longest_limit_seconds = {longest_limit_seconds:g} must be above 0")
    model = model or LublinModel()
    source = np.random.default_rng(seed)
    paid = _gaps(jobs, model, source)
    sizes = _sizes(jobs, nodes, model, source)
    runs = np.minimum(_run_seconds(sizes, nodes, model, source), longest_limit_seconds)
    limits, runs = _requests(runs, longest_limit_seconds, at_limit, source)
    found = Workload(
        submit_seconds=_arrivals(paid, model),
        nodes=sizes,
        limit_seconds=limits,
        run_seconds=runs,
        machine_nodes=nodes,
        name=f"lublin-{seed}",
    )
    if load is None:
        return found
    for _ in range(_ROUNDS):  # the budget is stretched, not the clock: the daily cycle stays
        paid = paid * (found.at_load(load).submit_seconds[-1] / found.submit_seconds[-1])
        found = replace(found, submit_seconds=_arrivals(paid, model))
    return found


def _sizes(jobs: int, nodes: int, model: LublinModel, source: np.random.Generator) -> Integers:
    largest = math.log2(nodes)
    smallest = min(model.smallest, largest)
    middle = max(smallest, largest - model.middle_below_largest)
    kind = source.random(jobs)
    lower = source.random(jobs) < model.lower_stage
    low, high = np.where(lower, smallest, middle), np.where(lower, middle, largest)
    logarithm = source.uniform(low, high)
    round_sizes = kind <= model.serial + model.power_of_two
    logarithm = np.where(round_sizes, np.floor(logarithm + 0.5), logarithm)
    sizes = np.floor(2.0**logarithm + 0.5).astype(np.int64)
    return np.where(kind <= model.serial, 1, np.clip(sizes, 1, nodes))


def _run_seconds(
    sizes: Integers, nodes: int, model: LublinModel, source: np.random.Generator
) -> Array:
    slope, intercept = model.short_share
    # The fit is to machines of about 128 nodes: what matters is a job's part of its machine.
    fitted = sizes * min(1.0, _FITTED_NODES / nodes)
    short = source.random(len(sizes)) < np.clip(slope * fitted + intercept, 0.0, 1.0)
    shape = np.where(short, model.short[0], model.long[0])
    scale = np.where(short, model.short[1], model.long[1])
    logarithm = source.gamma(shape, scale)
    while np.any(again := logarithm > model.longest):
        logarithm[again] = source.gamma(shape[again], scale[again])
    return np.maximum(1.0, np.floor(np.exp(logarithm)))


def _gaps(jobs: int, model: LublinModel, source: np.random.Generator) -> Array:
    """What all gaps up to each arrival cost, in mean half hours."""
    shape, scale = model.gap
    logarithm = source.gamma(shape * model.all_day, scale, jobs)
    while np.any(again := logarithm > _LONGEST_GAP):
        logarithm[again] = source.gamma(shape * model.all_day, scale, int(again.sum()))
    return np.cumsum(np.exp(logarithm)) / _BUCKET_SECONDS


def _arrivals(paid: Array, model: LublinModel) -> Array:
    """Gaps are paid out of a day's budget: half hours with more arrivals pass more slowly."""
    from scipy.special import gammainc

    numbers, spread = model.cycle
    edges = np.arange(_DAY_STARTS, _BUCKETS + _DAY_STARTS + 1) - 0.5
    share = np.diff(gammainc(numbers, edges / spread))
    budget = np.empty(_BUCKETS)
    budget[(np.arange(_DAY_STARTS, _BUCKETS + _DAY_STARTS) - 1) % _BUCKETS] = share / share.mean()
    spent = np.concatenate(([0.0], np.cumsum(budget)))
    days, rest = np.divmod(paid, _BUCKETS)
    within = np.interp(rest, spent, np.arange(_BUCKETS + 1) * _BUCKET_SECONDS)
    found: Array = days * _DAY + within
    return np.maximum.accumulate(found)


def _requests(
    runs: Array, longest: float, at_limit: float, source: np.random.Generator
) -> tuple[Array, Array]:
    """Requested times, and run times of which some go on beyond them."""
    used = 1.0 - source.random(len(runs))
    asked = np.where(source.random(len(runs)) < at_limit, runs, runs / used)
    place = np.searchsorted(ROUND_LIMITS, asked)
    longest_round = ROUND_LIMITS[-1]
    rounded = np.where(
        asked > longest_round, longest_round, ROUND_LIMITS[np.minimum(place, len(ROUND_LIMITS) - 1)]
    )
    limits = np.minimum(rounded, longest)
    ended = asked == runs
    return limits, np.where(ended, np.maximum(limits, runs), runs)
