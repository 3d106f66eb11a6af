"""A run's memory: its directory, its append-only event log, and how to read both.

from outlast.records import read_run
run = read_run("runs/quickstart")
run.losses()[-1]                      # (1500, 1.43)
run.seconds()["checkpoint"]           # seconds that training waited for checkpoints
"""

from outlast.records.coded import CodedStep, CodingTotals, Slowness, coding_totals
from outlast.records.copied import CheckpointCopied
from outlast.records.directory import RunDirectory, replace_file, sync_directory
from outlast.records.energy import DeviceEnergy, EnergyTotals, EnergyWindow, energy_totals
from outlast.records.events import (
    FORMAT_VERSION,
    PURPOSES,
    AttemptEnded,
    AttemptStarted,
    CheckpointFailed,
    CheckpointInterval,
    CheckpointRestored,
    CheckpointSaved,
    EnergyMeasured,
    Evaluated,
    Event,
    GradientsCoded,
    Guarded,
    MemberLost,
    MembershipChanged,
    Ready,
    Sampled,
    StateRecovered,
    StepsDone,
    StopRequested,
    Tensorized,
    Warned,
    WrongNumbers,
    finite,
)
from outlast.records.forecast import Compared, Forecast, Measured, forecast_of, measured_figures
from outlast.records.guarded import GuardTotals, OperationChecks, guard_totals
from outlast.records.lock import (
    OwnerLock,
    check_lease,
    leave_without_lease,
    lives_on_this_host,
    this_process,
)
from outlast.records.predicted import MemoryMeasured, Predicted, predicted_words
from outlast.records.reader import LOST, Attempt, Record, Run, read_run
from outlast.records.recovered import RecoveryTotals, recovery_totals, recovery_words
from outlast.records.sinks import (
    Curves,
    MlflowSink,
    Sink,
    TensorBoardSink,
    TrackioSink,
    WandbSink,
    notes,
    open_sinks,
    scalars,
)
from outlast.records.staged import DataStaged
from outlast.records.stopwatch import Stopwatch
from outlast.records.writer import RecordWriter, event_file

__all__ = [
    "FORMAT_VERSION",
    "LOST",
    "PURPOSES",
    "Attempt",
    "AttemptEnded",
    "AttemptStarted",
    "CheckpointCopied",
    "CheckpointFailed",
    "CheckpointInterval",
    "CheckpointRestored",
    "CheckpointSaved",
    "CodedStep",
    "CodingTotals",
    "Compared",
    "Curves",
    "DataStaged",
    "DeviceEnergy",
    "EnergyMeasured",
    "EnergyTotals",
    "EnergyWindow",
    "Evaluated",
    "Event",
    "Forecast",
    "GradientsCoded",
    "GuardTotals",
    "Guarded",
    "Measured",
    "MemberLost",
    "MembershipChanged",
    "MemoryMeasured",
    "MlflowSink",
    "OperationChecks",
    "OwnerLock",
    "Predicted",
    "Ready",
    "Record",
    "RecordWriter",
    "RecoveryTotals",
    "Run",
    "RunDirectory",
    "Sampled",
    "Sink",
    "Slowness",
    "StateRecovered",
    "StepsDone",
    "StopRequested",
    "Stopwatch",
    "TensorBoardSink",
    "Tensorized",
    "TrackioSink",
    "WandbSink",
    "Warned",
    "WrongNumbers",
    "check_lease",
    "coding_totals",
    "energy_totals",
    "event_file",
    "finite",
    "forecast_of",
    "guard_totals",
    "leave_without_lease",
    "lives_on_this_host",
    "measured_figures",
    "notes",
    "open_sinks",
    "predicted_words",
    "read_run",
    "recovery_totals",
    "recovery_words",
    "replace_file",
    "scalars",
    "sync_directory",
    "this_process",
]
