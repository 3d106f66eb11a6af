"""Training data on the nodes that read it: copied once per node, checked, evicted by last use.

from outlast.cluster.staging import Stage
stage = Stage(Path("/local/scratch"), limit_bytes=200 << 30)
copy = stage.fetch("s3://corpus/train.bin", beside=["train.json"])   # one process copies
copy.path                                                            # on the node's own disk
"""

from outlast.cluster.staging.copying import ReadAhead
from outlast.cluster.staging.job import (
    NodeStager,
    directives,
    job_directives,
    prefetch,
    prefetch_command,
    stage_for,
    stager_for,
    token_files_of,
    told,
)
from outlast.cluster.staging.stage import Stage, StagedCopy

__all__ = [
    "NodeStager",
    "ReadAhead",
    "Stage",
    "StagedCopy",
    "directives",
    "job_directives",
    "prefetch",
    "prefetch_command",
    "stage_for",
    "stager_for",
    "token_files_of",
    "told",
]
