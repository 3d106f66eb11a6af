"""``python -m outlast.cluster.staging [--beside-training] JOB.TOML [section.key=value ...]``.

Prefetch on this node, for `prefetch_command`, once on each; ``outlast cluster prefetch`` does the
same for a person. With --beside-training it makes way for what else runs there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from outlast.cluster.staging.job import BESIDE, prefetch, told
from outlast.errors import EXIT_BAD_INPUT, EXIT_DONE, OutlastError
from outlast.job import load_job

_NICE = 19


def main(arguments: list[str]) -> int:
    """Prefetch the tokens of a job; returns the exit code."""
    beside = arguments[:1] == [BESIDE]
    arguments = arguments[1:] if beside else arguments
    if not arguments:
        print(__doc__, file=sys.stderr)
        return EXIT_BAD_INPUT
    try:
        job = load_job(Path(arguments[0]), arguments[1:])
        if beside:
            os.nice(_NICE)
        print("\n".join(told(job, prefetch(job, beside_training=beside))), flush=True)
    except OutlastError as error:
        print(f"outlast: {error}", file=sys.stderr, flush=True)
        return EXIT_BAD_INPUT
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
