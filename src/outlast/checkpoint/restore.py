"""Restoring the newest version that is complete, fits and verifies, and replaying its logs.

All ranks go through the same versions in the same order and agree after each step, so that either
all take a version or none does. Tensors are read one batch of host memory at a time. The steps
after the version are done again from their logs, and compared with them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outlast.checkpoint.manifest import REPLAY
from outlast.checkpoint.reader import VersionReader, Wanted
from outlast.checkpoint.replay import (
    DIGEST,
    EXTRA,
    GRADIENT,
    OBJECT,
    SETTINGS,
    TENSOR,
    Digest,
    Trained,
    add_digest,
    has_optimizer,
)
from outlast.checkpoint.storage import describe_failure, sentence_of
from outlast.checkpoint.tiers import Place, Tiers
from outlast.checkpoint.version import UnfinishedError, Version, leading_on, list_versions
from outlast.errors import CheckpointError
from outlast.state import values
from outlast.state.box import Box, covers, whole
from outlast.state.install import Misfit, Saved, Targets, check_fit, find_targets, install
from outlast.state.live import (
    Filling,
    State,
    local_box,
    module_tensors,
    optimizers_of,
    plain_modules,
)
from outlast.state.tensors import dtype_of, opaque_array

if TYPE_CHECKING:
    from outlast.checkpoint.version import Contents
    from outlast.distributed.group import Group


_COPIED_BYTES = 256 << 20


def saved_in(contents: Contents) -> Saved:
    """Names and facts of everything that a version holds."""
    return Saved(contents.catalogue.tensors, contents.values, contents.catalogue.values)


def read_into(targets: Targets, reader: VersionReader) -> None:
    """Fill the live tensors of `targets`, one batch of host memory at a time.

    Raises:
        CheckpointError: When a tile is missing or damaged; tensors read before it are filled.
    """
    facts = reader.contents.catalogue.tensors
    batch: list[Filling] = []
    size = 0
    seen: set[int] = set()
    for name, tensor in targets.tensors.items():
        if name not in facts or facts[name].shape != tuple(tensor.shape) or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        filling = Filling(name, tensor, facts[name])
        batch.append(filling)
        size += filling.extra_bytes
        if size > _COPIED_BYTES:
            _fill(batch, reader)
            batch, size = [], 0
    _fill(batch, reader)


def _fill(batch: list[Filling], reader: VersionReader) -> None:
    reader.read([Wanted(filling.name, filling.box, filling.out) for filling in batch])
    for filling in batch:
        filling.finish()


def whole_tensor(reader: VersionReader, name: str) -> torch.Tensor:
    """One tensor of a version, whole, on the CPU."""
    facts = reader.contents.catalogue.tensors[name]
    tensor = torch.empty(facts.shape, dtype=dtype_of(facts))
    box = whole(facts.shape)
    reader.read([Wanted(name, box, opaque_array(tensor))])
    return tensor


@dataclass
class Replayed:
    """Result of replaying a run of logs.

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
    return leading_on(place.storage, base, lambda _, log: place.load(log))


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
            # Hand over the settings and other states as they are after the step.
            trained.set_settings(step.settings, "after")
            for key in _objects_of(state):
                state[key].load_state_dict(step.objects[f"{OBJECT}{key}"])
            for name, module in plain_modules(trained.module):
                if f"{EXTRA}{name}" in step.objects:
                    module.set_extra_state(step.objects[f"{EXTRA}{name}"])
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
    """Destinations of gradients and buffers; parameters without a logged gradient get none."""
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


@dataclass(frozen=True)
class Restored:
    """Result of a restore.

    Attributes:
        step: The step of the version that was loaded, or of the last replay log after it.
        skipped: One sentence for every newer version that could not be used, and for every tier
            that cannot be listed.
        read_bytes: Bytes read from the storage by this rank.
        needed_bytes: Bytes of the live tensors of this rank.
        place: Path or URL of the tier that it was read from.
    """

    step: int
    skipped: list[str] = field(default_factory=list)
    read_bytes: int = 0
    needed_bytes: int = 0
    place: str = ""


@dataclass(frozen=True)
class RestoreRequest:
    """The caller's request: the live objects, a step or the newest, misfits that are fine."""

    state: State
    step: int | None
    allow: Collection[Misfit]


class Restorer:
    """Restores from the tiers of a store, on all ranks together.

    Args:
        tiers: Where versions lie.
        log_place: Where replay logs lie.
        ranks: Those that restore together.

    Attributes:
        unfinished: A sentence for each version that was begun, where none is complete.
    """

    def __init__(self, tiers: Tiers, log_place: Place, ranks: Group) -> None:
        self._tiers = tiers
        self._log_place = log_place
        self._ranks = ranks
        self._place = tiers.first.storage.location
        self.unfinished: list[str] = []

    def restore(self, state: State, step: int | None, allow: Collection[Misfit]) -> Restored | None:
        """As `CheckpointStore.restore`."""
        wish = RestoreRequest(state, step, allow)
        self.unfinished = []
        tried: set[tuple[str, Version]] = set()
        skipped: list[str] = []
        damaged = False
        # Retention of a live run may delete all that was listed while newer versions come.
        while True:
            candidates, unlisted = self._candidates(step)
            skipped += [
                unavailable for unavailable in unlisted.values() if unavailable not in skipped
            ]
            news = [
                (place, version)
                for place, version in candidates
                if (place.storage.location, version) not in tried
            ]
            if not news:
                break
            for place, version in news:
                tried.add((place.storage.location, version))
                restored, problem, harmed = self._try(place, version, wish, skipped)
                if restored is not None:
                    return restored
                damaged = damaged or harmed
                skipped += [problem] if problem else []
        # A step that was asked for and begun is there, and no reason to begin with the first one.
        if not damaged and not unlisted and (step is None or not skipped):
            self.unfinished = skipped
            return None
        raise CheckpointError(
            f"no checkpoint in {self._place} can be used: {'; '.join(skipped)}; restore the files "
            "from a copy, or start anew elsewhere"
        )

    def logged(self) -> list[Version]:
        """The replay logs that this rank looks after.

        Raises:
            CheckpointError: When they cannot be listed.
        """
        if not self._log_place.keeps_house:
            return []
        try:
            return list_versions(self._log_place.storage)
        except OSError as error:
            raise CheckpointError(
                f"{self._log_place.storage.location} cannot be listed: {sentence_of(error)}"
            ) from None

    def all_logged(self) -> set[Version]:
        """The replay logs of all ranks, which call it together.

        Raises:
            CheckpointError: On all ranks, when one cannot list its logs.
        """
        mine: list[Version] = []
        problem = ""
        try:
            mine = self.logged()
        except CheckpointError as error:
            problem = str(error)
        if problem := self._ranks.first_problem(problem):
            raise CheckpointError(problem)
        return {log for logs in self._ranks.gather(mine) for log in logs}

    def _candidates(self, step: int | None) -> tuple[list[tuple[Place, Version]], dict[str, str]]:
        """List the versions to try, the best first, and why tiers could not be listed."""
        listed, unlisted = self._tiers.listed()
        if step is None:
            return listed, unlisted
        sessions = {version.session for version in self.all_logged() if version.step == step}
        chosen = [
            (place, version)
            for place, version in listed
            if version.step == step or (version.session in sessions and version.step < step)
        ]
        if not chosen:
            steps = ", ".join(map(str, sorted({item.step for _, item in listed}))) or "none"
            also = "".join(f"; {sentence}" for sentence in unlisted.values())
            raise CheckpointError(
                f"step = {step} is not in {self._place}; the steps there are {steps}{also}"
            )
        return chosen, unlisted

    def _try(
        self, place: Place, version: Version, wish: RestoreRequest, skipped: list[str]
    ) -> tuple[Restored | None, str, bool]:
        """Restore one version: what was restored, or why not and whether that is damage."""
        contents, problem, damaged = self._load_together(place, version)
        if contents is None:
            return None, problem, damaged
        restored, problem = self._restore_and_replay(place, contents, wish, skipped)
        return restored, problem, True

    def _load_together(self, place: Place, version: Version) -> tuple[Contents | None, str, bool]:
        """The manifests of `version`, or why they cannot be used, and whether that is damage.

        Where no rank has its part of a version, its save was cut short, which is no damage.
        """
        contents, problem, damaged = None, "", False
        try:
            contents = place.load(version)
        except UnfinishedError as error:
            problem = str(error)
        except CheckpointError as error:
            problem, damaged = str(error), True
        found = self._ranks.gather((contents is not None, problem, damaged))
        whole = [item for item, _, _ in found]
        damaged = any(whole) or any(item for _, _, item in found)
        problem = next((item for _, item, _ in found if item), "")
        if problem and not damaged:
            problem = f"{problem}: its save was cut short, or is still under way"
        return (contents if all(whole) else None), problem, damaged

    def _restore_and_replay(
        self, place: Place, contents: Contents, wish: RestoreRequest, skipped: list[str]
    ) -> tuple[Restored | None, str]:
        """Restore a version, and do the steps again that were logged after it, if they verify."""
        logs, unused = self._logs_after(contents.version, wish.state)
        step = wish.step
        if step is not None:
            logs = logs[: step - contents.version.step]
            if contents.version.step + len(logs) != step:
                gap = f"no replay logs lead from step {contents.version.step} to {step}"
                return None, unused or gap
            unused = ""
        problems = [unused] if unused else []
        while True:
            restored, problem = self._restore_version(place, contents, wish, skipped)
            if restored is None or not logs:
                break
            replayed = replay(self._log_place, logs, wish.state, self._ranks)
            restored = replace(
                restored,
                step=logs[-1].step,
                read_bytes=restored.read_bytes + replayed.read_bytes,
                needed_bytes=restored.needed_bytes + replayed.needed_bytes,
            )
            if not replayed.problem:
                break
            if step is not None:
                return None, replayed.problem
            # The live objects have gone astray: from the start, to the step before.
            problems.append(replayed.problem)
            logs = logs[: replayed.count]
        skipped += problems
        return restored, problem

    def _logs_after(self, base: Version, state: State) -> tuple[list[Version], str]:
        """The replay logs that lead on from `base` on all ranks, and why newer ones do not."""
        place = self._log_place
        mine = None
        if place.keeps_house:
            try:
                mine = logs_after(place, base)
            except (OSError, CheckpointError) as error:
                # The other ranks wait for an answer.
                reason = describe_failure(error)
                mine = [], f"the replay logs after step {base.step} cannot be read: {reason}"
        found = [rank for rank in self._ranks.gather(mine) if rank is not None]
        logs, unused = min(found, key=lambda array: len(array[0]))
        if logs and not all(self._ranks.gather(has_optimizer(state))):
            count = f"{len(logs)} replay log{'s' if len(logs) > 1 else ''}"
            return [], f"{count} after step {base.step} passed over: they need the optimizer"
        return logs, unused

    def _restore_version(
        self, place: Place, contents: Contents, wish: RestoreRequest, skipped: list[str]
    ) -> tuple[Restored | None, str]:
        step, location = contents.version.step, place.storage.location
        problem, targets, saved = "", None, saved_in(contents)
        try:
            targets = find_targets(wish.state, saved)
        except Exception as error:
            problem = str(error)
        names = {*targets.tensors, *targets.values} if targets is not None else set()
        taken = set().union(*self._ranks.gather(names))
        held = {*contents.catalogue.tensors, *contents.catalogue.values}
        if place.private:
            held = set().union(*self._ranks.gather(held))
        if targets is not None:
            problem = check_fit(targets, saved, taken, wish.allow)
            if place.private and not problem:
                boxes = {name: local_box(tensor)[0] for name, tensor in targets.tensors.items()}
                elsewhere = [name for name in targets.missing if name in held]
                lacking = next(iter(elsewhere), "") or not_held(contents, boxes)
                if lacking:
                    problem = f"rank {self._ranks.rank} did not save its part of `{lacking}`"
        if problem := self._ranks.first_problem(problem):
            sentence = f"{location}/{contents.version.folder} does not fit this model: {problem}"
            if place.private:
                # A rank may have had another share of the same model; lower tiers have all of it.
                return None, sentence
            raise CheckpointError(sentence)
        assert targets is not None
        counters, unexpected = None, None
        try:
            with VersionReader(place.storage, contents) as reader:
                read_into(targets, reader)
                counters = reader.counters
        except CheckpointError as error:
            problem = str(error)
        except Exception as error:
            # E.g. no memory: no other version would do, and the other ranks have to know.
            problem, unexpected = f"{type(error).__name__}: {error}", error
        fatal = self._ranks.any(unexpected is not None)
        problem = self._ranks.first_problem(problem)
        if fatal:
            raise unexpected or CheckpointError(problem)
        if problem:
            # A version also reads the packs of those before it, which the problem may name.
            folder = contents.version.folder
            return None, problem if folder in problem else f"{location}/{folder}: {problem}"
        assert counters is not None
        install(wish.state, targets, saved)
        read, needed = counters.read_bytes, counters.needed_bytes
        return Restored(step, skipped, read, needed, location), ""


def not_held(contents: Contents, boxes: dict[str, Box]) -> str:
    """The first tensor of which `contents` lacks a part of the given box; empty when none."""
    for name, box in boxes.items():
        pieces = [piece.box for part in contents.parts for piece in part.pieces.get(name, ())]
        if name not in contents.catalogue.tensors or box in pieces or not box.elements:
            continue
        common = (box.overlap(piece) for piece in pieces if len(piece.shape) == len(box.shape))
        inside = [
            Box(tuple(a - b for a, b in zip(item.offset, box.offset, strict=True)), item.shape)
            for item in common
            if item is not None
        ]
        if not covers(box.shape, inside):
            return name
    return ""
