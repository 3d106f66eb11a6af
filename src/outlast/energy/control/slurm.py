"""Clocks set by Slurm: its options, and scripts for a site's prolog.

Options as in Slurm 22.05's sbatch(1), variables as in its slurm.conf(5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMENT = "outlast-clocks="
"""Begins the job comment by which a job asks the prolog for clocks."""


def gpu_freq(clock_mhz: int) -> str:
    """The option of sbatch and srun for one clock on all GPUs of a job or step.

    Slurm takes the nearest clock that the GPU supports, and resets it after the job.

    Raises:
        EnergyError: For a clock that is not above 0.
    """
    _check([clock_mhz])
    return f"--gpu-freq={clock_mhz},verbose"


def batch_lines(clocks_mhz: Sequence[int], *, gpus_per_node: int) -> str:
    """Lines for the head of a batch script.

    One clock for all devices needs a Slurm built with NVML; clocks that differ within a node need
    the prolog.

    Args:
        clocks_mhz: Of each device, in the order of ranks.
        gpus_per_node: How many devices a node has.

    Raises:
        EnergyError: When nodes would need different lists of clocks.
    """
    node = _node_clocks(clocks_mhz, gpus_per_node)
    if len(set(node)) == 1:
        return f"#SBATCH {gpu_freq(node[0])}\n"
    return f"#SBATCH --comment={COMMENT}{','.join(map(str, node))}\n"


def prolog() -> str:
    """A Prolog script (run as root on every node) that locks clocks for jobs that ask for them.

    A job asks with ``--comment=outlast-clocks=1200,1410``: one clock for each of its GPUs on a
    node. Anything but digits and commas is ignored, for the comment is the user's. GPUs that are
    divided by MIG, on which others compute, or of which that cannot be told, are left alone. A file
    per job and GPU in /run/outlast-clocks, which belongs to root, says what has been locked.
    """
    return _PROLOG


def epilog() -> str:
    """The Epilog script that belongs to `prolog`: gives the clocks back, however the job ended.

    It goes by the prolog's files and never by the comment, which the user can change meanwhile.
    Where a clock cannot be given back the file stays.
    """
    return _EPILOG


def _node_clocks(clocks_mhz: Sequence[int], gpus_per_node: int) -> tuple[int, ...]:
    _check(clocks_mhz)
    if gpus_per_node < 1 or len(clocks_mhz) % min(gpus_per_node, len(clocks_mhz)):
        raise EnergyError(
            f"gpus_per_node = {gpus_per_node} does not divide the {len(clocks_mhz)} devices"
        )
    nodes = {
        tuple(clocks_mhz[first : first + gpus_per_node])
        for first in range(0, len(clocks_mhz), gpus_per_node)
    }
    if len(nodes) > 1:
        raise EnergyError(
            f"the plan gives {len(nodes)} of its nodes different clocks, which a job comment "
            "cannot say: set them from each rank with NVML or zeusd, or plan with switches = none"
        )
    return nodes.pop()


def _check(clocks_mhz: Sequence[int]) -> None:
    if not clocks_mhz or min(clocks_mhz) <= 0:
        raise EnergyError(f"clocks_mhz = {list(clocks_mhz)} must be one or more clocks above 0")


_HEAD = """\
#!/bin/bash
# Slurm {name}: {purpose}
# Slurm sets no search path for prologs.
PATH=/usr/bin:/bin
marks=/run/outlast-clocks
[[ "$SLURM_JOB_ID" =~ ^[0-9]+$ ]] || exit 0
"""

_PROLOG = (
    _HEAD.format(name="Prolog", purpose="lock the GPU clocks that a job asks for in its comment.")
    + """\
asked="${SLURM_JOB_COMMENT#outlast-clocks=}"
if [[ "$asked" == "$SLURM_JOB_COMMENT" || ! "$asked" =~ ^[0-9]{3,4}(,[0-9]{3,4})*$ ]]; then
    exit 0
fi
IFS=, read -r -a clocks <<< "$asked"
IFS=, read -r -a gpus <<< "$SLURM_JOB_GPUS"
if (( ${#clocks[@]} != ${#gpus[@]} )); then
    echo "outlast: ${#clocks[@]} clocks for ${#gpus[@]} GPUs; none is set"
    exit 0
fi
ask() { nvidia-smi --id="$1" "$2" --format=csv,noheader || echo unknown; }
umask 077
# A job that runs at full clocks is better than a drained node.
mkdir -p "$marks" || exit 0
for index in "${!gpus[@]}"; do
    gpu="${gpus[$index]}"
    clock="${clocks[$index]}"
    mig="$(ask "$gpu" --query-gpu=mig.mode.current)"
    if [[ "$mig" != Disabled && "$mig" != "[N/A]" ]]; then
        echo "outlast: GPU $gpu has MIG $mig; its clock is not set"
        continue
    fi
    # The job has no process yet: these are of others.
    others="$(ask "$gpu" --query-compute-apps=pid)"
    if [[ -n "$others" ]]; then
        echo "outlast: GPU $gpu is used by process ${others//[[:space:]]/, }; its clock is not set"
        continue
    fi
    : > "$marks/$SLURM_JOB_ID.$gpu" || continue
    nvidia-smi --id="$gpu" --lock-gpu-clocks="$clock,$clock" || rm -f "$marks/$SLURM_JOB_ID.$gpu"
done
exit 0
"""
)

_EPILOG = (
    _HEAD.format(name="Epilog", purpose="give back the GPU clocks that the prolog locked.")
    + """\
for mark in "$marks/$SLURM_JOB_ID".*; do
    # Without a mark the pattern stands for itself.
    [[ -f "$mark" ]] || continue
    gpu="${mark##*/"$SLURM_JOB_ID".}"
    if nvidia-smi --id="$gpu" --reset-gpu-clocks; then
        rm -f "$mark"
    else
        echo "outlast: the clock of GPU $gpu may still be locked; $mark stays"
    fi
done
exit 0
"""
)
