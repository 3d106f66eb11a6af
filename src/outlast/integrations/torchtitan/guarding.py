"""A guard in torchtitan's trainer: a step's passes are done again where their numbers are wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from outlast.train.guarding import RunGuard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchtitan.trainer import Trainer

    from outlast.job import GuardSection


class Guarding:
    """The guard of one training.

    Args:
        trainer: Whose model, optimizers and passes are guarded.
        settings: Of the guard.
        seed: Of the slices that are checked.
        step: Steps that are done.

    Attributes:
        run: The guard.
    """

    def __init__(self, trainer: Trainer, settings: GuardSection, seed: int, step: int) -> None:
        self.run = RunGuard(settings, seed, trainer.model_parts[0], [*trainer.optimizers])
        self.run.restart(step)
        self._trainer = trainer
        self._attempts: Iterator[int] = iter(())
        self._parts: list[dict[str, Any]] = []
        self._losses: list[torch.Tensor] = []
        self._tokens_before = 0

    def part(self, own: Callable[..., torch.Tensor], **part: Any) -> torch.Tensor:
        """The passes of one of a step's parts, and of all of them again where it must be.

        Args:
            own: The trainer's own `forward_backward_step`.
            part: As it is given.

        Returns:
            The part's loss, with what repeated passes of the parts before have changed in theirs.

        Raises:
            WrongNumbersError: On all ranks, when numbers stay wrong.
        """
        trainer = self._trainer
        if not self._parts:
            self._tokens_before = trainer.ntokens_seen
            self._attempts = self.run.attempts()
            next(self._attempts)
        self._parts.append(part)
        # A CUDA graph writes the next loss over this one.
        self._losses.append(own(**part).detach().clone())
        if len(self._parts) < trainer.gradient_accumulation_steps:
            return self._losses[-1]
        loss, told = self._losses[-1], self._losses[:-1]
        for _ in self._attempts:
            # Where CUDA graphs replay the passes, the gradients must stay where they are.
            trainer.optimizers.zero_grad(set_to_none=trainer.config.training.disable_cuda_graphs)
            trainer.ntokens_seen = self._tokens_before
            again = [own(**part).detach().clone() for part in self._parts]
            loss = torch.stack(again).sum() - sum(told)
        self._parts, self._losses = [], []
        return loss
