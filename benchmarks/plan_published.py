"""The constants that the planner ships: fitted to published runs, and written as TOML.

    python benchmarks/plan_published.py --data DIR [--out FOLDER]

DIR holds `throughput.csv`, the published table that docs/plan.md names. `published_time.toml` has
the constants of step times, without those of clusters and the points of single runs: what is left
is what another site can use. `published_memory.toml` has the memory constants of the framework
whose published runs say how much they held, failed runs included. `best_utilisation.toml` has the
run of each chip and precision that reached the largest share of the peak.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from plan_models import shared
from plan_time import SWEEP, fitting_rows

import outlast.plan.facts
from outlast.plan.api import PUBLISHED, PUBLISHED_MEMORY
from outlast.plan.calibration import (
    Calibration,
    Provenance,
    calibration_of,
    write_calibration,
)
from outlast.plan.conformal import Conformal, Support
from outlast.plan.memory_fit import device_constants, fit_device_memory, usable
from outlast.plan.rows import Row, clean
from outlast.plan.run_rows import read_rows
from outlast.plan.step_model import step_model
from outlast.version import __version__

SHIPPED = Path(outlast.plan.facts.__file__).parent
BEST_HEAD = """\
# The best published utilisation (MFU) of each chip and precision: model FLOPs per second, attention
# in full and nothing recomputed, over the dense peak; of a mixture of experts where no dense run is
# known. From the table that docs/plan.md names, by benchmarks/plan_published.py. Other counts of
# FLOPs give other shares: NVIDIA states 47 to 48 % for its largest runs on H100 (Megatron-LM's
# README at 0010ab74).
"""
CREDIT = "sources and licences are named in NOTICE and docs/plan.md."


def times(data: Path) -> Calibration:
    """Constants of step times."""
    rows = fitting_rows(data)
    text = f"Published step times; {CREDIT}"
    return calibration_of(shared(step_model(rows)), provenance(rows, text))


def memory(data: Path) -> Calibration:
    """Constants of memory; nothing in it is of time."""
    rows = usable([row for row in clean(read_rows(data)[0]) if row.source == SWEEP])
    fits = {name: each.fit for name, each in fit_device_memory(rows).items()}
    text = f"Published memory and out-of-memory outcomes of {SWEEP}'s sweep; {CREDIT}"
    return Calibration(
        constants=device_constants(fits),
        order=(),
        correlation=np.zeros((0, 0)),
        widths=Conformal(quantiles={}, floor=0.0),
        support=Support({}),
        provenance=provenance(rows, text),
    )


def best(data: Path) -> str:
    """The best published utilisation of each chip and precision, dense models before mixtures."""
    with data.open(encoding="utf-8-sig", newline="") as lines:
        sources = {cells["row_id"]: cells["source_ref"] for cells in csv.DictReader(lines)}
    found: dict[tuple[str, str], Row] = {}
    for row in fitting_rows(data):
        known = found.get((row.chip, row.run.precision))
        if known is None or _rank(row) > _rank(known):
            found[row.chip, row.run.precision] = row
    lines_of = [BEST_HEAD]
    for (chip, precision), row in sorted(found.items()):
        run = f"{row.model.name} on {row.run.devices}, sequence {row.run.sequence:,}"
        texts = {"chip": chip, "precision": precision, "run": run, "source": sources[row.name]}
        lines_of += ["[[best]]", *(f"{key} = {json.dumps(text)}" for key, text in texts.items())]
        lines_of += [f"share = {row.model_flops_share:.4f}"]
        lines_of += [f"dense = {json.dumps(row.model.experts <= 1)}", ""]
    return "\n".join(lines_of)


def _rank(row: Row) -> tuple[bool, float]:
    return row.model.experts <= 1, row.model_flops_share or 0.0


def provenance(rows: Sequence[Row], text: str) -> Provenance:
    """Of constants that were fitted to rows."""
    return Provenance(
        date=datetime.now(UTC).date().isoformat(),
        version=__version__,
        rows=tuple(row.name for row in rows),
        sources=tuple(sorted({row.source for row in rows})),
        text=text,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="published table")
    parser.add_argument(
        "--out", type=Path, default=SHIPPED, metavar="FOLDER", help="default: shipped"
    )
    parser.add_argument("--best", type=Path, metavar="FILE", help="default: the shipped table")
    options = parser.parse_args()
    table = options.data / "throughput.csv"
    (options.best or options.out / "best_utilisation.toml").write_text(
        best(table), encoding="utf-8"
    )
    write_calibration(memory(table), options.out / PUBLISHED_MEMORY)
    write_calibration(times(table), options.out / PUBLISHED)


if __name__ == "__main__":
    main()
