"""``python -m outlast.cluster.staging JOB.TOML [section.key=value ...]``: prefetch on this node.

For `prefetch_command`, once on each node; ``outlast cluster prefetch`` does the same for a person.
"""

from __future__ import annotations

import sys
from pathlib import Path

from outlast.cluster.staging.job import prefetch, told
from outlast.errors import EXIT_BAD_INPUT, EXIT_DONE, OutlastError
from outlast.job import load_job


def main(arguments: list[str]) -> int:
    """Prefetch the tokens of a job; returns the exit code."""
    if not arguments:
        print(__doc__, file=sys.stderr)
        return EXIT_BAD_INPUT
    try:
        job = load_job(Path(arguments[0]), arguments[1:])
        print("\n".join(told(job, prefetch(job))), flush=True)
    except OutlastError as error:
        print(f"outlast: {error}", file=sys.stderr, flush=True)
        return EXIT_BAD_INPUT
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
