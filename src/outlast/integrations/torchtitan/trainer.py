"""torchtitan's trainer with Outlast beside it: `OutlastTrainer`.

It does what torchtitan's own `Trainer` does. Around its loop stands `Beside`: the guard, and the
records with energy and memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchtitan.trainer import Trainer

from outlast.integrations.torchtitan.beside import Beside
from outlast.integrations.torchtitan.settings import job_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor


class OutlastTrainer(Trainer):  # type: ignore[misc]
    """A `Trainer` whose steps are guarded, recorded and metered; `use_outlast` gives one.

    A trainer of one's own derives from it in place of `Trainer`.

    Raises:
        JobError: When a setting of the job is wrong.
        IntegrationError: When one does not go with the recipe.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]
        """A recipe, and where the settings of what Outlast does beside it are."""

        outlast_job: str = ""
        """A TOML file with the sections [guard], [recover], [energy] and [log]; empty: defaults."""

        outlast_settings: list[str] = field(default_factory=list)
        """Overrides of the form "section.key=value"."""

    def __init__(self, config: Config) -> None:
        # A wrong setting ends it before anything is built.
        self._job = job_of(config)
        self._beside: Beside | None = None
        super().__init__(config)

    def train(self) -> None:
        """Train to the last step; see `Trainer.train`."""
        with Beside(self, self._job) as self._beside:
            super().train()

    def should_continue_training(self) -> bool:
        """Whether a step is to follow; asked before each, the first time with everything loaded."""
        if self._beside is not None:
            self._beside.begin()
        return bool(super().should_continue_training())

    def batch_generator(self, data_iterable: Iterable[Any]) -> Iterator[Any]:
        """The batches; waiting for them is told apart in the records."""
        batches = super().batch_generator(data_iterable)
        while True:
            if self._beside is None:
                batch = next(batches)
            else:
                with self._beside.watch("data"):
                    batch = next(batches)
            yield batch

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """One step, guarded and recorded."""
        beside = self._beside
        if beside is None:
            super().train_step(data_iterator)
            return
        beside.observe_rate(self.optimizers.optimizers[0].param_groups[0]["lr"])
        with beside.watch("compute"):
            super().train_step(data_iterator)
        beside.step()

    def forward_backward_step(self, **part: Any) -> Tensor:
        """The passes of one of a step's parts, and again where their numbers are wrong."""
        own = super().forward_backward_step
        loss: Tensor = own(**part) if self._beside is None else self._beside.part(own, **part)
        return loss
