"""What checkpoints cost and save: intervals, tiers, bytes and seconds, as pure functions.

The planner composes these. How often to save follows from `waste`, whose functions are offered
here as well; this module adds several tiers, sizes on disk, and the summary of a whole run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

from outlast.checkpoint.waste import (
    NODE_MTBF_SECONDS,
    SLOWDOWN_BUDGET,
    Failures,
    Interval,
    SaveCost,
    budget_interval_seconds,
    choose_interval,
    daly_interval_seconds,
    expected_run_seconds,
    optimal_interval_seconds,
    require,
    waste_fraction,
    young_interval_seconds,
)
from outlast.errors import CheckpointError

__all__ = [
    "NODE_MTBF_SECONDS",
    "SLOWDOWN_BUDGET",
    "CheckpointCost",
    "Failures",
    "Interval",
    "SaveCost",
    "Sizes",
    "Tiers",
    "budget_interval_seconds",
    "checkpoint_cost",
    "choose_interval",
    "choose_tiers",
    "daly_interval_seconds",
    "expected_run_seconds",
    "optimal_interval_seconds",
    "require",
    "restore_seconds",
    "save_seconds",
    "waste_fraction",
    "young_interval_seconds",
]


@dataclass(frozen=True)
class Tiers:
    """How often each of several stores is written.

    Attributes:
        base_seconds: Wall time between two saves of the tier that saves most often.
        every: For each tier, how many base intervals apart it saves, each a multiple of those of
            the tiers before it; 0 for a tier that is not worth its cost.
        waste: Expected waste, first order.
    """

    base_seconds: float
    every: tuple[int, ...]
    waste: float


def choose_tiers(tiers: list[tuple[SaveCost, Failures]]) -> Tiers:
    """Intervals of several tiers, e.g. peer memory, local disk and shared storage.

    First order (Benoit et al. 2017, IEEE Trans. Computers 66(7): the least overhead is
    `sum sqrt(2 rate_i o_i)`; for two levels Di et al. 2016, INRIA RR-8851): the waste is
    `sum o_i / (n_i T) + rate_i (n_i T / 2 + Q_i)`; for given integers `n_i` its minimum has a
    closed form. Of the subsets of tiers, and of the integers next to the real optimum, all are
    tried. A tier that is left out hands its failures to the next one.

    Args:
        tiers: From the cheapest to the safest: what a save costs, and the failures that this tier
            survives and no tier before it does.

    Returns:
        The intervals; one tier alone gets Young's, with `every = (1,)`.
    """
    if not tiers or len(tiers) > 6:
        raise CheckpointError(f"tiers has {len(tiers)} entries: give 1 to 6")
    for index, (save, failures) in enumerate(tiers):
        require(f"tiers[{index}] overhead_seconds", save.overhead_seconds, 0.0, above=True)
        require(f"tiers[{index}] failures per_second", failures.per_second, 0.0, above=True)
    best: Tiers | None = None
    for chosen in product((True, False), repeat=len(tiers) - 1):
        used = [index for index, taken in enumerate([*chosen, True]) if taken]
        rates = [
            sum(tiers[index][1].per_second for index in range(before + 1, last + 1))
            for before, last in zip([-1, *used], used, strict=False)
        ]
        saves = [tiers[index][0] for index in used]
        delay = sum(
            rate * (tiers[index][1].recovery_seconds + tiers[index][0].latency_seconds)
            for rate, index in zip(rates, used, strict=True)
        )
        for multiples in _multiples(saves, rates):
            seconds, waste = _tiers_waste(saves, rates, multiples)
            if best is None or waste + delay < best.waste:
                every = dict(zip(used, multiples, strict=True))
                best = Tiers(
                    seconds, tuple(every.get(i, 0) for i in range(len(tiers))), waste + delay
                )
    assert best is not None
    return best


def _multiples(saves: list[SaveCost], rates: list[float]) -> list[tuple[int, ...]]:
    """Nested integers around the real optimum `n_i = sqrt(o_i rate_1 / (rate_i o_1))`."""
    candidates: list[tuple[int, ...]] = [(1,)]
    for save, rate in zip(saves[1:], rates[1:], strict=True):
        first = saves[0].overhead_seconds
        target = math.sqrt(save.overhead_seconds * rates[0] / (rate * first))
        extended: list[tuple[int, ...]] = []
        for candidate in candidates:
            factor = max(1, math.floor(target / candidate[-1]))
            extended += [(*candidate, candidate[-1] * f) for f in (factor, factor + 1)]
        candidates = extended
    return candidates


def _tiers_waste(
    saves: list[SaveCost], rates: list[float], multiples: tuple[int, ...]
) -> tuple[float, float]:
    """The best base interval for these multiples, and its waste without the recoveries."""
    overhead = sum(save.overhead_seconds / n for save, n in zip(saves, multiples, strict=True))
    loss = sum(rate * n for rate, n in zip(rates, multiples, strict=True)) / 2.0
    shortest = max(save.durable_seconds / n for save, n in zip(saves, multiples, strict=True))
    seconds = max(math.sqrt(overhead / loss), shortest)
    return seconds, overhead / seconds + loss * seconds


@dataclass(frozen=True)
class Sizes:
    """What the versions of a run occupy.

    Attributes:
        state_bytes: Size of the state in memory, all ranks together, replicas counted once.
        full_ratio: State bytes per stored byte of a version that stands alone.
        delta_ratio: The same for a version stored as its difference from the one before.
        chain_cap: Most differences in a row before the next full version; 0 for none.
        keep: Newest versions kept.
        log_bytes_per_step: What a replay log adds in each step; 0 without one.
    """

    state_bytes: float
    full_ratio: float = 1.0
    delta_ratio: float = 1.0
    chain_cap: int = 0
    keep: int = 3
    log_bytes_per_step: float = 0.0

    def __post_init__(self) -> None:
        for name, lowest in (("state_bytes", 0), ("chain_cap", 0), ("keep", 1)):
            require(name, getattr(self, name), lowest)
        require("log_bytes_per_step", self.log_bytes_per_step, 0.0)
        require("full_ratio", self.full_ratio, 0.0, above=True)
        require("delta_ratio", self.delta_ratio, 0.0, above=True)

    def chain_bytes(self, differences: int) -> float:
        """Stored bytes of a full version and the differences on top of it."""
        return self.state_bytes * (1.0 / self.full_ratio + differences / self.delta_ratio)

    def written_bytes(self, saves: int, steps: int = 0) -> float:
        """Bytes of `saves` versions, every `chain_cap + 1`-th full, and of `steps` logged steps."""
        chains, rest = divmod(saves, self.chain_cap + 1)
        written = chains * self.chain_bytes(self.chain_cap) + steps * self.log_bytes_per_step
        return written + (self.chain_bytes(rest - 1) if rest else 0.0)

    def peak_bytes(self, steps_between_saves: int = 0) -> float:
        """The most bytes stored at once.

        That is while the version after `keep` others is being published and the oldest of these is
        the last of its chain, so that the whole chain must stay; and the log since the oldest kept.
        """
        log = self.keep * steps_between_saves * self.log_bytes_per_step
        return self.written_bytes(self.chain_cap + self.keep + 1) + log


def save_seconds(
    sizes: Sizes, encode_bytes_per_s: float, write_bytes_per_s: float, *, full: bool = True
) -> float:
    """Seconds to encode and write one version; the two overlap, so the slower one counts.

    Args:
        sizes: Sizes and ratios.
        encode_bytes_per_s: State bytes encoded per second, all ranks together.
        write_bytes_per_s: Stored bytes written and flushed per second, all ranks together.
        full: Whether the version stands alone.
    """
    require("encode_bytes_per_s", encode_bytes_per_s, 0.0, above=True)
    require("write_bytes_per_s", write_bytes_per_s, 0.0, above=True)
    stored = sizes.state_bytes / (sizes.full_ratio if full else sizes.delta_ratio)
    return max(sizes.state_bytes / encode_bytes_per_s, stored / write_bytes_per_s)


def restore_seconds(
    sizes: Sizes,
    read_bytes_per_s: float,
    decode_bytes_per_s: float,
    *,
    chain_length: int = 0,
    replayed_steps: int = 0,
    replay_seconds_per_step: float = 0.0,
) -> float:
    """Seconds to load a version with `chain_length` differences, then to replay logged steps.

    Reading and decoding overlap; the steps are replayed one after the other.

    Args:
        sizes: Sizes and ratios.
        read_bytes_per_s: Stored bytes read per second, all ranks together.
        decode_bytes_per_s: State bytes decoded per second, all ranks together.
        chain_length: Differences on top of the full version.
        replayed_steps: Logged steps since the version.
        replay_seconds_per_step: To apply one of them, without reading it.
    """
    require("read_bytes_per_s", read_bytes_per_s, 0.0, above=True)
    require("decode_bytes_per_s", decode_bytes_per_s, 0.0, above=True)
    for name, count in (("chain_length", chain_length), ("replayed_steps", replayed_steps)):
        require(name, count, 0)
    require("replay_seconds_per_step", replay_seconds_per_step, 0.0)
    read = sizes.chain_bytes(chain_length) / read_bytes_per_s
    decode = (1 + chain_length) * sizes.state_bytes / decode_bytes_per_s
    log = sizes.log_bytes_per_step / read_bytes_per_s
    return max(read, decode) + replayed_steps * (log + replay_seconds_per_step)


@dataclass(frozen=True)
class CheckpointCost:
    """What a run pays for its checkpoints and its failures; all predicted.

    Attributes:
        interval_seconds: Wall time from save to save.
        saves: Saves in a run without failures.
        failures: Expected failures during the run.
        save_overhead_seconds: By how much the saves lengthen the run.
        failure_seconds: Expected seconds of repeated work, restarts and restores.
        run_seconds: Expected wall time: the work and the two above.
        waste_fraction: Share of `run_seconds` that is not work.
        lost_seconds_per_failure: Expected work repeated after a failure, first order.
        written_bytes: Bytes written without failures.
        peak_bytes: The most bytes stored at once.
    """

    interval_seconds: float
    saves: int
    failures: float
    save_overhead_seconds: float
    failure_seconds: float
    run_seconds: float
    waste_fraction: float
    lost_seconds_per_failure: float
    written_bytes: float
    peak_bytes: float


def checkpoint_cost(
    work_seconds: float,
    step_seconds: float,
    interval_seconds: float,
    *,
    save: SaveCost,
    failures: Failures,
    sizes: Sizes,
) -> CheckpointCost:
    """Sums up a run of `work_seconds` in steps of `step_seconds`, saved every `interval_seconds`.

    Raises:
        CheckpointError: For an interval that is shorter than a save.
    """
    require("step_seconds", step_seconds, 0.0, above=True)
    run = expected_run_seconds(work_seconds, interval_seconds, save, failures)
    progress = interval_seconds - save.overhead_seconds
    if progress <= 0.0:
        raise CheckpointError(
            f"interval_seconds = {interval_seconds:g} leaves no time for work: "
            f"give more than {save.overhead_seconds:g}"
        )
    saves = math.floor(work_seconds / progress * (1.0 + 1e-12))
    overhead = saves * save.overhead_seconds
    between = 0 if interval_seconds == math.inf else math.ceil(progress / step_seconds)
    return CheckpointCost(
        interval_seconds=interval_seconds,
        saves=saves,
        failures=failures.per_second * run if math.isfinite(run) else math.inf,
        save_overhead_seconds=overhead,
        failure_seconds=max(0.0, run - work_seconds - overhead),
        run_seconds=run,
        waste_fraction=waste_fraction(interval_seconds, save, failures),
        lost_seconds_per_failure=interval_seconds / 2.0 + save.latency_seconds,
        written_bytes=sizes.written_bytes(saves, round(work_seconds / step_seconds)),
        peak_bytes=sizes.peak_bytes(between),
    )
