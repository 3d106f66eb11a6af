"""Recovery without a checkpoint: restart, replica groups, resizing, parity.

python benchmarks/recover.py [--quick] [--only PART ...] [--json FILE]

With `--only`, the rows of those parts take the place of the same rows of FILE.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from harness import Bar, publish

PARTS = {
    "restart": ("recover_restart", "bars"),
    "goodput": ("recover_restart", "goodput_bars"),
    "live": ("recover_live", "live_bars"),
    "resize": ("recover_resize", "bars"),
    "parity": ("recover_parity", "bars"),
}
"""Of each part: its module, and the function that gives its bars."""


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small cases only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the bars to FILE")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=[*PARTS], help="these parts")
    options = parser.parse_args()
    bars = [bar for part in options.only for bar in _bars(part, options.quick)]
    publish("recover", bars, options.json, part=set(options.only) != set(PARTS))


def _bars(part: str, quick: bool) -> list[Bar]:
    """The bars of one part, whose imports and needs are its own."""
    try:
        name, function = PARTS[part]
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        return [Bar(part, None, "", "", False, f"cannot run here: {error}")]
    found: list[Bar] = getattr(module, function)(quick)
    return found


if __name__ == "__main__":
    main()
