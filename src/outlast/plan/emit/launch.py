"""Shell scripts that start a target on one node; the batch script calls them on every node."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from outlast.errors import PlanError
from outlast.plan.emit.settings import commented, head

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.plan.cluster import Cluster
    from outlast.plan.configuration import Configuration
    from outlast.plan.emit.settings import Settings
    from outlast.plan.transformer import Transformer

NODE_VARIABLES = (
    "On several nodes, NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT say which node this is and "
    "where the first one is."
)


def nodes_of(run: Configuration, cluster: Cluster) -> tuple[int, int]:
    """Nodes, and devices on each of them.

    Raises:
        PlanError: The run does not fill its nodes, or takes more than the cluster has.
    """
    if run.devices > cluster.devices:
        raise PlanError(
            f"data x tensor x context x pipeline = {run.devices} devices, and {cluster.name} has "
            f"{cluster.devices}: take fewer"
        )
    if run.devices <= cluster.devices_per_node:
        return 1, run.devices
    nodes, over = divmod(run.devices, cluster.devices_per_node)
    if over:
        raise PlanError(
            f"data x tensor x context x pipeline = {run.devices} devices do not fill nodes of "
            f"devices_per_node = {cluster.devices_per_node}: launchers start equally many "
            f"processes on every node, so take {nodes * cluster.devices_per_node} or "
            f"{(nodes + 1) * cluster.devices_per_node}"
        )
    return nodes, cluster.devices_per_node


def torchrun(nodes: int, per_node: int) -> str:
    """The start of a command line, in which the environment says which node this is."""
    return (
        f'torchrun --nnodes="${{NNODES:-{nodes}}}" --nproc-per-node={per_node} \\\n'
        '  --node-rank="${NODE_RANK:-0}" --master-addr="${MASTER_ADDR:-127.0.0.1}" \\\n'
        '  --master-port="${MASTER_PORT:-29500}"'
    )


def argument_lines(arguments: Sequence[tuple[str, object]]) -> str:
    """Options and their values, one option a line; an option without a value has None."""
    lines = []
    for option, value in arguments:
        values = value if isinstance(value, tuple) else () if value is None else (value,)
        lines.append("  " + " ".join([option, *(shlex.quote(str(item)) for item in values)]))
    return "\n".join(lines)


def script(
    model: Transformer, run: Configuration, settings: Settings, body: str, *notes: str
) -> str:
    """A shell script with its head.

    Args:
        model: What is trained.
        run: How.
        settings: Has the predicted text.
        body: Commands.
        notes: Sentences for the head.
    """
    comments = commented(head(model, run, settings, NODE_VARIABLES, *notes))
    return f'#!/bin/bash\n{comments}set -euo pipefail\ncd "$(dirname "$0")"\n{body}'
