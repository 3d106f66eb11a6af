"""Restoring the newest version that is complete, fits and verifies, and replaying its logs.

All ranks go through the same versions in the same order and agree after each step, so that either
all take a version or none does. Tensors are read one batch of host memory at a time.

An optimizer is a function of parameters, gradients, its state and its settings. Between versions of
the state it is therefore enough to write every step's gradient: `CheckpointStore.restore` loads the
newest version, sets the logged gradients and runs the live optimizers. Whether that gave the bits
of the training is known, not assumed: every log holds a digest of what the step has to lead to.

replay = ReplayLog(store, {"model": model, "optimizer": optimizer})
for step in range(steps):
    ...                                   # forward, backward, clip the gradient
    replay.step(step + 1)                 # in place of optimizer.step()
    if (step + 1) % 100 == 0:
        store.save_async(step + 1, state)
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from outlast.checkpoint.lane import SaveHandle, SaveResult
from outlast.checkpoint.manifest import REPLAY, collection_paused
from outlast.checkpoint.reader import VersionReader, Wanted, untied
from outlast.checkpoint.storage import UnreadableError, describe_failure, sentence_of, within
from outlast.checkpoint.tiers import Place, Tiers
from outlast.checkpoint.version import (
    UnfinishedError,
    Version,
    leading_on,
    list_versions,
    listing,
    not_held,
)
from outlast.errors import CheckpointError
from outlast.state import values
from outlast.state.box import whole
from outlast.state.install import (
    Misfit,
    Saved,
    Targets,
    check_fit,
    decode_values,
    find_targets,
    install,
)
from outlast.state.live import (
    Filling,
    Live,
    State,
    has_extra_state,
    has_optimizer,
    local_box,
    module_tensors,
    name_of,
    objects_of,
    optimizers_of,
    parameter_names,
    parameters_of,
    plain_modules,
    put_into,
)
from outlast.state.sharded import is_dtensor
from outlast.state.tensors import dtype_of, opaque_array, sums_of_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outlast.checkpoint.store import CheckpointStore, LastSave
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
    reader.read([Wanted(name, whole(facts.shape), opaque_array(tensor))])
    return tensor


Digest = dict[str, list[int]]
"""Name to the sum of a tensor's bits read as integers, and that of their squares, modulo 2^64."""

GRADIENT, TENSOR, SETTINGS, OBJECT, EXTRA, DIGEST = (
    "gradient.",
    "tensor.",
    "settings.",
    "object.",
    "extra.",
    "digest.",
)
"""How the names of what a log holds begin."""

_MODULUS = 1 << 64


class Trained:
    """The parameters that optimizers train, by their plain names; made by all ranks together."""

    def __init__(self, state: State, ranks: Group) -> None:
        self.module = next(item for item in state.values() if isinstance(item, nn.Module))
        self.optimizers: list[tuple[str, torch.optim.Optimizer]] = []
        self.parameters: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}
        for key, value in state.items():
            optimizers = None if isinstance(value, nn.Module) else optimizers_of(value)
            if optimizers:
                self._names = parameter_names(state, key)
                self.optimizers += [(key, optimizer) for optimizer in optimizers]
        for key, optimizer in self.optimizers:
            for parameter in parameters_of(optimizer):
                self.parameters[name_of(parameter, self._names, key)] = parameter
        boxes = {name: local_box(parameter)[0] for name, parameter in self.parameters.items()}
        # What several ranks hold is counted by the first of them.
        earlier = ranks.gather(boxes)[: ranks.rank]
        self._first_of_name = {
            name for name in boxes if not any(name in array for array in earlier)
        }
        self._first_of_box = {
            name
            for name, box in boxes.items()
            if not any(array.get(name) == box for array in earlier)
        }

    @property
    def outdated(self) -> bool:
        """Return whether an optimizer was given other parameters."""
        now = {
            id(tensor) for _, optimizer in self.optimizers for tensor in parameters_of(optimizer)
        }
        return now != {id(parameter) for parameter in self.parameters.values()}

    def take_gradients(self, rounded: bool, *, copy: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Bring all gradients into the form in which they are replayed; yield copies if asked to.

        Args:
            rounded: Whether to round them in place to bfloat16.
            copy: Whether to yield name and copy, as bfloat16 where they were rounded.
        """
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                gradient = parameter.grad
                if gradient is None:
                    continue
                if gradient.layout != torch.strided or gradient.dtype != parameter.dtype:
                    raise CheckpointError(
                        f"the gradient of `{name}` is {gradient.layout}, {gradient.dtype}; only a "
                        f"dense one of the parameter's type {parameter.dtype} can be replayed"
                    )
                if gradient.stride() != parameter.stride():
                    # Kernels may round differently on another layout.
                    gradient = torch.empty_like(parameter).copy_(gradient)
                    parameter.grad = gradient
                if rounded and gradient.is_floating_point():
                    taken = gradient.to(torch.bfloat16)
                    if taken is not gradient:
                        gradient.copy_(taken)
                    elif copy:
                        taken = taken.clone()
                    if copy:
                        yield name, taken
                elif copy:
                    yield name, gradient.clone()

    def settings(self, when: str, live: Live) -> dict[str, dict[str, Any]]:
        """Settings of all parameter groups under the key `when`, by their names in the log."""
        found = {}
        for key, optimizer in self.optimizers:
            for group in optimizer.param_groups:
                names = [self._names[id(parameter)] for parameter in group["params"]]
                if names:
                    path = f"{SETTINGS}{key}.{names[0]}"
                    content = {name: member for name, member in group.items() if name != "params"}
                    encoded = values.encode(content, f"{path}.{when}", put_into(live, copied=True))
                    found[path] = {"optimizer": key, "parameters": names, when: encoded}
        return found

    def set_settings(self, settings: list[dict[str, Any]], when: str) -> None:
        """The inverse of `settings`, after decoding."""
        known = {
            (setting["optimizer"], name): setting[when]
            for setting in settings
            for name in setting["parameters"]
        }
        for key, optimizer in self.optimizers:
            for group in optimizer.param_groups:
                wanted = [(key, self._names[id(parameter)]) for parameter in group["params"]]
                if not wanted:
                    continue
                if any(known.get(pair) is not known.get(wanted[0]) for pair in wanted):
                    raise CheckpointError(f"`{key}` has other parameter groups than were logged")
                if wanted[0] not in known:
                    raise CheckpointError(f"there are no settings of `{wanted[0][1]}` for `{key}`")
                for name, value in known[wanted[0]].items():
                    if isinstance(value, torch.Tensor) and isinstance(group[name], torch.Tensor):
                        group[name].copy_(value)
                    else:
                        group[name] = value

    def step(self) -> None:
        """One step of every optimizer."""
        for _, optimizer in self.optimizers:
            optimizer.step()

    def digest(self) -> Digest:
        """The sums of all parameters and optimizer states that this rank counts.

        Sums over ranks do not depend on how the tensors are sharded, and integer sums not on the
        order of summation.
        """
        names, sums = [], []
        for name, parameter in self.parameters.items():
            if name in self._first_of_box:
                names.append(name)
                sums.append(sums_of_bits(parameter))
        for key, optimizer in self.optimizers:
            for parameter in parameters_of(optimizer):
                name = self._names[id(parameter)]
                for part, tensor in optimizer.state.get(parameter, {}).items():
                    if isinstance(tensor, torch.Tensor) and self._counts(name, tensor):
                        names.append(f"{key}.state.{name}.{part}")
                        sums.append(sums_of_bits(tensor))
        # One transfer per device, not one per tensor.
        return dict(zip(names, _on_host(sums), strict=True))

    def _counts(self, name: str, tensor: torch.Tensor) -> bool:
        parameter = self.parameters[name]
        if not is_dtensor(tensor) or not is_dtensor(parameter):
            return name in self._first_of_name
        alike = tensor.placements == parameter.placements
        return name in (self._first_of_box if alike else self._first_of_name)


def _on_host(sums: list[torch.Tensor]) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for device in {total.device for total in sums}:
        numbers = [number for number, total in enumerate(sums) if total.device == device]
        rows = torch.stack([sums[number] for number in numbers]).tolist()
        found.update(zip(numbers, ([item % _MODULUS for item in row] for row in rows), strict=True))
    return [found[number] for number in range(len(sums))]


def add_digest(total: Digest, part: Digest) -> None:
    """Add the sums of `part` to those of `total`, in place."""
    for name, sums in part.items():
        known = total.get(name, [0, 0])
        total[name] = [(one + other) % _MODULUS for one, other in zip(known, sums, strict=True)]


class Changes:
    """Changes of a step apart from the optimizers: buffers, and parameters moved by hand."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._copies: dict[str, torch.Tensor] = {}
        self._versions: dict[str, tuple[int, int]] = {}
        self.mark()
        self.found()

    def mark(self) -> None:
        """Take the parameters as they are now as unchanged; called when the optimizers are done."""
        self._versions = dict(self._versions_now())

    def found(self) -> dict[str, torch.Tensor]:
        """Changes since the mark, or the call before, by name in the log."""
        tensors = dict(module_tensors(self._module))
        # Parameters are large: a version counter tells of changes in place. Copies, because the
        # optimizers continue with them.
        changed = {
            TENSOR + name: tensors[name].detach().clone()
            for name, version in self._versions_now()
            if self._versions.get(name) != version
        }
        buffers = {
            name: local_box(tensor)[1]
            for name, tensor in tensors.items()
            if not isinstance(tensor, nn.Parameter)
        }
        for name, different in zip(buffers, self._compare(buffers), strict=True):
            if different:
                changed[TENSOR + name] = tensors[name]
                self._copies[name] = buffers[name].clone()
        return changed

    def _versions_now(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for name, tensor in module_tensors(self._module):
            if isinstance(tensor, nn.Parameter):
                memory = local_box(tensor)[1]
                yield name, (memory.data_ptr(), memory._version)

    def _compare(self, buffers: dict[str, torch.Tensor]) -> list[bool]:
        """Compare tensors with their copies; kernels that change buffers count no version."""
        results = []
        for name, memory in buffers.items():
            copy = self._copies.get(name)
            if copy is None or copy.shape != memory.shape or copy.dtype != memory.dtype:
                results.append(torch.tensor([True]))
            else:
                results.append(_bytes(copy).ne(_bytes(memory)).any().reshape(1))
        devices = {result.device for result in results}
        if len(devices) == 1 and results:
            return [bool(item) for item in torch.cat(results).tolist()]
        return [bool(result) for result in results]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


GradientKind = Literal["bf16", "exact"]


class ReplayLog:
    """Takes the optimizer's steps and logs each of them, so that no step done is lost.

    Logs lead on from the versions that `CheckpointStore.save_async` writes of the same `state`;
    before the first of them nothing is logged. After a log or a version that could not be written,
    nothing is logged either until the next version: a log is of no use without those before it.

    The rebuilt state has the same bits if the optimizer is a pure function of parameters,
    gradients, its state and its settings, and runs the same kernels. Where it is not (another
    device, stochastic rounding, another number of threads or ranks for an optimizer that sums over
    a matrix, as Muon does), the digest does not fit, and the restore ends at the last step that
    does. Elementwise optimizers such as AdamW and SGD can be replayed on any number of ranks.
    Parameters that are changed in place between the steps are logged whole.

    Args:
        store: Where versions and logs go; its versions must be exact.
        state: What is given to `save_async`: the module, its optimizers, and other objects, whose
            states are logged whole at every step and should be small.
        gradient: ``bf16`` rounds every gradient in place to bfloat16 (to nearest even) before the
            optimizer sees it. That changes the training slightly, by a relative error of at most
            2^-8 in each element, and makes logs some 2.5 times smaller than ``exact``, which leaves
            the training as it is.

    Raises:
        CheckpointError: When the state has no optimizer, or the store cannot be replayed from.
    """

    def __init__(
        self, store: CheckpointStore, state: State, *, gradient: GradientKind = "bf16"
    ) -> None:
        if gradient not in ("bf16", "exact"):
            raise CheckpointError(f'gradient = "{gradient}" must be bf16 or exact')
        if not has_optimizer(state):
            raise CheckpointError(
                f"a replay log needs a module and its optimizers, the state has only {list(state)}"
            )
        # Refuse a store whose versions cannot be the start of a replay.
        if store._reduction.lossy:
            raise CheckpointError(
                "a replay log needs exact versions to start from; make the store without lossy = "
                f"{store._reduction.lossy}"
            )
        if store._ranks.size > 1 and not store._coordinated:
            raise CheckpointError(
                "a replay log of several ranks needs a store with coordinated = True"
            )
        self._store = store
        self._state = dict(state)
        self._rounded = gradient == "bf16"
        self._trained = Trained(state, store._ranks)
        self._changes = Changes(self._trained.module)
        self._seen: LastSave | None = None
        self._bases: list[tuple[int, SaveHandle]] = []
        self._last_step: int | None = None
        self._log: SaveHandle | None = None
        self._stopped = "no version of this state has been saved by this store yet"

    def step(self, step: int, *, then: Callable[[], object] | None = None) -> SaveHandle:
        """Run `step()` of all optimizers, in place of calling them, and log it.

        Call it after backward and clipping. What belongs to the step but comes after the
        optimizers, such as the step of a learning-rate schedule, is given as `then`: the log holds
        the settings and other objects as they are after it.

        Args:
            step: Steps done when this one is done; versions are saved with the same numbers.
            then: Called after the optimizers, e.g. ``scheduler.step``.

        Returns:
            The log under way. Its result's `skipped` says why there is none.

        Raises:
            CheckpointError: When a gradient or an object's state cannot be logged.
        """
        reason = self._reason_not_to(step)
        if self._trained.outdated:
            self._trained = Trained(self._state, self._store._ranks)
        trained, live = self._trained, Live()
        changed = self._changes.found()
        live.tensors.update(changed)
        live.varying.update(changed)
        for name, gradient in trained.take_gradients(self._rounded, copy=not reason):
            live.tensors[GRADIENT + name] = gradient
        before = {} if reason else trained.settings("before", live)
        trained.step()
        if then is not None:
            then()
        self._last_step, self._log = step, None
        self._changes.mark()
        if reason:
            future: Future[SaveResult] = Future()
            future.set_result(SaveResult(step, 0.0, 0.0, 0, skipped=reason))
            return SaveHandle(future)
        after = trained.settings("after", live)
        for name, settings in before.items():
            live.values[name] = {**settings, **after[name]}
        _collect_objects(self._state, live)
        if digest := trained.digest():
            live.values[f"{DIGEST}{self._store._ranks.rank}"] = digest
        self._log = self._store.log_async(step, live, base=self._bases[0][0])
        return self._log

    def _reason_not_to(self, step: int) -> str:
        """Why this step is not logged; the same on all ranks, or empty on all."""
        if problem := self._problem_of_log():
            self._stop(f"the log of step {self._last_step} was not written: {problem}")
        if self._bases and self._last_step is not None and step != self._last_step + 1:
            self._stop(f"step {step} does not follow the step {self._last_step} before it")
        saved = self._store._last_save
        if saved is not None and saved is not self._seen:
            self._seen = saved
            if saved.step == step - 1 and set(saved.keys) >= set(self._state):
                if self._log is None:
                    self._bases = []
                self._bases.append((saved.step, saved.handle))
                self._stopped = ""
        self._drop_failed_bases()
        stop = self._store._ranks.any(bool(self._stopped))
        if stop and not self._stopped:
            self._stop("another rank could not log")
        return f"{self._stopped}; logs continue after the next saved version" if stop else ""

    def _problem_of_log(self) -> str:
        """Why the log of the step before is not there; waits for it where a save would wait."""
        if self._log is None:
            return ""
        if self._store._when_busy == "skip" and not self._log.done():
            return "it was still under way when the next one was due"
        result = self._log.result()
        return result.error or result.skipped

    def _drop_failed_bases(self) -> None:
        """Keep the newest published version that logs lead on from, and those under way after it.

        While none is published yet, those under way are kept from the first on.
        """
        sound, problems = [], []
        for base, handle in self._bases:
            problem = ""
            if handle.done():
                result = handle.result()
                problem = result.error or result.skipped
            if problem:
                problems.append(f"the version of step {base} was not saved: {problem}")
            else:
                sound.append((base, handle))
        if problems and not sound:
            self._stop(problems[-1])
        published = [number for number, (_, handle) in enumerate(sound) if handle.done()]
        self._bases = sound[published[-1] if published else 0 :]

    def _stop(self, reason: str) -> None:
        self._stopped, self._bases, self._log = reason, [], None


def _collect_objects(state: State, live: Live) -> None:
    """The states of all that is neither parameter, buffer nor optimizer, as they are now."""
    for key, value in state.items():
        if isinstance(value, nn.Module):
            for name, module in plain_modules(value):
                if has_extra_state(module):
                    path = f"{EXTRA}{name}"
                    live.values[path] = values.encode(
                        module.get_extra_state(), path, put_into(live, copied=True)
                    )
        elif optimizers_of(value) is None:
            path = f"{OBJECT}{key}"
            live.values[path] = values.encode(value.state_dict(), path, put_into(live, copied=True))


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


def replay(
    place: Place, logs: list[Version], state: State, ranks: Group, timeout_seconds: float
) -> Replayed:
    """Apply `logs`, one after the other, to live objects that hold the version before them.

    All ranks call it together, and agree after every part of it.

    Args:
        place: Of the logs.
        logs: Those of consecutive steps.
        state: Module, optimizers and other objects.
        ranks: Those that restore together.
        timeout_seconds: Longest wait for an answer of the storage.
    """
    replayed = Replayed()
    trained = Trained(state, ranks)
    for log in logs:
        step, problem = None, ""
        try:
            loads = functools.partial(place.load, log)
            contents = within(timeout_seconds, loads, place.storage.location)
            with VersionReader(place.storage, contents, timeout_seconds) as reader:
                step = _read(reader, trained, state, whole=log == logs[-1])
                replayed.read_bytes += reader.counters.read_bytes
                replayed.needed_bytes += reader.counters.needed_bytes
        except Exception as error:
            # Whatever it is, the other ranks wait for an answer.
            problem = describe_failure(error)
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
            for key in objects_of(state):
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
    wanted = {f"{OBJECT}{key}" for key in objects_of(state)}
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
        # An optimizer that cannot continue from here is no reason to give up what was restored.
        problem = describe_failure(error)
    total, logged = Digest(), Digest()
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


@dataclass(frozen=True)
class Restored:
    """Result of a restore.

    Attributes:
        step: The step of the version that was loaded, or of the last replay log after it.
        skipped: One sentence for every newer version that could not be used, for every tier that
            cannot be listed, and where all manifests were read because an index is damaged.
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
    """The caller's request; see `CheckpointStore.restore`."""

    state: State
    step: int | None
    allow: Collection[Misfit]
    after: int
    until: float


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

    @collection_paused()
    def restore(self, wish: RestoreRequest) -> Restored | None:
        """As `CheckpointStore.restore`."""
        self.unfinished = []
        tried, skipped, damaged = set[tuple[str, Version]](), list[str](), False
        # Retention of a live run may delete all that was listed while newer versions come.
        while True:
            candidates, unlisted = self._candidates(wish.step)
            skipped += [sentence for sentence in unlisted.values() if sentence not in skipped]
            news = [
                (place, version)
                for place, version in candidates
                if (place.storage.location, version) not in tried
                and version.step <= wish.until
                and (version.step > wish.after or self._leads_past(version, wish))
            ]
            if not news:
                break
            for place, version in news:
                tried.add((place.storage.location, version))
                contents, problem, harmed = self._load_together(place, version)
                if contents is not None:
                    restored, problem = self._restore_and_replay(place, contents, wish, skipped)
                    if restored is not None and restored.step > wish.after:
                        return restored
                    harmed = True
                damaged = damaged or harmed
                skipped += [problem] if problem else []
        # A step that was asked for and begun is there, and no reason to begin with the first one.
        if not damaged and not unlisted and (wish.step is None or not skipped):
            self.unfinished = skipped if wish.after < 0 else []
            return None
        raise CheckpointError(
            f"no checkpoint in {self._place} can be used: {listing(skipped)}; restore the files "
            "from a copy, or start anew elsewhere"
        )

    def logged(self) -> list[Version]:
        """The replay logs that this rank looks after.

        Raises:
            CheckpointError: When they cannot be listed.
        """
        if not self._log_place.keeps_house:
            return []
        storage = self._log_place.storage
        try:
            asks = functools.partial(list_versions, storage)
            return within(self._tiers.answer_seconds, asks, storage.location)
        except OSError as error:
            raise CheckpointError(
                f"{storage.location} cannot be listed: {sentence_of(error)}"
            ) from None

    def all_logged(self) -> set[Version]:
        """The replay logs of all ranks, which call it together.

        Raises:
            CheckpointError: On all ranks, when one cannot list its logs.
        """
        mine, problem = list[Version](), ""
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

    def _load_together(self, place: Place, version: Version) -> tuple[Contents | None, str, bool]:
        """The manifests of `version`, or why they cannot be used, and whether that is damage.

        Where no rank has its part of a version, its save was cut short, which is no damage.
        """
        contents, problem, damaged, unsure = None, "", False, False
        try:
            opens = functools.partial(place.open, version)
            contents = within(self._tiers.answer_seconds, opens, place.storage.location)
        except UnfinishedError as error:
            problem = str(error)
        except CheckpointError as error:
            problem, damaged, unsure = str(error), True, isinstance(error, UnreadableError)
        found = self._ranks.gather((contents is not None, problem, damaged, unsure))
        whole = [item for item, *_ in found]
        damaged = any(item for _, _, item, _ in found)
        if damaged and not any(item for *_, item in found):
            place.damaged.add(version)
        damaged = damaged or any(whole)
        problem = next((item for _, item, *_ in found if item), "")
        if problem and not damaged:
            problem = f"{problem}: its save was cut short, or is still under way"
        return (contents if all(whole) else None), problem, damaged

    def _restore_and_replay(
        self, place: Place, contents: Contents, wish: RestoreRequest, skipped: list[str]
    ) -> tuple[Restored | None, str]:
        """Restore a version, and do the steps again that were logged after it, if they verify."""
        logs, unused = self._logs_after(contents.version, wish.state)
        logs = [log for log in logs if log.step <= wish.until]
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
            timeout_seconds = self._tiers.answer_seconds
            replayed = replay(self._log_place, logs, wish.state, self._ranks, timeout_seconds)
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

    def own_logs(self, base: Version) -> tuple[list[Version], str]:
        """The replay logs that lead on from `base` on this rank, and why newer ones do not."""
        place = self._log_place
        try:
            logs = functools.partial(
                leading_on, place.storage, base, lambda _, log: place.load(log)
            )
            return within(self._tiers.answer_seconds, logs, place.storage.location)
        except (OSError, CheckpointError) as error:
            reason = describe_failure(error)
            return [], f"the replay logs after step {base.step} cannot be read: {reason}"

    def _leads_past(self, base: Version, wish: RestoreRequest) -> bool:
        """Return whether replay logs lead on from `base` to a step that is wanted."""
        logs, _ = self._logs_after(base, wish.state)
        return any(wish.after < log.step <= wish.until for log in logs)

    def _logs_after(self, base: Version, state: State) -> tuple[list[Version], str]:
        """The same on all ranks, which call it together."""
        mine = self.own_logs(base) if self._log_place.keeps_house else None
        found = [rank for rank in self._ranks.gather(mine) if rank is not None]
        logs, unused = min(found, key=lambda array: len(array[0]))
        if logs and not all(self._ranks.gather(has_optimizer(state))):
            count = f"{len(logs)} replay log{'s' if len(logs) > 1 else ''}"
            return [], f"{count} after step {base.step} passed over: they need the optimizer"
        return logs, unused

    def _fitting(
        self, place: Place, contents: Contents, wish: RestoreRequest, saved: Saved
    ) -> tuple[Targets | None, str]:
        """The targets of a version that fits, or why it is passed over."""
        problem, targets, more = "", None, contents.on_demand
        try:
            found = find_targets(wish.state, saved)
            if more is not None:
                more.read(found.boxes(saved))
            targets = found
        except Exception as error:
            problem = str(error)
        names = {*targets.tensors, *targets.values} if targets is not None else set()
        said = self._ranks.gather((names, None if more is None else more.failure))
        if failures := [failure for _, failure in said if failure is not None]:
            unsure = any(isinstance(failure, UnreadableError) for failure in failures)
            return None, self._passed_over(place, contents, str(failures[0]), unsure=unsure)
        taken = set().union(*(of_rank for of_rank, _ in said))
        held = {*contents.catalogue.tensors, *contents.catalogue.values}
        if place.private:
            held = set().union(*self._ranks.gather(held))
        if targets is not None:
            problem = check_fit(targets, saved, taken, wish.allow) or untied(
                contents, targets.tied(saved)
            )
            if place.private and not problem:
                elsewhere = [name for name in targets.missing if name in held]
                lacking = next(iter(elsewhere), "") or not_held(contents, targets.boxes(saved))
                if lacking:
                    problem = f"rank {self._ranks.rank} did not save its part of `{lacking}`"
        if problem := self._ranks.first_problem(problem):
            folder = contents.version.folder
            sentence = f"{place.storage.location}/{folder} does not fit this model: {problem}"
            if place.private:
                # A rank may have had another share of the same model; lower tiers have all of it.
                return None, sentence
            raise CheckpointError(sentence)
        return targets, ""

    def _passed_over(self, place: Place, contents: Contents, problem: str, *, unsure: bool) -> str:
        """Note that a version is damaged, unless that is not known; returns the sentence."""
        place.damaged.update(set() if unsure else {contents.version})
        # A version also reads the packs of those before it, which the problem may name.
        folder = contents.version.folder
        return problem if folder in problem else f"{place.storage.location}/{folder}: {problem}"

    def _restore_version(
        self, place: Place, contents: Contents, wish: RestoreRequest, skipped: list[str]
    ) -> tuple[Restored | None, str]:
        step, location, saved = contents.version.step, place.storage.location, saved_in(contents)
        targets, problem = self._fitting(place, contents, wish, saved)
        if targets is None:
            return None, problem
        counters, unexpected, unsure, decoded = None, None, False, {}
        try:
            timeout_seconds = self._tiers.answer_seconds
            with VersionReader(place.storage, contents, timeout_seconds) as reader:
                read_into(targets, reader)
                counters = reader.counters
            decoded = decode_values(targets, saved)
        except CheckpointError as error:
            problem, unsure = str(error), isinstance(error, UnreadableError)
        except Exception as error:
            # E.g. no memory: no other version would do, and the other ranks have to know.
            problem, unexpected = f"{type(error).__name__}: {error}", error
        fatal, unsure = self._ranks.any_of(unexpected is not None, unsure)
        problem = self._ranks.first_problem(problem)
        if fatal:
            raise unexpected or CheckpointError(problem)
        if problem:
            return None, self._passed_over(place, contents, problem, unsure=unsure)
        assert counters is not None
        install(wish.state, targets, saved, decoded)
        remarks = next(filter(None, self._ranks.gather(contents.remarks)), [])
        skipped += [sentence for sentence in remarks if sentence not in skipped]
        return Restored(step, skipped, counters.read_bytes, counters.needed_bytes, location), ""
