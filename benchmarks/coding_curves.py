"""Published error curves of approximate gradient codes, computed again with `outlast.coding`.

    python benchmarks/coding_curves.py FOLDER

draws them as SVG. Errors are per chunk, |alpha - 1|^2 / chunks, with alpha the coefficients of the
decoded sum; "debiased" means that alpha is divided by its mean before.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from harness import Bar

from outlast.coding.code import Decoder, FractionalRepetition, GradientCode
from outlast.coding.design import BernoulliCode, SoftDesign
from outlast.coding.graph import Expander, Graph, GraphCode, one_step_error

BATCH = 200
PROBABILITIES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
FRACTIONS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
STRAGGLERS = (3, 4, 5, 6, 7)

# Okabe and Ito's colours, which most people can tell apart.
BLUE, ORANGE, GREEN, GREY, BLACK = "#0072B2", "#D55E00", "#009E73", "#8C8C8C", "#222222"


def lower_bound(probability: float, degree: int) -> float:
    """p^d / (1 - p^d): no code with d copies has a smaller debiased error per chunk."""
    return probability**degree / (1.0 - probability**degree)


def bernoulli_error(workers: int, mean_copies: float, survivors: int) -> float:
    """N (n - d) / (u d): the one-step decoder's mean error over Bernoulli(d / n) codes."""
    return workers * (workers - mean_copies) / (survivors * mean_copies)


def debiased_error(code: GraphCode, probability: float, draws: int, seed: int = 0) -> float:
    """E |alpha / c - 1|^2 / chunks with c the mean coefficient, workers failing independently.

    As sum alpha = chunks - error, c = 1 - e and the debiased error is e / (1 - e), with e the mean
    error per chunk. Chunks that lose all workers make up most of it and are rare: their number is
    replaced by its expectation, chunks x p^d, so only the rest is left to chance.
    """
    generator = np.random.default_rng(seed)
    rest = 0.0
    for start in range(0, draws, BATCH):
        alive = generator.random((min(BATCH, draws - start), code.workers)) >= probability
        held = code.matrix.T @ alive.T.astype(np.float64)
        rest += float(code.errors(alive).sum()) - float((held == 0).sum())
    degree = code.degree or 0
    error = probability**degree + rest / (draws * code.chunks)
    return error / (1.0 - error)


def random_masks(workers: int, stragglers: int, draws: int, seed: int = 0) -> np.ndarray:
    """(draws, workers) random sets of survivors of one size."""
    order = np.argsort(np.random.default_rng(seed).random((draws, workers)), axis=1)
    return order >= stragglers


def mean_error(
    code: GradientCode, stragglers: int, draws: int, decoder: Decoder = "optimal"
) -> float:
    """Mean error per chunk over random sets of stragglers."""
    masks = random_masks(code.workers, stragglers, draws)
    return float(code.errors(masks, decoder).mean()) / code.chunks


def worst_found(code: GradientCode, stragglers: int, starts: int, decoder: Decoder) -> float:
    """Largest error that a local search over exchanges of one straggler finds."""
    worst = 0.0
    for alive in random_masks(code.workers, stragglers, starts, seed=1):
        current, best = alive, -1.0
        while True:
            gone, left = np.flatnonzero(~current), np.flatnonzero(current)
            moves = np.repeat(current[None], len(gone) * len(left), axis=0)
            rows = np.arange(len(moves))
            moves[rows, np.repeat(gone, len(left))] = True
            moves[rows, np.tile(left, len(gone))] = False
            errors = code.errors(moves, decoder)
            if errors.max() <= best + 1e-9:
                break
            best, current = float(errors.max()), moves[int(errors.argmax())]
        worst = max(worst, best)
    return worst


def small_graph() -> GraphCode:
    """24 workers, 16 chunks with 3 copies each, as in Glasgow and Wootters (2021)."""
    return GraphCode.random_regular(workers=24, degree=3, seed=1)


def ramanujan_graph() -> GraphCode:
    """6552 workers, 2184 chunks with 6 copies: the graph of Lubotzky, Phillips and Sarnak."""
    return GraphCode.of(ramanujan(5, 13))


def ramanujan(p: int, q: int) -> Graph:
    """The (p + 1)-regular Ramanujan graph X^{p,q} of Lubotzky, Phillips and Sarnak (1988).

    The Cayley graph of PGL(2, q) where p is no square modulo q (bipartite, q^3 - q vertices), else
    of PSL(2, q) (half as many), by the p + 1 integer quaternions of norm p with odd positive real
    part and even rest. All eigenvalues but +-(p + 1) are at most 2 sqrt(p). p = 5, q = 13 has 2184
    vertices and 6552 edges, as in Glasgow and Wootters (2021). p and q are different primes, both
    1 mod 4, with q > 2 sqrt(p).
    """
    # (p + 1, 2, 2) matrices over F_q of the quaternions a + bi + cj + dk of norm p.
    root = next(x for x in range(1, q) if x * x % q == q - 1)
    reach = math.isqrt(p)
    odd = range(1, reach + 1, 2)
    even = range(-(reach // 2) * 2, reach + 1, 2)
    found = [
        [[a + root * b, c + root * d], [-c + root * d, a - root * b]]
        for a, b, c, d in itertools.product(odd, even, even, even)
        if a * a + b * b + c * c + d * d == p
    ]
    generators = _normalised(np.array(found, dtype=np.int64) % q, q)
    # (elements, 2, 2) invertible matrices over F_q up to factors, first non-zero entry 1.
    square_determinant = pow(p, (q - 1) // 2, q) == 1
    grid = np.indices((q, q, q)).reshape(3, -1).T
    first = np.column_stack([np.ones(len(grid), np.int64), grid])
    pairs = np.indices((q, q)).reshape(2, -1).T
    second = np.column_stack([np.zeros(len(pairs), np.int64), np.ones(len(pairs), np.int64), pairs])
    entries = np.concatenate([first, second])
    determinants = (entries[:, 0] * entries[:, 3] - entries[:, 1] * entries[:, 2]) % q
    squares = np.unique(np.arange(1, q) ** 2 % q)
    kept = np.isin(determinants, squares) if square_determinant else determinants != 0
    elements = entries[kept].reshape(-1, 2, 2).astype(np.int64)
    keys = _keys(elements, q)
    order = np.argsort(keys)
    parts = []
    for generator in generators:
        products = _normalised(np.matmul(elements, generator) % q, q)
        targets = order[np.searchsorted(keys[order], _keys(products, q))]
        starts = np.arange(len(elements))
        parts.append(np.stack([starts, targets], axis=1)[starts < targets])
    return Graph(np.concatenate(parts), len(elements), transitive=True)


def _normalised(matrices: np.ndarray, q: int) -> np.ndarray:
    """Each matrix over F_q divided by its first non-zero entry."""
    inverses = np.array([0, *(pow(x, -1, q) for x in range(1, q))], dtype=np.int64)
    flat = matrices.reshape(-1, 4)
    leading = np.where(flat[:, 0] != 0, flat[:, 0], flat[:, 1])
    return (flat * inverses[leading][:, None] % q).reshape(-1, 2, 2)


def _keys(matrices: np.ndarray, q: int) -> np.ndarray:
    """One number for each matrix over F_q."""
    return matrices.reshape(-1, 4) @ np.array([q**3, q**2, q, 1], dtype=np.int64)


def curve_bars(quick: bool) -> Iterator[Bar]:
    """The published curves and the reference note's prototype as bars."""
    yield from graph_bars(quick)
    yield from random_bars(quick)
    yield from expander_bars(quick)


def within(name: str, figure: float, expected: float, share: float, peer: str) -> Bar:
    """A simulated figure that must be near an expected one."""
    bar = f"{expected:.3g} +- {share:.0%}"
    holds = abs(figure / expected - 1.0) <= share
    return Bar(name, float(f"{figure:.4g}"), "per chunk", bar, holds, peer, "simulated")


def graph_bars(quick: bool) -> Iterator[Bar]:
    """Graph codes with the optimal decoder against the lower bound."""
    draws = 40 if quick else 1000
    large = GraphCode.random_regular(workers=15_000, degree=3)
    for probability, prototype in ((0.1, 9.9e-4), (0.2, 8.6e-3), (0.3, 2.97e-2)):
        figure = debiased_error(large, probability, draws)
        name = f"graph code, d = 3, 15000 workers, p = {probability}, debiased error"
        bound = lower_bound(probability, 3)
        yield within(name, figure, prototype, 0.1, f"prototype; bound {bound:.3g}")
    lps = ramanujan_graph()
    for probability, prototype in ((0.2, 4.6e-5), (0.3, 7.6e-4)):
        figure = debiased_error(lps, probability, 5 * draws)
        name = f"graph code, LPS d = 6, 6552 workers, p = {probability}, debiased error"
        bound = lower_bound(probability, 6)
        yield within(name, figure, bound, 0.3, f"lower bound; prototype {prototype:.2g}")
    small = small_graph()
    for probability in (0.1, 0.2, 0.3):
        figure = debiased_error(small, probability, 100 * draws)
        bound, fixed = lower_bound(probability, 3), probability / (3 * (1 - probability))
        name = f"graph code, d = 3, 24 workers, p = {probability}, debiased error"
        limits = f"{bound:.3g} to {fixed / 2:.3g}"
        holds = 0.95 * bound <= figure <= fixed / 2
        peer = "lower bound; half of the fixed decoder's"
        yield Bar(name, float(f"{figure:.4g}"), "per chunk", limits, holds, peer, "simulated")


def random_bars(quick: bool) -> Iterator[Bar]:
    """Charles, Papailiopoulos and Ellenberg (2017): n = 100."""
    draws = 2000 if quick else 20_000
    for degree in (5, 10):
        for stragglers in (20, 50):
            survivors = 100 - stragglers
            codes = 20 if quick else 200
            figure = sum(
                mean_error(BernoulliCode(100, degree, seed=s), stragglers, draws // codes, "fixed")
                for s in range(codes)
            )
            closed = bernoulli_error(100, degree, survivors) / 100
            name = f"Bernoulli code, n = 100, d = {degree}, s = {stragglers}, one-step"
            yield within(name, figure / codes, closed, 0.1, "n (n - d) / (u d)")
            repetition = FractionalRepetition(100, degree - 1)
            expected = repetition.expected_error(stragglers)
            if expected is not None and expected.value > 0.02:
                figure = mean_error(repetition, stragglers, 10 * draws)
                name = f"repetition, n = 100, d = {degree}, s = {stragglers}, optimal"
                peer = "n C(n - d, u) / C(n, u)"
                yield within(name, figure, expected.value / 100, 0.3, peer)


def expander_bars(quick: bool) -> Iterator[Bar]:
    """Raviv, Tamo, Tandon and Dimakis (2018): n = 50, d = 3."""
    code = Expander(50, 3)
    for stragglers in STRAGGLERS:
        found = worst_found(code, stragglers, 5 if quick else 50, "fixed") ** 0.5
        bound = code.worst_error(stragglers).value ** 0.5
        least = float(stragglers // 3) ** 0.5
        name = f"expander, n = 50, d = 3, s = {stragglers}, fixed decoder, worst found"
        limits = f"{least:.3g} to {bound:.3g}"
        holds = least <= found <= bound
        peer = "lower bound; (lambda / d) sqrt(n s / (n - s))"
        yield Bar(name, round(found, 4), "of |G|", limits, holds, peer, "simulated")


def draw(folder: Path) -> None:
    """Write coding-graph.svg, coding-random.svg and coding-expander.svg."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update(
        {
            "svg.hashsalt": "outlast",
            "svg.fonttype": "none",
            "font.family": ["DejaVu Sans", "sans-serif"],
            "font.size": 9.5,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": "#666666",
            "axes.titlesize": 10.5,
            "axes.titlelocation": "left",
            "axes.grid": True,
            "axes.grid.which": "major",
            "grid.color": "#E6E6E6",
            "lines.linewidth": 1.8,
            "xtick.color": "#444444",
            "ytick.color": "#444444",
        }
    )
    for name, figure in (
        ("graph", graph_figure()),
        ("random", random_figure()),
        ("expander", expander_figure()),
    ):
        figure.savefig(folder / f"coding-{name}.svg", metadata={"Date": None})


def label(axes: Any, x: float, y: float, words: str, colour: str, *, points: float = 0.0) -> None:
    """A line's name beside its end, moved up by so many points where lines end close by."""
    axes.annotate(
        words, (x, y), (0, points), textcoords="offset points",
        color=colour, fontsize=8.5, va="center", ha="left",
    )  # fmt: skip


def panels() -> tuple[Any, Any]:
    """A figure of two panels with logarithmic errors."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9.0, 3.9), layout="constrained")
    for each in axes:
        each.set_yscale("log")
        each.minorticks_off()
    return figure, axes


def graph_figure() -> Any:
    """Debiased error against the probability of straggling, for both published families."""
    figure, both = panels()
    cases = (
        ("24 workers, 16 chunks, d = 3", small_graph(), 40_000, 3e-5),
        ("6552 workers, 2184 chunks, d = 6 (LPS)", ramanujan_graph(), 4000, 1e-9),
    )
    for axes, (title, code, draws, lowest) in zip(both, cases, strict=True):
        degree = code.degree or 0
        p = np.linspace(0.04, 0.31, 100)
        uncoded, fixed = p / (1 - p), p / (degree * (1 - p))
        bound = np.array([lower_bound(x, degree) for x in p])
        axes.plot(p, uncoded, color=GREY)
        axes.plot(p, fixed, color=ORANGE)
        axes.plot(p, bound, color=BLACK, linestyle=(0, (4, 2)), linewidth=1.3)
        found = [debiased_error(code, x, draws) for x in PROBABILITIES]
        axes.plot(PROBABILITIES, found, "o", color=BLUE, markersize=6, zorder=3)
        end = 0.315
        label(axes, end, uncoded[-1], "no code", GREY)
        label(axes, end, fixed[-1], "any code, fixed weights", ORANGE)
        label(axes, end, found[-1], "graph code, simulated", BLUE, points=6)
        label(axes, end, bound[-1], "lower bound, repetition", BLACK, points=-6)
        axes.set_title(title)
        axes.set_ylim(lowest, 1)
        axes.set_xlim(0.035, 0.46)
        axes.set_xticks(PROBABILITIES[1::2])
        axes.set_xlabel("probability that a worker straggles")
    both[0].set_ylabel("debiased error per chunk")
    return figure


def random_figure() -> Any:
    """Mean error against the share of stragglers for n = 100."""
    figure, both = panels()
    for axes, degree in zip(both, (5, 10), strict=True):
        share = np.array(FRACTIONS)
        gone = [round(100 * x) for x in FRACTIONS]
        bernoulli = [BernoulliCode(100, degree, seed=s) for s in range(10)]
        soft, repetition = SoftDesign(100, degree), FractionalRepetition(100, degree - 1)
        lines = (
            ("Bernoulli, one-step", ORANGE, "--",
             [bernoulli_error(100, degree, 100 - s) / 100 for s in gone]),
            ("regular, one-step", GREEN, "--",
             [one_step_error(100, degree, 100 - s) / 100 for s in gone]),
            ("Bernoulli, optimal", ORANGE, "-",
             [np.mean([mean_error(code, s, 100) for code in bernoulli]) for s in gone]),
            ("soft design, optimal", GREEN, "-", [mean_error(soft, s, 1000) for s in gone]),
            ("repetition, optimal", BLUE, "-",
             [_value(repetition.expected_error(s)) / 100 for s in gone]),
        )  # fmt: skip
        axes.plot(share, share, color=GREY)
        for name, colour, style, values in lines:
            axes.plot(share, values, style, color=colour, label=name)
        found = [mean_error(repetition, s, 20_000) for s in gone]
        seen = [(x, y) for x, y in zip(share, found, strict=True) if y > 1e-5]
        axes.plot(*zip(*seen, strict=True), "o", color=BLUE, markersize=5)
        label(axes, share[-1] + 0.015, share[-1], "no code", GREY)
        axes.set_title(f"n = 100, d = {degree}")
        axes.set_ylim(1e-5, 6)
        axes.set_xlim(0, 0.95)
        axes.set_xlabel("share of stragglers")
    both[1].legend(loc="lower right", frameon=False, fontsize=8.5)
    both[0].set_ylabel("mean error per chunk")
    return figure


def _value(bound: Any) -> float:
    """The value of a statement that is known to be there."""
    return float(bound.value)


def expander_figure() -> Any:
    """Norm of the error against the number of stragglers for n = 50, d = 3."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    code = Expander(50, 3)
    s = np.array(STRAGGLERS)
    lines = (
        ("bound  (\u03bb/d) \u221a(ns/(n\u2212s))", BLACK, (0, (4, 2)),
         [code.worst_error(x).value ** 0.5 for x in STRAGGLERS]),
        ("fixed weights, worst found", ORANGE, "-",
         [worst_found(code, x, 30, "fixed") ** 0.5 for x in STRAGGLERS]),
        ("fixed weights, mean", ORANGE, ":",
         [(mean_error(code, x, 20_000, "fixed") * 50) ** 0.5 for x in STRAGGLERS]),
        ("optimal weights, worst found", BLUE, "-",
         [worst_found(code, x, 10, "optimal") ** 0.5 for x in STRAGGLERS]),
        ("optimal weights, mean", BLUE, ":",
         [(mean_error(code, x, 2000) * 50) ** 0.5 for x in STRAGGLERS]),
        ("any code, worst \u2265 \u221a\u230as/d\u230b", GREY, "-",
         [float(x // 3) ** 0.5 for x in STRAGGLERS]),
        ("\u221a(s/d), as published", GREY, ":", list((s / 3.0) ** 0.5)),
    )  # fmt: skip
    apart = {lines[2][0]: 4.0, lines[5][0]: -4.0}
    for name, colour, style, values in lines:
        axes.plot(s, values, linestyle=style, marker="o", markersize=4, color=colour)
        label(axes, 7.1, values[-1], name, colour, points=apart.get(name, 0.0))
    axes.set_title("n = 50 workers, d = 3")
    axes.set_xlim(2.9, 9.4)
    axes.set_ylim(bottom=0)
    axes.set_xticks(STRAGGLERS)
    axes.set_xlabel("stragglers s")
    axes.set_ylabel("norm of the error, |\u03b1 \u2212 1|")
    return figure


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
