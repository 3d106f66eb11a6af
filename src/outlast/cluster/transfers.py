"""Rates for the copies of a run's checkpoints and data, as its job file says.

The trainer knows neither file systems nor plans; it is handed what `transfers_for` makes. Copies
are under way anyhow: training does not wait for a plan, nor the plan for training; whatever copy is
under way takes the bandwidth that its place in the schedule gives it among the others that are.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from outlast.cluster.copying import GentlePace, TokenBucket
from outlast.cluster.tasks.execute import Shares
from outlast.cluster.tasks.graph import figures_from_toml, run_graph
from outlast.cluster.tasks.planner import plan
from outlast.errors import ClusterError
from outlast.paths import read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from outlast.cluster.tasks.graph import RunFigures
    from outlast.cluster.tasks.schedule import Flow
    from outlast.job import Job


@dataclass(frozen=True)
class GentleCopies:
    """Copies that make way for strangers; travels to worker processes.

    Attributes:
        most_bytes_per_s: What a process gets when it is alone, by tier.
        stage_bytes_per_s: 0: staging has the limits of its own section.
    """

    most_bytes_per_s: Mapping[str, float]
    stage_bytes_per_s: ClassVar[float] = 0.0

    def tiers(self) -> dict[str, Callable[[int], AbstractContextManager[GentlePace]]]:
        """The pacing of each tier: what one of its copies has learnt, the next one knows."""
        return {
            name: _always(GentlePace.below(most)) for name, most in self.most_bytes_per_s.items()
        }


def _always(pace: GentlePace) -> Callable[[int], AbstractContextManager[GentlePace]]:
    return lambda step: contextlib.nullcontext(pace)


@dataclass(frozen=True)
class PlannedCopies:
    """Copies that follow a plan; travels to worker processes.

    All processes of a run copy the same version at the same time, each a part of it, so that each
    shares its part of the bandwidth in the same way and none needs to ask another.

    Attributes:
        bytes_per_s: Bandwidth by resource, of all that use it together.
        copies: For each tier, its copies by the step that was saved.
        stage_in: Of the data before the first step; None: nothing is staged.
        processes: That copy a checkpoint together.
        nodes: That stage data together.
    """

    bytes_per_s: Mapping[str, float]
    copies: Mapping[str, Mapping[int, Flow]]
    stage_in: Flow | None
    processes: int
    nodes: int

    @classmethod
    def of_run(cls, figures: RunFigures, processes: int, nodes: int) -> PlannedCopies:
        """Plan a run and keep what its copies need of the plan.

        Raises:
            ClusterError: For figures without a meaning.
        """
        schedule = plan(run_graph(figures))
        flows = {
            activity.name: schedule.flow_of(number)
            for number, activity in enumerate(schedule.graph.activities)
        }
        every = figures.save_every_steps
        saves = -(-figures.steps // every) if figures.save_bytes else 0
        copies = {
            tier.name: {
                min(save * every, figures.steps): flows[f"drain {save} to {tier.name}"]
                for save in range(tier.every, saves + 1, tier.every)
            }
            for tier in figures.tiers
        }
        staged = flows.get("stage-in")
        return cls(dict(figures.bytes_per_s), copies, staged, processes, nodes)

    def copy(self, tier: str, step: int) -> Flow:
        """Flow of the copy of a step to a tier.

        A save of another step than those planned, as that of a stop, has the place of the nearest.

        Raises:
            ClusterError: For a tier that is not planned.
        """
        planned = self.copies.get(tier)
        if not planned:
            raise ClusterError(f'no copies to a tier named "{tier}" are planned: add such a tier')
        return planned[min(planned, key=lambda item: (abs(item - step), item))]

    @property
    def stage_bytes_per_s(self) -> float:
        """Most for staging on a node; 0: no limit."""
        return 0.0 if self.stage_in is None else self.stage_in.cap_bytes_per_s / self.nodes

    def tiers(self) -> dict[str, Callable[[int], AbstractContextManager[TokenBucket]]]:
        """The pacing of each tier; those of one call share the bandwidth."""
        shares = Shares(self.bytes_per_s, 1.0 / self.processes)
        return {name: self._sharing(shares, name) for name in self.copies}

    def _sharing(
        self, shares: Shares, tier: str
    ) -> Callable[[int], AbstractContextManager[TokenBucket]]:
        @contextlib.contextmanager
        def pacing(step: int) -> Iterator[TokenBucket]:
            bucket = TokenBucket()
            shares.begin((tier, step), self.copy(tier, step), bucket)
            try:
                yield bucket
            finally:
                shares.end((tier, step))

        return pacing


def transfers_for(job: Job, *, processes: int, nodes: int) -> GentleCopies | PlannedCopies | None:
    """Rates that [checkpoint] asks for; None where copies only have the caps of their tiers.

    Args:
        job: Checked.
        processes: That copy a checkpoint together: of the run, or of a live group.
        nodes: Of the run.

    Raises:
        ClusterError: The plan cannot be read, or is of another run.
    """
    settings = job.checkpoint
    if settings.transfer_plan:
        where = f'checkpoint.transfer_plan = "{settings.transfer_plan}"'
        try:
            text = read_text(settings.transfer_plan)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
            raise ClusterError(f"{where} cannot be read ({reason}): give another file") from None
        figures = figures_from_toml(text, settings.transfer_plan)
        for problem in _differences(job, figures):
            raise ClusterError(f"{where} {problem}")
        return PlannedCopies.of_run(figures, processes, nodes)
    if not settings.back_off:
        return None
    rates = {
        "run": 1e6 * settings.drain_megabytes_per_s if settings.fast else 0.0,
        "mirror": 1e6 * settings.mirror_megabytes_per_s if settings.mirror else 0.0,
    }
    return GentleCopies({name: rate for name, rate in rates.items() if rate})


def _differences(job: Job, figures: RunFigures) -> Iterator[str]:
    """Differences between a plan and the job."""
    settings = job.checkpoint
    # Nodes and processes may change from link to link; each takes its part of the bandwidth.
    if figures.steps != job.train.steps:
        yield (
            f"is for {figures.steps} steps, but train.steps = {job.train.steps}; make them equal"
        )
    tiers = {tier.name: tier for tier in figures.tiers} if figures.save_bytes else {}
    wanted = {
        "run": (settings.fast, "checkpoint.fast", settings.drain_every, "drain_every"),
        "mirror": (settings.mirror, "checkpoint.mirror", settings.mirror_every, "mirror_every"),
    }
    for name, (place, setting, every, key) in wanted.items():
        if place and name not in tiers:
            yield (
                f'plans no copies to a tier named "{name}", but {setting} is given; add a [[tier]] '
                "of that name, and save_bytes to its [run]"
            )
        if place and name in tiers and tiers[name].every != every:
            yield (
                f'copies one save in {tiers[name].every} to "{name}", but checkpoint.{key} = '
                f"{every}; make them equal"
            )
    steps = settings.every_steps
    if tiers and steps not in ("auto", figures.save_every_steps):
        yield (
            f"saves every {figures.save_every_steps} steps, but checkpoint.every_steps = {steps}; "
            "make them equal"
        )
    if job.staging.directory and not figures.stage_in_bytes:
        yield "stages no data, but staging.directory is given; add stage_in_bytes to its [run]"
