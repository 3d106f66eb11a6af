"""All legal ways to run a model on a cluster, as arrays.

Axes are crossed one after the other, and rows that cannot run are dropped at once, so that few of
them are ever built. No Python loop runs over candidates: one is made an object when it is asked
for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from outlast.errors import PlanError
from outlast.plan.cases import Cases
from outlast.plan.cluster import Cluster
from outlast.plan.configuration import Configuration
from outlast.plan.pareto.axes import Axes, usual
from outlast.plan.pareto.front import Integers
from outlast.plan.pareto.layouts import LIMIT, Table, configuration_of, layouts_of, runnable
from outlast.plan.pareto.settings import Mechanisms, Settings
from outlast.plan.transformer import Transformer

_DEFAULTS = Mechanisms()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run, with everything that was chosen.

    Attributes:
        cluster: Its name.
        configuration: The layout.
        settings: The mechanisms.
    """

    cluster: str
    configuration: Configuration
    settings: Settings


@dataclass(frozen=True, slots=True)
class Block:
    """Some candidates, to be judged together; every layout's candidates are in one block.

    Attributes:
        layouts: (layouts,) what step time and memory depend on, before any mechanism.
        settings: The combinations of mechanism settings.
        layout: (candidates,) index into `layouts`, rising.
        setting: (candidates,) index into `settings`.
    """

    layouts: Cases
    settings: tuple[Settings, ...]
    layout: Integers
    setting: Integers

    def __len__(self) -> int:
        return len(self.layout)

    @property
    def cases(self) -> Cases:
        """(candidates,) the layout of each."""
        return self.layouts.taken(self.layout)

    def by_setting(self, values: Sequence[float]) -> np.ndarray:
        """(candidates,) of a number for each of `settings`."""
        return np.asarray(values, dtype=float)[self.setting]


@dataclass(frozen=True, slots=True)
class Space:
    """All candidates of one model on one cluster.

    Attributes:
        model: What is trained.
        cluster: On what.
        base: What all candidates share: batch, sequence, and what no axis varies.
        table: (layouts,) of each field that varies; words by their number in `WORDS`.
        layouts: (layouts,) the same as the model's formulas read it.
        settings: The combinations of mechanism settings.
        layout: (candidates,) index into `layouts`, rising.
        setting: (candidates,) index into `settings`.
        framework: Whose limits all candidates keep to; "any" where none was named.
    """

    model: Transformer
    cluster: Cluster
    base: Configuration
    table: Table
    layouts: Cases
    settings: tuple[Settings, ...]
    layout: Integers
    setting: Integers
    framework: str = "any"

    def __len__(self) -> int:
        return len(self.layout)

    def configuration(self, row: int) -> Configuration:
        """The layout of a candidate."""
        return configuration_of(self.base, self.table, int(self.layout[row]))

    def candidate(self, row: int) -> Candidate:
        """Everything about a candidate."""
        chosen = self.settings[self.setting[row]]
        return Candidate(self.cluster.name, self.configuration(row), chosen)

    @property
    def whole(self) -> Block:
        """All candidates together."""
        return Block(self.layouts, self.settings, self.layout, self.setting)

    def blocks(self, size: int = 16_384) -> Iterator[Block]:
        """All candidates in order, about `size` of them at a time, layouts never split."""
        begin = 0
        while begin < len(self):
            end = min(begin + max(size, 1), len(self))
            end = int(np.searchsorted(self.layout, self.layout[end - 1], side="right"))
            first = int(self.layout[begin])
            some = np.arange(first, int(self.layout[end - 1]) + 1)
            yield Block(
                self.layouts.taken(some),
                self.settings,
                self.layout[begin:end] - first,
                self.setting[begin:end],
            )
            begin = end


def space(
    model: Transformer,
    base: Configuration,
    cluster: Cluster,
    axes: Axes | None = None,
    mechanisms: Mechanisms = _DEFAULTS,
    *,
    framework: str = "any",
    target: str = "",
) -> Space:
    """All legal candidates.

    Args:
        model: What is trained.
        base: Batch, sequence and whatever no axis varies; its parallel sizes do not matter.
        cluster: On what.
        axes: What is varied; fields without a choice get the usual ones.
        mechanisms: Their settings, all combinations of which go with every layout (coding with so
            many copies only where there are as many replicas).
        framework: Whose limits to keep to, see `outlast.plan.frameworks`; of one that `emit` writes
            for, only what can be written.
        target: What they are to be written for, where that is another one.

    Raises:
        PlanError: No configuration is legal, or none can be written for the framework; an option is
            unknown to the cluster, or there are more than `LIMIT` candidates.
    """
    axes = usual(axes or Axes(), model, base, cluster, framework)
    table = layouts_of(model, base, axes)
    if len(table["data"]):
        table, layouts = runnable(model, base, cluster, table, framework=framework, target=target)
    count = len(table["data"])
    if not count:
        raise PlanError(
            f"no legal configuration of {model.name} with batch = {base.batch} and sequence = "
            f"{base.sequence} takes {_listed(axes.devices)} devices of {cluster.name}: give other "
            "device counts, or a batch that they divide"
        )
    settings = mechanisms.settings()
    if count * len(settings) > LIMIT:
        raise PlanError(
            f"{count:,} layouts with {len(settings):,} settings each are more than {LIMIT:,} "
            "candidates: give fewer choices of mechanisms or parallel sizes"
        )
    layout = np.repeat(np.arange(count), len(settings))
    setting = np.tile(np.arange(len(settings)), count)
    copies = np.array([setting.coding_copies for setting in settings])
    if copies.max() > 1:
        possible = copies[setting] <= table["data"][layout]
        layout, setting = layout[possible], setting[possible]
    return Space(model, cluster, base, table, layouts, settings, layout, setting, framework)


def _listed(numbers: Sequence[int]) -> str:
    some = [f"{number:,}" for number in numbers]
    return ", ".join(some[:6]) + (f" or {len(some) - 6} other numbers of" if len(some) > 6 else "")
