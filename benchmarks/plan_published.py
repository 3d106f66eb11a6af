"""The constants that the planner ships: fitted to the published step times, and written as TOML.

    python benchmarks/plan_published.py --data DIR [--out FILE]

DIR holds `throughput.csv`, the published table that docs/plan.md names. Constants of clusters and
the points of single runs are left out of the file: what is left is what another site can use.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

from plan_time import fitting_rows

import outlast.plan.calibration
from outlast.plan.calibration.calibrated import Provenance
from outlast.plan.calibration.calibration_file import write_calibration
from outlast.plan.calibration.step_model import step_model
from outlast.plan.calibration.stored import calibration_of, shared
from outlast.version import __version__

SHIPPED = Path(outlast.plan.calibration.__file__).with_name("published.toml")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="published table")
    parser.add_argument(
        "--out", type=Path, default=SHIPPED, metavar="FILE", help="default: shipped"
    )
    options = parser.parse_args()
    rows = fitting_rows(options.data / "throughput.csv")
    provenance = Provenance(
        date=datetime.now(UTC).date().isoformat(),
        version=__version__,
        rows=tuple(row.name for row in rows),
        sources=tuple(sorted({row.source for row in rows})),
        text="Published step times; sources and licences are named in NOTICE and docs/plan.md.",
    )
    write_calibration(calibration_of(shared(step_model(rows)), provenance), options.out)


if __name__ == "__main__":
    main()
