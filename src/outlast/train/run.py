"""One start of a run on this process: claim the directory, build, train, hand it back."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import socket
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psutil
import torch

from outlast.distributed.group import Group, gather_on_first, raise_together
from outlast.distributed.ranks import ALONE, Ranks, device_of, join, leave
from outlast.errors import (
    EXIT_DONE,
    EXIT_TO_BE_CONTINUED,
    DataCorruptionError,
    OutlastError,
    RunError,
)
from outlast.hardware import Device, Figure, device_reported_as, this_machine
from outlast.job import (
    Job,
    adjustable,
    changes,
    differences,
    fingerprint,
    identity,
    job_from_text,
    to_toml,
)
from outlast.records import (
    AttemptEnded,
    AttemptStarted,
    DataStaged,
    OwnerLock,
    Predicted,
    RecordWriter,
    RunDirectory,
    Sampled,
    SettingsChanged,
    Sink,
    Warned,
    forecast_of,
    open_sinks,
    read_run,
)
from outlast.records.process import age_seconds
from outlast.recover.resize import is_wanted
from outlast.runtime.display import Shown, progress_sink
from outlast.runtime.recording import versions
from outlast.runtime.stop import StopFlag
from outlast.runtime.watching import steps_before, under_watch
from outlast.train.build import SetUp, build, configure_torch, load_data
from outlast.train.export import continue_text, export_model, load_trained
from outlast.train.loop import warmup_note
from outlast.train.preflight import preflight
from outlast.train.tensorizing import export_note

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.data import Prepared
    from outlast.records import Event, Run
    from outlast.runtime.cadence import Turns
    from outlast.runtime.saves import Transfers
    from outlast.train.drill import Drill
    from outlast.train.loop import Outcome, Trainer
    from outlast.train.model import ModelSize


class Staged(Protocol):
    """A file on this node, or in place where `problem` says why there is no copy."""

    @property
    def path(self) -> Path:
        """Its path."""

    @property
    def source(self) -> str:
        """Its source."""

    @property
    def problem(self) -> str:
        """Why `path` is the source itself; empty where it is a copy."""

    def facts(self) -> dict[str, Any]:
        """An entry of `DataStaged.copies`, but for its host and processes."""


class Stager(Protocol):
    """Gets a file to this node, once for all processes that ask; it travels to worker processes."""

    @property
    def timeout_seconds(self) -> float:
        """Longest time that one file may take."""

    def __call__(self, source: str, beside: tuple[str, ...], digest: str | None) -> Staged:
        """Get the file at a path or URL, with the names beside it; raises OutlastError."""


class NodeFiles:
    """The files that this process has asked for; what `prepare` takes as `stage`."""

    def __init__(self, stager: Stager) -> None:
        self._stager = stager
        self._staged: list[Staged] = []
        self._seconds = 0.0

    def __call__(self, source: str, beside: tuple[str, ...], digest: str | None) -> Path:
        """The path on this node."""
        begun = time.perf_counter()
        staged = self._stager(source, beside, digest)
        self._seconds += time.perf_counter() - begun
        self._staged.append(staged)
        return staged.path

    def record(self, records: RecordWriter | None) -> None:
        """Write down what all nodes have done; all ranks call it together."""
        host = socket.gethostname()
        mine = [{"host": host, **staged.facts()} for staged in self._staged]
        everyone = gather_on_first((self._seconds, mine))
        if records is None or not everyone:
            return
        copies = [entry for _, listed in everyone for entry in listed]
        if not copies:
            return
        event = DataStaged(max(seconds for seconds, _ in everyone), by_node(copies))
        records.write(event)
        for problem in event.problems:
            records.write(Warned(problem))


def by_node(copies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per file and host: of the process that has copied, with all processes' waits."""
    nodes: dict[tuple[str, str], dict[str, Any]] = {}
    for copy_ in copies:
        key = (copy_["host"], copy_["source"])
        kept = nodes.get(key)
        if kept is None:
            nodes[key] = {**copy_, "processes": 1}
            continue
        leading = max(kept, copy_, key=lambda one: (one["copied_bytes"], one["seconds"]))
        nodes[key] = {
            **leading,
            "processes": kept["processes"] + 1,
            "waited_seconds": max(kept["waited_seconds"], copy_["waited_seconds"]),
        }
    return list(nodes.values())


@dataclass(frozen=True)
class Start:
    """Options with which a process works on a run.

    Attributes:
        job: The checked job.
        fresh: Whether an earlier run in the same directory is moved aside first.
        again: Whether the same launcher has started it before, with another number of processes.
        drill: Faults to train with, in place of training for good.
        process_faults: What happens to processes on purpose; see `outlast.guard.inject`.
        prediction: What the job is expected to need; recorded and printed before the first step,
            and beside the measured figures when the attempt has ended.
        stop_when: Asked by every rank after each step: why to save and stop now, or an empty text.
            One rank that says so is enough. Must survive pickling.
        stager: Gets token files to each node before they are opened; None: read in place.
        turns: Of the jobs that save to one file system; None: save when due.
        transfers: How fast checkpoints are copied on, besides the caps of their tiers.
    """

    job: Job
    fresh: bool = False
    again: bool = False
    drill: Drill | None = None
    process_faults: tuple[str, ...] = ()
    prediction: Predicted | None = None
    stop_when: Callable[[], str] | None = None
    stager: Stager | None = None
    turns: Turns | None = None
    transfers: Transfers | None = None


def run_directory(job: Job) -> RunDirectory:
    """The directory of the job's run."""
    return RunDirectory(Path(job.run.directory) / job.run.name)


def check_directory(job: Job, directory: RunDirectory) -> None:
    """Refuse a directory that holds the run of another job.

    Raises:
        RunError: With the settings that differ and what can be done.
    """
    if not directory.exists():
        return
    path = directory.path
    try:
        earlier = job_from_text(directory.job_file.read_text(encoding="utf-8"))
    except (OutlastError, OSError, UnicodeDecodeError) as error:
        raise RunError(
            f"{directory.job_file} cannot be read ({error}); start anew with --fresh, which moves "
            "the old directory aside"
        ) from None
    if changed := differences(earlier, job):
        raise RunError(another_job(path, changed))
    _check_adjusted(job, read_run(path))


def another_job(directory: Path, changed: list[str]) -> str:
    """Why a run directory is refused, `changed` being settings that shape the run."""
    listed = "\n".join(f"  - {line}" for line in changed)
    return (
        f"the run directory {directory} belongs to another job; these settings differ:\n{listed}\n"
        "give this run another name (run.name=...), set them back, or start anew with --fresh, "
        "which moves the old directory aside; a run may change in the middle: "
        f"{', '.join(adjustable(Job))}"
    )


def _check_adjusted(job: Job, run: Run) -> None:
    """Refuse settings that a run may change, where this one cannot change to them."""
    done = max((event.step for _, event in run.steps()), default=0)
    if job.train.steps < done:
        raise RunError(
            f"train.steps = {job.train.steps} is less than the {done} steps that the run in "
            f"{run.path} has done; set at least {done}, or give this run another name "
            "(run.name=...)"
        )
    sizes = {size for _, size in run.batch_sizes.values()} | {job.train.batch_size}
    if job.recover.mode == "live" and len(sizes) > 1:
        batches = ", ".join(map(str, sorted(sizes)))
        raise RunError(
            f"the run in {run.path} has trained with batches of {batches}"
            ' samples, and recover.mode = "live" cannot change train.batch_size; set it back, or '
            'choose recover.mode = "restart"'
        )


def claim(start: Start) -> OwnerLock:
    """Take the run directory for this attempt: move an old one aside if asked, lock, check.

    Raises:
        RunError: When it is another job's, in use, or cannot be written.
    """
    directory = run_directory(start.job)
    check = partial(check_directory, start.job, directory)
    return directory.claim(to_toml(start.job), check, fresh=start.fresh)


_CORPUS_WORTH_KEEPING = 64 * 2**20


def remove_unused(directory: RunDirectory, *, with_parent: bool) -> None:
    """Delete the directory where nothing was trained, so that another job can have its name.

    Kept are checkpoints, and a corpus whose preparation took a while. Where `with_parent`, the
    folder above goes too, if it is empty. Its lock is held: it goes under another name, so that
    nobody takes it before all of it has gone.
    """
    with contextlib.suppress(OSError, RunError):
        kept = [file for file in directory.checkpoints.rglob("*") if file.is_file()]
        corpus_bytes = sum(file.stat().st_size for file in directory.data.rglob("*"))
        begun = any(one.first_step is not None for one in read_run(directory.path).attempts)
        if not (kept or begun or corpus_bytes > _CORPUS_WORTH_KEEPING):
            unused = directory.path.with_name(f".{directory.path.name}-unused-{os.getpid()}")
            directory.path.rename(unused)
            shutil.rmtree(unused)
            if with_parent:
                directory.path.parent.rmdir()


def work_alone(start: Start) -> int:
    """`work` on a single process, again after wrong values, as `launch_group` does for several.

    Every start builds the model anew and restores the newest version, or begins at step 0.

    Raises:
        DataCorruptionError: When numbers are wrong more often than `launch.restarts` allows.
    """
    restarts = start.job.launch.restarts
    for restart in range(restarts):
        try:
            return work(start, ALONE)
        except DataCorruptionError as error:
            if error.in_versions:
                raise
            print(
                f"outlast: {error}; starting again from it ({restart + 1} of {restarts})",
                file=sys.stderr,
                flush=True,
            )
        # The old model and its state, which its checks' hooks refer to in circles.
        gc.collect()
        start = replace(start, fresh=False, again=True)
    return work(start, ALONE)


def work(start: Start, ranks: Ranks) -> int:
    """Work on the run as one of its processes, from set-up to the end.

    Returns:
        The exit code, equal on all ranks.

    Raises:
        OutlastError: For what only this rank could find out, e.g. a last save that failed.
    """
    # Wall clock when the user's command began, as far as this process can know.
    again = start.again
    process = psutil.Process()
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if ranks.launch == "nproc" and restarts == 0 and not again:
        parent = process.parent()
        process = parent if parent is not None else process
    began = time.time() - age_seconds(process)
    with StopFlag(os.getppid() if ranks.launch == "nproc" else None) as stop:
        parts = {"start and imports": time.time() - began}
        begun = time.perf_counter()
        configure_torch(start.job, ranks)
        device = device_of(ranks)
        join(ranks, device, start.job.launch.timeout_seconds)
        parts["process group"] = time.perf_counter() - begun
        lock, watch = None, contextlib.ExitStack()
        directory = run_directory(start.job)
        is_new, refused = not directory.path.exists(), False
        parent_is_new = not directory.path.parent.exists()
        try:
            lock = raise_together(lambda: claim(start) if ranks.is_first else None)
            before = raise_together(lambda: steps_before(start.job, ranks, directory))
            mark = raise_together(
                lambda: watch.enter_context(under_watch(start.job, ranks, directory))
            )
            setup = SetUp(
                start.job,
                raise_together(lambda: preflight(start.job, ranks.world_size)),
                ranks,
                device,
                directory,
                stop,
                parts,
                start.turns,
                mark=mark,
                transfers=start.transfers,
                restores=start.drill is None,
                steps_before=before,
            )
            if start.drill is not None:
                return start.drill.run(setup)
            return _train(setup, start, began)
        except OutlastError:
            refused = True
            raise
        finally:
            watch.close()
            if lock is not None:
                if is_new and refused:
                    remove_unused(directory, with_parent=parent_is_new)
                lock.release()
            leave()


def _train(setup: SetUp, start: Start, began: float) -> int:
    ranks = setup.ranks
    records = None
    try:
        directory, attempt = setup.directory, setup.directory.next_attempt
        records = raise_together(
            lambda: (
                RecordWriter(directory.path, 0, attempt(), sinks_of(setup))
                if ranks.is_first
                else None
            )
        )
        data = _load_data(setup, start.stager, records)
        trainer = trainer_of(setup, start, data, records)
        if ranks.is_first and ranks.launch == "nproc":
            trainer.consensus.resize_wanted = partial(is_wanted, setup.directory.path)
        try:
            outcome = trainer.run(began, setup.parts)
        except Exception as error:
            # Where a peer has died, torch's error says nothing about this rank.
            peer_died = ranks.world_size > 1 and isinstance(error, RuntimeError)
            if records is not None and not peer_died:
                reason = f"{type(error).__name__}: {error}"
                seconds = trainer.records.watch.lap()
                records.write(AttemptEnded(trainer.runtime.step, "failed", reason, seconds))
            raise
        if records is not None:
            end_run(setup, data, trainer, records, outcome)
            # Print the prediction of this attempt beside what was measured.
            forecast = forecast_of(read_run(directory.path)) if start.prediction else None
            if forecast is not None:
                print(forecast.sentence(), flush=True)
    finally:
        if records is not None:
            records.close()
    return EXIT_DONE if outcome.completed else EXIT_TO_BE_CONTINUED


def trainer_of(
    setup: SetUp, start: Start, data: Prepared, records: RecordWriter | None, groups: int = 0
) -> Trainer:
    """Build this process's trainer, and record how the attempt begins.

    Args:
        setup: Of this process.
        start: Of the run.
        data: Of the run.
        records: Of the run; None: another process writes them.
        groups: Replica groups of a live run, of which this process is one; 0: it is none.
    """
    trainer, size = build(setup, data, records)
    trainer.consensus.stop_when = start.stop_when
    if start.process_faults:
        rank = setup.ranks.local_rank if groups else setup.ranks.rank
        trainer.before_step = process_faults(setup, start, rank)
    if records is not None:
        predicted = [] if start.prediction is None else [start.prediction]
        warned = [] if trainer.guard is None else map(Warned, trainer.guard.warnings)
        begun = attempt_started(setup, data, size, groups)
        for event in (*notes_of(setup, data), *begun, *predicted, *warned):
            records.write(event)
    return trainer


def _load_data(setup: SetUp, stager: Stager | None, records: RecordWriter | None) -> Prepared:
    job, is_first = setup.job, setup.ranks.is_first
    files = None if stager is None else NodeFiles(stager)
    # Copying may take long as well, for each of two files and for whoever waits.
    seconds = 0.0 if stager is None else 2 * stager.timeout_seconds
    patient = Group.new(max(job.data.prepare_timeout_seconds, seconds))
    made: Prepared | None = None
    if files is None or job.data.source != "tokens":
        # Rank 0 alone tokenises, which may take long; then every rank opens what is there.
        made = patient.raise_together(lambda: load_data(setup) if is_first else None)
    data = (patient if files is not None else Group()).raise_together(
        lambda: load_data(setup, files, checked=True)
    )
    if files is not None:
        files.record(records)
    return data if made is None else replace(data, note=made.note)


def notes_of(setup: SetUp, data: Prepared) -> list[Warned]:
    """Remarks on the data and the schedule before the first step."""
    job = setup.job
    notes = [data.note, warmup_note(job.schedule, job.train.steps)]
    return [Warned(note) for note in notes if note]


def process_faults(setup: SetUp, start: Start, rank: int) -> Callable[[int], None]:
    """Faults that happen to this process, `rank`, on purpose, by the number of steps done."""
    from outlast.guard.inject import ProcessFaults, parse_faults

    faults = parse_faults(start.process_faults)
    marks = setup.directory.path / "faults"
    return ProcessFaults(faults, rank=rank, marks=marks).at


def end_run(
    setup: SetUp, data: Prepared, trainer: Trainer, records: RecordWriter, outcome: Outcome
) -> None:
    """Export and sample after the last step, and close the attempt in any case."""
    problem = None
    if outcome.completed:
        try:
            _leave_behind(setup, data, records, outcome.last_step)
        except OutlastError as error:
            problem = str(error)
            records.write(Warned(problem))
    records.write(outcome.ended(trainer.records.watch.lap()))
    if problem is not None:
        raise OutlastError(
            f"the run is complete and its checkpoint saved, but: {problem}; "
            "`outlast export` can write the model later"
        )


def _leave_behind(setup: SetUp, data: Prepared, records: RecordWriter, step: int) -> None:
    """The exported model and a sampled continuation of a completed run, made by rank 0 alone."""
    job, directory = setup.job, setup.directory
    if job.export.huggingface and job.model.module is None:
        export_model(job, directory, directory.model)
        if (note := export_note(job.tensorize)) is not None:
            records.write(Warned(note))
    if job.sample.tokens and data.tokenizer is not None:
        model, _ = load_trained(job, directory)
        text = continue_text(
            model,
            data.tokenizer,
            job.sample.prompt,
            tokens=job.sample.tokens,
            temperature=job.sample.temperature,
            window=job.data.sequence_length,
            seed=job.run.seed,
        )
        records.write(Sampled(step, job.sample.prompt, text))


def sinks_of(setup: SetUp) -> list[Sink]:
    """Return the other places that the events of the run go to, as the job says."""
    job, directory = setup.job, setup.directory
    name = f"{job.run.name}-{fingerprint(job)}"
    tokens = job.train.batch_size * job.data.sequence_length
    display = progress_sink(Shown(job.run.name, job.train.steps, tokens))
    return [display, *open_sinks(job.log, directory, name, job.model_dump())]


def attempt_started(setup: SetUp, data: Prepared, size: ModelSize, groups: int) -> list[Event]:
    """The event that opens an attempt, and one of settings that have changed since the last."""
    job, parallel = setup.job, setup.plan.layout.to_dict()
    tokens = job.train.batch_size * job.data.sequence_length
    settings = identity(job)
    started = AttemptStarted(
        fingerprint=fingerprint(job),
        world_size=groups or setup.ranks.world_size,
        launch=setup.ranks.launch,
        parallel={**parallel, "replicate": groups} if groups else parallel,
        machine=_machine_facts(setup),
        versions=versions(),
        total_steps=job.train.steps,
        samples_per_step=job.train.batch_size,
        tokens_per_step=tokens,
        parameters=size.parameters,
        flops_per_token=size.flops_per_token,
        data=_data_facts(data),
        settings=settings,
    )
    earlier = setup.run_before.of(AttemptStarted)
    changed = [
        {"name": name, "before": before, "after": after}
        for name, before, after in changes(earlier[-1][1].settings if earlier else {}, settings)
    ]
    return [started, SettingsChanged(changed)] if changed else [started]


def _machine_facts(setup: SetUp) -> dict[str, object]:
    """This machine, and the published peak of one accelerator in the job's precision if known."""
    facts = this_machine().to_dict()
    if setup.device.type == "cuda":
        properties = torch.cuda.get_device_properties(setup.device)
        device = device_reported_as(properties.name, properties.total_memory)
        if isinstance(device, Device):
            bf16 = setup.job.train.precision == "bf16"
            peak = device.bf16_peak_flop_per_s if bf16 else device.fp32_peak_flop_per_s
            if isinstance(peak, Figure):
                facts["peak_flop_per_s"] = peak.value
    return facts


def _data_facts(data: Prepared) -> dict[str, object]:
    facts: dict[str, object] = {
        "train_file": str(data.train.path),
        "train_tokens": len(data.train.tokens),
        "validation_tokens": 0 if data.validation is None else len(data.validation.tokens),
        "tokenizer": None if data.tokenizer is None else data.tokenizer.name,
    }
    if data.train.header is not None:
        facts["source_hash"] = data.train.header.source_hash
        facts["file_hash"] = data.train.header.file_hash
    return facts
