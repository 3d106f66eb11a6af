"""``outlast plan`` with recovery without a checkpoint: chosen by option, by job, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plan_commands import CONFIG, JOB, Plan

LAYOUT = ("--shard", "parameters", "--micro-batch", "1", "--tokens", "1B", "--sequence", "4096")
CLUSTER = """
[cluster]
node = "dgx-h100"
nodes = 4

[storage]
memory_bytes_per_s = 1e8
shared_bytes_per_s = 1e10

[[failures]]
name = "node"
per_node_day = 0.01
repair_hours = 24.0
"""


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Plan:
    return Plan(monkeypatch, capfd)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A model's config, and a cluster with a slow bus."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return tmp_path / "config.json", tmp_path / "cluster.toml"


def explained(plan: Plan, *arguments: object) -> tuple[str, dict[str, Any]]:
    """What `explain` says, in words and as JSON."""
    code, out, error = plan("explain", *arguments)
    assert code == 0, error
    return out, plan.json("explain", *arguments)


def test_what_keeping_costs_is_explained(plan: Plan, files: tuple[Path, Path]) -> None:
    source, cluster = files
    out, document = explained(plan, source, "--cluster", cluster, *LAYOUT, "--recover", "restart:2")
    assert "memory every step, parity 2" in " ".join(out.split())
    assert "keeping in memory" in out
    assert document["settings"]["recovery"] == {
        "mode": "restart",
        "every_steps": 1,
        "parity": 2,
        "parity_group": 8,
        "heartbeat_seconds": 1.0,
    }
    out, document = explained(plan, source, "--cluster", cluster, *LAYOUT)
    assert "memory every step" not in out
    assert document["settings"]["recovery"]["mode"] == "off"


@pytest.mark.slow
def test_a_job_says_how_it_recovers(plan: Plan, files: tuple[Path, Path]) -> None:
    source, cluster = files
    job = source.with_name("job.toml")
    job.write_text(JOB.format(config=source).replace("shard = 64", "shard = 32"))
    out, _ = explained(plan, job, "recover.every_steps=20", "--cluster", cluster)
    assert "memory every 20 steps" in out
    out, _ = explained(plan, job, "recover.mode=off", "--cluster", cluster)
    assert "memory every" not in out


def test_a_way_that_there_is_not_is_refused(plan: Plan, files: tuple[Path, Path]) -> None:
    source, cluster = files
    two = (*LAYOUT, "--recover", "off", "--recover", "live")
    sentence = plan.refused("explain", source, "--cluster", cluster, *two)
    assert "recovery = off, live" in sentence
    sentence = plan.refused(source, "--cluster", cluster, *LAYOUT[2:], "--recover", "restart:7")
    assert "recovery = 'restart:7'" in sentence
