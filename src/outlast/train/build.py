"""The composition root: from a checked job to a `Trainer` on this rank.

Everything that a run is made of is put together here, in the order in which it happens; a new
mechanism is composed here and nowhere else.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from outlast.checkpoint import ReplayLog
from outlast.data import (
    BatchLoader,
    SampleOrder,
    SampleWindow,
    check_vocabulary,
    microbatch_count,
    prepare,
)
from outlast.distributed.group import gather_objects, raise_together
from outlast.records import Warned, read_run
from outlast.recover.phase_page import EnterPhase, ignore_phase
from outlast.runtime.agreement import StepAgreement
from outlast.runtime.cadence import job_cadence
from outlast.runtime.energy import run_meter
from outlast.runtime.engine import Runtime, StepConsensus
from outlast.runtime.guarding import RunGuard
from outlast.runtime.memory import MemoryCheckpoint
from outlast.runtime.recording import MemoryWatch, StepRecords
from outlast.runtime.saves import Transfers, open_store
from outlast.runtime.watching import CommunicationWait, SlownessWatch
from outlast.train.adapt_rank import RankAdaptation, run_state
from outlast.train.engine import (
    CodedEngine,
    CoverageEngine,
    Engine,
    Evaluation,
    ReplicaEngine,
)
from outlast.train.layout import Layout, make_mesh
from outlast.train.loop import Trainer
from outlast.train.model import ModelSize, size_of
from outlast.train.optimizer import build_optimizers
from outlast.train.parallelize import coded_engine, is_coded, replica_engine
from outlast.train.preflight import Plan
from outlast.train.tensorizing import (
    SpikeWatch,
    add_update_rules,
    build_whole_model,
    calibrate_planner,
    factor_rules,
    slow_layers,
    tune_layers,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from outlast.checkpoint import CheckpointStore
    from outlast.data import Prepared
    from outlast.distributed.ranks import Ranks
    from outlast.job import Job
    from outlast.records import RecordWriter, Run, RunDirectory
    from outlast.runtime.cadence import Turns
    from outlast.runtime.stop import StopFlag
    from outlast.state.live import State
    from outlast.train.run import NodeFiles


@dataclass
class SetUp:
    """Knowledge of a rank before its trainer is built, and the seconds that the set-up takes.

    `restores` says whether the trainer will restore what is saved before it trains, `steps_before`
    how many steps the process with this rank had done when it was killed.
    """

    job: Job
    plan: Plan
    ranks: Ranks
    device: torch.device
    directory: RunDirectory
    stop: StopFlag
    parts: dict[str, float] = field(default_factory=dict)
    turns: Turns | None = None
    transfers: Transfers | None = None
    mark: EnterPhase = ignore_phase
    restores: bool = False
    steps_before: int = 0

    @cached_property
    def run_before(self) -> Run:
        """The run as its earlier starts have left it; read once, before this one is recorded."""
        return read_run(self.directory.path)

    def timed(self, name: str, begun: float) -> float:
        """Note the seconds since `begun` as phase `name` of the set-up; returns the time now."""
        now = time.perf_counter()
        self.parts[name] = self.parts.get(name, 0.0) + now - begun
        return now


def configure_torch(job: Job, ranks: Ranks) -> None:
    """Threads and determinism of this process.

    OMP_NUM_THREADS is respected; without it the ranks of a machine share its cores evenly. The
    number of threads decides the order of sums, so equal bits need an equal number.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(cores // ranks.local_world_size, 1))
    if job.run.deterministic:
        # cuBLAS needs a fixed workspace for repeatable results (CUDA documentation, cuBLAS 2.1.4).
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
        # The memory-efficient attention's backward pass adds in no fixed order.
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        # Filling fresh memory finds bugs in kernels; it is no part of determinism and costs time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def load_data(setup: SetUp, stage: NodeFiles | None = None, *, checked: bool = False) -> Prepared:
    """Tokenise the job's corpus, or open the tokens that are there already.

    With `stage`, what is opened are this node's own copies. Tokens that were `checked` on another
    rank are only opened.
    """
    begun = time.perf_counter()
    data = setup.job.data
    prepared = prepare(
        data.source,
        cache=setup.directory.data,
        train_patterns=data.train,
        validation_patterns=data.validation,
        validation_fraction=data.validation_fraction,
        tokenizer=data.tokenizer,
        token_dtype=data.token_dtype,
        stage=stage,
        checked=checked,
    )
    vocabulary_size = setup.plan.facts.vocabulary_size
    if vocabulary_size is not None:
        for file in (prepared.train, prepared.validation):
            if file is not None:
                check_vocabulary(file, vocabulary_size)
    setup.timed("data", begun)
    return prepared


def build(setup: SetUp, data: Prepared, records: RecordWriter | None) -> tuple[Trainer, ModelSize]:
    """Build this rank's trainer.

    Returns:
        The trainer, and the size of the whole model, which no rank may hold any more.
    """
    job, layout, device = setup.job, setup.plan.layout, setup.device
    begun = time.perf_counter()
    energy = raise_together(
        lambda: run_meter(
            job.energy,
            setup.ranks,
            device,
            tokens_per_step=job.train.batch_size * job.data.sequence_length,
            in_step=layout.pipeline == 1,
            stage=str(layout.pipeline_rank(setup.ranks.rank)),
        )
    )
    calibrate_planner(job, setup.ranks, device)
    store = open_store(
        job.checkpoint,
        setup.directory,
        pacings={} if setup.transfers is None else setup.transfers.tiers(),
    )
    # First weights are for nothing where all ranks restore a version; one on nodes' own disks is
    # restored only if every node still has its part.
    saved = (
        setup.restores
        and not job.checkpoint.fast_private
        and all(gather_objects(raise_together(lambda: store.newest(warn=False) is not None)))
    )
    model, tensorized = raise_together(lambda: build_whole_model(job, drawn=not saved))
    tune_layers(model, (job, layout, setup.ranks, device))
    if tensorized is not None and records is not None:
        records.write(tensorized)
        if (warning := slow_layers(tensorized)) is not None:
            records.write(warning)
    size = size_of(model, job.data.sequence_length)
    begun = setup.timed("model", begun)
    mesh = make_mesh(layout, device.type) if layout.world_size > 1 else None
    begun = setup.timed("process group", begun)
    waits = CommunicationWait(setup.mark)
    adaptation = RankAdaptation(setup, model, mesh, waits) if job.tensorize.adapt_rank else None
    engine = _engine(setup, model, mesh, waits, saved=saved)
    setup.timed("parallelize", begun)
    called = engine.model if isinstance(engine, ReplicaEngine) else model
    data_rank = layout.data_rank(setup.ranks.rank)
    loader = _loader(job, layout, data, data_rank)
    notes = None
    if mesh is not None and is_coded(job, layout):
        assert isinstance(engine, ReplicaEngine)
        engine, notes = coded_engine(setup, engine, loader, mesh)
    elif job.coding.scheme != "off" and records is not None:
        records.write(Warned("with one replica there is nothing for [coding] to do"))
    optimizers = build_optimizers(model, job.optimizer, factor_rules(model, job.tensorize))
    add_update_rules(model, optimizers, job.tensorize, job.optimizer)
    state = run_state(model, optimizers, adaptation)
    replay = None
    if job.checkpoint.replay != "off":
        replay = ReplayLog(store, state, gradient=job.checkpoint.replay)
    guard = None
    if job.guard.policy != "off":
        guard = _guard(job, called, optimizers, engine, loader)
    step_records = StepRecords(
        records,
        setup.ranks,
        log_every=job.log.every_steps,
        memory=MemoryWatch(setup.ranks, device),
        total_steps=job.train.steps,
        tokens_per_step=job.train.batch_size * job.data.sequence_length,
    )
    step_records.meter = energy
    consensus = _consensus(setup, waits, coded=notes is not None)
    runtime = _runtime(setup, store, state, step_records, consensus)
    runtime.guard, runtime.must_restore = guard, saved
    if guard is not None:
        guard.may_go_back, runtime.returns = _goes_back(job), job.launch.restarts
    if tensorized is not None and job.tensorize.spikes:
        consensus.spikes = SpikeWatch().observe
    trainer = Trainer(
        job=job,
        device=device,
        model=model,
        optimizers=optimizers,
        engine=engine,
        loader=loader,
        runtime=runtime,
        records=step_records,
        consensus=consensus,
        evaluation=_evaluation(job, layout, data, data_rank),
        pipeline_group=mesh["pipeline"].get_group() if mesh and layout.pipeline > 1 else None,
        replay=replay,
        coding=notes,
        adaptation=adaptation,
        earlier=_earlier_batches(setup) if setup.restores else (),
    )
    return trainer, size


def _guard(
    job: Job,
    called: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    engine: Engine,
    loader: BatchLoader,
) -> RunGuard:
    """The guard, which audits micro-batches where the engine does one at a time."""
    guard = RunGuard(job.guard, job.run.seed, called, optimizers)
    guard.repeat_steps()
    if isinstance(engine, ReplicaEngine):
        engine.audit = partial(guard.audit, loader.reload)
    elif isinstance(engine, (CodedEngine, CoverageEngine)):
        guard.refuse_audits("[coding] sums up whatever replicas have computed in time")
    return guard


def _earlier_batches(setup: SetUp) -> list[tuple[int, int]]:
    """First step and batch size of every earlier start of the run, the same on all ranks."""
    first = setup.ranks.is_first
    starts = raise_together(lambda: list(setup.run_before.batch_sizes.values()) if first else [])
    return gather_objects(starts)[0]


def _engine(
    setup: SetUp,
    model: nn.Module,
    mesh: DeviceMesh | None,
    waits: CommunicationWait,
    *,
    saved: bool,
) -> Engine:
    """The engine that the layout needs; the model is made parallel."""
    if setup.plan.layout.pipeline == 1:
        return replica_engine(setup, model, mesh, waits, saved=saved)
    assert mesh is not None
    # torch's pipelining loads its compiler, half a second that other layouts need not spend.
    from outlast.train.pipeline import pipeline_engine

    return pipeline_engine(setup, model, mesh)


def _runtime(
    setup: SetUp,
    store: CheckpointStore,
    state: State,
    records: StepRecords,
    consensus: StepConsensus,
) -> Runtime:
    """The runtime of `outlast train`."""
    job, ranks, directory = setup.job, setup.ranks, setup.directory
    # Weights and both moments of Adam, in fp32.
    state_bytes = 12.0 * sum(parameter.numel() for parameter in state["model"].parameters())
    memory = MemoryCheckpoint(
        job,
        ranks,
        directory,
        store,
        state,
        own_group=False,
        shown=True,
        steps_before=setup.steps_before,
        # What all of the state is compared with at every step can be trusted to be right.
        goes_back=_goes_back(job) and job.guard.policy == "full",
    )
    runtime = Runtime(
        ranks,
        consensus,
        records=records,
        memory=memory,
        mark=setup.mark,
        # The records say so.
        save_told=lambda _: None,
    )
    turns = setup.turns
    cadence = job_cadence(job.checkpoint, ranks, directory, "cadence.json", turns, state_bytes)
    runtime.save_to(store, state, cadence)
    return runtime


def _goes_back(job: Job) -> bool:
    """Return whether the run goes back to an earlier state where memory was wrong.

    In a live run a group counts as dead instead, and takes the state of another.
    """
    return job.guard.policy != "off" and job.guard.correct and job.recover.mode != "live"


def _consensus(setup: SetUp, waits: CommunicationWait, *, coded: bool) -> StepConsensus:
    ranks, layout = setup.ranks, setup.plan.layout
    agreement = StepAgreement(
        setup.device, alone=ranks.world_size == 1, counts=layout.counts_loss(ranks.rank)
    )
    # Stages need not take equally long, and codes have their own word on who is slow.
    compares = ranks.world_size > 1 and layout.pipeline == 1 and not coded
    slowness = SlownessWatch(ranks.rank, ranks.world_size) if compares else None
    return StepConsensus(agreement, setup.stop, waits, slowness=slowness)


def _loader(job: Job, layout: Layout, data: Prepared, data_rank: int) -> BatchLoader:
    windows = SampleWindow(data.train, job.data.sequence_length)
    count = microbatch_count(job.train.batch_size, layout.data_ranks, job.train.micro_batch_size)
    if job.coding.scheme == "coverage":
        # There must be something to hand out, and no part may be empty.
        count = max(count, min(job.coding.chunks, job.train.batch_size // layout.data_ranks))
    return BatchLoader(
        windows,
        SampleOrder(windows.samples, job.run.seed),
        batch_size=job.train.batch_size,
        rank=data_rank,
        ranks=layout.data_ranks,
        # A pipeline cuts its share itself.
        microbatches=1 if layout.pipeline > 1 else count,
    )


def _evaluation(job: Job, layout: Layout, data: Prepared, data_rank: int) -> Evaluation | None:
    if data.validation is None:
        return None
    windows = SampleWindow(data.validation, job.data.sequence_length)
    samples = min(job.evaluate.samples or windows.samples, windows.samples)
    share = -(-job.train.batch_size // layout.data_ranks)
    if layout.pipeline == 1 and job.train.micro_batch_size:
        share = min(share, job.train.micro_batch_size)
    return Evaluation(windows, samples, share, data_rank, layout.data_ranks)
