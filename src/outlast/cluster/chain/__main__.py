"""Entry point of a link's batch script: ``python -m outlast.cluster.chain FOLDER NUMBER``.

A filler, and a link whose time limit was chosen, is told its nodes and its limit as well: ``filler
NODES SECONDS`` or ``link NODES SECONDS``. Those of other links are in the plan.
"""

from __future__ import annotations

import sys
from pathlib import Path

from outlast.cluster.chain.files import ChainFiles
from outlast.cluster.chain.link import run_link
from outlast.errors import EXIT_BAD_INPUT, OutlastError

if __name__ == "__main__":
    try:
        shape = (int(sys.argv[4]), float(sys.argv[5])) if len(sys.argv) > 5 else None
        filler = shape is not None and sys.argv[3] == "filler"
        files, number = ChainFiles(Path(sys.argv[1])), int(sys.argv[2])
        sys.exit(run_link(files, number, shape, filler=filler))
    except OutlastError as error:
        print(f"outlast: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_BAD_INPUT)
