"""Scenarios as TOML."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outlast.errors import PlanError
from outlast.plan.simulate import Lemons, Scenario, load_scenario, scenario_from_text, simulate

TEXT = """
[run]
nodes = 64
interval_seconds = 600
productive_days = 2.0
trials = 10

[[failure]]
name = "node"
per_node_day = 0.01
repair_hours = 4

[[failure]]
name = "silent"
per_node_day = 1e-3
silent = true

[[tier]]
name = "memory"
survives_nodes = 0
blocked_seconds = 0.5

[[tier]]
name = "shared"
survives_nodes = inf
every = 6
blocked_seconds = 5
restore_seconds = 60

[restart]
restart_seconds = 120
spares = 1

[guard]
coverage = 0.9
rolls_back = true

[lemons]
share = 0.1
factor = 5
"""


def test_a_file_becomes_a_scenario_that_can_be_played(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(TEXT)
    scenario = load_scenario(path)
    run = scenario.reliability
    assert [cause.name for cause in run.causes] == ["node", "silent"]
    assert run.causes[1].silent
    assert run.tiers[1].survives_nodes == math.inf
    assert scenario.lemons == Lemons(share=0.1, factor=5.0)
    assert scenario.trials == 10
    assert 0.0 < simulate(scenario).ettr < 1.0


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[guard]", "[gaurd]", "gaurd .* did you mean guard"),
        ("coverage", "covrage", "covrage .* did you mean coverage"),
        ("nodes = 64", "nodez = 64", "did you mean nodes"),
        ("nodes = 64", "", "lacks nodes"),
        ("nodes = 64", 'nodes = "64"', "nodes = '64' .* give a number"),
        ("nodes = 64", "nodes = nan", "nodes .*= nan"),
        ("nodes = 64", "nodes = 64.5", "nodes = 64.5 .* whole number"),
        ("trials = 10", "trials = 1.5", "trials = 1.5 .* whole number"),
        ("trials = 10", "trials = 0", "trials = 0"),
        ("productive_days = 2.0", "productive_days = 0", "productive_days = 0"),
        ("silent = true", "silent = 1", "silent = 1 .* true or false"),
        ('name = "shared"', "", "lacks a name"),
        ("per_node_day = 0.01", "", "lacks per_node_day"),
        ("per_node_day = 0.01", "per_node_day = -1", "per_node_day = -1"),
        ("share = 0.1", "share = 2", "share of lemons = 2"),
        ("survives_nodes = inf", "survives_nodes = 0", "nothing is left after 'node'"),
        ("[restart]", "[[restart]]", r"write it as a table \[restart\]"),
        ("[run]", "[run", "is no TOML"),
    ],
)
def test_a_wrong_file_is_refused_in_a_sentence(old: str, new: str, words: str) -> None:
    assert old in TEXT
    with pytest.raises(PlanError, match=words) as refusal:
        scenario_from_text(TEXT.replace(old, new, 1), source="cluster.toml")
    assert "\n" not in str(refusal.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        load_scenario(tmp_path / "none.toml")


def test_a_scenario_is_one_run() -> None:
    scenario = scenario_from_text(TEXT)
    many = replace(scenario.reliability, interval_seconds=np.array([600.0, 900.0]))
    with pytest.raises(PlanError, match="interval_seconds has 2 values"):
        Scenario(reliability=many, productive_days=1.0)
