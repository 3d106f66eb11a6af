"""A guard in a `Trainer`: steps are done again where their numbers are wrong."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from outlast.train.guarding import RunGuard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import Trainer

    from outlast.job import GuardSection
    from outlast.records import (
        CorruptionDetected,
        Guarded,
        MemberLost,
    )


class Guarding:
    """The guard of one trainer, from the beginning of each training to its end.

    Args:
        trainer: Whose steps are guarded.
        settings: Of the guard.
        seed: Of the slices that are checked.

    Attributes:
        run: The guard while a training runs; None otherwise.
        findings: Of all ranks in this training, as far as they are gathered.
    """

    def __init__(self, trainer: Trainer, settings: GuardSection, seed: int) -> None:
        self.run: RunGuard | None = None
        self.findings: list[CorruptionDetected | MemberLost] = []
        self._trainer = trainer
        self._settings = settings
        self._seed = seed
        self._attempts: Iterator[int] | None = None
        self._parts: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._losses: list[torch.Tensor] = []

    def begin(self, step: int) -> None:
        """Install it in what the Trainer has prepared; `step` steps are done."""
        optimizer = self._trainer.optimizer
        self.findings = []
        self._forget()
        self.run = RunGuard(
            self._settings,
            self._seed,
            self._trainer.model_wrapped,
            [getattr(optimizer, "optimizer", optimizer)],
        )
        for message in self.run.warnings:
            warnings.warn(message, stacklevel=2)
        self.run.restart(step)

    def part(
        self,
        own: Callable[..., torch.Tensor],
        model: torch.nn.Module,
        *arguments: Any,
        **options: Any,
    ) -> torch.Tensor:
        """Forward and backward pass of one of a step's parts, and of all again where it must be.

        Args:
            own: The trainer's own `training_step`.
            model: As it is given.
            arguments: As they are given.
            options: As they are given.

        Returns:
            The part's loss, with what repeated passes of the parts before have changed in theirs.

        Raises:
            WrongNumbersError: On all ranks, when numbers stay wrong.
        """
        if self.run is None:
            return own(model, *arguments, **options)
        if self._attempts is None:
            self._attempts = self.run.attempts()
            next(self._attempts)
        self._parts.append((arguments, options))
        self._losses.append(own(model, *arguments, **options))
        accelerator = self._trainer.accelerator
        if not accelerator.sync_gradients:
            return self._losses[-1]
        told = torch.stack(self._losses[:-1]).sum() if self._losses[1:] else 0.0
        for _ in self._attempts:
            model.zero_grad()
            self._losses = []
            for number, (given, named) in enumerate(self._parts, 1):
                if number < len(self._parts):
                    with accelerator.no_sync(model=model):
                        self._losses.append(own(model, *given, **named))
                else:
                    self._losses.append(own(model, *given, **named))
        total = torch.stack(self._losses).sum()
        self._forget()
        return total - told

    def gather(self) -> None:
        """Bring the findings of all ranks to rank 0; all ranks call it together."""
        if self.run is not None:
            self.findings += self.run.news()

    def summary(self, step: int) -> Guarded | None:
        """What has been checked in this training so far."""
        return None if self.run is None else self.run.summary(step)

    def figures(self, step: int) -> dict[str, float]:
        """For the logs: what has been found on all ranks, and checked on this one."""
        summary = self.summary(step)
        checks = {} if summary is None else {"guard_checks": float(summary.checks)}
        return {"guard_findings": float(len(self.findings)), **checks}

    def finish(self) -> None:
        """Make the last checks; all ranks together, after the last step."""
        if self.run is not None:
            self.run.finish()

    def remove(self) -> None:
        """Give the model back as it was."""
        run, self.run = self.run, None
        self._forget()
        if run is not None:
            run.guard.remove()

    def _forget(self) -> None:
        self._attempts, self._parts, self._losses = None, [], []
