"""Replay: the steps after a version are done again from their logs, and compared with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outlast.checkpoint.format.logs import leading_on
from outlast.checkpoint.format.manifest import REPLAY
from outlast.checkpoint.format.reader import VersionReader
from outlast.checkpoint.replay.trained import (
    DIGEST,
    EXTRA,
    GRADIENT,
    OBJECT,
    SETTINGS,
    TENSOR,
    Digest,
    Trained,
    add_digest,
)
from outlast.checkpoint.restore import read_into, whole_tensor
from outlast.errors import CheckpointError
from outlast.state import values
from outlast.state.install import Targets
from outlast.state.live import State, module_tensors, optimizers_of, plain_modules

if TYPE_CHECKING:
    from outlast.checkpoint.format.version import Contents, Version
    from outlast.checkpoint.tiers import Place
    from outlast.distributed.group import Group


@dataclass
class Replayed:
    """How far a run of logs could be replayed.

    Attributes:
        count: Logs whose digest fits, from the first on.
        problem: Why the next one could not be used; empty when all could. The live objects are of
            no use then.
        read_bytes: Bytes read from the storage by this rank.
        needed_bytes: Bytes of the tensors read.
    """

    count: int = 0
    problem: str = ""
    read_bytes: int = 0
    needed_bytes: int = 0


def logs_after(place: Place, base: Version) -> tuple[list[Version], str]:
    """The complete logs that lead on from `base` without a gap, and why newer ones do not.

    Args:
        place: Of the logs.
        base: A version of the state.
    """
    return leading_on(place.storage, base, place.load)


def replay(place: Place, logs: list[Version], state: State, ranks: Group) -> Replayed:
    """Apply `logs`, one after the other, to live objects that hold the version before them.

    All ranks call it together, and agree after every part of it.

    Args:
        place: Of the logs.
        logs: Those of consecutive steps.
        state: Module, optimizers and other objects.
        ranks: Those that restore together.
    """
    replayed = Replayed()
    trained = Trained(state, ranks)
    for log in logs:
        step, problem = None, ""
        try:
            with VersionReader(place.storage, place.load(log)) as reader:
                step = _read(reader, trained, state, whole=log == logs[-1])
                replayed.read_bytes += reader.counters.read_bytes
                replayed.needed_bytes += reader.counters.needed_bytes
        except Exception as error:
            # Whatever it is, the other ranks wait for an answer.
            problem = _words(error)
        problem = ranks.first_problem(problem)
        if step is not None and not problem:
            problem = _take(step, trained, ranks, private=place.private)
        if problem:
            replayed.problem = f"step {log.step} could not be replayed: {problem}"
            break
        replayed.count += 1
        if step is not None and log == logs[-1]:
            _install(step, trained, state)
    for parameter in trained.parameters.values():
        parameter.grad = None
    return replayed


@dataclass
class _Step:
    """A log as it was read; gradients and buffers are in their places already.

    Attributes:
        digest: The sums over all ranks whose parts were read.
        settings: One entry for every parameter group.
        objects: States of other objects by their names in the log; read for the last step only.
    """

    digest: Digest = field(default_factory=dict)
    settings: list[dict[str, Any]] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)


def _read(reader: VersionReader, trained: Trained, state: State, *, whole: bool) -> _Step:
    """Read gradients into ``.grad`` and buffers into the module, and the rest.

    Raises:
        CheckpointError: When the log is damaged or does not fit the state.
    """
    contents = reader.contents
    if contents.kind != REPLAY:
        raise CheckpointError("it is no replay log")
    read_into(_targets(contents, trained), reader)
    saved = contents.values

    def tensor(name: str, kind: str) -> Any:
        found = whole_tensor(reader, name)
        return found.numpy() if kind == "numpy" else found

    step = _Step()
    wanted = {f"{OBJECT}{key}" for key in _objects_of(state)}
    for name, value in saved.items():
        if name.startswith(DIGEST):
            add_digest(step.digest, value)
        elif name.startswith(SETTINGS):
            step.settings.append(values.decode(value, tensor))
        elif whole and (name in wanted or name.startswith(EXTRA)):
            step.objects[name] = values.decode(value, tensor)
    if whole and (missing := sorted(wanted - set(step.objects))):
        raise CheckpointError(
            f"it has no `{missing[0].removeprefix(OBJECT)}`; give ReplayLog the whole state"
        )
    return step


def _targets(contents: Contents, trained: Trained) -> Targets:
    """Where gradients and buffers go; parameters without a logged gradient are given none."""
    targets = Targets()
    live = dict(module_tensors(trained.module))
    for parameter in trained.parameters.values():
        parameter.grad = None
    for name, facts in contents.catalogue.tensors.items():
        kind, _, own = name.partition(".")
        if f"{kind}." == GRADIENT:
            tensor = trained.parameters.get(own)
            if tensor is not None:
                with torch.no_grad():
                    tensor.grad = torch.empty_like(tensor)
                targets.tensors[name] = tensor.grad
        elif f"{kind}." == TENSOR:
            tensor = live.get(own)
            if tensor is not None:
                targets.tensors[name] = tensor
        else:
            continue
        if tensor is None or tuple(tensor.shape) != facts.shape:
            raise CheckpointError(
                f"it has a `{name}` of shape {facts.shape}, which does not fit the model"
            )
    return targets


def _take(step: _Step, trained: Trained, ranks: Group, *, private: bool) -> str:
    """Run the optimizers and compare; the same answer on all ranks: what is wrong, or empty."""
    problem, digest = "", {}
    try:
        trained.set_settings(step.settings, "before")
        trained.step()
        digest = trained.digest()
    except Exception as error:
        # An optimizer that cannot go on from here is no reason to give up what was restored.
        problem = _words(error)
    total: Digest = {}
    logged: Digest = {}
    for number, (rank_problem, part, known) in enumerate(
        ranks.gather((problem, digest, step.digest))
    ):
        problem = problem or rank_problem
        add_digest(total, part)
        # In a private place each rank reads the sums that it wrote itself, else those of all.
        if private or number == 0:
            add_digest(logged, known)
    if problem:
        return problem
    wrong = sorted(name for name in {*total, *logged} if total.get(name) != logged.get(name))
    if not wrong:
        return ""
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return (
        f"it gives other bits of `{wrong[0]}`{more} than in training; the optimizer, its kernels "
        "or the gradient are not the same"
    )


def _words(error: Exception) -> str:
    named = isinstance(error, CheckpointError)
    return str(error) if named else f"{type(error).__name__}: {error}"


def _objects_of(state: State) -> list[str]:
    return [
        key
        for key, value in state.items()
        if not isinstance(value, nn.Module) and optimizers_of(value) is None
    ]


def _install(step: _Step, trained: Trained, state: State) -> None:
    """Hand over the settings and other states as they are after the step."""
    trained.set_settings(step.settings, "after")
    for key in _objects_of(state):
        state[key].load_state_dict(step.objects[f"{OBJECT}{key}"])
    for name, module in plain_modules(trained.module):
        if f"{EXTRA}{name}" in step.objects:
            module.set_extra_state(step.objects[f"{EXTRA}{name}"])
