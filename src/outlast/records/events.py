"""Events of a run, each kind a frozen dataclass.

An event on disk is one JSON object on one line: the envelope (``v``, ``kind``, ``time``,
``monotonic``, ``rank``, ``attempt``) and the fields of its kind. ``v`` is `FORMAT_VERSION`. A
reader ignores kinds and fields that it does not know, so newer files stay readable. Numbers that
are not finite are the texts ``nan``, ``inf`` and ``-inf``.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

FORMAT_VERSION = 1
PURPOSES = (
    "compute",
    "data",
    "communication",
    "checkpoint",
    "evaluation",
    "startup",
    "restart",
    "other",
)
"""Purposes of a run's seconds; the reader adds ``lost`` for steps that were done again."""
KINDS: dict[str, type[Event]] = {}
"""All kinds of event by name, here and in `outlast.records.forecast`."""


@dataclass(frozen=True)
class Event:
    """Base of all events."""

    kind: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        """Make the new kind known to `from_fields`."""
        super().__init_subclass__()
        KINDS[cls.kind] = cls


@dataclass(frozen=True)
class AttemptStarted(Event):
    """A process group starts to work on the run; the first event of every attempt."""

    kind: ClassVar[str] = "attempt_started"
    fingerprint: str
    world_size: int
    launch: str
    parallel: dict[str, int]
    machine: dict[str, Any]
    versions: dict[str, str]
    total_steps: int
    samples_per_step: int
    tokens_per_step: int
    parameters: int
    flops_per_token: float
    data: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SettingsChanged(Event):
    """The attempt continues the run with other settings than the attempt before.

    Attributes:
        changes: Of each setting its ``name`` (``section.key``) and its values ``before`` and
            ``after``.
    """

    kind: ClassVar[str] = "settings_changed"
    changes: list[dict[str, Any]]

    def words(self) -> str:
        """The changes in one line."""
        listed = (
            f"{change.get('name')} {change.get('before')!r} -> {change.get('after')!r}"
            for change in self.changes
        )
        return f"settings changed since the last start: {', '.join(listed)}"


@dataclass(frozen=True)
class Tensorized(Event):
    """Linear layers of the model were replaced by structured ones, in this attempt as in all.

    Attributes:
        form: The form that was asked for, as in ``tensorize.form``.
        wanted_rank: As in ``tensorize.rank``, as text.
        modules: Of every layer that was replaced: ``name``, ``form``, ``rank`` (as text),
            ``in_features``, ``out_features``, ``parameters`` and ``dense_parameters``, ``flops``
            and ``dense_flops`` (per token, forward), and ``predicted_speed`` (over the dense
            layer's, on this machine; None where it is not known).
        kept: Name of each layer that was to be replaced and was not -> why not.
        parameters: Of the whole model, and of the same model with dense layers.
        dense_parameters: See `parameters`.
        flops_per_token: Forward and backward, of the whole model, and with dense layers.
        dense_flops_per_token: See `flops_per_token`.
        left: Name of everything else that stays dense -> why, and its share of the parameters.
    """

    kind: ClassVar[str] = "tensorized"
    form: str
    wanted_rank: str
    modules: list[dict[str, Any]]
    kept: dict[str, str]
    parameters: int
    dense_parameters: int
    flops_per_token: float
    dense_flops_per_token: float
    left: dict[str, str] = field(default_factory=dict)

    @property
    def parameter_share(self) -> float:
        """Parameters over those of the dense model."""
        return self.parameters / self.dense_parameters

    @property
    def flops_share(self) -> float:
        """FLOPs per token over those of the dense model."""
        return self.flops_per_token / self.dense_flops_per_token


@dataclass(frozen=True)
class RanksChanged(Event):
    """Ranks of tensorized layers have changed, or are those of the state that was restored.

    Attributes:
        step: Steps done.
        changes: Of every rank that is another one than this attempt's records said so far:
            ``name`` (of the layer), ``bond`` (its letter in the layer's network), ``before``,
            ``after``, and ``error``: the relative change of the layer's weight in the Frobenius
            norm; None where it is not known.
        parameters: Of the whole model.
        flops_per_token: Forward and backward, of the whole model.
        seconds: That training waited; 0 for a restored state.
    """

    kind: ClassVar[str] = "ranks_changed"
    step: int
    changes: list[dict[str, Any]]
    parameters: int
    flops_per_token: float
    seconds: float

    def words(self) -> str:
        """Return what has changed, for a person."""
        before, after = (sum(item[when] for item in self.changes) for when in ("before", "after"))
        return (
            f"step {self.step}: {len(self.changes)} ranks changed, from {before:,} in all to "
            f"{after:,}; the model has {self.parameters:,} parameters now"
        )


@dataclass(frozen=True)
class TrainingStarted(Event):
    """Set-up is over and the first step begins.

    Attributes:
        step: Steps already done (0 for a new run).
        seconds: From the start of the process to here.
        parts: Where these seconds went, by phase of the set-up.
    """

    kind: ClassVar[str] = "ready"
    step: int
    seconds: float
    parts: dict[str, float]


@dataclass(frozen=True)
class StepsDone(Event):
    """One or more optimizer steps are done.

    Attributes:
        step: Steps done so far.
        steps: Steps that this event covers.
        loss: Mean training loss over them, in nats per token.
        gradient_norm: Global gradient norm of the last of them, before clipping.
        learning_rate: Peak-scaled learning rate of the last of them.
        tokens: Tokens trained on since the run began.
        step_seconds: Wall time of each covered step.
        seconds: Wall time since the previous StepsDone (or TrainingStarted), by purpose; sums to
            wall time.
        metrics: What else the loop told of these steps, by its own names: means.
    """

    kind: ClassVar[str] = "steps_done"
    step: int
    steps: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    step_seconds: list[float]
    seconds: dict[str, float]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluated(Event):
    """The validation loss was measured.

    Attributes:
        loss: Nats per token.
        bits_per_byte: None where the number of source bytes is not known.
    """

    kind: ClassVar[str] = "evaluated"
    step: int
    loss: float
    bits_per_byte: float | None
    tokens: int
    seconds: float


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint is complete, verified to be on disk, and published.

    Attributes:
        blocked_seconds: Time that training waited for it.
        seconds: Time from the request to the publication.
        bytes: Size of its files.
    """

    kind: ClassVar[str] = "checkpoint_saved"
    step: int
    blocked_seconds: float
    seconds: float
    bytes: int


@dataclass(frozen=True)
class CheckpointFailed(Event):
    """A checkpoint could not be written; nothing was published."""

    kind: ClassVar[str] = "checkpoint_failed"
    step: int
    reason: str


@dataclass(frozen=True)
class CheckpointRestored(Event):
    """The run continues from a checkpoint.

    Attributes:
        step: The step that was restored.
        seconds: Until the last byte was in place.
        skipped: One sentence for each newer or nearer state that could not be used.
        source: The tier: ``disk``, ``shared`` or ``mirror``; empty where it is not known.
        place: Path or URL of the tier.
        lacking: One phrase for each nearer tier that was there and held nothing of use.
    """

    kind: ClassVar[str] = "checkpoint_restored"
    step: int
    seconds: float
    skipped: list[str]
    source: str = ""
    place: str = ""
    lacking: list[str] = field(default_factory=list)

    def words(self) -> str:
        """The tier, and what nearer ones lacked, behind what is said of the restore."""
        lacking = f" ({'; '.join(self.lacking)})" if self.lacking else ""
        return f" from {self.source}{lacking}" if self.source else lacking


@dataclass(frozen=True)
class CheckpointInterval(Event):
    """The number of steps between checkpoints was chosen anew.

    Attributes:
        steps: Steps to the next checkpoint.
        reason: The figures that it follows from.
    """

    kind: ClassVar[str] = "checkpoint_interval"
    step: int
    steps: int
    reason: str


@dataclass(frozen=True)
class CorruptionDetected(Event):
    """A check of the guard found wrong values.

    Attributes:
        module: Where, as a name in the model.
        operation: Which check, e.g. ``linear.forward``; ``coding.duplicate`` where two processes
            have computed the gradient of one chunk.
        device: What computed them.
        found_on: Rank of the process.
        rows: How many rows of the check were wrong.
        magnitude: Largest difference, in standard deviations of rounding; of duplicates, as a
            share of the larger gradient's 2-norm.
        outcome: ``corrected``, ``check``, ``rounding``, ``not_finite``, ``repeated``,
            ``restored``, ``persistent`` or ``detected``; see `outlast.guard.findings`.
    """

    kind: ClassVar[str] = "wrong_numbers"
    step: int
    module: str
    operation: str
    device: str
    found_on: int
    rows: int
    magnitude: float
    outcome: str


@dataclass(frozen=True)
class Guarded(Event):
    """Checks of the guard of rank 0 in this attempt so far.

    Attributes:
        policy: Its level.
        checks: Comparisons made.
        seconds: Time that they took; None where the device runs behind the host.
        operations: By check: ``checks``, ``spread`` (root mean square of the differences in
            standard deviations), ``worst`` and ``detection_point`` (largest error that could have
            passed, as a share of what was checked).
        modules: Number of modules with parameters.
        uncovered: Those of them in which no check was made in the last step, by class.
        parameters: Elements of the model's parameters.
        at_rest: Those of them that are checked at rest and as the optimizer updates them.
        trained: Elements of the parameters that got a gradient in the last step; 0 where that is
            not known.
        unwatched: Those of them whose gradient no check watched.
        flops: Share of the matrix products' FLOPs without a check; None where it is not known.
        gaps: What has no check: names of parameters and operations, and what is said of them. Names
            that differ in numbers alone are one, and only the first are given.
        audits: As `outlast.guard.AuditReport`, and ``share`` of the micro-batches that are audited;
            empty where none are made.
        coverage: Shares of the FLOPs and bytes of all operations of the last surveyed step that
            were checked, and the operations that were not, in a sentence; empty where not known.
    """

    kind: ClassVar[str] = "guarded"
    step: int
    policy: str
    checks: int
    seconds: float | None
    operations: dict[str, dict[str, Any]]
    modules: int
    uncovered: dict[str, int]
    parameters: int = 0
    at_rest: int = 0
    trained: int = 0
    unwatched: int = 0
    flops: float | None = None
    gaps: dict[str, str] = field(default_factory=dict)
    audits: dict[str, Any] = field(default_factory=dict)
    coverage: str = ""


@dataclass(frozen=True)
class CoverageWarned(Event):
    """Operations that the guard has no check for, as it saw them first, or has no longer.

    Attributes:
        step: The step in which it was seen, from 1.
        found_on: The first rank that saw it.
        message: What it is, in one sentence.
    """

    kind: ClassVar[str] = "coverage_warned"
    step: int
    found_on: int
    message: str


@dataclass(frozen=True)
class GradientsCoded(Event):
    """Replicas that stood in for slow ones, one entry per optimizer step.

    Attributes:
        step: Steps done so far.
        scheme: The gradient code, as in ``coding.scheme``.
        replicas: Number of data-parallel replicas.
        stragglers: Replicas that were not waited for, their work done by others or their messages
            not needed, and whose own share takes more than 1.2 times as long as the median one's.
        claims: Chunks computed by another replica than their owner.
        duplicates: Chunks that were computed twice.
        lost: Chunks that are missing in the gradient.
        errors: Certified error: the gradient is off by at most its square root times the spectral
            norm of the matrix of chunk gradients; 0 where it is exact.
        coded_seconds: Time of the gradient's computation, all replicas together.
        waiting_seconds: What waiting for every replica's own work (its load, with a fixed code)
            would have taken at least, from measured chunk times.
        protocol: The way of the sum, as in ``coding.protocol``.
    """

    kind: ClassVar[str] = "gradients_coded"
    step: int
    scheme: str
    replicas: int
    stragglers: list[list[int]]
    claims: list[int]
    duplicates: list[int]
    lost: list[int]
    errors: list[float]
    coded_seconds: list[float]
    waiting_seconds: list[float]
    protocol: str = "all_reduce"


@dataclass(frozen=True)
class EnergyMeasured(Event):
    """Energy since the event before, read from the meters of all nodes.

    Attributes:
        step: Steps done so far.
        steps: Steps that this event covers; 0 for the set-up and for the end of an attempt.
        tokens: Tokens of these steps.
        seconds: Length of the window, on rank 0.
        devices: Of every meter, none twice: ``name``, ``part`` (``gpu``, ``cpu``, ``memory`` or
            ``node``), ``host``, ``rank`` that has read it, and ``purposes``, that rank's seconds
            by purpose. Either ``joules``, ``low_joules``, ``high_joules``, ``kind``, ``source``
            and ``flags``, or ``unavailable``, why there is no figure, and ``carried``, whether the
            counter stood: its joules are in a later event's figure, if there is one (see
            `energy_totals`). ``boot`` tells machines of one host name apart. ``state`` holds what
            could be read at the end of the window: ``watts``, ``celsius``, ``sm_clock_mhz``,
            ``memory_clock_mhz``, ``throttle_reasons``.
        unavailable: What was asked for and has no meter -> why not; with the host in the name
            where hosts differ.
        tariff: Text of the file energy.tariff, in the first event of an attempt.
    """

    kind: ClassVar[str] = "energy_measured"
    step: int
    steps: int
    tokens: int
    seconds: float
    devices: list[dict[str, Any]]
    unavailable: dict[str, str]
    tariff: str = ""

    @property
    def counted(self) -> list[dict[str, Any]]:
        """The devices whose joules add up: a node's meter stands for all that is in the node.

        Also where it stood in this window: its next figure has the joules. `energy_totals` decides
        that for all windows of an attempt alike.
        """
        nodes = {
            (device.get("host"), device.get("boot"))
            for device in self.devices
            if device.get("part") == "node" and ("joules" in device or device.get("carried"))
        }
        return [
            device
            for device in self.devices
            if device.get("joules") is not None
            and (
                device.get("part") == "node"
                or (device.get("host"), device.get("boot")) not in nodes
            )
        ]

    @property
    def joules(self) -> float | None:
        """Sum over all nodes; None where nothing could be read."""
        counted = self.counted
        return math.fsum(float(device["joules"]) for device in counted) if counted else None


@dataclass(frozen=True)
class StopRequested(Event):
    """All ranks agreed to stop at this step boundary."""

    kind: ClassVar[str] = "stop_requested"
    step: int
    reason: str


@dataclass(frozen=True)
class StateRecovered(Event):
    """The state came from another place than a file checkpoint, or was chosen among several.

    Attributes:
        step: The step that was restored.
        source: ``peer``, ``parity``, ``memory``, ``disk`` or ``shared``.
        seconds: From the choice to the last byte in place.
        lost_steps: Steps that are done again, as far as is known; -1 where it is not.
        bytes: Moved on all ranks together.
        passed_over: One sentence for each better source that could not be used, or had nothing.
        cause: Of going back to an earlier step in the middle of an attempt; empty: it began so.
    """

    kind: ClassVar[str] = "state_recovered"
    step: int
    source: str
    seconds: float
    lost_steps: int
    bytes: int
    passed_over: list[str] = field(default_factory=list)
    cause: str = ""


@dataclass(frozen=True)
class MemberLost(Event):
    """A process, a node or a replica group is gone, hangs, or computes wrong values.

    Attributes:
        step: The steps done when it was noticed.
        member: Which, e.g. ``rank 2`` or ``group 1``.
        cause: ``dead``, ``hung``, ``stopped``, ``slow``, ``corrupt`` or ``coordinator``.
        seconds: From its last sign of life to the finding.
        note: In words, e.g. where the stacks are.
    """

    kind: ClassVar[str] = "member_lost"
    step: int
    member: str
    cause: str
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class MembershipChanged(Event):
    """From this step on, other processes or replica groups do the work.

    Attributes:
        step: The first step that they do.
        before: Number of them before.
        after: Number of them now.
        reason: ``lost``, ``joined`` or ``resized``.
        seconds: For which no step was done.
    """

    kind: ClassVar[str] = "membership_changed"
    step: int
    before: int
    after: int
    reason: str
    seconds: float


@dataclass(frozen=True)
class Warned(Event):
    """Something that a person should know, in one sentence."""

    kind: ClassVar[str] = "warned"
    message: str


@dataclass(frozen=True)
class Sampled(Event):
    """The trained model continued a prompt."""

    kind: ClassVar[str] = "sampled"
    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class AttemptEnded(Event):
    """The attempt ended in an orderly way.

    Attributes:
        outcome: ``completed``, ``left`` (its program has left its loop before the last step),
            ``to_be_continued`` or ``failed``.
        seconds: Wall time since the last StepsDone (or TrainingStarted), by purpose.
    """

    kind: ClassVar[str] = "attempt_ended"
    step: int
    outcome: str
    reason: str
    seconds: dict[str, float]


def from_fields(kind: str, fields: dict[str, Any]) -> Event | None:
    """The event of this kind, or None when the kind is unknown or a field is missing or damaged."""
    cls = KINDS.get(kind)
    if cls is None:
        return None
    try:
        return cls(
            **{
                item.name: _read_back(fields[item.name], str(item.type))
                for item in dataclasses.fields(cls)
                if item.name in fields
            }
        )
    except (TypeError, ValueError):
        return None


def finite(value: Any) -> Any:
    """JSON has no NaN or infinity: `value` with these as the texts ``nan``, ``inf``, ``-inf``."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value


def _read_back(value: Any, annotation: str) -> Any:
    """The inverse of `finite` for a field of this type; raises ValueError for other texts."""
    if "float" not in annotation:
        return value
    if isinstance(value, str):
        return float(value)
    if isinstance(value, dict):
        return {key: float(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [float(inner) for inner in value]
    return value


@dataclass(frozen=True)
class CheckpointCopied(Event):
    """A checkpoint is complete in a slower, safer place as well.

    Attributes:
        place: The tier.
        seconds: Time of the copy, without the wait before it.
        bytes: What rank 0 has written there.
    """

    kind: ClassVar[str] = "checkpoint_copied"
    step: int
    place: str
    seconds: float
    bytes: int


@dataclass(frozen=True)
class DataStaged(Event):
    """Every node has its own copy of the tokens, or reads them in place.

    Attributes:
        seconds: Longest time that a process needed for all its files.
        copies: One entry for each file and node: ``source``, ``path``, ``host``, ``processes``
            that use it there, ``bytes``, ``copied_bytes`` (read from the source now; 0: the copy
            was there), ``resumed_bytes`` (left by a process that died), ``seconds``,
            ``waited_seconds`` (the longest that a process waited for another), ``evicted`` (sources
            of copies that had to go), ``damaged`` (an earlier copy was, and was made anew) and
            ``problem`` (why it is read in place; empty where it is not).
    """

    kind: ClassVar[str] = "data_staged"
    seconds: float
    copies: list[dict[str, Any]]

    @property
    def copied_bytes(self) -> int:
        """Bytes that all nodes have read from the sources now."""
        return sum(int(copy_["copied_bytes"]) for copy_ in self.copies)

    @property
    def problems(self) -> list[str]:
        """Why files are read in place, each reason once."""
        return sorted({str(copy_["problem"]) for copy_ in self.copies if copy_["problem"]})

    def words(self) -> str:
        """One line for people."""
        kept = [copy_ for copy_ in self.copies if not copy_["problem"]]
        if not kept:
            return "data: read in place, on no node from a copy"
        nodes = len({copied["host"] for copied in kept})
        total = sum(int(copied["bytes"]) for copied in kept)
        on = f"{nodes} node{'s' if nodes != 1 else ''}"
        if not self.copied_bytes:
            return (
                f"data: {total / 1e6:,.1f} MB were on {on} already, found in {self.seconds:.2f} s"
            )
        return (
            f"data: {self.copied_bytes / 1e6:,.1f} of {total / 1e6:,.1f} MB copied to {on} in "
            f"{self.seconds:.2f} s"
        )
