"""Short runs that teach most about the constants, their choice and launch.

With a Gaussian prior of precision P over the log constants and a run whose log time has the
gradient x and the noise s, the information gained is `1/2 log det(P + sum x x' / s^2) - 1/2 log
det P` (Chaloner & Verdinelli 1995, section 2.2). It is monotone and submodular in the set of runs,
so that the greedy choice of k runs reaches at least 1 - 1/e = 63 % of the best k (Nemhauser, Wolsey
& Fisher 1978); with costs, gain per second and gain alone are both followed from several starts and
the best of these is taken (Khuller, Moss & Naor 1999).

A probe is a job file in a folder of its own and the run directory that the trainer leaves beside
it. A folder that is kept is read again and not run again.

Every few probes the constants are fitted again and the next probes chosen from there, since what a
run teaches depends on where the constants are (sequential design: Chaloner & Verdinelli 1995,
section 5).
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from outlast.errors import OutlastError, PlanError
from outlast.plan.batch import Array, Cases, cases
from outlast.plan.constants import memory_constants
from outlast.plan.here import divided
from outlast.plan.huggingface import SYNONYMS
from outlast.plan.job import run_of
from outlast.plan.memory import fits
from outlast.plan.run_rows import FRAMEWORK, read_run_row
from outlast.plan.step_fit import NOISE, Belonging, Fit, believed, fit
from outlast.plan.step_model import belonging
from outlast.plan.step_time import step_seconds

if TYPE_CHECKING:
    from outlast.job import Job
    from outlast.plan.cluster import Cluster
    from outlast.plan.configuration import Configuration
    from outlast.plan.rows import Row
    from outlast.plan.transformer import Transformer


FEWEST, MOST = 5, 12
_STARTS = 24
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Probes:
    """Chosen runs, best first.

    Attributes:
        rows: (k,) indices of the candidates.
        gains: (k,) information in nats that each adds to those before it.
        seconds: Of all runs together.
        shortage: Why there are fewer than asked for; empty where there are not.
    """

    rows: NDArray[np.intp]
    gains: Array
    seconds: float
    shortage: str = ""

    @property
    def gain(self) -> float:
        """Information of all runs together, in nats."""
        return float(self.gains.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Time and number of probes allowed.

    Attributes:
        seconds: Of all runs together.
        fewest: Runs that a calibration needs.
        most: Runs at most.
    """

    seconds: float
    fewest: int = FEWEST
    most: int = MOST


def choose_probes(
    jacobian: Array,
    prior_precision: Array,
    costs_seconds: Array,
    budget: Budget,
    noise: float | Array = 0.03,
) -> Probes:
    """The candidates to run, each at most once.

    The result depends on the arguments alone; of equal candidates the first is taken.

    Args:
        jacobian: (n, p) derivatives of log seconds by log constants, of feasible candidates.
        prior_precision: (p,) of the log constants: one over their variance; positive.
        costs_seconds: (n,) of running each; positive.
        budget: Seconds and number of runs.
        noise: Log standard deviation of one measurement, for all or (n,).

    Raises:
        PlanError: Shapes that differ, numbers that are not finite or not positive, or a budget
            below the cheapest candidate.
    """
    design, costs = _checked(jacobian, prior_precision, costs_seconds, noise)
    if budget.seconds < costs.min():
        raise PlanError(
            f"budget = {budget.seconds:g} s is below the {costs.min():g} s of the cheapest probe: "
            "raise it or shorten the probes"
        )
    # In units of the prior's deviations, the prior is the identity.
    design = design / np.sqrt(np.asarray(prior_precision, np.float64))
    alone = np.log1p(np.einsum("np,np->n", design, design)) / 2.0
    affordable = np.flatnonzero(costs <= budget.seconds)
    per_second = affordable[np.argsort(-alone[affordable] / costs[affordable], kind="stable")]
    by_gain = affordable[np.argsort(-alone[affordable], kind="stable")]
    starts = dict.fromkeys([*by_gain[:_STARTS].tolist(), *per_second[:_STARTS].tolist()])
    best: tuple[float, list[int], list[float]] | None = None
    for thrifty in (True, False):
        for start in (None, *starts):
            rows, gains = _greedy(design, costs, budget, thrifty, start)
            total = sum(gains)
            if best is None or total > best[0] * (1 + 1e-12):
                best = total, rows, gains
    assert best is not None
    rows, gains = _exchanged(design, costs, budget, best[1])
    seconds = float(costs[rows].sum())
    return Probes(
        np.array(rows, np.intp), np.array(gains), seconds, _shortage(len(rows), costs, budget)
    )


def information(jacobian: Array, prior_precision: Array, noise: float | Array = 0.03) -> float:
    """Nats that these runs add to the prior.

    Args:
        jacobian: (k, p) as in `choose_probes`.
        prior_precision: (p,).
        noise: Log standard deviation of one measurement, for all or (k,).
    """
    rows = np.asarray(jacobian, np.float64) / np.reshape(np.asarray(noise, np.float64), (-1, 1))
    rows = rows / np.sqrt(np.asarray(prior_precision, np.float64))
    # det(I + X'X) = det(I + XX'): the smaller of the two.
    gram = rows @ rows.T if rows.shape[0] < rows.shape[1] else rows.T @ rows
    return float(np.linalg.slogdet(np.eye(gram.shape[0]) + gram)[1]) / 2.0


def _checked(
    jacobian: Array, prior_precision: Array, costs_seconds: Array, noise: float | Array
) -> tuple[Array, Array]:
    """The jacobian in units of the noise, and the costs."""
    design = np.asarray(jacobian, np.float64)
    precision, costs = np.asarray(prior_precision, float), np.asarray(costs_seconds, float)
    noises = np.asarray(noise, np.float64)
    if design.ndim != 2 or not design.size:
        raise PlanError(f"jacobian has shape {design.shape}: give at least one candidate, (n, p)")
    count, constants = design.shape
    right = noises.shape in {(), (1,), (count,)}
    if precision.shape != (constants,) or costs.shape != (count,) or not right:
        raise PlanError(
            f"jacobian {design.shape} needs prior_precision ({constants},), costs_seconds "
            f"({count},) and noise () or ({count},); given are {precision.shape}, {costs.shape} "
            f"and {noises.shape}"
        )
    if not np.all(np.isfinite(design)):
        raise PlanError("jacobian is not finite everywhere: leave such candidates out")
    for name, values in (
        ("prior_precision", precision),
        ("costs_seconds", costs),
        ("noise", noises),
    ):
        if not (np.all(np.isfinite(values)) and np.all(values > 0)):
            raise PlanError(f"{name} has values that are not positive and finite: correct them")
    return design / noises.reshape(-1, 1), costs


def _greedy(
    design: Array, costs: Array, budget: Budget, thrifty: bool, start: int | None
) -> tuple[list[int], list[float]]:
    """One greedy pass, by gain per second (`thrifty`) or by gain.

    `spread[i] = x_i' A^-1 x_i` and `A^-1` follow each choice by rank-one updates (Sherman &
    Morrison 1950): O(n p) per choice.
    """
    inverse = np.eye(design.shape[1])
    spread = np.einsum("np,np->n", design, design)
    free = np.ones(len(costs), bool)
    left = budget.seconds
    rows: list[int] = []
    gains: list[float] = []
    while len(rows) < budget.most:
        possible = free & (costs <= left)
        if not possible.any():
            break
        gain = np.log1p(np.maximum(spread, 0.0)) / 2.0
        value = np.where(possible, gain / costs if thrifty else gain, -np.inf)
        row = start if start is not None and not rows else int(np.argmax(value))
        along = inverse @ design[row]
        grown = 1.0 + float(design[row] @ along)
        inverse -= np.outer(along, along) / grown
        spread -= (design @ along) ** 2 / grown
        rows.append(row)
        gains.append(float(gain[row]))
        free[row] = False
        left -= float(costs[row])
    return rows, gains


def _exchanged(
    design: Array, costs: Array, budget: Budget, rows: list[int]
) -> tuple[list[int], list[float]]:
    """Swaps one chosen run for a better one while that helps (Fedorov 1972), then orders them."""
    rows = list(rows)
    for _ in range(_REPEATS):
        before = list(rows)
        for place in range(len(rows)):
            rest = [row for index, row in enumerate(rows) if index != place]
            chosen = design[rest]
            inverse = np.linalg.inv(np.eye(design.shape[1]) + chosen.T @ chosen)
            spread = np.einsum("np,pq,nq->n", design, inverse, design, optimize=True)
            spread[costs > budget.seconds - float(costs[rest].sum())] = -np.inf
            spread[rest] = -np.inf
            better = int(np.argmax(spread))
            if spread[better] > spread[rows[place]] * (1 + 1e-9):
                rows[place] = better
        if rows == before:
            break
    own = Budget(seconds=float(costs[rows].sum()) * (1 + 1e-12), most=len(rows))
    order, gains = _greedy(design[rows], costs[rows], own, False, None)
    return [rows[index] for index in order], gains


def _shortage(count: int, costs: Array, budget: Budget) -> str:
    if count >= budget.fewest:
        return ""
    if len(costs) < budget.fewest:
        return f"only {len(costs)} candidates are feasible; {budget.fewest} probes are advised"
    return (
        f"{budget.seconds:g} s pay for {count} of the {budget.fewest} probes advised; "
        "raise the budget or shorten the probes"
    )


WIDTHS = (0.5, 1.0, 1.5, 2.0, 3.0)
LAYERS = (0.5, 1.0, 2.0, 3.0)
SEQUENCES = (0.5, 1.0, 2.0)
BATCHES = (0.5, 1.0, 2.0)
PASSES = (1, 2, 4)
"""Multiples of the job's own sizes; passes of one rank in a step."""
MOST_SETTINGS = 600
"""Settings that are looked at; of more, a random choice."""
_WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class Setting:
    """One way to run.

    Attributes:
        name: Tells it from all others of its family; a run's name.
        job: Checked, without checkpoints while it trains, evaluation, samples or export.
        model: As the planner reads it.
        run: As the planner reads it.
    """

    name: str
    job: Job
    model: Transformer
    run: Configuration


def family(job: Job, most_ranks: int, seed: int = 0, most: int = MOST_SETTINGS) -> list[Setting]:
    """Settings around a job that the trainer takes: sizes, batch, precision, division of the work.

    Args:
        job: Whose model has a config.
        most_ranks: Processes that the machine has room for.
        seed: Of the choice where there are more than `most`.
        most: Settings at most.

    Raises:
        PlanError: The planner cannot read the job's model, or no setting is possible.
    """
    base = _model_table(job)
    run_of(_laid_out(job, 1, "replicate"), 1)
    grid = list(
        itertools.product(
            WIDTHS,
            LAYERS,
            SEQUENCES,
            BATCHES,
            PASSES,
            (False, True),
            ("fp32", "bf16"),
            _layouts(most_ranks),
        )
    )
    found: dict[str, Setting] = {}
    for index in np.random.default_rng(seed).permutation(len(grid)):
        setting = _setting(job, base, grid[int(index)])
        if setting is not None:
            found.setdefault(setting.name, setting)
        if len(found) == most:
            break
    if not found:
        raise PlanError(
            f"no setting near the job {job.run.name} can be run here: give another job, or none "
            "for the quickstart's"
        )
    return list(found.values())


def _layouts(most_ranks: int) -> list[tuple[int, str]]:
    """Ranks and what they do; one rank is the most usual."""
    found = [(1, "replicate")] * 2
    ranks = 2
    while ranks <= most_ranks:
        found += [(ranks, "replicate"), (ranks, "shard")]
        ranks *= 2
    return found


def _model_table(job: Job) -> dict[str, Any]:
    """The config of the job's model, from the job or from its file."""
    if job.model.settings:
        return dict(job.model.settings)
    place = Path(job.model.config or job.model.directory or "")
    file = place / "config.json" if place.is_dir() else place
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        raise PlanError(
            f"the model of the job {job.run.name} has no config that can be varied ({file}): give "
            "model.config or [model.settings], or calibrate without a job"
        ) from None


def _setting(job: Job, base: Mapping[str, Any], choice: tuple[Any, ...]) -> Setting | None:
    """A setting of the grid; None where the trainer or the planner would refuse it."""
    width, layers, sequence, batch, passes, again, precision, (ranks, kind) = choice
    table = _scaled(base, width, layers)
    length = max(int(job.data.sequence_length * sequence), 8)
    samples = max(int(job.train.batch_size * batch), 1)
    if table is None or samples % (ranks * passes):
        return None
    for key in SYNONYMS["max_position_embeddings"]:
        if key in table:
            table[key] = max(int(table[key]), length)
    varied = _laid_out(job, ranks, kind).model_copy(
        update={
            "model": job.model.model_copy(
                update={"settings": table, "config": None, "directory": None}
            ),
            "data": job.data.model_copy(
                update={"sequence_length": length, "validation_fraction": 0.0, "validation": []}
            ),
            "train": job.train.model_copy(
                update={
                    "batch_size": samples,
                    "micro_batch_size": samples // (ranks * passes) if passes > 1 else 0,
                    "precision": precision,
                    "activation_checkpointing": again,
                }
            ),
        }
    )
    try:
        model, run = run_of(varied, ranks)
    except OutlastError:
        return None
    division = "" if ranks == 1 else f"-{kind}{ranks}"
    name = (
        f"h{model.hidden}-l{model.layers}-s{length}-b{samples}-m{run.micro_batch}-{precision}"
        f"{'-again' if again else ''}{division}-{job.optimizer.name}"
    )
    return Setting(name, varied, model, run)


def _laid_out(job: Job, ranks: int, kind: str) -> Job:
    degrees = {"replicate": 1, "shard": 1, "tensor": 1, "pipeline": 1, kind: ranks}
    parallel = job.parallel.model_copy(update=degrees)
    return job.model_copy(update={"parallel": parallel})


def _scaled(base: Mapping[str, Any], width: float, layers: float) -> dict[str, Any] | None:
    """The config with more or fewer heads of the same width; None where one would break."""
    table = dict(base)
    factors = dict.fromkeys(_WIDTHS, width) | {"num_hidden_layers": layers}
    for name, factor in factors.items():
        for key in SYNONYMS[name]:
            if isinstance(table.get(key), int):
                size = table[key] * factor
                if size % 1 or size < 1:
                    return None
                table[key] = int(size)
    return table


FEWEST_STEPS, MOST_STEPS = 10, 60
MEASURED_SECONDS = 7.0
"""That the steps of a probe should take together."""
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "SLURM_", "PMI_", "OMPI_")


@dataclass(frozen=True)
class Probe:
    """A setting that was run.

    Attributes:
        setting: What was run.
        row: What was measured.
        seconds: From the start of the process to its end; 0 where it was read from a kept folder.
        steps: That it trained; 0 likewise.
    """

    setting: Setting
    row: Row
    seconds: float
    steps: int = 0


_NO_TRACKERS = {
    "tensorboard": False,
    "wandb_project": None,
    "mlflow_experiment": None,
    "trackio_project": None,
}


def probe_job(setting: Setting, folder: Path, steps: int) -> Job:
    """The job of a short run that does nothing but train, and one small checkpoint at its end.

    Args:
        setting: Model, batch and division of the work.
        folder: That will hold the run directory.
        steps: Of the run.
    """
    job, ranks = setting.job, setting.run.devices
    quiet: dict[str, Mapping[str, object]] = {
        "run": {"name": setting.name, "directory": str(folder)},
        "train": {"steps": steps, "compile": False, "stop_after_steps": 0},
        "checkpoint": {"every_steps": 0, "writer": "thread", "replay": "off", "mirror": ""},
        "evaluate": {"every_steps": 0},
        "sample": {"tokens": 0},
        "export": {"huggingface": False},
        "energy": {"measure": False, "prometheus_port": 0},
        "guard": {"policy": "off", "modules": {}},
        "coding": {"scheme": "off"},
        "tensorize": {"form": "off"},
        "log": {"every_steps": steps, **_NO_TRACKERS},
        "launch": {"nproc": ranks, "restarts": 0},
        "schedule": {"name": "constant", "warmup_steps": 0},
    }
    sections = {name: getattr(job, name).model_copy(update=item) for name, item in quiet.items()}
    return job.model_copy(update=sections)


def steps_for(predicted_seconds: float) -> int:
    """Steps of a probe whose step takes about as long as given."""
    wanted = int(np.ceil(MEASURED_SECONDS / max(predicted_seconds, 1e-6)))
    return int(np.clip(wanted, FEWEST_STEPS, MOST_STEPS))


def run_probe(
    setting: Setting, cluster: Cluster, folder: Path, steps: int, timeout_seconds: float
) -> Probe:
    """Train a setting for some steps, or read what an earlier call has trained in the folder.

    Args:
        setting: What to run.
        cluster: This machine with one rank, or with one rank per GPU.
        folder: For the job file and the run directory.
        steps: To train.
        timeout_seconds: After which the run is ended.

    Raises:
        PlanError: The run fails or takes too long.
    """
    from outlast.job import to_toml

    kept = kept_probe(setting, cluster, folder)
    if kept is not None:
        return kept
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{setting.name}.toml"
    file.write_text(to_toml(probe_job(setting, folder, steps), comments=False), encoding="utf-8")
    command = [sys.executable, "-m", "outlast", "train", str(file), "--fresh"]
    begun = time.monotonic()
    output = _ended(command, timeout_seconds, setting.name)
    found = kept_probe(setting, cluster, folder)
    if found is None:
        last = (output.strip().splitlines() or ["it printed nothing"])[-1]
        raise PlanError(f"probe {setting.name} did not finish: {last}")
    return replace(found, seconds=time.monotonic() - begun, steps=steps)


def kept_probe(setting: Setting, cluster: Cluster, folder: Path) -> Probe | None:
    """Result of an earlier run of the setting; None where none was completed."""
    from outlast.records import read_run

    directory = folder / setting.name
    if not (directory / "events.jsonl").is_file():
        return None
    try:
        attempts = read_run(directory).attempts
        if not attempts or attempts[-1].outcome != "completed":
            return None
        row = read_run_row(directory, divided(cluster, setting.run.devices))
    except OutlastError:
        return None
    # The machine stands for the cluster, so that its runs correct each other.
    return Probe(setting, replace(row, source=cluster.name), 0.0)


def _ended(command: Sequence[str], timeout_seconds: float, name: str) -> str:
    """Run a command and return its output; its whole process group is ended after the timeout."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in _LAUNCHER and not key.startswith(_LAUNCHER_PREFIXES)
    }
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # Ranks that it starts belong to the group and end with it.
        process_group=0,
    )
    try:
        output, _ = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        raise PlanError(
            f"probe {name} was ended after {timeout_seconds:.0f} s: free the machine of other work"
        ) from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return output


SECONDS = 300.0
"""Wall time of all probes."""
AT_ONCE = 3
"""Probes that are chosen before the constants are fitted again."""
LONGEST_STEP_SECONDS = 1.2
SHORTEST_STEP_SECONDS = 0.015
FIRST_STEPS = 15
"""Of a probe while no more than two others are known."""
START_SECONDS = 9.0
"""Of a process until its first step and after its last, before any was seen."""
JITTER_SECONDS = 2e-3
"""Of a step, whatever its length: other programs, the clock of the processor."""
LEAST_HEADROOM = 0.3
"""Share of the memory that a probe must leave, since the memory model is not calibrated yet."""
MISSED = 0.08
"""Log standard deviation of what the formulas miss, per doubling of a size."""
_SIZES = ("hidden", "layers", "sequence", "micro_batch", "micro_batches")
_UNSURE = 1.5
_FAILURES = 3


@dataclass
class Probing:
    """Probes that are being run.

    Attributes:
        cluster: This machine, as `here.measured_cluster` gives it.
        settings: To choose from.
        folder: For jobs and run directories; what is there already is not run again.
        seconds: Wall time for all.
        say: Told in words what happens.
        runner: Runs one setting, as `run_probe` does.
        probes: Done so far.
        failures: Sentences about settings that did not run.
    """

    cluster: Cluster
    settings: Sequence[Setting]
    folder: Path
    seconds: float = SECONDS
    say: Callable[[str], None] = print
    runner: Callable[[Setting, Cluster, Path, int, float], Probe] = run_probe
    probes: list[Probe] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def run(self) -> list[Probe]:
        """Run probes until enough is known or the time is over.

        Raises:
            PlanError: So many fail or take so long that too few are left to fit.
        """
        self._read_kept()
        deadline = time.monotonic() + self.seconds
        left = [setting for setting in self.settings if setting.name not in self._names()]
        while left and len(self.probes) < MOST and len(self.failures) < _FAILURES:
            chosen = self._choose(left, deadline - time.monotonic())
            if not chosen:
                break
            for setting, seconds in chosen:
                remaining = deadline - time.monotonic()
                if self._cost(seconds) > remaining:
                    break
                self._one(setting, seconds, remaining)
            left = [item for item in left if item not in [setting for setting, _ in chosen]]
        if len(self.probes) < FEWEST:
            reasons = f" ({self.failures[-1]})" if self.failures else ""
            raise PlanError(
                f"{len(self.probes)} probes finished within {self.seconds:.0f} s, and {FEWEST} are "
                f"needed{reasons}: give more seconds or a smaller job"
            )
        return self.probes

    def _names(self) -> set[str]:
        return {probe.setting.name for probe in self.probes}

    def _read_kept(self) -> None:
        for setting in self.settings:
            kept = kept_probe(setting, self.cluster, self.folder)
            if kept is not None:
                self.probes.append(kept)
        if self.probes:
            self.say(f"{len(self.probes)} probes of an earlier time are read again")

    def _one(self, setting: Setting, seconds: float, remaining: float) -> None:
        steps = self._steps(seconds)
        longest = min(3.0 * self._cost(seconds) + 30.0, remaining)
        try:
            probe = self.runner(setting, self.cluster, self.folder, steps, longest)
        except PlanError as error:
            self.failures.append(str(error))
            self.say(str(error))
            return
        self.probes.append(probe)
        self.say(
            f"probe {len(self.probes)}: {setting.name}, {probe.row.step_seconds or 0.0:.3f} s per "
            f"step, {probe.seconds:.0f} s in all"
        )

    def _steps(self, step: float) -> int:
        """Few while nothing is known: the priors may be far off, and the time is limited."""
        wanted = steps_for(step)
        return wanted if len(self.probes) >= AT_ONCE else min(wanted, FIRST_STEPS)

    def _fit(self) -> Fit:
        if not self.probes:
            return believed([self._whose])
        rows = [probe.row for probe in self.probes]
        numbers = cases([(row.model, row.run, row.cluster) for row in rows])
        seconds = np.array([row.step_seconds for row in rows], dtype=np.float64)
        return fit(numbers, seconds, [belonging(row) for row in rows])

    @property
    def _whose(self) -> Belonging:
        return Belonging(self.cluster.device, self.cluster.name, FRAMEWORK)

    def _choose(self, left: Sequence[Setting], seconds: float) -> list[tuple[Setting, float]]:
        """The next probes and the seconds that a step of each should take."""
        found = self._fit()
        numbers, whose = numbers_of(left, self.cluster), [self._whose] * len(left)
        expected = step_seconds(numbers, found.constants(whose))
        within = (expected <= LONGEST_STEP_SECONDS) & (expected >= SHORTEST_STEP_SECONDS)
        costs = np.array([self._cost(item) for item in expected])
        room = fits(numbers, memory_constants(), LEAST_HEADROOM)
        possible = np.flatnonzero(within & room & (costs <= seconds))
        if not possible.size:
            return []
        design = self._design(found, numbers.taken(possible))
        chosen = choose_probes(
            design,
            np.ones(design.shape[1]),
            costs[possible],
            Budget(seconds=seconds, fewest=1, most=min(AT_ONCE, MOST - len(self.probes))),
            np.hypot(NOISE, JITTER_SECONDS / expected[possible]),
        )
        places = possible[chosen.rows]
        return [(left[int(place)], float(expected[place])) for place in places]

    def _design(self, found: Fit, numbers: Cases) -> Array:
        """(settings, unknowns) slopes of log seconds, in units of what is still unknown of each.

        Beside the constants these are what the formulas miss, as a straight line in each direction
        of the family: without it, the most informative settings crowd in a few of its corners.
        """
        constants = found.log_gradient(numbers, [self._whose] * len(numbers))
        missed = directions(numbers)
        known = np.eye(missed.shape[1]) / MISSED**2
        if self.probes:
            rows = [probe.row for probe in self.probes]
            done = directions(cases([(row.model, row.run, row.cluster) for row in rows]))
            known = known + done.T @ done / NOISE**2
        roots = np.linalg.cholesky(found.covariance), np.linalg.cholesky(np.linalg.inv(known))
        design: Array = np.concatenate([constants @ roots[0], missed @ roots[1]], axis=1)
        return design

    def _cost(self, step: float) -> float:
        """Wall seconds of a probe: starting, steps, ending."""
        started = [
            probe.seconds - probe.steps * (probe.row.step_seconds or 0.0)
            for probe in self.probes
            if probe.seconds
        ]
        start = float(np.median(started)) if started else START_SECONDS
        unsure = _UNSURE if len(started) < AT_ONCE else 1.1
        return max(start, 1.0) + unsure * self._steps(step) * step


def directions(numbers: Cases) -> Array:
    """(settings, directions): doublings of sizes, and which of two ways, of each setting."""
    columns = [np.log2(getattr(numbers, name)) for name in _SIZES]
    columns += [np.sign(getattr(numbers, name)) for name in ("half", "recompute", "sharding")]
    columns.append(np.minimum(numbers.devices - 1.0, 1.0))
    count = len(numbers)
    found: Array = np.stack([np.broadcast_to(column, (count,)) for column in columns], axis=1)
    return found


def numbers_of(settings: Sequence[Setting], cluster: Cluster) -> Cases:
    """The settings as the time model reads them.

    Args:
        settings: At least one.
        cluster: As `here.measured_cluster` gives it.
    """
    return cases(
        [
            (setting.model, setting.run, divided(cluster, setting.run.devices))
            for setting in settings
        ]
    )
