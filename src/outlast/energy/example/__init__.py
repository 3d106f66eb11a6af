"""Measured profiles to try the planner with: GPT-3 175B on 8 pipeline stages, one GPU of each.

The two CSV files are copies of ``sosp24_data/emulation/stage_profile`` in ml-energy/zeus (Copyright
Jae-Won Chung and the Zeus authors, University of Michigan; Apache-2.0), made for Perseus (SOSP'24).
Stages 0 to 6 are copies of one measurement; the A40 was capped at 300 W.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from importlib.resources import files

from outlast.energy.profile import Curve, Key, Point, Profile
from outlast.errors import EnergyError

# Blocking (P2P wait) power in watts: Perseus, SOSP'24, artefact.
_DEVICES = {
    "a100": ("NVIDIA A100-SXM", "gpt3_175b_a100_sxm.csv", 83.64),
    "a40": ("NVIDIA A40", "gpt3_175b_a40.csv", 70.38),
}


def profile(device: str) -> Profile:
    """Time and energy of GPT-3 175B's stages.

    Args:
        device: "a100" or "a40".

    Raises:
        EnergyError: For another device.
    """
    if device not in _DEVICES:
        raise EnergyError(f'device = "{device}" has no example profile; there are a100 and a40')
    name, file, blocking_watts = _DEVICES[device]
    points: dict[Key, list[Point]] = defaultdict(list)
    with files(__package__).joinpath(file).open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            key = Key(int(row["stage"]), row["instruction"])
            points[key].append(
                Point(int(row["frequency"]), float(row["time"]), float(row["energy"]))
            )
    curves = {key: Curve(tuple(sorted(found))) for key, found in points.items()}
    return Profile(curves, blocking_watts, device=name)
