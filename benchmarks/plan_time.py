"""Step times of published runs, predicted by fits that have not seen their configuration.

The rows are those of the published table that docs/plan.md names (`throughput.csv`). Beside each
error stand that of one constant utilisation (MFU) per chip and precision, fitted on the same rows,
and the published errors of Calculon and llm-analysis on these rows.
"""

from __future__ import annotations

import collections
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from harness import Bar
from plan_models import shared, uncalibrated

from outlast.plan.api import published_constants
from outlast.plan.batch import cases
from outlast.plan.conformal import OTHERS, Support, conformal, folds
from outlast.plan.probes import MISSED, choose_probes, directions
from outlast.plan.rows import Row, clean
from outlast.plan.run_rows import read_rows
from outlast.plan.step_fit import NOISE, Belonging, Fit, believed
from outlast.plan.step_model import (
    UNSEEN,
    StepModel,
    belonging,
    distances_from,
    fitted,
    interval_groups,
    ranges_of,
    utilisation,
    validate,
)
from outlast.plan.step_time import step_seconds

FEWEST = 0.1
"""Share of the peak below which the sweep's runs are broken: they are fitted and not scored."""
PARTS = 10
"""Of the configurations: widths are learnt from all but one, as many as a calibration has."""
PROBES = 4
DRAWS = 10
VTRAIN = "vtrain_multi"
SWEEP = "nanotron"
# Sequences are packed there, to lengths that nobody published.
LEFT_OUT = ("nemo_finetune",)
PUBLICATIONS = {
    "vtrain_multi": "vtrain",
    "vtrain_single": "vtrain",
    "nemo_dense": "nemo",
    "nemo_moe": "nemo",
}
TRANSFERS = ((VTRAIN, "mosaic"), ("mosaic", VTRAIN), (SWEEP, "mosaic"), ("mosaic", SWEEP))


def time_bars(data: Path, quick: bool) -> Iterator[Bar]:
    """All rows about step time.

    Args:
        data: The published table.
        quick: Fewer folds and draws.
    """
    rows = fitting_rows(data)
    # Which rows share a fold changes the errors; three dealings of the folds count together.
    seeds = (0,) if quick else (0, 1, 2)
    held = [validate(rows, 3 if quick else 10, seed) for seed in seeds]
    errors = np.concatenate([np.expm1(-each.log_errors) for each in held])
    constant = [_constant_errors(rows, 3 if quick else 10, seed) for seed in seeds]
    yield from _error_bars(rows, errors, np.concatenate(constant))
    yield from _interval_bars(rows, held[0])
    yield from _transfer_bars(rows, 2 if quick else DRAWS)
    yield from _unmeasured_bars(rows)


def elsewhere_bars(data: Path, quick: bool, keep: Path | None = None) -> Iterator[Bar]:
    """What a user gets on a cluster of which nothing was measured.

    The constants that are shipped know no cluster. Their errors on configurations that no fit had
    seen, of sites that it had, say how well formulas interpolate; errors on sites that were held
    out whole, with intervals from the other sites alone, are those to expect elsewhere.

    Args:
        data: The published table.
        quick: Only one site, and fewer folds.
        keep: Folder that keeps the fits, so that a run that was cut short continues.
    """
    rows = fitting_rows(data)
    yield from _summary(
        "step time with shipped constants, unseen configurations of fitted sites",
        rows,
        _shipped_errors(rows, 3 if quick else 10),
    )
    kinds = {"table group": [row.source for row in rows]}
    if not quick:
        kinds["publication"] = [PUBLICATIONS.get(row.source, row.source) for row in rows]
    for kind, names in kinds.items():
        held = ["vtrain_single"] if quick else sorted(set(names))
        kept = None if keep is None else keep / f"sites-{kind.replace(' ', '-')}.json"
        errors, widths = _site_errors(rows, names, held, _Fits(rows, names, kept))
        yield from _summary(f"step time on unseen sites, each {kind} held out", rows, errors)
        yield from _site_coverage(kind, rows, names, errors, widths)


def _shipped_errors(rows: Sequence[Row], count: int) -> np.ndarray:
    """Log of measured over predicted by constants that know no cluster, by configuration."""
    fold = folds([row.key for row in rows], count)
    errors = np.full(len(rows), np.nan)
    for number in range(count):
        kept = [row for row, own in zip(rows, fold, strict=True) if own != number]
        model = _general(_model(*fitted(kept)))
        out = np.flatnonzero(fold == number)
        errors[out] = -np.log1p(_errors(model, [rows[index] for index in out]))
    return errors


def _general(model: StepModel) -> StepModel:
    """Without what it knows of clusters; as `plan_models.shared`."""
    quantiles = {OTHERS: model.widths.quantiles.get(OTHERS, 1.0)}
    return shared(replace(model, widths=replace(model.widths, quantiles=quantiles)))


class _Fits:
    """Sites as fits of others predict them, kept in a file."""

    def __init__(self, rows: Sequence[Row], names: Sequence[str], file: Path | None) -> None:
        self.rows, self.names, self.file = rows, np.array(names), file
        self.numbers = cases([(row.model, row.run, row.cluster) for row in rows])
        known = {} if file is None or not file.exists() else json.loads(file.read_text())
        self.known: dict[str, dict[str, list[list[float]]]] = known

    def of(self, site: str, *others: str) -> tuple[np.ndarray, np.ndarray]:
        """Log errors and deviations of a site by a fit without it and without the others."""
        out = sorted({site, *others})
        key = "|".join(out)
        if key not in self.known:
            kept = np.flatnonzero(~np.isin(self.names, out))
            found, _ = fitted([self.rows[int(index)] for index in kept])
            self.known[key] = {each: self._predicted(found, each) for each in out}
            if self.file is not None:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                self.file.write_text(json.dumps(self.known))
        errors, deviations = self.known[key][site]
        return np.array(errors), np.array(deviations)

    def _predicted(self, found: Fit, site: str) -> list[list[float]]:
        own = np.flatnonzero(self.names == site)
        some = [self.rows[int(index)] for index in own]
        seconds = np.array([row.step_seconds for row in some])
        asked = self.numbers.taken(own)
        whose = [Belonging(row.chip, UNSEEN, row.framework) for row in some]
        unseen = [Belonging(row.chip, UNSEEN, UNSEEN) for row in some]
        errors = np.log(seconds / step_seconds(asked, found.constants(whose)))
        return [errors.tolist(), found.log_deviation(asked, unseen).tolist()]


def _site_errors(
    rows: Sequence[Row], names: Sequence[str], held: Sequence[str], fits: _Fits
) -> tuple[np.ndarray, np.ndarray]:
    """Log of measured over predicted, and half-widths: both from the other sites alone.

    As `outlast.plan.step_model` makes them; the floor of the scale is that of all
    rows, which hardly depends on one site.
    """
    errors, widths = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
    shipped, where = published_constants().widths, np.array(names)
    for site in held:
        own = np.flatnonzero(where == site)
        errors[own], deviations = fits.of(site)
        others = [fits.of(other, site) for other in sorted(set(names)) if other != site]
        scores = np.concatenate([np.abs(e) / np.hypot(shipped.floor, d) for e, d in others])
        ranges = ranges_of([row for row, name in zip(rows, names, strict=True) if name != site])
        away = distances_from(ranges, fits.numbers.taken(own))
        quantile = np.quantile(scores, shipped.coverage)
        widths[own] = quantile * np.hypot(shipped.floor, deviations) * (1.0 + away)
    return errors, widths


def _summary(name: str, rows: Sequence[Row], log_errors: np.ndarray) -> Iterator[Bar]:
    """Median, mean and p90 of the scored rows, with the median of each group."""
    known = np.isfinite(log_errors)
    errors = np.expm1(-log_errors)
    medians = []
    scored = np.zeros(len(rows), bool)
    for source in sorted({row.source for row in rows}):
        own = _scored(rows, source) & known
        scored |= own
        if own.any():
            medians.append(f"{source} {_three(errors[own])[0]:.1f}")
    three = _three(errors[scored])
    peer = f"median by group: {', '.join(medians)}"
    for label, value in zip(("median", "mean", "p90"), three, strict=True):
        yield _below(f"{name} ({scored.sum()} rows): {label} error", value, None, peer)


def _site_coverage(
    kind: str,
    rows: Sequence[Row],
    names: Sequence[str],
    errors: np.ndarray,
    widths: np.ndarray,
) -> Iterator[Bar]:
    """Share of intervals that hold the truth, with the 95 % interval of a binomial share."""
    known = np.isfinite(errors)
    inside, sites = np.abs(errors) <= widths, np.array(names)
    shares = [
        f"{site} {100.0 * inside[own].mean():.0f} of {own.sum()}"
        for site in sorted(set(sites[known]))
        for own in [sites == site]
    ]
    whole = np.zeros(len(rows), bool)
    for source in sorted({row.source for row in rows}):
        whole |= _scored(rows, source)
    share, low, high = _binomial(int(inside[known].sum()), int(known.sum()))
    unbroken = 100.0 * float(inside[known & whole].mean())
    peer = (
        f"{known.sum()} rows, binomial 95 %: {low:.1f} to {high:.1f}; {unbroken:.1f} without runs "
        f"below 10 % of the peak; % by site: {', '.join(shares)}"
    )
    name = f"90 % intervals on unseen sites, each {kind} held out: coverage"
    yield Bar(name, round(share, 2), "%", "87 to 93", 87.0 <= share <= 93.0, peer, "predicted")
    half = 100.0 * float(np.median(np.expm1(widths[known])))
    name = f"90 % intervals on unseen sites, each {kind} held out: median half-width"
    yield _below(name, half, None, "")


def _binomial(hits: int, count: int) -> tuple[float, float, float]:
    """A share and the ends of its 95 % interval, in per cent (Wilson 1927)."""
    share, z = hits / count, 1.96
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return 100.0 * share, 100.0 * float(middle - half), 100.0 * float(middle + half)


def fitting_rows(data: Path) -> list[Row]:
    """Rows of the table whose time can be fitted."""
    rows = clean(read_rows(data)[0])
    return [row for row in rows if row.fits_time and row.source not in LEFT_OUT]


def _scored(rows: Sequence[Row], source: str) -> np.ndarray:
    own = np.array([row.source == source for row in rows])
    return own & (utilisation(rows) >= FEWEST) if source == SWEEP else own


def _error_bars(rows: Sequence[Row], errors: np.ndarray, constant: np.ndarray) -> Iterator[Bar]:
    peers = {
        VTRAIN: "Calculon 10.6 / 16.2 / 34.5, llm-analysis 21.7 / 24.3 / 50.5",
        SWEEP: "Calculon 24.3 / 34.1 / 60.0 on 43 % of rows, llm-analysis 60.8 / 58.1 / 78.8",
    }
    bars: dict[str, tuple[float | None, float | None, float | None]] = {
        VTRAIN: (4.0, 6.0, 12.0),
        SWEEP: (7.0, None, 22.0),
    }
    for source in sorted({row.source for row in rows}):
        own = np.tile(_scored(rows, source), len(errors) // len(rows))
        found, base = _three(errors[own]), _three(constant[own])
        others = peers.get(source, "")
        peer = f"constant MFU {base[0]:.1f} / {base[1]:.1f} / {base[2]:.1f}"
        peer = f"{peer}; published on these rows: {others}" if others else peer
        labels = zip(("median", "mean", "p90"), found, bars.get(source, (None,) * 3), strict=True)
        for label, value, most in labels:
            count = own.sum() * len(rows) // len(errors)
            name = f"step time, {source} ({count} rows), cross-validated: {label} error"
            yield _below(name, value, most, peer)


def _interval_bars(rows: Sequence[Row], held) -> Iterator[Bar]:  # type: ignore[no-untyped-def]
    """Coverage of intervals whose widths come from other configurations than those judged."""
    groups = np.array(interval_groups(rows))
    part = folds([row.key for row in rows], PARTS, seed=1)
    widths = np.zeros(len(rows))
    for number in range(PARTS):
        learn, judge = part != number, part == number
        found = conformal(
            held.log_errors[learn],
            held.deviations[learn],
            list(groups[learn]),
            held.distances[learn],
        )
        widths[judge] = found.half_widths(
            held.deviations[judge], list(groups[judge]), held.distances[judge]
        )
    inside = np.abs(held.log_errors) <= widths
    share = 100.0 * float(inside.mean())
    peer = "nobody reports intervals"
    name = "90 % intervals of step time: coverage"
    yield Bar(name, share, "%", "87 to 93", 87.0 <= share <= 93.0, peer, "predicted")
    by_group = {group: 100.0 * float(inside[groups == group].mean()) for group in np.unique(groups)}
    worst = min(by_group, key=lambda group: by_group[group])
    peer = f"{worst}, {(groups == worst).sum()} rows"
    name = "90 % intervals: coverage of the worst group"
    yield Bar(name, by_group[worst], "%", ">= 80", by_group[worst] >= 80.0, peer, "predicted")
    half_width = 100.0 * float(np.median(np.expm1(widths)))
    yield _below("90 % intervals: median half-width", half_width, 12.0, "")


def _transfer_bars(rows: Sequence[Row], draws: int) -> Iterator[Bar]:
    """Fitted on one source and four runs of another, on which the rest is predicted."""
    rng = np.random.default_rng(0)
    ours, theirs, chosen_well = [], [], []
    for known, wanted in TRANSFERS:
        base = [row for row in rows if row.source == known]
        there = [row for row, own in zip(rows, _scored(rows, wanted), strict=True) if own]
        found, constant = [], []
        for _ in range(draws):
            chosen = set(rng.permutation(len(there))[:PROBES].tolist())
            errors, baseline = _transferred(base, there, chosen)
            found.append(errors)
            constant.append(baseline)
        mine, base_line = np.abs(np.concatenate(found)), np.abs(np.concatenate(constant))
        ours.append(np.median(mine))
        theirs.append(np.median(base_line))
        three = _three(mine)
        name = f"transfer, {known} + {PROBES} random runs of {wanted}: median error"
        peer = f"constant MFU from the same runs {100.0 * np.median(base_line):.1f}; "
        yield _below(name, three[0], 6.0, f"{peer}ours mean {three[1]:.1f}, p90 {three[2]:.1f}")
        errors, baseline = _transferred(base, there, _informative(base, there))
        chosen_well.append((known, wanted, _three(errors), _three(baseline)))
    for known, wanted, three, constant_three in chosen_well:
        name = f"transfer, {known} + {PROBES} D-optimal runs of {wanted}: median error"
        peer = f"constant MFU from the same runs {constant_three[0]:.1f}; "
        yield _below(name, three[0], None, f"{peer}ours mean {three[1]:.1f}, p90 {three[2]:.1f}")
    worse = sum(mine > theirs_ for mine, theirs_ in zip(ours, theirs, strict=True))
    name = "transfers in which constant MFU is better"
    yield Bar(name, int(worse), "", "<= 0", worse == 0, f"{len(TRANSFERS)} transfers", "predicted")


def _transferred(
    base: Sequence[Row], there: Sequence[Row], chosen: set[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Errors of all but the chosen runs, and those of one utilisation, from the same runs."""
    probes = [there[index] for index in sorted(chosen)]
    rest = [row for index, row in enumerate(there) if index not in chosen]
    return _errors(_model(*fitted([*base, *probes])), rest), _constant(probes, rest)


def _informative(base: Sequence[Row], there: Sequence[Row]) -> set[int]:
    """The runs that `outlast plan calibrate` would choose of these, knowing nothing of their times.

    As there (`Probing._choose`): what is unknown are the constants, and a straight line in each
    direction for what the formulas miss.
    """
    constants, _ = fitted(base)
    whose = [belonging(row) for row in there]
    before = believed(whose, constants)
    numbers = cases([(row.model, row.run, row.cluster) for row in there])
    design = np.concatenate(
        [
            before.log_gradient(numbers, whose) @ np.linalg.cholesky(before.covariance),
            MISSED * directions(numbers),
        ],
        axis=1,
    )
    return set(choose_probes(design / NOISE, np.ones(len(there)), float(PROBES), PROBES)[0])


def _unmeasured_bars(rows: Sequence[Row]) -> Iterator[Bar]:
    """Nothing measured of the source: the priors, and fits of all other sources."""
    prior, others = [], []
    families = {source: source.split("_")[0] for source in {row.source for row in rows}}
    for family in sorted(set(families.values())):
        known = [row for row in rows if families[row.source] != family]
        scored = np.zeros(len(rows), bool)
        for source in [each for each in families if families[each] == family]:
            scored |= _scored(rows, source)
        there = list(itertools.compress(rows, scored))
        prior.append(_errors(uncalibrated(), there))
        others.append(_errors(_model(*fitted(known)), there))
    peer = "Calculon 28.9, llm-analysis 14.7 on another A100 cluster"
    for label, found in (
        ("datasheet and priors alone", prior),
        ("datasheet, constants from other sources", others),
    ):
        three = _three(np.concatenate(found))
        beside = f"{peer}; ours mean {three[1]:.1f}, p90 {three[2]:.1f}"
        yield _below(f"nothing measured, {label}: median error", three[0], 12.0, beside)


def _model(constants: Fit, residual: object) -> StepModel:
    blank = uncalibrated()
    return StepModel(constants, residual, blank.widths, Support({}))  # type: ignore[arg-type]


def _errors(model: StepModel, rows: Sequence[Row]) -> np.ndarray:
    numbers = cases([(row.model, row.run, row.cluster) for row in rows])
    seconds = np.array([row.step_seconds for row in rows])
    return model.seconds(numbers, [belonging(row) for row in rows]) / seconds - 1.0


def _constant_errors(rows: Sequence[Row], count: int, seed: int) -> np.ndarray:
    """Errors of the median utilisation of the other folds, by source, chip and precision."""
    reached = utilisation(rows)
    fold = folds([row.key for row in rows], count, seed)
    kinds = [(row.source, row.chip, row.run.precision) for row in rows]
    errors = np.zeros(len(rows))
    for number in range(count):
        levels = collections.defaultdict(list)
        for index, kind in enumerate(kinds):
            if fold[index] != number and _counts(rows[index], reached[index]):
                levels[kind].append(reached[index])
        everything = np.median(np.concatenate([np.array(each) for each in levels.values()]))
        for index in np.flatnonzero(fold == number):
            level = np.median(levels[kinds[index]]) if levels[kinds[index]] else everything
            errors[index] = reached[index] / level - 1.0
    return errors


def _constant(probes: Sequence[Row], rest: Sequence[Row]) -> np.ndarray:
    """Errors of the median utilisation of the probes of each chip and precision, else of all."""
    levels = collections.defaultdict(list)
    for row, reached in zip(probes, utilisation(probes), strict=True):
        levels[row.chip, row.run.precision].append(float(reached))
    everything = float(np.median(utilisation(probes)))
    known = [levels.get((row.chip, row.run.precision)) for row in rest]
    level = np.array([everything if each is None else float(np.median(each)) for each in known])
    return utilisation(rest) / level - 1.0


def _counts(row: Row, reached: float) -> bool:
    return row.source != SWEEP or reached >= FEWEST


def _three(errors: np.ndarray) -> tuple[float, float, float]:
    """Median, mean and 90th percentile of the absolute errors, in per cent."""
    absolute = 100.0 * np.abs(errors)
    return float(np.median(absolute)), float(absolute.mean()), float(np.quantile(absolute, 0.9))


def _below(name: str, figure: float, most: float | None, peer: str) -> Bar:
    """A predicted figure in per cent; None for a bar that is only reported."""
    if most is None:
        return Bar(name, round(figure, 3), "%", "reported", True, peer, "predicted")
    return Bar(name, round(figure, 3), "%", f"<= {most:g}", figure <= most, peer, "predicted")
