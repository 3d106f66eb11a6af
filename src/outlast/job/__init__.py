"""A job: one TOML file as typed, checked configuration.

from outlast.job import load_job
job = load_job(Path("job.toml"), ["train.steps=500"])   # JobError lists every problem at once
job.train.steps                                         # 500
"""

from outlast.job.identity import differences, fingerprint, identity
from outlast.job.load import DEFAULT_JOB, default_job_text, job_from_text, load_job
from outlast.job.sections import (
    CheckpointSection,
    CodingSection,
    DataSection,
    EnergySection,
    EvaluateSection,
    ExportSection,
    GuardSection,
    Job,
    LaunchSection,
    LogSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    RunSection,
    SampleSection,
    ScheduleSection,
    Section,
    TensorizeSection,
    TrainSection,
)
from outlast.job.template import to_toml

__all__ = [
    "DEFAULT_JOB",
    "CheckpointSection",
    "CodingSection",
    "DataSection",
    "EnergySection",
    "EvaluateSection",
    "ExportSection",
    "GuardSection",
    "Job",
    "LaunchSection",
    "LogSection",
    "ModelSection",
    "OptimizerSection",
    "ParallelSection",
    "RunSection",
    "SampleSection",
    "ScheduleSection",
    "Section",
    "TensorizeSection",
    "TrainSection",
    "default_job_text",
    "differences",
    "fingerprint",
    "identity",
    "job_from_text",
    "load_job",
    "to_toml",
]
