"""From injections and findings to rates, each with its Clopper-Pearson interval.

The unit is an *event*: all injections of one fault in one module and step. It is

harmful    when the weights after its step differ from the clean run's in a run without protection
           that was clean until that step; with several events in a step, when those of the step
           together do;
masked     when it is not harmful: no bit of the weights is different, protected or not;
detected   when a check that covers its site made a finding, of the same module or of all modules
           together, in its step (or at most `patience` steps later);
corrected  when it is detected, corrected, and no such finding left wrong values;
missed     when it is harmful and not detected.

Shares of harmful events are of all harmful ones, so that no figure rests on masked ones, which any
check may ignore. A finding in a step without an event, and not within `patience` of one, is a false
alarm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.extras import require
from outlast.guard.findings import HARMFUL

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from outlast.guard.findings import Finding
    from outlast.guard.inject.fault import Injection

_RIGHT = frozenset({"corrected", "check", "repeated", "restored"})
_SEEN_BY = {
    "weight": frozenset({"weight", "linear", "optimizer", "rest", "replicas"}),
    "optimizer": frozenset({"optimizer", "weight", "rest", "replicas"}),
    "bucket": frozenset({"all_reduce", "reduce_scatter"}),
    "gather": frozenset({"all_gather"}),
}
"""Checks, by the first part of their names, that see a site other than by its own name."""

_WHOLE = frozenset({"optimizer", "gradients", "parameters"})
"""Names under which checks look at all modules together."""


@dataclass(frozen=True)
class Rate:
    """`count` of `total` trials."""

    count: int
    total: int

    @property
    def share(self) -> float | None:
        """None without trials."""
        return self.count / self.total if self.total else None

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Two-sided Clopper-Pearson interval of the probability.

        From quantiles of the beta distribution (Clopper and Pearson, Biometrika 1934): it covers
        the true probability at least with `confidence`.
        """
        return self.at_least((1 + confidence) / 2), self.at_most((1 + confidence) / 2)

    def at_least(self, confidence: float = 0.95) -> float:
        """One-sided lower bound of the probability."""
        if not self.count:
            return 0.0
        return _beta_quantile(self.count, self.total - self.count + 1, 1 - confidence)

    def at_most(self, confidence: float = 0.95) -> float:
        """One-sided upper bound of the probability; about 3 / total for no event at 0.95."""
        if self.count == self.total:
            return 1.0
        return _beta_quantile(self.count + 1, self.total - self.count, confidence)

    def as_dict(self) -> dict[str, float]:
        """As JSON: count, total and the 95 % interval."""
        low, high = self.interval() if self.total else (0.0, 1.0)
        return {"count": self.count, "total": self.total, "low": low, "high": high}

    def __str__(self) -> str:
        if self.share is None:
            return "none of 0"
        low, high = self.interval()
        return f"{self.count} ({100 * self.share:.3g} %, {100 * low:.3g} to {100 * high:.3g})"


def _beta_quantile(first: int, second: int, share: float) -> float:
    require("plan", "the interval of a rate", "scipy")
    from scipy.special import betaincinv

    return float(betaincinv(first, second, share))


@dataclass(frozen=True)
class SiteOutcomes:
    """Outcomes of the events at one site.

    Attributes:
        site: As in `outlast.guard.findings.SITES`.
        injected: Events.
        masked: Of all events.
        harmful: Of all events.
        detected: Of the harmful events.
        corrected: Of the harmful events.
        missed: Of the harmful events.
        detected_of_all: Of all events, masked ones too.
        mean_latency_steps: From a detected event to its first finding; None without any.
        longest_latency_steps: As above.
    """

    site: str
    injected: int
    masked: Rate
    harmful: Rate
    detected: Rate
    corrected: Rate
    missed: Rate
    detected_of_all: Rate
    mean_latency_steps: float | None
    longest_latency_steps: int | None


@dataclass(frozen=True)
class Campaign:
    """The rows of all sites, and the false alarms.

    Attributes:
        rows: By site, and ``all`` last.
        false_alarms: Of the checks made.
    """

    rows: tuple[SiteOutcomes, ...]
    false_alarms: Rate

    def table(self) -> str:
        """As plain text: counts, shares and their 95 % Clopper-Pearson intervals in percent."""
        head = ("site", "injected", "masked", "harmful", "detected", "corrected", "missed")
        lines: list[tuple[str, ...]] = [(*head, "detected of all", "latency")]
        for row in self.rows:
            rates = (row.masked, row.harmful, row.detected, row.corrected, row.missed)
            mean = row.mean_latency_steps
            latency = "-" if mean is None else f"{mean:.3g} ({row.longest_latency_steps})"
            shown = (*map(str, rates), str(row.detected_of_all), latency)
            lines.append((row.site, str(row.injected), *shown))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
        alarms = self.false_alarms
        bound = f", at most {alarms.at_most():.2g} per check at 95 %" if alarms.total else ""
        end = f"false alarms: {alarms.count} in {alarms.total} checks{bound}"
        return "\n".join([*rows, end])


@dataclass(frozen=True)
class _Event:
    site: str
    harmful: bool
    corrected: bool
    latency: int | None


def campaign(
    injections: Iterable[Injection],
    findings: Sequence[Finding],
    harmful_steps: Collection[int],
    *,
    checks: int = 0,
    patience: int = 0,
) -> Campaign:
    """The statistics of a drill.

    Args:
        injections: Of the protected run, on all ranks.
        findings: Of the protected run, on all ranks.
        harmful_steps: Steps after which the unprotected run's weights differed from the clean
            run's, each step begun with the clean run's weights.
        checks: Comparisons that the protected run made.
        patience: Steps within which a finding still belongs to an event.
    """
    groups: dict[tuple[int, int, str, str], bool] = {}
    for injection in injections:
        key = (injection.fault, injection.step, injection.site, injection.module)
        groups[key] = groups.get(key, False) or injection.changed
    events = [
        _event(key, changed and key[1] in harmful_steps, findings, patience)
        for key, changed in groups.items()
    ]
    steps = {step for _, step, _, _ in groups}
    alarms = sum(
        not any(step <= finding.step <= step + patience for step in steps) for finding in findings
    )
    sites = dict.fromkeys(event.site for event in events)
    rows = [_row(site, [event for event in events if event.site == site]) for site in sites]
    return Campaign((*rows, _row("all", events)), Rate(alarms, max(checks, alarms)))


def covers(finding: Finding, site: str, module: str) -> bool:
    """Return whether a finding is of a check that sees faults of this site of this module."""
    family = _family(site)
    if _family(finding.operation) not in _SEEN_BY.get(family, {family}):
        return False
    # A parameter's name and its module's are the same place: one begins with the other.
    one, other = f"{finding.module}.", f"{module}."
    # Found going back, an operation is named by its autograd node: "attention of ...Backward0".
    anywhere = finding.module in _WHOLE or " of " in finding.module
    return anywhere or one.startswith(other) or other.startswith(one)


def _family(name: str) -> str:
    return name.split(".", maxsplit=1)[0]


def _event(
    key: tuple[int, int, str, str], harmful: bool, findings: Sequence[Finding], patience: int
) -> _Event:
    _, step, site, module = key
    own = [
        finding
        for finding in findings
        if step <= finding.step <= step + patience and covers(finding, site, module)
    ]
    return _Event(
        site,
        harmful,
        corrected=any(finding.outcome in _RIGHT for finding in own)
        and not any(finding.outcome in HARMFUL for finding in own),
        latency=min((finding.step - step for finding in own), default=None),
    )


def _row(site: str, events: list[_Event]) -> SiteOutcomes:
    harmful = [event for event in events if event.harmful]
    latencies = [event.latency for event in events if event.latency is not None]
    detected = sum(event.latency is not None for event in harmful)
    return SiteOutcomes(
        site=site,
        injected=len(events),
        masked=Rate(len(events) - len(harmful), len(events)),
        harmful=Rate(len(harmful), len(events)),
        detected=Rate(detected, len(harmful)),
        corrected=Rate(sum(event.corrected for event in harmful), len(harmful)),
        missed=Rate(len(harmful) - detected, len(harmful)),
        detected_of_all=Rate(len(latencies), len(events)),
        mean_latency_steps=sum(latencies) / len(latencies) if latencies else None,
        longest_latency_steps=max(latencies, default=None),
    )
