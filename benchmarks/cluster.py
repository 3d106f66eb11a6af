"""Shared clusters: chains, the simulator, policies, tasks, storage, staging.

python benchmarks/cluster.py [--quick] [--only PART ...] [--json FILE]

With `--only`, the rows of those parts take the place of the same rows of FILE.
"""

from __future__ import annotations

from harness import run_parts

PARTS = {
    "chain": "cluster_chain.bars",
    "simulate": "cluster_simulate.bars",
    "policies": "cluster_policies.bars",
    "tasks": "cluster_tasks.bars",
    "storage": "cluster_storage.bars",
    "staging": "cluster_staging.bars",
}
"""Of each part, the function that gives its bars."""

if __name__ == "__main__":
    run_parts("cluster", str(__doc__), PARTS)
