"""Gradient coding: step times, exactness, stability, decoding, and time to a loss.

    python benchmarks/coding.py [--quick] [--json FILE]

Real processes compute real gradients; every layer also sleeps, and slow processes sleep longer
(`coding_workload`). The same delays are drawn for every scheme. A step is measured on rank 0 from a
barrier to the end of the update; figures are medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from coding_curves import curve_bars
from coding_stability import stability_bars
from coding_workload import SCHEMES, Course, Setting, alternate, on_ranks, train
from harness import Bar, arguments, at_most, median, publish

from outlast.coding import (
    BernoulliCode,
    FractionalRepetition,
    GradientCode,
    GraphCode,
    SoftDesign,
    SymmetricDesign,
)
from outlast.coding.assignment import spread
from outlast.coding.delays import Delays, Markov, ShiftedExponential, Slow, sample
from outlast.coding.simulate import cover, wait_all

CHUNKS, COPIES = 8, 3
WAIT, COVERAGE = "wait for all (DDP)", "micro-coverage"
DROP = "drop the slowest and rescale"
LOSSY = (DROP, "deadline per micro-batch (DropCompute)")


@dataclass(frozen=True)
class Pareto:
    """Slowdown of at least 1 with P(slowdown > x) = x^-shape, anew for every worker and step."""

    shape: float

    def draw(self, shape: tuple[int, int, int], generator: np.random.Generator) -> Delays:
        """Delays of shape (draws, steps, workers)."""
        slowdown = 1.0 + generator.pareto(self.shape, shape)
        return Delays(np.zeros(shape), slowdown, np.ones(shape))


@dataclass(frozen=True)
class Additive:
    """An exponential wait of so many seconds before the first chunk, however many follow."""

    scale: float

    def draw(self, shape: tuple[int, int, int], generator: np.random.Generator) -> Delays:
        """Delays of shape (draws, steps, workers)."""
        return Delays(generator.exponential(self.scale, shape), np.ones(shape), np.ones(shape))


def simulated(bar: Bar) -> Bar:
    """The same bar, marked as a simulation's."""
    return replace(bar, kind="simulated")


def reported(name: str, figure: float, unit: str, peer: str, kind: str = "measured") -> Bar:
    """A figure without a bar."""
    return Bar(name, round(figure, 4), unit, "reported", True, peer, kind)


def simulated_bars(quick: bool) -> Iterator[Bar]:
    """Coverage of 240 workers, and that it is never slower than waiting."""
    draws = 40 if quick else 400
    delays = sample(Slow(0.05, 10.0), draws, 240, seed=1)
    held = spread(240, CHUNKS, COPIES, seed=0)
    steps = cover(held, delays, 1 / CHUNKS)
    peer = "ideal: nobody slow (uncoded 10, one static backup 9.5 published in the field note)"
    name = "n 240, 8 micro-batches, 3 copies, 5 % 10x slow: median step"
    yield simulated(at_most(name, float(np.median(steps.seconds)), "x ideal", 1.28, peer))
    for copies in (2, 4):
        other = cover(spread(240, CHUNKS, copies, seed=0), delays, 1 / CHUNKS)
        yield reported(
            f"the same with {copies} copies", float(np.median(other.seconds)), "x ideal", peer,
            "simulated",
        )  # fmt: skip
    uncoded = float(np.median(wait_all(delays, 1.0).seconds))
    yield reported("the same, waiting for all", uncoded, "x ideal", "nobody slow", "simulated")
    worst = 0.0
    models = [ShiftedExponential(0.5), Pareto(1.5), Slow(0.1, 10.0), Markov(0.1, 0.95, 10.0)]
    for model in [*models, Additive(0.5)]:
        delays = sample(model, 50 if quick else 500, 24, seed=2)
        steps = cover(spread(24, CHUNKS, COPIES, seed=0), delays, 1 / CHUNKS)
        worst = max(worst, float(np.max(steps.seconds / wait_all(delays, 1.0).seconds.ravel())))
    name = "coverage / waiting for all, worst of all draws of 5 delay models, n 24"
    yield simulated(at_most(name, worst, "of its time", 1.0 + 1e-9, "the same draw, uncoded"))


def quiet_bars(quick: bool) -> Iterator[Bar]:
    """Nobody slow, against DDP, in turns."""
    for chunk_seconds, pairs in ((0.05, 40), (0.2, 10)):
        setting = Setting(COVERAGE, np.ones((1, 8)), CHUNKS, chunk_seconds)
        plain, coded, worst = on_ranks(8, alternate, setting, 4 if quick else pairs)[0]
        ratio = median([ours / theirs for ours, theirs in zip(coded, plain, strict=True)])
        name = f"nobody slow, 8 processes, micro-batches of {chunk_seconds:g} s: coverage / DDP"
        yield at_most(name, ratio, "of its time", 1.01, "DDP, which overlaps its all-reduce")
        yield at_most("its gradient against DDP's", worst, "relative", 1e-6, "DDP, fp32")


def realised(quick: bool) -> Iterator[Bar]:
    """Steps of real processes against the simulation of the same delays."""
    for workers, chunk_seconds in ((8, 0.05),) if quick else ((8, 0.05), (16, 0.1)):
        steps = 10 if quick else 30
        drawn = sample(Slow(0.05, 10.0), 1, workers, steps=400, seed=3).slowdown[0]
        # Steps in which somebody is slow: the others are measured by `quiet_bars`.
        slow = drawn[(drawn > 1).any(axis=1)][:steps]
        setting = Setting(COVERAGE, np.concatenate([np.ones((4, workers)), slow]), CHUNKS,
                          chunk_seconds, copies=COPIES)  # fmt: skip
        course: Course = on_ranks(workers, train, setting)[0]
        # A chunk's time at slowdown 1 includes its arithmetic and its claim.
        chunk = median(course.seconds[1:4]) / CHUNKS
        shape = (1, len(slow), workers)
        delays = Delays(np.zeros(shape), slow[None], np.ones(shape))
        foreseen = cover(spread(workers, CHUNKS, COPIES), delays, chunk).seconds
        real = median(course.seconds[4:])
        expected = float(np.median(foreseen))
        what = f"{workers} processes, 8 micro-batches, 3 copies, somebody 10x slow"
        yield reported(f"{what}: median step", real / (chunk * CHUNKS), "x ideal", "nobody slow")
        yield at_most(
            f"{what}: step / its simulation, deviation from 1",
            abs(real / expected - 1.0),
            "",
            0.15,
            f"simulated {expected / (chunk * CHUNKS):.3f} x ideal",
        )


def draw_bars(quick: bool) -> Iterator[Bar]:
    """Coverage and waiting on the same draws of milder delays."""
    steps = 4 if quick else 15
    for label, model in (
        ("1 + Exp(0.5)", ShiftedExponential(0.5)),
        ("Pareto 2", Pareto(2.0)),
    ):
        slowdown = np.minimum(sample(model, 1, 8, steps=steps, seed=4).slowdown[0], 6.0)
        slowdown = np.concatenate([np.ones((1, 8)), slowdown])
        setting = Setting(WAIT, slowdown, CHUNKS, 0.05)
        waiting = on_ranks(8, train, setting)[0].seconds[1:]
        covered = on_ranks(8, train, replace(setting, scheme=COVERAGE))[0].seconds[1:]
        ratios = [ours / theirs for ours, theirs in zip(covered, waiting, strict=True)]
        yield at_most(
            f"{label}, 8 processes: coverage / DDP, worst step", max(ratios), "of its time", 1.05,
            "DDP with the same delays; 5 % for claims and noise",
        )  # fmt: skip
        yield reported(f"{label}: median step", median(ratios), "of its time", "the same")


def loss_bars(quick: bool) -> Iterator[Bar]:
    """Time to the same loss at equal tokens, one worker persistently slow."""
    workers, chunks, chunk_seconds = 8, CHUNKS, 0.02
    steps = 6 if quick else 50
    # Schemes that lose samples need more steps.
    longer = steps * 3 // 2
    slowdown = np.ones((longer, workers))
    slowdown[:, -1] = sample(Markov(0.9, 0.98, 10.0), 1, 1, steps=longer, seed=5).slowdown[0, :, 0]
    for sites in (False, True):
        kind = "one site's data differ" if sites else "equal data"
        setting = Setting(
            WAIT, slowdown[:steps], chunks, chunk_seconds, sites=sites, every=2, copies=COPIES
        )
        courses = {
            scheme: on_ranks(
                workers,
                train,
                replace(setting, scheme=scheme, slowdown=slowdown[: longer if lossy else steps]),
            )[0]
            for scheme, lossy in ((each, each in LOSSY) for each in SCHEMES)
        }
        target = courses[WAIT].losses[-1][1] * 1.002
        for scheme, course in courses.items():
            name = f"time to wait-all's final loss, {kind}: {scheme}"
            yield _time_to(course, target, name, courses[WAIT])
        own = _seconds_to(courses[COVERAGE], target)
        for scheme in (WAIT, DROP):
            theirs = _seconds_to(courses[scheme], target)
            never = theirs == float("inf")
            # Who never got there has taken longer than its whole run.
            ratio = own / (sum(courses[scheme].seconds) if never else theirs)
            name = f"time to the same loss, {kind}: coverage / {scheme}"
            if sites or scheme == WAIT:
                peer = "which has not reached it: its whole run" if never else "the same loss"
                yield at_most(name, ratio, "of its time", 1.0, peer)
            else:
                yield reported(name, ratio, "of its time", "dropping equal data costs little")


def _seconds_to(course: Course, target: float) -> float:
    for step, loss in course.losses:
        if loss <= target:
            return sum(course.seconds[:step])
    return float("inf")


def _time_to(course: Course, target: float, name: str, waiting: Course) -> Bar:
    seconds = _seconds_to(course, target)
    if seconds == float("inf"):
        last = course.losses[-1][1]
        peer = f"not reached in {len(course.seconds)} steps: {last:.4f} nats, {target:.4f} wanted"
        return Bar(name, None, "s", "reported", True, peer)
    peer = f"waiting for all: {sum(waiting.seconds):.1f} s"
    return reported(name, seconds, "s", peer)


def decoding_bars() -> Iterator[Bar]:
    """Decoding and building codes."""
    generator = np.random.default_rng(0)
    small: list[tuple[str, Callable[[], GradientCode]]] = [
        ("fractional repetition", lambda: FractionalRepetition(workers=256, stragglers=3)),
        ("graph", lambda: GraphCode.random_regular(workers=256, degree=4)),
        ("symmetric design", lambda: SymmetricDesign(307)),
        ("soft design", lambda: SoftDesign(256, 4)),
        ("Bernoulli code", lambda: BernoulliCode(256, 4)),
    ]
    large: list[tuple[str, Callable[[], GradientCode]]] = [
        ("fractional repetition", lambda: FractionalRepetition(workers=10_000, stragglers=3)),
        ("graph", lambda: GraphCode.random_regular(workers=10_000, degree=4)),
        ("soft design", lambda: SoftDesign(10_000, 4)),
        ("Bernoulli code", lambda: BernoulliCode(10_000, 4)),
    ]
    for codes, limit in ((small, 0.001), (large, 0.01)):
        for name, make in codes:
            begun = time.perf_counter()
            code = make()
            built = time.perf_counter() - begun
            alive = generator.random(code.workers) > 0.1
            code.decode(alive)
            times = []
            for _ in range(15):
                begun = time.perf_counter()
                code.decode(alive)
                times.append(time.perf_counter() - begun)
            label = f"{name}, n = {code.workers}"
            yield at_most(
                f"decoding with its certificate, {label}", median(times), "s", limit, "one core"
            )
            yield at_most(f"building, {label}", built, "s", 1.0, "one core")
    code = GraphCode.random_regular(workers=240, degree=4)
    alive = generator.random((10_000, 240)) > 0.1
    begun = time.perf_counter()
    code.errors(alive)
    seconds = time.perf_counter() - begun
    yield reported("errors of 10,000 straggler draws, graph, n = 240", seconds, "s", "one core")


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    quick = options.quick
    parts = [
        quiet_bars(quick),
        realised(quick),
        draw_bars(quick),
        loss_bars(quick),
        simulated_bars(quick),
        decoding_bars(),
        stability_bars(quick),
        curve_bars(quick),
    ]
    publish("coding", [bar for part in parts for bar in part], options.json)


if __name__ == "__main__":
    main()
