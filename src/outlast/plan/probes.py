"""Measurements of this machine: its rates, and short runs that teach most about the constants.

The rates of processors are measured by torch, which the planner itself does not load: in a process
of its own, with as many threads as one rank of the trainer would have.

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
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outlast.errors import OutlastError, PlanError
from outlast.hardware import Machine, Unavailable, this_machine
from outlast.plan.api import run_of
from outlast.plan.batch import Array, Cases, cases
from outlast.plan.cluster import divided
from outlast.plan.cluster_file import RATES, read_cluster, this_cluster
from outlast.plan.constants import memory_constants
from outlast.plan.huggingface import SYNONYMS
from outlast.plan.memory import room
from outlast.plan.run_rows import FRAMEWORK, read_run_row
from outlast.plan.step_fit import NOISE, Belonging, believed, fit
from outlast.plan.step_model import belonging
from outlast.plan.step_time import step_seconds

if TYPE_CHECKING:
    from outlast.job import Job
    from outlast.plan.cluster import Cluster
    from outlast.plan.configuration import Configuration
    from outlast.plan.rows import Row
    from outlast.plan.transformer import Transformer


MEASURING_SECONDS = 4.0
"""That the measured loops take together, beside the start of torch."""
_DEADLINE_SECONDS = 120.0
_MESSAGE_BYTES = 16 << 20
_MESSAGES = 8

_PROGRAM = """
import json, os, sys, time
import torch

share = float(sys.argv[1]) / 8
threads = int(sys.argv[2])
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(threads)

def best_seconds(call):
    call()
    least, end, count = float("inf"), time.perf_counter() + share, 0
    while count < 3 or time.perf_counter() < end:
        begun = time.perf_counter()
        call()
        least, count = min(least, time.perf_counter() - begun), count + 1
    return least

found = {}
for name, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
    rates = []
    for side in (512, 1024, 1536):
        left, right = (torch.randn(side, side).to(kind) for _ in range(2))
        out = torch.empty(side, side, dtype=kind)
        rates.append(2 * side**3 / best_seconds(lambda: torch.mm(left, right, out=out)))
    found[name] = max(rates)
rates = []
for count in (1 << 20, 1 << 23):
    left, right, out = (torch.ones(count) for _ in range(3))
    rates.append(12 * count / best_seconds(lambda: torch.add(left, right, out=out)))
print(json.dumps({"matmul": found, "memory": max(rates), "threads": torch.get_num_threads()}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Best rates that were measured, of all cores of one rank together.

    Attributes:
        matmul_flop_per_s: By precision.
        memory_bytes_per_s: Of an elementwise operation on tensors of 4 and of 32 MiB.
        link_bytes_per_s: From one process to another of this machine.
        threads: That torch took.
    """

    matmul_flop_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    link_bytes_per_s: float
    threads: int


def measured_rates() -> Rates:
    """The rates of the cores that this process may use.

    Raises:
        PlanError: Torch cannot be started, or ends without a figure.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = max(cores or 1, 1)
    command = [sys.executable, "-c", _PROGRAM, str(MEASURING_SECONDS), str(threads)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DEADLINE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise PlanError(
            f"torch measured nothing within {_DEADLINE_SECONDS:g} s: free the machine of other "
            "work and calibrate again"
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise PlanError(f"torch cannot measure this machine: {last}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    for value in (*found["matmul"].values(), found["memory"]):
        if not 0.0 < value < math.inf:
            raise PlanError(f"a rate of {value:g} was measured here: measure again")
    return Rates(
        matmul_flop_per_s=found["matmul"],
        memory_bytes_per_s=found["memory"],
        link_bytes_per_s=loopback_bytes_per_s(),
        threads=found["threads"],
    )


def loopback_bytes_per_s() -> float:
    """Bytes per second between two processes through a socket, as gloo sends them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_DEADLINE_SECONDS)
        receiver = threading.Thread(target=_drain, args=(server,))
        receiver.start()
        message = bytes(_MESSAGE_BYTES)
        with socket.create_connection(server.getsockname(), timeout=_DEADLINE_SECONDS) as sender:
            begun = time.perf_counter()
            for _ in range(_MESSAGES):
                sender.sendall(message)
            sender.shutdown(socket.SHUT_WR)
            sender.recv(1)
            seconds = time.perf_counter() - begun
        receiver.join()
    return _MESSAGES * _MESSAGE_BYTES / seconds


def _drain(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.settimeout(_DEADLINE_SECONDS)
        buffer = bytearray(1 << 20)
        while connection.recv_into(buffer):
            pass
        connection.sendall(b"\0")


_HEAD = """\
# The processors of one machine, measured by `outlast plan calibrate --run`: one rank has all cores.
# Nothing is said to fail: give [[failures]] where you know better.
"""


def kept_cluster(file: Path) -> tuple[Cluster, str]:
    """The cluster of this machine as `file` says it, or measured now and written there.

    Probes of an earlier time were fitted with the rates of that time, so these are kept with them.

    Args:
        file: Beside the probes' runs.

    Returns:
        The cluster with one rank per GPU, or with one rank for all processors; the text of its
        file, empty where the catalogue knows the GPUs.

    Raises:
        PlanError: The GPUs are not in the catalogue, or torch cannot be started.
    """
    if file.is_file():
        text = file.read_text(encoding="utf-8")
        return read_cluster(text), text
    machine = this_machine()
    if not isinstance(machine.gpus, Unavailable) and machine.gpus.visible:
        return this_cluster(), ""
    text = machine_text(measured_rates(), machine)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return read_cluster(text), text


def machine_text(rates: Rates, machine: Machine | None = None) -> str:
    """A cluster file of one node with one device: all of its cores.

    Args:
        rates: Measured.
        machine: What was read of the machine; by default it is read now.
    """
    machine = machine or this_machine()
    # A device's key has small letters, digits and dashes.
    plain = re.sub(r"\((r|tm|c)\)", "", machine.cpu_model.lower())
    key = re.sub(r"[^a-z0-9]+", "-", plain).strip("-") or "processor"
    words = f"measured: {rates.threads} threads, the best of several sizes"
    lines = [
        _HEAD + "[cluster]",
        'name = "this-machine"',
        f'device = "{key}-{rates.threads}-threads"',
        "processor = true",
        "nodes = 1",
        "devices_per_node = 1",
        f"host_cores = {max(int(machine.usable_cores), 1)}",
        'failure_rates = "none"',
        f"memory_bytes = {float(machine.usable_memory_bytes):.6g}",
        f"memory_bytes_per_s = {rates.memory_bytes_per_s:.4g}",
        f"fast_bytes_per_s = {rates.link_bytes_per_s:.4g}",
    ]
    sources = [
        'memory_bytes = "measured: what this process may use"',
        f'memory_bytes_per_s = "{words}"',
        'fast_bytes_per_s = "measured: a socket of this machine"',
    ]
    # The best product of a precision is all that is known of its peak.
    for table in RATES:
        lines += ["", f"[cluster.{table}]"]
        lines += [f"{name} = {rate:.4g}" for name, rate in rates.matmul_flop_per_s.items()]
        sources += [f'"{table}.{name}" = "{words}"' for name in rates.matmul_flop_per_s]
    lines += ["", "[sources]", *sources]
    return "\n".join([*lines, ""])


FEWEST, MOST = 5, 12
"""Probes that a calibration needs, and that it makes at most."""
_STARTS = 24
_REPEATS = 3


def choose_probes(
    design: Array, costs_seconds: Array, seconds: float, most: int
) -> tuple[list[int], list[float]]:
    """The candidates to run, each at most once.

    The result depends on the arguments alone; of equal candidates the first is taken.

    Args:
        design: (n, p) derivatives of log seconds by log constants, in units of the constants'
            prior deviations and of the measurements' log standard deviations.
        costs_seconds: (n,) of running each; positive, and some within the budget.
        seconds: Of all runs together.
        most: Runs at most.

    Returns:
        Rows, best first, and the information in nats that each adds to those before it.
    """
    alone = np.log1p(np.einsum("np,np->n", design, design)) / 2.0
    affordable = np.flatnonzero(costs_seconds <= seconds)
    per_second = alone[affordable] / costs_seconds[affordable]
    cheap = affordable[np.argsort(-per_second, kind="stable")]
    by_gain = affordable[np.argsort(-alone[affordable], kind="stable")]
    starts = dict.fromkeys([*by_gain[:_STARTS].tolist(), *cheap[:_STARTS].tolist()])
    best: tuple[float, list[int]] = 0.0, []
    for thrifty in (True, False):
        for start in (None, *starts):
            rows, gains = _greedy(design, costs_seconds, (seconds, most), thrifty, start)
            total = sum(gains)
            if not best[1] or total > best[0] * (1 + 1e-12):
                best = total, rows
    return _exchanged(design, costs_seconds, seconds, best[1])


def _greedy(
    design: Array, costs: Array, budget: tuple[float, int], thrifty: bool, start: int | None
) -> tuple[list[int], list[float]]:
    """One greedy pass, by gain per second (`thrifty`) or by gain; the budget in seconds and runs.

    `spread[i] = x_i' A^-1 x_i` and `A^-1` follow each choice by rank-one updates (Sherman &
    Morrison 1950): O(n p) per choice.
    """
    inverse = np.eye(design.shape[1])
    spread = np.einsum("np,np->n", design, design)
    free = np.ones(len(costs), bool)
    left, most = budget
    rows: list[int] = []
    gains: list[float] = []
    while len(rows) < most:
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
    design: Array, costs: Array, seconds: float, rows: list[int]
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
            spread[costs > seconds - float(costs[rest].sum())] = -np.inf
            spread[rest] = -np.inf
            better = int(np.argmax(spread))
            if spread[better] > spread[rows[place]] * (1 + 1e-9):
                rows[place] = better
        if rows == before:
            break
    own = float(costs[rows].sum()) * (1 + 1e-12), len(rows)
    order, gains = _greedy(design[rows], costs[rows], own, False, None)
    return [rows[index] for index in order], gains


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
    # One rank is the most usual.
    layouts = [(1, "replicate")] * 2
    layouts += [
        (2**power, kind)
        for power in range(1, most_ranks.bit_length())
        for kind in ("replicate", "shard")
    ]
    axes = (WIDTHS, LAYERS, SEQUENCES, BATCHES, PASSES, (False, True), ("fp32", "bf16"), layouts)
    grid = list(itertools.product(*axes))
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
    varied = _changed(
        _laid_out(job, ranks, kind),
        model={"settings": table, "config": None, "directory": None},
        data={"sequence_length": length, "validation_fraction": 0.0, "validation": []},
        train={
            "batch_size": samples,
            "micro_batch_size": samples // (ranks * passes) if passes > 1 else 0,
            "precision": precision,
            "activation_checkpointing": again,
        },
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
    return _changed(job, parallel=degrees)


def _changed(job: Job, **sections: Mapping[str, object]) -> Job:
    """The job with other settings in some of its sections."""
    changed = {name: getattr(job, name).model_copy(update=new) for name, new in sections.items()}
    return job.model_copy(update=changed)


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
    return _changed(
        setting.job,
        run={"name": setting.name, "directory": str(folder)},
        train={"steps": steps, "compile": False, "stop_after_steps": 0},
        checkpoint={"every_steps": 0, "writer": "thread", "replay": "off", "mirror": ""},
        evaluate={"every_steps": 0},
        sample={"tokens": 0},
        export={"huggingface": False},
        energy={"measure": False, "prometheus_port": 0},
        guard={"policy": "off", "modules": {}},
        coding={"scheme": "off"},
        tensorize={"form": "off"},
        log={"every_steps": steps, **_NO_TRACKERS},
        launch={"nproc": setting.run.devices, "restarts": 0},
        schedule={"name": "constant", "warmup_steps": 0},
    )


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
_WAYS = ("half", "recompute", "sharding")
_DIRECTIONS = len(_SIZES) + len(_WAYS) + 1
_UNSURE = 1.5
_FAILURES = 3


@dataclass
class Probing:
    """Probes that are being run.

    Attributes:
        cluster: This machine, as `kept_cluster` gives it.
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
    seconds: float
    say: Callable[[str], None]
    runner: Callable[[Setting, Cluster, Path, int, float], Probe] = run_probe
    probes: list[Probe] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def run(self) -> list[Probe]:
        """Run probes until enough is known or the time is over.

        Raises:
            PlanError: So many fail or take so long that too few are left to fit.
        """
        kept = (kept_probe(setting, self.cluster, self.folder) for setting in self.settings)
        self.probes += [probe for probe in kept if probe is not None]
        if self.probes:
            self.say(f"{len(self.probes)} probes of an earlier time are read again")
        deadline = time.monotonic() + self.seconds
        known = {probe.setting.name for probe in self.probes}
        left = [setting for setting in self.settings if setting.name not in known]
        while left and len(self.probes) < MOST and len(self.failures) < _FAILURES:
            chosen = self._choose(left, deadline - time.monotonic())
            if not chosen:
                break
            for setting, step in chosen:
                remaining = deadline - time.monotonic()
                if self._cost(step) > remaining:
                    break
                self._one(setting, step, remaining)
            tried = [setting for setting, _ in chosen]
            left = [item for item in left if item not in tried]
        if len(self.probes) < FEWEST:
            reasons = f" ({self.failures[-1]})" if self.failures else ""
            raise PlanError(
                f"{len(self.probes)} probes finished within {self.seconds:.0f} s, and {FEWEST} are "
                f"needed{reasons}: give more seconds or a smaller job"
            )
        return self.probes

    def _one(self, setting: Setting, step: float, remaining: float) -> None:
        longest = min(3.0 * self._cost(step) + 30.0, remaining)
        try:
            probe = self.runner(setting, self.cluster, self.folder, self._steps(step), longest)
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
        """Of a probe; few while nothing is known: priors may be far off, and time is limited."""
        wanted = int(np.ceil(MEASURED_SECONDS / max(step, 1e-6)))
        most = MOST_STEPS if len(self.probes) >= AT_ONCE else FIRST_STEPS
        return int(np.clip(wanted, FEWEST_STEPS, most))

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

    def _choose(self, left: Sequence[Setting], seconds: float) -> list[tuple[Setting, float]]:
        """The next probes and the seconds that a step of each should take.

        Unknown are the constants and, beside them, what the formulas miss, as a straight line in
        each direction of the family: without it, the most informative settings crowd in a few of
        its corners.
        """
        whose = [Belonging(self.cluster.device, self.cluster.name, FRAMEWORK)]
        found, lines = believed(whose), np.eye(_DIRECTIONS) / MISSED**2
        if self.probes:
            rows = [probe.row for probe in self.probes]
            done = cases([(row.model, row.run, row.cluster) for row in rows])
            measured = np.array([row.step_seconds for row in rows], dtype=np.float64)
            found = fit(done, measured, [belonging(row) for row in rows])
            lines = lines + directions(done).T @ directions(done) / NOISE**2
        numbers = numbers_of(left, self.cluster)
        expected = step_seconds(numbers, found.constants(whose * len(left)))
        costs = np.array([self._cost(item) for item in expected])
        memory = room(numbers, memory_constants())
        possible = np.flatnonzero(
            (expected <= LONGEST_STEP_SECONDS)
            & (expected >= SHORTEST_STEP_SECONDS)
            & (memory.headroom >= LEAST_HEADROOM)
            & (memory.pressing < 1.0)
            & (costs <= seconds)
        )
        if not possible.size:
            return []
        some = numbers.taken(possible)
        # Slopes of log seconds, in units of what is still unknown of each.
        slopes = found.log_gradient(some, whose * len(some))
        roots = np.linalg.cholesky(found.covariance), np.linalg.cholesky(np.linalg.inv(lines))
        design = np.concatenate([slopes @ roots[0], directions(some) @ roots[1]], axis=1)
        noise = np.hypot(NOISE, JITTER_SECONDS / expected[possible])
        most = min(AT_ONCE, MOST - len(self.probes))
        chosen, _ = choose_probes(design / noise[:, None], costs[possible], seconds, most)
        return [(left[int(place)], float(expected[place])) for place in possible[chosen]]


def directions(numbers: Cases) -> Array:
    """(settings, directions): doublings of sizes, and which of two ways, of each setting."""
    columns = [np.log2(getattr(numbers, name)) for name in _SIZES]
    columns += [np.sign(getattr(numbers, name)) for name in _WAYS]
    columns.append(np.minimum(numbers.devices - 1.0, 1.0))
    return np.stack([np.broadcast_to(column, (len(numbers),)) for column in columns], axis=1)


def numbers_of(settings: Sequence[Setting], cluster: Cluster) -> Cases:
    """The settings as the time model reads them.

    Args:
        settings: At least one.
        cluster: As `kept_cluster` gives it.
    """
    return cases([(item.model, item.run, divided(cluster, item.run.devices)) for item in settings])
