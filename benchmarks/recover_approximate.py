"""What a lost pipeline stage costs in loss when it is filled from its neighbours.

    python benchmarks/recover_approximate.py [--quick] [--json FILE]

A small llama of three stages learns the source text of the Python standard library. After 150
steps the middle stage's weights and moments are lost. Filled with the mean of its neighbours
(`outlast.recover.approximate`), or with new random weights, training goes on for 100 steps and is
compared with the same training without a loss, over the same batches, for two seeds.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from checkpoint_workload import QUICK, STEPS, LiveTraining, Workload
from harness import Bar, arguments, at_most, median, publish

from outlast.recover.approximate import fill_lost_layers

LAST = 10
NEIGHBOURS, RANDOM = "filled from its neighbours", "filled with random weights"


@dataclass(frozen=True)
class Case:
    """One training and its loss of a stage.

    Attributes:
        lost_after: Steps before the stage is lost.
        goes_on: Steps after it.
    """

    workload: Workload
    lost_after: int
    goes_on: int


@dataclass(frozen=True)
class Excess:
    """Nats of loss above the run that lost nothing.

    Attributes:
        first: In the first step after the loss.
        last: Mean of the last steps.
    """

    first: float
    last: float


def bars(quick: bool) -> list[Bar]:
    layers, hidden, seeds = (3, 64, 1) if quick else (6, 128, 2)
    lost_after, goes_on = (15, 10) if quick else (150, STEPS - 150)
    found: dict[str, list[Excess]] = {NEIGHBOURS: [], RANDOM: []}
    for seed in range(seeds):
        workload = replace(QUICK, layers=layers, hidden=hidden, seed=20 + seed)
        for name, excess in _trial(Case(workload, lost_after, goes_on)).items():
            found[name].append(excess)
    of_random = median([each.last for each in found[RANDOM]])
    first = median([each.first for each in found[NEIGHBOURS]])
    return [
        at_most(
            f"approximate: loss after {goes_on} steps, middle stage {NEIGHBOURS}",
            median([each.last for each in found[NEIGHBOURS]]),
            "nats above the exact run",
            of_random,
            f"{RANDOM}: {of_random:.3f}; {layers} layers, {seeds} seed(s)",
        ),
        at_most(
            f"approximate: loss of the next step, middle stage {NEIGHBOURS}",
            first,
            "nats above the exact run",
            median([each.first for each in found[RANDOM]]),
            f"{RANDOM}: {median([each.first for each in found[RANDOM]]):.3f}",
        ),
    ]


def _trial(case: Case) -> dict[str, Excess]:
    training = LiveTraining(case.workload)
    for _ in range(case.lost_after):
        training.step()
    layers = case.workload.layers
    lost = range(layers // 3, 2 * layers // 3)
    # A copy of a model has no gradients.
    sides = (range(lost.start), range(lost.stop, layers))
    before, after = (_squared_gradients(training, side) for side in sides)
    exact = _go_on(copy.deepcopy(training), case.goes_on)
    found = {}
    for name in (NEIGHBOURS, RANDOM):
        hit = copy.deepcopy(training)
        if name == NEIGHBOURS:
            filled = fill_lost_layers(hit.model.state_dict(), lost, (before, after))
        else:
            filled = _anew(case.workload, lost)
        hit.model.load_state_dict(filled, strict=False)
        _forget_moments(hit, lost)
        losses = _go_on(hit, case.goes_on)
        last = sum(losses[-LAST:]) - sum(exact[-LAST:])
        found[name] = Excess(losses[0] - exact[0], last / LAST)
    return found


def _go_on(training: LiveTraining, steps: int) -> list[float]:
    return [training.step() for _ in range(steps)]


def _anew(workload: Workload, lost: range) -> dict[str, torch.Tensor]:
    fresh = LiveTraining(replace(workload, seed=workload.seed + 1000)).model
    names = tuple(f"model.layers.{layer}." for layer in lost)
    return {name: tensor for name, tensor in fresh.state_dict().items() if name.startswith(names)}


def _forget_moments(training: LiveTraining, lost: range) -> None:
    for parameter in _parameters(training, lost):
        training.optimizer.state.pop(parameter)


def _squared_gradients(training: LiveTraining, layers: range) -> float:
    gradients = (parameter.grad for parameter in _parameters(training, layers))
    return sum(float(each.square().sum()) for each in gradients if each is not None)


def _parameters(training: LiveTraining, layers: range) -> Iterable[torch.nn.Parameter]:
    return (each for layer in layers for each in training.model.model.layers[layer].parameters())


if __name__ == "__main__":
    options = arguments(str(__doc__).splitlines()[0])
    publish("recover", bars(options.quick), options.json, part=True)
