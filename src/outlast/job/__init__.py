"""A job: one TOML file as typed, checked configuration.

from outlast.job import load_job
job = load_job(Path("job.toml"), ["train.steps=500"])   # JobError lists every problem at once
job.train.steps                                         # 500
"""

from outlast.job.load import (
    DEFAULT_JOB,
    LoopJob,
    default_job_text,
    job_from_text,
    load_job,
    load_loop_job,
    loop_job_from_text,
    loop_template,
    settings_from_text,
)
from outlast.job.section import Section, differences, fingerprint, identity, to_toml
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
    SlurmSection,
    StagingSection,
    TensorizeSection,
    TrainSection,
)

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
    "LoopJob",
    "ModelSection",
    "OptimizerSection",
    "ParallelSection",
    "RunSection",
    "SampleSection",
    "ScheduleSection",
    "Section",
    "SlurmSection",
    "StagingSection",
    "TensorizeSection",
    "TrainSection",
    "default_job_text",
    "differences",
    "fingerprint",
    "identity",
    "job_from_text",
    "load_job",
    "load_loop_job",
    "loop_job_from_text",
    "loop_template",
    "settings_from_text",
    "to_toml",
]
