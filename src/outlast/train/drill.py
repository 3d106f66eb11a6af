"""A drill: train with faults on purpose and see what they do, with and without protection.

Three copies of the run go forward together on the same batches. The *clean* one meets no fault; its
findings are false alarms. The *bare* one begins every step with the clean one's state, meets the
faults and corrects nothing: what differs from the clean one afterwards is the faults' harm. The
*guarded* one meets the same faults under the job's own policy, so that its last weights show
whether everything was corrected. After a memory fault it goes back to what it has kept in memory,
as a run does. Only where a run would end it takes the clean one's state.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from outlast.data import MicroBatch
from outlast.distributed.group import gather_objects, raise_together
from outlast.errors import EXIT_DONE, DataCorruptionError, GuardError
from outlast.guard import Policy
from outlast.guard.inject import (
    OTHERS,
    PRODUCTS,
    Case,
    Fault,
    Injector,
    Rate,
    campaign,
    drill_operations,
    inject,
    parse_faults,
    summary_of,
)
from outlast.records import finite, replace_file
from outlast.train.build import build, load_data
from outlast.train.engine import ReplicaEngine

if TYPE_CHECKING:
    from torch import nn

    from outlast.data import Prepared
    from outlast.guard import Guard
    from outlast.guard.inject import SiteOutcomes
    from outlast.train.build import SetUp
    from outlast.train.loop import Trainer

RESULT = "drill.json"

SITES = (
    *("weight", "linear.output", "linear.dx", "linear.dw", "linear.operand", "linear.saved"),
    *("weight.rest", "linear.check", "embedding.output", "embedding.dw"),
    *("norm.output", "norm.dx", "norm.dw", "optimizer.state"),
    *("attention.output", "attention.dq", "attention.dk", "attention.dv", "loss.dlogits"),
)
"""Where the default faults strike; those that end in a restart stand apart."""


def default_faults(ranks: int, steps: int) -> list[str]:
    """One flip of any bit at each site in turn, one site per step, from the third step on."""
    sites = [*SITES, "bucket.during", "bucket.after"] if ranks > 1 else SITES
    return [
        f"{site}:bit=any:step={number + 2}:every={len(sites)}"
        for number, site in enumerate(sites)
        if number + 2 < steps
    ]


@dataclass(frozen=True)
class Drill:
    """A drill: its faults and choices.

    Attributes:
        faults: Texts as `outlast.guard.inject.parse_fault` reads them; process faults are passed
            over.
        seed: Of all choices.
        operations: Put so many faults into the results of operations instead.
        everywhere: Also into element-wise operations, norms and losses.
    """

    faults: tuple[str, ...]
    seed: int = 0
    operations: int = 0
    everywhere: bool = False

    def run(self, setup: SetUp) -> int:
        """Run all steps of the job with the faults; rank 0 writes `RESULT` to the run directory.

        Returns:
            The exit code.
        """
        raise_together(lambda: load_data(setup) if setup.ranks.is_first else None)
        data = raise_together(lambda: load_data(setup))
        if self.operations:
            return self._run_operations(setup, data)
        copies = _Copies.build(setup, data, self)
        try:
            steps = setup.job.train.steps
            for step in range(steps):
                copies.step(step)
                if setup.ranks.is_first and (step + 1) % setup.job.log.every_steps == 0:
                    print(f"drill: step {step + 1}/{steps}", flush=True)
            result = copies.result(self)
            if setup.ranks.is_first:
                file = setup.directory.path / RESULT
                replace_file(file, json.dumps(finite(result), indent=1).encode())
        finally:
            copies.close()
        return EXIT_DONE

    def _run_operations(self, setup: SetUp, data: Prepared) -> int:
        """Put faults into operations of the job's own model, and write `RESULT`."""
        if setup.ranks.world_size > 1:
            raise GuardError(
                f"launch.nproc = {setup.ranks.world_size}: faults in the results of operations are "
                "for one process; set it to 1"
            )
        trainer = _trainer(setup, data, guarded=False)
        engine, job = trainer.engine, setup.job
        if not isinstance(engine, ReplicaEngine) or trainer.device.type != "cpu":
            raise GuardError(
                f"the model is trained by {type(engine).__name__} on {trainer.device}: faults in "
                "the results of operations need one process that runs the whole model on the CPU"
            )
        tokens = job.train.batch_size * job.data.sequence_length

        def loss(_: nn.Module, step: int) -> torch.Tensor:
            sums = [engine.loss(part, step) for part in trainer.loader.batch(step)]
            return torch.stack(sums).sum() / tokens

        drill = drill_operations(
            Case(trainer.model, lambda step: step, loss),
            Policy(job.guard.policy, dict(job.guard.modules), seed=job.run.seed),
            name="the job's model",
            dtype="bf16" if engine.bf16_autocast else "fp32",
            faults=self.operations,
            seed=self.seed,
            operations=(*PRODUCTS, *OTHERS) if self.everywhere else PRODUCTS,
        )
        result = summary_of([drill], job.guard.policy)
        replace_file(setup.directory.path / RESULT, json.dumps(finite(result), indent=1).encode())
        trainer.store.close()
        return EXIT_DONE


@dataclass
class _Copies:
    """The three trainers, and what is known so far."""

    clean: Trainer
    bare: Trainer
    guarded: Trainer
    faults: tuple[Fault, ...]
    start: list[torch.Tensor]
    harmful_steps: list[int] = field(default_factory=list)
    noises: list[float] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    returns: list[dict[str, int]] = field(default_factory=list)

    @classmethod
    def build(cls, setup: SetUp, data: Prepared, drill: Drill) -> _Copies:
        """Three trainers of equal state, two of them with the faults."""
        faults = tuple(fault for fault in parse_faults(drill.faults) if isinstance(fault, Fault))
        clean, guarded = _trainer(setup, data), _trainer(setup, data)
        bare = _trainer(setup, data, correct=False)
        copies = cls(clean, bare, guarded, faults, _weights(clean))
        for trainer in (clean, bare, guarded):
            # As a run does: what changes from now on is found.
            _guard(trainer).restart(0)
        for trainer in (copies.bare, copies.guarded):
            inject(_guard(trainer), faults, seed=drill.seed, rank=setup.ranks.rank)
        return copies

    def step(self, step: int) -> None:
        """One step of all three."""
        parts = self.clean.loader.batch(step)
        due = any(fault.due(step) for fault in self.faults)
        before = _weights(self.clean) if due else []
        if due:
            _take_over(self.bare, self.clean)
        _guard(self.clean).prefer()
        self.clean.step(step, parts)
        if due:
            self._measure_harm(step, parts, before)
        _guard(self.guarded).prefer()
        if stop := self._guarded_step(step, due=due):
            # As after a restart from a checkpoint of this step without the defective device.
            self.stops.append(stop)
            _take_over(self.guarded, self.clean)
            _guard(self.guarded).restart(step + 1)
            self._keep(step + 1)

    def _guarded_step(self, step: int, *, due: bool) -> str:
        """One step of the guarded copy, and those before it again where it goes back.

        Returns:
            What would have ended a run; empty: nothing.
        """
        guarded, done = self.guarded, step
        while done <= step:
            parts = guarded.loader.batch(done)
            try:
                if due and (crash := _crash_of(guarded, done, parts)):
                    return crash
                if not due:
                    guarded.step(done, parts)
            except DataCorruptionError as error:
                guarded.runtime.step = found = done
                try:
                    done = guarded.go_back(error)
                except DataCorruptionError:
                    return str(error)
                self.returns.append({"step": found, "to": done})
            else:
                done += 1
                self._keep(done)
        return ""

    def _keep(self, step: int) -> None:
        """Keep the guarded copy's state in memory, where a run would."""
        runtime = self.guarded.runtime
        assert runtime.memory is not None
        if runtime.memory.due(step):
            runtime.keep(step, plan=any(gather_objects(runtime.memory.look(step))))

    def _measure_harm(self, step: int, parts: list[MicroBatch], before: list[torch.Tensor]) -> None:
        """Note whether the faults change the weights by more than another order of sums would."""
        after = _weights(self.clean)
        guard = _guard(self.bare)
        start = [optimizer.state_dict() for optimizer in self.bare.optimizers]
        start = copy.deepcopy(start)
        guard.prefer()
        guard.restart(step)
        with warnings.catch_warnings():
            # Where a fault stays, checks that rest on what it has changed are not made.
            warnings.filterwarnings("ignore", "not guarded in step")
            crashed = _crash_of(self.bare, step, parts)
        harm = math.inf if crashed else _distance(_weights(self.bare), after, before)
        fault_hook, guard.watch.fault_hook = guard.watch.fault_hook, None
        _load(self.bare, before, start)
        guard.restart(step)
        self.bare.step(step, [half for part in parts for half in _halves(part)])
        guard.watch.fault_hook = fault_hook
        noise = _distance(_weights(self.bare), after, before)
        self.noises.append(noise)
        if not harm <= noise:
            self.harmful_steps.append(step)

    def equal(self) -> bool:
        """True if the guarded copy's weights are the clean one's, bit for bit, on all ranks."""
        pairs = zip(_weights(self.guarded), _weights(self.clean), strict=True)
        return all(gather_objects(all(torch.equal(a, b) for a, b in pairs)))

    def result(self, drill: Drill) -> dict[str, Any]:
        """Summarise the drill, on all ranks together."""
        guard = _guard(self.guarded)
        findings = _joined(guard.ledger.findings)
        fault_hook = guard.watch.fault_hook
        assert isinstance(fault_hook, Injector)
        injections = _joined(fault_hook.injections)
        alarms = _joined(_guard(self.clean).ledger.findings)
        checks = sum(gather_objects(_guard(self.clean).ledger.checks))
        found = campaign(injections, findings, self.harmful_steps, checks=checks)
        alarm_rate = Rate(len(alarms), max(checks, len(alarms)))
        return {
            "faults": list(drill.faults),
            "seed": drill.seed,
            "policy": guard.policy.level,
            "rows": [_row(row) for row in found.rows],
            "idle": _joined([str(fault) for fault in fault_hook.idle]),
            "false_alarms": alarm_rate.as_dict() | {"at_most": alarm_rate.at_most()},
            "bits_equal": self.equal(),
            "stops": self.stops,
            "returns": self.returns,
            "noise": max(self.noises, default=0.0),
            "alarms": [dataclasses.asdict(alarm) for alarm in alarms],
            "distance": _distance(_weights(self.guarded), _weights(self.clean), self.start),
            "injections": [dataclasses.asdict(injection) for injection in injections],
            "findings": [dataclasses.asdict(finding) for finding in findings],
        }

    def close(self) -> None:
        """Give back what the trainers hold."""
        for trainer in (self.clean, self.bare, self.guarded):
            _guard(trainer).remove()
            trainer.runtime.forget()
            trainer.store.close()


def _guard(trainer: Trainer) -> Guard:
    assert trainer.guard is not None
    return trainer.guard.guard


def _trainer(
    setup: SetUp, data: Prepared, *, correct: bool = True, guarded: bool = True
) -> Trainer:
    """A trainer that keeps no checkpoints; without `correct` its guard only looks on."""
    job = setup.job
    changes = {
        "guard": job.guard.model_copy(
            update={"correct": job.guard.correct and correct} if guarded else {"policy": "off"}
        ),
        "checkpoint": job.checkpoint.model_copy(update={"replay": "off", "writer": "thread"}),
        "energy": job.energy.model_copy(update={"measure": False}),
    }
    own = dataclasses.replace(setup, job=job.model_copy(update=changes))
    trainer, _ = build(own, data, None)
    return trainer


def _crash_of(trainer: Trainer, step: int, parts: list[MicroBatch]) -> str:
    """Return what ended a step of any rank otherwise than by a verdict; empty: nothing did.

    A wrong count of steps, for one, makes Adam's update complex, which torch refuses.
    """
    error = ""
    try:
        trainer.step(step, parts)
    except (ArithmeticError, RuntimeError, ValueError) as problem:
        error = f"step {step + 1}: {type(problem).__name__}: {problem}"
        for optimizer in trainer.optimizers:
            optimizer.zero_grad(set_to_none=True)
    return next((object_ for object_ in gather_objects(error) if object_), "")


def _weights(trainer: Trainer) -> list[torch.Tensor]:
    """Copies of this rank's parts of the parameters."""
    return [_local(parameter).detach().clone() for parameter in trainer.model.parameters()]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _take_over(trainer: Trainer, other: Trainer) -> None:
    """Give `trainer` the weights and the optimizer state of `other`."""
    states = [optimizer.state_dict() for optimizer in other.optimizers]
    _load(trainer, _weights(other), copy.deepcopy(states))


def _load(trainer: Trainer, weights: list[torch.Tensor], states: list[dict[str, Any]]) -> None:
    with torch.no_grad():
        for parameter, weight in zip(trainer.model.parameters(), weights, strict=True):
            _local(parameter).copy_(weight)
    for optimizer, state in zip(trainer.optimizers, states, strict=True):
        optimizer.load_state_dict(state)


def _distance(
    weights: list[torch.Tensor], after: list[torch.Tensor], before: list[torch.Tensor]
) -> float:
    """|weights - after| / |after - before| in 2-norms, over all ranks; infinite for NaN."""
    squares = torch.zeros(2, dtype=torch.float64)
    for weight, end, start in zip(weights, after, before, strict=True):
        squares[0] += (weight.double() - end.double()).square().sum().cpu()
        squares[1] += (end.double() - start.double()).square().sum().cpu()
    change, step = (math.fsum(item) for item in zip(*gather_objects(squares.tolist()), strict=True))
    if not math.isfinite(change):
        return math.inf
    return math.sqrt(change / step) if step else float(change > 0)


def _halves(part: MicroBatch) -> list[MicroBatch]:
    """A micro-batch as two, so that its sums run in another order."""
    middle = len(part.sample_ids) // 2
    return [
        MicroBatch(part.sample_ids[cut], part.inputs[cut], part.targets[cut])
        for cut in (slice(None, middle), slice(middle, None))
    ]


def _joined(values: list[Any]) -> list[Any]:
    return [value for part in gather_objects(values) for value in part]


def _row(row: SiteOutcomes) -> dict[str, Any]:
    rates = ("masked", "harmful", "detected", "corrected", "missed", "detected_of_all")
    return {
        "site": row.site,
        "injected": row.injected,
        **{name: getattr(row, name).as_dict() for name in rates},
        "longest_latency_steps": row.longest_latency_steps,
    }
